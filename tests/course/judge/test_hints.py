"""What a wrong answer is told where no known mistake is all of it; and answers that never end, or
are interrupted.
"""

import contextlib
import linecache
import operator
import threading
import time
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from course.judge.toy_exercise import AREA, area, exercise_of

from gradmem_lib.course.judge import hints, time_limit
from gradmem_lib.course.judge.exercise import Mistake, Seen, calls
from gradmem_lib.course.judge.verdict import PASSED, judge
from gradmem_lib.course.learner.check import check

VOLUME = exercise_of(
    lambda width, height, depth: width * height * depth,
    calls((3, 5, 2), (2, 4, 7), (6, 1, 3), hidden=((5, 5, 9), (4, 3, 11))),
    Mistake("surface", lambda w, h, d: 2 * (w * h + h * d + w * d), "this is the surface."),
)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda w, h, d: 30, "the answer is 30 for all arguments"),
        (lambda w, h, d: w * h, "`depth` has no effect on your answer."),
        (
            lambda w, h, d: w * h * d * d,
            "with twice the `depth` your answer is 4 times as large, but should be 2 times",
        ),
        (lambda w, h, d: 3 * w * h * d, "every case is 3 times too large."),
        (lambda w, h, d: -w * h * d, "negative"),
        (lambda w, h, d: str(w * h * d), "return a number: this is text, '30'."),
        (lambda w, h, d: [w, h, d], "return one number: this is a sequence of length 3."),
        (lambda w, h, d: w * h * d + 0.5, "return a whole number"),
        (lambda w, h, d: float("nan"), "not a number"),
    ],
)
def test_what_a_wrong_formula_does_is_read_off_its_numbers(answer, said):
    line = judge(VOLUME, answer).line
    assert said in line and "\n" not in line
    assert "for <lambda>(" in line.casefold()  # and the case follows


def test_a_factor_is_seen_beside_cases_that_are_0():
    share = exercise_of(
        lambda x, y: (x - y) / y, calls((2, 2), (3, 2), (5, 4), hidden=((7, 2), (9, 3)))
    )
    assert "every case is 100 times too large." in judge(share, lambda x, y: 100 * (x - y) / y).line
    offset = judge(share, lambda x, y: 100 * (x - y) / y + (x == y)).line
    assert "every case" not in offset and "got 1, expected 0" in offset
    assert "every case" not in judge(share, lambda x, y: (x - y) / y * (1 if x == 3 else 100)).line


def test_half_precision_is_seen_by_how_near_it_is():
    mean = exercise_of(lambda x: x.mean(), lambda f: {n: f(torch.arange(n) / 7.0) for n in (5, 50)})
    assert "half precision" in judge(mean, lambda x: x.bfloat16().mean()).line


def test_numbers_that_are_alike_by_nature_are_not_nearly_right():
    losses = exercise_of(lambda: [7.64, 7.63, 7.66], lambda f: {"three steps": f()})
    assert "nearly right" not in judge(losses, lambda: [7.64, 7.64, 7.64]).line
    apart = exercise_of(lambda: [7.64, 1.63, 3.66], lambda f: {"three steps": f()})
    assert "nearly right" in judge(apart, lambda: [7.64, 1.64, 3.66]).line


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (8, "8 times too large (these look like bits): return bytes"),
        (1 / 2**20, "1,048,576 times too small (these look like MiB): return bytes"),
        (1e-9, "1,000,000,000 times too small (these look like GB): return bytes"),
        (3, "every case is 3 times too large"),
    ],
)
def test_another_unit_of_bytes_is_named(factor, said):
    assert said in judge(VOLUME, lambda w, h, d: w * h * d * factor).line


def test_a_truth_is_asked_for_by_name():
    fits = exercise_of(lambda n: n < 4, calls((3,), (5,)))
    assert "return True or False: this is 'yes'." in judge(fits, lambda n: "yes").line


def test_whole_numbers_that_are_nearly_right_are_not_said_to_be_rounded():
    nbytes = exercise_of(lambda n: 1000.0 * n + 4, lambda f: {n: f(n) for n in (5, 50)})
    line = judge(nbytes, lambda n: 1000 * n).line
    assert "a small part is missing" in line and "precision" not in line


def test_a_table_copied_from_messages_is_no_answer():
    shown = {(3, 5, 2): 30, (2, 4, 7): 56, (6, 1, 3): 18}
    line = judge(VOLUME, lambda w, h, d: shown.get((w, h, d), 0)).line
    assert (
        "for another case, which is not shown: 0 is too small" in line
        and "225" not in line
        and "5, 9" not in line
    )


