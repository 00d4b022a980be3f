"""Lesson 02's exercises: Adam, one idea at a time, then what it costs in bf16, and a step that
needs one temporary.

A rule is a function ``rule(p, grad, state, ...)``: it moves the parameter ``p`` in place, and keeps
in the dict ``state`` whatever it must remember until the next step.
"""

from __future__ import annotations

from functools import partial
from math import floor, log2, prod, sqrt

import torch
from torch import Tensor

from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, calls, measure, outside_torch
from . import faulty_rules


def momentum(p: Tensor, grad: Tensor, state: dict, lr: float, beta: float) -> None:
    """Move ``p`` against m, the moving average of the gradients."""
    if not state:
        state["m"] = torch.zeros_like(p)
    m = state["m"]
    m.mul_(beta).add_(grad, alpha=1 - beta)
    p.sub_(lr * m)


def second_moment(p: Tensor, grad: Tensor, state: dict, lr: float, beta: float, eps: float) -> None:
    """Move ``p`` against the gradient, divided by the root of v, the moving average of its
    square.
    """
    if not state:
        state["v"] = torch.zeros_like(p)
    v = state["v"]
    v.mul_(beta).add_(grad * grad, alpha=1 - beta)
    p.sub_(lr * grad / (v.sqrt() + eps))


def adam(
    p: Tensor, grad: Tensor, state: dict, lr: float, beta1: float, beta2: float, eps: float
) -> None:
    """One step of Adam on ``p``: both moments, corrected for having started at zero."""
    if not state:
        state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["t"] += 1
    t, m, v = state["t"], state["m"], state["v"]
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).add_(grad * grad, alpha=1 - beta2)
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    p.sub_(lr * m_hat / (v_hat.sqrt() + eps))


def adamw(p: Tensor, grad: Tensor, state: dict, lr, beta1, beta2, eps, weight_decay) -> None:
    """One step of AdamW on ``p``: first the decay, then Adam."""
    p.mul_(1 - lr * weight_decay)
    adam(p, grad, state, lr, beta1, beta2, eps)


def half_gap(x: float) -> float:
    """Half the distance from ``x`` to the next larger bf16 number: anything smaller, added to x,
    changes nothing.
    """
    return 2.0 ** (floor(log2(x)) - 8)


def _explain_gap(got, expected):
    ratios = {
        float(case.strip("(),")): got[case] / right
        for case, right in expected.items()
        if isinstance(got[case], (int, float))
    }
    wrong = {x: ratio for x, ratio in ratios.items() if ratio != 1}
    if len(ratios) < len(expected) or not wrong:
        return None
    if wrong.keys() == {x for x in ratios if x != 0.5 and not 1 <= x < 2}:
        return "this is right at 0.5 and from 1 to 2, and wrong elsewhere: the gap depends on x."
    below = {x: ratio for x, ratio in ratios.items() if x < 1 and x != 2.0 ** round(log2(x))}
    if set(wrong.values()) == {2.0} and wrong.keys() == below.keys():
        return (
            "below 1 your result is twice too large: log2 is negative there, and int() rounds "
            "towards zero, while floor() rounds down."
        )
    nearer_up = {x for x in ratios if log2(x) % 1 > 0.5}
    if set(wrong.values()) == {2.0} and wrong.keys() == nearer_up:
        return (
            "the exponent is rounded to the nearest whole number: it must be rounded down, by "
            "floor()."
        )
    bits = -log2(ratios[1.0]) if ratios[1.0] > 0 else 0
    # One bit more or less is half a gap or a whole one, in bf16 itself.
    if len(set(ratios.values())) == 1 and bits == int(bits) and bits < -1:
        return (
            f"every gap is {2**-bits:,.0f} times too large, as if for {7 + bits:.0f} bits after "
            "the point: bf16 has 7."
        )
    if len(set(ratios.values())) == 1 and bits in (3, 4, 16, 17):
        name = "float16, which has 10" if bits < 5 else "float32, which has 23"
        return (
            f"every gap is {2**bits:,.0f} times too small, as if for {name} bits after the "
            "point: bf16 has 7."
        )
    if len(set(ratios.values())) > 1 and all(
        ratio > 0 and log2(ratio) % 1 == 0 for ratio in ratios.values()
    ):
        return (
            "this is a power of two, but not the right one: take the exponent of the power of "
            "two at or below x, floor(log2(x)), and subtract 8."
        )
    return None


