"""Finds out from a wrong answer's numbers what it does, if no known mistake explains all of it.

A sentence says what to look at. ``verdict`` adds the case in which it shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from .compare import Measured, describe, difference, plain
from .exercise import Calls, HiddenCase

Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of everything in dicts of dicts.

    A ``Measured`` counts as its value and its bytes.
    """
    if isinstance(value, Measured):
        yield from leaves(value.value, path)
        yield (*path, "bytes"), replace(value, value=None)
    elif isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from leaves(entry, (*path, key))
    else:
        yield path, value


def entries(value: Any) -> dict[Path, Any]:
    """``leaves``, with each entry of a short tuple on its own: two numbers of an answer may be
    wrong for two reasons.
    """
    found = {}
    for path, leaf in leaves(value):
        leaf = plain(leaf)
        if isinstance(leaf, tuple) and len(leaf) <= 3:
            found |= {(*path, f"item {i}"): entry for i, entry in enumerate(leaf)}
        else:
            found[path] = leaf
    return found


def compared(got: Any, expected: Any, tolerance: float) -> dict[Path, bool]:
    """For each number, tensor or text of ``expected``: whether ``got`` has the same one at that
    place.
    """
    return _same(dict(leaves(got)), dict(leaves(expected)), tolerance)


def _same(mine: dict[Path, Any], theirs: dict[Path, Any], tolerance: float) -> dict[Path, bool]:
    return {
        path: path in mine and difference(mine[path], value, tolerance) is None
        for path, value in theirs.items()
    }


def _first_wrong(right: dict[Path, bool]) -> Path | None:
    """The first place of ``compared`` where the answer is wrong; ``None`` if it is right."""
    for path, same in right.items():
        if not same:
            return path
    return None


def nearest_mistake(
    got: Any,
    expected: Any,
    known: Iterable[tuple[str, Any]],
    tolerance: float,
    *,
    all_of_it: bool = False,
) -> str:
    """The sentence of the known mistake that ``got`` makes, perhaps beside another one.

    ``got`` must agree with the mistake at every place where the mistake is wrong, and at its own
    first wrong place. So for an answer with two mistakes, the first one is named. A truth (True or
    False) must agree in every case. ``known`` are (sentence, what the mistake does). The result is
    empty if none fits. ``all_of_it``: nearly all that is wrong in ``got`` is this mistake.
    """
    mine, wanted = entries(got), entries(expected)
    wrong = _wrong_places(mine, wanted, tolerance)
    best = ""
    most = 0  # places where the best mistake is wrong
    for says, value in known:
        theirs = entries(value)
        theirs_wrong = _wrong_places(theirs, wanted, tolerance)
        places = _with_all_truths(theirs_wrong, wanted)
        if not theirs_wrong or not _agree(mine, theirs, places, tolerance):
            continue
        if theirs_wrong[0] != wrong[0]:
            continue
        if all_of_it and len(theirs_wrong) < 0.8 * len(wrong):
            continue
        if len(theirs_wrong) > most:
            best, most = says, len(theirs_wrong)
    return best


def _with_all_truths(places: list[Path], wanted: dict[Path, Any]) -> list[Path]:
    """``places``, and for each truth among them this entry of all other cases.

    A truth that is wrong can have only one value. So two answers that are both wrong in some cases
    agree in these, whatever they do.
    """
    truths = {path[1:] for path in places if isinstance(wanted[path], bool)}
    more = []
    for path, value in wanted.items():
        if isinstance(value, bool) and path[1:] in truths and path not in places:
            more.append(path)
    return places + more


def _agree(
    mine: dict[Path, Any], theirs: dict[Path, Any], places: list[Path], tolerance: float
) -> bool:
    """Whether both have the same at each of these places."""
    for path in places:
        if path not in mine or path not in theirs:
            return False
        if difference(mine[path], theirs[path], tolerance) is not None:
            return False
    return True


def _wrong_places(mine: dict[Path, Any], wanted: dict[Path, Any], tolerance: float) -> list[Path]:
    return [path for path, same in _same(mine, wanted, tolerance).items() if not same]


