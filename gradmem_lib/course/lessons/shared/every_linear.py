"""Whether a recipe's ``lora_targets`` name every linear layer, as no targets at all do."""

from __future__ import annotations

import copy
from dataclasses import replace

from ....techniques.lora import linear_layers
from ....training.recipe import Recipe


def without_needless_targets(recipe: Recipe, config) -> Recipe:
    """``recipe`` without ``lora_targets``, if they name all linear layers of ``config``'s model but
    its output layer.
    """
    if not recipe.lora_targets:
        return recipe
    suffixes = tuple(f".{target}" for target in recipe.lora_targets)
    named = [f".{name}".endswith(suffixes) for name in _linear_names(config)]
    return replace(recipe, lora_targets=()) if all(named) else recipe


def _linear_names(config) -> list[str]:
    """Names of the linear layers of a model with one layer, which has no memory of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    with torch.device("meta"):
        return list(linear_layers(AutoModelForCausalLM.from_config(small)))
