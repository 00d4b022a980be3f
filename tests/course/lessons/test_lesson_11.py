"""Lesson 11's hints and its worked example quote what the puzzles weigh, and no hint gives an
answer away.
"""

from __future__ import annotations

import os
import re

import pytest
from support.paths import ROOT

from gradmem_lib.course import puzzle
from gradmem_lib.units import GiB

SOURCE = (ROOT / "solutions" / "11_make_it_fit.py").read_text(encoding="utf-8")
TEXT = " ".join(SOURCE.replace("\n# ", " ").split())
NAMES: dict = {}
exec("\n".join(re.findall(r"^\w+ = .*\{\".*", SOURCE.partition("## 2")[0], re.MULTILINE)), NAMES)
QUOTED = re.compile(r"`([^`]+)` needs ([\d.]+) GiB: ((?:\w+ [\d.]*\d(?:, )?)+)")


def breakdowns() -> list[tuple[str, str, str, str]]:
    """(id, recipe, GiB, parts) of every breakdown in a hint."""
    sections = re.split(r"### Exercise (11\.\d+)", TEXT)
    return [
        (id, *found)
        for id, text in zip(sections[1::2], sections[2::2], strict=True)
        for found in QUOTED.findall(text)
    ]


def rounded(nbytes: int, like: str) -> str:
    return f"{nbytes / GiB:.{len(like.partition('.')[2])}f}"


def test_hints_have_breakdowns():
    assert len(breakdowns()) >= 18 and TEXT.count("` needs ") == len(breakdowns())


@pytest.mark.parametrize(
    ("id", "expression", "needs", "parts"), breakdowns(), ids=lambda value: value[:24]
)
def test_a_hint_quotes_what_a_recipe_needs_that_is_no_answer(id, expression, needs, parts):
    assert f"`{expression}` needs {needs} GiB: {parts}" in TEXT
    answer = eval(expression, dict(NAMES))
    wrong, weighed = puzzle(id).judge(answer)
    assert wrong and weighed is not None
    assert needs == rounded(weighed.needs, needs)
    for name, figure in (part.split() for part in parts.split(", ")):
        assert figure == rounded(weighed.held[name], figure), name


def test_the_worked_example_goes_as_it_is_told():
    first = NAMES["bf16"] | {"accumulation": 8}
    steps = [first, first | NAMES["again"], first | NAMES["again"] | NAMES["chunks"]]
    steps.append(NAMES["bf16"] | NAMES["chunks"] | {"accumulation": 8, "optimizer": "adamw-8bit"})
    example = puzzle("11.0")
    weighed = [example.judge(step)[1] for step in steps]
    assert [one.spare >= 0 for one in weighed] == [False, False, True, True]
    assert [example.stars(one.seconds).count("★") for one in weighed[2:]] == [2, 3]
    held = [one.held for one in weighed]
    assert 0.2 < held[1]["activations"] / held[0]["activations"] < 0.3
    assert weighed[1].phase == "backward" and rounded(held[1]["temporaries"], "2") == "2"
    assert rounded(held[3]["activations"] - held[2]["activations"], "3.5") == "3.5"
    assert max(held[2], key=held[2].get) == "optimizer" and weighed[3].needs > weighed[2].needs


def test_what_is_left_of_11_5_is_less_than_one_rows_activations():
    one, kept = puzzle("11.5"), NAMES["qlora"] | {"accumulation": 8}
    weighed = one.weigh(one.recipe(kept))
    assert "In 11.5, gigabytes stay free." in TEXT
    assert f"those of one row are {rounded(weighed.held['activations'], '10.6')} GiB" in TEXT
    assert (
        weighed.spare < 0 and one.best()[0].offload == "activations" and one.best()[1].spare > GiB
    )


@pytest.mark.skipif(not os.environ.get("GRADMEM_ALL"), reason="what moves has to be predicted")
def test_larger_pieces_hardly_make_11_5_faster():
    one, moved = puzzle("11.5"), NAMES["qlora"] | {"offload": "activations"}
    by_rows = [one.weigh(one.recipe(moved | {"accumulation": n})) for n in (8, 2)]
    assert all(weighed.spare > GiB for weighed in by_rows)
    assert (
        f"four rows at once save {100 * (1 - by_rows[1].seconds / by_rows[0].seconds):.0f} %"
        in TEXT
    )


def test_sums_that_the_lesson_states():
    from gradmem_lib import known_model
    from gradmem_lib.course.material import models
    from gradmem_lib.prediction.configs import skeleton

    def weights(name: str) -> int:
        return sum(p.numel() for p in skeleton(known_model(name)[1]).parameters())

    small, seven = weights("Llama-3.2-1B"), weights("Llama-2-7B")
    assert f"Llama-3.2-1B has {small / 1e9:.2f} billion weights" in TEXT
    assert f"{seven / 1e9:.2f} billion weights: {2 * seven / GiB:.1f} GiB in bf16" in TEXT
    words = known_model("Llama-3.2-1B")[1].vocab_size
    logits = 2048 * words
    assert f"{words:,} words, so a row of 2,048 tokens has {logits / 1e6:.0f} million" in TEXT
    assert rounded(8 * logits, "2") == "2"
    smol = models.smollm2()[0].num_parameters()
    assert "Its weights in float32 alone are more." in TEXT and 4 * smol > GiB // 2


def test_how_many_models_plan_knows():
    from gradmem_lib.planning.models import model_table

    assert "`plan` knows more than 150 models by name" in TEXT and 150 < len(model_table()) < 200
