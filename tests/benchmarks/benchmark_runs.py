"""A benchmark run from a plain checkout, for its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

FOLDER = ROOT / "benchmarks"


# Whatever a plain checkout on a machine with torch and transformers may lack.
BARE = """
import runpy, sys
class Lacking:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in {absent}
        return None if absent else self.finder.find_spec(name, path, target)
installed = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.meta_path = [Lacking(finder) for finder in installed]
sys.argv = {arguments}
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""
ABSENT = (
    "anywidget",
    "ipywidgets",
    "traitlets",
    "IPython",
    "ipykernel",
    "matplotlib",
    "platformdirs",
    "gguf",
    "psutil",
    "accelerate",
    "peft",
    "nbformat",
    "jupytext",
    "pytest",
    "hypothesis",
)


def from_a_plain_checkout(folder: Path, script: str, *arguments: str) -> str:
    """What ``script`` prints there; it must end well."""
    code = BARE.format(
        absent=ABSENT,
        folder=str(FOLDER),
        script=str(FOLDER / script),
        arguments=[script, *arguments],
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
