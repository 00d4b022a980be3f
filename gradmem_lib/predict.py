"""The peak of a training step without running it.

The step runs for real, on *fake* tensors: they have a shape, a dtype and a storage of so many bytes, and no memory behind
it. ``MemoryTracker`` counts them as it counts real ones. Every layer of a deep model does the same things, so two short
traces, of three and of four layers, say what the trace of all of them looks like, event by event.
"""

from __future__ import annotations

import copy
import os
import socket
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from . import cuda, fakes
from .recipe import (
    Prepared,
    Recipe,
    _autocast,
    _loss,
    _micro_batches,
    example_batch,
    model_class,
    prepare,
    set_attention,
    step,
)
from .tracker import CATEGORIES, PHASES, MemorySnapshot, MemoryTracker, Timeline, _Watch

TARGETS = ("cpu", "cuda")
OP, PHASE, TOTAL = 0, 1, 2
BY = slice(3, 3 + len(CATEGORIES))
OWNED = slice(3 + len(CATEGORIES), 3 + 2 * len(CATEGORIES))
SHORT_TRACES = ((2, 3), (3, 4), (4, 5))  # in repeated units, which are layers or segments of layers
SHORTEST = 3  # layers: with fewer, the first and the last are all there is
CACHED_TRACES = 64
MOST_SAMPLES = 2**17  # of a timeline: more than an ordinary step has, and 9 MiB
HUB_SECONDS = 5
REPLAYED = 2  # micro-batches for the allocator: a third asks for what the second has given back
FEW = 3  # micro-batches that are traced: the first, the last, and one that stands for all between them


class CannotTrace(RuntimeError):
    """The model decides something by the values in its tensors, and fake tensors have none."""


@dataclass(frozen=True)
class Prediction:
    """What a training step will need, in the form of a ``MemoryTracker`` that has watched it. All figures are bytes.

    The step is a second or later one: the optimizer's states exist. Attributes: ``target``; ``timeline`` (thinned to the largest
    sample of each window where there are very many); ``peak``; ``peak_by_phase``; ``current``, what stays between steps;
    ``title``; ``traced_layers``, the lengths of the short traces that it was put together from, empty for a full trace.
    """

    target: str
    timeline: Timeline
    peak: MemorySnapshot
    peak_by_phase: dict[str, int]
    current: MemorySnapshot
    title: str = ""
    traced_layers: tuple[int, ...] = ()
    _question: Any = field(default=None, repr=False, compare=False)

    @property
    def reserved(self) -> int | None:
        """For a card: bytes that the caching allocator will have taken from the driver, by replaying its rules over the full
        trace (which takes a few seconds for a deep model). An estimate: the order of the frees is the trace's. Without
        ``workspace`` and ``context``. ``None`` for the CPU."""
        if self.target != "cuda":
            return None
        few = self._question.recipe.accumulation > REPLAYED and self._question.source.key is not None
        return cuda.replayed(_trace(self._question, None, REPLAYED if few else None).requests)

    @property
    def workspace(self) -> int | None:
        """For a card: bytes that cuBLAS takes from the allocator, beside the tensors (an estimate; more on Hopper)."""
        return cuda.workspace() if self.target == "cuda" else None

    @property
    def context(self) -> int | None:
        """For a card: bytes that the driver keeps for itself, outside the allocator's figures (an estimate)."""
        return cuda.CONTEXT if self.target == "cuda" else None

    def plot(self, ax=None):
        """The timeline as a matplotlib ``Figure``."""
        from .view.static import plot_timeline

        return plot_timeline(self.timeline, title=self.title, ax=ax)

    def show(self) -> None:
        """Display the timeline as the interactive view."""
        from .view.live import show_timeline

        show_timeline(self.timeline, title=self.title, budget=None, peak=self.peak)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{name}</td><td>{n:,}</td></tr>"
            for name, n in self.peak.by_category.items()
        )
        return (
            f"<table><thead><tr><th style='text-align:left'>bytes, predicted for {self.target}</th>"
            f"<th>at the peak ({self.peak.phase})</th></tr></thead>"
            f"<tbody>{rows}<tr><th style='text-align:left'>total</th><th>{self.peak.total:,}</th></tr></tbody></table>"
        )


