"""Finds the layers of a model."""

from torch import nn

from ..hf_names import hf_class

# By each list's name in the model: the layers, and the transformers model that calls them, if it
# was given.
Lists = dict[str, tuple[list[nn.Module], nn.Module | None]]


def find_layers(layers_or_model: nn.Module) -> Lists:
    """The lists of layers in an ``nn.Sequential``, an ``nn.ModuleList`` or a transformers model."""
    if not isinstance(layers_or_model, nn.Module):
        raise TypeError(
            "checkpoint_layers takes an nn.Sequential, an nn.ModuleList or a transformers model, "
            f"and was given {type(layers_or_model).__name__}"
        )
    found: Lists = {}
    if isinstance(layers_or_model, (nn.Sequential, nn.ModuleList)):
        found["layers"] = list(layers_or_model), None
    else:
        kind = hf_class("GradientCheckpointingLayer")
        owners = {}
        for name, module in layers_or_model.named_modules():
            if any(name.startswith(f"{outer}.") for outer in found):
                continue  # a list inside a layer of another list is recomputed with that layer
            if hasattr(module, "config"):
                owners[f"{name}." if name else ""] = module
            if (
                isinstance(module, nn.ModuleList)
                and len(module)
                and all(isinstance(m, kind) for m in module)
            ):
                enclosing = [owner for outer, owner in owners.items() if name.startswith(outer)]
                found[name] = list(module), enclosing[-1] if enclosing else None
    if not (layers := [layer for several, _ in found.values() for layer in several]):
        raise ValueError(
            f"there are no layers in this {type(layers_or_model).__name__}: in a model, a "
            "ModuleList of transformers' GradientCheckpointingLayers is looked for, and none was "
            "found. Give the nn.Sequential or nn.ModuleList itself, such as model.layers"
        )
    if len(set(layers)) < len(layers):
        raise ValueError(
            "the same layer is in the list more than once: shared layers cannot be in segments"
        )
    return found
