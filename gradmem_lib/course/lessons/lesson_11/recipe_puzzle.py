"""What makes an exercise of a puzzle: a recipe is judged by what it needs there, and told what
stands in the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....planning.held import resident_bytes
from ....training.recipe import Recipe
from ...judge.compare import Measured
from ...judge.exercise import Exercise, Mistake
from ..shared.settings import quietly
from .puzzles import CONDITIONS, Puzzle, Weighed, puzzle, search
from .stars import award

WHY = {
    "weights": "the weights alone do not fit.",
    "gradients": (
        "weights and gradients alone do not fit, and a smaller micro-batch does not make "
        "them smaller."
    ),
    "states": (
        "weights, gradients and optimizer states do not fit, and a smaller micro-batch does "
        "not make them smaller."
    ),
    "full": (
        "weights, gradients and states leave no room for what a card holds besides live tensors."
    ),
    "kept": (
        "weights, gradients and states would fit; the activations that every layer keeps for "
        "its backward do not."
    ),
    "step": (
        "the peak is in the optimizer's step, where the activations are gone: checkpoints do "
        "not lower it."
    ),
    "head": (
        "weights, gradients and states would fit; most of the rest is the head's: the logits "
        "of a micro-batch, one number for each token and each word."
    ),
    "beside": (
        "weights, gradients and states would fit; the other tensors at the peak do not fit "
        "beside them."
    ),
}
BROKEN = {key: says for key, (_, _, says) in CONDITIONS.items()}

BF16: dict[str, Any] = {"precision": "bf16", "optimizer": "adamw-fused"}
LORA = BF16 | {"lora_rank": 16}
QLORA = LORA | {"quantized_base": True}
AGAIN = {"checkpointing": "per-layer"}


@dataclass(frozen=True)
class Needs(Measured):
    """What a recipe needs, ``why`` that is too much, and for ``explain`` alone."""

    why: str = ""


def in_the_way(one: Puzzle, recipe: Recipe, weighed: Weighed) -> str:
    """A key of ``WHY`` for a recipe that does not fit."""
    held = resident_bytes(search(one).work, recipe, one.cards)
    for category, why in (
        ("parameters", "weights"),
        ("gradients", "gradients"),
        ("optimizer", "states"),
    ):
        if sum(list(held.values())[: list(held).index(category) + 1]) > weighed.room:
            return why
    if sum(held.values()) > search(one).available:
        return "full"
    if weighed.phase == "optimizer_step":
        return "step"
    beside = {name: n for name, n in weighed.held.items() if name not in held}
    logits, temporaries = _logits(one, recipe), beside.get("temporaries", 0)
    if temporaries > beside.get("activations", 0) and 0.95 * logits < temporaries < 1.05 * logits:
        return "head"
    plain = (
        recipe.checkpointing is None and recipe.every_n_layers is None and recipe.offload is None
    )
    return "kept" if plain and max(beside, key=beside.__getitem__) == "activations" else "beside"


def _logits(one: Puzzle, recipe: Recipe) -> int:
    """Bytes of a micro-batch's logits when backward begins: themselves and their gradient, with 8
    bytes for each; 0 in chunks.
    """
    tokens = one.rows // one.cards // recipe.accumulation * one.tokens
    return 0 if recipe.chunked_loss else 8 * tokens * search(one).work.vocabulary


def puzzle_exercise(
    id: str, difficulty: int, minutes: int, trains: str, *mistakes: tuple
) -> Exercise:
    """``mistakes``: (name, options of a recipe, what is said of it)."""
    one = puzzle(id)

    @quietly
    def observe(answer: Any) -> Any:
        wrong, weighed = one.judge(answer)
        if weighed is None:
            return wrong
        why = in_the_way(one, one.recipe(answer), weighed) if wrong else ""
        return Needs(
            "", weighed.needs, weighed.room, f"{str(weighed)[0].upper()}{str(weighed)[1:]}", why
        )

    def explain(got: Any, expected: Any) -> str:
        return WHY[got.why] if isinstance(got, Needs) else got

    known = tuple(Mistake(name, options, says) for name, options, says in mistakes)
    return Exercise(
        id=id,
        title=one.title,
        difficulty=difficulty,
        minutes=minutes,
        trains=trains,
        reference=one.best()[0],
        observe=observe,
        explain=explain,
        afterwards=lambda answer: award(one, answer),
        mistakes=known,
    )
