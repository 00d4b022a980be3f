"""Answers to the exercises of lesson 01 that nobody had in mind when its checks were written."""

import itertools
import math
from functools import reduce
from operator import mul

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

RIGHT, WRONG = {}, {}


def _by_storage(model):
    """Bytes by the storages, as ``saved_bytes`` counts them; each has one parameter here."""
    storages = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    sizes = np.array([[p.nbytes, p.requires_grad] for p in storages.values()])
    whole, trained = sizes[:, 0], sizes[:, 1]
    gradients = whole @ trained
    return dict(
        zip(
            ("optimizer", "gradients", "parameters"),
            (2 * gradients + 4 * trained.sum(), gradients, whole.sum()),
            strict=True,
        )
    )


class _Bill:
    """A mapping that computes its entries."""

    def __init__(self, model):
        self.p = [p.nbytes for p in model.parameters()]
        self.g = [p.nbytes for p in model.parameters() if p.requires_grad]

    def as_dict(self):
        return {
            "parameters": sum(self.p),
            "gradients": sum(self.g),
            "optimizer": sum(2 * g + 4 for g in self.g),
        }


def _bill(model, *, size=lambda p: p.nbytes, who=lambda p: p.requires_grad, states=None):
    trained = [p for p in model.parameters() if who(p)]
    gradients = sum(size(p) for p in trained)
    states = states or (lambda g, n: 2 * g + 4 * n)
    return {
        "parameters": sum(size(p) for p in model.parameters()),
        "gradients": gradients,
        "optimizer": states(gradients, len(trained)),
    }


