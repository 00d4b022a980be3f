"""Answers to the exercises of lesson 02 as people write them; see lesson_00.py."""

import itertools
import math

import numpy as np
import torch

RIGHT, WRONG = {}, {}


def _momentum(p, grad, state, lr, beta, *, take=None, move=None, key="m"):
    m = state.get(key, torch.zeros_like(p))
    state[key] = m * beta + grad * (1 - beta if take is None else take)
    p -= lr * (state[key] if move is None else move(m, state[key], grad))


def _m_not_in_place(p, grad, state, lr, beta):
    if not state:
        state["m"] = torch.zeros_like(p)
    m = state["m"]
    m.mul(beta).add(grad, alpha=1 - beta)
    p.sub_(lr * m)


RIGHT["2.1"] = {
    "new tensors": _momentum,
    "lists": lambda p, g, s, lr, b: p.sub_(
        lr * s.setdefault("m", [torch.zeros_like(p)])[0].mul_(b).add_(g * (1 - b))
    ),
    "lerp": lambda p, g, s, lr, b: p.add_(
        s.setdefault(0, torch.zeros_like(p)).lerp_(g, 1 - b), alpha=-lr
    ),
}


_SHARED = {}


def _by_name(p, grad, state, lr, beta):
    if not state:
        _SHARED.clear()
        state["there"] = True
    _momentum(p, grad, _SHARED, lr, beta)


def _not_at_first(p, grad, state, lr, beta):
    if not state:
        state["m"] = (1 - beta) * grad
        return
    _momentum(p, grad, state, lr, beta)


WRONG["2.1"] = {
    "a half": (lambda p, g, s, lr, b: _momentum(p, g, s, lr, 0.5), "fixed|settings|p"),
    "sum": (lambda p, g, s, lr, b: _momentum(p, g, s, lr, b, take=1.0), "whole gradient"),
    "nesterov": (
        lambda p, g, s, lr, b: _momentum(
            p, g, s, lr, b, move=lambda old, m, g: b * m + (1 - b) * g
        ),
        "Nesterov",
    ),
    "old": (
        lambda p, g, s, lr, b: _momentum(p, g, s, lr, b, move=lambda old, m, g: old),
        "step before",
    ),
    "global": (_by_name, "because each parameter has its own"),
    "by shape": (
        lambda p, g, s, lr, b, G={}: _momentum(p, g, G, lr, b, key=p.shape),
        "wrong for two in turn",
    ),
    "starts at the gradient": (
        lambda p, g, s, lr, b: _momentum(p, g, s, lr, b, take=None if s else 1.0),
        "first gradient",
    ),
    "not at first": (_not_at_first, "first step does not change p"),
    "sum, uphill": (
        lambda p, g, s, lr, b: _momentum(p, g, s, -lr, b, take=1.0),
        "two things.*whole gradient.*increases the loss",
    ),
    "sgd": (lambda p, g, s, lr, b: p.sub_(lr * g), "not the gradient"),
    "not in place": (lambda p, g, s, lr, b: p - lr * g, "in place"),
    "m not in place": (_m_not_in_place, r"m.mul\(…\) make new tensors"),
}


def _v(p, grad, state, lr, beta, eps, divide=lambda v, eps, grad, t: v.sqrt() + eps, share=None):
    v, t = state.get("v", torch.zeros_like(p)), state.get("t", 0) + 1
    share = 1 - beta if share is None else share
    state.update(v=beta * v + share * grad**2, t=t)
    p.sub_(lr * grad / divide(state["v"], eps, grad, t))


def _root_in_place(p, grad, state, lr, beta, eps):
    v = state.setdefault("v", torch.zeros_like(p))
    v.mul_(beta).add_(grad**2, alpha=1 - beta)
    p.sub_(lr * grad / v.sqrt_().add(eps))


