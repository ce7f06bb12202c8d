"""Copies of recurrent state at block boundaries, for any engine.

Tensors are whatever has DLPack, ``__cuda_array_interface__`` or ``__array_interface__``: PyTorch, CuPy, NumPy. A
request's states lie in blocks of a pool, found through its row of a block table: column c has the state after
(c + 1) * block_size tokens, the running column the newest one, and the columns after it one a draft token. Block 0 is
nobody's. Names and arguments are vLLM's. What does not fit (a column, a block, a count, a layout) is a ValueError that
names the numbers.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from deltaic import _core
from deltaic._core import ConvLayout, KVCacheConfig, KVCacheGroupSpec, MambaSpec, UniformTypeKVCacheSpecs

__all__ = [
    "MambaCopyBuffers",
    "MambaCopySpec",
    "MambaSpecDecodeGPUContext",
    "batch_memcpy",
    "collect_mamba_copy_meta",
    "do_mamba_copy_block",
    "get_conv_copy_spec",
    "get_mamba_groups",
    "get_temporal_copy_spec",
    "preprocess_mamba",
    "stage_postprocess_inputs_to_gpu",
]


class MambaCopySpec(NamedTuple):
    """One region of a state: its address, and how many elements."""

    start_addr: int
    num_elements: int


CopyFunc = Callable[[Any, Sequence[int], int, int], MambaCopySpec]
CopyFuncs = Mapping[Any, Sequence[CopyFunc]]
MakeBuffer = Callable[..., Any]


def batch_memcpy(src_ptrs: Any, dst_ptrs: Any, sizes: Any, stream: int | None = None) -> None:
    """Move sizes[i] bytes from src_ptrs[i] to dst_ptrs[i] for every i, as memmove does.

    Addresses are uint64 (or int64 with the same bits), sizes int32 or int64. On a GPU this only enqueues, on `stream`
    or else on the stream that the library of `src_ptrs` works on.
    """
    _core.batch_memcpy(src_ptrs, dst_ptrs, sizes, _current_stream(src_ptrs) if stream is None else stream)


def get_conv_copy_spec(
    state: Any, block_ids: Sequence[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Find what of a conv state [blocks, width, dim] stays when its first num_accepted_tokens - 1 tokens are dropped.

    In the DS layout [blocks, dim, width] that is one region only for 1 accepted token.
    """
    info = _core.array_info(state)
    offset = num_accepted_tokens - 1
    start = _block_address(info, block_ids, cur_block_idx)
    if _conv_layout() == ConvLayout.ds:
        assert offset == 0, f"a DS conv state shifted by {offset} tokens is not one region: use the fused path"
        return MambaCopySpec(start, info.shape[1] * info.shape[2])
    width, dim = info.shape[1:]
    if not 0 <= offset <= width:
        raise ValueError(f"num_accepted_tokens is {num_accepted_tokens}, the conv state holds {width} tokens")
    return MambaCopySpec(start + offset * info.strides[1] * info.itemsize, (width - offset) * dim)


