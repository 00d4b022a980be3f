"""``check`` says the right one of its three things about anything."""

import gc
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from course.judge.toy_exercise import AREA, area, exercise_of

from gradmem_lib.course.judge.exercise import Exercise, calls, measured
from gradmem_lib.course.judge.verdict import OPEN, PASSED, judge
from gradmem_lib.course.learner.check import check

NOT_YET = "✗ 0.7 not yet: "


RIGHT = [
    "lambda w, h: float(w) * h",
    "lambda height, width: torch.tensor(width * height)",
    "lambda w, h, unit='cm': torch.tensor(w * h).double().numpy()[()]",
    "lambda *sides: sides[0] * sides[1]",
    "lambda w, h: w * h * (1 + 1e-9) if isinstance(w, float) else w * h",
]


@pytest.mark.parametrize("text", RIGHT)
def test_a_right_answer_written_another_way_passes(text):
    answer = eval(text)
    verdict = judge(AREA, answer)
    assert verdict.line == "✓ 0.7 passed" and verdict.result is answer


def does_nothing(width, height):
    """With a docstring."""
    ...


def raises_not_implemented(width, height):
    half = width / 2
    raise NotImplementedError(f"your code here, {half}")


def returns_ellipsis(width, height):
    result = ...
    return result


def adds_to_ellipsis(width, height):
    total = ...
    return total + 1


def calls_a_stub(width, height):
    return raises_not_implemented(width, height)


@pytest.mark.parametrize(
    "stub",
    [
        *(..., None, NotImplemented, does_nothing, raises_not_implemented, returns_ellipsis),
        *(adds_to_ellipsis, calls_a_stub, lambda w, h: ..., lambda w, h: {"total": [...]}),
    ],
)
def test_a_stub_is_not_attempted(stub):
    verdict = judge(AREA, stub)
    assert verdict.outcome == OPEN and verdict.result(3, 4) == 12


def test_the_right_answer_handed_back_is_not_an_attempt():
    given = judge(AREA, ...).result
    assert judge(AREA, given).outcome == OPEN
    assert judge(AREA, area).outcome == PASSED  # written by a learner who found the same words
    assert judge(replace(AREA, id="0.8"), given).outcome == PASSED


def raises_in_a_branch(width, height):
    if isinstance(width, int):
        return width * height
    raise NotImplementedError("whole numbers only")


def raises_what_it_caught(width, height):
    try:
        return width // 0
    except ZeroDivisionError:
        raise NotImplementedError from None


def uses_what_torch_lacks(width, height):
    return torch.ones(2, device="meta").cpu()


@pytest.mark.parametrize(
    "answer", [raises_in_a_branch, raises_what_it_caught, uses_what_torch_lacks]
)
def test_a_branch_that_raises_not_implemented_is_an_attempt(answer):
    assert "Your code raised NotImplementedError at line" in judge(AREA, answer).line


