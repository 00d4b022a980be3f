"""The puzzles with two targets: no choice that is cheaper than the best known one fits, and what a
learner reads of a choice is true.
"""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest
from support.nightly import ALL

from gradmem_lib.course.catalogue import get
from gradmem_lib.course.judge.exercise import Unusable
from gradmem_lib.course.judge.verdict import judge
from gradmem_lib.course.learner.bargains import Bargain
from gradmem_lib.course.lessons.lesson_01.exercises_puzzle import LINES, in_order
from gradmem_lib.course.lessons.lesson_02.exercises_puzzle import PACKING, SIZES
from gradmem_lib.course.lessons.lesson_03.exercises_puzzle import (
    CUTTING,
    LENGTHS,
    in_micro_batches,
)
from gradmem_lib.course.lessons.lesson_05.exercises_puzzle import SWITCHES
from gradmem_lib.course.lessons.lesson_06.exercises_puzzle import RENTED
from gradmem_lib.course.lessons.lesson_07.exercises_puzzle import UNROUNDED
from gradmem_lib.course.lessons.lesson_09.exercises_puzzle import ADAPTERS
from gradmem_lib.course.lessons.lesson_10.exercises_puzzle import SHARING
from gradmem_lib.names import PRECISIONS
from gradmem_lib.optimizers import OPTIMIZERS
from gradmem_lib.units import parse_bytes

BARGAINS = {"1.10": LINES, "2.7": PACKING, "3.11": CUTTING, "5.12": SWITCHES, "6.8": RENTED}
BARGAINS |= {"7.7": UNROUNDED, "9.10": ADAPTERS, "10.8": SHARING}


def peak_and_price(bargain: Bargain, choice) -> tuple[int, int]:
    run, price = bargain.run(choice)
    return run.peak.total, price


def misses(bargain: Bargain, choice) -> bool:
    """Whether a choice is cheaper than the best known one, and does not fit."""
    peak, price = peak_and_price(bargain, choice)
    assert price < peak_and_price(bargain, bargain.best)[1], choice
    return peak > parse_bytes(bargain.room)


@pytest.mark.parametrize("id", [id for id in BARGAINS if ALL or id != "10.8"])
def test_the_best_known_choice_is_the_right_answer_and_the_target_leaves_room_for_another(id):
    bargain = BARGAINS[id]
    peak, price = peak_and_price(bargain, bargain.best)
    assert get(id).right == bargain.best and get(id).cases == bargain.cases
    assert peak <= parse_bytes(bargain.room) and price < bargain.most
    assert bargain.compared(bargain.best).startswith("★")


def orders() -> Iterator[str]:
    """All orders of at most four passes, for 8 rows that are trained and 24 that are evaluated."""
    whole = ["forward 8", "backward", "step", "zero_grad"]
    halves = [[f"forward {n}", f"forward {8 - n}", *whole[1:]] for n in range(1, 8)]
    for update in [whole, *halves]:
        for place in range(len(update) + 1):
            yield ", ".join([*update[:place], "evaluate 24", *update[place:]])
    # all 8 rows at once are too many wherever the evaluation is
    for n in (1, 12, 23):
        yield ", ".join([f"evaluate {n}", f"evaluate {24 - n}", *whole])


def test_no_order_of_fewer_passes_fits():
    assert all(misses(LINES, order) for order in orders())
    # larger pieces first: no other cut of 8 rows fits in as many passes
    fitting = []
    for n in range(1, 8):
        cut = f"evaluate 24, forward {n}, backward, forward {8 - n}, backward, step, zero_grad"
        if in_order(cut)[0].peak.total <= parse_bytes(LINES.room):
            fitting.append(cut)
    assert fitting == [LINES.best]


def test_no_two_groups_fit_and_a_steps_copy_is_its_largest_group():
    for groups in ([[*SIZES]], [[size] for size in SIZES], PACKING.best):
        residents = 4 * 1024 * sum(SIZES) + 4 * len(SIZES)  # with a counter of 4 bytes for each
        assert peak_and_price(PACKING, groups) == (
            residents + 1024 * max(map(sum, groups)),
            len(groups),
        )
    room = (parse_bytes(PACKING.room) - residents) // 1024
    assert 2 * room < sum(SIZES) <= 3 * room
    # largest first, each into the first group that has room
    groups: list[list[int]] = []
    for size in sorted(SIZES, reverse=True):
        for group in groups:
            if sum(group) + size <= room:
                group.append(size)
                break
        else:
            groups.append([size])
    assert len(groups) == PACKING.most


