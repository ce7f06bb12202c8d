"""What a model is, and what of it fits into memory; no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltaic import _core
from deltaic.engine_config import EngineConfig
from deltaic.memory_plan import available_memory_bytes, plan_sizes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Sizes of a checkpoint and of the caches that an engine would make for it."""

    folder: str
    architecture: str
    num_layers: int
    num_linear_attention_layers: int  # Gated DeltaNet
    num_full_attention_layers: int
    num_moe_layers: int
    num_mtp_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int  # of the text model, without the draft module
    weight_bytes: int  # of the checkpoint's files
    memory_bytes: int  # available now
    kv_bytes_per_token: int
    state_bytes_per_sequence: int  # recurrent states of one running request
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    num_snapshot_slots: int  # recurrent states kept for the prefix cache
    cache_bytes: int

    @property
    def num_cache_tokens(self) -> int:
        """Return how many tokens the attention blocks hold; block 0 is never used."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_full_length_sequences(self) -> int:
        """Return how many requests of max_model_len run at once."""
        blocks_each = -(-self.max_model_len // self.block_size)
        return min((self.num_blocks - 1) // blocks_each, self.max_num_seqs)


def model_info(folder: Path, config: EngineConfig) -> ModelInfo:
    """Return the sizes of a checkpoint and its memory plan; raises what making an engine would raise."""
    model = _core.load_model_config(folder)
    sizes, caches = plan_sizes(model, config)
    page_bytes = {"kv": 0, "state": 0}
    for group in caches.groups:
        kind = "kv" if isinstance(group.spec, _core.FullAttentionSpec) else "state"
        page_bytes[kind] += group.spec.page_size_bytes() * len(group.layer_names)
    num_running_slots = sizes.max_num_seqs if caches.num_running_slots is None else caches.num_running_slots
    num_slots = num_running_slots + caches.num_snapshot_slots
    return ModelInfo(
        folder=str(folder),
        architecture=model.architecture.name,
        num_layers=model.num_layers,
        num_linear_attention_layers=model.num_layers_of(_core.LayerKind.linear_attention),
        num_full_attention_layers=model.num_layers_of(_core.LayerKind.full_attention),
        num_moe_layers=sum(model.is_moe_layer),
        num_mtp_layers=model.num_mtp_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        num_parameters=model.num_parameters(),
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        memory_bytes=available_memory_bytes(),
        kv_bytes_per_token=page_bytes["kv"] // sizes.block_size,
        state_bytes_per_sequence=page_bytes["state"] * num_running_slots // sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        num_blocks=caches.num_blocks,
        block_size=sizes.block_size,
        num_snapshot_slots=caches.num_snapshot_slots,
        cache_bytes=page_bytes["kv"] * caches.num_blocks + page_bytes["state"] * num_slots,
    )


def describe_model(found: ModelInfo) -> list[tuple[str, str]]:
    """Return the lines of a table: name and value."""
    kinds = [
        f"{count} {kind}"
        for count, kind in (
            (found.num_linear_attention_layers, "Gated DeltaNet"),
            (found.num_full_attention_layers, "full attention"),
            (found.num_moe_layers, "with experts"),
        )
        if count
    ]
    drafts = f", and {found.num_mtp_layers} to draft" if found.num_mtp_layers else ""
    rows = [
        ("model", found.folder),
        ("architecture", f"{found.architecture}, {found.num_layers} layers ({', '.join(kinds)}){drafts}"),
        ("parameters", f"{found.num_parameters:,}"),
        ("vocabulary", f"{found.vocab_size:,} tokens, hidden size {found.hidden_size:,}"),
        ("context", f"{found.max_position_embeddings:,} tokens"),
        ("weights", f"{_size(found.weight_bytes)} on disk"),
        ("K and V", f"{_size(found.kv_bytes_per_token)} a token"),
        ("state", f"{_size(found.state_bytes_per_sequence)} a running request"),
        ("memory", f"{_size(found.memory_bytes)} available, {_size(found.cache_bytes)} for caches"),
        ("blocks", f"{found.num_blocks:,} of {found.block_size} tokens: {found.num_cache_tokens:,} tokens"),
        ("snapshots", f"{found.num_snapshot_slots:,} states for prefixes"),
        (
            "fits",
            f"{found.max_num_seqs:,} requests at once, {found.num_full_length_sequences:,} of the full "
            f"{found.max_model_len:,} tokens",
        ),
    ]
    return [row for row in rows if row[0] not in ("state", "snapshots") or found.num_linear_attention_layers]


def _size(num_bytes: int) -> str:
    """Return a number of bytes in the unit that a person would use."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
