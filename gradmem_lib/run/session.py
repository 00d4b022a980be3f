"""Measures a program that does not know of it, from torch's first import to the program's end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .program import CannotRun, Program, without_frames

if TYPE_CHECKING:
    from .tracking import ScriptTracker

NOTHING = "gradmem run: nothing of torch was run in this process, so there is nothing to report"
GOES_ON = "The measurement ended here, and the script goes on."


class AfterTorch(MetaPathFinder, Loader):
    """Calls ``start`` when the program has imported torch, and not before.

    A program may set environment variables that torch reads when it is imported.
    """

    def __init__(self, start):
        self.start, self.loader = start, None
        self.is_asking = False  # the other finders

    def find_spec(self, name, path, target=None):
        if name != "torch" or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self.is_asking = False
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec  # the program may only ask whether there is a torch, and import it later

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        sys.meta_path.remove(self)
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.start()


class Session:
    """One measurement of this process: ``start``, then ``finish``.

    ``out``: where the page is written. ``snapshot``: where PyTorch's kind of snapshot is written,
    or ``None``. ``limit``: the optimizer steps after which it finishes, if the program runs so far.
    ``stderr`` is kept, since the program may replace it.
    """

    def __init__(
        self, title: str, out: Path, snapshot: Path | None, budget: int | None, limit: int | None
    ):
        self.title, self.budget, self.limit = title, budget, limit
        # the program may change the folder
        self.out = out.absolute()
        self.snapshot = None if snapshot is None else snapshot.absolute()
        self.tracker: ScriptTracker | None = None
        self.process, self.stderr = os.getpid(), sys.stderr
        self.is_finished = False

    def start(self) -> None:
        if self._in_a_fork():
            return
        from .tracking import ScriptTracker

        self.tracker = ScriptTracker(self.budget)
        self.tracker.meter.limit, self.tracker.meter.at_limit = self.limit, self._go_on
        self.tracker.__enter__()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._leave_fork)

    def finish(self, error: BaseException | None = None, *, goes_on: bool = False) -> None:
        """Stop measuring, print what was found, and write the page.

        ``error`` ended the program. ``goes_on``: the program runs on without being measured.
        """
        if self.is_finished or self._in_a_fork():
            return
        self.is_finished = True
        try:
            if self.tracker is not None:
                self.tracker.end(error, goes_on=goes_on)
            self._report(error, goes_on)
        except Exception as problem:  # the program's exit status stays its own
            self._say(f"gradmem run: the report failed ({type(problem).__name__}: {problem})")

    def abandon(self) -> None:
        """Stop measuring without a report: there was no program to run."""
        self.is_finished = True
        if self.tracker is not None:
            self.tracker.end()

    def _report(self, error: BaseException | None, goes_on: bool) -> None:
        if self.tracker is None or not self.tracker.peak.total:
            self._say(NOTHING)
            return
        from .report import Report

        report = Report.of(
            self.tracker,
            self.title,
            ended=GOES_ON if goes_on else _how_it_ended(error),
            failed=_has_failed(error),
            error=_explained(error),
            ended_by=error,
        )
        self._say(report.text())
        page = report.html()
        if self._written(self.out, lambda: self.out.write_text(page, encoding="utf-8")):
            self._say(f"Report: {self.out}")
        if self.snapshot is None:
            return
        if self._written(self.snapshot, lambda: self.tracker.snapshot(self.snapshot)):
            self._say(f"Snapshot, for https://pytorch.org/memory_viz: {self.snapshot}")

    def _written(self, file: Path, write: Callable[[], Any]) -> bool:
        """Whether ``write`` could write ``file``. If it could not, the reason is printed."""
        try:
            write()
        except OSError as error:
            self._say(f"{file} cannot be written: {error.strerror}")
            return False
        return True

    def _in_a_fork(self) -> bool:
        return os.getpid() != self.process

    def _go_on(self) -> None:
        self.finish(goes_on=True)

    def _leave_fork(self) -> None:
        if self.tracker is not None and not self.is_finished:
            self.is_finished = True
            self.tracker.leave_fork()

    def _say(self, text: str) -> None:
        # it may be closed: by the program, or by the reader of a pipe
        with suppress(OSError, ValueError):
            print(text, file=self.stderr, flush=True)


def run(
    words: list[str],
    *,
    as_module: bool,
    out: Path | None = None,
    snapshot: Path | None = None,
    budget: int | None = None,
    steps: int | None = None,
) -> int:
    """Run a script (or a module) with its arguments. Its exit status is the program's own."""
    name = words[0]
    short_name = name if as_module else Path(name).stem
    out = _of_this_rank(out or Path(f"gradmem-{short_name}.html"), "--out")
    if snapshot is not None:
        snapshot = _of_this_rank(snapshot, "--snapshot")
    session = Session(Path(name).name, out, snapshot, budget, steps)
    program = Program(name, words[1:], as_module=as_module)
    program.prepare()
    if "torch" in sys.modules:
        session.start()
    else:
        sys.meta_path.insert(0, AfterTorch(session.start))
    try:
        program.run()
    except CannotRun:
        session.abandon()
        raise
    except SystemExit as error:
        session.finish(error)
        raise
    except BaseException as error:
        _show(error)
        session.finish(error)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *shown: None  # it is shown already; Python ends as it does
            raise
        return 1
    session.finish()
    return 0


def _of_this_rank(file: Path, option: str) -> Path:
    """Where this process writes what ``option`` names. Of several ranks, each writes its own."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise CannotRun(f"{option} {file}: the folder {folder} does not exist")
    rank = os.environ.get("RANK")
    return file if rank is None else file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def _show(error: BaseException) -> None:
    """Show an error as Python does, without the frames of this library."""
    seen, part = set[int](), error
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        part.__traceback__ = without_frames(part.__traceback__, _is_ours)
        part = part.__cause__ or part.__context__
    sys.excepthook(type(error), error, error.__traceback__)


def _is_ours(file: str) -> bool:
    here = Path(__file__).parent
    return Path(file).parent in (here, here.parent / "measure")


def _how_it_ended(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, SystemExit):
        return f"The script ended with {error.code!r}." if error.code else ""
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C ended the script."
    return f"{type(error).__name__} ended the script."


def _has_failed(error: BaseException | None) -> bool:
    """Whether an error has ended the script that is not about memory, and that nobody asked for."""
    if isinstance(error, SystemExit):
        return bool(error.code)
    of_memory = (MemoryError, sys.modules["torch"].OutOfMemoryError, KeyboardInterrupt)
    # On the CPU, PyTorch raises a RuntimeError: "DefaultCPUAllocator: can't allocate memory".
    is_of_memory = isinstance(error, of_memory) or "allocate" in str(error)
    return error is not None and not is_of_memory


def _explained(error: BaseException | None) -> str:
    """What a device's out-of-memory error says. A budget's error names its causes itself."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, torch.OutOfMemoryError):
        return ""
    from ..measure.budget import BudgetExceeded

    if isinstance(error, BudgetExceeded):
        return ""
    from ..view.explanation import explain

    return str(explain(error))
