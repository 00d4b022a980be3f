"""Leaks to find: a short script that needs more and more memory, or more than it should.

An answer returns two things: the number of the line that keeps tensors which no later line needs,
and the fixed script, a function. The fixed script is run, and must return what the script returned,
train the same weights, and stay within a budget that the script exceeds.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from types import CodeType
from typing import Any

import torch
from torch import nn

from ...judge.compare import Measured, describe, difference, plain
from ...judge.exercise import HiddenCase, Mistake, measure
from .settings import collecting_new_objects_only, flat

OUTSIDE = "outside of tensors"
KEPT_OUTSIDE = (
    "while the model runs, your script keeps many numbers in arrays or lists. No tracker sees "
    "these bytes, and the host's memory holds them all the same. Keep only what the result needs."
)
TWO_THINGS = "return two things, the number of the line and the fixed script: return 3, fixed"
HIDDEN, WEIGHTS = HiddenCase("other batches"), "the weights afterwards"
AGAIN = "the weights after a second call"

# What people call to get memory back, and what it does.
_FREES_NOTHING = {
    "collect": (
        "gc.collect() frees what nothing refers to any more, and something still refers to these "
        "tensors. "
    ),
    "empty_cache": (
        "empty_cache() gives back blocks without a tensor, and these blocks have tensors in them. "
    ),
}


@dataclass(frozen=True, kw_only=True)
class Leak:
    """A script that keeps what it does not need.

    ``script``: as it was. ``fixed``: a right one. ``line``: the line that keeps the tensors, from 1
    for its ``def``. ``innocent``: for other lines, why they are not to blame. ``setting``: the
    script's arguments for a number of batches, the model first, made afresh. ``batches``: how many
    the lesson has, and ``counted`` their name. ``budget``: bytes, such as "2 MiB". ``stays``: what
    is said of a script that still keeps too much. ``outside``: bytes that Python and numpy may
    hold while the model runs, which no tracker sees; what arrays and lists hold between two
    forwards is not counted. ``stays_outside``: what is said of a script that holds more of them.
    ``hidden_setting``: the arguments of the hidden case, where these are made in another way.
    """

    script: Callable[..., Any]
    fixed: Callable[..., Any]
    line: int
    innocent: Mapping[int, str]
    setting: Callable[[int], tuple]
    batches: int
    counted: str = "batches"
    budget: str
    stays: str
    outside: int
    stays_outside: str = KEPT_OUTSIDE
    hidden_setting: Callable[[int], tuple] | None = None

    @property
    def shown(self) -> str:
        """The name of the lesson's own case."""
        return f"{self.batches} {self.counted}"

    def observe(self, candidate: Callable[[], Any]) -> dict[str, Any]:
        line, script = _answer_of(candidate)
        # An answer may call gc.collect() in each step.
        with collecting_new_objects_only():
            return self._observe_script(line, script)

    def _observe_script(self, line: int, script: Callable[..., Any]) -> dict[str, Any]:
        return {
            "the line": self._says_of(line),
            self.shown: self._run(script, self.batches, self.setting),
            HIDDEN: self._run(script, self.batches // 2 + 1, self.hidden_setting or self.setting),
            OUTSIDE: self._measure_outside(script),
        }

    def _measure_outside(self, script: Callable[..., Any]) -> Measured:
        """The bytes outside of tensors while the model runs."""
        nbytes = _outside_when_the_model_runs(script, lambda: self.setting(self.batches))
        says = (
            f"Outside of tensors there are about {nbytes // 1000:,} kB while the model runs, and "
            f"{self.outside // 1000:,} kB are enough."
        )
        return Measured(None, nbytes, self.outside, says=says)

    def _says_of(self, line: int) -> str:
        """Empty for the right line. (A text, so that no message gives the right number away.)"""
        if line == self.line:
            return ""
        other = (
            f"line {line} keeps no tensor that a later line does not need: look for a name or a "
            "list through which tensors stay alive."
        )
        return self.innocent.get(line, other)

    def _run(
        self, script: Callable[..., Any], batches: int, setting: Callable[[int], tuple]
    ) -> Measured:
        arguments = setting(batches)
        model = arguments[0]
        optimizers = [a for a in arguments if isinstance(a, torch.optim.Optimizer)]
        run = measure(
            lambda: script(*arguments),
            budget=self.budget,
            model=model,
            optimizer=optimizers[0] if optimizers else None,
        )
        done = {
            "returned": run.value,
            WEIGHTS: flat(model.parameters()),
            "in train mode (1 is yes)": int(model.training),
        }
        # A gradient that the first call has left is in the second one.
        script(*_same_model_new_data(arguments, setting(batches)))
        done[AGAIN] = flat(model.parameters())
        names = _names_in(script)
        called = [says for name, says in _FREES_NOTHING.items() if name in names]
        if run.over and called:
            says = f"{called[0]}The script peaks at {run.peak:,} bytes of {run.budget:,}."
            return replace(run, value=done, says=says)
        return replace(run, value=done)

    def explain(self, got: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
        """The line first, then the weights, the bytes, and what is returned."""
        if got["the line"]:
            return got["the line"]
        mine, right = got[self.shown].value, expected[self.shown].value
        if difference(mine[WEIGHTS], right[WEIGHTS]) is not None:
            return (
                "the weights at the end are not those that the script trains: a fix changes what "
                "is kept, and no update."
            )
        if difference(mine[AGAIN], right[AGAIN]) is not None:
            return (
                "a second call of your script trains other weights than a second call of the "
                "script: gradients of the first call were still in the model. zero_grad() is "
                "missing, or comes too early."
            )
        if got[self.shown].over or got[HIDDEN].over:
            return self.stays
        if got[OUTSIDE].over:
            return self.stays_outside
        if difference(mine["returned"], right["returned"]) is not None:
            return (
                "your script returns something else than the script does: only its bytes may "
                "change."
            )
        return _why_elsewhere(got, expected, self.shown)

    def with_fix(self, script: Callable[..., Any], line: int = 0) -> Callable[[], tuple]:
        """An answer with this script, and the right line if no other is given."""

        def answer():
            return line or self.line, script

        return answer

    def as_it_was(self) -> Mistake:
        return Mistake("as it was", self.with_fix(self.script), self.stays)

    def wrong_lines(self) -> tuple[Mistake, ...]:
        """The right fix, with each of the lines that people name instead."""
        return tuple(
            Mistake(f"line {line}", self.with_fix(self.fixed, line), says)
            for line, says in self.innocent.items()
        )


def _why_elsewhere(got: Mapping, expected: Mapping, shown: str) -> str | None:
    """What is said of a script that trains and returns in the shown case what it should."""
    mine, right = got[shown].value, expected[shown].value
    trains = "in train mode (1 is yes)"
    if mine[trains] != right[trains]:
        left = "train" if mine[trains] else "eval"
        return f"the model is left in {left} mode: what the script does at its end belongs to it."
    if difference(got[HIDDEN].value, expected[HIDDEN].value) is not None:
        return (
            "the script is right for these arguments alone, and with others it returns or trains "
            "something else: is a number written down in it that the arguments give?"
        )
    return None


def _outside_when_the_model_runs(script: Callable[..., Any], setting: Callable[[], tuple]) -> int:
    """The most bytes that Python and numpy hold beside the arguments when a module of the model is
    called.
    """
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    held = [0]
    try:
        # Made under the trace: what a file object hands out may be its own bytes, and no copy.
        arguments = setting()
        before = tracemalloc.get_traced_memory()[0]

        def count(*_) -> None:
            held.append(tracemalloc.get_traced_memory()[0] - before)

        for module in arguments[0].modules():
            module.register_forward_pre_hook(count)
        script(*arguments)
    finally:
        if not was_tracing:
            tracemalloc.stop()
    return max(held)


def _same_model_new_data(arguments: tuple, new: tuple) -> list[Any]:
    """The arguments of a second call: a script may have emptied the list of batches."""
    return [
        old if isinstance(old, nn.Module | torch.optim.Optimizer) else other
        for old, other in zip(arguments, new, strict=True)
    ]


def _answer_of(candidate: Callable[[], Any]) -> tuple[int, Callable[..., Any]]:
    given = candidate()
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(TWO_THINGS)
    line, script = plain(given[0]), given[1]
    if callable(given[0]) and not callable(script):
        raise TypeError(f"the line comes first: {TWO_THINGS}")
    if isinstance(line, float) and line.is_integer():
        line = int(line)
    if isinstance(line, bool) or not isinstance(line, Integral):
        raise TypeError(f"the line must be a whole number, not {describe(given[0])}: {TWO_THINGS}")
    if not callable(script):
        raise TypeError(
            f"the fixed script must be a function, not {describe(script)}: give the function "
            "itself, without calling it"
        )
    return int(line), script


def _names_in(script: Callable[..., Any]) -> set[str]:
    """The names of functions and attributes in its code."""
    waiting = [getattr(script, "__code__", None)]
    names: set[str] = set()
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            names |= set(code.co_names)
            waiting += code.co_consts
    return names


class Net(nn.Module):
    """64 features to ``outputs``, through 128."""

    def __init__(self, outputs: int = 64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, 64); the result: (rows, outputs)."""
        return self.body(x)


def new_net(outputs: int = 64) -> Net:
    """The same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(outputs)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
