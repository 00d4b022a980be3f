"""Answers to the exercises of lesson 06 as people write them; see lesson_00.py."""

import gc
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gradmem_lib import Recipe, accumulate_gradients, checkpoint_layers, split

RIGHT, WRONG = {}, {}


def _error(asked, total, free, process, allocated, idle, *, context=None, others=None, pieces=None):
    return {
        "context": process - allocated - idle
        if context is None
        else context(total, free, process, allocated, idle),
        "others": total - free - process
        if others is None
        else others(total, free, process, allocated, idle),
        "in_pieces": free + idle >= asked if pieces is None else pieces(asked, total, free, idle),
    }


def _reserved_first(asked, total, free, process, allocated, idle):
    reserved = allocated + idle
    used = total - free
    return {
        "others": used - process,
        "in_pieces": not asked > free + idle,
        "context": process - reserved,
    }


RIGHT["6.1"] = {
    "by the sums": _error,
    "in steps": _reserved_first,
    "numbers of torch": lambda *six: {k: torch.tensor(v) for k, v in _error(*six).items()},
}
WRONG["6.1"] = {
    "idle forgotten": (partial(_error, context=lambda t, f, p, a, i: p - a), "idle"),
    "others in the context": (
        partial(_error, context=lambda t, f, p, a, i: t - f - a - i),
        "other processes",
    ),
    "all that is used": (partial(_error, others=lambda t, f, p, a, i: t - f), "this process"),
    "free too": (partial(_error, others=lambda t, f, p, a, i: t - p), "free bytes"),
    "beside the tensors": (
        partial(_error, others=lambda t, f, p, a, i: t - f - a),
        "allocated|this process",
    ),
    "idle alone": (partial(_error, pieces=lambda asked, t, f, i: i >= asked), "free"),
    "always": (partial(_error, pieces=lambda asked, t, f, i: True), "is always True"),
    "never": (partial(_error, pieces=lambda asked, t, f, i: False), "is always False"),
    "a sum": (
        partial(_error, pieces=lambda asked, t, f, i: f + i + asked),
        "return True or False: this is a number",
    ),
    "a sum, as a truth": (
        partial(_error, pieces=lambda asked, t, f, i: bool(f + i + asked)),
        "is always True",
    ),
    "too little free": (
        partial(_error, pieces=lambda asked, t, f, i: asked > f),
        "every out-of-memory error|asked",
    ),
    "to the byte": (
        partial(_error, pieces=lambda asked, t, f, i: f + i > asked),
        "compare with >=",
    ),
    "a tuple": (lambda *six: tuple(_error(*six).values()), "dict|sequence"),
}


def _rows(
    moments, rows, new, *, grows=("activations", "temporaries", "other"), steps=(), which=max
):
    def at(phase):
        names = grows if phase != "optimizer_step" else steps
        return sum(n * (new / rows if name in names else 1) for name, n in moments[phase].items())

    return which(at(phase) for phase in moments)


def _by_copy(moments, rows, new):
    largest = 0
    for phase, parts in moments.items():
        parts = dict(parts)
        if phase in ("forward", "backward"):
            for name in ("activations", "temporaries", "other"):
                parts[name] = parts[name] * new // rows
        largest = max(largest, sum(parts.values()))
    return largest


def _fixed_and_not(moments, rows, new):
    totals = [sum(moments["optimizer_step"].values())]
    for phase in ("forward", "backward"):
        stay = sum(moments[phase][name] for name in ("parameters", "gradients", "optimizer"))
        totals.append(stay + (sum(moments[phase].values()) - stay) / rows * new)
    return torch.tensor(totals).max()


def _only_the_peak(moments, rows, new):
    peak = max(moments, key=lambda phase: sum(moments[phase].values()))
    return _rows({peak: moments[peak]}, rows, new)


RIGHT["6.2"] = {"by phase": _rows, "by copy": _by_copy, "fixed": _fixed_and_not}
ALL = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")
WRONG["6.2"] = {
    "all of it": (partial(_rows, grows=ALL, steps=ALL), "weights|everything"),
    "activations alone": (partial(_rows, grows=("activations",)), "temporaries"),
    "gradients too": (
        partial(_rows, grows=("gradients", "activations", "temporaries", "other")),
        "gradients",
    ),
    "the step's too": (partial(_rows, steps=("temporaries",)), "optimizer's step|own"),
    "one moment": (_only_the_peak, "moment"),
    "a sum": (partial(_rows, which=sum), "sum|one after"),
    "nothing": (
        lambda moments, rows, new: max(sum(m.values()) for m in moments.values()),
        "rows|new",
    ),
    "upside down": (lambda moments, rows, new: _rows(moments, new, rows), "upside|new / rows"),
    "the ids stay": (partial(_rows, grows=("activations", "temporaries")), "`other`"),
}


