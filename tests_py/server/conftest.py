"""Servers for tests: on a socket with the bundled model, and in the process with a scripted engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltaic import AsyncLLM, text_engine
from deltaic.server import ServerSettings
from deltaic.tokenizer import Tokenizer
from harness import SMALL, Maker, Scripted, running_server
from scripted_engine import ScriptedEngine


@pytest.fixture(scope="session")
def bundled_llm() -> Iterator[AsyncLLM]:
    with AsyncLLM(**SMALL) as llm:
        yield llm


@pytest.fixture(scope="session")
def bundled_server(bundled_llm: AsyncLLM) -> Iterator[str]:
    with running_server(bundled_llm, ServerSettings(served_model_names=["toy", "alias"])) as url:
        yield url


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Iterator[Maker]:
    """Make a server whose engine says a text, or what a script says."""
    made: list[AsyncLLM] = []

    def make(
        says: Any = "fine",
        *,
        engine: dict[str, Any] | None = None,
        settings: ServerSettings | None = None,
        model: Path | None = None,
        **options: Any,
    ) -> Scripted:
        script = says if callable(says) else lambda *_: tokenizer.encode(says) if isinstance(says, str) else says
        scripted = ScriptedEngine(script, **(engine or {}))

        class Engine:
            @staticmethod
            def from_checkpoint(path: Path, config: object) -> ScriptedEngine:
                return scripted

        monkeypatch.setattr(text_engine, "Engine", Engine)
        made.append(AsyncLLM(model, **options))
        return Scripted(made[-1], scripted, settings or ServerSettings(served_model_names=["toy"]))

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture
def thinking_model(tmp_path: Path, default_model: Path) -> Path:
    """Return the bundled model's folder, without weights, with a template that opens the reasoning."""
    return with_template(
        tmp_path,
        default_model,
        "{%- if messages[0].role != 'user' and messages[0].role != 'system' %}"
        "{{- raise_exception('No user query found in messages.') }}{%- endif %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'system' and not loop.first %}"
        "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}"
        "{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}",
    )


def with_template(folder: Path, default_model: Path, template: str) -> Path:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


_HISTORY = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
)
_TOOLS = {
    "json": "{%- if tools %}{{- 'Tools: ' + (tools | tojson) + ' Answer <tool_call>{...}\\n' }}{%- endif %}",
    "tags": "{%- if tools %}{{- 'Tools: ' + (tools | tojson) + ' Answer <tool_call><function=...>\\n' }}{%- endif %}",
    "unknown": "{%- if tools %}{{- 'Tools: ' + (tools | tojson) + ' Answer [TOOL_CALLS]\\n' }}{%- endif %}",
}


@pytest.fixture
def tool_model(tmp_path: Path, default_model: Path) -> Callable[[str], Path]:
    """Return the bundled model's folder, without weights, with a template that asks for calls in a format."""
    return lambda form: with_template(
        tmp_path, default_model, _TOOLS[form] + (_HISTORY if form != "unknown" else "{{- messages[0].content }}")
    )
