"""Lesson 05's exercises about what is left of a model: adapters with something to train, an evaluation within the card."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ...names import IGNORED
from ...techniques.accumulation import split
from ...techniques.lora import LoRALinear
from ...techniques.losses import count_targets
from ..compare import over_budget
from ..exercise import Exercise, Mistake, measure
from .settings import (
    EVAL_CARD,
    EVAL_ROWS,
    LORA_CARD,
    evaluation_setting,
    lora_setting,
    quietly,
)

LORA_NAMES = ("q_proj", "v_proj")


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


def _a_alone(model, names, rank, lr):
    add_adapters(model, names, rank, lr)
    return torch.optim.AdamW([p for name, p in model.named_parameters() if name.endswith(".A")], lr=lr)


def _optimizer_first(model, names, rank, lr):
    optimizer = torch.optim.AdamW(_trained(model), lr=lr)
    add_adapters(model, names, rank, lr)
    return optimizer


_NOTHING_LEFT = "nothing is left to train: requires_grad_(False) came after the adapters, and froze them too; freeze first, then add."
_NO_ADAPTER = (
    "no layer of the model has become an adapter, so there is nothing to train: named_modules() has whole paths, such as "
    "model.layers.0.self_attn.q_proj; compare the last part, and put the LoRALinear into the parent with setattr."
)


def _explain_lora(got, expected):
    if not got["the adapters"]["around"]:
        return _NO_ADAPTER
    return _NOTHING_LEFT if got["the adapters"]["error"] else None


_NOTHING_TRAINED = ("empty parameter list", "does not require grad")


@quietly
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


def _held_out(*, mode=True, back=True, grad=False, weigh=True, first=False, last=True):
    """A wrong ``held_out_loss``."""

    def wrong(model, rows):
        model.train(not mode)
        total, items, parts = 0.0, 0, 0
        with torch.set_grad_enabled(grad):
            for micro in split(rows, 4):
                if not last and len(micro["labels"]) < 4:
                    break
                count = int((micro["labels"] != IGNORED).sum()) if first else count_targets(micro["labels"])
                total += model(**micro, use_cache=False).loss.item() * (count if weigh else 1)
                items, parts = items + count, parts + 1
        model.train(back)
        return total / (items if weigh else parts)

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


@quietly
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
    says = _TOO_MUCH_TO_EVALUATE.get(what, rows) if what else ""
    return f"{says} {over_budget(got['the card'])}" if says and got["the card"].over else says


EXERCISES = (
    Exercise(
        id="5.6", title="adapters with something to train", difficulty=2, minutes=8,
        trains="the order of freezing, adding and handing to the optimizer",
        reference=add_adapters,
        observe=_observe_lora,
        explain=_explain_lora,
        changes=("model",),
        mistakes=(
            Mistake("beside the layers", _beside,
                    "the adapters hang on the model under names with dots, and no forward goes through them: setattr wants the parent, model.get_submodule(parent), and the last part of the name."),
            Mistake("base not frozen", _base_not_frozen,
                    "the adapters are there and the rest of the model is trained as well: freeze it before you add them."),
            Mistake("every linear layer", _every_linear,
                    "every linear layer has an adapter, the output's with its large vocabulary too: only the layers named were asked for."),
            Mistake("B not zero", _random_b,
                    "the model has changed before its first update: B must start at zero, as LoRALinear leaves it, so that training starts from the base."),
            Mistake("A alone", _a_alone,
                    "the optimizer has A and not B: B stays zero, so the product stays zero, and so does A's gradient."),
            Mistake("optimizer first", _optimizer_first,
                    "the optimizer was made before the adapters: it has the frozen weights, which get no gradient, and never hears of A and B."),
        ),
    ),
    Exercise(
        id="5.7", title="an evaluation within the card", difficulty=2, minutes=8,
        trains="what an evaluation holds, and what it must leave as it was",
        reference=held_out_loss,
        observe=_observe_evaluation,
        explain=_explain_evaluation,
        mistakes=(
            Mistake("a graph", _held_out(grad=True), _TOO_MUCH_TO_EVALUATE["a graph"]),
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
)  # fmt: skip