def _loss(model, images, labels, reduction="mean"):
    return F.cross_entropy(model(images), labels, reduction=reduction)


def _end(optimizer, zero=True):
    optimizer.step()
    if zero:
        optimizer.zero_grad()


def _layers(every, size=30):
    def answer(model, optimizer, images, labels):
        with checkpoint_layers(model.blocks, every):
            total = 0.0
            for x, y in split((images, labels), size):
                loss = _loss(model, x, y, "sum") / len(labels)
                loss.backward()
                total += loss.item()
        _end(optimizer)
        return total

    return answer


def _library(model, optimizer, images, labels):
    def loss_and_count(micro):
        return _loss(model, *micro, "sum"), len(micro[1])

    found = accumulate_gradients(
        split((images, labels), 6), loss_and_count, total_items=len(labels)
    )
    _end(optimizer)
    return found.loss


def _by_hand(model, optimizer, images, labels):
    own = [block.forward for block in model.blocks]
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    loss = _loss(model, images, labels)
    loss.backward()
    for block, forward in zip(model.blocks, own, strict=True):
        block.forward = forward
    _end(optimizer)
    return loss


def _pieces(
    model,
    optimizer,
    images,
    labels,
    *,
    size=8,
    share=None,
    steps=False,
    zero=True,
    once=False,
    auto=False,
):
    total, losses = 0.0, []
    for x, y in split((images, labels), size):
        with torch.autocast("cpu", torch.bfloat16, enabled=auto):
            loss = _loss(model, x, y) * (
                len(y) / len(labels) if share is None else share(len(y), len(labels))
            )
        if once:
            losses.append(loss)
        else:
            loss.backward()
        total += loss.item()
        if steps:
            _end(optimizer)
    if once:
        sum(losses).backward()
    if not steps:
        _end(optimizer, zero)
    return total


RIGHT["6.3"] = {
    "a checkpoint a block": _layers(1),
    "roots": _layers("sqrt"),
    "both": _layers(2, 10),
    "the library": _library,
    "by hand": _by_hand,
    "pieces": _pieces,
}


def _left_on(model, optimizer, *batch):
    """Works once: nothing takes the checkpoints off the model again."""
    checkpoint_layers(getattr(model, "blocks", model), 1)
    if isinstance(batch[0], dict):
        return _t5(model, optimizer, *batch, every=None)
    return _pieces(model, optimizer, *batch)


def _length_of_a_pair(model, optimizer, images, labels):
    pieces = list(zip(images.split(8), labels.split(8), strict=True))

    def loss_and_count(piece):
        return F.cross_entropy(model(piece[0]), piece[1], reduction="sum"), len(piece)

    loss = accumulate_gradients(pieces, loss_and_count).loss
    optimizer.step()
    optimizer.zero_grad()
    return loss


WRONG["6.3"] = {
    "the length of a pair": (_length_of_a_pair, "len of a pair"),
    "checkpoints left on": (_left_on, "checkpoints stay on after the call"),
    "as it was": (partial(_pieces, size=30), "all 30 rows"),
    "halves": (partial(_pieces, size=16), "16 rows"),
    "one in two checkpointed": (_layers([4, 4]), "checkpoint"),
    "mean of means": (
        partial(_pieces, share=lambda n, all: n / all * 8 / n),
        "same weight|mean of means|times",
    ),
    "sum of means": (partial(_pieces, share=lambda n, all: 1), "adds up the means|too large"),
    "means for sums": (partial(_pieces, share=lambda n, all: 1 / all), "as if they were sums"),
    "steps each": (partial(_pieces, steps=True), "4 updates"),
    "never zeroed": (partial(_pieces, zero=False), "zero_grad"),
    "one backward": (partial(_pieces, once=True), "one backward|graph"),
    "bf16": (partial(_pieces, auto=True), "16-bit numbers, as under autocast"),
    "some": (lambda m, o, x, y: _pieces(m, o, x[:15], y[:15]), "15|rows"),
}


