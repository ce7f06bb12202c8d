"""Drafts change the speed, never a token: each request gives what it gives without them, exactly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from deltaic import _core
from deltaic.engine_config import EngineConfig
from deltaic.llm import LLM
from deltaic.sampling_params import SamplingParams
from device import DEVICE
from test_invariance import Job, make_engine, make_jobs, run
from test_parity import load_golden, prompts_of
from test_parity_drafts import WITH_MODULE, each_checkpoint

SMALL = WITH_MODULE[-1]  # dense, float32


def vocab_of(checkpoint: Path) -> int:
    vocab: int = _core.load_model_config(checkpoint).vocab_size
    return vocab


def expected_of(checkpoint: Path, jobs: list[Job]) -> list[list[int]]:
    """Return what each job gives alone and without drafts."""
    engine = make_engine(checkpoint, speculative_tokens=0, async_scheduling=False, enable_prefix_caching=False)
    return run(engine, jobs, at_once=1)


def greedy_jobs(prompts: list[list[int]], max_tokens: int = 32) -> list[Job]:
    return [Job(tuple(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens)) for prompt in prompts]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@each_checkpoint
def test_greedy_tokens_are_the_golden_ones(checkpoint: Path, num_drafts: int, async_scheduling: bool) -> None:
    """D58"""
    golden = load_golden(checkpoint)
    jobs = greedy_jobs(prompts_of(golden))
    expected = [golden[f"greedy_{i}"].tolist() for i in range(len(jobs))]
    assert expected == expected_of(checkpoint, jobs)
    for at_once in (1, None):
        engine = make_engine(checkpoint, speculative_tokens=num_drafts, async_scheduling=async_scheduling)
        assert run(engine, jobs, at_once=at_once) == expected
        drafts = engine.stats().drafts
        assert drafts.num_drafts > 0
        assert drafts.num_draft_tokens > drafts.num_drafts * (num_drafts - 1)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 3, "auto"])
def test_all_kinds_of_requests_give_the_same_tokens(num_drafts: int | str, async_scheduling: bool) -> None:
    """Greedy and seeded, penalties and filters, over random steps; chunked prompts beside drafts."""
    jobs = make_jobs(24, vocab_of(SMALL), seed=4)
    expected = expected_of(SMALL, jobs)
    engine = make_engine(
        SMALL, speculative_tokens=num_drafts, async_scheduling=async_scheduling, max_num_batched_tokens=50
    )
    assert run(engine, jobs, arrivals=random.Random(7)) == expected
    assert run(engine, jobs, arrivals=random.Random(8)) == expected  # now with hits


@pytest.mark.parametrize("async_scheduling", [False, True])
@each_checkpoint
def test_forced_preemptions_change_nothing(checkpoint: Path, async_scheduling: bool) -> None:
    jobs = make_jobs(12, vocab_of(checkpoint), seed=5, longest=60)
    engine = make_engine(
        checkpoint,
        speculative_tokens=3,
        async_scheduling=async_scheduling,
        max_model_len=88,
        num_blocks=20,
        max_num_seqs=6,
        kv_cache_memory_bytes=64 << 20,
    )
    assert run(engine, jobs) == expected_of(checkpoint, jobs)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("mamba_block_size", [8, 16])
def test_second_turns_hit_what_was_generated_with_drafts(mamba_block_size: int, async_scheduling: bool) -> None:
    rng = random.Random(3)
    engine = make_engine(
        SMALL,
        speculative_tokens=3,
        async_scheduling=async_scheduling,
        mamba_block_size=mamba_block_size,
        num_snapshot_slots=40,
        num_blocks=200,
    )
    first = greedy_jobs([[rng.randrange(256) for _ in range(length)] for length in range(5, 21)], max_tokens=40)
    answers = run(engine, first)
    turns = greedy_jobs(
        [[*job.prompt, *answer, 1, 2, 3] for job, answer in zip(first, answers, strict=True)], max_tokens=24
    )
    before = engine.stats().cache.num_hit_tokens
    assert run(engine, turns) == expected_of(SMALL, turns)
    hits = engine.stats().cache.num_hit_tokens - before
    # Each turn hits up to the last boundary that the answer came to.
    assert hits == sum((len(turn.prompt) - 4) // mamba_block_size * mamba_block_size for turn in turns)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("length", [4, 16 + 4, 48 + 4])
def test_a_part_of_a_prompt_as_long_as_a_verified_step(length: int, async_scheduling: bool) -> None:
    """D42: 1 + S tokens behind a boundary, beside running decodes; and again, with a hit of what they left."""
    rng = random.Random(42)
    engine = make_engine(
        SMALL,
        speculative_tokens=3,
        async_scheduling=async_scheduling,
        mamba_block_size=16,
        block_size=4,
        num_snapshot_slots=40,
        num_blocks=200,
    )
    long = greedy_jobs([[rng.randrange(256) for _ in range(9)] for _ in range(2)], max_tokens=100)
    (job,) = greedy_jobs([[rng.randrange(256) for _ in range(length)]], max_tokens=12)
    jobs = [*long, job, job]
    expected = expected_of(SMALL, jobs)
    tokens: list[list[int]] = [[] for _ in jobs]
    num_added = 0
    while num_added < len(jobs) or engine.has_unfinished_requests():
        is_due = (True, True, len(tokens[0]) > 8, len(tokens[2]) == 12)[min(num_added, 3)]
        if num_added < len(jobs) and is_due:
            engine.add_request(str(num_added), list(jobs[num_added].prompt), jobs[num_added].params)
            num_added += 1
        for output in engine.step():
            tokens[int(output.req_id)] += output.new_token_ids
    assert tokens == expected
    assert len(tokens[0]) > 50
    assert engine.stats().cache.num_hit_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_log_probabilities_are_those_without_drafts(num_logprobs: int, async_scheduling: bool) -> None:
    """D88: one entry a token, beside requests without and parts of prompts."""

    def logprobs(num_drafts: int) -> dict[str, list[Any]]:
        engine = make_engine(
            SMALL, speculative_tokens=num_drafts, async_scheduling=async_scheduling, max_num_batched_tokens=24
        )
        for i in range(6):
            params = SamplingParams(
                temperature=0.0, max_tokens=20, logprobs=None if i % 3 == 2 else num_logprobs, prompt_logprobs=1
            )
            engine.add_request(str(i), [7 * i + j for j in range(3 + 9 * i)], params)
        entries: dict[str, list[Any]] = {str(i): [] for i in range(6)}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if int(output.req_id) % 3 == 2:
                    assert output.logprobs is None
                else:
                    assert len(output.logprobs or []) == len(output.new_token_ids)
                for entry in [*(output.logprobs or []), *(output.prompt_logprobs or [])]:
                    if entry is not None:
                        entries[output.req_id].append((entry.token_ids, entry.logprobs, entry.rank))
        return entries

    with_drafts, without = logprobs(3), logprobs(0)
    if DEVICE == "cpu":
        assert with_drafts == without
    for req_id, entries in without.items():  # on CUDA sums of attention depend on how many keys a step sees
        for (ids, values, rank), (wanted_ids, wanted, wanted_rank) in zip(with_drafts[req_id], entries, strict=True):
            assert (ids, rank) == (wanted_ids, wanted_rank)
            assert values == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_token_that_stops_a_request_is_its_last(default_model: Path, async_scheduling: bool) -> None:
    """D91: by a model whose drafts behind the stop are often right."""
    golden = json.loads((default_model / "golden.json").read_text())["prompts"][0]
    prompt, greedy = golden["ids"], golden["greedy"]
    engine = make_engine(default_model, speculative_tokens=3, async_scheduling=async_scheduling)
    num_dropped = 0
    for position in range(1, 20):
        before = engine.stats().drafts.num_accepted_tokens + engine.stats().drafts.num_drafts
        params = SamplingParams(temperature=0.0, max_tokens=32, stop_token_ids=[greedy[position]], logprobs=0)
        engine.add_request("a", prompt, params)
        tokens, num_logprobs = [], 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens += output.new_token_ids
                num_logprobs += len(output.logprobs or [])
        assert tokens == greedy[: greedy.index(greedy[position]) + 1]
        assert num_logprobs == len(tokens)
        num_verified = engine.stats().drafts.num_accepted_tokens + engine.stats().drafts.num_drafts - before
        num_dropped += num_verified - (len(tokens) - 1)  # the first token came of the prefill
    assert num_dropped > 0


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_the_bundled_model_gives_the_same_text_and_accepts_drafts(default_model: Path, num_drafts: int) -> None:
    """D58: at temperature 0 with drafts as without, for 200 prompts in one queue."""
    rng = random.Random(1)
    openings = ["Once upon a time", "One day", "There was a", "The little", "In the morning", "Tom and", "Lily saw"]
    words = ["dog", "cat", "bird", "tree", "ball", "house", "girl", "mouse", "sun", "rain", "cake", "frog", "hat"]
    prompts = [f"{rng.choice(openings)} {rng.choice(words)} and the {rng.choice(words)}" for _ in range(200)]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    count = 200 if num_drafts == 2 else 40
    texts = {}
    for drafts in (0, num_drafts):
        llm = LLM(
            speculative_tokens=drafts,
            max_model_len=256,
            num_threads=2,
            dtype="float32",
            kv_cache_memory_bytes=256 << 20,  # of a GPU that other tests use too
        )
        texts[drafts] = [output.outputs[0].token_ids for output in llm.generate(prompts[:count], params)]
        metrics = llm.get_metrics()
        if drafts:
            assert metrics["spec_decode_mean_accepted_length"] > 1 + 0.3 * num_drafts
            assert metrics["spec_decode_num_accepted_tokens_pos_0"] > 0
        else:
            assert metrics["spec_decode_num_drafts"] == 0
    assert texts[0] == texts[num_drafts]


def test_auto_drafts_where_the_checkpoint_has_the_module() -> None:
    assert make_engine(SMALL).runner.options.num_speculative_tokens == 2
    assert make_engine(SMALL, speculative_tokens=0).runner.options.num_speculative_tokens == 0
    without = SMALL.parents[1] / "qwen3_5" / "fp32"
    assert make_engine(without).runner.options.num_speculative_tokens == 0


def test_what_cannot_be_drafted_is_refused_by_name() -> None:
    without = SMALL.parents[1] / "qwen3_5" / "fp32"
    with pytest.raises(ValueError, match="speculative_tokens is 2, but the checkpoint has no draft module"):
        make_engine(without, speculative_tokens=2)
    for wrong, message in (
        (-1, "at least 0, got -1"),
        (9, "at most 8, got 9"),
        ("two", "'auto' or a number"),
        (1.5, ""),
    ):
        with pytest.raises(ValueError, match=f"speculative_tokens must be .*{message}"):
            EngineConfig(speculative_tokens=wrong)  # type: ignore[arg-type]


class RandomDrafts:
    """Another number for every step, now and then none for long."""

    def __init__(self) -> None:
        self._rng = random.Random(2)
        self._num_off = 0

    def choose(self, num_running: int) -> int:
        if self._num_off == 0 and self._rng.random() < 0.05:
            self._num_off = self._rng.choice([5, 90])
        self._num_off = max(self._num_off - 1, 0)
        return 0 if self._num_off else self._rng.randrange(4)

    def observe_step(self, num_running: int, num_drafts: int, seconds: float) -> None:
        pass

    def observe_acceptance(self, num_drafts: int, num_accepted: int) -> None:
        pass


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_number_of_drafts_may_change_with_every_step(async_scheduling: bool) -> None:
    jobs = make_jobs(40, vocab_of(SMALL), seed=11)
    jobs += greedy_jobs([[3, 5, 7 + i] for i in range(4)], max_tokens=150)
    engine = make_engine(SMALL, speculative_tokens=3, async_scheduling=async_scheduling, max_num_batched_tokens=60)
    engine._scheduler.drafts = RandomDrafts()
    expected = expected_of(SMALL, jobs)
    assert run(engine, jobs, arrivals=random.Random(7)) == expected
    assert run(engine, jobs, arrivals=random.Random(8)) == expected  # now with hits of what was and was not drafted for
    assert engine.stats().drafts.num_accepted_tokens > 0


def test_the_bundled_model_drafts_its_golden_tokens(default_model: Path) -> None:
    golden = json.loads((default_model / "golden.json").read_text())["prompts"]
    runner = make_engine(default_model, speculative_tokens=1).runner
    num_right = num_drafts = 0
    for prompt in golden:
        ids, greedy, drafts = prompt["ids"], prompt["greedy"], prompt["mtp_draft"]
        for i in range(0, 40, 5):
            (token,), _, _ = runner.dense_draft(ids + greedy[:i], greedy[i], 1)
            num_drafts += 1
            num_right += token == drafts[i]
    assert num_right == num_drafts
