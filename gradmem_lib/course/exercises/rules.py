"""How a rule of lesson 02 is watched, and what one does that has a single thing wrong: to read a mistake off the numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..compare import difference
from ..recognising import most_alike

BESIDE = "a second parameter"
START = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
LOST = "p is where it was: `p = p - …` makes a new tensor and lets the parameter go; change it in place, as p.sub_(…) does."


def watched(*cases: dict, steps: int = 5):
    """An ``observe``: where a parameter is after some steps, alone and with another beside it, and its gradient."""

    def walk(rule, case: dict, beside: bool):
        p, second, state, of_second = START.clone(), START.flip(0), {}, {}
        for step in range(1, steps + 1):
            before = torch.tensor([0.3, -1.0, 2.0, 0.004], dtype=torch.float64) * (1.5 - step % 3)
            grad = before.clone()
            with torch.no_grad():
                rule(p, grad, state, *case.values())
                if beside:
                    rule(second, before.roll(1), of_second, *case.values())
            if step in (1, 2, steps):
                second_too = {BESIDE: second.clone()} if beside else {}
                yield step, {"p": p.clone(), "grad": grad, "grad before": before, **second_too}

    def observe(rule) -> dict:
        seen = {}
        for case in cases:
            settings = ", ".join(f"{name}={value}" for name, value in case.items())
            seen |= {f"step {step} with {settings}": found for step, found in walk(rule, case, False)}
            seen[f"{BESIDE} with {settings}"] = dict(walk(rule, case, True))[steps]
        return seen

    return observe


def read_off(
    observe: Callable, rule: Callable, says: dict[str, str], other: Callable | None = None
) -> Callable:
    """An ``explain`` of what ``observe`` saw: what holds for every rule, else what ``rule`` does with one of ``says`` wrong.

    ``other(got, expected)`` is asked about the first step, where none of these fits.
    """

    def explain(got, expected):
        got, expected = (
            {case: v for case, v in seen.items() if isinstance(v, dict) and "p" in v}
            for seen in (got, expected)
        )
        if any(not torch.equal(seen["grad"], seen["grad before"]) for seen in got.values()):
            return "the gradient is not the same any more: it is not yours to change; compute beside it, or in the state."
        if all(torch.equal(seen["p"], START) for seen in got.values()):
            return LOST
        right = {case: difference(got[case], expected[case]) is None for case in got}
        alone = [right[case] for case in got if not case.startswith(BESIDE)]
        if all(alone):
            return "one parameter alone goes right, two in turn do not: remember in `state`, which each of them has for itself."
        known = [(sentence, observe(partial(rule, wrong=wrong))) for wrong, sentence in says.items()]
        if named := most_alike(got, expected, known, 1e-5):
            return named
        if told := other and other(next(iter(got.values())), next(iter(expected.values()))):
            return told
        if all(alone[: len(alone) // 2]):
            return "right with the first settings and wrong with others: a number is fixed that should come from the arguments."
        if alone[0]:
            return "the first step is right and later ones are not: look at what `state` remembers, and how the average goes on."
        return "the very first step is wrong already: look at the formula, before what `state` remembers."

    return explain


def momentum(p, grad, state, lr, beta, *, wrong):
    if not state or wrong == "re-created":
        state.update(m=torch.zeros_like(p), t=state.get("t", 0))
    m, old = state["m"], state["m"].clone()
    state["t"] += 1
    share = beta if wrong == "swapped" else 1 - beta
    m.mul_(1 - beta if wrong == "swapped" else beta).add_(grad, alpha=1.0 if wrong == "sum" else share)
    along = {
        "by the gradient": grad,
        "corrected": m / (1 - beta ** state["t"]),
        "ahead": beta * m + (1 - beta) * grad,
        "old m": old,
        "uphill": -m,
    }
    p.sub_((1.0 if wrong == "no lr" else lr) * along.get(wrong, m))


MOMENTUM = {
    "corrected": "this corrects m for its start at zero, as Adam will: here m is used as it is.",
    "ahead": "this looks one step ahead (Nesterov): here the step goes along m itself.",
    "old m": "this steps along the m of the step before: take the new gradient in first.",
    "no lr": "the learning rate is missing: the step is lr * m.",
}


def second_moment(p, grad, state, lr, beta, eps, *, wrong):
    if not state or wrong == "re-created":
        state.update(v=torch.zeros_like(p), t=state.get("t", 0))
    v, old = state["v"], state["v"].clone()
    state["t"] += 1
    square = grad if wrong == "not squared" else grad * grad
    square = grad.abs() if wrong == "absolute" else square
    share = {"sum": 1.0, "all": 1.0, "swapped": beta}.get(wrong, 1 - beta)
    v.mul_({"swapped": 1 - beta, "all": 1.0}.get(wrong, beta)).add_(square, alpha=share)
    divisor = {
        "eps inside": (v + eps).sqrt(),
        "no root": v + eps,
        "old v": old.sqrt() + eps,
        "corrected": (v / (1 - beta ** state["t"])).sqrt() + eps,
        "no eps": v.sqrt(),
        "v unused": grad.abs() + eps,
        "absolute": v + eps,
        "multiplied": 1 / (v.sqrt() + eps),
        "no division": torch.ones_like(v),
    }
    step = (1.0 if wrong == "no lr" else lr) * grad / divisor.get(wrong, v.sqrt() + eps)
    p.sub_(-step if wrong == "uphill" else step)


SECOND_MOMENT = {
    "corrected": "this corrects v for its start at zero, as Adam will: here v is used as it is.",
    "swapped": "the weights are swapped: v keeps beta of itself and takes 1 - beta of the square.",
    "no eps": "eps is left out: add it to the root of v.",
    "v unused": "this divides by the size of this very gradient, not by the average: then every step is as long as lr.",
    "all": "v adds up all squares and forgets none (Adagrad): an average keeps beta of itself and takes 1 - beta of the square.",
    "absolute": "v averages the gradient's size: it averages its square, and the root comes afterwards.",
    "multiplied": "the gradient is multiplied by the root of v: divide by it.",
    "no division": "v is kept and not used: divide the gradient by its root.",
    "no lr": "the learning rate is missing.",
    "uphill": "this walks uphill: subtract.",
}


def adam(p, grad, state, lr, beta1, beta2, eps, weight_decay=0.0, *, wrong):
    """Adam, or AdamW, with one thing wrong."""
    begin = p.clone()
    decays = {
        "decay without lr": 1 - weight_decay,
        "decay grows": 1 + lr * weight_decay,
        "a decay of 0.01": 1 - lr * 0.01,
        "lr squared": 1 - lr * lr * weight_decay,
    }
    if wrong == "decay in the gradient":
        grad = grad + weight_decay * p
    elif wrong == "decay constant":
        p.sub_(lr * weight_decay)
    elif wrong not in ("decay afterwards", "no decay", "decay in the step"):
        p.mul_(decays.get(wrong, 1 - lr * weight_decay))
    if not state:
        state["t"] = 0
    if "m" not in state or wrong == "re-created":
        state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
    t = 1 if wrong == "t stays 1" else state["t"] + {"t from 0": 0, "t from 2": 2}.get(wrong, 1)
    state["t"] += 1
    m, v = state["m"], state["v"]
    first, second = (beta2, beta1) if wrong == "betas" else (beta1, beta2)
    m.mul_(first).add_(grad, alpha=1.0 if wrong == "sums" else 1 - first)
    v.mul_(second).add_(
        grad if wrong == "not squared" else grad * grad, alpha=1.0 if wrong == "sums" else 1 - second
    )
    c1, c2 = 1 - first**t, 1 - second**t
    if wrong == "multiplied":
        c1, c2 = 1 / c1, 1 / c2
    corrections = {"both by beta1": (c1, c1), "both by beta2": (c2, c2), "without 1 -": (1 - c1, 1 - c2)}
    c1, c2 = corrections.get(wrong, (c1, c2))
    if wrong == "stored":
        m.div_(c1), v.div_(c2)
        c1 = c2 = 1.0
    m_hat = m if wrong in ("no correction", "m not corrected") else m / c1
    v_hat = v if wrong in ("no correction", "v not corrected") else v / c2
    divisor = {
        "eps inside": (v_hat + eps).sqrt(),
        "no root": v_hat + eps,
        "no eps": v_hat.sqrt(),
        "eps corrected": (v.sqrt() + eps) / c2**0.5,
        "v corrected late": v.sqrt() / c2 + eps,
        "v unused": torch.ones_like(v),
    }.get(wrong, v_hat.sqrt() + eps)
    step = (1.0 if wrong == "no lr" else lr) * (grad if wrong == "along the gradient" else m_hat) / divisor
    if wrong == "decay in the step":
        step = lr * (m_hat + weight_decay * begin) / divisor
    p.sub_(-step if wrong == "uphill" else step)
    if wrong in ("decay afterwards", "decay twice"):
        p.mul_(1 - lr * weight_decay)


def factor_of(lr: float, weight_decay: float) -> Callable:
    """For ``read_off``: by what p is multiplied in the first step, where the rest of the step is right."""

    def explain(got, expected):
        right = 1 - lr * weight_decay
        factors = (got["p"] - (expected["p"] - right * START)) / START
        if not torch.allclose(factors, factors[0].expand(4)) or abs(factors[0] - right) < 1e-6:
            return None
        return f"p is multiplied by {factors[0].item():.6g} in the first step: with these numbers 1 - lr * weight_decay is {right:g}."

    return explain


ADAM = {
    "t from 2": "t begins at 2: the first step has t = 1, so count once a step.",
    "along the gradient": "m is kept and not used: the step goes along m_hat, not along the gradient.",
    "betas": "the betas are swapped: beta1 is for m, beta2 for v.",
    "stored": "the corrected m and v are stored: they are new tensors for this step alone; m and v stay as they are in `state`.",
    "m not corrected": "v is corrected and m is not.",
    "no correction": "this is Adam without bias correction.",
    "v not corrected": "m is corrected and v is not.",
    "no root": "the root is missing: v_hat has the size of a squared gradient.",
    "not squared": "v averages the gradient itself: it must average its square.",
    "sums": "the whole gradient and its square are added: an average takes 1 - beta of them.",
    "no eps": "eps is left out: it is added to the root of v_hat.",
    "eps corrected": "eps is added before the correction, which then divides it too: correct v first, then the root, then eps.",
    "v corrected late": "the root is taken before the correction: divide v by 1 - beta2**t first, then take the root.",
    "a decay of 0.01": "this decays p by 0.01 as well: there is no weight decay in this exercise, or another one.",
    "both by beta1": "both moments are corrected with beta1: v has filled up by 1 - beta2**t.",
    "both by beta2": "both moments are corrected with beta2: m has filled up by 1 - beta1**t.",
    "multiplied": "the corrections are multiplied in: m and v are too small, so divide by 1 - beta**t.",
    "without 1 -": "this divides by beta**t: the correction is 1 - beta**t.",
    "v unused": "v is kept and not used: divide m_hat by the root of v_hat.",
    "no lr": "the learning rate is missing.",
    "uphill": "this walks uphill: subtract.",
}
ADAMW = ADAM | {
    "decay constant": "a constant is subtracted, not a share of p: shrink p by the factor 1 - lr * weight_decay.",
    "decay twice": "p is decayed twice, before the step and after it.",
    "decay in the step": "the decay is inside the step, and is divided by the root of v there: AdamW shrinks p itself.",
    "decay in the gradient": "the decay goes into the gradient: AdamW shrinks p itself.",
    "decay without lr": "the decay lacks the learning rate: shrink p by the factor 1 - lr * weight_decay.",
    "decay afterwards": "the decay comes after the step: first the decay, then Adam.",
    "no decay": "the decay has no effect on p: shrink it in place.",
    "lr squared": "the decay has the learning rate twice: the factor is 1 - lr * weight_decay.",
    "eps inside": "eps is inside the root: it belongs outside, sqrt(…) + eps.",
    "re-created": "m and v start from zero in every step: make them once, when `state` is empty.",
    "t stays 1": "t is 1 in every step: keep it in `state` and count on.",
}