def relation(got: Any, expected: Any, tolerance: float) -> str:
    """What the numbers themselves show: another kind of value, always the same value, or everywhere
    too large by one factor.
    """
    right = compared(got, expected, tolerance)
    mine, theirs = dict(leaves(got)), dict(leaves(expected))
    first = _first_wrong(right)
    if first is None or first not in mine:
        return ""
    another_kind = _other_kind(mine[first], theirs[first])
    if another_kind:
        return another_kind
    if tolerance < 1e-3 and difference(got, expected, 1e-2) is None and _tells_apart(theirs):
        return _nearly_right(theirs)
    numbers = _numbers_in_both(mine, theirs)
    if len(numbers) < 3 or len(numbers) < len(theirs):
        return ""
    is_constant = len({number for number, _ in numbers}) == 1
    should_differ = len({wanted for _, wanted in numbers}) > 1
    if is_constant and should_differ:
        return f"the answer is {describe(numbers[0][0])} for all arguments: it must depend on them."
    for path, same in right.items():
        wanted = plain(theirs[path])
        if same and isinstance(wanted, Real) and wanted:
            return ""  # one is right, so no factor holds for all
    return _one_factor(numbers, tolerance)


def _numbers_in_both(mine: Mapping, theirs: Mapping) -> list[tuple[Real, Real]]:
    """(number of the answer, number of the reference) where both have a number at a place."""
    numbers = []
    for path, value in theirs.items():
        number, wanted = plain(mine.get(path)), plain(value)
        if isinstance(number, Real) and isinstance(wanted, Real):
            numbers.append((number, wanted))
    return numbers


def _tells_apart(expected: Mapping) -> bool:
    """Whether two right digits say anything: the losses of three steps differ by less, so that
    three times the first one is as near.
    """
    for value in map(plain, expected.values()):
        if not isinstance(value, tuple) or len(value) < 2:
            continue
        if all(isinstance(number, Real) for number in value):
            numbers = [float(number) for number in value]
            if max(numbers) - min(numbers) < 0.1 * max(map(abs, numbers)):
                return False
    return True


def _nearly_right(expected: Mapping) -> str:
    whole = True
    for value in map(plain, expected.values()):
        whole &= isinstance(value, Real) and float(value).is_integer()
    if whole:
        return (
            "nearly right: two digits agree, so a small part is missing, or a small part "
            "too much is counted."
        )
    return (
        "nearly right: two digits agree. Perhaps a small part is missing, or too much is counted, "
        "or something is computed in half precision (bf16 or float16)."
    )


def _one_factor(numbers: list[tuple[Real, Real]], tolerance: float) -> str:
    """Whether each number of an answer is the expected one times the same factor."""
    ratios = []
    whole = True
    for number, wanted in numbers:
        whole &= float(wanted).is_integer()
        if wanted:
            ratios.append(number / wanted)
        elif number:
            return ""
    # Bytes are exact; other numbers may have been computed in float32.
    closeness = 1e-9 if whole else max(tolerance, 1e-9)
    if len(ratios) > 2 and math.isfinite(ratios[0]) and ratios[0] and _alike(ratios, closeness):
        return f"every case is {times(ratios[0])}."
    return ""


_UNITS = {
    8: "bits",
    1 / 2**10: "KiB",
    1 / 2**20: "MiB",
    1 / 2**30: "GiB",
    1e-3: "kB",
    1e-6: "MB",
    1e-9: "GB",
}


def unit_of(ratio: float) -> str:
    """The sentence for bytes that are ``ratio`` times what they should be, as in another unit;
    empty where no unit has this factor.
    """
    for factor, name in _UNITS.items():
        if not math.isclose(ratio, factor, rel_tol=1e-9):
            continue
        if factor > 1:
            off = f"{factor:g} times too large"
        else:
            off = f"{1 / factor:,.0f} times too small"
        return f"every number is {off} (these look like {name}): return bytes."
    return ""


def other_unit(got: Any, expected: Any) -> str:
    """The sentence for an answer whose bytes are all in another unit.

    Only whole numbers are bytes, as floats too; truths beside them are not looked at.
    """
    theirs = {}
    for path, wanted in entries(expected).items():
        if not isinstance(wanted, bool):
            theirs[path] = wanted
    numbers = _numbers_in_both(entries(got), theirs)
    if len(numbers) < len(theirs):
        return ""
    ratios = []
    for number, wanted in numbers:
        if not float(wanted).is_integer():
            return ""
        if wanted:
            ratios.append(float(number) / float(wanted))
        elif number:
            return ""
    if len(ratios) > 2 and _alike(ratios):
        return unit_of(ratios[0])
    return ""


