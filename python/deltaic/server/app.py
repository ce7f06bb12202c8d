"""The application: all endpoints around one AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from deltaic._core import __version__
from deltaic.async_llm import AsyncLLM
from deltaic.server.chat_completions import chat_completions_router
from deltaic.server.completions import completions_router
from deltaic.server.errors import ERROR_RESPONSES, add_error_handlers
from deltaic.server.event_stream import ClientGone
from deltaic.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware, ConcurrencyMiddleware
from deltaic.server.models import models_router
from deltaic.server.page import page_router
from deltaic.server.responses_api import responses_router
from deltaic.server.serving import Serving
from deltaic.server.settings import ServerSettings
from deltaic.server.speech import speech_router
from deltaic.server.status import status_router
from deltaic.server.tokens import tokens_router


def create_app(llm: AsyncLLM, settings: ServerSettings | None = None) -> FastAPI:
    """Return an ASGI application that serves `llm`, and shuts it down when the application ends."""
    settings = settings or ServerSettings()
    serving = Serving(llm, settings)
    app = bare_app(llm.shutdown, settings)
    for make_router in (
        models_router,
        completions_router,
        chat_completions_router,
        responses_router,
        speech_router,
        tokens_router,
    ):
        app.include_router(make_router(serving))
    app.include_router(status_router(llm.check_health, serving.metrics.registry))
    app.include_router(page_router())
    return app


def bare_app(shutdown: Callable[[float], object], settings: ServerSettings) -> FastAPI:
    """Return an application with its errors, its limits and its keys, which shuts an engine down when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(shutdown, 0.5)

    app = FastAPI(
        title="deltaic",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERROR_RESPONSES,
    )
    add_error_handlers(app)

    async def nobody_reads(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ClientGone, nobody_reads)
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    app.add_middleware(ConcurrencyMiddleware, max_requests=settings.max_concurrent_requests)
    if settings.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=settings.api_keys)
    return app
