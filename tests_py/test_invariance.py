"""The same tokens, whatever else is in the batch and however the work is cut, with caches full of NaN at start-up.

On the CPU "the same" is exact, and on CUDA in f32. The reference runs each request alone: one request at a time, whole
prompts, no prefix cache, no scheduling ahead.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.sampling_params import SamplingParams
from device import DEVICE

PARITY = Path(__file__).parent / "data" / "parity"
# A dense hybrid, a mixture of experts with both kinds of layers, and full attention alone.
MODELS = ("qwen3_5/fp32", "qwen3_next/bf16", "qwen3_tied/fp32")
MAX_MODEL_LEN = 176


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0


def make_jobs(count: int, vocab_size: int, *, seed: int = 0, longest: int = 150) -> list[Job]:
    """Return requests of many lengths, every second one sampled with a seed, in every way that sampling has."""
    rng = random.Random(seed)
    jobs = []
    for i in range(count):
        num_tokens = rng.choice([1, 2, rng.randint(3, 40), rng.randint(41, longest)])
        prompt = tuple(rng.randrange(vocab_size) for _ in range(num_tokens))
        options: dict[str, Any] = {"temperature": 0.0}
        if i % 2:
            options = {"temperature": rng.choice([0.7, 1.0, 1.5]), "seed": rng.randrange(1 << 40)}
            options.update(rng.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}]))
        options.update(rng.choice([{}, {}, {"presence_penalty": 0.5, "repetition_penalty": 1.1}]))
        jobs.append(Job(prompt, SamplingParams(max_tokens=rng.randint(4, 20), **options), priority=rng.randint(0, 2)))
    return jobs


def make_engine(path: Path, **config: Any) -> Engine:
    defaults: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 8,
        "mamba_block_size": 16,
        "num_threads": 2,
        "poison_caches": True,
        "device": DEVICE,
        "dtype": "float32",  # in 16 bits what a request gives depends on the batch, as libraries choose kernels by it
    }
    return Engine.from_checkpoint(path, EngineConfig(**{**defaults, **config}))


def run(
    engine: Engine, jobs: list[Job], *, arrivals: random.Random | None = None, at_once: int | None = None
) -> list[list[int]]:
    """Return each job's tokens. Jobs arrive all at once, or over random steps; at most `at_once` are queued."""
    tokens: list[list[int]] = [[] for _ in jobs]
    num_added = num_finished = 0
    while num_finished < len(jobs):
        while num_added < len(jobs) and (at_once is None or num_added - num_finished < at_once):
            if arrivals is not None and engine.has_unfinished_requests() and arrivals.random() < 0.5:
                break
            job = jobs[num_added]
            engine.add_request(str(num_added), job.prompt, job.params, priority=job.priority)
            num_added += 1
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output.error
            tokens[int(output.req_id)] += output.new_token_ids
            num_finished += output.finish_reason is not None
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    assert all(len(got) == job.params.max_tokens for got, job in zip(tokens, jobs, strict=True))
    return tokens


def alone(path: Path, jobs: list[Job]) -> list[list[int]]:
    engine = make_engine(path, max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False)
    return run(engine, jobs, at_once=1)


@cache
def reference(model: str) -> tuple[list[Job], list[list[int]]]:
    jobs = make_jobs(32, 256)
    return jobs, alone(PARITY / model, jobs)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (engine, run)
    "batches of 2": ({"max_num_seqs": 2}, {"at_once": 2}),
    "batches of 8": ({"max_num_seqs": 8}, {"at_once": 8}),
    "batches of 32": ({"max_num_seqs": 32}, {}),
    "chunks of 7": ({"max_num_batched_tokens": 7}, {}),
    "chunks of 64": ({"max_num_batched_tokens": 64}, {}),
    "chunks of 100": ({"max_num_batched_tokens": 100, "long_prefill_token_threshold": 33}, {}),
    "no chunked prefill": ({"enable_chunked_prefill": False, "max_num_batched_tokens": 176}, {}),
    "small pool": ({"num_blocks": 1 + 44, "block_size": 4}, {}),
    "small pool, chunks, no prefix cache": (
        {"num_blocks": 1 + 44, "block_size": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
        {},
    ),
    "priority, small pool": ({"scheduling_policy": "priority", "num_blocks": 1 + 44, "block_size": 4}, {}),
    "one thread": ({"num_threads": 1}, {}),
}


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_tokens(model: str, case: str, async_scheduling: bool) -> None:
    jobs, expected = reference(model)
    config, options = CASES[case]
    engine = make_engine(PARITY / model, async_scheduling=async_scheduling, **config)
    is_small = "small pool" in case  # then all arrive at once, so that many run
    arrivals = None if is_small else random.Random(f"{model} {case}")
    assert run(engine, jobs, arrivals=arrivals, **options) == expected
    if is_small:
        assert engine.stats().num_preemptions >= 8


