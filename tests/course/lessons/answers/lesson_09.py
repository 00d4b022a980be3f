"""Answers to the exercises of lesson 09 as people write them; see lesson_00.py."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from gradmem_lib import LoRALinear, Recipe
from gradmem_lib.course.lessons.lesson_09 import (
    exercises_adapters,
    exercises_capstone,
    exercises_lion,
    exercises_loss,
)

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


RIGHT["9.1"] = {
    "loop": _quantize,
    "padded": _by_padding,
    "lists": lambda x, code, block: [*_quantize(x, code, block)],
    "numpy": _by_numpy,
}


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


def _blocks(
    *,
    least=1e-30,
    dtype=torch.uint8,
    cut=True,
    border=2.0,
    back=lambda code, i, absmax: code[i] * absmax,
):
    def quantize(x, code, block):
        rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
        absmax = rows.abs().amax(1, keepdim=True)
        indices = torch.bucketize(rows / absmax.clamp(min=least), (code[1:] + code[:-1]) / border)
        n = len(x) if cut else None
        return (
            indices.flatten()[:n].to(dtype),
            absmax[:, 0],
            back(code, indices, absmax).flatten()[:n],
        )

    return quantize


RIGHT["9.1"] |= {"a list of arrays": lambda *given: [part.numpy() for part in _blocks()(*given)]}


def _in_order(*order, given=lambda x, block: x):
    def quantize(x, code, block):
        parts = _blocks()(given(x, block), code, block)
        return tuple(parts[i] for i in order)

    return quantize


def _not_padded(x, code, block):
    rows = x.view(-1, block)
    absmax = rows.abs().amax(1).clamp(min=1e-30)
    indices = torch.bucketize(rows / absmax[:, None], (code[1:] + code[:-1]) / 2)
    return indices.to(torch.uint8).flatten(), absmax, (code[indices] * absmax[:, None]).flatten()


WRONG["9.1"] |= {
    "not padded": (_not_padded, "do not fill the last block"),
    "eps 1e-8": (_blocks(least=1e-8), "small numbers are lost"),
    "eps 1e-3": (_blocks(least=1e-3), "small numbers are lost"),
    "int8": (_blocks(dtype=torch.int8), "uint8 goes from 0 to 255"),
    "padded": (_blocks(cut=False), "the padding is still there"),
    "last block dropped": (
        _in_order(0, 1, 2, given=lambda x, block: x[: len(x) // block * block]),
        "the last block is missing",
    ),
    "another order": (_in_order(0, 2, 1), "in this order"),
    "index read back": (
        _blocks(back=lambda code, i, absmax: i * absmax),
        "the indices are right, but back is not",
    ),
    "border at the value": (_blocks(border=1.0), "not that of the nearest value"),
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


RIGHT["9.2"] = {"plain": _factored, "lerp": _factored_lerp, "einsum": _factored_einsum}


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


def _second_moment(
    *,
    share=lambda beta2: 1 - beta2,
    keeps=(True, True),
    v=lambda row, column, squares: torch.outer(row, column) / row.sum(),
):
    def moment(grad, row, column, beta2, eps):
        squares = grad.square() + eps
        new = row.lerp(squares.sum(1), share(beta2)), column.lerp(squares.sum(0), share(beta2))
        for vector, value, keep in zip((row, column), new, keeps, strict=True):
            vector.copy_(value if keep else vector)
        return v(*new, squares)

    return moment


RIGHT["9.2"] |= {"an array": lambda *given: _second_moment()(*given).numpy()}
WRONG["9.2"] |= {
    "weights swapped": (
        _second_moment(share=lambda beta2: beta2),
        "beta2 and 1 - beta2 are swapped",
    ),
    "row not kept": (_second_moment(keeps=(False, True)), "row has not changed"),
    "transposed": (
        _second_moment(v=lambda row, column, squares: torch.outer(column, row) / row.sum()),
        "along its rows",
    ),
    "this step's sum": (
        _second_moment(v=lambda row, column, squares: torch.outer(row, column) / squares.sum()),
        "this step's squares",
    ),
    "states returned": (
        _second_moment(v=lambda row, column, squares: (row, column)),
        "return only v",
    ),
    "without end": (lambda *given: range(10**12), "return only v, a tensor"),
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


RIGHT["9.3"] = {"lerp": _Lion, "counts its steps": _LionCounted, "out of place": _LionOutOfPlace}


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


class _Steps(exercises_lion.Lion):
    """Lion, one parameter at a time, in ``one``."""

    none = "skip"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None and self.none == "stop":
                    return
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    self.one(p, p.grad, m, group["lr"], *group["betas"], group["weight_decay"])

    def one(self, p, g, m, lr, beta1, beta2, decay):
        p.mul_(1 - lr * decay)
        p.sub_(lr * m.lerp(g, 1 - beta1).sign())
        m.lerp_(g, 1 - beta2)


def _lion_with_step(one):
    return type("Lion", (_Steps,), {"one": one})


def _updated_first(self, p, g, m, lr, beta1, beta2, decay):
    p.mul_(1 - lr * decay)
    m.lerp_(g, 1 - beta2)
    p.sub_(lr * m.lerp(g, 1 - beta1).sign())


def _decay(before=lambda lr, decay: 1 - lr * decay, after=lambda lr, decay: 1, blend=torch.lerp):
    def one(self, p, g, m, lr, beta1, beta2, decay):
        p.mul_(before(lr, decay))
        p.sub_(lr * blend(m, g, 1 - beta1).sign())
        p.mul_(after(lr, decay))
        m.lerp_(g, 1 - beta2)

    return _lion_with_step(one)


def _gradient_as_scratch(self, p, g, m, *settings):
    _Steps.one(self, p, g, m, *settings)
    g.mul_(0.5)


class _Zeroes(_Steps):
    def step(self, closure=None):
        super().step()
        self.zero_grad()


WRONG["9.3"] |= {
    "no decay": (_decay(lambda lr, decay: 1), "p does not shrink"),
    "decay without lr": (_decay(lambda lr, decay: 1 - decay), "p shrinks by the wrong factor"),
    "decay last": (
        _decay(lambda lr, decay: 1, lambda lr, decay: 1 - lr * decay),
        "p must shrink first",
    ),
    "m updated first": (_lion_with_step(_updated_first), "the sign of another blend"),
    "blend kept": (_decay(blend=torch.Tensor.lerp_), "blended twice"),
    "gradient as scratch": (_lion_with_step(_gradient_as_scratch), r"step\(\) changes gradients"),
    "zeroes": (_Zeroes, r"step\(\) changes gradients"),
    "stops at None": (
        type("Lion", (_Steps,), {"none": "stop"}),
        "a parameter without a gradient stops the loop",
    ),
    "a new p": (
        _lion_with_step(lambda self, p, g, m, lr, *rest: p - lr * m.lerp(g, 0.1).sign()),
        "no weight has moved",
    ),
}


def _lion_by_parts(
    momentum=lambda self, p: self.state[p].setdefault("exp_avg", torch.zeros_like(p)),
    *,
    decay=lambda p, lr, share: p.mul_(1 - lr * share),
    blend=lambda m, g, beta: m.lerp(g, 1 - beta),
    move=lambda p, blend, lr: p.sub_(lr * blend.sign()),
    keep=lambda m, g, beta: m.lerp_(g, 1 - beta),
    groups=lambda self: self.param_groups,
    betas=None,
):
    """A ``Lion``, by its parts."""

    def init(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super(made, self).__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in groups(self):
            for p in (p for p in group["params"] if p.grad is not None):
                m, (beta1, beta2) = momentum(self, p), betas or group["betas"]
                decay(p, group["lr"], group["weight_decay"])
                move(p, blend(m, p.grad, beta1), group["lr"])
                keep(m, p.grad, beta2)

    made = type("Lion", (torch.optim.Optimizer,), {"__init__": init, "step": step})
    return made


WRONG["9.3"] |= {
    "no momentum made": (
        _lion_by_parts(lambda self, p: self.state[p]["exp_avg"]),
        "empty at first",
    ),
    "one momentum for all": (
        _lion_by_parts(lambda self, p: self.state.setdefault("m", torch.zeros_like(p))),
        "its own momentum",
    ),
    "never updated": (_lion_by_parts(keep=lambda m, g, beta: m.lerp(g, 1 - beta)), "never updated"),
    "beta2 of the gradient": (
        _lion_by_parts(keep=lambda m, g, beta: m.lerp_(g, beta)),
        "takes beta2 of the gradient",
    ),
    "a sum": (_lion_by_parts(keep=lambda m, g, beta: m.mul_(beta).add_(g)), "the whole gradient"),
    "kept by beta1": (
        _lion_by_parts(blend=lambda m, g, beta: m.lerp_(g, 1 - beta), keep=lambda m, g, beta: m),
        "takes 1 - beta1",
    ),
    "default betas": (_lion_by_parts(betas=(0.9, 0.99)), r"group\["),
    "sign in the momentum": (
        _lion_by_parts(keep=lambda m, g, beta: m.lerp_(g.sign(), 1 - beta)),
        "takes the gradient's sign",
    ),
    "old momentum alone": (_lion_by_parts(blend=lambda m, g, beta: m), "first step"),
    "no lr": (
        _lion_by_parts(move=lambda p, blend, lr: p.sub_(blend.sign())),
        "moves by 1 where lr is 0.1",
    ),
    "less, whatever p is": (
        _lion_by_parts(decay=lambda p, lr, share: p.sub_(lr * share)),
        "itself is subtracted",
    ),
    "shrinks by lr": (_lion_by_parts(decay=lambda p, lr, share: p.mul_(1 - lr)), "without decay"),
    "first group": (
        _lion_by_parts(groups=lambda self: self.param_groups[:1]),
        "only one group moves",
    ),
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


RIGHT["9.4"] = {
    "two passes": _clip,
    "optimizers": _clip_sgd,
    "a backward for each norm": _clip_grad,
}


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


def _clip_frozen(model, loss_of, lr, max_norm):
    """Every parameter's gradient is asked for, and one is frozen."""
    gradients = torch.autograd.grad(loss_of(model), list(model.parameters()))
    return math.sqrt(sum(g.square().sum().item() for g in gradients))


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


