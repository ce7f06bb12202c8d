"""Where an engine runs, and what it computes and keeps its caches in."""

from __future__ import annotations

import os
from dataclasses import dataclass

from deltaic import _core
from deltaic.engine_config import EngineConfig, check_device

DTYPES = {"float32": _core.DType.f32, "bfloat16": _core.DType.bf16, "float16": _core.DType.f16}
DTYPE_BYTES = {_core.DType.f32: 4, _core.DType.bf16: 2, _core.DType.f16: 2}


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and the types of what lies on it."""

    device: _core.Device
    dtype: _core.DType  # of activations, and on CUDA of the weights' matrices; the CPU keeps weights as they are stored
    kv_dtype: _core.DType
    conv_state_dtype: _core.DType
    recurrent_state_dtype: _core.DType

    @property
    def is_cuda(self) -> bool:
        return self.device.type == _core.DeviceType.cuda

    @property
    def device_name(self) -> str:
        return f"cuda:{self.device.index}" if self.is_cuda else "cpu"


def resolve_device(name: str) -> _core.Device:
    """Return the device of a setting. ValueError for a GPU that is not there.

    auto is what the environment variable DELTAIC_DEVICE says, else the first usable GPU, else the CPU.
    """
    if name == "auto":
        name = os.environ.get("DELTAIC_DEVICE", "auto")
        check_device("DELTAIC_DEVICE", name)
    if name == "cpu":
        return _core.Device()
    num_devices = _core.num_cuda_devices()
    if name == "auto":
        return _core.Device(_core.DeviceType.cuda, 0) if num_devices else _core.Device()
    index = device_index(name)
    if index >= num_devices:
        raise ValueError(
            f"device {name!r}: this process can use {num_devices} GPUs (a build with CUDA, a driver and "
            "CUDA_VISIBLE_DEVICES decide): use " + (f"cuda:0 to cuda:{num_devices - 1}" if num_devices else "'cpu'")
        )
    return _core.Device(_core.DeviceType.cuda, index)


def device_index(name: str) -> int:
    """Return the number of a GPU: 1 for cuda:1, 0 for cuda."""
    return int(name.partition(":")[2] or 0)


def place(model: _core.ModelConfig, config: EngineConfig, device: _core.Device | None = None) -> Placement:
    """Return what the settings mean for a model; `device` instead of the one that config.device finds here.

    ValueError for a dtype that the device does not compute in.
    """
    device = resolve_device(config.device) if device is None else device
    if device.type == _core.DeviceType.cpu:
        if config.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype must be auto or float32 on the CPU, got {config.dtype!r}")
        dtype = _core.DType.f32
    elif config.dtype == "auto":
        dtype = _core.DType.bf16 if model.dtype is None else model.dtype
    else:
        dtype = DTYPES[config.dtype]
    kv, state = config.kv_cache_dtype, config.recurrent_state_dtype
    return Placement(
        device=device,
        dtype=dtype,
        kv_dtype=dtype if kv == "auto" else DTYPES[kv],
        conv_state_dtype=dtype,
        recurrent_state_dtype=_core.DType.f32 if state == "auto" else DTYPES[state],
    )
