"""Answers to the exercises of lesson 02 that nobody had in mind when its checks were written."""

import math

import numpy as np
import torch

RIGHT, WRONG = {}, {}


def _two_averages(p, grad, state, lr, beta):
    """By the closed form: all gradients are kept, and the average is made anew in each step."""
    seen = state.setdefault("seen", [])
    seen.append(grad.clone())
    shares = [(1 - beta) * beta**age for age in range(len(seen))][::-1]
    p.sub_(lr * torch.einsum("i,i...->...", torch.tensor(shares, dtype=p.dtype), torch.stack(seen)))


class _Momentum:
    """An object that is called."""

    def __call__(self, p, grad, state, lr, beta):
        old = state.get("m")
        state["m"] = grad * (1 - beta) if old is None else torch.lerp(grad, old, beta)
        p.add_(state["m"], alpha=-lr)


def _m(p, grad, state, beta, name="m"):
    m = state.setdefault(name, torch.zeros_like(p))
    return m.mul_(beta).add_(grad, alpha=1 - beta)


def _dampened(p, grad, state, lr, beta):
    """torch's SGD without dampening in the first step: its buffer begins at the gradient."""
    if "m" not in state:
        state["m"] = grad.clone()
    else:
        state["m"].mul_(beta).add_(grad, alpha=1 - beta)
    p.sub_(lr * state["m"])


def _velocity(p, grad, state, lr, beta):
    """lr inside the average."""
    v = state.setdefault("v", torch.zeros_like(p))
    v.mul_(beta).add_(grad, alpha=lr)
    p.sub_(v)


def _frozen_after_first(p, grad, state, lr, beta):
    if not state:
        state["m"] = (1 - beta) * grad
    else:
        state["m"] * beta + (1 - beta) * grad  # a new tensor that nobody keeps
    p.sub_(lr * state["m"])


RIGHT["2.1"] = {"closed form": _two_averages, "an object": _Momentum()}
WRONG["2.1"] = {
    "begins at the gradient": (_dampened, "start|begin|zero"),
    "lr in the average": (_velocity, r"1 - beta|sum"),
    "not written back": (_frozen_after_first, "write|first step is right|later ones"),
}


def _squares(p, grad, state, lr, beta, eps):
    """Two equal factors in place of the square, a root by a power."""
    v = state["v"] = beta * state.get("v", torch.tensor(0.0, dtype=p.dtype)) + (
        1 - beta
    ) * torch.mul(grad, grad)
    torch.sub(p, lr * grad * torch.reciprocal(torch.pow(v, 0.5) + eps), out=p)


def _v(p, grad, state, beta):
    v = state.setdefault("v", torch.zeros_like(p))
    return v.mul_(beta).addcmul_(grad, grad, value=1 - beta)


def _variance(p, grad, state, lr, beta, eps):
    """The variance: the square's average less the average's square."""
    m, v = _m(p, grad, state, beta), _v(p, grad, state, beta)
    p.sub_(lr * grad / ((v - m * m).clamp(min=0).sqrt() + eps))


RIGHT["2.2"] = {"powers": _squares}
WRONG["2.2"] = {
    "variance": (_variance, "a variance"),
    "root of each": (
        lambda p, g, s, lr, b, eps: p.sub_(lr * g / (_m(p, g.abs(), s, b) + eps)),
        "absolute|square",
    ),
    "by the norm": (
        lambda p, g, s, lr, b, eps: p.sub_(lr * g / (_v(p, g, s, b).sum().sqrt() + eps)),
        "one for all|same number",
    ),
    "v of the last step": (
        lambda p, g, s, lr, b, eps: (
            p.sub_(lr * g / (s.get("v", torch.ones_like(p)).sqrt() + eps)),
            _v(p, g, s, b),
        ),
        "first step|look at the formula",
    ),
}


def _moments(p, grad, state, beta1, beta2):
    state["t"] = state.get("t", 0) + 1
    return state["t"], _m(p, grad, state, beta1), _v(p, grad, state, beta2)


