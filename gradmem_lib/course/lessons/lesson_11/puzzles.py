"""Lesson 11's puzzles: a model, a card, rows, and a condition. A recipe's bytes and time are those
that ``plan`` gives.

The planner's best recipe for each puzzle is recorded in puzzles.json, with the bytes of known
mistakes: see tools/record_puzzles.py. Then a first check of a right answer, or of a common mistake,
needs no prediction.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from ....model.configs import find_model
from ....planning.cards import find_card
from ....planning.options import Option
from ....planning.search import Search
from ....planning.work import LORA_RANK, count
from ....prediction.question import CannotTrace
from ....training.recipe import Recipe
from ....units import format_bytes
from ....view.room import MemoryFit
from ...judge.compare import describe, plain_int
from ..shared.every_linear import without_needless_targets
from ..shared.seen import largest_first
from ..shared.settings import quiet

THREE, TWO, BEATEN = 0.95, 0.7, 1.001  # of the planner's best time over theirs
MISTAKES = ValueError, TypeError, NotImplementedError, CannotTrace  # of a recipe

# id, title, model, card, cards, rows and tokens of one update, conditions. 11.0 is what lesson 11
# plays through before the first puzzle.
TABLE = """
11.0  | the worked example        | Llama-3.2-1B | RTX 3060 12GB | 1 |  8 |  2048 | full
11.1  | half a GiB                | SmolLM2-135M | 0.5 GiB       | 1 |  4 |   128 |
11.2  | every weight of GPT-2 XL  | GPT-2 XL     | RTX 3070 8GB  | 1 |  8 |  1024 | full
11.3  | every weight of a 7B      | Llama-2-7B   | RTX 4090 24GB | 1 |  8 |  2048 | full
11.4  | a 7B in 16 bits           | Llama-2-7B   | RTX 4080 16GB | 1 |  8 |  2048 | 16 bits
11.5  | a 7B, and nothing twice   | Llama-2-7B   | RTX 3060 12GB | 1 |  8 |  2048 | once
11.6  | a 7B on the smallest card | Llama-2-7B   | RTX 3070 8GB  | 1 |  8 |  4096 | on the card
11.7  | 128,256 words             | Llama-3-8B   | RTX 4090 24GB | 1 |  8 |  4096 | 16 bits
11.8  | 32,768 tokens             | Mistral-7B   | RTX 4090 24GB | 1 |  1 | 32768 |
11.9  | a mixture of experts      | OLMoE-1B-7B  | RTX 4080 16GB | 1 |  8 |  2048 |
11.10 | every weight of a 13B     | Llama-2-13B  | RTX 3090 24GB | 8 | 16 |  2048 | full
11.11 | a 70B on two cards        | Llama-2-70B  | RTX 4090 24GB | 2 |  4 |  1024 |
11.12 | the impossible one        | Llama-2-7B   | RTX 4090 24GB | 1 |  8 |  2048 | full, after
"""

# (the puzzle's text, options that break it, the sentence for a recipe that has one of them)
CONDITIONS = {
    "full": (
        "every weight is trained",
        ("lora_rank",),
        "the condition is broken: every weight must be trained, but lora_rank freezes all of them.",
    ),
    "16 bits": (
        "no weight is kept in 4 bits",
        ("quantized_base",),
        "the condition is broken: no weight may be kept in 4 bits, but quantized_base keeps the "
        "frozen weights in 4 bits.",
    ),
    "once": (
        "no layer runs twice",
        ("checkpointing", "every_n_layers"),
        "the condition is broken: no layer may run twice, but checkpoints run layers again in "
        "backward.",
    ),
    "on the card": (
        "nothing waits in the host's memory",
        ("offload",),
        "the condition is broken: nothing may wait in the host's memory, but offload moves tensors "
        "there.",
    ),
    "after": (
        "the optimizer steps after backward",
        ("in_backward",),
        "the condition is broken: the optimizer must step after backward, but in_backward steps "
        "inside backward.",
    ),
}


@dataclass(frozen=True)
class Weighed:
    """A recipe's bytes on each card (``held``: bytes at the peak, by what holds them) and its
    estimated seconds a token.
    """

    needs: int
    room: int
    seconds: float
    phase: str
    held: dict[str, int]

    @property
    def spare(self) -> int:
        """Bytes that are left; negative: bytes that are missing."""
        return self.room - self.needs

    def __str__(self) -> str:
        needs, room = format_bytes(self.needs), format_bytes(self.room)
        if self.spare >= 0:
            lead = f"it needs {needs} of {room}, and {format_bytes(self.spare)} are left over"
        else:
            more = format_bytes(-self.spare)
            lead = f"it needs {needs}, which is {more} more than the available {room}"
        return (
            f"{lead}: at the peak, in {self.phase.replace('_', ' ')}, {largest_first(self.held)}."
        )


@dataclass(frozen=True)
class Puzzle:
    """A model to train on ``cards`` cards, with ``rows`` rows of ``tokens`` tokens for one update,
    and conditions.
    """

    id: str
    title: str
    model: str
    card: str
    cards: int
    rows: int
    tokens: int
    conditions: tuple[str, ...]

    @property
    def target(self) -> str:
        """The first card is not a card but a budget on the CPU."""
        return "cpu" if self.card.endswith("GiB") else "cuda"

    @property
    def room(self) -> int:
        """The bytes that a program can use on each card."""
        return find_card(self.card).nbytes

    @property
    def condition(self) -> str:
        """The condition for a recipe; empty if every recipe is allowed."""
        return " and ".join(CONDITIONS[key][0] for key in self.conditions)

    @property
    def where(self) -> str:
        """The card or cards, and the bytes that a program can use on each."""
        room = format_bytes(self.room)
        if self.target == "cpu":
            return f"a budget of {room} on the CPU"
        if self.cards == 1:
            return f"{self.card}, {room}"
        return f"{self.cards} x {self.card}, {room} each"

    def recipe(self, answer: Any) -> Recipe:
        """``answer``, a ``Recipe`` or a dict of its options.

        ``ValueError`` or ``TypeError`` in a sentence for all else.
        """
        recipe = answer
        if not isinstance(answer, Recipe):
            if not isinstance(answer, Mapping):
                raise TypeError(
                    "the answer is a dictionary of a Recipe's options, such as {'precision': "
                    f"'bf16'}}, or the Recipe itself, but {describe(answer)} was given"
                )
            names = [field.name for field in fields(Recipe)]
            for name in answer:
                if name not in names:
                    options = ", ".join(names)
                    raise ValueError(f"a Recipe has no {name!r}: its options are {options}")
            recipe = Recipe(**{name: plain_int(value) for name, value in answer.items()})
        return without_needless_targets(recipe, find_model(self.model)[0])

    def broken(self, recipe: Recipe) -> str:
        """Why ``recipe`` is not allowed, whatever it needs, in a sentence; empty if it is
        allowed.
        """
        if recipe.optimizer == "sgd":
            return (
                "plain SGD is not allowed, also with momentum: choose an optimizer that adapts to "
                "each weight."
            )
        if recipe.precision is None:
            return (
                "precision=None is for a module that has its own dtypes, and there is no module "
                "here: choose a precision."
            )
        if recipe.lora_rank and (recipe.lora_rank < LORA_RANK or recipe.lora_targets):
            return (
                f"adapters must have rank {LORA_RANK} or more, on every linear layer: "
                f"lora_rank={LORA_RANK}, and no lora_targets."
            )
        for key in self.conditions:
            _, options, says = CONDITIONS[key]
            if any(getattr(recipe, name) for name in options):
                return says
        if self.cards > 1 and recipe.sharding is None:
            return (
                f"{self.cards} cards train together, but the recipe does not say how they share: "
                "set sharding."
            )
        if self.cards == 1 and recipe.sharding is not None:
            return f"sharding={recipe.sharding!r} is for several cards, but there is only one."
        own = self.rows // self.cards
        if own % recipe.accumulation:
            return (
                f"accumulation={recipe.accumulation} must divide the number of rows of a card, "
                f"which is {own}."
            )
        return ""

    def weigh(self, recipe: Recipe) -> Weighed:
        """The bytes and time of ``recipe``: recorded, or predicted (in seconds).

        ``ValueError`` if the model cannot use it.
        """
        return records().get(self.id, {}).get(recipe) or predicted(self, recipe)

    def best(self) -> tuple[Recipe, Weighed]:
        """The fastest recipe that the planner found, and its bytes."""
        return next(iter(records()[self.id].items()))

    def judge(self, answer: Any) -> tuple[str, Weighed | None]:
        """What is wrong with ``answer``, in a sentence (empty if it is right), and its bytes, if
        they are known.
        """
        if answer is None or answer is ...:
            return "there is no recipe yet", None
        try:
            recipe = self.recipe(answer)
            wrong = self.broken(recipe)
            if wrong:
                return wrong, None
            weighed = self.weigh(recipe)
        except MISTAKES as error:
            return str(error), None
        return "" if weighed.spare >= 0 else str(weighed), weighed

    def show(self, answer: Any = None) -> MemoryFit:
        """Show the card with ``answer`` on it, and a sentence about it.

        Without an answer, show the empty card.
        """
        wrong, weighed = self.judge(answer)
        if weighed is None:
            with suppress(*MISTAKES):  # what is against the rules has its bytes too
                weighed = self.weigh(self.recipe(answer))
        words, held = [f"condition: {self.condition or 'none'}"], {}
        if weighed:
            words.append(str(weighed))
            held = weighed.held
        if wrong and wrong not in words:
            words.append(wrong)
        if weighed:
            earned = "" if wrong else f": {self.stars(weighed.seconds)}"
            words.append(f"{micros(weighed.seconds)} a token, by estimate{earned}")
        update = f"{self.rows} row{'s' if self.rows > 1 else ''} of {self.tokens:,} tokens"
        title = f"{self.id} {self.title}: {self.model}, {update}"
        return MemoryFit(title, self.where, self.room, held, words, not wrong)

    def stars(self, seconds: float) -> str:
        """One to three stars for a recipe that fits, by its estimated time compared with the
        planner's best.
        """
        share = self.best()[1].seconds / seconds
        won = "★☆☆"
        if share >= THREE:
            won = "★★★"
        elif share >= TWO:
            won = "★★☆"
        return f"{won}, you beat the planner" if share > BEATEN else won


@cache
def puzzles() -> dict[str, Puzzle]:
    """All puzzles by their ids, the worked example too."""
    found = {}
    for line in TABLE.strip().splitlines():
        id, title, model, card, cards, rows, tokens, keys = map(str.strip, line.split("|"))
        numbers = int(cards), int(rows), int(tokens)
        found[id] = Puzzle(
            id, title, model, card, *numbers, tuple(keys.split(", ") if keys else ())
        )
    return found


def puzzle(id: str) -> Puzzle:
    """The puzzle with that id, such as ``"11.4"``. Raises ``KeyError`` for other ids."""
    found = puzzles()
    if id not in found:
        raise KeyError(f"there is no puzzle {id!r}: they are {', '.join(found)}")
    return found[id]


# The allocator has reserved at most 0.42 of the live bytes beside them in all that is recorded.
MOST_RESERVED = 0.6


class Allowed(Search):
    """A search that respects a puzzle's condition. Every recipe that is faster counts, however
    much it changes training.
    """

    equal_time = 1.0

    def __init__(self, puzzle: Puzzle):
        config, _ = find_model(puzzle.model)
        ask = count(config), find_card(puzzle.card), puzzle.tokens, puzzle.rows, puzzle.target
        super().__init__(*ask, puzzle.cards)
        self.puzzle = puzzle

    def allows(self, recipe: Recipe) -> bool:
        return not self.puzzle.broken(recipe)

    def families(self, method: str) -> Iterator[Recipe]:
        return (family for family in super().families(method) if self.variants(family))

    def quick_option(self, recipe: Recipe) -> Option:
        """``option(recipe)``, but with a rough allocator where the recipe fits even with the most
        that an allocator reserves: its replay takes up to minutes for 80 layers.
        """
        prediction = self.predict(recipe, self.ranks)
        quick = self.option_of(recipe, prediction, replay=False)
        if quick.needs + round(MOST_RESERVED * prediction.peak.total) > self.card.nbytes:
            return self.option(recipe)
        return quick


@cache
def search(puzzle: Puzzle) -> Allowed:
    with quiet():
        return Allowed(puzzle)


@cache
def predicted(puzzle: Puzzle, recipe: Recipe, quickly: bool = True) -> Weighed:
    """``quickly``: by ``quick_option``, and not as it is recorded."""
    here = search(puzzle)
    with quiet():
        option = here.quick_option(recipe) if quickly else here.option(recipe)
    peak = option.prediction.peak
    held = {name: n for name, n in (peak.by_category | option.parts).items() if n}
    return Weighed(option.needs, option.card_bytes, option.seconds, peak.phase, held)


@cache
def records() -> dict[str, dict[Recipe, Weighed]]:
    """By puzzle: recipes and their bytes, the planner's best first.

    If other versions recorded them: only the best, for its time.
    """
    text = files(__package__).joinpath("puzzles.json").read_text(encoding="utf-8")
    written, found = json.loads(text), {}
    same = written["versions"] == versions()
    for id, rows in written["puzzles"].items():
        found[id] = {}
        for row in rows if same else rows[:1]:
            found[id][Recipe(**row["recipe"])] = Weighed(**row["weighed"])
    return found


def versions() -> dict[str, str]:
    # Without "+cpu" or "+cu130": a build for another device predicts the same bytes.
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


def micros(seconds: float) -> str:
    """Seconds a token in microseconds: "526.0 µs"."""
    return f"{1e6 * seconds:,.1f} µs"


def options_of(recipe: Recipe) -> dict[str, Any]:
    """The options of a recipe that differ from the defaults."""
    default = asdict(Recipe())
    return {name: value for name, value in asdict(recipe).items() if value != default[name]}


def written(recipe: Recipe) -> str:
    """The recipe as code, ``Recipe(precision='bf16')``, with the options that differ from the
    defaults.
    """
    return f"Recipe({', '.join(f'{name}={value!r}' for name, value in options_of(recipe).items())})"
