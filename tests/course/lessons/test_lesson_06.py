"""What lesson 06 says in figures that none of its cells prints."""

import math

import pytest
from support.paths import ROOT

from gradmem_lib import MemoryTracker, Recipe, find_card, known_model, predict
from gradmem_lib.course.ledger import published
from gradmem_lib.course.lessons.lesson_06 import exercises_models as exercises
from gradmem_lib.prediction.allocator import CONTEXT
from gradmem_lib.units import GiB, MiB

SOURCE = ROOT / "solutions" / "06_before_you_rent.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())


def asked(model: str, rows: int, tokens: int, **recipe):
    config = known_model(model)[1]
    recipe = Recipe(precision="bf16", **recipe)
    return predict(config, batch_size=rows, seq_len=tokens, recipe=recipe, target="cuda").peak


@pytest.mark.parametrize("setting", [exercises.classifier_setting, exercises.t5_setting])
def test_cards_and_peaks_of_its_exercises(setting):
    model, optimizer, *batch = setting()
    batch = batch[0] if isinstance(batch[0], dict) else tuple(batch)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        exercises._mean(model, batch).backward()
    if isinstance(batch, dict):
        assert (
            f"takes {tracker.peak.total / 1e6:.1f} MB" in TEXT
            and f"**{exercises.T5_CARD}**" in TEXT
        )
    else:
        assert (
            "The plain step of section 3 takes twice that" in TEXT
            and f"**{exercises.CLASSIFIER_CARD}**" in TEXT
        )
        assert 1.9 < tracker.peak.total / MiB / float(exercises.CLASSIFIER_CARD.split()[0]) < 2.1


def test_the_explorers_first_question():
    card = find_card("RTX 4090 24GB").nbytes - CONTEXT
    xl, seven = asked("GPT-2 XL", 1, 512), asked("Llama-2-7B", 1, 512)
    assert xl.total < card < asked("Llama-2-7B", 1, 512).total
    assert f"GPT-2 XL, with {xl.total / GiB:.0f} GiB." in TEXT
    states = (
        sum(seven.by_category[name] for name in ("parameters", "optimizer")) + 2 * 6_738_415_616
    )
    assert f"gradients and states alone are {states / GiB:.0f}." in TEXT


def test_the_explorers_second_and_third_question():
    def more_than_half(rows, tokens):
        peak = asked("SmolLM2-135M", rows, tokens, attention="eager")
        return peak.by_category["activations"] > peak.total / 2

    says = (
        "With 4 rows, they do so between 128 and 256 tokens. With one row, they do so a little "
        "above 512."
    )
    assert says in TEXT
    crossed = [more_than_half(*size) for size in ((4, 128), (4, 256), (1, 512), (1, 576))]
    assert crossed == [False, True, False, True]
    parts = asked("Llama-3.2-1B", 8, 1024).by_category
    logits = 8 * 1024 * 128_256 * 4
    assert max(parts, key=lambda name: parts[name]) == "activations"
    assert (
        f"Activations, {parts['activations'] / GiB:.0f} GiB, of which the log-softmax of the "
        f"logits has {logits / GiB:.0f}."
    ) in TEXT
    assert (
        math.isclose(parts["temporaries"], 2 * logits, rel_tol=0.001)
        and f"come {2 * logits / GiB:.0f} GiB of temporaries" in TEXT
    )


def test_half_the_rows_need_what_it_says():
    config = known_model("SmolLM2-135M")[1]
    four, two = (
        predict(config, batch_size=rows, seq_len=256, recipe=Recipe(), target="cuda").peak.total
        for rows in (4, 2)
    )
    assert f"half the rows need {100 * two / four:.0f} % of the bytes" in TEXT


def test_what_it_says_of_the_published_rows():
    off = {
        (row.source.split(",")[0], row.run): row.predicted / row.published - 1
        for row in published.rows()
    }
    worst = max(off, key=lambda name: abs(off[name]))
    assert (
        worst == ("torchtune", "LoRA")
        and f"torchtune's LoRA, is {100 * off[worst]:.1f} % too high" in TEXT
    )
    assert sum(abs(error) < 0.01 for error in off.values()) > len(off) / 2