def _clip_with_hooks(
    *,
    look=lambda g: g.square().sum().item(),
    whole=lambda found: math.sqrt(sum(found)),
    first=0.0,
    again=False,
    rate=True,
    given=lambda norm, most: norm,
):
    def clip(model, loss_of, lr, max_norm):
        found, factor, looks = [], first, True

        @torch.no_grad()
        def hook(p):
            if looks:
                found.append(look(p.grad))
            p.add_(p.grad, alpha=-(lr if rate else 1) * factor)
            p.grad = None

        handles = [
            p.register_post_accumulate_grad_hook(hook)
            for p in model.parameters()
            if p.requires_grad
        ]
        loss_of(model).backward()
        norm = whole(found)
        factor, looks = min(1.0, max_norm / norm), again
        loss_of(model).backward()
        for handle in handles:
            handle.remove()
        return given(whole(found), max_norm)

    return clip


WRONG["9.4"] |= {
    "sum of norms": (
        _clip_with_hooks(look=lambda g: g.norm().item(), whole=sum),
        "all gradients as one vector",
    ),
    "mean squares": (
        _clip_with_hooks(look=lambda g: g.square().mean().item()),
        "all gradients as one vector",
    ),
    "squares of both passes": (_clip_with_hooks(again=True), "the squares of both passes"),
    "first pass moves": (_clip_with_hooks(first=1.0), "the first pass only measures"),
    "no lr": (_clip_with_hooks(rate=False), "lr has no effect"),
    "clipped norm": (_clip_with_hooks(given=min), "this is the norm after clipping"),
}


