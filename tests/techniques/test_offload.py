"""What autograd saves is moved away and comes back: bytes of files on disk, gradients to the bit,
and nothing left behind.
"""

from __future__ import annotations

import gc
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.checkpointed import FAMILIES, batch_for, layers_of, made, same, step
from support.nightly import each
from support.oracle import allocator_peak
from support.predicted import assert_same, config, example_batch, model_class, predict, tracked
from support.trainers import small
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gradmem_lib import (
    MemoryTracker,
    Recipe,
    checkpoint_layers,
    offload_activations,
    prepare,
)
from gradmem_lib import step as train_step
from gradmem_lib.course.machine.compat import saved_tensor_hooks


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def left(folder: Path) -> list[Path]:
    gc.collect()
    return list(folder.iterdir())


@pytest.mark.parametrize("family", each(2, FAMILIES))
def test_gradients_are_the_same_to_the_bit_and_nothing_is_left(family, tmp_path):
    model, batch = made(family), batch_for(family)
    expected = step(family, model, batch)
    for checkpoints in (
        nullcontext,
        lambda: checkpoint_layers(layers_of(family, model), 2),
    ):
        for what in ("activations", "boundaries"):
            with checkpoints(), offload_activations(tmp_path, model=model, what=what) as moved:
                same(step(family, model, batch), expected)
            assert bool(moved.bytes) == (what == "activations" or checkpoints is not nullcontext)
            assert not left(tmp_path)


ALL = Recipe(offload="activations", precision="autocast-bf16", accumulation=2)
INPUTS = Recipe(offload="boundaries", checkpointing="per-layer", precision="bf16", accumulation=4)
MATRIX = [
    ("llama", 3, ALL),
    ("llama", 10, INPUTS),
    ("gqa", 3, Recipe(offload="activations", checkpointing=2, lora_rank=2)),
    ("tied", 10, Recipe(offload="boundaries", checkpointing=2, chunked_loss=True)),
    ("gemma", 3, Recipe(offload="activations", in_backward=True, optimizer="adamw-8bit")),
    ("gemma3", 4, Recipe(offload="boundaries", every_n_layers=2)),
    ("bert", 3, Recipe(offload="activations", attention="eager", accumulation=8)),
]


@pytest.mark.parametrize(("family", "layers", "recipe"), each(2, MATRIX))
def test_what_is_predicted_is_tracked_and_as_much_is_moved(family, layers, recipe):
    cfg = config(family, layers)
    predicted = predict(cfg, batch_size=8, seq_len=16, recipe=recipe, target="cpu")
    model, optimizer, undo = prepare(model_class(cfg)(cfg), recipe)
    batch = example_batch(model, 8, 16)
    train_step(model, optimizer, batch, recipe)
    moves = offload_activations(model=model, what=recipe.offload)
    with undo, MemoryTracker(model, optimizer, live=False) as tracker:
        train_step(model, optimizer, batch, recipe, offload=moves)
    assert_same(predicted, tracker)
    assert predicted.offload_traffic_bytes == 2 * moves.bytes > 0  # there and back
    assert f"<td>{predicted.offload_traffic_bytes:,}</td>" in predicted._repr_html_()


def test_as_many_bytes_lie_in_files_as_autograd_saves(tmp_path):
    """By PyTorch's own hooks: each storage once, all of them alive at the end."""
    model, x, kept = made("sequential"), torch.randn(8, 8), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), id):
        out = model(x).square().sum()
    expected = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)
    for how in ("backward", "dropped", "closed"):
        with offload_activations(tmp_path) as moved:
            out = model(x).square().sum()
        assert moved.bytes == on_disk(tmp_path) == expected
        assert moved.tensors == len(files(tmp_path))
        if how == "backward":
            out.backward()
        if how == "closed":
            moved.close()
            with pytest.raises(RuntimeError, match="Run the forward again"):
                out.backward()
        del out
        assert not left(tmp_path)


def test_ctrl_c_leaves_no_file_and_no_hook(tmp_path, monkeypatch):
    """Though the loss is kept, as a notebook keeps it in a variable or in the last traceback."""
    with pytest.raises(KeyboardInterrupt), offload_activations(tmp_path):
        loss = made("sequential")(torch.ones(4, 8)).sum()
        assert on_disk(tmp_path) > 0
        raise KeyboardInterrupt
    assert loss.requires_grad and not list(tmp_path.iterdir())
    assert saved_tensor_hooks() is None
    # In backward.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, optimizer, _ = prepare(small(), ALL)
    ids, seen = torch.randint(0, 64, (4, 8)), []
    batch = {"input_ids": ids, "labels": ids}

    def stop(grad):
        seen.append(files(tmp_path))
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.down_proj.weight.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        train_step(model, optimizer, batch, ALL)
    assert seen[0] and not list(tmp_path.iterdir())
    handle.remove()
    model.zero_grad()
    train_step(model, optimizer, batch, ALL)
    assert not list(tmp_path.iterdir())


def test_parameters_buffers_and_what_has_no_bytes_of_its_own_stay(tmp_path):
    frozen, head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    x = torch.randn(3, 8, requires_grad=True)
    with offload_activations(tmp_path) as moved:
        out = nn.functional.linear(frozen(x), head.weight) * head.weight[:3]
        nn.functional.linear(out, head.weight.T).sum().backward()
    # What two products with trained weights take, and the product that is multiplied.
    assert moved.bytes == 3 * 3 * 8 * 4
    model, x = nn.Module(), torch.randn(3, 3, requires_grad=True)
    model.register_buffer("scale", torch.randn(3, 3))
    sparse, empty = torch.eye(3).to_sparse(), torch.empty(0, 3, requires_grad=True)
    for given, moves in ((model, 0), (None, 1)):
        with offload_activations(tmp_path, model=given) as moved:
            loss = (x * model.scale).sum() + torch.sparse.mm(sparse, x).sum()
            loss = loss + (empty * empty).sum()
        assert moved.tensors == moves
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, model.scale + 1)


