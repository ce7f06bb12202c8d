"""
The native core of deltaic.
"""

from __future__ import annotations

import collections.abc
import os
import typing

import numpy
import numpy.typing

__all__: list[str] = [
    "Architecture",
    "ArrayInfo",
    "AsyncModelRunnerOutput",
    "AttentionMetadata",
    "CacheCapacity",
    "CacheManager",
    "CacheManagerOptions",
    "CacheStats",
    "CachedRequestData",
    "CodePredictorConfig",
    "CodeSampling",
    "CodecConfig",
    "CodecDecoder",
    "CodecStream",
    "CodecTransformerConfig",
    "ConvLayout",
    "DType",
    "Delivery",
    "Device",
    "DeviceError",
    "DeviceType",
    "EdgeMode",
    "EndStatus",
    "Error",
    "FullAttentionSpec",
    "GdnMetadata",
    "HiddenTap",
    "InputBatch",
    "InvalidArgument",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "LayerKind",
    "LayerKvCache",
    "LayerStateCache",
    "MambaCacheMode",
    "MambaSpec",
    "MambaType",
    "MemoryPlanOptions",
    "ModelConfig",
    "ModelRunner",
    "ModelRunnerOutput",
    "NewRequestData",
    "OutOfMemory",
    "PrefixHit",
    "RowPlan",
    "RowRun",
    "RunnerOptions",
    "SamplingMetadata",
    "SamplingParams",
    "SchedulerOutput",
    "StageEdge",
    "StageRunner",
    "StageTensors",
    "StateCopies",
    "StateCopy",
    "StateCopyKind",
    "StateTensor",
    "StepHook",
    "StepInputs",
    "StepRow",
    "StepView",
    "Talker",
    "TalkerConfig",
    "TensorView",
    "TokenLogprobs",
    "UniformTypeKVCacheSpecs",
    "Unsupported",
    "array_info",
    "batch_memcpy",
    "cache_capacity",
    "count_draft_layers",
    "device_memory",
    "device_name",
    "load_model_config",
    "make_kv_cache_groups",
    "make_stage_runner",
    "measure_cpu_ceilings",
    "measure_gpu_ceilings",
    "num_cuda_devices",
    "parse_model_config",
    "plan_kv_cache",
    "plan_rows",
    "validate_gdn_state_indices",
    "validate_sampling_params",
]

class Error(RuntimeError):
    pass

class InvalidArgument(Error, ValueError):
    pass

class Unsupported(Error, NotImplementedError):
    pass

class OutOfMemory(Error, MemoryError):
    pass

class DeviceError(Error):
    pass

class DType:
    """
    Members:

      f32

      f16

      bf16

      f64

      i8

      i32

      i64

      u8
    """

    __members__: typing.ClassVar[dict[str, DType]]
    bf16: typing.ClassVar[DType]
    f16: typing.ClassVar[DType]
    f32: typing.ClassVar[DType]
    f64: typing.ClassVar[DType]
    i32: typing.ClassVar[DType]
    i64: typing.ClassVar[DType]
    i8: typing.ClassVar[DType]
    u8: typing.ClassVar[DType]
    @typing.overload
    def __eq__(self, other: DType) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: DType) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class DeviceType:
    """
    Members:

      cpu

      cuda
    """

    __members__: typing.ClassVar[dict[str, DeviceType]]
    cpu: typing.ClassVar[DeviceType]
    cuda: typing.ClassVar[DeviceType]
    @typing.overload
    def __eq__(self, other: DeviceType) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: DeviceType) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Device:
    """
    A CPU or one GPU.
    """
    def __init__(self, type: DeviceType = ..., index: typing.SupportsInt | typing.SupportsIndex = 0) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def type(self) -> DeviceType: ...

class TensorView:
    """
    A view of a tensor of the core. Its owner keeps the memory alive.
    """
    def numpy(self) -> numpy.ndarray:
        """
        Copy the elements into a NumPy array; f16 and bf16 become f32.
        """
    @property
    def device(self) -> Device: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]: ...