def test_the_first_of_two_mistakes_is_named():
    flat = Mistake("flat", lambda w, h, d: w * h * min(d, 2), "this cuts the depth at 2.")
    shallow = replace(VOLUME, mistakes=(flat,), observe=calls((3, 5, 4), (2, 4, 1), (6, 1, 3)))

    def flat_and_more(w, h, d):
        return w * h * min(d, 2) if d > 1 else 17

    line = judge(shallow, flat_and_more).line
    assert line.startswith("✗ 0.7 not yet: this cuts the depth at 2. For <lambda>(3, 5, 4): got 30")


def test_a_mistake_is_named_only_if_all_its_cases_agree():
    def surface_and_more(w, h, d):
        return 2 * (w * h + h * d + w * d) if w != 4 else 17

    assert "surface" not in judge(VOLUME, surface_and_more).line


def test_a_coincidence_in_one_case_is_no_mistake():
    assert "surface" not in judge(VOLUME, lambda w, h, d: 62 if w == 3 else w + h + d).line


def test_what_is_right_already_is_said():
    def observe(f):
        return {
            name: {"area": f(*size), "width": size[0]}
            for name, size in (("one", (1, 5)), ("two", (2, 4)))
        }

    line = judge(exercise_of(area, observe), lambda w, h: 5 if w == 1 else 9).line
    assert line == (
        "✗ 0.7 not yet: all is right for one, and 'width' is right; for two, entry 'area': got "
        "9, expected 8."
    )


def test_notes_are_for_the_explanation_alone():
    def observe(function):
        return Seen({"a strip": {"area": function(3, 5)}}, calls=[function])

    explained = exercise_of(
        area, observe, explain=lambda got, expected: f"{len(got.notes['calls'])} call is made."
    )
    assert judge(explained, lambda w, h: h * w).outcome == PASSED
    assert judge(explained, lambda w, h: 1).line.startswith(
        "✗ 0.7 not yet: 1 call is made. For a strip"
    )


def test_an_exception_says_what_to_look_at():
    def loses_the_graph(width, height):
        torch.ones(1).sum().backward()

    line = judge(AREA, loses_the_graph).line
    assert line.startswith("✗ 0.7 not yet: backward is called on something without a graph")
    assert "Your code raised RuntimeError at line" in line
    own = replace(AREA, raises=(("ZeroDivisionError", "count from 1."),))

    def divides(width, height):
        step = 0
        return width / step

    line = judge(own, divides).line
    assert (
        line.startswith("✗ 0.7 not yet: count from 1. Your code raised ZeroDivisionError at line")
        and ", where step is 0:" in line
    )


def test_a_raised_mistake_is_matched_by_its_case():
    two = Mistake("two", lambda sides: sides[0] * sides[1], "this takes two sides.")
    sides = exercise_of(lambda sides: sides[0] * sides[-1], calls(((2, 3),), ((4,),)), two)
    assert (
        judge(sides, lambda sides: sides[0] * sides[1]).line
        == "✗ 0.7 not yet: this takes two sides."
    )
    assert "IndexError" in judge(sides, lambda sides: (4, 5)[len(sides)] and sides[2]).line


def endless(width, height):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_endless_answer_is_stopped_with_a_sentence(monkeypatch, elsewhere):
    monkeypatch.setattr(time_limit, "SECONDS", 0.2)
    lines = []

    def judged():
        lines.append(judge(AREA, endless).line)

    if elsewhere:
        thread = threading.Thread(target=judged)
        thread.start()
        thread.join(20)
    else:
        judged()
    assert (
        "your code was stopped after 0 seconds, and is at line" in lines[0]
        and "never ends" in lines[0]
    )
    assert judge(AREA, area).outcome == PASSED


def test_an_interrupted_check_is_one_line_and_leaves_everything_as_it_was(capsys):
    def interrupted(shape, bytes_per_element):
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    given = check("0.1", interrupted)
    assert capsys.readouterr().out == "○ 0.1 interrupted, and not judged: the bytes of one tensor\n"
    assert given((2, 3), 4) == 24 and torch.is_grad_enabled()


