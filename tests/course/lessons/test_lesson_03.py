"""What lesson 03 says that none of its cells shows."""

import re

import pytest
import transformers
from support.lesson_text import lesson
from support.paths import ROOT
from torch.nn.functional import cross_entropy

from gradmem_lib import BudgetExceeded, MemoryTracker, split
from gradmem_lib.course import window_setting
from gradmem_lib.course.lessons.shared import hf_trainer


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())


def test_a_compute_loss_of_ones_own_that_ignores_the_number(monkeypatch):
    monkeypatch.setattr("transformers.Trainer", OwnLoss)
    factor = hf_trainer.trainer_factors("LlamaForCausalLM", steps=4)["grad_norm"]
    assert lesson("03").says(f"the Llama's gradient is then {factor:.1f} times too large.")


def test_memory_runs_out_in_the_seventh_micro_batch():
    """The lesson's own script, with a count of the micro-batches that its model has seen."""
    source = (ROOT / "solutions" / "03_gradient_accumulation.py").read_text(encoding="utf-8")
    names = {"split": split, "cross_entropy": cross_entropy}
    exec(re.search(r"^def with_entropy.*?(?=\n# %%)", source, re.DOTALL | re.MULTILINE)[0], names)
    net, optimizer, batch = window_setting()
    seen = []
    net.register_forward_pre_hook(lambda *given: seen.append(1))
    with (
        pytest.raises(BudgetExceeded, match="made in 5 forwards of this step"),
        MemoryTracker(net, optimizer, budget="2 MiB"),
    ):
        names["with_entropy"](net, optimizer, batch)
    assert len(seen) == 7
    assert lesson("03").says("On a card of 2 MiB, the memory runs out in the seventh.")
    assert lesson("03").says("Six entropies are alive, and the error counts five forwards.")