class _LoRA(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


class _LoRALayers(nn.Module):
    """With layers, as PEFT has them."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad = False
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.alpha, self.rank = alpha, rank

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * (self.alpha / self.rank)


class _LoRATransposed(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.A = nn.Parameter(self.A.detach().T.contiguous())
        self.B = nn.Parameter(self.B.detach().T.contiguous())

    def forward(self, x):
        return self.base(x) + (x @ self.A @ self.B).mul(self.scale)


RIGHT["9.5"] = {
    "matrices": _LoRA,
    "layers": _LoRALayers,
    "transposed": _LoRATransposed,
    "the course's": LoRALinear,
}


class _LoRABRandom(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        nn.init.normal_(self.B, std=0.02)


class _LoRAZeros(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        nn.init.zeros_(self.A)


class _LoRAAlpha(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.scale = alpha


class _LoRANoScale(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.scale = 1.0


class _LoRATrainsAll(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        base.requires_grad_(True)


class _LoRAWritten(_LoRA):
    def forward(self, x):
        return F.linear(x, self.base.weight + self.scale * (self.B @ self.A), self.base.bias)


class _LoRATensors(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        a, b = self.A.detach(), self.B.detach()
        del self.A, self.B
        self.A, self.B = a, b


class _LoRAAlone(_LoRA):
    def forward(self, x):
        return self.scale * (x @ self.A.T @ self.B.T)


class _LoRAFrozenA(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.A.requires_grad_(False)


class _LoRACopied(_LoRA):
    def __init__(self, base, rank, alpha):
        fresh = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
        super().__init__(fresh, rank, alpha)


WRONG["9.5"] = {
    "B random": (_LoRABRandom, "B.*zero|before its first"),
    "both zero": (_LoRAZeros, "both|A"),
    "alpha": (_LoRAAlpha, "rank"),
    "no scale": (_LoRANoScale, "alpha"),
    "all trained": (_LoRATrainsAll, "base"),
    "written out": (_LoRAWritten, "matrix|bytes"),
    "tensors": (_LoRATensors, "nn.Parameter"),
    "alone": (_LoRAAlone, "base"),
    "A frozen": (_LoRAFrozenA, "A|numbers"),
    "another base": (_LoRACopied, "base"),
}


def _adapter(
    begin=lambda layer: None,
    forward=exercises_adapters.LoRA.forward,
    scale=lambda rank, alpha: alpha / rank,
):
    def init(self, base, rank, alpha):
        exercises_adapters.LoRA.__init__(self, base, rank, alpha)
        self.scale = scale(rank, alpha)
        begin(self)

    return type("LoRA", (exercises_adapters.LoRA,), {"__init__": init, "forward": forward})


def _other_way_round(layer):
    nn.init.zeros_(layer.A)
    nn.init.normal_(layer.B)


def _one_column(self, x):
    return self.base(x) + self.scale * (self.B @ (self.A @ x))


def _no_grad_base(self, x):
    with torch.no_grad():
        y = self.base(x)
    return y + self.scale * (x @ self.A.T) @ self.B.T


WRONG["9.5"] |= {
    "A zero": (_adapter(_other_way_round), "at the start A is zero and B is random"),
    "A ones": (
        _adapter(lambda layer: nn.init.ones_(layer.A)),
        "at the start A is all the same and B is zero",
    ),
    "x as one column": (_adapter(forward=_one_column), "the last dimension of x"),
    "base under no_grad": (_adapter(forward=_no_grad_base), "x gets no gradient from the base"),
    "rank / alpha": (_adapter(scale=lambda rank, alpha: rank / alpha), "times what it should be"),
    "whole number": (_adapter(scale=lambda rank, alpha: alpha // rank), "times what it should be"),
    "bias lost": (
        _adapter(
            forward=lambda self, x: x @ self.base.weight.T + self.scale * (x @ self.A.T) @ self.B.T
        ),
        "with its bias",
    ),
}


def _nf4(n, block, group):
    blocks = math.ceil(n / block)
    return math.ceil(n / 2) + blocks + 4 * math.ceil(blocks / group) + 4


RIGHT["9.6"] = {
    "ceil": _nf4,
    "floor of the negative": lambda n, b, g: -(-n // 2) + -(-n // b) + 4 * (1 - (-n // b) // g),
    "tensors": lambda n, b, g: torch.tensor(_nf4(n, b, g)),
    "loop": lambda n, b, g: (
        len(range(0, n, 2)) + len(range(0, n, b)) + 4 * len(range(0, len(range(0, n, b)), g)) + 4
    ),
}
WRONG["9.6"] = {
    "once": (lambda n, b, g: -(-n // 2) + 4 * -(-n // b), "float32|double|byte"),
    "no offset": (lambda n, b, g: _nf4(n, b, g) - 4, "mean|offset|4 bytes"),
    "rounded down": (lambda n, b, g: n // 2 + n // b + 4 * (n // b // g) + 4, "up|last"),
    "a byte each": (lambda n, b, g: _nf4(n, b, g) - -(-n // 2) + n, "half|4 bits|two"),
    "groups of weights": (lambda n, b, g: -(-n // 2) + -(-n // b) + 4 * -(-n // g) + 4, "group"),
    "half": (
        lambda n, b, g: _nf4(n, b, g) - 2 * math.ceil(math.ceil(n / b) / g),
        "float32|4 bytes|2 bytes",
    ),
    "a mean": (lambda n, b, g: n * (0.5 + 1 / b + 4 / (b * g)), "whole|fraction"),
    "bits": (lambda n, b, g: 8 * _nf4(n, b, g), "8 times"),
}


def _up(n, by):
    return -(-n // by)


def _nf4_by_parts(*, half=lambda n: _up(n, 2), absmax=1, scale=4, mean=4, blocks=_up, groups=_up):
    return lambda n, block, group: (
        half(n) + absmax * blocks(n, block) + scale * groups(blocks(n, block), group) + mean
    )


WRONG["9.6"] |= {
    "halves cut": (_nf4_by_parts(half=lambda n: n // 2), "bytes are lost in rounding"),
    "blocks cut": (_nf4_by_parts(blocks=int.__floordiv__), "bytes are lost in rounding"),
    "groups cut": (_nf4_by_parts(groups=int.__floordiv__), "bytes are lost in rounding"),
    "mean in a byte": (_nf4_by_parts(mean=1), "absmax values has 1 byte here: it is a float32"),
    "scale in a byte": (_nf4_by_parts(scale=1), "each group's scale has 1 byte here: it is"),
    "absmax of 4 bytes": (_nf4_by_parts(absmax=4), "each block's absmax has 4 bytes"),
    "no absmax": (_nf4_by_parts(absmax=0), "each block's absmax is missing"),
}


class _Chunked(torch.autograd.Function):
    """Gradients on the way forward, by autograd itself, a chunk at a time."""

    size, mean, capped, upstream = 100, True, True, True

    @staticmethod
    def logits(rows, weight, cap):
        return cap * torch.tanh(rows @ weight.T / cap)

    @classmethod
    def made(cls, ctx, hidden, weight, labels, cap):
        count = (labels != -100).sum()
        total, d_hidden, d_weight = 0.0, torch.zeros_like(hidden), torch.zeros_like(weight)
        for i in range(0, len(hidden), cls.size):
            with torch.enable_grad():
                rows = hidden[i : i + cls.size].detach().requires_grad_()
                matrix = weight.detach().requires_grad_()
                logits = cls.logits(rows, matrix, cap)
                loss = F.cross_entropy(logits, labels[i : i + cls.size], reduction="sum") / count
                a, b = torch.autograd.grad(loss, (rows, matrix))
            d_hidden[i : i + cls.size] = a
            d_weight += b
            total += loss.detach()
            del logits, loss, a, b
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        return _Chunked.made(ctx, hidden, weight, labels, cap)

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss, d_weight * d_loss, None, None


def _by_hand(
    *,
    cap_in_gradient=True,
    count=lambda labels: (labels != -100).sum(),
    capped=True,
    size=64,
    masked=True,
    chunk_mean=False,
    keeps_on=None,
):
    def forward(ctx, hidden, weight, labels, cap):
        n = count(labels)
        total, d_hidden, d_weight = (
            hidden.new_zeros(()),
            torch.empty_like(hidden),
            torch.zeros_like(weight),
        )
        chunks = math.ceil(len(hidden) / size)
        for i in range(0, len(hidden), size):
            rows, target = hidden[i : i + size], labels[i : i + size]
            t = torch.tanh(rows @ weight.T / cap) if capped else None
            log_p = (cap * t if capped else rows @ weight.T).log_softmax(1)
            good = (
                (target != -100)[:, None]
                if masked
                else torch.ones_like(target, dtype=bool)[:, None]
            )
            share = 1 / (good.sum() * chunks) if chunk_mean else 1 / n
            index = target.clamp(min=0)[:, None]
            total -= (log_p.gather(1, index) * good).sum() * share
            d = log_p.exp_()
            d.scatter_add_(1, index, -torch.ones_like(index, dtype=d.dtype))
            d *= good * share
            if capped and cap_in_gradient:
                d *= 1 - t * t
            d_hidden[i : i + size] = d @ weight
            d_weight.addmm_(d.T, rows)
            del t, log_p, d
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    return forward


def _function(forward, backward=_Chunked.backward):
    return type(torch.autograd.Function)(
        "ChunkedLoss",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


def _backward_in_place(ctx, d_loss):
    return *(saved.mul_(d_loss) for saved in ctx.saved_tensors), None, None


RIGHT["9.7"] = {
    "autograd a chunk": _Chunked,
    "by hand": _function(_by_hand()),
    "in place": _function(_by_hand(size=50), _backward_in_place),
}


def _whole(ctx, hidden, weight, labels, cap):
    with torch.enable_grad():
        rows, matrix = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = F.cross_entropy(_Chunked.logits(rows, matrix, cap), labels)
        ctx.save_for_backward(*torch.autograd.grad(loss, (rows, matrix)))
    return loss.detach()


WRONG["9.7"] = {
    "whole": (_function(_whole), "bytes"),
    "chunk too large": (_function(_by_hand(size=600)), "bytes"),
    "cap not derived": (_function(_by_hand(cap_in_gradient=False)), "tanh"),
    "no cap": (_function(_by_hand(capped=False)), "cap"),
    "upstream": (
        _function(_by_hand(), lambda ctx, d: (*ctx.saved_tensors, None, None)),
        "backward",
    ),
    "all rows": (_function(_by_hand(count=len)), "-100|ignored"),
    "unmasked": (_function(_by_hand(masked=False)), "-100|ignored"),
    "means": (_function(_by_hand(chunk_mean=True)), "mean"),
    "sum": (_function(_by_hand(count=lambda labels: 1)), "sum|divide|tokens|times"),
    "hidden alone": (
        _function(_by_hand(), lambda ctx, d: (ctx.saved_tensors[0] * d, None, None, None)),
        "weight",
    ),
}


def _chunks(*, bend=lambda z, cap: cap * torch.tanh(z / cap), whole=False, last=False, detach=True):
    class ChunkedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, cap):
            total, count, gradients = 0.0, (labels != -100).sum(), torch.zeros_like(weight)
            own = hidden.detach().requires_grad_()
            for start in range(0, len(hidden) // 64 * 64 if whole else len(hidden), 64):
                of_chunk = weight.detach().requires_grad_()
                with torch.enable_grad():
                    z = (own if detach else hidden)[start : start + 64] @ of_chunk.T
                    loss = (
                        F.cross_entropy(bend(z, cap), labels[start : start + 64], reduction="sum")
                        / count
                    )
                    loss.backward()
                gradients = of_chunk.grad if last else gradients.add_(of_chunk.grad)
                total += loss.detach()
                del z, loss, of_chunk
            ctx.save_for_backward(own.grad if detach else hidden.grad, gradients)
            return total

        @staticmethod
        def backward(ctx, d_loss):
            return *(gradient * d_loss for gradient in ctx.saved_tensors), None, None

    return ChunkedLoss


RIGHT["9.7"] |= {"autograd": _chunks()}


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        ctx.save_for_backward(hidden, weight, labels)
        ctx.cap, inner = cap, SimpleNamespace(save_for_backward=lambda *tensors: None)
        return exercises_loss.ChunkedLoss.forward(inner, hidden, weight, labels, cap)

    @staticmethod
    def backward(ctx, d_loss):
        found = []
        inner = SimpleNamespace(save_for_backward=lambda *tensors: found.extend(tensors))
        exercises_loss.ChunkedLoss.forward(inner, *ctx.saved_tensors, ctx.cap)
        return *(gradient * d_loss for gradient in found), None, None


WRONG["9.7"] |= {
    "computed in backward": (_InBackward, "backward computes again"),
    "clamped": (_chunks(bend=lambda z, cap: z.clamp(-cap, cap)), "the logits are wrong"),
    "cap of 30": (_chunks(bend=lambda z, cap: 30 * torch.tanh(z / 30)), "the logits are wrong"),
    "last rows": (_chunks(whole=True), "the last rows are left out"),
    "last weight": (_chunks(last=True), "weight.grad is not the sum over all chunks"),
    "not detached": (_chunks(detach=False), "the gradients are added twice"),
}


_FULL = dict(
    precision="bf16",
    optimizer="adafactor-torch",
    in_backward=True,
    checkpointing="per-layer",
    chunked_loss=True,
)


_LORA = dict(
    precision="bf16",
    optimizer="adamw",
    lora_rank=16,
    quantized_base=True,
    checkpointing="per-layer",
    chunked_loss=True,
)


def _under(full=None, lora=None, layers=12, deep=40):
    pair = (layers, Recipe(**_FULL | (full or {}))), (deep, Recipe(**_LORA | (lora or {})))
    return lambda: pair


RIGHT["9.8"] = {
    "the usual": _under(),
    "SGD, and AdamW in 8 bits": _under({"optimizer": "sgd"}, {"optimizer": "adamw-8bit"}),
    "lists, in pieces": lambda: [list(pair) for pair in _under(None, {"accumulation": 4})()],
}
WRONG["9.8"] = {
    "AdamW": (_under({"optimizer": "adamw"}), "states"),
    "float32": (_under({"precision": "float32"}), "float32|weights"),
    "accumulated": (_under({"in_backward": False, "accumulation": 8}), "gradients"),
    "logits": (_under({"chunked_loss": False}), "logits|loss"),
    "few layers": (_under(layers=8), "12"),
    "16 bits": (_under(None, {"quantized_base": False}), "4 bits|quantized"),
    "not adapters": (lambda: (_under()()[0], _under()()[0]), "lora_rank|adapters"),
    "adapters twice": (lambda: (_under()()[1], _under()()[1]), "every weight"),
    "not checkpointed": (_under(None, {"checkpointing": None}), "checkpoint"),
    "another rank": (_under(None, {"lora_rank": 4}), "16"),
    "attention alone": (
        _under(None, {"lora_targets": ("q_proj", "v_proj")}),
        "all linear|every linear",
    ),
    "one": (lambda: Recipe(**_FULL), "two"),
}


def _any_number(number):
    return lambda: tuple(
        (number(layers), recipe) for layers, recipe in exercises_capstone.under_300()
    )


RIGHT["9.8"] |= {"tensors": _any_number(torch.tensor), "numpy": _any_number(np.int64)}


def _adam_update(g, state, beta1=0.9, beta2=0.999, eps=1e-8):
    """As the lesson's cell has it."""
    state["t"] = t = state.get("t", 0) + 1
    m = state.setdefault("m", torch.zeros_like(g)).lerp_(g, 1 - beta1)
    v = state.setdefault("v", torch.zeros_like(g)).lerp_(g * g, 1 - beta2)
    return m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)


