"""A few chunks of a loss stand for all: timeline and reserved bytes are those of every chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.predicted import assert_short_is_full, on_targets

from gradmem_lib import Recipe, predict
from gradmem_lib.course import models
from gradmem_lib.measure.timeline import TOTAL
from gradmem_lib.prediction import trace
from gradmem_lib.prediction.chunks import TRACED_CHUNKS
from gradmem_lib.prediction.extrapolation import has_equal_chunks
from gradmem_lib.prediction.marks import CHUNKS
from gradmem_lib.prediction.predict import source_of
from gradmem_lib.prediction.short_traces import trace_few_parts
from gradmem_lib.techniques.losses import CHUNK_TOKENS

PLAIN = Recipe(precision="bf16", optimizer="adamw-fused", chunked_loss=True)


@pytest.fixture(scope="module")
def source():
    config = models.tiny_llama(layers=5, hidden=64, heads=4, intermediate=172, vocab=512)
    return source_of(config.config)


@pytest.mark.parametrize(
    ("recipe", "rows", "seq_len", "target"),
    on_targets(
        [
            (PLAIN, 1, 8 * CHUNK_TOKENS),
            (PLAIN, 2, 3 * CHUNK_TOKENS + 5),  # the last chunk has fewer tokens
            (PLAIN, 1, 5 * CHUNK_TOKENS + 1),
            (PLAIN, 1, 3 * CHUNK_TOKENS),  # too few to leave any out
            (replace(PLAIN, accumulation=4), 8, 4 * CHUNK_TOKENS),
            (replace(PLAIN, accumulation=2, checkpointing="first-2"), 4, 3 * CHUNK_TOKENS),
            (
                replace(PLAIN, precision="autocast-bf16", optimizer="adamw-8bit"),
                2,
                3 * CHUNK_TOKENS,
            ),
            (replace(PLAIN, lora_rank=2, checkpointing="per-layer"), 2, 4 * CHUNK_TOKENS),
            (replace(PLAIN, optimizer="adafactor-torch", in_backward=True), 2, 4 * CHUNK_TOKENS),
        ],
    ),
)
def test_few_chunks_say_what_all_say(source, recipe, rows, seq_len, target):
    ask = {"batch_size": rows, "seq_len": seq_len, "recipe": recipe, "target": target}
    few = assert_short_is_full(source, **ask)
    left_out = trace_few_parts(few._question).left_out.chunks
    chunks = -(-rows // recipe.accumulation * seq_len // CHUNK_TOKENS)
    assert left_out == max(0, chunks - TRACED_CHUNKS)


def test_chunks_that_are_not_alike_are_all_traced(source, monkeypatch):
    ask = {"batch_size": 1, "seq_len": 8 * CHUNK_TOKENS, "recipe": PLAIN, "target": "cpu"}
    few, full = predict(source, **ask), predict(source, **ask, full=True)
    traced = trace_few_parts(few._question)
    [start, *_] = np.flatnonzero((traced.places[:, 2:] == (CHUNKS, 2)).all(axis=1))
    rows = traced.rows.copy()
    rows[start:, TOTAL] += 8
    assert has_equal_chunks(traced.changes(), 1)
    assert not has_equal_chunks(replace(traced, rows=rows).changes(), 1)
    assert not has_equal_chunks(traced.changes(), 2)  # another loss has left no marks

    monkeypatch.setattr(trace, "has_equal_chunks", lambda changes, num_losses: False)
    assert trace_few_parts(few._question).left_out.chunks == 0
    assert np.array_equal(predict(source, **ask).timeline.rows, full.timeline.rows)