def _t5(model, optimizer, batch, *, size=4, every=1, count=None, k=False, steps=False, only=None):
    count = count or (lambda labels: int((labels != -100).sum()))
    every_list = [model] if only is None else [getattr(model, only).block]
    handles = [checkpoint_layers(layers, every) for layers in every_list] if every else []
    micros, total = list(split(batch, size)), 0.0
    for micro in micros:
        share = 1 / len(micros) if k else count(micro["labels"]) / count(batch["labels"])
        loss = model(**micro).loss * share
        loss.backward()
        total += loss.item()
        if steps:
            _end(optimizer)
    for handle in handles:
        handle.remove()
    if not steps:
        _end(optimizer)
    return total


def _t5_library(model, optimizer, batch):
    def mean_and_count(micro):
        return model(**micro).loss, int((micro["labels"] != -100).sum())

    with checkpoint_layers(model.encoder.block, 1), checkpoint_layers(model.decoder.block, 1):
        found = accumulate_gradients(
            list(split(batch, 2)),
            mean_and_count,
            reduction="mean",
            count_items=lambda m: int((m["labels"] >= 0).sum()),
        )
    _end(optimizer)
    return found.loss


def _t5_switch(model, optimizer, batch, left_on=False):
    model.activation_checkpointing_enable() if hasattr(
        model, "activation_checkpointing_enable"
    ) else (model.gradient_checkpointing_enable())
    loss = _t5(model, optimizer, batch, size=3, every=None)
    if not left_on:
        model.gradient_checkpointing_disable()
    return loss


RIGHT["6.4"] = {
    "both": _t5,
    "one row": partial(_t5, size=1, every=None),
    "the library": _t5_library,
    "the switch": _t5_switch,
}
WRONG["6.4"] = {
    "the switch left on": (
        partial(_t5_switch, left_on=True),
        "it was off before",
    ),
    "checkpoints left on": (_left_on, "checkpoints stay on after the call"),
    "as it was": (partial(_t5, size=16, every=None), "all 16 rows"),
    "checkpoints alone": (partial(_t5, size=16), "checkpoint"),
    "pieces alone": (partial(_t5, every=None), "4 rows"),
    "encoder alone": (partial(_t5, size=8, only="encoder"), "decoder"),
    "shifted": (
        partial(_t5, count=lambda labels: int((labels[:, 1:] != -100).sum())),
        "position 0|shift",
    ),
    "padding": (partial(_t5, count=lambda labels: labels.numel()), "padding|same weight"),
    "by K": (partial(_t5, k=True), "same weight|mean of means"),
    "steps": (partial(_t5, steps=True), "4 updates"),
}


def _recipe(micro=1, **choices):
    usual = {
        "precision": "bf16",
        "optimizer": "adamw-fused",
        "checkpointing": "per-layer",
        "accumulation": 8 // micro,
    }
    return lambda: (Recipe(**{**usual, **choices}), micro)


def _all_at_once(**choices):
    return _recipe(
        8, **{"in_backward": True, "optimizer": "adafactor", "chunked_loss": True, **choices}
    )


RIGHT["6.5"] = {
    "another Adafactor": _all_at_once(),
    "list": lambda: list(_all_at_once(optimizer="sgd")()),
    "boundaries away": _all_at_once(offload="boundaries"),
}
WRONG["6.5"] = {
    "full": (_recipe(), "weights and gradients alone"),
    "full, no states": (
        _recipe(8, optimizer="sgd", chunked_loss=True),
        "weights and gradients alone",
    ),
    "the ladder's": (_recipe(lora_rank=16), "every weight"),
    "AdamW": (_all_at_once(optimizer="adamw-8bit"), "next to nothing"),
    "no checkpoints": (_all_at_once(checkpointing=None), "checkpointing='per-layer'"),
    "whole logits": (
        _all_at_once(chunked_loss=False),
        "chunked_loss=True makes them piece by piece",
    ),
    "float32": (_all_at_once(precision="float32"), "25.10 GiB"),
    "small batch": (lambda: (_all_at_once()()[0], 4), "global batch"),
    "recipe alone": (lambda: Recipe(precision="bf16"), "two things"),
    "a fraction": (lambda: (_all_at_once()()[0], 1.5), "whole number"),
}

