"""For every test: nobody's real progress file is touched, and no figure asks for a screen."""

from __future__ import annotations

import os

import pytest


def pytest_configure() -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(autouse=True)
def own_progress_file(tmp_path, monkeypatch):
    """A progress file of its own for each test."""
    monkeypatch.setenv("GRADMEM_PROGRESS", str(tmp_path / "progress.json"))
