"""`check` says the right one of its three things about anything."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from course.judge.toy_exercise import AREA, area, exercise_of

from gradmem_lib.course.judge.exercise import Mistake, calls
from gradmem_lib.course.judge.verdict import OPEN, PASSED, judge
from gradmem_lib.course.learner.check import check


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


def test_a_wrong_answer_is_told_its_case_and_no_formula():
    assert (
        judge(AREA, lambda w, h: w * h + 2).line
        == "✗ 0.7 not yet: for area(3, 5): got 17, expected 15."
    )
    named = replace(AREA, observe=lambda f: {"a strip": {"total": f(3, 5)}})
    line = judge(named, lambda w, h: w * h + 2).line
    assert line == "✗ 0.7 not yet: for a strip, entry 'total': got 17, expected 15."


def test_the_author_may_explain_whole_families():
    told = replace(
        AREA, explain=lambda got, expected: "that is negative" if got["(3, 5)"] < 0 else None
    )
    assert (
        judge(told, lambda w, h: -w * h - 1).line
        == "✗ 0.7 not yet: that is negative. For area(3, 5): got -16, expected 15."
    )
    assert "expected 15" in judge(told, lambda w, h: w * h + 1).line


def test_an_exception_is_one_line_with_its_place():
    def answer(width, height):
        print("starting")
        return width / 0

    line = answer.__code__.co_firstlineno + 2
    expected = (
        f"✗ 0.7 not yet: your code raised ZeroDivisionError at line {line} of "
        "test_verdict.py: division by zero."
    )
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

    expected = "✗ 0.7 not yet: expected a function area(width, height), but yours is mine(width)."
    assert judge(AREA, mine).line == expected
    assert "without calling it" in judge(AREA, 15).line


def test_a_missing_return_is_guessed():
    def forgets(width, height):
        width * height

    assert "is a `return` missing?" in judge(AREA, forgets).line
    uses_it = replace(AREA, observe=lambda f: f(3, 5).bit_length())
    assert (
        judge(uses_it, forgets).line == "✗ 0.7 not yet: area returned None: is a `return` missing?"
    )


def test_a_result_that_the_check_cannot_use_is_said_plainly():
    uses_it = replace(AREA, observe=lambda f: f(3, 5).bit_length(), mistakes=())
    line = judge(uses_it, lambda w, h: "15").line
    assert line.startswith(
        "✗ 0.7 not yet: area(width, height) could not be used: AttributeError: 'str' object"
    )


def test_after_a_hint_a_function_keeps_its_name_as_it_is_spelled():
    hint = ("no attribute", "the area is a number.")
    uses_it = replace(AREA, observe=lambda f: f(3, 5).bit_length(), mistakes=(), raises=(hint,))
    line = judge(uses_it, lambda w, h: "15").line
    assert line.startswith("✗ 0.7 not yet: the area is a number. area(width, height) could not be")


def test_true_and_false_are_neither_small_nor_large():
    fits = exercise_of({"fits": True}, lambda value: value)
    assert judge(fits, {"fits": False}).line == "✗ 0.7 not yet: for entry 'fits': False is not it."


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
    told = (
        "contains itself (a list that was appended to itself, for example), or is nested "
        "hundreds of times: return plain numbers or tensors."
    )
    assert judge(AREA, lambda w, h: endless).line == f"✗ 0.7 not yet: what area returns {told}"
    assert judge(LAYERS, {"layers": endless}).line == f"✗ 0.7 not yet: your answer {told}"


def test_an_answer_whose_wrapped_leads_back_to_itself_is_judged_like_any_other():
    def right(w, h):
        return w * h

    def wrong(w, h):
        return w + h

    right.__wrapped__, wrong.__wrapped__ = right, wrong
    assert judge(AREA, right).outcome == PASSED
    assert judge(AREA, wrong).line.startswith("✗ 0.7 not yet: this adds the sides.")


LAYERS = exercise_of(
    {"layers": 12, "bytes": 4096},
    lambda value: value,
    Mistake("twice", {"layers": 24, "bytes": 4096}, "this counts every layer twice."),
)


def test_a_value_exercise_never_gives_its_value_away():
    assert judge(LAYERS, {"bytes": 4096.0, "layers": torch.tensor(12)}).outcome == PASSED
    assert (
        judge(LAYERS, {"layers": 24, "bytes": 4096}).line
        == "✗ 0.7 not yet: this counts every layer twice."
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


def test_a_stub_that_is_called_from_another_cell_is_a_stub_too():
    notebook: dict = {}
    exec(compile("def half():\n    raise NotImplementedError\n", "one cell", "exec"), notebook)
    exec(compile("def area(*sizes):\n    return half()\n", "another cell", "exec"), notebook)
    assert judge(AREA, notebook["area"]).outcome == OPEN
    exec(
        compile("def theirs():\n    raise NotImplementedError\n", "a library", "exec"),
        library := {},
    )
    notebook["half"] = library["theirs"]  # an operation that a library lacks: the learner has tried
    assert judge(AREA, notebook["area"]).outcome != OPEN


def test_only_the_beginning_of_a_long_answer_is_looked_at_for_what_is_unfinished():
    from gradmem_lib.course.judge.not_attempted import has_ellipsis

    assert has_ellipsis([1, (2, ...)]) and has_ellipsis({"a": [...]})
    assert not has_ellipsis([0] * 10_000 + [...])


def leaves_a_branch_open(width, height):
    if width == 3:
        return width * height
    else:
        ...


def returns_ellipsis_in_a_branch(width, height):
    return ... if isinstance(width, float) else width * height


def computes_with_ellipsis_in_a_branch(width, height):
    factor = 1
    if width == 3:
        factor = ...
    return width * height * factor


def has_an_empty_helper(width, height):
    def helper(): ...

    helper()
    return width + height + 1


def indexes_by_ellipsis(width, height):
    return torch.full((1, 2), 3.0)[..., 0]


@pytest.mark.parametrize(
    "attempt",
    [
        leaves_a_branch_open,
        returns_ellipsis_in_a_branch,
        computes_with_ellipsis_in_a_branch,
        has_an_empty_helper,
        indexes_by_ellipsis,
    ],
)
def test_an_attempt_with_something_open_is_no_stub(attempt):
    assert judge(AREA, attempt).line.startswith("✗ 0.7 not yet: ")


def test_a_forgotten_ellipsis_is_named():
    def area(width, height):
        result = width + height
        ...
        return result

    line = judge(AREA, area).line
    assert line.startswith("○") and "is still empty or `...`" in line


class Packs:
    """Packs a number, and unpacks it."""

    def pack(self, number):
        return [number]

    def unpack(self, packed):
        return packed[0]


def test_only_an_empty_method_that_was_asked_for_is_open():
    packing = exercise_of(Packs, lambda cls: {"back": cls().unpack(cls().pack(3))})

    class Empty(Packs):
        def pack(self, number):
            """Packs."""

    class Returns(Packs):
        def pack(self, number):
            return None

        def unpack(self, packed):
            return packed

    class Helper(Packs):
        def prepare(self): ...

        def unpack(self, packed):
            return packed

    assert judge(packing, Empty).outcome == OPEN
    assert judge(packing, Returns).line.startswith("✗")
    assert judge(packing, Helper).line.startswith("✗")


@pytest.mark.parametrize(
    "value",
    [
        list(range(100_000)),
        "x" * 1_000_000,
        10**5000,
        set(range(100_000)),
        {"k" * 100_000: 1},
        torch.zeros(100_000),
        type("C" * 100_000, (), {}),
        ValueError("e" * 1_000_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_line_is_as_long_as_an_answer(value):
    def answer(width, height):
        if isinstance(value, Exception):
            raise value
        return value

    told = replace(AREA, explain=lambda got, expected: f"the answer is {got!r}.")
    named = replace(AREA, observe=lambda f: f(3, 5) if isinstance(value, dict) else {"a": f(3, 5)})
    for exercise in (AREA, named, told):
        line = judge(exercise, answer).line
        assert line.startswith("✗") and len(line) < 1000
    assert len(judge(LAYERS, {"layers": value, "bytes": 1}).line) < 1000
