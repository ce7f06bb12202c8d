"""The command line, on an engine that says what a test tells it to; test_cli_end_to_end.py runs the real one."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltaic import cli, text_engine
from deltaic.cli_options import EngineFields, engine_options
from deltaic.engine_config import EngineConfig
from deltaic.tokenizer import Tokenizer
from scripted_engine import ScriptedEngine

Deltaic = Callable[..., tuple[int, str, str]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> ScriptedEngine:
    engine = ScriptedEngine(lambda *_: tokenizer.encode(", there was a ďog 🌶.<|im_end|>"))

    class Engine:
        @staticmethod
        def from_checkpoint(path: Path, config: object) -> ScriptedEngine:
            return engine

    monkeypatch.setattr(text_engine, "Engine", Engine)
    return engine


@pytest.fixture
def deltaic(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> Deltaic:
    """Run a command line; return exit code, stdout and stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        code = cli.run(args)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def prompt_text(engine: ScriptedEngine, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(engine.seen["0"].prompt_token_ids)


def test_version(deltaic: Deltaic) -> None:
    code, out, err = deltaic("--version")
    assert (code, err) == (0, "")
    assert out.startswith("deltaic 0.")


def test_no_command_shows_the_commands(deltaic: Deltaic) -> None:
    code, out, _ = deltaic()
    assert code == 0
    assert all(command in out for command in ("generate", "chat", "serve", "info"))


def test_bundled_model_continues_the_plain_prompt(
    deltaic: Deltaic, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    code, out, err = deltaic("generate", "Once upon a time")
    assert (code, out, err) == (0, ", there was a ďog 🌶.\n", "")
    assert prompt_text(engine, tokenizer) == "Once upon a time"
    params = engine.seen["0"].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.7, 0.9, 40, 128)


def test_no_argument_is_needed(deltaic: Deltaic, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    assert deltaic("generate")[0] == 0
    assert prompt_text(engine, tokenizer) == cli.FIRST_PROMPT


def test_model_with_a_chat_template_answers(
    deltaic: Deltaic, engine: ScriptedEngine, tokenizer: Tokenizer, default_model: Path
) -> None:
    assert deltaic("generate", "Hi", "--model", str(default_model), "--system", "Be kind.")[0] == 0
    start = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert prompt_text(engine, tokenizer) == start + "<|im_start|>assistant\n"


def test_form_of_the_prompt_can_be_chosen(
    deltaic: Deltaic, engine: ScriptedEngine, tokenizer: Tokenizer, default_model: Path
) -> None:
    assert deltaic("generate", "Hi", "--model", str(default_model), "--raw")[0] == 0
    assert prompt_text(engine, tokenizer) == "Hi"
    engine.seen.clear()
    assert deltaic("generate", "Hi", "--chat")[0] == 0
    assert prompt_text(engine, tokenizer).startswith("<|im_start|>user\nHi")


def test_prompt_is_read_from_stdin(
    deltaic: Deltaic, engine: ScriptedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from\na pipe"))
    assert deltaic("generate", "-")[0] == 0
    assert prompt_text(engine, tokenizer) == "from\na pipe"


def test_options_reach_the_engine(deltaic: Deltaic, engine: ScriptedEngine) -> None:
    code, out, _ = deltaic(
        *("generate", "x", "--max-tokens", "9", "--min-tokens", "1", "--temperature", "0.5", "--top-p", "0.8"),
        *("--top-k", "7", "--min-p", "0.1", "--presence-penalty", "1", "--frequency-penalty", "-1"),
        *("--repetition-penalty", "1.1", "--seed", "5", "--stop", " was", "--stop", "dog", "--ignore-eos"),
    )
    assert (code, out) == (0, ", there\n")
    params = engine.seen["0"].params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p) == (9, 1, 0.5, 0.8)
    assert (params.top_k, params.min_p, params.presence_penalty, params.frequency_penalty) == (7, 0.1, 1.0, -1.0)
    assert (params.repetition_penalty, params.seed, params.stop, params.ignore_eos) == (1.1, 5, [" was", "dog"], True)


def test_json_for_programs(deltaic: Deltaic) -> None:
    code, out, err = deltaic("generate", "x", "--json", "--stats")
    assert code == 0
    assert out.count("\n") == 1
    found = json.loads(out)
    assert (found["text"], found["finish_reason"], found["num_prompt_tokens"]) == (", there was a ďog 🌶.", "stop", 1)
    assert found["num_output_tokens"] == len(found["token_ids"])
    assert "1 prompt tokens" in err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["generat"], 2, "No such command 'generat'"),
        (["generate", "--nope"], 2, "--nope"),
        (["generate", "--top-p", "x"], 2, "--top-p"),
        (["generate", "a", "b"], 2, "b"),
        (["generate", "--temperature", "3"], 2, "temperature must be a finite number in [0, 2], got 3"),
        (["generate", "--temperature", "nan"], 2, "temperature must be a finite number in [0, 2], got nan"),
        (["generate", "--top-p", "0"], 2, "top_p must be a finite number in (0, 1], got 0"),
        (["generate", "--max-tokens", "0"], 2, "max_tokens must be an integer in [1, 2147483647], got 0"),
        (["generate", "--stop", ""], 2, "stop[0] must not be empty"),
        (["generate", "--device", "tpu"], 2, "device"),
        (["generate", "--max-model-len", "0"], 2, "max_model_len"),
        (["generate", "--system", "x"], 2, "--chat"),
        (["generate", "--model", "/no/such/folder"], 2, "PROMPT"),
        (["generate", "x", "--model", "/no/such/folder"], 1, "'/no/such/folder' does not exist"),
        (["generate", ""], 1, "the prompt must hold at least 1 token, got 0"),
        (["chat", "--top-p", "2"], 2, "top_p"),
        (["info", "/no/such/folder"], 1, "does not exist"),
        (["info", "--device", "tpu"], 2, "device"),
        (["info", "--device-memory", "lots"], 2, "device_memory must be a size like 141GB or 24GiB, got 'lots'"),
        (["info", "--device-memory", "1GB", "--device", "cpu"], 1, "the device must not be 'cpu'"),
        (["info", "--device-memory", "100MB"], 1, "has 0.10 GB free of 0.10 GB"),
        (["info", "--gpu-memory-utilization", "1.5"], 2, "gpu_memory_utilization must be in (0, 1], got 1.5"),
        (["info", "--recurrent-state-dtype", "int8"], 2, "recurrent_state_dtype must be one of"),
        (["serve", "--kv-cache-dtype", "fp8"], 2, "kv_cache_dtype must be one of"),
    ],
)
def test_error_is_one_line_with_its_exit_code(deltaic: Deltaic, args: list[str], code: int, words: str) -> None:
    found, out, err = deltaic(*args)
    assert found == code
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("args", [(), ("bench",)])
def test_command_of_commands_shows_its_help(deltaic: Deltaic, args: tuple[str, ...]) -> None:
    code, out, err = deltaic(*args)
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(('deltaic', *args))} [OPTIONS]")