def frugal_adamw(p: Tensor, grad: Tensor, state: dict, lr, beta1, beta2, eps, weight_decay) -> None:
    """AdamW with one temporary as large as ``p``: the root of v."""
    if not state:
        state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["t"] += 1
    t, m, v = state["t"], state["m"], state["v"]
    p.mul_(1 - lr * weight_decay)
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    divisor = v.sqrt().div_(sqrt(1 - beta2**t)).add_(eps)
    p.addcdiv_(m, divisor, value=-lr / (1 - beta1**t))


def _keeps_a_buffer(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    """The temporary of each parameter stays in its state."""
    if not state:
        state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p), buffer=torch.empty_like(p))
    state["t"] += 1
    t, m, v, buffer = (state[name] for name in ("t", "m", "v", "buffer"))
    p.mul_(1 - lr * weight_decay)
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    torch.sqrt(v, out=buffer).div_(sqrt(1 - beta2**t)).add_(eps)
    p.addcdiv_(m, buffer, value=-lr / (1 - beta1**t))


def _frugal(p, grad, state, lr, beta1, beta2, eps, weight_decay, *, wrong):
    """AdamW that saves bytes in the wrong place."""
    if not state:
        state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["t"] += 1
    t, m, v = state["t"], state["m"], state["v"]
    c1, c2 = 1 - beta1**t, 1 - beta2**t
    p.mul_(1 - lr * weight_decay)
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).add_(
        grad.mul_(grad) if "in the gradient" in wrong else grad * grad, alpha=1 - beta2
    )
    root = v.sqrt_() if "in v" in wrong else v.sqrt()
    divisor = root.div_(sqrt(c2)).add_(eps)
    if "in m" in wrong:
        p.sub_(m.mul_(lr / c1).div_(divisor))
    else:
        p.addcdiv_(m, divisor, value=-lr / c1)


SIZES = ((256, 128), (128, 64), (128,))
FOR_SCALARS = 256  # bytes


def three_steps(rule) -> dict[str, Tensor]:
    """Let ``rule`` take three steps on three parameters with fixed gradients; returns where all of
    them ended.

    Parameters and gradients are made here, so that a tracker around this counts every byte.
    """
    generator = torch.Generator().manual_seed(2)
    parameters = [torch.randn(size, generator=generator) for size in SIZES]
    gradients = [torch.randn(size, generator=generator) for size in SIZES]
    states = [{} for _ in SIZES]
    with torch.no_grad():
        for _ in range(3):
            for p, grad, state in zip(parameters, gradients, states, strict=True):
                rule(p, grad, state, 0.01, 0.9, 0.999, 1e-8, 0.1)
    named = {"parameter": parameters, "gradient": gradients}
    return {
        f"{name} {i}": tensor for name, tensors in named.items() for i, tensor in enumerate(tensors)
    }


def step_budget() -> int:
    """Bytes for ``three_steps``: parameters, gradients and two moments, in float32, the largest
    parameter once more, and room for scalars, such as a step counter that is a tensor.
    """
    sizes = [4 * prod(size) for size in SIZES]
    return 4 * sum(sizes) + max(sizes) + FOR_SCALARS


def _observe_frugal(candidate):
    measured = measure(lambda: three_steps(candidate), budget=step_budget())
    beside = _ADAMW(candidate)
    held = outside_torch(lambda: three_steps(candidate))
    too_many = held if held > 8 * prod(SIZES[0]) else 0  # a list of rows is small, and no array
    return beside | {"three steps": measured, "arrays that are no tensors": {"bytes": too_many}}


