"""The fine-tuning benchmark: three ways on the CPU, and on a card as far as it goes without one."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.model.inputs import example_batch
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step
from gradmem_lib.units import GiB


@pytest.fixture
def tune(load_writing_elsewhere):
    return load_writing_elsewhere("gpu_finetune")


@pytest.fixture
def runs(load):
    return load("gpu_runs")


@pytest.fixture
def ways(load_writing_elsewhere):
    return load_writing_elsewhere("finetune")


def test_what_a_quantized_model_is_built_from_never_was_larger(runs):
    """No matrix of the base in 16 bits at any time, and a loss that is a number."""
    recipe = Recipe(precision="bf16", lora_rank=16, quantized_base=True, chunked_loss=True)
    config = LlamaConfig(**runs.TINY, tie_word_embeddings=True)
    with MemoryTracker(live=False) as tracker:
        run = runs.built(config, recipe, "cpu")
    assert run.model.lm_head.weight is run.model.model.embed_tokens.weight
    kept = sum({p.untyped_storage().data_ptr(): p.nbytes for p in run.model.parameters()}.values())
    assert tracker.peak.total < 1.1 * kept + 4096
    batch = example_batch(run.model, 4, 16)
    assert torch.isfinite(step(run.model, run.optimizer, batch, recipe))
    run.undo.close()


def test_the_caps_are_taken_off_again(runs, monkeypatch):
    fractions = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    card = object.__new__(runs.Card)
    card.whole = 64 * GiB
    with pytest.raises(torch.OutOfMemoryError), card.capped(16 * GiB):
        raise torch.OutOfMemoryError("full")
    with card.capped(None):
        pass
    with card.capped(99 * GiB):
        pass
    assert fractions == [0.25, 1.0, 1.0, 1.0, 1.0]


def test_a_cap_is_a_result_and_so_is_an_error(runs):
    place, config = runs.DryRun(), LlamaConfig(**runs.TINY)
    ask = runs.Ask(config, Recipe(), 2, 16, cap=1000)
    assert "out of memory" in runs.tried(place, ask, float("inf")) and place.cap is None
    assert "left out" in runs.tried(place, replace(ask, cap=None), deadline=0.0)

    def breaks():
        raise ValueError("no such thing\nat all")

    assert runs.outcome(breaks) == {"error": "ValueError: no such thing"}


def pretend_runs(tune, monkeypatch) -> None:
    """A card of 80 GiB, on which all runs need 17; with whole logits and LoRA of rank 16 they fail
    under a cap.
    """
    place = SimpleNamespace(tiny=False, device="cpu", total=80 * GiB, whole=80 * GiB)

    def tried(place, ask, deadline):
        hf = not ask.recipe.chunked_loss
        if hf and ask.cap is not None and ask.recipe.lora_rank == 16:
            return {"out of memory": "full"}
        return {
            "allocated": 17 * GiB,
            "reserved": 18 * GiB,
            "rows/s": 2.0 if hf else 3.0,
            "seconds a step": 1.0,
        }

    monkeypatch.setattr(tune, "place_of", lambda dry: place)
    monkeypatch.setattr(tune, "tried", tried)
    monkeypatch.setattr(tune, "needed", lambda place, config, recipe, rows, tokens: 20 * GiB)


def test_what_fine_tuning_on_a_card_writes(tune, monkeypatch, tmp_path, capsys):
    pretend_runs(tune, monkeypatch)
    assert tune.main([]) == 0
    written = json.loads((tmp_path / "gpu_finetune.json").read_text())
    assert written["card bytes"] == 80 * GiB
    assert [len(written[name]) for name in tune.PARTS] == [15, 9]
    full, lora, *_ = written["8B against torchtune and HF defaults"]
    assert full["family"] == tune.FULL and full["reached, allocated"] and full["reached, reserved"]
    assert full["tokens/s to HF defaults"] == 1.5
    assert (
        lora["family"] == tune.LORA
        and not lora["reached, allocated"]
        and lora["allocated GiB"] == 17.0
    )
    again = [row for row in written["Llama-3.1-8B"] if "under the cap" in row]
    assert again and all(row["cap"] is None and row["tokens/s"] == 4096.0 for row in again)
    assert written["BERT-large"][0]["samples/s"] == 2.0 and "rows/s" not in written["BERT-large"][0]
    printed = capsys.readouterr().out
    assert "1.5 times the tokens/s of HF defaults" in printed and "measured today" in printed


def test_a_part_that_breaks_is_written_down_and_the_next_begins(
    tune, monkeypatch, tmp_path, capsys
):
    pretend_runs(tune, monkeypatch)

    def refuses(place, config, recipe, rows, tokens):
        raise RuntimeError("the card answers no more")

    monkeypatch.setattr(tune, "needed", refuses)
    assert tune.main([]) == 0
    written = json.loads((tmp_path / "gpu_finetune.json").read_text())
    assert written["Llama-3.1-8B"] == [
        {"name": "Llama-3.1-8B", "error": "RuntimeError: the card answers no more"}
    ]
    assert len(written["BERT-large"]) == 9
    assert "Stopped. Llama-3.1-8B: error: RuntimeError" in capsys.readouterr().out


def test_fine_tuning_keeps_its_time(tune, monkeypatch, tmp_path, capsys):
    pretend_runs(tune, monkeypatch)
    assert tune.main(["--seconds", "-1"]) == 0
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out.count("was up") == len(tune.PARTS)


def test_three_ways_on_the_cpu(ways):
    found = ways.three_ways(dry=True, steps=2)
    assert list(found["ways"]) == [ways.NAIVE, ways.DEFAULTS, ways.OURS]
    assert found["holds"]["same rows in the same order"]
    # Trainer brings its rows as tensors of their own (some KiB), beside what is predicted.
    for way, result in found["ways"].items():
        assert 0 <= result["peak bytes"] - result["predicted bytes"] < 128 * 1024, way
        assert result["held-out loss before"] == pytest.approx(6.25, abs=0.05)
        assert sum(result["at the peak"].values()) == result["peak bytes"]
    assert found["ways"][ways.OURS]["learning rate"] == ways.OUR_RATE
    assert found["to naive"][ways.NAIVE] == {"peak bytes": 1.0, "tokens/s": 1.0}
    assert found["holds"]["peak at most a quarter of naive's"]


def test_the_combined_form_is_the_first_that_fits(ways):
    forms = ways.candidates()
    assert [(form.checkpointing, form.accumulation) for form in forms] == [
        (again, pieces) for again in (None, "per-layer") for pieces in (1, 2, 4, 8)
    ]
    sizes = dict(zip(forms, (90, 70, 50, 40, 30, 25, 22, 21), strict=True))
    assert ways.first_that_fits(forms, sizes.get, 60) == forms[2]
    assert ways.first_that_fits(forms, sizes.get, 10) == forms[-1]


def test_a_promise_that_is_not_kept_shows(ways):
    naive = {"peak bytes": 400, "held-out loss after": 2.0}
    kept = ways.held(naive, {"peak bytes": 100, "held-out loss after": 2.02})
    broken = ways.held(naive, {"peak bytes": 101, "held-out loss after": 2.021})
    assert all(kept.values()) and not any(broken.values())


def test_figures_for_a_card_without_one(tune, capsys, monkeypatch):
    two = [case for case in tune.cases_8b() if case.way == tune.OUR_WAY][:2]
    monkeypatch.setattr(tune, "cases_8b", lambda: two)
    full, lora = tune.predicted_for_card()
    assert full["live bytes and workspace"] - full["live bytes"] == tune.allocator.workspace()
    assert 16 * GiB < full["live bytes"] < 18.9 * GiB and full["at most torchtune's"]
    assert lora["family"] == tune.LORA and 15.5 < lora["live bytes"] / GiB < 16.7
