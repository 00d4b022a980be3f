"""Lesson 11's puzzles beyond the layers: a large head, long rows, experts, several cards, and one
that cannot be solved.
"""

from ....names import CATEGORIES
from ....planning.held import resident_bytes
from ....units import format_bytes
from ...judge.compare import describe
from ...judge.exercise import Exercise, Mistake
from .puzzles import puzzle, search
from .recipe_puzzle import AGAIN, BF16, BROKEN, LORA, QLORA, WHY, puzzle_exercise

_LOGITS = (
    "the head makes the peak: the logits of a micro-batch have one number for each token and each "
    "word."
)
_CUT = BF16 | AGAIN | {"sharding": "fsdp"}
_TWO = QLORA | AGAIN | {"sharding": "fsdp"}
FORBIDS = puzzle("11.12")


def _forbidden(answer) -> str:
    """Why nothing fits, once it has been found out."""
    from ....training.recipe import Recipe

    held = resident_bytes(search(FORBIDS).work, Recipe(precision="bf16"))
    both = held["parameters"] + held["gradients"]
    room = format_bytes(search(FORBIDS).card.nbytes)
    return (
        f"★★★ (weights {format_bytes(held['parameters'])} and gradients "
        f"{format_bytes(held['gradients'])} are alive together at the end of backward: "
        f"{format_bytes(both)}, and the card has {room})"
    )


def _name(answer):
    word = answer.strip(" .!'\"").lower() if isinstance(answer, str) else ""
    word = word.removeprefix("the ").replace(" ", "_")
    found = [name for name in CATEGORIES if word in (name, name.removesuffix("s"))]
    return found[0] if found else describe(answer)


_INSTEAD = {
    "parameters": (
        "the parameters alone fit: in 16 bits they take little more than half of the card."
    ),
    "optimizer": (
        "the optimizer's states can be made very small: Adafactor keeps a sum for each "
        "row and column."
    ),
    "activations": (
        "activations can be made small: use one row at a time, and checkpoints in every layer."
    ),
    "temporaries": (
        "temporaries can be made small: use one row at a time, the loss in chunks, an "
        "optimizer that works in place."
    ),
    "other": (
        "'other' is CUDA's context and the allocator's idle blocks: without them the recipe "
        "would not fit either."
    ),
}


def _explain(got, expected) -> str:
    return f"the answer is the name of one category: {', '.join(CATEGORIES)}. You gave {got}."


EXERCISES = (
    puzzle_exercise(
        "11.7",
        2,
        3,
        "what a large vocabulary costs, and where",
        ("the whole loss", LORA | AGAIN | {"accumulation": 8}, _LOGITS),
        ("nothing runs again", LORA | {"chunked_loss": True, "accumulation": 8}, WHY["kept"]),
        ("4 bits", QLORA | AGAIN | {"accumulation": 8}, BROKEN["16 bits"]),
        ("all rows at once", LORA | AGAIN | {"chunked_loss": True}, WHY["beside"]),
        (
            "mixed precision",
            LORA | AGAIN | {"precision": "autocast-bf16", "accumulation": 8},
            WHY["weights"],
        ),
        (
            "every weight",
            BF16
            | AGAIN
            | {"optimizer": "adafactor-torch", "chunked_loss": True, "accumulation": 8},
            WHY["gradients"],
        ),
    ),
    puzzle_exercise(
        "11.8",
        3,
        3,
        "what grows with a row's length, when nothing else can be cut",
        ("the whole loss", QLORA | AGAIN, _LOGITS),
        ("in 16 bits", LORA | AGAIN | {"chunked_loss": True}, WHY["beside"]),
        ("nothing runs again", QLORA | {"chunked_loss": True}, WHY["kept"]),
        ("on the card", QLORA | AGAIN | {"chunked_loss": True}, WHY["beside"]),
        (
            "in pieces",
            QLORA | AGAIN | {"chunked_loss": True, "accumulation": 2},
            "the 1 row cannot be cut into 2 micro-batches: leave accumulation=1.",
        ),
        ("scores", QLORA | AGAIN | {"chunked_loss": True, "attention": "eager"}, WHY["beside"]),
    ),
    puzzle_exercise(
        "11.9",
        3,
        3,
        "weights that a token hardly uses, and that are there all the same",
        (
            "every weight",
            BF16 | AGAIN | {"optimizer": "adafactor-torch", "accumulation": 8},
            WHY["gradients"],
        ),
        ("nothing runs again", LORA | {"accumulation": 8}, WHY["kept"]),
        (
            "4 bits",
            QLORA | {"accumulation": 8},
            (
                "4 bits are for linear layers, and a mixture's experts are not linear layers: "
                "nearly all of the weights stay in 16 bits."
            ),
        ),
        (
            "mixed precision",
            LORA | AGAIN | {"precision": "autocast-bf16", "accumulation": 8},
            WHY["weights"],
        ),
        ("all rows at once", LORA | AGAIN, WHY["head"]),
        (
            "in backward",
            BF16
            | AGAIN
            | {"optimizer": "adafactor-torch", "in_backward": True, "chunked_loss": True},
            WHY["beside"],
        ),
    ),
    puzzle_exercise(
        "11.10",
        3,
        3,
        "what several cards share, and what each needs for itself",
        ("copies", _CUT | {"sharding": "ddp"}, WHY["weights"]),
        ("states cut", _CUT | {"sharding": "zero1"}, WHY["weights"]),
        ("gathered", _CUT | {"sharding": "zero2"}, WHY["weights"]),
        ("float32", _CUT | {"precision": "float32-master"}, WHY["states"]),
        (
            "one card",
            BF16 | AGAIN,
            "8 cards train together, but the recipe does not say how they share: set sharding.",
        ),
        ("adapters", LORA | AGAIN | {"sharding": "fsdp"}, BROKEN["full"]),
    ),
    puzzle_exercise(
        "11.11",
        3,
        3,
        "a model that no card of the two can hold",
        ("in 16 bits", _TWO | {"quantized_base": False}, WHY["weights"]),
        ("gathered", _TWO | {"sharding": "zero2"}, WHY["weights"]),
        ("copies", _TWO | {"sharding": "ddp"}, WHY["weights"]),
        ("nothing runs again", QLORA | {"sharding": "fsdp", "accumulation": 2}, WHY["kept"]),
        ("one row at a time", _TWO | {"accumulation": 2}, WHY["beside"]),
        (
            "the loss in chunks",
            _TWO | {"chunked_loss": True},
            (
                "Recipe refuses chunked_loss here: it does not use the model's own call, in which "
                "cards gather their weights; a smaller micro-batch has fewer logits too."
            ),
        ),
    ),
    Exercise(
        id="11.12",
        title=FORBIDS.title,
        difficulty=3,
        minutes=2,
        trains="naming what no recipe makes small enough",
        reference="gradients",
        observe=_name,
        explain=_explain,
        afterwards=_forbidden,
        mistakes=tuple(Mistake(name, name, says) for name, says in _INSTEAD.items()),
    ),
)
