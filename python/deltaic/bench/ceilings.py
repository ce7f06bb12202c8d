"""What a device can do at most: the bound that times are held against."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deltaic import _core
from deltaic.device import Placement

_QUIET = 0.05  # other processes that use less of the CPU disturb no measurement
_MAX_ROUNDS = 3
SHARE_ABOVE_ALL = (
    "a share above 100 % says that a ceiling is too low (other processes ran while it was measured, or it was given "
    "so), or that what is read lies in caches, which are faster than memory"
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations a second, and where the numbers come from."""

    bytes_per_second: float
    flops_per_second: float
    source: str
    other_load: float = 0.0  # the share of the CPU that other processes used while it was measured


# Measured: a sum over memory that no cache holds, and a bf16 product of 8192 x 8192 x 8192.
GPU_CEILINGS = {"NVIDIA H200": Ceilings(4.3e12, 803e12, "measured on an NVIDIA H200")}


def check_given(bandwidth: float | None, flops: float | None) -> None:
    """Raise ValueError naming the ceiling, of those given, that nothing could be divided by."""
    for name, value in (("bandwidth", bandwidth), ("flops", flops)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value}")


def find_ceilings(
    placement: Placement, *, bandwidth: float | None = None, flops: float | None = None, num_threads: int = 0
) -> Ceilings:
    """Return the ceilings of a device: those given (GB/s, TFLOP/s), known (some GPUs), or measured now.

    Measuring takes some seconds and a GiB of the device's memory. ValueError as check_given.
    """
    check_given(bandwidth, flops)
    if bandwidth is not None and flops is not None:
        return Ceilings(bandwidth * 1e9, flops * 1e12, "given")
    known = GPU_CEILINGS.get(_core.device_name(placement.device)) if placement.is_cuda else None
    if known is not None:
        found = known
    elif placement.is_cuda:
        found = Ceilings(*_core.measure_gpu_ceilings(placement.device.index), "measured now")
    else:
        found = measure_cpu(num_threads)
    if bandwidth is None and flops is None:
        return found
    return replace(
        found,
        bytes_per_second=found.bytes_per_second if bandwidth is None else bandwidth * 1e9,
        flops_per_second=found.flops_per_second if flops is None else flops * 1e12,
        source=f"given and {found.source}",
    )


def measure_cpu(num_threads: int = 0) -> Ceilings:
    """Return the best of several measurements of the CPU: other processes can only slow one down.

    All threads together are timed by the clock, one alone by the CPU time that it gets, which others hardly change. As
    many cores as there are threads compute what one does, each; memory is shared, so its bandwidth is the better of
    the two. Measured again, some times, while others use the CPU.
    """
    allowed = sorted(os.sched_getaffinity(0))
    num_threads = num_threads or len(allowed)
    num_cores = min(num_threads, _num_cores(allowed))
    bandwidth = flops = 0.0
    least_load = 1.0
    for _ in range(_MAX_ROUNDS):
        load = _OtherLoad()
        together, alone = _core.measure_cpu_ceilings(num_threads), _core.measure_cpu_ceilings(1)
        bandwidth = max(bandwidth, together[0], alone[0])
        flops = max(flops, together[1], num_cores * alone[1])
        least_load = min(least_load, load.share())
        if least_load < _QUIET:
            break
    return Ceilings(bandwidth, flops, "measured now", least_load)


def measure_again(ceilings: Ceilings, num_threads: int = 0) -> Ceilings:
    """Return the ceilings as they are or, where others disturbed their measurement, the better of them and new ones."""
    if ceilings.source != "measured now" or ceilings.other_load < _QUIET:
        return ceilings
    new = measure_cpu(num_threads)
    return Ceilings(
        max(ceilings.bytes_per_second, new.bytes_per_second),
        max(ceilings.flops_per_second, new.flops_per_second),
        ceilings.source,
        min(ceilings.other_load, new.other_load),
    )


def describe_ceilings(ceilings: Ceilings) -> str:
    """Return a line for people."""
    source = ceilings.source
    if ceilings.other_load >= _QUIET:
        source += (
            f" while other processes used {100 * ceilings.other_load:.0f} % of the CPU: may be too low, and shares of "
            "it too high"
        )
    return (
        f"bound: {ceilings.bytes_per_second / 1e9:,.1f} GB/s, {ceilings.flops_per_second / 1e12:,.2f} TFLOP/s "
        f"({source})"
    )


def notes_on_shares(results: Sequence[Mapping[str, object]]) -> list[str]:
    """Return what is to be said of results with a share above 1."""
    shares = [value for result in results for name, value in result.items() if name.endswith("share_of_bound") if value]
    return [SHARE_ABOVE_ALL] if any(isinstance(share, float) and share > 1.0 for share in shares) else []


class _OtherLoad:
    """What other processes use of the CPU from now on."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), _busy_seconds(), time.process_time()

    def share(self) -> float:
        seconds = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        others = (_busy_seconds() - self._busy) - (time.process_time() - self._own)
        return min(max(others / seconds, 0.0), 1.0)


def _busy_seconds() -> float:
    """Return the time that all CPUs of the machine have been busy, or taken away by its host."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _num_cores(cpus: Sequence[int]) -> int:
    """Return how many cores so many CPUs are: two threads of one core share its units."""
    siblings = set()
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.exists() else str(cpu))
    return len(siblings)