# An answer, and how what is said of it begins.
WRONG = {
    "lambda w, h: 2 * (w + h)": "this is the way around it. For area(3, 5): got 16, expected 15.",
    "lambda w, h: w * str(h)": "this repeats text. For area(3, 5): got '555', expected 15.",
    "lambda w, h: w * h + 2": "For area(3, 5): got 17, expected 15.",
    "lambda w, h: w * h if w < 7 else 1": "For another case, which is not shown: 1 is too small.",
    "lambda w, h: []": "return one number: this is []. For area(3, 5): got [], expected 15.",
    "lambda w, h: print(w)": "For area(3, 5): got None, expected 15. Is a `return` missing?",
    "lambda w: w": "expected a function area(width, height), but yours is <lambda>(w).",
    "15": "expected a function area(width, height), but got 15: pass area itself",
    "lambda w, h: sys.exit(3)": "Your code raised SystemExit at line",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_answer_hears_a_mistake_or_a_case(text):
    assert judge(AREA, eval(text)).line.startswith(NOT_YET + WRONG[text])


def test_an_exception_is_one_line_with_its_place():
    def answer(width, height):
        print("starting")
        raise ValueError("first 0x7f00deadbeef\nsecond" + "x" * 500)

    line = answer.__code__.co_firstlineno + 2
    said = f"Your code raised ValueError at line {line} of test_verdict.py: first 0x…."
    assert judge(AREA, answer).line == NOT_YET + said
    said = judge(AREA, lambda w, h: sys.exit()).line
    assert said.endswith(" of test_verdict.py: without a message.")
    cell = {}
    exec(compile("def answer(w, h):\n\n    return w[h]", "/tmp/no/such/cell.py", "exec"), cell)
    assert "TypeError at line 3 of its cell: 'int' object is" in judge(AREA, cell["answer"]).line


def test_a_keyboard_interrupt_passes_through():
    def answer(width, height):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(AREA, answer)


def test_a_result_that_the_check_cannot_use_is_said_plainly():
    uses_it = exercise_of(area, lambda f: f(3, 5).bit_length())
    says = "area could not be used: AttributeError: 'str' object has no attribute 'bit_length'."
    assert judge(uses_it, lambda w, h: "15").line == NOT_YET + says
    assert "is a `return` missing?" in judge(uses_it, lambda w, h: print(w)).line


def test_a_right_answer_that_cannot_run_here_is_not_the_learners_fault():
    def right(width, height):
        raise OSError("no such model")

    line = judge(replace(AREA, right=right), area).line
    assert "cannot be checked here" in line and "no such model" in line


def test_an_answer_too_odd_to_compare_is_still_one_line(capsys):
    endless = []
    endless.append(endless)
    for answer in (endless, lambda shape, size: endless):
        check("0.1", answer)
        out = capsys.readouterr().out
        assert out.startswith("✗ 0.1 not yet: ") and out.count("✗") == 1


@pytest.mark.parametrize(
    "value",
    [
        *(list(range(100_000)), "x" * 1_000_000, 10**5000, set(range(100_000)), {"k" * 10**5: 1}),
        *(torch.zeros(100_000), type("C" * 100_000, (), {}), ValueError("e" * 1_000_000)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_line_is_as_long_as_an_answer(value):
    def answer(width, height):
        if isinstance(value, Exception):
            raise value
        return value

    assert NOT_YET in judge(AREA, answer).line and len(judge(AREA, answer).line) < 1000


LAYERS = {"layers": 12, "bytes": 4096}
TWICE = LAYERS | {"layers": 24}


def layer_cases(answer):
    for name in LAYERS:
        yield name, answer[name]


def test_a_value_exercise_never_gives_its_value_away():
    counting = Exercise("0.7", LAYERS, layer_cases, "TWICE\n    this counts every layer twice.")
    assert judge(counting, {"bytes": 4096.0, "layers": torch.tensor(12)}).outcome == PASSED
    said = "this counts every layer twice. For layers: 24 is too large. "
    said += "(1 of 2 cases came out right.)"
    assert judge(counting, dict(TWICE)).line == NOT_YET + said
    said = "For bytes: 512 is too small. (1 of 2 cases came out right.)"
    assert judge(counting, LAYERS | {"bytes": 512}).line == NOT_YET + said
    assert judge(counting, LAYERS | {"bytes": ...}).outcome == OPEN
    judge(counting, ...).result["layers"] = 0
    assert LAYERS["layers"] == 12


class Counter:
    """Counts up by a step."""

    def __init__(self, step):
        self.step_size, self.total = step, 0

    def step(self):
        self.total += self.step_size


def steps(cls):
    counter = cls(3)
    counter.step()
    counter.step()
    return counter.total


def test_a_class_is_judged_like_a_function():
    counting = exercise_of(Counter, steps)

    class Stub(Counter):
        def step(self):
            raise NotImplementedError

    class Wrong(Counter):
        def step(self):
            self.total = 3

    assert judge(counting, Counter).result is Counter
    assert judge(counting, Stub).outcome == OPEN
    assert judge(counting, Wrong).line == f"{NOT_YET}For it: got 3, expected 6."
    given = judge(counting, Wrong).result
    assert steps(given) == 6 and judge(counting, given).outcome == OPEN


def walk(state, step):
    state["at"] = state.get("at", 0) + step
    state["most"] = max(state.get("most", 0), state["at"])


def walk_cases(answer):
    state = {}
    for step in (3, -2, 4):
        answer(state, step)
        yield f"after a step of {step}", (state["at"], state["most"])


def test_two_mistakes_at_once_and_one_that_explains_the_first_case():
    walking = Exercise(
        "0.7",
        walk,
        walk_cases,
        """
        + step → - step
            the step is subtracted.
        max(state → min(state
            this is the least.
        """,
        changes="state",
        pairs=True,
    )

    def both(state, step):
        state["at"] = state.get("at", 0) - step
        state["most"] = min(state.get("most", 0), state["at"])

    says = "two things at once: the step is subtracted. And this is the least."
    assert says in judge(walking, both).line
    assert judge(replace(walking, changes=""), walk).outcome == PASSED  # as the right answer does


def test_budgets_speak_in_tensors():
    def sum_of_squares(chunks, size):
        return sum(torch.full((size,), 2.0).square().sum().item() for _ in range(chunks))

    def cases(function):
        yield "4 chunks", measured(lambda: function(4, 250), 2000, "chunks", 1000)

    chunked = Exercise("0.7", sum_of_squares, cases)
    assert judge(chunked, sum_of_squares).outcome == PASSED
    line = judge(chunked, lambda c, s: torch.full((c * s,), 2.0).square().sum().item()).line
    says = "Your code peaks at 8,000 bytes; the budget is 2,000 bytes, 6.0 chunks too many."
    assert line == f"{NOT_YET}For 4 chunks: {says}"
    assert "got 15, expected 4,000" in judge(chunked, lambda c, s: 15).line


def test_a_judged_answer_leaves_no_tensor_alive():
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


def test_an_answer_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr("gradmem_lib.course.judge.time_limit.SECONDS", 0.2)

    def endless(width, height):
        while True:
            pass

    assert "was stopped after" in judge(AREA, endless).line


def test_hidden_cases_are_judged_with_copies_of_their_arguments():
    total = exercise_of(lambda numbers: sum(numbers), calls(([1, 2],), hidden=[([4],)]))

    def pops(numbers):
        result = 0
        while numbers:
            result += numbers.pop()
        return result

    for _ in range(2):
        assert "has changed `numbers` in place" in judge(total, pops).line
    assert judge(replace(total, changes="numbers"), pops).outcome == PASSED
