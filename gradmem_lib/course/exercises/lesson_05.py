"""Lesson 05's exercises about a whole run: its batch on one card, its schedule, its log, and a 7B's recipe."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch

from ...training.recipe import Recipe
from .. import models
from ..exercise import Exercise, Mistake
from .settings import quietly

TRAIN, STEPS, EVAL = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
)


def on_one_card(arguments: dict, gpus: int, fits: int) -> dict:
    """``arguments`` of a run on ``gpus`` cards, for one card that takes at most ``fits`` rows at a time."""
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
    for train, steps, gpus, fits in ((4, 4, 8, 2), (8, 1, 4, 8), (12, 2, 1, 7), (15, 3, 2, 11)):
        given = {
            TRAIN: train,
            STEPS: steps,
            EVAL: 32,
            "max_steps": 600,
            "warmup_steps": 60,
            "learning_rate": 2e-5,
        }
        found[f"{train} rows x {steps} x {gpus} GPUs, {fits} fit"] = candidate(given, gpus, fits)
    return found  # fmt: skip


_SCALED = {
    "max_steps": "it counts optimizer steps, and there are as many as before",
    "warmup_steps": "it counts optimizer steps, and there are as many as before",
    "learning_rate": "it goes with the global batch, which is the same",
}


def _explain_one_card(got, expected):
    case = next(case for case in expected if got[case] != expected[case])
    given, right = got[case], expected[case]
    if not isinstance(given, dict):
        return None
    if lost := [name for name in right if name not in given]:
        return f"for {case}: {lost[0]} is gone; hand back all fields, arguments | {{...}}"
    if all(isinstance(given[name], (int, float)) for name in (TRAIN, STEPS)):
        rows, wanted = (fields[TRAIN] * fields[STEPS] for fields in (given, right))
        if rows != wanted:
            return f"for {case}: your update has {rows} rows, and the run's had {wanted}; the global batch has changed"
    changed = [
        f"{name} has been changed: {why}" for name, why in _SCALED.items() if given[name] != right[name]
    ]
    return f"for {case}: {changed[0]}" if changed else None


def train_epoch(optimizer, micro_batches, window, warmup, accumulate) -> None:
    """An update after every ``window`` micro-batches and one for the rest; the rate climbs for the first part ``warmup`` of
    the updates, then falls in a line."""
    from transformers import get_linear_schedule_with_warmup

    updates = math.ceil(len(micro_batches) / window)
    schedule = get_linear_schedule_with_warmup(optimizer, round(warmup * updates), updates)
    for start in range(0, len(micro_batches), window):
        accumulate(micro_batches[start : start + window])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _epoch(warm=None, total=None, *, stop=lambda n, k: n, per_micro=False, first=False):
    """A wrong ``train_epoch``: of what the warm-up is a part, how long the schedule is, both from (micro-batches, window)."""

    def wrong(optimizer, micro_batches, window, warmup, accumulate):
        from transformers import get_linear_schedule_with_warmup

        n = len(micro_batches)
        steps, length = ((f or _updates)(n, window) for f in (warm, total))
        schedule = get_linear_schedule_with_warmup(
            optimizer, round(warmup * steps) if warm is not _one else warmup, length
        )
        for start in range(0, stop(n, window), window):
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
    found = {}
    # Parts of 6 updates, 5 whole windows and 21 micro-batches: rounded or cut off, the same.
    for n, window, warmup in ((40, 4, 0.2), (21, 4, 0.5)):
        model = models.tiny_llama(layers=1, hidden=8, heads=2, intermediate=8, vocab=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        updates: list[tuple[int, float]] = []
        held: list[torch.Tensor] = []

        def accumulate(some, model=model, held=held):
            held += some
            ids = torch.stack(some)
            model(input_ids=ids, labels=ids).loss.backward()

        def updated(optimizer, *_, updates=updates, held=held):
            updates.append((len(held), optimizer.param_groups[0]["lr"]))
            held.clear()

        optimizer.register_step_post_hook(updated)
        ids = torch.randint(0, 16, (n, 4), generator=torch.Generator().manual_seed(2))
        candidate(optimizer, list(ids), window, warmup, accumulate)
        found[f"{n} micro-batches, window {window}, warmup {warmup}"] = {
            "micro-batches of each update": [size for size, _ in updates],
            "learning rate of each update": torch.tensor([rate for _, rate in updates]),
        }
    return found


def _explain_schedule(got, expected):
    rates = next(iter(got.values()))["learning rate of each update"]
    if len(rates) > 1 and (rates == rates[0]).all():
        return "the schedule never steps: every update has its first learning rate, and with a warm-up that is 0."
    return None


MODEL_7B, CARD_7B, TOKENS_7B, BATCH_7B = "Llama-2-7B", "RTX 4090 24GB", 2048, 8


@cache
def _sizes():
    from ...planning.cards import find_card
    from ...planning.cost import count
    from ...planning.models import known_model

    config = known_model(MODEL_7B)[1]
    return config, count(config), find_card(CARD_7B)


@lru_cache(maxsize=32)
def on_card(recipe: Recipe, micro_batch: int):
    """What ``recipe`` needs for the exercise's 7B, as ``plan``'s ``Option``: with ``needs``, ``spare`` (bytes) and ``why_not()``.

    The allocator's part is the rough one that ``plan`` begins with.
    """
    from ...planning.cost import beyond, seconds_per_token
    from ...planning.options import Option
    from ...prediction.predict import predict

    config, work, card = _sizes()
    prediction = predict(
        config,
        batch_size=micro_batch * recipe.accumulation,
        seq_len=TOKENS_7B,
        recipe=recipe,
        target="cuda",
    )
    parts = beyond(prediction, card.capability, replay=False)
    seconds = seconds_per_token(work, recipe, card, micro_batch, TOKENS_7B)
    return Option(recipe, micro_batch, seconds, card.nbytes, prediction, parts)


def what_is_wrong(recipe: Recipe, micro_batch: int) -> str:
    """The kind of mistake in a recipe for the exercise's 7B, in a few words; empty where there is none."""
    from ...planning.cost import resident_bytes

    if micro_batch * recipe.accumulation != BATCH_7B:
        return "another batch"
    if recipe.frozen_base:
        return "the head alone"
    _, work, card = _sizes()
    resident = resident_bytes(work, recipe)
    if resident["parameters"] > card.nbytes:
        return "float32 weights"
    if resident["parameters"] + resident["gradients"] > card.nbytes:
        return "weights and gradients"
    if sum(resident.values()) > card.nbytes:
        return "states"
    if on_card(recipe, micro_batch).fits:
        return ""
    if recipe.checkpointing is None and recipe.every_n_layers is None:
        return "no checkpointing"
    if micro_batch > 1 and not recipe.in_backward:
        return "micro-batch"
    return f"this {on_card(recipe, micro_batch).why_not()}"


