"""A run in the format of PyTorch's memory snapshots, for the viewer at pytorch.org/memory_viz.

The viewer draws the history of allocations and frees, and the blocks that are live at the end. A
snapshot of PyTorch has the whole stack of each; here it is the module, the operation and the
script's line.
"""

from __future__ import annotations

import pickle
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from ..measure.recording import Entry
from ..measure.source_lines import source_line
from ..names import CATEGORIES

KEPT = 200_000  # allocations and frees, the latest


class Event(NamedTuple):
    action: str
    entry: Entry
    address: int


class History:
    """The latest allocations and frees of a run."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=KEPT)
        self._addresses: dict[int, int] = {}  # of what is live, by its entry

    def on_alloc(self, entry: Entry) -> None:
        storage = entry()
        # a storage that is being resized has its new memory by now
        address = entry.key if storage is None else storage.data_ptr()
        self._addresses[id(entry)] = address
        self.events.append(Event("alloc", entry, address))

    def on_free(self, entry: Entry) -> None:
        address = self._addresses.pop(id(entry), None)
        if address is not None:
            self.events.append(Event("free_completed", entry, address))

    def write(self, file: Path, live: list[Entry]) -> None:
        """Write the history, and the blocks of what is ``live``, as PyTorch pickles a snapshot."""
        trace = []
        for event in self.events:
            trace.append({"action": event.action, "addr": event.address} | _described(event.entry))
        segments = []
        for entry in live:
            address = self._addresses.get(id(entry))
            if address is not None:
                segments.append(_segment(entry, address))
        snapshot = {"segments": segments, "device_traces": [trace]}
        with file.open("wb") as out:
            pickle.dump(snapshot, out)


def _described(entry: Entry) -> dict[str, Any]:
    operation = str(entry.op).removesuffix(".default") or "(no operation)"
    owner = entry.module if isinstance(entry.module, str) else entry.module[1].__name__
    frames = [{"name": operation, "filename": owner, "line": 0}]
    line = source_line(entry.line)
    if line is not None:
        frames.append({"name": line.function, "filename": line.file, "line": line.line})
    category = CATEGORIES[entry.category]
    return {"size": entry.nbytes, "stream": 0, "frames": frames, "category": category}


def _segment(entry: Entry, address: int) -> dict[str, Any]:
    """A segment with one block, since an allocator's own segments are not known here."""
    described = _described(entry)
    size = entry.nbytes
    block = {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": described["frames"],
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
