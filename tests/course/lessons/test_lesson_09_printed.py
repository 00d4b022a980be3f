"""What lesson 09 says of its cells' outputs, and of GaLore's bytes."""

from __future__ import annotations

import re

import pytest
import torch
from lesson_facts import lessons
from support.paths import ROOT

from gradmem_lib import known_model
from gradmem_lib.course.lessons.lesson_09 import exercises_galore
from gradmem_lib.course.material import models
from gradmem_lib.measure.storages import tensors_in

SOURCE = ROOT / "solutions" / "09_optimizers_and_adapters.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())


@pytest.fixture(scope="module")
def printed() -> str:
    return next(lesson for lesson in lessons() if lesson.number == "09").printed


def test_what_adamw_keeps_and_needs(printed):
    states, extra = re.search(
        r"^AdamW +states ([\d.]+) a weight, temporaries ([\d.]+) matrices", printed, re.M
    ).groups()
    assert (float(states), float(extra)) == (8, 3)
    assert "AdamW keeps 8 bytes a weight, and its step needs three matrices more" in TEXT
    muon = re.search(r"^Muon +states ([\d.]+)", printed, re.M)[1]
    assert "**Muon** keeps m too" in TEXT and float(muon) == 4


def test_a_code_must_be_finer_towards_zero(printed):
    rows = dict(re.findall(r"^equal (\w+) +(\d+)% are 0", printed, re.M))
    assert "Equal distances round many v to 0." in TEXT
    assert int(rows["distances"]) > 10 * int(rows["ratios"])


def test_muon_brings_singular_values_together(printed):
    rows = re.findall(r"^(\w+) +singular values from (\S+) to (\S+)$", printed, re.M)
    spread = {name: float(largest) / float(smallest) for name, largest, smallest in rows}
    assert "The update's singular values are far closer together." in TEXT
    assert spread["update"] < 2 < 50 < spread["gradient"]


def test_galores_states_are_smaller():
    rows, columns, rank = 576, 1536, 64
    config = known_model("SmolLM2-135M")[1]
    assert (config.hidden_size, config.intermediate_size) == (rows, columns)
    assert "a gradient G of 576 rows and 1,536 columns" in TEXT
    p, state = torch.nn.Parameter(torch.zeros(rows, columns)), {}
    p.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    exercises_galore.galore_step(p, state, rank, 200, 0.1, 0.25)
    kept = sum(t.untyped_storage().nbytes() for t in tensors_in([state]) if t.dim() == 2)
    ratio = 2 * p.nbytes / kept
    assert f"With r = {rank}, P and both moments together are {ratio:.1f} times smaller" in TEXT


def test_a_merge_in_bf16_loses_most_of_the_additions(printed):
    share = int(re.search(r"^(\d+)% of the weights stay the same", printed, re.M)[1])
    assert "Merged in bf16, most are lost." in TEXT and share > 50
    weight = models.smollm2()[0].model.layers[20].mlp.down_proj.weight
    assert "These weights are about 0.2" in TEXT
    assert weight.square().mean().sqrt().item() == pytest.approx(0.2, abs=0.05)


def test_nf4s_error_is_smaller(printed):
    rows = dict(re.findall(r"^(equal|NF4) +error ([\d.]+)% of a weight", printed, re.M))
    assert "NF4's error is smaller" in TEXT and float(rows["NF4"]) < float(rows["equal"])


def test_a_qlora_that_keeps_too_much(printed):
    rows = re.findall(r"^ +(1024|2048) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", printed, re.M)
    table = {int(n): [int(mib.replace(",", "")) for mib in row] for n, *row in rows}
    assert "QLoRA saves 150 MiB at any length" in TEXT
    assert all(lora - qlora == 150 for lora, qlora, *_ in table.values())
    assert "With kept matrices, QLoRA needs more than LoRA at both lengths" in TEXT
    assert all(matrix > lora for lora, _, _, matrix in table.values())
    assert table[1024][2] < table[1024][0] and table[2048][2] > table[2048][0]


def test_a_loss_in_chunks(printed):
    rows = re.findall(
        r"^(logits at once|yours|theirs|with options) +([\d,]+) bytes$", printed, re.M
    )
    peaks = {name: int(nbytes.replace(",", "")) for name, nbytes in rows}
    assert "Theirs saves nothing without options." in TEXT
    assert peaks["theirs"] == peaks["logits at once"] > 4 * peaks["yours"]


def test_few_directions_of_a_few_tokens(printed):
    rows = dict(re.findall(r"^rank (\d+): (\d+)% of the gradient", printed, re.M))
    assert "The cell has few tokens, and G has at most as many directions" in TEXT
    assert int(rows["64"]) == 100
