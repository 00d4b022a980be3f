"""Answer.AI's FSDP + QLoRA (March 2024, two RTX 3090 or 4090), a rank's memory predicted in one
process.

Llama-2-7B in bf16, each layer checkpointed, adapters of rank 64 with dropout on six of its seven
matrices, torch's AdamW. What that software did otherwise than a ``Recipe`` today, from its source
and that of torch 2.2, transformers 4.37, PEFT 0.9 and bitsandbytes 0.43:

- logits were cast to float32, shifted into a second copy of that size, and kept until the step is
  over;
- the base is NF4 with quantized scales, made from bf16; embedding and output layer stay in bf16;
- PEFT cloned the product of a 4-bit layer before it added the adapter's to it in place;
- FSDP copied the tensors of each unit (a layer, an adapter's matrix, what is left) into one flat
  tensor when it wrapped the model, after a broadcast with a copy of its own. What it freed then
  stays reserved, and goes to activations as far as they fit;
- with shards, a rank keeps half of each flat tensor and of the adapters' states. Scales are no
  parameters, and stay whole. Two layers at a time, and the root all the time, are gathered on a
  stream of their own, whose blocks no other stream can have;
- 10 rows fill the card: the allocator gives its cache back to the driver, and tries again.

The published figure is what was reserved. Llama-2-70B in 4 bits with its parameters on the host (2
x 2,048 tokens, two cards:
14.92 GiB) is left out. By the rules above, states on the host too, it comes to 13.46 GiB. With the
shards copied up on a stream of their own, it comes to 13.95, 6.5 % too few: something of a GiB more
was reserved, and no source that we read says what. Nor does a ``Recipe`` say it: ``sharding="fsdp",
offload="parameters"`` is today's FSDP2, which allocates at most 8.95 GiB for it.
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

from gradmem_lib.course.ledger.published import Row
from gradmem_lib.planning.cards import CARDS
from gradmem_lib.prediction.allocator import CONTEXT, Allocator, rounded, workspace
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import GiB, MiB

SOURCE = "Answer.AI, Llama-2-7B, RTX 4090, 2024"
RANK, BUCKET = 64, 250 * MiB  # an adapter's; most bytes in one copy of a broadcast
CARD = CARDS["RTX 4090 24GB"]
LLAMA_7B = dict(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    use_cache=False,
)
ADAPTED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
# (method, rows of a card, tokens, cards that share the model): GiB
PEAKS = {
    ("QLoRA", 8, 2048, 1): 20.94,
    ("LoRA", 4, 2048, 1): 22.04,
    ("QLoRA", 1, 512, 2): 4.98,
    ("QLoRA", 1, 2048, 2): 5.21,
    ("QLoRA", 4, 2048, 2): 11.22,
    ("QLoRA", 10, 2048, 2): 20.97,
    ("LoRA", 1, 512, 2): 10.24,
    ("LoRA", 1, 2048, 2): 10.22,
    ("LoRA", 4, 2048, 2): 16.14,
    ("LoRA", 6, 2048, 2): 21.35,
}


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
        homes = [home for block in model.model.layers for home in (block.self_attn, block.mlp)]
        for home in homes:
            for name, layer in list(home.named_children()):
                if not isinstance(layer, nn.Linear):
                    continue
                sizes = layer.in_features, layer.out_features
                base = four_bits(*sizes) if quantized else layer
                if name in ADAPTED:
                    base = Adapted(base, *sizes, clone=quantized)
                setattr(home, name, base)
    # The checkpoints of that time needed an input that takes a gradient.
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out.requires_grad_())
    return model


def requests_of(model: nn.Module, rows: int, tokens: int) -> tuple[int, ...]:
    """What a step asks of the allocator, the parameters first."""
    with torch.device("meta"):
        ids = torch.zeros(rows, tokens, dtype=torch.long)
    kept: dict[str, Any] = {}

    def loss(model, batch):
        logits = kept["logits"] = model(input_ids=batch["ids"]).logits.float()
        shifted, labels = logits[:, :-1].contiguous(), batch["ids"][:, 1:].contiguous()
        return F.cross_entropy(shifted.flatten(0, 1), labels.flatten())

    recipe = Recipe(
        precision=None, optimizer="adamw-foreach", attention="fused", checkpointing="per-layer"
    )
    found = predict(model, batch={"ids": ids}, loss=loss, recipe=recipe, target="cuda")
    return found.requests()


def units_of(model: nn.Module) -> dict[str, list[int]]:
    """The bytes of each tensor in what FSDP makes one flat tensor of, by a name, in the order in
    which it does so.
    """
    found: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        layer = ".".join(name.split(".")[:3]) if ".layers." in name else "root"
        if "scales" not in name:
            found.setdefault(name if "lora" in name else layer, []).append(parameter.nbytes)
    return {name: sizes for name, sizes in found.items() if name != "root"} | {
        "root": found["root"]
    }


def wrap(allocator: Allocator, unit: list[int], cards: int) -> None:
    """One unit, as FSDP moves it to the card, flattens it and cuts it."""
    separate = [allocator.allocate(size) for size in unit]
    allocator.free(allocator.allocate(min(sum(unit), BUCKET)))
    whole = allocator.allocate(sum(unit))
    for address in separate:
        allocator.free(address)
    if cards > 1:
        allocator.allocate(-(-sum(unit) // cards))
        allocator.free(whole)


def gathered(units: dict[str, list[int]]) -> int:
    """Bytes reserved on the stream that gathers: the root, and two layers with their adapters."""
    allocator = Allocator()
    layer = [
        sum(sizes) for name, sizes in units.items() if f"{name}.".startswith("model.layers.0.")
    ]
    for size in [sum(units["root"]), *layer, *layer]:
        allocator.allocate(size)
    return allocator.reserved


def reserved(method: str, rows: int, tokens: int, cards: int) -> int:
    """The most bytes that a rank has reserved in a step, on a model that FSDP has wrapped."""
    model = model_of(method)
    parameters, units = list(model.named_parameters()), units_of(model)
    apart = gathered(units) if cards > 1 else 0
    allocator = Allocator(CARD.nbytes - CONTEXT - apart)
    for size in [workspace(CARD.capability) // 2] * 2:
        allocator.allocate(size)
    for name, parameter in parameters:
        if "scales" in name:
            allocator.allocate(parameter.nbytes)
    for unit in units.values():
        wrap(allocator, unit, cards)
    requests = requests_of(model, rows, tokens)
    there = [rounded(parameter.nbytes) for _, parameter in parameters]
    assert [*requests[: len(there)]] == there
    adapters = {rounded(parameter.nbytes) for name, parameter in parameters if "lora" in name}
    states = 2 * sum("lora" in name for name, _ in parameters)
    addresses: list[int | None] = [None] * len(there)
    most = 0
    for request in requests[len(there) :]:
        if request < 0:
            allocator.free(addresses[-1 - request])
            continue
        if states and request in adapters:  # they come first, and are cut
            states, request = states - 1, request // cards
        addresses.append(allocator.allocate(request))
        most = max(most, allocator.reserved)
    return most + apart


def rows() -> Iterator[Row]:
    for (method, count, tokens, cards), published in PEAKS.items():
        run = f"{method}, {count} x {tokens:,} tokens, {'FSDP' if cards > 1 else 'not sharded'}"
        predicted = reserved(method, count, tokens, cards)
        yield Row(SOURCE, run, "most reserved", round(published * GiB), predicted)
