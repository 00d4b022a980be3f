"""How a run of tests goes: long files first, and solutions with the settings that their stored outputs were made with."""

from __future__ import annotations

import os
import tempfile

import pytest
from build_notebooks import FIXED

SCRATCH = tempfile.TemporaryDirectory(prefix="gradmem-progress-")  # until this process ends

# Seconds on one core of the files that take ten or more, as last recorded. The rest are quick.
SECONDS = {}


def seconds(path) -> int:
    return SECONDS.get(path.name, 0)


def pytest_addoption(parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files that take ten seconds or more")


def pytest_ignore_collect(collection_path, config):
    return True if config.getoption("--quick") and seconds(collection_path) else None


def pytest_collection_modifyitems(items) -> None:
    # Two workers end together if what takes minutes is not what comes last. The order within a file stays.
    items.sort(key=lambda item: -seconds(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A notebook's kernel starts in the set-up of its first cell, and inherits what the environment says then."""
    if item.path.suffix != ".ipynb":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FIXED.items() if item.config.getoption("nbval") else ():
            patch.setenv(name, value)
        if "GRADMEM_PROGRESS" not in os.environ:
            patch.setenv("GRADMEM_PROGRESS", f"{SCRATCH.name}/{item.path.stem}.json")
        return (yield)
