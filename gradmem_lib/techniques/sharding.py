"""One model on several processes (ranks): what each rank has a copy of, and what is sharded.

PyTorch's own engines do the work. Rajbhandari et al. 2020 ("ZeRO", section 5) shard the optimizer's
states first, then also the gradients, then also the weights: stages 1, 2 and 3.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..compat.data_parallel import allow_integer_shards
from ..model.layers import Named, find_layers, layers_in
from ..names import SHARDING, check_choice
from .data_parallel import device_of

NO_PROCESS_GROUP = (
    "sharding={!r} is for several processes that train together, and this process is in no group: "
    "start the script with "
    "torchrun --nproc-per-node=2, and call torch.distributed.init_process_group() in it first"
)


def shard(
    model: nn.Module,
    how: str,
    *,
    mesh: DeviceMesh | None = None,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
    layers: Named = (),
) -> nn.Module:
    """Prepare ``model`` for training in all processes of ``mesh`` by ``how``, a key of
    ``SHARDING``. Every process calls this.

    Returns the ``DistributedDataParallel`` around the model. For ``"zero2"`` and ``"fsdp"`` it
    returns the model itself: its layers, and the rest of it, are sharded in place. Its parameters
    are new, so put checkpoints on before, and make the optimizer afterwards. ``"zero1"`` wraps like
    ``"ddp"``, and ``shard_optimizer_states`` makes its optimizer.

    Args:
        mesh: the processes, in one dimension. ``None``: all of the process group. ``"zero2"`` and
            ``"fsdp"`` also take two dimensions, for hybrid sharding (HSDP): each row of the mesh,
            such as a machine, has a copy of the model, and the ranks of a row share it.
        compute_dtype: the dtype in which sharded float32 weights are gathered. Their gradients are
            summed in float32.
        offload: keep the shards and their gradients in the host's memory, where the optimizer steps
            them (``"fsdp"``).
        layers: the names of its lists of layers, as ``Recipe`` takes them.

    Raises ``ValueError`` in a process without a process group, for a model whose layers are not
    found, and for a mesh with more dimensions.
    """
    check_choice("sharding", how, SHARDING)
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(NO_PROCESS_GROUP.format(how))
    if mesh is None:
        mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),))
    most = 2 if SHARDING[how].weights else 1
    if mesh.ndim > most:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions, and sharding={how!r} takes {most}: hybrid "
            "sharding, with a copy of the model in each row, is for 'fsdp' and 'zero2'"
        )
    if not SHARDING[how].weights:
        if device_of(model).type != mesh.device_type:
            model.to(mesh.device_type)  # as fully_shard does by itself, a layer at a time
        return DistributedDataParallel(model, process_group=mesh.get_group())
    _shard_fully(model, mesh, SHARDING[how].frees_layers, compute_dtype, offload, layers)
    return model


def _shard_fully(
    model: nn.Module, mesh: DeviceMesh, reshard: bool, dtype, offload: bool, named: Named
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    layers = layers_in(find_layers(model, named))
    with allow_integer_shards():
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard, **options)
        # The rest, such as embeddings and the output layer. Backward begins where forward ends: if
        # the rest were freed in between, it would be gathered again at once.
        fully_shard(model, reshard_after_forward=False, **options)


def shard_optimizer_states(
    parameters: list[nn.Parameter],
    make: Callable[[list], Optimizer],
    group: dist.ProcessGroup | None = None,
) -> Optimizer:
    """An optimizer whose states are sharded over the ranks.

    Each rank calls ``make(its part of the parameters)``, steps this part, and sends the new values
    to the others.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=make, process_group=group)
