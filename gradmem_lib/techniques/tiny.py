"""A tiny copy of a transformers model, made from its config: to find out by running it what a model's code does."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

VOCABULARY, LAYERS, EXPERTS, WIDTH = 97, 2, 4, 64
MOST_PARAMETERS = 40_000_000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = (
    "hidden_size",
    "n_embd",
    "d_model",
    "model_dim",
    "mamba_d_ssm",
    "lru_width",
    "embedding_size",
    "word_embed_proj_dim",
)
_HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "mamba_n_heads",
    "num_kv_heads",
)
_INSIDE = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim", "expert_ffn_hidden_size",
    "intermediate_size_mlp", "shared_intermediate_size", "ffn_hidden_size", "block_ff_dim",
)  # fmt: skip
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
    "moe_k",
    "moe_topk",
)
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")


def tiny_config(config: Any) -> Any:
    """``config`` with two layers, few heads, experts and words, and everything else as it was."""
    small = copy.deepcopy(config)
    if getattr(small, "quantization_config", None) is not None:
        del small.quantization_config
    text = small.get_text_config()
    before = next((getattr(text, name) for name in _LAYERS if hasattr(text, name)), None)
    heads = [
        n
        for n in (getattr(text, name, None) for name in ("num_attention_heads", "n_head", "num_heads"))
        if isinstance(n, int)
    ]
    factor = max(heads[0] // 2, 1) if heads else 1
    given = [name for name in vars(text) if not name.startswith("_")]
    for name in {*given, *_LAYERS, *_SIZES, *_HEADS} & set(dir(text)):
        value = getattr(text, name, None)
        if isinstance(value, list | tuple) and len(value) == before:
            setattr(text, name, value[:LAYERS])
        elif name in _TOKENS and value is not None:
            setattr(text, name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            continue
        if name in _LAYERS:
            setattr(text, name, min(value, LAYERS))
        elif name in _SIZES and name in given and value % factor == 0:
            setattr(text, name, value // factor)
        elif name in _HEADS and name in given:
            setattr(text, name, max(value // factor, 1))
        elif name in _INSIDE:
            setattr(text, name, min(value, WIDTH))
        elif name in _EXPERTS:
            setattr(text, name, min(value, EXPERTS if "per_tok" not in name and name[-1] != "k" else 2))
    text.vocab_size, text.use_cache = VOCABULARY, False
    return small


def tiny_model(cls: type, config: Any) -> nn.Module:
    """A model of class ``cls`` with random float32 weights on the CPU, or whatever error its code raises."""
    small = tiny_config(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(small)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"its tiny copy has {size:,} parameters")
    with torch.device("cpu"):
        return cls(small).float()
