"""Prompts in, text out, for asyncio: the engine's loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaic.chat import Message, ToolFormat
from deltaic.engine import EngineStats
from deltaic.engine_config import EngineConfig, check_integer, check_option_names
from deltaic.engine_thread import EngineStopped as EngineStopped
from deltaic.engine_thread import EngineThread
from deltaic.input_processor import EngineInput, InputProcessor, Prompt
from deltaic.outputs import RequestOutput
from deltaic.sampling_params import SamplingParams
from deltaic.scheduler_config import SchedulerConfig
from deltaic.step_sizes import StepSizes
from deltaic.text_engine import TextEngine
from deltaic.tokenizer import Tokenizer

DEFAULT_MAX_WAITING = 1024
DEFAULT_STALL_TIMEOUT_S = 120.0


class QueueFull(RuntimeError):
    """As many requests as allowed are waiting: come back later."""


class RequestFailed(RuntimeError):
    """A step that held the request failed; other requests go on."""


class OutputStream:
    """The outputs of the requests of one submit, as (index of the input, output), as they come.

    Belongs to one event loop. Raises RequestFailed or EngineStopped in place of the rest. close() aborts what has not
    ended; so does leaving `async with`.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self.request_ids = list(request_ids)
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue()
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._num_unfinished = len(request_ids)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._num_unfinished:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        output = item[1]
        for completion in output.outputs:
            if completion.error is not None:
                self.close()
                raise RequestFailed(f"request {output.request_id} failed: {completion.error}")
        self._num_unfinished -= output.finished
        return item

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._num_unfinished:
            self._num_unfinished = 0
            self._abort(self.request_ids)

    # ---- what the engine's thread calls ----

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def put(self, item: tuple[int, RequestOutput] | Exception) -> None:
        self._items.put_nowait(item)

    def settle(self, refusal: Exception | None) -> None:
        """Say that the engine has queued the requests, or why it has not."""
        if self._accepted.done():
            return
        if refusal is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(refusal)

    async def accepted(self) -> None:
        await self._accepted


@dataclass(frozen=True, slots=True)
class _Live:
    """A request between submit and its end."""

    stream: OutputStream
    index: int
    num_completions: int


