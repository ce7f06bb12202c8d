"""The engine on real checkpoints: log probabilities, stops and aborts, ahead of the output and not."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from deltaic import _core
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.request import EngineOutput
from deltaic.sampling_params import SamplingParams
from device import DEVICE

CHECKPOINT = Path(__file__).parent / "data" / "parity" / "qwen3_5" / "fp32"


def make_engine(**config: Any) -> Engine:
    defaults: dict[str, Any] = {
        "kv_cache_memory_bytes": 128 << 20,
        "num_threads": 2,
        "poison_caches": True,
        "device": DEVICE,
        "dtype": "float32",
    }
    return Engine.from_checkpoint(CHECKPOINT, EngineConfig(**{**defaults, **config}))


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(num_tokens)]


def run(engine: Engine) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.req_id, []).append(output)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    return outputs


def values(entries: list[_core.TokenLogprobs | None] | None) -> list[Any]:
    assert entries is not None
    return [None if entry is None else (entry.token_ids, entry.logprobs, entry.rank) for entry in entries]


def prompt_logprobs(outputs: list[EngineOutput]) -> list[Any]:
    first, *rest = outputs
    assert all(output.prompt_logprobs is None for output in rest)
    return values(first.prompt_logprobs)


def greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def test_a_prompt_sent_twice_has_the_same_prompt_logprobs() -> None:
    """D36: 33 tokens, 33 entries, the first None, both times, although the cache holds the prefix."""
    engine = make_engine(block_size=16, mamba_block_size=16)
    prompt = random_prompt(33)
    found = []
    for _ in range(2):
        engine.add_request("a", prompt, greedy(prompt_logprobs=1))
        found.append(prompt_logprobs(run(engine)["a"]))
    assert found[0] == found[1]
    assert len(found[0]) == 33
    assert found[0][0] is None
    assert [entry[0][0] for entry in found[0][1:]] == prompt[1:]
    engine.add_request("b", prompt, greedy())
    assert run(engine)["b"][0].num_cached_tokens == 32


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_prompt_logprobs_survive_chunks_and_a_preemption(async_scheduling: bool) -> None:
    """D89: 1000 tokens, a budget of 256, preempted after chunk 2: 1000 entries, those of the whole prompt."""
    prompt = random_prompt(1000)
    whole = make_engine(async_scheduling=False)
    whole.add_request("a", prompt, greedy(prompt_logprobs=0))
    expected = prompt_logprobs(run(whole)["a"])
    engine = make_engine(max_num_batched_tokens=256, async_scheduling=async_scheduling)
    engine.add_request("a", prompt, greedy(prompt_logprobs=0))
    engine.step()
    engine.step()
    assert engine.reset_prefix_cache(preempt_running=True)
    found = prompt_logprobs(run(engine)["a"])
    assert engine.stats().num_preemptions == 1
    assert len(found) == 1000
    assert found == expected


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_logprobs_do_not_depend_on_the_batch(async_scheduling: bool) -> None:
    prompt = random_prompt(40)
    found = []
    for num_others in (0, 5):
        engine = make_engine(async_scheduling=async_scheduling, max_num_batched_tokens=64)
        for i in range(num_others):
            engine.add_request(f"other {i}", random_prompt(11 * i + 1, seed=i), SamplingParams(max_tokens=3 + 4 * i))
        engine.add_request("a", prompt, SamplingParams(seed=7, max_tokens=12, logprobs=5))
        outputs = run(engine)["a"]
        assert all(len(output.logprobs or ()) == len(output.new_token_ids) for output in outputs)
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        tokens = [token for output in outputs for token in output.new_token_ids]
        assert [entry.token_ids[0] for entry in entries] == tokens
        assert len(tokens) == 12
        found.append(values(list(entries)))
    assert found[0] == found[1]


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_a_request_whose_logits_are_not_finite_fails_alone(tmp_path: Path, async_scheduling: bool) -> None:
    """A row of NaN in the embedding makes every prompt with that token fail, and no other."""
    shutil.copytree(CHECKPOINT.parent.parent / "qwen3_untied" / "fp32", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    header_bytes = int.from_bytes(data[:8], "little")
    embedding = json.loads(data[8 : 8 + header_bytes])["model.embed_tokens.weight"]
    row_bytes = 4 * embedding["shape"][1]
    begin = 8 + header_bytes + embedding["data_offsets"][0] + 5 * row_bytes
    data[begin : begin + row_bytes] = struct.pack("<f", float("nan")) * (row_bytes // 4)
    weights.write_bytes(data)

    engine = Engine.from_checkpoint(
        tmp_path / "model",
        EngineConfig(kv_cache_memory_bytes=64 << 20, async_scheduling=async_scheduling, device=DEVICE, dtype="float32"),
    )
    good = [token for token in random_prompt(40) if token != 5]
    engine.add_request("alone", good, greedy(max_tokens=8))
    expected = [token for output in run(engine)["alone"] for token in output.new_token_ids]
    engine.add_request("good", good, greedy(max_tokens=8))
    engine.add_request("bad", [*good[:20], 5], greedy(max_tokens=8))
    outputs = run(engine)
    assert (outputs["bad"][-1].finish_reason, outputs["bad"][-1].error) == (
        "error",
        "the logits of request 'bad' are not finite",
    )
    assert [token for output in outputs["good"] for token in output.new_token_ids] == expected


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_min_tokens_holds_off_every_stop(async_scheduling: bool) -> None:
    """D84, D85: all that could be chosen stops, of two kinds; exactly min_tokens come, of the ids that do not stop."""
    engine = make_engine(async_scheduling=async_scheduling)
    eos, stops = [1, 2], [3]
    params = greedy(max_tokens=10, min_tokens=3, stop_token_ids=stops, logit_bias=dict.fromkeys((1, 2, 3), 100.0))
    engine.add_request("a", random_prompt(20), params, eos_token_ids=eos)
    outputs = run(engine)["a"]
    tokens = [token for output in outputs for token in output.new_token_ids]
    assert outputs[-1].finish_reason == "stop"
    assert not {1, 2, 3} & set(tokens[:3])
    assert tokens[3] in {1, 2, 3}
    assert len(tokens) == 4


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("num_steps", range(5))
def test_abort_frees_everything_in_every_state(num_steps: int, async_scheduling: bool) -> None:
    """D77: waiting, in the middle of a prefill, decoding with a step in flight; the survivor is unharmed."""
    prompt = random_prompt(50)
    alone = make_engine(async_scheduling=False)
    alone.add_request("stays", prompt, greedy(max_tokens=12))
    expected = [token for output in run(alone)["stays"] for token in output.new_token_ids]
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=3, async_scheduling=async_scheduling)
    engine.add_request("stays", prompt, greedy(max_tokens=12))
    for i in range(4):
        engine.add_request(str(i), random_prompt(40, seed=i), greedy(max_tokens=50))
    outputs: list[EngineOutput] = []
    for _ in range(num_steps):
        outputs += engine.step()
    engine.abort(["0", "1", "2", "3", "unknown"])
    for later in run(engine).values():
        outputs += later
    assert {output.req_id: output.finish_reason for output in outputs if output.finish_reason} == {
        "stays": "length",
        **dict.fromkeys("0123", "abort"),
    }
    assert [t for output in outputs if output.req_id == "stays" for t in output.new_token_ids] == expected
