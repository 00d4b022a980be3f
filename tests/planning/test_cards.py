"""The table of cards against data sheets, and the names that find one."""

from __future__ import annotations

import re

import pytest

from gradmem_lib import BUSES, CARDS, find_card
from gradmem_lib.planning.cards import Card, _card, seconds_between, seconds_over_bus
from gradmem_lib.units import GiB


def test_cards_by_name_by_part_of_it_and_by_bytes():
    names = (
        "RTX 4090",
        "4090",
        "nvidia geforce rtx 4090",
        "RTX4090 24GB",
        "NVIDIA GeForce RTX 4090",
    )
    assert {find_card(name).name for name in names} == {"RTX 4090 24GB"}
    assert find_card("NVIDIA A100-SXM4-80GB") is CARDS["A100 80GB"]
    assert find_card("NVIDIA H100 80GB HBM3") is CARDS["H100 80GB"]
    assert find_card("L4").name == "L4 24GB" and find_card("Tesla T4").nbytes < 16 * GiB
    assert find_card("24 GiB").nbytes == 24 * GiB and find_card(10**9).nbytes == 10**9
    unnamed = find_card("24 GiB")
    assert unnamed.name == "24.00 GiB" and unnamed.bandwidth == CARDS["RTX 4090 24GB"].bandwidth
    assert find_card(unnamed) is unnamed
    with pytest.raises(ValueError, match="'A100 40GB' or 'A100 80GB'"):
        find_card("A100")


@pytest.mark.parametrize(
    "other", ["GTX 9999", "RTX 4060", "RTX 4080 SUPER", "L40", "A10", "", None]
)
def test_a_card_that_is_not_in_the_table_is_not_taken_for_one_that_is(other):
    known = ", ".join(CARDS)
    with pytest.raises(
        ValueError,
        match=rf"no card is known as .* or one of {known}$|without a unit .* or one of {known}$",
    ):
        find_card(other)


@pytest.mark.parametrize("number", ["24576", "24", 24, 5.5, "143,771", "4060", "2.4e4", 2**18 - 1])
def test_a_small_number_without_a_unit_is_no_card(number):
    """24576 is what nvidia-smi shows, and was once taken for 24 KiB."""
    with pytest.raises(ValueError, match=r"without a unit .*'24 GiB' or card='24576 MiB'"):
        find_card(number)
    assert find_card(2**18).nbytes == 2**18


def test_a_row_of_the_table_in_bytes_and_operations():
    assert _card("a card  1.5  2  3  4  12.1  8  5") == Card(
        "a card", 3 * 2**29, 2e12, 3e12, 4e9, (12, 1), 31.5e9, 5e9
    )


# Dense half and single precision in Tflop/s, GB/s and the compute capability as published, and what
# out-of-memory messages of named cards in public issues and repositories call the total capacity,
# in GiB. It differs a little with the driver, and nobody named an A10G or a 4080.
PUBLISHED = """\
RTX 2060 6GB            26     6.5     336   7.5    5.79
RTX 3070 8GB          40.6    20.3     448   8.6    7.76
RTX 3080 10GB         59.5    29.8     760   8.6    9.78
RTX 3060 12GB         25.5    12.7     360   8.6   11.75
T4 16GB                 65     8.1     320   7.5   14.75
V100 16GB              125    15.7     900   7.0   15.75
RTX 4060 Ti 16GB      44.1    22.1     288   8.9   15.60
RTX 4080 16GB         97.5    48.7   716.8   8.9       -
L4 24GB                121    30.3     300   8.9   22.03
A10G 24GB               70      35     600   8.6       -
RTX 3090 24GB           71    35.6     936   8.6   23.69
RTX 4090 24GB        165.2    82.6    1008   8.9   23.64
RTX 5090 32GB        209.5   104.8    1792  12.0   31.36
A100 40GB              312    19.5    1555   8.0   39.39
L40S 48GB              362    91.6     864   8.9   44.40
A100 80GB              312    19.5    2039   8.0   79.15
H100 80GB              989      67    3350   9.0   79.10
H200 141GB             989      67    4800   9.0  139.80
"""


def test_the_table_of_cards_is_the_data_sheets():
    names = []
    for row in PUBLISHED.splitlines():
        name, half, single, bandwidth, capability, reported = re.split("  +", row)
        names.append(name)
        card = CARDS[name]
        found = (card.half / 1e12, card.single / 1e12, card.bandwidth / 1e9)
        # whole numbers in the table
        published = (float(half), float(single), float(bandwidth))
        assert found == pytest.approx(published, abs=0.51), name
        assert card.capability == tuple(map(int, capability.split(".")))
        assert card.bf16 == (card.capability >= (8, 0))
        nominal = int(name.rpartition(" ")[2].removesuffix("GB"))
        # Error correction takes a part of GDDR6.
        least, most = (0.91, 0.95) if name.startswith(("L4", "A10G", "T4")) else (0.96, 0.995)
        assert least * nominal * GiB < card.nbytes < most * nominal * GiB, name
        if reported != "-":
            assert card.nbytes == round(float(reported) * GiB), name
    assert list(CARDS) == names


def test_seconds_over_the_bus_by_the_standard_s_rates():
    """A lane of PCIe 3 makes 8e9 transfers a second of a bit each, 128 of 130 are data, and each
    next one twice as many.
    """
    for generation in (3, 4, 5):
        rate = 16 * 8e9 * 2 ** (generation - 3) * 128 / 130 / 8
        assert abs(BUSES[f"PCIe {generation}"] / rate - 1) < 1e-3
    for name, generation, lanes in (
        ("T4", 3, 16),
        ("RTX 4090", 4, 16),
        ("H100", 5, 16),
        ("4060 Ti", 4, 8),
    ):
        whole = BUSES[f"PCIe {generation}"] * lanes / 16
        assert seconds_over_bus(1e9, name) == pytest.approx(1e9 / (0.8 * whole))


def test_links_between_cards_are_the_data_sheets():
    """NVLink of modules, both ways together, as the data sheets have it; all others talk over their
    bus.
    """
    both_ways = {
        "V100 16GB": 300,
        "A100 40GB": 600,
        "A100 80GB": 600,
        "H100 80GB": 900,
        "H200 141GB": 900,
    }
    assert {name: 2 * card.nvlink / 1e9 for name, card in CARDS.items() if card.nvlink} == both_ways
    assert CARDS["A100 80GB"].link == 300e9 and CARDS["RTX 3090 24GB"].link == BUSES["PCIe 4"]
    # What nccl-tests found on such machines, in public issues of NVIDIA/nccl, nccl-tests and
    # open-gpu-kernel-modules: bytes a second around a ring.
    for name, found in (("A100 80GB", 208e9), ("H100 80GB", 350e9), ("RTX 4090", 25.8e9)):
        assert seconds_between(1e9, name) == pytest.approx(1e9 / found, rel=0.17)
