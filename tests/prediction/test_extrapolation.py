"""Traces of made-up models: what two short ones say of a deep one is what the deep one says."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from gradmem_lib.measure.timeline import BY, OP, TOTAL, Timeline
from gradmem_lib.names import BACKWARD, CATEGORIES, FORWARD, OPTIMIZER_STEP
from gradmem_lib.prediction.extrapolation import Part, Trace, extrapolate, repeated_layers


def made_up(
    layers: int, first: int = 5, last: int = 9, ends: int = 0, odd: int | None = None
) -> Trace:
    """A step: forward keeps 7 and 3 bytes a layer, backward frees them, and leaves 11 of gradients,
    which go at once.

    ``first`` and ``last``: what only the first layer's forward and the last one's has for a moment.
    ``ends``: what both keep besides, in the operations that all layers have. ``odd``: a layer with
    an operation of its own.
    """
    events: list[tuple[str, int, int]] = [("embed", FORWARD, 100)]
    for layer in range(layers):
        more = ends * ((layer == 0) - 2 * (layer == layers - 1))
        events += [("mm", FORWARD, 7 + more), ("gelu", FORWARD, 20)]
        if layer == odd:
            events.append(("drop", FORWARD, 1))
        events += [("mm", FORWARD, 3 - 20)]
        if layer == 0 and first:
            events += [("scale", FORWARD, first), ("done", FORWARD, -first)]
        if layer == layers - 1 and last:
            events += [("norm", FORWARD, last), ("done", FORWARD, -last)]
    starts = [0, len(events)]
    events.append(("loss", BACKWARD, 4))
    for _ in range(layers):
        events += [
            ("mm_backward", BACKWARD, 6),
            ("gelu_backward", BACKWARD, -7),
            ("accumulate", BACKWARD, 11 - 3 - 6),
        ]
    starts.append(len(events))
    events += [("step", OPTIMIZER_STEP, 2), ("zero_grad", OPTIMIZER_STEP, -11 * layers - 2)]
    rows, total = np.zeros((len(events), 9), dtype=np.int64), 0
    for n, (_, phase, change) in enumerate(events):
        total += change
        rows[n, :5] = 3 * n + 2, phase, total, 2 * total, -total
    return Trace(rows, tuple(name for name, _, _ in events), tuple(starts))


def steps(trace: Trace) -> list[np.ndarray]:
    """By part: what each sample adds to the one before it, but for the phase."""
    found = []
    for start, end in zip(trace.starts, [*trace.starts[1:], len(trace.rows)], strict=True):
        before = (
            trace.rows[start - 1 : end - 1]
            if start
            else np.vstack([0 * trace.rows[:1], trace.rows[: end - 1]])
        )
        part = trace.rows[start:end] - before
        part[:, 1] = trace.rows[start:end, 1]
        found.append(part)
    return found


def test_the_parts_of_a_trace_are_its_differences():
    trace = made_up(3)
    parts = trace.parts()
    assert [len(part) for part, _ in parts] == [1 + 9 + 4, 1 + 9, 2]
    for (part, kinds), expected in zip(parts, steps(trace), strict=True):
        assert np.array_equal(part, expected)
        assert [phase for _, phase in kinds] == part[:, 1].tolist()
    names = [name for _, kinds in parts for name, _ in kinds]
    assert names == list(trace.operations)


def test_a_trace_says_what_its_timeline_says():
    rows = np.arange(2 * 9).reshape(2, 9) % 4
    timeline = Timeline(rows)
    assert timeline.events == rows[:, OP].tolist()
    assert timeline.totals == rows[:, TOTAL].tolist()
    assert [timeline.by_category[name] for name in CATEGORIES] == rows[:, BY].T.tolist()
    assert Trace(rows, ("a", "b"), (0,)).offload_traffic_bytes == 0
    with pytest.raises(ValueError):
        Trace(rows, ("a",), (0,)).parts()  # a sample without its operation


@pytest.mark.parametrize("units", [2, 3, 4])
@pytest.mark.parametrize("more", [1, 2, 9])
def test_two_short_traces_say_what_the_deep_one_says(units, more):
    found = extrapolate(made_up(units).parts(), made_up(units + 1).parts(), units, units + more)
    expected = steps(made_up(units + more))
    assert len(found) == len(expected) == 3
    for part, deep in zip(found, expected, strict=True):
        assert np.array_equal(part, deep)


@pytest.mark.parametrize("units", [3, 4, 5])
def test_the_round_that_is_repeated_is_neither_the_first_nor_the_last(units):
    short, long = (made_up(n, first=0, last=0, ends=2).parts() for n in (units, units + 1))
    for part, deep in zip(
        extrapolate(short, long, units, 12), steps(made_up(12, 0, 0, 2)), strict=True
    ):
        assert np.array_equal(part, deep)


def of_one_operation(rounds: int, before: int, special: int) -> Part:
    """Rounds of one operation each, after ``before`` others; ``special`` rounds at each end hold
    more bytes or less.
    """
    held = [1] * before + [9] * special + [7] * rounds + [5] * special
    names = ["other"] * before + ["mm"] * (rounds + 2 * special)
    return np.outer(held, [0, 0, *[1] * 7]), [(name, FORWARD) for name in names]


@pytest.mark.parametrize(("before", "special"), [(0, 0), (0, 2), (6, 2), (6, 5)])
def test_the_round_that_is_repeated_is_the_middle_one(before, special):
    short, long, deep = (of_one_operation(rounds, before, special) for rounds in (1, 2, 8))
    (found,) = extrapolate([short], [long], 1, 8)
    assert np.array_equal(found, deep[0])


def test_as_many_as_were_traced_are_what_was_traced():
    short, long = made_up(3), made_up(4)
    for part, traced in zip(
        extrapolate(short.parts(), long.parts(), 3, 3), steps(short), strict=True
    ):
        assert np.array_equal(part, traced)


def test_what_does_not_repeat_is_not_extrapolated():
    assert extrapolate(made_up(3).parts()[:2], made_up(4).parts(), 3, 8) is None  # a part less
    assert (
        extrapolate(made_up(4).parts(), made_up(3).parts(), 3, 8) is None
    )  # shorter where it should be longer
    assert (
        extrapolate(made_up(3).parts(), made_up(4, odd=2).parts(), 3, 8) is None
    )  # an operation that one round has
    renamed = made_up(4)
    renamed = Trace(renamed.rows, ("other", *renamed.operations[1:]), renamed.starts)
    assert extrapolate(made_up(3).parts(), renamed.parts(), 3, 8) is None
    # as long, with another operation
    assert extrapolate(made_up(4).parts(), renamed.parts(), 3, 8) is None
    larger = made_up(4)
    begin = next(n for n, name in enumerate(larger.operations) if name == "mm_backward")
    for n in range(4):  # a round's bytes that grow from round to round
        larger.rows[begin + 3 * n :, 2] += n + 1
    assert extrapolate(made_up(3).parts(), larger.parts(), 3, 8) is None


def test_a_part_in_which_nothing_happens():
    none = np.zeros((0, 9), dtype=np.int64), []
    (found,) = extrapolate([none], [none], 3, 8)
    assert found.shape == (0, 9)


class Model(nn.Module):
    def __init__(self, *stacks: nn.Module, **config: object):
        super().__init__()
        self.stacks = nn.ModuleList(stacks) if len(stacks) > 1 else stacks[0]
        self.config = type("Config", (), {})()
        vars(self.config).update(config)


def layers(n: int, kind=nn.ModuleList, width: int = 4) -> nn.Module:
    several = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(n)]
    found = kind(*several) if kind is nn.Sequential else kind(several)
    for number, layer in enumerate(found):
        layer.layer_idx = number
    return found


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_layers_that_are_alike_are_found(kind):
    stack = layers(5, kind)
    assert repeated_layers(Model(stack)) is stack
    short, long = layers(3, kind), layers(4, kind)
    for stacks in ((short, long), (long, short)):
        assert repeated_layers(Model(*stacks)) is long
    assert repeated_layers(Model(nn.Linear(2, 2))) is None


def test_the_first_of_two_equal_stacks_is_taken():
    one, other = layers(4), layers(4, width=8)
    assert repeated_layers(Model(one, other)) is one


CHANGES = {
    "a setting": lambda layer: setattr(layer[1], "p", 0.2),
    "a flag": lambda layer: setattr(layer, "causal", True),
    "nothing there": lambda layer: setattr(layer, "mask", None),
    "a name": lambda layer: setattr(layer, "form", "full"),
    "a number that does not count": lambda layer: setattr(layer, "layer_idx", 7),
    "a number of another name": lambda layer: setattr(layer, "window", 3),
    "training": lambda layer: layer.eval(),
    "a kind": lambda layer: layer.__setitem__(1, nn.Identity()),
    "a shape": lambda layer: layer.__setitem__(0, nn.Linear(4, 5)),
    "a dtype": lambda layer: layer[0].bfloat16(),
    "a dtype that is kept": lambda layer: setattr(layer, "compute", torch.bfloat16),
    "a device": lambda layer: layer[0].to("meta"),
    "frozen": lambda layer: layer[0].weight.requires_grad_(False),
    "a buffer": lambda layer: layer[0].register_buffer("table", torch.zeros(3)),
    "a hook": lambda layer: layer[0].register_forward_hook(lambda *args: None),
    "a hook before": lambda layer: layer[0].register_forward_pre_hook(lambda *args: None),
    "one layer more": lambda layer: layer.append(nn.Identity()),
}


@pytest.mark.parametrize("number", [0, 3, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_one_layer_that_differs_is_seen(change, number):
    stack = layers(5)
    CHANGES[change](stack[number])
    assert repeated_layers(Model(stack)) is None
    alike = layers(5)
    if change != "a number that does not count":
        for layer in alike:
            CHANGES[change](layer)
        assert repeated_layers(Model(alike)) is alike


def test_what_a_config_says_of_each_layer():
    stack = layers(4)
    kinds = ["full", "sliding"] * 2
    assert repeated_layers(Model(stack, layer_types=kinds)) is None
    assert repeated_layers(Model(stack, layer_types=tuple(kinds))) is None
    assert repeated_layers(Model(stack, layer_types=["full"] * 4)) is stack
    assert (
        repeated_layers(Model(stack, sizes=[1, 2, 3], names="abcd")) is stack
    )  # of something else than layers
    assert (
        repeated_layers(Model(copy.deepcopy(stack), same=["full"] * 4, layer_types=kinds)) is None
    )
    assert repeated_layers(copy.deepcopy(stack)) is not None  # no config at all
