"""The switches of a model that an answer has to leave as they were, and a sentence for each change.

A switch's name is also a part of the sentence: "your code leaves `model` with another dropout than
before". The mode, checkpointing, the config and attributes have sentences of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...compat.modules import hook_counts

_MODE = "another mode"
_CHECKPOINTING = "other checkpointing"
_OWN = "another attribute or hook"  # a wrapped forward is a hook in another form
_CONFIG = "another config"
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def model_switches(model: nn.Module) -> dict[str, Any]:
    """For each switch, pairs of a module or parameter and its state; the config as a dict, or
    ``None``.
    """
    modules = list(model.modules())
    parameters = list(model.parameters())
    dropouts = [m for m in modules if isinstance(m, nn.Dropout)]
    layers = [m for m in modules if hasattr(m, "gradient_checkpointing")]
    config = getattr(model, "config", None)
    return {
        _MODE: [(m, m.training) for m in modules],
        "another requires_grad": [(p, p.requires_grad) for p in parameters],
        "a hook more or less": [(thing, hook_counts(thing)) for thing in (*modules, *parameters)],
        _OWN: [(m, _own_attributes(m)) for m in modules],
        "another dropout": [(m, m.p) for m in dropouts],
        _CHECKPOINTING: [(m, m.gradient_checkpointing) for m in layers],
        _CONFIG: config.to_dict() if hasattr(config, "to_dict") else None,
    }


def _own_attributes(module: nn.Module) -> frozenset[str]:
    """The names of methods that ``module`` itself has, not its class, and of tensors that it keeps
    and are no parameters or buffers. Numbers and the like do not count.
    """
    names = set()
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE:
            continue
        entries = value if isinstance(value, (list, tuple)) else (value,)
        if callable(value) or any(isinstance(entry, torch.Tensor) for entry in entries):
            names.add(name)
    return frozenset(names)


def changed_switch(kind: str, was: Any, now: Any, *, may_be_on: bool) -> Iterator[str]:
    """What to say of the switch ``kind``, which was ``was`` and is ``now``.

    ``may_be_on``: it may have been switched on.
    """
    if kind == _CONFIG:
        yield from _changed_config(was, now)
    elif kind == _OWN:
        yield from _new_attributes(was, now)
    else:
        changed = _changed_states(was, now)
        if may_be_on:
            changed = [state for state in changed if not state]
        if changed:
            yield _sentence(kind, changed[0])


def _changed_config(was: dict | None, now: dict | None) -> Iterator[str]:
    """Only the first field that differs. A new field does not count."""
    if not was or not now:
        return
    for name, value in now.items():
        if value != was.get(name, value):
            yield f"config.{name} = {value!r}: put back what was there"
            return


def _new_attributes(was: list[tuple], now: list[tuple]) -> Iterator[str]:
    names_before = {id(module): names for module, names in was}
    for module, names in now:
        for name in sorted(names - names_before.get(id(module), names)):
            yield (
                f"an attribute {name!r} that was not there, a method or a tensor: use a local "
                "variable, or delete it"
            )


def _changed_states(was: list[tuple], now: list[tuple]) -> list:
    """The new states of what is in both lists: modules that are gone or new do not count."""
    before = {id(thing): state for thing, state in was}
    return [state for thing, state in now if before.get(id(thing), state) != state]


def _sentence(kind: str, state: Any) -> str:
    if kind == _MODE:
        left, other = ("train", "eval") if state else ("eval", "train")
        return f"{left} mode on, but it was off before: restore it with model.{other}()"
    if kind == _CHECKPOINTING:
        left, other = ("on", "off") if state else ("off", "on")
        return f"checkpointing {left}, but it was {other} before: switch it {other} again"
    return f"{kind} than before: put it back"
