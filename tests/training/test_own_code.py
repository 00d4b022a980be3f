"""Each line of the tables of docs/own_code.md runs, and those for loops do what is said of them."""

from __future__ import annotations

import copy
import re
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from support.gradients import ragged
from support.paths import ROOT
from support.trainers import plain_arguments, rows, small
from torch.optim.lr_scheduler import StepLR
from transformers import Trainer

import gradmem_lib
from gradmem_lib import MemoryCallback, Recipe, count_targets, next_token_loss, prepare, split

PAGE = (ROOT / "docs" / "own_code.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## What you have, and its one line\n")[2].partition("\n## ")[0]
LINES = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `(.+)` \|$", SECTION, re.MULTILINE)
RECIPE = Recipe(attention="eager", accumulation=4)


def batch():
    rows = ragged((24, 3, 17, 2, 9, 24, 5, 4), 64)
    del rows["attention_mask"]
    return rows


def of_pair(model, pair):
    ids, labels = pair
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def names(folder):
    """What a reader of the page has."""
    model = small(layers=1, hidden=32, intermediate=48, vocab=64).double()
    found = {name: getattr(gradmem_lib, name) for name in gradmem_lib.__all__}
    args, data = plain_arguments(folder, gradient_accumulation_steps=2), rows(16, 24, 64)
    made = prepare(copy.deepcopy(model), RECIPE)
    return found | {
        "model": model,
        "recipe": RECIPE,
        "batch": batch(),
        "pair": (batch()["input_ids"], batch()["labels"].clamp(min=0)),
        "of_pair": of_pair,
        "micro_batches": list(split(batch(), 2)),
        "loss_and_count": lambda micro: next_token_loss(model, micro),
        "count": lambda micro: count_targets(micro["labels"]),
        "optimizer": made.optimizer,
        "scheduler": StepLR(made.optimizer, 1, 0.5),
        "prepared": Accelerator(cpu=True).prepare(model),
        "Trainer": Trainer,
        "args": args,
        "rows": data,
        "memory": MemoryCallback(live=False),
        "trainer": Trainer(model, args, train_dataset=data),
        "stepped": made.model,
    }


def test_a_line_for_each_kind_of_loop():
    kinds = " ".join(kind for kind, _, _ in LINES)
    for word in ("own loop", "`Trainer`", "trl", "Lightning", "accelerate"):
        assert word in kinds


@pytest.mark.parametrize("line", [line for _, _, line in LINES])
def test_the_line_runs(line, tmp_path):
    known = names(tmp_path)
    if line.startswith(("step(", "loss = step(")):
        known["model"] = known["stepped"]
    with known["memory"]:
        exec(line, known)  # the page's own line


_, _, TABLE = PAGE.partition("## Every public name\n")
NAMES = re.findall(r"^\| (`.+`) \| [^|]+ \| `(.+)` \|$", TABLE, re.MULTILINE)


def test_every_public_name_has_a_line():
    listed = [name for cell, _ in NAMES for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == gradmem_lib.__all__


def example_names(folder):
    """What the examples of public names speak of besides."""
    known = names(folder)
    model, batch = known["model"].float(), known["batch"]
    optimizer = torch.optim.AdamW(model.parameters())

    def train_one_step():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with gradmem_lib.MemoryTracker(model, optimizer, live=False) as tracker:
        train_one_step()
    sizes = {"batch_size": 8, "seq_len": 16}
    return known | {
        "optimizer": optimizer,
        "torch": torch,
        "suppress": suppress,
        "train_one_step": train_one_step,
        "tracker": tracker,
        "prediction": gradmem_lib.predict(model, **sizes),
        "on_a_card": gradmem_lib.predict(model, target="cuda", **sizes),
        "found": gradmem_lib.plan(model, card="24 GiB", seq_len=16, global_batch=8),
        "accumulated": gradmem_lib.Accumulated(1.0, 8),
        "adapted": prepare(copy.deepcopy(model).float(), Recipe(lora_rank=2)).model,
        "parts": list(torch.randn(8, 4).split(2)),
        "embed": torch.nn.Linear(4, 4),
        "contrast": lambda embedded: (embedded @ embedded.T).logsumexp(-1).sum(),
        "loss": torch.ones(()),
        "text": "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "answer": ...,
    }


def test_the_example_of_each_name_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADMEM_LIVE", "0")
    known = example_names(tmp_path)
    for _, line in NAMES:
        exec(line, dict(known))
