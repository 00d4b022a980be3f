"""Layers that run in checkpointed segments while they train, by a schedule from ``schedules``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..compat import is_compiled, plain_call, replace_call, stand_in, storage_key
from .layer_bytes import LayerBytes, layer_bytes
from .layers import find_layers
from .schedules import Schedule, as_lists, checked_schedule, safe_segments, segments_for, total_layers


def checkpoint_layers(
    layers_or_model: nn.Module, every: str | int | Schedule, *, keep_last: bool | None = None
) -> CheckpointedLayers:
    """Run layers in checkpointed segments while they train, until ``.remove()`` or the end of a ``with`` block.

    Args:
        layers_or_model: an ``nn.Sequential``; an ``nn.ModuleList`` whose layers are called in order, each with the last
            one's output; or a transformers model, in which the list of layers is found, or several (an encoder's and a
            decoder's), each of which gets a schedule of its own.
        every: an int k for segments of k layers, or ``"per-layer"`` for 1; ``"sqrt"`` for about sqrt(n) of them; a list of
            segment lengths, first segment first, in which a list is a segment made of segments; or ``"best"``, which
            measures what each layer keeps and needs at the beginning of the first training forward (two extra forwards
            and a backward of the layers, one at a time) and takes ``safe_segments``: never a higher peak than one a layer,
            whatever logits and loss need after the layers.
        keep_last: whether the last segment is kept rather than run again. ``None``: yes for a list, no for an int and
            ``"sqrt"``, and ``"best"`` chooses.

    The modules, their names and their parameters stay where they are, so a state dict has the same keys. Layers run as
    before in eval mode and without gradients. Hooks on a layer fire whenever it really runs (what a pre-hook counts: the
    last layer that runs again is left before its end, once nothing more is needed). In training, an empty key-value
    cache is left out (with a warning), for a layer that runs again would write to it again. A forward of a model given
    here that collects hidden states or attentions checkpoints its layers one by one, and they come out right. Under
    ``torch.compile`` of the whole model, the layers run uncompiled. A copy of the model (``copy.deepcopy``,
    ``pickle``) is a plain one without checkpoints.

    Raises ``ValueError`` or ``TypeError`` for a schedule that does not fit, ``ValueError`` where no list of layers is found,
    and ``RuntimeError`` where a layer, or a part of one, is checkpointed already (by this function or by transformers), where
    a layer is compiled, or where ``"best"`` meets weights that FSDP has spread over processes.
    """
    return CheckpointedLayers(layers_or_model, every, keep_last)


class CheckpointedLayers:
    """Layers that run in segments; made by ``checkpoint_layers``.

    Attributes: ``layers``; ``segments`` (the schedule; None until ``"best"`` has measured); ``keep_last``; ``internal`` and
    ``boundary`` (what ``"best"`` measured, in bytes, a list with one number a layer; None before, and for the others). For
    a model with several lists of layers, each is a dict by the list's name in the model.
    """

    def __init__(self, layers_or_model: nn.Module, every: Any, keep_last: bool | None):
        found = find_layers(layers_or_model)
        _refuse([layer for layers, _ in found.values() for layer in layers])
        every = checked_schedule(every)
        if len(found) > 1 and isinstance(every, tuple):
            raise ValueError(
                f"a {type(layers_or_model).__name__} has several lists of layers ({', '.join(found)}), and every={as_lists(every)} "
                "is the schedule of one: give each list its own, checkpoint_layers(model.<list>, [...]), or an int or a name"
            )
        hands_all_on = isinstance(layers_or_model, nn.Sequential)
        self._asked = (layers_or_model, every, keep_last)
        self._undo = ExitStack()
        self._lists = {
            name: _Segments(layers, every, keep_last, hands_all_on) for name, (layers, _) in found.items()
        }
        with self._undo as undo:
            for name, (_, owner) in found.items():
                self._lists[name].install(owner, undo)
            for layer in [layer for layers, _ in found.values() for layer in layers]:
                stand_in(layer).owner = self
            self._undo = undo.pop_all()

    def __getattr__(self, name: str) -> Any:
        if name not in ("layers", "segments", "keep_last", "internal", "boundary"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        values = {where: getattr(part, name) for where, part in self._lists.items()}
        return values if len(values) > 1 else next(iter(values.values()))

    def put_on_copy(self, copies: dict[nn.Module, nn.Module]) -> CheckpointedLayers:
        """The same schedule on a copy of the model; ``copies`` has the copy of each of its modules."""
        given, every, keep_last = self._asked
        copied = copies.get(given)
        if copied is None:  # a list that is no part of the model
            layers = [copies[layer] for layer in given]
            copied = nn.Sequential(*layers) if isinstance(given, nn.Sequential) else nn.ModuleList(layers)
        return CheckpointedLayers(copied, every, keep_last)

    def remove(self) -> None:
        """Give the layers their own forward back. Calling it again does nothing."""
        self._undo.close()

    def __enter__(self) -> CheckpointedLayers:
        return self

    def __exit__(self, *error) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"CheckpointedLayers({', '.join(map(str, self._lists.values()))})"


class _Segments:
    """One list of layers, and how it runs."""

    def __init__(self, layers: list[nn.Module], every: Any, keep_last: bool | None, hands_all_on: bool):
        self.layers = layers
        self.keep_last = isinstance(every, tuple) if keep_last is None and every != "best" else keep_last
        self.segments: Schedule | None = None
        self.internal: list[int] | None = None
        self.boundary: list[int] | None = None
        # For each layer: where its segment starts, the segment, and whether it is kept.
        self._places: list[tuple[int, int | Schedule, bool]] = []
        if (segments := segments_for(every, len(layers))) is not None:
            self._settle(segments)
        self._hands_all_on = hands_all_on
        self._apart = False
        self._warned = False
        # (the next layer, where the segment ends, what was returned, and the arguments)
        self._waiting: tuple[int, int, Any, tuple, dict] | None = None
        # While "best" measures: the index and the bytes of each layer called, and whether it may share a segment with
        # the layer before it.
        self._measured: list[tuple[int, LayerBytes, bool]] | None = None
        self._last_call: tuple[Any, tuple, dict] | None = None

    def install(self, owner: nn.Module | None, undo: ExitStack) -> None:
        # Dynamo must not look into a schedule that changes while it runs.
        call, before = torch.compiler.disable(self._call), torch.compiler.disable(self._before_model)
        if owner is not None:
            undo.callback(owner.register_forward_pre_hook(_BeforeModel(before), with_kwargs=True).remove)
        for i, layer in enumerate(self.layers):
            undo.callback(replace_call(layer, _Turn(call, layer, i)))

    def __repr__(self) -> str:
        last = {True: "kept", False: "run again", None: "not chosen yet"}[self.keep_last]
        return f"{len(self.layers)} layers, segments={self.segments}, last one {last}"

    def _call(self, i: int, args: tuple, kwargs: dict) -> Any:
        """Layer ``i`` was called: run its segment, or hand the input on if the segment has run."""
        if not self._training():
            waiting, self._waiting = self._waiting, None
            if waiting is not None and waiting[0] == i and _input(args, kwargs) is self._hidden(waiting[2]):
                raise RuntimeError(_SWITCHED)
            return plain_call(self.layers[i])(*args, **kwargs)
        if getattr(self.layers[i], "gradient_checkpointing", False):
            raise RuntimeError(_TWICE_HF)
        args, kwargs = self._without_cache(args, kwargs)
        if self._measured is not None:
            return self._measure(i, args, kwargs)
        if self._apart:
            self._waiting = None
            return _checkpointed(lambda x: self._run(1, i, x, args, kwargs), args, kwargs)
        if self.segments is None:
            self._choose_from(i, args, kwargs)
        start, item, kept = self._places[i]
        if i != start:
            return self._hand_on(i, start, args, kwargs)
        self._waiting = None
        stop = start + total_layers(item)

        def segment(x):
            return self._run(item, start, x, args, kwargs)

        out = segment(_input(args, kwargs)) if kept else _checkpointed(segment, args, kwargs)
        if stop - start > 1:
            self._waiting = (i + 1, stop, out, args, kwargs)
        return out

    def _training(self) -> bool:
        return torch.is_grad_enabled() and any(layer.training for layer in self.layers)

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
            given, named = _with_input(args, kwargs, x)
            out = plain_call(self.layers[j])(*given, **named)
            x = self._hidden(out) if j < start + item - 1 else out
        return x

    def _hidden(self, out: Any) -> Any:
        """What the next layer is given of a layer's output."""
        if self._hands_all_on or not isinstance(out, tuple):
            return out
        if _more_than_hidden(out):
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
        if not _same(_rest(args, kwargs), _rest(first_args, first_kwargs)):
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
            kept = bool(self.keep_last) and j == len(segments) - 1
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

    def _before_model(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """The model that calls these layers begins its forward."""
        asked = [
            getattr(model.config, name, None) if kwargs.get(name) is None else kwargs[name]
            for name in ("output_hidden_states", "output_attentions")
        ]
        self._apart = any(a is not None and a is not False for a in asked)
        if self.segments is None and not self._apart and self._measured is None and self._training():
            # Layers of different kinds get masks of their own where a batch has padding.
            kinds = set(getattr(model.config, "layer_types", None) or ())
            self._choose(lambda: model.forward(*args, **kwargs), alike=len(kinds) < 2)

    def _choose_from(self, i: int, args: tuple, kwargs: dict) -> None:
        """Measure the layers of a list whose owner is not known: each with the output of the one before it."""
        if i != 0:
            raise RuntimeError(
                f'layer {i} was called before layer 0: "best" measures all layers when the first one is called'
            )

        def chain() -> None:
            given = args, kwargs
            for j in range(len(self.layers)):
                out = self._measure(j, *given)
                if j < len(self.layers) - 1:
                    given = _with_input(*given, out[0] if self._first_alone(out) else out)

        self._choose(chain)

    def _choose(self, run: Callable[[], Any], alike: bool = True) -> None:
        """Measure each layer while ``run`` calls them, and settle the schedule. Random states are left as they were."""
        devices = {p.device for layer in self.layers for p in layer.parameters() if p.device.type == "cuda"}
        self._measured = []
        try:
            with torch.random.fork_rng(devices=list(devices)):
                run()
            measured = self._measured
        finally:
            self._measured = self._last_call = None
        sizes = [size for _, size, _ in measured]
        self.internal, self.boundary = [s.internal for s in sizes], [s.boundary for s in sizes]
        in_order = [i for i, _, _ in measured] == list(range(len(self.layers)))
        if alike and in_order and all(follows for _, _, follows in measured[1:]):
            segments, self.keep_last = safe_segments(sizes, self.keep_last)
        else:  # layers that cannot share a segment
            segments, self.keep_last = [1] * len(self.layers), bool(self.keep_last)
        self._settle(segments)

    def _measure(self, i: int, args: tuple, kwargs: dict) -> Any:
        """The output of layer ``i``, without a graph, and what the layer keeps and needs."""
        layer, x = self.layers[i], _input(args, kwargs)
        if any(hasattr(p, "placements") for p in layer.parameters()):
            raise RuntimeError(_SPREAD)
        size, out = layer_bytes(layer, args, kwargs, x)
        follows = False
        if self._last_call is not None:
            before, *called = self._last_call
            hidden = before[0] if self._first_alone(before) else before
            follows = x is hidden and _same(_rest(args, kwargs), _rest(*called))  # type: ignore[arg-type]
            follows &= self._hands_all_on or not _more_than_hidden(before)
        self._measured.append((i, size, follows))
        self._last_call = (out, args, kwargs)
        return out

    def _first_alone(self, out: Any) -> bool:
        return isinstance(out, tuple) and not self._hands_all_on


def checkpoints_of(model: nn.Module) -> list[CheckpointedLayers]:
    """What ``checkpoint_layers`` has put on layers of ``model``."""
    turns = [stand_in(module) for module in model.modules()]
    return list(dict.fromkeys(turn.owner for turn in turns if isinstance(turn, _Turn)))


class _Turn:
    """What stands in for a layer's ``__call__``. In a copy of the layer it becomes the layer's own again."""

    def __init__(self, call: Callable, layer: nn.Module, index: int):
        self.call, self.layer, self.index = call, layer, index
        self.owner: CheckpointedLayers | None = None

    def __call__(self, *args, **kwargs):
        return self.call(self.index, args, kwargs)

    def __reduce__(self):
        return plain_call, (self.layer,)


class _BeforeModel:
    """Tells the segments that a forward of their model begins. In a copy of the model it does nothing."""

    def __init__(self, tell: Callable | None):
        self.tell = tell

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.tell is not None:
            self.tell(model, args, kwargs)

    def __reduce__(self):
        return type(self), (None,)


_TWICE = (
    "these layers, or parts of them, are checkpointed already, and a second schedule on top would run them three times: call "
    ".remove() on the first one, or use it in a `with` block"
)

_SWITCHED = (
    "gradients or training mode were switched off in the middle of a segment, whose layers have run already: let segments "
    "end where that happens"
)

_TWICE_HF = (
    "transformers' own checkpointing is on for some of these layers, and with segments on top they would run three times: call "
    "model.activation_checkpointing_disable() first (gradient_checkpointing_disable() before transformers 5.23), and leave "
    "it out of the Trainer's arguments"
)

_COMPILED = (
    "a layer is compiled by itself, and compiled code runs past the checkpoints: checkpoint the layers before they are "
    "compiled, or compile none of them"
)

_SPREAD = (
    'every="best" measures one layer alone, and here FSDP has spread its weights over processes: give an int, "sqrt" or a list '
    "of segment lengths (best_segments finds them from the bytes of an unspread layer)"
)


def _checkpointed(run: Callable, args: tuple, kwargs: dict) -> Any:
    return checkpoint(run, _input(args, kwargs), use_reentrant=False)


def _more_than_hidden(out: Any) -> bool:
    return isinstance(out, tuple) and any(part is not None for part in out[1:])


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


def _rest(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """All arguments but the input."""
    named = kwargs if args else {name: value for name, value in kwargs.items() if name != "hidden_states"}
    return args[1:], named


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same: one tensor (or two views of the same elements), or equal values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        views = [
            (storage_key(t.untyped_storage()), t.storage_offset(), t.shape, t.stride(), t.dtype)
            for t in (a, b)
        ]
        return views[0] == views[1]
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    return bool(a == b)


def _refuse(layers: list[nn.Module]) -> None:
    parts = [part for layer in layers for part in layer.modules()]
    if any(isinstance(stand_in(part), _Turn) for part in parts):  # a copy's is its own call
        raise RuntimeError(_TWICE)
    if any(getattr(part, "gradient_checkpointing", False) for part in parts):
        raise RuntimeError(_TWICE_HF)
    if any(is_compiled(layer) for layer in layers):
        raise RuntimeError(_COMPILED)