@torch.no_grad()
def _galore(
    p,
    state,
    rank,
    every,
    lr,
    scale,
    *,
    cut=torch.clone,
    due=lambda n, every: n % every == 0,
    wide=lambda G: G.shape[0] <= G.shape[1],
    factor=lambda lr, scale: lr * scale,
    last=False,
    _adam_update=_adam_update,
):
    G, n = p.grad, state.get("n", 0)
    if due(n, every) or n == 0:
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        U, V = (U[:, -rank:], Vh[-rank:].T) if last else (U[:, :rank], Vh[:rank].T)
        state["P"] = cut(U if wide(G) else V)
    state["n"] = n + 1
    P = state["P"]
    if wide(G):
        p.add_(P @ _adam_update(P.T @ G, state), alpha=-factor(lr, scale))
    else:
        p.add_(_adam_update(G @ P, state) @ P.T, alpha=-factor(lr, scale))


@torch.no_grad()
def _by_eigh(p, state, rank, every, lr, scale):
    """The directions as eigenvectors of the smaller product, and moments in a dict of their own."""
    G = p.grad
    wide = G.size(0) <= G.size(1)
    state.setdefault("calls", 0)
    if state["calls"] % every == 0:
        square = G @ G.T if wide else G.T @ G
        state["directions"] = torch.linalg.eigh(square).eigenvectors[:, -rank:].clone()
    state["calls"] += 1
    P, moments = state["directions"], state.setdefault("adam", {})
    small = torch.einsum("ir,ij->rj", P, G) if wide else torch.einsum("ij,jr->ir", G, P)
    update = _adam_update(small, moments)
    p -= lr * scale * (P @ update if wide else update @ P.mT)


