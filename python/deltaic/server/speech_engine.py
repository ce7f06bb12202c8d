"""A pipeline that speaks, for asyncio: its stages are stepped in a thread of their own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from deltaic.async_llm import EngineStopped, QueueFull, RequestFailed
from deltaic.stages.speech import AudioChunk, SpeechParams, SpeechPipeline

logger = logging.getLogger(__name__)

_Chunks = asyncio.Queue[AudioChunk | Exception]


class SpeechEngine:
    """Speak for the coroutines of any event loop.

    max_utterances bounds those that run or wait. A step that takes longer than stall_timeout_s makes check_health fail.
    """

    def __init__(self, pipeline: SpeechPipeline, *, max_utterances: int = 256, stall_timeout_s: float = 120.0) -> None:
        self.pipeline = pipeline
        self._max_utterances = max_utterances
        self._stall_timeout_s = stall_timeout_s
        self._ids = itertools.count()
        self._lock = threading.Lock()  # over the next two
        self._live: dict[str, tuple[asyncio.AbstractEventLoop, _Chunks]] = {}
        self._ended: str | None = None  # why the loop runs no longer
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="deltaic-speech", daemon=True)
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        return len(self._live)

    def check_health(self) -> None:
        """Raise EngineStopped when no request would get an answer."""
        if self._ended is not None:
            raise EngineStopped(self._ended)
        busy_since = self._busy_since
        if busy_since is not None and (seconds := time.monotonic() - busy_since) > self._stall_timeout_s:
            raise EngineStopped(f"the engine is stuck: a step runs since {seconds:.0f} s")

    async def speak(self, text: str, params: SpeechParams) -> AsyncGenerator[AudioChunk, None]:
        """Yield the chunks of one utterance; the last is final. Closing it ends the utterance.

        ValueError for what can never be spoken; QueueFull, EngineStopped, RequestFailed.
        """
        request_id = f"speech-{next(self._ids)}"
        chunks: _Chunks = asyncio.Queue()
        with self._lock:
            if self._ended is not None:
                raise EngineStopped(self._ended)
            if len(self._live) >= self._max_utterances:
                raise QueueFull(f"{len(self._live)} utterances are queued or running, which is the limit")
            self._live[request_id] = (asyncio.get_running_loop(), chunks)
        self._commands.put(lambda: self._add(request_id, text, params))
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
            self._commands.put(lambda: self.pipeline.cancel(request_id))

    def shutdown(self, timeout_s: float = 2.0) -> bool:
        """End all utterances with EngineStopped and the loop after its step; return whether it ended in time."""
        self._end("the engine was shut down")
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> SpeechEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._obey():
                for chunk in self.pipeline.step():
                    self._put(chunk.request_id, chunk)
        except BaseException as error:
            logger.critical("the speech loop died", exc_info=error)
            self._end(f"the engine died: {type(error).__name__}: {error}")
        finally:
            self._busy_since = None

    def _obey(self) -> bool:
        """Run what others asked for, waiting while there is no step to run either; False: stop."""
        block = not self.pipeline.has_unfinished_requests()
        while True:
            if block:
                self._busy_since = None
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                self._busy_since = time.monotonic()
                return True
            self._busy_since, block = time.monotonic(), not self.pipeline.has_unfinished_requests()
            if command is None:
                return False
            command()
            block = not self.pipeline.has_unfinished_requests()

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
            self.pipeline.cancel(request_id)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._live.pop(request_id, None)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            live: list[Any] = list(self._live)
        for request_id in live:
            self._put(request_id, EngineStopped(reason))


def load_speech_engine(
    folder: Path, *, max_num_seqs: int, num_threads: int, max_waiting: int, stall_timeout_s: float
) -> SpeechEngine:
    """Load a checkpoint that speaks; the errors are SpeechPipeline's."""
    pipeline = SpeechPipeline(folder, max_num_seqs=max_num_seqs, num_threads=num_threads)
    return SpeechEngine(pipeline, max_utterances=max_num_seqs + max_waiting, stall_timeout_s=stall_timeout_s)
