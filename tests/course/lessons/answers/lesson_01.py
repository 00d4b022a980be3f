"""Answers to the exercises of lesson 01 as people write them; see lesson_00.py."""

import gc
import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

RIGHT, WRONG = {}, {}


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


def _with_grad(model):
    return [p for p in model.parameters() if p.grad is not None]


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
        "4 bytes for each number",
    ),
    "frozen moments": (
        lambda model: (
            _resident(model) | {"optimizer": _resident(model, trained=lambda p: True)["optimizer"]}
        ),
        "no moments and no step counter",
    ),
    "trained alone": (
        lambda model: _resident(model) | {"parameters": _resident(model)["gradients"]},
        "take memory too",
    ),
    "tuple": (lambda model: tuple(_resident(model).values()), "a dict"),
    "buffers": (lambda model: _resident(model) | {"buffers": 0}, "this name was not asked for"),
    "counters of frozen tensors": (
        lambda model: (
            _resident(model)
            | {"optimizer": 2 * _resident(model)["gradients"] + 4 * len([*model.parameters()])}
        ),
        "no step counter",
    ),
    "a counter for each number": (
        lambda model: (
            _resident(model)
            | {
                "optimizer": 2 * _resident(model)["gradients"]
                + 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
            }
        ),
        "not yet: this has one step counter for each number",
    ),
    "asks p.grad": (
        lambda model: _resident(model) | {"gradients": sum(_bytes(p) for p in _with_grad(model))},
        "not yet: no gradient is counted: before the first backward each p.grad is None",
    ),
    "state dict": (
        lambda model: (
            _resident(model) | {"parameters": sum(t.nbytes for t in model.state_dict().values())}
        ),
        r"not yet: state_dict\(\) has a tied weight",
    ),
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
        "not yet: this counts the view.*Take key and bytes from",
    ),
    "parameters": (lambda model, x: _saved(model, x, own=()), "parameters"),
    "no input": (lambda model, x: _saved(model, x) - x.nbytes, "input is left out"),
    "output too": (lambda model, x: _saved(model, x) + model(x).nbytes, "output is counted too"),
    "kilobytes": (lambda model, x: _saved(model, x) / 1024, "1,024 times too small"),
    "nothing": (lambda model, x: 0, "not yet: nothing is counted: run model"),
    "weights by their own address": (
        lambda model, x: _saved(model, x, own={p.data_ptr() for p in model.parameters()}),
        "not yet: a parameter that begins inside its storage",
    ),
}


def _packed(size, *, key=lambda t: t.untyped_storage().data_ptr(), own=False, again=False):
    """``saved_bytes`` by a hook that writes a saved tensor's ``size`` down under its ``key``, or
    each time ``again``.
    """

    def saved(model, x):
        counted, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(t):
            if own or t.untyped_storage().data_ptr() not in weights:
                counted[len(counted) if again else key(t)] = size(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x)
        return sum(counted.values())

    return saved


def _storage_bytes(t):
    return t.untyped_storage().nbytes()