def _one_rate(p, grad, state, lr, beta1, beta2, eps):
    """Both corrections in one rate, and in eps."""
    t, m, v = _moments(p, grad, state, beta1, beta2)
    root = math.sqrt(1 - beta2**t)
    p.addcdiv_(m, v.sqrt() + eps * root, value=-lr * root / (1 - beta1**t))


def _geometric(p, grad, state, lr, beta1, beta2, eps):
    """The corrections as sums of shares."""
    t, m, v = _moments(p, grad, state, beta1, beta2)
    shares = [(1 - b) * sum(b**i for i in range(t)) for b in (beta1, beta2)]
    p -= lr * (m / shares[0]) / (torch.sqrt(v / shares[1]) + eps)


def _as_torch_does(p, grad, state, lr, beta1, beta2, eps):
    """torch.optim.Adam itself, made once for this parameter."""
    if "optimizer" not in state:
        state["weight"] = torch.nn.Parameter(p)
        state["optimizer"] = torch.optim.Adam(
            [state["weight"]], lr=lr, betas=(beta1, beta2), eps=eps
        )
    state["weight"].grad = grad.clone()
    state["optimizer"].step()


def _adam(which):
    def rule(p, grad, state, lr, beta1, beta2, eps):
        t, m, v = _moments(p, grad, state, beta1, beta2)
        c1, c2 = 1 - beta1**t, 1 - beta2**t
        step = {
            "amsgrad": lambda: (
                m
                / c1
                / (
                    (
                        state.setdefault("max", v.clone()).copy_(torch.maximum(state["max"], v))
                        / c2
                    ).sqrt()
                    + eps
                )
            ),
            "nadam": lambda: (beta1 * m / c1 + (1 - beta1) * grad / c1) / ((v / c2).sqrt() + eps),
            "correction of beta alone": lambda: m / (1 - beta1) / ((v / (1 - beta2)).sqrt() + eps),
            "t times beta": lambda: (
                m / (1 - beta1 * t if beta1 * t < 1 else 1) / ((v / c2).sqrt() + eps)
            ),
            "one correction for both": lambda: m / c1 / ((v / c1).sqrt() + eps),
            "no eps, no correction": lambda: m / v.sqrt(),
            "eps inside, m as it is": lambda: m / (v / c2 + eps).sqrt(),
            "multiplies": lambda: m * c1 / ((v * c2).sqrt() + eps),
            "rsqrt of nothing": lambda: m / c1 * (v / c2).rsqrt(),
        }[which]()
        p.sub_(lr * step)

    return rule


RIGHT["2.3"] = {"one rate": _one_rate, "sums of shares": _geometric, "torch's Adam": _as_torch_does}
WRONG["2.3"] = {
    "amsgrad": (_adam("amsgrad"), "AMSGrad"),
    "Nesterov": (_adam("nadam"), "already the first step is wrong"),
    "without t": (_adam("correction of beta alone"), r"\bt\b|power"),
    "c1 for both": (_adam("one correction for both"), "beta1|corrections"),
    "two things": (_adam("no eps, no correction"), "correct"),
    "two other things": (_adam("eps inside, m as it is"), "two things|eps"),
    "multiplied by the corrections": (_adam("multiplies"), "divide|multipl"),
    "no eps": (_adam("rsqrt of nothing"), "eps"),
}


def _decay(which):
    def rule(p, grad, state, lr, beta1, beta2, eps, weight_decay):
        g = grad
        if which == "twice":
            g = grad + weight_decay * p
            p.mul_(1 - lr * weight_decay)
        if which == "exponential":
            p.mul_(math.exp(-lr * weight_decay))
        if which == "squared lr":
            p.mul_(1 - lr * lr * weight_decay)
        if which == "of the sign":
            p.sub_(lr * weight_decay * p.sign())
        old = p.clone()
        t, m, v = _moments(p, g, state, beta1, beta2)
        p.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))
        if which == "of the old p":
            p.sub_(lr * weight_decay * old)
        if which == "of the new p":
            p.sub_(lr * weight_decay * p)
        if which == "matrices alone" and p.ndim > 1:
            p.mul_(1 - lr * weight_decay)
        if which == "of the m":
            p.sub_(lr * weight_decay * m)

    return rule


