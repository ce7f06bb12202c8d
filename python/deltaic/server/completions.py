"""/v1/completions: prompts go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from deltaic.async_llm import AsyncLLM, OutputStream
from deltaic.input_processor import EngineInput, Prompt
from deltaic.outputs import CompletionOutput, TokenLogprobs
from deltaic.server.errors import EVENT_STREAM, client_errors
from deltaic.server.event_stream import EventStream, unless_disconnected
from deltaic.server.protocol import Completion, CompletionBody, CompletionChoice, CompletionLogprobs, Usage
from deltaic.server.serving import Serving, TokenCounts, now, sampling_params
from deltaic.server.token_text import finite, token_name
from deltaic.tokenizer import Tokenizer


def completions_router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["completions"])

    @router.post("/v1/completions", response_model=Completion, responses=EVENT_STREAM)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several; with stream as server-sent events."""
        return await unless_disconnected(request, _answer(serving, body))

    return router


async def _answer(serving: Serving, body: CompletionBody) -> Response:
    serving.check_model(body.model)
    serving.check_room()
    with client_errors():
        inputs = await asyncio.to_thread(_inputs, serving.llm, body)
    name, stream = await serving.submit(inputs, "cmpl", body.priority)
    answer = _Answer(serving, body, inputs, name)
    if body.stream:
        return EventStream(answer.events(stream))
    return Response(await answer.whole(stream), media_type="application/json")


def _inputs(llm: AsyncLLM, body: CompletionBody) -> list[EngineInput]:
    body.refuse_unsupported()
    if body.echo or body.logprobs is not None:
        llm.get_tokenizer()  # tokens are written out
    max_tokens = body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # the step that reads the prompt; its token is dropped
    params = sampling_params(
        llm,
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    add_special_tokens = body.add_special_tokens is not False
    inputs = []
    prompts = _prompts(body)
    for i, prompt in enumerate(prompts):
        try:
            inputs.append(llm.inputs.process(prompt, params, add_special_tokens=add_special_tokens))
        except (ValueError, TypeError, NotImplementedError) as error:
            if len(prompts) == 1:
                raise
            raise type(error)(f"prompt[{i}]: {error}") from error
    return inputs


def _prompts(body: CompletionBody) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ValueError("prompt must hold at least 1 prompt or token id, got 0")
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [each if isinstance(each, str) else {"prompt_token_ids": each} for each in prompt]


class _Choice:
    """One completion while it grows: where its next token's text starts."""

    def __init__(self, given: EngineInput) -> None:
        self.given = given
        self.started = False
        self.num_chars = 0


class _Answer:
    """The answer to one request, whole or in events."""

    def __init__(self, serving: Serving, body: CompletionBody, inputs: Sequence[EngineInput], name: str) -> None:
        self._serving = serving
        self._body = body
        self._inputs = inputs
        self._frame: dict[str, Any] = {"id": name, "created": now(), "model": body.model or serving.model_name}
        self._n = inputs[0].sampling_params.n
        self._only_prompt = body.max_tokens == 0
        self._choices = {i * self._n + j: _Choice(given) for i, given in enumerate(inputs) for j in range(self._n)}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._counts = TokenCounts(inputs)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._serving.llm.get_tokenizer()

    async def whole(self, stream: OutputStream) -> str:
        choices = [choice async for choice in self._parts(stream)]
        choices.sort(key=lambda choice: choice.index)
        return self._json(choices, self._counts.usage)

    async def events(self, stream: OutputStream) -> AsyncGenerator[str, None]:
        has_text = self._serving.llm.has_tokenizer  # without any, an event says that there are tokens
        async for choice in self._parts(stream):
            if not has_text or choice.text or choice.logprobs or choice.finish_reason:
                yield self._json([choice], None)
        if self._body.include_usage:
            yield self._json([], self._counts.usage)

    def _json(self, choices: list[CompletionChoice], usage: Usage | None) -> str:
        return Completion(**self._frame, choices=choices, usage=usage).model_dump_json()

    async def _parts(self, stream: OutputStream) -> AsyncGenerator[CompletionChoice, None]:
        wants_prompt = self._body.echo is True and self._body.logprobs is not None
        held: dict[int, list[CompletionOutput]] = {}
        outputs = self._serving.outputs(stream, self._inputs)
        try:
            async for index, output in outputs:
                if output.prompt_logprobs is not None:
                    self._prompt_logprobs[index] = output.prompt_logprobs
                self._counts.add(index, output)
                if self._only_prompt:
                    self._counts.drop_generated()
                waiting = held.setdefault(index, [])
                waiting += output.outputs
                if wants_prompt and index not in self._prompt_logprobs:
                    continue  # another completion of the prompt reports it, and may be behind
                for completion in waiting:
                    yield self._part(index, completion)
                waiting.clear()
        finally:
            await outputs.aclose()

    def _part(self, index: int, completion: CompletionOutput) -> CompletionChoice:
        choice_index = index * self._n + completion.index
        choice = self._choices[choice_index]
        text, token_ids = completion.text, completion.token_ids
        entries: list[TokenLogprobs | None] = [*(completion.logprobs or [])]
        finish_reason, stop_reason = completion.finish_reason, completion.stop_reason
        if self._only_prompt:
            text, entries, token_ids = "", [], []
            finish_reason, stop_reason = (None if finish_reason is None else "length"), None
        if self._body.echo and not choice.started:
            given = choice.given
            prompt = self._tokenizer.decode(given.prompt_token_ids) if given.prompt is None else given.prompt
            text = prompt + text
            entries = [*self._prompt_logprobs.get(index, []), *entries]
            token_ids = [*given.prompt_token_ids, *token_ids]
        choice.started = True
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(choice, token_ids, entries)
        return CompletionChoice(
            index=choice_index, text=text, logprobs=logprobs, finish_reason=finish_reason, stop_reason=stop_reason
        )

    def _logprobs(
        self, choice: _Choice, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in zip(token_ids, entries, strict=True):
            made.tokens.append(token_name(self._tokenizer, token_id))
            made.text_offset.append(choice.num_chars)
            choice.num_chars += len(self._tokenizer.token_bytes(token_id).decode("utf-8", "replace"))
            if entry is None:
                made.token_logprobs.append(None)
                made.top_logprobs.append(None)
                continue
            made.token_logprobs.append(finite(entry[token_id].logprob))
            made.top_logprobs.append(
                {token_name(self._tokenizer, other): finite(found.logprob) for other, found in entry.items()}
            )
        return made
