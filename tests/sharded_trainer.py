"""Run in every rank by the tests of sharding: ``make_trainer``, and checkpoints that another number of ranks loads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sharded import model_of

from gradmem_lib import Recipe, make_trainer


def rows(number: int) -> list[dict]:
    """Of unequal numbers of labels."""
    ids = torch.randint(3, 96, (number, 12), generator=torch.Generator().manual_seed(3))
    ends = torch.randint(2, 13, (number, 1), generator=torch.Generator().manual_seed(4))
    labels = ids.masked_fill(torch.arange(12) >= ends, -100)
    return [{"input_ids": i, "labels": k} for i, k in zip(ids, labels, strict=True)]


def trained(folder: str, batch_size: int, fields: dict, family: str = "llama"):
    """What three steps of ``make_trainer`` have added to the weights, in one vector; and who averaged the gradients."""
    model = model_of(family, torch.float64)
    model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    recipe = Recipe(**{"precision": None, "optimizer": "sgd"} | fields)
    trainer = make_trainer(
        model, recipe, batch_size=batch_size, train_dataset=rows(24), max_steps=3, output_dir=folder, progress=False,
        live=False, learning_rate=0.1, max_grad_norm=0.5, lr_scheduler_type="constant",
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    change = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    return change, type(trainer.model_wrapped).__name__
