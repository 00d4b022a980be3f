"""What a deep model's step asks of a card's allocator, computed from traces of a few layers.

As in ``extrapolation.py``, the requests of the last unit of layers but one, between those of its
neighbours, are repeated. A trace frees a block by the number of its request, and this number is
another one in a deeper model. So each block gets a name that holds for any depth (``Block``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from .extrapolation import LIST, PART, UNIT, Trace, filled_places
from .marks import NOWHERE

FREED = -1  # in place of a size
KEPT = -1, -1, 0  # in place of where a block is freed
# A layer may free what a layer so many units away has asked for: its input's input.
FARTHEST = 2
# The unit from which a block's unit is counted. In a deeper model it is the same one from there.
START, END, REQUEST = "the first unit", "the last unit", "the unit that makes the request"


class Naming(NamedTuple):
    """One way to give blocks names that hold for any depth. Names decide nothing but which block of
    a deeper model is freed, and traces that agree in any of them prove the deeper model.

    ``by_end``: the blocks that a unit asks for in backward are numbered apart by where they are
    freed. The last unit of a decoder, which is the first one in backward, makes the first gradient
    of what all units read. The others add theirs to it, and ask for another number of blocks. What
    each unit leaves to its neighbour has the same number in all units nevertheless.
    ``units_kept``: what is freed at once are the blocks of all units but so many.
    """

    by_end: bool
    units_kept: int


# In the order in which they are tried
NAMINGS = Naming(False, 0), Naming(False, 1), Naming(True, 0), Naming(True, 1)


class Block(NamedTuple):
    """A block of memory: the ``number``-th of those that ``unit`` of list ``layers`` asks for in
    ``part``, and that have the same ``end``.

    ``end``: the part in which it is freed, the list that frees it, and how many units further; or
    ``KEPT``.
    ``since``: the unit from which ``unit`` is counted.
    """

    part: int
    layers: int
    unit: int
    number: int
    end: tuple[int, int, int]
    since: str = START


class Request(NamedTuple):
    """``size``: bytes, or ``FREED``. ``layers`` and ``unit``: the unit that makes the request."""

    size: int
    layers: int
    unit: int
    block: Block


class Round(NamedTuple):
    """The requests of one unit of list ``layers``, which are repeated before request ``start`` of
    the short trace. ``is_forward``: later copies are of later units. In a backward, they are of
    earlier ones.
    """

    start: int
    requests: list[Request]
    layers: int
    is_forward: bool


class Proof(NamedTuple):
    """The requests of a short trace, and the rounds that a deeper model has more.

    ``growth``: for each request that a unit more makes larger, as DDP's bucket, the number of the
    unit's list, that of the request, and the bytes.
    """

    requests: list[Request]
    rounds: list[Round]
    growth: list[tuple[int, int, int]]


def extrapolated_requests(
    short: Trace, longer: Mapping[int, Trace], repeats: Mapping[int, int]
) -> tuple[int, ...] | None:
    """The requests of a model that has more units than ``short``.

    ``repeats``: by the number of a list of layers, how many units it has more. ``longer``: for each
    of these lists, the trace with one unit more.

    The result is ``None`` if the traces do not prove it: without the unit that is repeated,
    ``longer`` has to ask for the same as ``short``, or for larger blocks. It is known already that
    the bytes of the step grow evenly.
    """
    proof = _proof(short, tuple(longer.items()))
    if proof is None:
        return None
    requests = list(proof.requests)
    for layers, number, more in proof.growth:
        size = requests[number].size + repeats[layers] * more
        requests[number] = requests[number]._replace(size=size)
    proof = proof._replace(requests=requests)
    last = _last_units(proof.requests)
    for layers in longer:
        last[layers] = last.get(layers, 0) + repeats[layers]
    return _numbered(_stretches(proof, repeats, last), last)


@lru_cache(maxsize=4)
def _proof(short: Trace, longer: tuple[tuple[int, Trace], ...]) -> Proof | None:
    """What ``short`` and ``longer`` prove, whatever the depth: recipes that recompute other numbers
    of layers share it.
    """
    for naming in NAMINGS:
        found = _proof_by_names(short, longer, naming)
        if found is not None:
            return found
    return None


def _proof_by_names(
    short: Trace, longer: tuple[tuple[int, Trace], ...], naming: Naming
) -> Proof | None:
    """What ``short`` and ``longer`` prove if blocks have the names that ``naming`` gives."""
    requests = _named(short, naming)
    if requests is None:
        return None
    proof = Proof(requests, [], [])
    for layers, long in longer:
        named = _named(long, naming)
        if named is None:
            return None
        rounds, rest = _rounds(named, layers)
        if rounds is None or len(rest) != len(requests):
            return None
        for number, (here, there) in enumerate(zip(requests, rest, strict=True)):
            if here == there:
                continue
            if FREED in (here.size, there.size) or here != there._replace(size=here.size):
                return None
            proof.growth.append((layers, number, there.size - here.size))
        proof.rounds.extend(rounds)
    return proof


def _named(trace: Trace, naming: Naming) -> list[Request] | None:
    """The requests of a trace, with names for their blocks.

    ``None`` if a layer frees a block of a layer that is far from it.
    """
    places = filled_places(trace.places)[:, [PART, LIST, UNIT]].tolist()
    homes: list[tuple[int, int, int]] = []  # part, list and unit of each block
    frees: list[tuple[int, int]] = []  # sample, and the number of the block
    for request, (sample, *by_name) in zip(trace.requests, trace.request_places, strict=True):
        part, *place = places[sample]
        if request < 0:
            frees.append((sample, -1 - request))
            continue
        # What exists before the step is made outside of layers: its name tells the layer.
        if place[0] == NOWHERE[0]:
            place = by_name
        homes.append((part, *place))
    at_once = _samples_that_free_every_unit(frees, homes, places, naming.units_kept)
    # Of each block that is freed: the part in which it is, and by which list and unit.
    freed_in: dict[int, tuple[int, int, int]] = {}
    for sample, number in frees:
        part, *place = places[sample]
        _, *home = homes[number]
        # As if each unit freed its own: a deeper model frees those of more units.
        if sample in at_once and home[0] != NOWHERE[0]:
            place = home
        freed_in[number] = part, *place
    ends = freed_in if naming.by_end else {}
    blocks = _blocks(homes, ends)
    makers: list[tuple[int, int, int, Block]] = []  # size, list, unit, block
    count = 0
    for request in trace.requests:
        if request >= 0:
            _, *place = homes[count]
            makers.append((request, *place, blocks[count]))
            count += 1
        else:
            number = -1 - request
            _, *place = freed_in[number]
            makers.append((FREED, *place, blocks[number]))
    return _with_distances(makers, _last_units(makers))


def _blocks(
    homes: Sequence[tuple[int, int, int]], freed_in: Mapping[int, tuple[int, int, int]]
) -> list[Block]:
    """Names for the blocks of a trace, numbered apart in backward by where they are ``freed_in``
    it.
    """
    asked: Counter[tuple] = Counter()  # by home and end: how many blocks so far
    blocks: list[Block] = []
    for number, home in enumerate(homes):
        part, layers, unit = home
        end = KEPT
        # The parts of a step are forward, backward, forward, ... and the optimizer's step.
        in_backward = part > 0 and part % 2 == 0
        if in_backward and number in freed_in:
            end_part, end_layers, end_unit = freed_in[number]
            distance = end_unit - unit if end_layers == layers else 0
            end = end_part, end_layers, distance
        blocks.append(Block(part, layers, unit, asked[home, end], end))
        asked[home, end] += 1
    return blocks


def _samples_that_free_every_unit(
    frees: list[tuple[int, int]],
    homes: list[tuple[int, int, int]],
    places: list[list[int]],
    units_kept: int,
) -> set[int]:
    """The samples outside of layers that free blocks of every unit of some list but ``units_kept``,
    as where all gradients are freed at once. FSDP so frees what it has sent, except for the unit
    that comes last in backward, whose block is free already.

    ``places``: for each sample the part of the step, the list and the unit.
    """
    freed: dict[tuple[int, int], set[int]] = {}  # units by (sample, list)
    for sample, number in frees:
        if places[sample][1] == NOWHERE[0]:  # outside of layers
            _, layers, unit = homes[number]
            freed.setdefault((sample, layers), set()).add(unit)
    num_units: dict[int, int] = {}
    for _, layers, unit in homes:
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


def _rounds(long: list[Request], layers: int) -> tuple[list[Round] | None, list[Request]]:
    """The rounds of the last unit but one of list ``layers``, and the other requests, as if there
    were one unit less.

    The rounds are ``None`` if that unit does not run between its neighbours.
    """
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
                return None, rest
            rounds.append(Round(len(rest), inside, layers, before == (layers, middle - 1)))
            inside = []
        before = place
        if place == (layers, last):
            request = request._replace(unit=middle)  # without the middle, the last unit is this one
        rest.append(request)
    if inside:
        return None, rest
    return rounds, rest


def _stretches(
    proof: Proof, repeats: Mapping[int, int], last: dict[int, int]
) -> Iterator[tuple[Sequence[Request], int | None]]:
    """The requests of the deep model in stretches, each with the unit that makes its requests;
    ``None`` in its place if the requests have units of their own.

    ``repeats``: by list of layers, how many times its rounds are repeated.
    ``last``: by list of layers, the number of the deep model's last unit.
    """
    short_last = _last_units(proof.requests)
    at_end = []  # those of the short trace, whose last units are the deep model's last ones
    for request in proof.requests:
        if request.unit == short_last[request.layers]:
            request = request._replace(unit=last[request.layers])
        at_end.append(request)
    done = 0
    for start, requests, layers, is_forward in sorted(proof.rounds, key=lambda one: one.start):
        yield at_end[done:start], None
        done = start
        first = requests[0].unit
        units = list(range(first, first + repeats[layers]))
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
    numbers: dict[tuple, int] = {}  # of a block: by part, list, number, end and unit
    asked: list[int] = []
    count = 0
    for requests, unit_of_all in stretches:
        for size, _, own_unit, (part, layers, unit, number, end, since) in requests:
            # a deep model has very many requests: this loop has no calls that it can do without
            if since == REQUEST:
                unit += own_unit if unit_of_all is None else unit_of_all
            elif since == END:
                unit += last[layers]
            block = part, layers, number, end, unit
            if size != FREED:
                numbers[block] = count
                asked.append(size)
                count += 1
            elif block in numbers:
                asked.append(-1 - numbers.pop(block))
            else:
                return None
    return tuple(asked)
