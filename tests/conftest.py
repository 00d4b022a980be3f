"""For every test: nobody's real progress file is touched, and no figure asks for a screen."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from unittest.mock import Mock

import cloudpickle
import pytest
from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
SENT_TO_RANKS = (
    "test_predict_ranks",
    "test_ranks",
    "test_sharding",
    "test_tracker_ranks",
)


def pytest_configure() -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_collection_finish(session) -> None:
    """Ranks are sent what a test file defines for them: importing it, and pytest, takes each a
    second.
    """
    for module in {getattr(item, "module", None) for item in session.items}:
        if module is not None and module.__name__.rpartition(".")[2] in SENT_TO_RANKS:
            cloudpickle.register_pickle_by_value(module)


@pytest.fixture(autouse=True)
def own_progress_file(tmp_path, monkeypatch):
    """A progress file of its own for each test."""
    monkeypatch.setenv("GRADMEM_PROGRESS", str(tmp_path / "progress.json"))


OF_THE_TEST_RUN = ("_pytest.", "pluggy.", "xdist.", "execnet.")


@pytest.fixture(autouse=True)
def few_names(request, monkeypatch):
    """A walk from the names of a script sees those of one test file, as if it ran alone: all files
    of a test run together have more than a walk may look at. Tests of what it says do not depend on
    how long it takes.
    """
    from gradmem_lib.measure import meter, paths

    is_of_a_script = paths._is_of_a_script
    seen = (request.module.__name__, "support", "script")
    monkeypatch.setattr(
        paths,
        "_is_of_a_script",
        lambda space: is_of_a_script(space) and str(space["__name__"]).startswith(seen),
    )
    monkeypatch.setattr(paths, "NOT_INTO", (*paths.NOT_INTO, *OF_THE_TEST_RUN))
    if request.path.parent.name == "measure":
        monkeypatch.setattr(meter.Meter, "seconds_for_walks", 999)


@pytest.fixture
def spy(monkeypatch):
    """``spy(module, name)``: the function works as before, and a mock knows its calls."""

    def on(module, name: str) -> Mock:
        known = Mock(wraps=getattr(module, name))
        monkeypatch.setattr(module, name, known)
        return known

    return on


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal has it, also where the test run was started in the background with
    interrupts ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium for the tests of one file."""
    from notebooks.browser import chromium

    with chromium() as found:
        yield found


@pytest.fixture
def load(monkeypatch):
    """A benchmark as a module, by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def loaded(name: str):
        spec = importlib.util.spec_from_file_location(
            f"benchmark_{name}", BENCHMARKS / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture
def load_writing_elsewhere(load, monkeypatch, tmp_path):
    """A benchmark as a module, by its name; what it records lies in ``tmp_path``."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def loaded(name: str):
        module = load(name)
        monkeypatch.setattr(sys.modules["shared"], "RESULTS", tmp_path)
        return module

    return loaded
