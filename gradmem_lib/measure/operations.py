"""What an operation does to memory: the storages that it reads for the first time, and those that
it makes, with their category and their owner.
"""

import threading
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import UntypedStorage, nn
from torch.nn.parallel import DistributedDataParallel

from .. import names
from ..compat import operators
from ..compat.collectives import all_gather
from ..compat.tensors import storage_key
from ..names import (
    BETWEEN_STEPS,
    EVALUATION,
    IN_BACKWARD,
    IN_OPTIMIZER_STEP,
    LOSS,
    TRAINING_FORWARD,
)
from .facts import FIRST_READ_PARAMETER
from .in_place_gradients import InPlaceGradients
from .moments import Position
from .recording import EXISTED, Entry, Recording
from .source_lines import calling_line
from .storages import own_storage, storages_of, tensors_in
from .watch import Operator, operator_of

# FSDP's full parameters, which exist only while a layer needs them
GATHERED = "gathered parameters"
# The "operation" of a storage that was there before its first use.
READ = "first read"
COPY = "copy of a storage"
FORWARDS = (TRAINING_FORWARD, LOSS, EVALUATION, BETWEEN_STEPS)
# Before a script's first forward, its weights are of no category so far.
ORIGINS = (names.GRADIENTS, names.PARAMETERS, names.OTHER)
LARGE_PART = 8  # of tensors above this part of the peak it is known whether they are expanded
EXPANDS = 4  # an upsampling to twice the height and width does not count
Owner = tuple[weakref.ref, type] | str  # a module (see `as_owner`), or a name