def wrapped_around(got: Any, expected: Any) -> str:
    """The sentence for a number of bytes that does not fit into a whole number of 32 bits: what
    remains of it differs by a multiple of 2**32.
    """
    wrapped = []
    small_right, small_wrong = 0, 0  # numbers that fit into 32 bits; zeros show nothing
    for number, wanted in _numbers_in_both(entries(got), entries(expected)):
        if not float(wanted).is_integer() or not float(number).is_integer():
            continue
        if wanted < 2**31:
            small_right += number == wanted != 0
            small_wrong += number != wanted
        elif number != wanted and _same_32_bits(number, wanted):
            wrapped.append((number, wanted))
    for number, wanted in wrapped:
        # A number of whole MiB that is wrong for another reason is off by 2**32 now and then.
        by_chance = number >= 0 and wanted % 2**20 == 0
        # Where all small numbers are right, the large one is not wrong for another reason.
        if not by_chance or (small_right > 1 and not small_wrong):
            return (
                "the number has wrapped around: 32 bits hold no more than 2,147,483,647, so count "
                "in Python's own numbers, or in int64."
            )
    return ""


def _same_32_bits(number: Real, wanted: Real) -> bool:
    """Whether ``number`` is what 32 bits, with a sign or without, hold of ``wanted``."""
    fits = -(2**31) <= number < 2**32
    return fits and (int(wanted) - int(number)) % 2**32 == 0


def without_its_fraction(got: Any, expected: Any) -> str:
    """The sentence for an answer that is always the expected number, made whole."""
    theirs = entries(expected)
    numbers = _numbers_in_both(entries(got), theirs)
    if len(numbers) < max(3, len(theirs)):
        return ""
    for number, wanted in numbers:
        if isinstance(number, bool):  # a truth is no number that was made whole
            return ""
        if not float(number).is_integer() or abs(number - wanted) >= 1:
            return ""
    is_constant = len({number for number, _ in numbers}) == 1
    should_be_whole = all(float(wanted).is_integer() for _, wanted in numbers)
    if is_constant or should_be_whole:
        return ""
    return "the result is a whole number in every case: return it with its fraction."


def not_a_number(got: Any, expected: Any, tolerance: float) -> str:
    """The sentence if the first wrong number is nan, which cannot be compared with any formula."""
    first = _first_wrong(compared(got, expected, tolerance))
    value = plain(dict(leaves(got)).get(first))
    if isinstance(value, Real) and math.isnan(value):
        return relation(got, expected, tolerance)
    return ""


def shares(got: Mapping, *terms: Mapping) -> list[float] | None:
    """The numbers c with got = c[0] * terms[0] + c[1] * terms[1] + … in every case; ``None`` if
    there are none.
    """
    import numpy

    cases = list(terms[0])
    numbers = [plain(got.get(case)) for case in cases]
    if not all(isinstance(number, Real) and math.isfinite(number) for number in numbers):
        return None
    left = numpy.array([[float(term[case]) for term in terms] for case in cases])
    right = numpy.array(numbers, dtype=float)
    # Each case counts the same, so that those of small numbers are not lost beside large ones.
    size = numpy.maximum(abs(left).max(axis=1), 1.0)
    left, right = left / size[:, None], right / size
    found = numpy.linalg.lstsq(left, right, rcond=None)[0]
    off = abs(left @ found - right).max()
    return [round(float(c), 9) for c in found] if off <= 1e-9 * max(1.0, abs(right).max()) else None


def times(ratio: float) -> str:
    """ "2 times too large", "4 times too small", "with the wrong sign"."""
    if ratio < 0:
        return (
            "with the wrong sign"
            if math.isclose(ratio, -1)
            else f"{-ratio:g} times, with the wrong sign"
        )
    return f"{ratio:.4g} times too large" if ratio > 1 else f"{1 / ratio:.4g} times too small"


def _alike(numbers: list[float], tolerance: float = 1e-9) -> bool:
    return all(math.isclose(number, numbers[0], rel_tol=tolerance) for number in numbers)


