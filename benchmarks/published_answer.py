"""Answer.AI's FSDP + QLoRA (March 2024, two RTX 3090 or 4090): the rows in which each card holds the whole model.

Llama-2-7B in bf16, 2,048 tokens, each layer checkpointed, adapters of rank 64 with dropout on six of its seven matrices, torch's
AdamW. What that software did otherwise than a ``Recipe`` today, from its source and that of transformers 4.37, PEFT 0.9 and
bitsandbytes 0.43:

- logits were cast to float32, shifted into a second copy of that size, and kept until the step is over;
- the base is NF4 with quantized scales, made from bf16; embedding and output layer stay in bf16;
- PEFT cloned the product of a 4-bit layer before it added the adapter's to it in place;
- FSDP, here without shards, copied the tensors of each unit (a layer, an adapter's matrix, what is left) into one flat tensor
  when it wrapped the model. What it freed then is reserved, and goes to activations as far as they fit.

The published figure is what was reserved. Rows in shards are left for lesson 10: a rank's share was tried as half of each flat
tensor, with two layers and the root gathered in a pool of their own. Against the published figures that gives for QLoRA -1.3 %
(1 row), +1.9 % (4 rows) and +9.4 % (10 rows), for LoRA -3.2 % (1 row), +2.7 % (4) and -4.0 % (6), and -23 % for QLoRA on 1 row of
512 tokens. How many gathered layers wait in that pool, and what FSDP's first steps leave reserved, is not known well enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from published_layers import FourBits, on_meta
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from gradmem_lib.course.published import Row
from gradmem_lib.prediction.allocator import Allocator, rounded, workspace
from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.trace import traced
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import GiB

SOURCE = "Answer.AI, Llama-2-7B, RTX 4090, 2024"
TOKENS, RANK, RTX_4090 = 2048, 64, (8, 9)
LLAMA_7B = dict(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32, use_cache=False
)  # fmt: skip
ADAPTED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
PEAKS = {("QLoRA", 8): 20.94, ("LoRA", 4): 22.04}  # (method, rows of a card): GiB


class FourBitsOfBf16(FourBits):
    was = torch.bfloat16


class Adapted(nn.Module):
    """A frozen layer with low-rank matrices beside it."""

    def __init__(self, base: nn.Module, columns: int, rows: int, clone: bool):
        super().__init__()
        self.base, self.clone = base, clone
        self.lora_a = nn.Linear(columns, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x).clone() if self.clone else self.base(x)
        y += self.lora_b(self.lora_a(F.dropout(x, 0.1, True))) * 0.25
        return y


def model_of(method: str) -> nn.Module:
    quantized = method == "QLoRA"
    four_bits = partial(FourBitsOfBf16, bias=False, double=True)
    with on_meta(torch.bfloat16):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_7B)).requires_grad_(False)
        for block in model.model.layers:
            for home in (block.self_attn, block.mlp):
                for name, layer in list(home.named_children()):
                    if isinstance(layer, nn.Linear):
                        sizes = layer.in_features, layer.out_features
                        base = four_bits(*sizes) if quantized else layer
                        setattr(
                            home, name, Adapted(base, *sizes, clone=quantized) if name in ADAPTED else base
                        )
    # The checkpoints of that time needed an input that takes a gradient.
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out.requires_grad_())
    return model


def requests_of(model: nn.Module, rows: int) -> tuple[int, ...]:
    """What a step asks of the allocator, the parameters first."""
    with torch.device("meta"):
        ids = torch.zeros(rows, TOKENS, dtype=torch.long)
    kept: dict[str, Any] = {}

    def loss(model, batch):
        logits = kept["logits"] = model(input_ids=batch["ids"]).logits.float()
        shifted, labels = logits[:, :-1].contiguous(), batch["ids"][:, 1:].contiguous()
        return F.cross_entropy(shifted.flatten(0, 1), labels.flatten())

    recipe = Recipe(precision=None, optimizer="adamw-foreach", attention="fused", checkpointing="per-layer")
    found = predict(model, batch={"ids": ids}, loss=loss, recipe=recipe, target="cuda")
    return traced(found._question, None, None).requests


def reserved(model: nn.Module, rows: int) -> int:
    """Bytes reserved after a step, on a model that FSDP has wrapped."""
    allocator = Allocator()
    for _ in range(2):
        allocator.allocate(workspace(RTX_4090) // 2)
    parameters = list(model.named_parameters())
    units: dict[str, list[int]] = {}
    for name, parameter in parameters:
        if "lora" not in name:
            unit = ".".join(name.split(".")[:3]) if ".layers." in name else "root"
            units.setdefault(unit, []).append(parameter.nbytes)
    for unit in [*(sizes for name, sizes in units.items() if name != "root"), units["root"]]:
        separate = [allocator.allocate(size) for size in unit]
        allocator.allocate(sum(unit))
        for address in separate:
            allocator.free(address)
    flat = {i for i, (name, _) in enumerate(parameters) if "lora" not in name}
    addresses: list[int | None] = []
    requests = requests_of(model, rows)
    assert [*requests[: len(parameters)]] == [rounded(parameter.nbytes) for _, parameter in parameters]
    for i, request in enumerate(requests):
        if request < 0:
            allocator.free(addresses[-1 - request])
        else:
            addresses.append(None if i in flat else allocator.allocate(request))
    return allocator.reserved


def rows() -> Iterator[Row]:
    for (method, count), published in PEAKS.items():
        run = f"{method}, {count} rows, not sharded"
        yield Row(SOURCE, run, "most reserved", round(published * GiB), reserved(model_of(method), count))
