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
    model_class,
    predict,
)
from torch import nn
from transformers import LlamaConfig

from gradmem_lib import MemoryTracker, Recipe, checkpoint_layers, fit
from gradmem_lib.course.material import models
from gradmem_lib.model.configs import skeleton
from gradmem_lib.model.layers import find_layers
from gradmem_lib.names import FORWARD, OPTIMIZER_STEP
from gradmem_lib.techniques.schedules import segments_for

ASKED = {"batch_size": 4, "seq_len": 48, "target": "cpu"}
RECIPES = {
    "float32": Recipe(),
    "bf16": Recipe(precision="bf16", optimizer="adamw-fused"),
    "autocast": Recipe(precision="autocast-bf16"),
    "lora": Recipe(lora_rank=4),
    "pieces": Recipe(precision="bf16", accumulation=2, chunked_loss=True),
}


def t5():
    shape = tiny_config("t5")
    shape.num_layers, shape.num_decoder_layers, shape.dropout_rate = 2, 3, 0.1
    return shape


LAYERS = 5
FAMILIES = {
    # The proportions of SmolLM2: grouped heads and a tied output.
    "smollm2": lambda: LlamaConfig(
        **TEXT, num_hidden_layers=LAYERS, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "gpt2": lambda: config("gpt2", LAYERS),
    "bert": lambda: config("bert", LAYERS),
    "gemma3": lambda: config("gemma3", 6),
    "t5": t5,
}
CASES = [
    # each once
    ("smollm2", "pieces"),
    ("gpt2", "autocast"),
    ("bert", "bf16"),
    ("t5", "float32"),
    ("gemma3", "lora"),
    *(("smollm2", name) for name in RECIPES if name != "pieces"),
    ("gpt2", "float32"),
    ("t5", "lora"),
]


def with_first(recipe: Recipe, first: int) -> Recipe:
    return replace(recipe, checkpointing=f"first-{first}" if first else None)


def between(shape, recipe: Recipe, **asked) -> int:
    """A budget between what no layer run again needs, and what all need."""
    n = sum(len(layers) for layers, _ in find_layers(skeleton(shape)).values())
    most, least = (
        predict(shape, recipe=with_first(recipe, first), **ASKED | asked).peak.total
        for first in (0, n)
    )
    assert most > least
    return (most + 2 * least) // 3


def tracked_with(shape, recipe: Recipe):
    return measured(shape, recipe, ASKED["batch_size"], ASKED["seq_len"])


@pytest.mark.parametrize(("family", "how"), each(5, CASES))
def test_tracked_within_the_budget_and_above_it_with_one_layer_less(family, how):
    shape, recipe = FAMILIES[family](), RECIPES[how]
    budget = between(shape, recipe)
    found = fit(shape, budget, recipe=recipe, **ASKED)
    first = int(found.checkpointing.removeprefix("first-"))
    assert found == with_first(recipe, first)
    tracker = tracked_with(shape, found)
    assert (
        tracker.peak.total <= budget < tracked_with(shape, with_first(recipe, first - 1)).peak.total
    )
    assert_same(predict(shape, recipe=found, **ASKED), tracker)


def test_to_the_byte():
    shape = FAMILIES["smollm2"]()
    two = predict(shape, recipe=with_first(Recipe(), 2), **ASKED).peak.total
    assert fit(shape, two, **ASKED).checkpointing == "first-2"
    assert fit(shape, f"{two} B", **ASKED).checkpointing == "first-2"
    assert fit(shape, two - 1, **ASKED).checkpointing == "first-3"
    assert fit(shape, "1 GiB", **ASKED).checkpointing is None


def asked_of(monkeypatch, shape, budget, **asked) -> tuple[list[str | None], str]:
    """What ``fit`` predicted before it refused ``budget``, and what it said."""
    tried = []

    def counted(*given, recipe, **more):
        tried.append(recipe.checkpointing)
        return predict(*given, recipe=recipe, **more)

    monkeypatch.setattr("gradmem_lib.prediction.fit.predict", counted)
    with pytest.raises(ValueError, match="is not enough") as refused:
        fit(shape, budget, **ASKED | asked)
    return tried, str(refused.value)


def test_a_budget_that_residents_pass_is_refused_after_two_predictions(monkeypatch):
    shape = FAMILIES["smollm2"]()
    shape.num_hidden_layers = 12
    held = (
        4 * predict(shape, **ASKED).peak.by_category["parameters"]
    )  # gradients and two moments are as large
    tried, said = asked_of(monkeypatch, shape, held - 1)
    assert tried == [None, "first-12"] and "alone need" in said
    assert int(said.split("alone need ")[1].split(" bytes")[0].replace(",", "")) >= held - 1


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
            assert fit(FAMILIES["smollm2"](), budget) == with_first(Recipe(), enough[0])
        else:
            with pytest.raises(ValueError, match=f"this step needs at least {min(peaks)} bytes"):
                fit(FAMILIES["smollm2"](), budget)
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
    made_up(
        monkeypatch,
        [500, 400, 300, 200, 100, 150],
        [[0] * 9, sample, [0, OPTIMIZER_STEP, in_step, *[0] * 6]],
    )
    with pytest.raises(ValueError, match="optimizer's step alone need 90 bytes"):
        fit(FAMILIES["smollm2"](), 89)
    with pytest.raises(ValueError, match="this step needs at least 100 bytes"):
        fit(FAMILIES["smollm2"](), 90)
    assert fit(FAMILIES["smollm2"](), 100).checkpointing == "first-4"


def loss_and_gradients(model, batch) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", each(2, ["smollm2", "gpt2", "t5", "gemma3"]))
def test_gradients_are_the_same_to_the_bit(family):
    shape = FAMILIES[family]()
    model = model_class(shape)(shape).train()
    # a decoder has a config of its own, and a cache changes the order of sums
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
    batch = example_batch(model, 2, 16)
    expected = loss_and_gradients(model, batch)
    for every in ("first-0", "first-1", "first-4", "first-5"):
        with checkpoint_layers(model, every):
            found = loss_and_gradients(model, batch)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), every


