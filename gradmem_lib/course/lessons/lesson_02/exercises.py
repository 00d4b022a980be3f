"""Lesson 02's exercises, in the order of the lesson: Adam, one idea at a time, then what it costs
in bf16, and a step that needs one temporary.

A rule is a function ``rule(p, grad, state, ...)``: it moves the parameter ``p`` in place, and keeps
in the dict ``state`` whatever it must remember until the next step.
"""

from math import floor, log2, prod, sqrt

import torch

from ...judge.exercise import Exercise, calls, measured, outside_torch

START = [1, -2, 0.5, 3]
GRADIENT = [0.3, -1, 2, 0.004]
SIZES = [1, -1, 3, 0.1, -0.1]  # of the gradient in each step; so an average of squares falls too


def start(*shape: int):
    """(p, its gradient), of this shape."""
    parameter, gradient = torch.tensor([START, GRADIENT], dtype=torch.float64)
    return parameter.reshape(shape), gradient.reshape(shape)


def walk(rule, settings: dict, sizes: list, *pairs) -> torch.Tensor:
    """Where all parameters are after a step with their gradient times each of the ``sizes``."""
    states: list[dict] = [{} for _ in pairs]
    for size in sizes:
        for (p, gradient), state in zip(pairs, states, strict=True):
            with torch.no_grad():
                rule(p, gradient * size, state, *settings.values())
    return torch.cat([p.flatten() for p, _ in pairs])


def walks(*settings: dict):
    """Cases for a rule: five steps with each of the ``settings``, then what else it must do."""

    def cases(rule):
        for each in settings:
            used = ", ".join(map("{}={}".format, each, each.values()))
            for steps in (1, 2, 5):
                sizes = SIZES[:steps]
                times = f"{GRADIENT} times {str(sizes)[1:-1]}"
                name = f"p = {START} after steps with gradients {times}, and {used}"
                yield name, walk(rule, each, sizes, start(4))
        first = settings[0]
        in_turn = walk(rule, first, SIZES, start(4), start(4))
        yield "two parameters in turn, each with a state of its own", in_turn
        p, gradient = start(2, 2)
        # not contiguous, as the weights of a convolution may be
        transposed = walk(rule, first, SIZES, (p.t(), gradient))
        yield "a p that is a transposed matrix, changed in place", transposed

    return cases


# 2.1


def momentum(p, grad, state, lr, beta):
    """Move ``p`` against m, the moving average of the gradients."""
    if not state:
        state["m"] = torch.zeros_like(p)
    m = state["m"]
    m.mul_(beta).add_(grad, alpha=1 - beta)
    p.sub_(lr * m)


MOMENTUM = Exercise(
    "2.1",
    momentum,
    walks({"lr": 0.1, "beta": 0.9}, {"lr": 0.02, "beta": 0.6}),
    """
    alpha=1 - beta → alpha=1
        this adds the whole gradient to m, as torch.optim.SGD does: here m is an average, which
        takes 1 - beta of it.
    mul_(beta) → mul_(1 - beta)
    alpha=1 - beta → alpha=beta
        the weights are swapped: m keeps beta of itself and takes 1 - beta of the gradient.
    if not state → if True
        the average starts from zero in every step: make it once, keep it in `state`, and write the
        new value back there.
    torch.zeros_like(p) → grad.clone()
        m starts as the whole first gradient: start from zeros, and take 1 - beta of the first one,
        like any other.
    lr * m → lr * grad
        the step is lr times the gradient, so m has no effect: the step must use m.
    p.sub_ → p.add_
        this increases the loss: subtract lr * m.
    m.mul_(beta).add_(grad, alpha=1 - beta) →
    p.sub_(lr * m) → p.sub_(lr * m); m.mul_(beta).add_(grad, alpha=1 - beta)
        the step uses m as it was before this gradient: update m first, then step.
    lr * m → m
        the learning rate is missing: the step is lr * m.
    """,
    changes="p state",
    pairs=True,
)

# 2.2


def second_moment(p, grad, state, lr, beta, eps):
    """Move ``p`` against the gradient, divided by the root of v, the moving average of its
    square.
    """
    if not state:
        state["v"] = torch.zeros_like(p)
    v = state["v"]
    v.mul_(beta).add_(grad * grad, alpha=1 - beta)
    p.sub_(lr * grad / (v.sqrt() + eps))


