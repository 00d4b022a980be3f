"""Finds what an answer has changed of its arguments: numbers, a model's switches, an optimizer's
settings, and the dtype and ``.grad`` of weights.

An argument is described by facts, which are compared before and after a call. A fact has a kind,
such as "mode", which is also the word by which an exercise allows it: ``changes="model.mode"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...compat.modules import hook_counts
from ...compat.tensors import version

# A fact: its kind, the module, weight or name that it is about, and its state.
Fact = tuple[str, Any, Any]
# Facts that must stay even where an argument may change.
LASTING = ("dtype", "gradient", "requires_grad of weights")
# What to do about a fact of each kind; the others are put back.
REMEDIES = {
    "dtype": "convert a copy, and leave the weights as they are",
    "gradient": "set .grad to None, as it was, or use torch.autograd.grad",
    "mode": "model.train() and model.eval() switch it, so put back the one that it had",
    "attribute": "use a local variable, or delete it",
}


def arguments_of(right: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by the right answer's names."""
    try:
        return inspect.signature(right).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}


class Given:
    """A function's arguments, described so that changes can be found afterwards.

    Numbers are copied to memory that no ``MemoryTracker`` counts. ``may_change`` names
    arguments that may change, or one kind of fact of an argument ("model.mode"). The dtypes of
    weights must stay even there, and no gradient may be left where none was.
    """

    def __init__(self, arguments: dict[str, Any], may_change: tuple[str, ...] = ()):
        self.arguments = arguments
        self.may_change = may_change
        self.weights = {name: _weights_in(value) for name, value in arguments.items()}
        self.before = {name: self._facts_of(name) for name in arguments}

    def changes(self) -> Iterator[tuple[tuple[str, str], str]]:
        """(name, kind) and a sentence for each fact that has changed of an argument."""
        for name, facts in self.before.items():
            now = {(kind, about): state for kind, about, state in self._facts_of(name)}
            for kind, about, was in facts:
                # What is gone or new does not count.
                is_now = now.get((kind, about), was)
                if kind == "attribute":
                    is_now = is_now | was
                if is_now != was and not self._may(name, kind, was, is_now):
                    noted = kind
                    if kind == "version":
                        # Where the right answer moves the weights, an answer trains, and may leave
                        # its gradients. So a weight that has moved is noted under the same name.
                        noted = "gradient"
                    yield (name, noted), _sentence(name, kind, about)

    def _facts_of(self, name: str) -> list[Fact]:
        """Everything of an argument that an answer has to leave as it was."""
        value = self.arguments[name]
        return [*_facts_of_weights(value, self.weights[name]), *_facts_of_value(value)]

    def _may(self, name: str, kind: str, was: Any, now: Any) -> bool:
        if kind == "gradient" and was:
            return True  # another one may be in its place
        allowed_by = [f"{name}.{kind}"]
        if kind not in LASTING:
            allowed_by.append(name)
        if kind == "mode" and now:
            allowed_by.append(f"{name}.train")
        if kind == "attribute":
            allowed_by.append(f"{name}.hook")  # a wrapped forward is a hook in another form
        return not set(allowed_by).isdisjoint(self.may_change)


def _sentence(name: str, kind: str, about: Any) -> str:
    if kind == "version":
        return ""
    if kind == "value":
        return f"Your code has changed `{name}` in place: leave `{name}` as it is"
    where = f" ({about})" if isinstance(about, str) else ""
    remedy = REMEDIES.get(kind, "put back what was there")
    return f"Your code leaves `{name}` with another {kind}{where} than before: {remedy}"


def _facts_of_value(value: Any) -> Iterator[Fact]:
    if isinstance(value, nn.Module):
        yield from _facts_of_model(value)
    elif isinstance(value, torch.optim.Optimizer):
        for number, group in enumerate(value.param_groups):
            for setting, entry in group.items():
                if setting != "params":
                    yield setting, f"group {number}", _data(entry)
    else:
        yield "value", "", _data(value)


def _facts_of_weights(value: Any, weights: list[torch.Tensor]) -> Iterator[Fact]:
    for weight in weights:
        yield "version", weight, version(weight)
        yield "dtype", weight, weight.dtype
        yield "gradient", weight, _has_numbers(weight.grad)
        if not isinstance(value, nn.Module):
            yield "requires_grad of weights", weight, weight.requires_grad


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _facts_of_model(model: nn.Module) -> Iterator[Fact]:
    """Its switches: an answer may change weights and gradients."""
    for module in model.modules():
        yield "mode", module, module.training
        yield "hook", module, hook_counts(module)
        yield "attribute", module, _own_attributes(module)
        if isinstance(module, nn.Dropout):
            yield "dropout", module, module.p
        if hasattr(module, "gradient_checkpointing"):
            yield "checkpointing", module, module.gradient_checkpointing
    for parameter in model.parameters():
        yield "hook", parameter, hook_counts(parameter)
        yield "requires_grad", parameter, parameter.requires_grad
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        for field, state in config.to_dict().items():
            yield "config", f"config.{field}", state


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


def _weights_in(value: Any) -> list[torch.Tensor]:
    """The parameters of a model or an optimizer, the tensors that require a gradient, and those in
    a collection of them.
    """
    if isinstance(value, nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.optim.Optimizer):
        return [p for group in value.param_groups for p in group["params"]]
    if isinstance(value, torch.Tensor):
        return [value] if value.is_leaf and value.requires_grad else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [weight for entry in value for weight in _weights_in(entry)]
    return []


def _has_numbers(gradient: torch.Tensor | None) -> bool:
    """Whether there is a gradient that is not zero everywhere."""
    if gradient is None:
        return False
    if type(gradient) is not torch.Tensor or not _can_be_read(gradient):
        return True
    return _bytes_of(gradient).strip(b"\0") != b""


def _data(value: Any) -> Any:
    """A copy of numbers, for comparison; ``None`` for what is not compared."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad or not _can_be_read(value):
            return None
        return value.dtype, tuple(value.shape), _bytes_of(value)
    if isinstance(value, dict):
        return [(key, _data(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [_data(entry) for entry in value]
    return value if isinstance(value, (int, float, str)) else None


def _can_be_read(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def _bytes_of(tensor: torch.Tensor) -> bytes:
    with torch.no_grad():
        return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