RIGHT["2.2"] = {
    "new tensors": _v,
    "power": lambda *a: _v(*a, divide=lambda v, eps, g, t: v**0.5 + eps),
    "rsqrt": lambda *a: _v(*a, divide=lambda v, eps, g, t: 1 / v.rsqrt() + eps),
}
WRONG["2.2"] = {
    "no root": (lambda *a: _v(*a, divide=lambda v, eps, g, t: v + eps), "root is missing"),
    "inside": (lambda *a: _v(*a, divide=lambda v, eps, g, t: (v + eps).sqrt()), "inside the root"),
    "no eps": (lambda *a: _v(*a, divide=lambda v, eps, g, t: v.sqrt()), "eps"),
    "root in place": (_root_in_place, "not yet: v.sqrt_.. overwrites v with its root"),
    "sum": (lambda *a: _v(*a, share=1.0), "adds the whole square"),
    "eps beside": (
        lambda *a: _v(*a, divide=lambda v, eps, g, t: 1 / (v.rsqrt() + eps)),
        "what eps is added to",
    ),
    "eps of its own": (
        lambda *a: _v(*a, divide=lambda v, eps, g, t: v.sqrt() + 1e-8),
        "not the one that was given",
    ),
    "one for all": (
        lambda *a: _v(*a, divide=lambda v, eps, g, t: v.mean().sqrt() + eps),
        "divided by the same",
    ),
    "this gradient": (
        lambda *a: _v(*a, divide=lambda v, eps, g, t: g.abs() + eps),
        "the current gradient",
    ),
    "corrected": (
        lambda *a: _v(*a, divide=lambda v, eps, g, t: (v / (1 - a[4] ** t)).sqrt() + eps),
        "corrects v",
    ),
}


def _adam(
    p,
    grad,
    state,
    lr,
    b1,
    b2,
    eps,
    wd=0.0,
    *,
    change=lambda m, v, c1, c2, eps: (m / c1) / ((v / c2).sqrt() + eps),
    decay=lambda p, lr, wd: p.mul_(1 - lr * wd),
    later=None,
    t0=0,
):
    t = state.get("t", t0) + 1
    m = b1 * state.get("m", 0.0) + (1 - b1) * grad
    v = b2 * state.get("v", 0.0) + (1 - b2) * grad * grad
    state.update(t=t, m=m, v=v)
    decay(p, lr, wd)
    p -= lr * change(m, v, 1 - b1**t, 1 - b2**t, eps)
    if later:
        later(p, lr, wd)


def _changed(change):
    return lambda *a: _adam(*a, change=change)


RIGHT["2.3"] = {
    "new tensors": _adam,
    "folded": _changed(lambda m, v, c1, c2, eps: m * (c2**0.5 / c1) / (v.sqrt() + eps * c2**0.5)),
    "numpy": _changed(
        lambda m, v, c1, c2, eps: torch.from_numpy(
            (m.numpy() / c1) / (np.sqrt(v.numpy() / c2) + eps)
        )
    ),
}
WRONG["2.3"] = {
    "v as it is": (_changed(lambda m, v, c1, c2, eps: m / c1 / (v.sqrt() + eps)), "v is not"),
    "m as it is": (_changed(lambda m, v, c1, c2, eps: m / ((v / c2).sqrt() + eps)), "m is not"),
    "eps hat": (
        _changed(lambda m, v, c1, c2, eps: m / c1 / ((v.sqrt() + eps) / c2**0.5)),
        "before the correction",
    ),
    "no root": (_changed(lambda m, v, c1, c2, eps: m / c1 / (v / c2 + eps)), "root is missing"),
    "no eps": (_changed(lambda m, v, c1, c2, eps: m / c1 / (v / c2).sqrt()), "eps is left out"),
    "uphill": (
        _changed(lambda m, v, c1, c2, eps: -m / c1 / ((v / c2).sqrt() + eps)),
        "increases the loss",
    ),
    "t from 1": (lambda *a: _adam(*a, t0=1), "t begins at 2"),
    "uncorrected, no root": (
        _changed(lambda m, v, c1, c2, eps: m / (v + eps)),
        "two things.*bias correction.*root is missing",
    ),
    "power": (
        lambda p, g, s, lr, b1, b2, eps: _adam(
            p,
            g,
            s,
            lr,
            b1,
            b2,
            eps,
            change=lambda m, v, c1, c2, eps: (
                m / (1 - b1 * s["t"]) / ((v / (1 - b2 * s["t"])).abs().sqrt() + eps)
            ),
        ),
        "first step is right",
    ),
    "t is 0": (
        lambda p, g, s, lr, b1, b2, eps: p.sub_(lr / (1 - b1 ** s.get("t", 0)) * g),
        "division by zero|zero",
    ),
}