def predict(
    model_or_config,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    recipe: Recipe | None = None,
    target: str | None = None,
    batch: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    full: bool = False,
) -> Prediction:
    """The memory of one training step of ``recipe``, to the byte, without allocating the model.

    Args:
        model_or_config: a transformers config; a folder or a hub id that has one; or any ``nn.Module``, which is copied
            without its memory and left as it is.
        batch_size: rows of one optimizer step, before ``recipe.accumulation`` cuts them.
        seq_len: tokens in a row; not needed for images.
        recipe: a ``Recipe``; ``None`` is the default one.
        target: ``"cpu"``: what ``MemoryTracker`` measures on this machine. ``"cuda"``: what a card's allocator counts as
            allocated. ``None``: ``"cuda"`` where there is a card, else ``"cpu"``.
        batch: for modules that are no transformers models: tensors as the module takes them (a dict by name, a tuple, or one
            tensor), real or on ``device="meta"``. Gives the sizes, its values are not read.
        loss: ``loss(model, micro_batch)`` returns the scalar to minimise, where the module's output does not hold it.
        full: trace every layer, also where short traces would do.

    Raises ``ValueError`` for what cannot be combined or found, and ``CannotTrace``, naming the operation, where the model's
    course depends on values.
    """
    recipe = Recipe() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {type(recipe).__name__}: give a Recipe, such as Recipe(precision='bf16')")
    target = _checked_target(target)
    source = _source(model_or_config)
    batch_size, seq_len = _checked_sizes(source, batch_size, seq_len, recipe, batch)
    question = _Question(source, recipe, batch_size, seq_len, target, batch, loss)
    rows, traced = _rows(question, full)
    return _prediction(rows, question, traced)


def _checked_target(target: str | None) -> str:
    if target is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if target not in TARGETS:
        raise ValueError(f"target={target!r}: choose 'cpu' or 'cuda'")
    return target


def _checked_sizes(source: _Source, batch_size, seq_len, recipe: Recipe, batch) -> tuple[int, int | None]:
    """The sizes of the batch, or a ``ValueError`` that says which is missing or does not fit."""
    if batch is not None:
        tensors = _leaves(batch)
        if not tensors:
            raise ValueError(
                f"batch is {type(batch).__name__} without a tensor in it: give a dict, a tuple or a tensor; "
                "torch.empty(..., device='meta') costs no memory"
            )
        recipe.micro_batch(len(tensors[0]))
        return len(tensors[0]), None
    config = getattr(source.skeleton, "config", None)
    if config is None:
        raise ValueError(
            f"{type(source.skeleton).__name__} is no transformers model, so its inputs are not known: give batch=, a dict, a "
            "tuple or a tensor as the module takes it (torch.empty(..., device='meta') costs no memory)"
        )
    recipe.micro_batch(batch_size)
    if getattr(source.skeleton, "main_input_name", "") == "pixel_values":
        return batch_size, None
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
        raise ValueError(f"seq_len={seq_len!r}: give the number of tokens in a row, at least 1, such as 2048")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    if positions and seq_len > positions:
        raise ValueError(
            f"seq_len={seq_len:,} is beyond the {positions:,} positions of this model: shorten the sequences, or raise "
            "config.max_position_embeddings if the model can be stretched"
        )
    return batch_size, seq_len


# --- what is to be predicted ----------------------------------------------------------------------


@dataclass(eq=False)
class _Source:
    """A model without memory, and the list of its repeated layers, if there is one."""

    skeleton: nn.Module
    title: str
    key: str | None
    layers: nn.Module | None = field(init=False)

    def __post_init__(self) -> None:
        self.layers = repeated_layers(self.skeleton)


@dataclass(frozen=True)
class _Question:
    source: _Source
    recipe: Recipe
    batch_size: int
    seq_len: int | None
    target: str
    batch: Any
    loss: Callable | None

    @property
    def key(self):
        """Hashable, or ``None`` where the same question may have another answer next time."""
        if self.source.key is None or self.batch is not None or self.loss is not None:
            return None
        return self.source.key, self.recipe, self.batch_size, self.seq_len, self.target


