"""How a run of tests goes: long files first, and solutions with the settings that their stored outputs were made with."""

from __future__ import annotations

import os
import tempfile

import pytest
from build_notebooks import FIXED

SCRATCH = tempfile.TemporaryDirectory(prefix="gradmem-progress-")  # until this process ends

# Seconds on one core, roughly, of the files that take ten or more. The rest are quick.
SECONDS = {
    "test_browser_lessons.py": 300,
    "05_fine_tuning.ipynb": 200,
    "test_families.py": 150,
    "test_plan.py": 150,
    "test_exercises.py": 130,
    "test_benchmarks.py": 110,
    "test_browser.py": 100,
    "test_notebooks.py": 90,
    "test_predict.py": 70,
    "test_tracker.py": 40,
    "test_accounting.py": 60,
    "test_best_schedule.py": 50,
    "test_predict_traces.py": 80,
    "test_accumulation.py": 50,
    "test_finetune.py": 55,
    "test_interrupted.py": 35,
    "test_tracker_limits.py": 40,
    "test_schedule_pictures.py": 35,
    "test_schedule.py": 12,
    "04_gradient_checkpointing.ipynb": 40,
    "03_gradient_accumulation.ipynb": 35,
    "01_memory_accounting.ipynb": 30,
    "test_trainer.py": 40,
    "test_predict_modules.py": 30,
    "test_programs.py": 25,
    "test_checkpointing.py": 25,
    "test_segment_bytes.py": 20,
    "test_segments.py": 15,
    "02_manual_adam.ipynb": 20,
    "test_claims.py": 20,
    "test_models.py": 20,
    "test_view.py": 15,
    "test_recipe.py": 15,
    "test_predict_card.py": 18,
    "test_bert_large.py": 15,
    "00_start_here.ipynb": 12,
}


def seconds(path) -> int:
    return SECONDS.get(path.name, 0)


def pytest_addoption(parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files that take ten seconds or more")


def pytest_ignore_collect(collection_path, config):
    return True if config.getoption("--quick") and seconds(collection_path) else None


def pytest_collection_modifyitems(items) -> None:
    # Two workers end together if what takes minutes is not what comes last. The order within a file stays.
    items.sort(key=lambda item: -seconds(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A notebook's kernel starts in the set-up of its first cell, and inherits what the environment says then."""
    if item.path.suffix != ".ipynb":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FIXED.items() if item.config.getoption("nbval") else ():
            patch.setenv(name, value)
        if "GRADMEM_PROGRESS" not in os.environ:
            patch.setenv("GRADMEM_PROGRESS", f"{SCRATCH.name}/{item.path.stem}.json")
        return (yield)
