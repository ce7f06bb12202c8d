"""Whether an engine drafts with the model's own draft module, and how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltaic import _core
from deltaic.draft_policy import DraftPolicy, FixedDrafts, MeasuredDrafts
from deltaic.engine_config import MAX_SPECULATIVE_TOKENS, EngineConfig

AUTO_DRAFTS = 2  # the most that "auto" tries


@dataclass(frozen=True, slots=True)
class Speculation:
    """The most drafts of a step, and who chooses among them."""

    num_tokens: int
    policy: DraftPolicy


def plan_speculation(path: str | Path, config: EngineConfig, device: _core.DeviceType) -> Speculation:
    """Return what `config` asks for and the checkpoint can do.

    ValueError for a number of drafts where the checkpoint has no draft module. Random weights ("dummy") have the
    module that config.json names; "auto" makes no drafts with them, as none would be right.
    """
    wanted = config.speculative_tokens
    if wanted == 0:
        return Speculation(0, FixedDrafts(0))
    is_dummy = config.load_format == "dummy"
    num_layers = _core.load_model_config(path).num_mtp_layers if is_dummy else _core.count_draft_layers(path)
    max_drafts = MAX_SPECULATIVE_TOKENS
    if device != _core.DeviceType.cpu:
        # A step may begin as many tokens before what is known, and takes one snapshot of a request.
        max_drafts = min((config.mamba_block_size - 1) // 2, max_drafts)
    if wanted == "auto":
        if is_dummy or num_layers != 1 or max_drafts < AUTO_DRAFTS:
            return Speculation(0, FixedDrafts(0))
        return Speculation(AUTO_DRAFTS, MeasuredDrafts(AUTO_DRAFTS))
    if num_layers == 0:
        raise ValueError(
            f"speculative_tokens is {wanted}, but the checkpoint has no draft module (mtp.* tensors): use 0 or 'auto'"
        )
    num_drafts = int(wanted)
    if num_drafts > max_drafts:
        raise ValueError(
            f"mamba_block_size {config.mamba_block_size} is too small for {num_drafts} drafts on a GPU: at least "
            f"{2 * num_drafts + 1} is needed"
        )
    return Speculation(num_drafts, FixedDrafts(num_drafts))