@pytest.mark.parametrize("model", MODELS)
def test_a_second_run_hits_the_prefix_cache_and_gives_the_same(model: str) -> None:
    jobs, expected = reference(model)
    engine = make_engine(PARITY / model)
    assert run(engine, jobs) == expected
    assert run(engine, jobs) == expected
    assert engine.stats().cache.num_hit_tokens > 500


def churn_jobs(count: int, seed: int) -> list[Job]:
    """Return requests that share a few prefixes, some of which are prefixes of others, and end differently."""
    rng = random.Random(seed)
    long = [tuple(rng.randrange(256) for _ in range(90)) for _ in range(3)]
    prefixes = [*long, *(prefix[:45] for prefix in long)]
    jobs = []
    for _ in range(count):
        own = tuple(rng.randrange(4) for _ in range(rng.randint(1, 3)))
        prompt = rng.choice(prefixes) + own * rng.randint(1, 12)
        options: dict[str, Any] = {"temperature": 0.0} if rng.random() < 0.5 else {"seed": rng.randrange(3)}
        jobs.append(Job(prompt, SamplingParams(max_tokens=rng.randint(1, 24), **options)))
    return jobs


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("model", MODELS)
def test_churn_in_a_small_prefix_cache_changes_no_token(model: str, async_scheduling: bool) -> None:
    jobs = churn_jobs(500, seed=1)
    without = make_engine(PARITY / model, enable_prefix_caching=False, async_scheduling=async_scheduling)
    expected = run(without, jobs, at_once=32)
    engine = make_engine(
        PARITY / model, num_blocks=1 + 70, num_snapshot_slots=9, max_num_seqs=8, async_scheduling=async_scheduling
    )
    got = run(engine, jobs, arrivals=random.Random(model), at_once=20)
    assert got == expected
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.cache.num_evicted_blocks > 100
    assert stats.cache.num_hit_tokens > 2000
    if "tied" not in model:
        assert stats.cache.num_evicted_snapshots > 20


@pytest.mark.parametrize("model", MODELS)
def test_two_equal_prompts_that_arrive_together(model: str) -> None:
    """D25: the second computes for itself what the first fills in the same step."""
    path = PARITY / model
    prompt = tuple(range(2 * 16 + 5))
    job = Job(prompt, SamplingParams(temperature=0.0, max_tokens=12))
    (expected,) = alone(path, [job])
    assert run(make_engine(path), [job, job, job]) == [expected] * 3


