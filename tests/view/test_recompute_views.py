"""The counter sees fused attention, and the frontier's picture says which ways nothing beats."""

import pytest
import torch
from support.predicted import tiny

from gradmem_lib import MemoryTracker, count_operations, show_frontier
from gradmem_lib.view.frontier import unbeaten

POINTS = {
    "nothing": (400, 1000),
    "elementwise": (240, 1000),
    "mlp": (200, 1160),
    "half": (150, 1130),
    "every layer": (60, 1250),
    "best": (60, 1250),
    "root": (140, 1300),
}


def step_of(attention: str):
    model = tiny(vocab=128, attention=attention)
    ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))
    return model, lambda: model(input_ids=ids, labels=ids).loss.backward()


def test_fused_attention_counts_as_eager_and_one_product_more():
    fused, eager = (count_operations(step_of(attention)[1]) for attention in ("sdpa", "eager"))
    # rows, heads, tokens, tokens, head's size: two operations each
    scores = 2 * (2 * 4 * 32 * 32 * 16)
    layers = 2
    # Backward computes the scores again.
    assert fused - eager == layers * scores


def test_a_count_inside_a_tracker_is_refused_since_it_would_miss_operations():
    model, step = step_of("sdpa")
    with MemoryTracker(model), pytest.raises(RuntimeError, match="count first"):
        count_operations(step)


def test_what_nothing_beats():
    assert unbeaten(POINTS) == ["elementwise", "half", "every layer", "best"]


def test_the_picture_has_every_way_and_says_it_in_words():
    figure = show_frontier(POINTS, title="Seven ways")
    alt = figure._repr_mimebundle_()[1]["image/png"]["alt"]
    assert "nothing: 100% of the bytes, +0.0% operations" in alt
    assert "every layer: 15% of the bytes, +25.0% operations" in alt
    assert alt.endswith("No other way beats elementwise, half, every layer, best.")
    drawn = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(", ".join(drawn).split(", ")) == sorted(POINTS) and "every layer, best" in drawn
    heights = sorted(text.get_position()[1] for text in figure.axes[0].texts)
    assert len(heights) == len(set(heights)) == 6
