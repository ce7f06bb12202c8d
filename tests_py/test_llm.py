"""The offline interface on an engine that says what a test tells it to."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltaic import text_engine
from deltaic.llm import LLM
from deltaic.outputs import RequestOutput
from deltaic.sampling_params import RequestOutputKind, SamplingParams
from deltaic.tokenizer import Tokenizer
from scripted_engine import ScriptedEngine

IM_END, END_OF_TEXT = 4095, 4093
LONG = SamplingParams(temperature=0, max_tokens=1000)
Maker = Callable[..., tuple[LLM, ScriptedEngine]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Maker:
    """Make an LLM whose engine says a text, or what a script says."""

    def make(says: Any = "", *, model: Path | None = None, seed: int | None = None, **options: Any) -> Any:
        script = says if callable(says) else lambda *_: tokenizer.encode(says) if isinstance(says, str) else says
        engine = ScriptedEngine(script, **options)

        class Engine:
            @staticmethod
            def from_checkpoint(path: Path, config: object) -> ScriptedEngine:
                return engine

        monkeypatch.setattr(text_engine, "Engine", Engine)
        return LLM(model, seed=seed), engine

    return make


def replace(params: SamplingParams, **fields: Any) -> SamplingParams:
    return dataclasses.replace(params, **fields)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_modle_len", "LLM has no option 'max_modle_len': did you mean 'max_model_len'?"),
        ("seeed", "LLM has no option 'seeed': did you mean 'seed'?"),
        ("zzz", "LLM has no option 'zzz': there are async_scheduling, block_size, "),
    ],
)
def test_option_that_is_none_is_named(name: str, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        LLM(**{name: 3})


# ---- prompts ----


def test_outputs_come_in_the_order_of_the_prompts(make: Maker, tokenizer: Tokenizer) -> None:
    """The first prompt is the last to finish."""
    llm, _ = make(lambda _, prompt: [*prompt, *prompt] if len(prompt) > 1 else [7])
    ids = tokenizer.encode("Once upon a time")
    outputs = llm.generate(["Once upon a time", {"prompt_token_ids": [5]}, {"prompt": "The end"}], LONG)
    assert [output.prompt for output in outputs] == ["Once upon a time", None, "The end"]
    assert outputs[0].prompt_token_ids == ids
    assert outputs[0].text == "Once upon a timeOnce upon a time"
    assert outputs[1].outputs[0].token_ids == [7]
    assert outputs[2].text == "The endThe end"
    assert all(output.finished for output in outputs)


def test_single_prompt_and_no_prompt(make: Maker) -> None:
    llm, _ = make("fine")
    assert [output.text for output in llm.generate("one", LONG)] == ["fine"]
    assert [output.text for output in llm.generate({"prompt_token_ids": (1, 2)}, LONG)] == ["fine"]
    assert llm.generate([], LONG) == []


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", ValueError, "at least 1 token, got 0"),
        ({"prompt_token_ids": []}, ValueError, "at least 1 token, got 0"),
        ({"prompt_token_ids": [4096]}, ValueError, r"prompt_token_ids\[0\] .*vocab_size = 4096\), got 4096"),
        ({"prompt_token_ids": [1, -1]}, ValueError, r"prompt_token_ids\[1\] .*got -1"),
        ({"prompt_token_ids": [5279552648203111001]}, ValueError, "got 5279552648203111001"),
        ({"prompt_token_ids": ["1"]}, TypeError, r"prompt_token_ids\[0\] must be an integer"),
        ({"prompt_token_ids": [1.0]}, TypeError, "must be an integer"),
        ({"prompt_token_ids": [True]}, TypeError, "must be an integer"),
        ({"prompt_token_ids": "12"}, TypeError, "must be a list"),
        ({"prompt_token_ids": 12}, TypeError, "must be a list"),
        ({"prompt": 5}, TypeError, "a prompt must be a string"),
        ({"text": "x"}, TypeError, "'text'"),
        (5, TypeError, "a prompt must be a string or .*got int"),
        (None, TypeError, "got NoneType"),
        ("a\ud800", ValueError, "lone surrogate"),
    ],
)
def test_bad_prompt_is_named_before_anything_runs(make: Maker, prompt: Any, error: type[Exception], words: str) -> None:
    """D106 among them: ids outside the vocabulary."""
    llm, engine = make("fine")
    with pytest.raises(error, match=r"prompts\[1\]: .*" + words) as caught:
        llm.generate(["good", prompt, "good"], LONG)
    assert "\n" not in str(caught.value)
    assert engine.seen == {}
    assert llm.generate("good", LONG)[0].text == "fine"


def test_single_bad_prompt_has_no_index(make: Maker) -> None:
    llm, _ = make()
    with pytest.raises(ValueError, match=r"^the prompt must hold"):
        llm.generate("", LONG)
    with pytest.raises(TypeError, match="prompts must be a list"):
        llm.generate(5, LONG)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [100, 101, 1000])
def test_prompt_as_long_as_the_context_names_both_lengths(make: Maker, length: int) -> None:
    """D104."""
    llm, engine = make([1], max_model_len=100)
    with pytest.raises(ValueError, match=f"{length} tokens, and max_model_len = 100 has room for 99"):
        llm.generate({"prompt_token_ids": [1] * length}, LONG)
    assert engine.seen == {}
    assert len(llm.generate({"prompt_token_ids": [1] * 99}, LONG)) == 1


# ---- parameters ----


def test_each_prompt_may_have_its_own_parameters(make: Maker) -> None:
    llm, engine = make([1, 2, 3, 4])
    outputs = llm.generate(["a", "b"], [replace(LONG, max_tokens=1), replace(LONG, max_tokens=3)], priority=[5, 1])
    assert [output.outputs[0].token_ids for output in outputs] == [[1], [1, 2, 3]]
    assert [request.options["priority"] for request in engine.seen.values()] == [5, 1]
    with pytest.raises(ValueError, match="one for each of 2 prompts, got 1"):
        llm.generate(["a", "b"], [LONG])
    with pytest.raises(ValueError, match="priority must have one number for each of 1 prompts, got 2"):
        llm.generate(["a"], LONG, priority=[1, 2])
    for wrong in ("high", 1.5, None, True, float("nan")):
        with pytest.raises(TypeError, match=r"priority\[1\] must be an integer"):
            llm.generate(["a", "b"], LONG, priority=[1, wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="priority must be a list of integers, got int"):
        llm.generate(["a"], LONG, priority=5)  # type: ignore[arg-type]
    assert len(engine.seen) == 2
    with pytest.raises(TypeError, match=r"prompts\[0\]: sampling_params must be SamplingParams, got dict"):
        llm.generate(["a"], [{"n": 1}])  # type: ignore[list-item]


def test_defaults_of_the_model_apply_when_nothing_is_given(make: Maker) -> None:
    llm, engine = make([1])
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9, top_k=40)
    llm.generate("a")
    llm.generate("a", SamplingParams(max_tokens=5))
    given = [request.params for request in engine.seen.values()]
    assert (given[0].temperature, given[0].top_k) == (0.7, 40)
    assert (given[1].temperature, given[1].top_k) == (1.0, 0)


def test_stop_ids_of_the_model_and_of_the_request_both_stop(make: Maker) -> None:
    """D103."""
    for token, stop_reason in ((IM_END, None), (END_OF_TEXT, None), (77, 77)):
        llm, _ = make([5, 6, token, 8])
        completion = llm.generate("a", replace(LONG, stop_token_ids=[77]))[0].outputs[0]
        assert completion.token_ids == [5, 6, token]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_reason)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_token_ids": [4096]}, r"stop_token_ids\[0\] must be in \[0, vocab_size = 4096\), got 4096"),
        ({"allowed_token_ids": [1, 4096]}, r"allowed_token_ids\[1\] .*got 4096"),
        ({"logit_bias": {4096: 1.0}}, "logit_bias key .*got 4096"),
        ({"logprobs": 21}, "logprobs must be at most max_logprobs = 20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be at most max_logprobs = 20, got -1, .* 4096"),
        ({"bad_words": ["  "]}, r"bad_words\[0\]"),
    ],
)
def test_parameters_are_checked_against_the_model(make: Maker, fields: dict[str, Any], words: str) -> None:
    """D106: the last id of the vocabulary is the last that is taken."""
    llm, engine = make()
    with pytest.raises(ValueError, match=words):
        llm.generate("a", replace(LONG, **fields))
    assert engine.seen == {}
    llm.generate("a", replace(LONG, stop_token_ids=[4095], allowed_token_ids=[4095], logit_bias={4095: 1}, logprobs=20))


def test_bad_words_become_token_ids(make: Maker, tokenizer: Tokenizer) -> None:
    llm, engine = make([1])
    llm.generate("a", replace(LONG, bad_words=["berry"]))
    assert set(engine.seen["0"].options["bad_words_token_ids"]) == {
        tuple(tokenizer.encode("berry")),
        tuple(tokenizer.encode(" berry")),
    }


def test_seed_of_the_llm_makes_unseeded_requests_repeatable(make: Maker) -> None:
    def seeds(seed: int | None) -> list[int | None]:
        llm, engine = make([1], seed=seed)
        llm.generate(["a", "b", "c"], [SamplingParams(), SamplingParams(seed=9), SamplingParams()])
        return [request.params.seed for request in engine.seen.values()]

    first = seeds(3)
    assert first == seeds(3)
    assert first[1] == 9
    assert len(set(first)) == 3
    assert seeds(4) != first
    assert seeds(None) == [None, 9, None]


# ---- text ----


@pytest.mark.parametrize("step_size", [1, 2, 5, 100])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_text_and_tokens_whatever_the_step(
    make: Maker, tokenizer: Tokenizer, step_size: int, include: bool
) -> None:
    """D92, D91: what a step holds behind the match is dropped, its logprobs too."""
    llm, engine = make("hello world. And more. And more", step_size=step_size)
    params = replace(LONG, stop=["more", "."], include_stop_str_in_output=include, logprobs=1)
    completion = llm.generate("a", params)[0].outputs[0]
    assert completion.text == ("hello world." if include else "hello world")
    assert completion.token_ids == tokenizer.encode("hello world.")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ".")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.cumulative_logprob == -2.0 * len(completion.token_ids)
    assert engine.running == {}
    assert engine.aborted == ([] if step_size == 100 else ["0"])


def test_stop_string_and_stop_token_wait_for_min_tokens(make: Maker, tokenizer: Tokenizer) -> None:
    """D85: both appear earlier and are ignored until then."""
    a, t = tokenizer.encode("a")[0], tokenizer.encode("t")[0]
    llm, _ = make([a, t, a, t, t, a, t])
    params = replace(LONG, stop=["a"], min_tokens=5)
    assert llm.generate("x", params)[0].text == "atatt"
    completion = llm.generate("x", replace(LONG, stop_token_ids=[t], min_tokens=5))[0].outputs[0]
    assert completion.token_ids == [a, t, a, t, t]


def test_stop_token_is_in_the_tokens_and_not_in_the_text(make: Maker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two")
    llm, _ = make([*ids, 100])
    params = replace(LONG, stop_token_ids=[ids[1]])
    completion = llm.generate("a", params)[0].outputs[0]
    assert (completion.text, completion.token_ids) == ("one", ids[:2])
    assert llm.generate("a", replace(params, include_stop_str_in_output=True))[0].text == "one two"


def test_special_tokens_show_on_demand(make: Maker) -> None:
    llm, _ = make("Hi<|im_start|>you<|im_end|>")
    assert llm.generate("a", LONG)[0].text == "Hiyou"
    shown = replace(LONG, skip_special_tokens=False)
    assert llm.generate("a", shown)[0].text == "Hi<|im_start|>you"
    assert llm.generate("a", replace(shown, ignore_eos=True))[0].text == "Hi<|im_start|>you<|im_end|>"


def test_incomplete_character_at_the_end_is_one_replacement(make: Maker, tokenizer: Tokenizer) -> None:
    """D96."""
    ids = tokenizer.encode("🌶")
    assert len(ids) > 1
    llm, _ = make(ids[:-1])
    assert llm.generate("a", LONG)[0].text == "\ufffd"
    assert "".join(llm.stream("a", LONG)) == "\ufffd"


def test_character_that_the_prompt_began_is_completed(make: Maker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🌶")
    llm, _ = make(ids[1:])
    assert llm.generate({"prompt_token_ids": ids[:1]}, LONG)[0].text == "🌶"


def test_without_detokenize_there_are_tokens_only(make: Maker) -> None:
    llm, _ = make("hello")
    completion = llm.generate("a", replace(LONG, detokenize=False, logprobs=0))[0].outputs[0]
    assert completion.text == ""
    assert completion.token_ids
    assert completion.logprobs is not None
    assert completion.logprobs[0][completion.token_ids[0]].decoded_token is None


# ---- logprobs ----


def test_logprobs_are_keyed_by_id_with_exact_bytes(make: Maker, tokenizer: Tokenizer) -> None:
    """D90: parts of characters have bytes and a text; tokens of the same letters do not collide."""
    ids = tokenizer.encode("🌶")
    llm, _ = make(ids)
    completion = llm.generate("a", replace(LONG, logprobs=3))[0].outputs[0]
    assert completion.logprobs is not None
    for token_id, entry in zip(ids, completion.logprobs, strict=True):
        assert list(entry) == [token_id, token_id - 1, token_id + 1]
        assert [logprob.rank for logprob in entry.values()] == [2, 1, 3]
        assert entry[token_id].token_bytes == tokenizer.token_bytes(token_id)
        assert entry[token_id].decoded_token
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == "🌶".encode()
    true, spaced = (tokenizer.encode(text)[0] for text in ("t", " t"))
    llm, _ = make([true, spaced])
    completion = llm.generate("a", replace(LONG, logprobs=3))[0].outputs[0]
    assert completion.logprobs is not None
    assert completion.logprobs[0][true].decoded_token == "t"
    assert completion.logprobs[1][spaced].decoded_token == " t"


def test_prompt_logprobs_have_one_entry_a_prompt_token(make: Maker) -> None:
    """D36, D89: the first is None; every one of several completions does not bring them again."""
    llm, _ = make([1, 2])
    prompt = {"prompt_token_ids": list(range(10, 43))}
    params = SamplingParams(n=2, prompt_logprobs=1)
    for output in (*llm.generate(prompt, params), *llm.generate(prompt, params)):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 33
        assert output.prompt_logprobs[0] is None
        assert all(entry is not None and 10 + i in entry for i, entry in enumerate(output.prompt_logprobs) if i)
    streamed = [output.prompt_logprobs for output in llm.stream_outputs(prompt, replace(params, n=1))]
    assert [entries is not None for entries in streamed] == [True, False]


# ---- several completions ----


def test_n_completions_are_n_requests(make: Maker) -> None:
    llm, engine = make(lambda req_id, _: [int(req_id[-1]) + 50] * 3)
    outputs = llm.generate(["a", "b"], SamplingParams(n=3, seed=2**63 - 2, max_tokens=2))
    for output in outputs:
        assert [(c.index, c.token_ids) for c in output.outputs] == [(i, [50 + i] * 2) for i in range(3)]
    assert list(engine.seen) == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    seeds = [engine.seen[f"0-{i}"].params.seed for i in range(3)]
    assert seeds == [2**63 - 2, 2**63 - 1, 0]


def test_streamed_completions_are_told_apart_by_index(make: Maker) -> None:
    llm, _ = make(lambda req_id, _: [int(req_id[-1]) + 50] * (2 + int(req_id[-1])))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for output in llm.stream_outputs("a", SamplingParams(n=3)):
        for completion in output.outputs:
            tokens[completion.index] += completion.token_ids
    assert tokens == {i: [50 + i] * (2 + i) for i in range(3)}
    with pytest.raises(ValueError, match="n must be 1 to stream text, got 3"):
        llm.stream("a", SamplingParams(n=3))


# ---- streams ----


@pytest.mark.parametrize("step_size", [1, 3, 100])
@pytest.mark.parametrize("stop", [None, "###END", ["never"]])
def test_deltas_add_up_to_the_text(make: Maker, tokenizer: Tokenizer, step_size: int, stop: Any) -> None:
    """D93: and no part of the stop string is ever shown."""
    text = "naïve 🌶️ ## text ###END and more"
    llm, _ = make(text, step_size=step_size)
    params = replace(LONG, stop=stop)
    deltas = list(llm.stream("a", params))
    assert all(deltas)
    assert "".join(deltas) == llm.generate("a", params)[0].text
    assert "".join(deltas) == (text if stop != "###END" else "naïve 🌶️ ## text ")
    tokens = [token for output in llm.stream_outputs("a", params) for token in output.outputs[0].token_ids]
    assert tokens == llm.generate("a", params)[0].outputs[0].token_ids


def test_stop_string_ends_reasoning_too(make: Maker) -> None:
    """D95: a stop string applies to all generated text, whatever tags stand around it, streamed or not."""
    llm, _ = make("<think>one END two</think>three END four")
    params = replace(LONG, stop="END")
    assert llm.generate("a", params)[0].text == "<think>one "
    assert "".join(llm.stream("a", params)) == "<think>one "


def test_leaving_the_stream_aborts_the_request(make: Maker) -> None:
    llm, engine = make("one two three four five")
    for delta in llm.stream("a", LONG):
        assert delta == "one"
        break
    assert (engine.running, engine.aborted) == ({}, ["0"])
    stream = llm.stream("a", LONG)
    next(stream)
    del stream
    assert (engine.running, engine.aborted) == ({}, ["0", "1"])


def test_stream_that_is_never_read_queues_nothing(make: Maker) -> None:
    llm, engine = make("one")
    llm.stream("a", LONG)
    assert engine.seen == {}
    with pytest.raises(ValueError, match="at least 1 token"):
        llm.stream("", LONG)


def test_streams_may_be_read_in_turn(make: Maker) -> None:
    llm, _ = make(lambda req_id, _: [int(req_id) + 50] * 5)
    first, second = llm.stream_outputs("a", LONG), llm.stream_outputs("b", LONG)
    tokens: tuple[list[int], list[int]] = ([], [])
    for _ in range(3):
        for stream, said in zip((first, second), tokens, strict=True):
            said += next(stream).outputs[0].token_ids
    assert llm.generate("c", LONG)[0].outputs[0].token_ids == [52] * 5
    for stream, said in zip((first, second), tokens, strict=True):
        for output in stream:
            said += output.outputs[0].token_ids
    assert tokens == ([50] * 5, [51] * 5)


def test_cumulative_output_is_not_for_generate_or_stream(make: Maker) -> None:
    """Both have a form of their own, whatever output_kind says."""
    llm, _ = make("one two three")
    for kind in RequestOutputKind:
        params = replace(LONG, output_kind=kind)
        assert llm.generate("a", params)[0].text == "one two three"
        assert list(llm.stream("a", params)) == ["one", " two", " three"]


# ---- several users ----


def test_threads_run_together(make: Maker) -> None:
    """A thread's step brings the outputs of all; nobody misses the end of a request that another thread's step made."""
    llm, engine = make(lambda _, prompt: prompt * 9, max_num_seqs=64, on_step=lambda: time.sleep(1e-4))

    def generate(i: int) -> bool:
        outputs = llm.generate([{"prompt_token_ids": [10 + i]}, {"prompt_token_ids": [50 + i, 7]}], LONG)
        return [output.outputs[0].token_ids for output in outputs] == [[10 + i] * 9, [50 + i, 7] * 9]

    def stream(i: int) -> bool:
        outputs = llm.stream_outputs({"prompt_token_ids": [10 + i]}, LONG)
        return [token for output in outputs for token in output.outputs[0].token_ids] == [10 + i] * 9

    with ThreadPoolExecutor(8) as threads:
        results = [threads.submit((generate, stream)[i % 2], i) for i in range(40)]
        assert all(result.result(timeout=60) for result in results)
    assert engine.running == {}


def test_generator_that_ends_within_a_step_is_aborted_behind_it(make: Maker) -> None:
    """The garbage collector may end a forgotten generator in the middle of another request's step."""
    generators: list[Iterator[RequestOutput]] = []
    aborted_within: list[list[str]] = []

    def end_the_first() -> None:
        if generators and engine.num_steps == 4:
            generators.clear()
            aborted_within.append(list(engine.aborted))

    llm, engine = make("one two three four five six", on_step=end_the_first)
    generators.append(llm.stream_outputs("a", LONG))
    next(generators[0])
    assert llm.generate("b", LONG)[0].text == "one two three four five six"
    assert aborted_within == [[]]
    assert engine.aborted == ["0"]
    assert engine.running == {}


