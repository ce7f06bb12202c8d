"""/health, /ping, /version and /metrics: for those who watch the server."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from deltaic._core import __version__


def status_router(check_health: Callable[[], None], registry: CollectorRegistry) -> APIRouter:
    """Return what tells of an engine; HEAD is for probes that want the status alone."""
    router = APIRouter(tags=["status"])

    @router.get("/health")
    @router.head("/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        """Answer 200, or 503 when the engine's loop is stuck, dead or shut down."""
        check_health()
        return {"status": "ok"}

    @router.get("/ping")
    @router.head("/ping", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    async def ping() -> dict[str, str]:
        """Do as /health does."""
        return await health()

    @router.get("/version")
    @router.head("/version", include_in_schema=False)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics", response_class=PlainTextResponse)
    @router.head("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """Return figures in Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
