"""Finds what an answer leaves behind (changed inputs, switches that were not restored), reports it,
and restores it.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from ...compat.modules import hook_counts
from ...compat.tensors import version
from ..machine import compat as course_compat

# What an answer left behind: a name for it, such as ("model", "another mode"), and a sentence. The
# sentence is empty where only what the reference does counts.
Left = tuple[tuple[str, str], str]


class Given:
    """A function's arguments, recorded so that changes can be found afterwards.

    Numbers are copied to memory that a ``MemoryTracker`` does not count. For models, only switches
    are recorded, since an answer may change weights and gradients. ``may_change`` names arguments
    that may change, or a switch of one ("model.mode"). The dtypes of weights must stay even there,
    and no gradient may be left where none was. A tensor that requires a gradient must go on doing
    so, outside of a model.
    """

    def __init__(self, arguments: dict[str, Any], may_change: tuple[str, ...] = ()):
        self.may_change = may_change
        self.arguments = arguments
        self.before = {name: self._look(name) for name in arguments}
        self.weights = {name: _weights_in(value) for name, value in arguments.items()}
        self.trained = {
            # a model's are among its switches
            name: [] if isinstance(arguments[name], nn.Module) else _requiring(weights)
            for name, weights in self.weights.items()
        }
        self.kept = {name: _kept_of(weights) for name, weights in self.weights.items()}

    def _look(self, name: str) -> Any:
        return None if name in self.may_change else _look(self.arguments[name])

    def changes(self) -> Iterator[Left]:
        """What has changed of each argument."""
        for name, value in self.arguments.items():
            before, after = self.before[name], self._look(name)
            if name in self.may_change:
                pass
            elif isinstance(value, nn.Module):
                yield from self._switched(name, before, after)
            elif isinstance(value, torch.optim.Optimizer):
                yield from self._settings(name, before, after)
            elif before != after:
                yield (
                    (name, "value"),
                    f"your code has changed `{name}` in place: do not change an argument, work "
                    "on a copy",
                )
            yield from self._weights(name)

    def _switched(self, name: str, before: dict, after: dict) -> Iterator[Left]:
        for kind in before:
            if any(f"{name}.{word}" in self.may_change for word in kind.split()):
                continue
            to_train_mode = kind == "another mode" and f"{name}.train" in self.may_change
            for what in _switched(kind, before[kind], after[kind], but_on=to_train_mode):
                yield (name, kind), f"your code leaves `{name}` with {what}"

    def _settings(self, name: str, before: list[dict], after: list[dict]) -> Iterator[Left]:
        for was, now in zip(before, after, strict=False):
            for key in was:
                if was[key] != now.get(key) and f"{name}.{key}" not in self.may_change:
                    yield (
                        (name, key),
                        f"your code leaves `{name}` with another {key} than before: restore it",
                    )

    def _weights(self, name: str) -> Iterator[Left]:
        """What has changed of the weights in an argument: a model, an optimizer, a list of them."""
        before, after = self.kept[name], _kept_of(self.weights[name])
        if any(was[0] != now[0] for was, now in zip(before, after, strict=True)):
            yield (
                (name, "another dtype"),
                f"your code leaves `{name}` with weights of another dtype than before: convert a "
                "copy, and leave the weights as they are",
            )
        if not all(weight.requires_grad for weight in self.trained[name]):
            yield (
                (name, "another requires_grad"),
                f"your code leaves `{name}` with weights that require no gradient any more: put "
                "requires_grad back",
            )
        says = ""
        if any(now[1] and not was[1] for was, now in zip(before, after, strict=True)):
            says = (
                f"your code leaves `{name}` with gradients in .grad, where there were none: set "
                "them to None, or use torch.autograd.grad"
            )
        if says or before != after:
            # Where the reference moves the weights, an answer trains, and may leave its gradients.
            yield (name, "gradients"), says


def arguments_of(reference: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by the reference's names."""
    try:
        return inspect.signature(reference).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}


