"""An answer that never comes to an end is stopped after a while."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator

SECONDS = 20  # or ten times as long as the reference takes, where that is more


class TooLong(BaseException):
    """Raised inside an answer that takes too long. Not an ``Exception``, so that no ``except`` of the answer's takes it."""


@contextlib.contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """``TooLong`` inside the block once it has run for so many seconds.

    By a signal where there is one, which also ends a ``time.sleep``; elsewhere (Windows, another thread) from a thread, between
    two steps of Python. It is raised again every second, in case that it came where Python drops exceptions.
    """
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        with _by_signal(seconds):
            yield
    else:
        with _by_thread(seconds):
            yield


@contextlib.contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    def stop(*_) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _by_thread(seconds: float) -> Iterator[None]:
    done, target = threading.Event(), ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            raise_in(target, ctypes.py_object(TooLong))
            wait = 1.0

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        raise_in(target, None)  # one that was raised and has not come yet
