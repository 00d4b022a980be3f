"""Modules of people's own that the tests of ranks train: nested, shared, normalized, recurrent."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from support.predicted import tracked
from support.ranked import figures
from torch import Tensor, nn

from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe

ROWS = 4  # of each rank


class UNet(nn.Module):
    """Lists of layers inside a list: two convolutions at each of three sizes, down and up again."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 16)):
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = 3
        for width in widths:
            self.down.append(nn.ModuleList([convolution(before, width), convolution(width, width)]))
            before = width
        for width in reversed(widths[:-1]):
            joined = before + width
            self.up.append(nn.ModuleList([convolution(joined, width), convolution(width, width)]))
            before = width
        self.last = nn.Conv2d(before, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        image, kept = x, []
        for stage in self.down:
            for layer in stage:
                x = layer(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = kept.pop()
        for stage in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1)
            for layer in stage:
                x = layer(x)
        return F.mse_loss(self.last(x), image)


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs))


class Translator(nn.Module):
    """Encoder, decoder and head share one embedding."""

    def __init__(self, width: int = 16, words: int = 40):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        options = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, **options) for _ in range(3)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 2, **options) for _ in range(3)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        memory = self.embedding(words)
        for layer in self.encoder:
            memory = layer(memory)
        out = self.embedding(words)
        for layer in self.decoder:
            out = layer(out, memory)
        return F.cross_entropy(self.head(out).flatten(0, 1), words.flatten())


class Normalized(nn.Module):
    """Convolutions with batch norm, whose running means are buffers."""

    def __init__(self):
        super().__init__()
        layers = []
        for inputs, outputs in ((3, 8), (8, 8), (8, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3))).square().mean()


class Recurrent(nn.Module):
    """A classifier of words with an LSTM of two layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, words: Tensor) -> Tensor:
        out, _ = self.lstm(self.embedding(words))
        return F.cross_entropy(self.head(out[:, -1]), words[:, 0] % 5)


class AllExperts(nn.Module):
    """A loop over experts that each see all rows, and whose sum a gate weighs."""

    def __init__(self, experts: int = 3):
        super().__init__()
        self.gate = nn.Linear(12, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + weights[:, i : i + 1] * expert(x)
        return (out - x).square().mean()


class ChosenExperts(AllExperts):
    """Each expert sees the rows for which the gate chooses it: how many there are, values say."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        weight, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return (out - x).square().mean()


MODULES = {
    "unet": UNet,
    "translator": Translator,
    "normalized": Normalized,
    "recurrent": Recurrent,
    "experts": AllExperts,
}


def batch_of(name: str) -> Tensor:
    if name in ("translator", "recurrent"):
        return torch.arange(ROWS * 6).reshape(ROWS, 6) % 40
    if name == "experts":
        return torch.linspace(0, 1, ROWS * 12).reshape(ROWS, 12)
    return torch.linspace(0, 1, ROWS * 3 * 64).reshape(ROWS, 3, 8, 8)


def measured_here(cases: list[tuple[str, dict]]) -> list:
    """In a rank: the figures of a second step, case by case, or the error that a step has."""
    warnings.filterwarnings("ignore")
    found = []
    for name, fields in cases:
        torch.manual_seed(0)
        try:
            found.append(figures(tracked(MODULES[name](), batch_of(name), Recipe(**fields))))
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def predicted_for(name: str, fields: dict, ranks: int, rank: int):
    torch.manual_seed(0)
    asked = {"recipe": Recipe(**fields), "target": "cpu", "ranks": ranks, "rank": rank}
    return figures(predict(MODULES[name](), batch=batch_of(name), **asked))