def _leaves_gradients_off(model):
    """Counts those with a gradient, after making one for all: the model is left with gradients."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    g = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    n = sum(p.grad is not None for p in model.parameters())
    return {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "gradients": g,
        "optimizer": 2 * g + 4 * n,
    }


RIGHT["1.1"] = {
    "by storages, in numpy": _by_storage,
    "a class": lambda model: _Bill(model).as_dict(),
    "state dict": lambda model: _bill(model, size=lambda p: p.nelement() * p.dtype.itemsize),
}
WRONG["1.1"] = {
    "in MiB": (
        lambda model: {name: n / 2**20 for name, n in _bill(model).items()},
        "look like MiB",
    ),
    "one counter": (lambda model: _bill(model, states=lambda g, n: 2 * g + 4), "counter"),
    "a counter a number": (
        lambda model: _bill(model, states=lambda g, n: 3 * g),
        "3 ×",
    ),
    "no gradients of vectors": (
        lambda model: _bill(model, who=lambda p: p.requires_grad and p.ndim > 1),
        "entry 'gradients': got 768",
    ),
    "bits": (lambda model: _bill(model, size=lambda p: 8 * p.nbytes), "look like bits"),
    "always 4 bytes": (
        lambda model: _bill(model, size=lambda p: 4 * p.numel()),
        "4 bytes for each number",
    ),
    "always 4 bytes, one moment": (
        lambda model: _bill(model, size=lambda p: 4 * p.numel(), states=lambda g, n: g + 4 * n),
        "4 bytes for each number",
    ),
    "gradients stay": (_leaves_gradients_off, "gradients in .grad"),
    "master copy": (
        lambda model: _bill(model, states=lambda g, n: 3 * g + 4 * n),
        "3 × the gradients",
    ),
    "SGD": (lambda model: _bill(model, states=lambda g, n: 0), "moments are missing"),
}


class _Hooks:
    """Both hooks as methods; a set of storages by identity of their address and size."""

    def __init__(self, model):
        self.seen = set()
        self.own = {
            (s.data_ptr(), s.nbytes())
            for s in map(torch.Tensor.untyped_storage, model.parameters())
        }
        self.alive = []

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        self.seen.add((storage.data_ptr(), storage.nbytes()))
        return self.alive.index(storage), tensor

    def unpack(self, packed):
        return packed[1]


def _with_a_class(model, x):
    hooks = _Hooks(model)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        out = model(x)
    out.sum().detach()
    return sum(n for _, n in hooks.seen - hooks.own)


def _backward_inside(model, x):
    """Counts in unpack, as backward reads what was saved; nothing is left in .grad."""
    found = {}

    def unpack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    weights = list(model.parameters())
    x = x.clone().requires_grad_()
    with saved_tensors_hooks(lambda t: t, unpack):
        out = model(x).float().sum()
        trained = [p for p in weights if p.requires_grad]
        torch.autograd.grad(out, trained, allow_unused=True)
    for p in weights:
        found.pop(p.untyped_storage().data_ptr(), None)
    return sum(n for _, n in found.values())


def _saved(model, x, *, keep=lambda t: t, own=True, size=lambda s: s.nbytes(), grad=True):
    found, alive = {}, []

    def pack(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = size(storage)
        return keep(tensor)

    with saved_tensors_hooks(pack, lambda t: t), torch.set_grad_enabled(grad):
        model(x)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()} if own else ()
    return sum(n for at, n in found.items() if at not in weights)


def _hooks_of_modules(model, x):
    """Inputs of all modules, by their storages."""
    found, alive = {}, []

    def note(module, args, out):
        alive.append(args[0])
        found[args[0].untyped_storage().data_ptr()] = args[0].untyped_storage().nbytes()

    for module in model.modules():
        module.register_forward_hook(note)
    model(x)
    return sum(found.values())


RIGHT["1.2"] = {"a class": _with_a_class, "in backward": _backward_inside}
WRONG["1.2"] = {
    "hooks stay": (_hooks_of_modules, "hook"),
    "no graph": (lambda m, x: _saved(m, x, grad=False), r"not under torch.no_grad\(\)"),
    "bits": (lambda m, x: _saved(m, x, size=lambda s: 8 * s.nbytes()), "look like bits"),
    "weights' bytes taken off": (
        lambda m, x: _saved(m, x, own=False) - sum(p.nbytes for p in m.parameters()),
        "not all of them are saved",
    ),
    "numbers of storages": (lambda m, x: _saved(m, x, size=lambda s: 1), "counts storages"),
}

RIGHT["1.3"] = {
    "a generator": lambda b, s, h: sum(4 * (s - 1) for _ in range(b * h * s)),
    "permutations": lambda b, s, h: 4 * b * h * math.perm(s, 2),
    "tensors": lambda b, s, h: torch.ones(b, h, s, s).nbytes - torch.ones(b, h, s).nbytes,
}
WRONG["1.3"] = {
    "bits": (lambda b, s, h: 32 * b * h * s * (s - 1), "look like bits"),
    "scores and weights": (lambda b, s, h: 4 * b * h * s * (2 * s - 1), "one square|twice|scores"),
    "upper triangle": (lambda b, s, h: 2 * b * h * s * (s - 1), "triangle|2 bytes"),
    "one sum a token": (lambda b, s, h: 4 * b * s * (h * s - 1), "head|row of scores"),
    "KiB": (lambda b, s, h: b * h * s * (s - 1) / 256, "look like KiB"),
}
RIGHT["1.4"] = {
    "empty tensors": lambda b, s, v: sum(torch.empty(b, s, v, device="meta").nbytes for _ in "abc"),
    "shift": lambda b, s, v: (b * s * v << 3) + (b * s * v << 2),
}
WRONG["1.4"] = {
    "probabilities too": (lambda b, s, v: 16 * b * s * v, "16 bytes a logit"),
    "bf16 logits beside": (lambda b, s, v: 14 * b * s * v, "14 bytes a logit"),
    "MB": (lambda b, s, v: 12 * b * s * v / 1e6, "look like MB"),
    "labels too": (lambda b, s, v: 12 * b * s * v + 8 * b * s, "8 bytes a token too many"),
    "bits": (lambda b, s, v: 96 * b * s * v, "look like bits"),
}
RIGHT["1.5"] = {
    "asked of torch": lambda r: {
        "float32": lambda w: w.itemsize * 4,
        "bf16": lambda w: w.bfloat16().itemsize * 4,
        "autocast-bf16": lambda w: w.itemsize * 4,
        "float32-master": lambda w: w.bfloat16().itemsize * 2 + w.itemsize * 3,
    }[r](torch.zeros(1)),
    "prefix": lambda r: 16 >> r.startswith("bf16"),
}
WRONG["1.5"] = {
    "float32 gradients beside a master": (
        lambda r: {"float32": 16, "bf16": 8, "autocast-bf16": 16, "float32-master": 18}[r],
        "master",
    ),
    "bf16 gradients of autocast": (
        lambda r: {"float32": 16, "bf16": 8, "autocast-bf16": 14, "float32-master": 16}[r],
        "autocast",
    ),
    "no moments": (
        lambda r: {"float32": 8, "bf16": 4, "autocast-bf16": 8, "float32-master": 8}[r],
        "moments",
    ),
    "master without its weights": (
        lambda r: {"float32": 16, "bf16": 8, "autocast-bf16": 16, "float32-master": 14}[r],
        "master",
    ),
}


def _recursive(model, optimizer, batches):
    if not batches:
        return []
    ids, *rest = batches
    loss = model(input_ids=ids, labels=ids)[0]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    del loss
    return [value, *_recursive(model, optimizer, rest)]


def _closure(model, optimizer, batches):
    def run(ids):
        def closure():
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss.detach()

        value = float(optimizer.step(closure))
        optimizer.zero_grad()
        return value

    return [run(ids) for ids in batches]


def _after_the_update(model, optimizer, batches):
    losses = []
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return losses


def _running_mean(model, optimizer, batches):
    losses = _recursive(model, optimizer, batches)
    return [sum(losses[: i + 1]) / (i + 1) for i in range(len(losses))]


def _by_hand(model, optimizer, batches):
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        del loss
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-3 * p.grad
                p.grad = None
    return losses


RIGHT["1.6"] = {"recursive": _recursive, "a closure": _closure}
WRONG["1.6"] = {
    "after the update": (_after_the_update, "after each update"),
    "running mean": (_running_mean, "entry|item 1"),
    "steps by hand": (_by_hand, "not by the given optimizer"),
}

_ROWS = [
    "ln_1",
    "attn.c_attn",
    "attn",
    "attn.c_proj",
    "attn.resid_dropout",
    "ln_2",
    "mlp.c_fc",
    "mlp.act",
    "mlp.c_proj",
    "mlp.dropout",
]


def _table(**wrong):
    def rows(batch, seq_len, hidden, heads):
        t, x = batch * seq_len, batch * seq_len * hidden
        known = dict(
            zip(
                _ROWS,
                (x + 2 * t, x, 4 * x + t * heads, 0, x, x + 2 * t, x, 4 * x, 4 * x, x),
                strict=True,
            )
        )
        for name, value in wrong.items():
            at = name.replace("__", ".")
            known[at] = value(t, x, heads, seq_len)
        return {name: 4 * n for name, n in known.items()}

    return rows


def _by_matrix(batch, seq_len, hidden, heads):
    coefficients = np.zeros((len(_ROWS), 3), dtype=int)
    coefficients[:, 0] = 1, 1, 4, 0, 1, 1, 1, 4, 4, 1
    coefficients[[0, 5], 1] = 2
    coefficients[2, 2] = 1
    numbers = coefficients @ (batch * seq_len * np.array([hidden, 1, heads])) * 4
    return {name: int(n) for name, n in zip(_ROWS, numbers, strict=True)}


RIGHT["1.7"] = {"a matrix": _by_matrix}
WRONG["1.7"] = {
    "q, k and v alone": (_table(attn=lambda t, x, h, s: 3 * x + t * h), "attn has"),
    "c_attn's output": (_table(attn__c_attn=lambda t, x, h, s: 3 * x), "c_attn"),
    "attention's dropout": (
        _table(attn=lambda t, x, h, s: 4 * x + t * h + t * h * s),
        "attn has",
    ),
    "norm as RMS": (
        _table(ln_1=lambda t, x, h, s: x + t, ln_2=lambda t, x, h, s: x + t),
        "a LayerNorm keeps its input, and for each token a mean and",
    ),
    "mlp's input twice": (_table(mlp__c_proj=lambda t, x, h, s: x), "c_proj"),
    "no second norm": (_table(ln_2=lambda t, x, h, s: 0), "ln_2"),
}


def _mlp(training=14, evaluation=5, more=lambda t, h, on: 0):
    return lambda t, h, on: 4 * ((training if on else evaluation) * t * h + more(t, h, on))


RIGHT["1.8"] = {
    "parts of a product": lambda t, h, on: reduce(mul, (4, t, h, (5, 14)[on])),
    "a chain": lambda t, h, on: sum(
        itertools.chain((4 * t * h, 16 * t * h), (16 * t * h, 16 * t * h, 4 * t * h) if on else ())
    ),
}
WRONG["1.8"] = {
    "GELU": (_mlp(18, 9), "ReLU"),
    "mask without the copy": (_mlp(10, 5), "14|training mode|first one|dropped"),
    "biases": (_mlp(more=lambda t, h, on: 5 * h), "multiple|bias"),
    "MiB": (lambda t, h, on: (14 if on else 5) * t * h * 4 / 2**20, "look like MiB"),
}


def _leak(line, keep):
    def answer():
        def fixed(model, optimizer, batches):
            history = []
            for x, y in batches:
                out = model(x)
                loss = F.mse_loss(out, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                history.append(keep(loss, out))
            return [(float(a), float(b)) for a, b in history]

        return line, fixed

    return answer


RIGHT["1.9"] = {
    "new scalars": _leak(9, lambda loss, out: (loss.detach().clone(), out.detach().mean().clone())),
}
WRONG["1.9"] = {
    "twice the loss": (_leak(9, lambda loss, out: (loss.item(), loss.item())), "something else"),
    "half precision": (
        _leak(9, lambda loss, out: (loss.item(), out.detach().half().mean().item())),
        "something else|nearly right|half",
    ),
}


def _no_parameter(model, x):
    """Leaves out a Parameter, and not its transpose."""
    seen, alive = {}, []

    def pack(tensor):
        alive.append(tensor)
        if not isinstance(tensor, nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(seen.values())


WRONG["1.2"] |= {"a Parameter itself": (_no_parameter, "may be its transpose")}
WRONG["1.3"] |= {
    "q, k and v too": (
        lambda b, s, h: 4 * b * h * s * s + 12 * b * h * s,
        "12 bytes a row of scores are added",
    ),
}


def _saves_but(left_out):
    def saved_bytes(model, x):
        found = {}

        def pack(tensor):
            if not left_out(tensor, model):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        return sum(found.values())

    return saved_bytes


def _is_in(parameters, tensor):
    return any(
        p.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for p in parameters
    )


RIGHT["1.2"] |= {"asked in pack": _saves_but(lambda t, model: _is_in(model.parameters(), t))}
WRONG["1.2"] |= {
    "trained weights alone": (
        _saves_but(lambda t, model: _is_in([p for p in model.parameters() if p.requires_grad], t)),
        "frozen layer is a parameter",
    ),
}
WRONG["1.1"] |= {
    "without embeddings": (
        lambda model: {
            name: sum(
                n * p.nbytes + (4 if name == "optimizer" else 0)
                for key, p in model.named_parameters()
                if "embed" not in key and (p.requires_grad or name == "parameters")
            )
            for name, n in (("parameters", 1), ("gradients", 1), ("optimizer", 2))
        },
        "tied table",
    ),
}
