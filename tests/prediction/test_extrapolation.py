"""Traces of made-up models: what short ones say of a deep one is what the deep one says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gradmem_lib.measure.timeline import OP
from gradmem_lib.names import BACKWARD, FORWARD, OPTIMIZER_STEP
from gradmem_lib.prediction.extrapolation import (
    BYTES,
    COUNT,
    NOTHING,
    OPERATION,
    SUMS,
    UNROUNDED,
    LeftOut,
    Trace,
    extrapolate,
    repeated_layers,
    timeline_rows,
)

NO = (-1, -1)


def made_up(encoders: int, decoders: int = 0, odd: int | None = None, grows: int = 0) -> Trace:
    """A step of a model with two lists of layers.

    Forward keeps 7 and 3 bytes a layer. The first and the last layer keep more for a moment.
    Backward leaves 11 bytes of gradients a layer, which are freed at once at the end. ``odd``: an
    encoder's layer with an operation of its own. ``grows``: one storage between the lists has so
    many bytes for each encoder's layer.
    """
    lists = (0, encoders, 7), (1, decoders, 70)
    # name, part, list and unit, bytes, storages
    events: list[tuple[str, int, tuple[int, int], int, int]] = [("exists", 0, NO, 100, 1)]
    for number, count, nbytes in lists:
        events.append(("embed", 1, NO, 5, 1))
        for i in range(count):
            place = number, i
            special = (i == 0) - 2 * (i == count - 1)
            events += [("mm", 1, place, nbytes + special, 1), ("gelu", 1, place, 20, 1)]
            events.append(("done", 1, NO, 3 - 20 - special, -1))  # outside, between two layers
            if number == 0 and i == odd:
                events.append(("drop", 1, place, 1, 1))
        events.append(("cat", 1, NO, 9 + grows * encoders, 1))
    for number, count, nbytes in reversed(lists):
        events.append(("loss", 2, NO, 4, 1))
        for i in reversed(range(count)):
            events.append(("mm_backward", 2, (number, i), 11 - 3 - nbytes, 0))
    for number, count, _ in lists:
        events += [("step", 3, (number, i), 2, 1) for i in range(count)]
        events.append(("step", 3, NO, 1, 1))
    layers = encoders + decoders
    events.append(("zero_grad", 3, NO, -13 * layers, -3 * layers))
    phases = FORWARD, FORWARD, BACKWARD, OPTIMIZER_STEP
    rows = np.zeros((len(events), 9), dtype=np.int64)
    names, places, storages = {}, [], []
    for n, (name, part, place, nbytes, count) in enumerate(events):
        before = rows[n - 1] if n else 0 * rows[0]
        rows[n] = before
        rows[n, SUMS] += np.array([3, nbytes, 2 * nbytes, -nbytes, 0, 0, 0, 0])
        rows[n, 1] = phases[part]
        places.append((names.setdefault(name, hash(name)), part, *place))
        storages.append((count, nbytes))
    return Trace(rows, np.array(places), np.cumsum(storages, axis=0))


def deepened(short: Trace, longer: list[Trace], times: list[int]):
    longer_changes = {i: trace.changes() for i, trace in enumerate(longer)}
    return extrapolate(short.changes(), longer_changes, dict(enumerate(times)), {})


@pytest.mark.parametrize(
    ("shallow", "deep"), [((2, 0), (2, 0)), ((4, 0), (13, 0)), ((3, 3), (8, 17)), ((3, 3), (9, 3))]
)
def test_short_traces_say_what_the_deep_one_says(shallow, deep):
    encoders, decoders = shallow
    longer = [made_up(encoders + 1, decoders)]
    if decoders:
        longer.append(made_up(encoders, decoders + 1))
    found = deepened(made_up(*shallow), longer, np.subtract(deep, shallow).tolist())
    expected = made_up(*deep)
    assert np.array_equal(timeline_rows(found, NOTHING), expected.rows)
    assert np.array_equal(found.places[:, :2], expected.places[:, :2])
    assert np.array_equal(found.storages.cumsum(axis=0), expected.storages)


def test_what_does_not_repeat_is_not_extrapolated():
    short, long = made_up(3), made_up(4)
    assert deepened(long, [short], [5]) is None  # shorter where it should be longer
    assert deepened(short, [made_up(4, odd=2)], [5]) is not None  # all layers between have it
    for odd in (0, 1, 3):
        assert deepened(short, [made_up(4, odd=odd)], [5]) is None
    assert deepened(short, [made_up(5)], [5]) is None  # two layers more
    assert deepened(made_up(3, 3), [made_up(4, 4), made_up(3, 4)], [5, 5]) is None


@pytest.mark.parametrize("column", [OP, 1, 2, 5, "operation"])
def test_one_event_that_differs_is_not_extrapolated(column):
    """In its phase, its bytes or its operation, unless it is in the layer that is repeated. More
    operations before it may also be those of a loop over parameters, outside of layers.
    """
    for event in range(1, len(made_up(4).rows) - 1):
        long = made_up(4)
        if column == "operation":
            long.places[event, OPERATION] += 1
        else:  # a phase is of one sample, and all later samples have what this one adds
            last = event + 1 if column == 1 else len(long.rows)
            long.rows[event:last, column] += 1
        number, unit = long.changes().places[event, 2:].tolist()
        allowed = (number, unit) == (0, 2) or (column == OP and number < 0)
        found = deepened(made_up(3), [long], [5])
        assert (found is not None) == allowed
        if allowed and column == OP:
            rows, deep = timeline_rows(found, NOTHING), made_up(8).rows
            assert np.array_equal(rows[:, BYTES], deep[:, BYTES])
            assert rows[-1, OP] == deep[-1, OP] + 5


def test_one_storage_that_grows_with_the_layers_is_not_extrapolated():
    short, long = made_up(3, grows=8), made_up(4, grows=8)
    assert deepened(short, [long], [5]) is None
    # a card rounds it, so that its growth may not show
    long = made_up(4)
    long.storages[-3:, UNROUNDED] += 4
    assert deepened(made_up(3), [long], [5]) is None
    long.storages[-3:, COUNT] += 1  # more storages may
    assert deepened(made_up(3), [long], [5]) is not None


def test_the_second_micro_batch_is_repeated():
    parts = np.repeat(np.arange(7), 2)
    rows = np.zeros((14, 9), dtype=np.int64)
    rows[:, 2] = np.arange(14) ** 2
    places = np.stack([parts, parts, 0 * parts - 1, 0 * parts - 1], axis=1)
    changes = Trace(rows, places, np.zeros((14, 2), dtype=np.int64)).changes()
    assert np.array_equal(timeline_rows(changes, NOTHING), rows)
    found = np.diff(timeline_rows(changes, LeftOut(micro_batches=2))[:, 2], prepend=0)
    added = np.diff(rows[:, 2], prepend=0).tolist()
    assert found.tolist() == added[:10] + added[6:10] * 2 + added[10:]


def layers(n: int, kind=nn.ModuleList, width: int = 4) -> nn.Module:
    several = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(n)]
    found = kind(*several) if kind is nn.Sequential else kind(several)
    for number, layer in enumerate(found):
        layer.layer_idx = number
    return found


def found_in(*stacks: nn.Module, **config: object) -> list[tuple[nn.Module, int]]:
    """The lists that are found in a model of ``stacks``, and their periods."""
    model = nn.Module()
    model.config = SimpleNamespace(**config)
    for number, stack in enumerate(stacks):
        model.add_module(f"stack{number}", stack)
    return [(several.layers, several.period) for several in repeated_layers(model)]


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_layers_that_are_alike_are_found_the_longest_list_first(kind):
    short, long, other = layers(3, kind), layers(4, kind), layers(4, kind, width=8)
    for stacks in ((short, long, other), (long, other, short)):
        assert found_in(*stacks) == [(long, 1), (other, 1), (short, 1)]
    assert found_in(nn.Linear(2, 2)) == found_in(layers(2, kind)) == []
    assert len(repeated_layers(long)) == 1  # no config at all


CHANGES = {
    "a setting": lambda layer: setattr(layer[1], "p", 0.2),
    "a name": lambda layer: setattr(layer, "form", "full"),
    "a number of another name": lambda layer: setattr(layer, "window", 3),
    "training": lambda layer: layer.eval(),
    "a kind": lambda layer: layer.__setitem__(1, nn.Identity()),
    "a shape": lambda layer: layer.__setitem__(0, nn.Linear(4, 5)),
    "a dtype": lambda layer: layer[0].bfloat16(),
    "a dtype that is kept": lambda layer: setattr(layer, "compute", torch.bfloat16),
    "a device": lambda layer: layer[0].to("meta"),
    "frozen": lambda layer: layer[0].weight.requires_grad_(False),
    "a hook": lambda layer: layer[0].register_forward_hook(lambda *args: None),
    "a hook before": lambda layer: layer[0].register_forward_pre_hook(lambda *args: None),
    "one layer more": lambda layer: layer.append(nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_layer_that_differs_is_seen_and_may_be_the_first(change):
    for number in (0, 3, 4):
        stack = layers(5)
        CHANGES[change](stack[number])
        assert found_in(stack) == ([(stack, 1)] if number == 0 else [])
    for layer in (alike := layers(5)):
        CHANGES[change](layer)
    assert found_in(alike) == [(alike, 1)]


def test_layers_that_share_weights_or_count_otherwise_are_not_repeated():
    stack = layers(4)
    stack[3].layer_idx = 7
    assert found_in(stack) == []
    stack[3].layer_idx = 3
    stack[3][0].weight = stack[2][0].weight
    assert found_in(stack) == []


@pytest.mark.parametrize(("n", "period"), [(6, 3), (7, 2), (9, 3)])
def test_kinds_of_layers_that_take_turns_have_a_period(n, period):
    stack = layers(n)
    for i, layer in enumerate(stack):
        layer.window = 8 if i % period else None
    assert found_in(stack) == [(stack, period)]
    stack[n - 1].window = 5
    assert found_in(stack) == []


def test_what_a_config_says_of_each_layer():
    stack = layers(4)
    assert found_in(stack, layer_types=["full", "sliding"] * 2) == [(stack, 2)]
    assert found_in(stack, layer_types=("full", "full", "full", "sliding")) == []
    # of something else than layers
    assert found_in(stack, sizes=[1, 2, 3], names="abcd") == [(stack, 1)]