def second_turns(first: list[Job], answers: list[list[int]], rng: random.Random) -> list[Job]:
    """Return for each conversation the next prompt: the old one, the answer, a new turn."""
    return [
        Job(
            job.prompt + tuple(answer) + tuple(rng.randrange(256) for _ in range(rng.randint(1, 20))),
            SamplingParams(temperature=0.0, max_tokens=8),
        )
        for job, answer in zip(first, answers, strict=True)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_answers_that_cross_a_boundary_are_hit_by_the_next_turn(model: str) -> None:
    """D27: prompts end 1 to 5 tokens below a block boundary, decode crosses it, eight at a time."""
    rng = random.Random(27)
    path = PARITY / model
    first = []
    for i in range(40):
        num_tokens = rng.choice([16, 32, 48]) - 1 - i % 5
        prompt = tuple(rng.randrange(256) for _ in range(num_tokens))
        first.append(Job(prompt, SamplingParams(temperature=0.0, max_tokens=rng.randint(7, 40), ignore_eos=True)))
    engine = make_engine(path, max_num_seqs=8)
    answers = run(engine, first, arrivals=rng, at_once=8)
    assert answers == alone(path, first)
    second = second_turns(first, answers, rng)
    hits_before = engine.stats().cache.num_hit_tokens
    assert run(engine, second, arrivals=rng, at_once=8) == alone(path, second)
    assert engine.stats().cache.num_hit_tokens - hits_before >= 16 * len(second)


def tokens_and_hit(engine: Engine, job: Job) -> tuple[list[int], int]:
    """Run one request alone in an engine; return its tokens, and how many of its prompt's were hit."""
    before = engine.stats().cache.num_hit_tokens
    (tokens,) = run(engine, [job])
    return tokens, engine.stats().cache.num_hit_tokens - before


def test_a_prompt_whose_state_was_evicted_starts_from_nothing() -> None:
    """D31: its K/V blocks are still cached, and no hit: neither they nor what is in the slot stand for its state."""
    path = PARITY / MODELS[0]
    rng = random.Random(31)
    jobs = [
        Job(tuple(rng.randrange(256) for _ in range(37)), SamplingParams(temperature=0.0, max_tokens=8))
        for _ in range(2)
    ]
    expected = alone(path, jobs)
    engine = make_engine(path, num_snapshot_slots=1, num_blocks=200)
    assert tokens_and_hit(engine, jobs[0]) == (expected[0], 0)
    assert tokens_and_hit(engine, jobs[0]) == (expected[0], 32)
    assert tokens_and_hit(engine, jobs[1]) == (expected[1], 0)
    assert engine.stats().cache.num_evicted_blocks == 0
    assert engine.stats().cache.num_evicted_snapshots > 0
    assert tokens_and_hit(engine, jobs[0]) == (expected[0], 0)


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_that_parts_from_a_running_one_within_a_block(model: str) -> None:
    """D34: 80 tokens are shared, 90 and 90 computed; the first decodes on while the second hits and writes its own."""
    path = PARITY / model
    rng = random.Random(34)
    first = tuple(rng.randrange(256) for _ in range(90))
    second = first[:80] + tuple(rng.randrange(256) for _ in range(10))
    jobs = [Job(prompt, SamplingParams(temperature=0.0, max_tokens=40)) for prompt in (first, second)]
    expected = alone(path, jobs)
    engine = make_engine(path, block_size=16, mamba_block_size=64)
    tokens: dict[str, list[int]] = {"0": [], "1": []}
    engine.add_request("0", first, jobs[0].params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.req_id] += output.new_token_ids
        if len(tokens["0"]) == 5 and engine.stats().cache.num_queries == 1:
            engine.add_request("1", second, jobs[1].params)
    assert list(tokens.values()) == expected
    assert engine.stats().cache.num_hit_tokens == (80 if "tied" in model else 64)
    # Nor did the second write what is cached of the first.
    assert tokens_and_hit(engine, jobs[0])[0] == expected[0]


def test_a_tail_of_one_token_behind_a_hit() -> None:
    """D21: prompts of 64 k + 1 and 16 k + 1 tokens, asked again: one token is left to compute, and it is the same."""
    path = PARITY / MODELS[0]
    rng = random.Random(21)
    engine = make_engine(path, max_model_len=800, num_blocks=1000, num_snapshot_slots=100)
    for length in [64 * k + 1 for k in range(1, 13)] + [16 * k + 1 for k in range(1, 13)]:
        job = Job(tuple(rng.randrange(256) for _ in range(length)), SamplingParams(temperature=0.0, max_tokens=3))
        tokens, num_hit = tokens_and_hit(engine, job)
        assert num_hit == 0
        assert tokens_and_hit(engine, job) == (tokens, length - 1)


def states_after(engine: Engine, prompt: tuple[int, ...]) -> list[tuple[bytes, bytes]]:
    """Run a prompt for one token; return the conv window and the recurrent state of every layer."""
    engine.add_request("states", prompt, SamplingParams(temperature=0.0, max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    slot = engine.runner.gdn_state_slots["states"]
    return [
        (layer.conv.numpy()[slot].tobytes(), layer.temporal.numpy()[slot].tobytes())
        for layer in engine.runner.gdn_state
    ]


def test_a_hit_restores_the_convolution_window_with_the_state() -> None:
    """D38: bit for bit what the same prompt computes from its first token."""
    path = PARITY / MODELS[0]
    prompt = tuple(random.Random(38).randrange(256) for _ in range(2 * 16 + 1))
    engine = make_engine(path)
    computed = states_after(engine, prompt)
    assert engine.stats().cache.num_hit_tokens == 0
    restored = states_after(engine, prompt)
    assert engine.stats().cache.num_hit_tokens == 32
    assert restored == computed


def random_config(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([4, 8, 16])
    has_prefix_cache = rng.random() < 0.8
    return {
        "max_num_seqs": rng.choice([1, 2, 3, 8, 32]),
        "max_num_batched_tokens": rng.choice([1, 5, 7, 16, 17, 64, 100, 1000]),
        "long_prefill_token_threshold": rng.choice([0, 0, 9]),
        "block_size": block_size,
        "mamba_block_size": rng.choice([16, 32, 64]),
        "num_blocks": rng.choice([None, 1 + MAX_MODEL_LEN // block_size]),
        "num_snapshot_slots": rng.choice([None, 0, 1, 5]) if has_prefix_cache else None,
        "enable_prefix_caching": has_prefix_cache,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": rng.random() < 0.7,
        "num_threads": rng.choice([1, 2, 3]),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", sorted(str(path.parent.relative_to(PARITY)) for path in PARITY.glob("*/*/config.json"))
)
def test_the_same_tokens_at_length(model: str) -> None:
    """Every checkpoint, random engines, random arrivals, prompts that share prefixes and prompts that do not."""
    rng = random.Random(model)
    path = PARITY / model
    for seed in range(2):
        jobs = make_jobs(24, 256, seed=seed) + churn_jobs(24, seed)
        expected = alone(path, jobs)
        for _ in range(12):
            config = random_config(rng)
            engine = make_engine(path, **config)
            order = rng.sample(range(len(jobs)), len(jobs))
            got = run(engine, [jobs[i] for i in order], arrivals=rng, at_once=rng.choice([2, 8, 48]))
            assert got == [expected[i] for i in order], config
            reset = engine.reset_prefix_cache()
            assert reset


# ---- the bundled model ---------------------------------------------------------------------------------------------


def random_prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(4000) for _ in range(num_tokens))


def test_the_bundled_model_gives_the_same_in_a_batch_with_chunks_and_preemptions(default_model: Path) -> None:
    jobs = make_jobs(16, 4000, seed=3, longest=90)
    expected = alone(default_model, jobs)
    # Without drafts the number of preemptions does not depend on times.
    engine = make_engine(
        default_model, num_blocks=1 + 44, block_size=4, max_num_batched_tokens=64, speculative_tokens=0
    )
    assert run(engine, jobs) == expected
    assert engine.stats().num_preemptions >= 3


def generate(engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], int]:
    """Return the tokens of one request, and how many of its prompt's came from the prefix cache."""
    engine.add_request("one", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    tokens: list[int] = []
    num_cached_tokens = -1
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output.error
            tokens += output.new_token_ids
            num_cached_tokens = output.num_cached_tokens
    return tokens, num_cached_tokens


def make_chat_engine(path: Path, **config: Any) -> Engine:
    defaults = {"kv_cache_memory_bytes": 256 << 20, "poison_caches": True, "device": DEVICE, "dtype": "float32"}
    return Engine.from_checkpoint(path, EngineConfig(**{**defaults, **config}))


def test_a_second_chat_turn_computes_what_is_new_and_at_most_one_mamba_block(default_model: Path) -> None:
    engine = make_chat_engine(default_model, max_model_len=4096)
    first = random_prompt(3000, seed=0)
    answer, num_cached = generate(engine, first, max_tokens=40)
    assert num_cached == 0
    second = first + tuple(answer) + random_prompt(200, seed=1)
    tokens, num_cached = generate(engine, second, max_tokens=8)
    num_new = 200 + 1  # the last token of the answer was never computed
    assert len(second) - num_cached <= num_new + 256
    without = make_chat_engine(default_model, max_model_len=4096, enable_prefix_caching=False)
    assert generate(without, second, max_tokens=8) == (tokens, 0)


def test_an_answer_that_passes_a_boundary_is_cached_up_to_it(default_model: Path) -> None:
    engine = make_chat_engine(default_model)
    first = random_prompt(250, seed=2)
    answer, _ = generate(engine, first, max_tokens=300)
    second = first + tuple(answer) + random_prompt(20, seed=3)
    tokens, num_cached = generate(engine, second, max_tokens=8)
    assert num_cached == 512
    without = make_chat_engine(default_model, enable_prefix_caching=False)
    assert generate(without, second, max_tokens=8) == (tokens, 0)


def test_the_third_of_three_prompts_hits_what_they_share(default_model: Path) -> None:
    engine = make_chat_engine(default_model)
    without = make_chat_engine(default_model, enable_prefix_caching=False)
    shared = random_prompt(300, seed=4)
    cached = []
    for i in range(3):
        prompt = shared + random_prompt(250, seed=10 + i)
        tokens, num_cached = generate(engine, prompt, max_tokens=8)
        assert generate(without, prompt, max_tokens=8) == (tokens, 0)
        cached.append(num_cached)
    assert cached[2] >= 300 - 256
    assert cached == [0, 0, 256]
