"""What lesson 11 says that its own cells do not compute."""

from __future__ import annotations

import os

import pytest
from support.lesson_text import lesson

from gradmem_lib.course import puzzle
from gradmem_lib.course.lessons.lesson_11.exercises import QLORA
from gradmem_lib.model.known import model_table


@pytest.mark.skipif(not os.environ.get("GRADMEM_ALL"), reason="what moves has to be predicted")
def test_larger_pieces_hardly_make_11_5_faster():
    one, moved = puzzle("11.5"), QLORA | {"offload": "activations"}
    slow, fast = [one.weigh(one.recipe(moved | {"accumulation": n})) for n in (8, 2)]
    saved = 100 * (1 - fast.seconds / slow.seconds)
    assert lesson("11").says(f"four rows at once save {saved:.0f} % of the time")


def test_how_many_models_plan_knows():
    assert lesson("11").says("`plan` knows more than 250 models by name")
    assert 250 < len(model_table()) < 300