SECOND_MOMENT = Exercise(
    "2.2",
    second_moment,
    walks(
        {"lr": 0.1, "beta": 0.9, "eps": 1e-8},
        {"lr": 0.02, "beta": 0.99, "eps": 0.1},
    ),
    """
    grad * grad → grad
        v averages the gradient itself: it must average its square, or signs cancel and the root of
        a negative is nan.
    v.sqrt() → v
        the root is missing: v is as large as a squared gradient, and sqrt(v) as large as a
        gradient.
    v.sqrt() + eps → (v + eps).sqrt()
        eps is inside the root: it belongs outside, sqrt(…) + eps, or tiny gradients are divided by
        a much too large number.
    v.mul_(beta).add_(grad * grad, alpha=1 - beta) →
    eps)) → eps)); v.mul_(beta).add_(grad * grad, alpha=1 - beta)
        this divides by v as it was before this gradient, which is 0 in the first step: update v
        first.
    alpha=1 - beta → alpha=1
        this adds the whole square: v is an average, which takes 1 - beta of it.
    if not state → if True
        the average starts from zero in every step: make it once, keep it in `state`, and write the
        new value back there.
    grad * grad → grad.square().mean()
        v is one number for the whole parameter: each number of the parameter needs its own.
    alpha=1 - beta → alpha=(1 - beta) ** 2
        1 - beta is squared too: only the gradient is squared.
    """,
    changes="p state",
    pairs=True,
)

# 2.3


def adam(p, grad, state, lr, beta1, beta2, eps):
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


USUAL = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
OTHER = {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 0.1}

ADAM = Exercise(
    "2.3",
    adam,
    walks(USUAL, OTHER),
    """
    m / (1 - beta1**t) → m
    v / (1 - beta2**t) → v
        this is Adam without bias correction: m and v start at zero, and are too small at first.
    v / (1 - beta2**t) → v
        m is corrected but v is not: v grows a hundred times more slowly, so it needs the
        correction more.
    m / (1 → m.div_(1
    v / (1 → v.div_(1
        the corrected m and v are stored: they are new tensors, only for this step; m and v stay as
        they are in `state`.
    state["t"] += 1 →
        p is not a number (nan) after the first step. If t is 0 there, 1 - beta**t is 0: count the
        step first.
    m / (1 - beta1**t) → m
        v is corrected but m is not: m starts at zero too, and is too small at first.
    if not state → if True
        m, v and t start from zero in every step: make them once, when `state` is empty.
    v_hat.sqrt() + eps → (v_hat + eps).sqrt()
        eps is inside the root: it belongs outside, sqrt(…) + eps, or tiny gradients are divided by
        a much too large number.
    lr * m_hat / (v_hat.sqrt() + eps) → lr * (1 - beta2**t) ** 0.5 * m_hat / (v.sqrt() + eps)
        eps is added to the root of v before its correction (the paper's shorter order): add it to
        the root of the corrected v.
    """,
    changes="p state",
    pairs=True,
)

# 2.4


