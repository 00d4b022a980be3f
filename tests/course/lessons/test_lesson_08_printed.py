"""What lesson 08 says of its cells' outputs: figures, orders and an optimum."""

from __future__ import annotations

import re

import pytest
from lesson_facts import lessons
from support.paths import ROOT

from gradmem_lib import find_card
from gradmem_lib.course.material import accounting

SOURCE = ROOT / "solutions" / "08_recompute_or_move.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())


@pytest.fixture(scope="module")
def printed() -> str:
    return next(lesson for lesson in lessons() if lesson.number == "08").printed


@pytest.fixture(scope="module")
def points(printed) -> dict[str, tuple[int, int]]:
    """Bytes of activations and operations of each way."""
    rows = re.findall(r"^(\S.*?) +([\d,]+) bytes +([\d,]+) operations$", printed, re.M)
    return {name: tuple(int(n.replace(",", "")) for n in row) for name, *row in rows}


def test_repeating_what_is_cheap(points):
    assert "Two fifths of the bytes are gone, and no product runs twice." in TEXT
    assert points["elementwise"][0] / points["nothing"][0] == pytest.approx(0.6, abs=0.03)
    assert points["elementwise"][1] == points["nothing"][1]


def test_the_policy_is_what_to_take_for_a_seventh_of_the_work(points):
    assert "which of them would you take, if you may repeat a seventh of the work?" in TEXT
    assert "So take your policy, if you may repeat a seventh of the work." in TEXT
    room = points["nothing"][1] * (1 + 1 / 7)
    allowed = {name: nbytes for name, (nbytes, work) in points.items() if work <= room}
    assert min(allowed, key=allowed.get) == "every second product"
    assert "Your policy is on it, and beats the MLP alone on both axes." in TEXT
    yours, mlp = points["every second product"], points["mlp"]
    assert yours[0] < mlp[0] and yours[1] < mlp[1]


def test_what_would_leave(printed, points):
    leaves = dict(re.findall(r"^ *([\d,]+) bytes of (\w+) would leave", printed, re.M))
    found = {name: int(nbytes.replace(",", "")) for nbytes, name in leaves.items()}
    assert "Most of it is weights" in TEXT and found["weights"] > found["activations"]
    assert f"more activations would leave than the {points['nothing'][0] / 1e6:.1f} MB" in TEXT
    assert found["activations"] > points["nothing"][0]
    assert "because a tensor leaves twice if two operations save it." in TEXT
    assert "It moves each storage once, so nothing leaves twice." in TEXT
    moved = re.search(r"^([\d,]+) bytes moved in", printed, re.M)[1].replace(",", "")
    assert int(moved) < points["nothing"][0] < found["activations"]


def test_when_the_bus_is_faster(printed):
    rows = re.findall(
        r"^(\S.*?GB) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M
    )
    table = {name: [float(ratio) for ratio in row] for name, *row in rows}
    assert "On a slow card moving can win. On a fast card it loses" in TEXT
    assert min(table["RTX 3060 12GB"][:3]) < 1
    for card in ("RTX 4090 24GB", "A100 80GB", "H100 80GB"):
        assert min(table[card][:3]) > 1 > table[card][3]
    assert "The faster the card, the higher is the price of the trip." in TEXT
    by_speed = sorted(table, key=lambda name: find_card(name).half)
    for column in range(5):
        prices = [table[name][column] for name in by_speed]
        assert prices == sorted(prices)
    assert "On a slow card, or over NVLink-C2C, even moving everything can be faster." in TEXT
    assert all(row[3] < 1 for row in table.values())
    assert "the boundary alone is cheap to move everywhere" in TEXT
    assert all(row[4] < 1 / 3 for row in table.values())


def test_the_budgets_run_that_fits(printed):
    predicted = re.search(r"^first-5: ([\d,]+) bytes predicted", printed, re.M)[1]
    assert "With the first five layers checkpointed, the run fits" in TEXT
    assert f"{predicted} measured" in printed
    assert int(predicted.replace(",", "")) <= 430 * 2**20 and "may take 430:" in TEXT


def test_what_grows_with_the_square(printed):
    rows = re.findall(r"^ *([\d,]+) +([\d,.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M)
    table = {int(n.replace(",", "")): [float(x.replace(",", "")) for x in row] for n, *row in rows}
    eager, *others = zip(table[32768], table[131072], strict=True)
    assert "The scores of eager attention grow with the square." in TEXT
    assert 14 < eager[1] / eager[0] < 16
    assert "With fused attention all bytes grow with the number of tokens" in TEXT
    for short, long in others:
        assert long / short == pytest.approx(4, rel=0.01)
    seven = accounting.SHAPES["Llama-2-7B"]
    assert 32 * 2 * 32768 * seven.hidden == 8 * 2**30 and table[32768][2] == 8


def test_the_compilers_budget(printed):
    rows = re.findall(r"^ +([\d.]+) +(\d+) +(\d+)$", printed, re.M)
    table = {float(budget): (int(after), int(peak)) for budget, after, peak in rows}
    budgets = sorted(table, reverse=True)
    after = [table[budget][0] for budget in budgets]
    assert "The smaller the budget, the less is kept after forward" in TEXT
    assert after == sorted(after, reverse=True)
    peaks = {budget: peak for budget, (_, peak) in table.items()}
    assert "the *peak* rises again below 0.2." in TEXT and min(peaks, key=peaks.get) == 0.2
    assert peaks[0.2] < peaks[0.1] < peaks[0.0]


def test_tiles(points):
    every, tiles = points["every layer"], points["every layer, 8 slices"]
    assert 'A third of what "every layer" keeps is gone' in TEXT
    assert tiles[0] / every[0] == pytest.approx(2 / 3, abs=0.02)
    assert "for a sixth more operations" in TEXT
    assert tiles[1] / every[1] == pytest.approx(7 / 6, abs=0.01)


def test_the_cache_is_the_difference(printed):
    peaks = re.findall(r"^use_cache=\w+ +peak ([\d,]+)$", printed, re.M)
    without, with_cache = (int(peak.replace(",", "")) for peak in peaks)
    assert "The difference is the cache, to the byte." in TEXT
    assert f"your formula: {with_cache - without:,}" in printed


def test_behind_frozen_layers(printed):
    more, less = re.search(r"^with it ([\d.]+) times, without it ([\d.]+)", printed, re.M).groups()
    assert float(more) > 2 > 1.1 > float(less)
    assert "Without it, only two layers run again." in TEXT
