"""For every test: nobody's real progress file is touched, and no figure asks for a screen."""

from __future__ import annotations

import os
import signal

import pytest


def pytest_configure() -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(autouse=True)
def own_progress_file(tmp_path, monkeypatch):
    """A progress file of its own for each test."""
    monkeypatch.setenv("GRADMEM_PROGRESS", str(tmp_path / "progress.json"))


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal has it, also where the test run was started in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium for the tests of one file."""
    from browser import chromium

    with chromium() as found:
        yield found
