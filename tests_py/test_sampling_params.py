"""Every field of SamplingParams at, below and above its range (D105: NaN and infinity among them; D94: empty stop)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from deltaic import _core
from deltaic.sampling_params import RequestOutputKind, SamplingParams

ACCEPTED: list[tuple[str, Any, Any]] = [  # field, what is given, what it becomes
    ("n", 1, 1),
    ("n", 16384, 16384),
    ("n", np.int64(3), 3),
    ("presence_penalty", -2, -2.0),
    ("presence_penalty", 2.0, 2.0),
    ("frequency_penalty", -2.0, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("repetition_penalty", 1e-6, 1e-6),
    ("repetition_penalty", 1e6, 1e6),
    ("temperature", 0, 0.0),
    ("temperature", 1e-9, 0.01),
    ("temperature", 0.0099, 0.01),
    ("temperature", 0.01, 0.01),
    ("temperature", 2, 2.0),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", 1e-6, 1e-6),
    ("top_p", 1, 1.0),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 1, 1),
    ("top_k", 10**9, 10**9),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("seed", -1, None),
    ("seed", 0, 0),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("seed", -(2**63), -(2**63)),
    ("stop", None, []),
    ("stop", "END", ["END"]),
    ("stop", ("a", "b"), ["a", "b"]),
    ("stop_token_ids", None, []),
    ("stop_token_ids", [0, 7], [0, 7]),
    ("ignore_eos", True, True),
    ("max_tokens", 1, 1),
    ("max_tokens", None, None),
    ("min_tokens", 0, 0),
    ("min_tokens", 16, 16),
    ("logprobs", -1, -1),
    ("logprobs", 0, 0),
    ("logprobs", 5, 5),
    ("prompt_logprobs", -1, -1),
    ("prompt_logprobs", 0, 0),
    ("detokenize", False, False),
    ("skip_special_tokens", False, False),
    ("spaces_between_special_tokens", False, False),
    ("include_stop_str_in_output", True, True),
    ("output_kind", RequestOutputKind.DELTA, RequestOutputKind.DELTA),
    ("logit_bias", {0: 1}, {0: 1.0}),
    ("logit_bias", {3: 1000.0, 4: -1000.0}, {3: 100.0, 4: -100.0}),
    ("logit_bias", {}, {}),
    ("allowed_token_ids", [0], [0]),
    ("allowed_token_ids", None, None),
    ("bad_words", None, []),
    ("bad_words", ["rude word"], ["rude word"]),
    ("skip_reading_prefix_cache", True, True),
    ("skip_reading_prefix_cache", None, None),
    ("extra_args", {"a": 1}, {"a": 1}),
]

NUMBERS = ["presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"]
INTEGERS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]
FLAGS = [
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
]

OUT_OF_RANGE: list[tuple[str, Any, str]] = [  # field, value, the range that the message names
    ("n", 0, "[1, 16384]"),
    ("n", 16385, "[1, 16384]"),
    ("presence_penalty", -2.01, "[-2, 2]"),
    ("presence_penalty", 2.01, "[-2, 2]"),
    ("frequency_penalty", -2.01, "[-2, 2]"),
    ("frequency_penalty", 2.01, "[-2, 2]"),
    ("repetition_penalty", 0, "(0, inf)"),
    ("repetition_penalty", -1.0, "(0, inf)"),
    ("temperature", -0.1, "[0, 2]"),
    ("temperature", 2.1, "[0, 2]"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", 1.1, "(0, 1]"),
    ("top_p", -0.5, "(0, 1]"),
    ("top_k", -2, "[-1, 2147483647]"),
    ("min_p", -0.01, "[0, 1]"),
    ("min_p", 1.01, "[0, 1]"),
    ("seed", 2**63, f"{2**63 - 1}]"),
    ("seed", -(2**63) - 1, f"[{-(2**63)}"),
    ("stop", "", "must not be empty"),
    ("stop", ["a", ""], "must not be empty"),
    ("stop_token_ids", [-1], "[0, 2147483647]"),
    ("stop_token_ids", [5279552648203111001], "[0, 2147483647]"),
    ("max_tokens", 0, "[1, 2147483647]"),
    ("max_tokens", -5, "[1, 2147483647]"),
    ("min_tokens", -1, "[0, 2147483647]"),
    *[(name, 2**31, "2147483647], got 2147483648") for name in ("top_k", "max_tokens", "min_tokens", "logprobs")],
    *[(name, 10**400, "2147483647], got one of 1329 bits") for name in ("top_k", "max_tokens", "prompt_logprobs")],
    ("min_tokens", 17, "[0, max_tokens = 16]"),
    ("logprobs", -2, "[-1, 2147483647]"),
    ("prompt_logprobs", -2, "[-1, 2147483647]"),
    ("logit_bias", {-1: 1.0}, "[0, 2147483647]"),
    ("logit_bias", {2**31: 1.0}, "[0, 2147483647]"),
    ("logit_bias", {1: math.nan}, "[-100, 100]"),
    ("logit_bias", {1: math.inf}, "[-100, 100]"),
    ("allowed_token_ids", [], "at least 1"),
    ("allowed_token_ids", [-1], "[0, 2147483647]"),
    ("bad_words", [""], "must not be empty"),
    *[(name, value, "finite") for name in NUMBERS for value in (math.nan, math.inf, -math.inf, 10**400)],
]

WRONG_TYPE: list[tuple[str, Any]] = [
    *[(name, value) for name in NUMBERS for value in ("1", True, [1.0], 1j)],
    *[(name, value) for name in INTEGERS for value in ("1", True, 1.0, [1], math.nan)],
    *[(name, value) for name in FLAGS for value in (1, "True", None)],
    *[(name, None) for name in NUMBERS],
    ("n", None),
    ("top_k", None),
    ("min_tokens", None),
    ("stop", 5),
    ("stop", [5]),
    ("stop", b"END"),
    ("stop", {"a": 1}),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 12),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["1"]),
    ("output_kind", "delta"),
    ("output_kind", 1),
    ("logit_bias", [(1, 2.0)]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 1}),
    ("logit_bias", {1: "x"}),
    ("logit_bias", {1: True}),
    ("logit_bias", {1.5: 1.0}),
    ("allowed_token_ids", "12"),
    ("allowed_token_ids", ["1"]),
    ("bad_words", "word"),
    ("bad_words", [1]),
    ("skip_reading_prefix_cache", 1),
    ("extra_args", [1]),
]


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 200
    return text


@pytest.mark.parametrize(("name", "given", "becomes"), ACCEPTED)
def test_value_within_its_range_is_accepted(name: str, given: Any, becomes: Any) -> None:
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == becomes
    assert type(value) is type(becomes)


@pytest.mark.parametrize(("name", "value", "wanted"), OUT_OF_RANGE)
def test_value_out_of_its_range_names_field_value_and_range(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    text = one_line(caught.value)
    assert wanted in text
    assert "got" in text


@pytest.mark.parametrize(("name", "value"), WRONG_TYPE)
def test_wrong_type_names_field_and_type(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "got" in one_line(caught.value)


@pytest.mark.parametrize(
    "name", ["structured_outputs", "thinking_token_budget", "repetition_detection", "logprob_token_ids"]
)
def test_field_of_other_engines_is_refused_by_name(name: str) -> None:
    assert getattr(SamplingParams(**{name: None}), name) is None
    with pytest.raises(_core.Unsupported, match=name) as caught:
        SamplingParams(**{name: 1})
    assert isinstance(caught.value, NotImplementedError)
    one_line(caught.value)


def test_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(TypeError, match="n must be") as caught:
        SamplingParams(n="x" * 10_000)  # type: ignore[arg-type]
    one_line(caught.value)


def test_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams.from_optional({}, temprature=0.5)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams.from_optional({"temprature": 0.5})


def test_greedy_resets_what_it_does_not_use() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.3)
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert not SamplingParams(temperature=0.001).is_greedy


def test_greedy_with_several_completions_is_refused() -> None:
    with pytest.raises(ValueError, match="n must be 1"):
        SamplingParams(temperature=0, n=2)
    assert SamplingParams(temperature=0.5, n=2).n == 2


def test_stop_needs_detokenize() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop_strings == []


def test_min_tokens_may_be_anything_without_max_tokens() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10_000).min_tokens == 10_000


def test_params_are_frozen_and_keep_their_own_copies() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ["a"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_replacing_a_field_checks_again() -> None:
    params = SamplingParams(stop="a", seed=-1, top_k=-1)
    assert dataclasses.replace(params, seed=5) == SamplingParams(stop="a", seed=5)
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=0)


def test_explicit_fields_win_over_defaults_and_none_is_not_given() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    params = SamplingParams.from_optional(defaults, temperature=0.2, top_p=None, max_tokens=64)
    assert params == SamplingParams(temperature=0.2, top_p=0.9, top_k=40, max_tokens=64)
    assert SamplingParams.from_optional() == SamplingParams()


def test_defaults_are_checked_too() -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams.from_optional({"top_p": 7})


def test_number_that_python_does_not_write_is_told() -> None:
    with pytest.raises(ValueError, match=r"max_tokens must be an integer in \[1, 2147483647\], got one of 16610 bits"):
        SamplingParams(max_tokens=10**5000)


def test_core_gets_every_field() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=2**31 - 1,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        seed=7,
        logprobs=3,
        prompt_logprobs=-1,
        logit_bias={5: -3.0},
        allowed_token_ids=[5, 6],
        min_tokens=2,
        stop_token_ids=[9],
    )
    core = params.to_core([11, 9], [[1, 2], [3]])
    assert (core.temperature, core.top_p, core.min_p) == (0.5, 0.75, 0.25)
    assert core.top_k == 2**31 - 1
    assert (core.presence_penalty, core.frequency_penalty, core.repetition_penalty) == (1, -1, 1.5)
    assert (core.seed, core.logprobs, core.prompt_logprobs) == (7, 3, -1)
    assert (core.logit_bias, core.allowed_token_ids, core.bad_words) == ({5: -3.0}, [5, 6], [[1, 2], [3]])
    assert (core.min_tokens, core.stop_token_ids) == (2, [9, 11])


def test_stop_ids_of_the_model_and_of_the_request_are_both_masked() -> None:
    """D103, D84: neither set replaces the other, and min_tokens masks both, ignored or not."""
    assert SamplingParams(stop_token_ids=[1]).to_core([2, 3]).stop_token_ids == [1, 2, 3]
    assert SamplingParams(ignore_eos=True, min_tokens=4).to_core([2, 3]).stop_token_ids == [2, 3]


def test_numbers_beyond_float32_are_refused_or_mean_their_limit() -> None:
    """A double that float32 turns into 0 or infinity is not left to the core."""
    for value in (1e39, 1e-40):
        with pytest.raises(ValueError, match="repetition_penalty must be a finite number"):
            SamplingParams(repetition_penalty=value)
    core = SamplingParams(top_p=1e-50, min_p=1e-50).to_core()
    assert 0.0 < core.top_p < 1e-37
    _core.validate_sampling_params(core, 4096)
