"""How a run of tests goes: long files first, and solutions with the settings that their stored outputs were made with."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from build_notebooks import FIXED

SCRATCH = tempfile.TemporaryDirectory(prefix="gradmem-progress-")  # until this process ends

# In a notebook's kernel, after each cell that imports much: garbage collections pass over it, see ``stay``. Every start
# of a ``Trainer`` collects twice, which takes most of a second.
KERNEL_STAYS = """
def _stay_after_imports():
    import gc, sys
    known = len(sys.modules)

    def stay(result):
        nonlocal known
        if len(sys.modules) > known + 200:
            known = len(sys.modules)
            gc.collect()
            gc.freeze()

    get_ipython().events.register("post_run_cell", stay)

_stay_after_imports()
del _stay_after_imports
"""

# Seconds on one core, roughly, of the files that take ten or more. The rest are quick.
SECONDS = {
    "05_fine_tuning.ipynb": 155,
    "06_before_you_rent.ipynb": 100,
    "test_exercises.py": 83,
    "test_browser.py": 81,
    "10_beyond_one_card.ipynb": 73,
    "07_mixed_precision.ipynb": 62,
    "test_claims.py": 66,
    "08_recompute_or_move.ipynb": 62,
    "03_gradient_accumulation.ipynb": 54,
    "test_predict_traces.py": 52,
    "test_predict.py": 50,
    "test_fit.py": 45,
    "test_browser_lessons.py": 42,
    "test_models.py": 24,
    "test_predict_ranks.py": 54,
    "test_finetune.py": 37,
    "test_sharding.py": 50,
    "test_plan_cards.py": 36,
    "test_tracker_ranks.py": 30,
    "04_gradient_checkpointing.ipynb": 35,
    "test_families.py": 34,
    "test_benchmark_finetune.py": 34,
    "test_answers_bank.py": 33,
    "test_best_schedule.py": 32,
    "test_printed_code.py": 31,
    "test_accounting.py": 30,
    "09_optimizers_and_adapters.ipynb": 28,
    "01_memory_accounting.ipynb": 27,
    "test_view.py": 26,
    "test_interrupted.py": 24,
    "test_trainer.py": 24,
    "test_benchmarks.py": 24,
    "02_manual_adam.ipynb": 23,
    "test_tracker.py": 23,
    "test_notebooks.py": 23,
    "test_plan_search.py": 22,
    "test_accumulation.py": 21,
    "test_offload.py": 20,
    "test_plan.py": 19,
    "test_explorer.py": 17,
    "test_tracker_limits.py": 16,
    "test_predict_modules.py": 16,
    "test_bert_large.py": 16,
    "00_start_here.ipynb": 16,
    "test_data_parallel.py": 15,
    "test_checkpointing.py": 15,
    "test_segment_bytes.py": 15,
    "test_benchmark_recompute.py": 14,
    "test_schedule_pictures.py": 14,
    "test_diagnosis.py": 13,
    "test_runs.py": 12,
    "test_selective.py": 11,
    "test_segments.py": 11,
    "test_without_widgets.py": 11,
    "test_lesson_06.py": 10,
    "test_dist.py": 11,
    "test_lesson_08_text.py": 10,
    "test_failure.py": 10,
    "test_programs.py": 10,
    "test_tracker_cases.py": 10,
    "test_precision.py": 10,
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


def ipython_folder() -> str:
    """Settings of IPython for the kernels of notebooks, none of which are the user's."""
    startup = Path(SCRATCH.name, "ipython", "profile_default", "startup")
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "stay.py").write_text(KERNEL_STAYS)
    return str(startup.parent.parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A notebook's kernel starts in the set-up of its first cell, and inherits what the environment says then."""
    if item.path.suffix != ".ipynb":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FIXED.items() if item.config.getoption("nbval") else ():
            patch.setenv(name, value)
        patch.setenv("IPYTHONDIR", ipython_folder())
        if "GRADMEM_PROGRESS" not in os.environ:
            patch.setenv("GRADMEM_PROGRESS", f"{SCRATCH.name}/{item.path.stem}.json")
        return (yield)
