"""How a run of tests goes: long files first, and solutions with the settings that their stored
outputs were made with.
"""

from __future__ import annotations

import datetime
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

# The seconds of each file of tests, each notebook and each test that is not short, as the last
# recorded run took them.
DURATIONS = Path(__file__).parent / "tests" / "durations.json"
LONG = 4  # seconds from which on a file is left out by --quick
NOT_SHORT = 1  # seconds from which on a test takes turns
TURNS = 7
RECORDED: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help=f"leave out files that take {LONG} seconds or more"
    )
    parser.addoption(
        "--turns",
        action="store_true",
        help=f"of the tests that take {NOT_SHORT} s or more, run one in {TURNS}: those whose turn "
        "it is by the day's number, or by GRADMEM_TURN",
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


def waiting(items) -> list:
    """The tests whose turn it is not. They are dealt out from the longest down, so that all turns
    take about as long. Cells of notebooks take no turns, since each needs those before it.
    """
    turn = int(os.environ.get("GRADMEM_TURN", os.environ["GRADMEM_DAY"]))
    long = [item for item in items if RECORDED.get(item.nodeid, 0) >= NOT_SHORT]
    long.sort(key=lambda item: (-RECORDED[item.nodeid], item.nodeid))
    del long[turn % TURNS :: TURNS]
    return long


def pytest_collection_modifyitems(config, items) -> None:
    if config.getoption("--turns"):
        wait = waiting(items)
        config.hook.pytest_deselected(items=wait)
        items[:] = [item for item in items if item not in wait]
    # Two workers end together if what takes minutes is not what comes last. The order within a file
    # stays.
    items.sort(key=lambda item: -seconds(item.path, config.rootpath))


class Recorder:
    """Adds up the seconds of each file and each test, also of those that other workers run."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report) -> None:
        file, _, test = report.nodeid.partition("::")
        self.seconds[file] += report.duration
        if not file.endswith(".ipynb"):
            self.seconds[f"{file}::{test}"] += report.duration

    def pytest_sessionfinish(self, session) -> None:
        known = RECORDED | {file: round(taken) for file, taken in self.seconds.items()}
        kept = {
            file: taken
            for file, taken in sorted(known.items())
            if taken >= (NOT_SHORT if "::" in file else LONG)
            and Path(session.config.rootpath, file.partition("::")[0]).exists()
        }
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config) -> None:
    # The workers have the day of the process that starts them, before midnight or after it.
    os.environ.setdefault("GRADMEM_DAY", str(datetime.date.today().toordinal()))
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