def _weights_in(value: Any) -> list[torch.Tensor]:
    """The tensors that require a gradient, in a model, an optimizer or a collection of those."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.optim.Optimizer):
        return [p for group in value.param_groups for p in group["params"]]
    if isinstance(value, torch.Tensor):
        return [value] if value.is_leaf and value.requires_grad else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [weight for entry in value for weight in _weights_in(entry)]
    return []


def _requiring(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [weight for weight in weights if weight.requires_grad]


def _kept_of(weights: list[torch.Tensor]) -> list[tuple[torch.dtype, bool, int]]:
    """The dtype of each weight, whether it has a gradient other than zeros, and how often it has
    changed in place.
    """
    return [(weight.dtype, _has_numbers(weight.grad), version(weight)) for weight in weights]


def _has_numbers(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    if type(gradient) is not torch.Tensor or gradient.device.type != "cpu":
        return True
    if gradient.layout != torch.strided:
        return True
    numbers = _numbers(gradient)
    return numbers.count(0) < len(numbers)


def _look(value: Any) -> Any:
    """Something that compares equal as long as ``value`` has not changed; ``None`` for values that
    are not checked.
    """
    if isinstance(value, torch.optim.Optimizer):
        return [
            {name: _data(v) for name, v in group.items() if name != "params"}
            for group in value.param_groups
        ]
    return _switches_of(value) if isinstance(value, nn.Module) else _data(value)


def _data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.requires_grad or value.device.type != "cpu" or value.layout != torch.strided:
            return None
        return value.dtype, tuple(value.shape), _numbers(value)
    if isinstance(value, dict):
        return [(key, _data(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [_data(entry) for entry in value]
    return value if isinstance(value, (int, float, str)) else None


def _numbers(tensor: torch.Tensor) -> bytes:
    with torch.no_grad():
        return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


_OWN = "another attribute or hook"  # a wrapped forward is a hook in another form
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _own_attributes(module: nn.Module) -> frozenset[str]:
    """The names of methods that ``module`` itself has, not its class, and of tensors that it keeps
    and are no parameters or buffers. Numbers and the like do not count.
    """
    names = set()
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE:
            continue
        entries = value if isinstance(value, (list, tuple)) else (value,)
        if callable(value) or any(isinstance(entry, torch.Tensor) for entry in entries):
            names.add(name)
    return frozenset(names)


def _switches_of(model: nn.Module) -> dict[str, Any]:
    modules = list(model.modules())
    config = getattr(model, "config", None)
    return {
        "another mode": [(m, m.training) for m in modules],
        "another requires_grad": [(p, p.requires_grad) for p in model.parameters()],
        "a hook more or less": [
            (thing, hook_counts(thing)) for thing in (*modules, *model.parameters())
        ],
        _OWN: [(m, _own_attributes(m)) for m in modules],
        "another dropout": [(m, m.p) for m in modules if isinstance(m, nn.Dropout)],
        "other checkpointing": [
            (m, m.gradient_checkpointing) for m in modules if hasattr(m, "gradient_checkpointing")
        ],
        "another config": config.to_dict() if hasattr(config, "to_dict") else None,
    }


def _switched(what: str, was: Any, now: Any, *, but_on: bool) -> Iterator[str]:
    """What to say of one switch of a model. ``but_on``: it may have been switched on."""
    if what == "another config":
        fields = [name for name in now or () if was and now[name] != was.get(name, now[name])]
        if fields:
            yield f"config.{fields[0]} = {now[fields[0]]!r}: put back what was there"
        return
    if what == _OWN:
        held_before = {id(module): names for module, names in was}
        for module, names in now:
            for name in sorted(names - held_before.get(id(module), names)):
                yield (
                    f"an attribute {name!r} that was not there, a method or a tensor: use a local "
                    "variable, or delete it"
                )
        return
    # Modules that are gone or new are not compared, only those in both.
    held = {id(thing): value for thing, value in was}
    flipped = [value for thing, value in now if held.get(id(thing), value) != value]
    if but_on:
        flipped = [value for value in flipped if not value]
    if not flipped:
        return
    if what == "another mode":
        left, other = ("train", "eval") if flipped[0] else ("eval", "train")
        yield f"{left} mode on, but it was off before: restore it with model.{other}()"
    elif what == "other checkpointing":
        yield f"checkpointing {'on' if flipped[0] else 'off'}, as it was not before: put it back"
    else:
        yield f"{what} than before: put it back"


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


def _attention_kernels() -> tuple[bool, ...]:
    """Which kernels ``scaled_dot_product_attention`` may choose. The CPU asks the same switches."""
    kernels = torch.backends.cuda
    return (
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
    )


def autocast_nesting() -> int:
    """The number of autocast blocks around this line. The last one clears the cache of casts."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


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