_IN_THE_WAY = {
    "weights and gradients": "weights and gradients alone are too many: 12.55 GiB each in bf16, and accumulation keeps the gradients from one micro-batch to the next, however small; train less, or step in backward.",
    "states": "gradients are freed as they come, and AdamW's states stay: with the weights they are more than the card has; choose an optimizer that keeps less, or train less.",
    "float32 weights": "the weights alone are 25.10 GiB in float32, and autocast leaves them so, frozen or not; precision='bf16' halves them.",
    "no checkpointing": "the weights fit, and the activations of 32 layers do not (frozen layers keep theirs too, for the adapters below them): checkpointing='per-layer'.",
    "another batch": "it is the global batch that has changed: micro-batch x accumulation must make 8 rows.",
    "micro-batch": "the weights fit, and so many rows at a time do not: a smaller micro-batch, and more accumulation.",
    "the head alone": "the head alone is trained, and the 32 layers below it are not: give every layer something to learn, by lora_rank.",
}  # fmt: skip


def recipe_7b() -> tuple[Recipe, int]:
    """A recipe that trains a 7B on a card of 24 GB, and the rows of a micro-batch."""
    recipe = Recipe(
        precision="bf16", optimizer="adamw-fused", lora_rank=16, checkpointing="per-layer", accumulation=8
    )
    return recipe, 1