class _Cache(OrderedDict):
    """The last ``size`` answers."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def get_or_make(self, key, make: Callable):
        if key is None:
            return make()
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        while len(self) > self.size:
            self.popitem(last=False)
        return self[key]


_sources = _Cache(8)
_traces = _Cache(CACHED_TRACES)


def clear_cache() -> None:
    """Forget every model and trace that ``predict`` has kept to answer faster."""
    _sources.clear()
    _traces.clear()
    fakes.forget()


def _source(given) -> _Source:
    if isinstance(given, nn.Module):
        return _Source(given, type(given).__name__, None)
    config = _config(given)
    key = f"{type(config).__module__}.{type(config).__name__} {config.to_json_string(use_diff=False)}"
    return _sources.get_or_make(key, lambda: _Source(_skeleton(config), _title(given, config), key))


def _title(given, config) -> str:
    return os.path.basename(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else config.model_type


def _config(given):
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(given, PretrainedConfig):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"predict takes a transformers config, a folder, a hub id or an nn.Module, and was given {type(given).__name__}"
        )
    name = os.fspath(given)
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(
            f"the folder {name} has no config.json: give a folder that save_pretrained has written"
        )
    try:
        try:
            return AutoConfig.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError):
            if os.path.exists(name) or not _hub_answers():
                raise
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"no model is known as {name!r} ({reason}). Give a folder with a config.json, the id of a model on the hub (needs "
            "a network, and for some models a login), or a config such as LlamaConfig(hidden_size=4096, ...)"
        ) from error


def _hub_answers() -> bool:
    """Whether there is a way to the hub: without one, its client would try for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True  # the way may lead through them
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=HUB_SECONDS).close()
    except OSError:
        return False
    return True


def _skeleton(config) -> nn.Module:
    """The model of ``config`` on the meta device: its structure, and no memory."""
    with torch.device("meta"):
        return model_class(config)(copy.deepcopy(config))


# --- repeated layers --------------------------------------------------------------------------------


def repeated_layers(model: nn.Module) -> nn.Module | None:
    """The ``ModuleList`` or ``Sequential`` of ``model`` whose entries are all alike, the longest one; ``None`` if none is.

    Alike: the same modules, parameters, settings and hooks, numbers that count the layers aside. A model whose config lists
    something per layer that differs (Gemma's alternating attention) has none.
    """
    found = None
    for module in model.modules():
        if type(module) not in (nn.ModuleList, nn.Sequential) or len(module) <= len(found or ()):
            continue
        first = _fingerprint(module[0], 0)
        if all(_fingerprint(layer, i) == first for i, layer in enumerate(module)):
            found = module
    if found is not None and _differs_by_layer(getattr(model, "config", None), len(found)):
        return None
    return found


def _fingerprint(layer: nn.Module, index: int) -> tuple:
    parts = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (int, float, str, bool, type(None), torch.dtype))
            and not (type(value) is int and value == index and "id" in key)
        )
        tensors = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad, t.device.type)
            for key, t in [*module._parameters.items(), *module._buffers.items()]
            if t is not None
        )
        hooks = tuple(
            len(getattr(module, h)) for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        )
        parts.append((name, type(module), settings, tensors, hooks))
    return tuple(parts)


def _differs_by_layer(config, n: int) -> bool:
    if config is None:
        return False
    lists = [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == n]
    return any(len({repr(entry) for entry in entries}) > 1 for entries in lists)


