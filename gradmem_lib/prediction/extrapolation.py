"""Computes a long trace from two short ones: every layer of a deep model does the same operations,
event by event.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..compat import hook_counts, own_tensors
from ..measure.timeline import PHASE

_COMPARED = (int, float, str, bool, type(None), torch.dtype)
# differences from sample to sample, and the operation and phase of each
Part = tuple[np.ndarray, list]


@dataclass(frozen=True)
class Trace:
    """The samples of one step: ``rows`` (samples, 9) as in a ``Timeline``, the operation of each
    sample, the start of each part of the step, the requests to a card's allocator
    (``allocator.replayed``), and the bytes that cross the bus.
    """

    rows: np.ndarray
    operations: tuple[str, ...]
    starts: tuple[int, ...]
    requests: tuple[int, ...] = ()
    offload_traffic_bytes: int = 0

    def parts(self) -> list[Part]:
        """For each part of the step: its differences from sample to sample, and its operations.

        Each operation has its phase. The phase's column holds the phase itself, not a difference.
        """
        steps = np.diff(self.rows, axis=0, prepend=0)
        steps[:, PHASE] = self.rows[:, PHASE]
        kinds = list(zip(self.operations, self.rows[:, PHASE].tolist(), strict=True))
        ends = [*self.starts[1:], len(kinds)]
        return [(steps[i:j], kinds[i:j]) for i, j in zip(self.starts, ends, strict=True)]


def repeated_layers(model: nn.Module) -> nn.Module | None:
    """The longest ``ModuleList`` or ``Sequential`` of ``model`` whose entries are all equal.

    Equal: the same modules, parameters, settings and hooks, except for numbers that count the
    layers. The result is ``None`` if the config lists different values for the layers (Gemma's
    alternating attention), or if the layers were edited.
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
    settings_differ = any(
        isinstance(v, list | tuple) and len(v) == n and len({*map(repr, v)}) > 1 for v in values
    )
    # Edited layers: some are not called, or they share weights.
    called = getattr(getattr(config, "get_text_config", lambda: config)(), "num_hidden_layers", n)
    shared = len([*found.parameters()]) < sum(len([*layer.parameters()]) for layer in found)
    return None if settings_differ or shared or called < n else found


def _fingerprint(layer: nn.Module, index: int) -> tuple:
    parts = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value if isinstance(value, _COMPARED) else type(value))
            for key, value in sorted(vars(module).items())
            if not (type(value) is int and value == index and "id" in key)
        )
        own = own_tensors(module)
        tensors = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad, t.device.type) for key, t in own
        )
        parts.append((name, type(module), settings, tensors, hook_counts(module)))
    return tuple(parts)


def extrapolate(
    short: list[Part], long: list[Part], units: int, num_units: int
) -> list[np.ndarray] | None:
    """Extrapolate from traces with ``units`` and ``units + 1`` repeated units to ``num_units``.

    Returns the differences from sample to sample, for each part of the step.

    In each part of the step, the longer trace has one more round of the same events. This round is
    found and repeated as often as needed. An event that happens once (such as freeing all
    gradients) grows in proportion. ``None`` if the rounds differ.
    """
    if len(short) != len(long):
        return None
    parts = [_extrapolated_part(a, b, num_units - units) for a, b in zip(short, long, strict=True)]
    return None if any(part is None for part in parts) else parts


def _extrapolated_part(short_part: Part, long_part: Part, extra_repeats: int) -> np.ndarray | None:
    (short, short_kinds), (long, long_kinds) = short_part, long_part
    n, extra = len(short_kinds), len(long_kinds) - len(short_kinds)
    if extra < 0:
        return None
    before = _common_prefix(short_kinds, long_kinds)
    after = _common_prefix(short_kinds[::-1], long_kinds[::-1])
    if before + after < n:
        return None
    at = _locate_repeat(short, long, extra, n - after, before) if extra else before
    if at is None:
        return None
    block = long[at : at + extra]
    aligned = np.concatenate([long[:at], long[at + extra :]])
    grown = short + (aligned - short) * extra_repeats
    return np.concatenate([grown[:at], np.tile(block, (extra_repeats, 1)), grown[at:]])


def _locate_repeat(
    short: np.ndarray, long: np.ndarray, extra: int, first: int, last: int
) -> int | None:
    """The start of the longer trace's additional round, from ``first`` to ``last``.

    This round must equal the one before or after it. Of several starts, it takes the nearest to the
    middle, far from what is special about the first and the last round. ``None`` if no start fits.
    """
    for at in sorted(range(first, last + 1), key=lambda at: abs(2 * at - first - last)):
        block = long[at : at + extra]
        if any(np.array_equal(short[max(i, 0) : i + extra], block) for i in (at - extra, at)):
            return at
    return None


def _common_prefix(a: list, b: list) -> int:
    """The length of the longest common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
