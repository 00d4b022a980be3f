"""Forwards that run twice, and what the second run has to find beside its arguments.

A checkpoint runs a forward again in backward, and ``accumulate_through_embeddings`` runs one again
with a graph. The second run must compute the same as the first, and leave no trace. So it gets the
random numbers of the first run, copies of the buffers that a forward writes, such as the running
statistics of a ``BatchNorm``, the numbers among the modules' attributes, and the items that the
lists and dicts among the arguments had. torch's own random numbers are left to the caller:
PyTorch's checkpoint takes care of them. What a forward writes into other attributes (a list, a
tensor that is no buffer) is put back afterwards, but not found again, and what it reads and writes
elsewhere (the generator of a data set) is neither. So the first two runs are compared.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat.autograd import determinism_check
from ..compat.data_parallel import is_sharded
from ..compat.dispatch_modes import without_modes
from ..compat.fake_tensors import has_numbers
from ..compat.tensors import version
from ..compat.trees import tree_leaves
from .module_state import Contents

# Attributes of modules that a forward may change: generators, a counter, a switch.
_KEPT = (random.Random, np.random.Generator, np.random.RandomState, bool, int, float, str)
_OF_EACH_MODULE = frozenset(vars(nn.Module()))  # attributes that torch reads and writes
# By module, and by its mode (``training``): the names of the buffers and of other untrained tensors
# that its forward writes.
_WRITTEN: WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = WeakKeyDictionary()
_BUFFERS = WeakTensorKeyDictionary()  # those that a run has found


def checkpoint_again(
    modules: Iterable[nn.Module], run: Callable, *args: Any, given: Any = (), **options: Any
) -> Any:
    """``run(*args)``, which calls ``modules``, in a checkpoint: it runs again in backward.

    ``given``: what ``run`` reads besides ``args``. ``options``: those of
    ``torch.utils.checkpoint.checkpoint``. Raises ``RuntimeError`` in backward if a tensor that is
    ``given`` was changed in place. (Autograd itself says so of ``args``.)
    """
    first = FirstRun(modules, (args, given))
    values = tree_leaves(given)
    versions = list(map(version_of, values))
    has_run = False
    if first.is_new:
        options["determinism_check"] = determinism_check(_Saved)

    def run_or_run_again(*args: Any) -> Any:
        nonlocal has_run
        if list(map(version_of, values)) != versions:
            raise RuntimeError(CHANGED_LATER.format(type(next(iter(first.modules))).__name__))
        context = first.found_again() if has_run else first.watched()
        has_run = True
        with context:
            return run(*args)

    return checkpoint(run_or_run_again, *args, use_reentrant=False, **options)


class _Saved:
    """What is compared of a tensor that both runs of a checkpoint save: its kind, and the sums of
    its rows and columns, which take few bytes.
    """

    def __init__(self, tensor: Tensor):
        self.kind = tensor.shape, tensor.dtype, tensor.device
        self.version = version_of(tensor)
        self.sums: list[Tensor] = []
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        # A BatchNorm changes what it has saved: its buffers.
        if plain and has_numbers(tensor) and tensor.numel() and tensor not in _BUFFERS:
            with torch.no_grad(), without_modes():  # a tracker measures the model's step
                self.sums = _sums(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Saved) or self.kind != other.kind:
            return False
        with torch.no_grad(), without_modes():
            # A kernel for 16 bits may round otherwise.
            dtypes = [self.kind[1]] * len(self.sums)
            if not all(map(nearly_same, self.sums, other.sums, dtypes)):
                written = self.version != other.version
                raise RuntimeError(WRITTEN_LATER if written else RUNS_DIFFER)
        return True


def _sums(tensor: Tensor) -> list[Tensor]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return [rows.sum(0, dtype=dtype), rows.sum(1, dtype=dtype)]


def nearly_same(again: Tensor, first: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors of one shape, made of numbers of this ``dtype``, differ by rounding
    alone. Another kernel may round otherwise; another dropout differs by far more.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.equal(again, first)
    difference = (again - first).norm()
    return not difference > torch.finfo(dtype).eps ** 0.5 * first.norm()


CHANGED_LATER = (
    "what this {} was called with was changed in place later, and its checkpoint would compute it "
    "again from the changed values: make a new tensor (x = x + y in place of x += y), or leave the "
    "checkpoint out"
)
WRITTEN_LATER = (
    "make a new tensor (x = x + y in place of x += y): an operation in place has changed what a "
    "checkpointed layer had saved for its backward"
)
RUNS_DIFFER = (
    "keep the tensors that a forward changes in buffers of its module, and draw random numbers "
    "from torch, random, np.random or a generator that is an attribute of it: the second run of a "
    "checkpointed layer has computed other numbers than the first, and the gradient would be of "
    "neither. If only the first forward differs, since it fills a cache, run one before the "
    "checkpoints. And leave the checkpoint of a layer out whose operation fills what it has saved "
    "already, as RReLU in training"
)


def watched_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` whose buffers have been copied once, in their first forward."""
    parts = [part for part in model.modules() if part in _WRITTEN]
    return [part for part in parts if next(part.buffers(recurse=False), None) is not None]


