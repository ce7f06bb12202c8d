from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from deltaic import _core
from deltaic.chat import ChatTemplate, find_chat_template

# What the templates of the Qwen family do, in short.
STRICT = """
{%- macro write(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{- raise_exception('System message must be at the beginning.') -}}
    {%- endif -%}
    <{{ message.role }}>{{ write(message.content)|trim if message.content }}
    {%- for call in message.tool_calls or [] -%}
        {%- for key, value in call.function.arguments|items -%}[{{ key }}={{ value|tojson }}]{%- endfor -%}
    {%- endfor -%}</>
{%- endfor -%}
{%- if not messages | selectattr('role', 'equalto', 'user') | list -%}
    {{- raise_exception('No user query found in messages.') -}}
{%- endif -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""


@pytest.fixture(scope="module")
def chatml(default_model: Path) -> ChatTemplate:
    source = find_chat_template(default_model)
    assert source is not None
    return ChatTemplate(source)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_bundled_template_writes_chatml(chatml: ChatTemplate) -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": "Hello <&>"}, *user("Bye")]
    start = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello <&><|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert chatml.render(messages) == start + "<|im_start|>assistant\n"
    assert chatml.render(messages, add_generation_prompt=False) == start


def test_template_is_the_file_before_the_one_in_the_config(tmp_path: Path, default_model: Path) -> None:
    assert find_chat_template(tmp_path) is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert find_chat_template(tmp_path) == "plain"
    assert find_chat_template(tmp_path, for_tools=True) == "tools"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "inline"}))
    assert find_chat_template(tmp_path) == "inline"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_chat_template(tmp_path) == "file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template\.jinja cannot be read: 'utf-8' codec"):
        find_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ValueError, match="must be a string"):
        find_chat_template(tmp_path)


@pytest.mark.parametrize("strict", [False, True])
def test_content_as_string_and_as_parts_is_the_same(chatml: ChatTemplate, strict: bool) -> None:
    """D102."""
    template = ChatTemplate(STRICT) if strict else chatml
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    assert template.render(user(parts)) == template.render(user("What is this?"))
    assert "What is this?" in template.render(user(parts))


def test_template_refuses_in_its_own_words() -> None:
    """D102: the caller reads what the template says."""
    template = ChatTemplate(STRICT)
    with pytest.raises(ValueError, match=r"System message must be at the beginning\."):
        template.render([*user("Hi"), {"role": "system", "content": "late"}])
    with pytest.raises(ValueError, match=r"No user query found in messages\."):
        template.render([{"role": "system", "content": "only"}])


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        ([], ValueError, "at least 1 message, got 0"),
        ("Hi", TypeError, "messages must be a list"),
        ({"role": "user", "content": "Hi"}, TypeError, "messages must be a list"),
        (["Hi"], TypeError, r"messages\[0\] must be a dict"),
        ([{"content": "Hi"}], ValueError, r"messages\[0\]\.role must be one of .*got None"),
        ([{"role": "robot", "content": "Hi"}], ValueError, "got 'robot'"),
        ([{"role": "user"}], ValueError, r"messages\[0\]\.content .*got None"),
        (user(5), TypeError, r"messages\[0\]\.content must be a string"),
        (user([5]), NotImplementedError, "'int'"),
        (user([{"type": "text"}]), TypeError, r"content\[0\]\.text"),
        (user([{"type": "image_url", "image_url": {}}]), NotImplementedError, "'image_url'.*text only"),
        ([*user("a"), {"role": "assistant", "tool_calls": [{}]}], ValueError, r"messages\[1\]\.tool_calls\[0\]"),
    ],
)
def test_bad_messages_are_named(chatml: ChatTemplate, messages: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        chatml.render(messages)
    assert "\n" not in str(caught.value)


def assistant_call(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return [*user("?"), {"role": "assistant", "content": None, "tool_calls": [call]}]


def test_arguments_of_a_tool_call_come_as_json_or_as_an_object() -> None:
    template = ChatTemplate(STRICT)
    for arguments in ({"x": [1]}, '{"x": [1]}'):
        assert "[x=[1]]" in template.render(assistant_call(arguments))
    with pytest.raises(ValueError, match="is not JSON"):
        template.render(assistant_call('{"bad'))
    with pytest.raises(ValueError, match="must be a JSON object"):
        template.render(assistant_call("[1]"))


def test_tools_are_refused_by_a_template_without_tools(chatml: ChatTemplate) -> None:
    with pytest.raises(_core.Unsupported, match="tools"):
        chatml.render(user("Hi"), tools=[{"type": "function"}])
    assert ChatTemplate(STRICT).render(user("Hi"), tools=[{"a": "<é>"}]).startswith('{"a": "<é>"}\n<user>')


@pytest.mark.parametrize(
    ("content", "strict", "end"), [("Once ", False, "Once "), ("Once ", True, "Once"), ("", True, "")]
)
def test_final_message_is_continued(chatml: ChatTemplate, content: str, strict: bool, end: str) -> None:
    template = ChatTemplate(STRICT) if strict else chatml
    messages = [*user("Tell"), {"role": "assistant", "content": content}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(("<assistant>" if strict else "<|im_start|>assistant\n") + end)
    assert messages[-1]["content"] == content


def test_continuing_excludes_a_generation_prompt(chatml: ChatTemplate) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        chatml.render(user("Hi"), continue_final_message=True)
    with pytest.raises(ValueError, match="does not write the content"):
        ChatTemplate("nothing").render(user("Hi"), continue_final_message=True, add_generation_prompt=False)


def test_template_knows_what_transformers_gives_it() -> None:
    def render(source: str, **kwargs: Any) -> str:
        return ChatTemplate(source).render(user("Hi"), **kwargs)

    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{% generation %}a{{ messages[0].content }}{% endgeneration %}b") == "aHib"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ eos_token }}", special_tokens={"eos_token": "<e>"}) == "<e>"
    assert render("{{ enable_thinking }}", template_kwargs={"enable_thinking": False}) == "False"
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert render("{{ messages[0].content }}", template_kwargs={"messages": "mine"}) == "Hi"
    assert render("{% if documents is none %}none{% endif %}") == "none"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ undefined.name }}",
        "{{ 1 + messages[0].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_template_that_fails_or_reaches_out_is_an_error(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template"):
        ChatTemplate(source).render(user("Hi"))


def test_template_that_does_not_compile_names_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("fine\n{% if %}")
