"""How a run of tests goes: long files first, and solutions with the settings that their stored
outputs were made with.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
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

# The seconds of each file of tests and each notebook, as the last recorded run took them.
DURATIONS = Path(__file__).parent / "tests" / "durations.json"
LONG = 4  # seconds from which on a file is left out by --quick
RECORDED: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help=f"leave out files that take {LONG} seconds or more"
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write the seconds of each file that runs to tests/durations.json",
    )


def seconds(path: Path, rootpath: Path) -> float:
    return RECORDED.get(path.relative_to(rootpath).as_posix(), 0)


def pytest_ignore_collect(collection_path, config):
    if not config.getoption("--quick") or collection_path.is_dir():
        return None
    return True if seconds(collection_path, config.rootpath) >= LONG else None


def pytest_collection_modifyitems(config, items) -> None:
    # Two workers end together if what takes minutes is not what comes last. The order within a file
    # stays.
    items.sort(key=lambda item: -seconds(item.path, config.rootpath))


class Recorder:
    """Adds up the seconds of each file's tests, also of those that other workers run."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session) -> None:
        known = RECORDED | {file: round(taken) for file, taken in self.seconds.items()}
        kept = {
            file: taken
            for file, taken in sorted(known.items())
            if taken >= LONG and Path(session.config.rootpath, file).exists()
        }
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config) -> None:
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--record-durations") and not is_worker:
        config.pluginmanager.register(Recorder())


def stay() -> None:
    """Garbage collections pass over what exists now.

    Many tests collect, and thousands of tests and modules are no garbage.
    """
    gc.enable()  # a test may have left it off
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
