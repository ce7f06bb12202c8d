"""What all endpoints share: the engine, the names of the model, the figures."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from deltaic.async_llm import AsyncLLM, OutputStream, QueueFull
from deltaic.input_processor import EngineInput
from deltaic.outputs import RequestOutput
from deltaic.sampling_params import MAX_TOKENS, RequestOutputKind, SamplingParams
from deltaic.server.errors import ApiError, client_errors
from deltaic.server.metrics import ServerMetrics
from deltaic.server.models import ServedModel
from deltaic.server.protocol import GenerationBody, PromptTokensDetails, Usage
from deltaic.server.settings import ServerSettings


class Serving(ServedModel):
    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        super().__init__(settings, llm.model_folder, llm.max_model_len)
        self.llm = llm
        self.settings = settings
        self.metrics = ServerMetrics(llm, self.model_name)

    def check_room(self) -> None:
        """Raise QueueFull before work is spent on a request that could not be queued."""
        if self.llm.num_unfinished >= self.llm.max_unfinished:
            raise QueueFull(f"{self.llm.num_unfinished} completions are queued or running, which is the limit")

    async def submit(self, inputs: Sequence[EngineInput], kind: str, priority: int | None) -> tuple[str, OutputStream]:
        """Queue the prompts of one HTTP request; return the answer's id and the outputs to come."""
        wanted = sum(given.sampling_params.n for given in inputs)
        if wanted > self.llm.max_unfinished:
            raise ApiError(
                400,
                f"n times the number of prompts must be at most {self.llm.max_unfinished}, got {wanted}",
                param="n",
            )
        self.llm.check_health()
        name = f"{kind}-{uuid.uuid4().hex}"
        with client_errors():  # what only the engine knows: a request that no cache of this size could hold
            return name, await self.llm.submit(inputs, request_id=name, priority=priority or 0)

    async def outputs(
        self, stream: OutputStream, inputs: Sequence[EngineInput]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the outputs, counting them; abort what has not ended when the generator is closed."""
        async with stream:
            observer = self.metrics.observer(inputs)
            try:
                async for index, output in stream:
                    observer.observe(index, output)
                    yield index, output
            except Exception:
                observer.end("error")
                raise
            finally:
                observer.end("abort")


def now() -> int:
    return int(time.time())


def sampling_params(
    llm: AsyncLLM,
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return what a body asks for, over the model's defaults; the errors are SamplingParams'."""
    if body.stream_options is not None and not body.stream:
        raise ValueError("stream_options needs stream = true")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return llm.sampling_params(
        n=body.n,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=None if body.logit_bias is None else {_token_id(key): bias for key, bias in body.logit_bias.items()},
        allowed_token_ids=body.allowed_token_ids,
        bad_words=body.bad_words,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        include_stop_str_in_output=body.include_stop_str_in_output,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )


def check_max_tokens(name: str, value: int | None) -> None:
    """Raise the ValueError of SamplingParams under the name that the field has for a client."""
    if value is not None and not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be an integer in [1, {MAX_TOKENS}], got {value}")


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 20):
        raise ValueError(f"logit_bias key must be a token id, got {key!r:.60}")
    return int(key)


class TokenCounts:
    """The usage of one HTTP request, of all its prompts and completions."""

    def __init__(self, inputs: Sequence[EngineInput]) -> None:
        self._num_prompt_tokens = sum(len(given.prompt_token_ids) for given in inputs)
        self._num_cached_tokens: dict[int, int] = {}
        self._num_generated_tokens = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output of new tokens, of the prompt `index`."""
        self._num_cached_tokens[index] = output.num_cached_tokens or 0
        self._num_generated_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def drop_generated(self) -> None:
        self._num_generated_tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_generated_tokens,
            total_tokens=self._num_prompt_tokens + self._num_generated_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens.values())),
        )
