"""Feeds a recording: watches every operation that PyTorch dispatches, and the modules, optimizers
and parameters behind them.
"""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial, wraps
from types import CodeType
from typing import Any, NamedTuple, Self

import torch
from torch import UntypedStorage, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from .. import compat, names
from ..names import (
    BETWEEN_STEPS,
    EVALUATION,
    IN_BACKWARD,
    IN_OPTIMIZER_STEP,
    LOSS,
    TRAINING_FORWARD,
)
from .facts import FIRST_READ_PARAMETER, INPUTS, READ_IN_PARTS
from .moments import Pass, Position
from .patches import patched_torch
from .recording import (
    EXISTED,
    NO_CATEGORY,
    Entry,
    Recording,
    is_expanded,
    is_result,
    source_of,
)
from .source_lines import calling_line
from .storages import NO_STORAGE, own_storage, storages_of, tensors_held, tensors_in
from .structure import Structure

# FSDP's full parameters, which exist only while a layer needs them
GATHERED = "gathered parameters"
# The "operation" of a storage that was there before its first use.
READ = "first read"
COPY = "copy of a storage"
FORWARDS = (TRAINING_FORWARD, LOSS, EVALUATION, BETWEEN_STEPS)
LARGE_PART = 8  # of tensors above this part of the peak it is known whether they are expanded
EXPANDS = 4  # an upsampling to twice the height and width does not count
graph_task, storage_key = compat.graph_task, compat.storage_key  # faster look-ups
Owner = tuple[weakref.ref, type] | str  # a module (see `Meter.as_owner`), or a name


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
        run = (_operators.get(id(func)) or _operator(func)).run
        out = run(*args, **kwargs) if kwargs else run(*args)
        self._observe(func, args, kwargs, out)
        return out


class Operator(NamedTuple):
    """What is known of an operator.

    ``func``: the operator itself. While it is held here, no other one can get its address, which is
    the key. ``run``: what runs it. ``aliases``: it returns an argument or a view of one.

    Two kinds of operators allocate no storage. ``only_views``: all that it returns are views of its
    first argument, and it writes nothing. ``in_place``: it writes into its first argument, and
    returns only this.
    """

    func: Any
    run: Callable
    aliases: bool
    only_views: bool
    in_place: bool


_operators: dict[int, Operator] = {}  # by address: an operator's hash is slow


