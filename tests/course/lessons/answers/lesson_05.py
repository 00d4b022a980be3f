"""Answers to the exercises of lesson 05 as people write them; see lesson_00.py."""

import contextlib
import copy
import gc
import io
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from gradmem_lib import LoRALinear, checkpoint_layers
from gradmem_lib.course.lessons.lesson_05.exercises_leak import train_on
from gradmem_lib.techniques.accumulation import accumulate_gradients, split
from gradmem_lib.techniques.losses import count_targets, next_token_loss

RIGHT, WRONG = {}, {}
TRAIN, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
EVAL = "per_device_eval_batch_size"


def _card(arguments, gpus, fits, *, micro=None, steps=None, **more):
    batch = arguments[TRAIN] * arguments[STEPS] * gpus
    size = (
        micro(batch, fits)
        if micro
        else max(m for m in range(1, min(fits, batch) + 1) if batch % m == 0)
    )
    steps = steps(batch, size) if steps else batch // size
    return {**arguments, TRAIN: size, STEPS: steps, EVAL: size, **more}


def _downwards(arguments, gpus, fits):
    new = dict(arguments)
    batch = arguments[TRAIN] * arguments[STEPS] * gpus
    while batch % fits:
        fits -= 1
    new.update({TRAIN: fits, EVAL: fits, STEPS: batch / fits})
    return new


RIGHT["5.1"] = {
    "downwards": _downwards,
    "tensors": lambda a, g, f: {
        k: torch.tensor(v, dtype=torch.float64) for k, v in _card(a, g, f).items()
    },
    "copied": lambda a, g, f: dict(_card(dict(a), g, f)),
}
WRONG["5.1"] = {
    "no GPUs": (lambda a, g, f: _card(a, 1, f), "other GPUs"),
    "steps kept": (lambda a, g, f: _card(a, g, f) | {STEPS: a[STEPS]}, "global batch has changed"),
    "too many": (partial(_card, micro=lambda batch, fits: batch), "do not fit"),
    "one": (partial(_card, micro=lambda batch, fits: 1), "one row at a time|would fit"),
    "rate": (lambda a, g, f: _card(a, g, f, learning_rate=a["learning_rate"] / g), "learning_rate"),
    "max_steps": (lambda a, g, f: _card(a, g, f, max_steps=a["max_steps"] * g), "max_steps must"),
    "gone": (lambda a, g, f: {k: _card(a, g, f)[k] for k in (TRAIN, STEPS, EVAL)}, "is gone"),
    "text": (lambda a, g, f: _card(a, g, f) | {TRAIN: str(_card(a, g, f)[TRAIN])}, "text"),
    "eval": (lambda a, g, f: _card(a, g, f) | {EVAL: a[EVAL]}, "evaluation"),
    "other names": (lambda a, g, f: a | {"batch_size": f}, "not yet: 'batch_size' is no field"),
    "a pair": (
        lambda a, g, f: (_card(a, g, f)[TRAIN], _card(a, g, f)[STEPS]),
        "not yet: return a dict with all fields",
    ),
    "parts of steps": (
        partial(_card, micro=lambda batch, fits: fits, steps=lambda batch, size: batch / size),
        "24 rows cannot be cut into whole micro-batches of 7",
    ),
    "power of two": (
        partial(
            _card,
            micro=lambda batch, fits: max(
                2**i for i in range(5) if 2**i <= fits and batch % 2**i == 0
            ),
        ),
        "more rows at a time would fit",
    ),
    "the run's own": (
        lambda a, g, f: a | {STEPS: a[STEPS] * g, EVAL: a[TRAIN]},
        "4 rows at a time do not fit",
    ),
    "both as text": (
        lambda a, g, f: _card(a, g, f) | {key: str(_card(a, g, f)[key]) for key in (TRAIN, STEPS)},
        "this is text, '2'",
    ),
}


def _on(model, **kwargs):
    model.train()
    model.gradient_checkpointing_enable(**kwargs)


def _each_layer(model):
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        module.train()


def _flags(model):
    model.train()
    model.model.gradient_checkpointing = True


RIGHT["5.2"] = {
    "old name": lambda model: _on(model, gradient_checkpointing_kwargs={"use_reentrant": False}),
    "after": lambda model: (
        model.gradient_checkpointing_enable({"use_reentrant": False}),
        model.train(),
    )[1],
    "modules": _each_layer,
}
WRONG["5.2"] = {
    "eval": (
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
        "eval mode",
    ),
    "train alone": (lambda model: model.train(), "no layer of this model"),
    "attribute": (_flags, "no layer|attribute"),
    "reentrant": (
        lambda model: _on(model, gradient_checkpointing_kwargs={"use_reentrant": True}),
        "use_reentrant=True",
    ),
    "bf16": (lambda model: (_on(model), model.to(torch.bfloat16))[1], "rounded to bf16"),
    "embedding frozen": (
        lambda model: (_on(model), model.get_input_embeddings().requires_grad_(False))[0],
        "another requires_grad",
    ),
    "fewer": (
        lambda model: (model.train(), setattr(model.model, "layers", model.model.layers[:2]))[1],
        "layers|loss",
    ),
}


