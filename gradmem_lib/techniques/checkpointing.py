"""Layers that run in checkpointed segments while they train, by a schedule from ``schedules``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from .schedules import Schedule, best_segments, checked_extra, segments_for, total_layers


def checkpoint_layers(
    layers_or_model: nn.Module,
    every: str | int | Schedule = "sqrt",
    *,
    keep_last: bool | None = None,
    max_extra_forward: float = 1.0,
) -> CheckpointedLayers:
    """Run layers in checkpointed segments while they train, until ``.remove()`` or the end of a ``with`` block.

    Args:
        layers_or_model: an ``nn.Sequential``; an ``nn.ModuleList`` whose layers are called in order, each with the last
            one's output; or a transformers model, in which the list of layers is found.
        every: an int k for segments of k layers; ``"sqrt"`` for about sqrt(n) of them; a list of segment lengths, first
            segment first, in which a list is a segment made of segments; or ``"best"``, which measures what each layer
            keeps at the beginning of the first training forward (one extra forward, one layer at a time) and takes
            ``best_segments``.
        keep_last: whether the last segment is kept rather than run again. ``None``: yes for a list and ``"best"``, no for
            an int and ``"sqrt"``.
        max_extra_forward: for ``"best"``.

    The modules, their names and their parameters stay where they are, so a state dict has the same keys. Layers run as
    before in eval mode and without gradients. Hooks on a layer fire whenever it really runs (what a pre-hook counts: the
    last layer that runs again is left before its end, once nothing more is needed). In training, an empty key-value
    cache is left out (with a warning), for a layer that runs again would write to it again. A forward of a model given
    here that collects hidden states or attentions checkpoints its layers one by one, and they come out right.

    A copy of the model (``copy.deepcopy``, ``pickle``) is a plain one without checkpoints.

    Raises ``ValueError`` or ``TypeError`` for a schedule that does not fit, ``ValueError`` where no list of layers is found,
    and ``RuntimeError`` where the layers are checkpointed already, by this function or by transformers.
    """
    return CheckpointedLayers(layers_or_model, every, keep_last, max_extra_forward)


class CheckpointedLayers:
    """Layers that run in segments; made by ``checkpoint_layers``.

    Attributes: ``layers``; ``segments`` (the schedule; None until ``"best"`` has measured); ``keep_last``; ``internal`` and
    ``boundary`` (what ``"best"`` measured, in bytes, a list with one number a layer; None before, and for the others).
    """

    def __init__(self, layers_or_model: nn.Module, every, keep_last: bool | None, max_extra_forward: float):
        self.layers, model = _find_layers(layers_or_model)
        _refuse_checkpointed(self.layers)
        self.keep_last = (
            every == "best" or isinstance(every, (list, tuple)) if keep_last is None else bool(keep_last)
        )
        self.segments = self.internal = self.boundary = None
        # For each layer: where its segment starts, the segment, and whether it is kept.
        self._places: list[tuple[int, int | Schedule, bool]] = []
        if (segments := segments_for(every, len(self.layers))) is not None:
            self._settle(segments)
        self._hands_all_on = isinstance(layers_or_model, nn.Sequential)
        self._max_extra_forward = checked_extra(max_extra_forward)
        self._apart = False
        self._warned = False
        self._waiting = None  # (the next layer, where the segment ends, what was returned, and the arguments)
        self._undo = ExitStack()
        with self._undo as undo:
            if model is not None:
                hook = _BeforeModel(self)
                undo.callback(model.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for i, layer in enumerate(self.layers):
                layer._call_impl = _Turn(self, i)
                undo.callback(delattr, layer, "_call_impl")
            self._undo = undo.pop_all()

    def remove(self) -> None:
        """Give the layers their own forward back. Calling it again does nothing."""
        self._undo.close()

    def __enter__(self) -> CheckpointedLayers:
        return self

    def __exit__(self, *error) -> None:
        self.remove()

    def __repr__(self) -> str:
        last = "kept" if self.keep_last else "run again"
        return f"CheckpointedLayers({len(self.layers)} layers, segments={self.segments}, last one {last})"

    def _call(self, i: int, args: tuple, kwargs: dict) -> Any:
        """Layer ``i`` was called: run its segment, or hand the input on if the segment has run."""
        if not torch.is_grad_enabled() or not any(layer.training for layer in self.layers):
            waiting, self._waiting = self._waiting, None
            if waiting is not None and waiting[0] == i and _input(args, kwargs) is self._hidden(waiting[2]):
                raise RuntimeError(_SWITCHED)
            return _plain(self.layers[i], args, kwargs)
        if getattr(self.layers[i], "gradient_checkpointing", False):
            raise RuntimeError(_TWICE_HF)
        args, kwargs = self._without_cache(args, kwargs)
        if self._apart:
            self._waiting = None
            return self._checkpoint(lambda x: self._run(1, i, x, args, kwargs), args, kwargs)
        if self.segments is None:
            self._choose(i, args, kwargs)
        start, item, kept = self._places[i]
        if i != start:
            return self._hand_on(i, start, args, kwargs)
        self._waiting = None
        stop = start + total_layers(item)

        def segment(x):
            return self._run(item, start, x, args, kwargs)

        out = segment(_input(args, kwargs)) if kept else self._checkpoint(segment, args, kwargs)
        if stop - start > 1:
            self._waiting = (i + 1, stop, out, args, kwargs)
        return out

    def _checkpoint(self, run: Callable, args: tuple, kwargs: dict) -> Any:
        return checkpoint(run, _input(args, kwargs), use_reentrant=False)

    def _run(self, item: int | Schedule, start: int, x: Any, args: tuple, kwargs: dict) -> Any:
        """The output of the layers of one segment, beginning at layer ``start`` with input ``x``."""
        if isinstance(item, list):
            for j, part in enumerate(item):

                def inner(x, part=part, start=start):
                    return self._run(part, start, x, args, kwargs)

                out = inner(x) if j == len(item) - 1 else checkpoint(inner, x, use_reentrant=False)
                start += total_layers(part)
                x = self._hidden(out) if j < len(item) - 1 else out
            return x
        for j in range(start, start + item):
            out = _plain(self.layers[j], *_with_input(args, kwargs, x))
            x = self._hidden(out) if j < start + item - 1 else out
        return x

    def _hidden(self, out: Any) -> Any:
        """What the next layer is given of a layer's output."""
        if self._hands_all_on or not isinstance(out, tuple):
            return out
        if any(part is not None for part in out[1:]):
            raise RuntimeError(
                "the layers return more than their hidden state, and a segment of several layers can hand on only that: "
                "checkpoint them one by one (every=1), or leave output_attentions off"
            )
        return out[0]

    def _hand_on(self, i: int, start: int, args: tuple, kwargs: dict) -> Any:
        """Layer ``i`` has run as part of its segment: give back the segment's output, in the form that layers return."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting[0] != i:
            raise RuntimeError(
                f"layer {i} was called, and it is in a segment that begins at layer {start}: the layers of a segment must "
                "be called in order, each once. Layers that are skipped or called alone need segments of one layer (every=1)"
            )
        _, stop, out, first_args, first_kwargs = waiting
        if _input(args, kwargs) is not self._hidden(out):
            raise RuntimeError(
                f"layer {i} was given something else than the output of layer {i - 1}, and both are in one segment: the "
                "model changes the hidden state between them. Begin a new segment there, or use every=1"
            )
        if not _same((args[1:], _rest(kwargs, args)), (first_args[1:], _rest(first_kwargs, first_args))):
            raise RuntimeError(
                f"layer {i} was called with other arguments (masks, positions, ...) than layer {start}, and both are in one "
                "segment, which runs with one set of them. Begin a new segment there, or use every=1"
            )
        if i + 1 < stop:
            self._waiting = (i + 1, stop, out, first_args, first_kwargs)
        return out

    def _settle(self, segments: Schedule) -> None:
        """From now on, layers run in these segments."""
        self.segments, start = segments, 0
        for j, item in enumerate(segments):
            kept = self.keep_last and j == len(segments) - 1
            self._places += [(start, item, kept)] * total_layers(item)
            start += total_layers(item)

    def _without_cache(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with None for a key-value cache."""
        modeling = sys.modules.get("transformers.cache_utils")
        if modeling is None:
            return args, kwargs

        def cut(value):
            if not isinstance(value, modeling.Cache):
                return value
            if value.get_seq_length() > 0:
                raise RuntimeError(
                    "the layers were given a key-value cache that has entries, while they train with checkpoints: running a "
                    "layer again would add to it again. Train without past_key_values, or remove the checkpoints"
                )
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "training with checkpoints leaves the key-value cache out: set model.config.use_cache = False",
                    stacklevel=2,
                )
            return None

        return tuple(cut(a) for a in args), {
            name: False if name == "use_cache" else cut(value) for name, value in kwargs.items()
        }

    def _choose(self, i: int, args: tuple, kwargs: dict) -> None:
        """Measure all layers, from the input of the first one, and settle the schedule."""
        if i != 0:
            raise RuntimeError(
                f'layer {i} was called before layer 0: "best" measures all layers when the first one is called'
            )
        self.internal, self.boundary = self._measure(args, kwargs)
        self._settle(best_segments(len(self.layers), self.internal, self.boundary, self._max_extra_forward))

    def _measure(self, args: tuple, kwargs: dict) -> tuple[list[int], list[int]]:
        """Bytes kept inside each layer, and bytes of its input. Random state and buffers are left as they were."""
        x = _input(args, kwargs)
        devices = {p.device for layer in self.layers for p in layer.parameters() if p.device.type == "cuda"}
        buffers = [(b, b.clone()) for layer in self.layers for b in layer.buffers()]
        internal, boundary = [], []
        with torch.random.fork_rng(devices=list(devices)):
            try:
                x = _cut_off(x)
                for layer in self.layers:
                    saved: list[Tensor] = []  # holds them all, so that no address is used twice
                    with saved_tensors_hooks(saved.append, _never):
                        args, kwargs = _with_input(args, kwargs, x)
                        out = self._hidden(layer.forward(*args, **kwargs))  # hooks are for real calls
                    # The output is not counted: it is the next layer's boundary.
                    there = [x, args, kwargs, out, *layer.parameters(), *layer.buffers()]
                    internal.append(_nbytes(saved, besides=there))
                    boundary.append(_nbytes(x))
                    x = _cut_off(out)
                    saved.clear()  # the graph holds the list through its hook, and the list the graph
                    del out, there
            finally:
                with torch.no_grad():
                    for buffer, value in buffers:
                        buffer.copy_(value)
        return internal, boundary


