"""The allocator's rules against a slow one that keeps a plain list of blocks, and what a card holds
beside the tensors.
"""

from __future__ import annotations

import math
import random

import pytest

from gradmem_lib.prediction.allocator import Allocator, OutOfCapacity, replayed, rounded, workspace

KiB, MiB = 2**10, 2**20
# Either side of every border that the rules have, and what leaves a rest at one.
SIZES = [
    border + more
    for border in (512, MiB, 9 * MiB, 10 * MiB, 18 * MiB, 19 * MiB)
    for more in (-512, -1, 0, 1, 512)
] + [2 * MiB - 1024, 3 * MiB, 13 * MiB, 31 * MiB]


class Slow:
    """After the comments in CUDACachingAllocator.cpp.

    A segment is a list of ``[bytes, whether it is free]``.
    """

    def __init__(self, capacity: float = math.inf):
        self.capacity, self.segments = capacity, []

    @property
    def reserved(self) -> int:
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    def allocate(self, nbytes: int) -> list:
        size = max(math.ceil(nbytes / 512), 1) * 512
        small = size <= MiB
        fits = [
            (block[0], number, at)
            for number, (pool, blocks) in enumerate(self.segments)
            for at, block in enumerate(blocks)
            if pool == small and block[1] and block[0] >= size
        ]
        if not fits:
            if small:
                asked = 2 * MiB
            elif size < 10 * MiB:
                asked = 20 * MiB
            else:
                asked = math.ceil(size / (2 * MiB)) * 2 * MiB
            if self.reserved + asked > self.capacity:
                self.empty()
            if self.reserved + asked > self.capacity:
                raise OutOfCapacity(asked)
            self.segments.append((small, [[asked, True]]))
            fits = [(asked, len(self.segments) - 1, 0)]
        total, number, at = min(fits)
        block, rest = self.segments[number][1][at], total - size
        block[1] = False
        if rest >= 512 if small else rest > MiB:
            block[0] = size
            self.segments[number][1].insert(at + 1, [rest, True])
        return block

    def free(self, block: list) -> None:
        block[1] = True
        for number, (pool, blocks) in enumerate(self.segments):
            merged = []
            for size, free in blocks:
                if merged and free and merged[-1][1]:
                    merged[-1][0] += size
                else:
                    merged.append([size, free])
            # blocks in use stay the same objects, whoever holds them
            if len(merged) != len(blocks):
                used = iter([one for one in blocks if not one[1]])
                self.segments[number] = pool, [one if one[1] else next(used) for one in merged]

    def empty(self) -> None:
        self.segments = [one for one in self.segments if not (len(one[1]) == 1 and one[1][0][1])]


@pytest.mark.parametrize("capacity", [math.inf, 120 * MiB])
def test_every_request_is_served_by_the_rules(capacity):
    """What is reserved after each of many requests, and what is refused where a card has
    no room.
    """
    rng, refused = random.Random(0), 0
    fast, slow, live = Allocator(capacity), Slow(capacity), []
    for _ in range(1500):
        if live and rng.random() < 0.45:
            address, block = live.pop(rng.randrange(len(live)))
            fast.free(address)
            slow.free(block)
        elif rng.random() < 0.01:
            fast.empty_cache()
            slow.empty()
        else:
            nbytes = rng.choice(SIZES)
            try:
                block = slow.allocate(nbytes)
            except OutOfCapacity as expected:
                with pytest.raises(OutOfCapacity) as error:
                    fast.allocate(nbytes)
                assert error.value.requested == expected.requested
                refused += 1
            else:
                live.append((fast.allocate(nbytes), block))
                assert fast._used[live[-1][0]][0] == block[0]
        assert fast.reserved == slow.reserved <= capacity
        free = sorted(size for pool in fast._free.values() for size, _ in pool)
        assert free == sorted(
            size for _, blocks in slow.segments for size, is_free in blocks if is_free
        )
    assert (refused > 0) == (capacity < math.inf)


def test_requests_are_numbered_from_nought():
    assert replayed([]) == 0
    assert replayed([0]) == 2 * MiB  # a tensor without elements that is asked for takes a block
    assert replayed([12 * MiB, 30 * MiB, -2, 30 * MiB]) == 42 * MiB
    assert replayed([12 * MiB, 30 * MiB, -1, 30 * MiB]) == 72 * MiB
    assert [rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_blocks_that_are_freed_together_may_be_freed_in_any_order():
    rng = random.Random(0)
    sizes = (512, 300 * KiB, MiB, 3 * MiB, 12 * MiB)
    for _ in range(100):
        before, after = (rng.choices(sizes, k=20) for _ in range(2))
        freed = [-1 - n for n in rng.sample(range(20), 12)]
        orders = (freed, sorted(freed), rng.sample(freed, 12))
        assert len({replayed([*before, *order, *after]) for order in orders}) == 1


def test_what_cublas_and_the_driver_take():
    """CUBLAS_WORKSPACE_CONFIG is :4096:2:16:8 by default: two of 4,096 KiB and eight of 16 KiB.

    On Hopper it is 32 MiB.
    """
    one = (2 * 4096 + 8 * 16) * KiB
    assert workspace() == workspace((8, 0)) == workspace((7, 5)) == workspace((8, 9)) == 2 * one
    assert workspace((9, 0)) == workspace((10, 0)) == 64 * MiB