def _epoch(optimizer, mbs, window, warmup, accumulate, *, n=None, warm=None, body=None, each=False):
    from transformers import get_scheduler

    updates = math.ceil(len(mbs) / window)
    total = n(len(mbs), window) if n else updates
    schedule = get_scheduler(
        "linear", optimizer, warm(updates, warmup) if warm else round(updates * warmup), total
    )
    for start in range(0, len(mbs), window):
        held = mbs[start : start + window]
        for some in [[one] for one in held] if each else [held]:
            accumulate(some)
        (body or _usual)(optimizer, schedule)


def _usual(optimizer, schedule):
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def _leaves(setting):
    def wrong(optimizer, *given):
        _epoch(optimizer, *given)
        for group in optimizer.param_groups:
            group[setting] = 0.3

    return wrong


def _by_lambda(optimizer, mbs, window, warmup, accumulate):
    n = -(-len(mbs) // window)
    warm = int(n * warmup)
    rate = lambda t: t / warm if t < warm else (n - t) / (n - warm)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    while mbs:
        held, mbs = mbs[:window], mbs[window:]
        optimizer.zero_grad()
        accumulate(held)
        optimizer.step()
        schedule.step()


RIGHT["5.3"] = {
    "lambda": _by_lambda,
    "scheduler": _epoch,
    "zero kept": partial(
        _epoch, body=lambda o, s: (o.step(), o.zero_grad(set_to_none=False), s.step())
    ),
}
WRONG["5.3"] = {
    "no zero": (
        partial(_epoch, body=lambda o, s: (o.step(), s.step())),
        r"zero_grad\(\) is missing",
    ),
    "zero first": (
        partial(_epoch, body=lambda o, s: (o.zero_grad(), o.step(), s.step())),
        "finds its gradient empty",
    ),
    "schedule first": (
        partial(_epoch, body=lambda o, s: (s.step(), o.step(), o.zero_grad())),
        "optimizer first",
    ),
    "no schedule": (
        partial(_epoch, body=lambda o, s: (o.step(), o.zero_grad())),
        "schedule never steps",
    ),
    "no step": (partial(_epoch, body=lambda o, s: s.step()), "no update"),
    "decay left": (_leaves("weight_decay"), "`optimizer` with another weight_decay"),
    "micro-batches": (partial(_epoch, n=lambda n, k: n), "length is counted in micro-batches"),
    "one by one": (partial(_epoch, each=True), "each micro-batch by itself"),
    "dropped": (
        lambda o, mbs, k, *rest: _epoch(o, mbs[: len(mbs) // k * k], k, *rest),
        "micro-batches are dropped",
    ),
    "half the warm-up": (partial(_epoch, warm=lambda n, w: round(n * w / 2)), "warm-up takes"),
}


def _log(
    model,
    window,
    *,
    share=lambda n, ns: n / sum(ns),
    back=sum,
    count=lambda m: count_targets(m["labels"]),
    keep=None,
):
    counts, parts, kept = [count(m) for m in window], [], []
    for micro, n in zip(window, counts, strict=True):
        out = model(**micro)
        part = out.loss * share(n, counts)
        part.backward()
        parts.append(part.item())
        if keep:
            kept.append(keep(out))
        del out, part
    return back(parts)


def _summed(model, window):
    total = sum(count_targets(m["labels"]) for m in window)
    loss = sum(model(**m).loss * count_targets(m["labels"]) / total for m in window)
    loss.backward()
    return loss.item()


RIGHT["5.4"] = {
    "library": lambda model, window: (
        accumulate_gradients(window, lambda m: next_token_loss(model, m)).loss
    ),
    "told": lambda model, window: _log(
        model, window, count=lambda m: int((m["labels"][:, 1:] != -100).sum())
    ),
    "tensor": lambda model, window: torch.tensor(_log(model, window)),
}
WRONG["5.4"] = {
    "one backward": (_summed, "one backward at the end"),
    "labels": (partial(_log, count=lambda m: m["labels"].numel()), "padding"),
    "by K": (partial(_log, share=lambda n, ns: 1 / len(ns)), "mean of means"),
    "by rows": (
        lambda model, window: _log(
            model,
            window,
            count=lambda m: len(m["labels"]),
        ),
        "weighted by their rows",
    ),
    "whole": (partial(_log, share=lambda n, ns: 1), "K times too large"),
    "last": (partial(_log, back=lambda parts: parts[-1]), "log is"),
    "mean": (partial(_log, back=lambda parts: sum(parts) / len(parts)), "log is"),
    "kept": (partial(_log, keep=lambda out: out.logits), "kept until the end"),
    "uphill": (partial(_log, share=lambda n, ns: -n / sum(ns)), "wrong sign"),
}


def _mixed(
    model,
    batches,
    lr,
    *,
    cast=lambda m: m.float(),
    auto=True,
    zero=True,
    rate=1.0,
    make=torch.optim.AdamW,
    dtype=torch.bfloat16,
    after=lambda m: None,
    sign=1,
):
    cast(model)
    optimizer = make(model.parameters(), lr=lr * rate)
    for batch in batches:
        with torch.autocast("cpu", dtype=dtype, enabled=auto):
            loss = sign * model(**batch).loss
        if zero:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after(model)
    return optimizer


RIGHT["5.5"] = {
    "to": partial(_mixed, cast=lambda m: m.to(torch.float32)),
    "fused": partial(_mixed, make=partial(torch.optim.AdamW, fused=True)),
    "float": _mixed,
}
WRONG["5.5"] = {
    "not cast": (partial(_mixed, cast=lambda m: None), "states are bf16"),
    "no autocast": (partial(_mixed, auto=False), "outside torch.autocast"),
    "no zero": (partial(_mixed, zero=False), "zero_grad"),
    "rate": (partial(_mixed, rate=100), "learning rate"),
    "float16": (partial(_mixed, dtype=torch.float16), "float16"),
    "uphill": (partial(_mixed, sign=-1), "wrong sign"),
    "back to bf16": (partial(_mixed, after=lambda m: m.to(torch.bfloat16)), "bf16 in the end"),
    "reversed": (lambda model, batches, lr: _mixed(model, batches[::-1], lr), "batch 3, 2, 1"),
}


def _lora(
    model, names, rank, lr, *, freeze=True, make=torch.optim.AdamW, thaw=(), only=lambda path: True
):
    if freeze:
        model.requires_grad_(False)
    for path in [p for p, _ in model.named_modules() if p.split(".")[-1] in names and only(p)]:
        parent, own = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        parent.set_submodule(own, LoRALinear(getattr(parent, own), rank))
    for name in thaw:
        model.get_submodule(name).requires_grad_(True)
    return make([p for p in model.parameters() if p.requires_grad], lr=lr)


def _lora_backwards(model, names, rank, lr):
    model.requires_grad_(False)
    for module in list(model.modules()):
        for own, child in list(module.named_children()):
            if own in names and isinstance(child, nn.Linear):
                setattr(module, own, LoRALinear(child, rank))
    return torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr)


def _on_the_model(model, names, rank, lr):
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        own = path.rpartition(".")[2]
        if own in names:
            setattr(model, own, LoRALinear(module, rank))
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def _lora_after_the_optimizer(model, names, rank, lr):
    model.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    _lora(model, names, rank, lr)
    return optimizer


RIGHT["5.6"] = {
    "children": _lora_backwards,
    "set_submodule": _lora,
    "all handed over": lambda m, n, r, lr: (
        _lora(m, n, r, lr),
        torch.optim.AdamW(m.parameters(), lr=lr),
    )[1],
}
WRONG["5.6"] = {
    "not frozen": (partial(_lora, freeze=False), "rest of the model is trained"),
    "rate": (lambda m, n, r, lr: _lora(m, n, r, 1e-3), "`lr` has no effect"),
    "rank": (lambda m, n, r, lr: _lora(m, n, 4, lr), "`rank` has no effect"),
    "names": (lambda m, n, r, lr: _lora(m, ("q_proj", "v_proj"), r, lr), "in `names`"),
    "sgd": (partial(_lora, make=torch.optim.SGD), "AdamW"),
    "head": (partial(_lora, thaw=("lm_head",)), "too many require a gradient"),
    "first layer": (partial(_lora, only=lambda path: "layers.0." in path), "in `names`|adapters"),
    "on the model": (_on_the_model, "not yet: the adapters hang on the model itself"),
    "optimizer first": (
        _lora_after_the_optimizer,
        "not yet: when the optimizer is made, no layer.*and only then make the optimizer",
    ),
}


def _held_out(
    model,
    rows,
    *,
    size=4,
    weigh=lambda m: count_targets(m["labels"]),
    mode=False,
    back=True,
    first=None,
    cache=False,
    auto=False,
    add=lambda total, n: total / n,
):
    model.train(mode)
    total = n = 0.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=auto):
        for micro in list(split(rows, size))[:first]:
            total += model(**micro, use_cache=cache).loss.item() * weigh(micro)
            n += weigh(micro)
    model.train(back)
    return add(total, n)


RIGHT["5.7"] = {
    "rows": partial(_held_out, size=1),
    "threes": partial(_held_out, size=3),
    "tensor": lambda model, rows: torch.tensor(_held_out(model, rows)),
}
WRONG["5.7"] = {
    "dropout": (partial(_held_out, mode=True), "dropout is on"),
    "dropout, rows": (partial(_held_out, mode=True, size=1), "dropout is on"),
    "left in eval": (partial(_held_out, back=False), "eval mode"),
    "means": (partial(_held_out, size=3, weigh=lambda m: 1), "mean of means"),
    "by rows": (partial(_held_out, weigh=lambda m: len(m["labels"])), "padding|predicted tokens"),
    "first tokens": (
        partial(_held_out, size=2, weigh=lambda m: int((m["labels"] != -100).sum())),
        "position 0",
    ),
    "sum": (partial(_held_out, add=lambda total, n: total), "sum over all tokens"),
    "by all labels": (
        lambda model, rows: (
            _held_out(model, rows, add=lambda total, n: total) / rows["labels"].numel()
        ),
        "divided by all labels, padding too",
    ),
    "all rows": (partial(_held_out, size=18), "18 rows"),
    "cache": (partial(_held_out, cache=True), "key-value cache"),
    "bf16": (partial(_held_out, auto=True), "bf16"),
    "some": (partial(_held_out, first=4), "rows are|last rows"),
}


def _backward(
    model,
    lr,
    steps,
    *,
    kind=torch.optim.AdamW,
    decay=None,
    on=lambda p: p.requires_grad,
    order=("step", "free"),
    rate=lambda t, n: 1 - t / n,
    put="register_post_accumulate_grad_hook",
    back=lambda dummy, optimizers: dummy,
):
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    more = {} if decay is None else {"weight_decay": decay}
    optimizers = []
    for p in filter(on, model.parameters()):
        optimizer = kind([{"params": [p]}], lr=lr, **more)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rate(t, steps))

        def hook(grad_or_p, p=p, optimizer=optimizer, schedule=schedule):
            for what in order:
                optimizer.step() if what == "step" else setattr(p, "grad", None)
            schedule.step()

        getattr(p, put)(hook)
        optimizers.append(optimizer)
    return back(LayerWiseDummyOptimizer(lr=lr), optimizers)