def wrong_names(got: Any, expected: Any) -> str:
    """What is said of an answer that must be a dict, in the first case where it is another kind of
    value, or a dict with other names. (For an ``observe`` that shows the answers themselves.)
    """
    for case, wanted in expected.items():
        if not isinstance(wanted, dict) or case not in got:
            continue
        mine = plain(got[case])
        if not isinstance(mine, dict):
            what = "None (is a `return` missing?)" if mine is None else describe(mine)
            return f"return a dict with the names {_listed(wanted)}: this is {what}."
        others = [name for name in mine if name not in wanted]
        missing = [name for name in wanted if name not in mine]
        if others and missing:
            return f"your dict has {_listed(others)}, but the names must be {_listed(wanted)}."
    return ""


def _listed(names: Iterable) -> str:
    *first, last = map(describe, names)
    return f"{', '.join(first)} and {last}" if first else last


def _other_kind(got: Any, expected: Any) -> str:
    """What another kind of value shows, such as text where a number was expected."""
    got, expected = plain(got), plain(expected)
    if isinstance(expected, bool):
        return _instead_of_a_bool(got)
    if isinstance(expected, Real):
        return _instead_of_a_number(got, expected)
    if isinstance(expected, tuple):
        return _instead_of_a_list(got, expected)
    return ""


def _instead_of_a_bool(got: Any) -> str:
    if got is None:
        return ""
    if not isinstance(got, Real):
        return f"return True or False: this is {describe(got)}."
    if got not in (0, 1):
        return f"return True or False: this is a number, {describe(got)}."
    return ""


def _instead_of_a_number(got: Any, expected: Real) -> str:
    if got is None:
        return ""
    if isinstance(got, str):
        return f"return a number: this is text, {describe(got)}."
    if isinstance(got, bool):
        return f"return a number: this is {got}."
    if not isinstance(got, Real):
        return f"return one number: this is {describe(got)}."
    if math.isnan(got) and not math.isnan(expected):
        return (
            "the result is not a number (nan): look for 0 / 0, or for the root of a "
            "negative number."
        )
    if got < 0 <= expected:
        return "the result is negative, but it can never be negative."
    if isinstance(expected, Integral) and math.isfinite(got) and got != round(got):
        return "return a whole number: this is a fraction."
    return ""


def _instead_of_a_list(got: Any, expected: tuple) -> str:
    if isinstance(got, Real):
        return "return a list with one number for each: this is one number in all."
    if not isinstance(got, tuple):
        return ""
    if len(got) != len(expected):
        return f"there must be {len(expected)} entries, but there are {len(got)}."
    around = expected[::-1]
    if difference(got, around) is None and difference(expected, around) is not None:
        return "these are the right entries in the reverse order."
    return ""


def insensitive_argument(cases: Calls, names: list[str], mine: Callable, theirs: Callable) -> str:
    """An argument that has no effect on an answer, or too much: found by doubling one at a time."""
    base = cases.cases[0]
    another_growth = ""  # the sentence for the first argument that has another effect
    for place, name in enumerate(names[: len(base)]):
        values = [case[place] for case in cases.cases]
        changed = _with(base, place, _other(base[place], values))
        was, is_now = _number(mine, base), _number(mine, changed)
        should_be, should_become = _number(theirs, base), _number(theirs, changed)
        if None in (was, is_now, should_be, should_become) or should_be == should_become:
            continue
        if was == is_now:
            if _has_no_effect(cases, place, mine):
                return f"`{name}` has no effect on your answer."
            continue
        if another_growth or not isinstance(base[place], Real):
            continue
        if 0 in (was, is_now, should_be, should_become):
            continue
        grows, should = is_now / was, should_become / should_be
        if should > 0 and grows > 0 and abs(math.log2(grows / should)) > 0.6:
            another_growth = (
                f"with twice the `{name}` your answer is {grows:.3g} times as large, but should "
                f"be {should:.3g} times as large."
            )
    return another_growth


def _has_no_effect(cases: Calls, place: int, function: Callable) -> bool:
    """Whether ``function`` returns the same for every case after the argument at ``place`` has
    become far larger, or another one.
    """
    values = [case[place] for case in cases.cases]
    far = [_with(case, place, _far(_other(case[place], values))) for case in cases.cases]
    return [_number(function, case) for case in far] == [
        _number(function, case) for case in cases.cases
    ]


def _with(case: tuple, place: int, value: Any) -> tuple:
    return (*case[:place], value, *case[place + 1 :])


