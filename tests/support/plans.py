"""Every recipe that a plan may propose, and what a plan has to say if these are all there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from support.own_models import Examples

from gradmem_lib.compat.trees import tree_leaves
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.held import overhead_of_prediction
from gradmem_lib.planning.options import EQUAL_TIME, Option, changes
from gradmem_lib.planning.report import Plan
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count
from gradmem_lib.prediction.question import CannotTrace


def brute_force(
    config,
    remembered: Callable,
    card: Card,
    rows: int,
    method: str,
    target: str,
    seq_len: int | None = 16,
    cards: int = 1,
    margin: float = 0.0,
) -> list[Option]:
    """Every recipe that the planner may propose, with every micro-batch. ``remembered`` predicts;
    what it refuses is left out.
    """
    search = Search(count(config, seq_len), card, seq_len, rows * cards, target, cards)
    asked = {"batch_size": rows, "seq_len": seq_len, "target": target}
    if cards > 1:
        asked["ranks"] = cards
    recipes = []
    for family in search.families(method):
        for chunked in reversed(search.losses):
            recipes += search.variants(replace(family, chunked_loss=chunked))
    options = []
    for recipe in recipes:
        try:
            found = remembered(config, recipe=recipe, **asked)
        except (ValueError, CannotTrace):
            continue
        parts = overhead_of_prediction(found, card.capability, cards=cards)
        moved = found.offload_traffic_bytes / (rows * search.units)
        seconds = search.seconds(recipe, moved)
        micro = rows // recipe.accumulation
        options.append(
            Option(recipe, micro, seconds, card.nbytes, found, parts, cards, margin=margin)
        )
    return options


def check(everything: list[Option], nbytes: int, made: Plan) -> None:
    """The plan's best is the fastest that fits. What changes training more has to be faster by more
    than an estimate can tell. And nothing that is faster by the same kind of training fits.
    """
    on_this_card = [replace(option, card_bytes=nbytes) for option in everything]
    fits = [option for option in on_this_card if option.fits]
    assert bool(made.best) == bool(fits), nbytes
    if not fits:
        least = min(everything, key=lambda o: o.needs).needs
        # for a card, what cannot fit is no more than estimated
        assert made.closest.needs == least or (made.target == "cuda" and made.closest.needs < least)
        return
    wanted = None
    for how_much in sorted({changes(option.recipe) for option in fits}):
        fastest = min(o.seconds for o in fits if changes(o.recipe) == how_much)
        if wanted is None or fastest < wanted[0] / EQUAL_TIME:
            wanted = fastest, how_much
    assert (made.best.seconds, changes(made.best.recipe)) == wanted, (nbytes, made.best)
    whole = replace(made.best.recipe, chunked_loss=False)
    as_fast = [o.recipe for o in fits if o.seconds == made.best.seconds]
    assert not made.best.recipe.chunked_loss or whole not in as_fast
    faster = made.next_faster
    assert faster is None or (not faster.fits and faster.seconds < made.best.seconds)
    for option in on_this_card:
        if made.is_of_the_best_ones_kind(option) and option.seconds < made.best.seconds:
            assert not option.fits, (nbytes, option)


def assert_code_needs_what_was_predicted(made: Plan, model, rows, loss) -> None:
    """The loop of a plan's code is run twice on ``rows`` and tracked the second time."""
    space = {"model": model, "train_dataset": Examples(rows), "loss": loss}
    exec(compile(made.code, "plan", "exec"), space)
    again = made.code[made.code.index("for rows in loader") :]
    with MemoryTracker(space["model"], space["optimizer"], live=False) as tracker:
        exec(compile(again, "plan", "exec"), space)
    expected = dict(made.best.prediction.peak.by_category)
    # A loader makes the batch inside of the tracker, beside the dataset, whose rows are views.
    expected["other"] += sum(tensor.nbytes for tensor in tree_leaves(rows))
    assert tracker.peak.by_category == expected
