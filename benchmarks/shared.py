"""What the benchmarks share: their command line, clocks, variants that take turns, and the record
in ``benchmarks/results/`` of what was found, with what it was found on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# A plain checkout: the library is not installed.
sys.path.insert(0, str(ROOT))

from gradmem_lib.training.recipe import Recipe  # noqa: E402

ON_CARD = torch.cuda.is_available()
CLOCK = "wall" if ON_CARD else "CPU time of one thread"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Its help is a benchmark's docstring as it stands there."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def settings(recipe: Recipe) -> dict:
    """What differs from ``Recipe()``."""
    plain = asdict(Recipe())
    return {name: value for name, value in asdict(recipe).items() if value != plain[name]}


def words(recipe: Recipe, *without: str) -> list[str]:
    """The same as ``name=value``, but for those in ``without``."""
    return [f"{name}={value}" for name, value in settings(recipe).items() if name not in without]


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside it, PyTorch computes in one thread, whose time is then that of the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def now() -> float:
    """Seconds of ``CLOCK``, on a card once it has done what it was given."""
    if ON_CARD:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds(run: Callable[[], object]) -> float:
    began = now()
    run()
    return now() - began


def in_turns(variants: dict[str, Callable[[], float]], rounds: int) -> list[dict[str, float]]:
    """The seconds that each variant returns, round by round: whatever else the machine does falls
    on all of them alike.
    """
    return [{name: run() for name, run in variants.items()} for _ in range(rounds)]


def ratio(rounds: list[dict[str, float]], over: str, under: str, digits: int = 2) -> float:
    """The median over the rounds of one variant's time to another's in the same round."""
    return round(statistics.median(found[over] / found[under] for found in rounds), digits)


def where() -> dict:
    """Device, versions and date of this run."""
    if ON_CARD:
        device = torch.cuda.get_device_name()
    else:
        device = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }


def record(name: str, results: dict, path: Path | None = None) -> None:
    """Write ``where()`` and ``results`` to ``path``, or to ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = path or RESULTS / f"{name}.json"
    path.write_text(json.dumps({"where": where(), **results}, indent=2) + "\n", encoding="utf-8")