def _explain_frugal(got, expected):
    unmoved = three_steps(lambda p, *_: None)
    measured, right = got["three steps"], expected["three steps"]
    if all(
        torch.equal(measured.value[name], unmoved[name])
        for name in unmoved
        if name.startswith("parameter")
    ):
        return faulty_rules.LOST
    if not got["arrays that are no tensors"]["bytes"]:
        sizes = [4 * prod(size) for size in SIZES]
        over = measured.over and measured.over + FOR_SCALARS
        third = over - (sum(sizes) - max(sizes))
        has_third = 0 <= third <= FOR_SCALARS or 0 <= third - max(sizes) <= FOR_SCALARS
        if has_third and difference(measured.value, right.value) is None:
            return _THIRD_STATE
        more, rest = divmod(over, 4 * prod(SIZES[0]))
        # scalars and counters
        if more and rest < 1024 and difference(measured.value, right.value) is None:
            return (
                f"{more + 1} temporaries as large as p exist at once, but one is enough: {_COPIES}"
            )
    elif difference(measured.value, right.value) is None:
        return (
            "numpy's temporaries take bytes too, although torch's tracker does not see them: "
            "use torch, in place."
        )
    return faulty_rules.read_off(
        _ADAMW, faulty_rules.adam, faulty_rules.ADAMW, faulty_rules.factor_of(0.1, 0.5)
    )(got, expected)


_EMPTY = (
    (
        "KeyError",
        "`state` is an empty dict before the first step: store a value in it before you read it.",
    ),
    (
        "view size is not compatible",
        "`view` needs a contiguous tensor, and p may be none, as a transposed matrix: work on p as "
        "it is, whatever its shape, since every operation here goes number by number.",
    ),
)
_THIRD_STATE = (
    "`state` keeps a third tensor for each parameter, so all of them stay alive at once: make the "
    "temporary in the step, and let it go."
)
_T = "t starts at 0, where 1 - beta**t is 0: count the step first, so that the first one has t = 1."
_COPIES = (
    "`/`, `*` and `+` allocate a new tensor, and a variable keeps it alive; div_, mul_ and "
    "add_ work in place."
)


_MOMENTUM = faulty_rules.Watched({"lr": 0.1, "beta": 0.9}, {"lr": 0.02, "beta": 0.6})
_SECOND_MOMENT = faulty_rules.Watched(
    {"lr": 0.1, "beta": 0.9, "eps": 1e-8},
    {"lr": 0.02, "beta": 0.99, "eps": 1e-8},
    {"lr": 0.02, "beta": 0.99, "eps": 0.1},
)
_ADAM = faulty_rules.Watched(
    {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8},
    {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 0.1},
)
_ADAMW = faulty_rules.Watched(
    {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.5},
    {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 0.1, "weight_decay": 0.1},
)


def _wrong(rule, wrong: str, says: str) -> Mistake:
    return Mistake(wrong, partial(rule, wrong={wrong}), says)


def _known(rule, says: dict[str, str]) -> tuple[Mistake, ...]:
    return tuple(_wrong(rule, wrong, sentence) for wrong, sentence in says.items())


