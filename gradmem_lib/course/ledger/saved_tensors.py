"""Counts what autograd saves in a real run: the tensors handed over, and the storages that they
keep alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from ...compat.fake_tensors import FakeTensorMode
from ...compat.tensors import storage_key
from ..machine.compat import model_from_config
from ..material.flops import count_operations
from ..material.shapes import Shape


def saved_tensors(
    run: Callable[[], object], but_not: Iterable[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], int]:
    """What autograd saves while ``run`` runs: every tensor handed over, and the bytes of their
    storages, each once.

    Storages that belong to a tensor in ``but_not`` (parameters, say) are left out of both.
    """
    ignored = {storage_key(tensor.untyped_storage()) for tensor in but_not}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor.untyped_storage()) not in ignored:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()  # alive until the count is done, or a storage's address could be used twice
    storages = {
        storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in kept
    }
    del result
    return kept, sum(storages.values())


def full_size_block(
    shape: Shape, batch_size: int, seq_len: int, attention: str
) -> tuple[nn.Module, list[torch.Tensor], Callable[[], torch.Tensor]]:
    """A real Llama block of transformers in bf16 at full size under fake tensors, its rotary
    tables, and its forward.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        use_cache=False,
    )
    implementation = {"fused": "sdpa", "eager": "eager"}[attention]
    with FakeTensorMode():
        model = model_from_config(
            LlamaForCausalLM, config, attn_implementation=implementation, dtype=torch.bfloat16
        )
        x = torch.empty(batch_size, seq_len, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        tables = [torch.empty(1, seq_len, shape.head_dim, dtype=torch.bfloat16) for _ in range(2)]
        mask = (
            torch.empty(batch_size, 1, seq_len, seq_len, dtype=torch.bfloat16)
            if attention == "eager"
            else None
        )
    block = model.train().model.layers[0]
    return block, tables, lambda: block(x, attention_mask=mask, position_embeddings=tables)


def block_operations(
    shape: Shape, seq_len: int, attention: str, again: Callable[[nn.Module], AbstractContextManager]
) -> int:
    """Operations of such a block's forward and backward on one row, within ``again(block)``."""
    block, _, forward = full_size_block(shape, 1, seq_len, attention)
    with again(block):
        return count_operations(lambda: forward().sum().backward())
