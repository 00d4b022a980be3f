"""The caching allocator's rules, applied to addresses without memory, and what a card holds besides
tensors.

It follows PyTorch's sources (c10/cuda/CUDACachingAllocator.cpp). ``make gpu``, which has not run
yet, compares it with a card.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

from ..units import MiB

BLOCK = 512


def rounded(nbytes: int) -> int:
    """``nbytes`` in whole blocks of the allocator, which are 512 bytes."""
    return -(-nbytes // BLOCK) * BLOCK


# Estimates. cuBLAS takes a workspace for each thread that multiplies matrices: one for forward and
# one for backward. They come from PyTorch's allocator. The context belongs to the driver, and no
# allocator counts it.
WORKSPACE_HOPPER, WORKSPACE = 32 * MiB, 4 * 2 * MiB + 8 * 16 * 1024
CONTEXT = 500 * MiB


def workspace(compute_capability: tuple[int, int] = (8, 0)) -> int:
    """Bytes of the cuBLAS workspaces at the end of a training step: one for forward, one for
    autograd's thread.
    """
    return 2 * (WORKSPACE_HOPPER if compute_capability[0] >= 9 else WORKSPACE)


SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LARGE, ROUND_LARGE = (
    1 * MiB,
    2 * MiB,
    20 * MiB,
    10 * MiB,
    2 * MiB,
)


class OutOfCapacity(Exception):
    """Raised if a segment of ``requested`` bytes exceeds the card's capacity.

    No unused segment is left to free for it.
    """

    def __init__(self, requested: int):
        self.requested = requested


class Allocator:
    """The caching allocator's rules, applied to addresses without memory (expandable segments off,
    one stream).

    Requests up to 1 MiB come from segments of 2 MiB. Requests up to 10 MiB come from segments of 20
    MiB. Larger ones get their own segment, a multiple of 2 MiB. The smallest free block that fits
    is taken, and split if enough is left. Free neighbours merge again. ``reserved`` is the bytes
    taken from the driver. ``empty_cache`` returns unused segments to the driver. Callers may call
    it, and ``allocate`` does when ``capacity`` is too small for a new segment. If that fails, it
    raises ``OutOfCapacity``.
    """

    def __init__(self, capacity: float = math.inf):
        self.capacity, self.reserved = capacity, 0
        # the address of the next segment: segments never touch, so that they never merge
        self._next = 0
        self._segments: dict[int, int] = {}  # address: bytes
        # address: bytes, and whether in the pool of small ones
        self._used: dict[int, tuple[int, bool]] = {}
        # By pool: sorted (bytes, address).
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._begins: dict[int, int] = {}  # a free block's address: its bytes
        self._ends: dict[int, int] = {}  # a free block's end: its bytes

    def allocate(self, nbytes: int) -> int:
        """The address of a block for ``nbytes``. Takes a new segment if no free block fits."""
        size = max(rounded(nbytes), BLOCK)
        small = size <= SMALL
        at = bisect_left(self._free[small], (size, -1))
        if at < len(self._free[small]):
            total, address = self._free[small][at]
            self._take(address, total, small)
        else:
            large = LARGE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
            total, address = SMALL_SEGMENT if small else large, self._next
            if self.reserved + total > self.capacity:
                self.empty_cache()
            if self.reserved + total > self.capacity:
                raise OutOfCapacity(total)
            self._next += 2 * total
            self._segments[address] = total
            self.reserved += total
        rest = total - size
        if rest >= BLOCK if small else rest > SMALL:
            self._put(address + size, rest, small)
        else:
            size = total
        self._used[address] = size, small
        return address

    def free(self, address: int) -> None:
        """Free the block at ``address``, and merge it with free neighbours."""
        size, small = self._used.pop(address)
        before, after = self._ends.get(address, 0), self._begins.get(address + size, 0)
        if after:
            self._take(address + size, after, small)
        if before:
            self._take(address - before, before, small)
        self._put(address - before, before + size + after, small)

    def empty_cache(self) -> None:
        """Return the segments without a block in use to the driver, as ``torch.cuda.empty_cache``
        does.
        """
        for address, total in list(self._segments.items()):
            if self._begins.get(address) == total:
                self._take(address, total, (total, address) in self._free[True])
                del self._segments[address]
                self.reserved -= total

    def _put(self, address: int, size: int, small: bool) -> None:
        insort(self._free[small], (size, address))
        self._begins[address] = self._ends[address + size] = size

    def _take(self, address: int, size: int, small: bool) -> None:
        free = self._free[small]
        del (
            free[bisect_left(free, (size, address))],
            self._begins[address],
            self._ends[address + size],
        )


def replayed(requests: Iterable[int], held: Iterable[int] = ()) -> int:
    """Bytes reserved after ``requests``, with blocks of ``held`` bytes there before and after them.

    A request is a number of bytes to allocate, or ``-1 - n`` to free the block of request n.
    """
    allocator, addresses = Allocator(), []
    for nbytes in held:
        allocator.allocate(nbytes)
    for request in requests:
        if request >= 0:
            addresses.append(allocator.allocate(request))
        else:
            allocator.free(addresses[-1 - request])
    return allocator.reserved
