"""A run in the format of PyTorch's memory snapshots, for the viewer at pytorch.org/memory_viz.

The viewer draws the history of allocations and frees, and the blocks that are live at the end. A
snapshot of PyTorch has the whole stack of each; here it is the module, the operation and the
script's line. It has all storages that are alive, and those that were freed last (``MAX_PAST``).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ..names import CATEGORIES
from .meter import name_of
from .recording import Entry, Recording
from .source_lines import source_line

STEP_OF_ADDRESSES = 1 << 9  # PyTorch's allocator gives multiples of 512 bytes


def write_snapshot(file: Path, recording: Recording, names: dict[int, str]) -> None:
    """``names``: of modules, by their addresses."""
    events = []  # (sample, is an allocation, storage): at a sample, frees come first
    segments, end = [], 0
    for entry in (*recording.past, *recording.entries()):
        first, stop = recording.lifetime(entry)
        if first >= stop:
            continue  # in no sample
        storage = {"addr": end} | _described(entry, names)
        end += -(-entry.nbytes // STEP_OF_ADDRESSES) * STEP_OF_ADDRESSES
        events.append((first, True, storage))
        if entry.stop is None:
            segments.append(_segment(storage))
        else:
            events.append((stop, False, storage))
    trace = []
    for _, is_new, storage in sorted(events, key=lambda event: event[:2]):
        trace.append({"action": "alloc" if is_new else "free_completed"} | storage)
    with file.open("wb") as out:
        pickle.dump({"segments": segments, "device_traces": [trace]}, out)


def _described(entry: Entry, names: dict[int, str]) -> dict[str, Any]:
    operation = str(entry.op).removesuffix(".default") or "(no operation)"
    frames = [{"name": operation, "filename": name_of(entry.module, names), "line": 0}]
    line = source_line(entry.line)
    if line is not None:
        frames.append({"name": line.function, "filename": line.file, "line": line.line})
    category = CATEGORIES[entry.category]
    return {"size": entry.nbytes, "stream": 0, "frames": frames, "category": category}


def _segment(storage: dict[str, Any]) -> dict[str, Any]:
    """A segment with one block, since an allocator's own segments are not known here."""
    address, size = storage["addr"], storage["size"]
    block = {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": storage["frames"],
    }
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large",
        "blocks": [block],
    }
