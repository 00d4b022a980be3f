"""Finds the lists of layers of any module that can run again in backward, by watching a forward.

A checkpoint drops what a layer keeps, and calls the layer again in backward. This is right if the
second call computes the same as the first: from its arguments and from weights, and without
changing anything that the first call has changed already. A forward on tensors without values shows
whether it is so, since each operator in it says which tensors it reads and which it writes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..compat.dispatch_modes import TorchDispatchMode
from ..compat.operators import arguments_of
from ..compat.tensors import storage_key
from ..compat.trees import tree_flatten, tree_leaves
from ..model.layers import Named, is_callable, items_called
from ..techniques.call_overrides import refuse_checkpointed
from ..techniques.layer_arguments import split_input
from .rows import WithLoss, run_on_fakes


@dataclass
class Seen:
    """What was seen of a layer in a forward.

    ``calls``: how often it was called. ``first_call``: the number of calls of other layers before
    its first one. ``kept_inside``: bytes for backward that a checkpoint would free. ``inputs``:
    bytes of its arguments, which a checkpoint keeps. ``problem``: why it cannot be checkpointed, as
    the end of a sentence; an empty string if it can be.
    """

    calls: int = 0
    first_call: int = 0
    kept_inside: int = 0
    inputs: int = 0
    problem: str = ""


def find_own_layers(
    model: nn.Module, batch: Any, loss: Callable | None = None
) -> tuple[Named, list[str]]:
    """The names of the lists of layers that plan may checkpoint, in the order of their first calls,
    and a sentence about each list that cannot be.

    The outermost lists are taken, if backward keeps more of what their layers compute than of their
    inputs. Where a list cannot be checkpointed, the lists inside its items are looked at.
    """
    candidates: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        layers = items_called(module)
        if name and layers and all(map(is_callable, layers)) and len(set(layers)) == len(layers):
            candidates[name] = layers
    watched = dict.fromkeys(layer for layers in candidates.values() for layer in layers)
    seen = watch_layers(model, batch, loss, list(watched))

    taken: list[str] = []
    problems: dict[str, list[str]] = {}  # the names of lists, by what is said of a list
    for name, layers in candidates.items():  # outer lists come before those inside them
        if any(name.startswith(f"{outer}.") for outer in taken):
            continue
        found = [seen[layer] for layer in layers]
        if sum(one.kept_inside for one in found) <= sum(one.inputs for one in found):
            continue  # a checkpoint of each layer would free less than it keeps
        problem = _problem_of(found)
        if problem:
            problems.setdefault(problem, []).append(name)
        else:
            taken.append(name)

    def first_call(name: str) -> int:
        return min(seen[layer].first_call for layer in candidates[name])

    sentences = [_about(names, problem) for problem, names in problems.items()]
    return tuple(sorted(taken, key=first_call)), sentences


def _problem_of(layers: list[Seen]) -> str:
    """Why a list of layers cannot be checkpointed, in a sentence with {} in place of the list's
    name; empty if it can be.
    """
    for i, layer in enumerate(layers):
        if layer.problem:
            return f"Layer {i} of {{}} cannot run again in backward: it {layer.problem}."
    uncalled = [i for i, layer in enumerate(layers) if not layer.calls]
    if uncalled:
        return (
            f"The forward does not call layer {uncalled[0]} of {{}}, so a checkpoint of it would "
            "not run."
        )
    return ""


def _about(names: list[str], problem: str) -> str:
    """What ``_problem_of`` says of several lists, in one or two sentences."""
    first, *others = names
    sentence = problem.replace("{}", first)
    if others:
        sentence += f" The same is true of {', '.join(others)}."
    return sentence


def watch_layers(
    model: nn.Module, batch: Any, loss: Callable | None, layers: list[nn.Module]
) -> dict[nn.Module, Seen]:
    """What each of ``layers`` does in a forward with ``batch``.

    Raises ``ValueError`` if the forward fails, and ``RuntimeError`` for layers that are
    checkpointed already.
    """
    refuse_checkpointed(layers)
    watch = _Watch(layers)
    hooks = []
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(watch.enter, with_kwargs=True))
        hooks.append(layer.register_forward_hook(watch.leave, with_kwargs=True))
    try:
        with torch.enable_grad(), saved_tensors_hooks(watch.keep, lambda kept: kept):
            run_on_fakes(WithLoss(model, loss), batch, watch)
    finally:
        for hook in hooks:
            hook.remove()
    return watch.seen


@dataclass
class _Call:
    """A call that runs. Storages are by their keys; ``created`` holds them, so that no other
    storage gets the key of one.
    """

    seen: Seen
    arguments: dict[int, torch.UntypedStorage]
    leaves: list  # of the arguments, as they were
    generators: tuple  # as they were
    created: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)  # bytes for backward

    def knows(self, key: int) -> bool:
        return key in self.created or key in self.arguments


class _Watch(TorchDispatchMode):
    """Watches the operators in calls of layers. A call may run inside another one."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.seen = {layer: Seen() for layer in layers}
        self.running: list[_Call] = []
        self.created: dict[int, torch.UntypedStorage] = {}  # in this forward
        # By the storage of an argument, the layers that were called with it. Each of them would
        # read it again in backward.
        self.read_again: dict[int, list[Seen]] = {}
        self.calls = 0

    def enter(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        seen = self.seen[layer]
        if not seen.calls:
            seen.first_call = self.calls
        seen.calls += 1
        self.calls += 1
        leaves, _ = tree_flatten((args, kwargs))
        arguments = _storages(leaves)
        seen.inputs += sum(storage.nbytes() for storage in arguments.values())
        self.running.append(_Call(seen, arguments, leaves, _generators()))
        for key in arguments:
            self.read_again.setdefault(key, []).append(seen)
        try:
            split_input(args, kwargs)
        except TypeError:
            seen.problem = (
                seen.problem or "gets no positional argument, and a checkpoint keeps the first one"
            )

    def leave(self, layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        call = self.running.pop()
        leaves, _ = tree_flatten((args, kwargs))
        same = len(leaves) == len(call.leaves) and all(map(_is, leaves, call.leaves))
        if not same and not call.seen.problem:
            call.seen.problem = "changes a list or dict that it is given"
        if _generators() != call.generators and not call.seen.problem:
            call.seen.problem = (
                "draws numbers from random or numpy, and would draw others: draw them from torch, "
                "whose generator a checkpoint sets back"
            )
        # What goes out stays, whether the layer is checkpointed or not.
        outputs = _storages(tree_leaves(output))
        for key, nbytes in call.kept.items():
            if key not in outputs:
                call.seen.kept_inside += nbytes

    def keep(self, tensor: Tensor) -> Tensor:
        """Called for each tensor that autograd saves for backward."""
        storage = tensor.untyped_storage()
        for call in self.running:
            if storage_key(storage) in call.created:
                call.kept[storage_key(storage)] = storage.nbytes()
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._read(tree_leaves((args, kwargs)))
        self._write(tree_leaves(_written(func, args, kwargs)))
        result = func(*args, **kwargs)
        before = _storages(tree_leaves((args, kwargs)))
        for key, storage in _storages(tree_leaves(result)).items():
            if key in before:  # a view, or written in place
                continue
            self.created[key] = storage
            for call in self.running:
                call.created[key] = storage
        return result

    def _read(self, values: list) -> None:
        for key in _storages(values):
            if key not in self.created:
                continue  # a weight, an input of the model, or a constant: it stays as it is
            for call in self.running:
                if not call.knows(key) and not call.seen.problem:
                    call.seen.problem = (
                        "reads a tensor that is none of its arguments, and another may be in its "
                        "place in backward: pass it as an argument"
                    )

    def _write(self, values: list) -> None:
        for key in _storages(values):
            for call in self.running:
                if key not in call.created and not call.seen.problem:
                    call.seen.problem = (
                        "changes a tensor in place that it has not made (its input, or a buffer, "
                        "as a batch norm does)"
                    )
            for seen in self.read_again.get(key, []):
                if not seen.problem:
                    seen.problem = "gets a tensor that is changed in place after its call"


def _generators() -> tuple:
    """The states of the generators of Python and of numpy, which can be compared."""
    kind, words, *rest = np.random.get_state()
    return random.getstate(), kind, words.tobytes(), *rest


def _is(one: Any, other: Any) -> bool:
    return one is other


def _storages(values: list) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors among ``values``, by their keys."""
    found = {}
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[storage_key(storage)] = storage
    return found


def _written(func: Any, args: tuple, kwargs: dict) -> list:
    """The arguments that an operator changes in place."""
    written = []
    for i, argument in enumerate(arguments_of(func)):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        if i < len(args):
            written.append(args[i])
        elif argument.name in kwargs:
            written.append(kwargs[argument.name])
    return written
