"""What is behind a tensor: its storage, its base, and the tensors that it wraps."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# The address of a storage's C++ object. Every Python wrapper of a storage has the same one. A new
# storage may reuse a freed one.
storage_key: Callable[[Any], int] = attrgetter("_cdata")
# How often a tensor, or its base if it is a view, has been changed in place.
version: Callable[[Tensor], int] = attrgetter("_version")
# Tensors that speak for others, such as those of per-sample gradients, answer even a question for
# their storage through their own function. In this context they answer as plain tensors.
plain_tensors: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
# What runs in this context is seen by no dispatch mode, and by no subclass of tensors.
without_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows ``tensor`` as a view."""
    return tensor._is_view()


def is_zero_tensor(tensor: Tensor) -> bool:
    """Whether it stands for zeros without having them, as forward-mode differentiation makes it."""
    return tensor._is_zerotensor()


def base_of(tensor: Tensor) -> Tensor:
    """What ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a COO tensor. The public methods work only after ``coalesce()``."""
    return tensor._indices(), tensor._values()


def inner_tensors(tensor: Tensor) -> list[Tensor] | None:
    """The local tensors inside a wrapper subclass (DTensor, torchao's).

    ``None`` if ``tensor`` is not a wrapper.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def inside_transform(tensor: Tensor) -> Tensor | None:
    """The innermost tensor that ``torch.func`` transforms have wrapped in ``tensor``.

    ``None`` if no transform has.
    """
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
