"""A tiny copy of a transformers model, made from its config: to find out by running it what a model's code does."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

VOCABULARY, LAYERS, EXPERTS, CHOSEN, WIDTH = 97, 2, 4, 2, 64
MOST_PARAMETERS = 40_000_000
# What families call the same thing. Sizes and heads are divided by one number, so that a head keeps its size.
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_blocks",
)
_SIZES = (
    "hidden_size", "n_embd", "d_model", "model_dim", "emb_dim", "mamba_d_ssm", "lru_width", "embedding_size",
    "word_embed_proj_dim", "attention_hidden_size",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
    "num_key_value_heads", "num_kv_heads", "mamba_n_heads", "n_groups", "mamba_n_groups",
)  # fmt: skip
_INSIDE = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim",
    "encoder_ffn_dim", "expert_ffn_hidden_size", "intermediate_size_mlp", "shared_intermediate_size", "ffn_hidden_size",
    "block_ff_dim",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
_POSITIONS, POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")


def tiny_config(cls: type, config: Any, heads: int = 2) -> Any:
    """``config`` for a model of class ``cls`` with two layers, about so many heads, few words, and all else as it was."""
    small = copy.deepcopy(config)
    if not isinstance(small, getattr(cls, "config_class", None) or object):
        small = small.get_text_config()
    if getattr(small, "quantization_config", None) is not None:
        del small.quantization_config
    text = small.get_text_config()
    given = {
        name: value for name, value in vars(text).items() if not name.startswith("_") and value is not None
    }
    layers = next((given[name] for name in _LAYERS if name in given), None)
    factor = _factor(given, heads)
    for name, value in given.items():
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, name, value[:LAYERS])
        elif name in _TOKENS:
            setattr(text, name, 0)
        elif name in _LAYERS:
            setattr(text, name, min(value, LAYERS))
        elif name in _POSITIONS and isinstance(value, int):
            setattr(text, name, max(value, POSITIONS))  # room for the rows that are tried
        elif name in _SIZES and value % factor == 0:
            setattr(text, name, value // factor)
        elif name in _HEADS and isinstance(value, int):
            setattr(text, name, max(value // factor, 1))
        elif name in _INSIDE and isinstance(value, int):
            setattr(text, name, min(value, WIDTH))
        elif name in _EXPERTS or name in _CHOSEN:
            setattr(text, name, min(value, EXPERTS if name in _EXPERTS else CHOSEN))
    text.vocab_size, text.use_cache = VOCABULARY, False
    return small


def _factor(given: dict[str, Any], heads: int) -> int:
    """The largest number that heads and the width can be divided by, so that ``heads`` of them are left, or a few more."""
    width = next((given[name] for name in _SIZES if name in given), 1)
    most = next((given[name] for name in _HEADS if isinstance(given.get(name), int)), max(width // WIDTH, 1))
    for factor in range(max(most // heads, 1), 1, -1):
        if most % factor == 0 and width % (16 * factor) == 0:  # kernels want rows of whole 16 bytes
            return factor
    return 1 if most == 1 or width % most or width // most < 16 else most


def tiny_model(cls: type, config: Any, heads: int = 2) -> nn.Module:
    """A model of class ``cls`` with random float32 weights on the CPU, or whatever error its code raises."""
    small = tiny_config(cls, config, heads)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(small)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"its tiny copy has {size:,} parameters")
    with torch.device("cpu"):
        return cls(small).float()