def _by_transposing(p, state, rank, every, lr, scale):
    with torch.no_grad():
        G = p.grad if p.shape[0] <= p.shape[1] else p.grad.T
        if state.get("t", 0) % every == 0:
            state["P"] = torch.linalg.svd(G)[0][:, :rank].contiguous()
        back = state["P"] @ _adam_update(state["P"].T @ G, state)
        p.data -= lr * scale * (back if p.shape[0] <= p.shape[1] else back.T)


@torch.no_grad()
def _own_moments(p, state, rank, every, lr, scale):
    """Without the given _adam_update, out of place, P kept as (rank, short side)."""
    G = p.grad
    if "t" not in state:
        state["t"], state["m"], state["v"] = 0, 0.0, 0.0
    if state["t"] % every == 0:
        U, _, V = torch.svd(G)
        state["Pt"] = (U if G.shape[0] <= G.shape[1] else V)[:, :rank].T.clone()
    state["t"] += 1
    Pt = state["Pt"]
    g = Pt @ G if G.shape[0] <= G.shape[1] else G @ Pt.T
    state["m"] = 0.9 * state["m"] + 0.1 * g
    state["v"] = 0.999 * state["v"] + 0.001 * g**2
    u = (state["m"] / (1 - 0.9 ** state["t"])) / (
        (state["v"] / (1 - 0.999 ** state["t"])) ** 0.5 + 1e-8
    )
    p.sub_(lr * scale * (Pt.T @ u if G.shape[0] <= G.shape[1] else u @ Pt))


RIGHT["9.9"] = {
    "plain": _galore,
    "eigenvectors": _by_eigh,
    "transposed, where it is tall": _by_transposing,
    "moments of its own": _own_moments,
}


@torch.no_grad()
def _not_back(p, state, rank, every, lr, scale):
    P = state.setdefault("P", torch.linalg.svd(p.grad)[0][:, :rank].clone())
    p.sub_(lr * scale * _adam_update(P.T @ p.grad, state))


@torch.no_grad()
def _full(p, state, rank, every, lr, scale, *, first=False):
    G, n = p.grad, state.get("n", 0)
    wide = G.shape[0] <= G.shape[1]
    if n % every == 0:
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        state["P"] = (U[:, :rank] if wide else Vh[:rank].T).clone()
    state["n"] = n + 1
    P = state["P"]

    def only(matrix):
        return P @ (P.T @ matrix) if wide else matrix @ P @ P.T

    p.sub_(lr * scale * (_adam_update(only(G), state) if first else only(_adam_update(G, state))))


def _vh_for_v(p, state, rank, every, lr, scale):
    with torch.no_grad():
        U, _, Vh = torch.linalg.svd(p.grad, full_matrices=False)
        wide = p.shape[0] <= p.shape[1]
        if state.setdefault("n", 0) % every == 0:
            state["P"] = (U if wide else Vh)[:, :rank].clone()
        state["n"] += 1
        P = state["P"]
        p.sub_(
            lr
            * scale
            * (
                P @ _adam_update(P.T @ p.grad, state)
                if wide
                else _adam_update(p.grad @ P, state) @ P.T
            )
        )


@torch.no_grad()
def _forgets(p, state, rank, every, lr, scale):
    if state.get("n", 0) % every == 0:
        for name in ("m", "v", "t"):
            state.pop(name, None)
    _galore(p, state, rank, every, lr, scale)


_ELSEWHERE: dict = {}


def _outside(p, state, rank, every, lr, scale):
    state["known"] = True
    _galore(p, _ELSEWHERE.setdefault(id(p), {}), rank, every, lr, scale)


@torch.no_grad()
def _keeps_the_gradient(p, state, *settings):
    _galore(p, state, *settings)
    state["small"] = state["P"].T @ p.grad if p.shape[0] <= p.shape[1] else p.grad @ state["P"]


@torch.no_grad()
def _scales_the_gradient(p, state, rank, every, lr, scale):
    """Adam's update does not depend on the gradient's size."""
    kept, p.grad = p.grad, scale * p.grad
    _galore(p, state, rank, every, lr, 1.0)
    p.grad = kept


def _new_tensor(p, state, *settings):
    q = torch.nn.Parameter(p.detach().clone())
    q.grad = p.grad
    _galore(q, state, *settings)
    p = q


@torch.no_grad()
def _without_adam(p, state, *settings):
    _galore(p, state, *settings, _adam_update=lambda g, state: g)


def _frees(p, state, *settings):
    _galore(p, state, *settings)
    p.grad = None


