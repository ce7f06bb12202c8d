"""What a model costs by its shapes: parameters, and the bytes and operations of a step. docs/benchmarks.md has the
formulae in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltaic import _core
from deltaic.device import DTYPE_BYTES, Placement

_CHUNK = 64  # tokens that the chunked delta rule takes together


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters by the part of a model that reads them, over all layers."""

    embedding: int
    head: int  # read once a step; the embedding's own matrix when tied
    linear_attention: int
    full_attention: int
    mlp: int  # of dense layers
    router: int
    shared_expert: int
    experts: int
    vectors: int  # norms, decays and the like
    tied: bool

    @property
    def total(self) -> int:
        return self.embedding + (0 if self.tied else self.head) + self.every_token + self.experts + self.vectors

    @property
    def every_token(self) -> int:
        """Return the matrices of the layers that every token meets, without its routed experts."""
        return self.linear_attention + self.full_attention + self.mlp + self.router + self.shared_expert


def count_parameters(model: _core.ModelConfig) -> ParameterCounts:
    """Count the text model's parameters, without the draft module."""
    hidden = model.hidden_size
    num_linear = model.num_layers_of(_core.LayerKind.linear_attention)
    num_full = model.num_layers - num_linear
    num_moe = sum(model.is_moe_layer)
    value_dim = model.linear_num_value_heads * model.linear_value_head_dim
    projected = model.conv_dim() + value_dim + 2 * model.linear_num_value_heads
    conv = model.conv_dim() * model.linear_conv_kernel_dim
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    expert = 3 * hidden * model.moe_intermediate_size
    shared = 3 * hidden * model.shared_expert_intermediate_size
    if model.shared_expert_intermediate_size:
        shared += hidden  # its gate
    vectors = hidden * (2 * model.num_layers + 1)
    vectors += num_linear * (2 * model.linear_num_value_heads + model.linear_value_head_dim)
    vectors += num_full * 2 * model.head_dim
    if model.attention_bias:
        vectors += num_full * (q * (1 + model.attention_output_gate) + 2 * kv + hidden)
    return ParameterCounts(
        embedding=model.vocab_size * hidden,
        head=model.vocab_size * hidden,
        linear_attention=num_linear * (hidden * (projected + value_dim) + conv),
        full_attention=num_full * hidden * (q * (2 + model.attention_output_gate) + 2 * kv),
        mlp=(model.num_layers - num_moe) * 3 * hidden * model.intermediate_size,
        router=num_moe * hidden * model.num_experts,
        shared_expert=num_moe * shared,
        experts=num_moe * model.num_experts * expert,
        vectors=vectors,
        tied=model.tie_word_embeddings,
    )


def count_draft_parameters(model: _core.ModelConfig) -> int:
    """Count the parameters of the draft module: a product of two vectors to one, and a layer with full attention."""
    hidden = model.hidden_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = hidden * (q * (2 + model.attention_output_gate) + 2 * kv)
    feed_forward = 3 * hidden * model.intermediate_size
    if model.num_experts:
        shared = model.shared_expert_intermediate_size
        feed_forward = hidden * model.num_experts + 3 * hidden * model.moe_intermediate_size * model.num_experts
        feed_forward += (3 * shared + 1) * hidden if shared else 0
    vectors = 5 * hidden + 2 * model.head_dim
    return 2 * hidden * hidden + attention + feed_forward + vectors


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes that must move, and floating-point operations."""

    num_bytes: float
    num_flops: float

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Return the least time: of the bound that takes longer."""
        return max(self.num_bytes / bytes_per_second, self.num_flops / flops_per_second)


class ModelCosts:
    """The costs of one model in the types of a placement; `weight_bytes` are the bytes of a parameter."""

    def __init__(self, model: _core.ModelConfig, placement: Placement, weight_bytes: float | None = None) -> None:
        self._model = model
        self.parameters = count_parameters(model)
        self._bytes_per_weight = DTYPE_BYTES[placement.dtype] if weight_bytes is None else weight_bytes
        num_linear = model.num_layers_of(_core.LayerKind.linear_attention)
        self._num_linear, self._num_full = num_linear, model.num_layers - num_linear
        self._state_elements = (
            num_linear * model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim
        )
        conv_elements = num_linear * model.conv_dim() * max(model.linear_conv_kernel_dim - 1, 0)
        self.state_bytes = (
            self._state_elements * DTYPE_BYTES[placement.recurrent_state_dtype]
            + conv_elements * DTYPE_BYTES[placement.conv_state_dtype]
        )
        self.kv_bytes_per_token = (
            2 * self._num_full * model.num_kv_heads * model.head_dim * DTYPE_BYTES[placement.kv_dtype]
        )

    def distinct_experts(self, num_tokens: int) -> float:
        """Return how many experts of a layer so many tokens meet, when each meets its own at random."""
        if not self._model.num_experts:
            return 0.0
        missed = (1 - self._model.num_experts_per_token / self._model.num_experts) ** num_tokens
        return self._model.num_experts * (1 - missed)

    def decode_step(self, batch_size: int, context_len: float) -> Cost:
        """Return the cost of a step that gives each of `batch_size` requests one token."""
        model = self._model
        recurrent = 7 * self._state_elements  # decay 1, read 2, write 2, read 2
        attention = 4 * self._num_full * model.num_heads * model.head_dim * context_len
        return Cost(
            num_bytes=self._weight_bytes(batch_size)
            + batch_size * (2 * self.state_bytes + (context_len + 1) * self.kv_bytes_per_token),
            num_flops=batch_size * (2 * (self._active_parameters() + self.parameters.head) + recurrent + attention),
        )

    def prefill(self, num_tokens: int, batch_size: int = 1) -> Cost:
        """Return the cost of prompts of `num_tokens` tokens each, run in one step, up to their first tokens."""
        model = self._model
        key, value = model.linear_key_head_dim, model.linear_value_head_dim
        chunked = self._num_linear * model.linear_num_value_heads
        chunked *= 6 * key * value + _CHUNK * 2 * (3 * key + 2 * value)
        attention = 4 * self._num_full * model.num_heads * model.head_dim * (num_tokens + 1) / 2
        flops = num_tokens * (2 * self._active_parameters() + chunked + attention) + 2 * self.parameters.head
        return Cost(
            num_bytes=self._weight_bytes(batch_size * num_tokens)
            + batch_size * (self.state_bytes + num_tokens * self.kv_bytes_per_token),
            num_flops=batch_size * flops,
        )

    def _active_parameters(self) -> float:
        """Return the parameters of the layers that one token meets."""
        share = self._model.num_experts_per_token / self._model.num_experts if self._model.num_experts else 0.0
        return self.parameters.every_token + share * self.parameters.experts

    def _weight_bytes(self, num_tokens: int) -> float:
        """Return the bytes of the weights that so many tokens touch, each once."""
        counts = self.parameters
        share = self.distinct_experts(num_tokens) / self._model.num_experts if self._model.num_experts else 0.0
        rows = min(num_tokens, self._model.vocab_size) * self._model.hidden_size  # of the embedding
        num_weights = counts.every_token + counts.head + share * counts.experts + counts.vectors + rows
        return num_weights * self._bytes_per_weight
