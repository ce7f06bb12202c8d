"""Whether an engine drafts with the model's own draft module, and how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltaic import _core
from deltaic.draft_policy import DraftPolicy, FixedDrafts, MeasuredDrafts
from deltaic.engine_config import EngineConfig

AUTO_DRAFTS = 2  # the most that "auto" tries


@dataclass(frozen=True, slots=True)
class Speculation:
    """The most drafts of a step, and who chooses among them."""

    num_tokens: int
    policy: DraftPolicy


def plan_speculation(path: str | Path, config: EngineConfig, device: _core.DeviceType) -> Speculation:
    """Return what `config` asks for and the checkpoint can do.

    ValueError for a number of drafts where the checkpoint has no draft module, NotImplementedError on CUDA.
    """
    wanted = config.speculative_tokens
    if wanted == 0:
        return Speculation(0, FixedDrafts(0))
    on_cpu = device == _core.DeviceType.cpu
    if wanted == "auto":
        if not on_cpu or config.load_format == "dummy" or _core.count_draft_layers(path) != 1:
            return Speculation(0, FixedDrafts(0))
        return Speculation(AUTO_DRAFTS, MeasuredDrafts(AUTO_DRAFTS))
    if not on_cpu:
        raise NotImplementedError(
            f"speculative_tokens {wanted} is not supported on CUDA yet: drafts are verified on the CPU alone, use 0"
        )
    if _core.count_draft_layers(path) == 0:
        raise ValueError(
            f"speculative_tokens is {wanted}, but the checkpoint has no draft module (mtp.* tensors): use 0 or 'auto'"
        )
    return Speculation(int(wanted), FixedDrafts(int(wanted)))
