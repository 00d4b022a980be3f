"""Finds what an answer leaves behind (changed inputs, switches that were not restored), reports it,
and restores it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ... import compat
from ..machine import compat as course_compat


class Given:
    """A function's arguments, recorded so that changes can be found afterwards.

    Numbers are copied to memory that a ``MemoryTracker`` does not count. For models, only switches
    are recorded, since an answer may change weights and gradients.
    """

    def __init__(self, arguments: dict[str, Any], may_change: tuple[str, ...] = ()):
        self.may_change = may_change
        self.before = {name: (value, _look(value)) for name, value in arguments.items()}

    def changes(self) -> Iterator[str]:
        """A sentence for each argument that has changed."""
        for name, (value, before) in self.before.items():
            after = _look(value)
            if isinstance(value, nn.Module):
                free = {
                    kind
                    for kind in before
                    if any(f"{name}.{w}" in self.may_change for w in kind.split())
                }
                before, after = (
                    {k: was for k, was in each.items() if k not in free} for each in (before, after)
                )
                yield from (
                    f"your code leaves `{name}` with {what}" for what in _switched(before, after)
                )
            elif isinstance(value, torch.optim.Optimizer):
                if changed := [
                    key
                    for was, now in zip(before, after, strict=False)
                    for key in was
                    if was[key] != now.get(key) and f"{name}.{key}" not in self.may_change
                ]:
                    yield (
                        f"your code leaves `{name}` with another {changed[0]} than before: "
                        "restore it"
                    )
            elif before != after:
                yield (
                    f"your code has changed `{name}` in place: do not change an argument, work "
                    "on a copy"
                )


def arguments_of(
    reference: Callable, args: tuple, kwargs: dict, changes: tuple[str, ...]
) -> dict[str, Any]:
    """Arguments by the reference's names, without those that an answer should change."""
    try:
        bound = inspect.signature(reference).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in bound.items() if name not in changes}


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


def _switches_of(model: nn.Module) -> dict[str, Any]:
    modules = list(model.modules())
    config = getattr(model, "config", None)
    return {
        "another mode": [(m, m.training) for m in modules],
        "another requires_grad": [(p, p.requires_grad) for p in model.parameters()],
        "a hook more or less": [
            (thing, compat.hook_counts(thing)) for thing in (*modules, *model.parameters())
        ],
        "another dropout": [(m, m.p) for m in modules if isinstance(m, nn.Dropout)],
        "another config": config.to_dict() if hasattr(config, "to_dict") else None,
    }


def _switched(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for what, was in before.items():
        now = after[what]
        if what == "another config":
            fields = [
                name
                for name in now or ()
                if was is not None and now[name] != was.get(name, now[name])
            ]
            if fields:
                yield f"config.{fields[0]} = {now[fields[0]]!r}: put back what was there"
            continue
        # Modules that are gone or new are not compared, only those in both.
        held = {id(thing): (thing, value) for thing, value in was}
        flipped = [
            value for thing, value in now if id(thing) in held and held[id(thing)][1] != value
        ]
        if flipped and what == "another mode":
            mode = "train" if flipped[0] else "eval"
            yield (
                f"{mode} mode on, but it was off before: restore it with "
                f"model.{'eval' if flipped[0] else 'train'}()"
            )
        elif flipped:
            yield f"{what} than before: put it back"


def switches() -> dict[str, Any]:
    """Every switch of torch that stays on after the code that set it."""
    return {
        "gradients": torch.is_grad_enabled(),
        "autocast": tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "anomaly detection": torch.is_anomaly_enabled(),
        "the number of threads": torch.get_num_threads(),
        "hooks on every module": course_compat.global_hooks(),
        "saved-tensor hooks": course_compat.saved_tensor_hooks(),
    }


def changed_switches(before: dict[str, Any]) -> Iterator[str]:
    """A sentence for each switch that has changed."""
    now = switches()
    for name, value in before.items():
        if now[name] == value:
            continue
        how = {"gradients": "off" if value else "on"}.get(name, "changed")
        how = _autocast(value, now[name]) if name == "autocast" else how
        how = f"at {now[name]}" if name.startswith("the ") else how
        stays = " (torch.set_grad_enabled stays until it is called again)" if how == "off" else ""
        yield (
            f"your code leaves {name} {how}, for all code after it: restore it, best by a `with` "
            f"block{stays}"
        )


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
    torch.clear_autocast_cache()
    torch.set_default_dtype(before["the default dtype"])
    if now["the default device"] != before["the default device"]:
        torch.set_default_device(None)  # "cpu" would stay on as a mode that all operations pass
        if torch.get_default_device() != before["the default device"]:
            torch.set_default_device(before["the default device"])
    deterministic, warns = before["deterministic algorithms"]
    torch.use_deterministic_algorithms(deterministic, warn_only=warns)
    torch.autograd.set_detect_anomaly(before["anomaly detection"])
    torch.set_num_threads(before["the number of threads"])
    course_compat.restore_global_hooks(before["hooks on every module"])
    course_compat.restore_saved_tensor_hooks(before["saved-tensor hooks"])
