"""Answers to exercises of lessons 00 to 02 as people write them: right ones in several forms, wrong
ones with what helps them.

``WRONG[id][name]`` is the answer and a pattern: what a message about it must say.
"""

import itertools
import math
from functools import reduce

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

RIGHT, WRONG = {}, {}

RIGHT["0.1"] = {
    "reduce": lambda shape, size: reduce(lambda a, b: a * b, shape, size),
    "numpy": lambda shape, size: np.prod(shape, dtype=np.int64) * size,
    "a meta tensor": lambda shape, size: (
        torch.empty(shape, dtype=torch.int8, device="meta").numel() * size
    ),
}
WRONG["0.1"] = {
    "8 bytes": (lambda shape, size: math.prod(shape) * 8, r"`bytes_per_element` has no effect"),
    "first side": (lambda shape, size: shape[0] * size, "any number of sides"),
    "last side": (lambda shape, size: (shape[-1] if shape else 1) * size, "only the last side"),
    "all but the first": (
        lambda shape, size: math.prod(shape[1:]) * size,
        "first side is left out",
    ),
    "max": (lambda shape, size: max(shape) * size, r"shape|sides"),
    "square": (
        lambda shape, size: math.prod(shape) * size**2,
        r"twice the `bytes_per_element`|too large",
    ),
    "kilobytes": (
        lambda shape, size: math.prod(shape) * size / 1024,
        r"1024 times too small|fraction",
    ),
    "a tuple": (lambda shape, size: (math.prod(shape), size), "return one number"),
    "bits": (lambda shape, size: math.prod(shape) * size * 8, "bits"),
}


def _bytes(p):
    return p.numel() * p.element_size()


def _resident(model, *, parameters=_bytes, trained=lambda p: p.requires_grad, moments=2, step=4):
    held = [p for p in model.parameters() if trained(p)]
    gradients = sum(map(_bytes, held))
    return {
        "parameters": sum(map(parameters, model.parameters())),
        "gradients": gradients,
        "optimizer": moments * gradients + step * len(held),
    }


def _measured(model):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    found = {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer": sum(v.nbytes for state in optimizer.state.values() for v in state.values()),
    }
    model.zero_grad()
    return found


RIGHT["1.1"] = {
    "measured": _measured,
    "named": lambda model: _resident(model, parameters=lambda p: p.nbytes),
    "floats": lambda model: {k: float(v) for k, v in _resident(model).items()},
}
WRONG["1.1"] = {
    "no counters": (lambda model: _resident(model, step=0), "step counter"),
    "eight": (lambda model: _resident(model, step=8), "step counters have 8 bytes"),
    "one moment": (lambda model: _resident(model, moments=1), "one moment"),
    "frozen": (lambda model: _resident(model, trained=lambda p: True), "frozen"),
    "4 bytes": (
        lambda model: _resident(model, parameters=lambda p: 4 * p.numel()),
        "bf16 MLP, entry 'parameters'",
    ),
    "frozen moments": (
        lambda model: (
            _resident(model) | {"optimizer": _resident(model, trained=lambda p: True)["optimizer"]}
        ),
        "neither gradient",
    ),
    "trained alone": (
        lambda model: _resident(model) | {"parameters": _resident(model)["gradients"]},
        "take memory too",
    ),
    "tuple": (lambda model: tuple(_resident(model).values()), "a dict"),
    "buffers": (lambda model: _resident(model) | {"buffers": 0}, "this name was not asked for"),
}


def _saved(
    model,
    x,
    size=lambda t: t.untyped_storage().nbytes(),
    key=lambda t: t.untyped_storage().data_ptr(),
    own=None,
):
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} if own is None else own
    return sum(
        {key(t): size(t) for t in kept if t.untyped_storage().data_ptr() not in own}.values()
    )


RIGHT["1.2"] = {
    "storages": _saved,
    "float": lambda model, x: float(_saved(model, x)),
    "tensor": lambda model, x: torch.tensor(_saved(model, x)),
}
WRONG["1.2"] = {
    "views": (
        lambda model, x: _saved(model, x, key=lambda t: t.data_ptr(), size=lambda t: t.nbytes),
        "view|slice",
    ),
    "parameters": (lambda model, x: _saved(model, x, own=()), "parameters"),
    "no input": (lambda model, x: _saved(model, x) - x.nbytes, "input is left out"),
    "output too": (lambda model, x: _saved(model, x) + model(x).nbytes, "output is counted too"),
    "kilobytes": (lambda model, x: _saved(model, x) / 1024, "1024 times too small|fraction"),
    "nothing": (lambda model, x: 0, "the answer is 0 for all"),
}

