"""The work of one rank of ``run_ranks``: it runs the function, and reports the result to the kernel
over its line.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from types import SimpleNamespace

from ...display import live_allowed, register
from ...view import live, pictures

# tells the fork server, which imports this first, where its socket is
FOLDER = "GRADMEM_FORK_SERVER"


def _delete_abandoned(folder: str, kernel: int) -> None:
    """Clean up after a killed kernel, which could not do it.

    Its line ends some moments before the kernel does.
    """
    until = time.monotonic() + 5
    while os.getppid() == kernel and time.monotonic() < until:
        time.sleep(0.02)
    if os.getppid() != kernel:
        shutil.rmtree(folder, ignore_errors=True)


if FOLDER in os.environ:
    os.setsid()  # only the kernel answers a signal to its group
    # until a rank works: imported modules are no garbage, and the search takes half a second
    gc.disable()
    atexit.register(_delete_abandoned, os.environ.pop(FOLDER), os.getppid())


def run_as_rank(task: bytes, environment: dict[str, str], line, out, err) -> None:
    """Run a rank's process from start to end.

    ``line``, ``out`` and ``err`` lead to the kernel: reports, prints and warnings.
    """
    # Ctrl-C reaches all processes, and the kernel decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdout, sys.stderr = (
        os.fdopen(fd, "w", 1, encoding="utf-8", closefd=False) for fd in (1, 2)
    )
    one_at_a_time, leave = threading.Lock(), threading.Event()

    def send(kind: str, value) -> None:
        with one_at_a_time:
            line.send((kind, value))

    main = threading.get_ident()
    threading.Thread(target=_answer_kernel, args=(line, send, main, leave), daemon=True).start()
    try:
        value = _run(task, send)
        sys.stdout.flush()
        sys.stderr.flush()
        send("returned", value)
    except BaseException as error:
        when = time.monotonic()
        what = "".join(traceback.format_exception_only(error)).strip()
        send("failed", (when, _frames(traceback.walk_tb(error.__traceback__)), what))
    leave.wait()
    # A process that ends well exits without Python's shutdown. DistributedDataParallel keeps its
    # process group, also after destroy_process_group(), and a thread of gloo's that releases a
    # tensor during the shutdown would abort the process (pytorch/pytorch#179291).
    os._exit(0)


def _run(task: bytes, send: Callable) -> bytes:
    import cloudpickle
    import torch
    import torch.distributed as dist

    gc.freeze()  # the fork server's imports are no garbage, and take a second to search
    gc.enable()
    torch.set_num_threads(1)
    function, args, watched = cloudpickle.loads(task)
    if watched:
        drawn = {**vars(pictures), "LivePlot": partial(_RemotePlot, send, count())}
        register(lambda: SimpleNamespace(**drawn), has_viewer=True)
    dist.init_process_group("gloo")
    return cloudpickle.dumps(function(*args))


def _answer_kernel(line, send: Callable, main: int, leave: threading.Event) -> None:
    """Runs on its own thread: ends the rank when the kernel is gone."""
    while not leave.is_set():
        try:
            asked = line.recv()
        except (EOFError, OSError):
            os._exit(1)
        if asked == "where":
            send("stands", _frames(reversed([*traceback.walk_stack(sys._current_frames()[main])])))
        else:
            leave.set()


def _frames(walked: Iterable) -> list[tuple[str, int, str]]:
    """Where the function was: (file, line, name), outermost first, without the frames that started
    it.
    """
    summary = traceback.StackSummary.extract(walked, lookup_lines=False)
    frames = [(frame.filename, frame.lineno, frame.name) for frame in summary]
    ours = [i for i, (file, *_) in enumerate(frames) if file == __file__]
    return frames[ours[-1] + 1 :] if ours else frames


def stack_of(frames: list[tuple[str, int, str]]) -> str:
    """Where a rank was, with the source lines that the kernel knows, also those of a notebook's
    cells.
    """
    return "".join(traceback.format_list([(*frame, None) for frame in frames]))


class _RemotePlot:
    """A tracker's live plot, which the kernel draws."""

    def __init__(self, send: Callable, numbers, *, title: str = "", budget: int | None = None):
        self.send, self.numbers, self.about = send, numbers, (title, budget)
        self.number = None  # until it starts

    def start(self) -> None:
        self.number = next(self.numbers)
        self.send("picture", (self.number, "start", *self.about))

    def push(self, timeline, current) -> None:
        if self.number is not None and live_allowed():
            self.send("picture", (self.number, "push", live.encode_frame(timeline, None, current)))

    def finish(self, timeline, peak=None) -> None:
        self.send("picture", (self.number, "finish", timeline))
