"""Answers to the exercises of lesson 09 about optimizers as people write them; see
answers_numbers.py.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

RIGHT, WRONG = {}, {}


def _quantize(
    x, code, block, *, size=lambda part: part.abs().max(), pick=None, dtype=torch.uint8, read=None
):
    indices, absmax, back = [], [], []
    for part in x.split(block):
        largest = size(part)
        scaled = part / (largest if largest > 0 else 1)
        i = (scaled[:, None] - code).abs().argmin(1) if pick is None else pick(scaled, code)
        indices.append(i.to(dtype))
        absmax.append(largest)
        back.append(code[i] * largest if read is None else read(code, i, largest))
    return torch.cat(indices), torch.stack(absmax), torch.cat(back)


def _by_padding(x, code, block):
    rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
    absmax = rows.abs().amax(1)
    scaled = rows / absmax.clamp(min=1e-30)[:, None]
    indices = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2)
    back = (code[indices] * absmax[:, None]).flatten()[: len(x)]
    return indices.flatten()[: len(x)].to(torch.uint8), absmax, back


def _by_numpy(x, code, block):
    indices, absmax, back = _quantize(x, code, block)
    return indices.numpy(), absmax.numpy(), back.numpy()


def _unguarded(x, code, block):
    rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
    absmax = rows.abs().amax(1, keepdim=True)
    indices = torch.bucketize(rows / absmax, (code[1:] + code[:-1]) / 2).to(torch.uint8)
    return (
        indices.flatten()[: len(x)],
        absmax.flatten(),
        (code[indices.long()] * absmax).flatten()[: len(x)],
    )


def _not_a_number(x, code, block):
    """argmin of what is not a number is the first position."""
    rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
    absmax = rows.abs().amax(1)
    indices = ((rows / absmax[:, None])[..., None] - code).abs().argmin(-1)
    back = (code[indices] * absmax[:, None]).flatten()[: len(x)]
    return indices.flatten()[: len(x)].to(torch.uint8), absmax, back


def _nothing_back(x, code, block):
    indices, absmax, back = _quantize(x, code, block)
    return (
        indices,
        absmax,
        torch.cat([b / a * a for a, b in zip(absmax, back.split(block), strict=True)]),
    )


RIGHT["9.1"] = {
    "loop": _quantize,
    "padded": _by_padding,
    "lists": lambda x, code, block: [*_quantize(x, code, block)],
    "numpy": _by_numpy,
}
WRONG["9.1"] = {
    "0 / 0": (_unguarded, "0 / 0"),
    "0 / 0, the first index": (_not_a_number, "0 / 0"),
    "nothing read back from zeros": (_nothing_back, "0 / 0"),
    "one for all": (
        lambda x, code, block: _by_padding(x, code, len(x)),
        "each block|every block|one number for",
    ),
    "no magnitude": (partial(_quantize, size=lambda part: part.max()), "abs|magnitude"),
    "next above": (
        partial(_quantize, pick=lambda s, c: torch.bucketize(s, c).clamp(max=len(c) - 1)),
        "nearest",
    ),
    "long": (partial(_quantize, dtype=torch.int64), "uint8|8 bytes"),
    "not scaled back": (partial(_quantize, read=lambda c, i, m: c[i]), "absmax|multiply"),
    "no code": (
        lambda x, code, block: _quantize(x, torch.linspace(-1, 1, len(code)), block),
        "code",
    ),
    "divided": (partial(_quantize, read=lambda c, i, m: c[i] / m.clamp(min=1e-9)), "back"),
    "given back": (lambda x, code, block: (*_quantize(x, code, block)[:2], x.clone()), "back"),
    "two things": (lambda x, code, block: _quantize(x, code, block)[:2], "three"),
}


def _factored(
    g,
    row,
    column,
    beta2,
    eps,
    *,
    square=True,
    total=torch.sum,
    average=True,
    keep=True,
    outside=0.0,
    reduce=torch.sum,
):
    g2 = (g * g if square else g.abs()) + eps
    share = 1 - beta2 if average else 1.0
    r = row * beta2 + share * reduce(g2, 1)
    c = column * beta2 + share * reduce(g2, 0)
    if keep:
        row.copy_(r)
        column.copy_(c)
    return torch.outer(r, c) / total(r) + outside


def _factored_lerp(g, row, column, beta2, eps):
    g2 = g.square().add_(eps)
    row.lerp_(g2.sum(dim=-1), 1 - beta2)
    column.lerp_(g2.sum(dim=-2), 1 - beta2)
    return row[:, None] * column[None, :] / column.sum()


def _factored_einsum(g, row, column, beta2, eps):
    g2 = g**2 + eps
    row.mul_(beta2).add_(torch.einsum("ij->i", g2), alpha=1 - beta2)
    column.mul_(beta2).add_(torch.einsum("ij->j", g2), alpha=1 - beta2)
    return (row / row.sum()).unsqueeze(1) @ column.unsqueeze(0)


def _swapped(g, row, column, beta2, eps):
    g2 = g * g + eps
    row.lerp_(g2.sum(0), 1 - beta2)
    column.lerp_(g2.sum(1), 1 - beta2)
    return torch.outer(row, column) / row.sum()


def _means(grad, row, column, beta2, eps):
    squares = grad.square() + eps
    row.lerp_(squares.mean(1), 1 - beta2)
    column.lerp_(squares.mean(0), 1 - beta2)
    return torch.outer(row, column) / row.mean()


RIGHT["9.2"] = {"plain": _factored, "lerp": _factored_lerp, "einsum": _factored_einsum}
WRONG["9.2"] = {
    "means over their mean": (_means, "row and column hold means"),
    "swapped": (_swapped, "row.*sum|last dimension|other way"),
    "no total": (partial(_factored, total=lambda r: 1.0), "divide|total"),
    "by the mean": (partial(_factored, total=torch.mean), "total|times"),
    "not squared": (partial(_factored, square=False), "square"),
    "not kept": (partial(_factored, keep=False), "in place"),
    "sums up": (partial(_factored, average=False), "average|1 - beta2"),
    "eps outside": (lambda g, r, c, beta2, eps: _factored(g, r, c, beta2, 0.0, outside=eps), "eps"),
    "no eps": (lambda g, r, c, beta2, eps: _factored(g, r, c, beta2, 0.0), "eps"),
    "means": (partial(_factored, reduce=torch.mean), "sums|mean"),
    "root": (lambda *given: _factored(*given).sqrt(), "root|got"),
}


class _Lion(torch.optim.Optimizer):
    first, last, sign, blend = 0, 1, staticmethod(torch.sign), True

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group)

    def one(self, p, g, state, group):
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        m = state["exp_avg"]
        beta = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        direction = m.lerp(g, 1 - beta[self.first]) if self.blend else g
        p.add_(self.sign(direction), alpha=-group["lr"])
        m.lerp_(g, 1 - beta[self.last])


class _LionCounted(_Lion):
    def one(self, p, g, state, group):
        state["step"] = state.get("step", 0) + 1
        super().one(p, g, state, group)


class _LionOutOfPlace(_Lion):
    def one(self, p, g, state, group):
        b1, b2 = group["betas"]
        m = state.get("m", torch.zeros_like(p))
        update = torch.sign(b1 * m + (1 - b1) * g) + group["weight_decay"] * p
        p -= group["lr"] * update
        state["m"] = b2 * m + (1 - b2) * g


class _LionOneBeta(_Lion):
    first, last = 1, 1


class _LionBetas(_Lion):
    first, last = 1, 0


class _LionNoSign(_Lion):
    sign = staticmethod(lambda direction: direction)


class _LionSignSGD(_Lion):
    blend = False


class _LionMomentumFirst(_Lion):
    def one(self, p, g, state, group):
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        m.lerp_(g, 1 - group["betas"][1])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(m.sign(), alpha=-group["lr"])


class _LionDecayInGradient(_Lion):
    def one(self, p, g, state, group):
        super().one(p, g + group["weight_decay"] * p, state, group | {"weight_decay": 0.0})


class _LionOneRate(_Lion):
    def one(self, p, g, state, group):
        super().one(p, g, state, group | {"lr": self.defaults["lr"]})


class _LionTwoStates(_Lion):
    def one(self, p, g, state, group):
        super().one(p, g, state, group)
        state["exp_avg_sq"] = torch.zeros_like(p)


class _LionHidden(_Lion):
    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self.held = {}

    def one(self, p, g, state, group):
        super().one(p, g, self.held.setdefault(p, {}), group)


class _LionFloat32(_Lion):
    def one(self, p, g, state, group):
        state.setdefault("exp_avg", torch.zeros(p.shape))
        b1, b2 = group["betas"]
        m, g = state["exp_avg"], g.float()
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
            group["lr"] * (b1 * m + (1 - b1) * g).sign()
        )
        m.mul_(b2).add_(g, alpha=1 - b2)


class _LionUphill(_Lion):
    sign = staticmethod(lambda direction: -direction.sign())


class _LionSoftSign(_Lion):
    sign = staticmethod(torch.tanh)


RIGHT["9.3"] = {"lerp": _Lion, "counts its steps": _LionCounted, "out of place": _LionOutOfPlace}
WRONG["9.3"] = {
    "one beta": (_LionOneBeta, "beta"),
    "swapped": (_LionBetas, "swapped|beta"),
    "no sign": (_LionNoSign, "sign"),
    "sign of the gradient": (_LionSignSGD, "momentum|gradient alone|no effect"),
    "momentum first": (_LionMomentumFirst, "before|beta"),
    "decay in the gradient": (_LionDecayInGradient, "decay"),
    "one rate": (_LionOneRate, "group"),
    "two states": (_LionTwoStates, "state"),
    "hidden": (_LionHidden, "self.state"),
    "float32 states": (_LionFloat32, "dtype|float32|bf16"),
    "uphill": (_LionUphill, "sign|uphill"),
    "no sign but a curve": (_LionSoftSign, "lr times a sign"),
}


def _clip(
    model,
    loss_of,
    lr,
    max_norm,
    *,
    coefficient=None,
    unhook=True,
    free=True,
    norm_of=math.sqrt,
    rate=1.0,
):
    trained = [p for p in model.parameters() if p.requires_grad]
    squares = []

    def look(p):
        squares.append(p.grad.square().sum().item())
        if free:
            p.grad = None

    handles = [p.register_post_accumulate_grad_hook(look) for p in trained]
    loss_of(model).backward()
    norm = norm_of(sum(squares))
    for handle in handles:
        handle.remove()
    factor = coefficient(norm, max_norm) if coefficient else min(1.0, max_norm / (norm + 1e-6))

    @torch.no_grad()
    def move(p):
        p.add_(p.grad, alpha=-lr * factor * rate)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(move) for p in trained]
    loss_of(model).backward()
    if unhook:
        for handle in handles:
            handle.remove()
    return norm


def _clip_sgd(model, loss_of, lr, max_norm):
    norm = torch.zeros(())
    trained = {p: torch.optim.SGD([p], lr=lr) for p in model.parameters() if p.requires_grad}
    stepping = False

    def hook(p):
        if stepping:
            p.grad.mul_((max_norm / (norm.sqrt() + 1e-6)).clamp(max=1.0))
            trained[p].step()
        else:
            norm.add_(p.grad.pow(2).sum())
        trained[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(hook) for p in trained]
    try:
        loss_of(model).backward()
        stepping = True
        loss_of(model).backward()
    finally:
        for handle in handles:
            handle.remove()
    return norm.sqrt()


def _clip_waiting(model, loss_of, lr, max_norm):
    loss_of(model).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = clip_grad_norm_(trained, max_norm)
    with torch.no_grad():
        for p in trained:
            p.sub_(lr * p.grad)
            p.grad = None
    return norm.item()


def _clip_each(model, loss_of, lr, max_norm, *, so_far=False):
    squares, handles = [], []

    @torch.no_grad()
    def hook(p):
        squares.append(p.grad.square().sum().item())
        norm = math.sqrt(sum(squares) if so_far else squares[-1])
        p.add_(p.grad, alpha=-lr * min(1.0, max_norm / (norm + 1e-6)))
        p.grad = None

    for p in model.parameters():
        if p.requires_grad:
            handles.append(p.register_post_accumulate_grad_hook(hook))
    loss_of(model).backward()
    for handle in handles:
        handle.remove()
    return math.sqrt(sum(squares))


def _clip_grad(model, loss_of, lr, max_norm):
    """Norm from autograd.grad, parameter by parameter: many backwards, nothing kept."""
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = loss_of(model)
    squares = [
        torch.autograd.grad(loss, p, retain_graph=True)[0].square().sum().item() for p in trained
    ]
    del loss
    norm = math.sqrt(sum(squares))
    factor = min(1.0, max_norm / (norm + 1e-6))

    def move(p):
        with torch.no_grad():
            p -= lr * factor * p.grad
            p.grad = None

    handles = [p.register_post_accumulate_grad_hook(move) for p in trained]
    loss_of(model).backward()
    [handle.remove() for handle in handles]
    return norm


def _clip_frozen(model, loss_of, lr, max_norm):
    """Every parameter's gradient is asked for, and one is frozen."""
    gradients = torch.autograd.grad(loss_of(model), list(model.parameters()))
    return math.sqrt(sum(g.square().sum().item() for g in gradients))


