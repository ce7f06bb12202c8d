"""The engine's loop around a fake runner: what it refuses, what it survives, what it reports."""

from __future__ import annotations

import time
from typing import Any

import pytest
from deltaic.draft_policy import FixedDrafts
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.request import EngineOutput
from deltaic.sampling_params import SamplingParams
from deltaic.scheduler_config import SchedulerConfig
from fakes import VOCAB_SIZE, FakeCacheManager, FakeRunner, expected_tokens


def make_engine(
    num_blocks: int = 100, async_scheduling: bool = True, mamba_block_size: int = 0, **config: Any
) -> Engine:
    sizes = SchedulerConfig(
        **{
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 100,
            "block_size": 4,
            "mamba_block_size": mamba_block_size,
            "num_kv_cache_groups": 2 if mamba_block_size else 1,
            **config,
        }
    )
    runner = FakeRunner(4, sizes.max_num_seqs, sizes.max_num_batched_tokens, mamba_block_size > 0)
    cache = FakeCacheManager(num_blocks, 4, mamba_block_size, 8 if mamba_block_size else 0, sizes.max_num_seqs)
    return Engine(runner, cache, sizes, vocab_size=VOCAB_SIZE, async_scheduling=async_scheduling)


def greedy(max_tokens: int = 5, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def run(engine: Engine) -> dict[str, list[EngineOutput]]:
    """Step to the end; return the outputs of each request."""
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(2000):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            outputs.setdefault(output.req_id, []).append(output)
    assert not engine.has_unfinished_requests()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    assert stats.num_running == stats.num_waiting == 0
    return outputs


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return [token for output in outputs for token in output.new_token_ids]


# ---- the loop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_request_gives_its_tokens_and_one_finish(async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling, mamba_block_size=8)
    prompts = {str(i): [i, *range(20, 21 + 7 * i)] for i in range(6)}
    for req_id, prompt in prompts.items():
        engine.add_request(req_id, prompt, greedy())
    outputs = run(engine)
    for req_id, prompt in prompts.items():
        assert tokens_of(outputs[req_id]) == expected_tokens(prompt, 5)
        assert outputs[req_id][-1].finish_reason == "length"


def test_async_scheduling_enqueues_a_step_before_it_reads_the_one_before() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=3))
    assert engine.step() == []
    assert len(engine.runner.steps) == 1
    (output,) = engine.step()
    assert output.new_token_ids == expected_tokens([1, 2, 3], 1)
    assert len(engine.runner.steps) == 2


def test_without_async_scheduling_a_step_gives_its_own_tokens() -> None:
    engine = make_engine(async_scheduling=False)
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=3))
    (output,) = engine.step()
    assert output.new_token_ids == expected_tokens([1, 2, 3], 1)


