"""What tracking costs: one training step untracked, tracked, tracked with the live view, and under
PyTorch's MemTracker.

    python benchmarks/tracker_overhead.py [--rounds 9] [--models tiny_llama smollm2]

Only ratios are kept. The variants take turns, so that whatever else the machine does falls on all
of them alike; each figure is the median over the rounds of the ratio within a round. The models run
in a Jupyter kernel, because that is where the live view sends its frames.
"""

from __future__ import annotations

import gc
import json
import time
from contextlib import nullcontext

import torch
from shared import ROOT, in_turns, parser, ratio, record

SIZES = {"tiny_llama": (2, 128), "smollm2": (1, 128)}  # batch, tokens


def measure(name: str, rounds: int) -> dict[str, float]:
    """Median ratios for one model; to be called inside a kernel."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from gradmem_lib import MemoryTracker
    from gradmem_lib.course.material import models

    model = models.tiny_llama() if name == "tiny_llama" else models.smollm2()[0]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, 8192, SIZES[name])
    repeat = 10 if name == "tiny_llama" else 1

    def run(context, steps: int = repeat) -> float:
        """Seconds of a step."""
        # else a variant pays for the garbage of the one before it: a full collection takes 0.1 s
        # here
        gc.collect()
        with context:
            start = time.perf_counter()
            for _ in range(steps):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return (time.perf_counter() - start) / steps

    def with_mem_tracker() -> float:
        seconds = []
        for _ in range(3):
            oracle = MemTracker()
            oracle.track_external(model, optimizer, ids)
            seconds.append(run(oracle, steps=1))  # it refuses a second forward
        return sorted(seconds)[1]

    variants = {
        "untracked": lambda: run(nullcontext()),
        "tracked": lambda: run(MemoryTracker(model, optimizer, live=False)),
        "live": lambda: run(MemoryTracker(model, optimizer)),
        "memtracker": with_mem_tracker,
    }
    times = in_turns(variants, rounds + 1)[1:]  # the first one only warms up
    with MemoryTracker(model, optimizer, live=False) as tracker:
        run(nullcontext())
    return {
        "tracked / untracked": ratio(times, "tracked", "untracked", 3),
        "live / tracked": ratio(times, "live", "tracked", 3),
        "MemTracker / untracked": ratio(times, "memtracker", "untracked", 3),
        "operations a step": tracker.timeline.events[-1] // repeat,
    }


def in_a_kernel(code: str) -> str:
    """What ``code`` prints last when a fresh Jupyter kernel runs it."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    client = NotebookClient(notebook, timeout=None, kernel_name="python3")
    client.execute(cwd=str(ROOT / "benchmarks"))
    printed = ""
    for output in notebook.cells[0].outputs:
        if output.get("name") == "stdout":
            printed += output.text
    return printed.strip().splitlines()[-1]


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=9)
    command.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    asked = command.parse_args(arguments)
    results = {}
    for name in asked.models:
        code = "import json; from tracker_overhead import measure\n"
        code += f"print(json.dumps(measure({name!r}, {asked.rounds})))"
        results[name] = json.loads(in_a_kernel(code))
        for key, figure in results[name].items():
            print(f"{name:<12} {key:<44} {figure}")
    record("tracker_overhead", {"ratios": results})


if __name__ == "__main__":
    main()