NAMES = ("micro-batches", "checkpointing", "8-bit states", "LoRA", "QLoRA")


def _next(
    phase,
    parts,
    rows,
    card,
    *,
    passes=None,
    one_row=True,
    logits=False,
    base=False,
    order=NAMES,
    enough=True,
    eight=(),
    spikes=True,
    adapters=True,
    own=True,
    nothing="none",
):
    passes = phase != "optimizer_step" if passes is None else passes
    step = phase == "optimizer_step"
    total = sum(parts.values())
    states = parts["optimizer"] + step * parts["temporaries"]
    lora = states + parts["gradients"]
    if not own:
        lora -= step * parts["temporaries"]
    qlora = parts["parameters"] + (lora if adapters else 0)
    takes = {
        "micro-batches": passes
        * (rows > 1 or not one_row)
        * (parts["activations"] + spikes * parts["temporaries"]),
        "checkpointing": passes * (parts["activations"] + logits * parts["temporaries"]),
        "8-bit states": states + sum(parts[name] for name in eight),
        "LoRA": lora + base * parts["parameters"],
        "QLoRA": qlora,
    }
    if not enough:
        return max(order, key=lambda name: takes[name])
    return next((name for name in order if total - takes[name] <= card), nothing)


def _ifs(phase, parts, rows, card):
    left = sum(parts.values()) - card
    step = phase == "optimizer_step"
    if not step and rows > 1 and parts["activations"] + parts["temporaries"] >= left:
        return "Micro-batches"
    if not step and parts["activations"] >= left:
        return "checkpointing"
    own = parts["optimizer"] + (parts["temporaries"] if step else 0)
    for name, more in (
        ("8-bit states", ()),
        ("LoRA", ("gradients",)),
        ("QLoRA", ("gradients", "parameters")),
    ):
        if own + sum(parts[part] for part in more) >= left:
            return name
    return "none"


RIGHT["6.6"] = {
    "a table": _next,
    "ifs": _ifs,
    "keywords": lambda phase, parts, rows, card: _next(phase, dict(parts), rows, card),
}
WRONG["6.6"] = {
    "the phase": (partial(_next, passes=True), "optimizer's step"),
    "one row": (partial(_next, one_row=False), "one row"),
    "logits": (partial(_next, logits=True), "temporaries"),
    "the base": (partial(_next, base=True), "LoRA"),
    "the largest": (partial(_next, enough=False), "enough|most"),
    "backwards": (partial(_next, order=NAMES[::-1]), "price|first|order"),
    "gradients in 8 bits": (
        partial(_next, eight=("gradients",)),
        "8-bit states remove the gradients",
    ),
    "the spike stays": (partial(_next, spikes=False), "only activations"),
    "4 bits without adapters": (partial(_next, adapters=False), "LoRA too"),
    "adapters keep the step's": (partial(_next, own=False), "LoRA and QLoRA leave"),
    "None for none": (partial(_next, nothing=None), 'the word "none"'),
    "always": (lambda phase, parts, rows, card: "checkpointing", "for every breakdown"),
    "the step's own": (
        lambda phase, parts, rows, card: (
            _next("backward", parts, 1, card)
            if phase == "optimizer_step"
            else _next(phase, parts, rows, card)
        ),
        "optimizer's step",
    ),
}


def answer(line, script):
    return lambda: (line, script)


def evaluates(keep, *, size=16, mean=None, graph=False, after=None, back=True):
    def script(model, batches):
        model.eval()
        kept, labels = [], []
        with torch.set_grad_enabled(graph):
            for x, y in batches:
                for part in x.split(size):
                    logits = model(part)
                    kept.append(keep(logits))
                    if after:
                        del logits
                        after()
                labels.append(y)
        if back:
            model.train()
        if mean:
            return mean(kept, labels)
        found = torch.cat(kept)
        found = found.argmax(-1) if found.ndim == 2 else found
        return (found == torch.cat(labels)).float().mean().item()

    return script


def counted(model, batches):
    model.eval()
    hits = rows = 0
    with torch.inference_mode():
        for x, y in batches:
            hits += (model(x).max(dim=-1).indices == y).sum().item()
            rows += len(y)
    model.train()
    return hits / rows


def to_lists(model, batches):
    was = model.training
    model.eval()
    hits = []
    with torch.no_grad():
        for x, y in batches:
            hits += (model(x).argmax(-1) == y).tolist()
    model.train(was)
    return sum(hits) / len(hits)


