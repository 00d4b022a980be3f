"""Who draws, who sees it, and whether it may move."""

import sys
from types import SimpleNamespace

import pytest

from gradmem_lib import display


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(display, "_load", None)
    monkeypatch.setattr(display, "_has_viewer", False)
    return display.register


def python(monkeypatch, kernel):
    """As in a plain Python (``None``), an IPython without a kernel, or a kernel."""
    shell = {"terminal": SimpleNamespace(), "kernel": SimpleNamespace(kernel=object())}.get(kernel)
    ipython = None if kernel is None else SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)


def test_pictures_are_what_was_registered_and_made_on_first_use(registered):
    with pytest.raises(RuntimeError, match="nobody to draw"):
        display.pictures()
    calls = []
    registered(lambda: calls.append(1) or "pictures")
    assert not calls and display.pictures() == "pictures" and calls == [1]


@pytest.mark.parametrize("kernel", [None, "no shell", "terminal", "kernel"])
def test_who_sees_what_is_drawn(kernel, registered, monkeypatch):
    python(monkeypatch, kernel)
    there = kernel == "kernel"
    assert display.in_kernel() is there
    for elsewhere in (False, True):
        registered(object, has_viewer=elsewhere)
        assert display.has_viewer() is (elsewhere or there)
    registered(object)
    assert display.has_viewer() is there
    for wanted, value in ((True, None), (True, "1"), (True, ""), (False, "0")):
        if value is None:
            monkeypatch.delenv("GRADMEM_LIVE", raising=False)
        else:
            monkeypatch.setenv("GRADMEM_LIVE", value)
        assert display.live_allowed() is wanted and display.live_enabled() is (there and wanted)
