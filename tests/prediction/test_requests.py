"""What a deep model asks of an allocator, from traces of a few layers, is what it really asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.families import tiny_config
from support.nightly import each

from gradmem_lib.course.material import models
from gradmem_lib.prediction import allocator, requests
from gradmem_lib.prediction.predict import predict, source_of
from gradmem_lib.prediction.requests import extrapolated_requests
from gradmem_lib.prediction.short_traces import MICRO_BATCHES
from gradmem_lib.prediction.trace import traced
from gradmem_lib.training.recipe import Recipe

PLAIN = Recipe(precision="bf16", optimizer="adamw-fused")
SIZES = {"batch_size": 4, "seq_len": 64, "target": "cuda"}
LAYERS = 9


@pytest.fixture(scope="module")
def source():
    config = models.tiny_llama(layers=LAYERS, hidden=64, heads=4, intermediate=172, vocab=512)
    return source_of(config.config)


@pytest.mark.parametrize(
    "recipe",
    each(
        3,
        [
            replace(PLAIN, accumulation=4),
            PLAIN,
            replace(PLAIN, checkpointing=f"first-{LAYERS - 1}", chunked_loss=True),
            replace(PLAIN, checkpointing="first-4", accumulation=4),
            # drops its copies of all weights at once, in another order each time
            Recipe(
                precision="autocast-bf16", optimizer="adafactor-torch", checkpointing="per-layer"
            ),
            replace(PLAIN, lora_rank=4, quantized_base=True, checkpointing="elementwise"),
            replace(
                PLAIN, optimizer="adafactor-torch", in_backward=True, checkpointing="per-layer"
            ),
        ],
    ),
)
def test_requests_of_short_traces_are_those_of_the_full_trace(recipe, source):
    predicted = predict(source, recipe=recipe, **SIZES)
    found = predicted._short.requests()
    of_all = traced(predicted._question, MICRO_BATCHES if recipe.accumulation > 3 else None)
    assert found == of_all.requests
    assert predicted.requests() == found
    assert predicted.replay_allocator() == allocator.replayed(of_all.requests)


@pytest.mark.parametrize("checkpointing", [None, "first-7"])
def test_a_bucket_has_the_gradients_of_all_layers(checkpointing):
    """A layer more makes one block larger, and asks for as many."""
    config = models.tiny_llama(layers=14, hidden=64, heads=4, intermediate=128, vocab=512).config
    recipe = replace(PLAIN, sharding="ddp", lora_rank=16, checkpointing=checkpointing)
    predicted = predict(source_of(config), recipe=recipe, ranks=8, **SIZES)
    assert predicted._short.requests() == traced(predicted._question).requests


@pytest.mark.parametrize(
    ("family", "recipe"),
    each(
        6,
        [
            ("whisper", PLAIN),
            ("t5", replace(PLAIN, optimizer="adafactor-torch", in_backward=True)),
            ("bart", replace(PLAIN, lora_rank=2, accumulation=4)),
            ("whisper", replace(PLAIN, checkpointing="first-5")),
            ("whisper", replace(PLAIN, checkpointing="per-layer", optimizer="adamw-8bit")),
            ("marian", replace(PLAIN, checkpointing="attention")),
        ],
    ),
)
def test_short_traces_prove_the_requests_of_an_encoder_and_a_decoder(family, recipe, monkeypatch):
    """All layers of the decoder read one tensor, and the first one in backward makes its gradient.
    The others add to it, and ask for other blocks.
    """
    config = tiny_config(family)
    for name in ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"):
        if hasattr(config, name):
            setattr(config, name, 11)
    source = source_of(config)
    sizes = SIZES | {"seq_len": 16, "recipe": recipe}
    with monkeypatch.context() as no_full_trace:
        no_full_trace.setattr("gradmem_lib.prediction.predict.traced", None)
        short = predict(source, **sizes)
        found = short.requests()
    full = predict(source, full=True, **sizes)
    of_all = full.requests()
    if recipe.accumulation > MICRO_BATCHES:
        of_all = traced(full._question, MICRO_BATCHES).requests
    assert found == of_all
    assert (short.timeline.rows == full.timeline.rows).all()
    assert short.replay_allocator() == full.replay_allocator()


@pytest.mark.parametrize("checkpointing", each(2, ["first-9", None]))
def test_traces_of_more_layers_prove_what_few_do_not(checkpointing, monkeypatch):
    """FSDP frees what it has sent at the end, for all layers but the one that is last in backward.
    With three layers, the middle one is as near to the last as to the first.
    """
    small = {"layers": 15, "hidden": 64, "heads": 4, "intermediate": 172, "vocab": 512}
    recipe = replace(PLAIN, lora_rank=4, sharding="fsdp", checkpointing=checkpointing)
    sizes = SIZES | {"ranks": 2, "recipe": recipe}
    predicted = predict(source_of(models.tiny_llama(**small).config), **sizes)
    assert predicted._short.requests() is None
    full = predict(source_of(models.tiny_llama(**small).config), full=True, **sizes)
    monkeypatch.setattr("gradmem_lib.prediction.predict.traced", None)  # no full trace
    assert predicted.requests() == full.requests()


def test_recipes_that_recompute_other_numbers_of_layers_share_their_traces(source, monkeypatch):
    made = []

    def counted(question, micro_batches=None, few_chunks=False):
        made.append(question.kept)
        return traced(question, micro_batches, few_chunks=few_chunks)

    named = []
    give_names = requests._named

    def counted_names(trace, naming):
        named.append(trace)
        return give_names(trace, naming)

    monkeypatch.setattr("gradmem_lib.prediction.short_traces.traced", counted)
    monkeypatch.setattr(requests, "_named", counted_names)
    names_after = []
    sizes = SIZES | {"batch_size": 6}  # which no other test asks for
    for k in (3, 4, 5):
        recipe = replace(PLAIN, checkpointing=f"first-{k}")
        predicted = predict(source, recipe=recipe, **sizes)
        full = predict(source, recipe=recipe, full=True, **sizes)
        assert (predicted.timeline.rows == full.timeline.rows).all()
        assert predicted.requests() == full.requests()
        names_after.append(len(named))
    assert names_after[2] == names_after[1] > 0  # what the traces prove holds for any k
    # Alone, each would need three, and "first-3", which keeps its three layers whole, two.
    assert len([kept for kept in made if kept]) == 3
    assert len([kept for kept in made if not kept]) == 3  # those of full=True


def test_what_short_traces_do_not_prove_is_not_computed(source):
    """A longer trace that asks for one block more outside of the repeated layer, or frees one that
    is far away.
    """
    short, longer, times = predict(source, recipe=PLAIN, **SIZES)._short
    assert extrapolated_requests(short, longer, times) is not None
    [long] = longer.values()
    outside = replace(
        long,
        requests=(512, *long.requests[:0], *_shifted(long.requests)),
        request_places=((0, -1, -1), *long.request_places),
    )
    assert extrapolated_requests(short, {0: outside}, times) is None


def _shifted(asked):
    """``asked`` after one block more."""
    return [request if request >= 0 else request - 1 for request in asked]


def test_a_layer_that_frees_what_is_far_away_is_traced_in_full(source, monkeypatch):
    monkeypatch.setattr(requests, "FARTHEST", 0)
    predicted = predict(source, recipe=PLAIN, **SIZES)
    assert predicted._short.requests() is None
    assert predicted.requests() == traced(predicted._question).requests
