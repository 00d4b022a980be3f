"""Lesson 05's exercise about dtypes: what autocast casts, and what the weights and an optimizer's
states are.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, Seen
from ..shared.settings import flat, quietly
from .settings import bf16_setting


def train_mixed(model, batches, lr):
    """One AdamW update for each batch, in place: matrices multiplied in bf16, weights and states in
    float32; the optimizer.
    """
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _mixed(before=lambda model: model, after=lambda model: None, *, auto=True):
    """A wrong ``train_mixed``: what it does to the model before, what it does after an update."""

    def wrong(model, batches, lr):
        model = before(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=auto):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after(model)
        return optimizer

    return wrong


def _new_parameters(model):
    for name, parameter in list(model.named_parameters()):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, nn.Parameter(parameter.detach().float()))
    return model


@quietly
def _observe_states(candidate):
    model, batches = bf16_setting()
    products, seen = [], []

    def look(module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        same = [
            i
            for i, batch in enumerate(batches)
            if ids is not None and torch.equal(ids, batch["input_ids"])
        ]
        seen.append(same[0] if same else -1)

    handles = [
        model.lm_head.register_forward_hook(
            lambda module, args, out: products.append(str(out.dtype))
        ),
        model.register_forward_pre_hook(look, with_kwargs=True),
    ]
    optimizer = candidate(model, batches, 1e-5)
    for handle in handles:
        handle.remove()
    states = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    first = [state.get("exp_avg", state.get("m")) for state in optimizer.state.values()]
    return Seen(
        {
            "the weights": {
                "dtypes": " and ".join(sorted({str(p.dtype) for p in model.parameters()})),
                "the head is still tied to the embedding (1 is yes)": int(
                    model.lm_head.weight is model.get_input_embeddings().weight
                ),
            },
            "the states": {
                "dtypes": " and ".join(sorted({str(t.dtype) for t in states})),
                "how many": len(states),
            },
            "products": {"dtypes, forward by forward": products},
            "the batches": {"in the order in which they are seen": seen},
            "the learning rate": {"of the optimizer": float(optimizer.param_groups[0]["lr"])},
            "the weight decay": {
                "of the optimizer": float(optimizer.param_groups[0].get("weight_decay", 0.01))
            },
            "after three updates": {"weights": flat(model.parameters())},
        },
        moments=flat(first) if first else torch.empty(0),
        updates=max(counts, default=0),
        counts_updates=isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)),
    )


def _explain_states(got, expected):
    if got["the batches"] != expected["the batches"]:
        order = got["the batches"]["in the order in which they are seen"]
        seen = ", ".join(str(i + 1) for i in order)
        return (
            f"each batch makes one update, in order: the model sees batch {seen or 'none'}, but "
            "should see 1, 2, 3."
        )
    says = (
        _why_no_update(got)
        or _why_dtypes(got, expected)
        or _why_settings(got, expected)
        or _why_other_updates(got, expected)
    )
    if says:
        return says
    same = [name for name in expected if difference(got[name], expected[name]) is None]
    if len(same) < len(expected) - 1:
        return None
    return _why_gradients(got.notes["moments"], expected.notes["moments"])


def _why_no_update(got) -> str | None:
    if got.notes["counts_updates"] and not got.notes["updates"]:
        return (
            "the returned optimizer has not updated any weight: call its step() after each "
            "backward, and zero_grad() only after the step."
        )
    return None


def _why_other_updates(got, expected) -> str | None:
    mine, right = (seen.notes["updates"] for seen in (got, expected))
    if not got.notes["counts_updates"] or mine == right:
        return None
    updates = "1 update" if mine == 1 else f"{mine} updates"
    return (
        f"the returned optimizer has made {updates}, but should have made {right}: make one "
        "optimizer before the loop, and call its step() once for each batch."
    )


def _why_dtypes(got, expected) -> str | None:
    """What is said of the dtypes of products, weights and states."""
    for dtype in got["products"]["dtypes, forward by forward"]:
        if "float16" in dtype and "bfloat16" not in dtype:
            return (
                "matrices are multiplied in float16, but bfloat16 was asked for: "
                "torch.autocast('cpu', dtype=torch.bfloat16)."
            )
    wide_states = "bfloat16" not in got["the states"]["dtypes"]
    if "bfloat16" in got["the weights"]["dtypes"] and wide_states:
        return (
            "the states are float32, but the weights are bf16 in the end: cast once, before the "
            "optimizer is made, and do not cast back."
        )
    if got["the states"]["how many"] != expected["the states"]["how many"] and wide_states:
        return (
            "AdamW keeps two states for each weight here: this optimizer keeps another number "
            "(amsgrad, or another kind?)."
        )
    return None


def _why_settings(got, expected) -> str | None:
    if got["the learning rate"] != expected["the learning rate"]:
        return "the learning rate is not the one that was given: pass lr=lr to AdamW."
    if got["the weight decay"] != expected["the weight decay"]:
        return "the weight decay is not AdamW's default, 0.01: this is Adam, or another setting."
    return None


def _why_gradients(mine, right) -> str | None:
    """What is said of AdamW's first moments, which have the size of the gradients."""
    along = (mine @ right / right.square().sum()).item() if mine.shape == right.shape else math.nan
    if along < 0:
        return "the gradients have the wrong sign: this increases the loss."
    if along < 0.5:
        return (
            "the gradients are much too small when AdamW takes them: they were clipped or divided."
        )
    if along > 1.2:
        return (
            "the gradients are too large when AdamW takes them: without zero_grad(), they "
            "include the gradients of earlier batches."
        )
    return None


EXERCISES = (
    Exercise(
        id="5.5",
        title="a checkpoint in bf16, states in float32",
        difficulty=2,
        minutes=6,
        trains="knowing where autocast ends and a model's own dtype begins",
        reference=train_mixed,
        observe=_observe_states,
        explain=_explain_states,
        changes=("model.train", "model.config"),
        mistakes=(
            Mistake(
                "bf16 over bf16",
                _mixed(),
                (
                    "weights and AdamW's states are bf16: autocast (bf16=True) chooses the dtype "
                    "of operations, and does not change a checkpoint's weights; call "
                    "model.float() first."
                ),
            ),
            Mistake(
                "half",
                _mixed(lambda model: model.half()),
                (
                    "half() is float16, not float32: each number still has two bytes, and small "
                    "gradients become 0."
                ),
            ),
            Mistake(
                "after the first update",
                _mixed(after=lambda model: model.float()),
                (
                    "model.float() comes after the first update: AdamW has already made its "
                    "states in bf16, and the mixture of dtypes raises an error; cast first."
                ),
            ),
            Mistake(
                "trains a copy",
                _mixed(lambda model: copy.deepcopy(model).float()),
                (
                    "this trains a copy, and the given model has not changed: model.float() casts "
                    "in place."
                ),
            ),
            Mistake(
                "new parameters",
                _mixed(_new_parameters),
                (
                    "new parameters break the tie between embedding and head: the head keeps its "
                    "own, in bf16; model.float() casts in place and keeps ties."
                ),
            ),
            Mistake(
                "no autocast",
                _mixed(lambda model: model.float(), auto=False),
                (
                    "weights and states are float32, and so is everything else: forward runs "
                    "outside torch.autocast."
                ),
            ),
        ),
    ),
)
