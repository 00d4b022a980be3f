"""One way to train, with the bytes and the time that it needs; and the order of several ways."""

import math
from dataclasses import dataclass, replace

from .. import optimizers
from ..names import PRECISIONS
from ..prediction.predict import Prediction
from ..training.recipe import Recipe
from ..units import format_bytes
from .cost import Cost
from .held import IDLE, ROUGHLY

# What is trained: every weight, low-rank additions to a frozen model, or such additions to a frozen
# model in 4 bits.
METHODS = ("full", "lora", "qlora")

# In the order of their distance from plain AdamW, which is the order of the table.
OPTIMIZERS = tuple(name for name, row in optimizers.OPTIMIZERS.items() if row.planned)
EQUAL_TIME = 1.10  # estimated times within this factor count as equal


@dataclass(frozen=True)
class Option:
    """A recipe with its micro-batch, the bytes that it needs, and its time.

    ``parts``: bytes that a card holds besides the prediction's live bytes (empty for target "cpu").
    ``needs``: the sum of all. ``spare``: the bytes that the card has left (negative: missing).
    ``seconds``: the estimated time of one token. With several ``cards``, micro-batch and bytes are
    those of each card, and the time is that of all. ``has_adapters``: the model came with adapters.
    ``margin``: the share of ``needs`` that has to stay free besides. ``cost``: the terms of
    ``seconds``, if they are known. ``machines``: how many have so many cards.
    """

    recipe: Recipe
    micro_batch: int
    seconds: float
    card_bytes: int
    prediction: Prediction
    parts: dict[str, int]
    cards: int = 1
    has_adapters: bool = False
    margin: float = 0.0
    cost: Cost | None = None
    machines: int = 1

    @property
    def needs(self) -> int:
        return self.prediction.peak.total + sum(self.parts.values())

    @property
    def spare(self) -> int:
        return self.card_bytes - self.needs

    @property
    def kept_free(self) -> int:
        """The bytes of the margin."""
        return math.ceil(self.margin * self.needs)

    @property
    def fits(self) -> bool:
        return self.spare >= self.kept_free

    def __str__(self) -> str:
        cards = f" x {self.cards} cards" if self.cards > 1 else ""
        cards += f" x {self.machines} machines" if self.machines > 1 else ""
        return (
            f"{describe(self.recipe, self.has_adapters)}, micro-batch {self.micro_batch} x "
            f"{self.recipe.accumulation}{cards}"
        )

    def replayed(self) -> "Option":
        """The same, with what the allocator reserves replayed in place of an estimate."""
        if ROUGHLY not in self.parts:
            return self
        idle = max(self.prediction.replay_allocator() - self.prediction.peak.total, 0)
        parts = {IDLE: idle} | self.parts
        del parts[ROUGHLY]
        return replace(self, parts=parts)

    def why_not(self) -> str:
        """Why it does not fit, in bytes."""
        if 0 <= self.spare < self.kept_free:
            return (
                f"leaves {format_bytes(self.spare)}, and the margin of {self.margin:.1%} is "
                f"{format_bytes(self.kept_free)} (margin=0, --margin 0: none)"
            )
        peak = self.prediction.peak
        parts = {n: b for n, b in peak.by_category.items() if b >= 0.02 * peak.total} | self.parts
        held = ", ".join(
            f"{n} {format_bytes(b)}" for n, b in sorted(parts.items(), key=lambda p: -p[1])
        )
        phase = peak.phase.replace("_", " ")
        about = "about " if ROUGHLY in self.parts else ""
        missing = f"{about}{format_bytes(-self.spare)} more than there is"
        return f"needs {missing}: at the peak, in {phase}, {held}"


@dataclass(frozen=True)
class RuledOut:
    """A kind of recipe that was not predicted: ``needs``, the bytes that it needs at least, are too
    many already, or the recipe cannot be predicted.
    """

    recipe: Recipe
    needs: int
    why: str
    has_adapters: bool = False

    def __str__(self) -> str:
        return describe(self.recipe, self.has_adapters)


def method_of(recipe: Recipe, has_adapters: bool = False) -> str:
    if recipe.quantized_base:
        return "qlora"
    return "lora" if has_adapters or recipe.lora_rank else "full"


def describe(recipe: Recipe, has_adapters: bool = False) -> str:
    """A recipe in one line, with its options spelled as in ``Recipe``."""
    method = method_of(recipe, has_adapters)
    words = [method, recipe.precision or "precision=None", recipe.optimizer]
    words += ["in_backward"] if recipe.in_backward else []
    words += [f"sharding={recipe.sharding}"] if recipe.sharding else []
    words += [f"every_n_layers={recipe.every_n_layers}"] if recipe.every_n_layers else []
    words += [f"checkpointing={recipe.checkpointing}"] if recipe.checkpointing is not None else []
    words += [f"offload={recipe.offload}"] if recipe.offload else []
    words += ["chunked_loss"] if recipe.chunked_loss else []
    return ", ".join(words)


def rounds_weights(recipe: Recipe) -> bool:
    """Whether updates go to weights in 16 bits alone."""
    return recipe.precision is not None and not PRECISIONS[recipe.precision].exact_weights


def changes(recipe: Recipe) -> tuple[int, ...]:
    """How much training differs from plain AdamW on float32 weights, as a tuple that can be
    compared: the method, whether the optimizer steps in backward (then there is no ``Trainer``, no
    clipping and no accumulation), whether weights are rounded, and the optimizer. Chunks of the
    loss change nothing.

    Raises ``ValueError`` for an optimizer that ``plan`` does not try.
    """
    if recipe.optimizer not in OPTIMIZERS:
        raise ValueError(
            f"a plan does not compare optimizer={recipe.optimizer!r}: choose one of "
            f"{', '.join(map(repr, OPTIMIZERS))}"
        )
    return (
        METHODS.index(method_of(recipe)),
        int(recipe.in_backward),
        int(rounds_weights(recipe)),
        OPTIMIZERS.index(recipe.optimizer),
    )


def ordered(options: list[Option]) -> list[Option]:
    """Sort by estimated time; among times within 10 % of each other, the option that changes
    training least comes first. An option is left out if another one is better in time and bytes,
    and changes training no more.
    """
    undominated = [o for o in options if not any(_dominated(o, by) for by in options)]
    rest = sorted(undominated, key=lambda o: o.seconds)
    found: list[Option] = []
    while rest:
        equal = [o for o in rest if o.seconds <= rest[0].seconds * EQUAL_TIME]
        found += sorted(equal, key=_changes_then_time)
        rest = rest[len(equal) :]
    return found


def _changes_then_time(option: Option) -> tuple:
    """Of two that are as fast, the one whose loss is whole comes first."""
    return changes(option.recipe), option.seconds, option.recipe.chunked_loss


def _dominated(option: Option, by: Option) -> bool:
    """Whether ``by`` is better in time or bytes, no worse in the other, and changes no more."""
    better, worse = (
        (*changes(one.recipe), one.recipe.chunked_loss, one.seconds, one.needs)
        for one in (by, option)
    )
    return better != worse and all(a <= b for a, b in zip(better, worse, strict=True))
