"""A room on one machine: many kernels run lesson 00 to its end at once. How much memory and time
does that take?

    python benchmarks/classroom.py [--kernels 30]

Each kernel is a learner's: a process of its own for the notebook, a progress file of its own, one
thread, and the cells one after another, with moving plots. All begin together, once all have
started. Memory is Linux's proportional set size, which divides a page that processes share among
them, so that the sum over all kernels is what they hold together. Where the machine had other work
to do (load average), the seconds of processor say more than the seconds of the clock.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
from shared import ROOT, parser, record

LESSON = ROOT / "lessons" / "00_start_here.ipynb"
# seconds between two looks at all processes: one look at 30 of them takes a tenth of a second
LOOK = 2.0


def learner(
    number: int, folder: str, ready: threading.Barrier, cells: list[str]
) -> dict[str, float]:
    """One kernel from its start to the end of the lesson: seconds from "go", its resident set in
    bytes, its seconds of processor.
    """
    from jupyter_client.manager import start_new_kernel

    own = {
        "GRADMEM_PROGRESS": f"{folder}/{number}.json",
        "OMP_NUM_THREADS": "1",
        "GRADMEM_LIVE": "1",
    }
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    manager, client = start_new_kernel(
        kernel_name="python3", startup_timeout=600, env=os.environ | own | {"PYTHONPATH": paths}
    )
    try:
        ready.wait()
        start = time.monotonic()
        for source in cells:
            reply = client.execute_interactive(
                source, timeout=None, output_hook=lambda message: None
            )
            if reply["content"]["status"] != "ok":
                raise RuntimeError(f"kernel {number}: {reply['content']['evalue']} in\n{source}")
        kernel, seconds = psutil.Process(manager.provisioner.pid), time.monotonic() - start
        return {
            "seconds": seconds,
            "resident": kernel.memory_info().rss,
            "cpu": sum(kernel.cpu_times()[:2]),
        }
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def held() -> tuple[int, int]:
    """What all processes below this one hold together, as proportional set size and as resident
    sets, in bytes.
    """
    total = resident = 0
    for process in psutil.Process().children(recursive=True):
        try:
            found = process.memory_full_info()
        except psutil.Error:  # it has ended meanwhile
            continue
        total, resident = total + getattr(found, "pss", found.rss), resident + found.rss
    return total, resident


def room(kernels: int, cells: list[str]) -> dict:
    """Run ``cells`` in so many kernels at once, and look at what they hold while they do."""
    seen, ready, load = [(0, 0)], threading.Barrier(kernels), psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(kernels) as pool:
        start = time.monotonic()
        running = [pool.submit(learner, number, folder, ready, cells) for number in range(kernels)]
        for future in running:
            future.add_done_callback(lambda done: ready.abort() if done.exception() else None)
        while not all(future.done() for future in running):
            seen.append(held())
            time.sleep(LOOK)
        done, together = [future.result() for future in running], time.monotonic() - start
    pss, rss = (max(column) for column in zip(*seen, strict=True))
    seconds = sorted(one["seconds"] for one in done)
    return {
        "kernels": kernels,
        "load average before": round(load, 1),
        "held together, most": pss,
        "a kernel": pss // kernels,
        "resident sets, sum, most": rss,
        "a resident set, most": max(one["resident"] for one in done),
        "seconds of the lesson": {
            "first": round(seconds[0], 1),
            "median": round(statistics.median(seconds), 1),
            "last": round(seconds[-1], 1),
        },
        "seconds of processor, a kernel": round(statistics.median(one["cpu"] for one in done), 1),
        "seconds with the kernels' start": round(together, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    import nbformat

    command = parser(__doc__)
    command.add_argument("--kernels", type=int, default=30)
    command.add_argument(
        "--dry-run", action="store_true", help="one cell instead of the lesson; nothing is written"
    )
    options = command.parse_args(arguments)

    notebook = nbformat.read(LESSON, as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    if options.dry_run:
        cells = ["import time; time.sleep(3)"]
    rooms = [room(count, cells) for count in sorted({1, options.kernels})]
    for found in rooms:
        times = found["seconds of the lesson"]
        print(
            f"{found['kernels']:>3} kernels: {found['held together, most'] / 2**30:.2f} GiB held "
            f"together, lesson 00 in {times['first']:.0f} to {times['last']:.0f} s"
        )
    if not options.dry_run:
        memory = psutil.virtual_memory().total
        record("classroom", {"lesson": LESSON.stem, "memory": memory, "rooms": rooms})


if __name__ == "__main__":
    main()
