"""Builds a tiny copy of a transformers model from its config: running it shows what the model's
code does.
"""

import copy
from typing import Any

import torch
from torch import nn

from ..hf_names import SIZES

VOCABULARY, LAYERS, POSITIONS, WIDTH = 97, 2, 128, 64  # as many positions as the tried rows need
MOST_PARAMETERS = 40_000_000
_KIND = {name: kind for kind, names in SIZES.items() for name in names}


def tiny_config(cls: type, config: Any, heads: int = 2) -> Any:
    """A copy of ``config`` for ``cls`` with two layers, about ``heads`` heads and a small
    vocabulary; the rest stays the same.
    """
    small = copy.deepcopy(config)
    if not isinstance(small, getattr(cls, "config_class", None) or object):
        small = small.get_text_config()
    vars(small).pop("quantization_config", None)
    text = small.get_text_config()
    settings = {
        name: v for name, v in vars(text).items() if not name.startswith("_") and v is not None
    }

    def first(kind: str) -> int | None:
        for name in SIZES[kind]:
            if isinstance(settings.get(name), int):
                return settings[name]
        return None

    factor = _factor(first("size") or 1, first("heads"), heads)
    shrunk = {
        "layers": lambda v: min(v, LAYERS),
        "size": lambda v: v if v % factor else v // factor,
        "heads": lambda v: max(v // factor, 1),
        "inside": lambda v: min(v, WIDTH),
        "experts": lambda v: min(v, 4),
        "chosen": lambda v: min(v, 2),
        "positions": lambda v: max(v, POSITIONS),
        "token": lambda v: 0,
    }
    for name, value in settings.items():
        if isinstance(value, list | tuple) and len(value) == first("layers"):
            setattr(text, name, value[:LAYERS])
        elif name in _KIND and (isinstance(value, int) or _KIND[name] == "token"):
            setattr(text, name, shrunk[_KIND[name]](value))
    text.vocab_size, text.use_cache = VOCABULARY, False
    return small


def _factor(width: int, head_count: int | None, heads: int) -> int:
    """The largest number that divides both ``width`` and ``head_count``.

    A head keeps its size, and ``heads`` heads (or a few more) are left.
    """
    head_count = head_count or max(width // WIDTH, 1)
    for factor in range(max(head_count // heads, 1), 1, -1):
        # kernels need rows of a multiple of 16 bytes
        if head_count % factor == 0 and width % (16 * factor) == 0:
            return factor
    if head_count == 1 or width % head_count or width // head_count < 16:
        return 1
    return head_count


def tiny_model(cls: type, config: Any, heads: int = 2) -> nn.Module:
    """A model of class ``cls`` with random float32 weights on the CPU.

    Raises the errors of the model's code.
    """
    small = tiny_config(cls, config, heads)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(small)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"its tiny copy has {size:,} parameters")
    with torch.device("cpu"):
        return cls(small).float()