def judging_functions() -> dict[ModuleType, dict[str, Any]]:
    """All names of the modules that judge: an answer may put something of its own there."""
    names = ("compare", "exercise", "hints", "side_effects", "verdict")
    modules = [sys.modules.get(f"{__package__}.{name}") for name in names]
    return {module: dict(vars(module)) for module in modules if module is not None}


def restore_judging_functions(before: dict[ModuleType, dict[str, Any]]) -> None:
    """Put back what was there, before anything is compared."""
    for module, names in before.items():
        for name, value in names.items():
            if vars(module).get(name) is not value:
                setattr(module, name, value)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return ""


def changed_switches(before: dict[str, Any]) -> Iterator[Left]:
    """What is left of each switch that has changed."""
    now = switches()
    for name, value in before.items():
        if now[name] == value:
            continue
        how = f"{name} {_how(name, value, now[name])}"
        stays = " (torch.set_grad_enabled stays until it is called again)" if value is True else ""
        stays = stays if name == "gradients" else ""
        yield (
            (name, "changed"),
            f"your code leaves {how}, for all code after it: restore it, best by a `with` "
            f"block{stays}",
        )


def _how(name: str, before: Any, now: Any) -> str:
    if name == "autocast":
        return _autocast(before, now)
    if name in ("gradients", "autocast's cache"):
        return "on" if now else "off"
    if name.startswith("the ") and not isinstance(now, tuple):
        return f"at {now}"
    return "changed"


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
    names = was.keys() | now.keys()
    if len(sys.modules) > before["modules"]:
        names = was.keys()
    return sorted(name for name in names if was.get(name) != now.get(name))


def _autocast(before, now) -> str:
    """The state of autocast: (device, on or off, dtype) for each kind of device."""
    for (kind, was_on, was_dtype), (_, on, dtype) in zip(before, now, strict=True):
        if on != was_on:
            return f"{'on' if on else 'off'} for {kind}"
        if dtype != was_dtype:
            return f"for {kind} at {dtype} by default, which was {was_dtype}"
    return "changed"


def restore(before: dict[str, Any]) -> None:
    """Restore every switch."""
    now = switches()
    if now == before:
        return
    torch.set_grad_enabled(before["gradients"])
    for kind, enabled, dtype in before["autocast"]:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(before["autocast's cache"])
    while autocast_nesting() > before["autocast's nesting"]:
        torch.autocast_decrement_nesting()
    while autocast_nesting() < before["autocast's nesting"]:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
    torch.set_default_dtype(before["the default dtype"])
    if now["the default device"] != before["the default device"]:
        torch.set_default_device(None)  # "cpu" would stay on as a mode that all operations pass
        if torch.get_default_device() != before["the default device"]:
            torch.set_default_device(before["the default device"])
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


def restore_process(before: dict[str, Any]) -> None:
    """Restore what holds for the whole process, except threads."""
    if before["the working directory"] not in ("", _working_directory()):
        os.chdir(before["the working directory"])
    for variable in _changed_variables(before):
        if variable in before["the environment"]:
            os.environ[variable] = before["the environment"][variable]
        else:
            del os.environ[variable]
    if sys.getrecursionlimit() != before["the recursion limit"]:
        sys.setrecursionlimit(before["the recursion limit"])
    if gc.isenabled() != before["garbage collection"]:
        (gc.enable if before["garbage collection"] else gc.disable)()
    torch.set_printoptions(**before["the way in which tensors are printed"])
    numpy.set_printoptions(**before["the way in which numpy prints"])
    numpy.seterr(**before["what numpy does at errors"])
