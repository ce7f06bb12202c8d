"""/health, /ping, /version and /metrics: for those who watch the server."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from deltaic._core import __version__
from deltaic.server.serving import Serving


def status_router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Answer 200, or 503 when the engine's loop is stuck, dead or shut down."""
        serving.llm.check_health()
        return {"status": "ok"}

    @router.get("/ping")
    @router.post("/ping", include_in_schema=False)
    async def ping() -> dict[str, str]:
        """Do as /health does."""
        return await health()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return figures in Prometheus' text format."""
        return Response(serving.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