# ---- trouble ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_logprobs": -2}, "max_logprobs must be at least -1, got -2"),
        ({"max_logprobs": "many"}, "max_logprobs must be an integer, got 'many'"),
        ({"max_logprobs": None}, "max_logprobs must be an integer, got None"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
    ],
)
def test_option_of_no_meaning_is_refused_by_name(make: Maker, options: dict[str, Any], words: str) -> None:
    make("fine")
    with pytest.raises(ValueError, match=words):
        LLM(**options)


def test_failed_request_says_so_and_leaves_the_others_alone(make: Maker) -> None:
    llm, _ = make("fine", failing={"1": "the logits are not finite"})
    with pytest.warns(RuntimeWarning, match="request 1 failed: the logits are not finite"):
        outputs = llm.generate(["a", "b", "c"], LONG)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].error == "the logits are not finite"
    assert (outputs[0].text, outputs[2].text) == ("fine", "fine")


def test_failed_stream_raises(make: Maker) -> None:
    llm, _ = make("fine", failing={"0": "the logits are not finite"})
    with pytest.raises(RuntimeError, match="the logits are not finite"):
        list(llm.stream("a", LONG))


@pytest.mark.parametrize("use", [lambda llm: llm.generate(["a", "b"], LONG), lambda llm: list(llm.stream("a", LONG))])
def test_interrupt_waits_for_the_step_and_aborts(make: Maker, use: Callable[[LLM], object]) -> None:
    """Ctrl-C in the middle of a step takes effect behind it."""
    ended: list[bool] = []

    def press_ctrl_c() -> None:
        if engine.num_steps == 2:
            signal.raise_signal(signal.SIGINT)
            ended.append(True)

    llm, engine = make("one two three four five", on_step=press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        use(llm)
    assert ended == [True]
    assert engine.running == {}
    assert engine.aborted == list(engine.seen)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("a", LONG)[0].text == "one two three four five"


def test_request_that_the_engine_refuses_leaves_nothing_behind(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, engine = make("fine")
    real = engine.add_request

    def refuse(req_id: str, *args: Any, **kwargs: Any) -> None:
        if req_id == "1":
            raise ValueError("no room")
        real(req_id, *args, **kwargs)

    monkeypatch.setattr(engine, "add_request", refuse)
    with pytest.raises(ValueError, match=r"^prompts\[1\]: no room"):
        llm.generate(["a", "b"], LONG)
    assert (engine.running, engine.aborted) == ({}, ["0"])
    assert llm.generate("a", LONG)[0].text == "fine"


def test_progress_shows_where_it_is_asked_for(
    make: Maker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws nothing on what is no terminal
    monkeypatch.setenv("TERM", "xterm")
    llm, _ = make("fine")
    llm.generate(["a", "b"], LONG)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b"], LONG, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "generating" in err


# ---- chat ----


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_chat_gives_the_model_what_its_template_writes(make: Maker, tokenizer: Tokenizer) -> None:
    llm, engine = make("Hello<|im_end|>")
    output = llm.chat(user("Hi"), LONG)[0]
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.seen["0"].prompt_token_ids == tokenizer.encode(output.prompt)
    assert (output.text, output.outputs[0].finish_reason) == ("Hello", "stop")
    assert "".join(llm.stream(user("Hi"), LONG)) == "Hello"


def test_chat_answers_several_conversations(make: Maker) -> None:
    llm, _ = make(lambda _, prompt: prompt[:3])
    outputs = llm.chat([user("a"), user("b")], LONG)
    assert [output.prompt and output.prompt.count("<|im_start|>") for output in outputs] == [2, 2]
    with pytest.raises(ValueError, match=r"conversation 1: messages\[0\]\.role"):
        llm.chat([user("a"), [{"role": "x", "content": "b"}]], LONG)
    with pytest.raises(ValueError, match="at least 1 message, got 0"):
        llm.chat([], LONG)
    with pytest.raises(TypeError, match="messages must be a list"):
        llm.chat("Hi", LONG)  # type: ignore[arg-type]


def test_chat_options_reach_the_template(make: Maker) -> None:
    llm, _ = make("x")
    text = llm.chat(user("Hi"), LONG, chat_template="{{ word }}!", chat_template_kwargs={"word": "Go"})[0].prompt
    assert text == "Go!"
    messages: Sequence[dict[str, str]] = [*user("Tell"), {"role": "assistant", "content": "Once"}]
    output = llm.chat(messages, LONG, add_generation_prompt=False, continue_final_message=True)[0]
    assert output.prompt is not None
    assert output.prompt.endswith("assistant\nOnce")
    with pytest.raises(NotImplementedError, match="tools"):
        llm.chat(user("Hi"), LONG, tools=[{"type": "function"}])
    with pytest.raises(TypeError, match="chat_template is for messages"):
        llm.stream("text", LONG, chat_template="x")


# ---- models ----


def test_model_without_a_tokenizer_takes_and_returns_ids(make: Maker, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    llm, _ = make([1, 2, 9, 4], model=tmp_path)
    completion = llm.generate({"prompt_token_ids": [1]}, replace(LONG, logprobs=1))[0].outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [1, 2, 9], "stop")
    for call in (
        lambda: llm.generate("text", LONG),
        lambda: llm.generate({"prompt_token_ids": [1]}, replace(LONG, stop="x")),
        lambda: llm.generate({"prompt_token_ids": [1]}, replace(LONG, bad_words=["x"])),
        llm.get_tokenizer,
    ):
        with pytest.raises(ValueError, match=r"no tokenizer\.json"):
            call()
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat(user("Hi"), LONG)


def test_tokenizer_larger_than_the_model_is_noticed(make: Maker, tmp_path: Path, default_model: Path) -> None:
    """A token for which the model has no row is refused before the engine sees it."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(default_model / name, tmp_path)
    llm, _ = make([1], model=tmp_path, vocab_size=4000)
    with pytest.raises(ValueError, match="vocab_size = 4000"):
        llm.generate("<|im_end|>", LONG)


def test_metrics_of_a_request(make: Maker) -> None:
    llm, _ = make("one two three")
    output = llm.generate("a", LONG)[0]
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 3
    assert output.metrics.time_to_first_token is not None
    assert output.metrics.time_to_first_token >= 0
    assert output.num_cached_tokens == 3
