"""A function in several processes at once, each a rank of one gloo process group: ``run_ranks``.

The kernel keeps the store in which the ranks find each other, as ``torchrun``'s agent does, and one line (a pair of
sockets) to each rank. A rank whose line ends leaves at once: no process outlives the kernel.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import connection, get_context
from types import ModuleType
from typing import Any

_PRELOAD = ["torch.distributed.fsdp", "transformers.models.llama.modeling_llama", __name__]
_GRACE = 1.0  # seconds in which the other ranks may say what they saw of a failure


class RanksFailed(RuntimeError):
    """One of the ranks raised an error, was ended from outside, or did not finish in time."""


def run_ranks(
    function: Callable, *args, ranks: int = 2, everyone: bool = False, seconds: float = 240
) -> list:
    """Run ``function(*args)`` in ``ranks`` processes that share a gloo process group; what each returned, by rank.

    The function may be defined in a notebook's cell: it is sent with the values that it uses, and each rank works on its
    own copy. A rank computes on one thread and starts with PyTorch's default seed. What rank 0 prints is printed
    here (its warnings too), and with ``everyone`` what all printed, rank by rank, after the end. Raises ``RanksFailed`` if a rank fails,
    and after ``seconds``; then the other ranks are ended too.
    """
    import cloudpickle

    if not callable(function):
        raise TypeError(f"run_ranks takes a function, and was given {type(function).__name__}")
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is the number of processes, at least 1, and was given as {ranks!r}")
    task = cloudpickle.dumps((function, args))
    with ExitStack() as stack:
        crew = _Crew(ranks, task, stack, everyone)
        return crew.results(time.monotonic() + seconds, seconds)


class _Crew:
    """The ranks of one call, seen from the kernel. Whatever ends the call, the ``stack`` ends them."""

    def __init__(self, ranks: int, task: bytes, stack: ExitStack, everyone: bool):
        self.ranks, self.everyone = ranks, everyone
        self.lines: list[connection.Connection] = []
        self.processes: list[Any] = []
        self.said: list[list[str]] = [[] for _ in range(ranks)]
        self.returned: dict[int, bytes] = {}
        self.failed: dict[int, tuple[float, list, str]] = {}
        store = stack.enter_context(_store())
        # Linux forks each rank from a server that has imported everything. A Mac's own libraries do not outlive a fork.
        context = get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            context.set_forkserver_preload(_PRELOAD)
        stack.callback(self._end)
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            self.lines.append(ours)
            process = context.Process(target=_be_rank, args=(task, _environment(rank, ranks, store), theirs))
            with _nothing_to_import():
                process.start()
            self.processes.append(process)
            theirs.close()

    def results(self, deadline: float, seconds: float) -> list:
        import cloudpickle

        while len(self.returned) < self.ranks:
            if not self._listen(deadline - time.monotonic()):
                waiting = [rank for rank in range(self.ranks) if rank not in self.returned]
                raise RanksFailed(self._hung(waiting, seconds))
            if self.failed or self._lost():
                raise RanksFailed(self._why())
        for line in self.lines:
            line.send("leave")
        for process in self.processes:
            process.join(5)
        if self.everyone:
            for rank, said in enumerate(self.said):
                for text in "".join(said).splitlines():
                    print(f"rank {rank}: {text}")
        return [cloudpickle.loads(self.returned[rank]) for rank in range(self.ranks)]

    def _listen(self, patience: float) -> bool:
        """Take in what the ranks send; whether anything came."""
        open_lines = [line for line in self.lines if not line.closed]
        dead = [process.sentinel for process in self.processes]
        ready = connection.wait([*open_lines, *dead], max(0, patience))
        for line in ready:
            if line in open_lines:
                self._take(self.lines.index(line))
        return bool(ready)

    def _take(self, rank: int) -> None:
        try:
            kind, value = self.lines[rank].recv()
        except (EOFError, OSError):
            self.lines[rank].close()
            return
        if kind in ("said", "warned") and rank == 0 and not self.everyone:
            print(value, end="", file=sys.stdout if kind == "said" else sys.stderr)
        elif kind == "said":
            self.said[rank].append(value)
        elif kind == "returned":
            self.returned[rank] = value
        elif kind == "failed":
            self.failed[rank] = value

    def _lost(self) -> list[int]:
        """The ranks that ended without a word."""
        return [
            rank
            for rank, process in enumerate(self.processes)
            if self.lines[rank].closed and rank not in self.returned and rank not in self.failed
        ]

    def _why(self) -> str:
        """The first failure; what it did to the others came later, and a killed rank says nothing."""
        until = time.monotonic() + _GRACE
        while not self._lost() and (left := until - time.monotonic()) > 0:
            self._listen(left)
        for rank in self._lost():
            process = self.processes[rank]
            process.join(5)
            code = process.exitcode
            how = f"by {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}"
            return (
                f"rank {rank} of {self.ranks} was ended {how}, outside Python (SIGKILL often means that the computer "
                "ran out of memory); the other ranks have been ended"
            )
        rank = min(self.failed, key=lambda rank: self.failed[rank][0])
        _, frames, error = self.failed[rank]
        where = "".join(traceback.format_list(traceback.StackSummary.from_list(frames)))
        return f"a rank failed, and the others have been ended. In rank {rank}:\n{where}rank {rank} of {self.ranks}: {error}"

    def _hung(self, waiting: list[int], seconds: float) -> str:
        return (
            f"rank {', '.join(map(str, waiting))} of {self.ranks} had not finished after {seconds:g} seconds"
        )

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.join()
            process.close()


class _nothing_to_import:
    """Meanwhile a new process finds no main program that it would run again, so that scripts need no ``if __name__``."""

    def __enter__(self) -> None:
        self.main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")

    def __exit__(self, *exc) -> None:
        sys.modules["__main__"] = self.main


class _store:
    """The store in which the ranks find each other, on a free port of the loopback address alone; its port."""

    def __enter__(self) -> int:
        import torch.distributed as dist

        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        port = self.listener.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=self.listener.detach()
        )
        return port

    def __exit__(self, *exc) -> None:
        del self.store


def loopback_only() -> dict[str, str]:
    """For gloo, which else asks for this machine's name, and that may lead elsewhere."""
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What ``torchrun`` tells a process, and that the store is there already."""
    told = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0, "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return {**os.environ, **loopback_only(), **{name: str(value) for name, value in told.items()}}


# In a rank.


class _Voice(io.TextIOBase):
    """What a rank prints goes over its line."""

    def __init__(self, send: Callable, kind: str):
        self.send, self.kind = send, kind

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.send(self.kind, text)
        return len(text)


def _be_rank(task: bytes, environment: dict[str, str], line: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the kernel decides
    os.environ.clear()
    os.environ.update(environment)
    leave, alone = threading.Event(), threading.Lock()

    def wait_for_kernel() -> None:
        try:
            line.recv()
        except (EOFError, OSError):
            os._exit(1)
        leave.set()

    def send(kind: str, value) -> None:
        with alone:
            line.send((kind, value))

    threading.Thread(target=wait_for_kernel, daemon=True).start()
    sys.stdout, sys.stderr = _Voice(send, "said"), _Voice(send, "warned")
    try:
        send("returned", _run(task))
    except BaseException as error:
        when = time.monotonic()
        summary = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
        frames = [(f.filename, f.lineno, f.name, None) for f in summary if f.filename != __file__]
        send("failed", (when, frames, "".join(traceback.format_exception_only(error)).strip()))
    leave.wait()
    # A process that ends well leaves without taking Python down first. DistributedDataParallel keeps its process group,
    # also after destroy_process_group(), and a thread of gloo's that lets go of a tensor meanwhile would abort the
    # process (pytorch/pytorch#179291).
    os._exit(0)


def _run(task: bytes) -> bytes:
    import cloudpickle
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function, args = cloudpickle.loads(task)
    dist.init_process_group("gloo")
    return cloudpickle.dumps(function(*args))
