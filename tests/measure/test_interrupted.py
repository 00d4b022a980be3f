"""Whatever ends a training, nothing is left behind, and it can go on: errors, budgets, Ctrl-C,
checkpoints.
"""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from support.trainers import ROWS, At, assert_clean, plain_arguments, rows, small, trainer_for
from torch import nn
from transformers import Trainer, TrainerCallback

from gradmem_lib import BudgetExceeded, MemoryCallback, MemoryTracker, Recipe, predict
from gradmem_lib.techniques.optimizers import AdamW8bit

pytestmark = pytest.mark.usefixtures("interruptible")


def plain_trainer(tmp_path, memory, **given):
    args = plain_arguments(tmp_path / "plain", max_steps=3, logging_strategy="no", **given)
    return Trainer(small(), args, train_dataset=rows(), eval_dataset=rows(16), callbacks=[memory])


def test_any_trainer_can_be_watched(tmp_path):
    with MemoryCallback(title="mine") as memory:
        plain_trainer(tmp_path, memory, eval_strategy="steps", eval_steps=3).train()
    assert sorted(memory.by_step) == [1, 2, 3]
    assert memory.by_step[2] == memory.by_step[3]
    assert memory.by_step[1].total <= memory.by_step[2].total
    highest = max(memory.tracker.timeline.totals)  # of the evaluation too
    assert memory.peak.total == highest >= max(s.total for s in memory.by_step.values())
    assert sum(holder.nbytes for holder in memory.tracker.largest_at_peak(10**6)) == highest
    assert memory.tracker.title == "mine" and MemoryTracker._running is None


def test_a_budget_ends_a_run_and_leaves_nothing_behind(tmp_path):
    with MemoryCallback(budget="2 MiB") as memory:
        trainer = plain_trainer(tmp_path, memory)
        with pytest.raises(BudgetExceeded):
            trainer.train()
    assert MemoryTracker._running is None
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules()
    )
    with MemoryCallback() as memory:
        plain_trainer(tmp_path, memory).train()
    assert memory.peak.total > 0


def test_outside_its_with_it_refuses(tmp_path):
    memory = MemoryCallback()
    with pytest.raises(RuntimeError, match="with block"):
        plain_trainer(tmp_path, memory).train()
    with pytest.raises(RuntimeError, match="nothing was trained"):
        _ = memory.peak


@pytest.mark.parametrize("checkpointing", ["per-layer", "sqrt"])
def test_an_error_leaves_nothing_behind(checkpointing, tmp_path):
    def fail():
        raise ArithmeticError("mine")

    recipe = Recipe(accumulation=2, checkpointing=checkpointing)
    trainer = trainer_for(small(), recipe, tmp_path, callbacks=[At(2, fail)])
    with pytest.raises(ArithmeticError, match="mine"):
        trainer.train()
    assert_clean(trainer)
    trainer.remove_callback(At)
    trainer.train()
    assert_clean(trainer)


def test_a_run_over_budget_can_be_repeated_with_a_smaller_micro_batch(tmp_path):
    model = small(layers=2)
    least = predict(
        model, batch_size=ROWS, seq_len=256, recipe=Recipe(accumulation=8), target="cpu"
    ).peak.total
    budget, data = round(1.2 * least), rows(2 * ROWS, 256)
    trainer = trainer_for(model, Recipe(), tmp_path, budget=budget, train_dataset=data)
    with pytest.raises(BudgetExceeded):
        trainer.train()
    assert_clean(trainer)
    trainer_for(model, Recipe(accumulation=8), tmp_path, budget=budget, train_dataset=data).train()


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(accumulation=2, checkpointing="sqrt"),
        Recipe(precision="bf16", optimizer="adamw-8bit", lora_rank=4, checkpointing="per-layer"),
        Recipe(precision="float32-master"),
        Recipe(precision="bf16", optimizer="adamw-8bit"),
    ],
    ids=str,
)
def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_run_goes_on(recipe, tmp_path, capsys):
    def run(folder, callbacks=(), resume=None):
        torch.manual_seed(0)
        trainer = trainer_for(
            small(vocab=1024),
            recipe,
            tmp_path / folder,
            max_steps=4,
            callbacks=list(callbacks),
            train_dataset=rows(vocab=1024),
        )
        if callbacks:
            with pytest.raises(KeyboardInterrupt, match="stopped after step 2"):
                trainer.train()
            assert_clean(trainer)
            assert torch.isfinite(trainer.model(input_ids=rows(2).ids, labels=rows(2).ids).loss)
        else:
            trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole")
    run("cut", callbacks=[At(2, lambda: os.kill(os.getpid(), signal.SIGINT))])
    assert "Finishing step 2, then saving" in capsys.readouterr().out
    assert (tmp_path / "cut" / "out" / "checkpoint-2").is_dir()
    resumed = run("cut", resume=True)
    assert resumed.state.global_step == 4
    for (name, ours), theirs in zip(
        resumed.model.named_parameters(), whole.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_ctrl_c_after_the_last_step_promises_no_checkpoint(tmp_path):
    class AtTheEnd(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)

    trainer = trainer_for(small(), Recipe(), tmp_path, callbacks=[AtTheEnd()])
    with pytest.raises(KeyboardInterrupt, match="the training is complete"):
        trainer.train()
    assert_clean(trainer)
    assert trainer.state.global_step == 2 and not list(tmp_path.glob("out/checkpoint-*"))


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = trainer_for(small(), Recipe(checkpointing="sqrt"), tmp_path, callbacks=[At(1, twice)])
    with pytest.raises(KeyboardInterrupt, match="at once"):
        trainer.train()
    assert_clean(trainer)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_run_in_the_background_goes_on_ignoring_the_ctrl_c_of_others(tmp_path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    press = At(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    trainer = trainer_for(small(), Recipe(), tmp_path, callbacks=[press])
    trainer.train()
    assert trainer.state.global_step == 2 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_it_trains_outside_the_main_thread(tmp_path):
    trainer, failed = trainer_for(small(), Recipe(), tmp_path), []

    def work():
        try:
            trainer.train()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed and trainer.state.global_step == 2


def test_parameters_share_the_tables_of_8_bits_when_states_are_loaded():
    parameters = [nn.Parameter(torch.randn(n)) for n in (6400, 5000)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    first, second = AdamW8bit(parameters), AdamW8bit(parameters)
    first.step()
    second.load_state_dict(first.state_dict())
    one, other = (second.state[p] for p in parameters)
    for name in ("code", "code_sq"):
        assert one[name].data_ptr() == other[name].data_ptr()
        assert torch.equal(one[name], first.state[parameters[0]][name])
