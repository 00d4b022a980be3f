"""Run in every rank by the tests of sharding: ``make_trainer``, and checkpoints that another number
of ranks loads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from support.sharded import exact_loss, model_of, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gradmem_lib import Recipe, make_trainer, prepare, step


def rows(number: int) -> list[dict]:
    """Of unequal numbers of labels."""
    ids = torch.randint(3, 96, (number, 12), generator=torch.Generator().manual_seed(3))
    ends = torch.randint(2, 13, (number, 1), generator=torch.Generator().manual_seed(4))
    labels = ids.masked_fill(torch.arange(12) >= ends, -100)
    return [{"input_ids": i, "labels": k} for i, k in zip(ids, labels, strict=True)]


def trained(folder: str, batch_size: int, fields: dict, family: str = "llama"):
    """What three steps of ``make_trainer`` have added to the weights, in one vector; and who
    averaged the gradients.
    """
    model = model_of(family, torch.float64)
    model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    recipe = Recipe(**{"precision": None, "optimizer": "sgd"} | fields)
    trainer = make_trainer(
        model,
        recipe,
        batch_size=batch_size,
        train_dataset=rows(24),
        max_steps=3,
        output_dir=folder,
        progress=False,
        live=False,
        learning_rate=0.1,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
    )
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    change = torch.cat(
        [(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    )
    return change, type(trainer.model_wrapped).__name__


def resumed(folder: str, fields: dict, steps: int, load: bool, save: bool):
    """``steps`` on the same 8 rows, from and to a distributed checkpoint: the weights, as one
    process has them.
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = model_of("llama", torch.float64)
    if load:
        torch.nn.init.zeros_(next(model.parameters()))  # what is not loaded is seen
    batch = {
        name: torch.stack([row[name] for row in rows(8)[rank::ranks]])
        for name in ("input_ids", "labels")
    }
    torch.manual_seed(rank)
    recipe = Recipe(precision=None, **fields)
    model, optimizer, _ = prepare(model, recipe, lr=1e-2)
    if load:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    for _ in range(steps):
        step(model, optimizer, batch, recipe, loss=exact_loss)
    if save:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.save(state, checkpoint_id=folder)
    return [whole(p.detach()) for p in model.parameters()]


def saved(folder: str, fields: dict):
    """A checkpoint after one step; and the weights after two steps of a training that goes on."""
    resumed(folder, fields, 1, load=False, save=True)
    return resumed(folder, fields, 2, load=False, save=False)