def filled_last(weight, x):
    return F.rrelu(x @ weight, training=True).sum()


def filled_and_used(weight, x):
    return F.rrelu(x @ weight, training=True).exp().sum()


def with_a_slope(weight, x):
    """Zeros that stand for no memory stay."""
    y, along = torch.func.jvp(lambda x: (x @ weight).tanh(), (x,), (torch.ones_like(x),))
    return (y + along).sum()


@pytest.mark.parametrize("loss_of", [filled_last, filled_and_used, with_a_slope])
def test_what_is_filled_after_it_was_saved_and_what_has_no_memory_come_back(loss_of):
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(50, 8)
    grads = []
    for context in (nullcontext(), offload_activations()):
        torch.manual_seed(0)
        with context:
            loss = loss_of(weight, x)
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert torch.equal(*grads)


def test_what_stays_goes_with_its_last_name_and_waits_for_no_collection(tmp_path):
    x = torch.ones(1000, requires_grad=True)
    with MemoryTracker(live=False) as tracker, offload_activations(tmp_path, what="boundaries"):
        y = x.exp()  # a node that keeps its own result
        gc.disable()
        try:
            before = tracker.current.total
            del y
            assert before - tracker.current.total == x.nbytes
        finally:
            gc.enable()


def test_one_storage_moves_once_and_again_when_it_has_changed(tmp_path):
    x = torch.randn(6, 8, requires_grad=True)
    with offload_activations(tmp_path) as moved:
        y = x * 1
        parts = [part.sin() for part in y.split(2)]  # three views of one storage
        assert (moved.bytes, moved.tensors) == (6 * 8 * 4, 1)
        total = sum(part.sum() for part in parts)
        kept = y.detach().clone()
        y.detach().mul_(2)
        total = total + y.exp().sum()  # exp keeps its own result
        total = total + y.cos().sum()
        assert moved.tensors == 3
    total.backward()
    assert torch.allclose(x.grad, kept.cos() + (2 * kept).exp() - (2 * kept).sin())


def test_what_stays_and_is_changed_before_its_backward_is_refused_as_autograd_does(tmp_path):
    model, x = made("sequential"), torch.randn(8, 8)
    with offload_activations(tmp_path, model=model):
        out = model(x).square().sum()
    with torch.no_grad():
        model[2][1].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(8, 12\).*changed in place since the forward"):
        out.backward()
    del out
    assert not left(tmp_path)


class SavedAndScaled(torch.autograd.Function):
    """Keeps the tensor and a part of it, and returns in backward what it has changed in place."""

    @staticmethod
    def forward(ctx, h, part):
        ctx.save_for_backward(h, part)
        return h.clone()

    @staticmethod
    def backward(ctx, d):
        whole, tail = ctx.saved_tensors
        assert whole.untyped_storage().data_ptr() == tail.untyped_storage().data_ptr()
        return whole.mul_(d), None


def test_one_copy_comes_back_for_all_that_need_it_while_it_is_alive(tmp_path):
    x, n = torch.randn(1000, requires_grad=True), 4000
    with MemoryTracker(live=False) as tracker, offload_activations(tmp_path) as moved:
        h = x * 1
        product, sine = h * h, h[10:].sin()
        del h
        assert (moved.bytes, moved.tensors) == (n, 1)
        part = sine.grad_fn._saved_self
        assert product.grad_fn._saved_self[10:].data_ptr() == part.data_ptr()
        assert torch.equal(part, x[10:])
        del part
        tracker.window_peak()
        torch.autograd.backward((product, sine), (torch.ones(1000), torch.ones(990)))
        # The two results, and h.
        assert tracker.window_peak().by_category["activations"] <= 3 * n
    assert torch.allclose(x.grad[10:], (2 * x + x.cos())[10:])


def test_a_copy_that_backward_has_changed_is_read_again(tmp_path):
    x, found = torch.randn(5, requires_grad=True), []
    with offload_activations(tmp_path):
        h = x * 1
        out = (h * h + 3 * SavedAndScaled.apply(h, h[1:])).sum()
    for _ in range(3):  # what was returned is alive, and its storage with it
        found += torch.autograd.grad(out, x, retain_graph=True)
    assert all(torch.allclose(grad, 5 * x) for grad in found)


class Squared(nn.Module):
    """Products of a tensor with itself, saved twice by one node and again by others."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        h = x * self.scale
        return (h * h * h.sin()).mean()


def test_predicted_and_tracked_are_what_the_allocator_gives_out():
    recipe, model, batch = Recipe(offload="activations"), Squared(), torch.randn(64, 16)
    predicted = predict(model, batch=batch, recipe=recipe, target="cpu")
    tracker = tracked(model, batch, recipe)
    assert_same(predicted, tracker)
    run = prepare(model, recipe)
    taken = allocator_peak(lambda: train_step(run.model, run.optimizer, batch, recipe), before=2)
    # the last step's loss
    assert tracker.peak.total - tracker.current.total == pytest.approx(taken, abs=16)
