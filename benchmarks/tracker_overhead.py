"""What tracking costs: one training step untracked, tracked, tracked with the live view, and under
PyTorch's MemTracker.

    python benchmarks/tracker_overhead.py [--rounds 9] [--models tiny_llama smollm2 small_layers]

Only ratios are kept. The variants take turns, so that whatever else the machine does falls on all
of them alike; each figure is the median over the rounds of the ratio within a round. The models run
in a Jupyter kernel, because that is where the live view sends its frames.

``small_layers`` is the worst case, 300 small layers whose operations have almost nothing to do:
what a step takes is what an operation costs to see. They are measured 16 and 64 wide, with 4 and 32
rows. It has results of its own (``tracker_small_layers``), with the least that anything of the
tracker's kind costs: a dispatch mode that does nothing, and one that only holds a weak reference to
each storage.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import weakref
from collections import deque
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
SIZES = {"tiny_llama": (2, 128), "smollm2": (1, 128)}  # batch, tokens
SMALL = "small_layers"
SMALL_SIZES = ((16, 4), (64, 32))  # width, rows


def measure(name: str, rounds: int) -> dict[str, float]:
    """Median ratios for one model; to be called inside a kernel."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from gradmem_lib import MemoryTracker
    from gradmem_lib.course.material import models

    model = models.tiny_llama() if name == "tiny_llama" else models.smollm2()[0]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, 8192, SIZES[name])
    repeat = 10 if name == "tiny_llama" else 1

    def run(context) -> float:
        # else a variant pays for the garbage of the one before it: a full collection takes 0.1 s
        # here
        gc.collect()
        with context:
            start = time.perf_counter()
            for _ in range(repeat):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return time.perf_counter() - start

    def mem_tracker():
        oracle = MemTracker()
        oracle.track_external(model, optimizer, ids)
        return oracle

    def with_mem_tracker() -> float:
        nonlocal repeat
        before, repeat = repeat, 1  # it refuses a second forward
        seconds = statistics.median(run(mem_tracker()) for _ in range(3)) * before
        repeat = before
        return seconds

    variants = {
        "untracked": lambda: run(contextlib.nullcontext()),
        "tracked": lambda: run(MemoryTracker(model, optimizer, live=False)),
        "live": lambda: run(MemoryTracker(model, optimizer)),
        "memtracker": with_mem_tracker,
    }
    for variant in variants.values():
        variant()
    times = [{key: variant() for key, variant in variants.items()} for _ in range(rounds)]
    with MemoryTracker(model, optimizer, live=False) as tracker:
        run(contextlib.nullcontext())
    return {
        "tracked / untracked": _median(times, "tracked", "untracked"),
        "live / tracked": _median(times, "live", "tracked"),
        "MemTracker / untracked": _median(times, "memtracker", "untracked"),
        "operations a step": tracker.timeline.events[-1] // repeat,
    }


def measure_small_layers(rounds: int, width: int, rows: int) -> dict[str, float]:
    """Median ratios of this thread's CPU time, for a step inside the block; the block's beginning
    and end are not in it.
    """
    from gradmem_lib import MemoryTracker
    from gradmem_lib.compat.dispatch_modes import TorchDispatchMode, WithoutDynamoGuard
    from gradmem_lib.compat.tensors import storage_key

    class Nothing(WithoutDynamoGuard, TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Held(Nothing):
        def __enter__(self):
            self.live, self.freed = {}, deque()
            return super().__enter__()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            while self.freed:
                del self.live[self.freed.popleft()]
            if isinstance(out, torch.Tensor):
                storage = out.untyped_storage()
                key = storage_key(storage)
                if key not in self.live:
                    self.live[key] = weakref.ref(storage, lambda _: self.freed.append(key))
            return out

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(300)))
    optimizer, batch = (
        torch.optim.AdamW(model.parameters(), foreach=False),
        torch.randn(rows, width),
    )

    def run(context) -> float:
        gc.collect()
        with context:
            start = time.thread_time()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return time.thread_time() - start

    variants = {
        "untracked": contextlib.nullcontext,
        "nothing": Nothing,
        "held": Held,
        "tracked": lambda: MemoryTracker(model, optimizer, live=False),
    }
    for variant in variants.values():
        run(variant())
    times = [{key: run(variant()) for key, variant in variants.items()} for _ in range(rounds)]
    return {
        "a mode that does nothing / untracked": _median(times, "nothing", "untracked"),
        "a weak reference to each storage / untracked": _median(times, "held", "untracked"),
        "tracked / untracked": _median(times, "tracked", "untracked"),
    }


def _median(times: list[dict[str, float]], over: str, under: str) -> float:
    return round(statistics.median(t[over] / t[under] for t in times), 3)


def in_a_kernel(code: str) -> str:
    """What ``code`` prints last when a fresh Jupyter kernel runs it."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=None, kernel_name="python3").execute(cwd=str(FOLDER))
    printed = "".join(
        o.text
        for o in notebook.cells[0].outputs
        if o.output_type == "stream" and o.name == "stdout"
    )
    return printed.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=[*SIZES, SMALL], default=[*SIZES, SMALL])
    arguments = parser.parse_args()
    from record import record

    results = {}
    for name in (one for one in arguments.models if one != SMALL):
        code = f"import sys, json; sys.path[:0] = {[str(FOLDER), str(FOLDER.parent)]!r}\n"
        code += (
            f"from tracker_overhead import measure; print(json.dumps(measure({name!r}, "
            f"{arguments.rounds})))"
        )
        results[name] = json.loads(in_a_kernel(code))
        show(name, results[name])
    if results:
        print(
            "written to", record("tracker_overhead", {"ratios": results}).relative_to(FOLDER.parent)
        )
    if SMALL in arguments.models:
        ratios = {}
        for width, rows in SMALL_SIZES:
            ratios[f"{width} wide, {rows} rows"] = measure_small_layers(
                3 * arguments.rounds, width, rows
            )
            show(f"{SMALL} {width}", ratios[f"{width} wide, {rows} rows"])
        print(
            "written to",
            record("tracker_small_layers", {"ratios": ratios}).relative_to(FOLDER.parent),
        )


def show(name: str, ratios: dict[str, float]) -> None:
    for key, ratio in ratios.items():
        print(f"{name:<12} {key:<44} {ratio}")


if __name__ == "__main__":
    sys.exit(main())
