"""Copies without memory: name by name what the module and the batch hold, storages shared as they
are there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradmem_lib.compat.fake_tensors import FakeTensor
from gradmem_lib.compat.tensors import storage_key
from gradmem_lib.prediction.copies import fake_batch, fake_copy
from gradmem_lib.prediction.fakes import QuickFakeMode
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.techniques.checkpointing import checkpoint_layers, checkpoints_of


class Wrapper(Tensor):
    """A tensor with a size and no memory of its own."""

    @staticmethod
    def __new__(cls, inside):
        return Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Packed(Tensor):
    __module__ = "bitsandbytes.nn.modules"  # its own operations, as the library's have


class Table:
    """It copies itself, and makes a tensor for that."""

    def __init__(self, rows: int):
        self.values = torch.zeros(rows, dtype=torch.float64)

    def __deepcopy__(self, memo):
        return Table(len(self.values))


class Holds(nn.Module):
    """All that a module may hold: parameters that share, buffers, views, a tensor in a list, and
    layers.
    """

    def __init__(self, make=nn.ModuleList):
        super().__init__()
        parts = [nn.Linear(3, 3) for _ in range(4)]
        self.layers = make(parts) if make is nn.ModuleList else make(*parts)
        self.frozen = nn.Parameter(torch.rand(4, 6, dtype=torch.float64), requires_grad=False)
        self.tied = self.layers[0].weight
        whole = torch.rand(10)
        self.part = nn.Parameter(whole[2:8].view(3, 2).t())
        self.register_buffer("rest", whole[8:])
        self.register_buffer("ids", torch.arange(5))
        self.loose = [torch.rand(2, 3, dtype=torch.bfloat16)]


def tensors_of(module: Holds) -> dict[str, Tensor]:
    found = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    return found | {"loose": module.loose[0]}


def form(tensor: Tensor) -> tuple:
    asked = (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.requires_grad,
    )
    return (
        *asked,
        tensor.untyped_storage().nbytes(),
        isinstance(tensor, nn.Parameter),
        tensor.device.type,
    )


def shared(tensors: dict[str, Tensor]) -> set[frozenset]:
    """Which names have one storage."""
    by: dict = {}
    for name, tensor in tensors.items():
        by.setdefault(storage_key(tensor.untyped_storage()), set()).add(name)
    return {frozenset(names) for names in by.values()}


@pytest.mark.parametrize("make", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("keep", [None, 0, 1, 3])
def test_a_copy_holds_what_the_module_holds(make, keep):
    real = Holds(make)
    before = {name: tensor.clone() for name, tensor in tensors_of(real).items()}
    with QuickFakeMode():
        made = fake_copy(real, None if keep is None else {real.layers: keep})
    wanted = {
        name: tensor
        for name, tensor in tensors_of(real).items()
        if keep is None or not name.startswith("layers.") or int(name.split(".")[1]) < keep
    }
    found = tensors_of(made)
    assert all(isinstance(tensor, FakeTensor) for tensor in found.values())
    assert {name: form(t) for name, t in found.items()} == {
        name: form(t) for name, t in wanted.items()
    }
    assert shared(found) == shared(wanted)
    assert type(made.layers) is make and len(made.layers) == (4 if keep is None else keep)
    assert made is not real and len(real.layers) == 4
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(real).items())
    if keep != 0:
        assert made.tied is made.layers[0].weight


def test_checkpoints_are_put_on_the_copy_too():
    real = Holds()
    with checkpoint_layers(real.layers, every=2), QuickFakeMode():
        made = fake_copy(real)
        assert len(list(checkpoints_of(made))) == len(list(checkpoints_of(real))) == 1
    with QuickFakeMode():
        assert not list(checkpoints_of(fake_copy(real)))


def test_a_batch_keeps_what_is_one_tensor_one():
    ids = torch.arange(12).view(3, 4)
    batch = {"ids": ids, "labels": ids, "flag": True, "more": [ids[1:], torch.rand(2, 3).half()]}
    with QuickFakeMode():
        made = fake_batch(batch)
    assert made["ids"] is made["labels"] and made["flag"] is True
    for fake, real in ((made["ids"], ids), *zip(made["more"], batch["more"], strict=True)):
        assert isinstance(fake, FakeTensor) and form(fake) == form(real)
    keys = [storage_key(t.untyped_storage()) for t in (made["ids"], *made["more"])]
    assert keys[0] == keys[1] != keys[2]


def test_what_copies_itself_makes_tensors_of_its_own():
    with QuickFakeMode():
        made = fake_batch({"table": Table(5)})["table"]
    assert isinstance(made.values, FakeTensor) and form(made.values) == form(Table(5).values)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (Wrapper(torch.rand(3)), "a Wrapper, and what its own operations take"),
        (torch.rand(3).as_subclass(Packed), "a Packed, and what its own operations take"),
        (torch.rand(2, 5, requires_grad=True) * 2, r"of shape \(2, 5\) that has been computed"),
    ],
)
def test_what_has_no_copy_is_named_with_where_it_is(held, says):
    with QuickFakeMode(), pytest.raises(CannotTrace, match=f"the batch .*{says}"):
        fake_batch({"x": held})
    module = Holds()
    module.loose = [held]
    with QuickFakeMode(), pytest.raises(CannotTrace, match=f"the model .*{says}"):
        fake_copy(module)
    # a leaf with a gradient, and what is computed without one, are as good as any
    with QuickFakeMode():
        kept = fake_batch([torch.rand(2, requires_grad=True), torch.rand(2) * 2])
    assert [t.requires_grad for t in kept] == [True, False]
