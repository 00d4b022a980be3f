"""Writes what a benchmark found to ``benchmarks/results/``, with what it was found on."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def where() -> dict:
    """Device, versions and date of this run."""
    if torch.cuda.is_available():
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


def record(name: str, results: dict, path: Path | None = None) -> Path:
    """Write ``results`` and ``where()`` to ``path``, or ``benchmarks/results/<name>.json``; the
    path written.
    """
    RESULTS.mkdir(exist_ok=True)
    path = path or RESULTS / f"{name}.json"
    path.write_text(json.dumps({"where": where(), **results}, indent=2) + "\n", encoding="utf-8")
    return path
