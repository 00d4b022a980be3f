"""Lesson 01's exercises on formulas: what eager attention saves, what the logits need, what a
recipe keeps.
"""

from __future__ import annotations

from ast import literal_eval
from contextlib import suppress
from math import prod

from ...judge.exercise import Exercise, Mistake, calls
from ...judge.hints import shares, times


def eager_surplus(batch: int, seq_len: int, heads: int) -> int:
    """Bytes that eager attention saves above fused attention, in one float32 block."""
    softmax = 4 * batch * heads * seq_len * seq_len
    log_sum_exp = 4 * batch * heads * seq_len
    return softmax - log_sum_exp


def _explain_surplus(got, expected):
    cases = {case: literal_eval(case) for case in expected}
    softmax = {
        case: 4 * batch * heads * seq_len**2 for case, (batch, seq_len, heads) in cases.items()
    }
    rows = {case: softmax[case] / seq_len for case, (_, seq_len, _) in cases.items()}
    tokens = {case: rows[case] / heads for case, (_, _, heads) in cases.items()}
    found = shares(got, softmax, rows, tokens)
    if found is None:
        return None
    squares, rows, tokens = found
    if squares == 2:
        return (
            "two squares are counted, the scores and their softmax: autograd saves only the "
            "softmax."
        )
    if squares == 1 and tokens:
        return (
            "the log-sum-exp is one number for each row of scores, and every head has rows of "
            "its own."
        )
    if squares == 1 and rows > 0 and rows != 1:
        return (
            f"{4 * rows:g} bytes a row of scores are added: eager attention saves only the softmax "
            "more, and fused attention saves the log-sum-exp."
        )
    if squares == 1 and rows > 0:
        return (
            "the log-sum-exp is added: fused attention saves it instead of the softmax, so "
            "subtract it."
        )
    if squares == 1:
        return f"the log-sum-exp has {-4 * rows:g} bytes a row here: it is one float32, 4 bytes."
    return (
        f"your answer has {squares:.4g} times the softmax: 4 bytes a number, one square for each "
        "head of each sequence."
    )


def logits_spike(batch: int, seq_len: int, vocab: int) -> int:
    """Bytes around the loss when its backward begins, for a model of any precision: three float32
    tensors.
    """
    return 3 * 4 * batch * seq_len * vocab


def _explain_spike(got, expected):
    logits = {case: prod(literal_eval(case)) for case in expected}
    found = shares(got, logits, {case: prod(literal_eval(case)[:2]) for case in expected})
    if found is None or not found[0]:
        return None
    if found[0] == 12:
        return (
            f"{found[1]:g} bytes a token too many are counted: count only the three large tensors."
        )
    return (
        f"your answer has {found[0]:.4g} bytes a logit: three float32 tensors of that shape "
        "make 12."
    )


def bytes_per_parameter(recipe: str) -> int:
    """Bytes that training with AdamW keeps for each parameter: weight, gradient, both moments,
    master copy.
    """
    return {
        "float32": 4 + 4 + 8,
        "bf16": 2 + 2 + 4,
        "autocast-bf16": 4 + 4 + 8,
        "float32-master": 2 + 2 + 4 + 8,
    }[recipe]


_RECIPES = ("float32", "bf16", "autocast-bf16", "float32-master")
# As the exercise called them at first.
_BEFORE = {"autocast-bf16": "autocast", "float32-master": "float32 master"}


def _asked(answer, recipe: str):
    """What ``answer`` says of ``recipe``.

    One that was written for the names of before is asked by those.
    """
    try:
        return answer(recipe)
    except KeyError as error:
        with suppress(KeyError):
            return answer(_BEFORE[recipe])
        raise error


# Of one parameter, in bytes: what each recipe keeps.
_KEPT = {
    "float32": {"weight": 4, "gradient": 4, "two moments": 8},
    "bf16": {"weight": 2, "gradient": 2, "two moments": 4},
    "autocast-bf16": {"weight": 4, "gradient": 4, "two moments": 8},
    "float32-master": {"weight": 2, "gradient": 2, "two moments": 8, "master copy": 4},
}


