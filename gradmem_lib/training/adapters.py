"""LoRA's additions in a trained model: found, merged, and saved as an ordinary model's weights."""

import torch
from torch import nn

from ..techniques.lora import LoRALinear, replace
from ..techniques.quantized import Linear4bit


def adapters_of(model: nn.Module) -> dict[str, LoRALinear]:
    """LoRA's layers in ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def _mergeable(model: nn.Module) -> dict[str, LoRALinear]:
    adapters = adapters_of(model)
    for name, module in adapters.items():
        if isinstance(module.base, Linear4bit):
            raise ValueError(
                f"the base of {name} is in 4 bits, and what was added would be lost in their rounding: load the model in bf16 "
                "with a recipe without quantized_base, resume from a checkpoint or copy A and B over, and merge there"
            )
    return adapters


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """``model.state_dict()`` as if the additions had been merged, which they stay as they are for."""
    adapters, state = _mergeable(model), model.state_dict()
    for name, module in adapters.items():
        del state[f"{name}.A"], state[f"{name}.B"]
        for key in [key for key in state if key.startswith(f"{name}.base.")]:
            state[name + key.removeprefix(f"{name}.base")] = state.pop(key)
        state[f"{name}.weight"] = module.weight
    return state


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Write LoRA's additions into the weights, in place, and return ``model``: an ordinary one, to save and load anywhere.

    ``ValueError`` where the frozen weights are in 4 bits: what was added would be lost in their rounding.
    """
    for name, module in _mergeable(model).items():
        replace(model, name, module.merged())
    return model
