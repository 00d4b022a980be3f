"""Measures a program that does not know of it, from torch's first import to the program's end."""

from __future__ import annotations

import html
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

from .program import load_module, load_script, run_as_main, without_frames

NOTHING = "gradmem run: nothing of torch was run in this process, so there is nothing to report"


class AfterTorch(MetaPathFinder, Loader):
    """Calls ``start`` when the program has imported torch, and not before.

    A program may set environment variables that torch reads when it is imported.
    """

    def __init__(self, start):
        self.start, self.loader = start, None

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.start()


class Session:
    def __init__(self, title: str, out: Path, budget: int | None):
        self.title, self.out, self.budget = title, out.absolute(), budget
        self.tracker, self.process, self.stderr = None, os.getpid(), sys.stderr

    def start(self) -> None:
        import torch

        from ..measure.tracker import MemoryTracker

        # asks the driver, and does not start CUDA in this process
        device = "cuda" if torch.cuda.device_count() else None
        self.tracker = MemoryTracker(budget=self.budget, live=False, device=device)
        self.tracker.__enter__()

    def finish(self) -> None:
        """Stop measuring, print what was found, and write the page."""
        if os.getpid() != self.process:
            return  # a fork of the program
        if self.tracker is None:
            print(NOTHING, file=self.stderr)
            return
        self.tracker.__exit__(None, None, None)
        if not self.tracker.peak.total:
            print(NOTHING, file=self.stderr)
            return
        from ..view.diagnosis import diagnose

        text = f"{self.title}: {self.tracker.steps} optimizer steps.\n{diagnose(self.tracker)}"
        try:
            self.out.write_text(self._page(text), encoding="utf-8")
            where = f"Report: {self.out}"
        except OSError as error:
            where = f"The report cannot be written to {self.out}: {error.strerror}"
        print(f"gradmem run, {text}\n{where}", file=self.stderr)

    def _page(self, text: str) -> str:
        from ..view.live import encode_frame, explorable_html
        from ..view.timeline import describe

        timeline = self.tracker.timeline
        frame = encode_frame(timeline, self.tracker.peak, None, finished=True)
        settings = {"title": self.title, "budget": float(self.budget or 0)}
        picture = explorable_html([(frame, settings)], html.escape(describe(timeline)))
        rows = []
        for holder in self.tracker.largest_at_peak(30):
            cells = (f"{holder.nbytes:,}", holder.category, holder.module, holder.line or "")
            rows.append("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in cells))
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
            f"<title>gradmem run: {html.escape(self.title)}</title><style>:root {{ color-scheme: "
            "light dark; } body { font: 16px/1.45 system-ui, sans-serif; max-width: 900px; "
            "margin: 0 auto; padding: 1rem; } pre { white-space: pre-wrap; } "
            "div.wide { overflow-x: auto; } td, th { padding: .1rem .5rem; text-align: left; }"
            f"</style><h1>Memory of {html.escape(self.title)}</h1>{picture}"
            f"<p>The picture has at most 400 moments, each the largest of its time.</p>"
            f"<pre>{html.escape(text)}</pre><h2>The largest storages at the peak</h2>"
            '<div class="wide"><table><tr><th>bytes<th>category<th>module<th>line'
            f"{''.join(rows)}</table></div></html>\n"
        )


def run(words: list[str], *, as_module: bool, out: Path | None, budget: int | None) -> int:
    """Run a script (or a module) with its arguments. Its exit status is the program's own."""
    name = words[0]
    code, module = load_module(name) if as_module else load_script(name)
    rank = os.environ.get("RANK")
    out = out or Path(f"gradmem-{Path(name).stem}.html")
    if rank is not None:
        out = out.with_name(f"{out.stem}.rank{rank}{out.suffix}")
    session = Session(Path(name).name, out, budget)
    first = module.__file__ if as_module else name
    folder = os.getcwd() if as_module else os.path.dirname(os.path.abspath(name))
    if "torch" in sys.modules:
        session.start()
    else:
        sys.meta_path.insert(0, AfterTorch(session.start))
    try:
        run_as_main(code, module, [first, *words[1:]], folder)
    except SystemExit:
        session.finish()
        raise
    except BaseException as error:
        cut = without_frames(error.__traceback__, _is_ours)
        sys.excepthook(type(error), error.with_traceback(cut), cut)
        session.finish()
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *shown: None  # it is shown already; Python ends as it does
            raise
        return 1
    session.finish()
    return 0


def _is_ours(file: str) -> bool:
    here = Path(__file__).parent
    return Path(file).parent == here or Path(file) == here.parent / "measure" / "watch.py"
