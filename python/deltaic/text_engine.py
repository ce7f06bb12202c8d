"""An engine with text on both sides: what LLM and AsyncLLM share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltaic import _core
from deltaic.chat import ChatTemplate, Message, ToolFormat, find_chat_template
from deltaic.checkpoint import default_sampling_fields, eos_token_ids, resolve_model
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.input_processor import EngineInput, InputProcessor
from deltaic.output_processor import OutputProcessor
from deltaic.outputs import RequestOutput
from deltaic.sampling_params import SamplingParams
from deltaic.step_sizes import StepSizes
from deltaic.tokenizer import Tokenizer, load_tokenizer


class TextEngine:
    """One model, loaded, with its tokenizer, its template and its defaults.

    `inputs` and render_chat may be used by any thread; add, abort and step by one at a time. The errors are LLM's.
    """

    def __init__(
        self, model: str | Path | None, config: EngineConfig, *, seed: int | None = None, max_logprobs: int = 20
    ) -> None:
        self.model_folder = resolve_model(model, config.load_format)
        self.tokenizer = load_tokenizer(self.model_folder)
        tokenizer_eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        self.default_fields = default_sampling_fields(self.model_folder)
        self.default_params = SamplingParams.from_optional(self.default_fields)
        self.engine = Engine.from_checkpoint(self.model_folder, config)
        self._eos_token_ids = eos_token_ids(self.model_folder, tokenizer_eos, self.engine.vocab_size)
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.engine.vocab_size,
            max_model_len=self.max_model_len,
            max_logprobs=max_logprobs,
            seed=seed,
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self.step_sizes = StepSizes()
        self.engine.on_schedule = self._scheduled
        self._templates: dict[bool, ChatTemplate] = {}  # the model's own, by whether tools are given

    @property
    def max_model_len(self) -> int:
        return self.engine.scheduler_config.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.model_folder} has no tokenizer.json")
        return self.tokenizer

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text that the model is given for one conversation."""
        return self._template(chat_template, for_tools=tools is not None).render(
            messages,
            tools=tools,
            template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self.get_tokenizer().special_tokens_map,
        )

    def tool_format(self) -> ToolFormat | None:
        """Return how the model's own template asks for calls of tools; None when it does not."""
        return self._template(None, for_tools=True).tool_format

    def _template(self, source: str | None, *, for_tools: bool) -> ChatTemplate:
        if source is not None:
            return ChatTemplate(source)
        if for_tools not in self._templates:
            found = find_chat_template(self.model_folder, for_tools=for_tools)
            if found is None:
                raise ValueError(f"{self.model_folder} has no chat template: give chat_template, or use generate")
            self._templates[for_tools] = ChatTemplate(found)
        return self._templates[for_tools]

    def add(self, request_id: str, given: EngineInput, priority: int = 0) -> None:
        """Queue one request; nothing of it stays when a part is refused."""
        req_ids = self._outputs.add_request(request_id, given)
        try:
            for index, req_id in enumerate(req_ids):
                self.engine.add_request(
                    req_id,
                    given.prompt_token_ids,
                    given.completion_params(index),
                    eos_token_ids=self._eos_token_ids,
                    bad_words_token_ids=given.bad_words_token_ids,
                    priority=priority,
                )
        except BaseException:
            self.abort(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds; unknown and finished ones are ignored."""
        self.engine.abort(self._outputs.abort(request_id))

    def abort_all(self) -> None:
        """Forget all requests."""
        for request_id in self._outputs.unfinished_ids():
            self.abort(request_id)

    def _scheduled(self, step: _core.SchedulerOutput) -> None:
        self.step_sizes.add(step.total_num_scheduled_tokens)
        if step.scheduled_new_reqs:
            self._outputs.scheduled(step)

    def has_unfinished_requests(self) -> bool:
        """Return whether step() has something to run, or rows of ended requests to let go."""
        return self.engine.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; return what callers get of it."""
        outputs, ended = self._outputs.process(self.engine.step())
        if ended:
            self.engine.abort(ended)
        return outputs
