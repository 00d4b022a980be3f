"""Lesson 05's exercise on a model in plain PyTorch: which technique leaves a step with dropout as
it is?
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ....techniques.checkpointing import checkpoint_layers
from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, Seen, measure
from ..shared.residual_net import labelled_rows, residual_net
from ..shared.settings import flat

RANDOM_CARD = "1.1 MiB"
ROWS = 64


def random_setting():
    """A residual net with dropout and drop path in training mode, its SGD, and 64 labelled rows."""
    model = residual_net(blocks=12, width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return model, optimizer, labelled_rows(ROWS, width=32)


def same_step(model, optimizer, batch) -> float:
    """One update on all rows of ``batch``, with a checkpoint on each block; the loss."""
    with checkpoint_layers(model.blocks, every=1):
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _update(model, optimizer, batch, *, pieces=1, every=None, mode=True, step=True, zero=True):
    """A wrong ``same_step``: in pieces, with or without checkpoints, in another mode."""
    model.train(mode)
    rows = len(batch["x"]) // pieces
    total = 0.0
    for start in range(0, len(batch["x"]), rows):
        part = slice(start, start + rows)
        loss = F.cross_entropy(model(batch["x"][part]), batch["labels"][part]) / pieces
        loss.backward()
        total += loss.item()
    if step:
        optimizer.step()
    if zero:
        optimizer.zero_grad()
    model.train()
    return total


def _other_numbers(model, optimizer, batch):
    """Checkpoints whose second run draws other random numbers."""
    x = batch["x"]
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    loss = F.cross_entropy(model.head(x), batch["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _seeded(model, optimizer, batch):
    torch.default_generator.manual_seed(0)
    with checkpoint_layers(model.blocks, every=1):
        return _update(model, optimizer, batch)


def _left_on(model, optimizer, batch):
    checkpoint_layers(model.blocks, every=1)
    return _update(model, optimizer, batch)


_EVALUATION = "the model is in evaluation mode: then it trains without dropout and drop path."
_PIECES = (
    "this is another update: each piece is a forward of its own, and draws other numbers for "
    "dropout and drop path. Keep all rows together."
)


def _observe(candidate):
    model, optimizer, batch = random_setting()
    before = flat(model.parameters())
    rows: list[int] = []  # of each forward of the head
    modes: list[bool] = []
    dtypes: list[torch.dtype] = []
    random_states: list[torch.Tensor] = []  # after the blocks have drawn their numbers

    def note(head, args, outputs):
        rows.append(len(outputs))
        dtypes.append(outputs.dtype)
        random_states.append(torch.get_rng_state())
        modes.append(all(module.training for module in model.modules()))

    def run():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return candidate(model, optimizer, batch)

    hook = model.head.register_forward_hook(note)
    try:
        measured = measure(run, budget=RANDOM_CARD, model=model, optimizer=optimizer)
    finally:
        hook.remove()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    after = flat(model.parameters())
    cases = {
        "the card": measured,
        "the update": {
            "change of the weights": after - before,
            # zero_grad(set_to_none=False) leaves zeros, and that is right too.
            "gradients that are left": sum(bool(gradient.any()) for gradient in gradients),
        },
        "the loss": {
            "has a graph (1 is yes)": int(getattr(measured.value, "requires_grad", False))
        },
    }
    head = sum(p.numel() for p in model.head.parameters())
    return Seen(
        cases,
        rows=rows,
        modes=modes,
        dtypes=dtypes,
        random=random_states,
        # model.head is the last part of the model.
        only_head_moved=torch.equal(after[:-head], before[:-head]),
    )


def _why_rows(rows: list[int]) -> str | None:
    """What is said of the rows of each forward of the head."""
    if not rows:
        return (
            "model.head never runs: model(x) ends with it, so what the blocks return goes through "
            "model.head(x)."
        )
    if sum(rows) < ROWS:
        return f"the update sees {sum(rows)} of the {ROWS} rows: it must be one of all rows."
    if any(n < ROWS for n in rows):
        return _PIECES
    return None


def _explain(got, expected):
    rows = got.notes["rows"]
    if not all(got.notes["modes"]):
        return _EVALUATION
    says = _why_rows(rows)
    if says:
        return says
    if got["the update"]["gradients that are left"]:
        return "gradients are left behind: call optimizer.zero_grad() after the step."
    moved, right = (seen["the update"]["change of the weights"] for seen in (got, expected))
    if not moved.any():
        return "the weights have not moved: call optimizer.step() once, after backward."
    if got.notes["only_head_moved"]:
        return (
            "only the head's weights have moved: does a gradient reach the blocks? A checkpoint "
            "with use_reentrant=True gives none where its input needs no gradient."
        )
    times = (moved.norm() / right.norm()).item()
    same_direction = torch.cosine_similarity(moved, right, dim=0).item() > 0.999
    if same_direction and times and abs(times - 1) > 0.01:
        return (
            f"the weights move {times:.3g} times as far as they should: take one step, with the "
            "mean loss as it is."
        )
    return _why_loss(got, expected)


def _why_loss(got, expected) -> str | None:
    """What is said of one forward of all rows in training mode."""
    loss, right = got["the card"].value, expected["the card"].value
    if loss is None:
        return "return the loss, a float."
    if got["the loss"]["has a graph (1 is yes)"]:
        return "the loss is a tensor that keeps its graph: return a float, loss.item()."
    if difference(loss, right):
        return _why_another_loss(got, expected)
    if got["the card"].over:
        return (
            "the step is right, and too large for the card: put a checkpoint on each block by "
            "itself, so that one block at a time has its activations."
        )
    return None


def _why_another_loss(got, expected) -> str | None:
    """What is said of a loss, a number, that is not the step's."""
    if not difference(got["the update"], expected["the update"]):
        return (
            "the update is right, but the loss is another one: return the loss of the forward that "
            "is trained, as it was before the update."
        )
    narrow = [dtype for dtype in got.notes["dtypes"] if dtype != torch.float32]
    if narrow:
        return (
            f"forward computes in {str(narrow[0]).removeprefix('torch.')}, which rounds more than "
            "the plain step does: leave the dtypes as they are."
        )
    mine, right = (seen.notes["random"][0] for seen in (got, expected))
    if not torch.equal(mine, right):
        return (
            "the forward draws other numbers for dropout and drop path than the plain step does: "
            "set no seed, and draw nothing before it."
        )
    return None


