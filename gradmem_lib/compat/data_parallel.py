"""DistributedDataParallel and FSDP: their process groups, and what they have sent."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from torch import Tensor, nn


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
    across_nodes = getattr(model, "_inter_node_pg", None)  # of HYBRID_SHARD
    return [model.process_group] + ([] if across_nodes is None else [across_nodes])


def fsdp2_groups(parts: Iterable[nn.Module]) -> tuple[list, set]:
    """The process groups over which ``fully_shard`` averages, and the divisors of its parts.

    Seen in torch 2.13.
    """
    found, divisors = {}, set()
    for part in parts:
        state = part._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)  # before torch 2.13 there was at most one
        for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
            divisors.add(group.gradient_divide_factor)
            for name in ("shard_process_group", "replicate_process_group"):
                if (process_group := getattr(group.mesh_info, name, None)) is not None:
                    found[name] = process_group
    return list(found.values()), divisors or {None}


@contextmanager
def allow_integer_shards() -> Iterator[None]:
    """While the block runs, ``fully_shard`` accepts integer weights (4-bit codes).

    Torch 2.13 accepts them without this.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(
            data, data.is_floating_point() if requires_grad is None else requires_grad
        )

    with patch.object(_fsdp_param, "nn", SimpleNamespace(**vars(nn) | {"Parameter": parameter})):
        yield
