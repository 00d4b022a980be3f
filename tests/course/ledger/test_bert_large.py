"""The BERT-large table: replays against closed forms and against predict, the record, and the
printed table.
"""

from __future__ import annotations

import json

import pytest
import record_bert_large
import torch
import torch.nn.functional as F

from gradmem_lib.course.ledger import bert_large
from gradmem_lib.course.ledger.bert_large import BATCH_SIZE, CONTEXT_MIB, LOADED_MIB, RUNS, SAMPLES
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.units import MiB

BY_NAME = {run.name: run for run in RUNS}
SCORES = BATCH_SIZE * 16 * 512 * 512 * 4  # bytes of one layer's attention scores in float32


def test_published_rows_agree_with_themselves():
    assert len(BY_NAME) == len(RUNS) == 9
    for run in RUNS:
        assert run.per_second == pytest.approx(SAMPLES / run.seconds, abs=0.006)
        assert run.recipe.attention == "eager" and run.recipe.micro_batch(BATCH_SIZE) in (1, 4)
        assert run.name.startswith("1 x 4") == (run.recipe.accumulation == 4)
        assert ("checkpointing" in run.name) == (run.recipe.checkpointing == "per-layer")
        assert ("fp16" in run.name) == (run.recipe.precision == "autocast-fp16")


def test_the_loaded_model_is_the_published_one_to_the_mebibyte():
    """The first tensor's segment of 2 MiB is in both published figures, and the model's small
    tensors move into it.
    """
    assert sum(p.numel() for p in bert_large.model().parameters()) == 335_143_938
    assert CONTEXT_MIB - 2 + bert_large.loaded() / MiB == LOADED_MIB


def test_replay_adds_what_arithmetic_says_and_finds_the_record_again():
    run = BY_NAME["batch 4"]
    found = bert_large.replayed(run)
    for stage in ("gradients zeroed", "softmax input"):
        assert record_bert_large.replay(run, stage) == found[stage], (
            "run: python tools/record_bert_large.py"
        )
    assert found["softmax input"].live - found["gradients zeroed"].live == 24 * SCORES
    gradients = sum(p.nbytes for p in bert_large.model().parameters())
    assert 0.99 * gradients < found["gradients zeroed"].live - found["today"].live <= gradients
    assert all(replayed.reserved > replayed.live for replayed in found.values())


@pytest.mark.parametrize("name", ["batch 4", "1 x 4, checkpointing"])
def test_todays_replay_peaks_where_predict_says(name):
    """They differ by AdamW's step counters alone, which live on the host, and which a cold start
    does not tell from others.
    """
    counters = 512 * len(list(bert_large.model().parameters()))
    run = BY_NAME[name]
    fewer_ids = (
        0 if run.recipe.accumulation == 1 else 2 * 512 * 8
    )  # a replay of two micro-batches has two rows
    more = bert_large.replayed(run)["today"].live - bert_large.predicted(run).peak.total
    assert more == counters - fewer_ids


def test_two_micro_batches_stand_for_four():
    run = BY_NAME["1 x 4, checkpointing, fp16, 8-bit Adam"]
    assert record_bert_large.replay(run) == bert_large.replayed(run)["old AdamW"]
    assert bert_large.replayed(run)["today"].live == pytest.approx(
        bert_large.predicted(run).peak.total, rel=1e-4
    )


def test_record_explains_every_published_figure():
    """Each cause has a size of its own, and none of them is fitted."""
    found = {row.run.name: row for row in bert_large.rows()}
    assert list(found) == list(BY_NAME)
    assert all(abs(row.difference) < 0.005 * row.run.mib for row in found.values())
    for name, row in found.items():
        if "check" in name:
            scores = 0
        else:
            scores = 24 * SCORES / MiB / (4 if "1 x 4" in name else 1)
        assert row.parts["softmax"] == pytest.approx(scores)
    # Each layer's input of GELU takes two bytes a number more, and the last layer's output is there
    # in float32 at the peak.
    gelu, numbers = bert_large.replayed(BY_NAME["batch 4, fp16"]), BATCH_SIZE * 512 * 4096
    assert (
        gelu["GELU in float32"].live - gelu["softmax input"].live == 24 * 2 * numbers + 4 * numbers
    )


def test_softmax_of_2022_keeps_its_input_and_has_the_same_gradient():
    x = torch.randn(3, 5, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.data_ptr()) or t, lambda t: t
    ):
        out = record_bert_large.SoftmaxOf2022.apply(x)
    assert set(sizes) == {out.data_ptr(), x.data_ptr()}
    weights = torch.randn(3, 5)
    (old,) = torch.autograd.grad((out * weights).sum(), x)
    (new,) = torch.autograd.grad((F.softmax(x, -1) * weights).sum(), x)
    assert torch.equal(old, new)


def test_adamw_of_2022_has_one_temporary_where_torch_has_two():
    def most(make):
        p = torch.nn.Parameter(torch.ones(256, 256))
        optimizer = make([p])
        for _ in range(2):
            p.grad = torch.ones_like(p)
            with MemoryTracker(torch.nn.ParameterList([p]), optimizer) as tracker:
                optimizer.step()
        return max(tracker.timeline.by_category["temporaries"]) / p.nbytes

    assert most(record_bert_large.AdamWOf2022) == pytest.approx(1, abs=0.01)
    assert most(lambda ps: torch.optim.AdamW(ps, foreach=False, fused=False)) == pytest.approx(
        2, abs=0.01
    )


def test_batch_and_model_are_what_a_benchmark_runs():
    batch = bert_large.batch(2, "cpu")
    assert batch["input_ids"].shape == (2, 512) and batch["labels"].shape == (2,)
    assert int(batch["input_ids"].min()) >= 100
    assert type(bert_large.model()).__name__ == bert_large.config().architectures[0]
    assert next(bert_large.model().parameters()).is_meta


def test_table_prints_every_run():
    text = bert_large.table()
    lines = text.splitlines()
    names = [name.replace(", checkpointing", " + ckpt") for name in BY_NAME]
    assert [line[:30].rstrip() for line in lines[1:10]] == names
    assert max(map(len, lines)) <= 100  # what a notebook shows without a break
    assert "14,949" in lines[1]
    assert all(f"\n{name}: " in text for name in [*bert_large.CAUSES, "left"])


def test_record_is_written_as_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(record_bert_large, "replay", lambda run, stage: bert_large.Replayed(1, 2))
    path, said = tmp_path / "record.json", []
    record_bert_large.write_record(path, said.append)
    monkeypatch.setattr(bert_large, "RECORD", path)
    assert len(said) == 9 and json.loads(path.read_text())["torch"]
    assert bert_large.replayed(RUNS[0]) == {stage: (1, 2) for stage in bert_large.STAGES}