RIGHT["1.3"] = {
    "difference": lambda b, s, h: b * h * (s * s - s) * 4,
    "numpy": lambda b, s, h: np.int64(4) * b * h * s * (s - 1),
    "comb": lambda b, s, h: 8 * b * h * math.comb(s, 2),
}
WRONG["1.3"] = {
    "bf16": (lambda b, s, h: 2 * b * h * s * (s - 1), "2 bytes a number"),
    "per head dimension": (lambda b, s, h: 4 * b * s * (s - 1), "one head"),
    "three squares": (lambda b, s, h: 12 * b * h * s * s - 4 * b * h * s, "3 times the softmax"),
    "two log-sum-exps": (lambda b, s, h: 4 * b * h * s * (s - 2), "log-sum-exp has 8"),
    "cube": (lambda b, s, h: 4 * b * h * s**3, "twice the `seq_len`"),
    "no batch": (lambda b, s, h: 4 * h * s * s - 4 * h * s, "one sequence|`batch`"),
}

RIGHT["1.4"] = {
    "loop": lambda b, s, v: sum(4 * b * s * v for _ in "abc"),
    "mb": lambda b, s, v: 12.0 * b * s * v,
    "tensor": lambda b, s, v: 3 * torch.empty(b, s, v, device="meta").nbytes,
}
WRONG["1.4"] = {
    "two": (lambda b, s, v: 8 * b * s * v, "two tensors"),
    "four": (lambda b, s, v: 16 * b * s * v, "16 bytes a logit"),
    "no vocab": (lambda b, s, v: 12 * b * s, "`vocab` has no effect"),
    "shifted": (lambda b, s, v: 12 * b * (s - 1) * v, "last position"),
    "square": (lambda b, s, v: 12 * b * s * s * v, "twice the `seq_len`"),
    "pairs": (lambda b, s, v: [4 * b * s * v] * 3, "return one number"),
}

