"""A replayed out-of-memory error: its text adds up, its segments are what an allocator written anew
would hold.
"""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest

from gradmem_lib import Recipe, out_of_memory, predict
from gradmem_lib.measure.error_text import pytorch_size
from gradmem_lib.model.known import known_model
from gradmem_lib.prediction.allocator import CONTEXT, replayed, workspace
from gradmem_lib.units import GiB, KiB, MiB


def asking(*requests: int):
    """What ``out_of_memory`` needs of a prediction."""
    return SimpleNamespace(target="cuda", requests=lambda: requests)


def rounded(request: int) -> int:
    """The bytes of the block that a request gets."""
    return max(512, (request + 511) // 512 * 512)


def segment_for(size: int) -> int:
    """The bytes of a new segment for a block of ``size`` bytes."""
    if size <= MiB:
        return 2 * MiB
    if size < 10 * MiB:
        return 20 * MiB
    return (size + 2 * MiB - 1) // (2 * MiB) * 2 * MiB


class Simulated:
    """PyTorch's caching allocator, written anew: ``segments`` are lists of blocks in their order,
    and a block is a list [bytes, the request's number or None].
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.segments: list[list[list]] = []

    def free(self, number: int) -> None:
        for segment in self.segments:
            for block in segment:
                if block[1] == number:
                    block[1] = None
            self.join_free_blocks(segment)

    def join_free_blocks(self, segment: list[list]) -> None:
        i = 1
        while i < len(segment):
            if segment[i - 1][1] is None and segment[i][1] is None:
                segment[i - 1][0] += segment.pop(i)[0]
            else:
                i += 1

    def alloc(self, size: int, number: int) -> bool:
        """Whether a block of ``size`` bytes was found or made."""
        fitting = self.fitting_blocks(size)
        if not fitting:
            new = segment_for(size)
            if not self.has_room(new):
                return False
            self.segments.append([[new, None]])
            fitting = [(new, len(self.segments) - 1, 0)]
        total, s, b = min(fitting)
        rest = total - size
        least = 512 if size <= MiB else MiB + 1  # a smaller rest is not cut off
        if rest >= least:
            self.segments[s][b : b + 1] = [[size, number], [rest, None]]
        else:
            self.segments[s][b] = [total, number]
        return True

    def fitting_blocks(self, size: int) -> list[tuple[int, int, int]]:
        """The free blocks that are large enough: their bytes, segment and place in it."""
        found = []
        for s, segment in enumerate(self.segments):
            for_small = sum(total for total, _ in segment) == 2 * MiB
            if for_small != (size <= MiB):
                continue
            for b, (total, owner) in enumerate(segment):
                if owner is None and total >= size:
                    found.append((total, s, b))
        return found

    def has_room(self, new: int) -> bool:
        """Whether a new segment fits, if need be once the unused ones are given back."""
        if self.reserved() + new > self.capacity:
            self.segments = [s for s in self.segments if any(owner is not None for _, owner in s)]
        return self.reserved() + new <= self.capacity

    def reserved(self) -> int:
        return sum(size for segment in self.segments for size, _ in segment)


def simulated(requests, capacity):
    """(the request that fails, or None; the segments)."""
    allocator = Simulated(capacity)
    number = 0
    for request in requests:
        if request < 0:
            allocator.free(-1 - request)
            continue
        if not allocator.alloc(rounded(request), number):
            return number, allocator.segments
        number += 1
    return None, allocator.segments


def random_requests(seed: int) -> list[int]:
    draw = random.Random(seed)
    requests, live, number = [], [], 0
    for _ in range(120):
        if live and draw.random() < 0.45:
            requests.append(-1 - live.pop(draw.randrange(len(live))))
        else:
            requests.append(
                draw.choice(
                    (
                        draw.randrange(1, MiB),
                        draw.randrange(MiB, 10 * MiB),
                        draw.randrange(1, 60 * MiB),
                    )
                )
            )
            live.append(number)
            number += 1
    return requests


@pytest.mark.parametrize("seed", range(12))
def test_it_fails_where_an_allocator_written_anew_fails_and_holds_the_same(seed):
    requests = random_requests(seed)
    most = replayed(requests)
    draw, ends = random.Random(seed), set()
    for capacity in (most, most - 1, *(draw.randrange(MiB, most) for _ in range(12))):
        error = out_of_memory(asking(*requests), capacity + CONTEXT, cublas=0)
        failed, segments = simulated(requests, capacity)
        ends.add(error is None)
        assert (error is None) == (failed is None)
        if error is not None:
            mine = [
                [(b["size"], b["state"] != "inactive") for b in s["blocks"]] for s in error.segments
            ]
            assert sorted(mine) == sorted([[(n, o is not None) for n, o in s] for s in segments])
            assert error.tensor == [r for r in requests if r >= 0][failed]
    assert False in ends


def test_one_byte_less_than_what_a_step_without_frees_reserves_is_too_little():
    requests = (3 * MiB, 40 * MiB, 700, 18 * MiB)
    enough = replayed(requests) + CONTEXT
    assert enough == (20 + 40 + 2 + 18) * MiB + CONTEXT
    assert out_of_memory(asking(*requests), enough, cublas=0) is None
    error = out_of_memory(asking(*requests), enough - 1, cublas=0)
    assert (error.asked, error.tensor, error.allocated) == (18 * MiB, 18 * MiB, 43 * MiB + 1024)
    # What was freed entirely is given back before the driver is asked in vain.
    assert out_of_memory(asking(40 * MiB, -1, 48 * MiB), 60 * MiB + CONTEXT, cublas=0) is None
    # Half a segment in use cannot be.
    held = out_of_memory(asking(9 * MiB, 9 * MiB, -1, 12 * MiB), 31 * MiB + CONTEXT, cublas=0)
    assert held.unallocated == 11 * MiB and held.free == 11 * MiB and held.asked == 12 * MiB


def read(text: str) -> list[float]:
    """The sizes of an error's text, in bytes."""
    units = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}
    return [float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) (bytes|KiB|MiB|GiB)", text)]


