"""Lesson 05's exercises: one batch in pieces, switches that do switch, schedules, logs, dtypes, adapters, and a 7B on a card.

Models are those of transformers, small enough for a step to take milliseconds.
"""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, wraps

import torch
from torch import nn

from ...names import IGNORED
from ...techniques.accumulation import split
from ...techniques.lora import LoRALinear
from ...techniques.losses import count_targets
from ...training.recipe import Recipe
from .. import models
from ..compare import over_budget
from ..exercise import Exercise, Mistake, measure
from .lesson_03 import rows


def text_batch(*lengths: int, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels`` of sequences of these lengths, padded on the right."""
    labels = rows(*lengths, seed=seed, vocab=vocab)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels != IGNORED).long(), "labels": labels}


def _flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().float().flatten() for t in tensors])


def _gradient(module: nn.Module) -> torch.Tensor:
    """All gradients in a row; zeros where there is none."""
    return _flat(torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())


def _quietly(observe):
    """``observe`` without what transformers says on the way, which is not the learner's output."""

    @wraps(observe)
    def quiet(candidate):
        from transformers.utils import logging

        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            return observe(candidate)
        finally:
            logging.set_verbosity(level)

    return quiet


def _with_bytes(says: str | None, run) -> str | None:
    """``says`` and the bytes of a measured run; ``None`` where there is nothing to say."""
    return f"{says} {over_budget(run)}" if says and run.over else says


TRAIN, STEPS, EVAL = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
)