class _Turn:
    """What stands in for a layer's ``__call__``. In a copy of the layer it becomes the layer's own again."""

    def __init__(self, owner: CheckpointedLayers, index: int):
        self.owner, self.index = owner, index

    def __call__(self, *args, **kwargs):
        return self.owner._call(self.index, args, kwargs)

    def __reduce__(self):
        return getattr, (self.owner.layers[self.index], "_call_impl")


class _BeforeModel:
    """Sees whether a forward of the model gathers what its layers compute: then it is kept, and layers run one by one."""

    def __init__(self, owner: CheckpointedLayers | None):
        self.owner = owner

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.owner is not None:
            asked = [
                getattr(model.config, name, None) if kwargs.get(name) is None else kwargs[name]
                for name in ("output_hidden_states", "output_attentions")
            ]
            self.owner._apart = any(a is not None and a is not False for a in asked)

    def __reduce__(self):
        return type(self), (None,)  # in a copy of the model it does nothing


_TWICE = (
    "these layers are checkpointed already, and a second schedule on top would run them three times: call .remove() on the "
    "first one, or use it in a `with` block"
)

_SWITCHED = (
    "gradients or training mode were switched off in the middle of a segment, whose layers have run already: let segments "
    "end where that happens"
)

_TWICE_HF = (
    "transformers' own checkpointing is on for this model, and with segments on top each layer would run three times: call "
    "model.activation_checkpointing_disable() first (gradient_checkpointing_disable() before transformers 5.23), and leave "
    "it out of the Trainer's arguments"
)


