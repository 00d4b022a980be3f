"""A long trace from two short ones: every layer of a deep model does the same things, event by event."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..compat import hook_counts, own_tensors
from ..measure.timeline import PHASE

_COMPARED = (int, float, str, bool, type(None), torch.dtype)
Part = tuple[np.ndarray, list]  # differences from sample to sample, and the operation and phase behind each


@dataclass(frozen=True)
class Trace:
    """The samples of one step: ``rows`` (samples, 9) as of a ``Timeline``, the operation behind each, where each part of the
    step begins, what was asked of a card's allocator (``allocator.replayed``), and the bytes that cross the bus."""

    rows: np.ndarray
    operations: tuple[str, ...]
    starts: tuple[int, ...]
    requests: tuple[int, ...] = ()
    moved: int = 0

    def parts(self) -> list[Part]:
        """Each part's differences from sample to sample (the phase as it is), and its operations with their phases."""
        steps = np.diff(self.rows, axis=0, prepend=0)
        steps[:, PHASE] = self.rows[:, PHASE]
        kinds = list(zip(self.operations, self.rows[:, PHASE].tolist(), strict=True))
        ends = [*self.starts[1:], len(kinds)]
        return [(steps[i:j], kinds[i:j]) for i, j in zip(self.starts, ends, strict=True)]


def repeated_layers(model: nn.Module) -> nn.Module | None:
    """The ``ModuleList`` or ``Sequential`` of ``model`` whose entries are all alike, the longest one; ``None`` if none is.

    Alike: the same modules, parameters, settings and hooks, numbers that count the layers aside. A model whose config lists
    something per layer that differs (Gemma's alternating attention) has none, nor one whose layers were edited.
    """
    found = None
    for module in model.modules():
        if type(module) not in (nn.ModuleList, nn.Sequential) or len(module) <= len(found or ()):
            continue
        first = _fingerprint(module[0], 0)
        if all(_fingerprint(layer, i) == first for i, layer in enumerate(module)):
            found = module
    if found is None:
        return None
    config, n = getattr(model, "config", None), len(found)
    values = getattr(config, "__dict__", {}).values()
    unlike = any(isinstance(v, list | tuple) and len(v) == n and len({*map(repr, v)}) > 1 for v in values)
    # Edited: some layers are not called, or share their weights.
    called = getattr(getattr(config, "get_text_config", lambda: config)(), "num_hidden_layers", n)
    shared = len([*found.parameters()]) < sum(len([*layer.parameters()]) for layer in found)
    return None if unlike or shared or called < n else found


def _fingerprint(layer: nn.Module, index: int) -> tuple:
    parts = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value if isinstance(value, _COMPARED) else type(value))
            for key, value in sorted(vars(module).items())
            if not (type(value) is int and value == index and "id" in key)
        )
        own = own_tensors(module)
        tensors = tuple((key, tuple(t.shape), t.dtype, t.requires_grad, t.device.type) for key, t in own)
        parts.append((name, type(module), settings, tensors, hook_counts(module)))
    return tuple(parts)


def extrapolate(short: list[Part], long: list[Part], units: int, wanted: int) -> list[np.ndarray] | None:
    """The differences in a trace with ``wanted`` repeated units, by part, from those with ``units`` and ``units + 1``.

    In each part of the step, the longer trace has one more round of the same events: it is found, repeated as often as
    needed, and whatever happens once (freeing all gradients) grows in proportion. ``None`` where the rounds differ.
    """
    if len(short) != len(long):
        return None
    parts = [_extrapolated_part(a, b, wanted - units) for a, b in zip(short, long, strict=True)]
    return None if any(part is None for part in parts) else parts


def _extrapolated_part(a: Part, b: Part, more: int) -> np.ndarray | None:
    (short, short_kinds), (long, long_kinds) = a, b
    n, extra = len(short_kinds), len(long_kinds) - len(short_kinds)
    if extra < 0:
        return None
    before = _agreeing(short_kinds, long_kinds)
    after = _agreeing(short_kinds[::-1], long_kinds[::-1])
    if before + after < n:
        return None
    at = _round_begins(short, long, extra, n - after, before) if extra else before
    if at is None:
        return None
    block = long[at : at + extra]
    aligned = np.concatenate([long[:at], long[at + extra :]])
    grown = short + (aligned - short) * more
    return np.concatenate([grown[:at], np.tile(block, (more, 1)), grown[at:]])


def _round_begins(short: np.ndarray, long: np.ndarray, extra: int, lo: int, hi: int) -> int | None:
    """Where the longer trace's additional round may begin, ``lo`` to ``hi``: it must repeat the round before or after it.

    The nearest to the middle is taken, away from what is special about the first round and the last.
    """
    for at in sorted(range(lo, hi + 1), key=lambda at: abs(2 * at - lo - hi)):
        block = long[at : at + extra]
        if any(np.array_equal(short[max(i, 0) : i + extra], block) for i in (at - extra, at)):
            return at
    return None


def _agreeing(a: list, b: list) -> int:
    """How many entries are the same, from the first on."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
