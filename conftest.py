"""How a run of tests goes: long files first, and solutions with the settings that their stored outputs were made with."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
from build_notebooks import FIXED

SCRATCH = tempfile.TemporaryDirectory(prefix="gradmem-progress-")  # until this process ends

# Seconds on one core, roughly, of the files that take ten or more. The rest are quick.
SECONDS = {
    "05_fine_tuning.ipynb": 230,
    "06_before_you_rent.ipynb": 120,
    "04_gradient_checkpointing.ipynb": 120,
    "03_gradient_accumulation.ipynb": 110,
    "test_browser.py": 105,
    "07_mixed_precision.ipynb": 80,
    "08_recompute_or_move.ipynb": 80,
    "test_predict_traces.py": 85,
    "test_exercises.py": 75,
    "test_browser_lessons.py": 70,
    "01_memory_accounting.ipynb": 60,
    "test_finetune.py": 55,
    "test_models.py": 50,
    "test_accounting.py": 50,
    "test_predict.py": 45,
    "02_manual_adam.ipynb": 45,
    "test_best_schedule.py": 40,
    "test_claims.py": 40,
    "test_tracker.py": 35,
    "test_interrupted.py": 35,
    "test_trainer.py": 35,
    "test_families.py": 35,
    "test_view.py": 30,
    "test_printed_code.py": 30,
    "test_runs.py": 30,
    "test_accumulation.py": 30,
    "test_notebooks.py": 30,
    "test_answers_bank.py": 30,
    "test_benchmark_finetune.py": 25,
    "test_benchmark_recompute.py": 12,
    "test_benchmarks.py": 25,
    "test_lesson_06.py": 30,
    "test_lesson_08_text.py": 25,
    "test_failure.py": 20,
    "test_programs.py": 20,
    "test_tracker_limits.py": 20,
    "test_predict_modules.py": 20,
    "test_data_parallel.py": 20,
    "test_bert_large.py": 15,
    "test_schedule_pictures.py": 15,
    "test_plan.py": 15,
    "test_checkpointing.py": 15,
    "test_fit.py": 30,
    "test_offload.py": 30,
    "test_selective.py": 15,
    "test_segment_bytes.py": 12,
    "test_segments.py": 12,
    "test_plan_search.py": 12,
    "00_start_here.ipynb": 12,
    "test_tracker_cases.py": 10,
    "test_precision.py": 15,
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


def stay() -> None:
    """Garbage collections pass over what exists now. Many tests collect, and thousands of tests and modules are no garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    stay()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    done = yield
    if nextitem is None or nextitem.path != item.path:
        stay()  # what this file has imported
    return done


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
