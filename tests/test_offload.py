"""What autograd saves is moved away and comes back: bytes of files on disk, gradients to the bit, and nothing left behind."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checkpointed import FAMILIES, batch_for, made, same, step
from predicted import assert_same, config, example_batch, model_class, predict
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gradmem_lib import MemoryTracker, Recipe, checkpoint_layers, offload_activations, prepare
from gradmem_lib import step as train_step


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


ALL = Recipe(offload="activations", precision="autocast-bf16", accumulation=2)
INPUTS = Recipe(offload="boundaries", checkpointing="per-layer", precision="bf16", accumulation=4)
MATRIX = [
    ("llama", 3, ALL),
    ("llama", 10, Recipe(offload="activations")),
    ("llama", 10, INPUTS),
    ("llama", 3, Recipe(offload="boundaries", checkpointing="best")),
    ("gqa", 3, Recipe(offload="activations", checkpointing=2, lora_rank=2)),
    ("tied", 10, Recipe(offload="boundaries", checkpointing=2, chunked_loss=True)),
    ("qwen3", 3, Recipe(offload="activations", checkpointing="attention")),
    ("gemma", 3, Recipe(offload="activations", in_backward=True, optimizer="adamw-8bit")),
    ("gpt2", 10, ALL),
    ("gpt2", 3, Recipe(offload="activations", checkpointing="elementwise")),
    ("bert", 3, Recipe(offload="activations", attention="eager", accumulation=8)),
    ("vit", 3, INPUTS),
    ("gemma3", 4, Recipe(offload="boundaries", every_n_layers=2)),
]


@pytest.mark.parametrize(("family", "layers", "recipe"), MATRIX)
def test_what_is_predicted_is_tracked_and_as_much_is_moved(family, layers, recipe):
    cfg = config(family, layers)
    predicted = predict(cfg, batch_size=8, seq_len=16, recipe=recipe, target="cpu")
    torch.manual_seed(0)
    model, optimizer, undo = prepare(model_class(cfg)(cfg), recipe)
    batch = example_batch(model, 8, 16)
    if "pixel_values" in batch and recipe.weight_dtype == torch.bfloat16:
        batch["pixel_values"] = batch["pixel_values"].bfloat16()
    train_step(model, optimizer, batch, recipe)
    moves = offload_activations(model=model, what=recipe.offload)
    with undo, MemoryTracker(model, optimizer, live=False) as tracker:
        train_step(model, optimizer, batch, recipe, offload=moves)
    assert_same(predicted, tracker)
    assert predicted.moved == moves.bytes > 0
    assert f"<td>{moves.bytes:,}</td>" in predicted._repr_html_()
