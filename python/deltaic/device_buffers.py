"""How much memory a runner takes beside weights and caches. Bounds for a plan: the buffers are made elsewhere."""

from __future__ import annotations

from deltaic import _core
from deltaic.device import DTYPE_BYTES, Placement

_CHUNK_TOKENS = 64
_KEY_TILE_BYTES = 2 * 64 * 128 * 2  # of a chunk and key head in the chunked delta rule: keys and queries
_VALUE_TILE_BYTES = 2 * 64 * 128 * 2 + 64 * 64 * 2 + 2 * 64 * 4  # and of a value head: two matrices, scores, decays
_MAX_KEY_SPLITS = 64  # of a request in decode attention
_ROW_BYTES_PER_SCORE = 8  # of a row of logits and a word of the vocabulary: the logit and its copy
_COUNT_BYTES_PER_SCORE = 8  # of a request and a word of the vocabulary: how often it came, and the list of those


def activation_bytes(
    model: _core.ModelConfig, placement: Placement, num_tokens: int, num_seqs: int, max_model_len: int
) -> int:
    """Return the bytes of hidden states, and of the layer that needs the most workspace."""
    hidden_states = num_tokens * model.hidden_size * (4 + 2 * DTYPE_BYTES[placement.dtype])
    mixers = [_full_attention_bytes(model, placement, num_tokens, num_seqs, max_model_len)]
    if model.num_layers_of(_core.LayerKind.linear_attention):
        mixers.append(_linear_attention_bytes(model, placement, num_tokens, num_seqs))
    return hidden_states + max(*mixers, _feed_forward_bytes(model, placement, num_tokens))


def draft_module_bytes(
    model: _core.ModelConfig, placement: Placement, num_tokens: int, num_seqs: int, max_model_len: int
) -> int:
    """Return the bytes of what the draft module, a layer of full attention, has of its own."""
    hidden_states = 5 * num_tokens * model.hidden_size * DTYPE_BYTES[placement.dtype]
    mixer = _full_attention_bytes(model, placement, num_tokens, num_seqs, max_model_len)
    return hidden_states + max(mixer, _feed_forward_bytes(model, placement, num_tokens))


def sampler_bytes(model: _core.ModelConfig, placement: Placement, num_seqs: int, num_drafts: int = 0) -> int:
    """Return the bytes of logits and, on a GPU, the most that requests with penalties and logprobs need."""
    num_rows = num_seqs * (1 + num_drafts)
    if not placement.is_cuda:
        return num_rows * model.vocab_size * 4
    return model.vocab_size * (num_rows * _ROW_BYTES_PER_SCORE + num_seqs * _COUNT_BYTES_PER_SCORE)


def metadata_bytes(placement: Placement, num_tokens: int, num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Return the bytes of block tables and of what a step says of its tokens, twice on a GPU."""
    row_bytes = -(-max_model_len // block_size) * 4 + 64
    return (num_seqs * row_bytes + num_tokens * 32) * (2 if placement.is_cuda else 1)


def _full_attention_bytes(
    model: _core.ModelConfig, placement: Placement, num_tokens: int, num_seqs: int, max_model_len: int
) -> int:
    heads = model.num_heads * (2 + model.attention_output_gate) + 2 * model.num_kv_heads  # q, gate, out, k, v
    rows = num_tokens * heads * model.head_dim * DTYPE_BYTES[placement.dtype]
    splits = min(_MAX_KEY_SPLITS, -(-max_model_len // _CHUNK_TOKENS)) if placement.is_cuda else 0
    return rows + num_seqs * splits * model.num_heads * (model.head_dim + 2) * 4


def _linear_attention_bytes(model: _core.ModelConfig, placement: Placement, num_tokens: int, num_seqs: int) -> int:
    value_dim = model.linear_num_value_heads * model.linear_value_head_dim
    row = 2 * model.conv_dim() + 2 * value_dim + 2 * model.linear_num_value_heads  # q, k, v twice; z; out; b and a
    num_chunks = num_tokens // _CHUNK_TOKENS + num_seqs if placement.is_cuda else 0
    tiles = model.linear_num_key_heads * _KEY_TILE_BYTES + model.linear_num_value_heads * _VALUE_TILE_BYTES
    return num_tokens * row * DTYPE_BYTES[placement.dtype] + num_chunks * tiles


def _feed_forward_bytes(model: _core.ModelConfig, placement: Placement, num_tokens: int) -> int:
    size = DTYPE_BYTES[placement.dtype]
    most = 0
    if not all(model.is_moe_layer):
        most = num_tokens * 2 * model.intermediate_size * size
    if any(model.is_moe_layer):
        pair = (model.moe_intermediate_size + model.hidden_size) * size + 16  # an expert's token: hidden, out, indices
        shared = 2 * model.shared_expert_intermediate_size * size + model.hidden_size * size
        routing = 4 * model.num_experts + 8 * model.num_experts_per_token
        most = max(most, num_tokens * (model.num_experts_per_token * pair + shared + routing))
    return most
