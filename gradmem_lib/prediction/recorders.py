"""Count the fake storages of a step as ``MemoryTracker`` counts real ones, or as a card does."""

from collections.abc import Iterable, Sequence
from functools import cache
from math import inf
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compat.autograd import in_backward
from ..compat.operators import writes_first_argument
from ..compat.tensors import base_of, is_view, storage_key
from ..measure.meter import Meter
from ..measure.recording import Entry, Recording
from ..measure.storages import storages_of
from ..measure.tracker import checked_optimizers
from ..names import OPTIMIZER_STEP
from . import allocator, cuda_kernels
from .changed_views import ChangedViews
from .extrapolation import Trace
from .marks import Marks


class _MarkingMeter(Meter):
    """A ``Meter`` that tells the marks what is touched outside of modules and backward."""

    seconds_for_walks = -inf  # no walk: nobody asks who holds what is fake

    def line(self, depth: int) -> None:
        """A prediction names no lines of scripts, and looking for them takes time."""

    def observe(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        if not self.stack and not in_backward():
            self.recording.marks.touch(func, args, self.recording.live)
        if torch.is_grad_enabled() and _changes_a_view(func, args):
            self.recording.note_changed_view(args[0])
        super().observe(func, args, kwargs, out)


_writes_first_argument = cache(writes_first_argument)


def _changes_a_view(func: Any, args: tuple) -> bool:
    """Whether ``func`` writes into a view in a way that autograd records."""
    if not _writes_first_argument(func) or not is_view(args[0]):
        return False
    for tensor in (base_of(args[0]), *args):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            return True
    return False


class CpuRecorder(Recording):
    """Counts the fake storages of a step. It keeps every sample.

    ``lists``: the lists of layers that the trace's marks name, each with its layers in a unit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | list[Optimizer],
        lists: Iterable[tuple[Sequence[nn.Module], int]] = (),
    ):
        super().__init__(torch.device("cpu"))
        self.optimizers = checked_optimizers(optimizer)
        self.meter = _MarkingMeter(model, self.optimizers, self)
        self.marks = Marks(model, lists)
        self.part = 0
        self.unrounded = 0  # live bytes, before a card rounds them
        self.offload_traffic_bytes = 0
        self.changes_views = False  # whether the step changed views in place
        self.views: ChangedViews | None = None  # what corrects their backwards, if anything does
        # the bytes of an allocation; or -1 - n: the storage of request n was freed
        self.requests: list[int] = []
        # of each request: the sample that counts it, and the layer that its name tells
        self._request_places: list[tuple[int, int, int]] = []
        # Flat lists of ints, four and two for each sample, are made into arrays the fastest.
        self._places: list[int] = []
        self._storages: list[int] = []
        self._operations: dict[object, int] = {}  # the number of each operation

    def __enter__(self) -> Self:
        self.meter.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.meter.__exit__(*error)
        self.drain()
        self.sample()

    def begin_part(self) -> None:
        """A new part of the step begins: a forward, a backward, or the optimizer's step."""
        self.part += 1
        self.marks.begin_part()

    def note_changed_view(self, view: Tensor) -> None:
        """``view`` is being changed in place."""
        self.changes_views = True
        if self.views is not None:
            self.views.note(view)

    def size(self, storage) -> int:
        return storage.nbytes()

    def after_alloc(self, entry) -> None:
        self.unrounded += entry.size

    def after_free(self, entry) -> None:
        self.unrounded -= entry.size

    def backdate(self, entries: list[Entry]) -> int:
        unrounded = sum(entry.size for entry in entries)
        for i in range(0, len(self._storages), 2):
            self._storages[i] += len(entries)
            self._storages[i + 1] += unrounded
        return super().backdate(entries)

    def sample(self, func="") -> None:
        super().sample(func)
        number = self._operations.get(func)
        if number is None:
            number = self._operations[func] = hash(str(func))
        self._places += (number, self.part, *self.marks.place(self.meter.stack))
        self._storages += (len(self.live), self.unrounded)

    def trace(self, offload_traffic_bytes: int = 0) -> Trace:
        return Trace(
            self.rows(),
            np.array(self._places).reshape(-1, 4),
            np.array(self._storages).reshape(-1, 2),
            tuple(self.requests),
            tuple(self._request_places),
            offload_traffic_bytes,
        )


class CudaRecorder(CpuRecorder):
    """Counts like a card's allocator: storages in blocks of 512 bytes, and scratch memory too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._host_keys: set[int] = set()
        self._numbers: dict[int, int] = {}  # the number of each entry's request
        self._num_requests = 0

    def __enter__(self) -> Self:
        # AdamW keeps its step counters in the host's memory, unless it is fused.
        for optimizer in self.optimizers:
            groups = optimizer.param_groups
            if getattr(optimizer, "fused", False) or any(group.get("fused") for group in groups):
                continue
            for state in optimizer.state.values():
                counter = state.get("step")
                if isinstance(counter, Tensor):
                    self._host_keys.add(storage_key(counter.untyped_storage()))
        return super().__enter__()

    def size(self, storage) -> int:
        if storage_key(storage) in self._host_keys:
            return 0
        return allocator.rounded(super().size(storage))

    def scratch(self, func, args) -> int:
        nbytes = cuda_kernels.scratch(func, args)
        if nbytes:
            self._add_request(nbytes)
            self._add_request(-1 - self._num_requests)
            self._num_requests += 1
        return nbytes

    def _add_request(self, request: int, name: object = None) -> None:
        self.requests.append(request)
        self._request_places.append((self.count, *self.marks.place_of_name(name)))

    def after_alloc(self, entry) -> None:
        super().after_alloc(entry)
        self._numbers[id(entry)] = self._num_requests
        self._add_request(entry.nbytes, entry.module)
        self._num_requests += 1

    def after_free(self, entry) -> None:
        super().after_free(entry)
        self._add_request(-1 - self._numbers.pop(id(entry)))

    def trace(self, offload_traffic_bytes: int = 0) -> Trace:
        self._sort_frees()
        return super().trace(offload_traffic_bytes)

    def _sort_frees(self) -> None:
        """Order the blocks that are freed at the same moment as they were asked for.

        Autocast drops its copies of the weights in an order that is another one in each run. An
        allocator joins free neighbours, so that the order of such frees changes nothing for it.
        """
        requests, places = self.requests, self._request_places
        start = 0
        while start < len(requests):
            stop = start + 1
            if requests[start] < 0:  # the block of a free, see `allocator.replayed`
                same_moment = places[start]
                while stop < len(requests) and requests[stop] < 0 and places[stop] == same_moment:
                    stop += 1
                # -1 is the block that was asked for first
                requests[start:stop] = sorted(requests[start:stop], reverse=True)
            start = stop


class OffloadedRecorder(CudaRecorder):
    """Counts like a card's allocator, with FSDP's offload of shards, gradients and states.

    What is in the host's memory has no bytes on the card. ``offload_traffic_bytes`` counts the
    copies in both directions.
    """

    def __enter__(self) -> Self:
        # Storages in the host's memory, by key. A key may be that of another storage later.
        self._host: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._copying_to_host = False
        states = [optimizer.state for optimizer in self.optimizers]
        for storage in storages_of([*self.meter.model.parameters(), *states]):
            self._host[storage_key(storage)] = storage
        to = Tensor.to

        def to_and_count(tensor, *args, **kwargs):
            if "non_blocking" not in kwargs or not isinstance(args[0], torch.device):
                return to(tensor, *args, **kwargs)
            self.offload_traffic_bytes += tensor.nbytes
            # What has bytes on the card is copied to the host, and all else comes from there.
            self._copying_to_host = self.size(tensor.untyped_storage()) > 0
            out = tensor.clone()  # `size` is asked about it meanwhile
            self._copying_to_host = False
            return out

        super().__enter__()
        # FSDP's copies between host and card, which are one memory here.
        self.meter.exit_stack.enter_context(patch.object(Tensor, "to", to_and_count))
        return self

    def size(self, storage) -> int:
        key = storage_key(storage)
        if self._copying_to_host or self.phase == OPTIMIZER_STEP:  # the host steps its shards
            self._host[key] = storage
        if self._host.get(key) is storage:
            return 0
        return super().size(storage)


def recorder_class(target: str, offloads_shards: bool) -> type[CpuRecorder]:
    if target == "cpu":
        return CpuRecorder
    return OffloadedRecorder if offloads_shards else CudaRecorder
