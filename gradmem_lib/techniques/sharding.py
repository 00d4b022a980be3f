"""One model over several processes, each called a rank: what every rank has a copy of, and what is cut over them.

PyTorch's own engines carry it out. Rajbhandari et al. 2020 ("ZeRO", section 5) cut the optimizer's states first, then the
gradients, then the weights: stages 1, 2 and 3.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..compat import shards_of_integers
from ..names import SHARDING, choose
from .data_parallel import device_of
from .layers import find_layers

ALONE = (
    "sharding={!r} is for several processes that train together, and this process is in no group: start the script with "
    "torchrun --nproc-per-node=2, and call torch.distributed.init_process_group() in it first"
)


def shard(
    model: nn.Module,
    how: str,
    *,
    mesh: DeviceMesh | None = None,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> nn.Module:
    """Train ``model`` in all processes of ``mesh`` together, as ``how`` says, a key of ``SHARDING``. Every process calls it.

    Returns the ``DistributedDataParallel`` around the model, or for ``"zero2"`` and ``"fsdp"`` the model itself, whose layers
    and whose rest are sharded in place, and whose parameters are new: make the optimizer afterwards, and put checkpoints on
    before. ``"zero1"`` wraps as ``"ddp"`` does, and its optimizer is ``cut_states``'.

    Args:
        mesh: the processes, in one dimension. ``None``: all of the process group.
        compute_dtype: that sharded float32 weights are gathered in. Their gradients are summed in float32.
        offload: keep the shards and their gradients in the host's memory, where the optimizer steps them (``"fsdp"``).

    ``ValueError`` in a process that no group was started for, and for a model whose layers are not found.
    """
    choose("sharding", how, SHARDING)
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(ALONE.format(how))
    if mesh is None:
        mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),))
    if how in ("ddp", "zero1"):
        if device_of(model).type != mesh.device_type:
            model.to(mesh.device_type)  # as fully_shard does by itself, a layer at a time
        return DistributedDataParallel(model, process_group=mesh.get_group())
    _shard_fully(model, mesh, how == "fsdp", compute_dtype, offload)
    return model


def _shard_fully(model: nn.Module, mesh: DeviceMesh, reshard: bool, dtype, offload: bool) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    try:
        layers = [layer for some, _ in find_layers(model).values() for layer in some]
    except ValueError as error:
        raise ValueError(
            f"fully_shard takes a model layer by layer, and {str(error).partition(':')[0]}. Call torch.distributed.fsdp's fully_shard "
            "on each of its parts and then on the whole yourself, make the optimizer afterwards, and give both to step"
        ) from error
    inside = {p for layer in layers for p in layer.parameters()}
    for part in [*layers, model]:
        own = [p for p in part.parameters() if p.requires_grad and (part is not model or p not in inside)]
        dtypes = sorted({str(p.dtype) for p in own})
        if len(dtypes) > 1:
            raise ValueError(
                f"trained weights of one {type(part).__name__} are in {' and '.join(dtypes)}, and fully_shard keeps a layer's in one dtype: "
                "choose a precision in the recipe, such as 'bf16', or cast the model"
            )
    with shards_of_integers():
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard, **options)
        # What is left, such as embeddings and the output layer. Backward begins where forward ends: freed between, it would be
        # gathered again at once.
        fully_shard(model, reshard_after_forward=False, **options)


def cut_states(
    parameters: list[nn.Parameter], make: Callable[[list], Optimizer], group: dist.ProcessGroup | None = None
) -> Optimizer:
    """The optimizer that ``make(some of the parameters)`` returns, for each parameter on one rank alone, which sends the
    others what it has become."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=make, process_group=group)
