"""A function in several processes at once, each a rank of one gloo process group: ``run_ranks``.

The kernel keeps the store in which the ranks find each other, as ``torchrun``'s agent does, and a
line (a pair of sockets) to each rank. A rank exits at once when its line ends, so no process
outlives the kernel.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import connection, get_context, parent_process
from multiprocessing.util import get_temp_dir
from types import ModuleType
from typing import Any

from ...display import in_kernel
from .rank_worker import FOLDER, run_as_rank, stack_of

_PRELOAD = [
    "gradmem_lib.course.machine.rank_worker",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
]
_STARTING = threading.Lock()  # calls from several threads start their ranks one after the other
_LONGEST = 107 - len(
    "/listener-12345678"
)  # Linux takes 107 bytes as a socket's name, and the fork server has one
_GRACE = 1.0  # seconds in which the other ranks may say what they saw of a failure


class RanksFailed(RuntimeError):
    """One of the ranks raised an error, was ended from outside, or did not finish in time."""


def run_ranks(
    function: Callable,
    *args: Any,
    ranks: int = 2,
    live: bool | None = None,
    everyone: bool = False,
    seconds: float | None = 240,
) -> list:
    """Run ``function(*args)`` in ``ranks`` processes that share a gloo process group. Returns the
    results by rank.

    The function may be defined in a notebook's cell: it is sent with the values that it uses, and
    each rank works on its own copy. A rank computes on one thread and starts with PyTorch's default
    seed. The output of rank 0 is printed here (also its warnings). With ``everyone``, the output of
    all ranks is printed at the end, rank by rank. A notebook shows the ``MemoryTracker`` of each
    rank, side by side (``live=False``: nothing is drawn). Raises ``RanksFailed`` if a rank fails,
    and after ``seconds`` (``None``: never). Then the other ranks are ended too.
    """
    import cloudpickle

    if not callable(function):
        raise TypeError(f"run_ranks takes a function, but was given {type(function).__name__}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(
            f"ranks is the number of processes, at least 1, but was given as {ranks!r}"
        )
    seconds = math.inf if seconds is None else seconds
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(
            "seconds is how long the ranks may take, above 0 (None: no limit), but was given "
            f"as {seconds!r}"
        )
    if parent_process() is not None:
        raise RuntimeError(
            "run_ranks starts ranks from a kernel or a script, but was called inside a rank"
        )
    watched = live is not False and in_kernel()
    task = cloudpickle.dumps((function, args, watched))
    with ExitStack() as stack:
        pictures = None
        if watched:
            from ...view.ranks import RankPictures

            pictures = stack.enter_context(RankPictures(ranks))
        group = _RankGroup(pictures, everyone)
        stack.callback(group.end)
        group.start(ranks, task, stack.enter_context(_store()))
        found = [cloudpickle.loads(value) for value in group.results(seconds)]
    return found


class _Rank:
    """One rank, seen from the kernel: its process, its line, and what it prints."""

    def __init__(self, context, tell: Callable, task: bytes, environment: dict[str, str]):
        self.tell = tell
        self.line, theirs = context.Pipe()
        self.pipes, far_ends = zip(*(context.Pipe(duplex=False) for _ in "oe"), strict=True)
        self.decoders = [getincrementaldecoder("utf-8")("replace") for _ in "oe"]
        self.said = ["", ""]  # to stdout, to stderr
        self.returned: bytes | None = None
        self.failed: tuple[float, list, str] | None = None  # when, where, what
        self.stands: list = []  # where it was after its time
        self.gone = False
        self.process = context.Process(
            target=run_as_rank, args=(task, environment, theirs, *far_ends)
        )
        with _without_main_program():
            self.process.start()
        for end in (theirs, *far_ends):
            end.close()

    def take_all(self) -> None:
        """Read all that has arrived, first what it printed.

        ``tell(kind, value)`` gets what should be shown.
        """
        reports = []
        try:
            while self.line.poll():
                reports.append(self.line.recv())
        except (EOFError, OSError):  # its process has ended
            self.gone = True
        for pipe, decoder, which in zip(self.pipes, self.decoders, (0, 1), strict=True):
            with suppress(EOFError, OSError):
                while pipe.poll() and (read := os.read(pipe.fileno(), 65536)):
                    self.tell("said", (which, decoder.decode(read)))
        for kind, value in reports:
            if kind in ("returned", "failed", "stands"):
                setattr(self, kind, value)
            else:
                self.tell(kind, value)

    def close(self) -> None:
        for end in (self.line, *self.pipes):
            end.close()
        self.process.join()
        self.process.close()


class _RankGroup:
    """The ranks of one call."""

    def __init__(self, pictures: Any, everyone: bool):
        self.pictures, self.everyone = pictures, everyone
        self.ranks: list[_Rank] = []

    def start(self, ranks: int, task: bytes, port: int) -> None:
        # Linux forks each rank from a server that has imported everything. On a Mac, system
        # libraries do not survive a fork.
        context = get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            if len(os.fsencode(get_temp_dir())) > _LONGEST:
                raise ValueError(
                    f"run_ranks keeps a socket among temporary files, and {get_temp_dir()} is too "
                    "long a path for one: set the environment variable TMPDIR to a shorter one, "
                    "such as /tmp, and start again"
                )
            context.set_forkserver_preload(_PRELOAD)
        for rank in range(ranks):
            report = partial(self._on_report, rank)
            self.ranks.append(_Rank(context, report, task, _environment(rank, ranks, port)))

    def results(self, seconds: float) -> list[bytes]:
        until = time.monotonic() + seconds
        while any(rank.returned is None for rank in self.ranks):
            self._listen(min(60, until - time.monotonic()))  # the system takes no infinite time
            if self._lost() or any(rank.failed for rank in self.ranks):
                raise RanksFailed(self._why())
            if time.monotonic() > until:
                raise RanksFailed(self._hung(seconds))
        for rank in self.ranks:
            with suppress(OSError):
                rank.line.send("leave")
        for rank in self.ranks:
            rank.process.join(5)
        if self.everyone:
            for number, rank in enumerate(self.ranks):
                for stream, text in zip((sys.stdout, sys.stderr), rank.said, strict=True):
                    stream.writelines(f"rank {number}: {line}\n" for line in text.splitlines())
        return [rank.returned for rank in self.ranks]

    def _listen(self, timeout: float) -> None:
        """Wait until a rank reports or prints something, or ends, and read it."""
        ends = {
            end: rank for rank in self.ranks if not rank.gone for end in (rank.line, *rank.pipes)
        }
        ends |= {rank.process.sentinel: rank for rank in self.ranks if not rank.gone}
        ready = connection.wait(list(ends), max(0, timeout))
        for rank in {id(ends[end]): ends[end] for end in ready}.values():
            ended = rank.process.sentinel in ready
            rank.take_all()
            rank.gone |= ended

    def _on_report(self, number: int, kind: str, value) -> None:
        if kind != "said":
            self.pictures.on_report(number, *value)
        elif number == 0 and not self.everyone:
            print(value[1], end="", file=(sys.stdout, sys.stderr)[value[0]])
        else:
            self.ranks[number].said[value[0]] += value[1]

    def _why(self) -> str:
        """The first failure. Failures of other ranks that it caused came later, and a killed rank
        reports nothing.
        """
        self._listen_until(
            lambda: self._lost() or all(r.failed or r.returned is not None for r in self.ranks)
        )
        for number in self._lost():
            rank = self.ranks[number]
            rank.process.join(5)
            code = rank.process.exitcode or 0
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            memory = (
                " (often because the computer's memory was full)" if how == "by SIGKILL" else ""
            )
            return (
                f"{rank.said[1][-2000:]}\nrank {number} of {len(self.ranks)} was ended "
                f"{how}{memory}. "
                "The other ranks have been ended too."
            )
        failed = [number for number, rank in enumerate(self.ranks) if rank.failed]
        first = min(failed, key=lambda number: self.ranks[number].failed)
        number = next(n for n in failed if self.ranks[n].failed[1:] == self.ranks[first].failed[1:])
        _, frames, error = self.ranks[number].failed
        return (
            f"rank {number} failed, and the others have been ended.\n{stack_of(frames)}"
            f"rank {number} of {len(self.ranks)}: {error}"
        )

    def _hung(self, seconds: float) -> str:
        late = [rank for rank in self.ranks if rank.returned is None]
        for rank in late:
            with suppress(OSError):
                rank.line.send("where")
        self._listen_until(lambda: all(rank.stands for rank in late))
        where = "".join(
            f"rank {self.ranks.index(rank)} was at\n{stack_of(rank.stands)}" for rank in late
        )
        return (
            f"{where}{len(late)} of {len(self.ranks)} ranks had not finished after {seconds:g} "
            "seconds, and were ended."
        )

    def _lost(self) -> list[int]:
        """The ranks that ended without a report."""
        return [
            n for n, r in enumerate(self.ranks) if r.gone and r.returned is None and not r.failed
        ]

    def _listen_until(self, enough: Callable[[], bool]) -> None:
        until = time.monotonic() + _GRACE
        while not enough() and (left := until - time.monotonic()) > 0:
            self._listen(left)

    def end(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.close()


@contextmanager
def _without_main_program() -> Iterator[None]:
    """Meanwhile, new processes find no main program to run again, so that scripts need no ``if
    __name__``.
    """
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"], os.environ[FOLDER] = ModuleType("__main__"), get_temp_dir()
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            del os.environ[FOLDER]


@contextmanager
def _store() -> Iterator[int]:
    """The store in which the ranks find each other, on a free port of the loopback address only;
    and its port.
    """
    import torch.distributed as dist

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    yield port
    del store


def loopback_only() -> dict[str, str]:
    """Restrict gloo to the loopback address.

    By default it looks up this machine's name, which may lead elsewhere.
    """
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that ``torchrun`` gives a process, with a note that the store exists
    already.
    """
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "OMP_NUM_THREADS": 1,
    }
    return {**os.environ, **loopback_only(), **{name: str(value) for name, value in told.items()}}
