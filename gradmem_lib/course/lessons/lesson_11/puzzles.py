"""Lesson 11's puzzles: a model, a card, rows, and a condition. A recipe's bytes and time are those
that ``plan`` gives.

``python -m gradmem_lib.course.lessons.lesson_11.puzzles --write`` finds the planner's best recipe
for each puzzle and records it in puzzles.json, with the bytes of known mistakes. Then a first check
of a right answer, or of a common mistake, needs no prediction.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from ....names import CATEGORIES
from ....planning.cards import find_card
from ....planning.held import overhead_of_prediction
from ....planning.models import find_model
from ....planning.options import METHODS, Option
from ....planning.search import Search
from ....planning.work import LORA_RANK, count
from ....prediction.predict import predict
from ....prediction.question import CannotTrace
from ....training.recipe import Recipe
from ....units import format_bytes
from ....view.room import MemoryFit
from ...judge.compare import describe, plain_int
from ..shared.every_linear import without_needless_targets
from ..shared.settings import quietly

RECORD = "puzzles.json"
# The lengths of segments that are recorded where a prediction of them takes long.
SEGMENTS = ("sqrt", 2, 4, 8)
THREE, TWO, BEATEN = 0.95, 0.7, 1.001  # of the planner's best time over theirs
RANK = LORA_RANK
# (the puzzle's text, a test whether a recipe respects it, the sentence for one that does not)
CONDITIONS: dict[str, tuple[str, Callable[[Recipe], bool], str]] = {
    "full": (
        "every weight is trained",
        lambda r: not r.lora_rank,
        "the condition is broken: every weight must be trained, but lora_rank freezes all of them.",
    ),
    "16 bits": (
        "no weight is kept in 4 bits",
        lambda r: not r.quantized_base,
        (
            "the condition is broken: no weight may be kept in 4 bits, but quantized_base keeps "
            "the frozen weights in 4 bits."
        ),
    ),
    "once": (
        "no layer runs twice",
        lambda r: r.checkpointing is None and r.every_n_layers is None,
        (
            "the condition is broken: no layer may run twice, but checkpoints run layers again in "
            "backward."
        ),
    ),
    "on the card": (
        "nothing waits in the host's memory",
        lambda r: r.offload is None,
        (
            "the condition is broken: nothing may wait in the host's memory, but offload moves "
            "tensors there."
        ),
    ),
    "after backward": (
        "the optimizer steps after backward",
        lambda r: not r.in_backward,
        (
            "the condition is broken: the optimizer must step after backward, but in_backward "
            "steps inside backward."
        ),
    ),
}
RULES = (
    "in all puzzles: adapters on every linear layer, of rank 16 or more, and any optimizer but "
    "plain SGD"
)


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
        lead = (
            (
                f"it needs {format_bytes(self.needs)} of {format_bytes(self.room)}, and "
                f"{format_bytes(self.spare)} are left over"
            )
            if self.spare >= 0
            else (
                f"it needs {format_bytes(self.needs)}, which is {format_bytes(-self.spare)} more "
                f"than the available {format_bytes(self.room)}"
            )
        )
        parts = sorted(self.held.items(), key=lambda part: -part[1])
        held = ", ".join(
            f"{name} {format_bytes(n)}" for name, n in parts if n >= 0.005 * self.needs
        )
        return f"{lead}: at the peak, in {self.phase.replace('_', ' ')}, {held}."


@dataclass(frozen=True)
class Puzzle:
    """A model to train on ``cards`` cards, with ``rows`` rows of ``tokens`` tokens for one update,
    and a condition.
    """

    id: str
    title: str
    model: str
    card: str
    rows: int
    tokens: int
    conditions: tuple[str, ...] = ()
    cards: int = 1
    target: str = "cuda"
    possible: bool = True

    @property
    def condition(self) -> str:
        """The condition for a recipe; empty if every recipe is allowed."""
        return " and ".join(CONDITIONS[key][0] for key in self.conditions)

    @property
    def where(self) -> str:
        """The card or cards, and the bytes that a program can use on each."""
        room = format_bytes(find_card(self.card).nbytes)
        if self.target == "cpu":
            return f"a budget of {room} on the CPU"
        several = f"{self.cards} x " if self.cards > 1 else ""
        return f"{several}{self.card}, {room}{' each' if several else ''}"

    @property
    def _rows(self) -> str:
        return f"{self.rows} row{'s' if self.rows > 1 else ''}"

    def __str__(self) -> str:
        return "\n".join(f"{name:<10} {words}" for name, words in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield self.id, self.title
        yield "model", self.model
        yield "on", self.where
        yield "one update", f"{self._rows} of {self.tokens:,} tokens"
        yield "condition", self.condition or "none"
        if not self.possible:
            yield "asked", f"no recipe fits: which part forbids it? One of {', '.join(CATEGORIES)}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        (id, title), *rest = self._lines()
        cells = "".join(
            (
                f"<tr><th style='text-align:left'>{name}</th><td "
                f"style='text-align:left'>{words}</td></tr>"
            )
            for name, words in rest
        )
        return (
            f"<table><caption style='text-align:left'><b>{id} "
            f"{title}</b></caption><tbody>{cells}</tbody></table>"
        )

    def recipe(self, answer: Any) -> Recipe:
        """``answer``, a ``Recipe`` or a dict of its options.

        ``ValueError`` or ``TypeError`` in a sentence for all else.
        """
        if isinstance(answer, Recipe):
            return without_needless_targets(answer, find_model(self.model)[0])
        if not isinstance(answer, Mapping):
            raise TypeError(
                "the answer is a dictionary of a Recipe's options, such as {'precision': 'bf16'}, "
                "or the Recipe itself, "
                f"but {describe(answer)} was given"
            )
        names = [field.name for field in fields(Recipe)]
        for name in answer:
            if name not in names:
                raise ValueError(f"a Recipe has no {name!r}: its options are {', '.join(names)}")
        options = {name: plain_int(value) for name, value in answer.items()}
        recipe = Recipe(**options)
        return without_needless_targets(recipe, find_model(self.model)[0])

    def broken(self, recipe: Recipe) -> str:
        """Why ``recipe`` is not allowed, whatever it needs, in a sentence; empty if it is
        allowed.
        """
        if recipe.optimizer == "sgd":
            return (
                "plain SGD is not allowed, also with momentum: choose an optimizer that adapts "
                "to each weight."
            )
        if recipe.precision is None:
            return (
                "precision=None is for a module that has its own dtypes, and there is no module "
                "here: choose a precision."
            )
        if recipe.lora_rank and (recipe.lora_rank < RANK or recipe.lora_targets):
            return (
                f"adapters must have rank {RANK} or more, on every linear layer: "
                f"lora_rank={RANK}, and no lora_targets."
            )
        if against := [
            CONDITIONS[key][2] for key in self.conditions if not CONDITIONS[key][1](recipe)
        ]:
            return against[0]
        if self.cards > 1 and recipe.sharding is None:
            return (
                f"{self.cards} cards train together, but the recipe does not say how they "
                "share: set sharding."
            )
        if self.cards == 1 and recipe.sharding is not None:
            return f"sharding={recipe.sharding!r} is for several cards, but there is only one."
        return self._why_uncut(recipe)

    def _why_uncut(self, recipe: Recipe) -> str:
        """Why ``accumulation`` cannot cut the rows of a card; empty if it can."""
        own = self.rows // self.cards
        of_each = " of each card" if self.cards > 1 else ""
        if own % recipe.accumulation == 0:
            return ""
        if own == 1:
            return (
                f"the 1 row{of_each} cannot be cut into {recipe.accumulation} micro-batches: "
                "leave accumulation=1."
            )
        return (
            f"accumulation={recipe.accumulation} does not cut {own} rows{of_each} evenly: choose a "
            f"divisor of {own}."
        )

    def weigh(self, recipe: Recipe) -> Weighed:
        """The bytes and time of ``recipe``: recorded, or predicted (in seconds).

        ``ValueError`` if the model cannot use it.
        """
        return _records().get(self.id, {}).get(recipe) or _weigh_quickly(self, recipe)

    def best(self) -> tuple[Recipe, Weighed]:
        """The fastest recipe that the planner found, and its bytes."""
        return next(iter(_records()[self.id].items()))

    def show(self, answer: Any = None) -> MemoryFit:
        """Show the card with ``answer`` on it, and a sentence about it.

        Without an answer, show the empty card.
        """
        wrong, weighed = self.judge(answer)
        if weighed is None and answer is not None and answer is not ...:
            with suppress(ValueError, TypeError, NotImplementedError, CannotTrace):
                # what is against the rules has its bytes too
                weighed = self.weigh(self.recipe(answer))
        words = [f"condition: {self.condition or 'none'}", *([str(weighed)] if weighed else [])]
        if not weighed or wrong not in ("", str(weighed)):
            words.append(wrong)
        if weighed:
            earned = "" if wrong else f": {self.stars(weighed.seconds)}"
            words.append(f"{micros(weighed.seconds)} a token, by estimate{earned}")
        title = f"{self.id} {self.title}: {self.model}, {self._rows} of {self.tokens:,} tokens"
        held = weighed.held if weighed else {}
        return MemoryFit(title, self.where, find_card(self.card).nbytes, held, words)

    def judge(self, answer: Any) -> tuple[str, Weighed | None]:
        """What is wrong with ``answer``, in a sentence (empty if it is right), and its bytes, if
        they are known.
        """
        if answer is None or answer is ...:
            return "there is no recipe yet", None
        try:
            recipe = self.recipe(answer)
            if wrong := self.broken(recipe):
                return wrong, None
            weighed = self.weigh(recipe)
        except (ValueError, TypeError, NotImplementedError, CannotTrace) as error:
            return str(error), None
        return "" if weighed.spare >= 0 else str(weighed), weighed

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


def puzzle(id: str) -> Puzzle:
    """The puzzle with that id, such as ``"11.4"``. Raises ``KeyError`` for other ids."""
    found = {p.id: p for p in (EXAMPLE, *PUZZLES)}
    if id not in found:
        raise KeyError(f"there is no puzzle {id!r}: they are {', '.join(found)}")
    return found[id]


# What lesson 11 plays through before the first puzzle.
EXAMPLE = Puzzle("11.0", "the worked example", "Llama-3.2-1B", "RTX 3060 12GB", 8, 2048, ("full",))
_STEP: dict[str, Any] = {"precision": "bf16", "optimizer": "adamw-fused", "accumulation": 8}
STEPS = [  # of section 2 of the lesson
    _STEP,
    _STEP | {"checkpointing": "per-layer"},
    _STEP | {"checkpointing": "per-layer", "chunked_loss": True},
    _STEP | {"chunked_loss": True, "optimizer": "adamw-8bit"},
]
PUZZLES = (
    Puzzle("11.1", "half a GiB", "SmolLM2-135M", "0.5 GiB", 4, 128, target="cpu"),
    Puzzle("11.2", "every weight of GPT-2 XL", "GPT-2 XL", "RTX 3070 8GB", 8, 1024, ("full",)),
    Puzzle("11.3", "every weight of a 7B", "Llama-2-7B", "RTX 4090 24GB", 8, 2048, ("full",)),
    Puzzle("11.4", "a 7B in 16 bits", "Llama-2-7B", "RTX 4080 16GB", 8, 2048, ("16 bits",)),
    Puzzle("11.5", "a 7B, and nothing twice", "Llama-2-7B", "RTX 3060 12GB", 8, 2048, ("once",)),
    Puzzle(
        "11.6", "a 7B on the smallest card", "Llama-2-7B", "RTX 3070 8GB", 8, 4096, ("on the card",)
    ),
    Puzzle("11.7", "128,256 words", "Llama-3-8B", "RTX 4090 24GB", 8, 4096, ("16 bits",)),
    Puzzle("11.8", "32,768 tokens", "Mistral-7B", "RTX 4090 24GB", 1, 32768),
    Puzzle("11.9", "a mixture of experts", "OLMoE-1B-7B", "RTX 4080 16GB", 8, 2048),
    Puzzle(
        "11.10",
        "every weight of a 13B",
        "Llama-2-13B",
        "RTX 3090 24GB",
        16,
        2048,
        ("full",),
        cards=8,
    ),
    Puzzle("11.11", "a 70B on two cards", "Llama-2-70B", "RTX 4090 24GB", 4, 1024, cards=2),
    Puzzle(
        "11.12",
        "the impossible one",
        "Llama-2-7B",
        "RTX 4090 24GB",
        8,
        2048,
        ("full", "after backward"),
        possible=False,
    ),
)


# The allocator has reserved at most 0.42 of the live bytes beside them in all that is recorded.
MOST_RESERVED = 0.6


class _Allowed(Search):
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

    def quick_option(self, recipe: Recipe) -> Option:
        """``option(recipe)``, but with a rough allocator where the recipe fits even with the most
        that an allocator reserves: its replay takes up to minutes for 80 layers.
        """
        sizes = {"batch_size": self.rows, "seq_len": self.seq_len}
        prediction = predict(
            self.work.source,
            recipe=recipe,
            target=self.target,
            ranks=self.cards if self.cards > 1 else None,
            **sizes,
        )
        parts = overhead_of_prediction(
            prediction, self.card.capability, replay=False, cards=self.cards
        )
        live = prediction.peak.total
        most = live + sum(parts.values()) + round(MOST_RESERVED * live)
        if most > self.card.nbytes:
            return self.option(recipe)
        moved = prediction.offload_traffic_bytes / (self.rows * self.seq_len)
        return Option(
            recipe,
            self.rows // recipe.accumulation,
            self.seconds(recipe, moved),
            self.card.nbytes,
            prediction,
            parts,
            self.cards,
            self.has_adapters,
        )

    def families(self, method: str) -> Iterator[Recipe]:
        return (family for family in super().families(method) if self.variants(family))


@cache
@quietly
def search(puzzle: Puzzle) -> _Allowed:
    return _Allowed(puzzle)


@lru_cache(maxsize=256)
@quietly
def _weigh(puzzle: Puzzle, recipe: Recipe) -> Weighed:
    return _weighed(search(puzzle).option(recipe))


@lru_cache(maxsize=256)
@quietly
def _weigh_quickly(puzzle: Puzzle, recipe: Recipe) -> Weighed:
    return _weighed(search(puzzle).quick_option(recipe))


def _weighed(option: Option) -> Weighed:
    peak = option.prediction.peak
    held = {name: n for name, n in (peak.by_category | option.parts).items() if n}
    return Weighed(option.needs, option.card_bytes, option.seconds, peak.phase, held)


@cache
def _records() -> dict[str, dict[Recipe, Weighed]]:
    """By puzzle: recipes and their bytes, the planner's best first.

    If other versions recorded them: only the best, for its time.
    """
    found = json.loads(files(__package__).joinpath(RECORD).read_text(encoding="utf-8"))
    same = found["versions"] == _versions()
    return {
        id: {
            Recipe(**row["recipe"]): Weighed(**row["weighed"])
            for row in (rows if same else rows[:1])
        }
        for id, rows in found["puzzles"].items()
    }


def _versions() -> dict[str, str]:
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


def solve(puzzle: Puzzle) -> Recipe:
    """The fastest recipe that the planner finds under the puzzle's condition.

    Raises ``LookupError`` if none fits.
    """
    for asked in (puzzle, replace(puzzle, conditions=())):
        # A new search: the recipes that learners have tried may not be among the planner's.
        here = search.__wrapped__(asked)
        here.find(list(METHODS))
        if allowed := [option for option in here.fits() if not puzzle.broken(option.recipe)]:
            return min(allowed, key=lambda option: option.seconds).recipe
    raise LookupError(f"{puzzle.id}: the planner finds nothing that fits")


def record(ids: list[str], keep_best: bool = False) -> None:
    """Write puzzles.json: for each puzzle the planner's best, then the known mistakes that are
    recipes. ``keep_best``: the recorded best stays, without a new search.
    """
    path = Path(__file__).with_name(RECORD)
    found = json.loads(path.read_text(encoding="utf-8"))["puzzles"] if path.exists() else {}

    def keep(one: Puzzle, recipes: list[Recipe]) -> None:
        found[one.id] = [
            {"recipe": options_of(r), "weighed": asdict(_weigh(one, r))} for r in recipes
        ]
        text = json.dumps({"versions": _versions(), "puzzles": found}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    wanted = [one for one in (EXAMPLE, *PUZZLES) if one.possible and (one.id in ids or not ids)]
    if not keep_best:
        for one in wanted:
            keep(one, [solve(one)])
            print(one.id, written(Recipe(**found[one.id][0]["recipe"])), flush=True)
    _records.cache_clear()
    for one in wanted:
        keep(one, list(dict.fromkeys([one.best()[0], *_tempting(one), *_in_pieces(one)])))


def _tempting(one: Puzzle) -> list[Recipe]:
    """The known mistakes that need a prediction; for the example, the steps of the lesson."""
    from ...catalogue import get

    found, given = (
        [],
        STEPS if one is EXAMPLE else [mistake.function for mistake in get(one.id).mistakes],
    )
    for options in given:
        with suppress(ValueError, TypeError):
            recipe = one.recipe(options)
            found += [] if one.broken(recipe) else [recipe]
    return found


def _in_pieces(one: Puzzle) -> list[Recipe]:
    """For several cards, whose models take long to predict: the best recipe with checkpoints in
    every layer or of segments, and the rows of a card cut in each way.

    A prediction with segments traces all layers.
    """
    if one.cards == 1:
        return []
    rows = one.rows // one.cards
    # The best may step in backward, which forbids pieces, or move something to the host.
    plain = replace(one.best()[0], in_backward=False, offload=None)
    recipes = []
    for checkpointing in ("per-layer", *SEGMENTS):
        for pieces in range(1, rows + 1):
            if rows % pieces == 0:
                way = {"checkpointing": checkpointing, "accumulation": pieces}
                recipes.append(replace(plain, **way))
    return recipes


if __name__ == "__main__":
    if "--write" not in sys.argv:
        sys.exit(
            "python -m gradmem_lib.course.lessons.lesson_11.puzzles --write [--keep-best] [ID ...]"
        )
    ids = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    record(ids, keep_best="--keep-best" in sys.argv)
