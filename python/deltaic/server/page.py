"""The page at /: a small chat, one file that asks no other host for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter, Response

_PAGE = Path(__file__).parent / "static" / "index.html"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_router() -> APIRouter:
    """Raise OSError when the page is not installed."""
    text = _PAGE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(text),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    router = APIRouter()

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return Response(text, headers=headers, media_type="text/html")

    return router


def _policy(text: str) -> str:
    """Return a policy that runs the page's own script, lets it reach this server, and nothing else."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
