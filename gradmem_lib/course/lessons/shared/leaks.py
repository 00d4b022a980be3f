"""Leaks to find: a short script that needs more and more memory, or more than it should.

An answer returns two things: the number of the line that keeps tensors which no later line needs,
and the fixed script, a function. The fixed script must return what the script returned, train the
same weights, and stay within a budget that the script exceeds.
"""

import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...judge.compare import Measured, describe, plain_int
from ...judge.exercise import Unusable, measured
from .settings import collecting_new_objects_only, seeded, weights_of

TWO_THINGS = "return two things, the number of the line and the fixed script: return 3, fixed"


def leak_cases(
    *,
    line: int,
    setting: Callable[[int], tuple],
    size: int,
    budget: str,
    outside: int,
    counted: str = "batches",
    other: Callable[[int], tuple] | None = None,
    where: str = "",
) -> Callable:
    """The cases of a leak.

    ``line``: the line that keeps the tensors, from 1 for its ``def``. ``setting(size)``: the
    script's arguments for ``size`` batches (or what is ``counted``), the model first, made afresh.
    ``budget``: bytes, such as "2 MiB". ``outside``: bytes that Python and numpy may hold while the
    model runs, which no tracker sees. ``other``: the arguments of the second case, where these
    are made in another way, which ``where`` says.
    """

    def cases(answer):
        given, script = answer_of(answer)
        # A message shows what was expected beside what was given, and must not give the line away.
        says = "another line" if given == line else f"line {given}"
        yield "the line that keeps what no later line needs", says
        few = size // 2 + 1
        fewer = other or setting
        # An answer may call gc.collect() in each step.
        with collecting_new_objects_only():
            yield from runs_of(script, lambda: setting(size), budget, f"{size} {counted}")
            yield from runs_of(script, lambda: fewer(few), budget, f"{few} {counted}{where}")
            held = outside_while_the_model_runs(script, lambda: setting(size))
        says = f"There are about {held // 1000:,} kB, and {outside // 1000:,} kB are enough."
        name = "bytes in arrays and lists while the model runs"
        yield name, Measured(None, held, outside, says)

    return cases


def runs_of(
    script: Callable, make: Callable[[], tuple], budget: str, name: str
) -> Iterator[tuple[str, Any]]:
    """Cases of two calls of ``script``, the second one with the same model and new data."""
    arguments = make()
    model = arguments[0]
    run = measured(lambda: script(*arguments), budget, model=model)
    yield f"{name}, the weights afterwards", weights_of(model)
    yield f"{name}, what the script returns", run.value
    yield f"{name}, the peak", run
    yield f"{name}, whether the model is in training mode at the end", model.training
    # The script may have emptied the list of batches, and left a gradient, which the second call
    # adds to its own.
    again = []
    for old, new in zip(arguments, make(), strict=True):
        again.append(old if isinstance(old, nn.Module | torch.optim.Optimizer) else new)
    script(*again)
    yield f"{name}, the weights after a second call", weights_of(model)


def answer_of(answer: Callable):
    """(line, fixed script) of an answer. Raises ``Unusable`` if it returns something else."""
    given = answer()
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise Unusable(TWO_THINGS)
    line, script = plain_int(given[0]), given[1]
    if type(line) is not int:
        raise Unusable(f"the line must be a whole number, not {describe(line)}: {TWO_THINGS}")
    if not callable(script):
        raise Unusable(
            f"the fixed script must be a function, not {describe(script)}: give the function "
            "itself, without calling it"
        )
    return line, script


def outside_while_the_model_runs(script: Callable, make: Callable[[], tuple]) -> int:
    """The most bytes that Python and numpy hold beside the arguments when a module of the model is
    called.
    """
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    held = [0]
    try:
        # Made under the trace: what a file object hands out may be its own bytes, and no copy.
        arguments = make()
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


def new_net(outputs: int = 64) -> nn.Sequential:
    """64 features to ``outputs``, through 128, with the same weights each time."""
    with seeded():
        body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, outputs))
    return nn.Sequential(OrderedDict(body=body))