WRONG["1.2"] |= {
    "each time, weights too": (
        _packed(_storage_bytes, own=True, again=True),
        "not yet: this counts a storage as often.*And this counts the parameters",
    ),
    "each time, of the view": (
        _packed(lambda t: t.nbytes, again=True),
        "not yet: this counts a storage as often",
    ),
    "weights too, of the view": (
        _packed(lambda t: t.nbytes, own=True),
        "not yet: this counts the parameters too",
    ),
    "weights too, views by their address": (
        _packed(lambda t: t.nbytes, key=torch.Tensor.data_ptr, own=True),
        "not yet: this counts the parameters too.*And this counts the view.*Take key and bytes",
    ),
    "weights too, elements": (
        _packed(lambda t: _storage_bytes(t) // t.itemsize, own=True),
        "not yet: this counts the parameters.*And this counts elements",
    ),
    "elements of the view": (
        _packed(torch.numel),
        "not yet: this counts the view.*And this counts elements",
    ),
    "all of it": (
        _packed(torch.numel, own=True, again=True),
        "not yet: this counts a storage.*And this counts the parameters.*And this counts elements",
    ),
}

RIGHT["1.3"] = {
    "difference": lambda b, s, h: b * h * (s * s - s) * 4,
    "numpy": lambda b, s, h: np.int64(4) * b * h * s * (s - 1),
    "comb": lambda b, s, h: 8 * b * h * math.comb(s, 2),
}
WRONG["1.3"] = {
    "bf16": (lambda b, s, h: 2 * b * h * s * (s - 1), "half of it: with 2 bytes a number"),
    "triangle": (lambda b, s, h: 2 * b * h * s * (s + 1) - 4 * b * h * s, "the lower triangle"),
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


RIGHT["1.6"] = {
    "zero first": lambda m, o, b: _train(m, o, b, first=True),
    "detached losses": lambda m, o, b: _train(
        m, o, b, keep=lambda kept, out: kept.append(out.loss.detach())
    ),
    "array": lambda m, o, b: np.array(_train(m, o, b)),
}


def _first_loss(model, optimizer, batches):
    return _train(model, optimizer, batches)[:1]


def _same_batch(model, optimizer, batches):
    return _train(model, optimizer, [batches[0]] * len(batches))


WRONG["1.6"] = {
    "holds the output": (
        lambda m, o, b: _train(m, o, b, hold=True),
        "logits are still alive in backward",
    ),
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


def answer(line, script):
    return lambda: (line, script)


def history_of(keep, finish=list, before=None, after=None):
    """The lesson's loop; ``keep`` makes an entry, and ``before`` and ``after`` stand around it."""

    def script(model, optimizer, batches):
        history = []
        for x, y in batches:
            if before:
                before(history)
            out = model(x)
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(keep(loss, out))
            if after:
                del out, loss
                after()
        return finish(history)

    return script


def in_two_lists(model, optimizer, batches):
    losses, means = [], []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        losses.append(float(loss))
        means.append(float(out.detach().mean()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(zip(losses, means, strict=True))


def without_graph(model, optimizer, batches):
    history = torch.zeros(len(batches), 2)
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            history[i, 0], history[i, 1] = loss, out.mean()
    return history.tolist()


def numbers(loss, out):
    return loss.item(), out.mean().item()


RIGHT["1.9"] = {
    "numbers": answer(9, history_of(numbers)),
    "two lists": answer(9, in_two_lists),
    "a table of numbers": answer(torch.tensor(9), without_graph),
    "numbers, and a collection": lambda: [9, history_of(numbers, after=gc.collect)],
}


def to_numbers(history):
    return [(float(loss), float(out.mean())) for loss, out in history]


def half_a_batch(model, optimizer, batches):
    return history_of(lambda loss, out: (loss, out), to_numbers)(
        model, optimizer, [(x[:128], y[:128]) for x, y in batches]
    )


def under_no_grad(model, optimizer, batches):
    with torch.no_grad():
        return history_of(numbers)(model, optimizer, batches)


def never_zeroed(model, optimizer, batches):
    history = []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        history.append(numbers(loss, out))
    return history


def collected_history(model, optimizer, batches):
    history = []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss, out))
        gc.collect()
    return to_numbers(history)


def emptied_history(model, optimizer, batches):
    history = []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss, out))
        torch.cuda.empty_cache()
    return to_numbers(history)


DETACHED = history_of(lambda loss, out: (loss.detach(), out.detach()), to_numbers)


def _arguments():
    from gradmem_lib.course import history_setting

    return history_setting(2)


WRONG["1.9"] = {
    "detached": (answer(9, DETACHED), r"detach\(\) and del .* \.item\(\)"),
    "on the host": (
        answer(9, history_of(lambda loss, out: (loss.cpu(), out.detach().cpu()), to_numbers)),
        r"the list still holds the tensor",
    ),
    "collected": (answer(9, collected_history), r"gc\.collect\(\) frees what nothing refers to"),
    "emptied": (answer(9, emptied_history), r"empty_cache\(\) gives back"),
    "the line that makes it": (answer(4, history_of(numbers)), "line 4 makes the outputs"),
    "the last line": (answer(10, history_of(numbers)), "after the last batch"),
    "a line that does nothing": (answer(3, history_of(numbers)), "line 3 keeps no tensor"),
    "in numpy": (
        answer(
            9, history_of(lambda loss, out: (loss.item(), out.detach().numpy().copy()), to_numbers)
        ),
        "arrays",
    ),
    "half the rows": (answer(9, half_a_batch), "the updates are different|trains"),
    "no gradients": (answer(9, under_no_grad), "no_grad around a training step"),
    "the loss alone": (
        answer(9, history_of(lambda loss, out: (loss.item(), out), to_numbers)),
        "one of the pair is a number",
    ),
    "forgotten": (
        answer(9, history_of(numbers, before=lambda history: history.clear())),
        "only the last|something else than the script|length",
    ),
    "never zeroed": (answer(9, never_zeroed), "weights at the end are not those"),
    "called": (lambda: (9, history_of(numbers)(*_arguments())), "must be a function"),
    "the function alone": (lambda: history_of(numbers), "two things"),
    "turned round": (lambda: (history_of(numbers), 9), "the line comes first"),
}


def _mlp(tokens, hidden, training, *, p=0.1, inner=4):
    layers = [nn.Linear(hidden, inner * hidden), nn.ReLU(), nn.Dropout(p)]
    layers += [nn.Linear(inner * hidden, hidden), nn.Dropout(p)]
    net = nn.Sequential(*layers).train(training)
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(torch.randn(tokens, hidden, requires_grad=True))
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    return sum(size for pointer, (size, _) in kept.items() if pointer not in own)


RIGHT["1.8"] = {
    "measured": _mlp,
    "one formula": lambda t, h, training: 4 * t * h * (14 if training else 5),
    "a sum of rows": lambda t, h, training: sum(
        4 * t * h * n for n in ([1, 4, 4, 4, 1] if training else [1, 4])
    ),
    "a tensor": lambda t, h, training: torch.tensor(20 * t * h + 36 * t * h * training),
}


WRONG["1.8"] = {
    "always training": (lambda t, h, training: 56 * t * h, "has no effect"),
    "never training": (lambda t, h, training: 20 * t * h, "has no effect"),
    "the wrong way round": (
        lambda t, h, training: 4 * t * h * (5 if training else 14),
        r"in evaluation mode this counts 14",
    ),
    "two masks and no copy": (
        lambda t, h, training: 4 * t * h * (10 if training else 5),
        r"second Linear's input is missing|in training mode this counts 10",
    ),
    "masks as bool": (
        lambda t, h, training: int(4 * t * h * (10.25 if training else 5)),
        r"one byte for each number of a mask",
    ),
    "the output too": (
        lambda t, h, training: 4 * t * h * (15 if training else 6),
        r"in evaluation mode this counts 6",
    ),
    "bf16": (
        lambda t, h, training: 2 * t * h * (14 if training else 5),
        r"in evaluation mode this counts 2.5",
    ),
    "weights too": (
        lambda t, h, training: 4 * t * h * (14 if training else 5) + 4 * 8 * h * h,
        r"not a multiple",
    ),
    "all outputs": (
        lambda t, h, training: 4 * t * h * (1 + 4 + 4 + 4 + 1 + 1 if training else 1 + 4 + 4 + 1),
        r"in evaluation mode this counts 10|ReLU",
    ),
}


def _storages_but(left_out):
    """Each saved storage once, without those of ``left_out(model)``."""

    def saved(model, x):
        found = {}

        def pack(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(x)
        for tensor in left_out(model):
            found.pop(tensor.untyped_storage().data_ptr(), None)
        del out
        return sum(found.values())

    return saved


WRONG["1.2"] |= {
    "no buffers": (
        _storages_but(lambda model: [*model.parameters(), *model.buffers()]),
        "a buffer is no parameter",
    ),
    "no state": (_storages_but(lambda model: model.state_dict().values()), "a buffer is no param"),
}
RIGHT["1.2"] |= {
    "buffers count": _storages_but(lambda model: list(model.parameters())),
    "by name": _storages_but(lambda model: dict(model.named_parameters()).values()),
}


def _losses_as(change, finish=list):
    """The loop of exercise 1.6, with each loss as ``change(loss)``."""

    def train(model, optimizer, batches):
        losses = []
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(change(loss))
            del loss
        return finish(losses)

    return train


WRONG["1.6"] |= {"losses with their graphs": (_losses_as(lambda loss: loss), "each with its graph")}
RIGHT["1.6"] |= {
    "item after the step": _losses_as(torch.Tensor.item),
    "float": _losses_as(float),
    "detached": _losses_as(torch.Tensor.detach),
    "numpy": _losses_as(lambda loss: loss.detach().numpy().copy()),
    "numbers at the end": _losses_as(
        lambda loss: loss, lambda losses: [loss.item() for loss in losses]
    ),
}


def _appends_the_outputs_loss(model, optimizer, batches, *, delete=False):
    losses = []
    for ids in batches:
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss)
        if delete:
            del output
    return losses


WRONG["1.6"] |= {
    "the output's losses": (_appends_the_outputs_loss, "each with its graph.*alive, too"),
    "the output's losses, and del": (
        partial(_appends_the_outputs_loss, delete=True),
        "each with its graph.*alive, too",
    ),
}


def _step_by_step(loss_of, *, after=float, order=list, each=True):
    """A loop that differs in its loss, in what it returns of it, or in when it steps."""

    def train(model, optimizer, batches):
        losses = []
        for ids in order(batches):
            loss = loss_of(model, ids)
            losses.append(after(loss.item()))
            loss.backward()
            del loss
            if each:
                optimizer.step()
                optimizer.zero_grad()
        if not each:
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return train


def _by_the_model(model, ids):
    return model(input_ids=ids, labels=ids).loss


def _own_entropy(model, ids, shift=1):
    logits = model(input_ids=ids).logits[:, : ids.shape[1] - shift]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, shift:].flatten())


