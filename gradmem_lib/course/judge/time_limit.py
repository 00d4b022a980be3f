"""Stops an answer that never ends."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator

SECONDS = 20  # or ten times as long as the reference takes, where that is more


class TooLong(BaseException):
    """Raised inside an answer that takes too long.

    It is no ``Exception``, so that the answer's ``except`` does not catch it.
    """


@contextlib.contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise ``TooLong`` inside the block when it has run for ``seconds``.

    It uses a signal if there is one, which also ends a ``time.sleep``. Elsewhere (Windows, another
    thread) a thread raises it between two steps of Python. It is raised again every second, since
    Python drops exceptions at some places.
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
