"""What autograd saves is moved away and comes back: bytes of files on disk, gradients to the bit, and nothing left behind."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checkpointed import FAMILIES, batch_for, made, same, step
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gradmem_lib import checkpoint_layers, offload_activations


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def left(folder: Path) -> list[Path]:
    gc.collect()
    return list(folder.iterdir())


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)))


def saved_bytes(run, stays) -> tuple[int, torch.Tensor]:
    """What autograd saves in ``run()``, by PyTorch's own hooks: each storage once, all of them alive at the end."""
    kept = {}
    with saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t
    ):
        out = run()
    own = {t.untyped_storage().data_ptr() for t in stays}
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own), out


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_to_the_bit_and_nothing_is_left(family, tmp_path):
    model, batch = made(family), batch_for(family)
    expected = step(family, model, batch)
    for checkpoints in (
        nullcontext,
        lambda: checkpoint_layers(model if family != "modulelist" else model.layers, 2),
    ):
        for what in ("activations", "boundaries"):
            with checkpoints(), offload_activations(tmp_path, model=model, what=what) as moved:
                same(step(family, model, batch), expected)
            assert bool(moved.bytes) == (what == "activations" or checkpoints is not nullcontext)
            assert not left(tmp_path)


def test_as_many_bytes_lie_in_files_as_autograd_saves(tmp_path):
    model, x = chain(), torch.randn(8, 16)
    expected, out = saved_bytes(lambda: model(x).square().sum(), model.parameters())
    with offload_activations(tmp_path) as moved:
        out = model(x).square().sum()
    assert moved.bytes == on_disk(tmp_path) == expected
    assert moved.tensors == len(files(tmp_path))
    out.backward()
    assert not left(tmp_path)
