"""DistributedDataParallel and FSDP: their process groups, and what they have sent."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from torch import Tensor, nn


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP, of either kind, has wrapped a module of ``model``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported already if anything is sharded
    if fsdp is None:
        return False
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())


def ddp_is_done(model: nn.Module) -> bool:
    """Whether the last backward of a ``DistributedDataParallel`` has sent all gradients. DDP's next
    forward makes the same call, and raises the same error. The first time, the call also rebuilds
    the buckets, so it is left out if no gradient is missing.
    """
    missing = any(p.requires_grad and p.grad is None for p in model.parameters())
    if not (missing or model._has_rebuilt_buckets):
        return True
    try:
        model.reducer._rebuild_buckets()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        return False
    return True


def fsdp1_groups(model: nn.Module) -> list:
    """The process groups over which a ``FullyShardedDataParallel`` averages gradients
    (torch 2.13).
    """
    groups = [model.process_group]
    across_nodes = getattr(model, "_inter_node_pg", None)  # of HYBRID_SHARD
    if across_nodes is not None:
        groups.append(across_nodes)
    return groups


def fsdp2_groups(parts: Iterable[nn.Module]) -> tuple[list, set]:
    """The process groups over which ``fully_shard`` averages, and the divisors of its parts.

    Seen in torch 2.13.
    """
    process_groups = {}  # by what they are for: the parts share them
    divisors = set()
    for part in parts:
        for group in _parameter_groups(part):
            divisors.add(group.gradient_divide_factor)
            for name in ("shard_process_group", "replicate_process_group"):
                process_group = getattr(group.mesh_info, name, None)
                if process_group is not None:
                    process_groups[name] = process_group
    return list(process_groups.values()), divisors or {None}


def _parameter_groups(part: nn.Module) -> list:
    """The parameters of a part of ``fully_shard``, in groups that travel together."""
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = getattr(state, "_fsdp_param_group", None)  # before torch 2.13 there was at most one
    return [group] if group else []


@contextmanager
def allow_integer_shards() -> Iterator[None]:
    """While the block runs, ``fully_shard`` accepts integer weights (4-bit codes).

    Torch 2.13 accepts them without this.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        if requires_grad is None:
            requires_grad = data.is_floating_point()
        return nn.Parameter(data, requires_grad)

    changed_nn = SimpleNamespace(**vars(nn) | {"Parameter": parameter})
    with patch.object(_fsdp_param, "nn", changed_nn):
        yield
