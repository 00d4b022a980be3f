"""Keeps a recording up to date while a block runs: operations, parameters and optimizers, and here
the calls of modules.
"""

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import UntypedStorage, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from ..compat.autograd import in_backward, next_sequence_nr
from ..compat.compiled import is_compiled, watch_compiled_calls
from ..compat.data_parallel import is_sharded
from ..compat.dispatch_modes import innermost_mode
from ..compat.tensors import plain_tensors, storage_key
from ..model.structure import NO_MODEL, Structure
from .facts import INPUTS
from .operations import Owner
from .parameters import ParameterMeter
from .paths import IN_A_CYCLE
from .recording import Recording
from .source_lines import calling_line
from .storages import storages_of, tensors_in
from .timeline import ForwardPass
from .walks import Walks
from .watch import Watch


class Meter(ParameterMeter):
    """Keeps ``recording`` up to date while its block runs.

    It sets the phase, and the category and the owner of each storage.

    Args:
        model: its parameters, gradients and buffers are counted from the start. They must be on
            ``recording.device``.
        optimizers: their states are counted from the start. Other optimizers are found when they
            step inside the block.
        after_sample: called as ``after_sample(allocated, func)`` after each sample: the new bytes,
            and the operation that allocated them.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: Iterable[Optimizer],
        recording: Recording,
        *,
        after_sample: Callable[[int, object], None] | None = None,
    ):
        super().__init__(model, optimizers, recording, after_sample)
        self.waiting_optimizers = weakref.WeakSet[Optimizer]()
        self._thread = threading.get_ident()
        self._turn_of_batch: int | None = None  # the latest that has said how large its batch is
        # By the type of a called module and the address of the first part with weights: this part,
        # and the number of these calls.
        self._numbers: dict[tuple[type, int], tuple[weakref.ref[nn.Module], int]] = {}
        self._next_number = itertools.count()
        # of the model, as they were when these were last asked for
        self._structure = NO_MODEL
        self._optimized: frozenset[str] | None = None
        self.walks = Walks(recording, self.seconds_for_walks, self.measures_a_script)
        self._freed_before = 0  # storages whose frees were to be counted when a collection began
        # Compiled code keeps the call of a module that it was made from, also after the block.
        self.is_running = False

    # what walks may take in addition to their share of the run's time
    seconds_for_walks = 0.5
    # Then the last walk looks behind the names of all libraries too.
    measures_a_script = False

    def __enter__(self) -> None:
        if self.model is not None:
            for name, module in self.model.named_modules():
                if is_compiled(module):
                    raise compiled_error(name or type(module).__name__)
        self.look_for_wrappers()
        with self.exit_stack as undo:
            self.sync()
            self.sample(self.recording.total, "what exists before the first step")
            undo.callback(optimizer_hooks.register_optimizer_step_pre_hook(self.before_step).remove)
            undo.callback(optimizer_hooks.register_optimizer_step_post_hook(self.after_step).remove)
            # Global hooks of modules take twice as long, and a hook on the model would be copied
            # and pickled with it.
            call = self._wrap_module_call(nn.Module.__call__)
            undo.enter_context(patch.object(nn.Module, "__call__", call))
            # The resize of a storage is not dispatched, and FSDP frees memory with it.
            resize = self._wrap_storage_resize(UntypedStorage.resize_)
            undo.enter_context(patch.object(UntypedStorage, "resize_", resize))
            undo.enter_context(
                watch_compiled_calls(self.on_compiled_call, run_eagerly=self.runs_compiled_eagerly)
            )
            self.watch = undo.enter_context(Watch(self.observe))
            undo.callback(self._note_no_collections)
            gc.callbacks.append(self.note_collection)
            self.exit_stack = undo.pop_all()
        self.is_running = True

    def __exit__(self, *error) -> None:
        self.is_running = False
        # RuntimeError: the model is on another device than in its last step
        with self.exit_stack, suppress(RuntimeError):
            self.sync()

    def look_for_wrappers(self) -> None:
        """Find out whether DDP or FSDP has wrapped a module of the model."""
        if self.model is None:
            return
        modules = self.model.modules()
        self.has_ddp = any(isinstance(module, DistributedDataParallel) for module in modules)
        self._has_fsdp = is_sharded(self.model)

    # A tracker refuses these two, and a model that moves. `gradmem run`, which must not stop a
    # script, overrides them.

    runs_compiled_eagerly = False

    def on_compiled_call(self, name: str) -> None:
        """A compiled function is called."""
        raise compiled_error(name)

    def on_other_thread(self, module: nn.Module) -> None:
        """A module is called in another thread than the block's."""
        if self.model is None or any(module is m for m in self.model.modules()):
            raise RuntimeError(
                f"{type(module).__name__} runs in another thread than the one that entered the "
                "block, and a tracker sees the operations of its own thread only: run the step "
                "there, or enter the MemoryTracker in that thread"
            )

    # The calls of modules

    def _wrap_module_call(self, call: Callable) -> Callable:
        def __call__(module, *args, **kwargs):
            if not self.is_running:
                return call(module, *args, **kwargs)
            if (
                threading.get_ident() != self._thread
                and not in_backward()
                and innermost_mode() is not self.watch
            ):
                self.on_other_thread(module)
                return call(module, *args, **kwargs)
            if not self.stack:
                if in_backward():
                    self.recomputed = True
                else:
                    self.begin_forward(module, args, kwargs)
            else:
                self.note_weights(module)
            self.stack.append(module)
            out = None
            try:
                out = call(module, *args, **kwargs)
            finally:
                del self.stack[-1:]
                if not self.stack and not in_backward():
                    self.end_forward(out)
            return out

        return __call__

    def begin_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """An outermost module is called."""
        if is_compiled(module):
            self.on_compiled_call(type(module).__name__)
        with self.lock:
            recording, with_grad = self.recording, torch.is_grad_enabled()
            recording.drain()  # what was freed since the last operation is not live before this
            self.walks.look(sys._getframe(1))
            if with_grad:
                self.begin_step()
            weight = next(module.parameters(), None)
            with plain_tensors():
                # a weight too may be computed, by functional_call or a parametrization
                inputs = list(tensors_in((args, kwargs)))
                given = tensors_in((inputs, weight))
                chained = any(tensor.grad_fn is not None for tensor in given)
            self.position.begin_forward(
                ForwardPass(
                    recording.step,
                    with_grad,
                    recording.total,
                    calling_line(),
                    next_sequence_nr(),
                    chained=chained,
                    has_weights=weight is not None,
                    first_sample=recording.count,
                    turn=recording.turn,
                    # In functional_call, other tensors stand in the place of its parameters.
                    called=weakref.ref(module) if isinstance(weight, nn.Parameter) else None,
                    training_mode=module.training,
                    number=self._number_of(module),
                )
            )
            if with_grad and weight is not None:
                self._note_batch(inputs)
            recording.moment = self.position.moment_of_call
            self.sync(states=False)  # states would take as long as all the rest
            # Count a batch that was made before the block. Storages that are known keep their
            # categories.
            for tensor in inputs:
                if self._count_read(tensor, "", INPUTS):
                    self.sample()

    def _number_of(self, module: nn.Module) -> int:
        """The same number for each call of ``module``, and of what is made anew from its parts for
        each call, as ``model[:-1]`` is. A module that is made after another one was dropped may
        have its address, but not its number.
        """
        with_weights = (part for part in module.modules() if has_parameters(part, recurse=False))
        first = next(with_weights, module)
        place = type(module), id(first)
        known = self._numbers.get(place)
        if known is None or known[0]() is not first:
            known = weakref.ref(first), next(self._next_number)
            self._numbers[place] = known
        return known[1]

    def _note_batch(self, inputs: list[torch.Tensor]) -> None:
        """Note how many rows the batch has, at the first training forward of each turn.

        These are the rows of the first tensor among the ``inputs``.
        """
        if self._turn_of_batch == self.recording.turn:
            return
        self._turn_of_batch = self.recording.turn
        with plain_tensors():
            for tensor in inputs:
                if tensor.dim():
                    self.recording.note_batch(tensor.size(0))
                    return

    def end_forward(self, out: Any) -> None:
        """The outermost module has returned ``out``; ``None`` if it has raised an error instead."""
        recording, forward = self.recording, self.position.open
        if forward is None:
            return
        with self.lock:
            recording.drain()
            for storage in storages_of(out):
                entry = recording.live.get(storage_key(storage))
                if entry is not None and entry.sample >= forward.first_sample:
                    entry.is_result = True  # made in this forward
            self.position.end_forward(recording.total, recording.count)

    def note_weights(self, module: nn.Module) -> None:
        """A module is called inside another one, which may hide it from its own parameters."""
        forward = self.position.open
        if forward is not None and not forward.has_weights and has_parameters(module):
            self.position.find_weights()

    def _note_no_collections(self) -> None:
        if self.note_collection in gc.callbacks:  # a script may have cleared the list
            gc.callbacks.remove(self.note_collection)

    def note_collection(self, phase: str, _: dict) -> None:
        """Python's collector begins, or has ended: what it has freed was in reference cycles."""
        freed = self.recording.freed
        if phase == "start":
            self._freed_before = len(freed)
            return
        for entry in list(freed)[self._freed_before :]:
            has_name = entry.held is not None and entry.held.path
            if not has_name:  # the name that it had would say more
                entry.held = IN_A_CYCLE

    # What a diagnosis asks

    def structure(self) -> Structure:
        """What a diagnosis has to know of the model."""
        if self.model is not None:
            self._structure = Structure.of(self.model)
        return self._structure

    def untrained(self) -> frozenset[str]:
        """The names of the parameters of other models than the tracked one, where they are known.

        A tracker knows the model that it was given, and no names of others.
        """
        return frozenset()

    def optimized(self) -> frozenset[str] | None:
        """The names of the model's parameters that an optimizer has.

        ``None`` if there are none: no optimizer is known, or it has copies of its own.
        """
        if self.model is not None:
            taken = self._ids_in_optimizers()
            names = (name for name, p in self.model.named_parameters() if id(p) in taken)
            self._optimized = frozenset(names) or None
        return self._optimized

    def mark_passes(self) -> None:
        """Note of each forward whether an optimizer has its module's weights, and has stepped; and
        whether they are weights of the tracked model.
        """
        taken, stepped = self._ids_in_optimizers(), ids_of_parameters(self.stepped)
        tracked = set[int]()
        if self.model is not None:
            tracked = {id(parameter) for _, parameter in self.model.named_parameters()}
        found: dict[int, tuple[bool, bool, bool]] = {}
        for done in self.position.passes:
            module = done.called() if done.called is not None else None
            if module is None:
                continue
            if id(module) not in found:
                weights = {id(p) for p in module.parameters()}
                trained = {id(p) for p in module.parameters() if p.requires_grad}
                for_none = bool(trained) and trained.isdisjoint(taken)
                waits = not trained.isdisjoint(taken) and trained.isdisjoint(stepped)
                found[id(module)] = for_none, waits, not weights.isdisjoint(tracked)
            for_none, waits, of_tracked = found[id(module)]
            done.for_no_optimizer, done.waits_for_step = for_none, waits
            done.has_tracked_weights = of_tracked

    def _ids_in_optimizers(self) -> set[int]:
        return ids_of_parameters({*self.optimizers, *self.waiting_optimizers})

    def find_waiting_optimizers(self) -> None:
        """Find the optimizers that have not stepped so far. It takes about as long as a garbage
        collection.

        A diagnosis of a run that ends before they step has no other way to know them.
        """
        for value in gc.get_objects():
            if issubclass(type(value), Optimizer):
                self.waiting_optimizers.add(value)

    def module_names(self) -> dict[int, str]:
        if self.model is None:
            return {}
        return {id(module): name for name, module in self.model.named_modules()}

    def close(self) -> None:
        """Drop the model. What a diagnosis asks of it stays known, as the names of its modules."""
        self.structure()
        self.optimized()
        self.mark_passes()
        modules, recording = self.module_names(), self.recording
        entries = [*recording.past, *recording.entries()]
        for peak in (recording.run_peak, recording.window_peak):
            entries += peak.freed_since
        for entry in entries:
            entry.module = name_of(entry.module, modules)
        self.model = None
        self.stack.clear()
        self._numbers.clear()  # a class may hold a model in its methods


def has_parameters(module: nn.Module, *, recurse: bool = True) -> bool:
    """Whether ``module`` has parameters, or a module in it if this counts too (``recurse``).

    A loss has none: its weights of classes are a buffer.
    """
    return next(iter(module.parameters(recurse)), None) is not None


def ids_of_parameters(optimizers: Iterable[Optimizer]) -> set[int]:
    """The addresses of all parameters that ``optimizers`` have."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def name_of(owner: Owner, names: dict[int, str]) -> str:
    return owner if isinstance(owner, str) else names.get(id(owner[0]())) or owner[1].__name__


def compiled_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is compiled with torch.compile, and under a tracker it would run uncompiled, now "
        "and afterwards: compiled code has its own memory plan. Track the original (before "
        "torch.compile, or ._orig_mod; torch.cond under torch.no_grad()). If the code that "
        "compiles is not yours, as in an optimizer, put the block inside `with "
        "torch.compiler.set_stance('force_eager'):`, or run the program with "
        "TORCH_COMPILE_DISABLE=1: then it runs uncompiled, and the tracker counts that"
    )
