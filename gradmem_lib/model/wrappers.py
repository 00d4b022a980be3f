"""The model inside of the wrappers of several processes, and of PEFT."""

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def without_wrappers(model: nn.Module) -> nn.Module:
    """Raises ``ValueError`` as ``inside_peft`` does."""
    return inside_peft(inside_wrapper(model))


def inside_wrapper(model: nn.Module) -> nn.Module:
    """The model inside ``DataParallel``, ``DistributedDataParallel`` or
    ``FullyShardedDataParallel``; any other model itself, whatever it calls its parts.
    """
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        return model.module
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel):
        return model.module
    return model


def inside_peft(model: nn.Module) -> nn.Module:
    """The transformers model inside a ``peft`` model; else ``model`` itself.

    Raises ``ValueError`` for prompt learning.
    """
    kinds = type(model).__mro__  # all classes, since fully_shard gives the model a new class
    if not any(kind.__module__.startswith("peft.") for kind in kinds):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            "give adapters inside the layers (LoraConfig, IA3Config, ...), or train with Trainer "
            f"itself: {type(model).__name__} trains a prompt or a prefix that stands before each "
            "row, and a step here knows the rows alone"
        )
    return model.get_base_model()
