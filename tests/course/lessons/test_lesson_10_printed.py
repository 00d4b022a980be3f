"""What lesson 10 says of its cells' outputs."""

from __future__ import annotations

import re

import pytest
from lesson_facts import lessons
from support.paths import ROOT

from gradmem_lib.units import MiB

SOURCE = (ROOT / "solutions" / "10_beyond_one_card.py").read_text(encoding="utf-8")
TEXT = " ".join(SOURCE.replace("\n# ", "\n").split())


@pytest.fixture(scope="module")
def printed() -> str:
    return next(lesson for lesson in lessons() if lesson.number == "10").printed


@pytest.fixture(scope="module")
def table(printed) -> dict[str, dict[str, float]]:
    """MB on rank 0: between steps and at the peak, on two ranks and on four."""
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M)
    names = ("between 2", "peak 2", "between 4", "peak 4")
    return {way: dict(zip(names, map(float, row), strict=True)) for way, *row in rows}


def test_the_sum_of_four_ranks(printed):
    assert printed.count("one of 4: the sum is 1111") == 4


def test_what_each_way_keeps_and_needs(table):
    alone, ddp, zero1, zero2, fsdp = (
        table[way] for way in ("alone", "ddp", "zero1", "zero2", "fsdp")
    )
    assert "**DDP needs more than a process alone**" in TEXT
    assert all(ddp[moment] > alone[moment] for moment in alone)
    assert "a process alone keeps 12 bytes a weight between steps" in TEXT
    assert alone["between 2"] == pytest.approx(12 * 429_248 / 1e6, abs=0.01)
    buckets = 4 * 429_248 / 1e6
    assert "4 bytes a weight more" in TEXT
    assert ddp["between 2"] - alone["between 2"] == pytest.approx(buckets, abs=0.02)
    assert "On two ranks they take what it saves." in TEXT
    assert zero1["between 2"] == pytest.approx(alone["between 2"], abs=0.02)
    assert zero1["between 4"] < alone["between 4"]
    assert "**ZeRO-2 and FSDP keep the same between steps.**" in TEXT
    for ranks in (2, 4):
        assert zero2[f"between {ranks}"] == fsdp[f"between {ranks}"]
        assert fsdp[f"peak {ranks}"] < zero2[f"peak {ranks}"]
    assert f"A process alone peaks at {alone['peak 2']} MB." in TEXT


def test_one_unit_is_worse_than_no_sharding(printed, table):
    one_unit = float(re.search(r"Prediction 10.b\n.*\n +measured +([\d.]+) MB", printed)[1])
    assert "**This is worse than no sharding.**" in TEXT and one_unit > table["alone"]["peak 2"]
    peak = table["fsdp"]["peak 2"]
    assert f"With a unit for each layer, as in section 2, the peak was {peak} MB." in TEXT
    yours = re.search(r"^yours, on two ranks: ([\d.]+) MB", printed, re.M)[1]
    assert f"Checkpoints lower the peak from {peak} to {yours} MB." in TEXT


def test_checkpoints_gather_no_more(printed):
    found = re.search(r"^without checkpoints: \{'allgather': (\d+)", printed, re.M)[1]
    more = re.search(r"Prediction 10.c\n.*\n.*\n +measured +(\d+) all-gathers", printed)[1]
    assert "Eight layers are gathered twice each" in TEXT and int(found) == 2 * 8 + 1
    assert "There are no more." in TEXT and more == found
    assert "So checkpoints under FSDP cost no more than on one card." in TEXT


def test_buckets_hold_all_gradients_once(printed):
    rows = re.findall(r"^micro-batches: (\d), buckets: \d+, bytes: ([\d,]+)", printed, re.M)
    assert [n for n, _ in rows] == ["1", "2"] and {sent for _, sent in rows} == {"1,716,992"}
    assert "The buckets hold all 1,716,992 bytes of gradients" in TEXT


def test_each_ranks_norm_is_another_number(printed):
    rows = re.findall(r"norm of its shards ([\d.]+), of the gradient ([\d.]+)", printed)
    (one, whole), (other, same) = [tuple(map(float, row)) for row in rows]
    assert whole == same and one**2 + other**2 == pytest.approx(whole**2, rel=0.01)
    assert one != whole != other


def test_four_ranks_continue_as_two_do(printed):
    two, four = (
        re.search(rf"^{name} +(\[.*\])$", printed, re.M)[1]
        for name in ("2 ranks:", "4 ranks, resumed:")
    )
    assert "The four ranks continue as the two do." in TEXT and two == four


def test_trainers_fsdp_on_the_cpu_is_ddp(printed):
    assert "**It is DDP, without a warning.**" in TEXT
    assert "\nDistributedDataParallel\n" in printed and "measured  1,716,992 bytes" in printed


def test_the_plan_is_exact(printed):
    predicted = re.search(r"^predicted ([\d,]+ bytes)$", printed, re.M)[1]
    assert "The prediction is exact." in TEXT
    assert re.search(rf"^measured +{predicted} {predicted}$", printed, re.M)


def test_how_many_cards_hold_every_weight_of_a_70b(printed):
    rows = re.findall(r"^ *(\d+) cards, (\S+) +(\d+) GB each", printed, re.M)
    found = {(int(cards), precision): int(gb) for cards, precision, gb in rows}
    room = 79.10 * 1024 * MiB / 1e9  # of an H100
    assert "Eight cards can hold it in pure bf16" in TEXT and found[8, "bf16"] < room
    assert "With float32 master weights it takes sixteen" in TEXT
    assert found[8, "float32-master"] > room > found[16, "float32-master"]


def test_1024_tokens_fit(printed):
    peak = float(re.search(r"Prediction 10.f\n.*\n +predicted +([\d.]+) GiB", printed)[1])
    assert "So 1,024 tokens fit, and 2,048 are a gamble." in TEXT and peak + 0.5 < 23.6
