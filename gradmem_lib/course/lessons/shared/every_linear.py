"""Whether a recipe's ``lora_targets`` name every linear layer, as no targets at all do."""

import copy
from dataclasses import replace

from ....model.linear import linear_layers
from ....training.recipe import Recipe


def without_needless_targets(recipe: Recipe, config) -> Recipe:
    """``recipe`` without ``lora_targets``, if they name all linear layers of ``config``'s model but
    its output layer. Then it means the same, and is equal to a recipe that names none.
    """
    if not recipe.lora_targets:
        return recipe
    import torch
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers = 1  # the others have the same names
    # A target names the end of a layer's name, and whole words of it: q_proj, self_attn.q_proj.
    suffixes = tuple(f".{target}" for target in recipe.lora_targets)
    with torch.device("meta"):  # without memory
        for name in linear_layers(AutoModelForCausalLM.from_config(small)):
            if not f".{name}".endswith(suffixes):
                return recipe
    return replace(recipe, lora_targets=())
