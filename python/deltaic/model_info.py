"""What a model is, and what of it fits into memory; no weight is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from deltaic import _core
from deltaic.checkpoint import weight_file_bytes
from deltaic.device import device_index, place
from deltaic.engine_config import EngineConfig
from deltaic.memory_plan import DeviceMemory, plan_memory


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Sizes of a checkpoint, and how an engine would divide the memory of its device for it."""

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
    file_bytes: int  # of the checkpoint's weights; 0 for a config.json alone
    device: str
    dtype: str
    total_memory_bytes: int  # of the device
    free_memory_bytes: int  # now
    usable_memory_bytes: int  # of the free ones, by gpu_memory_utilization
    weight_bytes: int  # on the device; on the CPU the mapped files
    activation_bytes: int  # hidden states, workspaces, logits, the sampler's state
    graph_bytes: int
    left_memory_bytes: int  # that nothing takes
    kv_bytes_per_token: int
    state_bytes_per_sequence: int  # recurrent states of one running request
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    num_snapshot_slots: int  # recurrent states kept for the prefix cache
    cache_bytes: int  # of which
    kv_cache_bytes: int
    running_state_bytes: int
    snapshot_bytes: int

    @property
    def num_cache_tokens(self) -> int:
        """Return how many tokens the attention blocks hold; block 0 is never used."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_full_length_sequences(self) -> int:
        """Return how many requests of max_model_len run at once."""
        blocks_each = -(-self.max_model_len // self.block_size)
        return min((self.num_blocks - 1) // blocks_each, self.max_num_seqs)


def model_info(path: Path, config: EngineConfig, device_memory_bytes: int | None = None) -> ModelInfo:
    """Return the sizes of a model and its memory plan; raises what making an engine would raise.

    `path` is a checkpoint folder or a config.json. With device_memory_bytes the plan is for a GPU that has so much
    memory, all of it free, whether there is one or not.
    """
    model = _core.load_model_config(path)
    device, memory = None, None
    if device_memory_bytes is not None:
        if config.device == "cpu":
            raise ValueError("a device memory is that of a GPU: the device must not be 'cpu'")
        device = _core.Device(_core.DeviceType.cuda, device_index(config.device))
        memory = DeviceMemory(total_bytes=device_memory_bytes, free_bytes=device_memory_bytes)
    placement = place(model, config, device)
    file_bytes = weight_file_bytes(path)
    mapped_bytes = None if placement.is_cuda else file_bytes or None  # the CPU reads weights where they lie
    plan = plan_memory(model, config, placement=placement, memory=memory, weight_bytes=mapped_bytes)
    sizes, caches = plan.sizes, plan.kv_cache
    kv_page_bytes = 0
    for group in caches.groups:
        if isinstance(group.spec, _core.FullAttentionSpec):
            kv_page_bytes += group.spec.page_size_bytes() * len(group.layer_names)
    capacity = _core.cache_capacity(caches, sizes.max_model_len)
    return ModelInfo(
        folder=str(path),
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
        file_bytes=file_bytes,
        device=placement.device_name,
        dtype=placement.dtype.name,
        total_memory_bytes=plan.memory.total_bytes,
        free_memory_bytes=plan.memory.free_bytes,
        usable_memory_bytes=plan.usable_bytes,
        weight_bytes=plan.weight_bytes,
        activation_bytes=plan.activation_bytes,
        graph_bytes=plan.graph_bytes,
        left_memory_bytes=plan.left_bytes,
        kv_bytes_per_token=kv_page_bytes // sizes.block_size,
        state_bytes_per_sequence=capacity.running_state_bytes // sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        num_blocks=caches.num_blocks,
        block_size=sizes.block_size,
        num_snapshot_slots=caches.num_snapshot_slots,
        cache_bytes=plan.cache_bytes,
        kv_cache_bytes=capacity.kv_bytes,
        running_state_bytes=capacity.running_state_bytes,
        snapshot_bytes=capacity.snapshot_bytes,
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
    mapped = found.device == "cpu" and found.file_bytes > 0
    rows = [
        ("model", found.folder),
        ("architecture", f"{found.architecture}, {found.num_layers} layers ({', '.join(kinds)}){drafts}"),
        ("parameters", f"{found.num_parameters:,}"),
        ("vocabulary", f"{found.vocab_size:,} tokens, hidden size {found.hidden_size:,}"),
        ("context", f"{found.max_position_embeddings:,} tokens"),
        ("weights", f"{_size(found.file_bytes)} on disk" if found.file_bytes else "none: a config.json alone"),
        ("K and V", f"{_size(found.kv_bytes_per_token)} a token"),
        ("state", f"{_size(found.state_bytes_per_sequence)} a running request"),
        (
            "memory",
            f"{found.device}: {_size(found.free_memory_bytes)} free of {_size(found.total_memory_bytes)}, "
            f"{_size(found.usable_memory_bytes)} may be used",
        ),
        ("  weights", f"{_size(found.weight_bytes)} " + ("of mapped files" if mapped else f"in {found.dtype}")),
        (
            "  activations",
            f"{_size(found.activation_bytes)} for steps of {found.max_num_batched_tokens:,} tokens of "
            f"{found.max_num_seqs:,} requests",
        ),
        ("  graphs", _size(found.graph_bytes)),
        (
            "  blocks",
            f"{_size(found.kv_cache_bytes)}: {found.num_blocks:,} of {found.block_size} tokens, "
            f"{found.num_cache_tokens:,} tokens",
        ),
        ("  states", f"{_size(found.running_state_bytes)} of {found.max_num_seqs:,} running requests"),
        ("  snapshots", f"{_size(found.snapshot_bytes)}: {found.num_snapshot_slots:,} states for prefixes"),
        ("  left", _size(found.left_memory_bytes)),
        (
            "fits",
            f"{found.max_num_seqs:,} requests at once, {found.num_full_length_sequences:,} of the full "
            f"{found.max_model_len:,} tokens",
        ),
    ]
    absent = set()
    if not found.num_linear_attention_layers:
        absent |= {"state", "  states", "  snapshots"}
    if not found.graph_bytes:
        absent.add("  graphs")
    return [row for row in rows if row[0] not in absent]


def parse_size(name: str, text: str) -> int:
    """Return the bytes of a size like 141GB, 24GiB or 1000000; ValueError names the field."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{name} must be a size like 141GB or 24GiB, got {text!r}")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** (" kmgt".index(unit[0]) if unit else 0))


def _size(num_bytes: int) -> str:
    """Return a number of bytes in the unit that a person would use."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
