"""torchtune's table (README, September 2024; one RTX 4090): Llama-3.1-8B in bf16 on 2 rows of 2,048
tokens, layers checkpointed.

What its recipes did, from its configurations and source:

- every weight: bitsandbytes' paged 8-bit AdamW in backward. Its states are in managed memory,
  outside of PyTorch's allocator, and it updates in place: for the allocator, plain SGD in backward;
- LoRA: rank 8 on queries and values. QLoRA: rank 8 on all seven matrices of a layer, these in NF4;
- logits are made in eight pieces. The loss of each was compiled: kept are its bf16 logits, and no
  float32 copy of them.

torch.compile compiled the layers too, whose plan is not traced: a prediction without it is too high
rather than too low. Eager losses were tried, and are further off: 19 % for LoRA, 31 % for QLoRA.
The table does not say which peak it has; here it is live bytes and cuBLAS's workspace. LoRA's row
stays 6 % off: by its figure, less than the logits of 4,096 tokens is there beside weights and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from published_layers import on_meta
from torch import nn
from transformers import LlamaForCausalLM

from gradmem_lib.course.ledger.published import Row
from gradmem_lib.model.known import known_model
from gradmem_lib.prediction.allocator import workspace
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import GiB

SOURCE = "torchtune, Llama-3.1-8B, RTX 4090, 2024"
ROWS, TOKENS, PIECES, RTX_4090 = 2, 2048, 8, (8, 9)
_CHECKPOINTED = Recipe(
    precision="bf16", optimizer="adamw-fused", checkpointing="per-layer", attention="fused"
)
ALL_SEVEN = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
PEAKS = {
    "every weight": (18.9, replace(_CHECKPOINTED, optimizer="sgd", in_backward=True)),
    "LoRA": (16.2, replace(_CHECKPOINTED, lora_rank=8, lora_targets=("q_proj", "v_proj"))),
    "QLoRA": (
        7.4,
        replace(_CHECKPOINTED, lora_rank=8, lora_targets=ALL_SEVEN, quantized_base=True),
    ),
}  # GiB


class _CompiledLoss(torch.autograd.Function):
    """Cross-entropy as one kernel each way: it keeps logits (tokens, vocabulary) as they came, and
    a float32 for each token.
    """

    @staticmethod
    def forward(ctx, logits, labels):
        ctx.save_for_backward(logits, labels, logits.new_empty(len(logits), dtype=torch.float32))
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, d_loss):
        return torch.empty_like(ctx.saved_tensors[0]), None


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = model.model(input_ids=batch["ids"], use_cache=False).last_hidden_state
    pieces = [model.lm_head(piece) for piece in hidden.chunk(PIECES, dim=1)]
    labels = batch["ids"].chunk(PIECES, dim=1)
    losses = [
        _CompiledLoss.apply(piece.flatten(0, 1), label.flatten())
        for piece, label in zip(pieces, labels, strict=True)
    ]
    return sum(losses) / batch["ids"].numel()


def rows() -> Iterator[Row]:
    for name, (published, recipe) in PEAKS.items():
        with on_meta(torch.bfloat16):
            model = LlamaForCausalLM(known_model("Llama-3.1-8B")[1])
            ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
        found = predict(model, batch={"ids": ids}, loss=loss, recipe=recipe, target="cuda")
        needs = found.peak.total + workspace(RTX_4090)
        yield Row(SOURCE, name, "peak", round(published * GiB), needs)
