"""deltaic.mamba on NumPy arrays and PyTorch tensors, on the CPU and on a GPU where there is one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltaic import mamba  # noqa: E402
from deltaic._core import (  # noqa: E402
    ConvLayout,
    DType,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaCacheMode,
    MambaSpec,
    MambaType,
    UniformTypeKVCacheSpecs,
)

BLOCK = 16
GDN_FUNCS = (mamba.get_conv_copy_spec, mamba.get_temporal_copy_spec)
COPY_FUNCS = {MambaType.gdn: GDN_FUNCS, MambaType.short_conv: (mamba.get_conv_copy_spec,)}

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_gpu)])


class Buffer:
    """What vLLM calls CpuGpuBuffer."""

    def __init__(self, size: int, dtype: Any, device: str) -> None:
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=device == "cuda")
        self.gpu = self.cpu if device == "cpu" else self.cpu.to(device)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n: int) -> Any:
        return self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)


def make_buffer(device: str) -> Any:
    return lambda n, dtype: Buffer(n, dtype, device)


def gdn_spec(width: int = 4, dim: int = 8, temporal: int = 24, speculative: int = 3) -> MambaSpec:
    return MambaSpec(
        block_size=BLOCK,
        shapes=[[width, dim], [temporal]],
        dtypes=[DType.f16, DType.f32],
        mamba_type=MambaType.gdn,
        cache_mode=MambaCacheMode.align,
        num_speculative_blocks=speculative,
    )


def short_conv_spec(width: int = 12, dim: int = 8, speculative: int = 3) -> MambaSpec:
    return MambaSpec(
        block_size=BLOCK,
        shapes=[[width, dim]],
        dtypes=[DType.f16],
        mamba_type=MambaType.short_conv,
        cache_mode=MambaCacheMode.align,
        num_speculative_blocks=speculative,
    )


@dataclass
class World:
    """Layers with random states in strided pages, one block table a group, and a fused context on them."""

    config: KVCacheConfig
    forward_context: dict[str, Any]
    tables: list[Any]
    device: str
    layout: str = "SD"
    ctx: Any = field(init=False)

    def __post_init__(self) -> None:
        self.ctx = mamba.MambaSpecDecodeGPUContext.create(
            len(self.tables[0]), self.config, COPY_FUNCS, self.device, make_buffer(self.device)
        )
        self.ctx.initialize_from_forward_context(self.config, self.forward_context, COPY_FUNCS, self.tables)

    def states(self) -> list[tuple[int, Any, Any]]:
        """(group, state, copy function) of every state."""
        result = []
        for group_id, group in enumerate(self.config.groups):
            for name in group.layer_names:
                spec = group.spec.layer_specs[name] if isinstance(group.spec, UniformTypeKVCacheSpecs) else group.spec
                functions = COPY_FUNCS[spec.mamba_type]
                result += [
                    (group_id, s, f) for s, f in zip(self.forward_context[name].kv_cache, functions, strict=False)
                ]
        return result

    def run(self, rows: list[tuple[int, int, int, int, int]]) -> list[int]:
        """Postprocess rows of (computed, scheduled, drafts, accepted, running column); the resulting counts."""
        columns = [torch.tensor(x, dtype=torch.int32, device=self.device) for x in zip(*rows, strict=True)]
        computed, scheduled, drafts, accepted, state_idx = columns
        self.ctx.run_fused_postprocess(len(rows), accepted, state_idx, scheduled, computed, drafts)
        return self.ctx.num_accepted_tokens_out[: len(rows)].tolist()

    def expected(self, rows: list[tuple[int, int, int, int, int]]) -> tuple[list[int], list[Any]]:
        """The same by the rules read aloud, on copies of the states."""
        counts = []
        results = [state.clone() for _, state, _ in self.states()]
        for row, (computed, scheduled, drafts, accepted, src) in enumerate(rows):
            certain = computed + scheduled - drafts
            aligned = (certain + accepted - 1) // BLOCK * BLOCK
            counts.append(accepted)
            if aligned < certain:
                continue
            bias, dst = aligned - certain, aligned // BLOCK - 1
            if src == dst:
                counts[-1] = 1
                if bias == 0:
                    continue
            for (group, state, copy_func), result in zip(self.states(), results, strict=True):
                slots = self.tables[group][row].tolist()
                if copy_func is mamba.get_temporal_copy_spec:
                    result[slots[dst]] = state[slots[src + bias]]
                elif self.layout == "SD":
                    width = state.shape[1]
                    result[slots[dst], : width - bias] = state[slots[src], bias:]
                else:
                    width = state.shape[2]
                    result[slots[dst], :, : width - bias] = state[slots[src], :, bias:]
        return counts, results


def pages(num_blocks: int, shapes: list[list[int]], dtypes: list[Any], device: str) -> list[Any]:
    """State tensors packed in one page a block, as strided views of one byte buffer."""
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    page = -(-sum(sizes) // 8) * 8 + 16
    raw = torch.randint(1, 120, (num_blocks * page,), dtype=torch.uint8, device=device)
    views, offset = [], 0
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        typed = raw.view(dtype)
        strides = [page // dtype.itemsize, *torch.empty(shape, device="meta").stride()]
        views.append(typed.as_strided([num_blocks, *shape], strides, offset // dtype.itemsize))
        offset += size
    return views


def gdn_world(
    device: str,
    num_rows: int,
    dtype: Any = torch.float16,
    layout: str = "SD",
    slots: list[list[int]] | None = None,
    num_layers: int = 2,
) -> World:
    columns = 8
    shape = [6, 10] if layout == "SD" else [10, 6]
    layers = [f"layers.{i}" for i in range(num_layers)]
    table = torch.arange(1, num_rows * columns + 1, dtype=torch.int32, device=device).reshape(num_rows, columns)
    for row, values in enumerate(slots or []):
        table[row, : len(values)] = torch.tensor(values, dtype=torch.int32) + num_rows * columns
    num_blocks = num_rows * columns + 64
    context = {
        name: SimpleNamespace(kv_cache=pages(num_blocks, [shape, [4, 6]], [dtype, torch.float32], device))
        for name in layers
    }
    config = KVCacheConfig(groups=[KVCacheGroupSpec(layer_names=layers, spec=gdn_spec())])
    return World(config, context, [table], device, layout)


# ---- batch_memcpy ---------------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("address_dtype", [torch.uint64, torch.int64])
@pytest.mark.parametrize("size_dtype", [torch.int32, torch.int64])
def test_batch_memcpy_is_an_exact_memmove(device: str, address_dtype: Any, size_dtype: Any) -> None:
    rows, row_bytes, shift = 128, 32768, 16
    memory = (torch.arange(rows * row_bytes, device=device) % row_bytes % 251).to(torch.uint8).reshape(rows, row_bytes)
    expected = memory.clone()
    starts = memory.data_ptr() + np.arange(rows, dtype=np.uint64) * np.uint64(row_bytes)
    to_tensor = lambda x, dtype: torch.from_numpy(x.view(np.int64)).view(dtype).to(device)  # noqa: E731
    src, dst = to_tensor(starts + np.uint64(shift), address_dtype), to_tensor(starts, address_dtype)
    sizes = torch.full((rows,), row_bytes - shift, dtype=size_dtype, device=device)
    for _ in range(10):
        mamba.batch_memcpy(src, dst, sizes)
        expected[:, : row_bytes - shift] = expected[:, shift:].clone()
        assert torch.equal(memory, expected)
    for _ in range(3):
        mamba.batch_memcpy(dst, src, sizes)
        expected[:, shift:] = expected[:, : row_bytes - shift].clone()
        assert torch.equal(memory, expected)


def test_batch_memcpy_takes_numpy_and_an_empty_list() -> None:
    memory = np.arange(100, dtype=np.uint8)
    address = memory.ctypes.data
    mamba.batch_memcpy(
        np.array([address, address + 50], dtype=np.uint64),
        np.array([address + 20, address + 90], dtype=np.uint64),
        np.array([5, 0], dtype=np.int32),
    )
    assert memory[20:26].tolist() == [0, 1, 2, 3, 4, 25]
    assert memory[90] == 90
    mamba.batch_memcpy(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int32))


def test_batch_memcpy_refuses_what_does_not_fit() -> None:
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="1 sources, 2 destinations, 1 sizes"):
        mamba.batch_memcpy(one, two, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="sizes has elements of kind f and 4 bytes, must be int32 or int64"):
        mamba.batch_memcpy(one, one, np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="src_ptrs is a list, which has neither DLPack nor an array interface"):
        mamba.batch_memcpy([1], one, np.zeros(1, np.int32))


# ---- copy specs and groups ------------------------------------------------------------------------------------------


def test_copy_specs_are_one_region() -> None:
    conv, temporal = pages(9, [[6, 10], [4, 6]], [torch.bfloat16, torch.float32], "cpu")
    block_ids = [3, 7, 2, 5]
    spec = mamba.get_conv_copy_spec(conv, block_ids, 1, 3)
    assert spec == (conv[7, 2].data_ptr(), 4 * 10)
    assert spec.start_addr == conv[7, 2].data_ptr()
    assert mamba.get_temporal_copy_spec(temporal, block_ids, 1, 3) == (temporal[5].data_ptr(), 24)
    with pytest.raises(ValueError, match="column 4 of a block table row of 4"):
        mamba.get_temporal_copy_spec(temporal, block_ids, 1, 4)


def test_a_shifted_ds_conv_state_is_not_one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    state = torch.zeros(4, 10, 6)
    assert mamba.get_conv_copy_spec(state, [2, 1], 0, 1) == (state[2].data_ptr(), 60)
    with pytest.raises(AssertionError, match="shifted by 1 tokens"):
        mamba.get_conv_copy_spec(state, [2, 1], 0, 2)


def mixed_config(uniform: bool) -> KVCacheConfig:
    attention = KVCacheGroupSpec(layer_names=["attn"], spec=FullAttentionSpec(num_kv_heads=1, head_size=8))
    if uniform:
        spec = UniformTypeKVCacheSpecs(
            block_size=BLOCK, layer_specs={"a": gdn_spec(), "b": gdn_spec(), "c": short_conv_spec()}
        )
        return KVCacheConfig(groups=[attention, KVCacheGroupSpec(layer_names=["a", "b", "c"], spec=spec)])
    return KVCacheConfig(
        groups=[
            attention,
            KVCacheGroupSpec(layer_names=["a", "b"], spec=gdn_spec()),
            KVCacheGroupSpec(layer_names=["c"], spec=short_conv_spec()),
        ]
    )


def mixed_context(num_blocks: int, device: str = "cpu") -> dict[str, Any]:
    half, single = torch.float16, torch.float32
    gdn = lambda: pages(num_blocks, [[4, 8], [24]], [half, single], device)  # noqa: E731
    extra = torch.zeros(3, device=device)
    return {
        "a": SimpleNamespace(kv_cache=[*gdn(), extra]),
        "b": SimpleNamespace(kv_cache=gdn()),
        "c": SimpleNamespace(kv_cache=[*pages(num_blocks, [[12, 8]], [half], device), extra, extra]),
        "attn": SimpleNamespace(kv_cache=[extra]),
    }


def test_groups_are_found_by_spec() -> None:
    assert mamba.get_mamba_groups(mixed_config(uniform=False)) == {gdn_spec(): [1], short_conv_spec(): [2]}
    assert mamba.get_mamba_groups(mixed_config(uniform=True)) == {gdn_spec(): [1], short_conv_spec(): [1]}


def test_recurrent_groups_must_agree() -> None:
    config = mixed_config(uniform=False)
    groups = config.groups
    groups[2] = KVCacheGroupSpec(layer_names=["c"], spec=short_conv_spec(speculative=1))
    config.groups = groups
    with pytest.raises(ValueError, match="disagree on num_speculative_blocks: 3 and 1"):
        mamba.MambaCopyBuffers.create(4, config, COPY_FUNCS, make_buffer("cpu"))
    with pytest.raises(ValueError, match="none of the 1 KV-cache groups is recurrent"):
        mamba.MambaCopyBuffers.create(4, KVCacheConfig(groups=groups[:1]), COPY_FUNCS, make_buffer("cpu"))


@on_devices
@pytest.mark.parametrize(("uniform", "group_indices"), [(False, [0, 0, 0, 0, 1]), (True, [0, 0, 0, 0, 0])])
def test_two_gdn_and_one_short_conv_layer_have_five_states(
    device: str, uniform: bool, group_indices: list[int]
) -> None:
    config, context = mixed_config(uniform), mixed_context(9, device)
    ctx = mamba.MambaSpecDecodeGPUContext.create(4, config, COPY_FUNCS, device, make_buffer(device))
    assert ctx.num_states == 5
    assert not ctx.is_initialized
    tables = [torch.zeros(4, 8, dtype=torch.int32, device=device) for _ in config.groups]
    ctx.initialize_from_forward_context(config, context, COPY_FUNCS, tables)
    assert ctx.is_initialized
    assert ctx.mamba_group_ids == ([1] if uniform else [1, 2])
    assert ctx.state_conv_widths.tolist() == [4, 0, 4, 0, 12]
    assert ctx.state_group_indices.tolist() == group_indices
    assert ctx.state_inner_sizes.tolist() == [8, 24, 8, 24, 8]
    assert ctx.state_elem_sizes.tolist() == [2, 4, 2, 4, 2]
    states = [context[name].kv_cache[i] for name, i in (("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0))]
    assert ctx.state_base_addrs.tolist() == [state.data_ptr() for state in states]
    assert ctx.state_block_strides.tolist() == [state.stride(0) * state.element_size() for state in states]
    assert ctx.block_table_ptrs.tolist() == [table.data_ptr() for table in tables[1:]]


@pytest.mark.parametrize("address", [0, 1, 2**63 - 1, 2**63, 2**63 + 1234, 2**64 - 1])
def test_addresses_keep_all_their_bits(address: int) -> None:
    class Fake:
        __array_interface__ = {  # noqa: RUF012
            "version": 3, "typestr": "<f4", "shape": (4, 24), "strides": None, "data": (address, False),
        }  # fmt: skip

    spec = MambaSpec(block_size=BLOCK, shapes=[[24]], dtypes=[DType.f32], mamba_type=MambaType.gdn)
    config = KVCacheConfig(groups=[KVCacheGroupSpec(layer_names=["a"], spec=spec)])
    functions = {MambaType.gdn: (mamba.get_temporal_copy_spec,)}
    ctx = mamba.MambaSpecDecodeGPUContext.create(1, config, functions, "cpu", make_buffer("cpu"))
    table = np.zeros((1, 4), np.int32)
    ctx.initialize_from_forward_context(config, {"a": SimpleNamespace(kv_cache=[Fake()])}, functions, [table])
    assert ctx.state_base_addrs.numpy().view(np.uint64)[0] == address


# ---- fused postprocess ----------------------------------------------------------------------------------------------

# computed, scheduled, drafts, accepted, running column; the resulting count; slots of the row
VECTORS = [
    ((60, 5, 2, 3, 3), 1, []),
    ((30, 3, 0, 2, 1), 2, []),
    ((45, 8, 3, 4, 2), 4, []),
    ((10, 6, 0, 2, 0), 1, []),
    ((30, 3, 0, 1, 1), 1, []),
    ((60, 5, 0, 3, 3), 3, []),
    ((30, 2, 0, 5, 1), 1, []),
    ((30, 1, 0, 2, 1), 1, []),
    ((60, 3, 0, 3, 2), 3, []),
    ((30, 2, 0, 3, 0), 3, [5, 5]),
    ((48, 0, 0, 1, 2), 1, []),
    ((31, 1, 0, 3, 0), 3, [41, 7]),
    ((28, 2, 0, 3, 1), 1, []),
    *(((32 - 2 * b, b, 0, b + 1, 1), 1, []) for b in (1, 2, 3)),
    *(((64 - 2 * b, b, 0, b + 1, 2), b + 1, []) for b in (1, 2, 3)),
]


@on_devices
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_postprocess_gives_the_worked_vectors(
    device: str, layout: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
    rows = [row for row, _, _ in VECTORS]
    world = gdn_world(device, len(rows), dtype, layout, [slots for _, _, slots in VECTORS])
    counts, states = world.expected(rows)
    assert counts == [count for _, count, _ in VECTORS]
    assert world.run(rows) == counts
    for (_, state, _), expected in zip(world.states(), states, strict=True):
        assert torch.equal(state.view(torch.uint8), expected.view(torch.uint8))


@on_devices
def test_each_vector_alone_gives_what_the_batch_gives(device: str) -> None:
    for row, count, slots in VECTORS:
        world = gdn_world(device, 1, slots=[slots])
        counts, states = world.expected([row])
        assert world.run([row]) == counts == [count]
        assert all(torch.equal(state, expected) for (_, state, _), expected in zip(world.states(), states, strict=True))


@on_devices
def test_a_sliced_wide_table_gives_what_a_tight_one_gives(device: str) -> None:
    rows = [row for row, _, slots in VECTORS if not slots][:4]
    world = gdn_world(device, 4)
    counts, states = world.expected(rows)
    wide = torch.full((16, 512), 1 << 20, dtype=torch.int32, device=device)
    wide[:4, :8] = world.tables[0]
    world.ctx.initialize_from_forward_context(world.config, world.forward_context, COPY_FUNCS, [wide[:4, :8]])
    assert world.run(rows) == counts
    assert all(torch.equal(state, expected) for (_, state, _), expected in zip(world.states(), states, strict=True))


@on_devices
@pytest.mark.parametrize("uniform", [False, True])
def test_random_batches_over_mixed_layers(device: str, uniform: bool) -> None:
    rng = random.Random(7)
    config = mixed_config(uniform)
    for _ in range(20):
        num_rows = rng.randint(1, 24)
        num_blocks = num_rows * 8 + 1
        table = torch.arange(1, num_blocks, dtype=torch.int32, device=device).reshape(num_rows, 8)
        other = num_blocks - table  # the same blocks in another order
        world = World(config, mixed_context(num_blocks, device), [table, table, other][: len(config.groups)], device)
        rows = []
        for _ in range(num_rows):
            drafts, accepted = rng.randint(0, 3), rng.randint(1, 4)
            certain = rng.choice([rng.randint(1, 60), 16 * rng.randint(1, 4) - rng.randint(0, 3)])
            scheduled = min(certain, rng.randint(1, 20)) + drafts
            rows.append((certain + drafts - scheduled, scheduled, drafts, accepted, (certain + drafts - 1) // BLOCK))
        world.config = KVCacheConfig(groups=config.groups[1:])  # what expected() goes through
        world.tables = world.tables[1:]
        counts, states = world.expected(rows)
        assert world.run(rows) == counts
        for (_, state, _), expected in zip(world.states(), states, strict=True):
            assert torch.equal(state, expected)


@on_devices
@pytest.mark.parametrize("accepted", [0, -1, 5, 2**30])
def test_a_garbage_count_harms_nobody(device: str, accepted: int) -> None:
    world = gdn_world(device, 2)
    world.run([(30, 3, 0, accepted, 7), (30, 1, 0, 2, 1)])
    before = [state.clone() for _, state, _ in world.states()]
    counts = world.run([(30, 3, 0, accepted, 7), (20, 1, 0, 1, 1)])
    assert counts == [accepted, 1]
    assert all(torch.equal(state, old) for (_, state, _), old in zip(world.states(), before, strict=True))


def test_a_context_refuses_what_does_not_fit() -> None:
    world = gdn_world("cpu", 2)
    rows = [(30, 3, 0, 2, 1)] * 3
    with pytest.raises(ValueError, match="num_reqs is 3, the context was made for 2"):
        world.run(rows)
    vector = torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_accepted_tokens has elements of kind f and 4 bytes, must be int32"):
        world.ctx.run_fused_postprocess(2, vector.float(), vector, vector, vector, vector)
    out = world.ctx.num_accepted_tokens_out
    with pytest.raises(ValueError, match="the inputs must be a snapshot"):
        world.ctx.run_fused_postprocess(2, out, vector, vector, vector, vector)
    fresh = mamba.MambaSpecDecodeGPUContext.create(2, world.config, COPY_FUNCS, "cpu", make_buffer("cpu"))
    with pytest.raises(ValueError, match="not initialized"):
        fresh.run_fused_postprocess(2, vector, vector, vector, vector, vector)
    unknown = {MambaType.gdn: (max, min)}
    with pytest.raises(ValueError, match="is neither get_conv_copy_spec nor get_temporal_copy_spec"):
        fresh.initialize_from_forward_context(world.config, world.forward_context, unknown, world.tables)
    with pytest.raises(ValueError, match="3 block tables, for 1 recurrent groups of 1"):
        fresh.initialize_from_forward_context(world.config, world.forward_context, COPY_FUNCS, world.tables * 3)


def test_the_conv_layout_is_read_at_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KVCacheConfig(groups=[KVCacheGroupSpec(layer_names=["a"], spec=gdn_spec())])
    create = lambda: mamba.MambaSpecDecodeGPUContext.create(2, config, COPY_FUNCS, "cpu", make_buffer("cpu"))  # noqa: E731
    assert create().conv_layout == ConvLayout.sd
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert create().conv_layout == ConvLayout.ds
    by_position = lambda n, kind: Buffer(n, kind, "cpu")  # noqa: E731
    given = mamba.MambaSpecDecodeGPUContext.create(2, config, COPY_FUNCS, "cpu", by_position, conv_layout="SD")
    assert given.conv_layout == ConvLayout.sd
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "XY")
    with pytest.raises(ValueError, match="VLLM_SSM_CONV_STATE_LAYOUT is 'XY', must be SD or DS"):
        create()


@dataclass
class NumpyBuffer:
    np: Any
    cpu: Any
    gpu: Any

    def copy_to_gpu(self, n: int) -> Any:
        return self.gpu[:n]


def test_a_context_works_on_numpy_alone() -> None:
    def make_numpy_buffer(n: int, dtype: Any) -> NumpyBuffer:
        array = np.zeros(n, dtype=dtype)
        return NumpyBuffer(array, array, array)

    config = KVCacheConfig(groups=[KVCacheGroupSpec(layer_names=["a"], spec=gdn_spec())])
    rng = np.random.default_rng(1)
    conv, temporal = rng.random((9, 4, 8), np.float32), rng.random((9, 24))
    before = conv.copy(), temporal.copy()
    ctx = mamba.MambaSpecDecodeGPUContext.create(1, config, COPY_FUNCS, "cpu", make_numpy_buffer)
    table = np.arange(1, 9, dtype=np.int32).reshape(1, 8)
    context = {"a": SimpleNamespace(kv_cache=[conv, temporal])}
    ctx.initialize_from_forward_context(config, context, COPY_FUNCS, [table])
    vectors = [np.array([x], np.int32) for x in (3, 1, 2, 28, 0)]  # accepted, column, scheduled, computed, drafts
    ctx.run_fused_postprocess(1, *vectors)
    assert ctx.num_accepted_tokens_out.tolist() == [1]
    assert np.array_equal(conv[2, :2], before[0][2, 2:])
    assert np.array_equal(conv[2, 2:], before[0][2, 2:])
    assert np.array_equal(temporal[2], before[1][4])


@no_gpu
def test_postprocess_in_a_cuda_graph_follows_its_inputs() -> None:
    world = gdn_world("cuda", 3)
    names = ("accepted", "state_idx", "scheduled", "computed", "drafts")
    vectors = {name: torch.zeros(3, dtype=torch.int32, device="cuda") for name in names}

    def fill(rows: list[tuple[int, int, int, int, int]]) -> None:
        for name, values in zip(
            ("computed", "scheduled", "drafts", "accepted", "state_idx"), zip(*rows, strict=True), strict=True
        ):
            vectors[name].copy_(torch.tensor(values, dtype=torch.int32))

    fill([(30, 3, 0, 1, 1)] * 3)  # nothing crosses while the graph is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.ctx.run_fused_postprocess(3, *vectors.values())
    for rows in ([VECTORS[0][0], VECTORS[1][0], VECTORS[7][0]], [VECTORS[8][0], VECTORS[12][0], VECTORS[4][0]]):
        fill(rows)
        counts, states = world.expected(rows)
        graph.replay()
        torch.cuda.synchronize()
        assert world.ctx.num_accepted_tokens_out.tolist() == counts
        assert all(torch.equal(state, want) for (_, state, _), want in zip(world.states(), states, strict=True))


# ---- the scalar path and staging ------------------------------------------------------------------------------------


def scheduler_output(scheduled: dict[str, int], drafts: dict[str, list[int]] | None = None, **kwargs: Any) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens=drafts or {},
        finished_req_ids=kwargs.get("finished", []),
        preempted_req_ids=kwargs.get("preempted", []),
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=kwargs.get("resumed", [])),
    )


@on_devices
@pytest.mark.parametrize("uniform", [False, True])
def test_preprocess_carries_states_into_the_next_column(device: str, uniform: bool) -> None:
    config, context = mixed_config(uniform), mixed_context(33, device)
    bufs = mamba.MambaCopyBuffers.create(4, config, COPY_FUNCS, make_buffer(device))
    assert bufs.capacity == 4 * 5
    blocks = {
        "crosses": [1, 2, 3, 4, 5, 6],
        "stays": [7, 8, 9, 10, 11],
        "new": [12, 13, 14, 15],
        "hit": [16, 17, 18, 19, 20],
    }
    computed = {"crosses": 31, "stays": 20, "new": 0, "hit": 32}
    requests = {
        name: SimpleNamespace(num_computed_tokens=computed[name], block_ids=[ids] * 3) for name, ids in blocks.items()
    }
    batch = SimpleNamespace(req_ids=list(blocks), num_accepted_tokens_cpu=np.array([2, 2, 1, 1], np.int32))
    state_idx = {"crosses": 1, "stays": 1, "finished": 3, "preempted": 4, "resumed": 5}
    output = scheduler_output(
        {"crosses": 3, "stays": 2, "new": 8, "hit": 4},
        finished=["finished"],
        preempted=["preempted"],
        resumed=["resumed"],
    )
    before = {name: [s.clone() for s in layer.kv_cache] for name, layer in context.items()}
    mamba.preprocess_mamba(output, config, None, state_idx, batch, requests, context, COPY_FUNCS, bufs)
    if device == "cuda":
        torch.cuda.synchronize()

    assert state_idx == {"crosses": 2, "stays": 1, "new": 0, "hit": 2}
    assert batch.num_accepted_tokens_cpu.tolist() == [1, 2, 1, 1]
    for name in ("a", "b", "c"):
        old, new = before[name], context[name].kv_cache
        expected = old[0].clone()
        expected[3, :-1] = old[0][2, 1:]  # column 1 to 2, one token on
        expected[18] = old[0][17]
        assert torch.equal(new[0], expected)
        if name != "c":
            expected = old[1].clone()  # the temporal state of "crosses" is in column 1 + 1 already
            expected[18] = old[1][17]
            assert torch.equal(new[1], expected)


def test_preprocess_forgets_who_left() -> None:
    config = mixed_config(uniform=False)
    bufs = mamba.MambaCopyBuffers.create(1, config, COPY_FUNCS, make_buffer("cpu"))
    state_idx = {"finished": 1, "preempted": 2, "resumed": 3, "keep": 99}
    output = scheduler_output({}, finished=["finished"], preempted=["preempted"], resumed=["resumed"])
    batch = SimpleNamespace(req_ids=[], num_accepted_tokens_cpu=np.zeros(0, np.int32))
    mamba.preprocess_mamba(output, config, None, state_idx, batch, {}, {}, COPY_FUNCS, bufs)
    assert state_idx == {"keep": 99}
    output.preempted_req_ids = None
    mamba.preprocess_mamba(output, config, None, state_idx, batch, {}, {}, COPY_FUNCS, bufs)
    assert bufs.offset == 0


def test_more_copies_than_the_buffers_hold_are_refused() -> None:
    config, context = mixed_config(uniform=False), mixed_context(9)
    bufs = mamba.MambaCopyBuffers.create(1, config, COPY_FUNCS, make_buffer("cpu"))
    request = SimpleNamespace(block_ids=[[1, 2, 3]] * 3)
    collect = lambda src, dst, bias: mamba.collect_mamba_copy_meta(  # noqa: E731
        bufs, config, COPY_FUNCS, [1, 2], src, dst, bias, request, context
    )
    collect(1, 1, 0)
    assert bufs.offset == 0
    collect(0, 1, 0)
    assert bufs.offset == 5
    with pytest.raises(ValueError, match="more than 5 state copies in one step"):
        collect(0, 2, 0)


@on_devices
def test_staging_fills_the_rows_of_the_batch_only(device: str) -> None:
    config = mixed_config(uniform=False)
    ctx = mamba.MambaSpecDecodeGPUContext.create(4, config, COPY_FUNCS, device, make_buffer(device))
    buffers = (
        ctx.mamba_state_idx_buf,
        ctx.num_scheduled_tokens_buf,
        ctx.num_computed_tokens_buf,
        ctx.num_draft_tokens_buf,
    )
    for buffer in buffers:
        buffer.np[:] = -7
        buffer.copy_to_gpu(4)
    requests = {name: SimpleNamespace(num_computed_tokens=n) for name, n in (("a", 30), ("b", 60), ("c", 5))}
    output = scheduler_output({"a": 3, "b": 1, "c": 1}, {"a": [5, 6]})
    mamba.stage_postprocess_inputs_to_gpu(ctx, output, ["a", "b", "c"], 2, requests, {"a": 1, "b": 3})
    assert [buffer.gpu.tolist() for buffer in buffers] == [
        [1, 3, -7, -7],
        [3, 1, -7, -7],
        [30, 60, -7, -7],
        [2, 0, -7, -7],
    ]
    with pytest.raises(AssertionError, match="mamba_state_idx missing entry"):
        mamba.stage_postprocess_inputs_to_gpu(ctx, output, ["a", "b", "c"], 3, requests, {"a": 1, "b": 3})


@on_devices
def test_the_fused_and_the_scalar_path_agree_before_a_forward(device: str) -> None:
    fused, scalar = gdn_world(device, 4), gdn_world(device, 4)
    for (_, a, _), (_, b, _) in zip(fused.states(), scalar.states(), strict=True):
        b.copy_(a)
    accepted, prev, scheduled, computed = [2, 3, 1, 4], [1, 1, 0, 2], [3, 2, 40, 5], [31, 20, 16, 45]
    vectors = [torch.tensor(x, dtype=torch.int32, device=device) for x in (accepted, prev, scheduled, computed)]
    fused.ctx.run_fused_preprocess(4, *vectors)

    bufs = mamba.MambaCopyBuffers.create(4, scalar.config, COPY_FUNCS, make_buffer(device))
    ids = ["0", "1", "2", "3"]
    requests = {
        i: SimpleNamespace(num_computed_tokens=computed[int(i)], block_ids=[scalar.tables[0][int(i)].tolist()])
        for i in ids
    }
    batch = SimpleNamespace(req_ids=ids, num_accepted_tokens_cpu=np.array(accepted, np.int32))
    state_idx = {i: prev[int(i)] for i in ids}
    output = scheduler_output({i: scheduled[int(i)] for i in ids})
    context = scalar.forward_context
    mamba.preprocess_mamba(output, scalar.config, None, state_idx, batch, requests, context, COPY_FUNCS, bufs)
    assert fused.ctx.num_accepted_tokens_out.tolist() == batch.num_accepted_tokens_cpu.tolist()
    assert fused.ctx.mamba_state_idx_out.tolist() == list(state_idx.values())
    for (_, a, _), (_, b, _) in zip(fused.states(), scalar.states(), strict=True):
        assert torch.equal(a, b)
