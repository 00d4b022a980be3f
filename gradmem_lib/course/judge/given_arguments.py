"""Finds what an answer has changed of its arguments: numbers, a model's switches, an optimizer's
settings, and the dtype and ``.grad`` of weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ...compat.tensors import version
from .model_switches import changed_switch, model_switches
from .side_effects import Left


def arguments_of(reference: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by the reference's names."""
    try:
        return inspect.signature(reference).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}


class Given:
    """A function's arguments, recorded so that changes can be found afterwards.

    Numbers are copied to memory that a ``MemoryTracker`` does not count. For models, only switches
    are recorded, since an answer may change weights and gradients. ``may_change`` names arguments
    that may change, or a switch of one ("model.mode"). The dtypes of weights must stay even there,
    and no gradient may be left where none was. A tensor that requires a gradient must go on doing
    so, outside of a model.
    """

    def __init__(self, arguments: dict[str, Any], may_change: tuple[str, ...] = ()):
        self.arguments = arguments
        self.may_change = may_change
        self.values: dict[str, Any] = {}  # as they were, for each argument that must not change
        self.weights: dict[str, list[torch.Tensor]] = {}
        self.weights_before: dict[str, list[_Weight]] = {}
        self.trained: dict[str, list[torch.Tensor]] = {}  # weights that required a gradient
        for name, value in arguments.items():
            if name not in may_change:
                self.values[name] = _comparable(value)
            weights = _weights_in(value)
            self.weights[name] = weights
            self.weights_before[name] = _look_at(weights)
            self.trained[name] = []
            if not isinstance(value, nn.Module):  # a model's are among its switches
                self.trained[name] = [weight for weight in weights if weight.requires_grad]

    def changes(self) -> Iterator[Left]:
        """What has changed of each argument."""
        for name in self.arguments:
            if name in self.values:
                yield from self._changed_value(name)
            yield from self._changed_weights(name)

    def _changed_value(self, name: str) -> Iterator[Left]:
        value = self.arguments[name]
        before, after = self.values[name], _comparable(value)
        if isinstance(value, nn.Module):
            yield from self._changed_model(name, before, after)
        elif isinstance(value, torch.optim.Optimizer):
            yield from self._changed_settings(name, before, after)
        elif before != after:
            yield (
                (name, "value"),
                f"your code has changed `{name}` in place: do not change an argument, work on a "
                "copy",
            )

    def _changed_model(self, name: str, before: dict, after: dict) -> Iterator[Left]:
        for kind in before:
            if any(f"{name}.{word}" in self.may_change for word in kind.split()):
                continue
            may_train = kind == "another mode" and f"{name}.train" in self.may_change
            for what in changed_switch(kind, before[kind], after[kind], may_be_on=may_train):
                yield (name, kind), f"your code leaves `{name}` with {what}"

    def _changed_settings(self, name: str, before: list[dict], after: list[dict]) -> Iterator[Left]:
        """Of an optimizer's groups."""
        for was, now in zip(before, after, strict=False):
            for key in was:
                if f"{name}.{key}" in self.may_change or was[key] == now.get(key):
                    continue
                yield (
                    (name, key),
                    f"your code leaves `{name}` with another {key} than before: restore it",
                )

    def _changed_weights(self, name: str) -> Iterator[Left]:
        """What has changed of the weights in an argument: a model, an optimizer, a list of them."""
        before = self.weights_before[name]
        after = _look_at(self.weights[name])
        pairs = list(zip(before, after, strict=True))
        if any(was.dtype != now.dtype for was, now in pairs):
            yield (
                (name, "another dtype"),
                f"your code leaves `{name}` with weights of another dtype than before: convert a "
                "copy, and leave the weights as they are",
            )
        if not all(weight.requires_grad for weight in self.trained[name]):
            yield (
                (name, "another requires_grad"),
                f"your code leaves `{name}` with weights that require no gradient any more: put "
                "requires_grad back",
            )
        if any(now.has_gradient and not was.has_gradient for was, now in pairs):
            yield (
                (name, "gradients"),
                f"your code leaves `{name}` with gradients in .grad, where there were none: set "
                "them to None, or use torch.autograd.grad",
            )
        elif before != after:
            # Where the reference moves the weights, an answer trains, and may leave its gradients.
            yield (name, "gradients"), ""


class _Weight(NamedTuple):
    """What is compared of a weight."""

    dtype: torch.dtype
    has_gradient: bool  # other than zeros
    version: int  # how often it has been changed in place


def _look_at(weights: list[torch.Tensor]) -> list[_Weight]:
    return [_Weight(w.dtype, _has_numbers(w.grad), version(w)) for w in weights]


def _has_numbers(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    if type(gradient) is not torch.Tensor or gradient.device.type != "cpu":
        return True
    if gradient.layout != torch.strided:
        return True
    numbers = _bytes_of(gradient)
    return numbers.count(0) < len(numbers)


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


def _comparable(value: Any) -> Any:
    """Something that compares equal as long as ``value`` has not changed; ``None`` for values that
    are not checked.
    """
    if isinstance(value, nn.Module):
        return model_switches(value)
    if isinstance(value, torch.optim.Optimizer):
        return [_settings_of(group) for group in value.param_groups]
    return _data(value)


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _data(value) for name, value in group.items() if name != "params"}


def _data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.requires_grad or value.device.type != "cpu" or value.layout != torch.strided:
            return None
        return value.dtype, tuple(value.shape), _bytes_of(value)
    if isinstance(value, dict):
        return [(key, _data(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [_data(entry) for entry in value]
    if isinstance(value, (int, float, str)):
        return value
    return None


def _bytes_of(tensor: torch.Tensor) -> bytes:
    with torch.no_grad():
        return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
