"""Lesson 05's runs: their short form has the peaks of the long one, and one update those of any
later one.
"""

import pytest
import torch
from support.nightly import each

from gradmem_lib.course.material import models, smollm2_runs, texts
from gradmem_lib.names import CATEGORIES
from gradmem_lib.training.recipe import Recipe

IN_BF16 = {"precision": "bf16", "accumulation": 8}


@pytest.mark.parametrize(
    "recipe",
    each(
        3,
        [
            Recipe(),
            Recipe(accumulation=8, checkpointing="per-layer"),
            Recipe(accumulation=8, checkpointing="per-layer", precision="autocast-bf16"),
            Recipe(**IN_BF16, checkpointing="per-layer", optimizer="adamw-8bit"),
            Recipe(**IN_BF16, optimizer="adafactor-torch"),
            Recipe(
                precision="bf16",
                accumulation=2,
                optimizer="adamw-8bit",
                lora_rank=4,
                chunked_loss=True,
            ),
        ],
        start=1,
    ),
    ids=str,
)
def test_the_short_form_has_the_peak_of_the_long_one(recipe, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # Trainer's output folder
    tiny = {"layers": 3, "hidden": 64, "intermediate": 160, "vocab": 512, "tied": True}
    monkeypatch.setattr(
        models,
        "smollm2",
        lambda dtype: (models.tiny_llama(**tiny, dtype=dtype or torch.float32), None),
    )
    rows = texts.Rows(
        torch.randint(
            0, 512, (32, smollm2_runs.SEQ_LEN), generator=torch.Generator().manual_seed(0)
        )
    )
    found = {}
    for size, updates, whole in (("ci", 1, False), ("ci", 1, True), ("full", 2, False)):
        monkeypatch.setenv("GRADMEM_SIZE", size)
        run = smollm2_runs.train(recipe, rows, updates=updates, whole=whole, progress=False)
        assert len(run.losses) == updates and run.seconds > 0
        found[size, updates, whole] = run
    long = found.pop(("full", 2, False))
    for case, run in found.items():
        assert run.peak.phase == long.peak.phase, case
        for category in set(CATEGORIES) - {"other"}:  # the token ids of the micro-batches
            apart = run.peak.by_category[category] - long.peak.by_category[category]
            assert abs(apart) <= 4 * recipe.accumulation, (case, category)  # losses
        assert (
            run.tokens
            == (
                smollm2_runs.BATCH // recipe.accumulation
                if case == ("ci", 1, False)
                else smollm2_runs.BATCH
            )
            * smollm2_runs.SEQ_LEN
        )