def test_info_plans_for_a_gpu_of_any_size(deltaic: Deltaic) -> None:
    config = str(Path(__file__).parent.parent / "bench" / "configs" / "qwen3_5_4b.json")
    memory = []
    for size in ("48GB", "141GB"):
        code, out, _ = deltaic("info", config, "--device-memory", size, "--json", "--max-model-len", "8192")
        assert code == 0
        memory.append(json.loads(out))
    assert [found["device"] for found in memory] == ["cuda:0", "cuda:0"]
    assert memory[0]["weight_bytes"] == memory[1]["weight_bytes"] == 2 * memory[0]["num_parameters"]
    assert memory[0]["num_blocks"] < memory[1]["num_blocks"]
    table = deltaic("info", config, "--device-memory", "48GB")[1]
    assert "cuda:0: 44.7 GiB free of 44.7 GiB, 40.2 GiB may be used" in table


def test_debug_shows_the_traceback(deltaic: Deltaic) -> None:
    _, _, err = deltaic("generate", "x", "--temperature", "3", "--debug")
    assert "Traceback" in err
    assert err.rstrip().splitlines()[-1].startswith("error: temperature")
    assert "Traceback" not in deltaic("generate", "x", "--temperature", "3")[2]


def test_failed_request_is_an_error(deltaic: Deltaic, engine: ScriptedEngine) -> None:
    engine.failing["0"] = "the logits are not finite"
    code, _, err = deltaic("generate", "x")
    assert (code, err) == (1, "error: request 0 failed: the logits are not finite\n")
    engine.seen.clear()
    code, _, err = deltaic("generate", "x", "--json")
    assert (code, err) == (1, "error: generation failed: the logits are not finite\n")


def test_defect_is_called_one(deltaic: Deltaic, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("boom")

    monkeypatch.setattr(cli, "load", broken)
    code, _, err = deltaic("generate", "x")
    assert (code, err) == (1, "error: KeyError: 'boom' (a defect of deltaic; --debug shows where)\n")


def test_interrupt_is_quiet(deltaic: Deltaic, engine: ScriptedEngine) -> None:
    def interrupt() -> None:
        if engine.num_steps == 2:
            raise KeyboardInterrupt

    engine.on_step = interrupt
    code, out, err = deltaic("generate", "x")
    assert (code, err.strip()) == (130, "")
    assert out
    assert engine.running == {}


def test_chat_reads_a_pipe(
    deltaic: Deltaic, engine: ScriptedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nAgain\n"))
    code, out, err = deltaic("chat", "--system", "Be kind.")
    assert (code, err) == (0, "")
    assert out == ", there was a ďog 🌶.\n" * 2
    second = tokenizer.decode(engine.seen["1"].prompt_token_ids)
    assert second.count("<|im_start|>") == 5
    assert second.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


def test_options_of_an_engine_are_fields_with_their_defaults() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    seen: list[dict[str, Any]] = []

    @engine_options(without=("dtype",), enable_prefix_caching=False)
    def command(model: str | None = None, *, engine: EngineFields, debug: bool = False) -> None:
        seen.append({**engine, "model": model, "debug": debug})

    parameters = inspect.signature(command).parameters
    assert next(iter(parameters)) == "model"
    assert [*parameters][-1] == "debug"
    names = [*parameters][1:-1]
    assert len(names) == 13
    given = {name: parameter.default for name, parameter in parameters.items()}
    command(**given | {"speculative_tokens": "3"})
    assert seen == [{**given, "speculative_tokens": 3}]
    assert {name: given[name] for name in names} == {
        **{name: defaults[name] for name in names},
        "enable_prefix_caching": False,
    }
