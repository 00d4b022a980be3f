"""Small models, rows and trainers: shared by the tests of ``make_trainer``."""

from __future__ import annotations

import signal

import torch
from support.families import tiny_config, with_dropout
from support.gradients import gradient
from transformers import BertForSequenceClassification, TrainerCallback, TrainingArguments

from gradmem_lib import MemoryTracker
from gradmem_lib.course.material import models, texts
from gradmem_lib.training.trainer import make_trainer

ROWS, SEQ = 8, 48


def small(**sizes):
    return models.tiny_llama(
        **({"layers": 3, "hidden": 64, "intermediate": 160, "vocab": 512} | sizes)
    )


def rows(n: int = 4 * ROWS, seq_len: int = SEQ, vocab: int = 512) -> texts.Rows:
    return texts.Rows(
        torch.randint(0, vocab, (n, seq_len), generator=torch.Generator().manual_seed(1))
    )


def trainer_for(model, recipe, tmp_path, in_order=False, **given):
    """``in_order``: rows in their order, so that two trainings see the same ones."""
    # Without clipping, decay and shuffling, so that steps can be compared with a plain loop's.
    settings = {
        "batch_size": ROWS,
        "train_dataset": rows(),
        "output_dir": str(tmp_path / "out"),
        "live": False,
        "progress": False,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
    }
    trainer = make_trainer(model, recipe, **(settings | given))
    if in_order:
        trainer._get_train_sampler = torch.utils.data.SequentialSampler
    return trainer


def plain_arguments(folder, **given):
    """For a ``Trainer`` of transformers' own."""
    settings = {"max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(str(folder), save_strategy="no", **settings | given)


def classifier():
    torch.manual_seed(0)
    return BertForSequenceClassification(with_dropout(tiny_config("bert"), 0.0))


class At(TrainerCallback):
    """Does something in the middle of a step."""

    def __init__(self, number, what):
        self.number, self.what = number, what

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.number:
            self.what()


class LastGradient(TrainerCallback):
    """The gradient that each step is taken with: the last one, and all of them."""

    def __init__(self):
        self.all = []

    @property
    def found(self):
        return self.all[-1]

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        there = any(parameter.grad is not None for parameter in model.parameters())
        self.all.append(gradient(model) if there else None)


def assert_clean(trainer):
    model = trainer.model
    assert MemoryTracker._running is None
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert not any("_call_impl" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
