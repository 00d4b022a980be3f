"""How a rule of lesson 02 is watched, and what one does that has a thing wrong, or two: to read
mistakes off the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import torch

from ...judge.compare import difference
from ...judge.hints import nearest_mistake, relation

BESIDE = "a second parameter"
START = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
TRANSPOSED = "a transposed matrix"  # it is not contiguous, as the weights of a convolution may be
MATRIX_START = START.reshape(2, 2).t()
A_COPY = (
    "a parameter that is not contiguous has not changed: reshape(-1) and flatten() make a copy of "
    "it. Work on p as it is, whatever its shape: every operation here goes number by number."
)
LOST = (
    "p has not changed: `p = …` and m.mul(…) make new tensors. Change tensors in place, with an "
    "underscore, as p.sub_(…) and m.mul_(…) do."
)
STEP_LOST = (
    "p only decays, and the rest of the step does not reach it: `p.addcdiv(…)` and `p.sub(…)` make "
    "new tensors. Change p in place, with an underscore, as p.addcdiv_(…) and p.sub_(…) do."
)


class Watched:
    """An ``observe``: where a parameter is after some steps, alone and with another beside it, and
    its gradient.
    """

    def __init__(self, *cases: dict, steps: int = 5):
        self.cases, self.steps = cases, steps

    def walk(self, rule, case: dict, beside: bool) -> Iterator[tuple[int, dict]]:
        p, second, state, of_second = START.clone(), START.flip(0), {}, {}
        for step in range(1, self.steps + 1):
            size = 1.5 - step % 3
            if step > 3:
                size /= 10  # so that an average of squares falls too
            before = torch.tensor([0.3, -1.0, 2.0, 0.004], dtype=torch.float64) * size
            grad = before.clone()
            with torch.no_grad():
                rule(p, grad, state, *case.values())
                if beside:
                    rule(second, before.roll(1), of_second, *case.values())
            if step in (1, 2, self.steps):
                second_too = {BESIDE: second.clone()} if beside else {}
                yield step, {"p": p.clone(), "grad": grad, "grad before": before, **second_too}

    def __call__(self, rule) -> dict:
        seen = {}
        for case in self.cases:
            settings = _settings(case)
            seen |= {
                f"step {step} with {settings}": found
                for step, found in self.walk(rule, case, False)
            }
            seen[f"{BESIDE} with {settings}"] = dict(self.walk(rule, case, True))[self.steps]
        seen[TRANSPOSED] = {"after two steps": self._matrix(rule, self.cases[0])}
        return seen

    def _matrix(self, rule, case: dict) -> torch.Tensor:
        # clone() would keep the strides, but make no view: this one is a view of its transpose.
        p, state = MATRIX_START.t().clone().t(), {}
        for size in (1.0, -0.5):
            grad = torch.tensor([[0.3, -1.0], [2.0, 0.004]], dtype=torch.float64) * size
            with torch.no_grad():
                rule(p, grad, state, *case.values())
        return p.clone()

    def begins(self, rule, got: dict) -> bool:
        """Whether ``rule`` does in the first step of the last case what was seen in ``got``."""
        found = next(self.walk(rule, self.cases[-1], False))[1]
        return not difference(found["p"], got[f"step 1 with {_settings(self.cases[-1])}"]["p"])


def _settings(case: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


def read_off(
    observe: Watched, rule: Callable, says: dict[str, str], other: Callable | None = None
) -> Callable:
    """An ``explain`` of what ``observe`` saw: what holds for every rule, else what ``rule`` does
    with one or two of ``says`` wrong.

    ``other(got, expected)`` is asked about the first step, where none of these fits.
    """

    def explain(got, expected):
        matrix_is_as_before = torch.equal(got[TRANSPOSED]["after two steps"], MATRIX_START)
        got, expected = (
            {case: v for case, v in seen.items() if isinstance(v, dict) and "p" in v}
            for seen in (got, expected)
        )
        if any(not torch.equal(seen["grad"], seen["grad before"]) for seen in got.values()):
            return (
                "the gradient has changed: you must not change it; use another tensor, or the "
                "state."
            )
        if all(torch.equal(seen["p"], START) for seen in got.values()):
            return LOST
        if _only_decays(observe, got):
            return STEP_LOST
        wrong = [case for case in got if difference(got[case], expected[case])]
        if not wrong:
            return A_COPY if matrix_is_as_before else None
        known = [
            (sentence, observe(partial(rule, wrong={name}))) for name, sentence in says.items()
        ]
        if named := nearest_mistake(got, expected, known, 1e-5) or _two(observe, rule, says, got):
            return named
        first, right = next(iter(got.values())), next(iter(expected.values()))
        if told := other and other(first, right):
            return told
        if wrong[0] == next(iter(got)) and (
            told := _one_size(observe, got, expected) or _nearly(got, expected)
        ):
            return told
        return _where(wrong[0], list(got), first)

    return explain


def _only_decays(observe: Watched, got: dict) -> bool:
    """Whether p shrinks by weight decay in every case, and does nothing else."""
    for case in observe.cases:
        factor = 1 - case["lr"] * case.get("weight_decay", 0.0)
        for step in (1, 2, observe.steps):
            p = got[f"step {step} with {_settings(case)}"]["p"]
            if difference(p, START * factor**step):
                return False
    return True


def _two(observe: Watched, rule: Callable, says: dict[str, str], got: dict) -> str:
    """The sentences of two mistakes that together do what ``got`` does; the first step alone sorts
    most pairs out.
    """
    for one, other in combinations(says, 2):
        both = partial(rule, wrong={one, other})
        if not observe.begins(both, got):
            continue
        theirs = observe(both)
        if not difference(got, {case: theirs[case] for case in got}):
            return f"two things at once: {says[one]} And {says[other]}"
    return ""


def _one_size(observe: Watched, got: dict, expected: dict) -> str:
    """The sentence for steps that are the gradient times one number, where each number of p has a
    size of its own. In the first step alone, that is also true of a v that begins at ones.
    """
    settings = _settings(observe.cases[0])
    for seen, should in ((got, True), (expected, False)):
        at = START
        for step in (1, 2):
            found = seen[f"step {step} with {settings}"]
            sizes = (at - found["p"]) / found["grad before"]
            same = torch.allclose(sizes, sizes[0].expand(4), rtol=1e-6)
            if should and not same:
                return ""
            if not should and same:
                return ""
            at = found["p"]
    return (
        "every number of p is divided by the same number: v has one number for each of them, "
        "not one for all."
    )


def _nearly(got: dict, expected: dict) -> str:
    """What can be said of how far p went, such as that two digits of it are right."""
    moves = (
        {case: v["p"] - START for case, v in seen.items() if BESIDE not in v}
        for seen in (got, expected)
    )
    return relation(*moves, 1e-5)


def _where(case: str, cases: list[str], first: dict) -> str:
    """What the first case that goes wrong tells, of all that were tried."""
    settings = case.partition(" with ")[2]
    if case.startswith(BESIDE):
        return (
            "this is right for one parameter, but wrong for two in turn: keep everything in "
            "`state`, because each parameter has its own."
        )
    if settings != cases[0].partition(" with ")[2]:
        if "eps" in settings and settings == cases[-1].partition(" with ")[2]:
            return (
                "this is right for a tiny eps, and wrong for 0.1: look at what eps is added to, "
                "and use the given eps."
            )
        return (
            "this is right with the first settings and wrong with others: a number is fixed "
            "that should come from the arguments."
        )
    if case != cases[0]:
        return (
            "the first step is right, but later ones are not: look at what `state` keeps, and "
            "how the average continues."
        )
    if torch.equal(first["p"], START):
        return "the first step does not change p: the step that makes the state must move p too."
    return "already the first step is wrong: look at the formula first, then at what `state` keeps."


def _one_of(table: dict, wrong: set, right):
    """What the first of ``table`` has that is wrong, else what is right."""
    return next((table[name] for name in table if name in wrong), right)


def momentum(p, grad, state, lr, beta, *, wrong):
    if not state or "re-created" in wrong:
        state.update(
            m=grad.clone() if "begins" in wrong else torch.zeros_like(p), t=state.get("t", 0)
        )
    m, old = state["m"], state["m"].clone()
    state["t"] += 1
    share = beta if "swapped" in wrong else 1 - beta
    m.mul_(1 - beta if "swapped" in wrong else beta).add_(
        grad, alpha=1.0 if "sum" in wrong else share
    )
    along = {
        "by the gradient": grad,
        "corrected": m / (1 - beta ** state["t"]),
        "ahead": beta * m + (1 - beta) * grad,
        "old m": old,
        "uphill": -m,
    }
    p.sub_((1.0 if "no lr" in wrong else lr) * _one_of(along, wrong, m))


AGAIN = (
    "the average starts from zero in every step: make it once, keep it in `state`, and write "
    "the new value back there."
)
EPS_INSIDE = (
    "eps is inside the root: it belongs outside, sqrt(…) + eps, or tiny gradients are "
    "divided by a much too large number."
)

MOMENTUM = {
    "sum": (
        "this adds the whole gradient to m, as torch.optim.SGD does: here m is an average, "
        "which takes 1 - beta of it."
    ),
    "swapped": (
        "the weights are swapped: m keeps beta of itself and takes 1 - beta of the gradient."
    ),
    "re-created": AGAIN,
    "begins": (
        "m starts as the whole first gradient: start from zeros, and take 1 - beta of the "
        "first one, like any other."
    ),
    "by the gradient": "m is kept but not used: the step must use m, not the gradient.",
    "uphill": "this increases the loss: subtract lr * m.",
    "corrected": "this corrects m for its start at zero, as Adam does: here use m as it is.",
    "ahead": "this looks one step ahead (Nesterov): here the step uses m itself.",
    "old m": "this uses the m of the step before: add the new gradient to m first.",
    "no lr": "the learning rate is missing: the step is lr * m.",
}


def second_moment(p, grad, state, lr, beta, eps, *, wrong):
    if not state or "re-created" in wrong:
        state.update(
            v=grad * grad if "begins" in wrong else torch.zeros_like(p), t=state.get("t", 0)
        )
    v, old = state["v"], state["v"].clone()
    state["t"] += 1
    square = grad if "not squared" in wrong else grad * grad
    square = grad.abs() if {"absolute", "absolute, with a root"} & wrong else square
    share = _one_of({"sum": 1.0, "all": 1.0, "swapped": beta}, wrong, 1 - beta)
    v.mul_(_one_of({"swapped": 1 - beta, "all": 1.0}, wrong, beta)).add_(square, alpha=share)
    if "variance" in wrong:
        mean = state["mean"] = beta * state.get("mean", 0.0) + (1 - beta) * grad
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
    if "variance" in wrong:
        divisor["variance"] = (v - mean * mean).clamp(min=0).sqrt() + eps
    step = (1.0 if "no lr" in wrong else lr) * grad / _one_of(divisor, wrong, v.sqrt() + eps)
    p.sub_(-step if "uphill" in wrong else step)
    if "root in place" in wrong:
        v.sqrt_()  # the step is right, and the next one continues from the root


SECOND_MOMENT = {
    "not squared": (
        "v averages the gradient itself: it must average its square, or signs cancel "
        "and the root of a negative is nan."
    ),
    "no root": (
        "the root is missing: v is as large as a squared gradient, and sqrt(v) as large as "
        "a gradient."
    ),
    "eps inside": EPS_INSIDE,
    "old v": "this divides by the v of the step before: add the new gradient to v first.",
    "root in place": (
        "v.sqrt_() overwrites v with its root, and the next step continues from that: use "
        "v.sqrt(), which makes a new tensor."
    ),
    "sum": "this adds the whole square: v is an average, which takes 1 - beta of it.",
    "re-created": AGAIN,
    "begins": (
        "v starts as the whole first square: start from zeros, and take 1 - beta of the "
        "first one, like any other."
    ),
    "corrected": "this corrects v for its start at zero, as Adam does: here use v as it is.",
    "swapped": "the weights are swapped: v keeps beta of itself and takes 1 - beta of the square.",
    "no eps": "eps is left out, or is not the one that was given: add it to the root of v.",
    "v unused": (
        "this divides by the magnitude of the current gradient, not by the average: then "
        "every step has the length lr."
    ),
    "all": (
        "v adds up all squares and forgets none (Adagrad): an average keeps beta of itself and "
        "takes 1 - beta of the square."
    ),
    "absolute": (
        "v averages the gradient's magnitude: it must average its square, and the root "
        "comes afterwards."
    ),
    "absolute, with a root": (
        "v averages the gradient's magnitude: it must average its square, grad * grad."
    ),
    "variance": (
        "the square of the mean is subtracted from v (a variance): here v is the average of the "
        "square alone."
    ),
    "multiplied": "the gradient is multiplied by the root of v: divide by it.",
    "no division": "v is kept but not used: divide the gradient by its root.",
    "no lr": "the learning rate is missing.",
    "uphill": "this increases the loss: subtract.",
}


def _correction(of: str, beta: float, t: int, wrong: set) -> float:
    if {"t is a factor", f"t is a factor for {of}"} & wrong:
        return 1 - beta * t
    if "power of the whole" in wrong:
        return (1 - beta) ** t
    return 1 - beta**t


def _corrections(c1: float, c2: float, wrong: set) -> tuple[float, float]:
    """What m and v are divided by."""
    if "multiplied" in wrong:
        c1, c2 = 1 / c1, 1 / c2
    table = {
        "both by beta1": (c1, c1),
        "both by beta2": (c2, c2),
        "without 1 -": (1 - c1, 1 - c2),
        "crossed": (c2, c1),
        "root of c1": (c1**0.5, c2),
    }
    return _one_of(table, wrong, (c1, c2))


_SHRINKS_LATER = {  # or never
    "decay in the gradient",
    "decay afterwards",
    "no decay",
    "decay in the step",
}


def _largest(v, state):
    """The largest v so far, number by number."""
    state["largest"] = torch.maximum(state.get("largest", v), v).clone()
    return state["largest"]


def _first_moments(p, grad, wrong: set) -> dict:
    """What m and v are before the first step."""
    if "begins" in wrong:
        return {"m": grad.clone(), "v": grad * grad}
    m = torch.zeros_like(p)
    return {"m": m, "v": m if "one tensor" in wrong else torch.zeros_like(p)}


def adam(p, grad, state, lr, beta1, beta2, eps, weight_decay=0.0, *, wrong):
    """Adam, or AdamW, with what is ``wrong`` in it."""
    begin = p.clone()
    decays = {
        "decay without lr": 1 - weight_decay,
        "decay grows": 1 + lr * weight_decay,
        "a decay of 0.01": 1 - lr * 0.01,
        "lr squared": 1 - lr * lr * weight_decay,
    }
    factor = _one_of(decays, wrong, 1 - lr * weight_decay)
    if {"decay in the gradient", "decay both ways"} & wrong:
        grad = grad + weight_decay * begin
    if "decay constant" in wrong:
        p.sub_(lr * weight_decay)
    elif not _SHRINKS_LATER & wrong and not (state and "decay once" in wrong):
        p.mul_(factor)
    if not state:
        state["t"] = 0
    if "m" not in state or "re-created" in wrong:
        state.update(_first_moments(p, grad, wrong))
    t = (
        1
        if "t stays 1" in wrong
        else state["t"] + _one_of({"t from 0": 0, "t from 2": 2}, wrong, 1)
    )
    state["t"] += 1
    m, v = state["m"], state["v"]
    first, second = (beta2, beta1) if "betas" in wrong else (beta1, beta2)
    m.mul_(first).add_(grad, alpha=1.0 if "sums" in wrong else 1 - first)
    v.mul_(second).add_(
        grad if "not squared" in wrong else grad * grad,
        alpha=1.0 if "sums" in wrong else 1 - second,
    )
    c1, c2 = _correction("m", first, t, wrong), _correction("v", second, t, wrong)
    c1, c2 = _corrections(c1, c2, wrong)
    if "stored" in wrong:
        m.div_(c1), v.div_(c2)
        c1 = c2 = 1.0
    m_hat = m if {"no correction", "m not corrected"} & wrong else m / c1
    v = _largest(v, state) if "the largest v" in wrong else v
    v_hat = v if {"no correction", "v not corrected"} & wrong else v / c2
    m_hat = grad / c1 if "gradient corrected" in wrong else m_hat
    divisors = {
        "eps inside": (v_hat + eps).sqrt(),
        "no root": v_hat + eps,
        "no eps": v_hat.sqrt(),
        "eps corrected": (v.sqrt() + eps) / c2**0.5,
        "v corrected late": v.sqrt() / c2 + eps,
        "v unused": torch.ones_like(v),
    }
    divisor = _one_of(divisors, wrong, v_hat.sqrt() + eps)
    step = (
        (1.0 if "no lr" in wrong else lr)
        * (grad if "along the gradient" in wrong else m_hat)
        / divisor
    )
    if "decay in the step" in wrong:
        step = lr * (m_hat + weight_decay * begin) / divisor
    p.sub_(-step if "uphill" in wrong else step)
    if {"decay afterwards", "decay twice"} & wrong:
        p.mul_(factor)


def factor_of(lr: float, weight_decay: float) -> Callable:
    """For ``read_off``: by what p is multiplied in the first step, where the rest of the step is
    right.
    """

    def explain(got, expected):
        right = 1 - lr * weight_decay
        factors = (got["p"] - (expected["p"] - right * START)) / START
        if not torch.allclose(factors, factors[0].expand(4)) or abs(factors[0] - right) < 1e-6:
            return None
        return (
            f"p is multiplied by {factors[0].item():.6g} in the first step: with these numbers "
            f"1 - lr * weight_decay is {right:g}."
        )

    return explain


ADAM = {
    "one tensor": (
        "m and v are one tensor under two names, so what changes one changes the other: make two "
        "tensors of zeros."
    ),
    "t from 2": "t begins at 2: the first step has t = 1, so count once a step.",
    "along the gradient": "m is kept but not used: the step must use m_hat, not the gradient.",
    "betas": "the betas are swapped: beta1 is for m, beta2 for v.",
    "stored": (
        "the corrected m and v are stored: they are new tensors, only for this step; m and v stay "
        "as they are in `state`."
    ),
    "m not corrected": "v is corrected but m is not.",
    "no correction": (
        "this is Adam without bias correction: m and v start at zero, and are too small at first."
    ),
    "v not corrected": (
        "m is corrected but v is not: v grows a hundred times more slowly, so it "
        "needs the correction more."
    ),
    "begins": (
        "m and v start as the first gradient and its square: they must start at zero, which "
        "the correction makes up for."
    ),
    "eps inside": EPS_INSIDE,
    "re-created": "m and v start from zero in every step: make them once, when `state` is empty.",
    "t stays 1": "t is 1 in every step: keep it in `state` and count on.",
    "no root": "the root is missing: v_hat is as large as a squared gradient.",
    "not squared": "v averages the gradient itself: it must average its square.",
    "sums": "the whole gradient and its square are added: an average takes 1 - beta of them.",
    "no eps": (
        "eps is left out, or is not the one that was given: it is added to the root of v_hat."
    ),
    "eps corrected": (
        "eps is added before the correction, which then divides it too: correct v "
        "first, then the root, then eps."
    ),
    "v corrected late": (
        "the root is taken before the correction: divide v by 1 - beta2**t first, then take "
        "the root."
    ),
    (
        "a decay of 0.01"
    ): "this also decays p by 0.01: this exercise has no weight decay, or another one.",
    "both by beta1": "both moments are corrected with beta1: divide v by 1 - beta2**t.",
    "both by beta2": "both moments are corrected with beta2: divide m by 1 - beta1**t.",
    "crossed": "the corrections are swapped: m is divided by 1 - beta1**t, and v by 1 - beta2**t.",
    "root of c1": (
        "m is divided by the root of its correction: only v gets a root, after its correction."
    ),
    "gradient corrected": (
        "the gradient is corrected here, and m is not used: m_hat is m / (1 - beta1**t)."
    ),
    "multiplied": (
        "the corrections are multiplied in: m and v are too small, so divide by 1 - beta**t."
    ),
    "without 1 -": "this divides by beta**t: the correction is 1 - beta**t.",
    "t is a factor for m": "beta1 is multiplied by t: the correction has a power, 1 - beta1**t.",
    "t is a factor": "beta is multiplied by t: the correction has a power, 1 - beta**t.",
    "power of the whole": (
        "the power is taken of (1 - beta): it belongs to beta alone, 1 - beta**t."
    ),
    "the largest v": (
        "this divides by the largest v so far (AMSGrad): Adam's v also falls where gradients "
        "become smaller."
    ),
    "v unused": "v is kept but not used: divide m_hat by the root of v_hat.",
    "no lr": "the learning rate is missing.",
    "uphill": "this increases the loss: subtract.",
}
ADAMW = ADAM | {
    "no correction": "this is AdamW without bias correction.",
    "decay constant": (
        "a constant is subtracted, not a share of p: shrink p by the factor 1 - lr * weight_decay."
    ),
    "decay once": "p is decayed in the first step alone: every step shrinks it.",
    "decay twice": "p is decayed twice, before the step and after it.",
    "decay both ways": (
        "the decay acts twice: p shrinks, and weight_decay * p is added to the gradient too. Leave "
        "the gradient as it is."
    ),
    "decay in the step": (
        "the decay is part of the step, and so is divided by the root of v: AdamW shrinks p itself."
    ),
    "decay in the gradient": (
        "the decay is added to the gradient, and so is divided by the root of v: that is Adam "
        "with weight decay; AdamW shrinks p itself."
    ),
    (
        "decay without lr"
    ): "the decay has no learning rate: shrink p by the factor 1 - lr * weight_decay.",
    "decay grows": "the sign is wrong: this makes p larger.",
    "decay afterwards": (
        "almost: the decay comes after the step, so it shrinks the step too. Decay first, then "
        "Adam's step."
    ),
    "no decay": "the decay has no effect on p: shrink it in place, p.mul_(1 - lr * weight_decay).",
    "lr squared": "the decay has the learning rate twice: the factor is 1 - lr * weight_decay.",
}
