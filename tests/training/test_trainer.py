"""make_trainer takes what Trainer takes, or says why not; what it writes loads anywhere; two
processes; a budget.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support.trainers import SEQ, plain_arguments, rows, small, trainer_for
from torch import nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from gradmem_lib import MemoryCallback, Recipe, predict
from gradmem_lib.training import trainer as of_trainer

pytestmark = pytest.mark.usefixtures("interruptible")


def test_a_lora_run_goes_on_from_a_checkpoint(tmp_path):
    model, recipe = small(), Recipe(lora_rank=4)
    trainer_for(model, recipe, tmp_path, save_strategy="steps", save_steps=1).train()
    again = trainer_for(small(), recipe, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    for ours, theirs in zip(again.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("kernel", "moves", "seen"), [(True, False, False), (True, True, True)])
def test_losses_are_shown_but_where_nothing_moves(kernel, moves, seen, tmp_path, monkeypatch):
    monkeypatch.setattr(of_trainer, "in_kernel", lambda: kernel)
    monkeypatch.setattr(of_trainer, "live_enabled", lambda: moves)
    trainer = trainer_for(small(), Recipe(), tmp_path, progress=None)
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert trainer.args.disable_tqdm is not seen
    assert bool(kinds & {ProgressCallback, PrinterCallback}) == seen


def test_two_cards_without_a_group_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"2 cards are in sight.*CUDA_VISIBLE_DEVICES=0"):
        trainer_for(small(), Recipe(), tmp_path)


def test_what_happens_between_steps_is_in_no_steps_peak(tmp_path):
    class Between(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            torch.zeros(10**7)

    trainer = trainer_for(small(), Recipe(optimizer="sgd"), tmp_path, callbacks=[Between()])
    trainer.train()
    first, second = (trainer.memory.by_step[n].total for n in (1, 2))
    assert trainer.memory.peak.total > 4 * 10**7 and second < 1.1 * first < 2 * 10**7


def collated(rows):
    ids = nn.utils.rnn.pad_sequence(
        [row["ids"] for row in rows], batch_first=True, padding_value=-100
    )
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids != -100).long(), "labels": ids}


class Words:
    def save_pretrained(self, folder):
        Path(folder, "words").touch()


def test_it_takes_a_collator_and_a_tokenizer(tmp_path):
    rows = [{"ids": torch.arange(1, 6 + 5 * i)} for i in range(8)]  # of unequal lengths
    given = {"train_dataset": rows, "remove_unused_columns": False, "max_steps": 1}
    given |= {"data_collator": collated, "processing_class": Words()}
    losses = []
    for accumulation in (1, 4):
        trainer = trainer_for(small(), Recipe(accumulation=accumulation), tmp_path, **given)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    expected = small().train()(**collated(rows)).loss.item()
    assert losses == pytest.approx([expected, expected], rel=1e-5)
    trainer.save_model()
    assert (tmp_path / "out" / "words").exists()


@pytest.mark.parametrize("ours", [True, False])
def test_auto_find_batch_size_answers_a_budget_with_fewer_rows(ours, tmp_path):
    least, most = (
        predict(small(), batch_size=n, seq_len=SEQ, recipe=Recipe(), target="cpu").peak.total
        for n in (7, 8)
    )
    budget = (least + most) // 2
    if ours:
        trainer = trainer_for(small(), Recipe(), tmp_path, budget=budget, auto_find_batch_size=True)
        trainer.train()
        memory = trainer.memory
    else:
        given = {"per_device_train_batch_size": 8, "auto_find_batch_size": True}
        args = plain_arguments(tmp_path, optim="adamw_torch", **given)
        with MemoryCallback(live=False, budget=budget) as memory:
            trainer = Trainer(small(), args, train_dataset=rows(), callbacks=[memory])
            trainer.train()
    assert trainer.state.global_step == 2 and sorted(memory.by_step) == [1, 2]
    assert least // 2 < memory.peak.total <= budget
    assert trainer._train_batch_size == 7


def test_a_loss_that_is_not_finite_makes_no_step(tmp_path):
    model, data = small(), rows()
    with torch.no_grad():
        model.get_input_embeddings().weight[data.ids[5, 0]] = torch.nan
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_for(model, Recipe(accumulation=2), tmp_path, in_order=True)
    with pytest.raises(ValueError, match=r"look for rows .*so none was made"):
        trainer.train()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)