def adamw(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    """One step of AdamW on ``p``: first the decay, then Adam."""
    p.mul_(1 - lr * weight_decay)
    adam(p, grad, state, lr, beta1, beta2, eps)


DECAYS = USUAL | {"weight_decay": 0.5}, OTHER | {"weight_decay": 0.1}

ADAMW = Exercise(
    "2.4",
    adamw,
    walks(*DECAYS),
    """
    p.mul_(1 - lr * weight_decay) → grad = grad + weight_decay * p
        the decay is added to the gradient, and so is divided by the root of v: that is Adam with
        weight decay; AdamW shrinks p itself.
    p.mul_(1 - lr * weight_decay) →
        the decay has no effect on p: shrink it in place, p.mul_(1 - lr * weight_decay).
    p.mul_(1 - lr * weight_decay) →
    beta2, eps) → beta2, eps); p.mul_(1 - lr * weight_decay)
        almost: the decay comes after the step, so it shrinks the step too. Decay first, then
        Adam's step.
    lr * weight_decay → weight_decay
        the decay has no learning rate: shrink p by the factor 1 - lr * weight_decay.
    1 - lr → 1 + lr
        the sign of the decay is wrong: this makes p larger.
    p.mul_(1 - lr * weight_decay) → p.sub_(lr * weight_decay)
        a constant is subtracted, not a share of p: shrink p by the factor 1 - lr * weight_decay.
    adam(p, grad, → adam(p, grad + weight_decay * p,
        the decay acts twice: p shrinks, and weight_decay * p is added to the gradient too. Leave
        the gradient as it is.
    beta2, eps) → beta2, eps); p.mul_(1 - lr * weight_decay)
        p is decayed twice, before the step and after it.
    """,
    changes="p state",
    pairs=True,
)

# 2.5


def half_gap(x: float) -> float:
    """Half the distance from ``x`` to the next larger bf16 number: anything smaller, added to x,
    changes nothing.
    """
    return 2.0 ** (floor(log2(x)) - 8)


HALF_GAP = Exercise(
    "2.5",
    half_gap,
    calls(
        (1.0,),
        (3.0,),
        (100.0,),
        (0.5,),
        (0.0125732421875,),
        hidden=[(0.0001678466796875,), (3008.0,)],
    ),
    """
    - 8 → - 7
        this is the whole gap: from its middle on, rounding goes up.
    - 8 → - 11
        this is float16, with 10 bits after the point: bf16 has 7.
    - 8 → - 24
        this is float32, with 23 bits after the point: bf16 has 7.
    floor(log2(x)) → log2(x)
        this grows smoothly with x: the gap is the same from one power of two to the next, and then
        doubles.
    floor(log2(x)) → int(log2(x))
        below 1 your result is twice too large, except at powers of two: int() rounds a negative
        log2 towards zero, while floor() rounds down.
    floor(log2(x)) → round(log2(x))
        for some x the exponent is too large: it must be rounded down, by floor().
    floor(log2(x)) → 0
        this is half the gap at 1, and gaps double at every power of two.
    floor(log2(x)) - 8 → -7
        torch.finfo(torch.bfloat16).eps is the whole gap at 1: you want half of it, at x.
    """,
)

# 2.6


def frugal_adamw(p, grad, state, lr, beta1, beta2, eps, weight_decay):
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


# Few rows: a list that holds something for each row is small.
LARGE, SMALL = (8, 4096), (4, 2048)
ONE = 4 * prod(LARGE)  # bytes of the largest parameter
FOR_SCALARS = 256  # bytes, such as of step counters that are tensors
# Two parameters, their gradients, m and v; the gradient that is given, and one temporary.
BUDGET = 6 * ONE + 4 * 4 * prod(SMALL) + FOR_SCALARS


def three_steps(rule) -> torch.Tensor:
    """Two float32 parameters after three steps. Everything is made here, so that a tracker around
    it counts every byte.
    """
    pairs = torch.randn(2, *LARGE), torch.randn(2, *SMALL)
    return walk(rule, DECAYS[0], SIZES[:3], *pairs)


def frugal_cases(rule):
    yield from walks(*DECAYS)(rule)
    steps = measured(lambda: three_steps(rule), BUDGET, "tensors as large as p", ONE)
    yield "three steps of two float32 parameters", steps
    # Without what the judge around it notes of the arguments, which are bytes of Python too.
    alone = getattr(rule, "__wrapped__", rule)
    outside = outside_torch(lambda: three_steps(alone), 3 * ONE // 2)
    yield "three steps, in arrays that are no tensors", outside


FRUGAL = Exercise(
    "2.6",
    frugal_adamw,
    frugal_cases,
    """
    v=torch.zeros_like(p)) → v=torch.zeros_like(p), buffer=torch.empty_like(p))
    v.sqrt().div_ → torch.sqrt(v, out=state["buffer"]).div_
        `state` keeps a third tensor for each parameter, so all of them stay alive at once: make the
        temporary in the step, and let it go.
    v.sqrt() → v.sqrt_()
        v.sqrt_() overwrites v with its root: this saves a temporary, but the second moment is lost.
    addcdiv_(m, divisor, value=-lr → sub_(m.div_(divisor).mul_(lr
    (1 - beta1**t)) → (1 - beta1**t)))
        this scales m itself to save a temporary: in the next step m is no longer an average.
    sqrt(1 - beta2**t) → (1 - beta2**t)
        the root of v is divided by 1 - beta2**t: sqrt(v / c) is sqrt(v) / sqrt(c), so take the
        root of c too.
    v.sqrt().div_(sqrt(1 - beta2**t)).add_(eps) → (v / (1 - beta2**t) + eps).sqrt()
        eps is inside the root: it belongs outside.
    p.mul_(1 - lr * weight_decay) →
        the decay has no effect on p: shrink it in place, p.mul_(1 - lr * weight_decay).
    p.mul_(1 - lr * weight_decay) → grad = grad + weight_decay * p
        the decay is added to the gradient, and so is divided by the root of v: that is Adam with
        weight decay; AdamW shrinks p itself.
    .div_(sqrt(1 - beta2**t)) →
    lr / (1 - beta1**t) → lr
        this is AdamW without bias correction.
    """,
    changes="p state",
    pairs=True,
)
