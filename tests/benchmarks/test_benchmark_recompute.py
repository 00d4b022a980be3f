"""The benchmark of recomputing and moving: its figures on a chain by hand, and its record."""

from __future__ import annotations

import json
import sys

import pytest
from support.paths import ROOT

RECORD = ROOT / "benchmarks" / "results" / "recompute_or_move.json"


@pytest.fixture
def benchmark(load, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load("recompute_or_move")


def test_a_chain_by_hand(benchmark):
    """Eight layers that keep five boundaries of 32 x 16 numbers each, and the sum at the end; the
    input was there before.
    """
    setting, boundary = benchmark.tiny("chain"), 32 * 16 * 4
    ways = benchmark.ways(setting)
    found = {name: benchmark.measured(setting, way) for name, way in ways.items()}
    kept = {name: one["kept"] for name, one in found.items()}
    loss = 4
    assert kept["none"] == 8 * 5 * boundary - boundary + loss
    assert kept["per layer"] == 8 * boundary - boundary + loss
    assert kept["none"] - kept["first 4"] == 4 * 4 * boundary
    assert kept["all moved"] == kept["per layer, boundaries moved"] == loss
    assert found["per layer, boundaries moved"]["moved"] == 8 * boundary
    assert {one["moved"] for name, one in found.items() if "moved" not in name} == {0}
    operations = {name: one["operations"] for name, one in found.items()}
    again = operations["per layer"] - operations["none"]
    assert operations["all moved"] == operations["elementwise"] == operations["none"]
    assert again == 2 * (operations["first 4"] - operations["none"]) > 0


def test_what_was_recorded_is_what_it_measures_today(benchmark):
    """Bytes and operations of the chain, which no machine changes."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert {"device", "torch", "transformers", "date"} <= set(recorded["where"])
    assert list(recorded["settings"]) == list(benchmark.NAMES)
    chain = recorded["settings"]["chain"]
    setting = benchmark.SETTINGS["chain"]()
    ways = benchmark.ways(setting)
    assert list(chain["ways"]) == list(ways)
    assert benchmark.measured(setting, ways["none"]) == chain["none"]
    found, row = benchmark.measured(setting, ways["first 32"]), chain["ways"]["first 32"]
    for what in ("kept", "operations"):
        assert row[f"{what} / none"] == round(found[what] / chain["none"][what], 3)