WRONG["9.9"] = {
    "the other side": (
        partial(_galore, wide=lambda G: G.shape[0] > G.shape[1]),
        "wrong side|shorter side",
    ),
    "always left": (partial(_galore, wide=lambda G: True), "tall"),
    "always right": (partial(_galore, wide=lambda G: False), "wide"),
    "not mapped back": (_not_back, "map(ped)? .*back"),
    "no scale": (partial(_galore, factor=lambda lr, scale: lr), "scale"),
    "scales the gradient": (_scales_the_gradient, "scale"),
    "divided by scale": (partial(_galore, factor=lambda lr, scale: lr / scale), "scale"),
    "no lr": (partial(_galore, factor=lambda lr, scale: scale), "lr has no effect"),
    "uphill": (partial(_galore, factor=lambda lr, scale: -lr * scale), "uphill|sign"),
    "a new P each step": (partial(_galore, due=lambda n, every: True), "each step"),
    "one P": (partial(_galore, due=lambda n, every: False), "never renewed"),
    "a step too late": (
        partial(_galore, due=lambda n, every: n > 1 and n % every == 1),
        "too late",
    ),
    "full moments of the gradient": (_full, "as large as the whole matrix"),
    "full moments of what is kept": (partial(_full, first=True), "as large as the whole matrix"),
    "Vh for V": (_vh_for_v, "Vh"),
    "a view": (partial(_galore, cut=lambda view: view), "view"),
    "smallest": (partial(_galore, last=True), "smallest"),
    "moments begin again": (_forgets, "begin again"),
    "a dict of its own": (_outside, "state"),
    "keeps the small gradient": (_keeps_the_gradient, "more is kept"),
    "a new tensor": (_new_tensor, "in place"),
    "no adam": (_without_adam, "adam"),
    "frees the gradient": (_frees, "p.grad"),
}


def _norm_of(square, change=float):
    """Exercise 9.4's two passes, whose squares are ``square(gradient)``."""

    def clip_in_backward(model, loss_of, lr, max_norm):
        trained = [p for p in model.parameters() if p.requires_grad]
        squares = []

        def measure(p):
            squares.append(square(p.grad))
            p.grad = None

        def backward(hook):
            handles = [p.register_post_accumulate_grad_hook(hook) for p in trained]
            loss_of(model).backward()
            for handle in handles:
                handle.remove()

        backward(measure)
        norm = math.sqrt(change(sum(squares)))
        factor = min(1.0, max_norm / (norm + 1e-6))

        @torch.no_grad()
        def move(p):
            p.add_(p.grad, alpha=-lr * factor)
            p.grad = None

        backward(move)
        return norm

    return clip_in_backward


_TWO_DIGITS = "right to two digits only"
WRONG["9.4"] |= {
    "squares in bf16": (_norm_of(lambda g: g.bfloat16().square().sum().item()), _TWO_DIGITS),
    "a sum in bf16": (_norm_of(lambda g: g.square().sum().bfloat16()), _TWO_DIGITS),
    "norms in bf16": (_norm_of(lambda g: g.norm().bfloat16().item() ** 2), _TWO_DIGITS),
}
RIGHT["9.4"] |= {
    "norms": _norm_of(lambda g: g.norm().item() ** 2),
    "a product": _norm_of(lambda g: torch.dot(g.flatten(), g.flatten()).item()),
    "tensors": _norm_of(lambda g: g.square().sum()),
    "in float64": _norm_of(lambda g: g.norm(dtype=torch.float64) ** 2),
    "linalg": _norm_of(lambda g: torch.linalg.vector_norm(g) ** 2),
}


def _lion_with(momentum, keep):
    """Lion whose m is ``momentum(self, p)``; ``keep(self, p, m)`` is called with the new one."""

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
            self.held = {}

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    m = momentum(self, p)
                    g = p.grad.to(m.dtype)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    blend = beta1 * m + (1 - beta1) * g
                    p.sub_((group["lr"] * blend.sign()).to(p.dtype))
                    keep(self, p, beta2 * m + (1 - beta2) * g)

    return Lion


def _elsewhere(self, p):
    return self.held.get(p, torch.zeros_like(p, dtype=torch.float32))


def _kept_twice(self, p, m):
    self.held[p] = m
    self.state[p]["exp_avg"] = m.to(p.dtype)


def _in_state(self, p):
    return self.state[p].get("exp_avg", torch.zeros_like(p))


def _kept(self, p, m):
    self.state[p]["exp_avg"] = m


WRONG["9.3"] |= {
    "float32 elsewhere": (_lion_with(_elsewhere, _kept_twice), "not in self.state alone"),
    "float32": (
        _lion_with(
            lambda self, p: self.state[p].get("m", torch.zeros_like(p, dtype=torch.float32)),
            lambda self, p, m: self.state[p].update(m=m),
        ),
        "another dtype than the parameter",
    ),
}
RIGHT["9.3"] |= {
    "a new m each time": _lion_with(_in_state, _kept),
    "another name": _lion_with(
        lambda self, p: self.state[p].get("m", torch.zeros_like(p)),
        lambda self, p, m: self.state[p].update(m=m),
    ),
    "float32 in between": _lion_with(
        lambda self, p: self.state[p].get("m", torch.zeros_like(p)).float(),
        lambda self, p, m: self.state[p].update(m=m.to(p.dtype)),
    ),
}


def _backward_with(hook, trained, loss):
    """A backward in which ``hook`` gets each trained parameter; the handles of its hooks."""
    handles = [p.register_post_accumulate_grad_hook(hook) for p in trained]
    loss.backward()
    return handles


def _remove(handles):
    for handle in handles:
        handle.remove()


def _clips_with(*, most=1.0, unhook=True, frees=True, wide=False):
    """An answer to exercise 9.4 in two passes, with something wrong besides too many bytes.

    ``most``: of the factor. ``unhook``: the last hooks are removed. ``frees``: the first pass frees
    each gradient. ``wide``: its hook makes a tensor four times as large.
    """

    def clip(model, loss_of, lr, max_norm):
        squares = []
        trained = [p for p in model.parameters() if p.requires_grad]

        def look(p):
            squares.append(p.grad.square().sum().item())
            if wide:
                torch.stack([p.grad] * 4)
            if frees:
                p.grad = None

        _remove(_backward_with(look, trained, loss_of(model)))
        norm = math.sqrt(sum(squares))
        factor = min(most, max_norm / (norm + 1e-6))
        model.zero_grad()

        @torch.no_grad()
        def move(p):
            p.add_(p.grad, alpha=-lr * factor)
            p.grad = None

        handles = _backward_with(move, trained, loss_of(model))
        if unhook:
            _remove(handles)
        return norm

    return clip


_LARGER = "made larger: the factor is at most 1. Your code peaks"
_HOOKED = "a hook is still on a parameter.*Your code peaks"
WRONG["9.4"] |= {
    "too wide": (_clips_with(wide=True), "no gradient waits, and still too much"),
    "too wide, and made larger": (_clips_with(wide=True, most=math.inf), _LARGER),
    "too wide, and hooks stay": (_clips_with(wide=True, unhook=False), _HOOKED),
    "waits, and made larger": (_clips_with(frees=False, most=math.inf), _LARGER),
    "waits, and hooks stay": (_clips_with(frees=False, unhook=False), _HOOKED),
}
RIGHT["9.4"] |= {"two kinds of hooks": _clips_with()}


