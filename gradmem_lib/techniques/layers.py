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
        to_give = _lists_to_give(layers_or_model)
        raise ValueError(
            f"there are no layers in this {type(layers_or_model).__name__}: no ModuleList of "
            "transformers' GradientCheckpointingLayers was found. Give the nn.Sequential or "
            f"nn.ModuleList itself{to_give}. With a recipe: checkpoint_layers first, and no "
            "checkpointing= in it"
        )
    if any(type(layer).forward is nn.Module.forward for layer in layers):
        raise ValueError(
            "the layers of this list have no forward of their own (they are lists or dicts of "
            "parts), so nobody calls them, and neither a checkpoint nor a shard would ever run: "
            "give a list whose items are called, for example modules that call these parts in "
            "their forward"
        )
    if len(set(layers)) < len(layers):
        raise ValueError(
            "the same layer is in the list more than once: shared layers cannot be in segments"
        )
    return found


def _lists_to_give(model: nn.Module) -> str:
    """The lists in ``model`` with two callable layers or more, in words; the longest first."""
    lists = []
    for name, module in model.named_modules():
        if not name or not isinstance(module, (nn.Sequential, nn.ModuleList)):
            continue
        callable_items = all(type(layer).forward is not nn.Module.forward for layer in module)
        if len(module) > 1 and callable_items:
            lists.append((len(module), name))
    if not lists:
        return (
            ". This model has none: make one of the layers, in the order in which its forward "
            "calls them, such as nn.ModuleList([model.first, model.second])"
        )
    lists.sort(key=lambda found: -found[0])
    words = [f"model.{name} ({n} layers)" for n, name in lists[:3]]
    several = ""
    if len(words) > 1:
        several = "; call checkpoint_layers once for each list"
    return f", such as {' or '.join(words)}{several}"
