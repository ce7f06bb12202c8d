"""`deltaic` as a process, on real checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltaic.checkpoint import read_json
from tiny_model import TINY, write_checkpoint

DELTAIC = [sys.executable, "-m", "deltaic"]
SMALL = ["--kv-cache-memory-bytes", str(32 << 20)]


def deltaic(*args: str, stdin: str = "") -> tuple[int, str, str]:
    """Run a command line to its end; return exit code, stdout and stderr."""
    done = subprocess.run([*DELTAIC, *args], input=stdin, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def test_bundled_model_writes_what_the_golden_file_says(default_model: Path) -> None:
    case = read_json(default_model / "golden.json")["prompts"][0]
    args = ["generate", case["prompt"], "--temperature", "0", "--max-tokens", "24", "--ignore-eos", *SMALL]
    code, out, err = deltaic(*args, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["token_ids"] == case["greedy"][:24]
    assert deltaic(*args) == (0, found["text"] + "\n", "")
    assert deltaic(*[arg.replace(case["prompt"], "-") for arg in args], stdin=case["prompt"]) == (
        0,
        found["text"] + "\n",
        "",
    )


def test_seed_repeats_a_sampled_text() -> None:
    args = ["generate", "--seed", "3", "--max-tokens", "12", *SMALL]
    first = deltaic(*args)
    assert first[0] == 0
    assert first == deltaic(*args)


def test_conversation_on_a_pipe() -> None:
    question = "What is the capital of France?\n"
    code, out, err = deltaic("chat", "--temperature", "0", *SMALL, stdin=question + "/clear\n" + question + "/exit\n")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert "Paris" in lines[0]
    assert err == "(forgotten)\n"


def test_info_of_the_bundled_model() -> None:
    small = [*SMALL, "--max-num-seqs", "4"]
    code, out, err = deltaic("info", *small)
    assert (code, err) == (0, "")
    assert "6 Gated DeltaNet, 2 full attention" in out
    found = json.loads(deltaic("info", "--json", *small)[1])
    assert found["cache_bytes"] <= 32 << 20


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


def empty(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 0)


def config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(TINY | fields))

    change.__name__ = "_".join(map(str, fields))
    return change


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "args", "words"),
    [
        (no_folder, [], "does not exist"),
        (no_config, [], "config.json"),
        (no_weights, [], "safetensors"),
        (truncated, [], "model.safetensors"),
        (empty, [], "model.safetensors"),
        (config(hidden_size=64), [], "[4096, 32]"),
        (config(num_hidden_layers=5), [], "model.layers.4"),
        (config(architectures=["MysteryForCausalLM"], model_type="mystery"), [], "mystery"),
        (broken_config, [], "config.json"),
        (broken_tokenizer, [], "tokenizer.json"),
        (nothing, ["--max-model-len", "1025"], "1024"),
        (nothing, ["--max-model-len", "3"], "max_model_len = 3"),
        (nothing, ["--kv-cache-memory-bytes", "100"], "100"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_run_is_one_line(
    tmp_path: Path, spoil: Callable[[Path], None], args: list[str], words: str
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    spoil(folder)
    code, out, err = deltaic("generate", "Once upon a time", "--model", str(folder), "--raw", *args)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["generate", ""], 1, "at least 1 token, got 0"),
        (["generate", "word " * 5000], 1, "max_model_len = 4096 has room for 4095"),
        (["generate", "x", "--temperature", "inf"], 2, "temperature"),
        (["generate", "x", "--top-k", "-2"], 2, "top_k must be an integer in [-1, 2147483647], got -2"),
        (["generate", "x", "--nope"], 2, "--nope"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(args: list[str], code: int, words: str) -> None:
    found, out, err = deltaic(*args)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert words in err


def test_random_checkpoint_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", with_tokenizer=False)
    code, out, err = deltaic("generate", "x", "--model", str(folder))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no tokenizer.json" in err


def start_endless() -> subprocess.Popen[bytes]:
    """Start a generation that outlives the test, and wait for its first text."""
    args = ["generate", "Once upon a time", "--ignore-eos", "--max-tokens", "4000", *SMALL]
    process = subprocess.Popen([*DELTAIC, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process


def test_interrupt_is_quiet() -> None:
    process = start_endless()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, b"")


def test_reader_that_goes_away_ends_it_quietly() -> None:
    process = start_endless()
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), err) == (1, b"")


@pytest.mark.parametrize(
    ("closed", "args", "code", "words"),
    [
        ("<&-", ["generate", "-"], 1, "the prompt must hold at least 1 token"),
        (">&-", ["generate", "x", "--max-tokens", "2"], 0, ""),
        ("2>&-", ["generate", "x", "--max-tokens", "0"], 2, ""),
        ("<&- >&- 2>&-", ["generate", "x", "--max-tokens", "2", "--stats"], 0, ""),
        ("<&-", ["chat", "--max-tokens", "2"], 0, ""),
    ],
)
def test_closed_streams_are_no_defect(closed: str, args: list[str], code: int, words: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *DELTAIC, *args]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (code, "")
    assert words in found.stderr
    assert found.stderr.count("\n") == bool(words)


def test_weights_are_mapped_and_held_once(tmp_path: Path) -> None:
    """Peak memory stays under 1.3 x the file, the caches and 200 MB."""
    folder = write_checkpoint(
        tmp_path / "large",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    file_bytes = (folder / "model.safetensors").stat().st_size
    assert file_bytes > 300e6
    args = ["--model", str(folder), "--raw", "--max-tokens", "4", "--temperature", "0", "--ignore-eos", *SMALL]
    # A process's peak counts from its parent's: one of a few megabytes stands between.
    program = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=sys.stderr, check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", program, *DELTAIC, "generate", "Once upon a time", *args]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    peak_bytes = int(found.stdout) * 1024
    print(f"peak {peak_bytes / 1e6:.0f} MB, file {file_bytes / 1e6:.0f} MB")
    assert peak_bytes < 1.3 * file_bytes + (32 << 20) + 200e6


@pytest.mark.parametrize("module", ["deltaic.cli", "typer", "numpy", "deltaic.engine", "tokenizers"])
def test_interrupt_while_the_command_is_loaded(module: str) -> None:
    code = """
import os, signal, sys
module, sys.argv[1] = sys.argv[1], "generate"

class Interrupter:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from deltaic.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ignored_interrupt_stays_ignored() -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv[1:] = ["--version"]
from deltaic.__main__ import main
try:
    main()
finally:
    print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[1:] == ["True"]
