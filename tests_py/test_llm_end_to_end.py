"""The offline interface on the bundled model."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltaic import LLM, SamplingParams
from deltaic.checkpoint import read_json

END_OF_TEXT, IM_END = 4093, 4095
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=64 << 20, poison_caches=True)


@pytest.fixture(scope="module")
def golden(default_model: Path) -> list[dict[str, Any]]:
    return list(read_json(default_model / "golden.json")["prompts"])


def test_greedy_tokens_are_the_golden_ones(llm: LLM, golden: list[dict[str, Any]]) -> None:
    outputs = llm.generate([case["prompt"] for case in golden], replace(GREEDY, max_tokens=40, ignore_eos=True))
    for case, output in zip(golden, outputs, strict=True):
        assert output.prompt_token_ids == case["ids"]
        assert output.outputs[0].token_ids == case["greedy"][:40]


def test_streamed_text_is_the_generated_text(llm: LLM) -> None:
    for params in (GREEDY, SamplingParams(seed=1, max_tokens=40), replace(GREEDY, stop=["lived", " her"])):
        whole = llm.generate("Once upon a time", params)[0]
        assert "".join(llm.stream("Once upon a time", params)) == whole.text
        assert whole.text


def test_answers_to_messages(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(messages, GREEDY)[0]
    assert "Paris" in output.text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == IM_END
    assert "".join(llm.stream(messages, GREEDY)) == output.text


def test_completions_of_a_seed_repeat_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=16)
    first = [completion.token_ids for completion in llm.generate("Once", params)[0].outputs]
    second = [completion.token_ids for completion in llm.generate(["The king", "Once"], params)[1].outputs]
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3
    assert llm.generate("Once", replace(params, n=1))[0].outputs[0].token_ids == first[0]


def test_logprobs_add_up_and_belong_to_the_tokens(llm: LLM) -> None:
    completion = llm.generate("Once upon a time", replace(GREEDY, logprobs=3))[0].outputs[0]
    assert completion.logprobs is not None
    assert completion.cumulative_logprob is not None
    chosen = [entry[token] for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert math.isclose(completion.cumulative_logprob, sum(entry.logprob for entry in chosen), rel_tol=1e-6)
    assert all(entry.rank == 1 for entry in chosen)
    assert all(len(entry) == 3 for entry in completion.logprobs)
    assert "".join(entry.decoded_token or "" for entry in chosen) == completion.text


def test_prompt_logprobs_are_the_same_with_a_cached_prefix(llm: LLM) -> None:
    """D36: as many entries as prompt tokens each time, the first None."""
    prompt = {"prompt_token_ids": [965, 594, 258, 475, 11, 415, 298, 258] * 4 + [475]}
    llm.generate(prompt, GREEDY)
    first, second = (llm.generate(prompt, replace(GREEDY, prompt_logprobs=1))[0].prompt_logprobs for _ in range(2))
    assert first is not None
    assert len(first) == 33
    assert first[0] is None
    assert first == second


def test_prompt_logprobs_survive_chunks_and_preemption() -> None:
    """D89: each prompt token has its entry, once, though prompts are cut and requests start again."""
    # Room for two prompts: the first needs another block when it has written three tokens, the second is in the
    # middle of its prompt then, and gives its blocks back.
    pool = LLM(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=640, num_blocks=65, num_snapshot_slots=4)
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(4000) for _ in range(510)]} for _ in range(3)]
    params = replace(GREEDY, prompt_logprobs=1, max_tokens=20, ignore_eos=True)
    together = pool.generate(prompts, params)
    assert pool.get_metrics()["num_preemptions"] > 0
    for prompt, output in zip(prompts, together, strict=True):
        alone = pool.generate(prompt, params)[0]
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 510
        assert output.prompt_logprobs == alone.prompt_logprobs
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("stops", [{}, {"stop_token_ids": [100]}])
def test_min_tokens_come_before_any_end(llm: LLM, stops: dict[str, Any]) -> None:
    """D84: both end-of-sequence ids are forced and masked; three tokens come, then the end."""
    bias = dict.fromkeys([END_OF_TEXT, IM_END, *stops.get("stop_token_ids", [])], 100.0)
    params = replace(GREEDY, min_tokens=3, max_tokens=10, logit_bias=bias, **stops)
    completion = llm.generate("Once", params)[0].outputs[0]
    assert len(completion.token_ids) == 4
    assert completion.finish_reason == "stop"
    assert set(completion.token_ids[:3]).isdisjoint(bias)


@pytest.mark.parametrize("token", [END_OF_TEXT, IM_END, 100])
def test_stop_ids_of_the_model_and_of_the_request_both_stop(llm: LLM, token: int) -> None:
    """D103."""
    params = replace(GREEDY, stop_token_ids=[100], allowed_token_ids=[token])
    completion = llm.generate("Once", params)[0].outputs[0]
    assert completion.token_ids == [token]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 100 if token == 100 else None)


def test_bad_words_never_come(llm: LLM) -> None:
    words = ["June", "girl", "berries"]
    text = llm.generate("Once upon a time", replace(GREEDY, max_tokens=60, bad_words=words))[0].text
    assert text
    assert not any(word in text for word in words)


@pytest.mark.parametrize(("num_prompt", "num_output"), [(4095, 1), (4094, 2)])
def test_context_ends_the_text(llm: LLM, num_prompt: int, num_output: int) -> None:
    """D104: the longest prompt leaves room for one token, whatever max_tokens says."""
    prompt = {"prompt_token_ids": [258] * num_prompt}
    completion = llm.generate(prompt, replace(GREEDY, max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (num_output, "length")


def test_bad_prompt_leaves_the_engine_alive(llm: LLM) -> None:
    before = llm.generate("Once", GREEDY)[0].text
    for bad in ("", {"prompt_token_ids": [4096]}, {"prompt_token_ids": [1] * 4096}):
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            llm.generate(["Once", bad], GREEDY)
    assert llm.generate("Once", GREEDY)[0].text == before
    assert llm.get_metrics()["num_requests_running"] == 0


def test_left_stream_frees_what_it_held(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", replace(GREEDY, max_tokens=500, ignore_eos=True))
    next(stream)
    assert not llm.reset_prefix_cache()
    del stream
    llm.generate("Once", GREEDY)
    assert llm.get_metrics()["kv_cache_usage"] == 0
    assert llm.reset_prefix_cache()


def test_second_turn_finds_the_first_in_the_cache(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [965, 594, 258, 475, 11, 415, 298] * 90}
    first = llm.generate(prompt, GREEDY)[0]
    second = llm.generate(prompt, GREEDY)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= 256
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.get_metrics()["prefix_cache_hits"] >= 256
