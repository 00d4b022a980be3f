"""What an answer leaves behind is found, told and put back; and budgets of bytes are kept."""

import sys
from dataclasses import replace

import pytest
import torch
from course.judge.toy_exercise import AREA, area, exercise_of
from torch import nn

from gradmem_lib import MemoryTracker
from gradmem_lib.course.judge.exercise import Mistake, calls, measure
from gradmem_lib.course.judge.side_effects import autocast_nesting
from gradmem_lib.course.judge.verdict import PASSED, judge
from gradmem_lib.course.learner.check import check


def test_check_prints_one_line_whatever_the_answer_prints(capsys):
    import warnings

    def noisy(shape, bytes_per_element):
        print("a")
        print("b", file=sys.stderr)
        warnings.warn("c", stacklevel=1)
        return 0

    with warnings.catch_warnings(record=True) as heard:
        check("0.1", noisy)
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == "" and not heard


def test_the_random_state_and_grad_mode_are_as_before():
    def random_answer(width, height):
        torch.manual_seed(7)
        torch.set_grad_enabled(False)
        return torch.rand(()).item()

    torch.manual_seed(3)
    before = torch.get_rng_state()
    judge(AREA, random_answer)
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()


def test_every_candidate_sees_the_same_random_numbers():
    drawn = exercise_of(lambda: torch.rand(3), lambda f: f())
    assert judge(drawn, lambda: torch.rand(3, dtype=torch.float32)).outcome == PASSED


def test_the_line_does_not_depend_on_the_learners_seed():
    drawn = exercise_of(lambda: torch.rand(()), lambda f: {"a draw": f()})
    torch.manual_seed(1)
    first = judge(drawn, lambda: torch.rand(()) + 1).line
    torch.manual_seed(2)
    assert judge(drawn, lambda: torch.rand(()) + 1).line == first


def test_changing_an_input_does_not_reach_the_next_candidate():
    total = exercise_of(lambda numbers: sum(numbers), calls(([1, 2, 3],), ([4],)))

    def pops(numbers):
        result = 0
        while numbers:
            result += numbers.pop()
        return result

    told = (
        "✗ 0.7 not yet: your code has changed `numbers` in place: do not change an argument, "
        "work on a copy."
    )
    assert judge(total, pops).line == told
    assert judge(total, pops).line == told
    assert judge(replace(total, changes=("numbers",)), pops).outcome == PASSED


def test_the_reference_is_computed_before_an_answer_can_reach_what_it_is_computed_from():
    shared = torch.ones(3)
    total = exercise_of(lambda x: x.sum(), lambda f: f(shared))

    def doubles(x):
        return x.mul_(2).sum() / 2

    assert "has changed `x` in place" in judge(total, doubles).line

    def twice_too_large(x):
        return x.mul_(2).sum()

    assert "has changed `x` in place" in judge(total, twice_too_large).line


def leaves_grad_off(width, height):
    torch.set_grad_enabled(False)


def leaves_autocast_on(width, height):
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()


def leaves_the_dtype_of_autocast(width, height):
    torch.set_autocast_dtype("cpu", torch.float16)


def leaves_the_default_dtype(width, height):
    torch.set_default_dtype(torch.float64)


def leaves_the_default_device(width, height):
    torch.set_default_device("meta")


def leaves_deterministic(width, height):
    torch.use_deterministic_algorithms(True)


def leaves_anomaly(width, height):
    torch.autograd.set_detect_anomaly(True)


def leaves_hooks_on_modules(width, height):
    nn.modules.module.register_module_forward_hook(lambda module, args, out: None)


