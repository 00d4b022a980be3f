"""The pictures of optimizers at work: what they draw, the words beside them, and an output that
never changes.
"""

from __future__ import annotations

import pytest
import torch

from gradmem_lib.view import descent


def bowl(points):
    return (points**2).sum(-1)


PATHS = {
    "SGD": torch.tensor([[2.0, 1.0], [1.0, 0.5], [0.25, -0.25]]),
    "mine": torch.tensor([[2.0, 1.0], [4.0, 3.0]]),
}


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(
        "IPython.display.display",
        lambda data, metadata, raw: outputs.append((data, metadata["image/png"])),
    )
    return outputs


def lines(figure) -> dict:
    """Label of the legend -> the points of the line that carries it."""
    return {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}


def test_paths_end_where_they_ended_and_all_of_them_are_in_the_picture():
    figure = descent.plot_paths(bowl, PATHS, title="a bowl", marks={"minimum": (-3.0, 0.0)})
    drawn = lines(figure)
    for name, path in PATHS.items():
        assert drawn[name].tolist() == [path[-1].tolist()]
    axes = figure.axes[0]
    for x, y in [*torch.cat(list(PATHS.values())).tolist(), (-3.0, 0.0)]:
        assert axes.get_xlim()[0] < x < axes.get_xlim()[1]
        assert axes.get_ylim()[0] < y < axes.get_ylim()[1]
    assert axes.collections, "no contours"


def test_losses_are_smoothed_over_the_last_steps():
    drawn = lines(descent.plot_losses({"SGD": [4.0, 2.0, 3.0]}, smooth=2))
    assert drawn["SGD"].tolist() == [[1, 4.0], [2, 3.0], [3, 2.5]]


def test_what_is_shown_has_words_and_a_constant_text(shown):
    descent.show_paths(bowl, PATHS, title="a bowl", marks={"minimum": (0, 0)})
    descent.show_losses({"SGD": [4.0, 2.0]}, title="a loss")
    descent.show_losses({"SGD": [4.0, 2.0]})
    (paths, words), (losses, others), (untitled, _) = shown
    assert paths["text/plain"] == "Descent plot: a bowl"
    assert untitled["text/plain"] == "Descent plot"
    assert "SGD ends at (0.25, -0.25); mine ends at (4.00, 3.00)" in words["alt"]
    assert "minimum is at (0.00, 0.00)" in words["alt"]
    assert "SGD from 4.00 to 2.00" in others["alt"]
    assert len(paths["image/png"]) < 80_000 and len(losses["image/png"]) < 40_000
