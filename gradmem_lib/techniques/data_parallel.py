"""Processes that train one model together: what is summed over them, and what each has to do for the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import compat

NOTHING = "there is nothing to learn from: no micro-batch, or not one item in all of them. Are all labels -100? Skip this window"


class Alone:
    """One process, or several that each train a model of their own. ``divisor``: what gradients are divided by on their way."""

    divisor: float = 1

    def micro_batches(self, given: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """Each micro-batch, and whether the others wait for its backward even if it has no items."""
        return ((micro, False) for micro in given)

    def forward_and_backward(self, needed: bool) -> AbstractContextManager:
        return nullcontext()

    def sums(self, *numbers: float) -> list[float]:
        """Each number, added up over all processes."""
        return list(numbers)


class Together(Alone):
    """Processes that average their gradients; ``groups`` are those to sum over, one after another."""

    def __init__(self, model: nn.Module, groups: list[dist.ProcessGroup]):
        self.model, self.groups = model, groups
        self.divisor = math.prod(group.size() for group in groups)

    def sums(self, *numbers: float) -> list[float]:
        device = next(self.model.parameters()).device
        total = torch.tensor(numbers, dtype=torch.float64, device=device)  # exact up to 2**53
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total.tolist()


class Replicated(Together):
    """``DistributedDataParallel``: gradients travel with the last micro-batch alone. Processes may have unequally many.

    The next micro-batch is fetched early, to know which one is the last: two of them are held at a time."""

    def micro_batches(self, given: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        rest = iter(given)
        try:
            held = next(rest)
        except StopIteration:
            raise ValueError(NOTHING) from None
        for following in rest:
            yield held, False
            held = following
        yield held, True

    def forward_and_backward(self, needed: bool) -> AbstractContextManager:
        # DDP sends gradients in any backward whose forward ran outside no_sync().
        return nullcontext() if needed else self.model.no_sync()


class Sharded(Together):
    """FSDP: every forward and backward is done by all processes together, and each keeps its part of the gradients.

    Gradients travel with every micro-batch. Held back they would be whole on each process, which sharding is to avoid."""

    def micro_batches(self, given: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        nothing, rest = object(), iter(given)
        while True:
            micro = next(rest, nothing)
            ready, all_of_them = self.sums(micro is not nothing, 1)
            if not ready:
                return
            if ready < all_of_them:
                raise ValueError(
                    f"{int(ready)} of {int(all_of_them)} processes have another micro-batch and the others have none, and FSDP "
                    "computes each one on all processes together: cut the batch into equally many micro-batches everywhere. "
                    "One whose labels are all -100 will do"
                )
            yield micro, True
            del micro


def processes_of(model: nn.Module | None) -> Alone:
    """How ``model`` is trained. ``ValueError`` where several processes would get a wrong gradient, and nobody would notice."""
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    if model is None:
        if dist.get_world_size() == 1:
            return Alone()
        raise ValueError(
            "several processes train together, and accumulate_gradients was not told the model: give "
            "model=the DistributedDataParallel (or the sharded module), so that items are counted over all processes (or "
            "model=the plain module, if this process trains one of its own)"
        )
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, DistributedDataParallel):
        return Replicated(model, [model.process_group])
    if isinstance(model, FullyShardedDataParallel):
        return Sharded(model, compat.fsdp1_groups(model))
    wrappers = (DistributedDataParallel, FullyShardedDataParallel)
    inner = [name for name, module in model.named_modules() if isinstance(module, wrappers)]
    if inner:
        raise ValueError(
            f"only a part of the model, {inner[0]!r}, is trained by several processes together: give the whole to "
            f"{type(model.get_submodule(inner[0])).__name__}, and that as model="
        )
    return _fully_sharded(model)


def _fully_sharded(model: nn.Module) -> Alone:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        return Alone()
    plain = [n for n, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if plain:
        raise ValueError(
            f"{len(plain)} trained parameters ({plain[0]}, ...) are not sharded while others are, and nobody averages their "
            "gradients over the processes: call fully_shard on the whole model too, after its layers"
        )
    groups, divisors = compat.fsdp2_groups(parts)
    together = Sharded(model, groups)
    if divisors != {None}:
        if len(divisors) > 1:
            raise ValueError(
                f"the parts of this model divide their gradients by different numbers ({divisors}): call "
                "set_gradient_divide_factor with one number on every part, or on none"
            )
        together.divisor = divisors.pop()
    return together


def own_part(tensor: Tensor) -> Tensor:
    """What of ``tensor`` lies in this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
