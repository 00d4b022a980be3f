"""LoRA's additions in a trained model: found, merged, and saved as an ordinary model's weights."""

from __future__ import annotations

import torch
from torch import nn

from ..techniques.lora import LoRALinear
from ..techniques.quantized import Linear4bit


def adapters_of(model: nn.Module) -> dict[str, LoRALinear]:
    """LoRA's layers in ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def _check_mergeable(adapters: dict[str, LoRALinear]) -> None:
    for name, module in adapters.items():
        if isinstance(module.base, Linear4bit):
            raise ValueError(
                f"the base of {name} is in 4 bits, and what was added would be lost in their rounding: load the model in bf16 "
                "with a recipe without quantized_base, resume from a checkpoint or copy A and B over, and merge there"
            )


@torch.no_grad()
def merged_state(model: nn.Module, adapters: dict[str, LoRALinear]) -> dict[str, torch.Tensor]:
    """``model.state_dict()`` as if the additions had been merged, which they stay as they are for."""
    _check_mergeable(adapters)
    state = model.state_dict()
    for name, module in adapters.items():
        for own in [key for key in state if key.startswith(f"{name}.")]:
            tensor = state.pop(own)
            if own == f"{name}.base.weight":
                state[f"{name}.weight"] = module.weight
            elif own.startswith(f"{name}.base."):
                state[f"{name}{own.removeprefix(f'{name}.base')}"] = tensor
    return state


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Write LoRA's additions into the weights, in place, and return ``model``: an ordinary one, to save and load anywhere.

    ``ValueError`` where the frozen weights are in 4 bits: what was added would be lost in their rounding.
    """
    adapters = adapters_of(model)
    _check_mergeable(adapters)
    for name, module in adapters.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module.merged())
    return model