def _by_the_formula(step):
    def rule(p, grad, state, lr, beta1, beta2, eps):
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * grad
        v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * grad**2
        p -= lr * step(m, v, 1 - beta1**t, 1 - beta2**t, eps, grad)

    return rule


def _of_an_empty_state(p, grad, state, lr, beta1, beta2, eps):
    state["t"] += 1


WRONG["2.3"] |= {
    "power of the whole": (
        lambda p, g, s, lr, b1, b2, eps: _adam(
            *(p, g, s, lr, b1, b2, eps),
            change=lambda m, v, c1, c2, eps: (
                m / (1 - b1) ** s["t"] / ((v / (1 - b2) ** s["t"]).sqrt() + eps)
            ),
        ),
        "not yet: the power is taken of",
    ),
    "t is a factor": (
        lambda p, g, s, lr, b1, b2, eps: _adam(
            *(p, g, s, lr, b1, b2, eps),
            change=lambda m, v, c1, c2, eps: (
                m / (1 - b1 * s["t"]) / ((v / (1 - b2 * s["t"])).sqrt() + eps)
            ),
        ),
        "not yet: beta is multiplied by t",
    ),
    "of an empty state": (
        _of_an_empty_state,
        "not yet: `state` is an empty dict before the first step.*KeyError at line",
    ),
    "corrections swapped": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: m / c2 / ((v / c1).sqrt() + eps)),
        "not yet: the corrections are swapped",
    ),
    "the gradient for m": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: g / c1 / ((v / c2).sqrt() + eps)),
        "not yet: the gradient is corrected here",
    ),
    "root of m's": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: m / c1**0.5 / ((v / c2).sqrt() + eps)),
        "not yet: m is divided by the root of its correction",
    ),
    "precedence": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: m / c1 / (v / c2).sqrt() + eps),
        "look at what eps is added to",
    ),
    "root first": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: m / c1 / (v.sqrt() / c2 + eps)),
        "the root is taken before the correction",
    ),
}

RIGHT["2.4"] = {
    "new tensors": _adam,
    "subtracted": lambda *a: _adam(*a, decay=lambda p, lr, wd: p.sub_(lr * wd * p)),
    "lerp to zero": lambda *a: _adam(
        *a, decay=lambda p, lr, wd: p.lerp_(torch.zeros_like(p), lr * wd)
    ),
}
WRONG["2.4"] = {
    "no lr": (lambda *a: _adam(*a, decay=lambda p, lr, wd: p.mul_(1 - wd)), "has no learning rate"),
    "none": (
        lambda *a: _adam(*a, decay=lambda p, lr, wd: p * (1 - lr * wd)),
        "decay has no effect",
    ),
    "afterwards": (
        lambda *a: _adam(*a, decay=lambda *b: None, later=lambda p, lr, wd: p.mul_(1 - lr * wd)),
        "after the step",
    ),
    "grows": (lambda *a: _adam(*a, decay=lambda p, lr, wd: p.mul_(1 + lr * wd)), "larger"),
    "afterwards, no lr": (
        lambda *a: _adam(*a, decay=lambda *b: None, later=lambda p, lr, wd: p.mul_(1 - wd)),
        "two things.*learning rate.*after the step",
    ),
    "twice lr": (
        lambda *a: _adam(*a, decay=lambda p, lr, wd: p.mul_(1 - lr * lr * wd)),
        "learning rate twice",
    ),
    "l2": (
        lambda p, g, s, lr, b1, b2, eps, wd: _adam(p, g + wd * p, s, lr, b1, b2, eps),
        "added to the gradient",
    ),
}