def _recipe(micro_batch=1, **choices):
    given = dict(precision="bf16", optimizer="adamw-fused", checkpointing="per-layer", chunked_loss=True)

    def wrong():
        return Recipe(**(given | {"accumulation": BATCH_7B // micro_batch} | choices)), micro_batch

    return wrong


@quietly
def _observe_7b(candidate):
    given = candidate()
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[0], Recipe):
        raise TypeError(
            "give two things back, the recipe and the rows of a micro-batch: return Recipe(...), 1"
        )
    recipe, micro_batch = given
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise TypeError(f"the rows of a micro-batch are a whole number of at least 1, not {micro_batch!r}")
    return {"what stands in the way": what_is_wrong(recipe, micro_batch)}


def _explain_7b(got, expected):
    what = got["what stands in the way"]
    return _IN_THE_WAY.get(what, what)


EXERCISES = (
    Exercise(
        id="5.1", title="the same batch on one card", difficulty=1, minutes=5,
        trains="rows, accumulation and GPUs, and what must not change with them",
        reference=on_one_card,
        observe=_observe_one_card,
        explain=_explain_one_card,
        mistakes=(
            Mistake("accumulation left as it was", lambda a, gpus, fits: on_one_card(a, gpus, fits) | {STEPS: a[STEPS]},
                    "the global batch has changed: fewer rows at a time and the accumulation as before is a smaller batch; rows x accumulation must stay what it was on all GPUs."),
            Mistake("GPUs forgotten", lambda a, gpus, fits: on_one_card(a, 1, fits),
                    "this forgets the other GPUs: each of them had rows of its own, and one card now has to work through them all."),
            Mistake("rounds down", _one_card_uneven(math.floor),
                    "rows get lost: where the micro-batch does not divide the batch, take the largest one that does and fits."),
            Mistake("rounds up", _one_card_uneven(math.ceil),
                    "the batch has grown: where the micro-batch does not divide it, take the largest one that does and fits."),
            Mistake("one row at a time", lambda a, gpus, fits: on_one_card(a, gpus, 1),
                    "the batch is right, and one row at a time is slower than need be: take as many as fit."),
            Mistake("evaluation left as it was", lambda a, gpus, fits: on_one_card(a, gpus, fits) | {EVAL: a[EVAL]},
                    "training fits, and the evaluation still takes the old number of rows at a time: set per_device_eval_batch_size too."),
        ),
    ),
    Exercise(
        id="5.3", title="a schedule in optimizer steps", difficulty=2, minutes=8,
        trains="counting updates, not micro-batches, in a loop that accumulates",
        reference=train_epoch,
        observe=_observe_schedule,
        explain=_explain_schedule,
        mistakes=(
            Mistake("a step for every micro-batch", _epoch(per_micro=True),
                    "the schedule steps with every micro-batch: it is through after a part of the updates, and the rest have a learning rate of 0."),
            Mistake("everything in micro-batches", _epoch(_micro, _micro),
                    "the schedule's length and warm-up are counted in micro-batches, and it steps with the updates: it climbs too slowly, and the epoch ends before it has fallen."),
            Mistake("length in micro-batches", _epoch(total=_micro),
                    "the schedule's length is counted in micro-batches, so the learning rate never comes down: count updates."),
            Mistake("warm-up of a fraction", _epoch(_one),
                    "the warm-up is handed over as a fraction of 1, and is counted in steps: multiply it by the number of updates."),
            Mistake("schedule first", _epoch(first=True),
                    "the schedule steps before the optimizer, so the first learning rate is never used and each update has the next one's: optimizer first."),
            Mistake("last window dropped", _epoch(_whole_windows, _whole_windows, stop=lambda n, k: n // k * k),
                    "the last micro-batches are dropped: a window that is not full makes an update too."),
        ),
    ),
    Exercise(
        id="5.8", title="a 7B on a card of 24 GB", difficulty=3, minutes=10,
        trains="finding what stands in the way, and the one change that moves it",
        reference=recipe_7b,
        observe=_observe_7b,
        explain=_explain_7b,
        mistakes=(
            Mistake("full, accumulated", _recipe(), _IN_THE_WAY["weights and gradients"]),
            Mistake("states", _recipe(in_backward=True, accumulation=1, micro_batch=8), _IN_THE_WAY["states"]),
            Mistake("float32 weights", _recipe(precision="autocast-bf16", lora_rank=16), _IN_THE_WAY["float32 weights"]),
            Mistake("no checkpointing", _recipe(checkpointing=None, lora_rank=16), _IN_THE_WAY["no checkpointing"]),
            Mistake("another batch", _recipe(accumulation=1, lora_rank=16), _IN_THE_WAY["another batch"]),
            Mistake("in backward, accumulated", _recipe(in_backward=True, optimizer="adafactor"),
                    "in_backward and accumulation exclude each other, and Recipe refuses: a gradient cannot be freed and added to; with in_backward all 8 rows go at once."),
        ),
    ),
)  # fmt: skip
