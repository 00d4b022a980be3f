"""Where the layers of a model are."""

from __future__ import annotations

import sys

from torch import nn

# By the list's name in the model: the layers, and the transformers model that calls them, if it was given.
Lists = dict[str, tuple[list[nn.Module], nn.Module | None]]


def find_layers(given: nn.Module) -> Lists:
    """The lists of layers in ``given`` by name, each with the transformers model that calls it, if one was given."""
    if isinstance(given, (nn.Sequential, nn.ModuleList)):
        found = {"layers": (list(given), None)}
    elif isinstance(given, nn.Module):
        found = _lists_of_model(given)
    else:
        raise TypeError(
            "checkpoint_layers takes an nn.Sequential, an nn.ModuleList or a transformers model, and was given "
            f"{type(given).__name__}"
        )
    layers = [layer for several, _ in found.values() for layer in several]
    if not layers:
        raise ValueError(f"there are no layers in this {type(given).__name__}: nothing to checkpoint")
    if len({id(layer) for layer in layers}) < len(layers):
        raise ValueError("the same layer is in the list more than once: shared layers cannot be in segments")
    return found


def _lists_of_model(model: nn.Module) -> Lists:
    modeling = sys.modules.get("transformers.modeling_layers")
    kind = getattr(modeling, "GradientCheckpointingLayer", ())
    found: Lists = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue  # a list inside a layer of another list runs again with it
        if isinstance(module, nn.ModuleList) and len(module) and all(isinstance(m, kind) for m in module):
            parts = name.split(".")
            owners = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]
            owner = next((m for m in reversed(owners) if hasattr(m, "config")), None)
            found[name] = list(module), owner
    if not found:
        raise ValueError(
            f"checkpoint_layers looks in a {type(model).__name__} for a ModuleList whose layers are transformers' "
            "GradientCheckpointingLayer, and none was found. Give the nn.Sequential or nn.ModuleList itself, such as "
            "model.layers"
        )
    return found
