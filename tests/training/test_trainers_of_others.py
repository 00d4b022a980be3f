"""Trainers that others write on ``Trainer``: preferences with a reference model, precomputed
log-probabilities, samples that are drawn inside a step. ``MemoryCallback`` watches and changes no
bit.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.trainers import plain_arguments, small
from transformers import PrinterCallback, Trainer, TrainerCallback

from gradmem_lib import MemoryCallback, MemoryTracker, diagnose

SECOND_MODELS = ("The weights are there more than once", "A second model is in memory")
PROMPT, REST, VOCABULARY = 4, 8, 512


class Pairs(torch.utils.data.Dataset):
    """A prompt with a chosen and a rejected answer, (2, PROMPT + REST)."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(3, VOCABULARY, (2, PROMPT + REST), generator=generator)
        ids[1, :PROMPT] = ids[0, :PROMPT]
        return {"input_ids": ids}


def log_probabilities(model, ids):
    """Of each row's answer, (rows,)."""
    log_p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None])[:, PROMPT - 1 :, 0].sum(1)


class OfPreferences(Trainer):
    """As trl's DPOTrainer: a loss of its own, and a reference model or what it said before."""

    reference = None
    said: dict | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"].flatten(0, 1)
        log_p = log_probabilities(model, ids)
        if self.said is None:
            with torch.no_grad():
                before = log_probabilities(self.reference, ids)
        else:
            before = torch.stack([self.said[tuple(row.tolist())] for row in ids])
        gain = (log_p - before).view(-1, 2)
        return -F.logsigmoid(0.1 * (gain[:, 0] - gain[:, 1])).mean()


class OfSamples(OfPreferences):
    """As trl's GRPOTrainer: it draws answers inside the step, and scores them by two models."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"][:, 0]
        with torch.no_grad():
            for _ in range(2):
                logits = model(input_ids=ids).logits[:, -1]
                drawn = torch.multinomial(logits.softmax(-1), 1)
                ids = torch.cat([ids, drawn], 1)
            old = log_probabilities(model, ids)
            far = log_probabilities(self.reference, ids) - old
        reward = ids.float().std(1)
        ratio = (log_probabilities(model, ids) - old).exp()
        return -(ratio * (reward - reward.mean() + 0.1 * far)).mean()


class Weights(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **more):
        self.found = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def trained(kind, tmp_path, watch, accumulation, precompute=False):
    """The weights after two steps, and what watched them."""
    torch.manual_seed(0)
    model = small(layers=2)
    arguments = plain_arguments(
        tmp_path,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    weights = Weights()
    trainer = kind(model, arguments, train_dataset=Pairs(), callbacks=[weights])
    trainer.remove_callback(PrinterCallback)
    trainer.reference = copy.deepcopy(model).requires_grad_(False)
    trainer.model_accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides
    if precompute:
        with torch.no_grad():
            pairs = Pairs()
            rows = torch.cat([pairs[i]["input_ids"] for i in range(len(pairs))])
            said = log_probabilities(trainer.reference, rows)
        trainer.said = {tuple(row.tolist()): one for row, one in zip(rows, said, strict=True)}
        trainer.reference = None
    watched = None
    if watch is None:
        trainer.train()
    elif watch is MemoryTracker:
        with MemoryTracker(model, live=False) as watched:
            trainer.train()
    else:
        with MemoryCallback(live=False) as watched:
            trainer.add_callback(watched)
            trainer.train()
    return weights.found, watched


@pytest.mark.parametrize(("kind", "accumulation"), [(OfPreferences, 1), (OfSamples, 4)])
def test_a_trainer_of_ones_own_is_watched_to_the_bit(kind, accumulation, tmp_path):
    plain, _ = trained(kind, tmp_path, None, accumulation)
    for watch in (MemoryCallback, MemoryTracker):
        found, watched = trained(kind, tmp_path, watch, accumulation)
        assert torch.equal(found, plain)
        causes = [cause.name for cause in diagnose(watched).causes]
        assert any(cause in SECOND_MODELS for cause in causes)
        assert "Losses are added up before one backward" not in causes


def test_the_remedy_for_a_reference_model_takes_its_weights_away(tmp_path):
    found = {}
    for precompute in (False, True):
        weights, watched = trained(OfPreferences, tmp_path, MemoryCallback, 4, precompute)
        found[precompute] = weights, watched.peak.total, diagnose(watched)
    torch.testing.assert_close(found[True][0], found[False][0])
    causes = [cause for cause in found[False][2].causes if cause.name in SECOND_MODELS]
    assert found[True][1] <= found[False][1] - 0.9 * causes[0].nbytes
    assert not [cause for cause in found[True][2].causes if cause.name in SECOND_MODELS]