RIGHT["2.4"] = {"of the old p, at the end": _decay("of the old p")}
WRONG["2.4"] = {
    "after the step": (_decay("of the new p"), "first|before|after"),
    "both ways": (_decay("twice"), "acts twice"),
    "exponential": (_decay("exponential"), "multiplied by 0.951229"),
    "lr twice": (_decay("squared lr"), "lr"),
    "matrices alone": (_decay("matrices alone"), "no decay|decay"),
}
RIGHT["2.5"] = {
    "numpy's spacing": lambda x: float(np.spacing(np.float32(x))) * 2**16 / 2,
    "by loop": lambda x: next(2.0**e for e in range(200, -200, -1) if 2.0**e <= x) / 256,
    "text": lambda x: float.fromhex("0x1p" + float(x).hex().split("p")[1]) / 256,
}
WRONG["2.5"] = {
    "fp8": (lambda x: 2.0 ** (math.floor(math.log2(x)) - 4), "as if for 3 bits"),
    "a quarter": (
        lambda x: 2.0 ** (math.floor(math.log2(x)) - 9),
        "2 times too small|half|quarter",
    ),
    "below x": (
        lambda x: 2.0 ** (math.ceil(math.log2(x)) - 9),
        "below|power of two|smaller",
    ),
    "natural log": (lambda x: 2.0 ** (math.floor(math.log(x)) - 8), "log2|power of two"),
    "linear": (lambda x: x / 256, "smoothly"),
}


def _frugal(which):
    def rule(p, grad, state, lr, beta1, beta2, eps, weight_decay):
        if not state:
            state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["t"] += 1
        t, m, v = state["t"], state["m"], state["v"]
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if which == "reused buffer":
            buffer = torch.sqrt(v).div_(math.sqrt(1 - beta2**t)).add_(eps)
            torch.div(m, buffer, out=buffer)
            p.mul_(1 - lr * weight_decay).add_(buffer, alpha=-lr / (1 - beta1**t))
        elif which == "rows":
            p.mul_(1 - lr * weight_decay)
            for row, a, b in zip(p, m, v, strict=True):
                row.addcdiv_(
                    a, b.sqrt().div_(math.sqrt(1 - beta2**t)).add_(eps), value=-lr / (1 - beta1**t)
                )
        elif which == "kept buffer":
            buffer = state.setdefault("buffer", torch.empty_like(p))
            torch.sqrt(v, out=buffer).div_(math.sqrt(1 - beta2**t)).add_(eps)
            p.mul_(1 - lr * weight_decay).addcdiv_(m, buffer, value=-lr / (1 - beta1**t))
        elif which == "root corrected by c2 itself":
            p.mul_(1 - lr * weight_decay)
            p.addcdiv_(m, v.sqrt().div_(1 - beta2**t).add_(eps), value=-lr / (1 - beta1**t))
        elif which == "decay last":
            p.addcdiv_(
                m, v.sqrt().div_(math.sqrt(1 - beta2**t)).add_(eps), value=-lr / (1 - beta1**t)
            )
            p.mul_(1 - lr * weight_decay)
        elif which == "undone":
            v.sqrt_().div_(math.sqrt(1 - beta2**t)).add_(eps)
            p.mul_(1 - lr * weight_decay).addcdiv_(m, v, value=-lr / (1 - beta1**t))
            v.sub_(eps).mul_(math.sqrt(1 - beta2**t)).square_()

    return rule


RIGHT["2.6"] = {"a buffer twice": _frugal("reused buffer"), "row by row": _frugal("rows")}
WRONG["2.6"] = {
    "a buffer for each": (_frugal("kept buffer"), "a third tensor"),
    "c2 without its root": (_frugal("root corrected by c2 itself"), "root"),
    "decay last": (_frugal("decay last"), "after|first|before"),
}