RIGHT["2.5"] = {
    "powers": lambda x: next(2.0**e for e in itertools.count(-200) if x < 2.0 ** (e + 9)),
    "numpy": lambda x: np.exp2(np.floor(np.log2(x)) - 8),
    "bits": lambda x: (
        2.0 ** (((torch.tensor(x, dtype=torch.float64).view(torch.int64) >> 52).item() - 1023) - 8)
    ),
}
WRONG["2.5"] = {
    "gap": (lambda x: 2.0 ** (math.floor(math.log2(x)) - 7), "whole gap"),
    "ceil": (lambda x: 2.0 ** (math.ceil(math.log2(x)) - 8), "half_gap"),
    "truncated": (lambda x: 2.0 ** (math.trunc(math.log2(x)) - 8), "rounds towards zero"),
    "float32": (lambda x: 2.0 ** (math.floor(math.log2(x)) - 24), "float32"),
    "relative": (lambda x: x / 256, "grows smoothly"),
    "constant": (lambda x: 2.0**-8, "half the gap at 1"),
}


def _frugal(p, grad, state, lr, b1, b2, eps, wd, *, root=True, c2=True, hold=None, divide="sqrt"):
    if not state:
        state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["t"] += 1
    t, m, v = state["t"], state["m"], state["v"]
    m.lerp_(grad, 1 - b1)
    v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
    held = hold(m, v) if hold else None
    p.mul_(1 - lr * wd)
    d = v.sqrt() if root else v.clone()
    d.div_((1 - b2**t) ** (0.5 if root else 1.0) if c2 else 1.0).add_(eps)
    p.addcdiv_(m, d, value=-lr / (1 - b1**t))
    del held


def _rows(*a):
    p, grad, state, *rest = a
    each = state.setdefault("each", [{} for _ in p])
    for row, g, s in zip(p, grad, each, strict=True):
        _adam(row, g, s, *rest)


RIGHT["2.6"] = {
    "chain": _frugal,
    "buffer": lambda *a: _frugal(*a),
    "views": _rows,
}
WRONG["2.6"] = {
    "copies": (_adam, "temporaries|new tensors"),
    "a second": (lambda *a: _frugal(*a, hold=lambda m, v: v.clone()), "2 temporaries"),
    "no root": (lambda *a: _frugal(*a, root=False), "root is missing|root"),
    "v as it is": (lambda *a: _frugal(*a, c2=False), "v is not"),
    "numpy": (
        lambda *a: _frugal(*a, hold=lambda m, v: [np.zeros((300, 300)), np.zeros((300, 300))]),
        "numpy",
    ),
    "no decay": (lambda *a: _frugal(*a[:-1], 0.0), "decay has no effect"),
}


def _flattened(flat):
    """AdamW on ``flat(p)``."""

    def adamw(p, grad, state, lr, beta1, beta2, eps, weight_decay):
        p, grad = flat(p), flat(grad)
        if not state:
            state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["t"] += 1
        t, m, v = state["t"], state["m"], state["v"]
        p.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))

    return adamw


