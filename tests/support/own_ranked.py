"""Modules of people's own that ranks train: in lists, shared, normalized, recurrent."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from support.own_models import NOISE, UNet, noise_loss, rows_of
from support.predicted import tracked
from support.ranked import figures
from torch import Tensor, nn

from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe

ROWS = 4  # of each rank


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


WORDS = torch.arange(ROWS * 6).reshape(ROWS, 6) % 40
IMAGES = torch.linspace(0, 1, ROWS * 3 * 64).reshape(ROWS, 3, 8, 8)
# By name: how the module is built, a rank's batch, and a loss, if the module returns none.
MODULES = {
    "unet": (UNet, rows_of(NOISE, ROWS), noise_loss),  # lists of layers, called in another order
    "translator": (Translator, WORDS, None),
    "normalized": (Normalized, IMAGES, None),
}


def measured_here(cases: list[tuple[str, dict]]) -> list:
    """In a rank: the figures of a second step, case by case, or the error that a step has."""
    warnings.filterwarnings("ignore")
    found = []
    for name, fields in cases:
        torch.manual_seed(0)
        try:
            build, batch, loss = MODULES[name]
            found.append(figures(tracked(build(), batch, Recipe(**fields), loss)))
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def predicted_for(name: str, fields: dict, ranks: int, rank: int):
    torch.manual_seed(0)
    build, batch, loss = MODULES[name]
    asked = {"recipe": Recipe(**fields), "target": "cpu", "ranks": ranks, "rank": rank}
    return figures(predict(build(), batch=batch, loss=loss, **asked))