def _other(value: Any, others: list[Any]) -> Any:
    """Twice a number; in place of anything else, the first of ``others`` that differs."""
    if isinstance(value, Real):
        return 2 * value
    return next((other for other in others if other != value), value)


def _far(value: Any) -> Any:
    """So large that a bound, as in ``min(value, 512)``, is not the reason of an equal result."""
    return 1000 * value if isinstance(value, Real) else value


def _number(function: Callable, case: tuple) -> float | None:
    """What ``function`` returns for ``case``, or the first of it; ``None`` if that is no number."""
    try:
        value = plain(function(*case))
        return value if isinstance(value, Real) else float(value[0])
    except Exception:
        return None


def partial_credit(got: Any, expected: Any, tolerance: float, name: str) -> str:
    """What is right already: whole cases, and entries of the first wrong case; empty if nothing is
    right.
    """
    right = compared(got, expected, tolerance)
    first = _first_wrong(right)
    if not first:
        return ""
    # The entries of each case, in order. A path is a case, and an entry below it: the entry's own
    # path, which is empty if the case is one value.
    by_case: dict[Any, dict[Path, bool]] = {}
    for (case, *entry), same in right.items():
        by_case.setdefault(case, {})[tuple(entry)] = same
    wrong_case = by_case[first[0]]
    whole = []
    for case, found in by_case.items():
        is_like_the_wrong_one = list(found) == list(wrong_case)
        if is_like_the_wrong_one and all(found.values()) and not isinstance(case, HiddenCase):
            whole.append(case)
    right_entries = [entry[-1] for entry, same in wrong_case.items() if same and entry]
    parts = []
    if whole:
        parts.append(_right_cases(whole, name))
    if right_entries:
        shown = " and ".join(repr(entry) for entry in right_entries[:3])
        verb = "are" if len(right_entries) > 1 else "is"
        parts.append(f"{shown} {verb} right")
    return ", and ".join(parts)


def _right_cases(cases: list, name: str) -> str:
    """``name``: of the function, which stands before the arguments of a case."""
    shown = []
    for case in cases[:2]:
        is_call = str(case).startswith("(")
        shown.append(f"{name}{case}" if is_call else str(case))
    more = f" and {len(cases) - 2} more" if len(cases) > 2 else ""
    return f"all is right for {' and '.join(shown)}{more}"


# Messages of PyTorch and Python, and what to look at.
_RAISED = (
    (
        r"modified by an inplace operation",
        (
            "a weight was changed between forward and backward, so the graph is no longer valid: "
            "call backward before optimizer.step()."
        ),
    ),
    (
        r"backward through the graph a second time",
        (
            "backward has already run through this graph, and its tensors are freed: run one "
            "forward for each backward."
        ),
    ),
    (
        r"does not require grad and does not have a grad_fn",
        (
            "backward is called on something without a graph: it was detached, made under "
            "no_grad, or turned into a number."
        ),
    ),
    (
        r"implicitly created only for scalar",
        "backward starts from one number: first add up the losses, or take their mean.",
    ),
    (
        r"leaf Variable that requires grad",
        "a weight is changed in place while autograd records: put that line under torch.no_grad().",
    ),
    (
        r"'(float|int)' object has no attribute '(backward|detach)'",
        "this is a number already, not a tensor: it has left the graph before its backward.",
    ),
    (
        r"'(float|int)' object has no attribute '(item|sqrt)'",
        "this is one of Python's numbers, not a tensor.",
    ),
    (
        r"NoneType",
        (
            "something is None here: the result of a function without `return`, or a gradient that "
            "does not exist yet."
        ),
    ),
    (
        r"empty parameter list",
        (
            "the optimizer got no parameters: nothing requires a gradient, or a generator was "
            "already read to its end."
        ),
    ),
    (r"RecursionError", "the function calls itself without end."),
    (
        r"unexpected keyword argument",
        "an argument has a name that the called function does not have.",
    ),
)


def raised(kind: str, text: str, own: tuple[tuple[str, str], ...] = ()) -> str:
    """What to look at after an exception, first by the exercise's ``own`` list; empty if nothing is
    known about it.
    """
    whole = f"{kind}: {text}"
    for pattern, says in (*own, *_RAISED):
        if re.search(pattern, whole):
            return says
    return ""
