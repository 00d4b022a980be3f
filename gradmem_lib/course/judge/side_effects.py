"""Finds what an answer leaves behind for all code after it, in torch and in the process: a sentence
each. Puts it back.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import torch

from ..machine import compat as course_compat


def _set_device(before: torch.device) -> None:
    torch.set_default_device(None)  # "cpu" would stay on as a mode that all operations pass
    if torch.get_default_device() != before:
        torch.set_default_device(before)


def autocast_nesting() -> int:
    """The number of autocast blocks around this line. The last one clears the cache of casts."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_nesting(before: int) -> None:
    while autocast_nesting() > before:
        torch.autocast_decrement_nesting()
    while autocast_nesting() < before:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def _leave_modes(before: list) -> None:
    for mode in reversed(course_compat.dispatch_modes()):
        if mode not in before:
            mode.__exit__(None, None, None)


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return ""


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if type(thread) is threading.Thread}


# Each stays as code has set it: its name, how it is read, and how it is put back.
SWITCHES = [
    ("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the default device", torch.get_default_device, _set_device),
    ("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ("modes that watch operations", course_compat.dispatch_modes, _leave_modes),
    ("hooks on every module", course_compat.global_hooks, course_compat.restore_global_hooks),
    (
        "saved-tensor hooks",
        course_compat.saved_tensor_hooks,
        course_compat.restore_saved_tensor_hooks,
    ),
    (
        "autocast for the CPU",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda was: torch.set_autocast_enabled("cpu", was),
    ),
    (
        "the dtype of autocast for the CPU",
        lambda: torch.get_autocast_dtype("cpu"),
        lambda was: torch.set_autocast_dtype("cpu", was),
    ),
    ("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ("autocast's nesting", autocast_nesting, _set_autocast_nesting),
    ("the working directory", _directory, os.chdir),
    ("the environment", lambda: dict(os.environ), os.environ.update),
    ("garbage collection", gc.isenabled, lambda was: gc.enable() if was else gc.disable()),
    ("a thread that still runs", _threads, lambda was: None),  # it cannot be stopped
]


def state() -> dict[str, Any]:
    return {name: read() for name, read, _ in SWITCHES}


def changed(before: dict[str, Any]) -> dict[tuple[str, str], str]:
    """The switches that are not as ``before``, with a sentence each."""
    found = {}
    for name, read, _ in SWITCHES:
        was, now = before[name], read()
        if name == "the environment":
            # A module that is imported may set new variables, which is no answer's doing.
            now = {variable: now.get(variable) for variable in was}
        if name == "a thread that still runs":
            if any(thread.is_alive() for thread in now - was):
                found[name, "changed"] = f"Your code leaves {name}: join it"
        elif now != was:
            found[name, "changed"] = (
                f"Your code leaves another state of {name} than before, for all code after it: "
                "restore it, best by a `with` block"
            )
    return found


def restore(before: dict[str, Any]) -> None:
    """Put back every switch that is not as ``before``."""
    for name, read, put_back in SWITCHES:
        if read() != before[name]:
            put_back(before[name])
