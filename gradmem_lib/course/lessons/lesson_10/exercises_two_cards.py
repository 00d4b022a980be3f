"""Lesson 10's exercise about a recipe: a 70B on two cards of 24 GB."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ....training.recipe import Recipe
from ...judge.exercise import Exercise, Mistake
from ..shared.every_linear import without_needless_targets
from ..shared.settings import quietly

TWO_CARDS, TOKENS, RANK = "RTX 4090 24GB", 1024, 16
RANKS = 2
LONGEST = 5  # layers of a segment with which the usual recipe fits


def two_cards() -> Recipe:
    """A recipe with which Llama-2-70B learns on two cards of 24 GB, a row of 1,024 tokens on each,
    by adapters of rank 16.
    """
    return _but()()


def _but(**changed):
    fields = {
        "precision": "bf16",
        "sharding": "fsdp",
        "lora_rank": RANK,
        "quantized_base": True,
        "checkpointing": "per-layer",
    }
    return lambda: Recipe(**fields | changed)


def _config():
    from ....planning.models import known_model

    return known_model("Llama-2-70B")[1]


def _segment_length(recipe: Recipe) -> int:
    """The layers of a segment, where every segment but the last has as many; otherwise 0."""
    if recipe.checkpointing == "sqrt":
        return round(_config().num_hidden_layers ** 0.5)
    return recipe.checkpointing if isinstance(recipe.checkpointing, int) else 0


@lru_cache(maxsize=32)
def seventy_peak(recipe: Recipe, tokens: int = TOKENS):
    """The peak (a ``MemorySnapshot``) that is predicted for one of two ranks of Llama-2-70B, on a
    row of ``tokens``.
    """
    from ....prediction.predict import predict

    ask = {"batch_size": 1, "seq_len": tokens, "ranks": RANKS, "target": "cuda"}
    return predict(_config(), recipe=recipe, **ask).peak


_SAYS = {
    "one card": "no sharding is chosen, so one card must hold everything: 35 GB in 4 bits alone.",
    "copied": (
        "every card has a copy of the frozen base, 35 GB in 4 bits: only sharding='fsdp' cuts it."
    ),
    "gathered": (
        "zero2 keeps every layer gathered from forward to backward, so a card holds the "
        "whole base: sharding='fsdp' frees each layer."
    ),
    "every weight": (
        "every weight is trained, and so needs a gradient and states: choose adapters, "
        "lora_rank=16."
    ),
    "16 bits": (
        "half of the base in bf16 is 69 GB on each card: keep it in 4 bits, quantized_base=True."
    ),
    "activations": (
        "the activations of 80 layers are kept, more than 15 GB: checkpointing='per-layer'."
    ),
    "one in several": (
        "most layers have no checkpoint, and keep their activations, which do not fit: "
        "checkpointing='per-layer'."
    ),
    "long segments": (
        "backward runs all layers of a segment again before it frees one, and so many of them do "
        "not fit: choose shorter segments, or checkpointing='per-layer'."
    ),
    "float32": (
        "embeddings, head and activations are not in 4 bits but in float32: precision='bf16'."
    ),
    "rank": (
        "the adapters must have rank 16 and be on every linear layer: lora_rank=16, and no "
        "lora_targets."
    ),
}


def what_is_in_the_way(recipe: Recipe) -> str:
    """A key of ``_SAYS``, a peak in words, or nothing where ``recipe`` fits: by its choices first,
    and by ``predict`` where they could.
    """
    from ....planning.cards import CARDS

    recipe = without_needless_targets(recipe, _config())
    checkpointed = recipe.checkpointing is not None or recipe.every_n_layers is not None
    one_in_several = recipe.every_n_layers is not None and recipe.every_n_layers > 1
    length = _segment_length(recipe)
    for key, wrong in (
        ("one card", recipe.sharding is None),
        ("every weight", recipe.lora_rank is None),
        ("16 bits", not recipe.quantized_base),
        ("copied", recipe.sharding in ("ddp", "zero1")),
        ("gathered", recipe.sharding == "zero2"),
        ("rank", recipe.lora_rank != RANK or recipe.lora_targets),
        ("activations", not checkpointed),
        ("one in several", one_in_several),
        ("long segments", length > LONGEST),
        ("float32", recipe.precision != "bf16"),
    ):
        if wrong:
            return key
    # The usual answer fits, as claim C17 shows, and so it does with short segments, whose
    # prediction takes minutes. So a first check predicts nothing for them.
    with_every_layer = recipe
    if length:
        with_every_layer = replace(recipe, checkpointing="per-layer")
    if with_every_layer == two_cards():
        return ""
    peak = seventy_peak(recipe)
    if peak.total <= CARDS[TWO_CARDS].nbytes:
        return ""
    return (
        f"the peak of a card is {peak.total:,} bytes, but the card has "
        f"{CARDS[TWO_CARDS].nbytes:,}; the largest part is "
        f"{max(peak.by_category, key=peak.by_category.get)}"
    )


@quietly
def _observe(candidate):
    recipe = candidate()
    if not isinstance(recipe, Recipe):
        raise TypeError("return one Recipe, the same for both cards")
    return {"what is in the way": what_is_in_the_way(recipe)}


def _explain(got, expected):
    what = got["what is in the way"]
    return _SAYS.get(what, f"{what}." if what else None)


EXERCISES = (
    Exercise(
        id="10.7",
        title="a 70B on two cards",
        difficulty=2,
        minutes=3,
        trains="which part of a card's memory each choice cuts",
        reference=two_cards,
        observe=_observe,
        explain=_explain,
        mistakes=(
            Mistake("one card", _but(sharding=None), _SAYS["one card"]),
            Mistake("ddp", _but(sharding="ddp"), _SAYS["copied"]),
            Mistake("zero2", _but(sharding="zero2"), _SAYS["gathered"]),
            Mistake("16 bits", _but(quantized_base=False), _SAYS["16 bits"]),
            Mistake(
                "every weight", _but(lora_rank=None, quantized_base=False), _SAYS["every weight"]
            ),
            Mistake("no checkpoints", _but(checkpointing=None), _SAYS["activations"]),
        ),
    ),
)
