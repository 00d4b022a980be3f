"""Recorded durations are of files that exist: the longest run first."""

import json

from support.paths import ROOT

DURATIONS = json.loads((ROOT / "tests" / "durations.json").read_text(encoding="utf-8"))


def test_every_recorded_file_exists():
    assert not [file for file in DURATIONS if not (ROOT / file).exists()]