def _operator(func: Any) -> Operator:
    if id(func) not in _operators:
        run = getattr(func, compat.KERNEL, func)
        if func in compat.collectives:
            run = partial(compat.run_collective_synchronously, func)
        aliases = [result.alias_info for result in compat.returns(func)]
        views = [alias for alias in aliases if alias is not None and not alias.is_write]
        _operators[id(func)] = Operator(
            func,
            run,
            aliases=any(alias is not None for alias in aliases),
            only_views=len(views) == len(aliases) > 0,
            in_place=len(aliases) == 1 and compat.writes_first_argument(func),
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
        self.waiting_optimizers = weakref.WeakSet[Optimizer]()
        self.position = Position()
        self.stack = self.position.calls
        self._thread = threading.get_ident()
        self._names: dict[int, str] = {}
        # of the optimizer step that runs: its first sample, and shapes of parameters without state
        self._step_began_at, self._without_state = 0, set[tuple[int, ...]]()
        self._hooked: dict[int, weakref.ref] = {}
        self._turn_of_batch = -1  # the latest turn that has said how large its batch is
        self.recomputed = False  # a forward ran again in a backward
        # The node of autograd's graph that allocated last, by its number, and what it allocated.
        self._node, self._made_by_node = -1, set[int]()
        self._reused: Entry | None = None  # a gradient that is free without a dispatch mode
        self.exit_stack = ExitStack()
        # Compiled code keeps the call of a module that it was made from, also after the block.
        self.is_running = False

    def __enter__(self) -> Self:
        if self.model is not None:
            for name, module in self.model.named_modules():
                if compat.is_compiled(module):
                    raise compiled_error(name or type(module).__name__)
        self.look_for_wrappers()
        with self.exit_stack as undo:
            self.sync()
            self.sample(self.recording.total, "what exists before the first step")
            undo.callback(optimizer_hooks.register_optimizer_step_pre_hook(self.before_step).remove)
            undo.callback(optimizer_hooks.register_optimizer_step_post_hook(self.after_step).remove)
            undo.enter_context(
                patched_torch(
                    self._wrap_module_call,
                    self._wrap_storage_resize,
                    self.on_compiled_call,
                    run_eagerly=self.runs_compiled_eagerly,
                )
            )
            self.watch = undo.enter_context(Watch(self.observe))
            self.exit_stack = undo.pop_all()
        self.is_running = True
        return self

    def __exit__(self, *error) -> None:
        self.is_running = False
        # RuntimeError: the model is on another device than in its last step
        with self.exit_stack, suppress(RuntimeError):
            self.sync()

    def look_for_wrappers(self) -> None:
        """Find out whether DDP or FSDP has wrapped a module of the model."""
        modules = list(self.model.modules()) if self.model is not None else []
        self._has_ddp = any(isinstance(module, DistributedDataParallel) for module in modules)
        fsdp = sys.modules.get("torch.distributed.fsdp")  # imported already if anything is sharded
        kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
        self._has_fsdp = any(isinstance(module, kinds) for module in modules)

    def line(self, depth: int) -> tuple[CodeType, int] | None:
        """The line of a script that makes a storage.

        ``depth``: how many frames of this file are between the script and ``calling_line``. A
        prediction names no lines, and overrides this.
        """
        return calling_line(depth)

    # A tracker refuses these three. `gradmem run`, which must not stop a script, overrides them.

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

    def on_moved(self, name: str, device: torch.device) -> None:
        """A parameter is on another device than the one that is counted."""
        raise RuntimeError(
            f"the model moved while it was tracked: the tracker counts {self.recording.device}, "
            f"and {name} is on {device}. Move the model first, then start a new MemoryTracker"
        )

    def structure(self) -> Structure | None:
        """What a diagnosis has to know of the model."""
        return Structure.of(self.model)

    def untrained(self) -> frozenset[str]:
        """The names of the parameters of other models than the tracked one, where they are known.

        A tracker knows the model that it was given, and no names of others.
        """
        return frozenset()

    def optimized(self) -> frozenset[str] | None:
        """The names of the model's parameters that an optimizer has.

        ``None`` if there are none: no optimizer is known, or it has copies of its own.
        """
        taken = self._ids_in_optimizers()
        named = self.model.named_parameters() if self.model is not None else ()
        return frozenset(name for name, p in named if id(p) in taken) or None

    def mark_passes(self) -> None:
        """Note which forwards are of modules whose parameters need gradients for no optimizer."""
        taken = self._ids_in_optimizers()
        found: dict[int, bool] = {}
        for done in self.position.passes:
            module = done.module() if done.module is not None else None
            if module is None:
                continue
            if id(module) not in found:
                trained = [p for p in module.parameters() if p.requires_grad]
                found[id(module)] = bool(trained) and not any(id(p) in taken for p in trained)
            done.for_no_optimizer = found[id(module)]

    def _ids_in_optimizers(self) -> set[int]:
        known = {*self.optimizers, *self.waiting_optimizers}
        groups = [group for optimizer in known for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def find_waiting_optimizers(self) -> None:
        """Find the optimizers that have not stepped so far. It takes about as long as a garbage
        collection.

        A diagnosis of a run that ends before its first step has no other way to know them.
        """
        if self.recording.step or self.position.has_stepped:
            return
        for value in gc.get_objects():
            if issubclass(type(value), Optimizer):
                self.waiting_optimizers.add(value)

    def close(self) -> None:
        """Drop the model. The recorded entries keep the names of its modules."""
        modules, recording = self.module_names(), self.recording
        entries = recording.entries()
        for peak in (recording.run_peak, recording.window_peak):
            entries += peak.freed_since
        for entry in entries:
            entry.module = name_of(entry.module, modules)
        for done in self.position.passes:
            done.owner = name_of(done.owner, modules)
        self.model = None
        self.stack.clear()

    def observe(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        """Called after every operation: count its allocations and frees, and sample a change."""
        recording, allocated = self.recording, 0
        operator = _operators.get(id(func)) or _operator(func)
        self.lock.acquire()  # `with` takes twice as long
        try:
            recording.op += 1
            before = recording.total
            if recording.freed:
                recording.drain()
            if self._reused is not None:
                self._check_reused()
            recording.moment = self.position.moment()
            # Most operations make views of tensors that are counted already, or write into them.
            if operator.only_views and self._is_counted(args[0]):
                pass
            elif operator.in_place and not self._has_ddp:
                allocated = self._count_reads(args, kwargs, func)
            else:
                if self._has_ddp:
                    before += self._find_bucket(operator, out)
                allocated = self._count(func, args, kwargs, out)
            if allocated or recording.total != before:
                self.sample(allocated, func)
            if recording.scratch and (scratch := recording.scratch(func, args)):
                recording.record_scratch(scratch, func)
        finally:
            self.lock.release()

    def _is_counted(self, tensor: Any) -> bool:
        """Whether the storage of a plain tensor is among those that live."""
        if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
            return False
        try:
            return storage_key(tensor.untyped_storage()) in self.recording.live
        except NO_STORAGE:
            return False

    def _count(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> int:
        """Count the storages that an operation reads for the first time, and those that it makes.

        Returns their bytes.
        """
        recording, nbytes = self.recording, 0
        if func is not compat.lift_fresh:  # torch.tensor(...): what it reads is its result
            nbytes += self._count_reads(args, kwargs, func)
        if func is compat.add_tensors and recording.moment == IN_BACKWARD:
            self._free_reused(args)
        for tensor in (out,) if isinstance(out, torch.Tensor) else tensors_in((out,)):
            for storage in storages_of(tensor):
                entry = recording.live.get(storage_key(storage))
                if entry is None or entry.size != storage.nbytes():
                    nbytes += self._add(tensor, storage, entry, func, args)
        # FSDP's buffer, which backward does not need
        if self._has_fsdp and func is compat.all_gather:
            recording.tag(args[0], names.TEMPORARIES, GATHERED)
        return nbytes

    def sample(self, allocated: int = 0, func: object = "") -> None:
        recording, forward = self.recording, self.position.open
        recording.sample(func)
        if forward is not None and recording.total > forward.peak:
            forward.peak = recording.total
        if self.after_sample is not None:
            self.after_sample(allocated, func)

    def _count_reads(self, args: tuple, kwargs: dict | None, func: Any) -> int:
        """Count the storages among an operation's arguments that were there before their first use.

        Returns their bytes. A module, an optimizer or a view may have brought most of them before:
        what is left are tensors from before the block, and from code that does not dispatch.
        """
        live, nbytes = self.recording.live, 0
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                try:
                    if storage_key(value.untyped_storage()) in live:
                        continue
                except NO_STORAGE:
                    pass
            elif type(value) is not list:
                continue  # a number, a dtype, a size
            for tensor in tensors_in((value,)):
                nbytes += self._count_read(tensor, func)
        return nbytes

    def _count_read(self, tensor: torch.Tensor, func: Any, module: Any = None) -> int:
        """Count the storages of ``tensor`` that are not known. They existed before this operation.

        Returns their bytes.
        """
        recording, nbytes = self.recording, 0
        for storage in storages_of(tensor):
            if storage_key(storage) in recording.live:
                continue
            if _is_copied_storage(tensor, func):
                owner, line = self.owner(), self.line(3)
                nbytes += recording.on_alloc(storage, names.OTHER, owner, COPY, tensor, line)
                continue
            op = READ_IN_PARTS if func in compat.parts_of_a_tensor else READ
            if isinstance(tensor, nn.Parameter):
                op = FIRST_READ_PARAMETER
            owner, line = module or self.owner(), self.line(3)
            counted = recording.on_alloc(storage, names.OTHER, owner, op, tensor, line)
            if counted:
                recording.live[storage_key(storage)].step = EXISTED
                nbytes += counted
        return nbytes

    def _add(
        self, tensor: torch.Tensor, storage: UntypedStorage, entry: Entry | None, func: Any, args
    ) -> int:
        """Count ``storage``, of the result ``tensor``, if it is new (no ``entry``) or has a new
        size.

        Returns the bytes that it adds.
        """
        recording = self.recording
        if entry is not None:
            return recording.resize(entry, storage)
        category = self._category_of_new(storage, func, args)
        owner, moment = self.owner(), recording.moment
        if moment == IN_BACKWARD:
            self._note_node(storage)
            if category == names.TEMPORARIES:
                owner = "(backward)"
        nbytes = recording.on_alloc(storage, category, owner, func, tensor, self.line(5))
        if nbytes and moment in FORWARDS:
            self._note_origin(recording.live[storage_key(storage)], args)
        return nbytes

    def _note_origin(self, entry: Entry, args: tuple) -> None:
        """Note what a diagnosis asks later about a tensor that a forward has made, or code between
        steps.

        Is it much larger than what it was computed from? Was it computed from gradients alone? Does
        autograd keep a Python number for it?
        """
        is_large = entry.nbytes * LARGE_PART > self.recording.run_peak.total
        if is_large and self._expands(entry.nbytes, args):
            entry.expanded = True
        if entry.moment == BETWEEN_STEPS:
            if not compat.reads_only_a_shape(entry.op):
                entry.source = self._category_of_reads(args)
        elif entry.op is compat.multiply or entry.op is compat.divide:
            # The gradient of x * 0.5 needs the 0.5, which autograd keeps without a dispatch.
            by_a_number = not isinstance(args[1], torch.Tensor)
            if by_a_number and args[0].requires_grad and torch.is_grad_enabled():
                self.recording.note_number()

    def _expands(self, nbytes: int, args: tuple) -> bool:
        """Whether an operation without weights has made ``nbytes`` from much less."""
        reads_several = len(list(tensors_in(args))) > 1
        in_a_layer = self.stack and next(self.stack[-1].parameters(recurse=False), None) is not None
        if reads_several and in_a_layer:
            return False  # one of them may be the layer's weight in another dtype
        read = 0
        for tensor in tensors_in(args):
            for storage in storages_of(tensor):
                entry = self.recording.live.get(storage_key(storage))
                if entry is not None and entry.category == names.PARAMETERS:
                    return False
                if entry is not None and is_expanded(entry) and nbytes >= entry.nbytes:
                    return True  # computed from such a tensor, which may be freed soon
                read += storage.nbytes()
        return 0 < read * EXPANDS < nbytes

    def _category_of_reads(self, args: tuple) -> int:
        """Gradients or parameters, if an operation reads nothing else; or ``NO_CATEGORY``.

        What was computed from gradients alone, such as a copy of them, counts as gradients.
        """
        found = NO_CATEGORY
        for tensor in tensors_in(args):
            for storage in storages_of(tensor):
                entry = self.recording.live.get(storage_key(storage))
                if entry is None:
                    return NO_CATEGORY
                category = entry.category
                if category == names.OTHER:
                    category = source_of(entry)
                if category not in (names.GRADIENTS, names.PARAMETERS):
                    return NO_CATEGORY
                if found not in (NO_CATEGORY, category):
                    return NO_CATEGORY  # both of them
                found = category
        return found

    def _category_of_new(self, storage: UntypedStorage, func: Any, args: tuple) -> int:
        """The category of a storage that an operation has just made.

        Gradients and states are temporaries until their parameter or optimizer has them.
        """
        moment = self.recording.moment
        in_ddp = self.stack and isinstance(self.stack[-1], DistributedDataParallel)
        operator = _operators.get(id(func)) or _operator(func)
        if operator.aliases or in_ddp:
            return names.OTHER  # made by code that does not dispatch, or DDP's own
        if moment == IN_BACKWARD:
            # Autograd computes gradients with grad mode off. If grad mode is on, a forward is being
            # recomputed.
            if not torch.is_grad_enabled():
                return names.TEMPORARIES
            self.recomputed = True
            return names.ACTIVATIONS
        if moment in (TRAINING_FORWARD, LOSS):
            return names.ACTIVATIONS
        if moment in (IN_OPTIMIZER_STEP, EVALUATION):
            return names.TEMPORARIES
        if (
            storage.nbytes()
            and torch.is_grad_enabled()
            and any(t.requires_grad for t in tensors_in(args))
        ):
            # a forward pass written without modules
            self.begin_step()
            self.recording.moment = TRAINING_FORWARD
            return names.ACTIVATIONS
        return names.OTHER

    # Sums of gradients. Where a tensor is used twice, autograd adds up its gradients: in place, or
    # into a new tensor while any dispatch mode is active. The recording shows the program as it is
    # without the tracker, so the first gradient's bytes become the sum's.

    def _note_node(self, storage: UntypedStorage) -> None:
        """Remember that the node that runs has allocated ``storage``."""
        number = compat.sequence_nr(compat.current_node())
        if number != self._node:
            self._node, self._made_by_node = number, set()
        self._made_by_node.add(storage_key(storage))

    def _free_reused(self, args: tuple) -> None:
        """Stop counting the first tensor of an addition, if it is one of autograd's own additions
        that would be in place.
        """
        if len(args) != 2 or torch.is_grad_enabled() or not all(map(torch.is_tensor, args)):
            return
        gradient = args[0]
        if not compat.would_be_added_in_place(gradient):
            return
        key, node = storage_key(gradient.untyped_storage()), compat.current_node()
        made_here = self._node == compat.sequence_nr(node) and key in self._made_by_node
        # A node's own formula may add up what it has just computed, and that is never in place.
        if node is None or (made_here and not compat.gives_one_tensor_twice(node)):
            return
        entry = self.recording.live.get(key)
        if entry is not None and entry.category == names.TEMPORARIES:
            self.recording.on_free(entry)
            self._reused = entry

    def _check_reused(self) -> None:
        """Count a gradient again that should have been freed by now, and is still there."""
        entry, self._reused = self._reused, None
        if entry is None:
            return
        storage = entry()
        if storage is not None:
            owner, line = entry.module, entry.line
            self.recording.on_alloc(storage, entry.category, owner, entry.op, None, line)

    def owner(self) -> Owner:
        """The module that runs."""
        return self.as_owner(self.stack[-1]) if self.stack else ""

    def as_owner(self, module: nn.Module) -> Owner:
        """A weak reference to ``module``: a strong one would keep the weights alive."""
        return weakref.ref(module), type(module)

    def _find_bucket(self, operator: Operator, out: Any) -> int:
        """Count a gradient bucket of DDP, and return its bytes.

        Its allocation is not dispatched: it is first seen when a gradient is written into it.
        """
        recording = self.recording
        if recording.moment != IN_BACKWARD or not operator.aliases:
            return 0
        storage = own_storage(out) if isinstance(out, torch.Tensor) else None
        if storage is None or storage_key(storage) in recording.live:
            return 0
        nbytes = recording.on_alloc(storage, names.OTHER, "DistributedDataParallel", operator.func)
        recording.backdate([recording.live[storage_key(storage)]] if nbytes else [])
        return nbytes

    # Who owns what

    def sync(self, states: bool = True) -> None:
        """Update the categories of parameters, gradients, buffers and new states, any of which may
        have been replaced.
        """
        with compat.plain_tensors():
            self.sync_now(states)

    def sync_now(self, states: bool) -> None:
        recording = self.recording
        before = recording.total
        recording.drain()
        if self.model is not None:
            self._sync_model(self.model)
        if states:
            for optimizer in self.optimizers:
                self._tag_states(optimizer)
        if recording.total != before:
            self.sample()

    def _sync_model(self, model: nn.Module) -> None:
        recording = self.recording
        parameters, computed = dict[str, nn.Parameter](), set[str]()
        for name, parameter in model.named_parameters():
            if parameter.is_leaf:
                parameters[name] = parameter
            else:  # in a call of functional_call, it stands in the place of a parameter
                computed.add(name)
        for name, parameter in parameters.items():
            if parameter.device.type != recording.device.type:
                self.on_moved(name, parameter.device)
        weights = {*self._names.values()} - computed
        for entry in recording.live.values():
            if entry.category == names.PARAMETERS and entry.module in weights:
                entry.category = names.OTHER  # set back below if it is still a parameter
        # Buffers first: the storage of a buffer that is a view of a parameter belongs to the
        # parameter.
        for name, buffer in model.named_buffers():
            recording.tag(buffer, names.OTHER, name)
        for name, parameter in parameters.items():
            self._sync_parameter(name, parameter)

    def _sync_parameter(self, name: str, parameter: nn.Parameter) -> None:
        self._names[id(parameter)] = name
        self._tag_now(parameter)
        # bitsandbytes' 4-bit weights have scales, and these may have scales too
        state = vars(parameter).get("quant_state")
        while state is not None:
            self.recording.tag(vars(state), names.PARAMETERS, name)
            state = state.state2
        self._watch_gradient(parameter)

    def _watch_gradient(self, parameter: nn.Parameter) -> None:
        """Tag the gradient of ``parameter`` whenever it has been accumulated."""
        known = self._hooked.get(id(parameter))
        if known is not None and known() is parameter:
            return
        if parameter.requires_grad and not is_lazy(parameter):
            self._hooked[id(parameter)] = weakref.ref(parameter)
            hook = parameter.register_post_accumulate_grad_hook(self._tag_parameter)
            self.exit_stack.callback(hook.remove)

    def _tag_parameter(self, parameter: torch.Tensor) -> None:
        with self.lock, compat.plain_tensors():
            self._tag_now(parameter)

    def _tag_now(self, parameter: torch.Tensor) -> None:
        """Count a parameter and its gradients under their categories."""
        recording, name = self.recording, self._names.get(id(parameter), "parameter")
        recording.tag(parameter, names.PARAMETERS, name)
        if parameter.grad is not None:
            recording.tag(parameter.grad, names.GRADIENTS, name)
        summed = vars(parameter).get(names.GRADIENT_SUM)
        if summed is not None:
            recording.tag(summed, names.GRADIENTS, name)

    def _tag_states(self, optimizer: Optimizer) -> None:
        """Count all that the optimizer keeps under "optimizer": its states, also those inside
        objects, and the tensors in attributes of its own.
        """
        self.recording.drain()
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict) and all(map(self._is_state, state.values())):
                continue  # as in all steps but the first
            name = self._names.get(id(parameter), "parameter")
            for tensor in tensors_held(state):
                self._tag_state(tensor, name)
        for attribute, value in vars(optimizer).items():
            if attribute not in ("state", "param_groups", "defaults"):
                for tensor in tensors_held(value):
                    self._tag_state(tensor, f"{type(optimizer).__name__}.{attribute}")

    def _is_state(self, value: Any) -> bool:
        """Whether it is a plain tensor that counts as an optimizer's already."""
        if type(value) is not torch.Tensor:
            return False
        try:
            entry = self.recording.live.get(storage_key(value.untyped_storage()))
        except NO_STORAGE:
            return False
        return entry is not None and entry.category == names.OPTIMIZER

    def _tag_state(self, tensor: torch.Tensor, name: str) -> None:
        """Count a tensor of an optimizer. Weights and gradients in it stay what they are."""
        recording = self.recording
        for storage in storages_of(tensor):
            entry = recording.live.get(storage_key(storage))
            taken = entry is not None and entry.category in (names.PARAMETERS, names.GRADIENTS)
            if not taken:
                recording.tag_storage(storage, names.OPTIMIZER, name)

    def before_step(self, optimizer: Optimizer, args, kwargs) -> tuple[tuple, dict]:
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
            self.position.stepping.append(optimizer)
            self._step_began_at = recording.count
            self._without_state = set()
            self._tag_parameters(optimizer)
            self._tag_states(optimizer)
            self.sample()
        named = {name: self._wrap_closure(value) for name, value in kwargs.items()}
        return tuple(map(self._wrap_closure, args)), named

    def _tag_parameters(self, optimizer: Optimizer) -> None:
        """Count the optimizer's parameters, and note the shapes of those without a state."""
        with compat.plain_tensors():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._tag_now(parameter)
                    if parameter not in optimizer.state:
                        self._without_state.add(tuple(parameter.shape))

    def tag_states_being_made(self) -> None:
        """In an optimizer's first step: count as states what it has made for a parameter that had
        none, though ``.state`` has it only when all of it is there.

        A step that is refused halfway would show these as temporaries.
        """
        if not self.position.stepping:
            return
        for entry in self.recording.live.values():
            made = getattr(entry.op, "overloadpacket", None) in compat.factories
            for_a_parameter = tuple(entry.shape) in self._without_state
            in_this_step = entry.sample >= self._step_began_at
            is_temporary = entry.category == names.TEMPORARIES
            if made and for_a_parameter and in_this_step and is_temporary:
                entry.category = names.OPTIMIZER

    def _wrap_closure(self, value: Any) -> Any:
        """Wrap a closure that a step calls (LBFGS), so that its operations get their own phases.

        The step continues after the closure.
        """
        if not callable(value):
            return value

        position = self.position

        @wraps(value)
        def closure(*args, **kwargs):
            stepping, position.stepping = position.stepping, []
            try:
                return value(*args, **kwargs)
            finally:
                position.stepping = stepping

        return closure

    def after_step(self, optimizer: Optimizer, args, kwargs) -> None:
        with self.lock:
            self._tag_states(optimizer)
            self.position.end_step()

    def begin_step(self) -> None:
        """A forward begins that records gradients: perhaps the first of a step, or of a turn."""
        recording, position = self.recording, self.position
        recording.step += position.begin_step()
        if recording.turn != position.turn:
            recording.begin_turn(position.turn)

    # Modules

    def _wrap_module_call(self, call: Callable) -> Callable:
        def __call__(module, *args, **kwargs):
            if not self.is_running:
                return call(module, *args, **kwargs)
            if (
                threading.get_ident() != self._thread
                and graph_task() == -1
                and not compat.num_active_dispatch_modes()
            ):
                self.on_other_thread(module)
                return call(module, *args, **kwargs)
            if not self.stack:
                if graph_task() == -1:
                    self.begin_forward(module, args, kwargs)
                else:
                    self.recomputed = True
            else:
                self.note_weights(module)
            self.stack.append(module)
            out = None
            try:
                out = call(module, *args, **kwargs)
            finally:
                del self.stack[-1:]
                if not self.stack and graph_task() == -1:
                    self.end_forward(out)
            return out

        return __call__

    def begin_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """An outermost module is called."""
        if compat.is_compiled(module):
            self.on_compiled_call(type(module).__name__)
        with self.lock:
            recording, with_grad = self.recording, torch.is_grad_enabled()
            recording.drain()  # what was freed since the last operation is not live before this
            if with_grad:
                self.begin_step()
            weight = next(module.parameters(), None)
            with compat.plain_tensors():
                # a weight too may be computed, by functional_call or a parametrization
                given = tensors_in((args, kwargs, weight))
                chained = any(tensor.grad_fn is not None for tensor in given)
            self.position.begin_forward(
                Pass(
                    self.as_owner(module),
                    recording.step,
                    with_grad,
                    recording.total,
                    calling_line(2),
                    compat.next_sequence_nr(),
                    chained=chained,
                    has_weights=weight is not None,
                    first_sample=recording.count,
                    turn=recording.turn,
                    # In functional_call, other tensors stand in the place of its parameters.
                    module=weakref.ref(module) if isinstance(weight, nn.Parameter) else None,
                    number=id(module),
                )
            )
            if with_grad and weight is not None:
                self._note_batch((args, kwargs))
            recording.moment = self.position.moment_of_call
            self.sync(states=False)  # states would take as long as all the rest
            # Count a batch that was made before the block. Storages that are known keep their
            # categories.
            for tensor in tensors_in((args, kwargs)):
                if self._count_read(tensor, "", INPUTS):
                    self.sample()

    def _note_batch(self, inputs: tuple) -> None:
        """Note how many rows the batch has, at the first training forward of each turn.

        These are the rows of the first tensor among the ``inputs``.
        """
        if self._turn_of_batch == self.recording.turn:
            return
        self._turn_of_batch = self.recording.turn
        for tensor in tensors_in(inputs):
            if tensor.dim():
                self.recording.note_batch(tensor.size(0))
                return

    def end_forward(self, out: Any) -> None:
        """The outermost module has returned ``out``; ``None`` if it has raised an error instead."""
        recording, forward = self.recording, self.position.open
        if forward is None:
            return
        returned = 0
        with self.lock:
            recording.drain()
            for tensor in tensors_in((out,)):
                for storage in storages_of(tensor):
                    entry = recording.live.get(storage_key(storage))
                    if entry is None or entry.sample < forward.first_sample or is_result(entry):
                        continue  # not made in this forward, or seen already
                    entry.is_result = True
                    returned += entry.nbytes
            self.position.end_forward(recording.total, recording.count, returned)

    def note_weights(self, module: nn.Module) -> None:
        """A module is called inside another one, which may hide it from its own parameters."""
        forward = self.position.open
        if forward is not None and not forward.has_weights and has_parameters(module):
            self.position.find_weights()

    def _wrap_storage_resize(self, resize: Callable) -> Callable:
        def resize_(storage, size):
            out = resize(storage, size)
            with self.lock:
                before = self.recording.total
                self.recording.drain()
                allocated = self._add_resized(storage)
                if self.recording.total != before:
                    self.sample(allocated, "resize_")
            return out

        return resize_

    def _add_resized(self, storage: UntypedStorage) -> int:
        """Count a storage that was resized. Returns the bytes that it adds."""
        recording = self.recording
        entry = recording.live.get(storage_key(storage))
        if entry is None:
            if self._has_fsdp:
                return recording.on_alloc(storage, names.PARAMETERS, GATHERED, "resize_")
            category = self._category_of_new(storage, "resize_", ())
            return recording.on_alloc(storage, category, self.owner(), "resize_")
        return 0 if entry.size == storage.nbytes() else recording.resize(entry, storage)

    def module_names(self) -> dict[int, str]:
        if self.model is None:
            return {}
        return {id(module): name for name, module in self.model.named_modules()}


def _is_copied_storage(tensor: torch.Tensor, func: Any) -> bool:
    """Whether a storage is being copied as a whole, as in the deepcopy of a tensor.

    Its allocation is not dispatched. It is first seen when a tensor of bytes takes it, to copy into
    it.
    """
    return func is compat.take_storage and tensor.dtype is torch.uint8


def has_parameters(module: nn.Module) -> bool:
    """Whether ``module`` has parameters. A loss has none: its weights of classes are a buffer."""
    return next(iter(module.parameters()), None) is not None


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