def test_the_text_of_a_real_step_adds_up_and_its_segments_are_the_sums():
    recipe = Recipe(optimizer="adamw-foreach")
    step = predict(
        known_model("SmolLM2-135M")[1], batch_size=4, seq_len=256, recipe=recipe, target="cuda"
    )
    error = out_of_memory(step, "4 GiB")
    asked, total, free, process, allocated, unallocated = read(str(error))
    near = 0.011 * GiB
    assert total == 4 * GiB and abs(total - free - process) < near
    assert abs(process - CONTEXT - allocated - unallocated) < near
    assert asked == error.asked == 192 * MiB  # logits: 4 x 256 x 49,152 float32 numbers
    assert error.tensor == 4 * 256 * 49_152 * 4
    assert (
        sum(s["total_size"] for s in error.segments)
        == error.reserved
        == 4 * GiB - CONTEXT - error.free
    )
    blocks = [block for s in error.segments for block in s["blocks"]]
    sums = {
        state: sum(b["size"] for b in blocks if b["state"] == state)
        for state in ("active_allocated", "inactive")
    }
    assert sums == {"active_allocated": error.allocated, "inactive": error.unallocated}
    for segment in error.segments:
        ends = [block["address"] + block["size"] for block in segment["blocks"]]
        assert [segment["address"], *ends[:-1]] == [block["address"] for block in segment["blocks"]]
        assert ends[-1] == segment["address"] + segment["total_size"]
    # It fits where the replay says, and the context and the workspace with it.
    needs = step.replay_allocator() + CONTEXT
    assert out_of_memory(step, needs, cublas=0) is None
    assert out_of_memory(step, step.peak.total + CONTEXT - 1, cublas=0) is not None
    # Both halves of the workspace, 8.125 MiB each, lie in one segment of 20 MiB.
    assert out_of_memory(step, needs + 20 * MiB) is None and workspace() == 16.25 * MiB


@pytest.mark.parametrize(
    "nbytes, text",
    [(512, "512 bytes"), (MiB, "1024.00 KiB"), (20 * MiB, "20.00 MiB"), (GiB + 1, "1.00 GiB")],
)
def test_sizes_are_written_as_pytorch_writes_them(nbytes, text):
    assert pytorch_size(nbytes) == text


def test_refusals():
    with pytest.raises(ValueError, match="for the CPU"):
        out_of_memory(SimpleNamespace(target="cpu"), "4 GiB")
    with pytest.raises(ValueError, match="no room for the driver's context"):
        out_of_memory(asking(1), "400 MiB")
