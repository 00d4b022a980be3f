"""Puzzles with two targets: bytes at the peak, and a price in time. The price is counted and not
measured, such as micro-batches, so that it is the same on every machine.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...model.configs import find_model
from ...prediction.predict import predict
from ...training.recipe import Recipe
from ...units import parse_bytes
from ...view.live import show_timeline
from ..judge.compare import Measured, plain_int
from ..judge.exercise import Unusable


@dataclass(frozen=True)
class Bargain:
    """``run(choice)`` does what a choice says. It returns a tracker or a prediction, and the price:
    how many ``unit``. It raises ``Unusable`` for what is no choice.

    ``room``: bytes. ``most``: the highest price that passes. ``best``: the cheapest choice of all
    that fit, since tests/course/lessons/test_bargains.py tries the cheaper ones.
    """

    best: Any
    run: Callable[[Any], tuple[Any, int]]
    room: str
    most: int
    unit: str

    def cases(self, choice):
        run, price = self.run(choice)
        peak, room = run.peak.total, parse_bytes(self.room)
        says = f"It peaks at {peak:,} bytes, and there is room for {room:,}."
        yield "the bytes", Measured(None, peak, room, says)
        says = f"It takes {price:,} {self.unit}, and may take {self.most:,}."
        yield "the time", Measured(None, price, self.most, says)

    def compared(self, choice) -> str:
        """What is said of a right answer."""
        price, lowest = self.run(choice)[1], self.run(self.best)[1]
        if price > lowest:
            return f"({price:,} {self.unit}; the best known takes {lowest:,})"
        return f"★ ({price:,} {self.unit}, as few as the best known)"

    def show(self, choice) -> None:
        """Print and draw a choice beside the best known one."""
        if choice is ...:
            print("There is no choice yet.")
            return
        mine, price = self.run(choice)
        best, lowest = self.run(self.best)
        print(f"yours       {mine.peak.total:>15,} bytes, {price:,} {self.unit}")
        print(f"best known  {best.peak.total:>15,} bytes, {lowest:,} {self.unit}")
        outline = ("best known", best.timeline)
        room = parse_bytes(self.room)
        show_timeline(mine.timeline, title="yours", budget=room, beside=outline)


def parts_of(choice, whole: Iterable[int]) -> list[list[int]]:
    """A choice of lists in which each number of ``whole`` stands once, without empty lists."""
    try:
        parts = [[plain_int(number) for number in part] for part in choice]
        same = sorted(itertools.chain(*parts)) == sorted(whole)
    except TypeError:
        same = False
    if not same:
        numbers = ", ".join(map(str, whole))
        raise Unusable(f"the answer is a list of lists, in which each of {numbers} stands once")
    return [part for part in parts if part]


def by_recipe(model: str, options: str, price: Callable, ask: dict, **fixed: Any) -> Callable:
    """The ``run`` of choices that are some ``options`` of a recipe, beside those that are
    ``fixed``. ``price(recipe, config)``; ``ask``: the other arguments of ``predict``.
    """

    def run(choice):
        if not isinstance(choice, dict) or set(choice) - set(options.split()):
            names = ", ".join(options.split())
            raise Unusable(f"the answer is a dict with some of these options: {names}")
        try:
            recipe = Recipe(**fixed, **choice)
        except (TypeError, ValueError) as error:
            raise Unusable(str(error)) from None
        cost = price(recipe, find_model(model)[0])  # first: it refuses without a prediction
        return predicted(model, recipe, **ask), cost

    return run


@cache
def predicted(model: str, recipe: Recipe, **ask: Any):
    return predict(find_model(model)[0], recipe=recipe, **ask)


def calls_of_layers(recipe: Recipe, config) -> int:
    """How often a layer's forward runs in an update, in checkpoints too."""
    layers = config.num_hidden_layers
    if recipe.checkpointing is None:
        again = 0
    elif recipe.checkpointing == "per-layer":
        again = layers
    elif str(recipe.checkpointing).startswith("first-"):
        again = int(recipe.checkpointing[6:])
    else:
        raise Unusable("checkpointing is 'per-layer' here, or 'first-8' for the first 8 layers")
    return recipe.accumulation * (layers + again)
