"""What can be seen of wrong numbers without knowing the exercise. Each function says one thing that
was observed, or nothing. ``verdict`` adds the case in which it shows.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch

from .compare import Measured, describe, difference, plain
from .exercise import Exercise, parsed

Pairs = list[tuple[Any, Any]]  # (of the answer, of the right answer) at each place of all cases


def pattern_of(exercise: Exercise, answer: Any, got: Mapping, expected: Mapping) -> str:
    """A sentence on what ``got`` shows beside ``expected``; empty if nothing is seen."""
    for case, wanted in expected.items():
        if isinstance(wanted, Mapping) and case in got and not isinstance(got[case], Mapping):
            return another_kind(plain(got[case]), wanted)
    mine, right = dict(leaves(got)), dict(leaves(expected))
    pairs = [(plain(mine[path]), plain(right[path])) for path in right if path in mine]
    wrong = (pair for pair in pairs if difference(*pair, exercise.tolerance))
    first = next(wrong, None)
    if first is None or first[0] is None:
        return ""
    says = ""
    if len(pairs) == len(right) > 2 and all(map(are_numbers, pairs)):
        says = one_factor(pairs) or always_the_same(pairs) or made_whole(pairs)
    says = says or another_kind(*first) or another_order(*first)
    says = says or without_effect(exercise, answer) or one_factor_of_a_tensor(*first)
    if not says and len(pairs) == len(right) and isinstance(first[1], tuple):
        return one_factor_in_a_place(pairs, first)
    return says


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """(path, value) of everything in dicts of dicts; a budget counts as the bytes over it."""
    if isinstance(value, Measured):
        yield from leaves(value.value, path)
        yield (*path, "bytes"), value.over
    elif isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from leaves(entry, (*path, key))
    else:
        yield path, value


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def are_numbers(pair: tuple[Any, Any]) -> bool:
    return is_number(pair[0]) and is_number(pair[1])


def another_kind(mine: Any, right: Any) -> str:
    """Text where a number was expected, a fraction where a whole number was, and the like."""
    expected = ""
    if isinstance(right, bool):
        if not isinstance(mine, Real) or mine not in (0, 1):
            expected = "True or False"
    elif isinstance(right, tuple):
        if isinstance(mine, Real):
            expected = "one number for each"
    elif isinstance(right, Mapping):
        if not isinstance(mine, Mapping):
            expected = f"a dict with the names {', '.join(map(repr, right))}"
    elif is_number(right) and not is_number(mine):
        expected = "one number"
    if mine is not None and expected:
        return f"return {expected}: this is {describe(mine)}."
    if are_numbers((mine, right)):
        return another_kind_of_number(mine, right)
    return ""


def another_kind_of_number(mine: Real, right: Real) -> str:
    if math.isnan(mine) and not math.isnan(right):
        return "the result is not a number (nan): look for 0 / 0, or the root of a negative number."
    if mine < 0 <= right:
        return "the result is negative, but it can never be negative."
    if isinstance(right, Integral) and math.isfinite(mine) and mine != round(mine):
        return "return a whole number: this is a fraction."
    return ""


UNITS = {
    8: "bits",
    2**-10: "KiB",
    2**-20: "MiB",
    2**-30: "GiB",
    1e-3: "kB",
    1e-6: "MB",
    1e-9: "GB",
}


def one_factor(numbers: Pairs) -> str:
    """Whether each number is the right one times the same factor, which may be that of a unit."""
    mine, right = torch.tensor(numbers, dtype=torch.float64).T
    if right.count_nonzero() < 3:
        return ""
    are_whole = torch.equal(right, right.round())
    # Bytes are exact; other numbers may have been computed in float32.
    ratio = common_factor(mine, right, 1e-9 if are_whole else 1e-5, 0.0)
    for factor, unit in UNITS.items():
        if are_whole and math.isclose(ratio, factor):
            return f"every number is {times(ratio)} (these look like {unit}): return bytes."
    return f"every number is {times(ratio)}." if ratio else ""


def common_factor(mine: torch.Tensor, right: torch.Tensor, rtol: float, atol: float) -> float:
    """How many times as large as ``right`` all numbers of ``mine`` are; 0 if they are the same, or
    have no such factor.
    """
    factor = (mine @ right / (right @ right)).item()
    if 1e-4 < abs(factor - 1) < math.inf and torch.allclose(mine, factor * right, rtol, atol):
        return factor
    return 0.0


def one_factor_in_a_place(pairs: Pairs, first: tuple) -> str:
    """The same for sequences of numbers or tensors, at the first place where the first wrong one
    differs.
    """
    for place, values in enumerate(zip(*first, strict=True)):
        if difference(*values):
            says = one_factor_of_a_tensor(*values)
            if are_numbers(values):
                says = one_factor([(mine[place], right[place]) for mine, right in pairs])
            return says and f"at this place, {says}"
    return ""


def times(ratio: float) -> str:
    """ "2 times too large", "4 times too small", "the right one with the wrong sign"."""
    if math.isclose(ratio, -1):
        return "the right one with the wrong sign"
    if ratio < 0:
        return f"the right one times {-ratio:.4g} with the wrong sign"
    if ratio < 1:
        return f"{1 / ratio:,.4g} times too small"
    return f"{ratio:.4g} times too large"


def always_the_same(numbers: Pairs) -> str:
    mine, right = map(set, zip(*numbers, strict=True))
    if len(mine) == 1 < len(right):
        return f"the answer is {describe(*mine)} for all arguments: it must depend on them."
    return ""


def made_whole(numbers: Pairs) -> str:
    """Whether each number is the right one, rounded to a whole number."""
    mine, right = torch.tensor(numbers, dtype=torch.float64).T
    are_near = (mine - right).abs().max() < 1
    if are_near and torch.equal(mine, mine.round()) and not torch.equal(right, right.round()):
        return "the result is a whole number in every case: return it with its fraction."
    return ""


def another_order(mine: Any, right: Any) -> str:
    if isinstance(right, tuple) and isinstance(mine, tuple):
        if difference(mine, right[::-1]) is None:
            return "these are the right entries in the reverse order."
        return ""
    if not are_tensors(mine, right):
        return ""
    if mine.shape == right.shape and difference(mine, right.flip(0)) is None:
        return "these are the right numbers in the reverse order."
    if mine.ndim == 2 and difference(mine.t(), right) is None:
        return "this is the right matrix, transposed."
    return ""


def are_tensors(*values: Any) -> bool:
    return all(map(torch.is_tensor, values))


def without_effect(exercise: Exercise, answer: Any) -> str:
    """For cases that are calls: an argument that changes nothing, however large it is."""
    cases = getattr(exercise.cases, "arguments", ())
    if not cases:
        return ""
    for place, name in enumerate(inspect.signature(exercise.right).parameters):
        if not all(isinstance(case[place], Real) for case in cases):
            continue
        larger = [(*case[:place], 1000 * case[place], *case[place + 1 :]) for case in cases]
        if same_results(answer, cases, larger) and not same_results(exercise.right, cases, larger):
            return f"`{name}` has no effect on your answer."
    return ""


def same_results(function: Any, some: Any, others: Any) -> bool:
    return not difference([function(*case) for case in some], [function(*case) for case in others])


def one_factor_of_a_tensor(mine: Any, right: Any) -> str:
    """Whether all numbers of a tensor are the right ones, times the same factor."""
    if not are_tensors(mine, right) or mine.shape != right.shape or mine.numel() < 3:
        return ""
    a, b = mine.double().flatten(), right.double().flatten()
    if b.any() and not a.any():
        return "all numbers are 0."
    factor = common_factor(a, b, 0.0, 1e-5 * a.abs().max().item())
    return f"every number is {times(factor)}." if factor else ""


# What exceptions of PyTorch and Python mean: words of "Kind: text", and what to look at.
_RAISED = r"""
    modified by an inplace operation
        A weight was changed between forward and backward, so the graph is no longer valid: call
        backward before optimizer.step().
    backward through the graph a second time
        Backward has already run through this graph, and its tensors are freed: run one forward for
        each backward.
    does not require grad and does not have a grad_fn
        Backward is called on something without a graph: it was detached, made under no_grad, or
        turned into a number.
    implicitly created only for scalar
        Backward starts from one number: first add up the losses, or take their mean.
    leaf Variable that requires grad
        A weight is changed in place while autograd records: put that line under torch.no_grad().
    '(float|int)' object has no attribute '(backward|detach)'
        This is a number already, not a tensor: it has left the graph before its backward.
    '(float|int)' object has no attribute
        This is one of Python's numbers, not a tensor.
    has changed the type|but hook returned
        A hook has returned something, which takes the gradient's place: let it return nothing.
    division by zero
        Something is divided by 0: a count, the length of an empty list, or 1 - beta**t where t is
        0.
    returned an (invalid gradient at index|incorrect number of gradients)
        backward returns a gradient for each argument of forward after ctx: in their order, the
        first at index 0, and each in its argument's shape.
    '(generator|map|zip|\w+_iterator|.*islice)' has no len\(\)
        An iterator can be read once, from front to back: it has no length.
    shapes cannot be multiplied
        The inner sizes of a matrix product must be equal: F.linear(x, W) needs W of shape
        (out, in).
    NoneType
        Something is None here: the result of a function without `return`, or a gradient that does
        not exist yet.
    empty parameter list
        The optimizer got no parameters: nothing requires a gradient, or a generator was already
        read to its end.
    RecursionError
        The function calls itself without end.
    KeyError
        A dict has no such key: look at the keys that it has.
    EOFError
        There is nothing more to read: the file is empty, or was read to its end before.
    unexpected keyword argument
        An argument has a name that the called function does not have.
"""


def what_to_look_at(kind: str, text: str) -> str:
    """What an exception means; empty if nothing is known about it."""
    for (words,), says in parsed(_RAISED):
        if re.search(words, f"{kind}: {text}"):
            return says
    return ""
