"""Fake tensors: they have a shape, a dtype and a device, but no values."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor

from .tensors import is_zero_tensor

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
# What FakeTensorMode raises when an operation needs a fake tensor's values, or a size that is not
# known.
NO_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


def has_numbers(tensor: Tensor) -> bool:
    """Whether its numbers can be read: those of a prediction, or on the device meta, cannot."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_fake_without_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` is fake, and the real one would have no memory: it is on the device meta,
    or consists of the zeros of forward-mode differentiation.
    """
    if type(tensor) is not FakeTensor:
        return False
    return tensor.fake_device.type == "meta" or is_zero_tensor(tensor)


def fast_fake_tensor(inside: Tensor, device: torch.device, attributes: dict[str, Any]) -> Any:
    """Like ``FakeTensor(mode, inside, device)``, but faster.

    ``attributes``: those of an earlier fake tensor.
    """
    options: dict[str, Any] = {"dispatch_device": True, "device_for_backend_keys": device}
    fake = Tensor._make_subclass(FakeTensor, inside, False, **options)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(attributes)
    return fake
