"""What lesson 03 says in figures that none of its cells prints."""

import pytest
import torch.nn.functional as F
import transformers
from support.paths import ROOT

from gradmem_lib.course.lessons.shared import hf_trainer

SOURCE = ROOT / "solutions" / "03_gradient_accumulation.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())


class OwnLoss(transformers.Trainer):
    """The next token's cross-entropy in a ``compute_loss`` of one's own."""

    reduction = "mean"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), reduction=self.reduction)
        return loss if self.reduction == "mean" else loss / num_items_in_batch


class OwnSum(OwnLoss):
    reduction = "sum"


@pytest.mark.parametrize("trainer, times_too_large", [(OwnLoss, 4.8), (OwnSum, 1.0)])
def test_a_compute_loss_of_ones_own_decides_whether_the_number_is_used(
    trainer, times_too_large, monkeypatch
):
    assert "the Llama's gradient is then 4.8 times too large" in TEXT
    assert "Return the sum, divided by `num_items_in_batch`" in TEXT
    monkeypatch.setattr("transformers.Trainer", trainer)
    factors = hf_trainer.trainer_factors("LlamaForCausalLM", steps=4)
    assert round(factors["grad_norm"], 1) == times_too_large


def test_divided_by_all_tokens_over_the_number_of_processes():
    """Two processes' means of gradients of sums, each divided by 212 / 2, are the mean of all."""
    assert TEXT.count("divide by the count of all processes over their number") == 1
    assert "divides by the count of all processes over their number" in TEXT
    sums, tokens = (3.0, 5.0), 22 + 190
    exact = sum(sums) / tokens
    assert sum(one / (tokens / 2) for one in sums) / 2 == pytest.approx(exact)
    assert sum(one / tokens for one in sums) / 2 == pytest.approx(exact / 2)
