"""Each cause is found in programs that have it, its remedy takes away the bytes that were said, and
programs that only look like it are not accused.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from support import oom
from support.oom import evaluations, graphs, growth, tensors, weights
from support.oracle import nbytes
from support.programs import mlp
from torch import nn

from gradmem_lib import BudgetExceeded, MemoryTracker, diagnose
from gradmem_lib.measure.cause import Cause, within
from gradmem_lib.measure.diagnosis import CHUNKS, MICRO_BATCHES, TECHNIQUES
from gradmem_lib.measure.remedied_peak import peak_without
from gradmem_lib.units import format_bytes

# A smaller evaluation or generation, or a narrower second model, may still be the largest part.
REMAIN = (
    oom.EVALUATION,
    oom.IN_EACH_STEP,
    oom.GENERATION,
    oom.SECOND,
    oom.GRADIENTS,
)
# How much memory these remedies need is not known from the run, and nothing is said of it: that of
# an attention that stores no scores, of one layer that is recomputed, of a graph that ends earlier,
# of a gradient with a row for each entry of a batch, of half a batch beside its masks and tables.
NOT_SAID = (
    oom.SCORES,
    oom.IDLE,
    oom.TWICE,
    oom.TABLE,
    oom.EVALUATION,
    oom.IN_EACH_STEP,
    oom.GRADIENTS,
    oom.ONE_STEP,
    oom.STAYS,
)
SOMETIMES_SAID = (oom.STAY, oom.UNUSED)


def in_one_line(error: BudgetExceeded) -> str:
    return " ".join(str(error).split())


def names(diagnosis) -> list[str]:
    return [cause.name for cause in diagnosis.causes]


def source(line) -> str:
    return Path(line.file).read_text().splitlines()[line.line - 1]


@pytest.mark.parametrize("name", oom.PROGRAMS)
def test_a_program_is_told_its_causes_and_the_remedy_takes_the_bytes_away(name):
    program = oom.PROGRAMS[name]
    before = diagnose(program.run())
    assert names(before) == list(program.causes), before
    if program.line:
        assert program.line in source(before.causes[0].lines[0])
    if "remedied" not in inspect.signature(program.run).parameters:
        return
    cause = before.causes[0]
    assert program.says in cause.remedy
    text = str(before)
    assert text.index(cause.evidence) < text.index("What ")
    assert f"Remedy: {cause.remedy}" in text

    after = diagnose(program.run(remedied=True))
    if cause.name not in REMAIN:
        assert cause.name not in names(after)
    if name != "reentrant_on_frozen_inputs":  # its layers learn nothing before
        assert after.peak.total < before.peak.total
    if cause.name not in SOMETIMES_SAID:
        assert (cause.stays is None) == (cause.name in NOT_SAID)
    if cause.stays is None:
        assert not cause.limit
    else:
        said, _ = peak_without(cause, before.facts)
        assert after.peak.total <= said <= before.peak.total


IN_THE_MIDDLE = [
    growth.weights_of_each_epoch,
    graphs.sampling_with_gradients,
    graphs.entropy_added_up,
    tensors.data_set_on_the_device,
    weights.norm_of_all_gradients,
]


@pytest.mark.parametrize("program", IN_THE_MIDDLE, ids=lambda program: program.__name__)
def test_a_run_that_ends_in_the_middle_is_told_the_same(program, monkeypatch):
    budget = program().peak.total * 9 // 10
    for module in (oom, sys.modules[program.__module__]):
        monkeypatch.setattr(
            module, "MemoryTracker", partial(MemoryTracker, budget=budget), raising=False
        )
    with pytest.raises(BudgetExceeded) as caught:
        program.__wrapped__()
    first = diagnose(caught.value).causes[0]
    assert first.name == oom.PROGRAMS[program.__name__].causes[0]
    text = in_one_line(caught.value)
    assert str(first).splitlines()[0] in text
    assert text.index(f"Remedy: {first.remedy}") < text.index("What could bring")
    if first.stays is not None:
        assert peak_without(first, caught.value.facts)[0] < budget
    if first.limit:  # the rest of the run is not known
        assert "the peak so far" in first.limit
    program.__wrapped__(remedied=True)  # it fits now


def test_micro_batches_help_a_teacher():
    found = diagnose(evaluations.teacher_in_each_step())
    assert MICRO_BATCHES in found.helps and "smaller micro-batches do that" in str(found)
    lowered = evaluations.teacher_in_each_step(remedied=True).peak.total
    assert found.lowest[MICRO_BATCHES] <= lowered < found.peak.total / 2


def beside(teachers: list[nn.Module], student: nn.Module) -> dict[str, Cause]:
    """What a distillation is told, by name."""
    optimizer = oom.sgd(student)

    def step(i):
        x = torch.randn(16, 64)
        with torch.no_grad():
            targets = sum(teacher(x)[:, :8] for teacher in teachers)
        oom.stepped((student(x)[:, :8] - targets).square().mean(), optimizer)

    tracker = oom.trained(student, optimizer, step, steps=4)
    return {cause.name: cause for cause in diagnose(tracker).causes}


@pytest.mark.parametrize(("layers", "outputs"), [(8, 32), (4, 32), (6, 32), (3, 30), (8, 8)])
def test_a_teacher_with_other_layers_is_a_second_model_and_no_copy(layers, outputs):
    teacher = mlp(64, *[64] * layers, outputs).requires_grad_(False)
    causes = beside([teacher], mlp(64, 64, 64, 64, 32))
    assert oom.COPIED not in causes
    assert causes[oom.SECOND].nbytes == nbytes(teacher.parameters())


@pytest.mark.parametrize("words", ["a second copy", "2 more copies"])
def test_a_teacher_of_the_same_shapes_is_a_copy(words):
    sizes = (64, 64, 64, 64, 32)
    teachers = [mlp(*sizes).requires_grad_(False) for _ in range(int(words[0] == "2") + 1)]
    causes = beside(teachers, mlp(*sizes))
    assert oom.SECOND not in causes
    assert causes[oom.COPIED].nbytes == nbytes(nn.ModuleList(teachers).parameters())
    assert words in causes[oom.COPIED].evidence


@pytest.mark.parametrize("tracked_is_wrapped", [True, False])
def test_the_tracked_model_under_another_name_is_no_other_model(tracked_is_wrapped):
    model = oom.Net(2048)
    wrapper = nn.Sequential(model)
    optimizer, copies = oom.sgd(model), []

    def step(i):
        oom.stepped(wrapper(torch.randn(8, 64)).mean(), optimizer)
        with torch.no_grad():
            model(torch.randn(8, 64))
        if i == 1:
            copies.extend(parameter.detach().clone() for parameter in model.parameters())

    tracker = oom.trained(model if tracked_is_wrapped else wrapper, optimizer, step, steps=4)
    [cause] = [cause for cause in diagnose(tracker).causes if cause.name == oom.COPIED]
    assert "calls another model" not in cause.remedy


def test_much_is_promised_of_many_forwards():
    before = diagnose(graphs.sampling_with_gradients())
    assert peak_without(before.causes[0], before.facts)[0] < 0.7 * before.peak.total


def test_a_long_scoring_is_blamed_for_the_forwards_that_are_no_longer_in_the_list():
    net, x, scores = oom.Net(), torch.randn(8, 64), []
    with MemoryTracker(net) as tracker:
        for _ in range(400):
            scores.append(net(x).mean())
    found = diagnose(tracker).causes[0]
    assert found.name == oom.UNUSED
    last_output = 4 * x.numel()  # it is there without a graph, too
    assert found.nbytes == tracker.peak.by_category["activations"] - last_output


def test_bytes_outside_of_a_training_step_get_no_remedy_of_the_batch():
    found = diagnose(evaluations.logits_in_one_tensor())
    assert found.peak.moment in ("between steps", "evaluation or generation")
    batch = {technique.name for technique in TECHNIQUES if technique.of_the_step}
    assert len(batch) == 4 and batch <= set(found.cannot_help)
    assert "A smaller batch does not help" in str(found)


def test_chunks_of_the_loss_are_not_offered_for_an_embeddings_output():
    model = nn.ModuleDict({"embed": nn.Embedding(100, 512), "head": nn.Linear(512, 1000)})
    ids = torch.zeros(8, 64, dtype=torch.long)
    with (
        pytest.raises(BudgetExceeded) as caught,
        MemoryTracker(model, budget="2800 KiB"),
    ):
        model["head"](model["embed"](ids))
    assert "embedding" in str(caught.value)
    assert CHUNKS in diagnose(caught.value).cannot_help


def test_a_trainers_evaluation_is_told_three_arguments_and_each_of_them_helps():
    before = diagnose(evaluations.evaluation_of_a_trainer())
    first = before.causes[0]
    assert first.name == oom.COLLECTED
    for argument in (
        "preprocess_logits_for_metrics",
        "eval_accumulation_steps",
        "prediction_loss_only",
    ):
        assert argument in first.remedy
        after = evaluations.evaluation_of_a_trainer(argument)
        assert before.peak.total - after.peak.total >= first.nbytes // 2
    smaller_batch = evaluations.evaluation_of_a_trainer(batch=1)
    assert "A smaller batch does not help" in first.remedy
    assert smaller_batch.peak.total > before.peak.total - first.nbytes // 4


def test_another_moment_that_becomes_the_peak_is_said():
    before = diagnose(growth.predictions_joined_in_each_step())
    cause = before.causes[0]
    after = diagnose(growth.predictions_joined_in_each_step(remedied=True)).peak
    assert before.peak.total - cause.nbytes < after.total / 2  # the cause alone would say too much
    assert peak_without(cause, before.facts) == (after.total, after.moment)
    size = format_bytes(after.total)
    assert f"Without these bytes, the peak is at most {size}, in backward." in str(before)


def test_a_moment_between_steps_has_no_second_preposition():
    assert within("between steps") == "between steps"
    assert within("backward") == "in backward"
