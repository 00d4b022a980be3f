"""The table of a tracker's storages."""

import re

import torch

from gradmem_lib import MemoryTracker


def tracker_of(rows: int) -> MemoryTracker:
    model = torch.nn.Linear(8, 4)
    kept = []
    with MemoryTracker(model) as tracker:
        for row in range(rows):
            kept.append(torch.ones(row + 1, 8))
    return tracker


def test_a_terminal_shows_a_line_for_each_storage_with_its_bytes_and_its_line():
    holders = tracker_of(5).largest_at_peak(3)
    head, *lines = repr(holders).splitlines()
    assert head.split()[:4] == ["bytes", "category", "tensor", "module"]
    assert [line.split()[0] for line in lines] == ["160", "128", "128"]
    assert "float32 5 × 8" in lines[0] and "test_holders.py:" in lines[0]
    assert max(map(len, lines)) < 160


def test_a_long_list_says_how_many_bytes_are_not_shown():
    holders = tracker_of(30).holders()
    *lines, rest = repr(holders).splitlines()
    shown = sum(int(line.split()[0].replace(",", "")) for line in lines[1:])
    more, nbytes = re.fullmatch(r"(\d+) more have ([\d,]+) bytes together", rest).groups()
    assert int(more) == len(holders) - 20
    assert shown + int(nbytes.replace(",", "")) == sum(holder.nbytes for holder in holders)
    assert repr(tracker_of(1).largest_at_peak(0)) == "no storages"
