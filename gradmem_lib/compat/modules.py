"""Modules: their own tensors, their hooks, and the call that runs both hooks and forward."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of ``module`` itself, by name.

    A tensor that has two names is listed twice.
    """
    entries = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in entries if tensor is not None]


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the parameter or buffer ``name`` of ``module`` itself is part of its
    ``state_dict``.
    """
    return name not in module._non_persistent_buffers_set


def hook_counts(thing: nn.Module | Tensor) -> tuple[int, ...]:
    """The numbers of hooks of a module or a tensor, by kind.

    A module has hooks before and after forward, and before and after backward. A tensor has hooks
    before and after ``.grad`` is set.
    """
    kinds = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_backward_pre_hooks",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    )
    counts = []
    for kind in kinds:
        hooks = getattr(thing, kind, None) or ()  # a tensor without hooks has None
        counts.append(len(hooks))
    return tuple(counts)


# The attributes of a module in which its parameters, buffers and parts stand, and its hooks.
TABLES = ("_parameters", "_buffers", "_modules")
PARTS = "_modules"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def tables_of_hooks(module: nn.Module) -> list[dict[int, Callable]]:
    """The hooks of a module that run in a step, by their numbers, in a table for each kind."""
    return [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]


def is_hook_of(handle: Any, parameter: Tensor) -> bool:
    """Whether the hook of ``handle`` runs after the ``.grad`` of ``parameter`` is set.

    ``torch.utils.swap_tensors`` gives a tensor's hooks to another one.
    """
    hooks = parameter._post_accumulate_grad_hooks
    return hooks is not None and handle.id in hooks and handle.hooks_dict_ref() is hooks


def call_override(module: nn.Module) -> Callable | None:
    """The function that ``override_call`` has set for ``module``, or ``None``."""
    return module.__dict__.get("_call_impl")


def override_call(module: nn.Module, call: Callable) -> Callable[[], None]:
    """Make ``module(...)`` run ``call(...)`` in place of hooks and forward.

    Returns a function that undoes this.
    """
    module._call_impl = call
    return lambda: module.__dict__.pop("_call_impl", None)


def original_call(module: nn.Module) -> Callable:
    """The module's own call (hooks and forward), even after ``override_call``.

    It pickles like the module's own method.
    """
    return type(module)._call_impl.__get__(module)
