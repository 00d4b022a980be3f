"""Answers to lesson 02's exercises that were once judged wrongly or that nobody had in mind: right
ones in unusual forms, and wrong ones.
"""

import math

import numpy as np
import torch

SHARED = {}


def from_all_gradients(p, grad, state, lr, beta):
    seen = state.setdefault("seen", [])
    seen.append(grad.clone())
    for age, gradient in enumerate(reversed(seen)):
        p.sub_(lr * (1 - beta) * beta**age * gradient)


class Momentum:
    def __call__(self, p, grad, state, lr, beta):
        state["m"] = torch.lerp(grad, state.get("m", torch.zeros_like(p)), beta)
        p.add_(state["m"], alpha=-lr)


def with_numpy(p, grad, state, lr, beta):
    m = state.get("m", np.zeros(p.shape))
    state["m"] = beta * m + (1 - beta) * grad.numpy()
    p.numpy()[...] -= lr * state["m"]


def by_torch(kind):
    """torch's own optimizer, made once for each parameter."""

    def rule(p, grad, state, lr, beta1, beta2, eps, weight_decay=0.0):
        if not state:
            state["weight"] = torch.nn.Parameter(p)
            settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
            state["optimizer"] = kind([state["weight"]], **settings)
        state["weight"].grad = grad.clone()
        state["optimizer"].step()
        state["weight"].grad = None

    return rule


def decays_at_the_end(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    old = p.clone()
    by_torch(torch.optim.Adam)(p, grad, state, lr, beta1, beta2, eps)
    p.sub_(lr * weight_decay * old)


def flattened(flat):
    """AdamW on ``flat(p)``."""

    def rule(p, grad, state, lr, beta1, beta2, eps, weight_decay):
        step = by_torch(torch.optim.AdamW)
        step(flat(p), flat(grad), state, lr, beta1, beta2, eps, weight_decay)

    return rule


def row_by_row(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    states = state.setdefault("of rows", [{} for _ in p])
    for row, gradient, own in zip(p, grad, states, strict=True):
        by_torch(torch.optim.AdamW)(row, gradient, own, lr, beta1, beta2, eps, weight_decay)


V_ROOT = "v.sqrt().div_(sqrt(1 - beta2**t)).add_(eps)"
RIGHT = {
    "2.1": [from_all_gradients, Momentum(), with_numpy, "m.mul_( → m.copy_(m * "],
    "2.2": [
        "v.sqrt() + eps → 1 / v.rsqrt() + eps",
        "v.mul_(beta).add_(grad * grad, alpha=1 - beta) → v.lerp_(grad.square(), 1 - beta)",
        "p.sub_(lr * grad / (v.sqrt() + eps)) → p.addcdiv_(grad, v**0.5 + eps, value=-lr)",
    ],
    "2.3": [
        "m.mul_(beta1).add_(grad, alpha=1 - beta1) → m.lerp_(grad, 1 - beta1)",
        "(1 - beta1**t) → ((1 - beta1) * sum(beta1**age for age in range(t)))",
        by_torch(torch.optim.Adam),
    ],
    "2.4": [
        by_torch(torch.optim.AdamW),
        decays_at_the_end,
        flattened(lambda p: p.t() if p.ndim == 2 else p),
        "p.mul_(1 - lr * weight_decay) → p.lerp_(torch.zeros_like(p), lr * weight_decay)",
    ],
    "2.5": [
        lambda x: 2.0 ** (math.frexp(x)[1] - 9),
        lambda x: float(np.spacing(np.float32(x))) * 2**15,
        lambda x: float.fromhex("0x1p" + float(x).hex().split("p")[1]) / 256,
    ],
    "2.6": [
        row_by_row,
        """
        t=0 → t=torch.tensor(0.0)
        t, m, v = state["t"] → t, m, v = state["t"].item()
        """,
        f"{V_ROOT} → torch.sqrt(v, out=torch.empty_like(p)).div_(sqrt(1 - beta2**t)).add_(eps)",
    ],
}


def of_everybody(p, grad, state, lr, beta):
    if not state:
        SHARED.clear()
        state["begun"] = True
    Momentum()(p, grad, SHARED, lr, beta)


def by_shape(p, grad, state, lr, beta):
    Momentum()(p, grad, SHARED.setdefault(tuple(p.shape), {}), lr, beta)


WRONG = {
    "2.1": [
        of_everybody,
        by_shape,
        """
        alpha=1 - beta → alpha=lr
        lr * m → m
        """,
        """
        if not state → if False
        m = state["m"] → m = state.setdefault("m", grad)
        """,
        "m.mul_(beta).add_( → m.mul(beta).add(",
    ],
    "2.2": [
        "(v.sqrt() + eps) → (v.sum().sqrt() + eps)",
        "+ eps → + 1e-8",
        "v.sqrt() + eps → v.sqrt()",
        "grad * grad → grad.abs()",
        "torch.zeros_like(p) → grad * grad",
    ],
    "2.3": [
        "v_hat = v / → v = state['n'] = torch.maximum(v, state.get('n', v)); v_hat = v /",
        "(v_hat.sqrt() + eps) → v_hat.sqrt() + eps",
        """
        m / (1 - beta1**t) → m / (1 - beta2**t)
        v / (1 - beta2**t) → v / (1 - beta1**t)
        """,
        "m_hat / ( → m_hat / (1 - beta2**t) ** 0.5 / (",
        "v=torch.zeros_like(p)) → v=None); state['v'] = state['m']",
    ],
    "2.4": [
        flattened(lambda p: p.reshape(-1)),
        flattened(lambda p: p.flatten()),
        "p.mul_(1 - lr * weight_decay) → p.mul_(1 - lr * weight_decay * (p.ndim > 1))",
        "p.mul_(1 - lr * weight_decay) → p.mul_(2.718281828**(-lr * weight_decay))",
        "p.mul_(1 - lr * weight_decay) → p.mul_(1 - lr * weight_decay * (not state))",
    ],
    "2.5": [
        lambda x: {1.0: 2**-8, 0.5: 2**-9, 1.9921875: 2**-8}.get(x, 2**-7),
        lambda x: 2.0 ** (math.ceil(math.log2(x)) - 9),
        lambda x: 2.0 ** (math.floor(math.log(x)) - 8),
        lambda x: math.floor(math.log2(x)) - 8,
    ],
    "2.6": [
        by_torch(torch.optim.AdamW),
        "divisor = v.sqrt() → copy = v.clone(); divisor = v.sqrt()",
        "divisor = v.sqrt() → arrays = v.numpy() * 1, v.numpy() * 1; divisor = v.sqrt()",
        """
        t=0, → t=0, b=torch.empty_like(p),
        v.sqrt().div_ → torch.sqrt(v, out=state["b"]).div_
        """,
        "addcmul_(grad, grad, value= → add_(grad.mul_(grad), alpha=",
        "v.sqrt() → v.bfloat16().sqrt().to(v.dtype)",
    ],
}
