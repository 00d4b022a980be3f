"""Short traces say what the full one says: of a few layers, micro-batches and chunks of a loss,
also what the allocator is asked for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.families import tiny_config
from support.nightly import each
from support.predicted import adapted, assert_short_is_full, config

from gradmem_lib import Loop, Recipe, predict
from gradmem_lib.course import models
from gradmem_lib.measure.timeline import TOTAL
from gradmem_lib.prediction import requests, short_traces, trace
from gradmem_lib.prediction.chunks import TRACED_CHUNKS
from gradmem_lib.prediction.extrapolation import PART, has_equal_chunks
from gradmem_lib.prediction.marks import CHUNKS
from gradmem_lib.prediction.predict import source_of
from gradmem_lib.prediction.requests import extrapolated_requests
from gradmem_lib.prediction.short_traces import MICRO_BATCHES, trace_few_parts
from gradmem_lib.techniques.losses import CHUNK_TOKENS

ASK = {"batch_size": 2, "seq_len": 16, "target": "cpu"}
PAIR = ["encoder_layers", "decoder_layers"]
# The names of the numbers of layers, where there are two.
DEPTHS = dict.fromkeys(["whisper", "bart", "marian", "pegasus"], PAIR)
DEPTHS["t5"] = ["num_layers", "num_decoder_layers"]


def deep(family: str, *depths: int, **changes):
    """All layers of a pair's decoder read one tensor, and the first one in backward makes its
    gradient. The others add to it, and ask for other blocks.
    """
    shape = tiny_config(family)
    changes |= dict(zip(DEPTHS.get(family, ["num_hidden_layers"]), depths, strict=True))
    if getattr(shape, "layer_types", None):  # made from the number of layers
        return type(shape)(**shape.to_dict() | {"layer_types": None} | changes)
    for name, value in changes.items():
        setattr(shape, name, value)
    return shape


def llama(layers: int = 9, intermediate: int = 172):
    sizes = {"hidden": 64, "heads": 4, "intermediate": intermediate, "vocab": 512}
    return models.tiny_llama(layers=layers, **sizes).config


SGD, CUDA = {"optimizer": "sgd"}, {"target": "cuda"}
OFFLOADED = {"offload": "activations", "checkpointing": "per-layer"}
TORCHS = {"optimizer": "adafactor-torch", "precision": "bf16"}
RANKS = {"ranks": 3, "rank": 2}
PLAIN = {"precision": "bf16", "optimizer": "adamw-fused"}
FOUR, CHUNKED = PLAIN | {"accumulation": 4}, PLAIN | {"chunked_loss": True}
IN_BACKWARD = TORCHS | {"in_backward": True}
# A layer more makes one block larger, and asks for as many.
BUCKET = PLAIN | {"sharding": "ddp", "lora_rank": 16}
# FSDP frees what it has sent at the end, for all layers but the one that is last in backward. With
# three layers, the middle one is as near to the last as to the first: more layers prove it.
SPREAD = PLAIN | {"lora_rank": 4, "sharding": "fsdp"}
OF_TWO, OF_EIGHT = CUDA | {"ranks": 2}, CUDA | {"ranks": 8}


def tokens(chunks: float, **more) -> dict:
    return {"seq_len": round(chunks * CHUNK_TOKENS), **more}


# A model, a recipe, what is asked besides, and the numbers of layers that are traced.
CASES = [
    # segments of 2, 2, ..., 1
    (config("llama", 13), {"checkpointing": 2}, {}, (5, 7)),
    (llama(), FOUR | {"checkpointing": "first-4"}, CUDA, (6, 7, 7)),
    (llama(5), CHUNKED, tokens(8), ()),
    (deep("whisper", 12, 12), {"checkpointing": "per-layer"}, {}, (6, 7, 7)),
    (deep("whisper", 11, 11), PLAIN, CUDA, (6, 7, 7)),
    # clipping stacks a norm of each parameter: that is one storage that grows with the layers
    (config("llama", 9), SGD, {"loop": Loop(clips=True)}, ()),
    # the last chunk has fewer tokens
    (llama(5), CHUNKED, tokens(3.05, **CUDA), ()),
    (adapted(9), {"precision": None}, CUDA, (3, 4)),
    (llama(14, 128), BUCKET, OF_EIGHT, (3, 4, 5)),
    (config("gqa", 16), {"sharding": "ddp", "accumulation": 5}, OF_TWO, (3, 4, 5)),
    (deep("gemma2", 16), {"attention": "eager"}, {}, (4, 6)),
    (llama(5), CHUNKED | {"accumulation": 4}, tokens(4), ()),
    (config("llama", 9), SGD, {"loop": Loop(keeps="outputs")}, (3, 4)),
    (config("gqa", 16), {"sharding": "ddp"}, RANKS, (3, 4, 5)),
    (config("llama", 36), {"checkpointing": "sqrt", "precision": "autocast-bf16"}, CUDA, (12, 18)),
    (config("gpt2"), FOUR | {"precision": "float32-master", "checkpointing": [2, 1]}, {}, ()),
    (llama(5), CHUNKED, tokens(3), ()),  # too few to leave any out
    (llama(15), SPREAD | {"checkpointing": "first-9"}, OF_TWO, (6, 7, 7)),
    (config("llama", 13), {"every_n_layers": 2, "optimizer": "sgd"}, CUDA, (5, 7)),
    # drops its copies of all weights at once, in another order each time
    (llama(), TORCHS | {"precision": "autocast-bf16", "checkpointing": "per-layer"}, CUDA, (3, 4)),
    (llama(), FOUR | {"precision": "autocast-fp16", "accumulation": 5}, CUDA, (3, 4)),
    (deep("pegasus", 11, 11), OFFLOADED, {}, (6, 7, 7)),
    (llama(), CHUNKED | {"checkpointing": "first-8"}, CUDA, (4, 5)),
    (config("llama", 19), {"checkpointing": 3, "accumulation": 2} | PLAIN, {}, (7, 10)),
    (
        llama(),
        PLAIN | {"lora_rank": 4, "quantized_base": True, "checkpointing": "elementwise"},
        CUDA,
        (3, 4),
    ),
    (llama(5), CHUNKED | {"accumulation": 2, "checkpointing": "first-2"}, tokens(3, **CUDA), ()),
    (config("llama", 12), {"checkpointing": 2, "precision": "bf16", "lora_rank": 2}, {}, (4, 6)),
    (llama(), IN_BACKWARD | {"checkpointing": "per-layer"}, CUDA, (3, 4)),
    (config("gqa", 16), {"sharding": "fsdp", "checkpointing": "per-layer"}, RANKS, (3, 4)),
    (llama(14, 128), BUCKET | {"checkpointing": "first-7"}, OF_EIGHT, (6, 7, 7, 8, 8)),
    (deep("whisper", 12, 4), {}, {}, (7, 8)),
    (deep("t5", 11, 11), IN_BACKWARD, CUDA, (6, 7, 7)),
    (deep("bart", 12, 12), {}, {}, (6, 7, 7)),
    (deep("bart", 11, 11), FOUR | {"lora_rank": 2}, CUDA, (6, 7, 7)),
    (deep("marian", 14, 8), TORCHS, {}, (6, 7, 7)),
    (llama(5), IN_BACKWARD | {"chunked_loss": True}, tokens(4), ()),
    (deep("whisper", 4, 12), {"optimizer": "adamw-8bit", "precision": "bf16"}, {}, (7, 8)),
    (deep("whisper", 11, 11), PLAIN | {"checkpointing": "first-5"}, CUDA, (9, 10, 10, 10)),
    (deep("t5", 13, 12), {}, {}, (6, 7, 7)),
    (deep("marian", 11, 11), PLAIN | {"checkpointing": "attention"}, CUDA, (6, 7, 7)),
    (config("vit"), {"precision": "autocast-bf16", "accumulation": 4}, {}, ()),
    # segments of lists of different lengths, segments of one list that differ, two kinds of layers
    # that take turns and are more work in pairs, and two traces that are more work than one
    (deep("bart", 16, 9), {"checkpointing": "sqrt"}, {}, ()),
    (config("llama", 9), {"checkpointing": [5, 3, 1]}, {}, ()),
    (config("gemma3", 10), {}, {}, ()),
    (config("llama", 6), {}, {}, ()),
    (llama(15), SPREAD, OF_TWO, (3, 4)),
]


@pytest.mark.parametrize(("source", "fields", "more", "layers"), each(4, CASES))
def test_few_parts_say_what_all_say(source, fields, more, layers):
    recipe = Recipe(**fields)
    pieces = recipe.accumulation
    asked = ASK | {"batch_size": 2 * pieces, "recipe": recipe} | more
    found, full = assert_short_is_full(source, **asked)
    assert found.traced_layers == layers
    left_out = trace_few_parts(replace(found._question, target="cuda")).left_out
    assert left_out.micro_batches == max(0, pieces - MICRO_BATCHES - (recipe.sharding == "ddp"))
    if recipe.chunked_loss:
        assert left_out.chunks == max(0, -(-2 * asked["seq_len"] // CHUNK_TOKENS) - TRACED_CHUNKS)
    if found.target == "cuda" and not left_out.chunks:
        of_all = full.requests()
        if left_out.micro_batches:
            of_all = trace.traced(found._question, pieces - left_out.micro_batches).requests
        assert found.requests() == of_all


# At least three layers of each kind are kept, so the first list has three more than the second k.
FIRST_LAYERS = [
    ("whisper", (8, 7), "cuda"),
    ("bart", (9, 9), "cpu"),
    ("t5", (8, 9), "cpu"),
    ("pegasus", (8, 8), "cuda"),
]


@pytest.mark.parametrize(("family", "depths", "target"), each(4, FIRST_LAYERS))
def test_the_first_layers_of_two_lists_are_predicted_from_shared_short_traces(
    family, depths, target
):
    """With k in the first list, at its end, and in the second list."""
    source = source_of(deep(family, *depths))
    remembered = []
    for k in (4, 5, depths[0], depths[0] + 3):
        recipe = Recipe(**PLAIN, checkpointing=f"first-{k}")
        asked = ASK | {"recipe": recipe, "target": target}
        short, _ = assert_short_is_full(source, **asked)
        assert short.traced_layers
        remembered.append(len(source.short_traces))
    assert remembered[1] == remembered[0]


IN_BLOCKS = [
    # norms of half a block each, two in a layer
    (64, {}, True),
    (64, {"checkpointing": "first-5"}, True),
    # adapters of all layers fill blocks together, and those of one layer do not
    (48, {"lora_rank": 1, "lora_targets": ("q_proj",), "precision": "bf16"}, False),
    (64, {"lora_rank": 16}, True),
    # in bf16, the two norms are half a block together
    (64, {"precision": "bf16"}, False),
    (32, {}, False),
    (96, {"lora_rank": 1}, False),
]


@pytest.mark.parametrize(("hidden", "fields", "is_short"), each(3, IN_BLOCKS))
def test_layers_that_fill_whole_blocks_of_ddps_bucket_are_traced_shortly(hidden, fields, is_short):
    sizes = {"hidden_size": hidden, "head_dim": hidden // 4, "num_key_value_heads": 4}
    shape = deep("llama", 14, **sizes, intermediate_size=80)
    recipe = Recipe(**{"precision": "autocast-bf16", "sharding": "ddp", **fields})
    found, _ = assert_short_is_full(shape, **ASK | OF_TWO | {"recipe": recipe})
    assert bool(found.traced_layers) == is_short


# What is not alike, or not proven, is traced in full.


def test_micro_batches_that_are_not_alike_are_all_traced(monkeypatch):
    """As where the third one did something else than the second."""
    traced = short_traces.traced

    def odd(question, micro_batches=None, few_chunks=False):
        made = traced(question, micro_batches, few_chunks=few_chunks)
        rows = made.rows.copy()
        third_forward = np.flatnonzero(made.places[:, PART] == 5)[3]
        rows[third_forward:, TOTAL] += micro_batches is not None
        return replace(made, rows=rows)

    ask = ASK | {"batch_size": 5, "recipe": Recipe(accumulation=5)}
    full = predict(config("llama"), **ask, full=True)
    monkeypatch.setattr(short_traces, "traced", odd)
    assert np.array_equal(predict(config("llama"), **ask).timeline.rows, full.timeline.rows)


def test_chunks_that_are_not_alike_are_all_traced(monkeypatch):
    source, ask = source_of(llama(5)), ASK | tokens(4) | {"recipe": Recipe(**CHUNKED)}
    few, full = predict(source, **ask), predict(source, **ask, full=True)
    made = trace_few_parts(few._question)
    [start, *_] = np.flatnonzero((made.places[:, 2:] == (CHUNKS, 2)).all(axis=1))
    rows = made.rows.copy()
    rows[start:, TOTAL] += 8
    assert has_equal_chunks(made.changes(), 1)
    assert not has_equal_chunks(replace(made, rows=rows).changes(), 1)
    assert not has_equal_chunks(made.changes(), 2)  # another loss has left no marks
    monkeypatch.setattr(trace, "has_equal_chunks", lambda changes, num_losses: False)
    assert trace_few_parts(few._question).left_out.chunks == 0
    assert np.array_equal(predict(source, **ask).timeline.rows, full.timeline.rows)


@pytest.fixture(scope="module")
def source():
    return source_of(llama())


def test_recipes_that_recompute_other_numbers_of_layers_share_their_traces(source, spy):
    traced, named = spy(short_traces, "traced"), spy(requests, "_named")
    names_after = []
    for k in (3, 4, 5):
        recipe = Recipe(**PLAIN, checkpointing=f"first-{k}")
        predict(source, **ASK | CUDA | {"recipe": recipe}).requests()
        names_after.append(named.call_count)
    assert names_after[2] == names_after[1] > 0  # what the traces prove holds for any k
    # Alone, each would need three, and "first-3", which keeps its three layers whole, two.
    assert traced.call_count == 3 and all(call.args[0].kept for call in traced.call_args_list)


def test_requests_that_short_traces_do_not_prove_are_not_computed(source, monkeypatch):
    """A longer trace that asks for one block more outside of the repeated layer, or frees one that
    is far away.
    """
    asked = ASK | CUDA | {"recipe": Recipe(**PLAIN)}
    short, longer, times = predict(source, **asked)._short
    assert extrapolated_requests(short, longer, times) is not None
    [long] = longer.values()
    after_one_more = [request if request >= 0 else request - 1 for request in long.requests]
    outside = replace(
        long,
        requests=(512, *after_one_more),
        request_places=((0, -1, -1), *long.request_places),
    )
    assert extrapolated_requests(short, {0: outside}, times) is None
    monkeypatch.setattr(requests, "FARTHEST", 0)
    found = predict(source, **asked)
    assert found._short.requests() is None
    assert found.requests() == trace.traced(found._question).requests
