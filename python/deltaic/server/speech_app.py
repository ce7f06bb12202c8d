"""The application around a model that speaks: /v1/audio/speech and what watches it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.responses import StreamingResponse

from deltaic import _core
from deltaic.server.app import bare_app
from deltaic.server.errors import client_errors
from deltaic.server.event_stream import unless_disconnected
from deltaic.server.models import ServedModel, models_router
from deltaic.server.settings import ServerSettings
from deltaic.server.speech import SpeechBody
from deltaic.server.speech_engine import SpeechEngine
from deltaic.server.status import status_router
from deltaic.stages.speech import AudioChunk, SpeechParams, Voice, WavWriter
from deltaic.stages.speech.audio import to_pcm16

_MAX_CHARS = 4096  # OpenAI's
_SOUND: dict[str, Any] = {"audio/wav": {}, "audio/pcm": {}}


class SpeechServing(ServedModel):
    """The engine, its names and its figures."""

    def __init__(self, engine: SpeechEngine, settings: ServerSettings) -> None:
        super().__init__(settings, engine.pipeline.config.folder, engine.pipeline.max_frames)
        self.engine = engine
        self.registry = CollectorRegistry()
        name, labels = self.model_name, ["model_name"]
        running = Gauge("deltaic:num_requests_running", "Utterances.", labels, registry=self.registry)
        running.labels(name).set_function(lambda: engine.num_unfinished)
        ended = Counter(
            "deltaic:request_success", "Utterances, by end.", [*labels, "finished_reason"], registry=self.registry
        )
        self._ended = ended
        seconds = Counter("deltaic:audio_seconds", "Seconds of sound made.", labels, registry=self.registry)
        self.audio_seconds = seconds.labels(name)
        first = Histogram("deltaic:time_to_first_chunk_seconds", "From arrival.", labels, registry=self.registry)
        self.first_chunk = first.labels(name)

    def count_end(self, reason: str) -> None:
        self._ended.labels(self.model_name, reason).inc()

    def params(self, body: SpeechBody) -> SpeechParams:
        """Return what a body asks for; ValueError or Unsupported."""
        body.refuse_unsupported()
        if not body.input.strip():
            raise ValueError("input is empty: there is nothing to speak")
        if len(body.input) > _MAX_CHARS:
            raise ValueError(f"input must have at most {_MAX_CHARS} characters, got {len(body.input)}")
        if body.response_format not in (None, "wav", "pcm"):
            raise _core.Unsupported(f"response_format must be wav or pcm, got {body.response_format!r:.60}")
        if body.speed not in (None, 1.0):
            raise _core.Unsupported(f"speed must be 1, got {body.speed}")
        if body.stream_format not in (None, "audio"):
            raise _core.Unsupported(f"stream_format must be audio, got {body.stream_format!r:.60}")
        if isinstance(body.voice, dict):
            raise _core.Unsupported("voice must be the name of a speaker")
        if body.seed is not None and not 0 <= body.seed < 1 << 63:
            raise ValueError(f"seed must be in [0, 2^63), got {body.seed}")
        return SpeechParams(
            voice=Voice(speaker=body.voice),
            language=body.language or "auto",
            instruct=body.instructions or "",
            max_frames=self.engine.pipeline.max_frames,
            seed=body.seed,
        )

    async def chunks(self, text: str, params: SpeechParams) -> AsyncGenerator[AudioChunk, None]:
        """Yield the chunks of an utterance, counting them."""
        begin = asyncio.get_running_loop().time()
        rate = self.engine.pipeline.config.sample_rate
        reason, is_first = "abort", True
        chunks = self.engine.speak(text, params)
        try:
            async for chunk in chunks:
                if is_first and len(chunk.samples):
                    self.first_chunk.observe(asyncio.get_running_loop().time() - begin)
                    is_first = False
                self.audio_seconds.inc(len(chunk.samples) / rate)
                reason = chunk.finish_reason or reason
                yield chunk
        except Exception:
            reason = "error"
            raise
        finally:
            await chunks.aclose()
            self.count_end(reason)


def create_speech_app(engine: SpeechEngine, settings: ServerSettings | None = None) -> FastAPI:
    """Return an ASGI application that serves `engine`, and shuts it down when the application ends."""
    settings = settings or ServerSettings()
    serving = SpeechServing(engine, settings)
    rate = engine.pipeline.config.sample_rate

    app = bare_app(engine.shutdown, settings)
    app.include_router(models_router(serving))
    app.include_router(status_router(engine.check_health, serving.registry))

    @app.post("/v1/audio/speech", tags=["speech"], responses={200: {"content": _SOUND}}, response_class=Response)
    async def create_speech(body: SpeechBody, request: Request) -> Response:
        """Speak a text: as a WAV file, or as 16-bit little-endian samples that come while they are made."""
        serving.check_model(body.model)
        engine.check_health()
        with client_errors():
            params = serving.params(body)
        if body.response_format == "pcm":
            chunks = serving.chunks(body.input, params)
            with client_errors():
                first = await unless_disconnected(request, _first_sound(chunks))  # before it, what is wrong is a status
            return StreamingResponse(_samples(first, chunks), media_type="audio/pcm")
        with client_errors():
            data = await unless_disconnected(request, _wav(serving.chunks(body.input, params), rate))
        return Response(data, media_type="audio/wav")

    return app


async def _first_sound(chunks: AsyncGenerator[AudioChunk, None]) -> AudioChunk:
    """Return the first chunk with samples, or the final one: a thinker's text comes before its sound."""
    chunk = await anext(chunks)
    while not (len(chunk.samples) or chunk.is_final):
        chunk = await anext(chunks)
    return chunk


async def _samples(first: AudioChunk, chunks: AsyncGenerator[AudioChunk, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield to_pcm16(first.samples)
        async for chunk in chunks:
            if len(chunk.samples):
                yield to_pcm16(chunk.samples)
    finally:
        await chunks.aclose()


async def _wav(chunks: AsyncGenerator[AudioChunk, None], sample_rate: int) -> bytes:
    held = io.BytesIO()
    try:
        with WavWriter(held, sample_rate) as writer:
            async for chunk in chunks:
                writer.write(chunk.samples)
    finally:
        await chunks.aclose()
    return held.getvalue()