def argmax(logits):
    return logits.argmax(-1)


def hits_and_rows(model, batches):
    """Counts, and does not switch the model to evaluation."""
    hits = rows = 0
    with torch.no_grad():
        for x, y in batches:
            hits += (model(x).argmax(-1) == y).sum().item()
            rows += len(y)
    return hits / rows


def restores_the_mode(model, batches):
    was = model.training
    model.eval()
    accuracy = hits_and_rows(model, batches)
    model.train(was)
    return accuracy


RIGHT["6.7"] = {
    "restores the mode": answer(7, restores_the_mode),
    "argmax": answer(7, evaluates(argmax)),
    "counted": answer(7, counted),
    "lists": answer(7, to_lists),
    "a whole float": answer(7.0, counted),
    "smaller batches too": answer(7, evaluates(argmax, size=4)),
}


def means_of_batches(kept, labels):
    means = [(a == b).float().mean() for a, b in zip(kept, labels, strict=True)]
    return torch.stack(means).mean().item()


def of_arrays(kept, labels):
    found = torch.cat([torch.from_numpy(logits.argmax(-1)) for logits in kept])
    return (found == torch.cat(labels)).float().mean().item()


def half_the_data(model, batches):
    return evaluates(argmax)(model, batches[: len(batches) // 2])


WRONG["6.7"] = {
    "never in eval": (answer(7, hits_and_rows), "stays in training mode"),
    "detached": (
        answer(7, evaluates(lambda logits: logits.detach())),
        "1,000 numbers of every row",
    ),
    "on the host": (answer(7, evaluates(lambda logits: logits.cpu())), "1,000 numbers of every"),
    "in bf16": (answer(7, evaluates(lambda logits: logits.bfloat16())), "still kept"),
    "smaller batches": (answer(7, evaluates(lambda logits: logits, size=2)), "smaller|1,000"),
    "emptied": (
        answer(7, evaluates(lambda logits: logits, after=gc.collect)),
        r"1,000 numbers|gc\.collect\(\)",
    ),
    "probabilities": (answer(7, evaluates(lambda logits: logits.softmax(-1))), "1,000 numbers"),
    "with a graph": (answer(7, evaluates(lambda logits: logits, graph=True)), "no_grad|1,000"),
    "mean of means": (answer(7, evaluates(argmax, mean=means_of_batches)), "means"),
    "in numpy": (
        answer(7, evaluates(lambda logits: logits.numpy().copy(), mean=of_arrays)),
        "arrays",
    ),
    "half the data": (answer(7, half_the_data), "first batches|something else"),
    "left in eval": (answer(7, evaluates(argmax, back=False)), "eval mode"),
    "line 6": (answer(6, counted), "take their place"),
    "line 8": (answer(8, counted), "kept before"),
    "line 4": (answer(4, counted), "no graph is recorded"),
    "line 99": (answer(99, counted), "line 99 keeps no tensor"),
}


def _clips_images(clip, each=False):
    """Exercise 6.3's update, clipped by ``clip(parameters)``, which nobody asked for."""

    def train_small(model, optimizer, images, labels):
        total = 0.0
        for x, y in zip(images.split(8), labels.split(8), strict=True):
            loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
            loss.backward()
            total += loss.item()
            if each:
                clip(model.parameters())
        if not each:
            clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return train_small


_CLIPPED = "is clipped to .*no clipping"
_TO_ONE = partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0)
WRONG["6.3"] |= {
    "clipped to 1": (_clips_images(_TO_ONE), _CLIPPED),
    "each clipped to 1": (_clips_images(_TO_ONE, each=True), _CLIPPED),
    "values": (_clips_images(partial(torch.nn.utils.clip_grad_value_, clip_value=1.0)), _CLIPPED),
}
RIGHT["6.3"] |= {
    "to infinity": _clips_images(partial(torch.nn.utils.clip_grad_norm_, max_norm=float("inf"))),
}


def _evaluates(hits_of, result):
    """Exercise 6.7's script, which keeps ``hits_of(logits, labels)`` and returns ``result``."""

    def script(model, batches):
        model.eval()
        with torch.no_grad():
            hits = torch.cat([hits_of(model(x), y) for x, y in batches]).float()
        model.train()
        return result(hits, len(batches))

    return lambda: (7, script)


def _found(logits, labels):
    return logits.argmax(-1) == labels


def _share(hits, batches):
    return hits.mean().item()


WRONG["6.7"] |= {
    "argmax(0)": (
        _evaluates(lambda logits, labels: logits.argmax(0) == labels, _share),
        "argmax.0. looks along the rows",
    ),
    "percent": (_evaluates(_found, lambda hits, n: 100 * hits.mean().item()), "a percentage"),
    "hits": (_evaluates(_found, lambda hits, n: hits.sum().item()), "the number of hits"),
    "errors": (_evaluates(_found, lambda hits, n: 1 - hits.mean().item()), "that are wrong"),
    "16 rows each": (_evaluates(_found, lambda hits, n: hits.sum().item() / (16 * n)), "has 5"),
}
RIGHT["6.7"] |= {
    "hits": _evaluates(_found, _share),
    "topk": _evaluates(lambda logits, labels: logits.topk(1).indices[:, 0] == labels, _share),
    "max": _evaluates(lambda logits, labels: logits.max(-1).indices == labels, _share),
    "sorted": _evaluates(lambda logits, labels: logits.argsort(-1)[:, -1] == labels, _share),
    "after a softmax": _evaluates(
        lambda logits, labels: logits.softmax(-1).argmax(-1) == labels, _share
    ),
}


def _in_backward(**changed):
    """A recipe for exercise 6.5 that steps in backward, with something ``changed``."""
    given = {"precision": "bf16", "optimizer": "adafactor-torch", "in_backward": True}
    given |= {"checkpointing": "per-layer", "chunked_loss": True}
    return lambda: (Recipe(**given | changed), 8)


WRONG["6.5"] |= {
    "8 bits in backward": (_in_backward(optimizer="adamw-8bit"), "AdamW's states stay"),
}
RIGHT["6.5"] |= {
    "boundaries moved": _in_backward(offload="boundaries"),
    "segments of two": _in_backward(checkpointing=2),
    "activations moved": _in_backward(offload="activations", checkpointing=None),
}


def _backward_after_the_block(model, optimizer, images, labels):
    with checkpoint_layers(model.blocks, 1):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


RIGHT["6.3"] |= {"backward after the block": _backward_after_the_block}


WRONG["6.1"] |= {
    "a tuple": (
        lambda *six: tuple(_error(*six).values()),
        "return a dict with the names 'context', 'others' and 'in_pieces': this is a sequence",
    ),
    "one number": (
        lambda *six: _error(*six)["context"],
        "return a dict with the names 'context', 'others' and 'in_pieces': this is",
    ),
    "other names": (
        lambda *six: dict(zip(("ctx", "other", "in_pieces"), _error(*six).values(), strict=True)),
        "your dict has 'ctx' and 'other', but the names must be 'context', 'others'",
    ),
}


BATCH = ("activations", "temporaries", "other")


def _peak(moments, factor, of=max):
    def moment(phase):
        grows = () if phase == "optimizer_step" else BATCH
        return sum(n * (factor if name in grows else 1) for name, n in moments[phase].items())

    return of(moment(phase) for phase in moments)


RIGHT["6.2"] |= {"by moments": lambda moments, rows, new: _peak(moments, new / rows)}
WRONG["6.2"] |= {
    "the lowest": (lambda moments, rows, new: _peak(moments, new / rows, min), "lowest of the"),
    "one row, times the rows": (
        lambda moments, rows, new: new * _peak(moments, 1 / rows),
        "peak of one row, times the rows",
    ),
    "a whole factor": (
        lambda moments, rows, new: _peak(moments, max(1, new // rows)),
        "rounded to a whole number",
    ),
}


def _first_enough(phase, parts, rows, card, *, fewest=1, choose=lambda enough, takes: enough[0]):
    in_step = phase == "optimizer_step"
    states = parts["optimizer"] + in_step * parts["temporaries"]
    batch = 0 if in_step else parts["activations"]
    takes = {
        "micro-batches": (batch + (not in_step) * parts["temporaries"]) * (rows > fewest),
        "checkpointing": batch,
        "8-bit states": states,
        "LoRA": states + parts["gradients"],
        "QLoRA": states + parts["gradients"] + parts["parameters"],
    }
    enough = [name for name, n in takes.items() if sum(parts.values()) - n <= card]
    return choose(enough, takes) if enough else "none"


ORDER = [*("micro-batches", "checkpointing", "8-bit states", "LoRA", "QLoRA"), "none"]
RIGHT["6.6"] |= {"the first of a list": _first_enough}
WRONG["6.6"] |= {
    "more than two rows": (
        partial(_first_enough, fewest=2),
        "a technique that comes before your answer can be enough",
    ),
    "the one that takes least": (
        partial(_first_enough, choose=lambda enough, takes: min(enough, key=takes.get)),
        "a technique that comes before your answer can be enough",
    ),
    "a list": (lambda *given: [_first_enough(*given)], "return text: one of"),
    "its place": (lambda *given: ORDER.index(_first_enough(*given)), "return text: one of"),
}


def _wrong_entry(name, formula):
    """``formula`` is of the six numbers: requested, capacity, free, process, allocated, idle."""
    return lambda *six: _error(*six) | {name: formula(*six)}


WRONG["6.1"] |= {
    "free, idle and requested bytes added": (
        _wrong_entry("others", lambda a, t, f, p, al, i: t - (f + i + a)),
        "the requested bytes are subtracted from the others' memory: the driver refused",
    ),
    "requested bytes in the context": (
        _wrong_entry("context", lambda a, t, f, p, al, i: p - al - i + a),
        "the requested bytes are added to the context: the driver refused",
    ),
    "free bytes in the context": (
        _wrong_entry("context", lambda a, t, f, p, al, i: p + f - al - i),
        "the card's free bytes are added to the context",
    ),
    "tensors in the context": (
        _wrong_entry("context", lambda a, t, f, p, al, i: p - i),
        "the allocated bytes are not subtracted from the context",
    ),
    "turned round": (
        _wrong_entry("context", lambda a, t, f, p, al, i: al + i - p),
        "the context has the wrong sign",
    ),
    "the process twice": (
        _wrong_entry("others", lambda a, t, f, p, al, i: t - f - 2 * p),
        "this process's bytes are counted 2 times",
    ),
    "all three added, in bytes": (
        _wrong_entry("in_pieces", lambda a, t, f, p, al, i: f + i + a),
        "return True or False: this is a number",
    ),
    "what is left of the card": (
        _wrong_entry("in_pieces", lambda a, t, f, p, al, i: t - p >= a),
        "in_pieces is True in a case where .* too few, and False in a case where .* enough",
    ),
    "requested bytes beside the free ones": (
        _wrong_entry("in_pieces", lambda a, t, f, p, al, i: f + a <= i),
        "in_pieces is False in a case where .* enough: compare",
    ),
}


def _before_one_backward(of_pieces, size=8):
    """All forwards, and then the only backward, through ``of_pieces(model, pieces, rows)``."""

    def train_small(model, optimizer, images, labels):
        pieces = list(split((images, labels), size))
        loss = of_pieces(model, pieces, len(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return train_small


def _sum_of_losses(model, pieces, rows):
    return sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in pieces) / rows


def _joined_logits(model, pieces, rows):
    logits = torch.cat([model(x) for x, _ in pieces])
    return F.cross_entropy(logits, torch.cat([y for _, y in pieces]))


def _retained(model, optimizer, images, labels):
    total = 0.0
    for x, y in split((images, labels), 8):
        loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
        loss.backward(retain_graph=True)
        total = total + loss
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


def _in_eval_mode(rows):
    def train_small(model, optimizer, images, labels):
        model.eval()
        total = 0.0
        with checkpoint_layers(model.blocks, 1):
            for x, y in split((images, labels), rows):
                loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        model.train()
        return total

    return train_small


def _under_autocast(model, optimizer, images, labels):
    total = 0.0
    for x, y in split((images, labels), 8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


_ONCE = "backward runs once, after all forwards: until then the graph of every piece is kept"
WRONG["6.3"] |= {
    "one backward, a row at a time": (_before_one_backward(_sum_of_losses, 1), _ONCE),
    "one backward, joined logits": (_before_one_backward(_joined_logits), _ONCE),
    "every graph retained": (_retained, "pieces of 8 rows fit on this card one after another"),
    "evaluation mode": (_in_eval_mode(30), "Checkpoints do nothing in evaluation mode"),
    "halves in evaluation mode": (_in_eval_mode(16), "in evaluation mode, where checkpoints do"),
    "eight thirtieths of each mean": (
        partial(_pieces, share=lambda n, all: 8 / all),
        "the mean of every micro-batch has the same weight in the gradient, 0.267",
    ),
    "autocast": (_under_autocast, "right one within 5 % of its largest number"),
}
RIGHT["6.3"] |= {"pieces in evaluation mode": _in_eval_mode(8)}


def _t5_once(model, optimizer, batch):
    rows = list(split(batch, 1))
    targets = [(row["labels"] != -100).sum() for row in rows]
    with checkpoint_layers(model, 1):
        means = [model(**row).loss for row in rows]
        loss = sum(m * n for m, n in zip(means, targets, strict=True)) / sum(targets)
        loss.backward()
    _end(optimizer)
    return loss.item()


WRONG["6.4"] |= {"one backward, checkpointed": (_t5_once, _ONCE)}


def _scaled(names, step=()):
    """A peak where these categories are scaled by new / rows."""

    def with_rows(moments, rows, new):
        def moment(phase):
            grows = step if phase == "optimizer_step" else names
            parts = moments[phase].items()
            return sum(n * (new / rows if name in grows else 1) for name, n in parts)

        return max(map(moment, moments))

    return with_rows


WRONG["6.2"] |= {
    "weights and states too": (
        _scaled((*BATCH, "parameters", "gradients", "optimizer")),
        "in forward and backward everything is scaled",
    ),
    "gradients and states too": (
        _scaled((*BATCH, "gradients", "optimizer")),
        "in forward and backward the gradients and the optimizer's states are scaled",
    ),
    "gradients and states, in the step too": (
        _scaled((*BATCH, "gradients", "optimizer"), (*BATCH, "gradients", "optimizer")),
        "`(gradients|optimizer)` is scaled in forward and backward",
    ),
    "temporaries stay": (
        _scaled(("activations", "other")),
        "`temporaries` is not scaled in forward and backward",
    ),
    "times new": (
        lambda moments, rows, new: _peak(moments, new),
        "the factor is `new` itself, as if there had been one row",
    ),
}


def _with_takes(change):
    """``next_technique`` with what ``change(phase, parts)`` says that some take."""

    def next_technique(phase, parts, rows, card):
        in_step = phase == "optimizer_step"
        states = parts["optimizer"] + in_step * parts["temporaries"]
        batch = parts["activations"] + parts["temporaries"]
        takes = {
            "micro-batches": 0 if in_step else batch,
            "checkpointing": 0 if in_step else parts["activations"],
            "8-bit states": states,
            "LoRA": states + parts["gradients"],
            "QLoRA": states + parts["gradients"] + parts["parameters"],
        } | change(phase, parts)
        if rows == 1:
            takes["micro-batches"] = 0
        enough = [name for name in ORDER[:-1] if sum(parts.values()) - takes[name] <= card]
        return enough[0] if enough else "none"

    return next_technique


def _not_in_forward(*names):
    return _with_takes(lambda phase, _: dict.fromkeys(names, 0) if phase == "forward" else {})


RIGHT["6.6"] |= {"a dict": _with_takes(lambda phase, parts: {})}
WRONG["6.6"] |= {
    "8-bit states not in forward": (_not_in_forward("8-bit states"), "6.6 not yet: in forward, "),
    "LoRA not in forward": (_not_in_forward("LoRA"), "6.6 not yet: in forward, "),
    "QLoRA not in forward": (_not_in_forward("QLoRA"), "6.6 not yet: in forward, "),
    "none of the three in forward": (
        _not_in_forward("8-bit states", "LoRA", "QLoRA"),
        "in forward, 8-bit states, LoRA and QLoRA take nothing away here",
    ),
    "LoRA takes no gradients in forward": (
        _with_takes(lambda phase, p: {"LoRA": p["optimizer"]} if phase == "forward" else {}),
        "6.6 not yet: in forward, ",
    ),
    "micro-batches take the temporaries of backward alone": (
        _with_takes(
            lambda phase, p: {"micro-batches": p["activations"]} if phase == "forward" else {}
        ),
        "in forward, micro-batches leave the temporaries here",
    ),
    "8-bit states take the temporaries of forward": (
        _with_takes(
            lambda phase, p: (
                {"8-bit states": p["optimizer"] + p["temporaries"]} if phase == "forward" else {}
            )
        ),
        "6.6 not yet: in forward, ",
    ),
}
