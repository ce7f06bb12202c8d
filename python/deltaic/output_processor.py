"""Tokens that an engine made, to the text and the outputs that a caller reads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter

from deltaic import _core
from deltaic.detokenizer import Detokenizer
from deltaic.input_processor import EngineInput
from deltaic.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from deltaic.request import EngineOutput
from deltaic.sampling_params import RequestOutputKind
from deltaic.tokenizer import Tokenizer

_metrics_values = attrgetter(*(known.name for known in fields(RequestMetrics)))


@dataclass(slots=True)
class _Completion:
    """One of a prompt's completions, while it grows."""

    index: int
    req_id: str  # the engine's name for it
    detokenizer: Detokenizer | None  # None: token ids only
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_returned: int = 0  # tokens that earlier deltas held


@dataclass(slots=True)
class _Request:
    request_id: str
    input: EngineInput
    completions: list[_Completion]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    changed: set[int] = field(default_factory=set)  # completions with news
    prompt_logprobs_returned: bool = False
    num_unfinished: int = field(init=False)  # completions

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.completions)


class OutputProcessor:
    """Keep the text of every running request: detokenise, stop at stop strings, report in the form asked for."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._of_engine: dict[str, tuple[_Request, _Completion]] = {}

    def add_request(self, request_id: str, given: EngineInput) -> list[str]:
        """Expect outputs for a request; return the engine's ids of its completions, by index."""
        params = given.sampling_params
        req_ids = [request_id] if params.n == 1 else [f"{request_id}-{index}" for index in range(params.n)]
        completions = [
            _Completion(index, req_id, self._detokenizer(given), logprobs=None if params.logprobs is None else [])
            for index, req_id in enumerate(req_ids)
        ]
        for completion in completions:
            completion.cumulative_logprob = None if params.logprobs is None else 0.0
        request = _Request(request_id, given, completions, RequestMetrics(arrival_time=time.monotonic()))
        self._requests[request_id] = request
        self._of_engine.update({completion.req_id: (request, completion) for completion in completions})
        return req_ids

    def _detokenizer(self, given: EngineInput) -> Detokenizer | None:
        params = given.sampling_params
        if self._tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            given.prompt_token_ids,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def unfinished_ids(self) -> list[str]:
        return list(self._requests)

    def scheduled(self, step: _core.SchedulerOutput) -> None:
        """Take the time at which the requests that a step starts were first scheduled."""
        now = time.monotonic()
        for new in step.scheduled_new_reqs:
            known = self._of_engine.get(new.req_id)
            if known is not None and known[0].metrics.scheduled_time is None:
                known[0].metrics.scheduled_time = now

    def process(self, outputs: Iterable[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take a step's outputs; return what callers get, and the engine's ids of requests that a stop string ended.

        Outputs of requests that are unknown, or ended here already, are dropped.
        """
        now = time.monotonic()
        touched: dict[str, _Request] = {}
        to_abort: list[str] = []
        any_finished = False
        for output in outputs:
            known = self._of_engine.get(output.req_id)
            if known is None:
                continue
            request, completion = known
            self._take(request, completion, output, now)
            touched[request.request_id] = request
            if completion.finish_reason is not None:
                request.num_unfinished -= 1
                any_finished = True
                del self._of_engine[output.req_id]
                if output.finish_reason is None:
                    to_abort.append(output.req_id)
        made = [out for request in touched.values() if (out := self._make_output(request)) is not None]
        if any_finished:
            for request in touched.values():
                if not request.num_unfinished:
                    self._requests.pop(request.request_id, None)
        return made, to_abort

    def abort(self, request_id: str) -> list[str]:
        """Forget a request; return the engine's ids that still run for it."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        running = [completion.req_id for completion in request.completions if completion.finish_reason is None]
        for req_id in running:
            del self._of_engine[req_id]
        return running

    def _take(self, request: _Request, completion: _Completion, output: EngineOutput, now: float) -> None:
        params = request.input.sampling_params
        if output.prompt_logprobs is not None and request.prompt_logprobs is None:
            request.prompt_logprobs = [
                None if entry is None else self._logprobs(entry, params.detokenize) for entry in output.prompt_logprobs
            ]
        if request.num_cached_tokens is None:
            request.num_cached_tokens = output.num_cached_tokens
        metrics, detokenizer = request.metrics, completion.detokenizer
        token_ids = output.new_token_ids
        if detokenizer is not None:
            skips_last = output.finish_reason == "stop" and not params.include_stop_str_in_output
            num_with_text = len(token_ids) - 1 if skips_last else len(token_ids)  # all but the stop token
            for count, token_id in enumerate(token_ids, start=1):
                if count > num_with_text:
                    detokenizer.skip()
                elif (stop := detokenizer.append(token_id)) is not None:
                    completion.finish_reason, completion.stop_reason = "stop", stop
                    token_ids = token_ids[:count]
                    break
        completion.token_ids += token_ids
        if completion.logprobs is not None and output.logprobs is not None:
            for entry in output.logprobs[: len(token_ids)]:
                completion.logprobs.append(self._logprobs(entry, params.detokenize))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry.logprobs[0]
        if token_ids:
            metrics.num_generation_tokens += len(token_ids)
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
        if completion.finish_reason is None and output.finish_reason is not None:
            completion.finish_reason = output.finish_reason
            completion.stop_reason = output.stop_reason
            completion.error = output.error
        if completion.finish_reason is not None and detokenizer is not None:
            detokenizer.finish()
        request.changed.add(completion.index)

    def _logprobs(self, entry: _core.TokenLogprobs, with_text: bool) -> TokenLogprobs:
        found: TokenLogprobs = {}
        for i, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            if token_id not in found:
                found[token_id] = self._logprob(token_id, logprob, entry.rank if i == 0 else i, with_text)
        return found

    def _logprob(self, token_id: int, logprob: float, rank: int, with_text: bool) -> Logprob:
        if self._tokenizer is None or not with_text:
            return Logprob(logprob, rank)
        token = self._tokenizer.token_bytes(token_id)
        return Logprob(logprob, rank, token.decode("utf-8", "replace"), token)

    def _make_output(self, request: _Request) -> RequestOutput | None:
        kind = request.input.sampling_params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY:
            if request.num_unfinished:
                return None
            request.changed = set(range(len(request.completions)))
        delta = kind is RequestOutputKind.DELTA
        prompt_logprobs = None if delta and request.prompt_logprobs_returned else request.prompt_logprobs
        request.prompt_logprobs_returned = request.prompt_logprobs is not None
        outputs = [self._make_completion(request.completions[index], delta=delta) for index in sorted(request.changed)]
        request.changed.clear()
        return RequestOutput(  # one a request and step: without keywords it takes half the time
            request.request_id,
            request.input.prompt,
            request.input.prompt_token_ids,
            outputs,
            not request.num_unfinished,
            prompt_logprobs,
            request.num_cached_tokens,
            RequestMetrics(*_metrics_values(request.metrics)),
        )

    @staticmethod
    def _make_completion(completion: _Completion, *, delta: bool) -> CompletionOutput:
        start = completion.num_returned if delta else 0
        completion.num_returned = len(completion.token_ids)
        text = ""
        if completion.detokenizer is not None:
            text = completion.detokenizer.take_delta() if delta else completion.detokenizer.safe_text()
        return CompletionOutput(  # likewise
            completion.index,
            text,
            completion.token_ids[start:],
            completion.cumulative_logprob,
            None if completion.logprobs is None else completion.logprobs[start:],
            completion.finish_reason,
            completion.stop_reason,
            completion.error,
        )
