"""/v1/audio/speech: what a text model answers to a request for speech."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from deltaic.server.errors import ApiError
from deltaic.server.protocol import RequestBody
from deltaic.server.serving import Serving


class SpeechBody(RequestBody):
    input: str
    voice: str | dict[str, Any] | None = None
    response_format: str | None = None
    speed: float | None = None
    instructions: str | None = None
    stream_format: str | None = None
    # Not OpenAI's.
    language: str | None = None
    seed: int | None = None


def speech_router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["speech"])

    @router.post("/v1/audio/speech")
    async def create_speech(body: SpeechBody) -> None:
        """Refuse: the model that is served writes text."""
        serving.check_model(body.model)
        raise ApiError(
            400,
            f"the model {body.model or serving.model_name} writes text and makes no speech",
            param="model",
            code="unsupported_model",
        )

    return router