class RecordedSteps(FixedDrafts):
    """Draft policy that keeps the times of steps."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seen: list[tuple[int, int, float]] = []

    def observe_step(self, num_running: int, num_drafts: int, seconds: float) -> None:
        self.seen.append((num_running, num_drafts, seconds))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_time_of_a_step_ends_where_its_tokens_are_read(async_scheduling: bool) -> None:
    """Of a runner whose steps run on when they are enqueued: since the step before ended, if that is later."""
    engine = make_engine(async_scheduling=async_scheduling, num_speculative_tokens=1)
    engine._runs_ahead = True
    policy = engine._scheduler.drafts = RecordedSteps()
    runner, seconds = engine.runner, 0.02
    enqueue = runner.sample_tokens_async

    class SlowOutput:
        def __init__(self) -> None:
            self.output = enqueue()

        def get_output(self) -> Any:
            time.sleep(seconds)
            return self.output.get_output()

    runner.sample_tokens_async = SlowOutput
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=8))
    started = time.perf_counter()
    run(engine)
    total = time.perf_counter() - started
    assert len(policy.seen) >= 5
    assert all((num_running, num_drafts) == (1, 0) and took >= seconds for num_running, num_drafts, took in policy.seen)
    assert sum(took for *_, took in policy.seen) <= total


def test_nothing_is_left_in_flight_when_the_last_request_ends() -> None:
    engine = make_engine()
    stop = expected_tokens([1, 2, 3], 2)[1]
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=9), eos_token_ids=[stop])
    outputs = run(engine)
    assert tokens_of(outputs["a"]) == expected_tokens([1, 2, 3], 2)
    assert len(engine.runner.steps) == 3  # one was scheduled ahead
    assert engine.step() == []


def test_a_step_without_requests_does_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert engine.runner.steps == []


def test_stats_count() -> None:
    engine = make_engine(num_blocks=1 + 10, async_scheduling=False)
    for req_id in "ab":
        engine.add_request(req_id, list(range(12)), greedy(max_tokens=12))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 0)
    assert stats.cache_usage == pytest.approx(8 / 10)
    outputs = run(engine)
    stats = engine.stats()
    assert stats.num_generated_tokens == 24
    assert stats.num_prompt_tokens == 24
    assert stats.num_preemptions > 0
    assert stats.cache.num_hit_tokens > 0
    assert {output.num_cached_tokens for output in outputs["b"]} == {0}


def test_the_prefix_cache_is_reset_when_idle_and_on_demand() -> None:
    """D30: with requests running it is refused, or they start again and give the same."""
    engine = make_engine()
    prompts = {str(i): list(range(i, i + 18)) for i in range(3)}
    for req_id, prompt in prompts.items():
        engine.add_request(req_id, prompt, greedy(max_tokens=10))
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(4):
        for output in engine.step():
            outputs.setdefault(output.req_id, []).append(output)
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(preempt_running=True)
    for req_id, rest in run(engine).items():
        outputs[req_id] += rest
    for req_id, prompt in prompts.items():
        assert tokens_of(outputs[req_id]) == expected_tokens(prompt, 10)
    assert engine.reset_prefix_cache()
    engine.add_request("again", prompts["0"], greedy())
    assert run(engine)["again"][0].num_cached_tokens == 0


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_alone_with_the_numbers() -> None:
    engine = make_engine(num_blocks=1 + 20)
    engine.add_request("good", [1, 2, 3], greedy())
    for prompt, message in (
        ([], "at least 1 token, got 0"),
        ([1] * 100, "the prompt has 100 tokens, max_model_len 100 leaves room for at most 99"),
        ([1] * 1000, "the prompt has 1000 tokens, max_model_len 100"),
        ([1, VOCAB_SIZE], r"token id 1000 is outside the vocabulary \[0, 1000\)"),
        ([-1, 2], r"token id -1 is outside the vocabulary \[0, 1000\)"),
        ([5279552648203111001], "token id 5279552648203111001 is outside"),
        ([1] * 90, "90 prompt tokens and up to 5 new ones need 24 blocks of 4 tokens, the cache has 20"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add_request("bad", prompt, greedy())
    for params, message in (
        (greedy(logit_bias={VOCAB_SIZE: 1.0}), "1000"),
        (greedy(allowed_token_ids=[VOCAB_SIZE]), "1000"),
        (greedy(stop_token_ids=[VOCAB_SIZE]), "1000"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add_request("bad", [1], params)
    with pytest.raises(TypeError):
        engine.add_request("bad", [1.5], greedy())  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'good' is in use"):
        engine.add_request("good", [1, 2, 3], greedy())
    assert tokens_of(run(engine)["good"]) == expected_tokens([1, 2, 3], 5)


def test_a_prompt_one_below_the_context_gives_one_token() -> None:
    engine = make_engine()
    engine.add_request("a", [1] * 99, greedy())
    (output,) = run(engine)["a"]
    assert (len(output.new_token_ids), output.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", "tpu", "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("device", "cuda:x", "device must be auto, cpu, cuda or cuda:N, got 'cuda:x'"),
        ("device", None, "device must be auto, cpu, cuda or cuda:N, got None"),
        ("dtype", "int8", "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype must be one of"),
        ("recurrent_state_dtype", "float16", "recurrent_state_dtype must be one of auto, float32, bfloat16"),
        ("enforce_eager", 1, "enforce_eager must be True or False, got 1"),
        ("max_model_len", 0, "max_model_len must be at least 1, got 0"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
        ("max_num_batched_tokens", -1, "max_num_batched_tokens must be at least 1, got -1"),
        ("kv_cache_memory_bytes", 0, "kv_cache_memory_bytes must be at least 1, got 0"),
        ("block_size", 0, "block_size must be at least 1, got 0"),
        ("block_size", 1.5, "block_size must be an integer, got 1.5"),
        ("block_size", None, "block_size must be an integer, got None"),
        ("mamba_block_size", None, "mamba_block_size must be an integer, got None"),
        ("speculative_tokens", None, "speculative_tokens must be an integer, got None"),
        ("num_threads", None, "num_threads must be an integer, got None"),
        ("num_threads", True, "num_threads must be an integer, got True"),
        ("num_threads", 5000, "num_threads must be at most 4096, got 5000"),
        ("long_prefill_token_threshold", None, "long_prefill_token_threshold must be an integer, got None"),
        ("mamba_block_size", 24, "mamba_block_size must be a multiple of block_size, got 24 and 16"),
        ("num_blocks", 1, "num_blocks must be at least 2, got 1"),
        ("num_threads", -1, "num_threads must be at least 0, got -1"),
        ("num_snapshot_slots", -1, "num_snapshot_slots must be at least 0, got -1"),
        ("long_prefill_token_threshold", -1, "long_prefill_token_threshold must be at least 0, got -1"),
        ("gpu_memory_utilization", 0.0, r"gpu_memory_utilization must be in \(0, 1\], got 0.0"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization must be in"),
        ("scheduling_policy", "lifo", "scheduling_policy must be one of fcfs, priority, got 'lifo'"),
        ("load_format", "gguf", "load_format must be one of"),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{field: value})


def test_chunked_prefill_off_needs_a_step_as_long_as_a_prompt() -> None:
    with pytest.raises(ValueError, match="at least max_model_len, got 64 and 100"):
        make_engine(enable_chunked_prefill=False)


# ---- what it survives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("where", ["check", "execute", "output"])
def test_a_step_that_raises_fails_its_requests_and_the_others_go_on(where: str, async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling, mamba_block_size=8, max_num_seqs=2)
    prompts = {req_id: [ord(req_id), *range(20)] for req_id in "abc"}
    for req_id, prompt in prompts.items():
        engine.add_request(req_id, prompt, greedy(max_tokens=8))
    getattr(engine.runner, f"fail_{where}").add(4)
    outputs = run(engine)
    for req_id in "ab":
        *good, bad = outputs[req_id]
        assert (bad.finish_reason, bad.error) == ("error", "RuntimeError: step 4 failed")
        got = [token for output in good for token in output.new_token_ids]
        assert got == expected_tokens(prompts[req_id], len(got))
        assert got
    assert tokens_of(outputs["c"]) == expected_tokens(prompts["c"], 8)
    # What the failed step had published is not hit.
    engine.add_request("a", prompts["a"], greedy(max_tokens=8))
    again = run(engine)["a"]
    assert again[0].num_cached_tokens == 0
    assert tokens_of(again) == expected_tokens(prompts["a"], 8)


def test_the_runner_hears_of_requests_that_ended_before_a_step_that_raised() -> None:
    engine = make_engine(async_scheduling=False, max_num_seqs=2)
    engine.add_request("short", [1, 2, 3], greedy(max_tokens=2))
    engine.add_request("long", [4, 5, 6], greedy(max_tokens=8))
    engine.runner.fail_check.add(2)  # the step that says that "short" has ended
    outputs = run(engine)
    assert outputs["long"][-1].finish_reason == "error"
    for req_id in "ab":
        engine.add_request(req_id, [7, ord(req_id)], greedy())
    outputs = run(engine)
    assert engine.runner.rows.keys() == {"a", "b"}
    for req_id in "ab":
        assert tokens_of(outputs[req_id]) == expected_tokens([7, ord(req_id)], 5)


def test_a_cache_that_refuses_what_must_fit_makes_nobody_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(FakeCacheManager, "admit", lambda *_: None)
    for req_id in "ab":
        engine.add_request(req_id, [1, 2, 3], greedy())
    outputs = run(engine)
    assert {req_id: outputs[req_id][0].finish_reason for req_id in "ab"} == {"a": "error", "b": "error"}


def test_requests_outside_a_failed_step_start_again() -> None:
    engine = make_engine(max_num_batched_tokens=4, async_scheduling=False)
    engine.add_request("a", list(range(4)), greedy(max_tokens=8))
    engine.add_request("b", list(range(50, 60)), greedy(max_tokens=8))
    engine.runner.fail_execute.add(0)
    outputs = run(engine)
    assert outputs["a"][0].finish_reason == "error"
    assert tokens_of(outputs["b"]) == expected_tokens(list(range(50, 60)), 8)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("defect", "message"), [("not_finite", "not finite"), ("gives_no_token", "gave no token")])
def test_a_request_without_a_token_fails_and_the_others_do_not(
    defect: str, message: str, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling, mamba_block_size=8)
    for req_id in "ab":
        engine.add_request(req_id, [1, 2, 3, 4, 5], greedy(max_tokens=8, seed=ord(req_id)))
    first = engine.step()
    getattr(engine.runner, defect).add("a")
    outputs = run(engine)
    for output in first:
        outputs[output.req_id].insert(0, output)
    assert outputs["a"][-1].finish_reason == "error"
    assert message in str(outputs["a"][-1].error)
    assert tokens_of(outputs["b"]) == expected_tokens([1, 2, 3, 4, 5], 8, seed=ord("b"))


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_in_any_state_gives_one_output_and_all_blocks_back(num_steps: int) -> None:
    engine = make_engine(max_num_batched_tokens=8, mamba_block_size=8)
    for req_id in "abc":
        engine.add_request(req_id, list(range(20)), greedy(max_tokens=30))
    for _ in range(num_steps):
        engine.step()
    engine.abort(["a", "b", "c", "unknown"])
    engine.abort(["a"])
    outputs = run(engine)
    assert {req_id: [output.finish_reason for output in outputs[req_id]] for req_id in "abc"} == {
        req_id: ["abort"] for req_id in "abc"
    }
