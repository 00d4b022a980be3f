"""The only table of cards: their bytes, their rates, and the ways to write their names."""

import re
from dataclasses import dataclass, replace

from ..units import GiB, format_bytes, parse_bytes

_TERA, _GIGA = 1e12, 1e9
# Bytes a second each way: 16 lanes by the PCIe standard, where 128 of 130 bits are data; NVLink-C2C
# by Grace Hopper's data sheet.
BUSES = {"PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9, "NVLink-C2C": 450e9}
NETWORK = 12.5e9  # bytes a second between machines, each way: 100 Gbit/s
# the share of that rate that copies of pinned memory, and NCCL between cards, reach, roughly
BUS_UTILIZATION = 0.8


@dataclass(frozen=True)
class Card:
    """``nbytes``: the bytes that the driver lets a program use. ``half`` and ``single``: operations
    a second in 16 and 32 bits. ``bandwidth``: bytes a second. ``capability``: CUDA's compute
    capability. ``bus``: bytes a second to the host, each way. ``nvlink``: bytes a second to other
    cards, each way; 0 if they use the bus.
    """

    name: str
    nbytes: int
    half: float
    single: float
    bandwidth: float
    capability: tuple[int, int] = (8, 9)
    bus: float = BUSES["PCIe 4"]
    nvlink: float = 0.0

    @property
    def link(self) -> float:
        """Bytes a second to another card in the same machine, each way."""
        return self.nvlink or self.bus

    @property
    def bf16(self) -> bool:
        """Whether it multiplies bf16 matrices at the rate ``half``.

        Older cards reach that rate only with float16.
        """
        return self.capability >= (8, 0)


def seconds_over_bus(nbytes: float, card: Card | str | int) -> float:
    """The time in which ``nbytes`` cross the bus between ``card`` and its host once: estimated, at
    ``BUS_UTILIZATION`` of its rate.
    """
    return nbytes / (BUS_UTILIZATION * find_card(card).bus)


def seconds_between(nbytes: float, card: Card | str | int) -> float:
    """The time in which ``card`` sends ``nbytes`` to another card in its machine and receives as
    many: an estimate, as above.
    """
    return nbytes / (BUS_UTILIZATION * find_card(card).link)


# Memory: the total capacity in PyTorch's out-of-memory message on Linux, to two digits. The nominal
# figure in a name is in GiB too: the driver keeps 1 to 4 % of it, and 8 % where error correction
# takes part of the GDDR6. Rates: the makers' data sheets for dense matrices with float32 sums, in
# 1e12 operations a second; "CUDA" is the compute capability, "lanes" those of PCIe.
# NVLink in GB/s: of modules (SXM), half of the stated rate, which is for both directions. An RTX
# 3090 can have NVLink too (56), over a bridge that is sold separately.
TABLE = """
name                   GiB  half  single  GB/s   CUDA  lanes  NVLink
RTX 2060 6GB          5.79    26     6.5   336    7.5     16       0
RTX 3070 8GB          7.76    41      20   448    8.6     16       0
RTX 3080 10GB         9.78    60      30   760    8.6     16       0
RTX 3060 12GB        11.75    25      13   360    8.6     16       0
T4 16GB              14.75    65     8.1   320    7.5     16       0
V100 16GB            15.75   125    15.7   900    7.0     16     150
RTX 4060 Ti 16GB     15.60    44      22   288    8.9      8       0
RTX 4080 16GB        15.60    97      49   717    8.9     16       0
L4 24GB              22.03   121      30   300    8.9     16       0
A10G 24GB            22.05    70      35   600    8.6     16       0
RTX 3090 24GB        23.69    71      36   936    8.6     16       0
RTX 4090 24GB        23.64   165      83  1008    8.9     16       0
RTX 5090 32GB        31.36   210     105  1792   12.0     16       0
A100 40GB            39.39   312    19.5  1555    8.0     16     300
L40S 48GB            44.40   362      92   864    8.9     16       0
A100 80GB            79.15   312    19.5  2039    8.0     16     300
H100 80GB            79.10   989      67  3350    9.0     16     450
H200 141GB          139.80   989      67  4800    9.0     16     450
"""


def _card(row: str) -> Card:
    name, *figures = re.split(r"\s{2,}", row)
    gib, half, single, bandwidth, capability, lanes, nvlink = map(float, figures)
    major, minor = divmod(round(10 * capability), 10)
    generation = 3  # of PCIe: cards of one architecture share it
    if major >= 9:
        generation = 5
    elif major >= 8:
        generation = 4
    bus = BUSES[f"PCIe {generation}"] * lanes / 16
    rates = half * _TERA, single * _TERA, bandwidth * _GIGA
    return Card(name, round(gib * GiB), *rates, (major, minor), bus, nvlink * _GIGA)


CARDS: dict[str, Card] = {card.name: card for card in map(_card, TABLE.strip().splitlines()[1:])}


def find_card(card: Card | str | int) -> Card:
    """The card with this name (upper or lower case, "4090" for "RTX 4090 24GB"), or with these
    bytes (``"24 GiB"`` or an int).

    Raises ``ValueError`` for a name that fits no card or several, and for a number that must be GiB
    or MiB without its unit.
    """
    if isinstance(card, Card):
        return card
    names = []
    if isinstance(card, str):
        for name in CARDS:
            if _plain(card) in _spellings(name):
                names.append(name)
    if len(names) > 1:
        raise ValueError(f"card={card!r} may be {' or '.join(map(repr, names))}: say which")
    if names:
        return CARDS[names[0]]
    try:
        nbytes = parse_bytes(card)
    except ValueError:
        raise ValueError(
            f"no card is known as {card!r}: give its memory, such as card='24 GiB', or one of "
            f"{', '.join(CARDS)}"
        ) from None
    # perhaps MiB, as a driver shows them
    if nbytes < 2**18 and re.fullmatch(r"[\d\s.,_e+]+", str(card)):
        raise ValueError(
            f"card={card!r} without a unit is {format_bytes(nbytes)}, and no card is that small: "
            "write the unit, such as card='24 GiB' or card='24576 MiB', or one of "
            f"{', '.join(CARDS)}"
        )
    # with its rates
    return replace(CARDS["RTX 4090 24GB"], name=format_bytes(nbytes), nbytes=nbytes)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|card|sxm\d?|pcie|hbm\d\w?|[^a-z0-9]", "", name.lower())


def _spellings(name: str) -> set[str]:
    """A card's name with and without its memory, and both without RTX."""
    spelled = {_plain(name), _plain(name.rpartition(" ")[0])}
    return spelled | {s.removeprefix("rtx") for s in spelled}
