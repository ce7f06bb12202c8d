"""The bodies of requests and answers. Only what they are; what they mean is the endpoints'."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from deltaic import _core
from deltaic.server.lone_surrogates import find_lone_surrogate

# Of one request. Beyond these a body would be checked for seconds, and nothing else be done meanwhile.
MAX_PROMPTS = 2048
MAX_STOPS = 64
MAX_ENTRIES = 10_000
MAX_TOKEN_IDS = 1 << 20
MAX_PRIORITY = 2**31 - 1

# Fields of other servers whose absence would change an answer silently, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "chat_template": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "web_search_options": (),
}


def _limit_entries(value: object) -> object:
    """Refuse a large object before each of its entries is checked and found wrong."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError(
            "too_long",
            "Object should have at most {limit} entries, not {number}",
            {"limit": MAX_ENTRIES, "number": len(value)},
        )
    return value


TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Strings = Annotated[list[str], Field(max_length=MAX_ENTRIES, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_ENTRIES, fail_fast=True)]
Numbers = Annotated[dict[str, float], BeforeValidator(_limit_entries)]
Texts = Annotated[dict[str, str], BeforeValidator(_limit_entries)]


class RequestBody(BaseModel):
    """Types are taken as JSON has them: "5" is no number. Unknown fields are ignored, but all strings must be text."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_lone_surrogates(cls, fields: object) -> object:
        if isinstance(fields, dict) and (found := find_lone_surrogate(fields)) is not None:
            raise PydanticCustomError(
                "lone_surrogate",
                "{path} is no text: it has a lone surrogate at character {at}",
                {"path": found[0], "at": found[1]},
            )
        return fields

    def refuse_unsupported(self) -> None:
        """Raise Unsupported for a field that asks for what this server does not have."""
        for name, value in (self.model_extra or {}).items():
            harmless = _UNSUPPORTED.get(name)
            if harmless is not None and value is not None and value is not False and value not in harmless:
                raise _core.Unsupported(f"{name} is not supported by this version of deltaic; leave it out")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationBody(RequestBody):
    """What completions and chat completions share; null means not given."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Numbers | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


Prompts = (
    str
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
)


class CompletionBody(GenerationBody):
    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None


class ChatOptions(RequestBody):
    """How messages become text."""

    messages: Objects
    tools: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionBody(ChatOptions, GenerationBody):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(RequestBody):
    """A prompt, or messages with the fields of ChatOptions."""

    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    tokens: TokenIds


# ---- answers: a field that was not set is left out ----


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """One entry a token; the first of a prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(BaseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class CalledFunction(BaseModel):
    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """A call, or in a stream a piece of one: only the first has its id and name."""

    index: int | None = None  # in streams
    id: str | None = None
    type: str = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message, or of a stream what is new of it."""

    role: str = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "deltaic"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str
