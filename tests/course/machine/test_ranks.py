"""run_ranks: one function in several processes, which end with their cell whatever happens."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import transformers
from support.paths import ROOT

from gradmem_lib.course import RanksFailed, run_ranks
from gradmem_lib.course.machine import run_ranks as ranks


def reduced(start: int):
    total = torch.ones(3) * (start + dist.get_rank())
    dist.all_reduce(total)
    print("the sum is", total[0].item())
    if dist.get_rank():
        warnings.warn("from rank 1", stacklevel=1)
    return (
        total,
        gc.isenabled(),
        torch.get_num_threads(),
        os.environ["RANK"],
        os.environ["WORLD_SIZE"],
    )


def test_each_rank_returns_and_the_first_prints(capfd):
    found = run_ranks(reduced, 5)
    assert [told for _, *told in found] == [[True, 1, "0", "2"], [True, 1, "1", "2"]]
    assert all(torch.equal(total, torch.full((3,), 11.0)) for total, *_ in found)
    assert capfd.readouterr() == ("the sum is 11.0\n", "")


def test_on_request_all_print_one_after_the_other(capfd):
    run_ranks(reduced, 0, ranks=4, everyone=True)
    assert capfd.readouterr().out == "".join(f"rank {rank}: the sum is 6.0\n" for rank in range(4))


def test_a_function_may_be_a_closure_and_return_what_the_cell_defined():
    @dataclass
    class Found:
        rank: int

    assert run_ranks(lambda: Found(dist.get_rank()), ranks=3) == [Found(0), Found(1), Found(2)]


def test_one_error_arrives_and_names_its_rank():
    def fail():
        if dist.get_rank() == 1:
            raise ValueError("no such batch")
        dist.barrier()

    with pytest.raises(
        RanksFailed, match=r"in fail\n(.|\n)*rank 1 of 2: ValueError: no such batch$"
    ):
        run_ranks(fail)


def test_of_the_same_error_everywhere_the_first_rank_tells():
    def fail():
        time.sleep(0.2 * (dist.get_rank() == 0))
        raise ValueError("no such batch")

    with pytest.raises(RanksFailed, match=r"rank 0 of 3: ValueError: no such batch$"):
        run_ranks(fail, ranks=3)


def test_what_it_cannot_run_it_refuses():
    with pytest.raises(TypeError, match="takes a function, but was given int"):
        run_ranks(3)
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(print, ranks=0)
    with pytest.raises(ValueError, match="given as True"):
        run_ranks(print, ranks=True)


def test_inside_a_rank_it_is_refused_and_what_comes_after_works():
    with pytest.raises(RanksFailed, match="called inside a rank"):
        run_ranks(run_ranks, print)
    assert run_ranks(os.path.exists, "/") == [True, True]  # the fork server's folder is still there


def test_several_threads_may_call_at_once():
    main = sys.modules["__main__"]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: run_ranks(abs, n), range(6)))
    assert found == [[n, n] for n in range(6)] and sys.modules["__main__"] is main


# Nothing stays behind, whatever ends a cell.


def family() -> list[psutil.Process]:
    """The processes below this one that run: also the fork server, which has no rank when nothing
    runs.
    """
    return [
        p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """No process, port or file of a call is left after it.

    The fork server, which waits for the next call, is older.
    """
    run_ranks(print, ranks=1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def left():
        ports = [
            c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN
        ]
        return {p.pid for p in family()}, ports, os.listdir(tmp_path)

    before = left()
    yield
    assert left() == before


def stuck(kill=None):
    if kill == dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.get_rank() or dist.recv(torch.ones(1), src=1)
    return "done"


@pytest.mark.parametrize("killed", [0, 3])
def test_a_killed_rank_ends_the_others_with_a_sentence(killed, alone):
    with pytest.raises(
        RanksFailed, match=rf"rank {killed} of 4 was ended by SIGKILL .* The other ranks"
    ):
        run_ranks(stuck, killed, ranks=4, seconds=None)


def test_a_rank_that_leaves_by_itself_says_how(alone):
    def leave():
        transformers.logging.get_logger("transformers.trainer").warning("last words")
        os._exit(7) if dist.get_rank() else dist.barrier()

    with pytest.raises(RanksFailed, match=r"last words\n\nrank 1 of 2 was ended with exit code 7"):
        run_ranks(leave)


def waits_for_ever():
    one = torch.ones(1)
    if dist.get_rank():
        dist.recv(one, src=0)
    else:  # one statement: rank 1 returns only when rank 0 is in it
        return dist.send(one, dst=1), dist.recv(one, src=1)


def test_after_its_time_it_says_where_each_rank_waits(alone, monkeypatch):
    """Its time is over when rank 1 has returned, however long that takes; then the clock goes on
    slowly.
    """
    now, listen = [0.0, 0.0], ranks._RankGroup._listen

    def clock():
        now[0] += now[1]
        return now[0]

    def until_rank_1_has_returned(crew, patience):
        listen(crew, patience)
        if crew.ranks[1].returned and not now[1]:
            now[:] = 2.0, 0.02

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(ranks._RankGroup, "_listen", until_rank_1_has_returned)
    words = r"(?s)rank 0 was at\n.*in waits_for_ever\n.*(?:send|recv).*1 of 2 ranks had not"
    with pytest.raises(RanksFailed, match=words) as caught:
        run_ranks(waits_for_ever, seconds=1)
    assert "rank 1 was" not in str(caught.value)


def test_without_a_time_it_waits_as_long_as_they_take(alone):
    assert run_ranks(dist.get_rank, ranks=1, seconds=None) == [0]
    for seconds in (0, -1, float("nan"), "60", True):
        with pytest.raises(ValueError, match="seconds is how long the ranks may take"):
            run_ranks(dist.get_rank, seconds=seconds)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_all(alone):
    ours = os.getpid()

    def press():
        if dist.get_rank() == 0:
            os.kill(ours, signal.SIGINT)
        stuck()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(press, seconds=None)


# No `if __name__ == "__main__"`, and every network but this computer's own is blocked.
SCRIPT = """
import os, sys, time
import torch.distributed as dist
from gradmem_lib.course import run_ranks

print("started", os.getpid(), flush=True)

class Own:
    pass

def wait(own, for_ever):
    print("rank", os.getpid(), flush=True)
    dist.barrier()
    if for_ever:
        time.sleep(600)
    return own

assert type(run_ranks(wait, Own(), False)[1]) is Own
run_ranks(wait, Own(), True)
"""


def test_a_folder_for_temporary_files_with_too_long_a_name_is_a_sentence(monkeypatch):
    monkeypatch.setattr("gradmem_lib.course.machine.run_ranks.get_temp_dir", lambda: "/" + 90 * "x")
    with pytest.raises(ValueError, match="set the environment variable TMPDIR"):
        run_ranks(reduced, 1)


@pytest.fixture
def short_folder():
    """pytest's own may be too long a name for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_script_that_is_killed_leaves_nobody_behind(tmp_path, short_folder):
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT / "tests" / "offline"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(short_folder)}
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], env=env, stdout=subprocess.PIPE, text=True
    ) as script:
        said = [script.stdout.readline().split()[0] for _ in range(3)]
        below = psutil.Process(script.pid).children(recursive=True)
        script.kill()
        _, left = psutil.wait_procs(below, timeout=20)
    assert said == ["started", "rank", "rank"] and len(below) >= 4 and not left
    assert not list(short_folder.glob("pymp-*"))  # the fork server's socket was there