def _lion_with(momentum_of, after=None):
    """Lion, with the momentum that ``momentum_of`` finds; ``after`` is called after each update."""

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
            self.buffers = {}

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                (beta1, beta2), lr = group["betas"], group["lr"]
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    m = momentum_of(self, p)
                    p.mul_(1 - lr * group["weight_decay"])
                    p.sub_(lr * m.lerp(p.grad, 1 - beta1).sign())
                    m.lerp_(p.grad, 1 - beta2)
                    if after:
                        after(self, p, m)

    return Lion


def _of_state(optimizer, p):
    return optimizer.state[p].setdefault("exp_avg", torch.zeros_like(p))


def _of_the_first_look(optimizer, p):
    if p not in optimizer.buffers:
        optimizer.buffers[p] = _of_state(optimizer, p)
    return optimizer.buffers[p]


def _of_the_parameter(optimizer, p):
    if not hasattr(p, "momentum"):
        p.momentum = torch.zeros_like(p)
    optimizer.state[p]["exp_avg"] = p.momentum
    return p.momentum


ALL_MOMENTA = {}


def _of_the_module(optimizer, p):
    m = ALL_MOMENTA.setdefault(p, torch.zeros_like(p))
    optimizer.state[p]["exp_avg"] = m
    return m


def _keeps_another(optimizer, p, m):
    optimizer.buffers[p] = m.clone()


NOT_ALONE = "not in self.state alone"
RIGHT["9.3"] |= {"from the state": _lion_with(_of_state)}
WRONG["9.3"] |= {
    "a dict that looks once": (_lion_with(_of_the_first_look), NOT_ALONE),
    "the parameter's own": (_lion_with(_of_the_parameter), NOT_ALONE),
    "a dict of the module": (_lion_with(_of_the_module), NOT_ALONE),
    "another copy": (_lion_with(_of_state, _keeps_another), "stays alive after the step, outside"),
}


def _nf4_of(pairs=1, absmax=1, scale=4, mean=4, *, number=0, blocks=_up):
    """The bytes of each part of a matrix in NF4; ``number``: of each number beside its pair's."""

    def nf4_bytes(numbers, block, group):
        n = blocks(numbers, block)
        parts = pairs * _up(numbers, 2), absmax * n, scale * blocks(n, group), mean
        return sum(parts) + number * numbers

    return nf4_bytes


