"""Answers to the course's exercises that were judged wrongly before: right ones that failed, wrong
ones that passed.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradmem_lib.course.catalogue import get
from gradmem_lib.course.judge.compare import difference
from gradmem_lib.course.judge.verdict import PASSED, judge
from gradmem_lib.course.lessons.lesson_02 import exercises as lesson_02
from gradmem_lib.course.lessons.lesson_03 import exercises as lesson_03
from gradmem_lib.course.lessons.lesson_03 import exercises_updates
from gradmem_lib.course.lessons.lesson_05 import exercises_batch


def of_everybody(rule):
    """``rule`` with one state for all parameters, in a global that is fresh with each
    first step.
    """
    held = {}

    def wrong(p, grad, state, *settings):
        if not state:
            held.clear()
            state["known"] = True
        rule(p, grad, held, *settings)

    return wrong


def reentrant(layers, x, k):
    for start in range(0, len(layers), k):
        x = checkpoint(layers[start : start + k], x, use_reentrant=True)
    return x


def fills_what_it_was_given(micro_batches, loss_and_count):
    mean = lesson_03.accumulate(micro_batches, loss_and_count)
    for micro in micro_batches:
        micro[micro == -100] = 0
    return mean


def never_zeroes(model, optimizer, micro_batches, loss_and_count, max_norm):
    lesson_03.accumulate(micro_batches, loss_and_count)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm.item()


def without_the_last_update(model, optimizer, batches):
    losses = []
    for i, ids in enumerate(batches, 1):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        if i < len(batches):
            optimizer.step()
        optimizer.zero_grad()
        del loss
    return losses


def in_parts(parts, factor=1.0):
    """Three steps, each on a batch that is cut into parts of as many rows."""

    def train(model, optimizer, batches):
        losses = []
        for ids in batches:
            total = 0.0
            for part in ids.chunk(parts):
                loss = model(input_ids=part, labels=part).loss / parts
                total += loss.item()
                (factor * loss).backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        return losses

    return train


def shrinks_the_weights(model, optimizer, batches):
    losses = in_parts(1)(model, optimizer, batches)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.999)
    return losses


def changes_the_arguments(arguments, gpus, fits):
    arguments.update(exercises_batch.on_one_card(arguments, gpus, fits))
    return arguments


def powers_of_two(arguments, gpus, fits):
    batch = arguments[exercises_batch.TRAIN] * arguments[exercises_batch.STEPS] * gpus
    micro = max(2**k for k in range(9) if 2**k <= fits and batch % 2**k == 0)
    return arguments | {
        exercises_batch.TRAIN: micro,
        exercises_batch.STEPS: batch // micro,
        exercises_batch.EVAL: micro,
    }


@pytest.mark.parametrize(
    ("id", "answer", "said"),
    [
        ("1.6", without_the_last_update, "for afterwards"),
        ("1.6", in_parts(2, factor=1 / 3), "the first update is 3 times too small"),
        ("1.6", shrinks_the_weights, "weights minus a replay of these updates"),
        ("2.1", of_everybody(lesson_02.momentum), "because each parameter has its own"),
        ("2.2", of_everybody(lesson_02.second_moment), "because each parameter has its own"),
        ("2.3", of_everybody(lesson_02.adam), "because each parameter has its own"),
        ("3.3", fills_what_it_was_given, "your code has changed `micro_batches` in place"),
        ("3.6", never_zeroes, "a second update"),
        ("4.4", reentrant, "use_reentrant=False"),
        ("5.1", changes_the_arguments, "your code has changed `arguments` in place"),
        ("5.1", powers_of_two, "entry 'per_device_train_batch_size'"),
    ],
)
def test_a_wrong_answer_that_passed_is_told_what_is_wrong(id, answer, said):
    line = judge(
        replace(get(id), mistakes=()), answer
    ).line  # which are slow to run, and named something else
    assert line.startswith(f"✗ {id} not yet: ") and said in line


def test_the_answers_above_are_wrong_in_one_thing_alone():
    assert judge(get("3.6"), exercises_updates.clipped_update).outcome == PASSED
    assert judge(get("3.3"), lesson_03.accumulate).outcome == PASSED
    assert judge(get("5.1"), exercises_batch.on_one_card).outcome == PASSED


@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_may_be_computed_in_parts_whose_rounding_differs(parts):
    assert judge(get("1.6"), in_parts(parts)).outcome == PASSED


@pytest.mark.parametrize("number", [np.int64, float, torch.tensor])
def test_a_length_may_be_any_kind_of_number(number):
    best = get("4.6").reference
    assert judge(get("4.6"), lambda n, a, x: number(best(n, a, x))).outcome == PASSED


def test_the_best_length_is_the_best_of_all():
    from gradmem_lib.course.lessons.lesson_04.exercises_lengths import best_length, kept_at_peak
    from gradmem_lib.techniques.schedules import uniform_segments

    for n in (1, 2, 3, 5, 7, 12, 13, 31, 64):
        for ratio in (1, 2, 4, 5, 23):
            peaks = [kept_at_peak(uniform_segments(n, k), ratio, 1) for k in range(1, n + 1)]
            assert peaks[best_length(n, ratio, 1) - 1] == min(peaks), (n, ratio)


def test_all_layers_in_one_segment_are_never_the_only_best_length():
    from gradmem_lib.course.lessons.lesson_04.exercises_lengths import kept_at_peak
    from gradmem_lib.techniques.schedules import uniform_segments

    for n in range(2, 40):
        for a in (1, 1.01, 2, 10):  # a includes x, so a is at least x
            peaks = [kept_at_peak(uniform_segments(n, k), a, 1) for k in range(1, n + 1)]
            assert min(peaks[:-1]) <= peaks[-1], (n, a)


@pytest.mark.parametrize("yes", [True, 1, 1.0, np.True_, torch.tensor(True)])
def test_an_entry_that_asks_for_1_takes_true(yes):
    assert difference({"(1 is yes)": yes}, {"(1 is yes)": 1}) is None
    assert difference({"(1 is yes)": yes}, {"(1 is yes)": True}) is None
    assert difference({"(1 is yes)": yes}, {"(1 is yes)": 0}) is not None