class FirstRun:
    """What a forward of ``modules`` finds beside its arguments. To be made before it runs::

        first = FirstRun([model])
        with first.watched():
            model(x)
        with first.found_again():  # as often as needed
            model(x)

    ``found_again`` without a first run leaves the random numbers of the block without a trace.

    ``given``: arguments of the forward. Lists and dicts among them get back the items that they
    have now.

    Bytes: a copy of each buffer that the forward writes. Which ones these are is asked in the first
    forward of a module, during which there is a copy of each of its buffers.
    """

    def __init__(self, modules: Iterable[nn.Module], given: Any = ()):
        self.given = Contents([given])
        self.modules = dict.fromkeys(part for module in modules for part in module.modules())
        self.random_state = random.getstate(), np.random.get_state()
        self.used = _UsedGenerators()
        # By module and name: copies of buffers, and of generators and numbers among the attributes.
        self.copies: dict[tuple[nn.Module, str], Any] = {}
        copied: dict[int, Any] = {}  # what several modules share has one copy
        for module in self.modules:
            for name, value in vars(module).items():
                if isinstance(value, _KEPT):
                    self.copies[module, name] = _copy(value, copied)

    @property
    def is_new(self) -> bool:
        """Whether a module has not run in its mode before."""
        return any(module.training not in _WRITTEN.get(module, {}) for module in self.modules)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The first run."""
        copied: dict[int, Any] = {}
        before, others = [], self._versions_of_others()
        for module in self.modules:
            written = _WRITTEN.setdefault(module, {}).get(module.training)
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                before.append((module, name, buffer, version_of(buffer)))
                _BUFFERS[buffer] = None
                if written is None or name in written:
                    self.copies[module, name] = _copy(buffer, copied)
        with self.used:
            yield
        asked = [module for module in self.modules if module.training not in _WRITTEN[module]]
        for module in asked:
            _WRITTEN[module][module.training] = set()
        for module, name, buffer, old_version in before:
            changed = getattr(module, name) is not buffer or version_of(buffer) != old_version
            if module in asked and not changed:
                changed = self._differs(module, name, buffer)
            if changed:
                self._note(module, name)
        same_tensors = {other[:3] for other in others}
        for module, name, number, _ in self._versions_of_others() - others:
            if (module, name, number) in same_tensors:
                _WRITTEN[module][module.training].add(name)

    def _versions_of_others(self) -> set[tuple[nn.Module, str, int, int]]:
        """The tensors that are no buffers, by module and name, and their versions."""
        found = set()
        for module in self.modules:
            for name, tensor in _other_tensors(module):
                # By its number: a tensor that the forward replaces must not stay in memory.
                found.add((module, name, id(tensor), version_of(tensor)))
        return found

    def _differs(self, module: nn.Module, name: str, buffer: Tensor) -> bool:
        """Whether the run has written a buffer through ``.data``, which changes no version. If not,
        its copy is not needed.
        """
        copy = self.copies.pop((module, name))
        if has_numbers(buffer):
            differs = not torch.equal(buffer, copy)
        else:  # a prediction: the kernels of norms change running statistics, and no version
            differs = module.training and getattr(module, "track_running_stats", False)
        if differs:
            self.copies[module, name] = copy
        return differs

    def _note(self, module: nn.Module, name: str) -> None:
        """Note a buffer that the run has written."""
        _WRITTEN[module][module.training].add(name)
        if (module, name) in self.copies:
            return
        self.copies[module, name] = getattr(module, name)
        warnings.warn(
            f"this forward is the first in which a {type(module).__name__} changes its buffer "
            f"{name}, of which there is no older copy. If its output depends on the buffer, this "
            "step's gradient is that of the new numbers. Later steps are exact",
            stacklevel=2,
        )

    @contextmanager
    def found_again(self) -> Iterator[None]:
        """A second run. Afterwards, all is as just before it."""
        copied: dict[int, Any] = {}
        found = self._copies_to_write_to()
        own = {(owner, name): getattr(owner, name) for owner, name in found | self.copies}
        attributes = list(map(_attributes, self.modules))
        contents, given = Contents(attributes), Contents(item for item, _ in self.given.items)
        of_torch = {generator: generator.get_state() for generator in self.used.states}
        now = random.getstate(), np.random.get_state()
        try:
            _set_python_and_numpy(self.random_state)
            for generator, state in self.used.states.items():
                generator.set_state(state)
            for place, value in self.copies.items():
                setattr(*place, _copy(value, copied))
            for place, copy in found.items():
                setattr(*place, copy)
            self.given.put_back()
            with self.used:
                yield
        finally:
            _set_python_and_numpy(now)
            for generator, state in (self.used.states | of_torch).items():
                generator.set_state(state)
            given.put_back()
            for module, own_attributes in zip(self.modules, attributes, strict=True):
                vars(module).update(own_attributes)
            contents.put_back()
            for place, value in own.items():
                setattr(*place, value)

    def _copies_to_write_to(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Copies of the tensors, besides buffers, that the second run is going to write in place.

        The first run made none, so no mode that compares the operations of both may see this.
        """
        found: dict[tuple[nn.Module, str], Tensor] = {}
        copied: dict[int, Any] = {}
        for module in self.modules:
            written = _WRITTEN.get(module, {}).get(module.training, ())
            for name, tensor in _other_tensors(module):
                if name in written:
                    with without_modes():
                        found[module, name] = _copy(tensor, copied)
        return found


