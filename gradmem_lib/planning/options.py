"""One way to train, with what it needs and what it takes; and which of several comes first."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..prediction.predict import Prediction
from ..training.recipe import Recipe
from ..units import format_bytes

METHODS = {
    "full": "every weight is trained",
    "lora": "low-rank additions are trained on a frozen model",
    "qlora": "the same, and the frozen model is kept in 4 bits",
}

# By how far they are from plain AdamW. transformers' own Adafactor needs more than torch's, and no less time.
OPTIMIZERS = ("adamw-fused", "adamw-8bit", "adafactor-torch")
EQUAL_TIME = 1.10  # what an estimate of time cannot tell apart


@dataclass(frozen=True)
class Option:
    """One way to train: a recipe with its micro-batch, what it needs, and what it takes.

    ``needs`` is in bytes, ``parts`` are its parts beyond the live bytes of the prediction (empty for target "cpu"), ``spare``
    is what the card has left (negative: what it lacks). ``seconds`` is the estimated time of one token.
    """

    recipe: Recipe
    method: str
    micro_batch: int
    seconds: float
    card_bytes: int
    prediction: Prediction
    parts: dict[str, int]
    needs: int

    @property
    def spare(self) -> int:
        return self.card_bytes - self.needs

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    def __str__(self) -> str:
        return describe(self.recipe, self.method, self.micro_batch)

    def why_not(self) -> str:
        """What stands in the way, in bytes."""
        peak = self.prediction.peak
        parts = {n: b for n, b in peak.by_category.items() if b >= 0.02 * peak.total} | self.parts
        held = ", ".join(
            f"{name} {format_bytes(n)}" for name, n in sorted(parts.items(), key=lambda p: -p[1])
        )
        phase = peak.phase.replace("_", " ")
        return f"needs {format_bytes(-self.spare)} more than there is: at the peak, in {phase}, {held}"

    def to_dict(self) -> dict:
        peak = self.prediction.peak
        return {
            "method": self.method,
            "recipe": {k: v for k, v in asdict(self.recipe).items()},
            "micro_batch": self.micro_batch,
            "needs": self.needs,
            "spare": self.spare,
            "estimated_seconds_per_token": self.seconds,
            "peak": {"total": peak.total, "phase": peak.phase, **peak.by_category},
            "beyond_the_peak": dict(self.parts),
        }


@dataclass(frozen=True)
class RuledOut:
    """A kind of recipe that was not predicted, since ``needs`` bytes that it cannot do without are too many already."""

    recipe: Recipe
    method: str
    needs: int
    why: str

    def __str__(self) -> str:
        return describe(self.recipe, self.method, None)


def describe(recipe: Recipe, method: str, micro_batch: int | None) -> str:
    """A recipe in a line, its options spelled as ``Recipe`` does."""
    words = [method, recipe.precision, recipe.optimizer]
    words += ["in_backward"] if recipe.in_backward else []
    words += [f"every_n_layers={recipe.every_n_layers}"] if recipe.every_n_layers else []
    words += [f"checkpointing={recipe.checkpointing}"] if recipe.checkpointing is not None else []
    words += ["chunked_loss"] if recipe.chunked_loss else []
    if micro_batch is not None:
        words.append(f"micro-batch {micro_batch} x {recipe.accumulation}")
    return ", ".join(words)


def ordered_options(options: list[Option]) -> list[Option]:
    """By estimated time; of those within 10 % of each other, the one that changes training least comes first."""
    rest, ordered = sorted(options, key=lambda o: o.seconds), []
    while rest:
        equal = [o for o in rest if o.seconds <= rest[0].seconds * EQUAL_TIME]
        ordered += sorted(equal, key=lambda o: (_changes(o), o.seconds))
        rest = rest[len(equal) :]
    return ordered


def worthwhile(options: list[Option]) -> list[Option]:
    """Without those that another one beats in time and bytes alike, and changes training no more than they do."""

    def beaten(o: Option, by: Option) -> bool:
        pairs = [
            *zip(_changes(by)[:3], _changes(o)[:3], strict=True),
            (by.seconds, o.seconds),
            (by.needs, o.needs),
        ]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    return [o for o in options if not any(beaten(o, by) for by in options)]


def _changes(option: Option) -> tuple[int, ...]:
    """How far the result of training is from that of plain AdamW on float32 weights, as far as it can be put in order."""
    recipe = option.recipe
    return (
        list(METHODS).index(option.method),
        OPTIMIZERS.index(recipe.optimizer),
        recipe.precision == "bf16",
        recipe.in_backward,
        recipe.chunked_loss,
    )
