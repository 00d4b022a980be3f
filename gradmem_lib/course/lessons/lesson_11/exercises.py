"""Lesson 11's exercises: a recipe is judged by what it needs in its puzzle, and told what stands in
the way.
"""

from ....names import CATEGORIES
from ....planning.held import resident_bytes
from ....training.recipe import Recipe
from ....units import format_bytes
from ...judge.compare import Measured, describe
from ...judge.exercise import Exercise, Unusable
from ..shared.settings import quietly
from .puzzles import Puzzle, Weighed, puzzle, search
from .stars import award

# What stands in the way of a recipe that does not fit.
WHY = {
    "parameters": "the weights alone do not fit.",
    "gradients": "weights and gradients alone do not fit, and a smaller micro-batch does not make "
    "them smaller.",
    "optimizer": "weights, gradients and optimizer states do not fit, and a smaller micro-batch "
    "does not make them smaller.",
    "full": "weights, gradients and states leave no room for what a card holds besides live "
    "tensors.",
    "kept": "weights, gradients and states would fit; the activations that every layer keeps for "
    "its backward do not.",
    "step": "the peak is in the optimizer's step, where the activations are gone: checkpoints do "
    "not lower it.",
    "head": "weights, gradients and states would fit; most of the other tensors at the peak are "
    "the head's: the logits of a micro-batch, one number for each token and each word.",
    "beside": "weights, gradients and states would fit; the rest at the peak does not fit beside "
    "them.",
}


def in_the_way(one: Puzzle, recipe: Recipe, weighed: Weighed) -> str:
    """A key of ``WHY`` for a recipe that does not fit."""
    here = search(one)
    resident = 0
    held = resident_bytes(here.work, recipe, one.cards)
    for category, nbytes in held.items():
        resident += nbytes
        if resident > weighed.room:
            return category
    if resident > here.available:
        return "full"
    if weighed.phase == "optimizer_step":
        return "step"
    # A micro-batch's logits when backward begins: themselves and their gradient, 8 bytes for each.
    tokens = one.rows // one.cards // recipe.accumulation * one.tokens
    logits = 0 if recipe.chunked_loss else 8 * tokens * here.work.sized.vocabulary
    activations = weighed.held.get("activations", 0)
    temporaries = weighed.held.get("temporaries", 0)
    other = weighed.held.get("other", 0)
    if temporaries > activations + other and 0.95 * logits < temporaries < 1.05 * logits:
        return "head"
    is_plain = not (recipe.checkpointing or recipe.every_n_layers or recipe.offload)
    if is_plain and resident + activations > weighed.room:
        return "kept"
    return "beside"


def recipe_cases(one: Puzzle):
    @quietly
    def cases(answer):
        wrong, weighed = one.judge(answer)
        if weighed is None:
            # the sentence as a number of bytes, so that each broken rule is told from the others
            yield "the recipe", Measured(None, int.from_bytes(wrong.encode()), 0, wrong)
            return
        if wrong:
            why = WHY[in_the_way(one, one.recipe(answer), weighed)]
            wrong = f"{why} {wrong[0].upper()}{wrong[1:]}"
        yield "the recipe", Measured(None, weighed.needs, weighed.room, wrong)

    return cases


BF16 = {"precision": "bf16", "optimizer": "adamw-fused"}
LORA = BF16 | {"lora_rank": 16}
QLORA = LORA | {"quantized_base": True}
AUTOCAST = {"precision": "autocast-bf16"}
AGAIN = {"checkpointing": "per-layer"}
ADAFACTOR = {"optimizer": "adafactor-torch"}
CHUNKS = {"chunked_loss": True}
FSDP = {"sharding": "fsdp"}


def recipe_exercise(id: str, tempting: str) -> Exercise:
    """``tempting``: recipes and what is said of them; tools/record_puzzles.py records their
    bytes.
    """
    one = puzzle(id)
    best, _ = one.best()
    return Exercise(
        id, best, recipe_cases(one), tempting, afterwards=lambda answer: award(one, answer)
    )


HALF_A_GIB = recipe_exercise(
    "11.1",
    """
    {}
        the weights alone do not fit.
    BF16
        weights and gradients alone do not fit, and a smaller micro-batch does not make
        them smaller.
    LORA | AUTOCAST
        autocast leaves the weights in float32, frozen or not.
    LORA
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    QLORA | AUTOCAST
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    LORA | {"accumulation": 3}
        accumulation=3 must divide the number of rows of a card, which is 4.
    """,
)

