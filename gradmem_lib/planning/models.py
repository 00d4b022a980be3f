"""Models that people know by name: their sizes, without a network."""

from __future__ import annotations

import copy
import os
import re
from typing import Any

from torch import nn

from ..techniques.shapes import SHAPES, Shape

# Shapes of well-known models: the id that they have on the hub, and the positions that they were made for. Their sizes are
# those of ``accounting.SHAPES`` where it has them.
_MODELS = {
    "tiny Llama": ("", 2048),
    "SmolLM2-135M": ("HuggingFaceTB/SmolLM2-135M-Instruct", 8192),
    "GPT-2": ("openai-community/gpt2", 1024),
    "GPT-2 XL": ("openai-community/gpt2-xl", 1024),
    "BERT-large": ("google-bert/bert-large-uncased", 512),
    "Llama-3.2-1B": ("meta-llama/Llama-3.2-1B", 131072),
    "Llama-2-7B": ("meta-llama/Llama-2-7b-hf", 4096),
    "Llama-3.1-8B": ("meta-llama/Llama-3.1-8B", 131072),
    "Llama-2-13B": ("meta-llama/Llama-2-13b-hf", 4096),
    "Llama-2-70B": ("meta-llama/Llama-2-70b-hf", 4096),
}

_MORE_SHAPES = {"Llama-3.1-8B": Shape("Llama-3.1-8B", 128256, 4096, 32, 32, 8, 14336)}


def known_model(name: str) -> tuple[str, Any, str] | None:
    """(name, config, hub id) of a well-known model, in whatever way its name is written; ``None`` for others.

    The config has the model's sizes and needs no network. Names: those of ``_MODELS``.
    """
    for known, (hub_id, positions) in _MODELS.items():
        if re.sub(r"[^a-z0-9]", "", name.lower()) in (
            re.sub(r"[^a-z0-9]", "", n.lower()) for n in (known, hub_id) if n
        ):
            return known, _shape_config(known, positions), hub_id
    return None


def _shape_config(name: str, positions: int):
    if name == "BERT-large":
        from transformers import BertConfig

        return BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
    # The hub's GPT-2s are trained with dropout, and its masks take memory.
    return (_MORE_SHAPES.get(name) or SHAPES[name]).config(positions=positions, dropout=0.1)


def find_model(given) -> tuple[Any, str]:
    from ..prediction.configs import find_config, title_of

    if isinstance(given, nn.Module):
        config = getattr(given, "config", None)
        if config is None:
            raise ValueError(
                f"{type(given).__name__} has no config: plan is for transformers models. For other modules, predict each recipe "
                "with predict(model, batch=..., recipe=Recipe(...))"
            )
        config = copy.deepcopy(config)
        config.architectures = [type(given).__name__]
        return config, type(given).__name__
    known = known_model(given) if isinstance(given, str) and not os.path.exists(given) else None
    if known is not None:
        return known[1], known[0]
    config = find_config(given)
    return config, title_of(given, config)