def _all_in_the_last_hook(model, lr, steps):
    trained, ready = [p for p in model.parameters() if p.requires_grad], []
    optimizer = torch.optim.AdamW(trained, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)

    def hook(p):
        ready.append(p)
        if len(ready) == len(trained):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            ready.clear()

    for p in trained:
        p.register_post_accumulate_grad_hook(hook)
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr)


RIGHT["5.9"] = {
    "closures": _backward,
    "fused": partial(_backward, kind=partial(torch.optim.AdamW, fused=True)),
    "its own dummy": partial(
        _backward,
        back=lambda dummy, optimizers: torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1),
    ),
}
WRONG["5.9"] = {
    "one rate": (lambda m, lr, n: _backward(m, 1e-3, n), "use both `lr`"),
    "ordinary": (
        lambda m, lr, n: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr),
        "ordinary AdamW",
    ),
    "not freed": (partial(_backward, order=("step",)), "free each one in its hook"),
    "freed first": (partial(_backward, order=("free", "step")), "no weight has moved"),
    "frozen too": (partial(_backward, on=lambda p: True), "frozen parameter"),
    "vectors alone": (
        partial(_backward, on=lambda p: p.requires_grad and p.dim() == 1),
        "17 of 75 parameters",
    ),
    "SGD": (partial(_backward, kind=torch.optim.SGD), "not as under torch's AdamW"),
    "no decay": (partial(_backward, decay=0.0), "not as under torch's AdamW"),
    "square": (partial(_backward, rate=lambda t, n: (1 - t / n) ** 2), "falls linearly"),
    "no schedule": (partial(_backward, rate=lambda t, n: 1), "learning rate never falls"),
    "a list": (partial(_backward, back=lambda dummy, optimizers: optimizers), "takes an optimizer"),
    "nothing": (
        partial(_backward, back=lambda dummy, optimizers: None),
        "takes an optimizer|return",
    ),
    "all at the end": (_all_in_the_last_hook, "not yet: for the card.*budget"),
}


