"""What a device can do at most: the bound that times are held against."""

from __future__ import annotations

from dataclasses import dataclass

from deltaic import _core
from deltaic.device import Placement


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations a second, and where the numbers come from."""

    bytes_per_second: float
    flops_per_second: float
    source: str


# Measured: a sum over memory that no cache holds, and a bf16 product of 8192 x 8192 x 8192.
GPU_CEILINGS = {"NVIDIA H200": Ceilings(4.3e12, 803e12, "measured on an NVIDIA H200")}


def find_ceilings(
    placement: Placement, *, bandwidth: float | None = None, flops: float | None = None, num_threads: int = 0
) -> Ceilings:
    """Return the ceilings of a device: those given (GB/s, TFLOP/s), known (some GPUs), or measured now.

    Measuring takes some seconds and a GiB of the device's memory.
    """
    if bandwidth is not None and flops is not None:
        return Ceilings(bandwidth * 1e9, flops * 1e12, "given")
    known = GPU_CEILINGS.get(_core.device_name(placement.device)) if placement.is_cuda else None
    if known is not None:
        found = known
    elif placement.is_cuda:
        found = Ceilings(*_core.measure_gpu_ceilings(placement.device.index), "measured now")
    else:
        found = Ceilings(*_core.measure_cpu_ceilings(num_threads), "measured now")
    if bandwidth is None and flops is None:
        return found
    return Ceilings(
        found.bytes_per_second if bandwidth is None else bandwidth * 1e9,
        found.flops_per_second if flops is None else flops * 1e12,
        f"given and {found.source}",
    )


def describe_ceilings(ceilings: Ceilings) -> str:
    """Return a line for people."""
    return (
        f"bound: {ceilings.bytes_per_second / 1e9:,.1f} GB/s, {ceilings.flops_per_second / 1e12:,.2f} TFLOP/s "
        f"({ceilings.source})"
    )
