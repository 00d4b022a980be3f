"""A Trainer with a loss of its own is asked whether accumulation trains the same loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.refusals import refusal
from support.trainers import LastGradient, plain_arguments, small
from transformers import PrinterCallback, Trainer

from gradmem_lib import Recipe, check_accumulation, make_trainer
from gradmem_lib.course import run_ranks

VOCABULARY, WIDTH = 512, 12


def row(i):
    generator = torch.Generator().manual_seed(i)
    ids = torch.randint(3, VOCABULARY, (WIDTH,), generator=generator)
    labels = ids.clone()
    labels[3 + i :] = -100
    return {"input_ids": ids, "labels": labels, "score": torch.randn((), generator=generator)}


ROWS = [row(i) for i in range(8)]  # of unequally many labels, with a score for each


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ROWS


def parts(model, inputs):
    """The losses of tokens and of rows, and how many tokens have a label."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    named = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    scored = F.logsigmoid(logits.mean((1, 2)) * inputs["score"])
    return named, scored, (labels != -100).sum()


def own(loss):
    """A ``Trainer`` whose ``compute_loss`` is ``loss(trainer, model, inputs, items)``."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return loss(self, model, inputs, num_items_in_batch)

    return type(loss.__name__, (Trainer,), {"compute_loss": compute_loss})


@own
def OfRows(trainer, model, inputs, items):
    """A mean over rows, which the model's arguments do not scale."""
    return -parts(model, inputs)[1].mean()


@own
def OfTokens(trainer, model, inputs, items):
    """Divided by the tokens of the whole step."""
    return parts(model, inputs)[0] / items


@own
def OfBoth(trainer, model, inputs, items):
    """As trl's DPO with loss_type=["sigmoid", "sft"]: it adds two means of its micro-batch."""
    named, scored, count = parts(model, inputs)
    return named / count - scored.mean()


@own
def OfChance(trainer, model, inputs, items):
    return torch.rand(()) * OfRows.compute_loss(trainer, model, inputs)


@own
def HiddenChance(trainer, model, inputs, items):
    """Its dropout is always on; a head of zeros shows none of it."""
    logits = F.dropout(model(input_ids=inputs["input_ids"]).logits, 0.5, True)
    return F.cross_entropy(logits.flatten(0, 1), inputs["input_ids"].flatten())


@own
def Failing(trainer, model, inputs, items):
    raise KeyError("no such column")


@own
def Own(trainer, model, inputs, items):
    """Trainer's own loss, of what the model takes."""
    inputs = {name: inputs[name] for name in ("input_ids", "labels")}
    return Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=items)


@own
def Divides(trainer, model, inputs, items):
    """A mean over rows, which may be divided by the micro-batches of a step."""
    loss = OfRows.compute_loss(trainer, model, inputs)
    if trainer.by == "current":
        return loss / trainer.current_gradient_accumulation_steps
    return loss / trainer.args.gradient_accumulation_steps if trainer.by == "args" else loss


@own
def TimesTheProcesses(trainer, model, inputs, items):
    return (
        OfTokens.compute_loss(trainer, model, inputs, num_items_in_batch=items)
        * trainer.accelerator.num_processes
    )


def trainer_of(kind, folder, accumulation=4, data=ROWS):
    torch.manual_seed(0)
    arguments = plain_arguments(
        folder,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        remove_unused_columns=False,
        accelerator_config={"dispatch_batches": False},  # each process reads its own rows
    )
    trainer = kind(small(layers=1), arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.model_accepts_loss_kwargs = kind in (OfTokens, Trainer)
    return trainer


@pytest.mark.parametrize(("kind", "data"), [(OfRows, Streamed()), (OfTokens, ROWS)])
def test_a_loss_that_is_the_same_in_pieces_passes_and_nothing_changes(kind, data, tmp_path):
    trainer = trainer_of(kind, tmp_path, data=data)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    numbers = torch.get_rng_state()
    assert check_accumulation(trainer) is None
    assert torch.equal(torch.get_rng_state(), numbers)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_trainers_own_loss_passes(tmp_path):
    trainer = trainer_of(Own, tmp_path)
    trainer.model_accepts_loss_kwargs = True
    check_accumulation(trainer)
    trainer.model_accepts_loss_kwargs = False  # then Trainer averages means of unequally many
    with pytest.raises(ValueError, match="trains another loss with Own"):
        check_accumulation(trainer)


def test_two_means_are_refused_and_uncut_they_are_right(tmp_path):
    with pytest.raises(ValueError, match=r"steps=1 with.*steps=4 trains another loss with OfBoth"):
        check_accumulation(trainer_of(OfBoth, tmp_path))
    check_accumulation(trainer_of(OfBoth, tmp_path, accumulation=1))


def test_the_trainer_of_a_recipe_passes(tmp_path):
    recipe = Recipe(accumulation=4)
    files = {"output_dir": tmp_path, "remove_unused_columns": False}
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in ROWS]
    trainer = make_trainer(small(layers=1), recipe, batch_size=4, train_dataset=rows, **files)
    assert check_accumulation(trainer) is None


