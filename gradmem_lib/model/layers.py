"""Finds the layers of a model."""

from contextlib import suppress

from torch import nn

from ..hf_names import hf_class

# By each list's name in the model: the layers, and the transformers model that calls them, if it
# was given.
Lists = dict[str, tuple[list[nn.Module], nn.Module | None]]
# Lists of layers by name: each is a list's name, or a tuple of its layers' names.
Named = tuple[str | tuple[str, ...], ...]


def find_layers(layers_or_model: nn.Module, named: Named = ()) -> Lists:
    """The lists of layers in an ``nn.Sequential``, an ``nn.ModuleList`` or a transformers model.

    ``named``: the lists of any model, by name. Each is the name of an ``nn.ModuleList`` or
    ``nn.Sequential``, as ``named_modules`` gives it (a ModuleList among its items, which nobody
    calls, stands for its own items), or a tuple of the names of layers. An empty tuple: they are
    looked for.

    Raises ``ValueError`` for layers that are not found, are in two lists, or cannot be called.
    """
    if not isinstance(layers_or_model, nn.Module):
        raise TypeError(
            "checkpoint_layers takes an nn.Sequential, an nn.ModuleList or a transformers model, "
            f"and was given {type(layers_or_model).__name__}"
        )
    if named:
        found = _named_lists(layers_or_model, named)
    elif isinstance(layers_or_model, (nn.Sequential, nn.ModuleList)):
        found = {"layers": (list(layers_or_model), None)}
    else:
        found = _lists_of_transformers(layers_or_model)
    _check(layers_in(found), layers_or_model)
    return found


def layers_in(lists: Lists) -> list[nn.Module]:
    """The layers of all lists."""
    return [layer for layers, _ in lists.values() for layer in layers]


def layers_of(model: nn.Module, named: Named = ()) -> list[nn.Module]:
    """The layers of all lists that ``find_layers`` finds; an empty list if it finds none."""
    with suppress(ValueError):
        return layers_in(find_layers(model, named))
    return []


def _check(layers: list[nn.Module], model: nn.Module) -> None:
    """Refuse layers that a checkpoint cannot run, found in ``model``."""
    if not layers:
        to_give = _lists_to_give(model)
        raise ValueError(
            f"there are no layers in this {type(model).__name__}: no ModuleList of transformers' "
            "GradientCheckpointingLayers was found. Give the nn.Sequential or nn.ModuleList "
            f"itself{to_give}. A recipe takes its name, layers='...' beside checkpointing="
        )
    if not all(is_callable(layer) for layer in layers):
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


def _lists_of_transformers(model: nn.Module) -> Lists:
    """The lists of layers that transformers itself can checkpoint."""
    kind = hf_class("GradientCheckpointingLayer")
    found: Lists = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue  # a list inside a layer of another list is recomputed with that layer
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if all(isinstance(layer, kind) for layer in module):
            found[name] = list(module), _owner(model, name)
    return found


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    """The innermost module with a config around the one of this name; ``None`` if none has one."""
    owner = None
    for outer, module in model.named_modules():  # a module comes before those inside it
        is_around = outer == "" or name.startswith(f"{outer}.")
        if is_around and hasattr(module, "config"):
            owner = module
    return owner


def _named_lists(model: nn.Module, named: Named) -> Lists:
    """The lists of these names. Raises ``ValueError`` if one is not there."""
    found: Lists = {}
    for entry in named:
        if not entry:
            raise ValueError(
                f"layers={named!r} has an empty list: give the name of an nn.ModuleList or "
                "nn.Sequential that has layers, or a tuple of the names of layers"
            )
        if isinstance(entry, str):
            layers = items_called(_module_named(model, entry))
            found[entry] = layers, _owner(model, entry)
        else:
            layers = [_module_named(model, name) for name in entry]
            found[" and ".join(entry)] = layers, _owner(model, entry[0])
    _check_named(found)
    return found


def _check_named(lists: Lists) -> None:
    """Refuse a list without layers, and one with a layer that is inside another layer."""
    inside: set[nn.Module] = set()  # all modules below the layers
    for layer in layers_in(lists):
        _, *parts = layer.modules()
        inside.update(parts)
    for name, (layers, _) in lists.items():
        if not layers:
            raise ValueError(
                f"{name} has no items: give the name of an nn.ModuleList or nn.Sequential that "
                "has layers, or a tuple of the names of layers"
            )
        if not inside.isdisjoint(layers):
            raise ValueError(
                f"{name} is a part of another layer that is given, and would run a third time: "
                "give the one or the other"
            )


def _module_named(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if not name or name not in modules:
        raise ValueError(
            f"layers={name!r}: there is no such module in this {type(model).__name__}"
            f"{_lists_to_give(model)}"
        )
    return modules[name]


def is_callable(module: nn.Module) -> bool:
    """Whether a module has a forward, as lists and dicts of parts have not."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


def items_called(several: nn.Module) -> list[nn.Module]:
    """The items of a ModuleList or Sequential; in place of a ModuleList among them, its items.

    Empty for other modules. ``None`` in a list, which stands for a part that this model does not
    have, is left out.
    """
    if not isinstance(several, (nn.Sequential, nn.ModuleList)):
        return []
    items: list[nn.Module] = []
    for item in several:
        if isinstance(item, nn.ModuleList):  # nobody can call it
            items += items_called(item)
        elif item is not None:
            items.append(item)
    return items


def _lists_to_give(model: nn.Module) -> str:
    """The lists in ``model`` with two callable layers or more, in words; the longest first."""
    lists = []
    for name, module in model.named_modules():
        if not name or not isinstance(module, (nn.Sequential, nn.ModuleList)):
            continue
        layers = items_called(module)
        if len(layers) > 1 and all(is_callable(layer) for layer in layers):
            lists.append((len(layers), name))
    if not lists:
        return (
            ". This model has none: make one of the layers, in the order in which its forward "
            "calls them, such as nn.ModuleList([model.first, model.second])"
        )
    lists.sort(key=lambda found: -found[0])  # by length; equals stay in the model's order
    words = [f"model.{name} ({n} layers)" for n, name in lists[:3]]
    several = ""
    if len(words) > 1:
        several = "; call checkpoint_layers once for each list"
    return f", such as {' or '.join(words)}{several}"
