"""Imports of before the floors still work, and give the module itself, not a second copy of it."""

import subprocess
import sys
from importlib import import_module

import pytest

from gradmem_lib.moved import BESIDES, MOVED


@pytest.mark.parametrize("name", MOVED)
def test_a_module_is_one_under_both_names(name):
    home = import_module(f"gradmem_lib.{MOVED[name]}")
    spec = home.__spec__
    assert import_module(f"gradmem_lib.{name}") is home
    assert home.__spec__ is spec and home.__name__ == f"gradmem_lib.{MOVED[name]}"
    for own, place in BESIDES.get(name, {}).items():
        there = import_module(f"gradmem_lib.{place}")
        assert getattr(home, own) is getattr(there, own, there)


def test_the_lines_of_an_older_notebook_run():
    lines = (
        "from gradmem_lib import models, texts, claims\n"
        "from gradmem_lib.exercises import all_exercises, check, get, core\n"
        "from gradmem_lib.exercises.lesson_04 import EXERCISES\n"
        "from gradmem_lib.accumulation import accumulate_gradients, next_token_loss, split\n"
        "from gradmem_lib.checkpointing import best_segments, checkpoint_layers\n"
        "from gradmem_lib.recipe import LoRALinear, Recipe, add_lora\n"
        "from gradmem_lib.tracker import BudgetExceeded, MemoryTracker\n"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", lines], check=True)


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        import_module("gradmem_lib.nothing")