EVERY_WEIGHT_OF_GPT2_XL = recipe_exercise(
    "11.2",
    """
    BF16 | AGAIN | {"accumulation": 8}
        weights, gradients and optimizer states do not fit, and a smaller micro-batch
        does not make them smaller.
    BF16 | AGAIN | {"optimizer": "adamw-8bit", "accumulation": 8}
        weights, gradients and optimizer states do not fit, and a smaller micro-batch
        does not make them smaller.
    BF16 | AUTOCAST | AGAIN | ADAFACTOR | {"accumulation": 8}
        weights and gradients alone do not fit, and a smaller micro-batch does not make
        them smaller.
    BF16 | ADAFACTOR | {"accumulation": 8}
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    LORA | {"accumulation": 8}
        the condition is broken: every weight must be trained, but lora_rank freezes all
        of them.
    BF16 | AGAIN | ADAFACTOR | {"in_backward": True, "accumulation": 8}
        a gradient that is freed cannot be added to.
    """,
)

EVERY_WEIGHT_OF_A_7B = recipe_exercise(
    "11.3",
    """
    BF16 | AGAIN | ADAFACTOR | {"accumulation": 8}
        weights and gradients alone do not fit, and a smaller micro-batch does not make
        them smaller.
    BF16 | AGAIN | {"in_backward": True}
        weights, gradients and optimizer states do not fit, and a smaller micro-batch
        does not make them smaller.
    BF16 | AGAIN | {"optimizer": "adamw-8bit", "in_backward": True}
        weights, gradients and optimizer states do not fit, and a smaller micro-batch
        does not make them smaller.
    BF16 | AUTOCAST | AGAIN | ADAFACTOR | {"in_backward": True}
        the weights alone do not fit.
    BF16 | ADAFACTOR | {"in_backward": True}
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    LORA | AGAIN
        the condition is broken: every weight must be trained, but lora_rank freezes all
        of them.
    """,
)

SIXTEEN_BITS = recipe_exercise(
    "11.4",
    """
    QLORA | AGAIN | {"accumulation": 8}
        the condition is broken: no weight may be kept in 4 bits, but quantized_base
        keeps the frozen weights in 4 bits.
    LORA | AUTOCAST | AGAIN | {"accumulation": 8}
        autocast leaves the weights in float32, frozen or not.
    LORA | {"accumulation": 8}
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    LORA | AGAIN
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    BF16 | AGAIN | ADAFACTOR | {"accumulation": 8}
        weights and gradients alone do not fit, and a smaller micro-batch does not make
        them smaller.
    LORA | {"checkpointing": "attention", "accumulation": 8}
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    """,
)

NOTHING_TWICE = recipe_exercise(
    "11.5",
    """
    QLORA | AGAIN | {"accumulation": 8}
        the condition is broken: no layer may run twice, but checkpoints run layers
        again in backward.
    LORA | {"offload": "activations", "accumulation": 8}
        the weights alone do not fit.
    QLORA | {"accumulation": 8}
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    QLORA | {"offload": "activations"}
        weights, gradients and states would fit; most of the other tensors at the peak
        are the head's: the logits of a micro-batch, one number for each token and each
        word.
    QLORA | {"offload": "boundaries", "accumulation": 8}
        boundaries are the inputs of checkpointed layers, and this recipe has none.
    """,
)

SMALLEST_CARD = recipe_exercise(
    "11.6",
    """
    QLORA | AGAIN | {"accumulation": 8}
        the head makes the peak: the logits of a micro-batch have one number for each
        token and each word.
    LORA | AGAIN | {"accumulation": 8}
        the weights alone do not fit.
    QLORA | CHUNKS | {"offload": "activations", "accumulation": 8}
        the condition is broken: nothing may wait in the host's memory, but offload
        moves tensors there.
    QLORA | CHUNKS | {"every_n_layers": 2, "accumulation": 8}
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    QLORA | CHUNKS | {"accumulation": 8}
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    QLORA | AGAIN | CHUNKS
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    """,
)

MANY_WORDS = recipe_exercise(
    "11.7",
    """
    LORA | AGAIN | {"accumulation": 8}
        the head makes the peak: the logits of a micro-batch have one number for each
        token and each word.
    LORA | CHUNKS | {"accumulation": 8}
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    QLORA | AGAIN | {"accumulation": 8}
        the condition is broken: no weight may be kept in 4 bits, but quantized_base
        keeps the frozen weights in 4 bits.
    LORA | AGAIN | CHUNKS
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    LORA | AUTOCAST | AGAIN | {"accumulation": 8}
        the weights alone do not fit.
    BF16 | AGAIN | ADAFACTOR | CHUNKS | {"accumulation": 8}
        weights and gradients alone do not fit, and a smaller micro-batch does not make
        them smaller.
    """,
)