class _UsedGenerators(TorchFunctionMode):
    """Notes each ``torch.Generator`` that an operation is given, with its state before that."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[torch.Generator, Tensor] = {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not kwargs:
            return func(*args)
        generator = kwargs.get("generator")
        if generator is not None and generator not in self.states:
            self.states[generator] = generator.get_state()
        return func(*args, **kwargs)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are its own, and not those of every module."""
    if is_sharded(module):  # FSDP keeps what it has gathered in attributes
        return {}
    return {name: value for name, value in vars(module).items() if name not in _OF_EACH_MODULE}


def _other_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module that are neither trained nor buffers."""
    for name, value in _attributes(module).items():
        if isinstance(value, Tensor):
            yield name, value
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if not parameter.requires_grad:
            yield name, parameter


def _copy(value: Any, copied: dict[int, Any]) -> Any:
    """A copy, or the one in ``copied`` that was made of the same object."""
    if id(value) not in copied:
        copy = value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
        if isinstance(value, nn.Parameter):  # as a module demands
            copy = nn.Parameter(copy, requires_grad=False)
        copied[id(value)] = copy
    return copied[id(value)]


def _set_python_and_numpy(state: tuple[Any, Any]) -> None:
    of_python, of_numpy = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def version_of(x: Any) -> int:
    """How often the tensor was changed in place; 0 for something else, and for a tensor of
    ``torch.inference_mode``, which does not count it.
    """
    if not isinstance(x, Tensor) or x.is_inference():
        return 0
    return version(x)
