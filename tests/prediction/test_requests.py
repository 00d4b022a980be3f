"""What a deep model asks of an allocator, from traces of a few layers, is what it really asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.families import tiny_config
from support.nightly import ALL

from gradmem_lib import Recipe, predict
from gradmem_lib.course import models
from gradmem_lib.prediction import allocator, requests
from gradmem_lib.prediction.predict import source_of
from gradmem_lib.prediction.requests import extrapolated_requests
from gradmem_lib.prediction.short_traces import MICRO_BATCHES
from gradmem_lib.prediction.trace import traced

PLAIN = Recipe(precision="bf16", optimizer="adamw-fused")
SIZES = {"batch_size": 4, "seq_len": 64, "target": "cuda"}
LAYERS = 9


def llama(layers: int, intermediate: int = 172):
    sizes = {"hidden": 64, "heads": 4, "intermediate": intermediate, "vocab": 512}
    return models.tiny_llama(layers=layers, **sizes).config


def pair(family: str):
    """All layers of the decoder read one tensor, and the first one in backward makes its gradient.
    The others add to it, and ask for other blocks.
    """
    config = tiny_config(family)
    for name in ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"):
        if hasattr(config, name):
            setattr(config, name, 11)
    return config


@pytest.fixture(scope="module")
def source():
    return source_of(llama(LAYERS))


IN_BACKWARD = replace(PLAIN, optimizer="adafactor-torch", in_backward=True)
# A layer more makes one block larger, and asks for as many.
BUCKET = replace(PLAIN, sharding="ddp", lora_rank=16)
# FSDP frees what it has sent at the end, for all layers but the one that is last in backward. With
# three layers, the middle one is as near to the last as to the first: more layers prove it.
SPREAD = replace(PLAIN, lora_rank=4, sharding="fsdp")
CASES = [
    (llama(LAYERS), replace(PLAIN, checkpointing="first-4", accumulation=4), {}),
    (llama(14, 128), BUCKET, {"ranks": 8}),
    (pair("whisper"), PLAIN, {}),
    (llama(15), replace(SPREAD, checkpointing="first-9"), {"ranks": 2}),
    # drops its copies of all weights at once, in another order each time
    (
        llama(LAYERS),
        Recipe(precision="autocast-bf16", optimizer="adafactor-torch", checkpointing="per-layer"),
        {},
    ),
    (llama(LAYERS), replace(PLAIN, accumulation=4), {}),
    (llama(LAYERS), PLAIN, {}),
    (llama(LAYERS), replace(PLAIN, checkpointing="first-8", chunked_loss=True), {}),
    (
        llama(LAYERS),
        replace(PLAIN, lora_rank=4, quantized_base=True, checkpointing="elementwise"),
        {},
    ),
    (llama(LAYERS), replace(IN_BACKWARD, checkpointing="per-layer"), {}),
    (llama(14, 128), replace(BUCKET, checkpointing="first-7"), {"ranks": 8}),
    (pair("t5"), IN_BACKWARD, {}),
    (pair("bart"), replace(PLAIN, lora_rank=2, accumulation=4), {}),
    (pair("whisper"), replace(PLAIN, checkpointing="first-5"), {}),
    (pair("whisper"), replace(PLAIN, checkpointing="per-layer", optimizer="adamw-8bit"), {}),
    (pair("marian"), replace(PLAIN, checkpointing="attention"), {}),
    (llama(15), SPREAD, {"ranks": 2}),
]


@pytest.mark.parametrize(("config", "recipe", "more"), CASES[:4] if not ALL else CASES)
def test_requests_of_short_traces_are_those_of_the_full_trace(config, recipe, more, monkeypatch):
    sizes = SIZES | {"seq_len": 16, "recipe": recipe} | more
    with monkeypatch.context() as no_full_trace:
        no_full_trace.setattr("gradmem_lib.prediction.predict.traced", None)
        short = predict(source_of(config), **sizes)
        found = short.requests()
    few = MICRO_BATCHES if recipe.accumulation > MICRO_BATCHES else None
    of_all = traced(short._question, few).requests
    assert found == of_all
    assert short.replay_allocator() == allocator.replayed(of_all)
    assert (short._short.requests() is None) == (recipe.sharding == "fsdp")


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
        predict(source, recipe=recipe, **sizes).requests()
        names_after.append(len(named))
    assert names_after[2] == names_after[1] > 0  # what the traces prove holds for any k
    # Alone, each would need three, and "first-3", which keeps its three layers whole, two.
    assert len(made) == 3 and all(made)


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
