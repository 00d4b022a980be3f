"""What a deep model's step asks of a card's allocator, computed from traces of a few layers.

As in ``extrapolation.py``, the requests of the last unit of layers but one, between those of its
neighbours, are repeated. A trace frees a block by the number of its request, and this number is
another one in a deeper model. So each block gets a name that holds for any depth (``Block``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .extrapolation import LIST, PART, UNIT, Trace, filled_places
from .marks import NOWHERE

FREED = -1  # in place of a size
# A layer may free what a layer so many units away has asked for: its input's input.
FARTHEST = 2
# The unit from which a block's unit is counted. In a deeper model it is the same one from there.
START, END, REQUEST = "the first unit", "the last unit", "the unit that makes the request"


class Block(NamedTuple):
    """A block of memory: the ``number``-th that ``unit`` of list ``layers`` asks for in ``part``.

    ``since``: the unit from which ``unit`` is counted.
    """

    part: int
    layers: int
    unit: int
    number: int
    since: str = START


class Request(NamedTuple):
    """``size``: bytes, or ``FREED``. ``layers`` and ``unit``: the unit that makes the request."""

    size: int
    layers: int
    unit: int
    block: Block


class Round(NamedTuple):
    """The requests of one unit, which are repeated ``times`` times before request ``start`` of the
    short trace. ``is_forward``: later copies are of later units. In a backward, they are of earlier
    ones.
    """

    start: int
    requests: list[Request]
    times: int
    is_forward: bool


def extrapolated_requests(
    short: Trace, longer: Mapping[int, Trace], repeats: Mapping[int, int]
) -> tuple[int, ...] | None:
    """The requests of a model that has more units than ``short``.

    ``repeats``: by the number of a list of layers, how many units it has more. ``longer``: for each
    of these lists, the trace with one unit more.

    The result is ``None`` if the traces do not prove it: without the unit that is repeated,
    ``longer`` has to ask for the same as ``short``.
    """
    for units_kept in (0, 1):
        found = _extrapolated(short, longer, repeats, units_kept)
        if found is not None:
            return found
    return None


def _extrapolated(
    short: Trace, longer: Mapping[int, Trace], repeats: Mapping[int, int], units_kept: int
) -> tuple[int, ...] | None:
    """The same, if what is freed at once are the blocks of all units but ``units_kept``."""
    requests = _named(short, units_kept)
    if requests is None:
        return None
    units = _last_units(requests)
    rounds: list[Round] = []
    for layers, long in longer.items():
        found = _rounds(requests, _named(long, units_kept), layers, repeats[layers])
        if found is None:
            return None
        rounds += found
        units[layers] = units.get(layers, 0) + repeats[layers]
    return _numbered(_stretches(requests, rounds, units), units)


def _named(trace: Trace, units_kept: int) -> list[Request] | None:
    """The requests of a trace, with names for their blocks.

    ``None`` if a layer frees a block of a layer that is far from it.
    """
    places = filled_places(trace.places)[:, [PART, LIST, UNIT]].tolist()
    asked: Counter[tuple] = Counter()  # by part, list and unit: how many blocks so far
    blocks: list[Block] = []  # by the number that the trace frees them by
    makers: list[tuple[int, int, int, Block]] = []  # size, list, unit, block
    at_once = _samples_that_free_every_unit(trace, places, units_kept)
    for request, (sample, *by_name) in zip(trace.requests, trace.request_places, strict=True):
        part, *place = places[sample]
        if request >= 0:
            # What exists before the step is made outside of layers: its name tells the layer.
            if place[0] == NOWHERE[0]:
                place = by_name
            home = part, *place
            blocks.append(Block(*home, asked[home]))
            asked[home] += 1
            makers.append((request, *place, blocks[-1]))
        else:
            block = blocks[-1 - request]
            # As if each unit freed its own: a deeper model frees those of more units.
            if sample in at_once and block.layers != NOWHERE[0]:
                place = [block.layers, block.unit]
            makers.append((FREED, *place, block))
    return _with_distances(makers, _last_units(makers))


def _samples_that_free_every_unit(
    trace: Trace, places: list[list[int]], units_kept: int
) -> set[int]:
    """The samples outside of layers that free blocks of every unit of some list but ``units_kept``,
    as where all gradients are freed at once. FSDP so frees what it has sent, except for the unit
    that comes last in backward, whose block is free already.

    ``places``: for each sample the part of the step, the list and the unit.
    """
    homes: list[tuple[int, int]] = []  # list and unit of each block
    freed: dict[tuple[int, int], set[int]] = {}  # units by (sample, list)
    for request, (sample, *by_name) in zip(trace.requests, trace.request_places, strict=True):
        _, layers, unit = places[sample]
        is_outside = layers == NOWHERE[0]
        if request >= 0:
            homes.append(tuple(by_name) if is_outside else (layers, unit))
        elif is_outside:
            layers, unit = homes[-1 - request]
            freed.setdefault((sample, layers), set()).add(unit)
    num_units: dict[int, int] = {}
    for layers, unit in homes:
        num_units[layers] = max(num_units.get(layers, 0), unit + 1)
    found = set()
    for (sample, layers), units in freed.items():
        if layers != NOWHERE[0] and len(units) == num_units[layers] - units_kept:
            found.add(sample)
    return found


def _last_units(requests: Sequence[tuple]) -> dict[int, int]:
    """By list of layers: the number of its last unit."""
    last: dict[int, int] = {}
    for _, layers, unit, _ in requests:
        last[layers] = max(last.get(layers, 0), unit)
    return last


def _with_distances(makers: list[tuple], last: dict[int, int]) -> list[Request] | None:
    """The requests, with the units of their blocks counted so that they hold for a deeper model.

    ``None`` if a layer frees a block of a layer that is far from it.
    """
    requests = []
    for size, layers, unit, block in makers:
        in_layers = block.layers != NOWHERE[0]
        if in_layers and block.layers == layers:
            distance = block.unit - unit
            if abs(distance) > FARTHEST:
                return None
            block = block._replace(unit=distance, since=REQUEST)
        elif in_layers and 2 * block.unit >= last[block.layers]:
            # The last layers of a list have left it to what comes after them.
            block = block._replace(unit=block.unit - last[block.layers], since=END)
        requests.append(Request(size, layers, unit, block))
    return requests


def _rounds(
    short: list[Request], long: list[Request] | None, layers: int, times: int
) -> list[Round] | None:
    """The rounds of list ``layers`` that ``long`` has and ``short`` does not have.

    ``None`` if ``long`` has more, or other, requests besides.
    """
    if long is None:
        return None
    last = _last_units(long).get(layers, 0)
    middle = last - 1
    rest: list[Request] = []
    rounds: list[Round] = []
    before = NOWHERE  # list and unit of the last request outside of the middle unit
    inside: list[Request] = []
    for request in long:
        place = request.layers, request.unit
        if place == (layers, middle):
            inside.append(request)
            continue
        if inside:
            if {before, place} != {(layers, middle - 1), (layers, middle + 1)}:
                return None
            rounds.append(Round(len(rest), inside, times, before == (layers, middle - 1)))
            inside = []
        before = place
        rest.append(request._replace(unit=middle) if place == (layers, last) else request)
    if inside or rest != short:
        return None
    return rounds


def _stretches(
    short: list[Request], rounds: list[Round], last: dict[int, int]
) -> Iterator[tuple[Sequence[Request], int | None]]:
    """The requests of the deep model in stretches, each with the unit that makes its requests;
    ``None`` in its place if the requests have units of their own.

    ``last``: by list of layers, the number of the deep model's last unit.
    """
    short_last = _last_units(short)
    at_end = []  # those of the short trace, whose last units are the deep model's last ones
    for request in short:
        if request.unit == short_last[request.layers]:
            request = request._replace(unit=last[request.layers])
        at_end.append(request)
    done = 0
    for start, requests, times, is_forward in sorted(rounds, key=lambda one: one.start):
        yield at_end[done:start], None
        done = start
        first = requests[0].unit
        units = list(range(first, first + times))
        if not is_forward:
            units.reverse()
        for unit in units:
            yield requests, unit
    yield at_end[done:], None


def _numbered(
    stretches: Iterable[tuple[Sequence[Request], int | None]], last: dict[int, int]
) -> tuple[int, ...] | None:
    """The requests as ``allocator.replayed`` takes them.

    ``None`` if a block would be freed that is not there.
    """
    numbers: dict[tuple[int, ...], int] = {}  # of a block: by part, list, number and unit
    asked: list[int] = []
    count = 0
    for requests, unit_of_all in stretches:
        for size, _, own_unit, (part, layers, unit, number, since) in requests:
            # a deep model has very many requests: this loop has no calls that it can do without
            if since == REQUEST:
                unit += own_unit if unit_of_all is None else unit_of_all
            elif since == END:
                unit += last[layers]
            block = part, layers, number, unit
            if size != FREED:
                numbers[block] = count
                asked.append(size)
                count += 1
            elif block in numbers:
                asked.append(-1 - numbers.pop(block))
            else:
                return None
    return tuple(asked)
