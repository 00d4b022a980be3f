"""What a ledger is fed from: every operation that PyTorch dispatches, every module, optimizer and parameter that it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from ..compat import (
    TorchDispatchMode,
    Unguarded,
    compiled_calls,
    graph_task,
    is_compiled,
    listening,
    returns,
    storage_key,
)
from ..names import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    IDLE,
    OPTIMIZER,
    OPTIMIZER_STEP,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
)
from .patches import module_calls, resizes
from .storages import Ledger, Recorder, dispatches, own_storage, storages_of, tensors_in

Observe = Callable[[Any, tuple, dict | None, Any], None]


class Watch(Unguarded, TorchDispatchMode):
    """Hands every dispatched operation to ``observe(func, args, kwargs, out)``, when it has run."""

    supports_higher_order_operators = True

    def __init__(self, observe: Observe):
        super().__init__()
        self._observe = observe

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and any([_wraps(kind, args, kwargs) for kind in types]):
            return NotImplemented  # DTensors, quantized tensors: their own operations on the tensors inside come next
        out = func(*args, **kwargs) if kwargs else func(*args)
        self._observe(func, args, kwargs, out)
        return out


_known_wrappers: dict[type, bool] = {}


def _wraps(kind: type, args: tuple, kwargs: dict | None) -> bool:
    known = _known_wrappers.get(kind)
    if known is None:
        found = [t for t in tensors_in((args, kwargs or {})) if type(t) is kind]
        if not dispatches(kind) or not found:
            return False
        known = _known_wrappers[kind] = any(own_storage(t) is None for t in found)
    return known


class Meter:
    """Keeps ``ledger`` up to date while its block runs, and knows the phase and the owners.

    Args:
        model: whose parameters, gradients and buffers are counted from the start.
        optimizers: whose states are; those that step inside the block are found.
        recorder: what is counted, and who hears of it.
        device: the model's parameters must be on it.
        mode: the dispatch mode that is given ``observe``.
    """

    limit: int | None = None  # bytes; above it, what ``exceeded(asked, func)`` returns is raised
    exceeded: Callable[[int, object], Exception]
    after_sample: Callable[[], None] | None = None

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: list[Optimizer],
        recorder: Recorder,
        *,
        device: torch.device,
        mode: Callable[[Observe], TorchDispatchMode] = Watch,
    ):
        self.model, self.optimizers, self.device = model, optimizers, device
        self.recorder, self.ledger, self.mode = recorder, Ledger(recorder), mode
        # Reentrant: a garbage collection inside the locked part may free tensors and run Python code.
        self.lock = threading.RLock()
        self.op = 0
        self.phase = IDLE  # of the last operation
        self.stack: list[nn.Module] = []
        self._host_phase = IDLE
        self._stepping: list[int] = []  # phases to go back to, one for each optimizer that is in its step
        self._thread = threading.get_ident()
        self._step_optimizer: Optimizer | None = None
        self._func: object = ""
        self._root_has_grad = False
        self._names: dict[int, str] = {}
        self._hooked = WeakIdKeyDictionary()
        self._states_seen: dict[int, int] = {}
        self._aliases: dict[object, bool] = {}
        self._scratch = None if type(recorder).scratch is Recorder.scratch else recorder.scratch
        self._undo = ExitStack()

    def __enter__(self) -> Meter:
        self._refuse_compiled()
        with self._undo as undo:
            self.sync_model()
            for optimizer in self.optimizers:
                self._tag_states(optimizer)
            self.sample()
            self._check(self.ledger.total, "what exists before the first step")
            for handle in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                undo.callback(handle.remove)
            undo.enter_context(module_calls(self.enter_module, self.leave_module))
            undo.enter_context(resizes(self.resized))
            undo.enter_context(compiled_calls(compiled_error))
            undo.enter_context(self.mode(self.observe))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def close(self) -> None:
        """Let go of the model and everything that was counted."""
        self.model, self.optimizers, self._step_optimizer = None, [], None
        self.ledger.storages, self.stack = {}, []
        self._func = ""

    def observe(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        """Called after every operation: take off what is gone, add what is new, and see where that leaves us."""
        with self.lock:
            ledger = self.ledger
            self.op += 1
            self._func = func
            before = ledger.total
            if ledger.freed:
                ledger.drain()
            phase = self._host_phase
            if graph_task() != -1 and not self._stepping:
                if phase == FORWARD:  # what follows the backward pass is no longer its forward pass
                    self._host_phase = IDLE
                phase = BACKWARD
            self.phase = phase
            if isinstance(out, torch.Tensor):
                asked = self._add(out, func, args, phase)
            elif isinstance(out, (tuple, list)):
                asked = sum([self._add(t, func, args, phase) for t in tensors_in(out)])
            else:
                asked = 0
            if asked and self._stepping:
                self._tag_new_states()
            if asked or ledger.total != before:
                self.sample()
                if asked and self.limit is not None:
                    self._check(asked, func)
            if self._scratch is not None:
                self._take_scratch(func, args)

    def _take_scratch(self, func, args) -> None:
        scratch = self._scratch(func, args)
        if scratch:
            for sign in (1, -1):
                self.ledger.total += sign * scratch
                self.ledger.by[TEMPORARIES] += sign * scratch
                if sign == 1:
                    self.sample()

    def _check(self, asked: int, func: object) -> None:
        if self.limit is not None and self.ledger.total > self.limit:
            raise self.exceeded(asked, func)

    def _add(self, tensor: torch.Tensor, func, args, phase: int) -> int:
        """Count the storage of ``tensor`` if it is new; the bytes that it adds."""
        storage = own_storage(tensor)
        if storage is None:
            return sum([self._add_storage(s, func, args, phase) for s in storages_of(tensor)])
        return self._add_storage(storage, func, args, phase)

    def _add_storage(self, storage: torch.UntypedStorage, func, args, phase: int) -> int:
        entry = self.ledger.storages.get(storage_key(storage))
        if entry is not None:
            return 0 if entry.size == storage.nbytes() else self.ledger.resize(entry, storage)
        if storage.nbytes() == 0:
            return 0
        if self._is_alias(func):
            category = OTHER  # made before the block, or by code that does not dispatch
        elif phase == FORWARD:
            category = ACTIVATIONS if self._root_has_grad else TEMPORARIES
        elif phase == BACKWARD:
            # Autograd computes gradients with grad mode off; on means that a forward is being recomputed.
            category = ACTIVATIONS if torch.is_grad_enabled() else TEMPORARIES
        elif phase == OPTIMIZER_STEP:
            category = TEMPORARIES
        elif torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            category, self.phase = ACTIVATIONS, FORWARD  # a forward pass written without modules
        else:
            category = OTHER
        if phase == BACKWARD and category == TEMPORARIES:
            owner: object = "(backward)"
        else:
            owner = self.stack[-1] if self.stack else ""
        return self.ledger.enter(storage, category, owner, func)

    def _is_alias(self, func) -> bool:
        """Whether ``func`` returns (a view of) one of its arguments rather than new memory."""
        known = self._aliases.get(func)
        if known is None:
            known = any(r.alias_info is not None for r in returns(func))
            self._aliases[func] = known
        return known

    def sample(self) -> None:
        """Hand the recorder where the bytes stand."""
        self.recorder.sampled(self.op, self.phase, self.ledger.total, self.ledger.by, self._func)
        if self.after_sample is not None:
            self.after_sample()

    @property
    def phase_now(self) -> int:
        if self.phase == BACKWARD and graph_task() == -1 and not self._stepping:
            return self._host_phase  # the backward pass is over, and nothing has run since
        return self.phase

    @contextmanager
    def in_phase(self, phase: int) -> Iterator[None]:
        """What runs in the block belongs to ``phase``; what follows an optimizer's step is idle."""
        before, self._host_phase = self._host_phase, phase
        try:
            yield
        finally:
            self._host_phase = IDLE if phase == OPTIMIZER_STEP else before

    # Who owns what

    def tag(self, tensors: torch.Tensor | Iterable[torch.Tensor], category: int, owner: str) -> None:
        """Put what holds ``tensors`` under ``category``."""
        for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
            storage = own_storage(tensor)
            if storage is not None:
                self.ledger.tag(storage, category, owner)
            else:
                for storage in storages_of(tensor):
                    self.ledger.tag(storage, category, owner)

    def sync_model(self) -> None:
        """Put parameters, gradients and buffers where they belong: they may have been replaced since the last look."""
        if self.model is None:
            return
        before = self.ledger.total
        for name, parameter in self.model.named_parameters():
            if parameter.device.type != self.device.type:
                raise RuntimeError(
                    f"the model moved while it was tracked: the tracker counts {self.device}, and {name} is on "
                    f"{parameter.device}. Move the model first, then start a new MemoryTracker"
                )
            self._names[id(parameter)] = name
            self.tag(parameter, PARAMETERS, name)
            if parameter.grad is not None:
                self.tag(parameter.grad, GRADIENTS, name)
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                self._hooked[parameter] = True
                self._undo.callback(parameter.register_post_accumulate_grad_hook(self._after_gradient).remove)
        for name, buffer in self.model.named_buffers():
            self.tag(buffer, OTHER, name)
        if self.ledger.total != before:
            self.sample()

    def _after_gradient(self, parameter: nn.Parameter) -> None:
        with self.lock:
            if parameter.grad is not None:  # another hook may have used it up already
                self.tag(parameter.grad, GRADIENTS, self._name(parameter))

    def _name(self, parameter) -> str:
        return self._names.get(id(parameter), "parameter")

    def _tag_states(self, optimizer: Optimizer, start: int = 0, stop: int | None = None) -> None:
        for parameter, state in islice(optimizer.state.items(), start, stop):
            self.tag(tensors_in((state,)), OPTIMIZER, self._name(parameter))

    def _tag_new_states(self) -> None:
        """In a first step: name states as they appear. The newest parameter's may still be incomplete."""
        optimizer = self._step_optimizer
        seen, there = self._states_seen.get(id(optimizer), 0), len(optimizer.state)
        if there - 1 > seen:
            self._tag_states(optimizer, seen, there - 1)
            self._states_seen[id(optimizer)] = there - 1

    def _before_step(self, optimizer: Optimizer, args, kwargs) -> tuple[tuple, dict]:
        with self.lock:
            if id(optimizer) not in self._states_seen:
                self._states_seen[id(optimizer)] = 0
                self._count_older_states(optimizer)
            self._stepping.append(self._host_phase)
            self._host_phase = OPTIMIZER_STEP
            self._step_optimizer = optimizer
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._name(parameter)
                    self.tag(parameter, PARAMETERS, name)
                    if parameter.grad is not None:
                        self.tag(parameter.grad, GRADIENTS, name)
            self._tag_states(optimizer)
            self.sample()
        args = (*args[:1], *[self._as_itself(a) if callable(a) else a for a in args[1:]])
        return args, {name: self._as_itself(a) if callable(a) else a for name, a in kwargs.items()}

    def _as_itself(self, closure: Callable) -> Callable:
        """A closure that a step calls (LBFGS) has a forward and a backward of its own; the step goes on after it."""

        def run(*args, **kwargs):
            before = self._host_phase, self._stepping
            self._host_phase, self._stepping = IDLE, []
            try:
                return closure(*args, **kwargs)
            finally:
                self._host_phase, self._stepping = before

        return run

    def _count_older_states(self, optimizer: Optimizer) -> None:
        """An optimizer that was not given steps: the states that it brings have been there since the block began."""
        for parameter, state in optimizer.state.items():
            for tensor in tensors_in((state,)):
                for storage in storages_of(tensor):
                    entry = self.ledger.tag(storage, OPTIMIZER, self._name(parameter))
                    if entry is not None:
                        self.recorder.was_there(entry)
        self._check(self.ledger.total, "the states of an optimizer that was not given")

    def _after_step(self, optimizer: Optimizer, args, kwargs) -> None:
        with self.lock:
            self._tag_states(optimizer)
            self._states_seen[id(optimizer)] = len(optimizer.state)
            # Optimizers may step inside the backward pass, from a hook: go back to what was before.
            before = self._stepping.pop() if self._stepping else IDLE
            self._host_phase = before if before == FORWARD else IDLE

    # Modules

    def enter_module(self, module: nn.Module, args: tuple, kwargs: dict) -> bool:
        """``module(*args, **kwargs)`` begins. Returns whether that is of interest."""
        if threading.get_ident() != self._thread and graph_task() == -1 and not listening():
            if self.model is None or any(module is m for m in self.model.modules()):
                raise RuntimeError(
                    f"{type(module).__name__} runs in another thread than the one that entered the block, and a tracker sees "
                    "the operations of its own thread only: run the step there, or enter the MemoryTracker in that thread"
                )
            return False
        if not self.stack and graph_task() == -1:
            with self.lock:
                if is_compiled(module):
                    raise compiled_error(type(module).__name__)
                self._stepping.clear()  # a step that raised never came to its end
                self._host_phase = FORWARD
                self._root_has_grad = torch.is_grad_enabled()
                self.sync_model()
                self._count_inputs(args, kwargs)
        elif module is self.model:
            with self.lock:
                self._count_inputs((), kwargs)
        self.stack.append(module)
        return True

    def leave_module(self) -> None:
        """The module that was entered last is done, or raised."""
        if self.stack:
            self.stack.pop()
        if not self.stack and not self._root_has_grad and graph_task() == -1:
            self._host_phase = IDLE

    def _count_inputs(self, args: tuple, kwargs: dict) -> None:
        """Count a batch that was made before the block; leave what is known as it is."""
        for tensor in tensors_in((args, kwargs)):
            if tensor.layout == torch.strided:
                for storage in storages_of(tensor):
                    if storage_key(storage) not in self.ledger.storages:
                        self.ledger.tag(storage, OTHER, "inputs")
                        self.sample()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` has a new size, which no operation told."""
        with self.lock:
            before = self.ledger.total
            self.ledger.drain()
            asked = self._add_storage(storage, "resize_", (), self.phase)
            if self.ledger.total != before:
                self.sample()
                if asked:
                    self._check(asked, "resize_")

    def _refuse_compiled(self) -> None:
        for name, module in self.model.named_modules() if self.model is not None else ():
            if is_compiled(module):
                raise compiled_error(name or type(module).__name__)


def compiled_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is compiled with torch.compile, and under a tracker it would run uncompiled, now and afterwards. Track the "
        "original (a module before torch.compile, or compiled._orig_mod); compiled code has its own memory plan"
    )