RIGHT["9.4"] = {
    "two passes": _clip,
    "optimizers": _clip_sgd,
    "a backward for each norm": _clip_grad,
}
WRONG["9.4"] = {
    "waits": (_clip_waiting, "bytes|wait"),
    "each its own": (_clip_each, "own norm|whole"),
    "so far": (partial(_clip_each, so_far=True), "so far|whole|first pass"),
    "hooks stay": (partial(_clip, unhook=False), "hook"),
    "not freed": (partial(_clip, free=False), "first pass|twice|freed|p.grad"),
    "always": (
        partial(_clip, coefficient=lambda norm, most: most / (norm + 1e-6)),
        "below|larger|small",
    ),
    "no root": (partial(_clip, norm_of=lambda total: total), "root"),
    "never": (partial(_clip, coefficient=lambda norm, most: 1.0), "max_norm|clip"),
    "uphill": (partial(_clip, rate=-1.0), "sign|uphill"),
    "no norm": (lambda *given: _clip(*given) and None, "norm|return"),
    "nan": (lambda *given: _clip(*given) * math.nan, "not yet: the result is not a number"),
    "frozen too": (_clip_frozen, "put on a frozen parameter"),
    "in eval mode": (
        lambda model, *given: [_clip(model, *given), model.eval()][0],
        "leaves `model` with eval mode on",
    ),
}