def _plain(layer: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Call the layer as if nothing had been put on it, hooks included."""
    return type(layer)._call_impl(layer, *args, **kwargs)


def _input(args: tuple, kwargs: dict) -> Any:
    if args:
        return args[0]
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    raise TypeError(
        f"a checkpointed layer was called without a positional argument (only {sorted(kwargs) or 'nothing'}): pass what one "
        "layer hands to the next as the first argument"
    )


def _with_input(args: tuple, kwargs: dict, x: Any) -> tuple[tuple, dict]:
    return ((x, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": x})


def _rest(kwargs: dict, args: tuple) -> dict:
    return kwargs if args else {name: value for name, value in kwargs.items() if name != "hidden_states"}


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same: one tensor (or two views of the same elements), or equal values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        views = [
            (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (a, b)
        ]
        return views[0] == views[1]
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    return bool(a == b)


def _storages(value: Any) -> dict[int, int]:
    """The storages behind the tensors in ``value``: their address and bytes."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _nbytes(value: Any, besides: Any = ()) -> int:
    """Bytes of the storages behind the tensors in ``value``, each counted once, but for those behind ``besides``."""
    skip = _storages(besides)
    return sum(nbytes for key, nbytes in _storages(value).items() if key not in skip)


def _never(packed: Any) -> Tensor:
    raise AssertionError("no backward follows a measurement")


def _cut_off(value: Any) -> Any:
    """The same tensors without the graph behind them."""
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


def _find_layers(given: nn.Module) -> tuple[list[nn.Module], nn.Module | None]:
    """The layers of ``given``, and the transformers model that they belong to, if it was given."""
    if isinstance(given, (nn.Sequential, nn.ModuleList)):
        layers, model = list(given), None
    elif isinstance(given, nn.Module):
        layers, model = _layers_of_model(given)
    else:
        raise TypeError(
            "checkpoint_layers takes an nn.Sequential, an nn.ModuleList or a transformers model, and was given "
            f"{type(given).__name__}"
        )
    if not layers:
        raise ValueError(f"there are no layers in this {type(given).__name__}: nothing to checkpoint")
    if len({id(layer) for layer in layers}) < len(layers):
        raise ValueError("the same layer is in the list more than once: shared layers cannot be in segments")
    return layers, model


def _layers_of_model(model: nn.Module) -> tuple[list[nn.Module], nn.Module | None]:
    modeling = sys.modules.get("transformers.modeling_layers")
    kind = getattr(modeling, "GradientCheckpointingLayer", ())
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(isinstance(m, kind) for m in module)
    }
    if len(lists) != 1:
        found = "none was found" if not lists else f"{len(lists)} were found: {', '.join(lists)}"
        raise ValueError(
            f"checkpoint_layers looks in a {type(model).__name__} for the one ModuleList whose layers are transformers' "
            f"GradientCheckpointingLayer, and {found}. Give the nn.Sequential or nn.ModuleList itself, such as model.layers"
        )
    ((name, layers),) = lists.items()
    owner, owners = model, [model]
    for part in name.split("."):
        owner = getattr(owner, part)
        owners.append(owner)
    return list(layers), next((m for m in reversed(owners) if hasattr(m, "config")), None)


def _refuse_checkpointed(layers: list[nn.Module]) -> None:
    if any(isinstance(layer.__dict__.get("_call_impl"), _Turn) for layer in layers):
        raise RuntimeError(_TWICE)
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        raise RuntimeError(_TWICE_HF)