class Architecture:
    """
    Members:

      qwen3

      qwen3_moe

      qwen3_next

      qwen3_5

      qwen3_5_moe
    """

    __members__: typing.ClassVar[dict[str, Architecture]]
    qwen3: typing.ClassVar[Architecture]
    qwen3_5: typing.ClassVar[Architecture]
    qwen3_5_moe: typing.ClassVar[Architecture]
    qwen3_moe: typing.ClassVar[Architecture]
    qwen3_next: typing.ClassVar[Architecture]
    @typing.overload
    def __eq__(self, other: Architecture) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Architecture) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class LayerKind:
    """
    Members:

      full_attention

      linear_attention
    """

    __members__: typing.ClassVar[dict[str, LayerKind]]
    full_attention: typing.ClassVar[LayerKind]
    linear_attention: typing.ClassVar[LayerKind]
    @typing.overload
    def __eq__(self, other: LayerKind) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: LayerKind) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ModelConfig:
    """
    What a Hugging Face config.json says of the text model.
    """
    def conv_dim(self) -> int: ...
    def num_layers_of(self, kind: LayerKind) -> int: ...
    def num_parameters(self) -> int: ...
    @property
    def architecture(self) -> Architecture: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def attention_output_gate(self) -> bool: ...
    @property
    def dtype(self) -> DType | None: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def is_moe_layer(self) -> list[bool]: ...
    @property
    def layer_kinds(self) -> list[LayerKind]: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int: ...
    @property
    def linear_num_key_heads(self) -> int: ...
    @property
    def linear_num_value_heads(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_token(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_mtp_layers(self) -> int: ...
    @property
    def shared_expert_intermediate_size(self) -> int: ...
    @shared_expert_intermediate_size.setter
    def shared_expert_intermediate_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...

class SamplingParams:
    """
    How a request's tokens are chosen: what the core needs of it.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def allowed_token_ids(self) -> list[int]: ...
    @allowed_token_ids.setter
    def allowed_token_ids(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...
    @property
    def bad_words(self) -> list[list[int]]: ...
    @bad_words.setter
    def bad_words(
        self, arg0: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
    ) -> None: ...
    @property
    def frequency_penalty(self) -> float: ...
    @frequency_penalty.setter
    def frequency_penalty(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def logit_bias(self) -> dict[int, float]: ...
    @logit_bias.setter
    def logit_bias(
        self,
        arg0: collections.abc.Mapping[
            typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex
        ],
    ) -> None: ...
    @property
    def logprobs(self) -> int | None: ...
    @logprobs.setter
    def logprobs(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def min_p(self) -> float: ...
    @min_p.setter
    def min_p(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def min_tokens(self) -> int: ...
    @min_tokens.setter
    def min_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def presence_penalty(self) -> float: ...
    @presence_penalty.setter
    def presence_penalty(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def prompt_logprobs(self) -> int | None: ...
    @prompt_logprobs.setter
    def prompt_logprobs(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def repetition_penalty(self) -> float: ...
    @repetition_penalty.setter
    def repetition_penalty(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def seed(self) -> int | None: ...
    @seed.setter
    def seed(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def stop_token_ids(self) -> list[int]: ...
    @stop_token_ids.setter
    def stop_token_ids(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...
    @property
    def temperature(self) -> float: ...
    @temperature.setter
    def temperature(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def top_k(self) -> int: ...
    @top_k.setter
    def top_k(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def top_p(self) -> float: ...
    @top_p.setter
    def top_p(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class NewRequestData:
    """
    A request that the runner has not seen, or that comes back.
    """

    req_id: str
    sampling_params: SamplingParams
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def block_ids(self) -> list[list[int]]: ...
    @block_ids.setter
    def block_ids(
        self, arg0: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
    ) -> None: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @num_computed_tokens.setter
    def num_computed_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def prefill_token_ids(self) -> list[int]: ...
    @prefill_token_ids.setter
    def prefill_token_ids(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @prompt_token_ids.setter
    def prompt_token_ids(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...

class CachedRequestData:
    """
    What changed for the requests that the runner knows.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def new_block_ids(self) -> list[list[list[int]] | None]: ...
    @new_block_ids.setter
    def new_block_ids(
        self,
        arg0: collections.abc.Sequence[
            collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]] | None
        ],
    ) -> None: ...
    @property
    def num_computed_tokens(self) -> list[int]: ...
    @num_computed_tokens.setter
    def num_computed_tokens(
        self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    @property
    def num_output_tokens(self) -> list[int]: ...
    @num_output_tokens.setter
    def num_output_tokens(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...
    @property
    def req_ids(self) -> list[str]: ...
    @req_ids.setter
    def req_ids(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def resumed_req_ids(self) -> list[str]: ...
    @resumed_req_ids.setter
    def resumed_req_ids(self, arg0: collections.abc.Sequence[str]) -> None: ...

class StateCopyKind:
    """
    Which way a state copy goes.

    Members:

      hit : snapshot slot to running slot, before the forward

      snapshot : running slot to snapshot slot, after the forward
    """

    __members__: typing.ClassVar[dict[str, StateCopyKind]]
    hit: typing.ClassVar[StateCopyKind]
    snapshot: typing.ClassVar[StateCopyKind]
    @typing.overload
    def __eq__(self, other: StateCopyKind) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: StateCopyKind) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class StateCopy:
    """
    One copy of a request's recurrent state from or to a snapshot slot.
    """

    kind: StateCopyKind
    req_id: str
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @num_tokens.setter
    def num_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def snapshot_slot(self) -> int: ...
    @snapshot_slot.setter
    def snapshot_slot(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class SchedulerOutput:
    """
    What one step runs.
    """

    scheduled_cached_reqs: CachedRequestData
    def __init__(self, **kwargs: typing.Any) -> None: ...
    def next_decodes(
        self,
        new_block_ids: collections.abc.Mapping[
            typing.SupportsInt | typing.SupportsIndex,
            collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]],
        ],
    ) -> SchedulerOutput:
        """
        The step in which the requests of this one, decodes of one token each, run one token further. new_block_ids: by row, the new blocks of those that got some, a list a KV-cache group.
        """
    @property
    def finished_req_ids(self) -> list[str]: ...
    @finished_req_ids.setter
    def finished_req_ids(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def num_drafts(self) -> int | None: ...
    @num_drafts.setter
    def num_drafts(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def num_scheduled_tokens(self) -> dict[str, int]: ...
    @num_scheduled_tokens.setter
    def num_scheduled_tokens(
        self, arg0: collections.abc.Mapping[str, typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    @property
    def preempted_req_ids(self) -> list[str]: ...
    @preempted_req_ids.setter
    def preempted_req_ids(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def scheduled_new_reqs(self) -> list[NewRequestData]: ...
    @scheduled_new_reqs.setter
    def scheduled_new_reqs(self, arg0: collections.abc.Sequence[NewRequestData]) -> None: ...
    @property
    def scheduled_spec_decode_tokens(self) -> dict[str, list[int]]: ...
    @scheduled_spec_decode_tokens.setter
    def scheduled_spec_decode_tokens(
        self, arg0: collections.abc.Mapping[str, collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
    ) -> None: ...
    @property
    def state_copies(self) -> list[StateCopy]: ...
    @state_copies.setter
    def state_copies(self, arg0: collections.abc.Sequence[StateCopy]) -> None: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @total_num_scheduled_tokens.setter
    def total_num_scheduled_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class TokenLogprobs:
    """
    Raw log probabilities of one position: the token itself first, then the best.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def logprobs(self) -> list[float]: ...
    @logprobs.setter
    def logprobs(self, arg0: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]) -> None: ...
    @property
    def rank(self) -> int: ...
    @rank.setter
    def rank(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def token_ids(self) -> list[int]: ...
    @token_ids.setter
    def token_ids(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...

class ModelRunnerOutput:
    """
    The sampled tokens of one step.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def draft_token_ids(self) -> list[list[int]]: ...
    @draft_token_ids.setter
    def draft_token_ids(
        self, arg0: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
    ) -> None: ...
    @property
    def failed_req_ids(self) -> list[str]: ...
    @failed_req_ids.setter
    def failed_req_ids(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def logprobs(self) -> dict[str, list[TokenLogprobs]]: ...
    @logprobs.setter
    def logprobs(self, arg0: collections.abc.Mapping[str, collections.abc.Sequence[TokenLogprobs]]) -> None: ...
    @property
    def prompt_logprobs(self) -> dict[str, list[TokenLogprobs]]: ...
    @prompt_logprobs.setter
    def prompt_logprobs(self, arg0: collections.abc.Mapping[str, collections.abc.Sequence[TokenLogprobs]]) -> None: ...
    @property
    def req_id_to_index(self) -> dict[str, int]: ...
    @req_id_to_index.setter
    def req_id_to_index(
        self, arg0: collections.abc.Mapping[str, typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    @property
    def req_ids(self) -> list[str]: ...
    @req_ids.setter
    def req_ids(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def sampled_token_ids(self) -> list[list[int]]: ...
    @sampled_token_ids.setter
    def sampled_token_ids(
        self, arg0: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
    ) -> None: ...

class FullAttentionSpec:
    """
    K and V of one full-attention layer, in pages of block_size tokens.
    """

    dtype: DType
    def __init__(self, **kwargs: typing.Any) -> None: ...
    def page_size_bytes(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @block_size.setter
    def block_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def head_size(self) -> int: ...
    @head_size.setter
    def head_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def head_size_v(self) -> int: ...
    @head_size_v.setter
    def head_size_v(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_kv_heads(self) -> int: ...
    @num_kv_heads.setter
    def num_kv_heads(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def page_size_padded(self) -> int | None: ...
    @page_size_padded.setter
    def page_size_padded(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...

class MambaType:
    """
    Members:

      gdn

      mamba2

      short_conv
    """

    __members__: typing.ClassVar[dict[str, MambaType]]
    gdn: typing.ClassVar[MambaType]
    mamba2: typing.ClassVar[MambaType]
    short_conv: typing.ClassVar[MambaType]
    @typing.overload
    def __eq__(self, other: MambaType) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: MambaType) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class MambaCacheMode:
    """
    Members:

      none

      align

      all
    """

    __members__: typing.ClassVar[dict[str, MambaCacheMode]]
    align: typing.ClassVar[MambaCacheMode]
    all: typing.ClassVar[MambaCacheMode]
    none: typing.ClassVar[MambaCacheMode]
    @typing.overload
    def __eq__(self, other: MambaCacheMode) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: MambaCacheMode) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class MambaSpec:
    """
    The state tensors of one recurrent layer, for one slot.
    """

    cache_mode: MambaCacheMode
    mamba_type: MambaType
    def __eq__(self, arg0: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, **kwargs: typing.Any) -> None: ...
    def page_size_bytes(self) -> int: ...
    def replay_bytes(self) -> int:
        """
        Bytes of a running slot beside its page, for drafts.
        """
    @property
    def block_size(self) -> int: ...
    @block_size.setter
    def block_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def dtypes(self) -> list[DType]: ...
    @dtypes.setter
    def dtypes(self, arg0: collections.abc.Sequence[DType]) -> None: ...
    @property
    def num_speculative_blocks(self) -> int: ...
    @num_speculative_blocks.setter
    def num_speculative_blocks(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def page_size_padded(self) -> int | None: ...
    @page_size_padded.setter
    def page_size_padded(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def shapes(self) -> list[list[int]]: ...
    @shapes.setter
    def shapes(
        self, arg0: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
    ) -> None: ...

class UniformTypeKVCacheSpecs:
    """
    A group whose layers have different specs of one kind.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    def page_size_bytes(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @block_size.setter
    def block_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def layer_specs(self) -> dict[str, FullAttentionSpec | MambaSpec]: ...
    @layer_specs.setter
    def layer_specs(self, arg0: collections.abc.Mapping[str, FullAttentionSpec | MambaSpec]) -> None: ...

class KVCacheGroupSpec:
    """
    Layers whose caches share block ids.
    """

    is_eagle_group: bool
    spec: FullAttentionSpec | MambaSpec | UniformTypeKVCacheSpecs
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def layer_names(self) -> list[str]: ...
    @layer_names.setter
    def layer_names(self, arg0: collections.abc.Sequence[str]) -> None: ...

class KVCacheConfig:
    """
    The caches of one runner.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def groups(self) -> list[KVCacheGroupSpec]: ...
    @groups.setter
    def groups(self, arg0: collections.abc.Sequence[KVCacheGroupSpec]) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @num_blocks.setter
    def num_blocks(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_running_slots(self) -> int | None: ...
    @num_running_slots.setter
    def num_running_slots(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def num_snapshot_slots(self) -> int: ...
    @num_snapshot_slots.setter
    def num_snapshot_slots(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class PrefixHit:
    """
    What the prefix index knows of a request's tokens.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def num_attention_tokens(self) -> int: ...
    @num_attention_tokens.setter
    def num_attention_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @num_tokens.setter
    def num_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def snapshot_slot(self) -> int: ...
    @snapshot_slot.setter
    def snapshot_slot(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class CacheStats:
    """
    Counters of a CacheManager since it was made.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def num_evicted_blocks(self) -> int: ...
    @num_evicted_blocks.setter
    def num_evicted_blocks(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_evicted_snapshots(self) -> int: ...
    @num_evicted_snapshots.setter
    def num_evicted_snapshots(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_hit_tokens(self) -> int: ...
    @num_hit_tokens.setter
    def num_hit_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_queries(self) -> int: ...
    @num_queries.setter
    def num_queries(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_query_tokens(self) -> int: ...
    @num_query_tokens.setter
    def num_query_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_snapshots(self) -> int: ...
    @num_snapshots.setter
    def num_snapshots(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_superseded_snapshots(self) -> int: ...
    @num_superseded_snapshots.setter
    def num_superseded_snapshots(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class CacheManagerOptions:
    """
    The sizes of a CacheManager.
    """

    enable_prefix_caching: bool
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def block_size(self) -> int: ...
    @block_size.setter
    def block_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def first_snapshot_slot(self) -> int: ...
    @first_snapshot_slot.setter
    def first_snapshot_slot(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def mamba_block_size(self) -> int: ...
    @mamba_block_size.setter
    def mamba_block_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @num_blocks.setter
    def num_blocks(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_snapshot_slots(self) -> int: ...
    @num_snapshot_slots.setter
    def num_snapshot_slots(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class CacheManager:
    """
    Owns attention blocks and snapshot slots, and the prefix index over both.
    """
    def __init__(self, options: CacheManagerOptions) -> None: ...
    def add_request(
        self,
        req_id: str,
        token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        cache_salt: str = "",
    ) -> None: ...
    def admit(
        self, req_id: str, hit: PrefixHit, num_tokens: typing.SupportsInt | typing.SupportsIndex
    ) -> list[int] | None: ...
    def append_tokens(
        self, req_id: str, token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    def can_ever_fit(self, num_tokens: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    def cancel_snapshot(self, req_id: str, num_tokens: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def extend(self, req_id: str, num_tokens: typing.SupportsInt | typing.SupportsIndex) -> list[int] | None: ...
    def find_prefix(self, req_id: str) -> PrefixHit: ...
    def publish(self, req_id: str, num_computed_tokens: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def publish_snapshot(self, req_id: str, num_tokens: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def release(self, req_id: str) -> None: ...
    def remove_request(self, req_id: str) -> None: ...
    def reserve_snapshot(self, req_id: str, num_tokens: typing.SupportsInt | typing.SupportsIndex) -> int | None: ...
    def reset_prefix_cache(self) -> bool: ...
    @property
    def num_cached_blocks(self) -> int: ...
    @property
    def num_cached_snapshots(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_free_snapshot_slots(self) -> int: ...
    @property
    def num_total_blocks(self) -> int: ...
    @property
    def options(self) -> CacheManagerOptions: ...
    @property
    def stats(self) -> CacheStats: ...

class MemoryPlanOptions:
    """
    What plan_kv_cache divides, and for what.
    """

    conv_state_dtype: DType
    enable_prefix_caching: bool
    kv_dtype: DType
    recurrent_state_dtype: DType
    with_draft_module: bool
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def block_size(self) -> int: ...
    @block_size.setter
    def block_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def mamba_block_size(self) -> int: ...
    @mamba_block_size.setter
    def mamba_block_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def max_model_len(self) -> int: ...
    @max_model_len.setter
    def max_model_len(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @max_num_seqs.setter
    def max_num_seqs(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def memory_bytes(self) -> int: ...
    @memory_bytes.setter
    def memory_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_blocks(self) -> int | None: ...
    @num_blocks.setter
    def num_blocks(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def num_snapshot_slots(self) -> int | None: ...
    @num_snapshot_slots.setter
    def num_snapshot_slots(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def num_speculative_tokens(self) -> int: ...
    @num_speculative_tokens.setter
    def num_speculative_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class CacheCapacity:
    """
    What a KVCacheConfig holds.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def kv_bytes(self) -> int: ...
    @kv_bytes.setter
    def kv_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def max_concurrency(self) -> float: ...
    @max_concurrency.setter
    def max_concurrency(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @num_tokens.setter
    def num_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def running_state_bytes(self) -> int: ...
    @running_state_bytes.setter
    def running_state_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def snapshot_bytes(self) -> int: ...
    @snapshot_bytes.setter
    def snapshot_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class SamplingMetadata:
    """
    How the rows of a batch are sampled, as lists by row.
    """
    @property
    def all_greedy(self) -> bool: ...
    @property
    def generators(self) -> dict[int, int]: ...
    @property
    def min_p(self) -> list[float]: ...
    @property
    def temperature(self) -> list[float]: ...
    @property
    def top_k(self) -> list[int]: ...
    @property
    def top_p(self) -> list[float]: ...

class InputBatch:
    """
    The rows of the running batch.
    """
    def block_table(
        self, group: typing.SupportsInt | typing.SupportsIndex, row: typing.SupportsInt | typing.SupportsIndex
    ) -> list[int]:
        """
        The block ids of a row, in token order.
        """
    def make_sampling_metadata(self, vocab_size: typing.SupportsInt | typing.SupportsIndex) -> SamplingMetadata: ...
    def num_tokens(self, row: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def token_ids(self, row: typing.SupportsInt | typing.SupportsIndex) -> list[int]: ...
    @property
    def last_sampled_tokens(self) -> list[int]: ...
    @property
    def num_reqs(self) -> int: ...
    @property
    def req_id_to_index(self) -> dict[str, int]: ...
    @property
    def req_ids(self) -> list[str]: ...

class StepRow:
    """
    One request of a step and its place on the token axis.
    """

    req_id: str
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def first_token(self) -> int: ...
    @first_token.setter
    def first_token(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def is_prefill(self) -> bool: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @num_computed_tokens.setter
    def num_computed_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @num_prompt_tokens.setter
    def num_prompt_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @num_tokens.setter
    def num_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def seq_len(self) -> int: ...

class RowRun:
    """
    Neighbouring rows that one call of a preprocessing hook takes.
    """
    @property
    def first_row(self) -> int: ...
    @property
    def is_batched(self) -> bool: ...
    @property
    def num_rows(self) -> int: ...

class RowPlan:
    """
    What a step does with its rows.
    """
    @property
    def predictor_rows(self) -> list[int]: ...
    @property
    def runs(self) -> list[RowRun]: ...

class StepView:
    """
    A step as a hook sees it; the arrays are valid during the call alone.
    """
    @property
    def hidden(self) -> typing.Any: ...
    @property
    def input_ids(self) -> typing.Any: ...
    @property
    def inputs_embeds(self) -> typing.Any: ...
    @property
    def layer_hidden(self) -> typing.Any: ...
    @property
    def positions(self) -> typing.Any: ...
    @property
    def rows(self) -> list[StepRow]: ...

class StepHook:
    """
    Is called around each forward of a ModelRunner.
    """
    def __init__(self) -> None: ...
    def after_forward(self, step: StepView) -> None: ...
    def after_sample(
        self, step: StepView, token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    def before_forward(self, step: StepView) -> None: ...
    def fills_embeddings(self) -> bool: ...
    def hidden_layer(self) -> int: ...

class StageRunner(StepHook):
    """
    Runs the hooks of one stage over the rows of a step: plan, validate, commit. A Python class implements preprocess_rows(rows, is_batched, ids, embeds), which fills its arrays or returns why the rows are refused, and may implement has_batched_hook, has_predictor, predict_rows(rows, embeds), commit_rows(rows), begin_step and after_forward.
    """
    def __init__(
        self,
        hidden_size: typing.SupportsInt | typing.SupportsIndex,
        max_num_tokens: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def has_batched_hook(self) -> bool: ...
    def has_predictor(self) -> bool: ...
    def prepare(
        self, rows: collections.abc.Sequence[StepRow], ids: typing.Annotated[numpy.typing.ArrayLike, numpy.int32]
    ) -> RowPlan:
        """
        Fill the ids and embeddings of a step's tokens; return the plan.
        """
    def take_failures(self) -> dict[str, str]:
        """
        Return the requests that failed since the last call.
        """
    @property
    def embeds(self) -> typing.Any: ...
    @property
    def ids(self) -> typing.Any: ...

class StepInputs:
    """
    What the last step ran on.
    """
    @property
    def input_token_ids(self) -> list[int]: ...
    @property
    def logits_indices(self) -> list[int]: ...
    @property
    def positions(self) -> list[int]: ...
    @property
    def query_start_loc(self) -> list[int]: ...

class AttentionMetadata:
    """
    The attention metadata of the last step.
    """
    @property
    def block_table(self) -> list[int]: ...
    @property
    def block_table_row_stride(self) -> int: ...
    @property
    def seq_lens(self) -> list[int]: ...
    @property
    def slot_mapping(self) -> list[int]: ...

class GdnMetadata:
    """
    The Gated DeltaNet metadata of the last step.
    """
    @property
    def has_initial_state(self) -> list[bool]: ...
    @property
    def num_accepted_tokens(self) -> list[int]: ...
    @property
    def num_decode_tokens(self) -> int: ...
    @property
    def num_decodes(self) -> int: ...
    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def num_prefills(self) -> int: ...
    @property
    def num_spec_decode_tokens(self) -> int: ...
    @property
    def num_spec_decodes(self) -> int: ...
    @property
    def prefill_query_start_loc(self) -> list[int]: ...
    @property
    def prefill_state_indices(self) -> list[int]: ...
    @property
    def state_indices(self) -> list[int]: ...

class LayerKvCache:
    """
    K and V of one full-attention layer.
    """
    @property
    def k(self) -> TensorView: ...
    @property
    def layer(self) -> int: ...
    @property
    def v(self) -> TensorView: ...

class LayerStateCache:
    """
    The states of one Gated DeltaNet layer.
    """
    @property
    def conv(self) -> TensorView: ...
    @property
    def layer(self) -> int: ...
    @property
    def temporal(self) -> TensorView: ...

class RunnerOptions:
    """
    Sizes and switches of a ModelRunner.
    """

    async_input_combine: bool
    device: Device
    dtype: DType
    dummy_weights: bool
    enforce_eager: bool
    poison_caches: bool
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def max_model_len(self) -> int: ...
    @max_model_len.setter
    def max_model_len(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def max_num_reqs(self) -> int: ...
    @max_num_reqs.setter
    def max_num_reqs(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_speculative_tokens(self) -> int: ...
    @num_speculative_tokens.setter
    def num_speculative_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @num_threads.setter
    def num_threads(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def scripted_draft_acceptance(self) -> float: ...
    @scripted_draft_acceptance.setter
    def scripted_draft_acceptance(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class AsyncModelRunnerOutput:
    """
    The tokens of a step that may still run.
    """
    def get_output(self) -> ModelRunnerOutput:
        """
        Wait for the step and return its output; once.
        """

class ModelRunner:
    """
    Runs one model: a SchedulerOutput in, sampled tokens out.
    """
    @staticmethod
    def supports_async() -> bool: ...
    @typing.overload
    def __init__(
        self,
        model: ModelConfig,
        tensors: collections.abc.Mapping[str, numpy.ndarray],
        kv_cache: KVCacheConfig,
        options: RunnerOptions,
    ) -> None:
        """
        Take the weights from contiguous float32 arrays in memory, under their checkpoint names.
        """
    @typing.overload
    def __init__(
        self, checkpoint: os.PathLike[str] | str | bytes, kv_cache: KVCacheConfig, options: RunnerOptions
    ) -> None: ...
    def dense_draft(
        self,
        token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        next_token: typing.SupportsInt | typing.SupportsIndex,
        num_drafts: typing.SupportsInt | typing.SupportsIndex,
    ) -> tuple[typing.Any, ...]:
        """
        A chain of greedy drafts behind a sequence and the token that follows it, computed on its own: their ids, their logits [num_drafts, vocab_size], and the draft module's hidden states [num_tokens, hidden_size].
        """
    def dense_forward(
        self,
        token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        with_hidden: bool = False,
        positions: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
        | None = None,
    ) -> tuple[typing.Any, ...]:
        """
        Logits of every position of one sequence, computed on its own: [num_tokens, vocab_size]; and the hidden states [num_layers + 2, num_tokens, hidden_size] when asked for, else None.
        """
    def execute_model(self, input: SchedulerOutput) -> ModelRunnerOutput | None:
        """
        Enqueue one step; an output without tokens when nothing was scheduled, else None.
        """
    def sample_tokens(self) -> ModelRunnerOutput:
        """
        Sample from the last forward, and wait.
        """
    def sample_tokens_async(self) -> AsyncModelRunnerOutput:
        """
        Sample from the last forward without waiting.
        """
    def set_step_hook(self, hook: StepHook) -> None:
        """
        Call a hook around each forward from now on; None: no more.
        """
    @property
    def attn_kv(self) -> list[LayerKvCache]: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def fa_page_size_bytes(self) -> int: ...
    @property
    def full_attn_group_id(self) -> int: ...
    @property
    def gdn_group_id(self) -> int: ...
    @property
    def gdn_state(self) -> list[LayerStateCache]: ...
    @property
    def gdn_state_slots(self) -> dict[str, int]: ...
    @property
    def input_batch(self) -> InputBatch: ...
    @property
    def kv_cache_config(self) -> KVCacheConfig: ...
    @property
    def last_attn_meta(self) -> AttentionMetadata: ...
    @property
    def last_gdn_meta(self) -> GdnMetadata: ...
    @property
    def last_step(self) -> StepInputs: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_state_slots(self) -> int: ...
    @property
    def options(self) -> RunnerOptions: ...
    @property
    def weight_bytes(self) -> int: ...

class EndStatus:
    """
    How a request on an edge ended.

    Members:

      ok

      error

      cancelled
    """

    __members__: typing.ClassVar[dict[str, EndStatus]]
    cancelled: typing.ClassVar[EndStatus]
    error: typing.ClassVar[EndStatus]
    ok: typing.ClassVar[EndStatus]
    @typing.overload
    def __eq__(self, other: EndStatus) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: EndStatus) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class EdgeMode:
    """
    How an edge hands over.
    """

    is_full: bool
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def first(self) -> int: ...
    @first.setter
    def first(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def left_context(self) -> int: ...
    @left_context.setter
    def left_context(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def size(self) -> int: ...
    @size.setter
    def size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class Delivery:
    """
    What is due of a request: a payload, or its end.
    """
    def rows(self, key: tuple[str, str]) -> numpy.ndarray:
        """
        Rows of one key.
        """
    @property
    def error(self) -> str:
        """
        Why it ended with an error; else empty.
        """
    @property
    def id(self) -> str:
        """
        Whose it is: REQUEST/GENERATION.
        """
    @property
    def num_left(self) -> int:
        """
        Rows in front of each key that were given before.
        """
    @property
    def payload(self) -> dict[str, dict[str, typing.Any]]:
        """
        Section to name to rows [n, ...] or to the latest value.
        """
    @property
    def request(self) -> typing.Any:
        """
        The latest object of set_request; None without one.
        """
    @property
    def status(self) -> EndStatus | None:
        """
        How the request ended; None while it goes on.
        """

class StageEdge:
    """
    The one way from a stage to the next: of each request its rows in order, and then exactly one end. Ids are REQUEST/GENERATION; what comes for a generation that has not begun is parked, for a dead one it is dropped.
    """
    def __init__(
        self,
        mode: EdgeMode,
        *,
        name: str = "",
        keys: collections.abc.Sequence[tuple[str, str]],
        replace_keys: collections.abc.Sequence[tuple[str, str]] = [],
        capacity: typing.SupportsInt | typing.SupportsIndex = 1048576,
        deadline_s: typing.SupportsFloat | typing.SupportsIndex | None = None,
    ) -> None:
        """
        At most `capacity` rows of a request may wait. A request for which nothing new comes for deadline_s seconds ends in an error. Raises InvalidArgument naming the field.
        """
    def advance(self, now: typing.SupportsFloat | typing.SupportsIndex) -> None:
        """
        Say what time it is, in seconds.
        """
    def carries(self, key: tuple[str, str]) -> bool:
        """
        Whether the edge passes a key on.
        """
    def close(self, id: str) -> None:
        """
        Cancel a request; what still comes for it is dropped.
        """
    def end(self, id: str, status: EndStatus = EndStatus.ok, error: str = "") -> bool:
        """
        End a request; only the first end counts, others return False. A cancelled request loses what waits.
        """
    def forget(self, id: str) -> None:
        """
        Drop all that is known of a request, of any generation; its id may then be used anew.
        """
    def is_open(self, id: str) -> bool:
        """
        Whether a request has begun and was not closed.
        """
    def open(self, id: str, num_prompt_rows: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        Begin a request; what was parked for it is there, an older generation is cancelled. The first chunk has num_prompt_rows more rows. Raises InvalidArgument for a generation that has begun or ended.
        """
    def put(
        self, id: str, key: tuple[str, str], rows: numpy.ndarray, begin: typing.SupportsInt | typing.SupportsIndex = -1
    ) -> bool:
        """
        Add rows [n, ...] behind row `begin` of a key, -1: behind the last; those that were given already stay. False for a dead generation, after the end, or where more rows than the capacity would wait. Raises InvalidArgument for rank 1, a key that the edge replaces, or a `begin` behind the last row.
        """
    def replaces(self, key: tuple[str, str]) -> bool:
        """
        Whether of a key the latest value counts, not all rows.
        """
    def set(self, id: str, key: tuple[str, str], value: typing.Any) -> bool:
        """
        Keep a value that is no rows, the latest; False for a dead generation and after the end.
        """
    def set_request(self, id: str, request: typing.Any) -> bool:
        """
        Keep the latest object of a request; False likewise.
        """
    def take(self) -> list[Delivery]:
        """
        Return what is due now, of all open requests; of a request its end is the last.
        """
    @property
    def mode(self) -> EdgeMode:
        """
        How the edge hands over.
        """
    @property
    def num_kept(self) -> int:
        """
        Requests of which anything is kept.
        """

class StageTensors:
    """
    The tensors of a checkpoint of several models, or of a part of it.
    """
    def __init__(self, path: os.PathLike[str] | str | bytes) -> None:
        """
        Map a checkpoint folder or a safetensors file.
        """
    def as_text_model(self, embedding: str, head: str) -> StageTensors:
        """
        Name an embedding and a head as a text model does.
        """
    def has(self, name: str) -> bool: ...
    def part(self, prefix: str) -> StageTensors:
        """
        Return those whose names start with a prefix, without it; ValueError for none.
        """
    @property
    def num_bytes(self) -> int: ...

class CodeSampling:
    """
    How residual codes are chosen.
    """

    do_sample: bool
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def temperature(self) -> float: ...
    @temperature.setter
    def temperature(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def top_k(self) -> int: ...
    @top_k.setter
    def top_k(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def top_p(self) -> float: ...
    @top_p.setter
    def top_p(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class CodePredictorConfig:
    """
    Sizes of a code predictor.
    """

    decoder: ModelConfig
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def num_codebooks(self) -> int: ...
    @num_codebooks.setter
    def num_codebooks(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def talker_hidden_size(self) -> int: ...
    @talker_hidden_size.setter
    def talker_hidden_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class TalkerConfig:
    """
    Sizes of a talker.
    """

    predictor: CodePredictorConfig
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def hidden_size(self) -> int: ...
    @hidden_size.setter
    def hidden_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def projection_size(self) -> int: ...
    @projection_size.setter
    def projection_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def text_hidden_size(self) -> int: ...
    @text_hidden_size.setter
    def text_hidden_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def text_vocab_size(self) -> int: ...
    @text_vocab_size.setter
    def text_vocab_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def vocab_size(self) -> int: ...
    @vocab_size.setter
    def vocab_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class Talker(StageRunner):
    """
    The embeddings and the code predictor around the decoder of a talker.
    """
    def __init__(
        self,
        config: TalkerConfig,
        tensors: StageTensors,
        *,
        max_num_reqs: typing.SupportsInt | typing.SupportsIndex,
        max_num_tokens: typing.SupportsInt | typing.SupportsIndex,
        num_threads: typing.SupportsInt | typing.SupportsIndex,
        codes: StageEdge,
    ) -> None:
        """
        Make the stage; `codes` is the edge that takes what it hands over.
        """
    def add_request(
        self,
        req_id: str,
        *,
        prompt: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
        text: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
        pad: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
        end: typing.Annotated[numpy.typing.ArrayLike, numpy.float32] | None = None,
        is_text_complete: bool = True,
        sampling: CodeSampling,
        seed: typing.SupportsInt | typing.SupportsIndex | None = None,
    ) -> None:
        """
        Begin a request: its prompt, a row of text a frame, the row of frames behind the text, and the row that take_text puts behind text that has ended.
        """
    def append_text(
        self, req_id: str, rows: typing.Annotated[numpy.typing.ArrayLike, numpy.float32], is_last: bool
    ) -> None: ...
    def codec_rows(
        self, codec_ids: typing.Annotated[numpy.typing.ArrayLike, numpy.int32]
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        Embeddings of codes and control tokens of the talker.
        """
    def frame_rows(
        self, codes: typing.Annotated[numpy.typing.ArrayLike, numpy.int32]
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        The embeddings of whole frames, added up over their codebooks.
        """
    def hand_over(self, req_id: str) -> None:
        """
        Hand over the codes that are not yet.
        """
    def project_hidden(
        self, hidden: typing.Annotated[numpy.typing.ArrayLike, numpy.float32]
    ) -> numpy.typing.NDArray[numpy.float32]: ...
    def project_text(
        self, embeddings: typing.Annotated[numpy.typing.ArrayLike, numpy.float32]
    ) -> numpy.typing.NDArray[numpy.float32]: ...
    def remove_request(self, req_id: str) -> None: ...
    def take_ready_tokens(self) -> dict[str, int]:
        """
        Return the tokens whose input exists, of the requests for which it has changed; -1: no limit any more.
        """
    def take_text(self, text: StageEdge) -> list[Delivery]:
        """
        Take the text that is due of all requests that have begun; return what is left.
        """
    def text_rows(
        self, text_ids: typing.Annotated[numpy.typing.ArrayLike, numpy.int32]
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        Projected embeddings of text ids.
        """
    @property
    def num_predictor_calls(self) -> int: ...
    @property
    def num_requests(self) -> int: ...

class HiddenTap(StepHook):
    """
    Hands hidden states over an edge.
    """
    def __init__(
        self, layer: typing.SupportsInt | typing.SupportsIndex, edge: StageEdge, key: tuple[str, str]
    ) -> None: ...

class CodecTransformerConfig:
    """
    Sizes of a codec's transformer.
    """
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def head_dim(self) -> int: ...
    @head_dim.setter
    def head_dim(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def hidden_size(self) -> int: ...
    @hidden_size.setter
    def hidden_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def intermediate_size(self) -> int: ...
    @intermediate_size.setter
    def intermediate_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_heads(self) -> int: ...
    @num_heads.setter
    def num_heads(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_kv_heads(self) -> int: ...
    @num_kv_heads.setter
    def num_kv_heads(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_layers(self) -> int: ...
    @num_layers.setter
    def num_layers(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @rms_norm_eps.setter
    def rms_norm_eps(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def rope_theta(self) -> float: ...
    @rope_theta.setter
    def rope_theta(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def sliding_window(self) -> int: ...
    @sliding_window.setter
    def sliding_window(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class CodecConfig:
    """
    Sizes of a codec decoder.
    """

    transformer: CodecTransformerConfig
    def __init__(self, **kwargs: typing.Any) -> None: ...
    @property
    def codebook_dim(self) -> int: ...
    @codebook_dim.setter
    def codebook_dim(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def codebook_size(self) -> int: ...
    @codebook_size.setter
    def codebook_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def decoder_dim(self) -> int: ...
    @decoder_dim.setter
    def decoder_dim(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def latent_dim(self) -> int: ...
    @latent_dim.setter
    def latent_dim(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def num_codebooks(self) -> int: ...
    @num_codebooks.setter
    def num_codebooks(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def upsample_rates(self) -> list[int]: ...
    @upsample_rates.setter
    def upsample_rates(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...
    @property
    def upsampling_ratios(self) -> list[int]: ...
    @upsampling_ratios.setter
    def upsampling_ratios(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...

class CodecStream:
    """
    What one utterance's decoding keeps between pieces.
    """
    def copy(self) -> CodecStream:
        """
        Return a stream that goes on by itself.
        """
    @property
    def num_frames(self) -> int: ...
    @property
    def num_samples(self) -> int: ...

class CodecDecoder:
    """
    Turns frames of codes into samples, piece by piece.
    """
    def __init__(
        self, config: CodecConfig, tensors: StageTensors, num_threads: typing.SupportsInt | typing.SupportsIndex = 0
    ) -> None: ...
    def decode(
        self, stream: CodecStream, codes: typing.Annotated[numpy.typing.ArrayLike, numpy.int32]
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        Return the samples that frames [n, num_codebooks] complete.
        """
    def num_samples(self, num_frames: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Samples of a whole stream.
        """
    def start(self) -> CodecStream: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def samples_per_frame(self) -> int: ...

class ArrayInfo:
    """
    Where an array of another library lies. Strides are in elements.
    """
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...
    @property
    def strides(self) -> tuple[typing.Any, ...]: ...

class ConvLayout:
    """
    Members:

      sd

      ds
    """

    __members__: typing.ClassVar[dict[str, ConvLayout]]
    ds: typing.ClassVar[ConvLayout]
    sd: typing.ClassVar[ConvLayout]
    @typing.overload
    def __eq__(self, other: ConvLayout) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: ConvLayout) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class StateTensor:
    """
    One state tensor of one layer, as the copies see it.
    """
    @property
    def base(self) -> int: ...
    @property
    def conv_width(self) -> int: ...
    @property
    def elem_size(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def row_stride(self) -> int: ...
    @property
    def slot_stride(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...

class StateCopies:
    """
    All states of a model and their block tables, ready for copies.
    """
    def __init__(
        self,
        states: collections.abc.Sequence[tuple[typing.Any, bool, typing.SupportsInt | typing.SupportsIndex]],
        block_tables: collections.abc.Sequence[typing.Any],
        block_size: typing.SupportsInt | typing.SupportsIndex,
        layout: ConvLayout,
    ) -> None: ...
    def postprocess(
        self,
        num_reqs: typing.SupportsInt | typing.SupportsIndex,
        num_accepted_tokens: typing.Any,
        mamba_state_idx: typing.Any,
        num_scheduled_tokens: typing.Any,
        num_computed_tokens: typing.Any,
        num_draft_tokens: typing.Any,
        num_accepted_tokens_out: typing.Any,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def preprocess(
        self,
        num_reqs: typing.SupportsInt | typing.SupportsIndex,
        num_accepted_tokens: typing.Any,
        mamba_state_idx: typing.Any,
        num_scheduled_tokens: typing.Any,
        num_computed_tokens: typing.Any,
        num_accepted_tokens_out: typing.Any,
        mamba_state_idx_out: typing.Any,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    @property
    def block_table_ptrs(self) -> list[int]: ...
    @property
    def states(self) -> list[StateTensor]: ...

def array_info(array: typing.Any) -> ArrayInfo:
    """
    Read where an array with DLPack or an array interface lies.
    """

def batch_memcpy(
    src_ptrs: typing.Any, dst_ptrs: typing.Any, sizes: typing.Any, stream: typing.SupportsInt | typing.SupportsIndex = 0
) -> None:
    """
    Move sizes[i] bytes from src_ptrs[i] to dst_ptrs[i], overlap allowed.
    """

def cache_capacity(config: KVCacheConfig, max_model_len: typing.SupportsInt | typing.SupportsIndex) -> CacheCapacity:
    """
    What a KVCacheConfig holds, in tokens, requests and bytes.
    """

def count_draft_layers(checkpoint: os.PathLike[str] | str | bytes) -> int:
    """
    Count the layers of the draft module (mtp.*) that a checkpoint folder has.
    """

def device_memory(device: Device) -> tuple[int, int]:
    """
    Free and total bytes of a CUDA device.
    """

def device_name(device: Device) -> str:
    """
    What the driver calls a CUDA device.
    """

def load_model_config(path: os.PathLike[str] | str | bytes) -> ModelConfig:
    """
    Read the config.json of a checkpoint folder, or the file itself.
    """

def make_kv_cache_groups(model: ModelConfig, options: MemoryPlanOptions) -> KVCacheConfig:
    """
    The KV-cache groups of a model, without any division of memory.
    """

def make_stage_runner(
    model: ModelConfig, tensors: StageTensors, kv_cache: KVCacheConfig, options: RunnerOptions
) -> ModelRunner:
    """
    Make the ModelRunner of one stage.
    """

def measure_cpu_ceilings(num_threads: typing.SupportsInt | typing.SupportsIndex = 0) -> tuple[float, float]:
    """
    Bytes a second that this process can read, and f32 operations a second; takes seconds and 512 MiB.
    """

def measure_gpu_ceilings(device_index: typing.SupportsInt | typing.SupportsIndex) -> tuple[float, float]:
    """
    Bytes a second that a GPU can read, and bf16 operations a second; takes about 1 GiB of its memory.
    """

def num_cuda_devices() -> int:
    """
    CUDA devices that this process may use; 0 in a build without CUDA or on a machine without a GPU.
    """

def parse_model_config(json: str) -> ModelConfig:
    """
    Read the text of a config.json.
    """

def plan_kv_cache(model: ModelConfig, options: MemoryPlanOptions) -> KVCacheConfig:
    """
    Divide memory between running state slots, attention blocks and snapshot slots.
    """

def plan_rows(
    rows: collections.abc.Sequence[StepRow],
    num_step_tokens: typing.SupportsInt | typing.SupportsIndex,
    *,
    has_batched_hook: bool = False,
    has_predictor: bool = False,
) -> RowPlan:
    """
    Group the rows of a step for its hooks. RuntimeError for tokens with a gap or out of range.
    """

def validate_gdn_state_indices(
    indices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    required: typing.SupportsInt | typing.SupportsIndex,
    num_slots: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Raise InvalidArgument, naming the row, for state indices that a step must not use.
    """

def validate_sampling_params(params: SamplingParams, vocab_size: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    Raise InvalidArgument, naming the field and the numbers, for a value or a token id out of range.
    """

__version__: str = "0.1.0"
