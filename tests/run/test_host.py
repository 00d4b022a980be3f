"""The host's memory beside the counted bytes: a process that grows by what is no tensor is told so,
and one that grows by its tensors, once, or not at all is not.
"""

import gc
import multiprocessing
import time

import numpy as np
import psutil
import pytest

from gradmem_lib.run.host import KEPT, Host

STEP = 2**26  # bytes: so much is always taken from the system, and given back


@pytest.fixture
def host():
    host = Host()
    host.every = 0
    return host


def test_arrays_that_are_kept_are_found_with_their_bytes(host):
    gc.collect()  # what other tests have left would go in between
    kept, before = [], psutil.Process().memory_info().rss
    for step in range(10):
        kept.append(np.ones(STEP // 8))
        host.look(step, 0)
    grown = psutil.Process().memory_info().rss - before
    assert grown > 0.9 * 10 * STEP
    private = [look.private for look in host.looks]
    assert private[-1] - private[0] == pytest.approx(9 * STEP, rel=0.1)
    assert "The process grows by" in host.growth() and "its tensors by 0 B" in host.growth()


def test_what_is_kept_beside_a_card_may_be_tensors(host):
    kept = []
    for step in range(10):
        kept.append(np.ones(STEP // 8))
        host.look(step, None)
    assert "Look for tensors that are moved there" in host.growth()


@pytest.mark.parametrize("kind", ["counted", "once", "not at all", "counted ones go"])
def test_other_growth_is_not_reported(host, kind):
    kept, counted = [], 20 * STEP
    for step in range(10):
        if kind == "counted" or (kind == "once" and step == 4):
            kept.append(np.ones(STEP // 8))
        if kind == "counted":
            counted += STEP
        elif kind == "counted ones go":  # and the process keeps their memory
            counted -= STEP
        host.look(step, counted)
    assert host.growth() == ""


def test_a_file_that_is_mapped_is_not_the_processs_own(host, tmp_path):
    file = np.memmap(tmp_path / "data", dtype=np.uint8, mode="w+", shape=10 * STEP)
    for step in range(10):
        file[step * STEP : (step + 1) * STEP] = 1
        host.look(step, 0)
    assert host.growth() == ""


def _grow(pipe) -> None:
    array = np.ones(STEP // 8)
    pipe.send(len(array))
    time.sleep(60)


def test_what_a_worker_has_for_itself_counts(host):
    shared = np.ones(STEP // 2)  # a fork has it in common with its parent
    host.look(0, 0)
    others = host.workers  # of other tests
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_grow, args=(theirs,))
    worker.start()
    try:
        assert ours.recv()
        host.workers_next = 0
        host.look(1, 0)
    finally:
        worker.kill()
        worker.join()
    assert 0.9 * STEP < host.looks[1].private - host.looks[0].private < 2 * STEP
    assert host.workers == others + 1 and "that it started" in host.words()[0]
    assert shared.nbytes == 4 * STEP


def test_a_long_run_keeps_few_looks(host):
    for step in range(3 * KEPT):
        host.next = 0
        host.look(step, 0)
    assert len(host.looks) <= KEPT


def test_without_psutil_nothing_is_said(host):
    host.process = None
    host.look(0, 0)
    assert host.growth() == "" and host.words() == []