def test_an_optimizers_settings_are_put_back():
    def observe(function):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        return function(optimizer)

    def reference(optimizer):
        return len(optimizer.param_groups)

    def slower(optimizer):
        optimizer.param_groups[0]["lr"] = 0.1
        return 1

    assert (
        "your code leaves `optimizer` with another lr than before"
        in judge(exercise_of(reference, observe), slower).line
    )


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_left_on_a_weight_is_found_unless_it_is_asked_for(register):
    def forward(model):
        return float(model(torch.ones(2)))

    def hooked(model):
        getattr(model.weight, register)(lambda *_: None)
        return forward(model)

    def taken_off(model):
        getattr(model.weight, register)(lambda *_: None).remove()
        return forward(model)

    def in_eval(model):
        model.eval()
        return hooked(model)

    asked = exercise_of(forward, lambda f: f(torch.nn.Linear(2, 1)))
    assert "your code leaves `model` with a hook more or less" in judge(asked, hooked).line
    assert judge(asked, taken_off).outcome == PASSED
    hooks = replace(asked, changes=("model.hook",))
    assert judge(hooks, hooked).outcome == PASSED
    assert "your code leaves `model` with eval mode on" in judge(hooks, in_eval).line
    assert judge(replace(asked, changes=("model",)), in_eval).outcome == PASSED


def test_no_kind_of_result_stops_a_check():
    odd = [
        None,
        True,
        0.5,
        "a",
        (1, 2),
        (2, 1),
        {"a": 1},
        torch.tensor(1.0),
        torch.randn(3),
        (torch.randn(3), torch.randn(3)),
        (torch.randn(2), 1),
        (float("nan"),) * 2,
        1 + 2j,
        torch.float32,
        range(3),
        object(),
    ]
    for got in odd:
        for expected in odd:
            hints.relation({"one": got, "two": got}, {"one": expected, "two": expected}, 1e-6)
            known = [("Its own.", {"one": got}), ("The right one.", {"one": expected})]
            hints.nearest_mistake({"one": got}, {"one": expected}, known, 1e-6)


def test_a_mistake_in_truths_is_named_only_if_it_has_the_same_truths_in_every_case():
    names = ["one", "two", "three", "four", "five", "six"]
    expected = dict(zip(names, [False, False, False, False, True, True], strict=True))
    known = [("It is always True.", dict.fromkeys(names, True))]
    mostly = dict.fromkeys(names, True) | {"six": False}
    for all_of_it in (True, False):
        says = hints.nearest_mistake(mostly, expected, known, 1e-6, all_of_it=all_of_it)
        assert says == ""
    with_a_number = {name: {"enough": True, "bytes": 1} for name in names}
    expected_too = {name: {"enough": truth, "bytes": 2} for name, truth in expected.items()}
    both_known = [
        ("It is always True.", {name: {"enough": True, "bytes": 2} for name in names}),
    ]
    says = hints.nearest_mistake(with_a_number, expected_too, both_known, 1e-6)
    assert says == "It is always True."


def _over_a_helper(width, height):
    area, i = width * height, 0
    for i in range(2):
        area += 1 / (i - i) if i else 0
    return area


def _in_place(width, height):
    empty: list[int] = []
    zero, area = 0, width * height
    area //= len(
        empty,
    )
    return area + zero


def _remainder(width, height):
    zero, sides = 0, {"width": 0}
    return zero + width % sides["width"]


def _a_zero_that_divides_nothing(width, height):
    zero = 0
    return zero + Fraction(width, 0)


def _no_division(width, height):
    zero = 0
    return zero**-1


def _elsewhere(width, height):
    zero = 0
    return zero + sum(map(operator.truediv, [width], [zero]))


@pytest.mark.parametrize(
    ("divides", "named"),
    [
        (_over_a_helper, ", where i - i is 0: "),
        (_in_place, ", where len(empty) is 0: "),
        (_remainder, ", where sides['width'] is 0: "),
        (_a_zero_that_divides_nothing, None),
        (_no_division, None),
        (_elsewhere, None),
    ],
)
def test_of_a_division_by_zero_the_divisor_is_named_or_nothing(divides, named):
    line = judge(AREA, divides).line
    assert "our code raised ZeroDivisionError at line" in line
    if named is None:
        assert "where" not in line
    else:
        assert named in line


def test_a_divisor_in_a_notebooks_cell_is_named():
    cell = "def area(width, height):\n    i = 0\n    é = [i]; return width / é[-1]\n"
    name = "<ipython-input-1-zero>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    names: dict = {}
    exec(compile(cell, name, "exec"), names)
    line = judge(AREA, names["area"]).line
    assert "ZeroDivisionError at line 3 of its cell, where é[-1] is 0: " in line