LONG_ROW = recipe_exercise(
    "11.8",
    """
    QLORA | AGAIN
        the head makes the peak: the logits of a micro-batch have one number for each
        token and each word.
    LORA | AGAIN | CHUNKS
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    QLORA | CHUNKS
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    QLORA | AGAIN | CHUNKS
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    QLORA | AGAIN | CHUNKS | {"accumulation": 2}
        accumulation=2 must divide the number of rows of a card, which is 1.
    QLORA | AGAIN | CHUNKS | {"attention": "eager"}
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    """,
)

EXPERTS = recipe_exercise(
    "11.9",
    """
    BF16 | AGAIN | ADAFACTOR | {"accumulation": 8}
        weights and gradients alone do not fit, and a smaller micro-batch does not make
        them smaller.
    LORA | {"accumulation": 8}
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    QLORA | {"accumulation": 8}
        4 bits are for linear layers, and a mixture's experts are not linear layers:
        nearly all of the weights stay in 16 bits.
    LORA | AUTOCAST | AGAIN | {"accumulation": 8}
        the weights alone do not fit.
    LORA | AGAIN
        weights, gradients and states would fit; most of the other tensors at the peak
        are the head's: the logits of a micro-batch, one number for each token and each
        word.
    BF16 | AGAIN | ADAFACTOR | CHUNKS | {"in_backward": True}
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    """,
)

EIGHT_CARDS = recipe_exercise(
    "11.10",
    """
    BF16 | AGAIN | {"sharding": "ddp"}
        the weights alone do not fit.
    BF16 | AGAIN | {"sharding": "zero1"}
        the weights alone do not fit.
    BF16 | AGAIN | {"sharding": "zero2"}
        the weights alone do not fit.
    BF16 | AGAIN | FSDP | {"precision": "float32-master"}
        weights, gradients and optimizer states do not fit, and a smaller micro-batch
        does not make them smaller.
    BF16 | AGAIN
        8 cards train together, but the recipe does not say how they share: set
        sharding.
    LORA | AGAIN | FSDP
        the condition is broken: every weight must be trained, but lora_rank freezes all
        of them.
    """,
)

TWO_CARDS = recipe_exercise(
    "11.11",
    """
    LORA | AGAIN | FSDP
        the weights alone do not fit.
    QLORA | AGAIN | {"sharding": "zero2"}
        the weights alone do not fit.
    QLORA | AGAIN | {"sharding": "ddp"}
        the weights alone do not fit.
    QLORA | FSDP | {"accumulation": 2}
        weights, gradients and states would fit; the activations that every layer keeps
        for its backward do not.
    QLORA | AGAIN | FSDP | {"accumulation": 2}
        weights, gradients and states would fit; the rest at the peak does not fit
        beside them.
    QLORA | AGAIN | CHUNKS | FSDP
        cards gather their weights in the model's own call, which chunked_loss does not use:
        a smaller micro-batch has fewer logits too.
    """,
)


# 11.12


def category_cases(answer):
    word = str(answer).strip(" .!'\"").lower().removeprefix("the ")
    if f"{word}s" in CATEGORIES:
        word += "s"
    if word not in CATEGORIES:
        names = ", ".join(CATEGORIES)
        raise Unusable(f"the answer is the name of one category, {names}, not {describe(answer)}")
    yield "the part that forbids it", word


def forbidden(answer) -> str:
    """Why nothing fits, once it has been found out."""
    here = search(puzzle("11.12"))
    held = resident_bytes(here.work, Recipe(precision="bf16"))
    both = held["parameters"] + held["gradients"]
    return (
        f"★★★ (weights {format_bytes(held['parameters'])} and gradients "
        f"{format_bytes(held['gradients'])} are alive together at the end of backward: "
        f"{format_bytes(both)}, and the card has {format_bytes(here.card.nbytes)})"
    )


IMPOSSIBLE = Exercise(
    "11.12",
    "gradients",
    category_cases,
    """
    "parameters"
        the parameters alone fit: in 16 bits they take little more than half of the card.
    "optimizer"
        the optimizer's states can be made very small: Adafactor keeps a sum for each row and
        column.
    "activations"
        activations can be made small: use one row at a time, and checkpoints in every layer.
    "temporaries"
        temporaries can be made small: use one row at a time, the loss in chunks, an optimizer that
        works in place.
    "other"
        'other' is CUDA's context and the allocator's idle blocks: without them the recipe would not
        fit either.
    """,
    afterwards=forbidden,
)
