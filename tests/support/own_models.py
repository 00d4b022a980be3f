"""Modules of one's own whose layers are in lists, each with a row of its inputs and its loss: as
people write them who do not use transformers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from gradmem_lib.compat.trees import tree_leaves, tree_map
from gradmem_lib.planning.rows import rows_like

TOKENS, WIDTH = 8, 32


def attend(mixed):
    heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in mixed.chunk(3, -1)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(attend(self.mixed(self.norm(x))))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.forth = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.forth(x)


class Pairs(nn.Module):
    """A transformer whose layers are lists of an attention and an MLP."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.inputs = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(), FeedForward()]) for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, x):
        x = self.inputs(x)
        for attention, forth in self.layers:
            x = attention(x) + x
            x = forth(x) + x
        return self.head(x.mean(1))


class InARow(nn.Module):
    """A transformer whose layers are one nn.Sequential, as timm has it."""

    def __init__(self, layers: int = 4):
        super().__init__()
        self.inputs, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, x):
        return self.head(self.blocks(self.inputs(x)).mean(1))


class Conditioned(nn.Module):
    """A block of a diffusion transformer: the time shifts and scales its input."""

    def __init__(self):
        super().__init__()
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))
        self.block = Block()

    def forward(self, x, time):
        shift, scale, gate = self.condition(time)[:, None].chunk(3, -1)
        return x + gate * self.block(x * (1 + scale) + shift)


class Diffusion(nn.Module):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 2, 2)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Conditioned() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, latents, times):
        x = self.patches(latents).flatten(2).transpose(1, 2)
        time = self.time(times[:, None])
        for block in self.blocks:
            x = block(x, time)
        side = latents.shape[-1] // 2
        return F.pixel_shuffle(self.head(x).transpose(1, 2).unflatten(-1, (side, side)), 2)


class Residual(nn.Module):
    """A block of a UNet, which gets the time too."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.skip = nn.Linear(1, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, time):
        inside = F.silu(self.norm(self.first(x)) + self.time(time)[:, :, None, None])
        return self.skip(x) + F.silu(self.second(inside))


class UNet(nn.Module):
    """Its lists are defined in another order than that of their calls."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.up = nn.ModuleList([Residual(6 * width, 2 * width), Residual(3 * width, width)])
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width), Residual(width, 2 * width)])
        self.middle = nn.ModuleList([Residual(2 * width, 4 * width)])
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, latents, times):
        time = times[:, None]
        x, skipped = self.first(latents), []
        for layer in self.down:
            x = layer(x, time)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        for layer in self.middle:
            x = layer(x, time)
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, skipped.pop()], 1), time)
        return self.last(x)


def noise_loss(model, batch):
    return F.mse_loss(model(batch["latents"], batch["times"]), batch["noise"])


def class_loss(model, batch):
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


CLASS = torch.zeros(1, dtype=torch.int64)
NOISE = {
    "latents": torch.zeros(1, 4, 8, 8),
    "times": torch.zeros(1),
    "noise": torch.zeros(1, 4, 8, 8),
}
# By name: how the model is built, a row of its batch, its loss, and the lists of its layers in the
# order of their calls.
OWN_MODELS = {
    "diffusion": (Diffusion, NOISE, noise_loss, ("blocks",)),
    "unet": (UNet, NOISE, noise_loss, ("down", "middle", "up")),
    "pairs": (Pairs, (torch.zeros(1, TOKENS, 4), CLASS), class_loss, ("layers",)),
    "in a row": (InARow, (torch.zeros(1, TOKENS, 4), CLASS), class_loss, ("blocks",)),
}


def rows_of(batch, rows: int = 4, dtype: torch.dtype | None = None):
    """Real rows like those of ``batch``."""
    return tree_map(lambda t: torch.zeros(t.shape, dtype=t.dtype), rows_like(batch, rows, dtype))


class Examples(Dataset):
    """The rows of a batch: dicts or tuples."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self) -> int:
        return len(tree_leaves(self.batch)[0])

    def __getitem__(self, i: int):
        return tree_map(lambda tensor: tensor[i], self.batch)
