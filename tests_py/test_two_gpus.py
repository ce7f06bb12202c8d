"""Two engines of one process, each on a GPU of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from deltaic import _core
from deltaic.engine import Engine
from deltaic.sampling_params import SamplingParams
from test_engine_end_to_end import make_engine, random_prompt

pytestmark = pytest.mark.skipif(_core.num_cuda_devices() < 2, reason="needs two CUDA devices")


def add_requests(engine: Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    for i in range(6):
        engine.add_request(str(i), random_prompt(20 + 30 * i, i), params)


def step(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for output in engine.step():
        tokens.setdefault(output.req_id, []).extend(output.new_token_ids)


def tokens_of(engine: Engine) -> dict[str, list[int]]:
    add_requests(engine)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        step(engine, tokens)
    return tokens


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_interleaved_engines_give_what_one_gives(enforce_eager: bool) -> None:
    expected = tokens_of(make_engine(device="cuda:0", enforce_eager=enforce_eager))
    assert all(len(tokens) == 40 for tokens in expected.values())
    engines = [make_engine(device=f"cuda:{i}", enforce_eager=enforce_eager) for i in (1, 0)]
    found: list[dict[str, list[int]]] = [{}, {}]
    for engine in engines:
        add_requests(engine)
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, tokens in zip(engines, found, strict=True):
            step(engine, tokens)
    assert found == [expected, expected]


def test_engines_of_two_threads_give_what_one_gives() -> None:
    expected = tokens_of(make_engine(device="cuda:1"))
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda i: tokens_of(make_engine(device=f"cuda:{i}")), (0, 1))) == [expected, expected]


def test_the_environment_chooses_the_devices() -> None:
    """With the second GPU alone visible it is cuda:0, and there is no cuda:1."""
    device = "_core.Device(_core.DeviceType.cuda)"
    code = f"from deltaic import _core; print(_core.num_cuda_devices(), _core.device_memory({device})[0] > 0)"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", "True"]