EXERCISES = (
    Exercise(
        id="5.10",
        title="the same step on a smaller card",
        difficulty=2,
        minutes=6,
        trains="choosing between pieces and checkpoints where layers draw random numbers",
        reference=same_step,
        observe=_observe,
        explain=_explain,
        changes=("model", "optimizer"),
        mistakes=(
            Mistake(
                "as it was",
                _update,
                (
                    "the step is right, and too large for the card: what forward keeps of 12 "
                    "blocks has to be smaller."
                ),
            ),
            Mistake(
                "in four pieces",
                partial(_update, pieces=4),
                _PIECES,
            ),
            Mistake(
                "in pieces of one row",
                partial(_update, pieces=64),
                _PIECES,
            ),
            Mistake(
                "in evaluation mode",
                partial(_update, mode=False),
                _EVALUATION,
            ),
            Mistake(
                "other numbers in the second run",
                _other_numbers,
                (
                    "the second run of a block draws other numbers than the first: leave "
                    "preserve_rng_state as it is."
                ),
            ),
            Mistake(
                "seeded",
                _seeded,
                (
                    "this sets a seed of its own, so dropout and drop path draw other numbers than "
                    "the plain step does: set no seed."
                ),
            ),
            Mistake(
                "no update",
                partial(_update, step=False),
                "the weights have not moved: call optimizer.step() once, after backward.",
            ),
        ),
    ),
)
