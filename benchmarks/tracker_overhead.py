"""What tracking costs: one training step of SmolLM2 untracked, tracked, and under PyTorch's
MemTracker.

    python benchmarks/tracker_overhead.py [--rounds 9]

Only ratios are kept. The variants take turns, so that whatever else the machine does falls on all
of them alike; each figure is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext

import torch
from shared import in_turns, parser, ratio, record


def measure(rounds: int) -> dict[str, float]:
    """Median ratios."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from gradmem_lib import MemoryTracker
    from gradmem_lib.course.material import models

    model, _ = models.smollm2()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, 8192, (1, 128))

    def run(context) -> float:
        """Seconds of a step."""
        # else a variant pays for the garbage of the one before it: a full collection takes 0.1 s
        # here
        gc.collect()
        with context:
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return time.perf_counter() - start

    def with_mem_tracker() -> float:
        seconds = []
        for _ in range(3):
            oracle = MemTracker()
            oracle.track_external(model, optimizer, ids)
            seconds.append(run(oracle))  # it refuses a second forward
        return sorted(seconds)[1]

    variants = {
        "untracked": lambda: run(nullcontext()),
        "tracked": lambda: run(MemoryTracker(model, optimizer, live=False)),
        "memtracker": with_mem_tracker,
    }
    times = in_turns(variants, rounds + 1)[1:]  # the first one only warms up
    with MemoryTracker(model, optimizer, live=False) as tracker:
        run(nullcontext())
    return {
        "tracked / untracked": ratio(times, "tracked", "untracked", 3),
        "MemTracker / untracked": ratio(times, "memtracker", "untracked", 3),
        "operations a step": tracker.timeline.events[-1],
    }


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=9)
    asked = command.parse_args(arguments)
    found = measure(asked.rounds)
    for key, figure in found.items():
        print(f"{key:<44} {figure}")
    record("tracker_overhead", {"ratios": {"smollm2": found}})


if __name__ == "__main__":
    main()
