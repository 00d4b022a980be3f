"""Feeds a recording: watches every operation that PyTorch dispatches, and the modules, optimizers
and parameters behind them.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import UntypedStorage, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from .. import compat, names
from ..names import BACKWARD, FORWARD, IDLE, OPTIMIZER_STEP
from .recording import Entry, Recording
from .storages import own_storage, storages_of, tensors_in

# FSDP's full parameters, which exist only while a layer needs them
GATHERED = "gathered parameters"
graph_task, storage_key = compat.graph_task, compat.storage_key  # faster look-ups


class Watch(compat.WithoutDynamoGuard, compat.TorchDispatchMode):
    """Passes every dispatched operation to ``observe(func, args, kwargs, out)`` after it
    has run.
    """

    supports_higher_order_operators = True

    def __init__(self, observe: Callable[[Any, tuple, dict | None, Any], None]):
        super().__init__()
        self._observe = observe

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is compat.read_device and type(args[0]) is compat.FakeTensor:
            return args[0].fake_device  # a real run does not have this operation
        if types and any([_wraps(kind, args, kwargs) for kind in types]):
            # DTensors and quantized tensors next dispatch operations on the tensors inside
            return NotImplemented
        run = (_operators.get(id(func)) or _operator(func))[1]
        out = run(*args, **kwargs) if kwargs else run(*args)
        self._observe(func, args, kwargs, out)
        return out


_operators: dict[int, tuple[Any, Callable, bool]] = {}  # by address: an operator's hash is slow


def _operator(func: Any) -> tuple[Any, Callable, bool]:
    """``func``, the callable that runs it, and whether it returns an argument or a view of one.

    Holding ``func`` keeps its address, the key, from being reused.
    """
    if id(func) not in _operators:
        run = getattr(func, compat.KERNEL, func)
        if func in compat.collectives:
            run = partial(compat.run_collective_synchronously, func)
        _operators[id(func)] = (
            func,
            run,
            any(r.alias_info is not None for r in compat.returns(func)),
        )
    return _operators[id(func)]


_wrappers: dict[type, bool] = {}


def _wraps(kind: type, args: tuple, kwargs: dict | None) -> bool:
    """Whether tensors of this type are wrappers, with a size but no bytes of their own."""
    if kind not in _wrappers:
        for tensor in tensors_in((args, kwargs or {})):
            if tensor.numel() and type(tensor) is kind:
                _wrappers[kind] = own_storage(tensor) is None
    return _wrappers.get(kind, False)


class Meter:
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
        self.model, self.recording, self.after_sample = model, recording, after_sample
        # weak, since the program may drop them
        self.optimizers = weakref.WeakKeyDictionary(dict.fromkeys(optimizers))
        # Reentrant, since a garbage collection inside the locked part may free tensors and run
        # Python code.
        self.lock = threading.RLock()
        self.stack: list[nn.Module] = []
        self._thread = threading.get_ident()
        self._in_forward = self._with_grad = False
        self._stepping: list[Optimizer] = []
        self._names: dict[int, str] = {}
        self._hooked: dict[int, weakref.ref] = {}
        self.exit_stack = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules() if self.model is not None else ():
            if compat.is_compiled(module):
                raise compiled_error(name or type(module).__name__)
        modules = list(self.model.modules()) if self.model is not None else []
        self._has_ddp = any(isinstance(module, DistributedDataParallel) for module in modules)
        fsdp = sys.modules.get("torch.distributed.fsdp")  # imported already if anything is sharded
        kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
        self._has_fsdp = any(isinstance(module, kinds) for module in modules)
        with self.exit_stack as undo:
            self.sync()
            self.sample(self.recording.total, "what exists before the first step")
            undo.callback(
                optimizer_hooks.register_optimizer_step_pre_hook(self._before_step).remove
            )
            undo.callback(
                optimizer_hooks.register_optimizer_step_post_hook(self._after_step).remove
            )
            undo.enter_context(
                patch.object(nn.Module, "__call__", self._wrap_module_call(nn.Module.__call__))
            )
            resize = self._wrap_storage_resize(UntypedStorage.resize_)
            undo.enter_context(patch.object(UntypedStorage, "resize_", resize))
            undo.enter_context(compat.refuse_compiled_calls(compiled_error))
            undo.enter_context(Watch(self.observe))
            self.exit_stack = undo.pop_all()
        return self

    def __exit__(self, *error) -> None:
        # RuntimeError: the model is on another device than in its last step
        with self.exit_stack, suppress(RuntimeError):
            self.sync()

    def close(self) -> None:
        """Drop the model. The recorded entries keep the names of its modules."""
        modules, recording = self.module_names(), self.recording
        entries = recording.entries()
        for peak in (recording.run_peak, recording.window_peak):
            entries += peak.freed_since
        for entry in entries:
            entry.module = name_of(entry.module, modules)
        self.model, self.stack = None, []

    def observe(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        """Called after every operation: count its allocations and frees, and sample a change."""
        recording, allocated = self.recording, 0
        self.lock.acquire()  # `with` takes twice as long
        try:
            recording.op += 1
            before = recording.total
            if recording.freed:
                recording.drain()
            if self._stepping:
                recording.phase = OPTIMIZER_STEP
            elif graph_task() != -1:
                recording.phase = BACKWARD
                # later operations are forward only inside a module
                self._in_forward &= bool(self.stack)
                if self._has_ddp and _operator(func)[2]:
                    before += self._find_bucket(out, func)
            else:
                recording.phase = FORWARD if self._in_forward else IDLE
            for storage in storages_of(out):
                entry = recording.live.get(storage_key(storage))
                if entry is None or entry.size != storage.nbytes():
                    allocated += self._add(storage, entry, func, args)
            # FSDP's buffer, which backward does not need
            if self._has_fsdp and func is compat.all_gather:
                recording.tag(args[0], names.TEMPORARIES, GATHERED)
            if allocated or recording.total != before:
                self.sample(allocated, func)
            if recording.scratch and (scratch := recording.scratch(func, args)):
                recording.record_scratch(scratch, func)
        finally:
            self.lock.release()

    def sample(self, allocated: int = 0, func: object = "") -> None:
        self.recording.sample(func)
        if self.after_sample is not None:
            self.after_sample(allocated, func)

    def _add(self, storage: UntypedStorage, entry: Entry | None, func: Any, args: tuple) -> int:
        """Count ``storage`` if it is new (no ``entry``) or has a new size.

        Returns the bytes that it adds.
        """
        recording = self.recording
        if entry is not None:
            return 0 if entry.size == storage.nbytes() else recording.resize(entry, storage)
        if self._has_fsdp and func == "resize_":
            return recording.on_alloc(storage, names.PARAMETERS, GATHERED, func)
        if _operator(func)[2] or (
            self.stack and DistributedDataParallel in type(self.stack[-1]).__mro__
        ):
            # DDP's own, or made before the block or by code that does not dispatch
            category = names.OTHER
        elif recording.phase == FORWARD:
            category = names.ACTIVATIONS if self._with_grad else names.TEMPORARIES
        elif recording.phase == BACKWARD:
            # Autograd computes gradients with grad mode off. If grad mode is on, a forward is being
            # recomputed.
            category = names.ACTIVATIONS if torch.is_grad_enabled() else names.TEMPORARIES
        elif recording.phase == OPTIMIZER_STEP:
            category = names.TEMPORARIES
        elif (
            storage.nbytes()
            and torch.is_grad_enabled()
            and any(t.requires_grad for t in tensors_in(args))
        ):
            recording.phase = FORWARD  # a forward pass written without modules
            category = names.ACTIVATIONS
        else:
            category = names.OTHER
        in_backward = category == names.TEMPORARIES and recording.phase == BACKWARD
        return recording.on_alloc(
            storage, category, "(backward)" if in_backward else self.owner(), func
        )

    def owner(self) -> tuple[weakref.ref, type] | str:
        """A weak reference to the module that runs.

        A strong one, kept for the name, would keep the weights alive.
        """
        return (weakref.ref(self.stack[-1]), type(self.stack[-1])) if self.stack else ""

    def _find_bucket(self, out: Any, func: Any) -> int:
        """Count a gradient bucket of DDP, and return its bytes.

        Its allocation is not dispatched: it is first seen when a gradient is written into it.
        """
        storage, recording = (
            own_storage(out) if isinstance(out, torch.Tensor) else None,
            self.recording,
        )
        if storage is None or storage_key(storage) in recording.live:
            return 0
        nbytes = recording.on_alloc(storage, names.OTHER, "DistributedDataParallel", func)
        recording.backdate([recording.live[storage_key(storage)]] if nbytes else [])
        return nbytes

    # Who owns what

    def sync(self, states: bool = True) -> None:
        """Update the categories of parameters, gradients, buffers and new states, any of which may
        have been replaced.
        """
        recording, before = self.recording, self.recording.total
        recording.drain()
        named = dict(self.model.named_parameters()) if self.model is not None else {}
        parameters = {name: p for name, p in named.items() if p.is_leaf}
        for name, parameter in parameters.items():
            if parameter.device.type != recording.device.type:
                raise RuntimeError(
                    f"the model moved while it was tracked: the tracker counts {recording.device}, "
                    f"and {name} is on {parameter.device}. Move the model first, then start a new "
                    "MemoryTracker"
                )
        # functional_call's are computed
        weights = {*self._names.values()} - (named.keys() - parameters)
        for entry in recording.live.values():
            if entry.category == names.PARAMETERS and entry.module in weights:
                entry.category = names.OTHER  # set back below if it is still a parameter
        # Buffers first: the storage of a buffer that is a view of a parameter belongs to the
        # parameter.
        for name, buffer in self.model.named_buffers() if self.model is not None else ():
            recording.tag(buffer, names.OTHER, name)
        for name, parameter in parameters.items():
            self._names[id(parameter)] = name
            self._tag_parameter(parameter)
            state = getattr(parameter, "quant_state", None)
            # bitsandbytes' 4-bit weights have scales, and these may have scales too
            while state is not None:
                recording.tag(vars(state), names.PARAMETERS, name)
                state = state.state2
            known = self._hooked.get(id(parameter), lambda: None)() is parameter
            if not known and parameter.requires_grad and not is_lazy(parameter):
                self._hooked[id(parameter)] = weakref.ref(parameter)
                self.exit_stack.callback(
                    parameter.register_post_accumulate_grad_hook(self._tag_parameter).remove
                )
        for optimizer in self.optimizers if states else ():
            self._tag_states(optimizer)
        if recording.total != before:
            self.sample()

    def _tag_parameter(self, parameter: torch.Tensor) -> None:
        with self.lock:  # also called when the parameter's gradient has been accumulated
            name, grad = self._names.get(id(parameter), "parameter"), parameter.grad
            self.recording.tag(parameter, names.PARAMETERS, name)
            if grad is not None:
                self.recording.tag(grad, names.GRADIENTS, name)

    def _tag_states(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            self.recording.tag(state, names.OPTIMIZER, self._names.get(id(parameter), "parameter"))

    def _before_step(self, optimizer: Optimizer, args, kwargs) -> tuple[tuple, dict]:
        recording = self.recording
        with self.lock:
            if optimizer not in self.optimizers:  # its states existed before the block
                self.optimizers[optimizer] = None
                recording.drain()
                known = set(recording.live)
                self._tag_states(optimizer)
                recording.backdate(
                    [entry for key, entry in recording.live.items() if key not in known]
                )
                self.sample(recording.total, "the states of an optimizer that was not given")
            self._stepping.append(optimizer)
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                self._tag_parameter(parameter)
            self._tag_states(optimizer)
            self.sample()
        return tuple(map(self._wrap_closure, args)), {
            name: self._wrap_closure(value) for name, value in kwargs.items()
        }

    def _wrap_closure(self, value: Any) -> Any:
        """Wrap a closure that a step calls (LBFGS), so that its operations get their own phases.

        The step continues after the closure.
        """
        if not callable(value):
            return value

        @wraps(value)
        def closure(*args, **kwargs):
            with patch.object(self, "_stepping", []):
                return value(*args, **kwargs)

        return closure

    def _after_step(self, optimizer: Optimizer, args, kwargs) -> None:
        with self.lock:
            self._tag_states(optimizer)
            del self._stepping[-1:]
            self._in_forward = False

    # Modules

    def _wrap_module_call(self, call: Callable) -> Callable:
        # Global module hooks are twice as slow. A hook on the model would be copied and pickled
        # with it.
        def __call__(module, *args, **kwargs):
            if (
                threading.get_ident() != self._thread
                and graph_task() == -1
                and not compat.num_active_dispatch_modes()
            ):
                self._refuse_thread(module)
                return call(module, *args, **kwargs)
            if not self.stack and graph_task() == -1:
                self._begin_forward(module, args, kwargs)
            self.stack.append(module)
            try:
                return call(module, *args, **kwargs)
            finally:
                del self.stack[-1:]
                if not self.stack and not self._with_grad and graph_task() == -1:
                    self._in_forward = False

        return __call__

    def _refuse_thread(self, module: nn.Module) -> None:
        if self.model is None or any(module is m for m in self.model.modules()):
            raise RuntimeError(
                f"{type(module).__name__} runs in another thread than the one that entered the "
                "block, and a tracker sees the operations of its own thread only: run the step "
                "there, or enter the MemoryTracker in that thread"
            )

    def _begin_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if compat.is_compiled(module):
            raise compiled_error(type(module).__name__)
        with self.lock:
            self._stepping.clear()  # a step that raised an error has not ended
            self._in_forward, self._with_grad = True, torch.is_grad_enabled()
            self.sync(states=False)  # states would take as long as all the rest
            # Count a batch that was made before the block. Storages that are known keep their
            # categories.
            for storage in storages_of((args, kwargs)):
                if storage_key(storage) not in self.recording.live:
                    self.recording.on_alloc(storage, names.OTHER, "inputs")
                    self.sample()

    def _wrap_storage_resize(self, resize: Callable) -> Callable:
        # A resize is not dispatched, and FSDP frees memory with it.
        def resize_(storage, size):
            out = resize(storage, size)
            with self.lock:
                before = self.recording.total
                self.recording.drain()
                allocated = self._add(
                    storage, self.recording.live.get(storage_key(storage)), "resize_", ()
                )
                if self.recording.total != before:
                    self.sample(allocated, "resize_")
            return out

        return resize_

    def module_names(self) -> dict[int, str]:
        return (
            {id(m): name for name, m in self.model.named_modules()}
            if self.model is not None
            else {}
        )


def name_of(owner: tuple[weakref.ref, type] | str, names: dict[int, str]) -> str:
    return owner if isinstance(owner, str) else names.get(id(owner[0]())) or owner[1].__name__


def compiled_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is compiled with torch.compile, and under a tracker it would run uncompiled, now "
        "and afterwards. Track the original (before torch.compile, or ._orig_mod; torch.cond "
        "under torch.no_grad()): compiled code has its own memory plan"
    )