def answer(line, script):
    return lambda: (line, script)


def resumes(load=torch.load, *, drop="before", read="step"):
    def script(model, optimizer, file, batches):
        saved = load(file)
        model.load_state_dict(saved["model"])
        if drop == "weights":
            del saved["model"]
        optimizer.load_state_dict(saved["optimizer"])
        if drop == "states":
            del saved["optimizer"]
        start = saved[read] if read else 0
        if drop == "before":
            del saved
        losses = train_on(model, optimizer, batches[start:])
        if drop == "after":
            del saved
        return losses

    return script


def in_a_function(model, optimizer, file, batches):
    def load():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]

    return train_on(model, optimizer, batches[load() :])


def popped(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved.pop("model"))
    optimizer.load_state_dict(saved.pop("optimizer"))
    return train_on(model, optimizer, batches[saved["step"] :])


RIGHT["5.11"] = {
    "del before the training": answer(2, resumes()),
    "the weights alone": answer(2, resumes(drop="weights")),
    "a function of its own": answer(2, in_a_function),
    "popped": answer(2, popped),
}


def collected(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    gc.collect()
    return train_on(model, optimizer, batches[saved["step"] :])


def copied(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    return train_on(model, optimizer, batches[saved["step"] :])


def assigned(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"], assign=True)
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
    del saved
    return train_on(model, optimizer, batches[start:])


def weights_alone(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    start = saved["step"]
    del saved
    return train_on(model, optimizer, batches[start:])


ON_THE_HOST = resumes(lambda file: torch.load(file, map_location="cpu"), drop="")


WRONG["5.11"] = {
    "on the host, and kept": (answer(2, ON_THE_HOST), "still there while the model trains"),
    "del after the training": (answer(2, resumes(drop="after")), "before the training"),
    "del of the states": (answer(2, resumes(drop="states")), "very tensors"),
    "collected": (answer(2, collected), r"gc\.collect\(\)"),
    "copied once more": (answer(2, copied), "still there|too many"),
    "assigned": (answer(2, assigned), "assign=True"),
    "no states": (answer(2, weights_alone), "AdamW begins with moments of zero"),
    "from the start": (answer(2, resumes(read="")), "first batch again"),
    "line 3": (answer(3, resumes()), "copies the loaded weights"),
    "line 4": (answer(4, resumes()), "very tensors"),
    "line 5": (answer(5, resumes()), "needs a number"),
    "as text": (answer("saved = torch.load(file)", resumes()), "whole number"),
}


HELD = []


def keeps(copy_of, *, at_load=False, until_training=False):
    """A script that makes another copy of the checkpoint, outside of tensors."""

    def script(model, optimizer, file, batches):
        kept = copy_of(file) if at_load else None
        file.seek(0)
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if not at_load:
            kept = copy_of(saved["model"])
        start = saved["step"]
        del saved
        if until_training:
            del kept
        losses = train_on(model, optimizer, batches[start:])
        HELD.clear()
        return losses

    return script


def arrays_of(weights):
    return {name: weight.numpy().copy() for name, weight in weights.items()}


def lists_of(weights):
    return {name: weight.tolist() for name, weight in weights.items()}


def held_elsewhere(weights):
    HELD.append(arrays_of(weights))


def saved_again(weights):
    other = io.BytesIO()
    torch.save(weights, other)
    return other


def by_arrays(model, optimizer, file, batches):
    saved = torch.load(file)
    start, arrays = saved["step"], arrays_of(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    del saved
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    del arrays
    return train_on(model, optimizer, batches[start:])


RIGHT["5.11"] |= {
    "arrays, let go in time": answer(2, keeps(arrays_of, until_training=True)),
    "the file's bytes, let go": answer(
        2, keeps(io.BytesIO.read, at_load=True, until_training=True)
    ),
    "the file's own bytes": answer(2, keeps(io.BytesIO.getvalue, at_load=True)),
    "by way of arrays": answer(2, by_arrays),
}
COPIED = "copy of the checkpoint is still there.*outside of tensors there are about"
WRONG["5.11"] |= {
    "arrays": (answer(2, keeps(arrays_of)), f"(?i){COPIED}"),
    "lists": (answer(2, keeps(lists_of)), f"(?i){COPIED}"),
    "arrays in a list of the cell": (answer(2, keeps(held_elsewhere)), f"(?i){COPIED}"),
    "saved again": (answer(2, keeps(saved_again)), f"(?i){COPIED}"),
    "the file's bytes": (answer(2, keeps(io.BytesIO.read, at_load=True)), f"(?i){COPIED}"),
    "a copy of the file": (answer(2, keeps(copy.deepcopy, at_load=True)), f"(?i){COPIED}"),
}


def _step(model, optimizer, batch, *, forward=None, rows=None, scale=1.0, zero=True, steps=1):
    outputs = (forward or (lambda model, x: model(x)))(model, batch["x"][:rows])
    loss = F.cross_entropy(outputs, batch["labels"][:rows])
    (scale * loss).backward()
    for _ in range(steps):
        optimizer.step()
    if zero:
        optimizer.zero_grad()
    return loss.item()


def _per_block(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return model.head(x)


def _with_segments(model, optimizer, batch, every=2, **how):
    with checkpoint_layers(model.blocks, every=every):
        return _step(model, optimizer, batch, **how)


RIGHT["5.10"] = {
    "segments of two": _with_segments,
    "by hand": partial(_step, forward=_per_block),
    "sqrt": partial(_with_segments, every="sqrt"),
}


def _blocks_by_hand(model, x, *, preserve=True):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=preserve)
    return model.head(x)


def _in_halves(model, optimizer, batch):
    total = 0.0
    for micro in split(batch, 32):
        loss = F.cross_entropy(model(micro["x"]), micro["labels"]) / 2
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _in_evaluation(model, optimizer, batch):
    model.eval()
    loss = _step(model, optimizer, batch)
    model.train()
    return loss


def _pieces_and_checkpoints(model, optimizer, batch):
    total = 0.0
    with checkpoint_layers(model.blocks, every=1):
        for micro in split(batch, 16):
            loss = F.cross_entropy(model(micro["x"]), micro["labels"]) / 4
            loss.backward()
            total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


WRONG["5.10"] = {
    "halves": (_in_halves, "another update"),
    "pieces and checkpoints": (_pieces_and_checkpoints, "another update"),
    "no dropout": (_in_evaluation, "evaluation mode"),
    "other numbers": (
        partial(_step, forward=partial(_blocks_by_hand, preserve=False)),
        "second run of a block",
    ),
    "half of the rows": (partial(_with_segments, every=1, rows=32), "32 of the 64 rows"),
    "two steps": (partial(_with_segments, every=1, steps=2), "2 times as far"),
    "gradients stay": (partial(_with_segments, every=1, zero=False), "zero_grad"),
    "a step too long": (partial(_with_segments, every=1, scale=2.0), "2 times as far"),
}


def _clips_window(clip, each=False):
    """Exercise 5.4's gradient, clipped by ``clip(parameters)``, which nobody asked for."""

    def train_and_log(model, window):
        counts = [count_targets(micro["labels"]) for micro in window]
        logged = 0.0
        for micro, count in zip(window, counts, strict=True):
            loss = model(**micro).loss * (count / sum(counts))
            loss.backward()
            logged += loss.item()
            if each:
                clip(model.parameters())
        if not each:
            clip(model.parameters())
        return logged

    return train_and_log


_CLIPPED = "is clipped to .*no clipping"
_TO_ONE = partial(nn.utils.clip_grad_norm_, max_norm=1.0)
WRONG["5.4"] |= {
    "clipped to 1": (_clips_window(_TO_ONE), _CLIPPED),
    "each clipped to 1": (_clips_window(_TO_ONE, each=True), _CLIPPED),
    "clipped to 10": (_clips_window(partial(nn.utils.clip_grad_norm_, max_norm=10.0)), _CLIPPED),
    "values": (_clips_window(partial(nn.utils.clip_grad_value_, clip_value=1.0)), _CLIPPED),
}
RIGHT["5.4"] |= {
    "to infinity": _clips_window(partial(nn.utils.clip_grad_norm_, max_norm=float("inf"))),
}


def _fused(model, lr, steps):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


WRONG["5.9"] |= {"fused, after backward": (_fused, "an ordinary AdamW")}


def _backward_outside(model, optimizer, batch):
    with checkpoint_layers(model.blocks, every=1):
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# A segment runs again as it ran first, even where the block with the checkpoints has ended.
RIGHT["5.10"] |= {"backward outside of the block": _backward_outside}


def _resumes_from(step, mode=True):
    """Exercise 5.11's script, from ``step(saved)`` on, and in train mode or not."""

    def script(model, optimizer, file, batches):
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        rest = batches[step(saved) :]
        del saved
        model.train(mode)
        return train_on(model, optimizer, rest)

    return lambda: (2, script)


WRONG["5.11"] |= {
    "always from batch 2": (_resumes_from(lambda saved: 2), "right for these arguments alone"),
    "in eval mode": (_resumes_from(lambda saved: saved["step"], mode=False), "left in eval mode"),
    "one batch later": (_resumes_from(lambda saved: saved["step"] + 1), "weights at the end"),
}


def _loads_and_counts(model, optimizer, file):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def _with_a_function(model, optimizer, file, batches):
    return train_on(model, optimizer, batches[_loads_and_counts(model, optimizer, file) :])


def _clears(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    saved.clear()
    return train_on(model, optimizer, batches[step:])


RIGHT["5.11"] |= {
    "the step": _resumes_from(lambda saved: saved["step"]),
    "loaded in a function": lambda: (2, _with_a_function),
    "cleared": lambda: (2, _clears),
}


def _loads_twice(model, optimizer, file, batches, *, back=False):
    model.load_state_dict(torch.load(file)["model"])
    if back:
        file.seek(0)
    saved = torch.load(file)
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    del saved
    return train_on(model, optimizer, batches[step:])


def _read_to_its_end(model, optimizer, file, batches):
    file.read()
    return _loads_twice(model, optimizer, file, batches)


_READ_AGAIN = "not yet: torch.load begins where the file object stands"
WRONG["5.11"] |= {
    "loaded twice": (answer(2, _loads_twice), _READ_AGAIN),
    "read to its end": (answer(2, _read_to_its_end), _READ_AGAIN),
}
RIGHT["5.11"] |= {"loaded twice, from its beginning": answer(2, partial(_loads_twice, back=True))}


def _falls_by(schedule):
    """One epoch with this schedule: (optimizer, updates of the warm-up, updates in all)."""

    def train_epoch(optimizer, micro_batches, window, warmup, accumulate):
        updates = math.ceil(len(micro_batches) / window)
        scheduler = schedule(optimizer, round(warmup * updates), updates)
        for start in range(0, len(micro_batches), window):
            accumulate(micro_batches[start : start + window])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return train_epoch


def _constant(optimizer, warm, updates):
    return get_constant_schedule_with_warmup(optimizer, warm)


WRONG["5.3"] |= {
    "a cosine": (_falls_by(get_cosine_schedule_with_warmup), "not fall in a straight line"),
    "constant": (_falls_by(_constant), "stays as it is"),
}


def _climbs_by(rate):
    """``rate``: of an update of the warm-up, from its number and the warm-up's length."""

    def schedule(optimizer, warm, updates):
        def share(update):
            if update < warm:
                return rate(update, warm)
            return (updates - update) / (updates - warm)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, share)

    return _falls_by(schedule)


WRONG["5.3"] |= {
    "a warm-up from 1 / w": (
        _climbs_by(lambda update, warm: (update + 1) / warm),
        "the warm-up begins at 0.5 of the learning rate: it begins at 0",
    ),
    "a warm-up from 1 / (w + 1)": (
        _climbs_by(lambda update, warm: (update + 1) / (warm + 1)),
        "the warm-up begins at 0.333 of the learning rate",
    ),
    "a warm-up from a tenth": (
        _climbs_by(lambda update, warm: max(update / warm, 0.1)),
        "the warm-up begins at 0.1 of the learning rate",
    ),
}


def _one_update(
    model,
    optimizer,
    batch,
    *,
    forward=_per_block,
    around=contextlib.nullcontext,
    zero=True,
    loss_after=False,
    first=lambda optimizer: None,
    result=torch.Tensor.item,
):
    """Exercise 5.10's update, with a checkpoint on each block."""
    first(optimizer)
    with around():
        loss = F.cross_entropy(forward(model, batch["x"]), batch["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=zero)
    if loss_after:
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])
    return result(loss)


def _without_head(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def _reentrant(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return model.head(x)


def _at_once(model, x):
    return checkpoint(model, x, use_reentrant=False)


def _draws_first(model, x):
    torch.rand(3)
    return _per_block(model, x)


_BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
RIGHT["5.10"] |= {
    "zeros stay": partial(_one_update, zero=False),
    "cleared before the step too": partial(_one_update, first=lambda o: o.zero_grad()),
    "a detached loss": partial(_one_update, result=torch.Tensor.detach),
}
WRONG["5.10"] |= {
    "autocast": (partial(_one_update, around=_BF16), "forward computes in bfloat16"),
    "without the head": (partial(_one_update, forward=_without_head), "model.head never runs"),
    "reentrant": (partial(_one_update, forward=_reentrant), "only the head's weights have moved"),
    "one checkpoint": (partial(_one_update, forward=_at_once), "on each block by itself"),
    "draws first": (partial(_one_update, forward=_draws_first), "draws other numbers"),
    "loss after the update": (
        partial(_one_update, loss_after=True),
        "the update is right, but the loss is another one",
    ),
    "a loss with a graph": (partial(_one_update, result=lambda loss: loss), "keeps its graph"),
}


def _updates_of(body, *, after=None):
    """Exercise 5.5's updates: ``body(model, batch, optimizer, loss)`` for each batch."""

    def train_mixed(model, batches, lr):
        model.float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for batch in batches:
            with _BF16():
                loss = model(**batch).loss
            loss.backward()
            body(optimizer)
        if after:
            after(optimizer)
        return optimizer

    return train_mixed


def _new_each_time(model, batches, lr):
    model.float()
    for batch in batches:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        with _BF16():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


_NO_UPDATE = "has not updated any weight"
WRONG["5.5"] |= {
    "a new optimizer each time": (_new_each_time, "has made 1 update, but should have made 3"),
    "one step after the loop": (
        _updates_of(lambda o: None, after=lambda o: o.step()),
        "has made 1 update, but should have made 3",
    ),
    "two steps each": (
        _updates_of(lambda o: (o.step(), o.step(), o.zero_grad())),
        "has made 6 updates, but should have made 3",
    ),
    "cleared before the step": (_updates_of(lambda o: (o.zero_grad(), o.step())), _NO_UPDATE),
    "no step": (_updates_of(lambda o: o.zero_grad()), _NO_UPDATE),
}


def _scaled_by(share):
    """``share(update, warm, updates)`` of the learning rate."""

    def schedule(optimizer, warm, updates):
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: share(update, warm, updates)
        )

    return _falls_by(schedule)


def _one_at_a_time(optimizer, micro_batches, window, warmup, accumulate):
    for micro in micro_batches:
        accumulate(micro)


def _stacked(optimizer, micro_batches, window, *given):
    accumulate = given[-1]
    _epoch(optimizer, micro_batches, window, given[0], lambda some: accumulate(torch.stack(some)))


RIGHT["5.3"] |= {"a stack of micro-batches": _stacked}
WRONG["5.3"] |= {
    "the fall forgets the warm-up": (
        _scaled_by(lambda u, warm, n: u / warm if u < warm else 1 - u / n),
        "the highest learning rate of an update is 0.8 of the given one",
    ),
    "0 in the last update": (
        _scaled_by(lambda u, warm, n: u / warm if u < warm else (n - 1 - u) / (n - 1 - warm)),
        "ends before the epoch: the last update has a learning rate of 0",
    ),
    "a bent warm-up": (
        _scaled_by(lambda u, warm, n: (u / warm) ** 2 if u < warm else (n - u) / (n - warm)),
        "the warm-up does not climb in a straight line",
    ),
    "one micro-batch, no list": (_one_at_a_time, "takes a list of micro-batches"),
}


def _other_name(of):
    """The resumed run whose weights have a name beside ``saved``, which alone is deleted."""

    def script(model, optimizer, file, batches):
        saved = torch.load(file)
        start, weights, states = saved["step"], of(saved), saved["optimizer"]
        del saved
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        return train_on(model, optimizer, batches[start:])

    return script


WRONG["5.11"] |= {
    "another name": (
        answer(2, _other_name(lambda saved: saved["model"])),
        "`saved`, or another name for them",
    ),
}


def _adapters(model, names, rank, lr, *, freeze=True, trained=("A", "B"), handed=("A", "B")):
    """Exercise 5.6, where ``trained`` matrices require a gradient, and some are ``handed`` over."""
    _lora(model, names, rank, lr, freeze=freeze)
    given = []
    for path, parameter in model.named_parameters():
        own = path.rpartition(".")[2]
        if own in ("A", "B"):
            parameter.requires_grad_(own in trained)
            if own in handed:
                given.append(parameter)
    return torch.optim.AdamW(given, lr=lr)


WRONG["5.6"] |= {
    "B alone": (partial(_adapters, handed=("B",)), "0 of 6 matrices A move, and 6 matrices B"),
    "B frozen": (partial(_adapters, trained=("A",), handed=("A",)), "too few require a gradient"),
    "not frozen, not handed over": (
        partial(_adapters, freeze=False),
        "numbers too many require a gradient",
    ),
}


def _late_binding(model, lr, steps):
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = {p: torch.optim.AdamW([p], lr=lr) for p in trained}
    schedules = {
        p: torch.optim.lr_scheduler.LinearLR(optimizers[p], 1.0, 0.0, steps) for p in trained
    }
    for p in optimizers:

        def hook(_):
            optimizers[p].step()  # noqa: B023 (the mistake)
            schedules[p].step()  # noqa: B023
            optimizers[p].zero_grad()  # noqa: B023

        p.register_post_accumulate_grad_hook(hook)
    return LayerWiseDummyOptimizer(optimizer_dict=optimizers, lr=lr)


def _no_hook(model, lr, steps):
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    return LayerWiseDummyOptimizer(optimizer_dict=dict.fromkeys(trained, optimizer), lr=lr)


WRONG["5.9"] |= {
    "the loop's last": (_late_binding, "1 of 75 parameters move.*the loop's last value"),
    "no hook": (_no_hook, "no optimizer has stepped on a gradient"),
}


def _divided_by(number):
    """Exercise 5.7's sum over all tokens, divided by ``number`` of the pieces."""

    def held_out_loss(model, rows):
        total = _held_out(model, rows, add=lambda total, n: total)
        return total / number(list(split(rows, 4)))

    return held_out_loss


WRONG["5.7"] |= {
    "by the pieces": (_divided_by(len), "divided by the number of pieces"),
    "by the last piece": (
        _divided_by(lambda pieces: count_targets(pieces[-1]["labels"])),
        "divided by the predicted tokens of the last piece",
    ),
}
