"""Lesson 06's exercises on models that nobody prepared: a classifier written by hand, and a T5,
each in its own loop.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ....names import IGNORED
from ....techniques.accumulation import accumulate_gradients, split
from ....techniques.checkpointing import checkpoint_layers
from ....techniques.losses import count_targets
from ...judge.compare import difference, plain
from ...judge.exercise import Exercise, Mistake, Seen, measure
from ..shared.gradient_weights import (
    ANOTHER_STEP,
    NO_STEP,
    parts_of,
    weights_of,
    why,
    why_clipped,
)
from ..shared.settings import flat, gradients_of, quietly, with_large_gradients

CLASSIFIER_CARD, T5_CARD = "22 MiB", "10.5 MB"


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Images (batch, 3, 32, 32) to 10 scores: 64 patches each, eight blocks, and a mean."""

    def __init__(self, width: int = 64, depth: int = 8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, 64, width)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def classifier_setting() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """The classifier after a first step, its AdamW, 30 images and their labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model, images = Classifier(), torch.randn(30, 3, 32, 32)
    return model, _adamw(model), images, torch.arange(30) % 10


def t5_setting() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A small T5 after a first step, its AdamW, and 16 pairs of 96 tokens and up to 32, the rest of
    the labels -100.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64,
        d_kv=16,
        d_ff=256,
        num_layers=3,
        num_heads=4,
        vocab_size=512,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = T5ForConditionalGeneration(config).train()
        ids, labels = torch.randint(1, 512, (16, 96)), torch.randint(1, 512, (16, 32))
    lengths = torch.tensor([32 - 2 * row for row in range(16)])
    labels = labels.masked_fill(torch.arange(32) >= lengths[:, None], IGNORED)
    return model, _adamw(model), {"input_ids": ids, "labels": labels}


def _steep_classifier():
    """``classifier_setting``, with a longer gradient."""
    model, *rest = classifier_setting()
    with_large_gradients(model.head, 30)
    return model, *rest


def _steep_t5():
    """``t5_setting``, with a longer gradient."""
    model, *rest = t5_setting()
    with_large_gradients(model.lm_head, 30)
    return model, *rest


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With its states in place: a step on gradients of zero, without weight decay, moves
    nothing.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def train_small(model, optimizer, images, labels) -> float:
    """One update on all images, in micro-batches; the mean loss."""

    def loss_and_count(micro):
        return F.cross_entropy(model(micro[0]), micro[1], reduction="sum"), len(micro[1])

    found = accumulate_gradients(
        split((images, labels), 8), loss_and_count, total_items=len(labels)
    )
    optimizer.step()
    optimizer.zero_grad()
    return found.loss


def train_t5(model, optimizer, batch) -> float:
    """One update on all pairs, checkpointed and in micro-batches; the mean loss over all target
    tokens.
    """

    def targets(micro):
        return int((micro["labels"] != IGNORED).sum())

    def mean_and_count(micro):
        return model(**micro).loss, targets(micro)

    micro_batches = list(split(batch, 4))
    with checkpoint_layers(model, 1):
        found = accumulate_gradients(
            micro_batches, mean_and_count, reduction="mean", count_items=targets
        )
    optimizer.step()
    optimizer.zero_grad()
    return found.loss


def _rows(batch) -> torch.Tensor:
    return batch["labels"] if isinstance(batch, dict) else batch[1]


def _mean(model, batch) -> torch.Tensor:
    return (
        model(**batch).loss
        if isinstance(batch, dict)
        else F.cross_entropy(model(batch[0]), batch[1])
    )


def _items(batch) -> int:
    return int((_rows(batch) != IGNORED).sum())


def _loop(
    model, optimizer, *batch, size, every=None, share=None, steps=False, zero=True, once=False
) -> float:
    """The loop that most people write, with one thing or another wrong."""
    batch = batch[0] if isinstance(batch[0], dict) else batch
    handle = None
    if every:
        handle = checkpoint_layers(model if every == 1 else model.encoder.block, 1)
    micro_batches, total, kept = list(split(batch, size)), 0.0, []
    for micro in micro_batches:
        weight = (
            _items(micro) / _items(batch)
            if share is None
            else share(micro, batch, len(micro_batches))
        )
        loss = _mean(model, micro) * weight
        kept.append(loss) if once else loss.backward()
        total += loss.item()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
    if once:
        sum(kept).backward()
    if handle is not None:
        handle.remove()
    if not steps:
        optimizer.step()
    if not steps and zero:
        optimizer.zero_grad()
    return total


class _Notes:
    """What passes through a model: rows of each forward that is no recomputation, and which lists
    of layers ran again.

    ``forwards``: the rows of each forward with a graph before the first backward.
    ``was_training``: whether each forward with a graph was in training mode.
    """

    def __init__(self, model: nn.Module):
        self.rows: list[int] = []
        self.forwards: list[int] = []
        self.backwards = 0
        self.was_training = True
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
            and not any(part.isdigit() for part in name.split("."))
        }
        self.runs = dict.fromkeys(lists, 0)
        for name, layers in lists.items():
            inner = next(m for m in layers[1].modules() if not list(m.children()))
            inner.register_forward_hook(lambda *_, name=name: self._ran(name))
        model.register_forward_pre_hook(self._forward, with_kwargs=True)
        # The last parameter is in no checkpointed layer: its gradient comes once for each backward.
        list(model.parameters())[-1].register_hook(self._backward)

    def _ran(self, name: str) -> None:
        self.runs[name] += 1

    def _forward(self, module, args, kwargs) -> None:
        rows = len(next(iter([*args, *kwargs.values()])))
        self.rows.append(rows)
        if torch.is_grad_enabled():
            self.was_training = self.was_training and module.training
            if not self.backwards:
                self.forwards.append(rows)

    def _backward(self, gradient) -> None:
        self.backwards += 1

    def all_before_one_backward(self, everything: int) -> bool:
        """Whether all rows, in several pieces, went through before the only backward."""
        in_pieces = len(self.forwards) > 1 and sum(self.forwards) == everything
        return in_pieces and self.backwards == 1

    @property
    def kept(self) -> list[str]:
        """The lists whose layers did not run again."""
        return [name for name, runs in self.runs.items() if runs <= len(self.rows)]


def _observe(candidate, setting, card, fits=0):
    """``fits``: so many rows at a time fit without checkpoints."""
    model, optimizer, *batch = setting()
    given = flat(model.parameters())
    notes, updates = _Notes(model), []
    optimizer.register_step_post_hook(lambda *_: updates.append(None))
    measured = measure(
        lambda: candidate(model, optimizer, *batch), budget=card, model=model, optimizer=optimizer
    )
    rows, kept = list(notes.rows), notes.kept
    once = notes.all_before_one_backward(len(_rows(batch[0] if len(batch) == 1 else batch)))
    was_training = notes.was_training
    moved = not torch.equal(given, flat(model.parameters()))
    # Adam's first moment is a tenth of the first gradient. A copy of the gradient itself would lie
    # on the card.
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    found = {
        "the update": {
            "gradient": 10 * flat(moments),
            "loss": measured.value,
            "updates": len(updates),
        },
        "the card": replace(measured, value=None),
        "afterwards": {"gradients left (1 is yes)": int(bool(gradients_of(model).any()))},
    }
    optimizer.zero_grad()
    try:
        candidate(model, optimizer, *batch)
    except RuntimeError as error:
        raise RuntimeError(f"the first update works, but a second call fails: {error}") from error
    return Seen(
        found,
        rows=rows,
        kept=kept,
        setting=setting,
        moved=moved,
        once=once,
        was_training=was_training,
        fits=fits,
    )


@quietly
def _explain(got, expected):
    mine, right = got["the update"], expected["the update"]
    rows = got.notes["rows"]
    model, _, *batch = got.notes["setting"]()
    batch = batch[0] if isinstance(batch[0], dict) else batch
    everything = len(_rows(batch))
    if not mine["updates"]:
        return ANOTHER_STEP if got.notes["moved"] else NO_STEP
    if mine["updates"] > 1:
        return (
            f"{mine['updates']} updates are made with this batch: the exercise asks for one, on "
            f"all {everything} rows."
        )
    if sum(rows) < everything:
        return (
            f"{sum(rows)} of {everything} rows go through the model: the update is for all of them."
        )
    if difference(mine["gradient"], right["gradient"], TOLERANCE):
        return _why_gradient(mine["gradient"], right["gradient"], model, batch, rows)
    if not isinstance(plain(mine["loss"]), (int, float)) or difference(
        mine["loss"], right["loss"], TOLERANCE
    ):
        return "the gradient is right; return the mean loss over the whole batch, a float."
    if not got["the card"].over:
        return "the update is right, but its gradients are still there: zero_grad() is missing."
    return _why_over(rows, everything, got.notes)


def _why_gradient(gradient, right, model, batch, rows) -> str | None:
    everything = len(_rows(batch))
    pairs = 2 * len(rows)  # len of each micro-batch, where it is a pair (images, labels)
    as_pairs = everything / pairs * right
    if not isinstance(batch, dict) and not difference(gradient, as_pairs, 1e-3):
        return (
            f"the sum is divided by {pairs} (the len of a pair of images and labels is 2, "
            f"whatever is in them): divide by the number of all images, {everything}."
        )
    says = why_clipped(gradient, right) or _why(gradient, model, batch, rows)
    # bf16 under autocast is 2 % off here.
    if not says and not difference(gradient, right, 0.05):
        return (
            "the gradient is the right one within 5 % of its largest number, and the exercise "
            "asks for the same update. 16-bit numbers, as under autocast, are not exact enough."
        )
    return says


def _why_over(rows: list[int], everything: int, notes) -> str:
    """What is said of a right update that needs more bytes than the card has."""
    kept = notes["kept"]
    if notes["once"]:
        return (
            "backward runs once, after all forwards: until then the graph of every piece is kept. "
            "Call backward on each piece before the next forward."
        )
    if kept and not notes["was_training"]:
        return (
            "the model is in evaluation mode, where checkpoints do nothing: every layer keeps its "
            "activations. Leave the model in training mode."
        )
    return _too_many(rows, kept, everything, notes["fits"])


def _too_many(rows: list[int], kept: list[str], everything: int, fits: int) -> str:
    most = max(rows)
    many = f"{most} row" if most == 1 else f"{most} rows"
    if most <= fits:
        return (
            f"pieces of {many} fit on this card one after another, so something of each is kept "
            "for the next: a graph, or what the model returns; keep only loss.item()."
        )
    if (kept and not any(name.startswith(("encoder", "decoder")) for name in kept)) or len(
        kept
    ) == 2:
        if most == everything:
            return (
                f"all {everything} rows go through at once, and every layer keeps its "
                "activations: nothing is made smaller yet."
            )
        return f"{many} at a time are still too many where every layer keeps its activations."
    if kept:
        return (
            f"the layers in {kept[0]} keep their activations: an encoder and a decoder are two "
            "lists, and each needs its checkpoints."
        )
    if most == everything:
        return (
            "the checkpoints are there, but all rows go through at once: that is still too "
            "much; use smaller segments, or fewer rows at a time."
        )
    return (
        f"{many} at a time are still too much, even with checkpoints: use fewer rows, or "
        "look for what is kept from one micro-batch to the next."
    )


def _why(gradient, model, batch, rows) -> str | None:
    def sum_and_count(micro):
        return _mean(model, micro) * _items(micro), _items(micro)

    starts = [sum(rows[:i]) for i in range(len(rows))]
    pieces = [
        next(iter(split(_cut(batch, start), size)))
        for start, size in zip(starts, rows, strict=True)
    ]
    parts, counts = parts_of(sum_and_count, pieces, list(model.parameters()))
    weights = weights_of(gradient, parts, 1e-3)
    if weights is None:
        return None
    for sizes, says in (
        (
            [_rows(p).numel() for p in pieces],
            (
                "padding has weight here: a micro-batch's share is its target tokens, not all of "
                "its labels."
            ),
        ),
        ([int((_rows(p)[..., 1:] != IGNORED).sum()) for p in pieces], _SHIFTED),
    ):
        shares = [
            w * n / max(size, 1) * sum(sizes)
            for w, n, size in zip(weights, counts, sizes, strict=True)
        ]
        # Where all pieces have one size, a share of sizes is 1 / K, and `why` says that.
        alike = sizes == counts or len(set(sizes)) == 1
        if not alike and all(abs(share - 1) < 3e-3 for share in shares):
            return says
    return why(weights, counts)


def _cut(batch, start: int):
    return (
        {n: t[start:] for n, t in batch.items()}
        if isinstance(batch, dict)
        else tuple(t[start:] for t in batch)
    )


TOLERANCE = 5e-4  # of the gradients and the loss
_MEANS = {"share": lambda micro, batch, k: 1 / k}
_ADDED = {"share": lambda micro, batch, k: 1.0}
_SHIFTED = (
    "position 0 of each row is left out of the counts: a T5 shifts its decoder's inputs, "
    "not its labels; count all labels except -100."
)
_LEFT_ON = (
    "are checkpointed already",
    (
        "the checkpoints stay on after the call, and a second call puts more on top of them: use "
        "checkpoint_layers in a `with` block, or call .remove() at the end."
    ),
)
SAME_WEIGHT = "every micro-batch has the same weight in the gradient (loss / K, a mean of means)"


EXERCISES = (
    Exercise(
        id="6.3",
        title="a classifier of your own, halved",
        difficulty=2,
        minutes=5,
        trains="putting a technique into a loop of your own, and leaving the update what it was",
        reference=train_small,
        observe=partial(_observe, setting=_steep_classifier, card=CLASSIFIER_CARD, fits=13),
        explain=_explain,
        tolerance=TOLERANCE,
        changes=("model.train", "model.config", "model.hook"),
        raises=(_LEFT_ON,),
        mistakes=(
            Mistake(
                "as it was",
                partial(_loop, size=30),
                (
                    "all 30 rows go through at once, and every layer keeps its activations: "
                    "nothing is made smaller yet. Checkpoints do nothing in evaluation mode."
                ),
            ),
            Mistake(
                "halves",
                partial(_loop, size=15),
                (
                    "two halves are not half the memory: weights, gradients and states stay, and "
                    "the first half's gradients stay in memory; cut further."
                ),
            ),
            Mistake(
                "by K",
                partial(_loop, size=8, **_MEANS),
                (
                    f"{SAME_WEIGHT}: the last one has 6 images, and the others have 8; weight each "
                    "by its images."
                ),
            ),
            Mistake(
                "added up",
                partial(_loop, size=8, **_ADDED),
                (
                    "this adds up the means of the micro-batches: with 4 of them the gradient is "
                    "about 4 times too large."
                ),
            ),
            Mistake(
                "steps each",
                partial(_loop, size=8, steps=True),
                "4 updates are made with this batch: the exercise asks for one, on all 30 rows.",
            ),
            Mistake(
                "one backward",
                partial(_loop, size=8, once=True),
                (
                    "one backward at the end keeps every micro-batch's graph until then: that is "
                    "the full batch again."
                ),
            ),
        ),
    ),
    Exercise(
        id="6.4",
        title="a T5, from nothing",
        difficulty=3,
        minutes=8,
        trains="the whole way on a model that no lesson has shown",
        reference=train_t5,
        observe=quietly(partial(_observe, setting=_steep_t5, card=T5_CARD, fits=1)),
        explain=_explain,
        tolerance=TOLERANCE,
        changes=("model.train", "model.config", "model.hook"),
        raises=(_LEFT_ON,),
        mistakes=(
            Mistake(
                "as it was",
                partial(_loop, size=16),
                (
                    "all 16 rows go through at once, and every layer keeps its activations: "
                    "nothing is made smaller yet. Checkpoints do nothing in evaluation mode."
                ),
            ),
            Mistake(
                "checkpoints alone",
                partial(_loop, size=16, every=1),
                (
                    "the checkpoints are there, but all rows go through at once: what a layer "
                    "needs while it runs, and the logits, grow with the rows; cut the batch as "
                    "well."
                ),
            ),
            Mistake(
                "pieces alone",
                partial(_loop, size=4),
                "4 rows at a time are still too many where every layer keeps its activations.",
            ),
            Mistake(
                "by K",
                partial(_loop, size=4, every=1, **_MEANS),
                (
                    f"{SAME_WEIGHT}: rows have unequal numbers of target tokens; weight each by "
                    "its own."
                ),
            ),
            Mistake(
                "shifted",
                partial(
                    _loop,
                    size=4,
                    every=1,
                    share=lambda m, b, k: count_targets(m["labels"]) / count_targets(b["labels"]),
                ),
                _SHIFTED,
            ),
            Mistake(
                "steps each",
                partial(_loop, size=4, every=1, steps=True),
                "4 updates are made with this batch: the exercise asks for one, on all 16 rows.",
            ),
        ),
    ),
)
