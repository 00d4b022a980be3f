"""As few layers run again as a budget allows: tracked within it, and above it with one layer less;
the same gradients.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.families import tiny_config
from support.nightly import each
from support.predicted import (
    TEXT,
    assert_same,
    config,
    example_batch,
    measured,
    predict,
    tiny,
)
from transformers import LlamaConfig

from gradmem_lib import MemoryTracker, Recipe, checkpoint_layers, fit
from gradmem_lib.model.configs import skeleton
from gradmem_lib.model.layers import find_layers
from gradmem_lib.names import FORWARD, OPTIMIZER_STEP

ASKED = {"batch_size": 4, "seq_len": 48, "target": "cpu"}


def t5():
    shape = tiny_config("t5")
    shape.num_layers, shape.num_decoder_layers, shape.dropout_rate = 2, 3, 0.1
    return shape


def smollm2():
    """The proportions of SmolLM2: grouped heads and a tied output."""
    sizes = {"num_hidden_layers": LAYERS, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaConfig(**TEXT, **sizes)


CASES = [
    (smollm2, Recipe(precision="bf16", accumulation=2, chunked_loss=True)),
    (t5, Recipe()),
    (lambda: config("gemma3", 6), Recipe(lora_rank=4)),
    (lambda: config("gpt2", LAYERS), Recipe(precision="autocast-bf16")),
    (lambda: config("bert", LAYERS), Recipe(precision="bf16", optimizer="adamw-fused")),
]


def between(shape, recipe: Recipe) -> int:
    """A budget between what no layer run again needs, and what all need."""
    n = sum(len(layers) for layers, _ in find_layers(skeleton(shape)).values())
    most, least = (
        predict(shape, recipe=with_first(recipe, first), **ASKED).peak.total for first in (0, n)
    )
    assert most > least
    return (most + 2 * least) // 3


LAYERS = 5


def with_first(recipe: Recipe, first: int) -> Recipe:
    return replace(recipe, checkpointing=f"first-{first}" if first else None)


def tracked_with(shape, recipe: Recipe):
    return measured(shape, recipe, ASKED["batch_size"], ASKED["seq_len"])


@pytest.mark.parametrize(("made", "recipe"), each(2, CASES))
def test_tracked_within_the_budget_and_above_it_with_one_layer_less(made, recipe):
    shape = made()
    budget = between(shape, recipe)
    found = fit(shape, budget, recipe=recipe, **ASKED)
    first = int(found.checkpointing.removeprefix("first-"))
    assert found == with_first(recipe, first)
    tracker = tracked_with(shape, found)
    assert (
        tracker.peak.total <= budget < tracked_with(shape, with_first(recipe, first - 1)).peak.total
    )
    assert_same(predict(shape, recipe=found, **ASKED), tracker)


def made_up(monkeypatch, peaks, rows) -> list[int]:
    """Let ``fit`` ask for predictions with these peaks, by how many layers run again, and these
    samples; which were asked for.
    """
    tried = []

    def predicted(source, recipe):
        first = int((recipe.checkpointing or "first-0").removeprefix("first-"))
        tried.append(first)
        return SimpleNamespace(
            peak=SimpleNamespace(total=peaks[first]), timeline=SimpleNamespace(rows=np.array(rows))
        )

    monkeypatch.setattr("gradmem_lib.prediction.fit.predict", predicted)
    return tried


@pytest.mark.parametrize(
    "peaks", [(9, 8, 7, 6, 5, 4), (9, 7, 5, 3, 2, 4), (9, 3, 4, 5, 6, 7), (3, 4, 5, 6, 7, 8)]
)
def test_the_fewest_layers_of_whatever_peaks(peaks, monkeypatch):
    """Each peak falls with the layers that run again up to the lowest, and rises from there on."""
    tried = made_up(monkeypatch, peaks, [[0] * 9])
    for budget in range(1, 11):
        tried.clear()
        enough = [first for first, peak in enumerate(peaks) if peak <= budget]
        if enough:
            assert fit(smollm2(), f"{budget} B") == with_first(Recipe(), enough[0])
        else:
            with pytest.raises(ValueError, match=f"this step needs at least {min(peaks)} bytes"):
                fit(smollm2(), budget)
            below = max(peaks.index(min(peaks)) - 1, 1)  # one layer less than the lowest peak has
            assert tried == [0, *range(LAYERS, below - 1, -1)]


@pytest.mark.parametrize(
    ("held", "in_step"), [((20, 30, 40), 0), ((20, 30, 4), 90), ((90, 0, 0), 70), ((0, 0, 90), 70)]
)
def test_what_no_checkpoint_takes_away(held, in_step, monkeypatch):
    """Weights, gradients and states of any sample, and all that there is in the optimizer's step:
    here 90 bytes.
    """
    sample = [0, FORWARD, 500, *held, 300, 400, 500]
    tried = made_up(
        monkeypatch,
        [500, 400, 300, 200, 100, 150],
        [[0] * 9, sample, [0, OPTIMIZER_STEP, in_step, *[0] * 6]],
    )
    with pytest.raises(ValueError, match="optimizer's step alone need 90 bytes"):
        fit(smollm2(), 89)
    assert tried == [0, LAYERS]  # no other number of layers is predicted
    with pytest.raises(ValueError, match="this step needs at least 100 bytes"):
        fit(smollm2(), 90)
    assert fit(smollm2(), 100).checkpointing == "first-4"


def test_layers_of_a_model_as_it_is():
    """In its own dtype, with the optimizer that the recipe names."""
    model = tiny(layers=LAYERS, vocab=128).bfloat16()
    batch = example_batch(model, 4, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    recipe = Recipe(precision=None, attention=None, optimizer="sgd")

    def peak() -> int:
        with MemoryTracker(model, optimizer, live=False) as tracker:
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return tracker.peak.total

    peaks = []
    for first in range(LAYERS + 1):
        with checkpoint_layers(model, f"first-{first}"):
            peaks.append(peak())
    for first in (1, 3):
        assert peaks[first - 1] > peaks[first]
        how = {"every": "fit", "batch": batch, "recipe": recipe, "target": "cpu"}
        with checkpoint_layers(model, budget=peaks[first], **how) as handle:
            assert handle.segments == [1] * first + [LAYERS - first]
    with checkpoint_layers(model, "fit", budget="1 GiB", batch_size=4, seq_len=48) as handle:
        assert handle.segments == [LAYERS] and handle.keep_last


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"every": "fit"}, 'every="fit" needs a budget'),
        ({"every": 2, "budget": "1 GiB"}, "are for it alone"),
        ({"every": "sqrt", "seq_len": 8}, "are for it alone"),
        ({"every": "fit", "budget": "much", "seq_len": 8, "batch_size": 1}, "cannot read 'much'"),
        (
            {"every": "fit", "budget": 10, "recipe": Recipe(checkpointing=2)},
            "without checkpointing",
        ),
        (
            {"every": "fit", "budget": 10, "recipe": Recipe(every_n_layers=2)},
            "without checkpointing",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(how, says):
    with pytest.raises(ValueError, match=says):
        checkpoint_layers(tiny(), **how)