def calls(model, run) -> list[int]:
    """How often each layer runs."""
    layers = [layer for several, _ in find_layers(model).values() for layer in several]
    counted = [0] * len(layers)

    def count_at(i):
        def hook(*given):
            counted[i] += 1

        return hook

    hooks = [layer.register_forward_pre_hook(count_at(i)) for i, layer in enumerate(layers)]
    run()
    for hook in hooks:
        hook.remove()
    return counted


def test_the_first_layers_run_again_of_two_lists_the_encoders_come_first():
    shape = t5()
    model = model_class(shape)(shape).train()
    batch = example_batch(model, 2, 16)
    for first in range(6):
        with checkpoint_layers(model, f"first-{first}"):
            assert calls(model, lambda: loss_and_gradients(model, batch)) == [2] * first + [1] * (
                5 - first
            )
    with pytest.raises(ValueError, match="'first-6': there are 5 layers in all"):
        checkpoint_layers(model, "first-6")


def test_as_a_schedule():
    assert segments_for("first-2", 5) == [1, 1, 3] and segments_for("first-5", 5) == [1] * 5
    assert segments_for("first-0", 3) == [3]
    chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    handle = checkpoint_layers(chain, "first-1")
    assert handle.segments == [1, 2] and handle.keep_last is True
    for wrong in ("first-", "first-x", "first--1", "fit"):
        with pytest.raises(ValueError, match="'first-5' for the first 5 layers"):
            Recipe(checkpointing=wrong)


@pytest.mark.parametrize("dtype", each(2, [torch.float32, torch.bfloat16], start=1))
def test_layers_of_a_model_as_it_is(dtype):
    """In its own dtype, with the optimizer that the recipe names."""
    model = models.tiny_llama(layers=LAYERS, hidden=64, heads=4, intermediate=96, vocab=128).to(
        dtype
    )
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
        checkpoint_layers(models.tiny_llama(layers=2), **how)