def leaves_hooks_on_saved_tensors(width, height):
    torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (leaves_grad_off, "gradients off"),
        (leaves_autocast_on, "autocast on for cpu"),
        (
            leaves_the_dtype_of_autocast,
            "autocast for cpu at torch.float16 by default, which was torch.bfloat16",
        ),
        (leaves_the_default_dtype, "the default dtype at torch.float64"),
        (leaves_the_default_device, "the default device at meta"),
        (leaves_deterministic, "deterministic algorithms changed"),
        (leaves_anomaly, "anomaly detection changed"),
        (leaves_hooks_on_modules, "hooks on every module changed"),
        (leaves_hooks_on_saved_tensors, "saved-tensor hooks changed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_an_answer_leaves_switched_is_told_and_put_back(leave, said):
    from gradmem_lib.course.judge.side_effects import switches

    before = switches()

    def answer(width, height):
        leave(width, height)
        return width * height

    assert judge(AREA, answer).line.startswith(
        f"✗ 0.7 not yet: your code leaves {said}, for all code after it"
    )
    assert switches() == before

    def fails(width, height):
        leave(width, height)
        raise ValueError("stop")

    assert "raised ValueError" in judge(AREA, fails).line
    assert switches() == before and not torch.overrides.has_torch_function((torch.ones(1),))
    assert judge(AREA, area).outcome == PASSED


class Configured(nn.Module):
    """A model with dropout, a hook, and a config as transformers' have them."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(2, 2), nn.Dropout(0.5)
        self.config = type(
            "Config", (), {"use_cache": True, "to_dict": lambda self: {"use_cache": self.use_cache}}
        )()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.eval(), "eval mode on, but it was off before"),
        (lambda model: model.requires_grad_(False), "another requires_grad than before"),
        (
            lambda model: model.layer.register_forward_hook(lambda *a: None),
            "a hook more or less than before",
        ),
        (lambda model: setattr(model.dropout, "p", 0.0), "another dropout than before"),
        (lambda model: setattr(model.config, "use_cache", False), "config.use_cache = False"),
    ],
)
def test_what_an_answer_leaves_switched_on_a_model_is_told(change, said):
    counting = exercise_of(lambda model: len(list(model.modules())), lambda f: f(Configured()))

    def answer(model):
        change(model)
        return len(list(model.modules()))

    assert f"your code leaves `model` with {said}" in judge(counting, answer).line
    assert judge(replace(counting, changes=("model",)), answer).outcome == PASSED


def test_moving_a_models_weights_is_what_an_answer_is_for():
    def moves(model):
        model.layer.weight.data.zero_()
        return len(list(model.modules()))

    counting = exercise_of(lambda model: len(list(model.modules())), lambda f: f(Configured()))
    assert judge(counting, moves).outcome == PASSED


def test_a_judged_answer_leaves_no_tensor_alive():
    import gc
    import weakref

    alive = []

    def holds_and_fails(width, height):
        tensor = torch.ones(1000)
        alive.append(weakref.ref(tensor))
        raise ValueError("stop")

    gc.disable()
    try:
        judge(AREA, holds_and_fails)
        assert alive and alive[0]() is None
    finally:
        gc.enable()


def sum_of_squares(chunks, size):
    """Holds one chunk and its square at a time."""
    return sum(torch.full((size,), 2.0).square().sum().item() for _ in range(chunks))


def all_at_once(chunks, size):
    return torch.full((chunks * size,), 2.0).square().sum().item()


BUDGETED = exercise_of(
    sum_of_squares,
    lambda f: {"4 chunks": measure(lambda: f(4, 250), budget=2000)},
    Mistake("all at once", all_at_once, "this holds all chunks together."),
)


def test_the_right_value_over_the_budget_is_not_enough():
    assert judge(BUDGETED, sum_of_squares).outcome == PASSED
    # 1,000 float32 numbers and their squares; the numbers are free again before the sum is made.
    peak = "Your code peaks at 8,000 bytes; the budget is 2,000 bytes (6,000 too many)."
    assert (
        judge(BUDGETED, lambda c, s: all_at_once(c, s)).line
        == f"✗ 0.7 not yet: this holds all chunks together. {peak}"
    )
    anonymous = replace(BUDGETED, mistakes=())
    line = judge(anonymous, all_at_once).line
    assert (
        line
        == f"✗ 0.7 not yet: for 4 chunks: the numbers are right, the bytes are too many. {peak}"
    )
    assert "got 15, expected 4,000" in judge(BUDGETED, lambda c, s: 15).line


def test_watching_an_answer_keeps_nothing_of_it_alive():
    def make(size):
        return torch.ones(size)

    def twice(function):
        def run():
            function(1000)
            function(1000)

        return {"made twice": measure(run, budget=4000)}

    assert judge(exercise_of(make, twice), lambda size: torch.ones(size)).outcome == PASSED
    assert twice(make)["made twice"].peak == 4000
    line = judge(exercise_of(make, twice), lambda size: torch.cat([torch.ones(size)])).line
    assert "Your code peaks at 8,000 bytes; the budget is 4,000 bytes (4,000 too many)." in line


def test_an_enforced_budget_is_an_answer_too_large_and_not_a_crash():
    from gradmem_lib import MemoryTracker

    def observe(function):
        with MemoryTracker(budget=2000, live=False):
            return {"4 chunks": function(4, 250)}

    enforced = replace(BUDGETED, observe=observe, mistakes=())
    assert judge(enforced, sum_of_squares).outcome == PASSED
    line = judge(enforced, all_at_once).line
    expected = (
        "your code goes over its budget of 2,000 bytes: with the 4,000 bytes that it "
        "requested last, 4,000 bytes would"
    )
    assert expected in line and "2,000 too many." in line


def test_autocast_that_stays_on_keeps_no_copies_of_weights_afterwards():
    """A cache of casts is cleared when the outermost block ends, so an answer's block must end."""
    judge(AREA, leaves_autocast_on)
    assert autocast_nesting() == 0
    layer = torch.nn.Linear(64, 64)

    def forward_in_a_block():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(torch.ones(1, 64))

    forward_in_a_block()
    with MemoryTracker(layer, live=False) as tracker:
        forward_in_a_block()
    cast = layer.weight.numel() * 2
    assert tracker.peak.by_category["other"] < cast, "the cast of the block before has ended"
