"""Devices and types: what a setting means here, and on a machine with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltaic import _core
from deltaic.device import place, resolve_device
from deltaic.engine_config import EngineConfig

CUDA_1 = _core.Device(_core.DeviceType.cuda, 1)


@pytest.fixture
def model(default_model: Path) -> _core.ModelConfig:
    return _core.load_model_config(default_model)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(_core, "num_cuda_devices", lambda: count)


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTAIC_DEVICE")
    gpus(monkeypatch, 0)
    assert resolve_device("auto").type == resolve_device("cpu").type == _core.DeviceType.cpu
    gpus(monkeypatch, 2)
    assert resolve_device("cpu").type == _core.DeviceType.cpu
    for name, index in (("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        device = resolve_device(name)
        assert (device.type, device.index) == (_core.DeviceType.cuda, index)


def test_environment_says_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    for value, kind in (
        ("cpu", _core.DeviceType.cpu),
        ("cuda:1", _core.DeviceType.cuda),
        ("auto", _core.DeviceType.cuda),
    ):
        monkeypatch.setenv("DELTAIC_DEVICE", value)
        assert resolve_device("auto").type == kind
        assert resolve_device("cpu").type == _core.DeviceType.cpu
    monkeypatch.setenv("DELTAIC_DEVICE", "gpu")
    with pytest.raises(ValueError, match="DELTAIC_DEVICE must be auto, cpu, cuda or cuda:N, got 'gpu'"):
        resolve_device("auto")
    monkeypatch.setenv("DELTAIC_DEVICE", "cuda:2")
    with pytest.raises(ValueError, match="device 'cuda:2': this process can use 2 GPUs"):
        resolve_device("auto")


def test_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match=r"device 'cuda': this process can use 0 GPUs .*: use 'cpu'"):
        resolve_device("cuda")
    gpus(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"device 'cuda:2': this process can use 2 GPUs .*: use cuda:0 to cuda:1"):
        resolve_device("cuda:2")


def test_cpu_computes_in_float32(model: _core.ModelConfig) -> None:
    found = place(model, EngineConfig(device="cpu"))
    assert (found.device_name, found.is_cuda) == ("cpu", False)
    f32 = _core.DType.f32
    assert (found.dtype, found.kv_dtype, found.conv_state_dtype, found.recurrent_state_dtype) == (f32, f32, f32, f32)
    with pytest.raises(ValueError, match="dtype must be auto or float32 on the CPU, got 'float16'"):
        place(model, EngineConfig(device="cpu", dtype="float16"))


def test_gpu_takes_the_checkpoint_s_type(model: _core.ModelConfig) -> None:
    bf16, f16, f32 = _core.DType.bf16, _core.DType.f16, _core.DType.f32
    found = place(model, EngineConfig(), CUDA_1)
    assert (found.device_name, found.is_cuda) == ("cuda:1", True)
    assert (found.dtype, found.kv_dtype, found.conv_state_dtype) == (bf16, bf16, bf16)
    assert found.recurrent_state_dtype == f32
    config = EngineConfig(dtype="float16", kv_cache_dtype="bfloat16", recurrent_state_dtype="bfloat16")
    found = place(model, config, CUDA_1)
    assert (found.dtype, found.kv_dtype, found.conv_state_dtype, found.recurrent_state_dtype) == (f16, bf16, f16, bf16)


def test_caches_of_another_type_on_the_cpu_keep_their_tokens(default_model: Path) -> None:
    """K and V in bf16 take half the memory; the first token of a short prompt does not change."""
    from deltaic import LLM, SamplingParams

    texts, num_bytes = [], []
    for dtype in ("auto", "bfloat16"):
        llm = LLM(default_model, device="cpu", kv_cache_dtype=dtype, max_num_seqs=1, num_blocks=20, max_model_len=200)
        texts.append(llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=1))[0].text)
        num_bytes.append(llm.engine.runner.fa_page_size_bytes)
    assert texts[0] == texts[1]
    assert num_bytes[0] == 2 * num_bytes[1]
