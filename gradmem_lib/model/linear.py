"""The linear layers of a model, and the one that makes its logits."""

import torch
from torch import Tensor, nn

from ..hf_names import hf_class


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer; ``None`` for other modules.

    A subclass of ``nn.Linear`` with a forward of its own is tried on one row: a router returns a
    pair, and is not a linear layer, and neither is one that needs more than its input.
    """
    if isinstance(module, nn.Linear):
        if type(module).forward is not nn.Linear.forward and not _returns_a_tensor(module):
            return None
        return module.in_features, module.out_features
    if isinstance(module, hf_class("Conv1D")):
        return tuple(module.weight.shape)
    return None


@torch.no_grad()
def _returns_a_tensor(module: nn.Linear) -> bool:
    one_row = module.weight.new_zeros(1, module.in_features)
    try:
        return isinstance(module.forward(one_row), Tensor)
    except Exception:  # its own code may raise anything
        return False


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers inside ``model`` by name, without the output layer."""
    left_out = [model]  # nothing can be put in its place
    if hasattr(model, "get_output_embeddings"):
        left_out.append(model.get_output_embeddings())
    found = {}
    for name, module in model.named_modules():
        if module not in left_out and linear_sizes(module):
            found[name] = module
    return found


def output_layer(model: nn.Module) -> nn.Linear | None:
    """The layer that makes the logits of words; ``None`` if there is none."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if isinstance(head, nn.Linear) else None