def get_temporal_copy_spec(
    state: Any, block_ids: Sequence[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Find the temporal state after num_accepted_tokens tokens: a whole block, num_accepted_tokens - 1 columns on."""
    info = _core.array_info(state)
    start = _block_address(info, block_ids, cur_block_idx + num_accepted_tokens - 1)
    return MambaCopySpec(start, int(np.prod(info.shape[1:], dtype=np.int64)))


def get_mamba_groups(kv_cache_config: KVCacheConfig) -> dict[MambaSpec, list[int]]:
    """Map each recurrent spec to the ids of the groups that have it."""
    groups: dict[MambaSpec, list[int]] = {}
    for group_id, group in enumerate(kv_cache_config.groups):
        for _, spec in _mamba_layers(group):
            ids = groups.setdefault(spec, [])
            if group_id not in ids:
                ids.append(group_id)
    return groups


@dataclass(slots=True, eq=False)
class MambaCopyBuffers:
    """Pinned (source, destination, size) triples of the copies of one step, and how many there are."""

    src_ptrs: Any
    dst_ptrs: Any
    sizes: Any
    mamba_group_ids: list[int]
    mamba_spec: MambaSpec
    capacity: int
    offset: int = 0

    @classmethod
    def create(
        cls, max_num_reqs: int, kv_cache_config: KVCacheConfig, copy_funcs: CopyFuncs, make_buffer: MakeBuffer
    ) -> MambaCopyBuffers:
        """Make room for the copies of max_num_reqs requests. make_buffer(n, dtype) as for the fused context."""
        group_ids, spec = _common_spec(kv_cache_config)
        capacity = max_num_reqs * _num_states(kv_cache_config, group_ids, copy_funcs)
        return cls(
            src_ptrs=_make(make_buffer, capacity, "uint64"),
            dst_ptrs=_make(make_buffer, capacity, "uint64"),
            sizes=_make(make_buffer, capacity, "int32"),
            mamba_group_ids=group_ids,
            mamba_spec=spec,
            capacity=capacity,
        )

    def append(self, src: int, dst: int, size: int) -> None:
        """Add one copy."""
        if self.offset >= self.capacity:
            raise ValueError(f"more than {self.capacity} state copies in one step: max_num_reqs is too small")
        self.src_ptrs.np.view(np.uint64)[self.offset] = src
        self.dst_ptrs.np.view(np.uint64)[self.offset] = dst
        self.sizes.np[self.offset] = size
        self.offset += 1


def collect_mamba_copy_meta(
    copy_bufs: MambaCopyBuffers,
    kv_cache_config: KVCacheConfig,
    copy_funcs: CopyFuncs,
    mamba_group_ids: Iterable[int],
    src_block_idx: int,
    dest_block_idx: int,
    accept_token_bias: int,
    req_state: Any,
    forward_context: Mapping[str, Any],
) -> None:
    """Append the copies of all states of one request from a column, accept_token_bias tokens on, to another."""
    if src_block_idx == dest_block_idx and accept_token_bias == 0:
        return
    for group_id in mamba_group_ids:
        block_ids = req_state.block_ids[group_id]
        for layer_name, spec in _mamba_layers(kv_cache_config.groups[group_id]):
            for state, copy_func in _layer_states(layer_name, spec, copy_funcs, forward_context):
                region = copy_func(state, block_ids, src_block_idx, accept_token_bias + 1)
                info = _core.array_info(state)
                dst = _block_address(info, block_ids, dest_block_idx)
                copy_bufs.append(region.start_addr, dst, region.num_elements * info.itemsize)


def do_mamba_copy_block(copy_bufs: MambaCopyBuffers) -> None:
    """Run all collected copies in one batch_memcpy."""
    num_copies = copy_bufs.offset
    if num_copies == 0:
        return
    buffers = (copy_bufs.src_ptrs, copy_bufs.dst_ptrs, copy_bufs.sizes)
    for buffer in buffers:
        buffer.copy_to_gpu(num_copies)
    batch_memcpy(*(buffer.gpu[:num_copies] for buffer in buffers))


def preprocess_mamba(
    scheduler_output: Any,
    kv_cache_config: KVCacheConfig,
    cache_config: Any,
    mamba_state_idx: dict[str, int],
    input_batch: Any,
    requests: Mapping[str, Any],
    forward_context: Mapping[str, Any],
    copy_funcs: CopyFuncs,
    copy_bufs: MambaCopyBuffers,
) -> None:
    """Before a forward, carry the state of each request into the column that its step writes.

    mamba_state_idx (id -> running column) forgets finished, preempted and resumed requests, and is brought up to date;
    where a state moves, the request's accepted count becomes 1.
    """
    if not getattr(cache_config, "enable_prefix_caching", True):
        raise ValueError("preprocess_mamba: cache_config.enable_prefix_caching is off, so states have no columns")
    for req_id in chain(
        scheduler_output.finished_req_ids,
        scheduler_output.preempted_req_ids or (),
        scheduler_output.scheduled_cached_reqs.resumed_req_ids,
    ):
        mamba_state_idx.pop(req_id, None)

    block_size = copy_bufs.mamba_spec.block_size
    copy_bufs.offset = 0
    for row, req_id in enumerate(input_batch.req_ids):
        request = requests[req_id]
        num_computed = int(request.num_computed_tokens)
        prev = mamba_state_idx.get(req_id, (num_computed - 1) // block_size)
        num_tokens = num_computed + int(scheduler_output.num_scheduled_tokens[req_id])
        curr = -(-num_tokens // block_size) - 1
        mamba_state_idx[req_id] = curr
        if prev in (-1, curr):
            continue
        bias = int(input_batch.num_accepted_tokens_cpu[row]) - 1
        collect_mamba_copy_meta(
            copy_bufs,
            kv_cache_config,
            copy_funcs,
            copy_bufs.mamba_group_ids,
            prev,
            curr,
            bias,
            request,
            forward_context,
        )
        input_batch.num_accepted_tokens_cpu[row] = 1
    do_mamba_copy_block(copy_bufs)


@dataclass(slots=True, eq=False)
class MambaSpecDecodeGPUContext:
    """Fused copies for speculative decoding: one launch decides for all requests and moves all their states.

    make_buffer(n, dtype) gives an object with .cpu, .gpu, .np and copy_to_gpu(n); dtype is PyTorch's when that takes
    it, else NumPy's. The context works on the device of its states.
    """

    max_num_reqs: int
    num_states: int
    mamba_group_ids: list[int]
    mamba_spec: MambaSpec
    conv_layout: ConvLayout
    device: Any
    # Results of the fused calls, [max_num_reqs] int32.
    num_accepted_tokens_out: Any
    mamba_state_idx_out: Any
    # What stage_postprocess_inputs_to_gpu fills, [max_num_reqs] int32.
    mamba_state_idx_buf: Any
    num_scheduled_tokens_buf: Any
    num_computed_tokens_buf: Any
    num_draft_tokens_buf: Any
    # One entry a state or a block table, see _METADATA. Behind each array is a buffer of make_buffer.
    state_base_addrs: Any
    state_block_strides: Any
    state_elem_sizes: Any
    state_inner_sizes: Any
    state_conv_widths: Any
    state_group_indices: Any
    block_table_ptrs: Any
    _metadata: dict[str, Any]
    is_initialized: bool = False
    _copies: _core.StateCopies | None = None
    _tensors: tuple[Any, ...] = ()  # keeps states and tables alive

    @classmethod
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: KVCacheConfig,
        copy_funcs: CopyFuncs,
        device: Any,
        make_buffer: MakeBuffer,
        conv_layout: ConvLayout | str | None = None,
    ) -> MambaSpecDecodeGPUContext:
        """Make the buffers of a context for max_num_reqs requests. conv_layout: SD unless the environment says DS."""
        group_ids, spec = _common_spec(kv_cache_config)
        num_states = _num_states(kv_cache_config, group_ids, copy_funcs)
        sizes = {name: len(group_ids) if name == "block_table_ptrs" else num_states for name in _METADATA}
        metadata = {name: _make(make_buffer, sizes[name], dtype) for name, dtype in _METADATA.items()}
        return cls(
            max_num_reqs=max_num_reqs,
            num_states=num_states,
            mamba_group_ids=group_ids,
            mamba_spec=spec,
            conv_layout=_conv_layout(conv_layout),
            device=device,
            num_accepted_tokens_out=_make(make_buffer, max_num_reqs, "int32").gpu,
            mamba_state_idx_out=_make(make_buffer, max_num_reqs, "int32").gpu,
            mamba_state_idx_buf=_make(make_buffer, max_num_reqs, "int32"),
            num_scheduled_tokens_buf=_make(make_buffer, max_num_reqs, "int32"),
            num_computed_tokens_buf=_make(make_buffer, max_num_reqs, "int32"),
            num_draft_tokens_buf=_make(make_buffer, max_num_reqs, "int32"),
            _metadata=metadata,
            **{name: buffer.gpu for name, buffer in metadata.items()},
        )

    def initialize_from_forward_context(
        self,
        kv_cache_config: KVCacheConfig,
        forward_context: Mapping[str, Any],
        copy_funcs: CopyFuncs,
        block_tables: Sequence[Any],
    ) -> None:
        """Note where all states and block tables lie; they must stay there.

        forward_context[layer].kv_cache has the layer's states in the order of its spec; more of them are ignored.
        block_tables: int32 [rows, columns], one a recurrent group, or one a group of the config.
        """
        num_groups = len(kv_cache_config.groups)
        if len(block_tables) not in (len(self.mamba_group_ids), num_groups):
            raise ValueError(
                f"{len(block_tables)} block tables, for {len(self.mamba_group_ids)} recurrent groups of {num_groups}"
            )
        if len(block_tables) != len(self.mamba_group_ids):
            block_tables = [block_tables[group_id] for group_id in self.mamba_group_ids]
        states: list[tuple[Any, bool, int]] = []
        for index, group_id in enumerate(self.mamba_group_ids):
            for layer_name, spec in _mamba_layers(kv_cache_config.groups[group_id]):
                for state, copy_func in _layer_states(layer_name, spec, copy_funcs, forward_context):
                    states.append((state, _is_conv(copy_func), index))
        if len(states) != self.num_states:
            raise ValueError(
                f"the forward context has {len(states)} states, the context was made for {self.num_states}"
            )
        self._copies = _core.StateCopies(states, list(block_tables), self.mamba_spec.block_size, self.conv_layout)
        self._tensors = (*(state for state, _, _ in states), *block_tables)
        tensors = self._copies.states
        self._fill("state_base_addrs", [tensor.base for tensor in tensors])
        self._fill("state_block_strides", [tensor.slot_stride for tensor in tensors])
        self._fill("state_elem_sizes", [tensor.elem_size for tensor in tensors])
        self._fill("state_inner_sizes", [_inner_size(tensor) for tensor in tensors])
        self._fill("state_conv_widths", [tensor.conv_width for tensor in tensors])
        self._fill("state_group_indices", [tensor.group for tensor in tensors])
        self._fill("block_table_ptrs", self._copies.block_table_ptrs)
        self.is_initialized = True

    def run_fused_postprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Any,
        mamba_state_idx_gpu: Any,
        num_scheduled_tokens_gpu: Any,
        num_computed_tokens_gpu: Any,
        num_draft_tokens_gpu: Any,
        stream: int | None = None,
    ) -> None:
        """After sampling, save the states whose block was completed; the counts go to num_accepted_tokens_out.

        Inputs are int32 with num_reqs entries or more, and none of them may be num_accepted_tokens_out. Enqueues one
        launch, on `stream` or else on the stream that the library of num_accepted_tokens_gpu works on.
        """
        self._ready(num_reqs).postprocess(
            num_reqs,
            num_accepted_tokens_gpu,
            mamba_state_idx_gpu,
            num_scheduled_tokens_gpu,
            num_computed_tokens_gpu,
            num_draft_tokens_gpu,
            self.num_accepted_tokens_out,
            _current_stream(num_accepted_tokens_gpu) if stream is None else stream,
        )

    def run_fused_preprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Any,
        mamba_state_idx_gpu: Any,
        num_scheduled_tokens_gpu: Any,
        num_computed_tokens_gpu: Any,
        stream: int | None = None,
    ) -> None:
        """Before a forward, carry states into the columns that the step writes.

        The counts go to num_accepted_tokens_out, the running columns of the step to mamba_state_idx_out. Otherwise as
        run_fused_postprocess.
        """
        self._ready(num_reqs).preprocess(
            num_reqs,
            num_accepted_tokens_gpu,
            mamba_state_idx_gpu,
            num_scheduled_tokens_gpu,
            num_computed_tokens_gpu,
            self.num_accepted_tokens_out,
            self.mamba_state_idx_out,
            _current_stream(num_accepted_tokens_gpu) if stream is None else stream,
        )

    def _ready(self, num_reqs: int) -> _core.StateCopies:
        if self._copies is None:
            raise ValueError("the context is not initialized: call initialize_from_forward_context first")
        if num_reqs > self.max_num_reqs:
            raise ValueError(f"num_reqs is {num_reqs}, the context was made for {self.max_num_reqs}")
        return self._copies

    def _fill(self, name: str, values: Sequence[int]) -> None:
        buffer = self._metadata[name]
        if _METADATA[name] == "int64":
            buffer.np.view(np.uint64)[:] = np.array(values, dtype=np.uint64)
        else:
            buffer.np[:] = values
        buffer.copy_to_gpu(len(values))


def stage_postprocess_inputs_to_gpu(
    ctx: MambaSpecDecodeGPUContext,
    scheduler_output: Any,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, Any],
    mamba_state_idx: Mapping[str, int],
) -> None:
    """Fill and copy the four staging buffers of `ctx` for the first num_reqs requests."""
    if num_reqs > ctx.max_num_reqs:
        raise ValueError(f"num_reqs is {num_reqs}, the context was made for {ctx.max_num_reqs}")
    for row, req_id in enumerate(req_ids[:num_reqs]):
        state_idx = mamba_state_idx.get(req_id)
        assert state_idx is not None, f"mamba_state_idx missing entry for request {req_id!r}"
        ctx.mamba_state_idx_buf.np[row] = state_idx
        ctx.num_scheduled_tokens_buf.np[row] = scheduler_output.num_scheduled_tokens[req_id]
        ctx.num_computed_tokens_buf.np[row] = requests[req_id].num_computed_tokens
        ctx.num_draft_tokens_buf.np[row] = len(scheduler_output.scheduled_spec_decode_tokens.get(req_id, ()))
    for buffer in (
        ctx.mamba_state_idx_buf,
        ctx.num_scheduled_tokens_buf,
        ctx.num_computed_tokens_buf,
        ctx.num_draft_tokens_buf,
    ):
        buffer.copy_to_gpu(num_reqs)


# What a context notes of each state (of each group: block_table_ptrs). Addresses are the bits of a uint64; strides are
# bytes; the inner size is the elements of a token (SD), 1 (DS) or the elements of a block (temporal); the conv width is
# in tokens, 0 for a temporal state.
_METADATA = {
    "state_base_addrs": "int64",
    "state_block_strides": "int64",
    "state_elem_sizes": "int32",
    "state_inner_sizes": "int64",
    "state_conv_widths": "int32",
    "state_group_indices": "int32",
    "block_table_ptrs": "int64",
}


def _inner_size(tensor: _core.StateTensor) -> int:
    if tensor.num_rows > 0:
        return 1
    return int(tensor.row_bytes if tensor.conv_width > 0 else tensor.state_bytes) // int(tensor.elem_size)


def _conv_layout(layout: ConvLayout | str | None = None) -> ConvLayout:
    """Return the layout asked for, by default the environment's."""
    if isinstance(layout, ConvLayout):
        return layout
    what = "VLLM_SSM_CONV_STATE_LAYOUT" if layout is None else "conv_layout"
    name = os.environ.get(what, "SD") if layout is None else layout
    if name not in ("SD", "DS"):
        raise ValueError(f"{what} is {name!r}, must be SD or DS")
    return ConvLayout.ds if name == "DS" else ConvLayout.sd


def _is_conv(copy_func: CopyFunc) -> bool:
    if copy_func is get_conv_copy_spec:
        return True
    if copy_func is get_temporal_copy_spec:
        return False
    raise ValueError(f"{copy_func!r} is neither get_conv_copy_spec nor get_temporal_copy_spec")


def _block_address(info: _core.ArrayInfo, block_ids: Sequence[int], column: int) -> int:
    if not 0 <= column < len(block_ids):
        raise ValueError(f"column {column} of a block table row of {len(block_ids)}")
    block_id = int(block_ids[column])
    if not 0 <= block_id < info.shape[0]:
        raise ValueError(f"block {block_id} in column {column}, the state has {info.shape[0]} blocks")
    return int(info.address) + block_id * int(info.strides[0]) * int(info.itemsize)


def _mamba_layers(group: KVCacheGroupSpec) -> Iterator[tuple[str, MambaSpec]]:
    spec = group.spec
    for layer_name in group.layer_names:
        layer_spec = spec.layer_specs[layer_name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        if isinstance(layer_spec, MambaSpec):
            yield layer_name, layer_spec


def _copy_funcs_of(spec: MambaSpec, copy_funcs: CopyFuncs) -> Sequence[CopyFunc]:
    for key in (spec.mamba_type, spec.mamba_type.name):
        if key in copy_funcs:
            return copy_funcs[key]
    raise ValueError(f"no copy functions for the mamba type {spec.mamba_type.name}")


def _layer_states(
    layer_name: str, spec: MambaSpec, copy_funcs: CopyFuncs, forward_context: Mapping[str, Any]
) -> Iterator[tuple[Any, CopyFunc]]:
    functions = _copy_funcs_of(spec, copy_funcs)
    states = forward_context[layer_name].kv_cache
    if len(states) < len(functions):
        raise ValueError(f"{layer_name} has {len(states)} state tensors, there are {len(functions)} copy functions")
    return zip(states, functions, strict=False)


def _num_states(kv_cache_config: KVCacheConfig, group_ids: Iterable[int], copy_funcs: CopyFuncs) -> int:
    layers = chain.from_iterable(_mamba_layers(kv_cache_config.groups[group_id]) for group_id in group_ids)
    return sum(len(_copy_funcs_of(spec, copy_funcs)) for _, spec in layers)


def _common_spec(kv_cache_config: KVCacheConfig) -> tuple[list[int], MambaSpec]:
    """Return the recurrent groups and the first spec; what all of them must share is checked."""
    groups = get_mamba_groups(kv_cache_config)
    if not groups:
        raise ValueError(f"none of the {len(kv_cache_config.groups)} KV-cache groups is recurrent")
    first, *others = groups
    for spec in others:
        for field in ("block_size", "num_speculative_blocks", "cache_mode"):
            if getattr(spec, field) != getattr(first, field):
                raise ValueError(
                    f"the recurrent groups disagree on {field}: {getattr(first, field)} and {getattr(spec, field)}"
                )
    return sorted(set(chain.from_iterable(groups.values()))), first


def _make(make_buffer: MakeBuffer, size: int, dtype: str) -> Any:
    """Call make_buffer(size, dtype) with PyTorch's dtype if that is loaded and taken, else with NumPy's."""
    by_keyword = "dtype" in inspect.signature(make_buffer).parameters

    def call(library_dtype: Any) -> Any:
        return make_buffer(size, dtype=library_dtype) if by_keyword else make_buffer(size, library_dtype)

    torch = sys.modules.get("torch")
    if torch is not None:
        try:
            return call(getattr(torch, dtype))
        except TypeError:  # a maker of NumPy arrays
            pass
    return call(np.dtype(dtype))


def _current_stream(array: Any) -> int:
    """Return the stream that the library of `array` works on now; 0, the default stream, for others."""
    library = type(array).__module__.partition(".")[0]
    if library == "torch" and array.is_cuda:
        return int(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    if library == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0