def on_one_card(arguments: dict, gpus: int, fits: int) -> dict:
    """``arguments`` of a run on ``gpus`` cards, for one card that takes at most ``fits`` rows at a time."""
    batch = arguments[TRAIN] * arguments[STEPS] * gpus
    micro = max(m for m in range(1, fits + 1) if batch % m == 0)
    return arguments | {TRAIN: micro, STEPS: batch // micro, EVAL: micro}


def _one_card(steps=lambda a, batch, micro: batch // micro, **more):
    """A wrong ``on_one_card``: how it counts ``steps``, and other fields, from (arguments, batch, micro-batch)."""

    def wrong(arguments, gpus, fits):
        batch = arguments[TRAIN] * arguments[STEPS] * gpus
        micro = max(m for m in range(1, fits + 1) if batch % m == 0)
        changed = {TRAIN: micro, STEPS: steps(arguments, batch, micro), EVAL: micro}
        return arguments | changed | {name: f(arguments, batch, micro) for name, f in more.items()}

    return wrong


def _one_card_uneven(divide):
    def wrong(arguments, gpus, fits):
        batch = arguments[TRAIN] * arguments[STEPS] * gpus
        return arguments | {TRAIN: fits, STEPS: divide(batch / fits), EVAL: fits}

    return wrong


def _gpus_forgotten(arguments, gpus, fits):
    return on_one_card(arguments, 1, fits)


def _old_steps_forgotten(arguments, gpus, fits):
    return on_one_card(arguments | {STEPS: 1}, gpus, fits)


def _micro_batch_of_one(arguments, gpus, fits):
    return on_one_card(arguments, gpus, 1)


def _more_steps(name):
    return {name: lambda a, batch, micro: a[name] * (batch // micro) // a[STEPS]}


def _observe_one_card(candidate):
    found = {}
    for train, steps, gpus, fits in ((4, 4, 8, 2), (8, 1, 4, 8), (12, 2, 1, 5), (16, 3, 2, 9)):
        given = {
            TRAIN: train,
            STEPS: steps,
            EVAL: 32,
            "max_steps": 600,
            "warmup_steps": 60,
            "learning_rate": 2e-5,
        }
        found[f"{train} rows x {steps} x {gpus} GPUs, {fits} fit"] = candidate(given, gpus, fits)
    return found  # fmt: skip


def _explain_one_card(got, expected):
    for case, right in expected.items():
        given = got[case]
        if given == right or not isinstance(given, dict):
            continue
        lost = [name for name in right if name not in given]
        if lost:
            return f"for {case}: {lost[0]} is gone; hand back all fields, arguments | {{...}}"
        rows, wanted = (fields[TRAIN] * fields[STEPS] for fields in (given, right))
        if rows != wanted:
            return f"for {case}: your update has {rows} rows, and the run's had {wanted}; the global batch has changed"
        return None
    return None


CHECKPOINTING_CARD = "5 MiB"
CHECKPOINTING_MODEL = dict(layers=6, hidden=64, heads=4, intermediate=172, vocab=256)


def checkpointing_setting() -> tuple[nn.Module, torch.Tensor]:
    """A tiny Llama of six layers as ``from_pretrained`` leaves a model, and token ids (4, 64)."""
    model = models.tiny_llama(**CHECKPOINTING_MODEL)
    model.config.use_cache = True
    return model.eval(), torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))


def _enable(model: nn.Module, kwargs: dict | None = None, **more) -> None:
    """Checkpointing on, by the name that the installed transformers has for it (a new one since 5.23)."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    kwargs = {"use_reentrant": False} if kwargs is None else kwargs
    getattr(model, f"{name}_checkpointing_enable")(kwargs, **more)


def switch_on(model) -> None:
    """Checkpoint every layer of ``model``, in place, so that a training step does run them again."""
    model.train()
    _enable(model)


def _switch(model) -> str:
    """Which switch of ``model`` was found, where it saves too little."""
    on = [layer.gradient_checkpointing for layer in model.model.layers]
    if any(on):
        return "some layers" if not all(on) else "" if model.training else "eval mode"
    if getattr(model.config, "gradient_checkpointing", False):
        return "the config's"
    return (
        "an attribute" if {"gradient_checkpointing", "activation_checkpointing"} & {*vars(model)} else "none"
    )


def _left_in_eval(model):
    _enable(model)


def _train_mode_alone(model):
    model.train()
    model.config.use_cache = False


def _config_flag(model):
    model.train()
    model.config.gradient_checkpointing = True


def _attribute(model):
    model.train()
    model.gradient_checkpointing = True


def _on_a_copy(model):
    model.train()
    switch_on(copy.deepcopy(model))


def _one_in(n):
    def wrong(model):
        switch_on(model)
        for i, layer in enumerate(model.model.layers):
            layer.gradient_checkpointing = i % n == 0

    return wrong


def _layer_by_layer(model):
    model.train()
    for layer in model.model.layers:
        layer.gradient_checkpointing = True


def _reentrant(model):
    model.train()
    _enable(model, {"use_reentrant": True})


def _frozen(model):
    switch_on(model)
    model.requires_grad_(False)


def _in_bf16(model):
    switch_on(model)
    model.bfloat16()


@_quietly
def _observe_checkpointing(candidate):
    model, ids = checkpointing_setting()
    candidate(model)

    def step():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    measured = measure(step, budget=CHECKPOINTING_CARD, model=model)
    found = {
        "a step on token ids": {"loss": measured.value, "gradients": _gradient(model)},
        "the card": measured,
        "what stands in the way": _switch(model) if measured.over else "",  # tells ways of one peak apart
    }
    model, ids = checkpointing_setting()
    vectors = model.get_input_embeddings()(ids).detach()
    candidate(model)
    model(inputs_embeds=vectors.to(model.dtype), labels=ids).loss.backward()
    return found | {"a step on vectors (inputs_embeds)": {"gradients of the layers": _gradient(model.model.layers)}}  # fmt: skip


def train_epoch(optimizer, micro_batches, window, warmup, accumulate) -> None:
    """An update after every ``window`` micro-batches and one for the rest; the rate climbs for the first part ``warmup`` of
    the updates, then falls in a line."""
    from transformers import get_linear_schedule_with_warmup

    updates = math.ceil(len(micro_batches) / window)
    schedule = get_linear_schedule_with_warmup(optimizer, round(warmup * updates), updates)
    for start in range(0, len(micro_batches), window):
        accumulate(micro_batches[start : start + window])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _epoch(
    warm=lambda n, k: math.ceil(n / k),
    total=lambda n, k: math.ceil(n / k),
    *,
    stop=lambda n, k: n,
    per_micro=False,
    steps=True,
    first=False,
):
    """A wrong ``train_epoch``: of what the warm-up is a part, how long the schedule is, both from (micro-batches, window)."""

    def wrong(optimizer, micro_batches, window, warmup, accumulate):
        from transformers import get_linear_schedule_with_warmup

        n = len(micro_batches)
        schedule = get_linear_schedule_with_warmup(
            optimizer, round(warmup * warm(n, window)), total(n, window)
        )
        for start in range(0, stop(n, window), window):
            held = micro_batches[start : start + window]
            accumulate(held)
            if first:
                schedule.step()
            optimizer.step()
            for _ in held if per_micro else [0] * (steps and not first):
                schedule.step()
            optimizer.zero_grad()

    return wrong


def _micro(n, k):
    return n


def _whole_windows(n, k):
    return n // k


def _warm_up_of_a_fraction(optimizer, micro_batches, window, warmup, accumulate):
    from transformers import get_linear_schedule_with_warmup

    schedule = get_linear_schedule_with_warmup(optimizer, warmup, math.ceil(len(micro_batches) / window))
    for start in range(0, len(micro_batches), window):
        accumulate(micro_batches[start : start + window])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@_quietly
def _observe_schedule(candidate):
    found = {}
    # Parts of 6 updates, 5 whole windows and 21 micro-batches: rounded or cut off, the same.
    for n, window, warmup in ((40, 4, 0.2), (21, 4, 0.5)):
        model = models.tiny_llama(layers=1, hidden=8, heads=2, intermediate=8, vocab=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        updates: list[tuple[int, float]] = []
        held: list[torch.Tensor] = []

        def accumulate(some, model=model, held=held):
            held += some
            ids = torch.stack(some)
            model(input_ids=ids, labels=ids).loss.backward()

        def updated(optimizer, *_, updates=updates, held=held):
            updates.append((len(held), optimizer.param_groups[0]["lr"]))
            held.clear()

        optimizer.register_step_post_hook(updated)
        ids = torch.randint(0, 16, (n, 4), generator=torch.Generator().manual_seed(2))
        candidate(optimizer, list(ids), window, warmup, accumulate)
        found[f"{n} micro-batches, window {window}, warmup {warmup}"] = {
            "micro-batches of each update": [size for size, _ in updates],
            "learning rate of each update": torch.tensor([rate for _, rate in updates]),
        }
    return found


LOG_CARD = "1.4 MB"
LOG_MODEL = dict(layers=2, hidden=32, heads=2, intermediate=64, vocab=512)


def log_setting(kind: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A tiny Llama and a window of six micro-batches, of ``"equal"`` or ``"unequal"`` lengths, made afresh."""
    lengths = {"equal": [(24, 24)] * 6, "unequal": [(32, 30), (4, 3), (9, 5), (17, 6), (28, 20), (2, 32)]}[
        kind
    ]
    window = [text_batch(*each, vocab=512, seed=seed) for seed, each in enumerate(lengths)]
    return models.tiny_llama(**LOG_MODEL), window


def train_and_log(model, window) -> float:
    """Leave the gradient of the mean loss over the window's predicted tokens; return that mean, to be logged."""
    counts = [count_targets(micro["labels"]) for micro in window]
    logged = 0.0
    for micro, count in zip(window, counts, strict=True):
        loss = model(**micro).loss * (count / sum(counts))
        loss.backward()
        logged += loss.item()
    return logged


def _logs(report, *, keep=lambda outputs, loss: loss.item()):
    """A wrong ``train_and_log`` whose gradient is right: what it returns, from (means, counts)."""

    def wrong(model, window):
        counts = [count_targets(micro["labels"]) for micro in window]
        means = []
        for micro, count in zip(window, counts, strict=True):
            outputs = model(**micro)
            (outputs.loss * (count / sum(counts))).backward()
            means.append(keep(outputs, outputs.loss))
        return report(means, counts)

    return wrong


def _weighted(means, counts):
    return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


def _by_k(model, window):
    logged = 0.0
    for micro in window:
        loss = model(**micro).loss / len(window)
        loss.backward()
        logged += loss.item()
    return logged


def _by_k_with_its_graph(model, window):
    logged = 0.0
    for micro in window:
        loss = model(**micro).loss / len(window)
        loss.backward()
        logged += loss
    return logged


def _by_k_logs_the_last(model, window):
    for micro in window:
        loss = model(**micro).loss / len(window)
        loss.backward()
    return loss.item()


def _first_tokens_too(model, window):
    items, logged = sum(int((micro["labels"] != IGNORED).sum()) for micro in window), 0.0
    for micro in window:
        loss = model(**micro, num_items_in_batch=torch.tensor(items)).loss
        loss.backward()
        logged += loss.item()
    return logged


def _not_divided(model, window):
    logged = 0.0
    for micro in window:
        loss = model(**micro).loss
        loss.backward()
        logged += loss.item()
    return logged


def _one_backward(model, window):
    counts = [count_targets(micro["labels"]) for micro in window]
    loss = _weighted([model(**micro).loss for micro in window], counts)
    loss.backward()
    return loss.item()


@_quietly
def _observe_log(candidate):
    found = {}
    for kind in ("unequal", "equal"):
        model, window = log_setting(kind)
        backward: list[None] = []
        model.lm_head.weight.register_hook(lambda gradient, backward=backward: backward.append(None))
        if kind == "unequal":
            measured = measure(lambda m=model, w=window: candidate(m, w), budget=LOG_CARD, model=model)
            logged = measured.value
            many = len(backward) > 1
            found["what is too much"] = "" if not measured.over else "kept" if many else "one backward"
            found["the card"] = replace(measured, value=None)
        else:
            logged = candidate(model, window)
        graph = isinstance(logged, torch.Tensor) and logged.requires_grad
        found[f"a window of {kind} lengths"] = {
            "loss": logged.item() if isinstance(logged, torch.Tensor) else logged,
            "gradients": _gradient(model),
            "what is returned hangs on a graph (1 is yes)": int(graph),
        }
    return found


_TOO_MUCH_TO_LOG = {
    "kept": "the outputs of all micro-batches are kept until the end of the window, and logits are in them: keep the loss's number alone.",
    "one backward": "one backward at the end keeps every micro-batch's graph until then: call backward for each.",
}  # fmt: skip


def _explain_log(got, expected):
    return _with_bytes(_TOO_MUCH_TO_LOG.get(got["what is too much"]), got["the card"])


def bf16_setting() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A tiny Llama whose weights are bf16, its head tied to its embedding, and three batches."""
    model = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64, vocab=128, tied=True)
    batches = [text_batch(16, 16, vocab=128, seed=seed) for seed in range(3)]
    return model.to(torch.bfloat16), batches


def train_mixed(model, batches, lr):
    """One AdamW update for each batch, in place: matrices multiplied in bf16, weights and states in float32; the optimizer."""
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _mixed(before=lambda model: model, own=lambda model: model.parameters(), after=lambda model: None, *, auto=True):  # fmt: skip
    """A wrong ``train_mixed``: what it does to the model before, what it hands to AdamW, what it does after an update."""

    def wrong(model, batches, lr):
        model = before(model)
        optimizer = torch.optim.AdamW(own(model), lr=lr)
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=auto):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after(model)
        return optimizer

    return wrong


def _linear_layers_alone(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.float()
    return model


def _new_parameters(model):
    for name, parameter in list(model.named_parameters()):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, nn.Parameter(parameter.detach().float()))
    return model


def _float_copies(model):
    return [p.detach().float().requires_grad_() for p in model.parameters()]


@_quietly
def _observe_states(candidate):
    model, batches = bf16_setting()
    products = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: products.append(str(out.dtype)))
    optimizer = candidate(model, batches, 1e-5)
    handle.remove()
    states = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return {
        "the weights": {
            "dtypes": " and ".join(sorted({str(p.dtype) for p in model.parameters()})),
            "the head is still tied to the embedding (1 is yes)": int(
                model.lm_head.weight is model.get_input_embeddings().weight
            ),
        },
        "the states": {"dtypes": " and ".join(sorted({str(t.dtype) for t in states})), "how many": len(states)},
        "products": {"dtypes, forward by forward": products},
        "the weights after three updates": _flat(model.parameters()),
    }  # fmt: skip


LORA_CARD = "4.5 MiB"
LORA_MODEL = dict(layers=3, hidden=64, heads=4, intermediate=172, vocab=2048)
LORA_NAMES = ("q_proj", "v_proj")


def lora_setting() -> tuple[nn.Module, torch.Tensor]:
    """A tiny Llama of three layers, not tied, and token ids (2, 24)."""
    ids = torch.randint(0, 2048, (2, 24), generator=torch.Generator().manual_seed(3))
    return models.tiny_llama(**LORA_MODEL), ids


def add_adapters(model, names, rank, lr):
    """Freeze ``model``, put a ``LoRALinear`` around every layer whose last name is in ``names``; AdamW for what is trained."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if own in names:
            setattr(model.get_submodule(parent), own, LoRALinear(module, rank))
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def _adapt(model, names, rank, wanted=None):
    """Adapters alone: nothing else of ``model`` is frozen."""
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if wanted(name, module) if wanted else own in names:
            setattr(model.get_submodule(parent), own, LoRALinear(module, rank))


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def _freezes_last(model, names, rank, lr):
    _adapt(model, names, rank)
    model.requires_grad_(False)
    return torch.optim.AdamW(_trained(model), lr=lr)


def _freezes_last_gives_all(model, names, rank, lr):
    _adapt(model, names, rank)
    model.requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def _whole_names(model, names, rank, lr):
    model.requires_grad_(False)
    _adapt(model, names, rank, lambda name, module: name in names)
    return torch.optim.AdamW(_trained(model), lr=lr)


def _whole_names_gives_all(model, names, rank, lr):
    model.requires_grad_(False)
    _adapt(model, names, rank, lambda name, module: name in names)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def _beside(model, names, rank, lr):
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in names:
            setattr(model, name, LoRALinear(module, rank))
    return torch.optim.AdamW(_trained(model), lr=lr)


def _base_not_frozen(model, names, rank, lr):
    _adapt(model, names, rank)
    return torch.optim.AdamW(_trained(model), lr=lr)


def _every_linear(model, names, rank, lr):
    model.requires_grad_(False)
    _adapt(model, names, rank, lambda name, module: isinstance(module, nn.Linear))
    return torch.optim.AdamW(_trained(model), lr=lr)


def _random_b(model, names, rank, lr):
    optimizer = add_adapters(model, names, rank, lr)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):
            nn.init.normal_(parameter, std=0.02)
    return optimizer


def _only(letter):
    def wrong(model, names, rank, lr):
        add_adapters(model, names, rank, lr)
        return torch.optim.AdamW([p for n, p in model.named_parameters() if n.endswith(f".{letter}")], lr=lr)

    return wrong


def _optimizer_first(model, names, rank, lr):
    optimizer = torch.optim.AdamW(_trained(model), lr=lr)
    add_adapters(model, names, rank, lr)
    return optimizer


def _optimizer_before_freezing(model, names, rank, lr):
    _adapt(model, names, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.requires_grad_(True)
            module.base.requires_grad_(False)
    return optimizer


_NO_ADAPTER = (
    "no layer of the model has become an adapter, so there is nothing to train: named_modules() has whole paths, such as "
    "model.layers.0.self_attn.q_proj; compare the last part, and put the LoRALinear into the parent with setattr."
)


def _explain_lora(got, expected):
    return None if got["the adapters"]["around"] else _NO_ADAPTER


_NOTHING_TRAINED = ("empty parameter list", "does not require grad")


@_quietly
def _observe_lora(candidate):
    model, ids = lora_setting()
    with torch.no_grad():
        before = model(input_ids=ids).logits
    weights = {p: p.detach().clone() for p in model.parameters()}
    changed = torch.zeros_like(before)
    starts: dict[nn.Parameter, torch.Tensor] = {}
    stopped = ""

    def train():
        optimizer = candidate(model, LORA_NAMES, 4, 0.01)
        with torch.no_grad():
            changed.copy_(model(input_ids=ids).logits - before)
            starts.update(
                (p, p.clone()) for name, p in model.named_parameters() if name.endswith((".A", ".B"))
            )
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        measured = measure(train, budget=LORA_CARD, model=model)
    except (ValueError, RuntimeError) as error:
        stopped = next((words for words in _NOTHING_TRAINED if words in str(error)), "")
        if not stopped:
            raise
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    trained = sum(p.numel() for p in _trained(model))
    found = {"the adapters": {"around": " ".join(sorted(adapters)), "error": stopped}}
    if stopped:
        return found | {"numbers that are trained": trained}
    return found | {
        "before the first update": {"change of the logits": changed},
        "two updates": {
            "matrices A and B that have moved": [
                sum(not torch.equal(m.A, starts[m.A]) for m in adapters.values()),
                sum(not torch.equal(m.B, starts[m.B]) for m in adapters.values()),
            ],
            "numbers that are trained": trained,
            "weights of the base that have moved": sum(not torch.equal(p, w) for p, w in weights.items()),
        },
        "the card": measured,
    }


EVAL_CARD = "2.5 MiB"
EVAL_ROWS = 4  # which fit
EVAL_MODEL = dict(layers=4, hidden=64, heads=4, positions=64, vocab=256)


def evaluation_setting() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny GPT-2 with dropout and a key-value cache, in the middle of its training, and 18 rows of unequal lengths."""
    model = models.tiny_gpt2(**EVAL_MODEL)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    model.config.use_cache = True
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)  # rows that differ in their loss, as after training
    return model.train(), text_batch(*(2 + i * i % 61 for i in range(17)), 64, vocab=256)


def held_out_loss(model, rows) -> float:
    """The mean loss over all predicted tokens of ``rows``, within the card; ``model`` is left as it was."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for micro in split(rows, 4):
            loss = model(**micro, use_cache=False).loss
            total += loss.item() * count_targets(micro["labels"])
    model.train()
    return total / count_targets(rows["labels"])


def _held_out(
    size=4, *, mode=True, back=True, grad=False, weigh=True, first=False, last=True, keep=None, **arguments
):
    """A wrong ``held_out_loss``."""
    arguments = {"use_cache": False} | arguments

    def wrong(model, rows):
        model.train(not mode)
        total, items, parts, kept = 0.0, 0, 0, []
        with torch.set_grad_enabled(grad):
            for micro in split(rows, size):
                if not last and len(micro["labels"]) < size:
                    break
                outputs = model(**micro, **arguments)
                labels = micro["labels"]
                count = int((labels != IGNORED).sum()) if first else count_targets(labels)
                total = total + (outputs.loss if keep == "losses" else outputs.loss.item()) * (count if weigh else 1)  # fmt: skip
                items, parts = items + count, parts + 1
                if keep == "logits":
                    kept.append(outputs.logits)
        if back:
            model.train()
        return float(total / (items if weigh else parts))

    return wrong


@contextmanager
def _seen(model):
    """What forward passes of ``model`` do: a dict of the most rows, and whether one built a graph or filled a cache."""
    seen = {"rows": 0, "graph": False, "cache": False}

    def look(module, args, kwargs, out):
        seen["rows"] = max(seen["rows"], len(out.logits))
        seen["graph"] |= out.logits.requires_grad
        seen["cache"] |= out.past_key_values is not None

    handle = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@_quietly
def _observe_evaluation(candidate):
    model, held_out = evaluation_setting()
    with _seen(model) as seen:
        measured = measure(lambda: candidate(model, held_out), budget=EVAL_CARD, model=model)
    found = {"what is too much": ""}
    if seen["graph"]:
        found = {"what is too much": "a graph"}
    elif measured.over:
        too_many = f"{seen['rows']} rows" if seen["rows"] > EVAL_ROWS else ""
        found = {"what is too much": too_many or ("the cache" if seen["cache"] else "the logits")}
    return found | {
        "18 rows": {"loss": measured.value},
        "the model afterwards": {"is in train mode (1 is yes)": int(model.training)},
        "the card": replace(measured, value=None),
    }


_TOO_MUCH_TO_EVALUATE = {
    "a graph": "gradients are on, so every layer's activations are kept for a backward that never comes: torch.no_grad().",
    "the cache": "the key-value cache is on, as from_pretrained leaves it: keys and values of every layer stay until the last one is through. Training keeps them anyway; here give use_cache=False.",
    "the logits": "something of every piece is kept until the end, as large as its logits: the loss is all that is asked for, and it is one number.",
    "18 rows": "all 18 rows go through at once: cut them, as in training.",
}  # fmt: skip


def _explain_evaluation(got, expected):
    what = got["what is too much"]
    rows = f"{what} at a time are too many for this card: an evaluation has a micro-batch too."
    return _with_bytes(_TOO_MUCH_TO_EVALUATE.get(what, rows) if what else None, got["the card"])


MODEL_7B, CARD_7B, TOKENS_7B, BATCH_7B = "Llama-2-7B", "RTX 4090 24GB", 2048, 8


@cache
def _sizes():
    from ...planning.cards import find_card
    from ...planning.cost import count
    from ...planning.models import known_model

    config = known_model(MODEL_7B)[1]
    return config, count(config), find_card(CARD_7B)


@lru_cache(maxsize=32)
def on_card(recipe: Recipe, micro_batch: int):
    """What ``recipe`` needs for the exercise's 7B, as ``plan``'s ``Option``: with ``needs``, ``spare`` (bytes) and ``why_not()``.

    The allocator's part is the rough one that ``plan`` begins with.
    """
    from ...planning.cost import beyond, seconds_per_token
    from ...planning.options import Option
    from ...prediction.predict import predict

    config, work, card = _sizes()
    prediction = predict(
        config,
        batch_size=micro_batch * recipe.accumulation,
        seq_len=TOKENS_7B,
        recipe=recipe,
        target="cuda",
    )
    parts = beyond(prediction, card.capability, replay=False)
    return Option(
        recipe=recipe,
        method="qlora" if recipe.quantized_base else "lora" if recipe.lora_rank else "full",
        micro_batch=micro_batch,
        seconds=seconds_per_token(work, recipe, card, micro_batch, TOKENS_7B),
        card_bytes=card.nbytes,
        prediction=prediction,
        parts=parts,
        needs=prediction.peak.total + sum(parts.values()),
    )


def what_is_wrong(recipe: Recipe, micro_batch: int) -> str:
    """The kind of mistake in a recipe for the exercise's 7B, in a few words; empty where there is none."""
    from ...planning.cost import resident_bytes

    if micro_batch * recipe.accumulation != BATCH_7B:
        return "another batch"
    if recipe.frozen_base:
        return "the head alone"
    _, work, card = _sizes()
    resident = resident_bytes(work, recipe)
    if resident["parameters"] > card.nbytes:
        return "float32 weights"
    if resident["parameters"] + resident["gradients"] > card.nbytes:
        return "weights and gradients"
    if sum(resident.values()) > card.nbytes:
        return "states"
    if on_card(recipe, micro_batch).fits:
        return ""
    if recipe.checkpointing is None and recipe.every_n_layers is None:
        return "no checkpointing"
    if micro_batch > 1 and not recipe.in_backward:
        return "micro-batch"
    return f"this {on_card(recipe, micro_batch).why_not()}"


def recipe_7b() -> tuple[Recipe, int]:
    """A recipe that trains a 7B on a card of 24 GB, and the rows of a micro-batch."""
    recipe = Recipe(
        precision="bf16", optimizer="adamw-fused", lora_rank=16, checkpointing="per-layer", accumulation=8
    )
    return recipe, 1


def _recipe(micro_batch=1, **choices):
    given = dict(precision="bf16", optimizer="adamw-fused", checkpointing="per-layer", chunked_loss=True)

    def wrong():
        return Recipe(**(given | {"accumulation": BATCH_7B // micro_batch} | choices)), micro_batch

    return wrong


@_quietly
def _observe_7b(candidate):
    given = candidate()
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[0], Recipe):
        raise TypeError(
            "give two things back, the recipe and the rows of a micro-batch: return Recipe(...), 1"
        )
    recipe, micro_batch = given
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise TypeError(f"the rows of a micro-batch are a whole number of at least 1, not {micro_batch!r}")
    return {"what stands in the way": what_is_wrong(recipe, micro_batch)}


def _explain_7b(got, expected):
    return got["what stands in the way"]


EXERCISES = (
    Exercise(
        id="5.1",
        title="the same batch on one card",
        difficulty=1,
        minutes=5,
        trains="rows, accumulation and GPUs, and what must not change with them",
        reference=on_one_card,
        observe=_observe_one_card,
        explain=_explain_one_card,
        mistakes=(
            Mistake("accumulation left as it was", _one_card(lambda a, batch, micro: a[STEPS]),
                    "the global batch has changed: fewer rows at a time and the accumulation as before is a smaller batch; rows x accumulation must stay what it was on all GPUs."),
            Mistake("GPUs forgotten", _gpus_forgotten,
                    "this forgets the other GPUs: each of them had rows of its own, and one card now has to work through them all."),
            Mistake("old accumulation forgotten", _old_steps_forgotten,
                    "this forgets the accumulation that the run already had: its batch was rows x accumulation x GPUs."),
            Mistake("accumulation on top", _one_card(lambda a, batch, micro: a[STEPS] * (batch // micro)),
                    "this counts the old accumulation twice: it is in the global batch already."),
            Mistake("rounds down", _one_card_uneven(math.floor),
                    "rows get lost: where the micro-batch does not divide the batch, take the largest one that does and fits."),
            Mistake("rounds up", _one_card_uneven(math.ceil),
                    "the batch has grown: where the micro-batch does not divide it, take the largest one that does and fits."),
            Mistake("one row at a time", _micro_batch_of_one,
                    "the batch is right, and one row at a time is slower than need be: take as many as fit."),
            Mistake("evaluation left as it was", _one_card(**{EVAL: lambda a, batch, micro: a[EVAL]}),
                    "training fits, and the evaluation still takes the old number of rows at a time: set per_device_eval_batch_size too."),
            Mistake("max_steps by micro-batches", _one_card(**_more_steps("max_steps")),
                    "max_steps has been scaled: it counts optimizer steps, and there are as many as before."),
            Mistake("warm-up by micro-batches", _one_card(**_more_steps("warmup_steps")),
                    "warmup_steps has been scaled: it counts optimizer steps, and there are as many as before."),
            Mistake("both by micro-batches", _one_card(**_more_steps("max_steps"), **_more_steps("warmup_steps")),
                    "max_steps and warmup_steps have been scaled: they count optimizer steps, and there are as many as before."),
            Mistake("learning rate by rows", _one_card(learning_rate=lambda a, batch, micro: a["learning_rate"] * micro / a[TRAIN]),
                    "the learning rate has been scaled: it goes with the global batch, which is the same."),
        ),
    ),
    Exercise(
        id="5.2",
        title="checkpointing that happens",
        difficulty=2,
        minutes=6,
        trains="making sure that a switch has switched something",
        reference=switch_on,
        observe=_observe_checkpointing,
        mistakes=(
            Mistake("left in eval", _left_in_eval,
                    "checkpointing is on and the model is in eval mode, as from_pretrained leaves it: layers check both, and save nothing without a word; call model.train()."),
            Mistake("train mode alone", _train_mode_alone,
                    "no layer of this model checkpoints: train mode and a cache switched off are not the switch, and TrainingArguments or a copy do not reach the model."),
            Mistake("on a copy", _on_a_copy,
                    "no layer of this model checkpoints: train mode and a cache switched off are not the switch, and TrainingArguments or a copy do not reach the model."),
            Mistake("a field of the config", _config_flag,
                    "model.config.gradient_checkpointing is read when a model is made, and by nobody afterwards: call the model's method."),
            Mistake("an attribute", _attribute,
                    "model.gradient_checkpointing = True makes an attribute that nobody reads: each layer has its own, and the model's method sets them all."),
            Mistake("one layer in two", _one_in(2),
                    "only some of the layers are checkpointed, which saves too little for this card: leave every_n_layers at 1."),
            Mistake("one layer in three", _one_in(3),
                    "only some of the layers are checkpointed, which saves too little for this card: leave every_n_layers at 1."),
            Mistake("layer by layer", _layer_by_layer,
                    "the layers' own switches are on, and they were given no function to checkpoint with: activation_checkpointing_enable() does both."),
            Mistake("reentrant", _reentrant,
                    "use_reentrant=True trains on token ids, for transformers lets the embedding's output require a gradient; on vectors that need none, no layer gets one: use_reentrant=False."),
            Mistake("frozen", _frozen,
                    "every weight is frozen, so there is no gradient to compute: leave requires_grad as it is."),
            Mistake("bf16", _in_bf16,
                    "it fits with room to spare, and the weights have been rounded to bf16: that is another model; checkpointing changes no number."),
        ),
    ),
    Exercise(
        id="5.3",
        title="a schedule in optimizer steps",
        difficulty=2,
        minutes=8,
        trains="counting updates, not micro-batches, in a loop that accumulates",
        reference=train_epoch,
        observe=_observe_schedule,
        mistakes=(
            Mistake("a step for every micro-batch", _epoch(per_micro=True),
                    "the schedule steps with every micro-batch: it is through after a part of the updates, and the rest have a learning rate of 0."),
            Mistake("everything in micro-batches", _epoch(_micro, _micro),
                    "the schedule's length and warm-up are counted in micro-batches, and it steps with the updates: it climbs too slowly, and the epoch ends before it has fallen."),
            Mistake("length in micro-batches", _epoch(total=_micro),
                    "the schedule's length is counted in micro-batches, so the learning rate never comes down: count updates."),
            Mistake("warm-up in micro-batches", _epoch(warm=_micro),
                    "the warm-up is a part of the micro-batches, and takes several times too long: it is a part of the updates."),
            Mistake("warm-up of a fraction", _warm_up_of_a_fraction,
                    "the warm-up is handed over as a fraction of 1, and is counted in steps: multiply it by the number of updates."),
            Mistake("all in micro-batches, steps too", _epoch(_micro, _micro, per_micro=True),
                    "length, warm-up and steps all count micro-batches: nearly the same curve, which is why it goes unnoticed, and not the one asked for where the last window is short; count updates."),
            Mistake("schedule first", _epoch(first=True),
                    "the schedule steps before the optimizer, so the first learning rate is never used and each update has the next one's: optimizer first."),
            Mistake("last window dropped", _epoch(_whole_windows, _whole_windows, stop=lambda n, k: n // k * k),
                    "the last micro-batches are dropped: a window that is not full makes an update too."),
            Mistake("last window not counted", _epoch(_whole_windows, _whole_windows),
                    "the last, incomplete window makes an update and is not in the schedule's length: round up when counting updates."),
            Mistake("never steps", _epoch(steps=False),
                    "the schedule never steps: every update has its first learning rate, and with a warm-up that is 0."),
        ),
    ),
    Exercise(
        id="5.4",
        title="the loss in the log",
        difficulty=2,
        minutes=6,
        trains="logging what is trained, and holding on to nothing for it",
        reference=train_and_log,
        observe=_observe_log,
        explain=_explain_log,
        mistakes=(
            Mistake("times K", _not_divided,
                    "gradient and log are K times too large: every micro-batch's mean must be weighted by its share of the tokens, which add up to 1."),
            Mistake("logged times K", _logs(lambda means, counts: sum(means)),
                    "the gradient is right, and the log adds up K means: K times too large."),
            Mistake("the last, divided by K", _logs(lambda means, counts: means[-1] / len(means)),
                    "the gradient is right, and the log has what was left in `loss`: the last micro-batch's, divided for its backward."),
            Mistake("the last, by its share", _logs(lambda means, counts: means[-1] * counts[-1] / sum(counts)),
                    "the gradient is right, and the log has what was left in `loss`: the last micro-batch's part, where all of them are to be added up."),
            Mistake("the last", _logs(lambda means, counts: means[-1]),
                    "the gradient is right, and the log has the last micro-batch's loss for the whole window's."),
            Mistake("mean of means, log", _logs(lambda means, counts: sum(means) / len(means)),
                    "the gradient is right, and the log is a mean of means: a micro-batch of few tokens counts as much as one of many."),
            Mistake("mean of means, both", _by_k,
                    "dividing by K makes the gradient and the log a mean of means: weight each micro-batch by its share of the tokens."),
            Mistake("mean of means, a graph in the log", _by_k_with_its_graph,
                    "dividing by K makes the gradient and the log a mean of means: weight each micro-batch by its share of the tokens; and log loss.item(), for the tensor hangs on its graph."),
            Mistake("mean of means, logs the last", _by_k_logs_the_last,
                    "the log has what was left in `loss`, the last micro-batch's divided by K: add up every part; and dividing by K makes the gradient a mean of means."),
            Mistake("first tokens too", _first_tokens_too,
                    "position 0 of each row is counted, and nothing predicts it: count labels[:, 1:], as count_targets does."),
            Mistake("a graph in the log", _logs(_weighted, keep=lambda outputs, loss: loss),
                    "the number is right, and it is a tensor that hangs on the graph: 4 bytes a loss once backward has run, all activations where it has not, as in an evaluation; log loss.item()."),
            Mistake("keeps the outputs", _logs(lambda kept, counts: _weighted([o.loss.item() for o in kept], counts), keep=lambda outputs, loss: outputs),
                    _TOO_MUCH_TO_LOG["kept"]),
            Mistake("one backward", _one_backward,
                    _TOO_MUCH_TO_LOG["one backward"]),
        ),
    ),
    Exercise(
        id="5.5",
        title="a checkpoint in bf16, states in float32",
        difficulty=2,
        minutes=6,
        trains="knowing where autocast ends and a model's own dtype begins",
        reference=train_mixed,
        observe=_observe_states,
        mistakes=(
            Mistake("bf16 over bf16", _mixed(),
                    "weights and AdamW's states are bf16: autocast (bf16=True) chooses the dtype of operations, and leaves a checkpoint's weights as they came; call model.float() first."),
            Mistake("half", _mixed(lambda model: model.half()),
                    "half() is float16, not float32: weights and states still have two bytes, and small gradients become 0."),
            Mistake("after the first update", _mixed(after=lambda model: model.float()),
                    "model.float() comes after the first update: AdamW has made its states in bf16 by then, and stops at the mixture; cast first."),
            Mistake("copies", _mixed(own=_float_copies),
                    "the optimizer has float32 copies that get no gradient, so nothing moves: cast the model, and give AdamW its own parameters."),
            Mistake("trains a copy", _mixed(lambda model: copy.deepcopy(model).float()),
                    "this trains a copy, and the model that was given has not moved: model.float() casts in place."),
            Mistake("linear layers alone", _mixed(_linear_layers_alone),
                    "the linear layers are float32 and the norms are still bf16, as are their states: cast the whole model."),
            Mistake("new parameters", _mixed(_new_parameters),
                    "new parameters break the tie between embedding and head: the head keeps its own, in bf16; model.float() casts in place and keeps ties."),
            Mistake("no autocast", _mixed(lambda model: model.float(), auto=False),
                    "weights and states are float32, and so is everything else: forward runs outside torch.autocast."),
        ),
    ),
    Exercise(
        id="5.6",
        title="adapters with something to train",
        difficulty=2,
        minutes=8,
        trains="the order of freezing, adding and handing to the optimizer",
        reference=add_adapters,
        observe=_observe_lora,
        explain=_explain_lora,
        mistakes=(
            Mistake("freezes last", _freezes_last,
                    "nothing is left to train: requires_grad_(False) came after the adapters, and froze them too; freeze first, then add."),
            Mistake("freezes last, all to AdamW", _freezes_last_gives_all,
                    "nothing is left to train, so backward has no way to go: requires_grad_(False) came after the adapters, and froze them too; freeze first, then add."),
            Mistake("whole names", _whole_names,
                    _NO_ADAPTER),
            Mistake("whole names, all to AdamW", _whole_names_gives_all,
                    _NO_ADAPTER),
            Mistake("beside the layers", _beside,
                    "the adapters hang on the model under names with dots, and no forward goes through them: setattr wants the parent, model.get_submodule(parent), and the last part of the name."),
            Mistake("base not frozen", _base_not_frozen,
                    "the adapters are there and the rest of the model is trained as well: freeze it before you add them."),
            Mistake("every linear layer", _every_linear,
                    "every linear layer has an adapter, the output's with its large vocabulary too: only the layers named were asked for."),
            Mistake("B not zero", _random_b,
                    "the model has changed before its first update: B must start at zero, as LoRALinear leaves it, so that training starts from the base."),
            Mistake("A alone", _only("A"),
                    "the optimizer has A and not B: B stays zero, so the product stays zero, and so does A's gradient."),
            Mistake("B alone", _only("B"),
                    "the optimizer has B and not A: it learns, in a random subspace that never turns; give it both."),
            Mistake("optimizer first", _optimizer_first,
                    "the optimizer was made before the adapters: it has the frozen weights, which get no gradient, and never hears of A and B."),
        ),
    ),
    Exercise(
        id="5.7",
        title="an evaluation within the card",
        difficulty=2,
        minutes=8,
        trains="what an evaluation holds, and what it must leave as it was",
        reference=held_out_loss,
        observe=_observe_evaluation,
        explain=_explain_evaluation,
        mistakes=(
            Mistake("all rows at once", _held_out(18), _TOO_MUCH_TO_EVALUATE["18 rows"]),
            Mistake("eight rows", _held_out(8),
                    "eight rows at a time, Trainer's default for evaluation, are too many for this card: an evaluation has a micro-batch too."),
            Mistake("cache on", _held_out(use_cache=True), _TOO_MUCH_TO_EVALUATE["the cache"]),
            Mistake("a graph", _held_out(grad=True), _TOO_MUCH_TO_EVALUATE["a graph"]),
            Mistake("all graphs", _held_out(grad=True, keep="losses"),
                    "the sum of the losses hangs on the graphs of all rows: torch.no_grad(), and loss.item()."),
            Mistake("logits", _held_out(keep="logits"), _TOO_MUCH_TO_EVALUATE["the logits"]),
            Mistake("left in eval", _held_out(back=False),
                    "the loss is right, and the model is left in eval mode: training goes on without dropout, and checkpointing saves nothing any more; model.train()."),
            Mistake("dropout", _held_out(mode=False), "dropout is on: this is the loss of a model with holes in it; model.eval() first."),
            Mistake("mean of means", _held_out(weigh=False),
                    "this is a mean of means: rows of few tokens, and the last, smaller piece, count as much as full ones; weight by predicted tokens."),
            Mistake("first tokens too", _held_out(first=True),
                    "position 0 of each row is counted, and nothing predicts it: count labels[:, 1:], as count_targets does."),
            Mistake("last piece dropped", _held_out(last=False),
                    "the last rows are dropped: 18 rows are four pieces of 4 and one of 2."),
        ),
    ),
    Exercise(
        id="5.8",
        title="a 7B on a card of 24 GB",
        difficulty=3,
        minutes=10,
        trains="finding what stands in the way, and the one change that moves it",
        reference=recipe_7b,
        observe=_observe_7b,
        explain=_explain_7b,
        mistakes=(
            Mistake("full, accumulated", _recipe(),
                    "weights and gradients alone are too many: 12.55 GiB each in bf16, and accumulation keeps the gradients from one micro-batch to the next, however small; train less, or step in backward."),
            Mistake("states", _recipe(in_backward=True, accumulation=1, micro_batch=8),
                    "gradients are freed as they come, and AdamW's states stay: with the weights they are more than the card has; choose an optimizer that keeps less, or train less."),
            Mistake("float32 weights", _recipe(precision="autocast-bf16", lora_rank=16),
                    "the weights alone are 25.10 GiB in float32, and autocast leaves them so, frozen or not; precision='bf16' halves them."),
            Mistake("no checkpointing", _recipe(checkpointing=None, lora_rank=16),
                    "the weights fit, and the activations of 32 layers do not (frozen layers keep theirs too, for the adapters below them): checkpointing='per-layer'."),
            Mistake("another batch", _recipe(accumulation=1, lora_rank=16),
                    "it is the global batch that has changed: micro-batch x accumulation must make 8 rows."),
            Mistake("micro-batch too large", _recipe(micro_batch=8, chunked_loss=False, lora_rank=16),
                    "the weights fit, and so many rows at a time do not: a smaller micro-batch, and more accumulation."),
            Mistake("in backward, accumulated", _recipe(in_backward=True, optimizer="adafactor"),
                    "in_backward and accumulation exclude each other, and Recipe refuses: a gradient cannot be freed and added to; with in_backward all 8 rows go at once."),
            Mistake("the head alone", _recipe(frozen_base=True),
                    "the head alone is trained, and the 32 layers below it are not: give every layer something to learn, by lora_rank."),
        ),
    ),
)  # fmt: skip
