"""The fine-tuning benchmark: three ways on the CPU, and what is predicted for a card."""

from __future__ import annotations

import pytest

from gradmem_lib.units import GiB


@pytest.fixture
def ways(load_writing_elsewhere):
    return load_writing_elsewhere("finetune")


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


def test_figures_for_a_card_without_one(ways, monkeypatch):
    full, lora = ways.cases_8b()[1], ways.cases_8b()[4]
    monkeypatch.setattr(ways, "cases_8b", lambda: [full, lora])
    full, lora = ways.predicted_for_card()
    assert full["live bytes and workspace"] - full["live bytes"] == ways.allocator.workspace()
    assert 16 * GiB < full["live bytes"] < 18.9 * GiB and full["at most torchtune's"]
    assert lora["family"] == "LoRA" and 15.5 < lora["live bytes"] / GiB < 16.7