RIGHT["9.6"] |= {
    "a sum of parts": _nf4_of(),
    "divmod": _nf4_of(blocks=lambda a, b: divmod(a, b)[0] + bool(a % b)),
    "a tensor": lambda *given: torch.tensor(_nf4_of()(*given)),
}
WRONG["9.6"] |= {
    "no byte for a pair": (_nf4_of(0), "each pair of numbers is missing"),
    "four bytes for a number": (_nf4_of(0, number=4), "a number has 4 bytes here"),
    "a mean for each group": (_nf4_of(scale=8, mean=0), "each group's scale has 8 bytes"),
    "a scale of half a byte": (_nf4_of(absmax=0.5), "each block's absmax has 0.5 bytes"),
    "a mean of two": (_nf4_of(mean=2), "mean of all absmax values has 2 bytes"),
    "pairs alone": (_nf4_of(absmax=0, scale=0, mean=0), "each block's absmax is missing"),
    "always one more": (_nf4_of(blocks=lambda a, b: a // b + 1), "where the last one is full"),
    "blocks of bytes": (
        lambda n, block, group: _nf4_of()(_up(n, 2), block, group) + _up(n, 2) - _up(_up(n, 2), 2),
        "a block is made of bytes here",
    ),
}


def _skips_zeros(x, code, block):
    """A block of zeros keeps index 0, and back 0."""
    indices = torch.zeros(len(x), dtype=torch.uint8)
    back, absmax = torch.zeros_like(x), []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        largest = part.abs().max()
        absmax.append(largest)
        if largest == 0:
            continue
        i = (part[:, None] / largest - code).abs().argmin(1)
        indices[start : start + block] = i.to(torch.uint8)
        back[start : start + block] = code[i] * largest
    return indices, torch.stack(absmax), back


def _as_a_mask(x, code, block):
    rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
    absmax = rows.abs().amax(1).clamp(min=1e-30)
    borders = (code[1:] + code[:-1]) / 2
    indices = torch.bucketize(rows / absmax[:, None], borders).to(torch.uint8)
    return indices.flatten()[: len(x)], absmax, code[indices] * absmax[:, None]


WRONG["9.1"] |= {
    "a block of zeros is skipped": (_skips_zeros, "in a block of zeros, your index is not"),
    "uint8 as an index": (_as_a_mask, r"a uint8 tensor for a mask: read code\[indices.long"),
}


def _without_outer(grad, row, column, beta2, eps):
    squares = grad.square() + eps
    row.lerp_(squares.sum(1), 1 - beta2)
    column.lerp_(squares.sum(0), 1 - beta2)
    return row * column / row.sum()


def _sums_added(grad, row, column, beta2, eps):
    squares = grad.square() + eps
    row.add_(squares.sum(1))
    column.add_(squares.sum(0))
    return torch.outer(row, column) / row.sum()


def _eps_once(grad, row, column, beta2, eps):
    row.lerp_(grad.square().sum(1) + eps, 1 - beta2)
    column.lerp_(grad.square().sum(0) + eps, 1 - beta2)
    return torch.outer(row, column) / row.sum()


def _v_by_numel(grad, row, column, beta2, eps):
    squares = grad.square() + eps
    row.lerp_(squares.sum(1), 1 - beta2)
    column.lerp_(squares.sum(0), 1 - beta2)
    return torch.outer(row, column) / row.sum() / grad.numel()


def _by_both_totals(grad, row, column, beta2, eps):
    squares = grad.square() + eps
    row.lerp_(squares.sum(1), 1 - beta2)
    column.lerp_(squares.sum(0), 1 - beta2)
    return torch.outer(row, column) / (row.sum() + column.sum())


WRONG["9.2"] |= {
    "no outer product": (_without_outer, r"torch.outer\(row, column\) multiplies each"),
    "sums added up": (_sums_added, "beta2 has no effect"),
    "eps once": (_eps_once, "eps is added to each sum once"),
    "both totals": (_by_both_totals, "v is half as large as it should be"),
    "v by numel": (_v_by_numel, "v is divided by the number of elements"),
}


class _LionOf(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    def gradient(self, p):
        """A parameter's gradient, or None to leave it as it is."""
        return p.grad

    def momentum(self, p):
        return self.state[p].setdefault("m", torch.zeros_like(p))

    def sign(self, blend):
        return blend.sign()

    def shrink(self, p, group):
        p.mul_(1 - group["lr"] * group["weight_decay"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                g = self.gradient(p)
                if g is None:
                    continue
                m = self.momentum(p)
                self.shrink(p, group)
                p.sub_(group["lr"] * self.sign(m.lerp(g, 1 - first)))
                m.lerp_(g, 1 - second)


class _LionShrinksAll(_LionOf):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                _LionOf.shrink(self, p, group)
        super().step()

    def shrink(self, p, group):
        """Every parameter has shrunk before."""


class _LionZeros(_LionOf):
    def gradient(self, p):
        return torch.zeros_like(p) if p.grad is None else p.grad


class _LionGets(_LionOf):
    def momentum(self, p):
        return self.state[p].get("m")


class _LionByAbs(_LionOf):
    def sign(self, blend):
        return blend / blend.abs()


class _LionSkipsZeros(_LionOf):
    def gradient(self, p):
        return p.grad if p.grad is not None and p.grad.any() else None


class _LionStops(_LionOf):
    def gradient(self, p):
        if p.grad is None:
            raise StopIteration
        return p.grad

    def step(self, closure=None):
        try:
            super().step()
        except StopIteration:
            return


RIGHT["9.3"] |= {"by parts": _LionOf}
WRONG["9.3"] |= {
    "shrinks without a gradient": (_LionShrinksAll, "in a step in which its p.grad is None"),
    "zeros for no gradient": (_LionZeros, "in a step in which its p.grad is None"),
    "a momentum never made": (_LionGets, "has no momentum before the first step"),
    "divided by its magnitude": (_LionByAbs, r"becomes nan, as 0 / 0 is: take blend.sign\(\)"),
    "a whole gradient of 0": (_LionSkipsZeros, "its momentum still moves it"),
    "stops at None": (_LionStops, "stops the loop: skip only this parameter"),
}


def _second_pass_waits(model, loss_of, lr, max_norm):
    trained = [p for p in model.parameters() if p.requires_grad]
    squares = []

    def look(p):
        squares.append(p.grad.square().sum())
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(look) for p in trained]
    loss_of(model).backward()
    for handle in handles:
        handle.remove()
    norm = torch.stack(squares).sum().sqrt().item()
    factor = min(1.0, max_norm / (norm + 1e-6))
    loss_of(model).backward()
    with torch.no_grad():
        for p in trained:
            p.sub_(p.grad, alpha=lr * factor)
            p.grad = None
    return norm


def _second_pass_waits_in_numbers(model, loss_of, lr, max_norm):
    """As before, with the squares as Python's numbers."""
    trained = [p for p in model.parameters() if p.requires_grad]
    squares = []

    def look(p):
        squares.append(p.grad.square().sum().item())
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(look) for p in trained]
    loss_of(model).backward()
    for handle in handles:
        handle.remove()
    norm = math.sqrt(sum(squares))
    loss_of(model).backward()
    with torch.no_grad():
        for p in trained:
            p.sub_(p.grad, alpha=lr * min(1.0, max_norm / norm))
            p.grad = None
    return norm


WRONG["9.4"] |= {
    "the second pass waits": (_second_pass_waits, "in the second backward, gradients wait"),
    "it waits, with numbers": (
        _second_pass_waits_in_numbers,
        "in the second backward, gradients wait",
    ),
}


class _LoRAOf(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def added(self, x):
        return F.linear(F.linear(x, self.A), self.B)

    def forward(self, x):
        return self.base(x) + self.scale * self.added(x)


class _LoRADetached(_LoRAOf):
    def added(self, x):
        return super().added(x.detach())


class _LoRAOfCopies(_LoRAOf):
    """The base's weights lie in parameters of its own, which require no gradient."""

    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        del self.base
        weight = base.weight.detach().clone()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if base.bias is None else base.bias.detach().clone()

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.scale * self.added(x)


class _LoRAFrozen(_LoRAOf):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.requires_grad_(False)


class _LoRAOnceTooOften(_LoRAOf):
    def added(self, x):
        return F.linear(F.linear(x, self.A.T), self.B.T)


class _LoRAExchanged(_LoRAOf):
    def added(self, x):
        return x @ self.B @ self.A


RIGHT["9.5"] |= {"by parts": _LoRAOf, "a copy of the base": _LoRAOfCopies}
WRONG["9.5"] |= {
    "x detached": (_LoRADetached, "x gets no gradient through A and B"),
    "A and B frozen": (_LoRAFrozen, "A and B are parameters, but they require no gradient"),
    "transposed once too often": (_LoRAOnceTooOften, "F.linear transposes by itself"),
    "exchanged": (_LoRAExchanged, "F.linear transposes by itself"),
}


def _chunked_with(*, slope=lambda t, cap: 1 - t * t, chunks=lambda n: -(-n // 50), divide=True):
    """A loss in chunks of 50 rows, by hand."""

    def forward(ctx, hidden, weight, labels, cap):
        count = (labels != -100).sum()
        total = hidden.new_zeros(())
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for i in range(chunks(len(hidden))):
            part = slice(50 * i, 50 * (i + 1))
            t = torch.tanh(hidden[part] @ weight.T / cap)
            log_p = (cap * t).log_softmax(1)
            counted = (labels[part] != -100)[:, None]
            index = labels[part].clamp(min=0)[:, None]
            total -= (log_p.gather(1, index) * counted).sum()
            d = log_p.exp_()
            d.scatter_add_(1, index, -torch.ones_like(index, dtype=d.dtype))
            d *= counted
            d *= slope(t, cap)
            d_hidden[part] = d @ weight
            d_weight.addmm_(d.T, hidden[part])
            del t, log_p, d
        if divide:
            d_hidden /= count
            d_weight /= count
        ctx.save_for_backward(d_hidden, d_weight)
        return total / count

    return _function(forward)


RIGHT["9.7"] |= {"chunks of 50 by hand": _chunked_with()}
WRONG["9.7"] |= {
    "inner cap forgotten": (
        _chunked_with(slope=lambda t, cap: cap * (1 - t * t)),
        "both gradients are multiplied by cap",
    ),
    "divided by cap": (
        _chunked_with(slope=lambda t, cap: (1 - t * t) / cap),
        "both gradients are divided by cap",
    ),
    "whole chunks alone": (
        _chunked_with(chunks=lambda n: n // 50),
        "the last rows are left out",
    ),
    "gradients of the sum": (
        _chunked_with(divide=False),
        "both gradients are those of the sum over the tokens",
    ),
}


class _LionThatForgets(_Lion):
    """The momentum decays in a step without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None and "exp_avg" in self.state[p]:
                    self.state[p]["exp_avg"].mul_(group["betas"][1])
        super().step(closure)


WRONG["9.3"] |= {"a momentum that decays": (_LionThatForgets, "leave its momentum as it is")}


class _LionOfFloat32(_Lion):
    def one(self, p, g, state, group):
        state.setdefault("exp_avg", torch.zeros(p.shape))
        super().one(p, g, state, group)


WRONG["9.3"] |= {"a momentum in float32": (_LionOfFloat32, "its momentum has another dtype")}