_PER = {"float32": 16, "bf16": 8, "autocast-bf16": 16, "float32-master": 16}
RIGHT["1.5"] = {
    "table": _PER.get,
    "if": lambda recipe: 8 if recipe == "bf16" else 16,
    "words": lambda recipe: 16 >> (recipe == "bf16"),
}
WRONG["1.5"] = {
    "bf16 master": (lambda recipe: _PER[recipe] - 4 * (recipe == "float32-master"), "master"),
    "weights": (lambda recipe: _PER[recipe] // 4, "gradient and its two moments|4 times too small"),
    "half moments": (
        lambda recipe: _PER[recipe] - 4 * (recipe == "autocast-bf16"),
        "autocast-bf16: 4 bytes too few",
    ),
    "double": (lambda recipe: 2 * _PER[recipe], "2 times too large"),
    "always": (lambda recipe: 16, "bf16"),
    "key": (lambda recipe: {"fp32": 16}[recipe], "KeyError"),
}


def _train(
    model, optimizer, batches, *, keep=lambda losses, out: losses.append(out.loss.item()), **options
):
    losses = []
    for ids in batches:
        if options.get("first", False):
            optimizer.zero_grad()
        out = model(input_ids=ids, labels=ids)
        loss = out.loss
        keep(losses, out)
        if not options.get("hold"):
            del out
        loss.backward()
        if options.get("step", True):
            optimizer.step()
        if options.get("zero", True) and not options.get("first", False):
            optimizer.zero_grad()
        del loss
    return losses


def _first_loss(model, optimizer, batches):
    return _train(model, optimizer, batches)[:1]


def _same_batch(model, optimizer, batches):
    return _train(model, optimizer, [batches[0]] * len(batches))


RIGHT["1.6"] = {
    "zero first": lambda m, o, b: _train(m, o, b, first=True),
    "detached losses": lambda m, o, b: _train(
        m, o, b, keep=lambda kept, out: kept.append(out.loss.detach())
    ),
    "array": lambda m, o, b: np.array(_train(m, o, b)),
}
WRONG["1.6"] = {
    "holds the output": (lambda m, o, b: _train(m, o, b, hold=True), "output is still alive"),
    "no zero": (lambda m, o, b: _train(m, o, b, zero=False), "zero_grad"),
    "no step": (lambda m, o, b: _train(m, o, b, step=False), "step"),
    "first loss": (_first_loss, "there must be 3 entries"),
    "same batch": (_same_batch, "item 1"),
    "graphs": (
        lambda m, o, b: _train(m, o, b, keep=lambda kept, out: kept.append(out.logits)),
        "got a tensor",
    ),
}


def _gpt2(b, s, hidden, heads, size=4, norm=2, **rows):
    t, x = b * s, b * s * hidden
    counts = {"ln_1": x + norm * t, "attn.c_attn": x, "attn": 4 * x + t * heads, "attn.c_proj": 0}
    counts |= {"attn.resid_dropout": x, "ln_2": x + norm * t, "mlp.c_fc": x}
    counts |= {"mlp.act": 4 * x, "mlp.c_proj": 4 * x, "mlp.dropout": x}
    counts |= {name.replace("__", "."): count(t, x) for name, count in rows.items()}
    return {name: size * count for name, count in counts.items()}


def _asked_of_torch(b, s, hidden, heads):
    norm = _saved(torch.nn.LayerNorm(hidden), torch.randn(b, s, hidden))
    inner = torch.empty(b, s, 4 * hidden, device="meta").nbytes
    found = {
        "attn": inner + torch.empty(b, heads, s).nbytes,
        "attn.c_proj": 0,
        "ln_1": norm,
        "ln_2": norm,
    }
    found |= dict.fromkeys(("mlp.act", "mlp.c_proj"), inner)
    return found | dict.fromkeys(
        ("attn.c_attn", "attn.resid_dropout", "mlp.c_fc", "mlp.dropout"), inner // 4
    )


RIGHT["1.7"] = {
    "formula": _gpt2,
    "asked of torch": _asked_of_torch,
    "numpy": lambda *sizes: {name: np.float64(n) for name, n in _gpt2(*sizes).items()},
    "backwards": lambda *sizes: dict(reversed(_gpt2(*sizes).items())),
}
WRONG["1.7"] = {
    "outputs": (
        lambda *a: _gpt2(*a, attn__c_attn=lambda t, x: 3 * x, mlp__c_fc=lambda t, x: 4 * x),
        r"attn\.c_attn.*3 \* hidden",
    ),
    "the result twice": (
        lambda *a: _gpt2(*a, attn__c_proj=lambda t, x: x),
        "counted already|twice",
    ),
    "a narrow GELU": (lambda *a: _gpt2(*a, mlp__act=lambda t, x: x), r"mlp\.act.*4 \* hidden"),
    "no dropout": (
        lambda *a: _gpt2(*a, attn__resid_dropout=lambda t, x: 0, mlp__dropout=lambda t, x: 0),
        "mask",
    ),
    "a bit of dropout": (
        lambda *a: _gpt2(
            *a, attn__resid_dropout=lambda t, x: x / 4, mlp__dropout=lambda t, x: x / 4
        ),
        "byte",
    ),
    "scores": (
        lambda b, s, h, n: _gpt2(b, s, h, n, attn=lambda t, x: 4 * x + n * t * s),
        r"scores|square",
    ),
    "no log-sum-exp": (lambda *a: _gpt2(*a, attn=lambda t, x: 4 * x), "log-sum-exp"),
    "one sum": (lambda *a: sum(_gpt2(*a).values()), "a dict"),
    "bf16": (lambda *a: _gpt2(*a, size=2), "2 times too small|half"),
    "no mean": (lambda *a: _gpt2(*a, norm=1), r"ln_1.*mean"),
    "one sequence": (lambda b, s, h, n: _gpt2(1, s, h, n), "batch"),
    "empty": (lambda *a: {}, "ln_1|missing|entries"),
}


def _momentum(p, grad, state, lr, beta, *, take=None, move=None, key="m"):
    m = state.get(key, torch.zeros_like(p))
    state[key] = m * beta + grad * (1 - beta if take is None else take)
    p -= lr * (state[key] if move is None else move(m, state[key], grad))


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


RIGHT["2.1"] = {
    "new tensors": _momentum,
    "lists": lambda p, g, s, lr, b: p.sub_(
        lr * s.setdefault("m", [torch.zeros_like(p)])[0].mul_(b).add_(g * (1 - b))
    ),
    "lerp": lambda p, g, s, lr, b: p.add_(
        s.setdefault(0, torch.zeros_like(p)).lerp_(g, 1 - b), alpha=-lr
    ),
}
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
}


def _v(p, grad, state, lr, beta, eps, divide=lambda v, eps, grad, t: v.sqrt() + eps, share=None):
    v, t = state.get("v", torch.zeros_like(p)), state.get("t", 0) + 1
    share = 1 - beta if share is None else share
    state.update(v=beta * v + share * grad**2, t=t)
    p.sub_(lr * grad / divide(state["v"], eps, grad, t))


RIGHT["2.2"] = {
    "new tensors": _v,
    "power": lambda *a: _v(*a, divide=lambda v, eps, g, t: v**0.5 + eps),
    "rsqrt": lambda *a: _v(*a, divide=lambda v, eps, g, t: 1 / v.rsqrt() + eps),
}
WRONG["2.2"] = {
    "no root": (lambda *a: _v(*a, divide=lambda v, eps, g, t: v + eps), "root is missing"),
    "inside": (lambda *a: _v(*a, divide=lambda v, eps, g, t: (v + eps).sqrt()), "inside the root"),
    "no eps": (lambda *a: _v(*a, divide=lambda v, eps, g, t: v.sqrt()), "eps"),
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
