"""Lesson 05's exercises about what is left of a model: adapters with something to train, an
evaluation within the card.
"""

from __future__ import annotations

import torch
from torch import nn

from ....techniques.lora import LoRALinear
from ...judge.exercise import Exercise, Mistake, measure
from ..shared.settings import quietly
from .settings import LORA_CARD, lora_setting

LORA_NAMES = ("q_proj", "v_proj")


def add_adapters(model, names, rank, lr):
    """Freeze ``model``, put a ``LoRALinear`` around every layer whose last name is in ``names``;
    AdamW for what is trained.
    """
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
    return torch.optim.AdamW(
        [p for name, p in model.named_parameters() if name.endswith(".A")], lr=lr
    )


def _optimizer_first(model, names, rank, lr):
    optimizer = torch.optim.AdamW(_trained(model), lr=lr)
    add_adapters(model, names, rank, lr)
    return optimizer


_NOTHING_LEFT = (
    "nothing is left to train: requires_grad_(False) came after the adapters, and "
    "froze them too; freeze first, then add."
)
_BESIDE = (
    "the adapters hang on the model itself, and no forward goes through them: setattr needs the "
    "parent, model.get_submodule(parent), and the last part of the name."
)
_NO_ADAPTER = (
    "no layer of the model has become an adapter, so there is nothing to train: named_modules() "
    "has whole paths, such as model.layers.0.self_attn.q_proj; compare the last part, and put the "
    "LoRALinear into the parent with setattr."
)
# An optimizer that is made first, and one whose adapters were never put into the model, are stopped
# by the same error at the same place.
_NO_ADAPTER_YET = (
    "when the optimizer is made, no layer of the model is an adapter, so it gets an empty list: "
    "freeze, add the adapters, and only then make the optimizer. If you do it in this order, put "
    "each LoRALinear into its layer's parent with setattr: named_modules() has whole paths, such "
    "as model.layers.0.self_attn.q_proj."
)


def _explain_lora(got, expected):
    if not got["the adapters"]["around"]:
        if got["the adapters"]["error"] == "empty parameter list":
            return _NO_ADAPTER_YET
        return _NO_ADAPTER
    if got["the adapters"]["error"]:
        if got["numbers that are trained"]:
            return _BESIDE  # the loss does not depend on them
        return _NOTHING_LEFT
    other, right = (seen["other names, another rank and rate"] for seen in (got, expected))
    wrong = [name for name in right if other[name] != right[name]]
    said = {
        "around": (
            "the adapters are not around the right layers: wrap all layers whose last name "
            "is in `names`, and no others."
        ),
        "ranks": (
            f"`rank` has no effect: the adapters have rank {other['ranks']}, but "
            f"{right['ranks']} was asked for."
        ),
        "an AdamW (1 is yes)": (
            "the optimizer is no AdamW: return torch.optim.AdamW, with its default settings."
        ),
        "scales": "the adapters have another scale: make them by LoRALinear(layer, rank).",
        "learning rates": (
            f"`lr` has no effect: the optimizer has {other['learning rates']}, but "
            f"{right['learning rates']} was asked for."
        ),
    }
    if wrong and wrong[0] in said:
        return said[wrong[0]]
    return _why_trained(got, expected)


def _why_trained(got, expected) -> str | None:
    """What is said of the numbers that are trained, and of how they move."""
    numbers = [seen["two updates"]["numbers that are trained"] for seen in (got, expected)]
    if numbers[0] > numbers[1]:
        return (
            f"{numbers[0] - numbers[1]:,} numbers too many require a gradient: train only A and B "
            "of the adapters, and freeze all else, the head and the norms too."
        )
    if numbers[0] < numbers[1]:
        return (
            f"{numbers[1] - numbers[0]:,} numbers too few require a gradient: A and B of each "
            "adapter are both trained."
        )
    moved, all_of_them = (
        seen["two updates"]["matrices A and B that have moved"] for seen in (got, expected)
    )
    if moved[0] < all_of_them[0] and moved[1]:
        return (
            f"{moved[0]} of {all_of_them[0]} matrices A move, and {moved[1]} matrices B: hand both "
            "matrices of each adapter to the optimizer."
        )
    if got["two updates"]["largest number in B, in learning rates"] != 2:
        return (
            "B does not move as AdamW moves it, by about lr in each update: return "
            "torch.optim.AdamW, with its default settings."
        )
    return None


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
                (p, p.clone())
                for name, p in model.named_parameters()
                if name.endswith((".A", ".B"))
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
    adapters = {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }
    trained = sum(p.numel() for p in _trained(model))
    found = {"the adapters": {"around": " ".join(sorted(adapters)), "error": stopped}}
    if stopped:
        return found | {"numbers that are trained": trained}
    largest = max((m.B.abs().max().item() for m in adapters.values()), default=0.0)
    return found | {
        "before the first update": {"change of the logits": changed},
        "two updates": {
            "matrices A and B that have moved": [
                sum(not torch.equal(m.A, starts[m.A]) for m in adapters.values()),
                sum(not torch.equal(m.B, starts[m.B]) for m in adapters.values()),
            ],
            "numbers that are trained": trained,
            "weights of the base that have moved": sum(
                not torch.equal(p, w) for p, w in weights.items()
            ),
            "largest number in B, in learning rates": round(largest / 0.01),
        },
        "the card": measured,
        "other names, another rank and rate": _other_adapters(candidate),
    }


def _other_adapters(candidate) -> dict:
    model, _ = lora_setting()
    # The head is the model's last module, and in none of its layers. No layer is called "up_",
    # though that is a part of a name.
    optimizer = candidate(model, ("o_proj", "lm_head", "up_"), 3, 0.002)
    adapters = {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        "around": " ".join(sorted(adapters)),
        "an AdamW (1 is yes)": int("adamw" in type(optimizer).__name__.lower()),
        "ranks": sorted({len(m.A) for m in adapters.values()}),
        "scales": sorted({m.scale for m in adapters.values()}),
        "learning rates": sorted({float(group["lr"]) for group in optimizer.param_groups}),
        "parameters that are trained and not handed to the optimizer": sum(
            id(p) not in held for p in _trained(model)
        ),
    }


EXERCISES = (
    Exercise(
        id="5.6",
        title="adapters with something to train",
        difficulty=2,
        minutes=8,
        trains="the order of freezing, adding and handing to the optimizer",
        reference=add_adapters,
        observe=_observe_lora,
        explain=_explain_lora,
        changes=("model.requires_grad", "model.hook"),
        mistakes=(
            Mistake(
                "beside the layers",
                _beside,
                _BESIDE,
            ),
            Mistake(
                "base not frozen",
                _base_not_frozen,
                (
                    "the adapters are there, but the rest of the model is trained too: freeze it "
                    "before you add them."
                ),
            ),
            Mistake(
                "every linear layer",
                _every_linear,
                (
                    "every linear layer has an adapter, even the output layer with its large "
                    "vocabulary: wrap only the named layers."
                ),
            ),
            Mistake(
                "B not zero",
                _random_b,
                (
                    "the model has changed before its first update: B must start at zero, as "
                    "LoRALinear leaves it, so that training starts from the base."
                ),
            ),
            Mistake(
                "A alone",
                _a_alone,
                (
                    "the optimizer has A but not B: B stays zero, so the product stays zero, and "
                    "so does A's gradient."
                ),
            ),
            Mistake(
                "optimizer first",
                _optimizer_first,
                (
                    "the optimizer was made before the adapters: it has the frozen weights, which "
                    "get no gradient, and it does not have A and B."
                ),
            ),
        ),
    ),
)
