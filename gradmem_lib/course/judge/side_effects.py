"""Finds what an answer leaves behind for all code after it: switches of torch, and states of the
process. Reports them, and restores them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy
import torch

from ..machine import compat as course_compat

# What an answer left behind: a name for it, such as ("model", "another mode"), and a sentence. The
# sentence is empty where only what the reference does counts.
Left = tuple[tuple[str, str], str]


def switches() -> dict[str, Any]:
    """Every switch of torch that stays on after the code that set it, for the thread or for all."""
    return {
        "gradients": torch.is_grad_enabled(),
        "autocast": tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "autocast's nesting": autocast_nesting(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "anomaly detection": torch.is_anomaly_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the choice of attention kernels": _attention_kernels(),
        "modes that watch operations": course_compat.dispatch_modes(),
        "hooks on every module": course_compat.global_hooks(),
        "saved-tensor hooks": course_compat.saved_tensor_hooks(),
    }


def autocast_nesting() -> int:
    """The number of autocast blocks around this line. The last one clears the cache of casts."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _attention_kernels() -> tuple[bool, ...]:
    """Which kernels ``scaled_dot_product_attention`` may choose. The CPU asks the same switches."""
    kernels = torch.backends.cuda
    return (
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
    )


def changed_switches(before: dict[str, Any]) -> Iterator[Left]:
    """What is left of each switch that has changed."""
    now = switches()
    for name, value in before.items():
        if now[name] == value:
            continue
        how = f"{name} {_how(name, value, now[name])}"
        stays = ""
        if name == "gradients" and value is True:
            stays = " (torch.set_grad_enabled stays until it is called again)"
        yield (
            (name, "changed"),
            f"your code leaves {how}, for all code after it: restore it, best by a `with` "
            f"block{stays}",
        )


def _how(name: str, before: Any, now: Any) -> str:
    """How a switch is left: "on", "at torch.float64", or "changed"."""
    if name == "autocast":
        return _autocast(before, now)
    if name in ("gradients", "autocast's cache"):
        return "on" if now else "off"
    if name.startswith("the ") and not isinstance(now, tuple):
        return f"at {now}"
    return "changed"


def _autocast(before: tuple, now: tuple) -> str:
    """The state of autocast: (device, on or off, dtype) for each kind of device."""
    for (kind, was_on, was_dtype), (_, on, dtype) in zip(before, now, strict=True):
        if on != was_on:
            return f"on for {kind}" if on else f"off for {kind}"
        if dtype != was_dtype:
            return f"for {kind} at {dtype} by default, which was {was_dtype}"
    return "changed"


def restore(before: dict[str, Any]) -> None:
    """Restore every switch."""
    now = switches()
    if now == before:
        return
    torch.set_grad_enabled(before["gradients"])
    _restore_autocast(before)
    torch.set_default_dtype(before["the default dtype"])
    if now["the default device"] != before["the default device"]:
        _restore_default_device(before["the default device"])
    if now["deterministic algorithms"] != before["deterministic algorithms"]:
        # Not always: this call imports torch's compiler, which takes seconds.
        deterministic, warns = before["deterministic algorithms"]
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
    torch.autograd.set_detect_anomaly(before["anomaly detection"])
    torch.set_num_threads(before["the number of threads"])
    torch.set_float32_matmul_precision(before["the precision of float32 products"])
    flash, mem_efficient, math = before["the choice of attention kernels"]
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(mem_efficient)
    torch.backends.cuda.enable_math_sdp(math)
    for mode in reversed(now["modes that watch operations"]):
        if mode not in before["modes that watch operations"]:
            mode.__exit__(None, None, None)
    course_compat.restore_global_hooks(before["hooks on every module"])
    course_compat.restore_saved_tensor_hooks(before["saved-tensor hooks"])


def _restore_autocast(before: dict[str, Any]) -> None:
    for kind, enabled, dtype in before["autocast"]:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(before["autocast's cache"])
    nesting = before["autocast's nesting"]
    while autocast_nesting() > nesting:
        torch.autocast_decrement_nesting()
    while autocast_nesting() < nesting:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def _restore_default_device(device: torch.device) -> None:
    torch.set_default_device(None)  # "cpu" would stay on as a mode that all operations pass
    if torch.get_default_device() != device:
        torch.set_default_device(device)


def process_state() -> dict[str, Any]:
    """What holds for the whole process and stays as code has set it."""
    return {
        "the working directory": _working_directory(),
        "the environment": dict(os.environ),
        "modules": len(sys.modules),
        "the recursion limit": sys.getrecursionlimit(),
        "garbage collection": gc.isenabled(),
        "the way in which tensors are printed": course_compat.print_options(),
        "the way in which numpy prints": numpy.get_printoptions(),
        "what numpy does at errors": numpy.geterr(),
        "threads": {thread for thread in threading.enumerate() if type(thread) is threading.Thread},
    }


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return ""


def left_in_process(before: dict[str, Any]) -> Iterator[Left]:
    """What is left of each state of the process that has changed; a thread may still run."""
    now = process_state()
    for name, value in before.items():
        if now[name] == value or name == "modules":
            continue
        if name == "the environment":
            for variable in _changed_variables(before):
                yield (
                    (name, variable),
                    f"your code leaves {variable} in the environment with another value than "
                    "before: put it back",
                )
        elif name == "threads":
            if any(thread.is_alive() for thread in now[name] - value):
                yield (name, ""), "your code leaves a thread that still runs: join it"
        else:
            yield (
                (name, "changed"),
                f"your code leaves {name} changed, for all code after it: put it back",
            )


def _changed_variables(before: dict[str, Any]) -> list[str]:
    """The names of environment variables that have changed since ``before``. A module that is
    imported may set new ones, as torch's compiler does: these stay, and are no answer's doing.
    """
    was, now = before["the environment"], dict(os.environ)
    if len(sys.modules) > before["modules"]:
        names = was.keys()
    else:
        names = was.keys() | now.keys()
    return sorted(name for name in names if was.get(name) != now.get(name))


def restore_process(before: dict[str, Any]) -> None:
    """Restore what holds for the whole process, except threads."""
    directory = before["the working directory"]
    if directory not in ("", _working_directory()):
        os.chdir(directory)
    for variable in _changed_variables(before):
        if variable in before["the environment"]:
            os.environ[variable] = before["the environment"][variable]
        else:
            del os.environ[variable]
    if sys.getrecursionlimit() != before["the recursion limit"]:
        sys.setrecursionlimit(before["the recursion limit"])
    if before["garbage collection"]:
        gc.enable()
    else:
        gc.disable()
    torch.set_printoptions(**before["the way in which tensors are printed"])
    numpy.set_printoptions(**before["the way in which numpy prints"])
    numpy.seterr(**before["what numpy does at errors"])


def judging_functions() -> dict[ModuleType, dict[str, Any]]:
    """All names of the modules that judge, those of this folder: an answer may put something of its
    own there.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__}."):
            found[module] = dict(vars(module))
    return found


def restore_judging_functions(before: dict[ModuleType, dict[str, Any]]) -> None:
    """Put back what was there, before anything is compared."""
    for module, names in before.items():
        now = module.__dict__  # not vars(module): an answer may have added a `vars` here, too
        for name in now.keys() - names.keys():
            del now[name]  # it may hide a builtin, as compare.isinstance = … does
        now.update(names)
