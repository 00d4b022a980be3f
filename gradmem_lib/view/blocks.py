"""The largest storages of a run, packed for a picture in which the pointer finds each one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable

import numpy as np

from ..measure.holders import in_words
from ..measure.timeline import BY, OP, PHASE, Timeline
from ..names import CATEGORIES

MOST_SAMPLES = 4096  # more than a screen is wide, so that there is something to zoom into


def encode_blocks(timeline: Timeline | None) -> bytes:
    """A gzip of JSON, or nothing if there are no blocks. ``withBlocks`` in run.js reads it.

    ``op`` and ``start`` are differences. A series over the samples (phase, bytes by category) is a
    pair: samples since the last change, and by how much it changes there. Each word of a block is a
    number of ``strings``.
    """
    if timeline is None or not timeline.blocks:
        return b""
    shown = timeline.decimate(MOST_SAMPLES)
    blocks = shown.blocks
    strings: dict[str, int] = {}
    words: dict[str, list[int]] = {}
    for block in blocks:
        said = in_words(block.holder) | {"op": block.holder.op.removeprefix("aten.")}
        for name, word in said.items():
            words.setdefault(name, []).append(strings.setdefault(word, len(strings)))
    growing = None
    if shown.growing is not None:
        growing = list(map(_changes, shown.growing.T))
    packed = {
        "n": len(shown),
        "op": _differences(shown.rows[:, OP]),
        "phase": _changes(shown.rows[:, PHASE]),
        "parts": list(map(_changes, shown.rows[:, BY].T)),
        "growing": growing,
        "start": _differences([block.start for block in blocks]),
        "life": [block.stop - block.start for block in blocks],
        "bytes": [block.holder.nbytes for block in blocks],
        "category": [CATEGORIES.index(block.holder.category) for block in blocks],
        "grows": [int(block.grows) for block in blocks],
        "words": words,
        "strings": list(strings),
    }
    text = json.dumps(packed, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0)


def _differences(values: Iterable[int]) -> list[int]:
    return np.diff(np.asarray(values), prepend=0).tolist()


def _changes(values: np.ndarray) -> list[list[int]]:
    change = np.diff(values, prepend=0)
    at = change.nonzero()[0]
    return [_differences(at), change[at].tolist()]
