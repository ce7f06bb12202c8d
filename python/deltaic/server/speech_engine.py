"""A pipeline that speaks, for asyncio: its stages are stepped in a thread of their own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path

from deltaic.async_llm import QueueFull, RequestFailed
from deltaic.engine_thread import EngineStopped, EngineThread
from deltaic.stages.speech import AudioChunk, SpeechParams, SpeechPipeline

_Chunks = asyncio.Queue[AudioChunk | Exception]


class SpeechEngine:
    """Speak for the coroutines of any event loop.

    max_utterances bounds those that run or wait. A step that takes longer than stall_timeout_s makes check_health fail.
    """

    def __init__(self, pipeline: SpeechPipeline, *, max_utterances: int = 256, stall_timeout_s: float = 120.0) -> None:
        self.pipeline = pipeline
        self._max_utterances = max_utterances
        self._ids = itertools.count()
        self._thread = EngineThread(
            "engine",
            has_work=pipeline.has_unfinished_requests,
            step=self._step,
            on_end=self._tell_all,
            stall_timeout_s=stall_timeout_s,
        )
        self._live: dict[str, tuple[asyncio.AbstractEventLoop, _Chunks]] = {}  # under the thread's lock
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        return len(self._live)

    def check_health(self) -> None:
        """Raise EngineStopped when no request would get an answer."""
        self._thread.check_health()

    async def speak(self, text: str, params: SpeechParams) -> AsyncGenerator[AudioChunk, None]:
        """Yield the chunks of one utterance; the last is final. Closing it ends the utterance.

        ValueError for what can never be spoken; QueueFull, EngineStopped, RequestFailed.
        """
        request_id = f"speech-{next(self._ids)}"
        chunks: _Chunks = asyncio.Queue()
        with self._thread.lock:
            self._thread.check_open()
            if len(self._live) >= self._max_utterances:
                raise QueueFull(f"{len(self._live)} utterances are queued or running, which is the limit")
            self._live[request_id] = (asyncio.get_running_loop(), chunks)
        self._thread.call_soon(lambda: self._add(request_id, text, params))
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk.error is not None:
                    raise RequestFailed(f"speaking failed: {chunk.error}")
                yield chunk
                if chunk.is_final:
                    return
        finally:
            self._forget(request_id)
            self._thread.call_soon(lambda: self.pipeline.cancel(request_id))

    def shutdown(self, timeout_s: float = 2.0) -> bool:
        """End all utterances with EngineStopped and the loop after its step; return whether it ended in time."""
        return self._thread.shutdown(timeout_s)

    def __enter__(self) -> SpeechEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- the thread ----

    def _step(self) -> None:
        if self.pipeline.has_unfinished_requests():
            for chunk in self.pipeline.step():
                self._put(chunk.request_id, chunk)

    def _add(self, request_id: str, text: str, params: SpeechParams) -> None:
        if request_id not in self._live:
            return  # its client has gone
        try:
            self.pipeline.add(request_id, text, params)
        except (ValueError, TypeError, NotImplementedError) as refusal:
            self._put(request_id, refusal)

    def _put(self, request_id: str, item: AudioChunk | Exception) -> None:
        known = self._live.get(request_id)
        if known is None:
            return
        try:
            known[0].call_soon_threadsafe(known[1].put_nowait, item)
        except RuntimeError:  # that event loop is closed
            self._forget(request_id)
            self._thread.call_soon(lambda: self.pipeline.cancel(request_id))

    def _forget(self, request_id: str) -> None:
        with self._thread.lock:
            self._live.pop(request_id, None)

    def _tell_all(self, reason: str) -> None:
        with self._thread.lock:
            live = list(self._live)
        for request_id in live:
            self._put(request_id, EngineStopped(reason))


def load_speech_engine(
    folder: Path, *, max_num_seqs: int, num_threads: int, max_waiting: int, stall_timeout_s: float
) -> SpeechEngine:
    """Load a checkpoint that speaks; the errors are SpeechPipeline's."""
    pipeline = SpeechPipeline(folder, max_num_seqs=max_num_seqs, num_threads=num_threads)
    return SpeechEngine(pipeline, max_utterances=max_num_seqs + max_waiting, stall_timeout_s=stall_timeout_s)
