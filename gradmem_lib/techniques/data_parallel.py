"""Processes that train one model together: the sums over all of them, and the work that each has to
do for the others.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..compat.data_parallel import ddp_is_done, fsdp1_groups, fsdp2_groups

NO_ITEMS_ERROR = (
    "there is nothing to learn from: no micro-batch, or not one item in all of them. Are all "
    "labels -100, or rows one token long? Skip this window"
)
_SENTINEL = object()  # stands for "no micro-batch", since None may be one


class Processes:
    """Processes that average their gradients over ``groups``, one group after another.

    Without groups: a single process.
    """

    def __init__(self, model: nn.Module | None = None, groups: Sequence[dist.ProcessGroup] = ()):
        self.model, self.groups = model, groups
        # averaging divides gradients by it
        self.divisor: float = math.prod(group.size() for group in groups)

    def micro_batches(self, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """Each micro-batch, and whether its backward sends gradients to other processes.

        Such a backward must run even if the micro-batch has no items.
        """
        return ((micro, False) for micro in batches)

    def forward_and_backward(self, sync_gradients: bool) -> AbstractContextManager:
        return nullcontext()

    def check_gradients(self) -> None:
        """Called after the last backward. Raises ``ValueError`` if gradients have not been sent."""

    def sums(self, *numbers: float) -> list[float]:
        """The sum of each number over all processes."""
        if not self.groups:
            return list(numbers)
        # exact up to 2**53
        total = torch.tensor(numbers, dtype=torch.float64, device=device_of(self.model))
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total.tolist()


class Replicated(Processes):
    """``DistributedDataParallel``: gradients are sent with the last micro-batch. Processes may have
    unequally many.

    To know which one is the last, it prefetches the next one: two micro-batches are alive at a
    time.
    """

    def micro_batches(self, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        pending = _SENTINEL
        for following in batches:
            if pending is not _SENTINEL:
                yield pending, False
            pending = following
        if pending is _SENTINEL:
            raise ValueError(NO_ITEMS_ERROR)
        yield pending, True

    def forward_and_backward(self, sync_gradients: bool) -> AbstractContextManager:
        # DDP sends gradients in any backward whose forward ran outside no_sync().
        return nullcontext() if sync_gradients else self.model.no_sync()

    def check_gradients(self) -> None:
        if not ddp_is_done(self.model):
            trained = [(n, p) for n, p in self.model.module.named_parameters() if p.requires_grad]
            missing = [n for n, p in trained if p.grad is None]
            raise ValueError(
                "freeze what the loss does not use (requires_grad_(False)) or, if the data decide, "
                "wrap the model in DistributedDataParallel(find_unused_parameters=True): backward "
                f"has not reached {', '.join(missing[:3]) or 'parameters of this micro-batch'}, "
                "and DistributedDataParallel, which waits for it, has averaged no gradient"
            )


class Sharded(Processes):
    """FSDP: all processes run every forward and backward together, and each keeps its part of the
    gradients.

    Gradients are sent with every micro-batch. If they waited, each process would hold all of them,
    which sharding avoids.
    """

    def micro_batches(self, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        rest = iter(batches)
        while True:
            micro = next(rest, _SENTINEL)
            have_one, world_size = map(int, self.sums(micro is not _SENTINEL, 1))
            if not have_one:
                return
            if have_one < world_size:
                raise ValueError(
                    f"{have_one} of {world_size} processes have another micro-batch and the others "
                    "have none, and FSDP computes each one on all processes together: cut the "
                    "batch into equally many micro-batches everywhere. One whose labels are all "
                    "-100 will do"
                )
            yield micro, True
            del micro


def device_of(model: nn.Module) -> torch.device:
    """The device that ``model`` computes on: for offloaded shards, the device on which they are
    gathered.
    """
    first = next(model.parameters())
    return (
        torch.device(first.device_mesh.device_type)
        if hasattr(first, "device_mesh")
        else first.device
    )


def processes_of(model: nn.Module | None) -> Processes:
    """The processes that train ``model``.

    ``ValueError`` if several processes would get a wrong gradient unnoticed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Processes()
    if model is None:
        if dist.get_world_size() == 1:
            return Processes()
        raise ValueError(
            "several processes train together, and accumulate_gradients was not told the model: "
            "give model=the DistributedDataParallel (or the sharded module), so that items are "
            "counted over all processes (or model=the plain module, if this process trains one of "
            "its own)"
        )
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(model, DistributedDataParallel):
        if model.static_graph:
            raise ValueError(
                "DistributedDataParallel(static_graph=True) expects the same backward in each "
                "step, and accumulation runs some of them in no_sync(), without sending gradients: "
                "wrap the model without static_graph"
            )
        return Replicated(model, [model.process_group])
    if isinstance(model, FullyShardedDataParallel):
        return Sharded(model, fsdp1_groups(model))
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise ValueError(
                f"only a part of the model, {name!r}, is trained by several processes together: "
                f"give the whole to {type(module).__name__}, and that as model="
            )
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return _fully_sharded(model, parts) if parts else Processes()


def check_trained_together(model: nn.Module, optimizer: Any) -> None:
    """``ValueError`` if each process would train its own model, or if the optimizer has none of the
    shards.
    """
    groups = [] if isinstance(optimizer, list) else optimizer.param_groups
    stepped, own = (
        {id(p) for group in groups for p in group["params"]},
        {id(p) for p in model.parameters()},
    )
    if not processes_of(model).groups or (stepped and stepped.isdisjoint(own)):
        raise ValueError(
            "with sharding, give model and optimizer that prepare(model, recipe) returned"
        )


def _fully_sharded(model: nn.Module, parts: list) -> Sharded:
    from torch.distributed.tensor import DTensor

    if plain := [
        n for n, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)
    ]:
        raise ValueError(
            f"{len(plain)} trained parameters ({plain[0]}, ...) are not sharded while others are, "
            "and nobody averages their gradients over the processes: call fully_shard on the "
            "whole model too, after its layers"
        )
    groups, divisors = fsdp2_groups(parts)
    if len(divisors) > 1:
        raise ValueError(
            f"the parts of this model divide their gradients by different numbers ({divisors}): "
            "call set_gradient_divide_factor with one number on every part, or on none"
        )
    processes, (divisor,) = Sharded(model, groups), divisors
    processes.divisor = processes.divisor if divisor is None else divisor
    return processes
