"""Lesson 10's script for several machines, its budgets, and the gradients of its cut layers."""

from __future__ import annotations

import re

import torch
from support.paths import ROOT
from torch.distributed.run import get_args_parser

from gradmem_lib.course import models, run_ranks, torchrun
from gradmem_lib.course.lessons.lesson_10 import exercises

SOURCE = (ROOT / "solutions" / "10_beyond_one_card.py").read_text(encoding="utf-8")
TEXT = " ".join(SOURCE.replace("\n# ", "\n").split())


def test_the_budgets_that_the_exercises_state():
    assert f"on one of 2 ranks may take **{exercises.WRAP_CARD:,} bytes**" in TEXT
    assert f"on 4 ranks may take **{exercises.SHARD_CARD:,} bytes**" in TEXT


GRADIENTS = """
import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh
from gradmem_lib.course import models
CELLS
net, alone = (models.tiny_llama(layers=2, vocab=128) for _ in range(2))
cut_layers(net)
ids = torch.arange(64).view(2, 32)
for model in (net, alone):
    model(input_ids=ids, labels=ids).loss.backward()
for p, q in zip(net.parameters(), alone.parameters(), strict=True):
    whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    torch.testing.assert_close(whole, q.grad, atol=1e-6, rtol=1e-4)
"""


def test_layers_that_are_cut_have_the_gradients_of_one_process():
    cells = re.split(r"^# %%.*$", SOURCE, flags=re.M)
    needed = [cell for cell in cells if "import Replicate" in cell or "def cut_layers(" in cell]
    run_ranks(exec, GRADIENTS.replace("CELLS", "".join(needed)), {})


def test_the_script_trains_on_two_machines_of_two_cards(tmp_path):
    """Four processes of this computer in place of cards, and a tiny model."""
    command = re.search(r"^# torchrun (--nnodes.*) train.py$", SOURCE, re.M)[1]
    given = get_args_parser().parse_args([*command.split(), "train.py"])
    script = re.search(r"^# ```python\n(.*?)^# ```$", SOURCE, re.M | re.S)[1]
    script = re.sub(r"^# ?", "", script, flags=re.M)
    (tmp_path / "my_rows.py").write_text(
        "import torch\n"
        "rows = list(torch.randint(0, 128, (8, 16), generator=torch.Generator().manual_seed(0)))\n"
    )
    tiny = "__import__('gradmem_lib.course', fromlist=['models']).models.tiny_llama(vocab=128)"
    script = re.sub(r"AutoModelForCausalLM\.from_pretrained\(.*?\)", tiny, script)
    for old, new in (
        (f"MACHINES, CARDS = {given.nnodes}, {given.nproc_per_node}", "MACHINES, CARDS = 2, 2"),
        ('"cuda"', '"cpu"'),
        ('"weights.pt"', repr(str(tmp_path / "weights.pt"))),
    ):
        assert old in script
        script = script.replace(old, new)
    torchrun(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{script}", processes=4)
    saved = torch.load(tmp_path / "weights.pt")
    fresh = models.tiny_llama(vocab=128).state_dict()
    assert {name: t.shape for name, t in saved.items()} == {n: t.shape for n, t in fresh.items()}
    assert not torch.equal(saved["lm_head.weight"], fresh["lm_head.weight"])
