"""Answers to the exercises of lesson 09 that nobody had in mind when its checks were written."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib.course import adam_update
from gradmem_lib.course.catalogue import get

RIGHT, WRONG = {}, {}


def summed_loss(rows, weight, labels, cap):
    logits = cap * torch.tanh(rows @ weight.T / cap)
    return F.cross_entropy(logits, labels, reduction="sum")


def _by_distance(x, code, block):
    """Each block by itself, and the nearest value by the smallest distance."""
    indices, scales, back = [], [], []
    for part in x.split(block):
        top = part.abs().max()
        scaled = part / top if top else torch.zeros_like(part)
        nearest = torch.cdist(scaled[:, None].double(), code[:, None].double()).argmin(1)
        indices.append(nearest.to(torch.uint8))
        scales.append(top)
        back.append(code[nearest] * top)
    return torch.cat(indices), torch.stack(scales), torch.cat(back)


def _quantized(
    scales=lambda rows: rows.abs().amax(1),
    scaled=lambda rows, absmax: rows / absmax.clamp(min=1e-30)[:, None],
    back=lambda values, absmax, rows: values * absmax[:, None],
):
    def quantize(x, code, block):
        rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
        absmax = scales(rows)
        indices = torch.bucketize(scaled(rows, absmax), (code[1:] + code[:-1]) / 2)
        read = back(code[indices], absmax, rows)
        return indices.flatten()[: len(x)].to(torch.uint8), absmax, read.flatten()[: len(x)]

    return quantize


RIGHT["9.1"] = {"by distance": _by_distance}
WRONG["9.1"] = {
    "one absmax for all": (
        _quantized(lambda rows: rows.abs().max().expand(len(rows)).clone()),
        "blocks' absmax",
    ),
    "max without abs": (_quantized(lambda rows: rows.amax(1).clamp(min=0)), "take abs"),
    "norm": (_quantized(lambda rows: rows.norm(dim=1)), "largest magnitude"),
    "no absmax": (_quantized(scaled=lambda rows, absmax: rows), "divide by the block"),
    "absmax in float16": (
        _quantized(lambda rows: rows.abs().amax(1).half().float()),
        "rounded to 16 bits",
    ),
    "back without absmax": (
        _quantized(back=lambda values, absmax, rows: values),
        "multiply the code",
    ),
    "back is x": (_quantized(back=lambda values, absmax, rows: rows), "back is not"),
}


def _by_einsum(grad, row, column, beta2, eps):
    squares = torch.einsum("ij,ij->ij", grad, grad).add(eps)
    row.mul_(beta2).add_(torch.einsum("ij->i", squares), alpha=1 - beta2)
    column.mul_(beta2).add_(torch.einsum("ij->j", squares), alpha=1 - beta2)
    return torch.einsum("i,j->ij", row / column.sum(), column)


def _factored(form):
    def adafactor_second_moment(grad, row, column, beta2, eps):
        squares = grad.square() + (0 if form == "eps last" else eps)
        axis = (0, 1) if form == "swapped axes" and grad.shape[0] == grad.shape[1] else (1, 0)
        sums = [squares.sum(a) for a in axis]
        if form == "means":
            sums = [squares.mean(a) for a in axis]
        if form == "absolute":
            sums = [(grad.abs() + eps).sum(a) for a in axis]
        row.lerp_(sums[0], 1 - beta2)
        column.lerp_(sums[1], 1 - beta2)
        v = torch.outer(row, column) / row.sum()
        if form == "eps last":
            v = v + eps
        if form == "rooted":
            v = v.sqrt()
        if form == "of this step":
            v = torch.outer(sums[0], sums[1]) / sums[0].sum()
        if form == "product of sums":
            v = torch.outer(row, column) / (row.sum() * column.sum())
        return v

    return adafactor_second_moment


RIGHT["9.2"] = {"einsum": _by_einsum}
WRONG["9.2"] = {
    "eps last": (_factored("eps last"), "added to v at the end"),
    "rooted": (_factored("rooted"), "the root of v"),
    "of this step": (_factored("of this step"), "this step's sums"),
    "both sums": (_factored("product of sums"), "everything twice"),
    "magnitudes": (_factored("absolute"), "not of its square"),
}


def _lion(step):
    """``step(p, m, g, group)`` moves p, and returns the new m. ``beta1`` and so on are in group."""

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        m = self.state[p].get("m", torch.zeros_like(p))
                        self.state[p]["m"] = step(p, m, p.grad, group)

    return Lion


def _blend(m, g, beta):
    return beta * m + (1 - beta) * g


def _shrink(p, group):
    p.mul_(1 - group["lr"] * group["weight_decay"])


def _copied(p, m, g, group):
    decay = 1 - group["lr"] * group["weight_decay"]
    p.copy_(decay * p - group["lr"] * torch.sign(_blend(m, g, group["betas"][0])))
    return _blend(m, g, group["betas"][1])


def _decays_after(p, m, g, group):
    p.sub_(group["lr"] * _blend(m, g, group["betas"][0]).sign())
    _shrink(p, group)
    return _blend(m, g, group["betas"][1])


def _decays_inside(p, m, g, group):
    direction = _blend(m, g, group["betas"][0]) + group["weight_decay"] * p
    p.sub_(group["lr"] * direction.sign())
    return _blend(m, g, group["betas"][1])


def _m_first(p, m, g, group):
    m = _blend(m, g, group["betas"][1])
    _shrink(p, group)
    p.sub_(group["lr"] * _blend(m, g, group["betas"][0]).sign())
    return m


def _m_of_the_blend(p, m, g, group):
    blend = _blend(m, g, group["betas"][0])
    _shrink(p, group)
    p.sub_(group["lr"] * blend.sign())
    return _blend(m, blend, group["betas"][1])


def _signs_averaged(p, m, g, group):
    _shrink(p, group)
    p.sub_(group["lr"] * _blend(m, g.sign(), group["betas"][0]).sign())
    return _blend(m, g, group["betas"][1])


class _TwoStates(_lion(_copied)):
    def step(self, closure=None):
        super().step()
        for p, state in self.state.items():
            state["v"] = torch.zeros_like(p)


RIGHT["9.3"] = {"copied": _lion(_copied)}
WRONG["9.3"] = {
    "decay after the step": (_lion(_decays_after), "shrink first"),
    "decay inside the sign": (_lion(_decays_inside), "inside the sign"),
    "m first": (_lion(_m_first), "another blend"),
    "m of the blend": (_lion(_m_of_the_blend), "goes into the momentum"),
    "signs averaged": (_lion(_signs_averaged), "another blend"),
    "a second state": (_TwoStates, "Lion needs one"),
}


def _clip(form):
    def clip_in_backward(model, loss_of, lr, max_norm):
        trained = [p for p in model.parameters() if p.requires_grad]
        found = []

        def both(hook):
            handles = [p.register_post_accumulate_grad_hook(hook) for p in trained]
            try:
                loss_of(model).backward()
            finally:
                for handle in handles if form != "hooks stay" else ():
                    handle.remove()

        def look(p):
            found.append(
                p.grad.norm().item() if form == "sum of norms" else p.grad.square().sum().item()
            )
            p.grad = None

        both(look)
        norm = sum(found) if form == "sum of norms" else math.sqrt(sum(found))
        factor = min(1.0, max_norm / norm)
        if form == "always":
            factor = max_norm / norm
        if form == "squared":
            factor = min(1.0, max_norm / norm**2)

        @torch.no_grad()
        def move(p):
            p.add_(p.grad, alpha=-lr * factor)
            p.grad = None if form != "zeroed" else torch.zeros_like(p)

        both(move)
        return norm * factor if form == "clipped norm" else torch.tensor(norm)

    return clip_in_backward


RIGHT["9.4"] = {"a tensor": _clip("plain")}
WRONG["9.4"] = {
    "hooks stay": (_clip("hooks stay"), "still there"),
    "sum of norms": (_clip("sum of norms"), "add up the squares"),
    "always scaled": (_clip("always"), "made larger"),
    "norm after clipping": (_clip("clipped norm"), "after clipping"),
    "zeros stay": (_clip("zeroed"), "gradient"),
}


def _random(*shape):
    return torch.randn(shape) / shape[-1] ** 0.5


def _lora(
    scale=lambda rank, alpha: alpha / rank,
    a=_random,
    b=torch.zeros,
    out=lambda self, x: self.base(x) + self.scale * (x @ self.A.T @ self.B.T),
    trains_base=False,
    parameter=nn.Parameter,
):
    class LoRA(nn.Module):
        def __init__(self, base, rank, alpha):
            super().__init__()
            self.base = base.requires_grad_(trains_base)
            self.scale = scale(rank, alpha)
            self.A = parameter(a(rank, base.in_features))
            self.B = nn.Parameter(b(base.out_features, rank))

        def forward(self, x):
            return out(self, x)

    return LoRA


class _TwoLayers(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


def _written_out(self, x):
    return F.linear(x, self.base.weight + self.scale * self.B @ self.A, self.base.bias)


def _base_detached(self, x):
    return self.base(x).detach() + self.scale * (x @ self.A.T @ self.B.T)


def _scale_on_all(self, x):
    return self.scale * (self.base(x) + x @ self.A.T @ self.B.T)


RIGHT["9.5"] = {"two linear layers": _TwoLayers}
WRONG["9.5"] = {
    "no scale": (_lora(lambda rank, alpha: 1.0), "alpha has no effect"),
    "alpha alone": (_lora(lambda rank, alpha: alpha), "multiplied by alpha"),
    "root of rank": (_lora(lambda rank, alpha: alpha / rank**0.5), "2 times"),
    "inverse": (_lora(lambda rank, alpha: rank / alpha), "0.25 times"),
    "both zero": (_lora(a=torch.zeros), "both zero"),
    "B random, A zero": (_lora(a=torch.zeros, b=_random), "A must be random"),
    "A is no parameter": (_lora(parameter=torch.Tensor.requires_grad_), "both A and B must"),
    "scaled base": (_lora(out=_scale_on_all), "not scaled"),
    "base detached": (_lora(out=_base_detached), "gets no gradient from the base"),
    "written out": (_lora(out=_written_out), "as large as the base"),
    "base trained": (_lora(trains_base=True), "trained as well"),
}
RIGHT["9.6"] = {
    "divmod": lambda n, b, g: (
        lambda blocks: sum(divmod(n, 2)) + blocks + 4 * (blocks // g + (blocks % g > 0)) + 4
    )(n // b + (n % b > 0)),
}
WRONG["9.6"] = {
    "single quantization": (lambda n, b, g: -(-n // 2) + 4 * -(-n // b), "4 bytes here"),
    "floor everywhere": (lambda n, b, g: n // 2 + n // b + 4 * (n // b // g) + 4, "round up"),
    "bits": (
        lambda n, b, g: 8 * (-(-n // 2) + -(-n // b) + 4 * math.ceil(math.ceil(n / b) / g) + 4),
        "look like bits",
    ),
    "groups of numbers": (
        lambda n, b, g: -(-n // 2) + -(-n // b) + 4 * -(-n // g) + 4,
        "not of weights",
    ),
    "8 bits a number": (
        lambda n, b, g: (lambda k: n + k + 4 * -(-k // g) + 4)(-(-n // b)),
        "one byte",
    ),
}


def _chunked(form):
    class ChunkedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, cap):
            count = (labels != -100).sum()
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            total = hidden.new_zeros(())
            size = 64
            pieces = range(0, len(labels), size)
            for i in pieces:
                with torch.enable_grad():
                    rows = h[i : i + size]
                    own = labels[i : i + size]
                    loss = summed_loss(rows, w, own, cap)
                    if form == "mean of means":
                        loss = loss / (own != -100).sum().clamp(min=1) / len(pieces)
                    elif form == "all rows":
                        loss = loss / len(labels)
                    else:
                        loss = loss / count
                loss.backward()
                total += loss.detach()
            ctx.save_for_backward(h.grad, w.grad)
            return total

        @staticmethod
        def backward(ctx, d_loss):
            d_hidden, d_weight = ctx.saved_tensors
            if form == "not multiplied":
                return d_hidden, d_weight, None, None
            if form == "hidden alone":
                return d_hidden * d_loss, d_weight, None, None
            if form == "turned round":
                return d_weight * d_loss, d_hidden * d_loss, None, None
            return d_hidden * d_loss, d_weight * d_loss, None, None

    return ChunkedLoss


RIGHT["9.7"] = {"slices": _chunked("plain")}
WRONG["9.7"] = {
    "mean of means": (_chunked("mean of means"), "mean of means"),
    "all rows": (_chunked("all rows"), "all rows"),
    "not multiplied": (_chunked("not multiplied"), "leaves out the gradient"),
    "the weight's alone not multiplied": (_chunked("hidden alone"), "entry 'weight.grad'"),
}


def _by_svd(g, rank):
    return torch.linalg.svd(g, full_matrices=False).U[:, :rank].clone()


def _by_gram(g, rank):
    return torch.linalg.eigh(g @ g.T).eigenvectors.flip(1)[:, :rank].clone()


def _by_qr(g, rank):
    return torch.linalg.qr(g).Q[:, :rank].clone()


def _at_random(g, rank):
    return torch.linalg.qr(torch.randn(len(g), rank, dtype=g.dtype)).Q


def _with_singular_values(g, rank):
    U, S, _ = torch.linalg.svd(g, full_matrices=False)
    return U[:, :rank] * S[:rank]


def _galore(
    directions=_by_svd,
    renewed=lambda state: None,
    change=lambda P, g, update, lr, scale: lr * scale * (P @ update),
):
    @torch.no_grad()
    def galore_step(p, state, rank, every, lr, scale):
        wide = p.shape[0] <= p.shape[1]
        g = p.grad if wide else p.grad.T
        call = state["n"] = state.get("n", -1) + 1
        if call % every == 0:
            state["P"] = directions(g, rank)
            renewed(state)
        P = state["P"]
        moved = change(P, g, adam_update(P.T @ g, state), lr, scale)
        p.sub_(moved if wide else moved.T)

    return galore_step


def _moments_anew(state):
    state.pop("adam_update", None)


def _residual_too(P, g, update, lr, scale):
    return lr * scale * (P @ update) + lr * (g - P @ (P.T @ g))


RIGHT["9.9"] = {"by the Gram matrix": _galore(_by_gram)}
WRONG["9.9"] = {
    "QR": (_galore(_by_qr), "QR keeps"),
    "random": (_galore(_at_random), "first step is wrong"),
    "with singular values": (_galore(_with_singular_values), "first step is wrong"),
    "moments anew": (_galore(renewed=_moments_anew), "begin again"),
    "residual too": (_galore(change=_residual_too), "first step is wrong"),
    "plus": (
        _galore(change=lambda P, g, update, lr, scale: -lr * scale * (P @ update)),
        "wrong sign",
    ),
}


def _one_absmax_a_number(x, code, block):
    indices, absmax, back = get("9.1").reference(x, code, block)
    return indices, absmax.repeat_interleave(block)[: len(x)], back


WRONG.setdefault("9.1", {})["one absmax a number"] = (
    _one_absmax_a_number,
    "one for each block",
)
WRONG["9.1"]["absmax in bf16"] = (
    _quantized(lambda rows: rows.abs().amax(1).bfloat16()),
    "rounded to 16 bits",
)


def _clip_by_passes(
    *, leave=False, factor=lambda norm, most: min(1.0, most / norm), of=lambda p: True, place=True
):
    def clip_in_backward(model, loss_of, lr, max_norm):
        trained = [p for p in model.parameters() if p.requires_grad]
        squares = []

        def measure(gradient):
            squares.append(gradient.square().sum().item())

        def free(p):
            p.grad = None

        def move(p):
            with torch.no_grad():
                if place:
                    p -= lr * factor(norm, max_norm) * p.grad
                else:
                    p = p - lr * factor(norm, max_norm) * p.grad
            if not leave:
                p.grad = None

        # A tensor's own hook gets the whole gradient of a shared weight, as it is accumulated.
        handles = [p.register_hook(measure) for p in trained]
        handles += [p.register_post_accumulate_grad_hook(free) for p in trained]
        loss_of(model).backward()
        for handle in handles:
            handle.remove()
        norm = math.sqrt(sum(squares))
        moved = filter(of, trained)
        handles = [p.register_post_accumulate_grad_hook(move) for p in moved]
        loss_of(model).backward()
        for handle in handles:
            handle.remove()
        if not place:
            model.zero_grad()
        return norm

    return clip_in_backward


def _clip_a_list(model, loss_of, lr, max_norm):
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss_of(model), trained)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    with torch.no_grad():
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g, alpha=lr * min(1.0, max_norm / norm))
    return norm


RIGHT["9.4"] |= {"measured by tensors' hooks": _clip_by_passes()}
WRONG["9.4"] |= {
    "a list of gradients": (_clip_a_list, "every gradient waits"),
    "left in the second pass": (_clip_by_passes(leave=True), "the second pass leaves"),
    "matrices alone": (_clip_by_passes(of=lambda p: p.ndim == 2), "some trained weights"),
    "a new p": (_clip_by_passes(place=False, leave=True), "names a new tensor"),
    "no step below": (
        _clip_by_passes(factor=lambda norm, most: most / norm if norm > most else 0.0),
        "below max_norm takes no step",
    ),
}


def _with_backward(back=lambda gradient, d: gradient * d, count=lambda y: (y != -100).sum()):
    class ChunkedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, cap):
            ctx.found, loss = _gradients(hidden, weight, labels, cap, count(labels))
            return loss

        @staticmethod
        def backward(ctx, d_loss):
            return *(back(gradient, d_loss) for gradient in ctx.found), None, None

    return ChunkedLoss


def _gradients(hidden, weight, labels, cap, count, ignored=-100):
    """By torch.func, 50 rows at a time."""

    def loss_of(rows, matrix, target):
        return summed_loss(rows, matrix, target, cap) / count

    d_hidden, d_weight, total = [], torch.zeros_like(weight), 0.0
    for rows, target in zip(hidden.split(50), labels.split(50), strict=True):
        both, loss = torch.func.grad_and_value(loss_of, (0, 1))(rows, weight, target)
        d_hidden.append(both[0])
        d_weight += both[1]
        total = total + loss
    return (torch.cat(d_hidden), d_weight), total


class _OneForAll(torch.autograd.Function):
    kept = ()

    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        count = (labels != -100).sum()
        _OneForAll.kept, loss = _gradients(hidden, weight, labels, cap, count)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        return *(gradient * d_loss for gradient in _OneForAll.kept), None, None


class _FillsLabels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        kept = labels.clone()
        labels[labels == -100] = 0
        count = (kept != -100).sum()
        ctx.found, loss = _gradients(hidden, weight, kept, cap, count)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        return *(gradient * d_loss for gradient in ctx.found), None, None


RIGHT["9.7"] |= {"torch.func": _with_backward()}
WRONG["9.7"] |= {
    "kept by the class": (_OneForAll, "those of the last forward"),
    "labels filled": (_FillsLabels, "do not change an argument"),
    "positive labels": (_with_backward(count=lambda y: (y > 0).sum()), "is divided by 110"),
    "one more": (_with_backward(count=lambda y: (y != -100).sum() + 1), "is divided by 117"),
    "minus": (_with_backward(lambda gradient, d: -gradient * d), "the wrong sign"),
    "twice": (_with_backward(lambda gradient, d: gradient * d * d), "given, once"),
    "plus": (_with_backward(lambda gradient, d: gradient + d), "given, once"),
}


def _under_300(whole=None, adapters=None, number=int):
    (layers, full), (deep, lora) = get("9.8").reference()
    return lambda: (
        (number(layers), replace(full, **whole or {})),
        (number(deep), replace(lora, **adapters or {})),
    )


_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RIGHT.setdefault("9.8", {}).update(
    {
        "all linear layers by name": _under_300(adapters={"lora_targets": _ALL}),
        "floats": _under_300(number=float),
    }
)
WRONG.setdefault("9.8", {}).update(
    {
        "all but one by name": (_under_300(adapters={"lora_targets": _ALL[1:]}), "only on some"),
        "float32 adapters": (_under_300(adapters={"precision": "float32"}), "but in float32"),
    }
)


def _galore_with(*, take=lambda rank: rank, moment=lambda g: g):
    @torch.no_grad()
    def galore_step(p, state, rank, every, lr, scale):
        wide = p.shape[0] <= p.shape[1]
        G = p.grad if wide else p.grad.T
        state["n"] = n = state.get("n", -1) + 1
        if n % every == 0:
            state["P"] = torch.linalg.svd(G)[0][:, : take(rank)].clone()
        update = adam_update(moment(state["P"].T @ G), state).to(G.dtype)
        change = lr * scale * (state["P"] @ update)
        p.copy_(p - (change if wide else change.T))

    return galore_step


RIGHT["9.9"] |= {"moments in float32": _galore_with(moment=torch.Tensor.float)}
WRONG["9.9"] |= {
    "a rank too many": (_galore_with(take=lambda rank: rank + 1), "P has rank 3 where `rank` is 2"),
    "always rank 2": (_galore_with(take=lambda rank: 2), "P has rank 2 where `rank` is 3"),
}