def check_limits(max_waiting: int, stall_timeout_s: float) -> None:
    """Raise the ValueError that AsyncLLM would."""
    check_integer("max_waiting", max_waiting, 0)
    if isinstance(stall_timeout_s, bool) or not isinstance(stall_timeout_s, (int, float)) or not stall_timeout_s > 0:
        raise ValueError(f"stall_timeout_s must be more than 0, got {stall_timeout_s!r:.60}")


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> bool:
    """Call a function in an event loop from another thread; False when that loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


def _put_all(items: Sequence[tuple[_Live, RequestOutput]]) -> None:
    for request, output in items:
        request.stream.put((request.index, output))


class AsyncLLM:
    """One model, loaded, for the coroutines of any event loop.

    `model`, `seed`, `max_logprobs` and `options` (the fields of EngineConfig) are LLM's, and so are the errors.
    max_waiting bounds the completions that wait beyond the max_num_seqs that run. A step that takes longer than
    stall_timeout_s makes check_health fail. shutdown() ends the loop; `with` does so too.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        seed: int | None = None,
        max_logprobs: int = 20,
        max_waiting: int = DEFAULT_MAX_WAITING,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        **options: Any,
    ) -> None:
        check_limits(max_waiting, stall_timeout_s)
        check_option_names("AsyncLLM", options, ("model", "seed", "max_logprobs", "max_waiting", "stall_timeout_s"))
        self._text = TextEngine(model, EngineConfig(**options), seed=seed, max_logprobs=max_logprobs)
        self.max_unfinished = self._text.engine.scheduler_config.max_num_seqs + max_waiting  # completions
        self._next_id = itertools.count()
        self._stats = self._text.engine.stats()
        self._thread = EngineThread(
            "engine",
            has_work=self._text.has_unfinished_requests,
            step=self._step,
            on_end=self._tell_all,
            on_stop=self._drain,
            stall_timeout_s=stall_timeout_s,
        )
        self._live: dict[str, _Live] = {}  # under the thread's lock
        self._num_unfinished = 0  # completions of them; likewise
        self._thread.start()

    # ---- what is known without a step ----

    @property
    def model_folder(self) -> Path:
        """Return the checkpoint folder that `model` stands for."""
        return self._text.model_folder

    @property
    def max_model_len(self) -> int:
        """Return how many tokens one request may have, prompt and output."""
        return self._text.max_model_len

    @property
    def inputs(self) -> InputProcessor:
        """Return what makes the inputs of submit: inputs.process(prompt, params)."""
        return self._text.inputs

    @property
    def num_unfinished(self) -> int:
        """Return how many completions are queued or running."""
        return self._num_unfinished

    @property
    def has_tokenizer(self) -> bool:
        """Return False for a model that takes and gives token ids alone."""
        return self._text.tokenizer is not None

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; ValueError for a checkpoint without one."""
        return self._text.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what applies when no SamplingParams are given: those of the model's generation_config.json."""
        return self._text.default_params

    @property
    def default_fields(self) -> Mapping[str, Any]:
        """Return what the model's generation_config.json sets of SamplingParams."""
        return self._text.default_fields

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Return what was given, over the model's defaults; None means not given."""
        return SamplingParams.from_optional(self._text.default_fields, **given)

    def render_chat(self, messages: Sequence[Message], **chat_options: Any) -> str:
        """Return the text that the model is given for one conversation; chat_options are those of LLM.chat."""
        return self._text.render_chat(messages, **chat_options)

    def tool_format(self) -> ToolFormat | None:
        """Return how the model's own template asks for calls of tools; None when it does not."""
        return self._text.tool_format()

    def stats(self) -> EngineStats:
        """Return the engine's figures after its last step."""
        return self._stats

    @property
    def step_sizes(self) -> StepSizes:
        """Return how many tokens the engine's steps had."""
        return self._text.step_sizes

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """Return the sizes of steps and requests that the engine runs with."""
        return self._text.engine.scheduler_config

    def check_health(self) -> None:
        """Raise EngineStopped when no request would get an answer."""
        self._thread.check_health()

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **chat_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt or conversation, of the kind that the parameters' output_kind says.

        chat_options are those of LLM.chat, for a conversation alone; the lowest priority runs first, with
        scheduling_policy "priority". Cancelling, or closing the iterator, aborts the request. ValueError, TypeError or
        Unsupported for what is wrong with it; QueueFull, EngineStopped, RequestFailed.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        given = await asyncio.to_thread(self._process, prompt, params, chat_options)
        async with await self.submit([given], request_id=request_id, priority=priority) as stream:
            async for _, output in stream:
                yield output

    def _process(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams, chat_options: Mapping[str, Any]
    ) -> EngineInput:
        if isinstance(prompt, (str, Mapping)):
            if chat_options:
                raise TypeError(
                    f"{next(iter(chat_options))} is for messages, got a prompt of type {type(prompt).__name__}"
                )
            return self.inputs.process(prompt, params)
        return self.inputs.process(self.render_chat(prompt, **chat_options), params, add_special_tokens=False)

    async def submit(
        self, inputs: Sequence[EngineInput], *, request_id: str | None = None, priority: int = 0
    ) -> OutputStream:
        """Queue all of `inputs` (made by .inputs.process) or none; return their outputs to come.

        ValueError for a request_id that is in use; QueueFull, EngineStopped.
        """
        name = f"request-{next(self._next_id)}" if request_id is None else request_id
        request_ids = [name] if len(inputs) == 1 else [f"{name}-{i}" for i in range(len(inputs))]
        stream = OutputStream(request_ids, self._abort_soon)
        live = [_Live(stream, i, given.sampling_params.n) for i, given in enumerate(inputs)]
        num_completions = sum(request.num_completions for request in live)
        with self._thread.lock:
            self._thread.check_open()
            for known in request_ids:
                if known in self._live:
                    raise ValueError(f"request_id {known!r} is in use")
            if self._num_unfinished + num_completions > self.max_unfinished:
                raise QueueFull(
                    f"{self._num_unfinished} completions are queued or running, {num_completions} more would pass the "
                    f"limit of {self.max_unfinished}"
                )
            self._live.update(zip(request_ids, live, strict=True))
            self._num_unfinished += num_completions
            self._thread.call_soon(lambda: self._add(stream, inputs, priority))
        try:
            await stream.accepted()
        except BaseException:
            stream.close()
            raise
        return stream

    def _abort_soon(self, request_ids: Sequence[str]) -> None:
        self._thread.call_soon(lambda: self._abort(request_ids))

    def shutdown(self, timeout_s: float = 2.0) -> bool:
        """End all requests with EngineStopped and the loop after its step; return whether it ended in time."""
        return self._thread.shutdown(timeout_s)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- the thread ----

    def _step(self) -> None:
        if self._text.has_unfinished_requests():
            self._deliver(self._text.step())
        self._stats = self._text.engine.stats()

    def _add(self, stream: OutputStream, inputs: Sequence[EngineInput], priority: int) -> None:
        queued: list[str] = []
        try:
            for request_id, given in zip(stream.request_ids, inputs, strict=True):
                if request_id in self._live:  # else aborted before it came here
                    self._text.add(request_id, given, priority)
                    queued.append(request_id)
        except (ValueError, TypeError, NotImplementedError) as refusal:
            self._abort(stream.request_ids)
            _call_soon(stream.loop, stream.settle, refusal)
            return
        if not _call_soon(stream.loop, stream.settle, None):
            self._abort(queued)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._text.abort(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        with self._thread.lock:
            request = self._live.pop(request_id, None)
            if request is not None:
                self._num_unfinished -= request.num_completions

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        items: dict[asyncio.AbstractEventLoop, list[tuple[_Live, RequestOutput]]] = {}
        for output in outputs:
            request = self._live.get(output.request_id)
            if request is None:
                continue
            if output.finished:
                self._forget(output.request_id)
            items.setdefault(request.stream.loop, []).append((request, output))
        for loop, of_loop in items.items():
            if not _call_soon(loop, _put_all, of_loop):
                self._abort([output.request_id for _, output in of_loop])

    def _tell_all(self, reason: str) -> None:
        """Tell those that wait that the loop has ended. Any thread."""
        with self._thread.lock:
            live = list(self._live.values())
            self._live.clear()
            self._num_unfinished = 0
        for stream in {id(request.stream): request.stream for request in live}.values():
            _call_soon(stream.loop, stream.put, EngineStopped(reason))
            _call_soon(stream.loop, stream.settle, EngineStopped(reason))

    def _drain(self) -> None:
        """Give back all that requests hold, the rows in flight too."""
        self._text.abort_all()
        while self._text.has_unfinished_requests():
            self._text.step()
        self._stats = self._text.engine.stats()