def test_what_cannot_be_asked_is_said_so(tmp_path):
    with pytest.raises(ValueError, match=r"^draw random numbers.*cannot be seen"):
        check_accumulation(trainer_of(OfChance, tmp_path))
    hidden = trainer_of(HiddenChance, tmp_path)
    torch.nn.init.zeros_(hidden.model.lm_head.weight)
    with pytest.raises(ValueError, match=r"^draw random numbers.*cannot be seen"):
        check_accumulation(hidden)
    with pytest.raises(ValueError, match=r"cannot be seen.*raised KeyError: 'no such column'"):
        check_accumulation(trainer_of(Failing, tmp_path))


class OwnStep(OfRows):
    """Divides in a ``training_step`` of its own, by what it is told to divide by."""

    pieces = 4

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        (loss / self.pieces).backward()
        return loss.detach()


class OwnBackward(OwnStep):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().compute_loss(model, inputs).detach()


def test_a_training_step_of_ones_own_is_asked(tmp_path):
    trainer = trainer_of(OwnStep, tmp_path)
    with pytest.raises(ValueError, match="trains another loss with OwnStep"):
        check_accumulation(trainer)  # a step of one micro-batch is divided too
    trainer.pieces = 1
    with pytest.raises(ValueError, match="trains another loss with OwnStep"):
        check_accumulation(trainer)
    with pytest.raises(ValueError, match=r"raised ValueError: no call of backward\(\)"):
        check_accumulation(trainer_of(OwnBackward, tmp_path))


def gradient_of(trainer):
    """The gradient that the trainer's first step is taken with."""
    last = LastGradient()
    trainer.add_callback(last)
    trainer.args.max_grad_norm, trainer.args.max_steps = 0.0, 1
    trainer.train()
    return last.found


@pytest.mark.parametrize(
    ("scaled", "by"), [(None, ""), (True, ""), (None, "current"), (True, "args")]
)
def test_what_is_divided_by_the_micro_batches_is_judged_as_it_trains(scaled, by, tmp_path):
    trainer = trainer_of(Divides, tmp_path)
    trainer.loss_is_scaled_for_ga, trainer.by = scaled, by
    expected = gradient_of(trainer_of(OfRows, tmp_path, accumulation=1))
    is_right = bool(by) == bool(scaled)
    if is_right:
        check_accumulation(trainer)
    else:
        with pytest.raises(ValueError, match=f"^set loss_is_scaled_for_ga = {bool(by)} in"):
            check_accumulation(trainer)
    assert trainer.args.gradient_accumulation_steps == 4
    found = gradient_of(trainer)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7) == is_right


def judged_on_a_rank(folder: str) -> list[str]:
    found = []
    for kind, accumulation, data in (
        (OfTokens, 1, ROWS),
        (OfTokens, 2, ROWS),
        (OfRows, 2, ROWS),
        (TimesTheProcesses, 1, ROWS),
        (Own, 2, ROWS),
        (TimesTheProcesses, 2, Streamed()),
    ):
        trainer = trainer_of(kind, folder, accumulation, data)
        trainer.model_accepts_loss_kwargs = kind is not OfRows
        found.append(refusal(check_accumulation, trainer))
    return found


def test_two_processes_are_asked_together(tmp_path):
    for found in run_ranks(judged_on_a_rank, str(tmp_path)):
        assert found[2:] == 4 * [""]
        for said in found[:2]:  # divided by the tokens of both, and then averaged
            assert "over 2 processes trains another loss with OfTokens" in said
            assert said.startswith("return loss * self.accelerator.num_processes")


def test_a_row_whose_loss_is_not_finite_is_named(tmp_path):
    rows = [*ROWS[:2], ROWS[2] | {"score": torch.tensor(torch.nan)}, *ROWS[3:]]
    with pytest.raises(ValueError, match=r"numbers: of the first rows.*micro-batch 3 of 4 has the"):
        check_accumulation(trainer_of(OfRows, tmp_path, data=rows))
