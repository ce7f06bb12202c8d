"""Prompts in, text out: the offline interface."""

from __future__ import annotations

import itertools
import numbers
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from deltaic.chat import Message
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig, check_option_names
from deltaic.input_processor import EngineInput, Prompt
from deltaic.interrupts import deferred_interrupt
from deltaic.outputs import RequestOutput
from deltaic.progress import ProgressBar
from deltaic.sampling_params import RequestOutputKind, SamplingParams
from deltaic.text_engine import TextEngine
from deltaic.tokenizer import Tokenizer


class LLM:
    """One model, loaded, with its tokenizer. Requests of several threads run together, a step at a time.

    `model` is a checkpoint folder, a hub id, or None for the model that ships with deltaic; a config.json is enough for
    load_format dummy, random weights. `options` are the further fields of EngineConfig. `seed` makes requests without a
    seed of their own repeatable; max_logprobs (-1: no limit) bounds what a request may ask for. ValueError, TypeError,
    Unsupported or MemoryError names the option and the numbers when the model cannot be run so.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        speculative_tokens: int | str = "auto",
        seed: int | None = None,
        load_format: str = "auto",
        max_logprobs: int = 20,
        **options: Any,
    ) -> None:
        check_option_names("LLM", options, ("model", "seed", "max_logprobs"))
        config = EngineConfig(
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            speculative_tokens=speculative_tokens,
            load_format=load_format,
            **options,
        )
        self._text = TextEngine(model, config, seed=seed, max_logprobs=max_logprobs)
        self._next_id = itertools.count()
        self._lock = threading.Lock()  # over the engine and the next two
        self._awaited: set[str] = set()  # requests that someone waits for
        self._ready: dict[str, list[RequestOutput]] = {}  # their outputs that nobody has taken yet
        self._abandoned: deque[str] = deque()  # to be aborted

    @property
    def max_model_len(self) -> int:
        """Return how many tokens one request may have, prompt and output."""
        return self._text.max_model_len

    @property
    def model_folder(self) -> Path:
        """Return the checkpoint folder that `model` stands for."""
        return self._text.model_folder

    @property
    def engine(self) -> Engine:
        """Return the engine below, for measurements; its interface is not public."""
        return self._text.engine

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; ValueError for a checkpoint without one, which takes token ids alone."""
        return self._text.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what applies when no SamplingParams are given: those of the model's generation_config.json."""
        return self._text.default_params

    def get_metrics(self) -> dict[str, int | float]:
        """Return gauges of now and counters since the start, by name.

        kv_cache_usage is a share from 0 to 1, prefix_cache_queries and prefix_cache_hits count tokens.
        """
        stats = self._text.engine.stats()
        cache = stats.cache
        return {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "num_preemptions": stats.num_preemptions,
            "prompt_tokens": stats.num_prompt_tokens,
            "generation_tokens": stats.num_generated_tokens,
            "kv_cache_usage": stats.cache_usage,
            "prefix_cache_queries": cache.num_query_tokens,
            "prefix_cache_hits": cache.num_hit_tokens,
            "prefix_cache_evicted_blocks": cache.num_evicted_blocks,
            "state_snapshots": cache.num_snapshots,
            "state_snapshots_evicted": cache.num_evicted_snapshots,
            **stats.drafts.figures(),
        }

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while requests run."""
        with self._lock:
            self._drop_abandoned()
            return self._text.engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; return their outputs in the same order.

        A prompt is a string or {"prompt_token_ids": [...]}. One SamplingParams serves all prompts, a list has one for
        each; None takes the model's defaults, while given ones are taken as they stand. All prompts are checked before
        any runs: ValueError, TypeError or Unsupported names the index of the first that is wrong. A request that fails
        later has finish_reason "error", warns, and leaves the others alone. `priority` has an integer for each prompt;
        with scheduling_policy "priority" the lowest runs first. progress: None shows a bar on a terminal.
        """
        if isinstance(prompts, (str, Mapping)):
            return self._run(
                [self._text.inputs.process(prompts, self._one_params(sampling_params))], priority, progress
            )
        items = _as_list("prompts", "strings or {'prompt_token_ids': [...]}", prompts)
        given = self._list_params(sampling_params, len(items))
        inputs = []
        for i, (prompt, params) in enumerate(zip(items, given, strict=True)):
            with _naming(f"prompts[{i}]"):
                inputs.append(self._text.inputs.process(prompt, params))
        return self._run(inputs, priority, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; return one output for each.

        chat_template is the source of a template to use instead of the model's; chat_template_kwargs are what it
        reads beside the messages (enable_thinking, say). continue_final_message lets the model go on with the last
        message instead of answering it. Checks and errors are those of generate; ValueError for a model without a
        template when none is given.
        """
        several = bool(_as_list("messages", "messages", messages)) and not isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        given = self._list_params(sampling_params, len(conversations))
        inputs = []
        for i, (conversation, params) in enumerate(zip(conversations, given, strict=True)):
            with _naming(f"conversation {i}" if several else ""):
                text = self.render_chat(
                    conversation,
                    tools=tools,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                )
                inputs.append(self._text.inputs.process(text, params, add_special_tokens=False))
        return self._run(inputs, None, progress)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **chat_options: Any
    ) -> Iterator[str]:
        """Yield the text of one completion as it grows; of a prompt, or of the answer to a list of messages.

        The pieces, concatenated, are the text that generate or chat returns. chat_options are chat's. Leaving the
        loop aborts the request. RuntimeError when the request fails.
        """
        params = self._one_params(sampling_params)
        if params.n != 1:
            raise ValueError(f"n must be 1 to stream text, got {params.n}: stream_outputs tells completions apart")
        outputs = self.stream_outputs(prompt, params, **chat_options)
        return (output.text for output in outputs if output.text)

    def stream_outputs(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **chat_options: Any
    ) -> Iterator[RequestOutput]:
        """Yield outputs that hold what is new, as stream does its text; checked now, run when iterated.

        The request is queued by the first next(). Text may come later than its tokens: half a character and what may
        become a stop string are held back.
        """
        params = replace(self._one_params(sampling_params), output_kind=RequestOutputKind.DELTA)
        if isinstance(prompt, (str, Mapping)):
            if chat_options:
                raise TypeError(
                    f"{next(iter(chat_options))} is for messages, got a prompt of type {type(prompt).__name__}"
                )
            given = self._text.inputs.process(prompt, params)
        else:
            text = self.render_chat(prompt, **chat_options)
            given = self._text.inputs.process(text, params, add_special_tokens=False)
        return self._stream(given)

    def render_chat(self, messages: Sequence[Message], **chat_options: Any) -> str:
        """Return the text that chat gives to the model for one conversation; chat_options are chat's."""
        return self._text.render_chat(messages, **chat_options)

    def _one_params(self, params: SamplingParams | Sequence[SamplingParams] | None) -> SamplingParams:
        return self._list_params(params, 1)[0]

    def _list_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            return [self._text.default_params] * num_prompts
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        given = _as_list("sampling_params", "SamplingParams", params)
        if len(given) != num_prompts:
            raise ValueError(f"sampling_params must be one or one for each of {num_prompts} prompts, got {len(given)}")
        return given

    def _add(self, given: EngineInput, priority: int = 0) -> str:
        """Queue one request; nothing of it stays when a part is refused."""
        request_id = str(next(self._next_id))
        with self._lock:
            self._text.add(request_id, given, priority)
            self._awaited.add(request_id)
        return request_id

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests, at the latest when the step that runs has ended: a generator's end may come within one."""
        self._abandoned.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_abandoned()
            finally:
                self._lock.release()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._text.abort(request_id)
            self._awaited.discard(request_id)
            self._ready.pop(request_id, None)

    def _take(self, request_ids: set[str]) -> dict[str, list[RequestOutput]]:
        """Return what requests have got since the last call, after a step if that is nothing.

        The step may bring outputs for other threads and generators; they find them here.
        """
        with deferred_interrupt(), self._lock:
            self._drop_abandoned()
            if not self._ready.keys() & request_ids:
                for output in self._text.step():
                    if output.request_id in self._awaited:
                        self._ready.setdefault(output.request_id, []).append(output)
            taken = {request_id: self._ready.pop(request_id) for request_id in self._ready.keys() & request_ids}
            self._drop_abandoned()
        return taken

    def _stream(self, given: EngineInput) -> Iterator[RequestOutput]:
        request_ids: set[str] = set()
        try:
            with deferred_interrupt():
                request_ids.add(self._add(given))
            finished = False
            while not finished:
                for output in itertools.chain.from_iterable(self._take(request_ids).values()):
                    for completion in output.outputs:
                        if completion.error is not None:
                            raise RuntimeError(f"request {output.request_id} failed: {completion.error}")
                    finished = output.finished
                    yield output
        finally:
            self._abort(request_ids)

    def _run(
        self, inputs: Sequence[EngineInput], priority: Sequence[int] | None, progress: bool | None
    ) -> list[RequestOutput]:
        """Run requests to their end."""
        priorities = [0] * len(inputs) if priority is None else _as_list("priority", "integers", priority)
        for i, rank in enumerate(priorities):
            if isinstance(rank, bool) or not isinstance(rank, numbers.Integral):
                raise TypeError(f"priority[{i}] must be an integer, got {rank!r:.60}")
        if len(priorities) != len(inputs):
            raise ValueError(f"priority must have one number for each of {len(inputs)} prompts, got {len(priorities)}")
        request_ids: list[str] = []
        with ProgressBar(len(inputs), progress) as bar:
            try:
                for i, (given, rank) in enumerate(zip(inputs, priorities, strict=True)):
                    params = replace(given.sampling_params, output_kind=RequestOutputKind.FINAL_ONLY)
                    with deferred_interrupt(), _naming(f"prompts[{i}]" if len(inputs) > 1 else ""):
                        request_ids.append(self._add(replace(given, sampling_params=params), rank))
                unfinished = set(request_ids)
                finished: dict[str, list[RequestOutput]] = {}
                while unfinished:
                    taken = self._take(unfinished)
                    unfinished -= taken.keys()
                    finished |= taken
                    bar.advance(len(taken))
                outputs = [finished[request_id][0] for request_id in request_ids]
            finally:
                self._abort(request_ids)
        for i, output in enumerate(outputs):
            for completion in output.outputs:
                if completion.error is not None:
                    warnings.warn(f"request {i} failed: {completion.error}", RuntimeWarning, stacklevel=3)
        return outputs


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put a name, if there is one, in front of the message of what is wrong with one of several."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        if not name:
            raise
        raise type(error)(f"{name}: {error}") from error


def _as_list(name: str, of: str, values: object) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of {of}, got {type(values).__name__}")
    return list(values)
