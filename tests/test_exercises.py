"""Every exercise of the course is fit to be given, and `check` says the right one of its three things about anything."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradmem_lib.course.check import UnknownExercise, all_exercises, audit, check, get, lessons
from gradmem_lib.course.compare import Measured, describe, difference
from gradmem_lib.course.exercise import Exercise, Mistake, calls, measure
from gradmem_lib.course.judging import OPEN, PASSED, WRONG, judge


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADMEM_PROGRESS", str(tmp_path / "progress.json"))


def exercise_of(reference, observe, *mistakes, **fields):
    fields = {"id": "0.7", "title": "a test", "difficulty": 2, "minutes": 3, "trains": "testing", **fields}
    return Exercise(reference=reference, observe=observe, mistakes=mistakes, **fields)


def area(width, height):
    return width * height


AREA = exercise_of(
    area,
    calls((3, 5), (2.5, 4)),
    Mistake("perimeter", lambda w, h: 2 * (w + h), "this is the way around it."),
    Mistake("sum", lambda w, h: w + h, "this adds the sides."),
    Mistake("width", lambda w, h: w * w, "this squares the width."),
    Mistake("string", lambda w, h: w * str(h), "this repeats text."),
)


# The course's own exercises -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", all_exercises(), ids=lambda exercise: exercise.id)
def test_every_exercise_is_fit_to_be_given(exercise):
    assert audit(exercise) == []


def test_ids_are_unique_and_belong_to_their_lesson():
    for lesson in lessons():
        ids = [exercise.id for exercise in all_exercises(lesson)]
        assert ids and len(set(ids)) == len(ids)
        assert all(id.startswith(f"{int(lesson)}.") for id in ids)


def test_lesson_00_shows_all_three_outcomes(capsys):
    def tensor_bytes(shape, bytes_per_element):
        raise NotImplementedError

    given = check("0.1", tensor_bytes)
    assert given((2, 3), 4) == 24
    check("0.1", lambda shape, size: sum(shape) * size)
    mine = lambda shape, size: torch.empty(shape, dtype=torch.int8).numel() * float(size)  # noqa: E731
    assert check("0.1", mine) is mine
    assert capsys.readouterr().out.splitlines() == [
        "○ 0.1 not attempted yet: the bytes of one tensor (later cells use the reference solution)",
        "✗ 0.1 not yet: this adds the sides of the shape: a 2 × 3 tensor has 6 elements, not 5.",
        "✓ 0.1 passed: the bytes of one tensor",
    ]


def test_the_audit_finds_what_is_wrong_with_an_exercise():
    assert audit(AREA) == []
    assert "only 1 known" in audit(replace(AREA, mistakes=AREA.mistakes[:1]))[0]
    same = Mistake("sum again", lambda w, h: h + w, "this is the same mistake.")
    assert "'sum again' is not named as itself" in audit(replace(AREA, mistakes=(*AREA.mistakes, same)))[0]
    right = Mistake("right", lambda w, h: h * w, "this is right, in fact.")
    assert "'right' is not named as itself: ✓" in audit(replace(AREA, mistakes=(*AREA.mistakes, right)))[0]
    assert "the id" in audit(replace(AREA, difficulty=4))[0]
    assert "what the exercise trains" in audit(replace(AREA, trains=""))[0]
    long = Mistake("no stop", lambda w, h: 0, "no full stop")
    assert "full stop" in audit(replace(AREA, mistakes=(*AREA.mistakes, long)))[0]

    counter = iter(range(1000))
    assert any(
        "the reference does not pass" in problem
        for problem in audit(replace(AREA, observe=lambda f: next(counter)))
    )
    # A reference that does nothing cannot be told from a stub.
    lazy = exercise_of(lambda x: None, lambda f: 1, *AREA.mistakes)
    assert any("does not pass" in problem for problem in audit(lazy))


def test_a_stub_is_one_even_where_it_happens_to_be_right():
    def observe(function):
        try:
            return function(1, 2) and None
        except NotImplementedError:
            return None

    assert audit(replace(AREA, observe=observe, mistakes=())) == [
        "only 0 known mistakes: at least four are needed"
    ]


# Passed ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        lambda w, h: float(w) * h,
        lambda height, width: torch.tensor(width * height),
        lambda w, h, unit="cm": np.float64(w * h),
        lambda *sides: sides[0] * sides[1],
        lambda w, h: w * h * (1 + 1e-9) if isinstance(w, float) else w * h,
    ],
)
def test_a_right_answer_written_another_way_passes(answer):
    verdict = judge(AREA, answer)
    assert verdict.line == "✓ 0.7 passed: a test"
    assert verdict.result is answer


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ([1, 2], (1, 2)),
        (torch.Size([1, 2]), [1, 2]),
        (torch.tensor([1, 2]), (1, 2)),
        ([1.0, 2.0], torch.tensor([1.0, 2.0])),
        (np.array([[1, 2]]), torch.tensor([[1.0, 2.0]])),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3)),
        (torch.ones((), requires_grad=True), 1),
        ({"b": 2.0, "a": 1}, {"a": 1, "b": 2}),
        ({"a", "b"}, frozenset("ba")),
        (" Forward", "forward"),
        (12_884_901_888.0, 12_884_901_888),
        (True, 1),
        (float("nan"), float("nan")),
        (torch.tensor([float("nan")]), [float("nan")]),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
        (torch.float32, torch.float32),
        (None, None),
        (Measured(3, peak=10, budget=20), Measured(3.0, peak=15, budget=20)),
    ],
)
def test_the_same_value_in_another_form_is_equal(got, expected):
    assert difference(got, expected) is None


@pytest.mark.parametrize(
    ("got", "expected", "said"),
    [
        (12_884_901_889, 12_884_901_888, "got 12,884,901,889, expected 12,884,901,888"),
        (12_884_901_887.0, 12_884_901_888, "got 12,884,901,887, expected 12,884,901,888"),
        (0.30001, 0.3, "got 0.30001, expected 0.3"),
        (float("nan"), 0.3, "got nan, expected 0.3"),
        (None, 3, "got None (is a `return` missing?), expected 3"),
        ((1, 2, 3), (1, 2), "got a sequence of length 3, expected a sequence of length 2"),
        (
            torch.ones(2, 3),
            torch.ones(3, 2),
            "got a tensor of shape (2, 3), expected a tensor of shape (3, 2)",
        ),
        (torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), "got 3, expected 2"),
        (torch.tensor([float("nan")]), torch.tensor([2.0]), "got nan, expected 2"),
        (["a", [1]], torch.ones(2), "got a sequence of length 2, expected a tensor of shape (2,)"),
        ({"a": 1}, {"a": 1, "b": 2}, "it is missing"),
        ({"a": 1, "b": 2}, {"a": 1}, "nothing of this name was asked for"),
        ("backward", "forward", "got 'backward', expected 'forward'"),
        (torch.float32, torch.bfloat16, "got torch.float32, expected torch.bfloat16"),
        (object(), 3, "got a value of type object, expected 3"),
        (lambda: 0, {"a"}, "got a value of type function, expected the set {'a'}"),
        (Measured(3, 21, 20), Measured(3, 15, 20), "peaks at 21 bytes; the budget is 20 bytes"),
        (Measured(4, 21, 20), Measured(3, 15, 20), "got 4, expected 3"),
    ],
)
def test_a_difference_is_said_in_exact_numbers(got, expected, said):
    assert difference(got, expected).said == said


def test_the_tolerance_of_a_tensor_is_relative_to_its_largest_entry():
    expected = torch.tensor([1000.0, 0.0])
    assert difference(torch.tensor([1000.0, 0.001]), expected, 1e-5) is None
    found = difference(torch.tensor([1000.0, 0.1]), expected, 1e-5)
    assert found.path == ("at index [1]",) and found.said == "got 0.1, expected 0"


def test_a_description_never_holds_an_address():
    assert "0x" not in describe(object()) + describe(nn.Linear(2, 2)) + describe([object()])


# Not attempted --------------------------------------------------------------------------------------------------------


def does_nothing(width, height): ...


def only_passes(width, height):
    """With a docstring."""
    pass


def raises_not_implemented(width, height):
    half = width / 2
    raise NotImplementedError(f"your code here, {half}")


def returns_ellipsis(width, height):
    result = ...
    return result


def returns_not_implemented(width, height):
    return NotImplemented


def adds_to_ellipsis(width, height):
    total = ...
    return total + 1


def has_a_gap(width, height):
    total = 0
    for _ in range(height):
        ...
    return total


@pytest.mark.parametrize(
    "stub",
    [
        ...,
        None,
        NotImplemented,
        does_nothing,
        only_passes,
        raises_not_implemented,
        returns_ellipsis,
        returns_not_implemented,
        adds_to_ellipsis,
        lambda w, h: ...,
        lambda w, h: {"total": [...]},
    ],
)
def test_a_stub_is_not_attempted(stub):
    verdict = judge(AREA, stub)
    assert verdict.outcome == OPEN
    assert verdict.result(3, 4) == 12


def test_a_gap_left_among_given_lines_is_not_attempted_unless_the_answer_is_right():
    whole_numbers = replace(AREA, observe=calls((3, 5)))
    assert judge(whole_numbers, has_a_gap).outcome == OPEN

    def right_all_the_same(width, height):
        ...
        return width * height

    assert judge(AREA, right_all_the_same).outcome == PASSED


def test_the_reference_handed_back_is_not_an_attempt(capsys):
    given = judge(AREA, ...).result
    assert judge(AREA, given).outcome == OPEN
    assert judge(AREA, area).outcome == PASSED  # written by a learner who found the same words
    other = replace(AREA, id="0.8")
    assert judge(other, given).outcome == PASSED


def raises_in_a_branch(width, height):
    if isinstance(width, int):
        return width * height
    raise NotImplementedError("whole numbers only")


def raises_in_a_loop(width, height):
    for side in (width, height):
        if side > 2:
            raise NotImplementedError
    return width


def raises_what_it_caught(width, height):
    try:
        return width // 0
    except ZeroDivisionError:
        raise NotImplementedError from None


@pytest.mark.parametrize("answer", [raises_in_a_branch, raises_in_a_loop, raises_what_it_caught])
def test_a_branch_that_raises_not_implemented_is_an_attempt(answer):
    assert "your code raised NotImplementedError at line" in judge(AREA, answer).line


def test_a_stub_does_not_wait_for_the_reference():
    def reference(width, height):
        raise OSError("no such model")

    assert judge(replace(AREA, reference=reference), raises_not_implemented).outcome == OPEN


def test_an_answer_that_returns_nothing_where_nothing_is_asked_for_is_not_told_of_a_return():
    def add_one(numbers):
        numbers[0] += 1

    def observe(function):
        numbers = [1]
        function(numbers)
        return 1 / (numbers[0] - 1)

    adds = exercise_of(add_one, observe, changes=("numbers",))
    line = judge(adds, lambda numbers: numbers.sort()).line
    assert "could not be used: ZeroDivisionError" in line and "return" not in line


def test_an_operation_that_torch_lacks_is_an_attempt():
    def answer(width, height):
        return torch.ones(2, device="meta").cpu()

    assert "✗ 0.7 not yet: your code raised NotImplementedError at line" in judge(AREA, answer).line


# What is wrong --------------------------------------------------------------------------------------------------------


def test_a_wrong_answer_is_told_its_case_and_no_formula():
    assert judge(AREA, lambda w, h: w * h + 2).line == "✗ 0.7 not yet: for area(3, 5): got 17, expected 15."
    named = replace(AREA, observe=lambda f: {"a strip": {"total": f(3, 5)}})
    line = judge(named, lambda w, h: w * h + 2).line
    assert line == "✗ 0.7 not yet: for a strip, entry 'total': got 17, expected 15."


def test_the_author_may_explain_whole_families():
    told = replace(AREA, explain=lambda got, expected: "that is negative" if got["(3, 5)"] < 0 else None)
    assert judge(told, lambda w, h: -w * h - 1).line == "✗ 0.7 not yet: that is negative."
    assert "expected 15" in judge(told, lambda w, h: w * h + 1).line


def test_an_exception_is_one_line_with_its_place():
    def answer(width, height):
        print("starting")
        return width / 0

    line = answer.__code__.co_firstlineno + 2
    expected = f"✗ 0.7 not yet: your code raised ZeroDivisionError at line {line} of test_exercises.py: division by zero."
    assert judge(AREA, answer).line == expected

    cell = {}
    exec(compile("def answer(w, h):\n\n    return w[h]", "/tmp/no/such/cell.py", "exec"), cell)
    assert (
        "TypeError at line 3 of its cell: 'int' object is not subscriptable."
        in judge(AREA, cell["answer"]).line
    )

    def long(width, height):
        raise ValueError("first 0x7f00deadbeef\nsecond" + "x" * 500)

    assert judge(AREA, long).line.endswith(": first 0x…")


def test_a_known_mistake_may_be_one_that_raises():
    assert judge(AREA, lambda w, h: w * str(h)).line == "✗ 0.7 not yet: this repeats text."


def test_exit_in_an_answer_does_not_end_the_kernel():
    def answer(width, height):
        sys.exit(3)

    assert "raised SystemExit" in judge(AREA, answer).line


def test_a_keyboard_interrupt_passes_through():
    def answer(width, height):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(AREA, answer)


def test_a_wrong_signature_is_told_the_expected_one():
    def mine(width):
        return width

    expected = "✗ 0.7 not yet: expected a function area(width, height), and yours is mine(width)."
    assert judge(AREA, mine).line == expected
    assert "without calling it" in judge(AREA, 15).line


def test_a_missing_return_is_guessed():
    def forgets(width, height):
        width * height

    assert "is a `return` missing?" in judge(AREA, forgets).line
    uses_it = replace(AREA, observe=lambda f: f(3, 5).bit_length())
    assert judge(uses_it, forgets).line == "✗ 0.7 not yet: area returned None: is a `return` missing?"


def test_a_result_that_the_check_cannot_use_is_said_plainly():
    uses_it = replace(AREA, observe=lambda f: f(3, 5).bit_length(), mistakes=())
    line = judge(uses_it, lambda w, h: "15").line
    assert line.startswith(
        "✗ 0.7 not yet: area(width, height) could not be used: AttributeError: 'str' object"
    )


def test_a_reference_that_cannot_run_here_is_not_the_learners_fault():
    def reference(width, height):
        raise OSError("no such model")

    line = judge(replace(AREA, reference=reference), area).line
    assert "cannot be checked here" in line and "no such model" in line


def test_an_answer_too_odd_to_compare_is_still_one_line(capsys):
    endless = []
    endless.append(endless)
    for answer in (endless, lambda shape, size: endless):
        check("0.1", answer)
        out = capsys.readouterr().out
        assert out.startswith("✗ 0.1 not yet: ") and out.count("\n") == 1


# Values and classes ---------------------------------------------------------------------------------------------------

LAYERS = exercise_of(
    {"layers": 12, "bytes": 4096},
    lambda value: value,
    Mistake("twice", {"layers": 24, "bytes": 4096}, "this counts every layer twice."),
)


def test_a_value_exercise_never_gives_its_value_away():
    assert judge(LAYERS, {"bytes": 4096.0, "layers": torch.tensor(12)}).outcome == PASSED
    assert (
        judge(LAYERS, {"layers": 24, "bytes": 4096}).line == "✗ 0.7 not yet: this counts every layer twice."
    )
    assert (
        judge(LAYERS, {"layers": 12, "bytes": 512}).line
        == "✗ 0.7 not yet: for entry 'bytes': 512 is too small."
    )
    assert judge(LAYERS, {"layers": 12, "bytes": ...}).outcome == OPEN
    assert "you gave a function" in judge(LAYERS, lambda: 12).line
    given = judge(LAYERS, ...).result
    given["layers"] = 0
    assert LAYERS.reference["layers"] == 12


class Counter:
    """Counts up by a step."""

    def __init__(self, step):
        self.step_size, self.total = step, 0

    def reset(self):
        self.total = 0

    def step(self):
        self.total += self.step_size


def steps(cls):
    counter = cls(3)
    counter.step()
    counter.step()
    return {"two steps": counter.total}


def test_a_class_is_judged_like_a_function():
    counting = exercise_of(Counter, steps)

    class Mine(Counter):
        def step(self):
            self.total = self.total + self.step_size

    class Stub:
        def __init__(self, step):
            self.step_size, self.total = step, 0

        def step(self): ...

    class Wrong(Stub):
        def step(self):
            self.total = 3

    assert judge(counting, Mine).result is Mine
    assert judge(counting, Stub).outcome == OPEN
    assert judge(counting, Wrong).line == "✗ 0.7 not yet: for two steps: got 3, expected 6."
    given = judge(counting, Wrong).result
    assert steps(given) == {"two steps": 6} and judge(counting, given).outcome == OPEN


# Nothing leaks --------------------------------------------------------------------------------------------------------


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

    told = "✗ 0.7 not yet: your code changes `numbers`, which it was given: leave it as it was, and work on a copy."
    assert judge(total, pops).line == told
    assert judge(total, pops).line == told
    assert judge(replace(total, changes=("numbers",)), pops).outcome == PASSED


def test_the_reference_is_computed_before_an_answer_can_reach_what_it_is_computed_from():
    shared = torch.ones(3)
    total = exercise_of(lambda x: x.sum(), lambda f: f(shared))

    def doubles(x):
        return x.mul_(2).sum() / 2

    assert "changes `x`" in judge(total, doubles).line

    def twice_too_large(x):
        return x.mul_(2).sum()

    assert "changes `x`" in judge(total, twice_too_large).line


def leaves_grad_off(width, height):
    torch.set_grad_enabled(False)


def leaves_autocast_on(width, height):
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()


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
        (leaves_autocast_on, "autocast on"),
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
    from gradmem_lib.course.traces import switches

    before = switches()

    def answer(width, height):
        leave(width, height)
        return width * height

    assert judge(AREA, answer).line.startswith(
        f"✗ 0.7 not yet: your code leaves {said}, for all that runs after it"
    )
    assert switches() == before

    def fails(width, height):
        leave(width, height)
        raise ValueError("stop")

    assert "raised ValueError" in judge(AREA, fails).line
    assert switches() == before
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
        (lambda model: model.eval(), "eval mode on, where it was off"),
        (lambda model: model.requires_grad_(False), "another requires_grad than before"),
        (lambda model: model.layer.register_forward_hook(lambda *a: None), "a hook more or less than before"),
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


# Budgets --------------------------------------------------------------------------------------------------------------


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
    assert line == f"✗ 0.7 not yet: for 4 chunks: the numbers are right, the bytes are too many. {peak}"
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
    expected = "your code goes over its budget of 2,000 bytes: with the 4,000 bytes it asked for last, 4,000 bytes would"
    assert expected in line and "2,000 too many." in line


# Ids and imports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["0.9", "99.1", "one", "", 0.1, None])
def test_an_unknown_exercise_is_one_sentence_that_lists_those_there_are(id):
    with pytest.raises(KeyError) as caught:
        check(id, None)
    assert isinstance(caught.value, UnknownExercise)
    sentence = str(caught.value)
    assert sentence.startswith(f"there is no exercise {id!r}: ") and ("0.1" in sentence)


def test_ids_forgive_spaces_and_lessons_forgive_zeros():
    assert get(" 0.1 ").id == "0.1"
    assert all_exercises(0) == all_exercises("00") == all_exercises("0") != []


def test_importing_the_exercises_imports_nothing_heavy():
    code = "import sys, gradmem_lib.course.check as e; print([m for m in ('torch', 'IPython', 'ipywidgets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_and_passed_are_the_words_the_progress_file_keeps():
    from gradmem_lib.course import progress

    check("0.1", ...)
    assert progress.load()["checks"] == {}
    check("0.1", lambda s, b: 1)
    assert progress.load()["checks"]["0.1"] == {"outcome": WRONG, "tries": 1}
    check("0.1", get("0.1").reference)
    check("0.1", lambda s, b: 1)
    assert progress.load()["checks"]["0.1"] == {"outcome": PASSED, "tries": 3}


def test_cards_and_peaks_that_lesson_05_states_are_those_of_its_checks():
    from gradmem_lib.course.exercises import settings
    from gradmem_lib.measure.tracker import MemoryTracker

    text = (Path(__file__).parent.parent / "solutions" / "05_fine_tuning.py").read_text(encoding="utf-8")
    for card in ("CHECKPOINTING_CARD", "LOG_CARD", "LORA_CARD", "EVAL_CARD"):
        assert f"**{getattr(settings, card)}**" in text, card

    def peak(setting, steps: int) -> str:
        model, ids = setting()
        model.train()
        with MemoryTracker(model, live=False) as tracker:
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for _ in range(steps):
                model(input_ids=ids, labels=ids).loss.backward()
                if steps > 1:
                    optimizer.step()
                    optimizer.zero_grad()
        return f"{tracker.peak.total / 2**20:.1f} MiB"

    assert f"where it takes {peak(settings.checkpointing_setting, 1)} now" in text
    assert f"every weight trained they take {peak(settings.lora_setting, 2)}" in text


def test_checkpoints_beside_torchs_adafactor_save_what_lesson_05_says():
    from gradmem_lib.planning.models import known_model
    from gradmem_lib.prediction.predict import predict
    from gradmem_lib.training.recipe import Recipe

    recipe = Recipe(precision="bf16", optimizer="adafactor-torch", accumulation=8)
    ask = {"batch_size": 8, "seq_len": 128, "target": "cpu"}
    config = known_model("SmolLM2-135M")[1]
    without, checkpointed = (
        predict(config, recipe=replace(recipe, checkpointing=how), **ask).peak.total
        for how in (None, "per-layer")
    )
    text = (Path(__file__).parent.parent / "solutions" / "05_fine_tuning.py").read_text(encoding="utf-8")
    assert "would lower this peak by less than one MiB" in " ".join(text.replace("#", " ").split())
    assert 0 < without - checkpointed < 2**20