def _under_autocast(model, ids):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _by_the_model(model, ids)


def _with_names_kept(model, optimizer, batches):
    losses = []
    for ids in batches:
        logits = model(input_ids=ids).logits
        entropy = torch.nn.functional.cross_entropy
        loss = entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _returns_in_the_loop(model, optimizer, batches, result=list):
    losses = []
    for ids in batches:
        loss = _by_the_model(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return result(losses)


def _with_names_kept_and_an_update_less(model, optimizer, batches):
    losses = _with_names_kept(model, optimizer, batches[:-1])
    logits = model(input_ids=batches[-1]).logits
    entropy = torch.nn.functional.cross_entropy
    loss = entropy(logits[:, :-1].flatten(0, 1), batches[-1][:, 1:].flatten())
    loss.backward()
    return [*losses, loss.item()]


WRONG["1.6"] |= {
    "return in the loop": (_returns_in_the_loop, "is the return inside the loop"),
    "return of a number in the loop": (
        partial(_returns_in_the_loop, result=sum),
        "is the return inside the loop",
    ),
    "names kept, and an update less": (
        _with_names_kept_and_an_update_less,
        "^(?!.*updates are right)",
    ),
    "one step for all": (_step_by_step(_by_the_model, each=False), "one step on each batch"),
    "divided by the batches": (
        _step_by_step(lambda model, ids: _by_the_model(model, ids) / 3),
        "divided by 3, the number of batches",
    ),
    "rounded": (_step_by_step(_by_the_model, after=lambda loss: round(loss, 2)), "are rounded"),
    "autocast": (_step_by_step(_under_autocast), "another precision"),
    "backwards": (
        _step_by_step(_by_the_model, order=lambda batches: batches[::-1]),
        "in another order",
    ),
    "not shifted": (
        _step_by_step(lambda model, ids: _own_entropy(model, ids, 0)),
        "labels are not shifted",
    ),
    "shifted twice": (
        _step_by_step(lambda model, ids: _own_entropy(model, ids, 2)),
        "labels are shifted twice",
    ),
    "the logits have a name": (_with_names_kept, "still refers to the logits"),
}


WRONG["1.2"] |= {
    "an x that requires a gradient": (
        lambda model, x: _saved(model, x.clone().requires_grad_()),
        "neither x nor the first layer requires a gradient here",
    ),
    "bytes times the size of an element": (
        lambda model, x: _saved(
            model, x, size=lambda t: t.untyped_storage().size() * t.element_size()
        ),
        r"size\(\) and nbytes\(\) are its bytes already",
    ),
}
WRONG["1.7"] |= {
    "a row of the total": (
        lambda *sizes: _gpt2(*sizes) | {"total": sum(_gpt2(*sizes).values())},
        "not yet: every row is right: leave out 'total'",
    ),
}
WRONG["1.8"] |= {
    "nothing in evaluation": (
        lambda t, h, training: 56 * t * h * training,
        "not yet: in evaluation mode this counts nothing",
    ),
}


def _counters_in_dtype(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return _resident(model) | {"optimizer": sum(2 * p.nbytes + p.element_size() for p in trained)}


WRONG["1.1"] |= {
    "an entry for the total": (
        lambda model: _resident(model) | {"total": sum(_resident(model).values())},
        "not yet: all three entries are right: leave out 'total'",
    ),
    "counters in the parameters' dtype": (
        _counters_in_dtype,
        "your step counters have the parameters' dtype",
    ),
}


def _steps_before_backward(model, optimizer, batches):
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.step()
        loss.backward()
        optimizer.zero_grad()
        del loss
    return losses


WRONG["1.6"] |= {
    "the step before backward": (
        _steps_before_backward,
        r"not yet: optimizer.step\(\) finds no gradients: backward\(\) must run before",
    ),
}


def _pops_every_parameter(model, x):
    found, kept = {}, []

    def pack(tensor):
        kept.append(tensor)
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    for p in model.parameters():
        found.pop(p.untyped_storage().data_ptr())
    return sum(found.values())


WRONG["1.2"] |= {
    "pops every parameter": (_pops_every_parameter, "not yet: a key is missing that looks like"),
}
