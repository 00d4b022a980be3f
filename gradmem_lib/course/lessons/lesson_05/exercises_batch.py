"""Lesson 05's exercises about a whole run: its batch on one card, and its schedule."""

from __future__ import annotations

import math
import re

import torch

from ...judge.compare import plain
from ...judge.exercise import Exercise, Mistake, Seen
from ...material import models
from ..shared.settings import flat, gradients_of, quietly

TRAIN, STEPS, EVAL = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
)


def on_one_card(arguments: dict, gpus: int, fits: int) -> dict:
    """``arguments`` of a run on ``gpus`` cards, for one card that takes at most ``fits`` rows at a
    time.
    """
    batch = arguments[TRAIN] * arguments[STEPS] * gpus
    micro = max(m for m in range(1, fits + 1) if batch % m == 0)
    return arguments | {TRAIN: micro, STEPS: batch // micro, EVAL: micro}


def _one_card_uneven(divide):
    def wrong(arguments, gpus, fits):
        batch = arguments[TRAIN] * arguments[STEPS] * gpus
        return arguments | {TRAIN: fits, STEPS: divide(batch / fits), EVAL: fits}

    return wrong


def _observe_one_card(candidate):
    found = {}
    for train, steps, gpus, fits in (
        (4, 4, 8, 2),
        (8, 1, 4, 8),
        (12, 2, 1, 7),
        (15, 3, 2, 11),
        (7, 5, 3, 9),
        (7, 1, 1, 4),  # one row at a time alone divides this batch
        (2, 8, 2, 16),  # more rows fit than a GPU of the run had
    ):
        given = {
            TRAIN: train,
            STEPS: steps,
            EVAL: 32,
            "max_steps": 600,
            "warmup_steps": 60,
            "learning_rate": 2e-5,
        }
        found[f"{train} rows x {steps} x {gpus} GPUs, {fits} fit"] = candidate(given, gpus, fits)
    return found


_SCALED = {
    "max_steps": "it counts optimizer steps, and there are as many as before",
    "warmup_steps": "it counts optimizer steps, and there are as many as before",
    "learning_rate": "it goes with the global batch, which is the same",
}


def _explain_one_card(got, expected):
    case = next(case for case in expected if got[case] != expected[case])
    given, right = plain(got[case]), expected[case]
    if not isinstance(given, dict):
        return (
            "return a dict with all fields: arguments | {...}, with new numbers for three of them."
        )
    if lost := [name for name in right if name not in given]:
        return f"{lost[0]} is gone: return all fields, arguments | {{...}}."
    if new := [name for name in given if name not in right]:
        return (
            f"{new[0]!r} is no field of these arguments: the new numbers go under {TRAIN}, "
            f"{STEPS} and {EVAL}."
        )
    ours = [plain(given[name]) for name in (TRAIN, STEPS)]
    if all(isinstance(number, (int, float)) for number in ours):
        theirs = [right[name] for name in (TRAIN, STEPS)]
        fits, gpus = (int(re.search(pattern, case)[1]) for pattern in (r"(\d+) fit", r"(\d+) GPU"))
        if says := _why_rows(ours, theirs, gpus, fits):
            return says
    changed = [
        f"{name} must stay as it was: {why}."
        for name, why in _SCALED.items()
        if given[name] != right[name]
    ]
    if changed:
        return changed[0]
    rows = plain(given[EVAL])
    if isinstance(rows, (int, float)) and rows != right[EVAL]:
        return (
            f"training is right; an evaluation takes {rows:g} rows at a time, but should take "
            f"the rows of a micro-batch, {right[EVAL]}."
        )
    return None


def _why_rows(ours, theirs, gpus, fits) -> str | None:
    rows, wanted = math.prod(ours), math.prod(theirs)
    if ours == theirs[::-1] != theirs and ours[0] > fits:
        return (
            f"the two are swapped: {TRAIN} is the number of rows at a time, and {STEPS} is the "
            "number of micro-batches."
        )
    if rows * gpus == wanted and gpus > 1:
        return (
            "this forgets the other GPUs: each of them had rows of its own, and one card now "
            "has to work through them all."
        )
    if rows != wanted:
        return (
            f"your update has {rows:g} rows, but the run's update had {wanted}: the global "
            "batch has changed."
        )
    if ours[1] != int(ours[1]):
        return (
            f"{rows:g} rows cannot be cut into whole micro-batches of {ours[0]:g}: take the "
            "largest number that fits and divides them."
        )
    if ours[0] > fits:
        return (
            f"the batch is right, but {ours[0]:g} rows at a time do not fit: the card takes {fits}."
        )
    if ours[0] < theirs[0]:
        return (
            "the batch is right, but more rows at a time would fit: take the largest number "
            "that fits and divides it, for as few micro-batches as possible."
        )
    return None


def train_epoch(optimizer, micro_batches, window, warmup, accumulate) -> None:
    """An update after every ``window`` micro-batches and one for the rest; the rate climbs for the
    first part ``warmup`` of the updates, then falls linearly.
    """
    from transformers import get_linear_schedule_with_warmup

    updates = math.ceil(len(micro_batches) / window)
    schedule = get_linear_schedule_with_warmup(optimizer, round(warmup * updates), updates)
    for start in range(0, len(micro_batches), window):
        accumulate(micro_batches[start : start + window])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _epoch(warm=None, total=None, *, per_micro=False, first=False):
    """A wrong ``train_epoch``: of what the warm-up is a part, how long the schedule is, both from
    (micro-batches, window).
    """

    def wrong(optimizer, micro_batches, window, warmup, accumulate):
        from transformers import get_linear_schedule_with_warmup

        n = len(micro_batches)
        steps, length = ((f or _updates)(n, window) for f in (warm, total))
        schedule = get_linear_schedule_with_warmup(
            optimizer, round(warmup * steps) if warm is not _one else warmup, length
        )
        for start in range(0, n, window):
            held = micro_batches[start : start + window]
            accumulate(held)
            if first:
                schedule.step()
            optimizer.step()
            for _ in held if per_micro else [0] * (not first):
                schedule.step()
            optimizer.zero_grad()

    return wrong


def _updates(n, k):
    return math.ceil(n / k)


def _micro(n, k):
    return n


def _one(n, k):
    return 1


def _whole_windows(n, k):
    return n // k


@quietly
def _observe_schedule(candidate):
    found, notes = {}, {}
    # Parts of 6 updates, 5 whole windows and 21 micro-batches: rounded or cut off, the same.
    for n, window, warmup in ((40, 4, 0.2), (21, 4, 0.5)):
        model = models.tiny_llama(layers=1, hidden=8, heads=2, intermediate=8, vocab=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        watch = _Updates(model, optimizer)
        ids = torch.randint(0, 16, (n, 4), generator=torch.Generator().manual_seed(2))
        candidate(optimizer, list(ids), window, warmup, watch.accumulate)
        name = f"{n} micro-batches, window {window}, warmup {warmup}"
        found[name] = {
            "micro-batches of each update": [sum(held) for held, *_ in watch.updates],
            "learning rate of each update": torch.tensor([rate for _, rate, _ in watch.updates]),
            "calls of accumulate for each update": [len(held) for held, *_ in watch.updates],
            "weights afterwards": flat(model.parameters()),
        }
        notes[name] = watch
    return Seen(found, watched=notes)


class _Updates:
    """Each update of ``optimizer``: (micro-batches in each call of ``accumulate``, learning rate,
    whether a gradient was there).
    """

    def __init__(self, model, optimizer):
        self.model, self.held, self.updates, self.still_there, self.ever = model, [], [], 0, 0
        optimizer.register_step_pre_hook(self._step)

    def accumulate(self, some) -> None:
        if isinstance(some, torch.Tensor) and some.ndim == 1:
            raise TypeError("accumulate takes a list of micro-batches: this is one micro-batch.")
        self.still_there += bool(self.updates and not self.held and gradients_of(self.model).any())
        self.held.append(len(some))
        self.ever += len(some)
        ids = torch.stack(list(some))
        self.model(input_ids=ids, labels=ids).loss.backward()

    def _step(self, optimizer, *_) -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        self.updates.append((self.held, rate, bool(gradients_of(self.model).any())))
        self.held = []


def _explain_schedule(got, expected):
    for name, watch in got.notes["watched"].items():
        rates, right = (seen[name]["learning rate of each update"] for seen in (got, expected))
        if says := _why_updates(watch, len(right)) or _why_rates(rates, right):
            return says
        if watch.still_there:
            return (
                "the gradients of one update are still there in the next: optimizer.zero_grad() "
                "is missing."
            )
    return None


def _why_updates(watch, wanted: int) -> str | None:
    if not watch.updates:
        return (
            "the given optimizer makes no update (did you make another one, or never call step()?)."
        )
    if not watch.ever:
        return (
            "accumulate is never called: no micro-batch is read, and every update has an empty "
            "gradient."
        )
    held = [sizes for sizes, *_ in watch.updates]
    if not held[0]:
        return (
            "the optimizer steps before anything is accumulated: the order is accumulate, "
            "optimizer, schedule, zero."
        )
    if not any(there for *_, there in watch.updates):
        return (
            "every update finds its gradient empty: zero_grad() comes between accumulate and "
            "step, but belongs after the step."
        )
    if len(held) < wanted and sum(map(sum, held)) < watch.ever + 1 and len(held) == wanted - 1:
        return "the last micro-batches are dropped: a window that is not full needs an update too."
    if len(held) != wanted:
        return (
            f"the epoch makes {_counted(len(held))}, but should make {wanted}: one for every "
            "window, and one for the remaining micro-batches."
        )
    if max(map(len, held)) > 1:
        return (
            "accumulate is called for each micro-batch by itself, and adds up their means: pass "
            "the whole window, a list."
        )
    return None


def _counted(n: int) -> str:
    return f"{n} update{'s' * (n != 1)}"


_NEXT_RATE = (
    "each update has the learning rate of the next one, as if the schedule stepped before the "
    "optimizer: optimizer first, so that the first rate is used."
)


def _why_rates(rates, right) -> str | None:
    if len(rates) != len(right) or torch.allclose(rates, right):
        return None
    if (rates == rates[0]).all():
        return (
            "the schedule never steps: every update has the first learning rate, which is 0 "
            "with a warm-up."
        )
    # Each second rate, and 0 where the schedule is at its end.
    twice = torch.cat([right[::2], torch.zeros_like(right)])[: len(right)]
    if torch.allclose(rates, twice):
        return "the schedule steps twice for each update: it must step once."
    warm, wanted = (int(each.argmax()) for each in (rates, right))
    if rates[0] > 0 and not warm:
        return "there is no warm-up: the first update already has the whole learning rate."
    if torch.allclose(rates[:-1], right[1:]):
        return _NEXT_RATE
    if rates[0] > 0:
        return (
            f"the warm-up begins at {rates[0] / right.max():.3g} of the learning rate: it begins "
            "at 0, so the first update has a learning rate of 0."
        )
    if warm != wanted:
        return (
            f"the warm-up takes {_counted(warm)}, but should take {wanted}: the fraction "
            "`warmup` of all updates."
        )
    return _why_fall(rates, right, warm)


def _why_fall(rates: torch.Tensor, right: torch.Tensor, warm: int) -> str:
    """What is said of rates that are wrong after the warm-up."""
    if (rates[warm:] == rates[warm]).all():
        return (
            "after the warm-up the learning rate stays as it is: it must fall to 0, in a straight "
            "line."
        )
    if not _is_straight(rates[warm:]):
        return (
            "after the warm-up the learning rate does not fall in a straight line: take as much "
            "from it after each update, as get_linear_schedule_with_warmup does."
        )
    highest = (rates.max() / right.max()).item()
    if abs(highest - 1) > 0.01:
        return (
            f"the highest learning rate of an update is {highest:.3g} of the given one: the first "
            "update after the warm-up must have all of it."
        )
    if torch.allclose(rates[warm:], right[warm:]):
        return (
            "the warm-up does not climb in a straight line: add as much after each of its updates."
        )
    if rates[-1] > right[-1] * 1.01:
        return (
            "the schedule is too long: the epoch ends before the learning rate has fallen; the "
            "schedule's length is the number of updates."
        )
    if rates[-1] == 0:
        return (
            "the schedule ends before the epoch: the last update has a learning rate of 0, but "
            "should still have a small one. The schedule's length is the number of updates, and it "
            "steps once for each."
        )
    return "the learning rate falls too fast: the schedule's length is the number of updates."


def _is_straight(rates: torch.Tensor) -> bool:
    """Whether the rates, from the highest one on, fall by equal steps until they are zero."""
    falls = rates[:-1] - rates[1:]
    # Where the schedule ends between two updates, the last step before zero is smaller.
    falls = falls[: int((rates > 0).sum()) - 1]
    return bool(torch.allclose(falls, falls[:1].expand_as(falls), rtol=1e-3))


EXERCISES = (
    Exercise(
        id="5.1",
        title="the same batch on one card",
        difficulty=1,
        minutes=5,
        trains="rows, accumulation and GPUs, and what must not change with them",
        reference=on_one_card,
        observe=_observe_one_card,
        explain=_explain_one_card,
        mistakes=(
            Mistake(
                "accumulation left as it was",
                lambda a, gpus, fits: on_one_card(a, gpus, fits) | {STEPS: a[STEPS]},
                (
                    "the global batch has changed: fewer rows at a time with the same accumulation "
                    "make a smaller batch; rows x accumulation must stay what it was on all GPUs."
                ),
            ),
            Mistake(
                "GPUs forgotten",
                lambda a, gpus, fits: on_one_card(a, 1, fits),
                (
                    "this forgets the other GPUs: each of them had rows of its own, and one card "
                    "now has to work through them all."
                ),
            ),
            Mistake(
                "rounds down",
                _one_card_uneven(math.floor),
                (
                    "rows get lost: where the micro-batch does not divide the batch, take the "
                    "largest one that does and fits."
                ),
            ),
            Mistake(
                "rounds up",
                _one_card_uneven(math.ceil),
                (
                    "the batch has grown: where the micro-batch does not divide it, take the "
                    "largest one that does and fits."
                ),
            ),
            Mistake(
                "one row at a time",
                lambda a, gpus, fits: on_one_card(a, gpus, 1),
                (
                    "the batch is right, but one row at a time is slower than necessary: take as "
                    "many as fit."
                ),
            ),
            Mistake(
                "evaluation left as it was",
                lambda a, gpus, fits: on_one_card(a, gpus, fits) | {EVAL: a[EVAL]},
                (
                    "training fits, but the evaluation still takes the old number of rows at a "
                    "time: set per_device_eval_batch_size too."
                ),
            ),
        ),
    ),
    Exercise(
        id="5.3",
        title="a schedule in optimizer steps",
        difficulty=2,
        minutes=8,
        trains="counting updates, not micro-batches, in a loop that accumulates",
        reference=train_epoch,
        observe=_observe_schedule,
        explain=_explain_schedule,
        changes=("optimizer.lr",),
        mistakes=(
            Mistake(
                "a step for every micro-batch",
                _epoch(per_micro=True),
                (
                    "the schedule steps with every micro-batch: it ends after a part of the "
                    "updates, and the others have a learning rate of 0."
                ),
            ),
            Mistake(
                "everything in micro-batches",
                _epoch(_micro, _micro),
                (
                    "the schedule's length and warm-up are counted in micro-batches, but it steps "
                    "with the updates: the learning rate rises too slowly, and the epoch ends "
                    "before it has fallen."
                ),
            ),
            Mistake(
                "length in micro-batches",
                _epoch(total=_micro),
                (
                    "the schedule's length is counted in micro-batches, so the learning rate never "
                    "falls to its end: count updates."
                ),
            ),
            Mistake(
                "warm-up of a fraction",
                _epoch(_one),
                (
                    "the warm-up is passed as a fraction of 1, but it is counted in steps: "
                    "multiply it by the number of updates."
                ),
            ),
            Mistake(
                "schedule first",
                _epoch(first=True),
                _NEXT_RATE,
            ),
            Mistake(
                "last window not counted",
                _epoch(_whole_windows, _whole_windows),
                (
                    "the schedule's length leaves out the last update: a window that is not full "
                    "makes an update too, so round up."
                ),
            ),
        ),
    ),
)
