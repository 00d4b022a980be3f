"""The caching allocator's rules on addresses that stand for memory, and what a card holds beside the tensors.

It follows PyTorch's sources (c10/cuda/CUDACachingAllocator.cpp). ``make gpu`` compares it with a card; that has not been
done yet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from ..units import MiB

BLOCK = 512


def rounded(nbytes: int) -> int:
    """``nbytes`` in whole blocks of the allocator, which are 512 bytes."""
    return -(-nbytes // BLOCK) * BLOCK


# Estimates. cuBLAS takes a workspace for each thread that multiplies matrices, forward and backward each their own;
# it comes from PyTorch's allocator. The context is the driver's, outside of any allocator's figure.
WORKSPACE_HOPPER, WORKSPACE = 32 * MiB, 4 * 2 * MiB + 8 * 16 * 1024
CONTEXT = 500 * MiB


def workspace(compute_capability: tuple[int, int] = (8, 0)) -> int:
    """Bytes of cuBLAS workspace that a training step ends up with: one for forward, one for autograd's thread."""
    return 2 * (WORKSPACE_HOPPER if compute_capability[0] >= 9 else WORKSPACE)


SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LARGE, ROUND_LARGE = 1 * MiB, 2 * MiB, 20 * MiB, 10 * MiB, 2 * MiB


class Allocator:
    """The caching allocator's rules on addresses that stand for memory (expandable segments off, one stream).

    Requests up to 1 MiB come from segments of 2 MiB; up to 10 MiB from segments of 20 MiB; larger ones get a segment of their
    own, in whole 2 MiB. The smallest free block that fits is taken, and split if enough is left; neighbours that are free
    merge again. ``reserved`` is what has been taken from the driver, which nothing gives back.
    """

    def __init__(self):
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {
            True: [],
            False: [],
        }  # by pool: sorted (bytes, address)
        self._blocks: dict[int, list] = {}  # address: [bytes, small, used, previous address, next address]
        self._next = 0

    def allocate(self, nbytes: int) -> int:
        """The address of a block for ``nbytes``, taking a new segment where no free block fits."""
        size = max(rounded(nbytes), BLOCK)
        small = size <= SMALL
        free = self._free[small]
        i = bisect_left(free, (size, -1))
        if i < len(free):
            total, address = free.pop(i)
        else:
            total = (
                SMALL_SEGMENT
                if small
                else LARGE_SEGMENT
                if size < LARGE
                else -(-size // ROUND_LARGE) * ROUND_LARGE
            )
            address = self._next
            self._next += 2 * total  # segments never touch, so that they never merge
            self._blocks[address] = [total, small, False, None, None]
            self.reserved += total
        block = self._blocks[address]
        rest = total - size
        if rest >= BLOCK if small else rest > SMALL:
            after = block[4]
            self._blocks[address + size] = [rest, small, False, address, after]
            if after is not None:
                self._blocks[after][3] = address + size
            block[0], block[4] = size, address + size
            insort(free, (rest, address + size))
        block[2] = True
        return address

    def free(self, address: int) -> None:
        """Give the block at ``address`` back, merged with free neighbours."""
        block = self._blocks[address]
        block[2] = False
        free = self._free[block[1]]
        before, after = block[3], block[4]
        if after is not None and not self._blocks[after][2]:
            free.remove((self._blocks[after][0], after))
            self._join(address, after)
        if before is not None and not self._blocks[before][2]:
            free.remove((self._blocks[before][0], before))
            self._join(before, address)
            address = before
        insort(free, (self._blocks[address][0], address))

    def _join(self, first: int, second: int) -> None:
        gone = self._blocks.pop(second)
        self._blocks[first][0] += gone[0]
        self._blocks[first][4] = gone[4]
        if gone[4] is not None:
            self._blocks[gone[4]][3] = first


def replayed(requests: Iterable[int]) -> int:
    """Bytes reserved after ``requests``: a number of bytes asks for a block, ``-1 - n`` gives the nth one back."""
    allocator, addresses = Allocator(), []
    for request in requests:
        if request >= 0:
            addresses.append(allocator.allocate(request))
        else:
            allocator.free(addresses[-1 - request])
    return allocator.reserved
