"""What lesson 03 says in figures that none of its cells prints."""

import contextlib
import io
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.paths import ROOT

from gradmem_lib import (
    MemoryTracker,
    accumulate_gradients,
    check_pieces_add_up,
    next_token_loss,
    split,
)
from gradmem_lib.course import models
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


def test_the_peak_is_in_forward_while_three_large_tensors_are_alive():
    """Logits of all positions, and a copy and a log-softmax without the last one."""
    assert "where three large tensors are alive: logits, a copy without the last position" in TEXT
    assert "Backward's three tensors (lesson 01) all lack that position" in TEXT
    rows, length, vocab = 4, 16, 512
    model = models.tiny_llama(layers=1, hidden=32, heads=2, intermediate=64, vocab=vocab)
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(0, vocab, (rows, length)))
    with MemoryTracker(model, live=False) as tracker:
        loss, _ = next_token_loss(model, batch)
        loss.backward()
    assert tracker.peak.phase == "forward"
    shorter = rows * (length - 1) * vocab * 4
    largest = [held.nbytes for held in tracker.largest_at_peak(3)]
    assert largest == [rows * length * vocab * 4, shorter, shorter]
    # Backward's peak is lower by one tensor's last position, and by the flat copy of the labels.
    last_position = rows * vocab * 4
    highest = tracker.peak_by_phase
    assert last_position <= highest["forward"] - highest["backward"] < 1.1 * last_position


def test_divided_by_all_tokens_and_multiplied_by_the_number_of_processes():
    """Two processes' gradients of sums, each divided by 212 and times 2, have the mean of all."""
    assert "divides by the count of all processes, and multiplies by their number" in TEXT
    sums, tokens = (3.0, 5.0), 22 + 190
    exact = sum(sums) / tokens
    assert sum(one / tokens * 2 for one in sums) / 2 == pytest.approx(exact)
    halved = sum(one / tokens for one in sums) / 2
    assert (
        halved == pytest.approx(exact / 2) and "the gradient is half as long as it should" in TEXT
    )
    assert (exact - halved) / exact == pytest.approx(0.5) and "Why is the error 0.5 then?" in TEXT


def optional_section():
    """The section on losses that compare rows, run: its names, and what it prints."""
    text = SOURCE.read_text(encoding="utf-8")
    section = text.partition("# ## Optional: losses that compare rows")[2]
    section = section.partition("\n# ## ")[0]
    code = "\n".join(
        cell
        for cell in re.split(r"^# %%", section, flags=re.MULTILINE)[1:]
        if "[markdown]" not in cell
    )

    def take_gradient(model):
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return found

    names = {
        "torch": torch,
        "MemoryTracker": MemoryTracker,
        "accumulate_gradients": accumulate_gradients,
        "split": split,
        "take_gradient": take_gradient,
        "relative_error": lambda found, right: ((found - right).norm() / right.norm()).item(),
        "exact": models.tiny_gpt2(layers=2, hidden=32, heads=2, vocab=64, dtype=torch.float64),
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return names, printed.getvalue()


def test_a_loss_that_compares_rows_in_pieces_and_in_two_passes():
    names, printed = optional_section()
    lines = re.findall(r"(\w+) +peak +([\d,]+), error ([\d.]+)", printed)
    found = {way: (int(peak.replace(",", "")), float(error)) for way, peak, error in lines}
    assert list(found) == ["at_once", "in_pieces", "in_two_passes"]
    # The gradient of the whole loss, by this test's own loop over rows.
    encoder, pairs = names["encoder"], names["pairs"]
    vectors = []
    for name in ("question", "answer"):
        last = encoder(pairs[name]).last_hidden_state[:, -1]
        vectors.append(last / last.norm(dim=-1, keepdim=True))
    loss = 0
    for row in range(16):
        similar = vectors[1] @ vectors[0][row] / 0.1
        loss = loss + (similar.logsumexp(0) - similar[row]) / 16
    loss.backward()
    right = torch.cat([p.grad.flatten() for p in encoder.parameters()])
    encoder.zero_grad()
    for way, gradient in names["gradients"].items():
        error = ((gradient - right).norm() / right.norm()).item()
        assert round(error, 2) == found[way.__name__][1]
        assert (error < 1e-12) == (way.__name__ != "in_pieces")
    assert "miss the gradient by half of its length" in TEXT
    assert 0.45 <= found["in_pieces"][1] < 0.55
    assert "need hardly more memory than the pieces" in TEXT
    whole, pieces, passes = (peak for peak, _ in found.values())
    assert pieces < passes < 1.02 * pieces < 0.35 * whole
    assert "each question is compared with 3 others instead of 15" in TEXT
    assert "must be more similar to the question than the 15 others" in TEXT

    def loss_and_count(micro):
        return names["contrast"](*names["embed"](micro)), len(micro["answer"])

    with pytest.raises(ValueError, match="accumulate_through_embeddings"):
        check_pieces_add_up(encoder, pairs, loss_and_count, reduction="mean")
