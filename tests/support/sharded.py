"""Run in every rank by the tests of sharding: optimizer steps of several ranks, and of one process
on all their rows; and checkpoints that another number of ranks loads.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from support.families import tiny_config, with_dropout
from support.gradients import error, own_loss
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gradmem_lib.model.classes import model_class, predicts_next_token
from gradmem_lib.model.inputs import example_batch
from gradmem_lib.training.prepare import prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step

ROWS = 4  # of each rank


def model_of(family: str, dtype: torch.dtype) -> torch.nn.Module:
    config = with_dropout(tiny_config(family), 0.0)
    torch.manual_seed(0)
    model = model_class(config)(config).to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model


def batch_of(model: torch.nn.Module, rows: int) -> dict:
    """Rows of unequal numbers of labels."""
    torch.manual_seed(1)
    batch = example_batch(model, rows, 12)
    if batch["labels"].dim() == 2:
        ends = torch.randint(2, 13, (rows, 1))
        batch["labels"] = batch["labels"].masked_fill(torch.arange(12) >= ends, -100)
    return batch


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def exact_loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The model's own loss in float64: transformers' own is computed in float32."""
    shifted = batch["labels"].dim() == 2 and predicts_next_token(model)
    return own_loss(model, batch, shifted)


def trained(family: str, recipe: Recipe, rows, clip: float, peft: bool):
    """Gradients of each step, the weights after the last, and the losses."""
    model = model_of(family, torch.float64)
    whole_batch = batch_of(model, ROWS * dist.get_world_size())
    batch = {name: t[rows].contiguous() for name, t in whole_batch.items()}
    torch.manual_seed(2)
    if peft:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).double()
    if family == "albert" and recipe.fully_sharded:
        # one layer that is called again and again: found by nobody
        for layer in model.albert.encoder.albert_layer_groups:
            fully_shard(layer)
        fully_shard(model)
        recipe = replace(recipe, sharding=None)
    model, optimizer, undo = prepare(model, recipe)
    seen = []

    def mark(part: str) -> None:
        if part == "step":
            weights = [p for p in model.parameters() if p.requires_grad]
            seen.extend(whole(p.grad).clone() for p in weights if p.grad is not None)

    given = {"mark": mark, "loss": exact_loss, "max_grad_norm": clip or None}
    with undo:
        losses = [step(model, optimizer, batch, recipe, **given) for _ in range(2)]
    return {
        "gradients": seen,
        "weights": [whole(p.detach()) for p in model.parameters()],
        "losses": losses,
    }


def distance(family: str, recipe: Recipe, **options) -> float:
    """The largest relative distance of all gradients, weights or losses from one process's, found
    by the first rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = trained(family, recipe, slice(rank, None, ranks), **options)
    if rank:
        return 0.0
    memory_alone = {"checkpointing": None, "every_n_layers": None, "offload": None}
    alone = replace(recipe, sharding=None, accumulation=1, **memory_alone)
    there = one_process(family, alone, **options)
    assert there["gradients"] or recipe.in_backward
    return max(far(here[kind], there[kind]) for kind in here if there[kind])


@cache
def one_process(family: str, recipe: Recipe, **options):
    return trained(family, recipe, slice(None), **options)


def far(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The distance of all tensors together, since some gradients are 0 but for rounding (a key's
    bias); bytes have to be equal.
    """
    assert len(some) == len(others), (len(some), len(others))
    whole_numbers = [not t.is_floating_point() for t in others]
    if not all(torch.equal(a, b) for a, b, n in zip(some, others, whole_numbers, strict=True) if n):
        return float("inf")
    a, b = (
        torch.cat([t.double().flatten() for t, n in zip(ts, whole_numbers, strict=True) if not n])
        for ts in (some, others)
    )
    return error(a, b)


def distances(cases: dict[str, tuple]) -> dict[str, float | str]:
    """``cases``: by name, the family, and the recipe's fields and options. What each found."""
    warnings.filterwarnings("ignore")
    found = {}
    for name, (family, fields) in cases.items():
        fields = {"precision": None, "attention": None} | fields
        options = {"clip": fields.pop("clip", 0.0), "peft": fields.pop("peft", False)}
        try:
            found[name] = distance(family, Recipe(**fields), **options)
        except Exception as error:  # every rank says the same
            found[name] = f"{type(error).__name__}: {error}"
    return found


def resumed(folder: str, fields: dict, steps: int, load: bool, save: bool):
    """``steps`` on the same 8 rows, from and to a distributed checkpoint: the weights, as one
    process has them.
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = model_of("llama", torch.float64)
    if load:
        torch.nn.init.zeros_(next(model.parameters()))  # what is not loaded is seen
    batch = {name: rows[rank::ranks] for name, rows in batch_of(model, 8).items()}
    torch.manual_seed(rank)
    recipe = Recipe(precision=None, **fields)
    model, optimizer, _ = prepare(model, recipe, lr=1e-2)

    def state():
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    if load:
        found = state()
        checkpoint.load(found, checkpoint_id=folder)
        given = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(model, optimizer, **given)
    for _ in range(steps):
        step(model, optimizer, batch, recipe, loss=exact_loss)
    if save:
        checkpoint.save(state(), checkpoint_id=folder)
    return [whole(p.detach()) for p in model.parameters()]


def saved(folder: str, fields: dict):
    """A checkpoint after one step; and the weights after two steps of a training that goes on."""
    resumed(folder, fields, 1, load=False, save=True)
    return resumed(folder, fields, 2, load=False, save=False)