class OperationMeter:
    """Keeps ``recording`` up to date with the operations of a program.

    ``observe`` is called after each of them. ``after_sample``: called as
    ``after_sample(allocated, func)`` after each sample: the new bytes, and the operation that
    allocated them.
    """

    def __init__(self, recording: Recording, after_sample: Callable[[int, object], None] | None):
        self.recording, self.after_sample = recording, after_sample
        # Reentrant, since a garbage collection inside the locked part may free tensors and run
        # Python code.
        self.lock = threading.RLock()
        self.position = Position()
        self.stack = self.position.calls
        self.recomputed = False  # a forward ran again in a backward
        self._in_place = InPlaceGradients(recording)
        self.has_ddp = self._has_fsdp = False  # whether a module of the model is wrapped

    def observe(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        """Called after every operation: count its allocations and frees, and sample a change."""
        recording, allocated = self.recording, 0
        operator = operator_of(func)
        self.lock.acquire()  # `with` takes twice as long
        try:
            recording.op += 1
            before = recording.total
            if recording.freed:
                recording.drain()
            if self._in_place.freed is not None:
                self._in_place.check_freed()
            recording.moment = self.position.moment()
            # Most operations make views of tensors that are counted already, or write into them.
            if operator.only_views and self._is_counted(args[0]):
                pass
            elif operator.in_place and not self.has_ddp:
                allocated = self._count_reads(args, kwargs, func)
            else:
                if self.has_ddp:
                    before += self._find_bucket(operator, out)
                allocated = self._count(func, args, kwargs, out)
            if operator.takes_part and recording.moment == BETWEEN_STEPS:
                self._note_part(args[0])
            if allocated or recording.total != before:
                self.sample(allocated, func)
            if recording.scratch and (scratch := recording.scratch(func, args)):
                recording.record_scratch(scratch, func)
        finally:
            self.lock.release()

    def _note_part(self, tensor: torch.Tensor) -> None:
        """Before a step, a part was taken from a tensor, or is written into: data has batches."""
        entry = self.recording.entry_of(tensor)
        if entry is not None and entry.category == names.OTHER:
            entry.parts_until = self.recording.step

    def _is_counted(self, tensor: Any) -> bool:
        """Whether the storage of a plain tensor is among those that live."""
        is_plain = type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
        return is_plain and self.recording.entry_of(tensor) is not None

    def _count(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> int:
        """Count the storages that an operation reads for the first time, and those that it makes.

        Returns their bytes.
        """
        recording, nbytes = self.recording, 0
        if func is not operators.lift_fresh:  # torch.tensor(...): what it reads is its result
            nbytes += self._count_reads(args, kwargs, func)
        in_backward = recording.moment == IN_BACKWARD
        if in_backward and func is operators.add_tensors:
            self._in_place.free_first(args)
        elif in_backward and func in operators.written_in_place_by_formulas and not self.stack:
            # No module runs: it is not a checkpoint's second forward.
            self._in_place.free_filled(args, out)
        for tensor in (out,) if isinstance(out, torch.Tensor) else tensors_in((out,)):
            for storage in storages_of(tensor):
                entry = recording.live.get(storage_key(storage))
                if entry is None or entry.size != storage.nbytes():
                    nbytes += self._add(tensor, storage, entry, func, args)
        # FSDP's buffer, which backward does not need
        if self._has_fsdp and func is all_gather:
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
        recording, nbytes = self.recording, 0
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                if recording.entry_of(value) is not None:
                    continue
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
            op = READ
            if isinstance(tensor, nn.Parameter):
                op = FIRST_READ_PARAMETER
            # In the deepcopy of a tensor, its storage is copied as a whole, and its allocation is
            # not dispatched. It is first seen when a tensor of bytes takes it, to copy into it.
            is_copied = func is operators.take_storage and tensor.dtype is torch.uint8
            if is_copied:
                op = COPY
            owner, line = module or self.owner(), self.line(3)
            counted = recording.on_alloc(storage, names.OTHER, owner, op, tensor, line)
            if counted and not is_copied:
                entry = recording.live[storage_key(storage)]
                entry.step = EXISTED
                if func in operators.parts_of_a_tensor:
                    entry.parts_until = recording.step
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
            self._in_place.note_allocation(storage)
            if category == names.TEMPORARIES:
                owner = "(backward)"
        nbytes = recording.on_alloc(storage, category, owner, func, tensor, self.line(5))
        if nbytes and moment in FORWARDS:
            self._note_origin(recording.live[storage_key(storage)], args)
        elif nbytes and category == names.ACTIVATIONS:  # a checkpoint computes it again in backward
            self._note_expansion(recording.live[storage_key(storage)], args)
        return nbytes

    def _category_of_new(self, storage: UntypedStorage, func: Any, args: tuple) -> int:
        """The category of a storage that an operation has just made.

        Gradients and states are temporaries until their parameter or optimizer has them.
        """
        moment = self.recording.moment
        in_ddp = self.stack and isinstance(self.stack[-1], DistributedDataParallel)
        operator = operator_of(func)
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

    def begin_step(self) -> None:
        """A forward begins that records gradients: perhaps the first of a step, or of a turn."""
        recording, position = self.recording, self.position
        recording.step += position.begin_step()
        recording.turn = position.turn

    def _note_origin(self, entry: Entry, args: tuple) -> None:
        """Note what a diagnosis asks later about a tensor that a forward has made, or code between
        steps.

        Is it much larger than what it was computed from? Does it continue a tensor that was joined
        before? Was it computed from gradients alone, or from weights?
        """
        self._note_expansion(entry, args)
        if entry.op is operators.join:
            for part in map(self.recording.entry_of, tensors_in(args)):
                if part is not None and part.op is entry.op and part.nbytes <= entry.nbytes:
                    entry.continues = True
        # A copy of the weights that is made with a graph looks like a forward without modules.
        in_no_module = entry.moment == TRAINING_FORWARD and not self.stack
        outside = entry.moment == BETWEEN_STEPS or in_no_module
        if outside and not operators.reads_only_a_shape(entry.op):
            entry.origin = self._origin_of_reads(args)

    def _note_expansion(self, entry: Entry, args: tuple) -> None:
        """Note if it is a large part of the peak, and much larger than what it was made from."""
        is_large = entry.nbytes * LARGE_PART > self.recording.run_peak.total
        if is_large and self._expands(entry.nbytes, args):
            entry.expanded = True

    def _expands(self, nbytes: int, args: tuple) -> bool:
        """Whether an operation without weights has made ``nbytes`` from much less."""
        reads_several = len(list(tensors_in(args))) > 1
        in_a_layer = self.stack and next(self.stack[-1].parameters(recurse=False), None) is not None
        if reads_several and in_a_layer:
            return False  # one of them may be the layer's weight in another dtype
        read = 0
        for storage in storages_of(args):
            entry = self.recording.live.get(storage_key(storage))
            if entry is not None and entry.category == names.PARAMETERS:
                return False
            if entry is not None and entry.expanded and nbytes >= entry.nbytes:
                return True  # computed from such a tensor, which may be freed soon
            read += storage.nbytes()
        return 0 < read * EXPANDS < nbytes

    def _origin_of_reads(self, args: tuple) -> Entry | None:
        """The gradient, the weight, or the tensor that may become a weight, from which an operation
        computes; ``None`` if it reads anything else as well.

        What was computed from gradients alone, such as a copy of them, counts as gradients.
        """
        found = None
        for storage in storages_of(args):
            entry = self.recording.live.get(storage_key(storage))
            if entry is not None and entry.category in (names.OTHER, names.ACTIVATIONS):
                entry = entry.origin or entry
            if entry is None or entry.category not in ORIGINS:
                return None
            if found is None:
                found = entry
            of_one_kind = found.category == entry.category != names.OTHER
            if found is not entry and not of_one_kind:
                return None  # a gradient and a weight, or two that are not known
        return found

    def owner(self) -> Owner:
        """The module that runs."""
        return self.as_owner(self.stack[-1]) if self.stack else ""

    def as_owner(self, module: nn.Module) -> Owner:
        """A weak reference to ``module``: a strong one would keep the weights alive."""
        return weakref.ref(module), type(module)

    def line(self, depth: int) -> tuple[CodeType, int] | None:
        """The line of a script that makes a storage.

        ``depth``: how many of the meter's own frames to pass over, which saves time. A
        prediction names no lines, and overrides this.
        """
        return calling_line(depth)

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
        self.backdate([recording.live[storage_key(storage)]] if nbytes else [])
        return nbytes

    def backdate(self, entries: list[Entry]) -> None:
        """Count ``entries``, which were just found, as there from the first sample on."""
        self.position.add_live(self.recording.backdate(entries))

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