EXERCISES = (
    Exercise(
        id="2.1",
        title="momentum",
        difficulty=1,
        minutes=4,
        trains="a moving average, and changing a tensor in place",
        reference=momentum,
        observe=_MOMENTUM,
        changes=("p", "state", "grad"),
        raises=_EMPTY,
        explain=faulty_rules.read_off(_MOMENTUM, faulty_rules.momentum, faulty_rules.MOMENTUM),
        mistakes=_known(faulty_rules.momentum, faulty_rules.MOMENTUM),
    ),
    Exercise(
        id="2.2",
        title="the second moment",
        difficulty=1,
        minutes=4,
        trains="one step size for every number of a parameter",
        reference=second_moment,
        observe=_SECOND_MOMENT,
        changes=("p", "state", "grad"),
        raises=_EMPTY,
        explain=faulty_rules.read_off(
            _SECOND_MOMENT, faulty_rules.second_moment, faulty_rules.SECOND_MOMENT
        ),
        mistakes=_known(faulty_rules.second_moment, faulty_rules.SECOND_MOMENT),
    ),
    Exercise(
        id="2.3",
        title="Adam",
        difficulty=2,
        minutes=6,
        trains="both moments together, and the bias correction",
        reference=adam,
        observe=_ADAM,
        changes=("p", "state", "grad"),
        raises=_EMPTY,
        explain=faulty_rules.read_off(_ADAM, faulty_rules.adam, faulty_rules.ADAM),
        mistakes=_known(faulty_rules.adam, faulty_rules.ADAM | {"t from 0": _T}),
    ),
    Exercise(
        id="2.4",
        title="AdamW",
        difficulty=2,
        minutes=4,
        trains="decoupled weight decay: where the W goes",
        reference=adamw,
        observe=_ADAMW,
        changes=("p", "state", "grad"),
        raises=_EMPTY,
        explain=faulty_rules.read_off(
            _ADAMW, faulty_rules.adam, faulty_rules.ADAMW, faulty_rules.factor_of(0.1, 0.5)
        ),
        mistakes=_known(faulty_rules.adam, faulty_rules.ADAMW),
    ),
    Exercise(
        id="2.5",
        title="the gaps between bf16 numbers",
        difficulty=2,
        minutes=5,
        trains="reading a float format: which additions change nothing",
        reference=half_gap,
        raises=(
            (
                r"'float' object has no attribute|must be Tensor, not float",
                "x is one of Python's numbers, not a tensor: math.log2 and math.floor take it.",
            ),
        ),
        explain=_explain_gap,
        observe=calls(
            (1.0,),
            (0.5,),
            (3.0,),
            (100.0,),
            (0.0125732421875,),
            (1.9921875,),
            hidden=((0.0001678466796875,), (7.5,), (3008.0,)),
        ),
        mistakes=(
            Mistake(
                "whole gap",
                lambda x: 2.0 ** (floor(log2(x)) - 7),
                "this is the whole gap: from its middle on, rounding goes up.",
            ),
            Mistake(
                "relative",
                lambda x: x * 2.0**-8,
                (
                    "this grows smoothly with x: the gap is the same from one power of two to the "
                    "next, and then doubles."
                ),
            ),
            Mistake(
                "at one",
                lambda x: 2.0**-8,
                "this is half the gap at 1, and gaps double at every power of two.",
            ),
            Mistake(
                "eps",
                lambda x: 2.0**-7,
                "torch.finfo(torch.bfloat16).eps is the whole gap at 1: you want half of it, at x.",
            ),
            Mistake(
                "float16",
                lambda x: 2.0 ** (floor(log2(x)) - 11),
                "this is float16, with 10 bits after the point: bf16 has 7.",
            ),
            Mistake(
                "float32",
                lambda x: 2.0 ** (floor(log2(x)) - 24),
                "this is float32, with 23 bits after the point: bf16 has 7.",
            ),
        ),
    ),
    Exercise(
        id="2.6",
        title="AdamW with one temporary",
        difficulty=3,
        minutes=9,
        trains="in-place arithmetic under a byte budget",
        reference=frugal_adamw,
        observe=_observe_frugal,
        changes=("p", "state", "grad"),
        explain=_explain_frugal,
        mistakes=(
            Mistake(
                "corrected copies",
                adamw,
                (
                    "this is the step of exercise 2.4: m_hat, v_hat and what is made of them are "
                    "new tensors, each as large as p."
                ),
            ),
            Mistake(
                "a buffer for each",
                _keeps_a_buffer,
                _THIRD_STATE,
            ),
            _wrong(
                _frugal,
                "in v",
                (
                    "v.sqrt_() overwrites v with its root: this saves a temporary, but the second "
                    "moment is lost."
                ),
            ),
            _wrong(
                _frugal,
                "in m",
                (
                    "this scales m itself to save a temporary: in the next step m is no longer an "
                    "average."
                ),
            ),
            _wrong(
                _frugal,
                "in the gradient",
                (
                    "this squares the gradient in place: this saves bytes, but the gradient is not "
                    "yours to change, and the next step sees the square."
                ),
            ),
            *(
                _wrong(faulty_rules.adam, name, faulty_rules.ADAMW[name])
                for name in ("decay in the gradient", "no correction")
            ),
        ),
    ),
)
