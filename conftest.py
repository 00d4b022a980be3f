"""How a run of tests goes: long files first, and solutions with the settings that their stored
outputs were made with.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from build_notebooks import FIXED

SCRATCH = tempfile.TemporaryDirectory(prefix="gradmem-progress-")  # until this process ends

# In a notebook's kernel, after each cell that imports much: garbage collections pass over it, see
# ``stay``. Every start of a ``Trainer`` collects twice, which takes most of a second.
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

# Seconds of a processor, roughly, of the files that take seven or more. The rest are quick.
SECONDS = {
    "05_fine_tuning.ipynb": 120,
    "06_before_you_rent.ipynb": 85,
    "test_browser.py": 78,
    "10_beyond_one_card.ipynb": 73,
    "03_gradient_accumulation.ipynb": 56,
    "test_predict_ranks.py": 54,
    "08_recompute_or_move.ipynb": 52,
    "04_gradient_checkpointing.ipynb": 50,
    "test_sharding.py": 50,
    "07_mixed_precision.ipynb": 48,
    "test_claims.py": 41,
    "test_browser_lessons.py": 38,
    "test_plan_peft.py": 38,
    "01_memory_accounting.ipynb": 37,
    "test_plan_cards.py": 36,
    "test_families.py": 45,
    "test_answers_bank.py": 32,
    "test_exercises.py": 32,
    "09_optimizers_and_adapters.ipynb": 30,
    "11_make_it_fit.ipynb": 30,
    "test_predict.py": 30,
    "test_tracker_ranks.py": 30,
    "02_manual_adam.ipynb": 26,
    "test_notebooks.py": 26,
    "test_fit.py": 22,
    "test_predict_traces.py": 22,
    "test_models.py": 21,
    "test_puzzles.py": 21,
    "test_best_schedule.py": 20,
    "test_benchmark_finetune.py": 19,
    "test_benchmarks.py": 18,
    "00_start_here.ipynb": 17,
    "test_view.py": 17,
    "test_tracker.py": 17,
    "test_accounting.py": 16,
    "test_finetune.py": 15,
    "test_benchmark_recompute.py": 15,
    "test_data_parallel.py": 15,
    "test_printed_code.py": 14,
    "test_predict_modules.py": 14,
    "test_plan.py": 13,
    "test_without_widgets.py": 13,
    "test_bert_large.py": 13,
    "test_checkpointing.py": 12,
    "test_plan_search.py": 11,
    "test_offload.py": 11,
    "test_tracker_limits.py": 11,
    "test_schedule_pictures.py": 11,
    "test_interrupted.py": 10,
    "test_diagnosis.py": 9,
    "test_causes.py": 9,
    "test_lesson_08_text.py": 9,
    "test_benchmark_optimizers.py": 9,
    "test_selective.py": 9,
    "test_segments.py": 9,
    "test_lesson_06.py": 8,
    "test_compat.py": 8,
    "test_guesses.py": 7,
    "test_explorer.py": 7,
    "test_dist.py": 7,
    "test_accumulation.py": 7,
}


def seconds(path) -> int:
    return SECONDS.get(path.name, 0)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out the files that take seven seconds or more"
    )


def pytest_ignore_collect(collection_path, config):
    return True if config.getoption("--quick") and seconds(collection_path) else None


def pytest_collection_modifyitems(items) -> None:
    # Two workers end together if what takes minutes is not what comes last. The order within a file
    # stays.
    items.sort(key=lambda item: -seconds(item.path))


def stay() -> None:
    """Garbage collections pass over what exists now.

    Many tests collect, and thousands of tests and modules are no garbage.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # of what the tests import nothing is garbage, and looking for it takes a third of the time
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


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
    """A notebook's kernel starts in the set-up of its first cell, and inherits what the environment
    says then.
    """
    if item.path.suffix != ".ipynb":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FIXED.items() if item.config.getoption("nbval") else ():
            patch.setenv(name, value)
        patch.setenv("IPYTHONDIR", ipython_folder())
        if "GRADMEM_PROGRESS" not in os.environ:
            patch.setenv("GRADMEM_PROGRESS", f"{SCRATCH.name}/{item.path.stem}.json")
        return (yield)
