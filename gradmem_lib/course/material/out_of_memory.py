"""A card that is too small: replays the allocator's rules to give PyTorch's error, and what the
allocator holds then.
"""

from dataclasses import dataclass

from ...measure.error_text import cuda_message
from ...prediction.allocator import CONTEXT, SMALL_SEGMENT, Allocator, OutOfCapacity, workspace
from ...prediction.predict import Prediction
from ...units import parse_bytes


@dataclass(frozen=True)
class OutOfMemory:
    """The failure of a predicted step. All figures are bytes.

    ``asked``: the segment that the driver refused, for a tensor of ``tensor`` bytes. ``total``: the
    card. ``context``: what the process holds besides PyTorch's allocator. ``allocated``: blocks
    with a tensor in them. ``reserved``: all segments. ``segments``: as
    ``torch.cuda.memory_snapshot`` lists them.
    """

    asked: int
    tensor: int
    total: int
    context: int
    allocated: int
    reserved: int
    segments: list[dict]

    @property
    def process(self) -> int:
        """What ``nvidia-smi`` shows for the process."""
        return self.context + self.reserved

    @property
    def free(self) -> int:
        return self.total - self.process

    @property
    def unallocated(self) -> int:
        """Reserved bytes without a tensor: free blocks in segments that are in use."""
        return self.reserved - self.allocated

    def __str__(self) -> str:
        """PyTorch's own words (2.10 to 2.13)."""
        return cuda_message(
            asked=self.asked,
            total=self.total,
            free=self.free,
            process=self.process,
            allocated=self.allocated,
            idle=self.unallocated,
        )


class _Inspected(Allocator):
    def snapshot(self) -> list[dict]:
        """The segments with their blocks, by address, in the format of
        ``torch.cuda.memory_snapshot``.
        """
        found = []
        for address, total in self._segments.items():
            blocks: list[dict] = []
            at = address
            while at < address + total:
                used, size = (
                    at in self._used,
                    self._used[at][0] if at in self._used else self._begins[at],
                )
                state = "active_allocated" if used else "inactive"
                blocks.append({"address": at, "size": size, "state": state})
                at += size
            held = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
            sizes = {"total_size": total, "allocated_size": held, "active_size": held}
            kind = {
                "segment_type": "small" if total == SMALL_SEGMENT else "large",
                "blocks": blocks,
            }
            found.append({"address": address} | sizes | kind)
        return found


def out_of_memory(
    prediction: Prediction,
    capacity: int | str,
    *,
    context: int = CONTEXT,
    cublas: int | None = None,
) -> OutOfMemory | None:
    """The error with which the predicted step ends on a card of ``capacity`` bytes, or ``None`` if
    it fits.

    The step is not the first one, and runs alone on the card. ``context`` (the driver's bytes) and
    ``cublas`` (its workspaces in PyTorch's memory) are estimated unless they are given. It takes
    seconds, like ``Prediction.replay_allocator``.

    Raises ``ValueError`` for a prediction for the CPU, and if ``capacity`` is too small for the
    context.
    """
    total = parse_bytes(capacity)
    if prediction.target != "cuda":
        raise ValueError(
            "this prediction is for the CPU, which does not raise this error: predict(..., "
            "target='cuda')"
        )
    if total <= context:
        raise ValueError(
            f"a card of {total:,} bytes has no room for the driver's context of {context:,} bytes"
        )
    held = _Inspected(total - context)
    addresses: list[int] = []
    workspaces = workspace() if cublas is None else cublas
    size = 0
    try:
        for size in [workspaces // 2] * 2 if workspaces else []:
            held.allocate(size)
        for request in prediction.requests():
            if request < 0:
                held.free(addresses[-1 - request])
            else:
                size = request
                addresses.append(held.allocate(size))
    except OutOfCapacity as refused:
        segments = held.snapshot()
        used = sum(segment["allocated_size"] for segment in segments)
        return OutOfMemory(refused.requested, size, total, context, used, held.reserved, segments)
    return None
