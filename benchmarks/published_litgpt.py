"""LitGPT's resource tables (October 2023, one A100 40 GB), predicted on a module that keeps for
backward what LitGPT's did.

LoRA of rank 8 on queries and values, bf16, no checkpoints, Alpaca's longest row first. All that
follows was read from the repository at the commits of that month; transformers' models do each of
these things otherwise:

- queries, keys and values come from one matrix, and the values that attention keeps are a view of
  the whole product;
- LoRA's product for queries and values is copied into a tensor of zeros, and ``index_copy`` keeps
  what it copied;
- adapters see their input through dropout: a copy of it and a mask are kept;
- rotary tables are float32, so rotated queries and keys are float32 until they are cast back;
- logits are made in pieces of 128 tokens, and Fabric casts what a module returns to float32; they
  live until the next step;
- the longest row is in the first micro-batch, when the optimizer has no states yet;
- every linear layer was quantized, the output layer too; bitsandbytes 0.41 made it float16 first,
  so writing it out makes a float16 copy before the bf16 one, and its product kept its input for
  backward.

One thing the published figures decide. The table names a commit of 16 October 2023, when RMSNorm
worked in bf16. On 24 October, three days before the table came, RMSNorm went to float32: each norm
then keeps its input in float32, twice the bytes. With bf16, Llama's bf16 rows come out 3 to 5 % low
while all others are right; with float32 all rows are within half a per cent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from published_layers import FourBits, on_meta
from torch import Tensor, nn

from gradmem_lib.course.ledger.published import Row
from gradmem_lib.prediction.allocator import workspace
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe

SOURCE = "LitGPT, LoRA, A100 40 GB, 2023"
RANK, CHUNK = 8, 128


@dataclass(frozen=True)
class Shape:
    """A model of LitGPT's. ``longest``: tokens of Alpaca's longest row; ``rotated``: the part of a
    head that is rotated.
    """

    longest: int
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    rotated: float
    llama: bool = True  # RMSNorm, a gated MLP without biases, one residual after the other
    shared_norm: bool = False
    head_bias: bool = False


SHAPES = {
    "phi-1.5": Shape(
        1044, 51_200, 2048, 8192, 24, 32, 0.5, llama=False, shared_norm=True, head_bias=True
    ),
    "StableLM-Alpha-3B": Shape(1034, 50_688, 4096, 16_384, 16, 32, 0.25, llama=False),
    "Llama-2-7B": Shape(1304, 32_000, 4096, 11_008, 32, 32, 1.0),
    "Llama-2-13B": Shape(1304, 32_000, 5120, 13_824, 40, 40, 1.0),
}
# (model, base, rows): GB, as published.
PEAKS = {
    ("phi-1.5", "bf16", 1): 4.82,
    ("phi-1.5", "bf16", 2): 6.76,
    ("phi-1.5", "bf16", 4): 10.68,
    ("phi-1.5", "nf4", 1): 3.78,
    ("phi-1.5", "nf4-dq", 1): 3.72,
    ("StableLM-Alpha-3B", "bf16", 1): 9.69,
    ("StableLM-Alpha-3B", "bf16", 2): 12.10,
    ("StableLM-Alpha-3B", "bf16", 4): 16.92,
    ("StableLM-Alpha-3B", "nf4", 1): 6.35,
    ("StableLM-Alpha-3B", "nf4-dq", 1): 6.19,
    ("Llama-2-7B", "bf16", 1): 21.30,
    ("Llama-2-7B", "bf16", 2): 29.07,
    ("Llama-2-7B", "nf4", 1): 14.14,
    ("Llama-2-7B", "nf4-dq", 1): 13.84,
    ("Llama-2-13B", "bf16", 1): 38.12,
    ("Llama-2-13B", "nf4", 1): 23.14,
    ("Llama-2-13B", "nf4-dq", 1): 22.55,
}


class Float32Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * (wide * scale)).to(x.dtype)


LINEAR = {"bf16": nn.Linear, "nf4": FourBits, "nf4-dq": partial(FourBits, double=True)}


class QueriesKeysValues(nn.Module):
    """One frozen matrix for all three, and LoRA for the first and the last: (batch, tokens, width)
    to three times the width.
    """

    def __init__(self, width: int, bias: bool, linear: Callable):
        super().__init__()
        self.width = width
        self.linear = linear(width, 3 * width, bias=bias)
        self.lora_a = nn.Parameter(torch.empty(2 * RANK, width))
        self.lora_b = nn.Parameter(torch.empty(2 * width, RANK))

    def forward(self, x: Tensor) -> Tensor:
        base = self.linear(x)
        small = F.linear(F.dropout(x, 0.05, True), self.lora_a)
        both = F.conv1d(small.mT, self.lora_b[..., None], groups=2).mT.transpose(0, 1)
        places = torch.zeros(2 * self.width, dtype=torch.long, device=x.device)
        zeros = both.new_zeros(both.shape[0] * both.shape[1], 3 * self.width)
        placed = zeros.index_copy(1, places, both.reshape(-1, 2 * self.width))
        return base + placed.view(*both.shape[:2], 3 * self.width).transpose(0, 1) * 2.0


class Block(nn.Module):
    def __init__(self, shape: Shape, linear: Callable):
        super().__init__()
        norm = Float32Norm if shape.llama else nn.LayerNorm
        bias = not shape.llama
        self.shape = shape
        self.norms = nn.ModuleList(norm(shape.width) for _ in range(1 if shape.shared_norm else 2))
        self.qkv = QueriesKeysValues(shape.width, bias, linear)
        self.out = linear(shape.width, shape.width, bias=bias)
        self.up = nn.ModuleList(
            linear(shape.width, shape.inner, bias=bias) for _ in range(1 + shape.llama)
        )
        self.down = linear(shape.inner, shape.width, bias=bias)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        size, n = width // self.shape.heads, cos.shape[-1]
        parts = self.qkv(x).view(batch, tokens, self.shape.heads, 3, size).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(batch, -1, tokens, size) for part in parts.split(1, dim=2))
        q, k = (torch.cat((rotated(t[..., :n], cos, sin), t[..., n:]), dim=-1) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def mlp(self, x: Tensor) -> Tensor:
        if self.shape.llama:
            return self.down(F.silu(self.up[0](x)) * self.up[1](x))
        return self.down(F.gelu(self.up[0](x)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norms[0](x)
        attended = self.attention(normed, cos, sin)
        if self.shape.llama:
            x = attended + x
            return self.mlp(self.norms[1](x)) + x
        return self.mlp(normed if self.shape.shared_norm else self.norms[1](x)) + attended + x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class Model(nn.Module):
    """(batch, tokens) to a list of logits in float32, (batch, 128, vocabulary) each."""

    def __init__(self, shape: Shape, linear: Callable):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, linear) for _ in range(shape.layers))
        self.norm = Float32Norm(shape.width) if shape.llama else nn.LayerNorm(shape.width)
        self.head = linear(shape.width, shape.vocabulary, bias=shape.head_bias)
        tables = torch.zeros(
            2, shape.longest, int(shape.rotated * shape.width / shape.heads), dtype=torch.float32
        )
        self.register_buffer("tables", tables)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, *self.tables)
        logits = [self.head(part) for part in self.norm(x).split(CHUNK, dim=1)]
        return [part.float() for part in logits]


def predicted(name: str, base: str, rows: int) -> int:
    """Bytes at the peak of the first micro-batch, cuBLAS's workspace among them."""
    shape = SHAPES[name]
    with on_meta(torch.bfloat16):
        model = Model(shape, LINEAR[base])
        ids = torch.zeros(rows, shape.longest, dtype=torch.long)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in parameter_name)
    kept: dict[str, Any] = {}

    def loss(model, batch):
        ids, targets = batch
        logits = kept["logits"] = model(ids)
        logits[-1] = logits[-1][:, :-1]
        losses = (
            F.cross_entropy(part.flatten(0, 1), labels.flatten(), reduction="none")
            for part, labels in zip(logits, targets[:, 1:].split(CHUNK, dim=1), strict=True)
        )
        return torch.cat([*losses]).mean()

    recipe = Recipe(precision=None, optimizer="adamw-foreach", attention="fused")
    peak = predict(model, batch=(ids, ids), loss=loss, recipe=recipe, target="cuda").peak
    assert peak.phase in ("forward", "backward") and not peak.by_category["gradients"]
    return peak.total - peak.by_category["optimizer"] + workspace()


def rows() -> Iterator[Row]:
    for (name, base, count), published in PEAKS.items():
        run = f"{name}, {base}, {count} row{'s' * (count > 1)}"
        yield Row(
            SOURCE, run, "most allocated", round(published * 1e9), predicted(name, base, count)
        )