def _explain_recipes(got, expected):
    if not all(isinstance(value, (int, float)) for value in got.values()):
        return None
    if factor := shares(got, expected):
        bits = ": these are bits, not bytes" if factor == [8] else ""
        return f"every recipe is {times(factor[0])}{bits}."
    case, off = next(
        (case, got[case] - right) for case, right in expected.items() if got[case] != right
    )
    recipe = literal_eval(case)
    kept = _KEPT[recipe] | {"one of its moments": _KEPT[recipe]["two moments"] // 2}
    alike = [
        part if part.startswith("one") else f"its {part}"
        for part, size in kept.items()
        if size == abs(off)
    ]
    if off == -kept["two moments"] - kept["gradient"]:
        alike = ["its gradient and its two moments"]
    few = "few" if off < 0 else "many"
    if alike:
        return f"{recipe}: {abs(off):g} bytes too {few}, as much as {' or '.join(alike)}."
    parts = ", ".join(f"its {part}" for part in _KEPT[recipe])
    return f"{recipe}: {abs(off):g} bytes too {few}: count {parts}, each in its own dtype."


def _recipe(**wrong):
    right = {recipe: bytes_per_parameter(recipe) for recipe in _RECIPES}
    return lambda recipe: {**right, **{name.replace("_", "-"): n for name, n in wrong.items()}}[
        recipe
    ]


EXERCISES = (
    Exercise(
        id="1.3",
        title="what eager attention saves on top",
        difficulty=2,
        minutes=5,
        trains="the one term that grows with the square of the sequence",
        reference=eager_surplus,
        observe=calls((1, 128, 4), (2, 256, 8), (8, 64, 3), hidden=((3, 100, 5), (5, 7, 2))),
        explain=_explain_surplus,
        mistakes=(
            Mistake(
                "one head",
                lambda batch, seq_len, heads: 4 * batch * seq_len * (seq_len - 1),
                "this counts one head: every head has scores of its own.",
            ),
            Mistake(
                "one sequence",
                lambda batch, seq_len, heads: 4 * heads * seq_len * (seq_len - 1),
                "this counts one sequence: every sequence of the batch has scores of its own.",
            ),
            Mistake(
                "log-sum-exp forgotten",
                lambda batch, seq_len, heads: 4 * batch * heads * seq_len**2,
                (
                    "almost: fused attention saves something instead, one float32 (the "
                    "log-sum-exp) for each row of scores."
                ),
            ),
            Mistake(
                "lower triangle",
                lambda batch, seq_len, heads: 2 * batch * heads * seq_len * (seq_len + 1),
                (
                    "this counts the lower triangle: a causal mask fills the rest with zeros, and "
                    "zeros take bytes too."
                ),
            ),
            Mistake(
                "half precision",
                lambda batch, seq_len, heads: 2 * batch * heads * seq_len * (seq_len - 1),
                (
                    "this is half of it: with 2 bytes a number, the block is in float32; with the "
                    "lower triangle alone, zeros take bytes too."
                ),
            ),
            Mistake(
                "not squared",
                lambda batch, seq_len, heads: 4 * batch * heads * seq_len,
                "this grows with the sequence: the scores grow with its square.",
            ),
        ),
    ),
    Exercise(
        id="1.4",
        title="the logits spike",
        difficulty=2,
        minutes=5,
        trains="seeing the loss as the largest layer of a small model",
        reference=logits_spike,
        observe=calls(
            (1, 128, 49152), (4, 256, 8192), (2, 32, 1000), hidden=((3, 100, 500), (5, 7, 11))
        ),
        explain=_explain_spike,
        mistakes=(
            Mistake(
                "once",
                lambda batch, seq_len, vocab: 4 * batch * seq_len * vocab,
                "this counts one tensor: the loss's backward holds three of that shape at once.",
            ),
            Mistake(
                "without the last gradient",
                lambda batch, seq_len, vocab: 8 * batch * seq_len * vocab,
                (
                    "this counts two tensors: the saved log-softmax, its gradient, and the "
                    "gradient of the logits make three."
                ),
            ),
            Mistake(
                "bf16",
                lambda batch, seq_len, vocab: 6 * batch * seq_len * vocab,
                (
                    "this takes 2 bytes a number: the loss is computed in float32, whatever the "
                    "model's precision."
                ),
            ),
            Mistake(
                "shifted",
                lambda batch, seq_len, vocab: 12 * batch * (seq_len - 1) * vocab,
                (
                    "this leaves out the last position: transformers shifts the labels, and the "
                    "logits keep their length."
                ),
            ),
            Mistake(
                "without the batch",
                lambda batch, seq_len, vocab: 12 * seq_len * vocab,
                "this counts one sequence: multiply by the batch.",
            ),
        ),
    ),
    Exercise(
        id="1.5",
        title="bytes per parameter, by recipe",
        difficulty=1,
        minutes=5,
        trains="telling precision recipes apart by what they keep",
        reference=bytes_per_parameter,
        observe=lambda answer: {f"({recipe!r})": _asked(answer, recipe) for recipe in _RECIPES},
        explain=_explain_recipes,
        mistakes=(
            Mistake(
                "float32 moments in bf16",
                _recipe(bf16=12),
                (
                    "the bf16 recipe has 12 bytes here: PyTorch's moments have the parameters' "
                    "dtype, so they are bf16 too."
                ),
            ),
            Mistake(
                "autocast halves",
                _recipe(autocast_bf16=8),
                (
                    "autocast-bf16 has 8 bytes here: autocast casts inside the forward pass, and "
                    "keeps weights, gradients and moments in float32."
                ),
            ),
            Mistake(
                "autocast keeps both",
                _recipe(autocast_bf16=18),
                (
                    "autocast-bf16 has 18 bytes here: its bf16 copies live only while the forward "
                    "and backward pass run."
                ),
            ),
            Mistake(
                "twelve beside a master",
                _recipe(float32_master=12),
                (
                    "the master recipe has 12 bytes here: it keeps a float32 copy of the weights "
                    "(4) and both moments in float32 (8)."
                ),
            ),
            Mistake(
                "one moment",
                _recipe(float32=12, bf16=6, autocast_bf16=12, float32_master=12),
                "this counts one moment: Adam keeps two.",
            ),
            Mistake(
                "no gradients",
                _recipe(float32=12, bf16=6, autocast_bf16=12, float32_master=14),
                "the gradient is missing: it is as large as the weight.",
            ),
            Mistake(
                "no moments",
                _recipe(float32=8, bf16=4, autocast_bf16=8, float32_master=8),
                "Adam's two moments are missing: each is as large as a weight or its master.",
            ),
        ),
    ),
)