def _unit(recipe: Recipe, n: int) -> tuple[int, Recipe] | None:
    """(layers in the repeated unit, the recipe for fewer of them); ``None`` where segments are not all of one length."""
    schedule = recipe.checkpointing
    if schedule == "best":
        return None
    if recipe.every_n_layers is not None:
        return recipe.every_n_layers, recipe
    if schedule in (None, "per-layer"):
        return 1, recipe
    if schedule == "sqrt":
        from .checkpointing import checkpoint_layers

        with checkpoint_layers(nn.ModuleList(nn.Identity() for _ in range(n)), every="sqrt") as plan:
            lengths = plan.segments
        if not all(length == lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
            return None
        schedule = lengths[0]
    if isinstance(schedule, int):
        return schedule, replace(recipe, checkpointing=schedule)
    return None


# --- short traces instead of a long one -------------------------------------------------------------


def _rows(question: _Question, full: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """The samples of the step, and the lengths of the short traces behind them (none: a full trace)."""
    if full:
        return _trace(question, None).rows, ()
    recipe, layers = question.recipe, question.source.layers
    n = 0 if layers is None else len(layers)
    unit = _unit(recipe, n) if n else None
    if unit is not None:
        size, recipe = unit
        rest = n % size
        for pair in SHORT_TRACES:
            short, long = (k * size + rest for k in pair)
            if pair[0] * size < SHORTEST:
                continue
            if short + long >= n:
                break
            lesser = replace(question, recipe=recipe)
            try:
                (one, folded), (two, _) = _step_parts(lesser, short), _step_parts(lesser, long)
            except CannotTrace:
                raise
            except Exception:
                break  # this model cannot do with fewer layers: the full trace will say so, or work
            steps = extrapolate(one, two, pair[0], n // size)
            if steps is not None:
                return _joined(steps, folded), (short, long)
    parts, folded = _step_parts(question, None)
    return _joined([steps for steps, _ in parts], folded), ()


Part = tuple[np.ndarray, list]  # differences from sample to sample, and the operation and phase behind each


def _step_parts(question: _Question, layers: int | None) -> tuple[list[Part], int]:
    """The parts of a trace, and how many micro-batches were left out of it, all of them like the second.

    Parts: what comes first, a forward and a backward for each micro-batch, the optimizer's. The first micro-batch makes the
    gradients, all others add to them; a backward ends with what the next micro-batch starts from, and the last one has none.
    """
    k = question.recipe.accumulation
    if k > FEW and question.source.key is not None:
        parts = _parts(_trace(question, layers, FEW))
        (_, second, third), (_, fourth, last) = [[steps for steps, _ in parts[i:7:2]] for i in (1, 2)]
        if np.array_equal(second, third) and np.array_equal(fourth[: len(last)], last):
            return parts, k - FEW
    return _parts(_trace(question, layers)), 0


def _joined(steps: list[np.ndarray], folded: int) -> np.ndarray:
    """The rows of a step from the differences in its parts, the second micro-batch ``folded`` times more."""
    steps = np.concatenate(steps[:5] + steps[3:5] * folded + steps[5:])
    rows = steps.cumsum(axis=0)
    rows[:, PHASE] = steps[:, PHASE]
    return rows


@dataclass(frozen=True)
class Trace:
    """The samples of one step: ``rows`` (samples, 15), the operation behind each, and where each part of the step begins.

    Columns of ``rows``: operation index, phase, total bytes, bytes by category at that moment, and bytes by the category that
    they turned out to belong to (a gradient is a temporary until its parameter has it).
    """

    rows: np.ndarray
    operations: tuple[str, ...]
    starts: tuple[int, ...]
    requests: tuple[int, ...] = ()


def extrapolate(short: list[Part], long: list[Part], units: int, wanted: int) -> list[np.ndarray] | None:
    """The differences in a trace with ``wanted`` repeated units, by part, from those with ``units`` and ``units + 1``.

    In each part of the step, the longer trace has one more round of the same events: it is found, repeated as often as
    needed, and whatever happens once (freeing all gradients) grows in proportion. ``None`` where the rounds differ.
    """
    if len(short) != len(long):
        return None
    parts = [_extrapolated_part(a, b, wanted - units) for a, b in zip(short, long, strict=True)]
    return None if any(part is None for part in parts) else parts


def _parts(trace: Trace) -> list[Part]:
    """Each part's differences from sample to sample (the phase as it is), and its operations with their phases."""
    steps = np.diff(trace.rows, axis=0, prepend=0)
    steps[:, PHASE] = trace.rows[:, PHASE]
    kinds = list(zip(trace.operations, trace.rows[:, PHASE].tolist(), strict=True))
    ends = [*trace.starts[1:], len(kinds)]
    return [(steps[i:j], kinds[i:j]) for i, j in zip(trace.starts, ends, strict=True)]


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
        if np.array_equal(short[max(at - extra, 0) : at], block) or np.array_equal(
            short[at : at + extra], block
        ):
            return at
    return None


def _agreeing(a: list, b: list) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


# --- one trace --------------------------------------------------------------------------------------


class _WatchFakes(_Watch):
    """Asking a fake tensor for its device is an operation too, and none that a real run has."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard costs more than the work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is fakes.DEVICE and type(args[0]) is fakes.FakeTensor:
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Recorder(MemoryTracker):
    """A tracker that counts fake storages and notes every sample."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer, live=False, device="cpu")
        self.samples: list[tuple] = []
        self.operations: list[str] = []
        self.starts = [0]
        self._operation = ""
        self._born: list[int] = []  # by serial: the sample that a storage was first part of
        self._moved: list[tuple[int, int, int, int, int]] = []

    def _watch(self) -> TorchDispatchMode:
        return _WatchFakes(self._observe)

    def mark(self, part: str) -> None:
        self._drain()
        self.starts.append(len(self.samples))

    def _is_here(self, storage) -> bool:
        return storage.device.type == "meta"  # a fake tensor says "cpu", and its storage what is behind it

    def _observe(self, func, args, out) -> None:
        self._operation = str(func)
        super()._observe(func, args, out)

    def _enter(self, storage, category, owner, op) -> None:
        self._born.append(len(self.samples))
        super()._enter(storage, category, owner, op)

    def _tag(self, tensor, category, owner) -> None:
        self._drain()
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        before = entry and entry.category
        super()._tag(tensor, category, owner)
        if entry is not None and before != category:
            self._moved.append((self._born[entry.birth], len(self.samples), entry.nbytes, before, category))

    def _sample(self) -> None:
        super()._sample()
        self.samples.append((self._op, self._phase, self._total, *self._by))
        self.operations.append(self._operation)

    def trace(self) -> Trace:
        rows = np.array(self.samples, dtype=np.int64)
        moved = np.zeros((len(rows) + 1, len(CATEGORIES)), dtype=np.int64)
        for born, until, nbytes, before, category in self._moved:
            moved[born, category] += nbytes
            moved[born, before] -= nbytes
            moved[until, category] -= nbytes
            moved[until, before] += nbytes
        owned = rows[:, BY] + moved.cumsum(axis=0)[:-1]
        rows = np.concatenate([rows, owned], axis=1)
        return Trace(rows, tuple(self.operations), tuple(self.starts), tuple(getattr(self, "requests", ())))


class _CudaRecorder(_Recorder):
    """Counts as a card's allocator does: every storage in whole blocks of 512 bytes, scratch memory of kernels included."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.requests: list[int] = []  # bytes asked for, or -1 - n where the storage of the nth request went

    def __enter__(self):
        # AdamW keeps its step counters in the host's memory, unless it is fused.
        fused = any(group.get("fused") for o in self.optimizers for group in o.param_groups)
        fused |= any(getattr(o, "fused", False) for o in self.optimizers)
        self._on_host = set()
        for optimizer in [] if fused else self.optimizers:
            counters = [state.get("step") for state in optimizer.state.values()]
            self._on_host |= {c.untyped_storage()._cdata for c in counters if isinstance(c, Tensor)}
        return super().__enter__()

    def _is_here(self, storage) -> bool:
        return storage._cdata not in self._on_host and super()._is_here(storage)

    def _enter(self, storage, category, owner, op) -> None:
        super()._enter(storage, category, owner, op)
        entry = self._storages[storage._cdata]
        self.requests.append(entry.nbytes)
        more = cuda.rounded(entry.nbytes) - entry.nbytes
        entry.nbytes += more
        self._total += more
        self._by[category] += more

    def _drain(self) -> None:
        before = len(self._freed)
        self.requests += [-1 - entry.birth for entry in list(self._freed)[:before]]
        super()._drain()

    def _resize(self, entry, nbytes: int) -> int:
        nbytes = cuda.rounded(nbytes)
        return 0 if nbytes == entry.nbytes else super()._resize(entry, nbytes)

    def _observe(self, func, args, out) -> None:
        super()._observe(func, args, out)
        scratch = cuda.scratch(func, args)
        if scratch:
            self._born.append(len(self.samples))
            self.requests += [scratch, -1 - self._serial]
            self._serial += 1
            temporaries = CATEGORIES.index("temporaries")
            self._total += scratch
            self._by[temporaries] += scratch
            self._sample()
            self._total -= scratch
            self._by[temporaries] -= scratch


def _trace(question: _Question, layers: int | None, micro_batches: int | None = None) -> Trace:
    key = question.key
    return _traces.get_or_make(
        key and (key, layers, micro_batches), lambda: _traced(question, layers, micro_batches)
    )


def _traced(question: _Question, layers: int | None, micro_batches: int | None) -> Trace:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    recipe = question.recipe
    try:
        with ExitStack() as stack:
            stack.enter_context(_without_remarks())
            name = stack.enter_context(attention_without_mask())
            corrected = {"cpu": _cpu_layer_norm, "cuda": _cuda_layer_norm}[question.target]
            mode = stack.enter_context(fakes.QuickFakeMode(corrected))
            model = fake_copy(question.source.skeleton, mode, question.source.layers, layers)
            prepared = prepare(model, recipe)
            stack.callback(prepared.undo.close)
            _answer_in_steps(prepared, mode)
            if getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa":
                set_attention(model, name)
            if question.batch is None:
                batch = example_batch(model, question.batch_size, question.seq_len)
            else:
                batch = _fakes(question.batch)
            recorder = _Recorder(model, prepared.optimizer)
            if question.target == "cuda":
                stack.enter_context(cuda.kernels(recipe.autocast_dtype))
                recorder = _CudaRecorder(model, prepared.optimizer)
            _warm_up(prepared, question, batch)
            with recorder:
                step(
                    model, prepared.optimizer, batch, recipe,
                    loss=question.loss, mark=recorder.mark, micro_batches=micro_batches,
                )  # fmt: skip
            return recorder.trace()
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise _cannot_trace(error) from error


def _answer_in_steps(prepared: Prepared, mode: fakes.QuickFakeMode) -> None:
    """Let an optimizer read values in its step. Adafactor scales its update by them: any number needs the same bytes.

    In a model they stay an error, since there they may decide what is computed."""

    def answer(value: float | None) -> Callable:
        return lambda *step: setattr(mode, "value", value)

    for optimizer in _optimizers(prepared):
        optimizer.register_step_pre_hook(answer(1.0))
        optimizer.register_step_post_hook(answer(None))


def _optimizers(prepared: Prepared) -> list[Optimizer]:
    return prepared.optimizer if isinstance(prepared.optimizer, list) else [prepared.optimizer]


@contextmanager
def _without_remarks() -> Iterator[None]:
    """transformers has remarks to make when a model trains (GPT-2: about its loss), and here none does."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _warm_up(prepared: Prepared, question: _Question, batch) -> None:
    """Bring the optimizer's states, and whatever a module keeps from its first step, into being."""
    if question.source.key is None:
        step(prepared.model, prepared.optimizer, batch, question.recipe, loss=question.loss)
        return
    if question.recipe.checkpointing == "best":
        _first_forward(prepared.model, batch, question.recipe)  # in which it measures the layers and settles
    for optimizer in _optimizers(prepared):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _first_forward(model: nn.Module, batch, recipe: Recipe) -> None:
    micro, _ = next(_micro_batches(model, batch, recipe))
    with _autocast(next(model.parameters()).device.type, recipe):
        _loss(model, micro, recipe)


def _cannot_trace(error) -> CannotTrace:
    home = os.path.dirname(torch.__file__)
    here = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((home, here))]
    where = f" (line {frames[-1].lineno} of {frames[-1].filename}: {frames[-1].line})" if frames else ""
    name = str(getattr(error, "func", error))
    what = (
        "reads a tensor's value, as .item(), int(), bool() and if do"
        if "_local_scalar_dense" in name
        else "has a result whose size depends on values"
    )
    return CannotTrace(
        f"the operation {name} {what}{where}, and a prediction has shapes but no values. Predict a variant of the model without "
        "it, or measure one real step with MemoryTracker"
    )


@contextmanager
def attention_without_mask() -> Iterator[str]:
    """A name for fused attention that transformers knows while the block runs, and that is the same under fake tensors.

    With real tensors, transformers looks whether any token is masked or several sequences are packed in a row, and leaves the
    mask out where there is neither. Fake tensors have no values to see that by, and it would build one: sequence x sequence
    bytes that no real run has. Here both questions are answered with no. A window shorter than the sequence has its mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def mask(*args, attention_mask=None, **kwargs):
        return masking_utils.sdpa_mask(*args, **kwargs)

    def none_packed(position_ids):
        find_packed(position_ids)  # for the memory that looking takes
        return None

    name = "gradmem_fused"
    find_packed = masking_utils.find_packed_sequence_indices
    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, mask)
    masking_utils.find_packed_sequence_indices = none_packed
    try:
        yield name
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        # There is no public way to take a name back.
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _cpu_layer_norm(func, args, out):
    """The CPU keeps mean and 1/std in float32 when the weight is wider than the input."""
    if func is torch.ops.aten.native_layer_norm.default and len(args) > 2 and args[2] is not None:
        return _with_float32_statistics(out) if args[2].dtype != args[0].dtype else out
    return out


def _cuda_layer_norm(func, args, out):
    """A card always keeps them in float32."""
    return _with_float32_statistics(out) if func is torch.ops.aten.native_layer_norm.default else out


def _with_float32_statistics(out):
    return out[0], out[1].to(torch.float32), out[2].to(torch.float32)


# --- copies without memory ---------------------------------------------------------------------------


def _leaves(batch) -> list[Tensor]:
    values = batch.values() if isinstance(batch, dict) else [batch] if isinstance(batch, Tensor) else batch
    return (
        [v for v in values if isinstance(v, Tensor)]
        if isinstance(values, (list, tuple)) or isinstance(batch, dict)
        else []
    )


def _fakes(batch):
    if isinstance(batch, dict):
        return {name: _fake(t, {}) for name, t in batch.items()}
    return _fake(batch, {}) if isinstance(batch, Tensor) else tuple(_fake(t, {}) for t in batch)


def _fake(tensor: Tensor, bases: dict[int, Tensor]) -> Tensor:
    """A fake CPU tensor like ``tensor``; tensors that share a storage get fakes that share one (kept in ``bases``)."""
    storage = tensor.untyped_storage()
    if (
        storage.nbytes() == tensor.numel() * tensor.itemsize
        and tensor.is_contiguous()
        and storage._cdata not in bases
    ):
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        bases[storage._cdata] = fake
        return fake
    if storage._cdata not in bases:
        bases[storage._cdata] = torch.empty(
            storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cpu"
        )
    base = bases[storage._cdata]
    if base.dtype != tensor.dtype:
        base = base.view(-1).view(tensor.dtype)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Copying(torch.overrides.TorchFunctionMode):
    """Inside ``copy.deepcopy``: tensors become fake ones rather than being copied."""

    def __init__(self, bases: dict[int, Tensor]):
        super().__init__()
        self.bases = bases

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake_like(tensor, self.bases)
        return memo[id(tensor)]


def _fake_like(tensor: Tensor, bases: dict[int, Tensor]) -> Tensor:
    if tensor.layout != torch.strided:
        raise CannotTrace(
            f"the model holds a tensor of layout {tensor.layout}, and only dense ones can be predicted: make it dense"
        )
    fake = _fake(tensor, bases)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(model: nn.Module, mode, layers: nn.Module | None = None, keep: int | None = None) -> nn.Module:
    """``model`` with fake tensors in place of its own, on "cpu"; of its ``layers`` only the first ``keep``, if given."""
    memo: dict[int, Any] = {}
    bases: dict[int, Tensor] = {}
    left_out = set() if keep is None else set(list(layers)[keep:])
    for _, module in model.named_modules(left_out):
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _fake_like(tensor, bases)
    with _Copying(bases):
        if keep is not None:
            kept = [copy.deepcopy(layer, memo) for layer in list(layers)[:keep]]
            memo[id(layers)] = (
                type(layers)(kept) if isinstance(layers, nn.ModuleList) else type(layers)(*kept)
            )
        return copy.deepcopy(model, memo)


# --- the answer ---------------------------------------------------------------------------------------


def _prediction(rows: np.ndarray, question: _Question, traced: tuple[int, ...]) -> Prediction:
    phases = {
        name: int(rows[rows[:, PHASE] == code, TOTAL].max(initial=0)) for code, name in enumerate(PHASES)
    }
    return Prediction(
        target=question.target,
        timeline=Timeline(rows[:, : BY.stop].copy()).decimate(MOST_SAMPLES),
        peak=_snapshot(rows[rows[:, TOTAL].argmax()], OWNED),
        peak_by_phase=phases,
        current=replace(_snapshot(rows[-1], BY), phase="idle"),
        title=f"{question.source.title}, predicted for {question.target}",
        traced_layers=traced,
        _question=question,
    )


def _snapshot(row: np.ndarray, columns: slice) -> MemorySnapshot:
    by = dict(zip(CATEGORIES, row[columns].tolist(), strict=True))
    return MemorySnapshot(int(row[TOTAL]), by, PHASES[row[PHASE]])