def partitions(rows: list[int], parts: int) -> Iterator[list[list[int]]]:
    """All ways to put rows into at most so many lists."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:], parts):
        for place in range(len(rest)):
            yield [*rest[:place], [rows[0], *rest[place]], *rest[place + 1 :]]
        if len(rest) < parts:
            yield [[rows[0]], *rest]


@cache
def fits_alone(rows: int, longest: int) -> bool:
    """Whether a micro-batch fits where it runs first, before any gradient."""
    # it is run as its longest row so many times: peaks depend on nothing else
    logits = 12 * rows * longest * 1024  # of which three copies are alive at the end of forward
    if logits > parse_bytes(CUTTING.room):
        return False
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setitem(in_micro_batches.__globals__, "LENGTHS", (longest,) * rows)
        tracker, _ = in_micro_batches([[longest] * rows])
    return tracker.peak.total <= parse_bytes(CUTTING.room)


def test_no_three_micro_batches_fit():
    for parts in partitions([*LENGTHS], 3):
        assert not all(fits_alone(len(part), max(part)) for part in parts), parts
    assert fits_alone(2, 117) and not fits_alone(3, 128)


def test_no_fewer_calls_fit_lesson_00s_run():
    optimizers = OPTIMIZERS if ALL else ("adafactor-torch", "adamw-8bit")
    for optimizer, in_backward in itertools.product(optimizers, (False, True)):
        choice = {"optimizer": optimizer, "in_backward": in_backward, "chunked_loss": True}
        if optimizer == "adafactor-torch":  # the least states
            assert all(misses(SWITCHES, choice | some) for some in first_layers(0, 1, 2))
        assert misses(SWITCHES, choice | {"checkpointing": "first-3"})


def first_layers(*numbers: int) -> Iterator[dict]:
    for k in numbers:
        yield {"checkpointing": f"first-{k}"} if k else {}


def test_no_fewer_checkpoints_fit_section_1s_run():
    assert all(misses(RENTED, choice) for choice in first_layers(0, 1, 2, 3))


def test_no_fewer_checkpoints_lose_no_update():
    precisions = PRECISIONS if ALL else ("float32-master", "autocast-bf16")
    optimizers = OPTIMIZERS if ALL else ("adafactor-torch",)
    ways = [("bf16", "adamw-stochastic"), *itertools.product(precisions, optimizers)]
    for precision, optimizer in ways:
        choice = {"precision": precision, "optimizer": optimizer, "checkpointing": "first-18"}
        with suppress(Unusable):  # a recipe that there is not, or whose small updates are lost
            assert misses(UNROUNDED, choice), choice


def test_no_fewer_checkpoints_fit_adapters():
    for quantized, chunked in itertools.product((False, True), repeat=2):
        choice = {"quantized_base": quantized, "chunked_loss": chunked}
        assert misses(ADAPTERS, choice | {"checkpointing": "first-25"})
    assert misses(ADAPTERS, choice)


@pytest.mark.skipif(not ALL, reason="a prediction of a 13B for each choice")
def test_no_way_of_sharing_sends_less():
    for sharding, most in {"ddp": 8, "zero1": 8, "zero2": 4, "fsdp": 2}.items():
        for pieces in (1, 2, 4, 8):
            if pieces <= most:
                assert misses(SHARING, {"sharding": sharding, "accumulation": pieces})


@pytest.mark.parametrize(
    ("id", "choice", "says"),
    [
        ("1.10", "forward 8, backward, step", "then come step and zero_grad"),
        ("2.7", [[44, 42]], "in which each of 44, 42, 37"),
        ("3.11", 3, "the answer is a list of lists"),
        ("5.12", {"lora_rank": 8}, "a dict with some of these options: optimizer, accumulation"),
        ("6.8", {"checkpointing": "sqrt"}, "checkpointing is 'per-layer' here, or 'first-8'"),
        ("6.8", {"accumulation": 3}, "cannot be cut into equal micro-batches"),
        ("7.7", {"precision": "bf16"}, "small updates are lost"),
        ("10.8", {}, "choose how they share"),
    ],
)
def test_what_is_no_choice_is_said(id, choice, says):
    assert says in judge(get(id), choice).line


def test_a_choice_is_shown_beside_the_best_known_one(capsys):
    PACKING.show(...)
    assert capsys.readouterr().out == "There is no choice yet.\n"
    PACKING.show([[size] for size in SIZES])
    yours, best = capsys.readouterr().out.splitlines()
    assert yours.split()[1:] == ["1,011,748", "bytes,", "9", "groups"]
    assert best.split()[2:] == ["1,047,588", "bytes,", "3", "groups"]
    assert PACKING.compared([[44], [42, 37], [29, 23, 17, 9], [21, 14]]).startswith(
        "(4 groups; the"
    )