WRONG["2.4"] |= {
    "view(-1)": (_flattened(lambda p: p.view(-1)), "`view` needs a contiguous tensor"),
    "reshape(-1)": (_flattened(lambda p: p.reshape(-1)), "reshape.-1. and flatten.. make a copy"),
    "flatten": (_flattened(lambda p: p.flatten()), "reshape.-1. and flatten.. make a copy"),
}
RIGHT["2.4"] |= {
    "as it is": _flattened(lambda p: p),
    "of p.data": _flattened(lambda p: p.data),
    "transposed": _flattened(lambda p: p.t() if p.ndim == 2 else p),
    "detached": _flattened(lambda p: p.detach()),
    "one axis more": _flattened(lambda p: p.unsqueeze(0)),
}


def _by_magnitude(p, grad, state, lr, beta, eps):
    v = state["v"] = beta * state.get("v", 0.0) + (1 - beta) * grad.abs()
    p -= lr * grad / (v.sqrt() + eps)


def _t_times_beta1(p, grad, state, lr, beta1, beta2, eps):
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * grad
    v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * grad**2
    p -= lr * (m / (1 - beta1 * t)) / ((v / (1 - beta2**t)).sqrt() + eps)


def _decays_once(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    if not state:
        p *= 1 - lr * weight_decay
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * grad
    v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * grad**2
    p -= lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)


WRONG["2.2"] |= {"magnitudes": (_by_magnitude, "averages the gradient's magnitude")}
WRONG["2.3"] |= {"beta1 times t": (_t_times_beta1, "beta1 is multiplied by t")}
WRONG["2.4"] |= {"decays once": (_decays_once, "in the first step alone")}


def _moments_in_one_tensor(p, grad, state, lr, beta1, beta2, eps):
    if not state:
        state["t"] = 0
        state["m"] = state["v"] = torch.zeros_like(p)
    state["t"] += 1
    m, v = state["m"], state["v"]
    m.mul_(beta1).add_((1 - beta1) * grad)
    v.mul_(beta2).add_((1 - beta2) * grad**2)
    m_hat, v_hat = m / (1 - beta1 ** state["t"]), v / (1 - beta2 ** state["t"])
    p.sub_(lr * m_hat / (v_hat.sqrt() + eps))


def _decays_and_loses_the_step(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    if not state:
        state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["t"] += 1
    m, v = state["m"], state["v"]
    p.mul_(1 - lr * weight_decay)
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = v.sqrt().div_(math.sqrt(1 - beta2 ** state["t"])).add_(eps)
    p.addcdiv(m, root, value=-lr / (1 - beta1 ** state["t"]))


WRONG["2.3"] |= {"m and v in one tensor": (_moments_in_one_tensor, "m and v are one tensor")}
WRONG["2.4"] |= {"the step is lost": (_decays_and_loses_the_step, "not yet: p only decays")}
WRONG["2.6"] |= {"the step is lost": (_decays_and_loses_the_step, "not yet: p only decays")}
WRONG["2.5"] |= {
    "item": (
        lambda x: 2.0 ** (math.floor(math.log2(x.item())) - 8),
        "not yet: x is one of Python's numbers",
    ),
    "log2 of torch": (
        lambda x: 2.0 ** (torch.floor(torch.log2(x)) - 8),
        "not yet: x is one of Python's numbers",
    ),
}


def _counts_in_a_tensor(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    """The step counter and the corrections are tensors, as in PyTorch's own AdamW."""
    if not state:
        state.update(t=torch.tensor(0.0), m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["t"] += 1
    t, m, v = state["t"], state["m"], state["v"]
    c1, c2 = 1 - beta1 ** t.double(), 1 - beta2 ** t.double()
    p.mul_(1 - lr * weight_decay)
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = v.sqrt().div_(c2.sqrt()).add_(eps)
    p.addcdiv_(m, root, value=(-lr / c1).item())


def _root_of_a_number(p, grad, state, lr, beta1, beta2, eps):
    (1 - beta2**1).sqrt()


RIGHT["2.6"] |= {"a tensor counts": _counts_in_a_tensor}
WRONG["2.3"] |= {
    "sqrt of a number": (_root_of_a_number, "not yet: this is one of Python's numbers, not a t"),
}
