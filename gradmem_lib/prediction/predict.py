"""The peak of a training step without running it.

The step really runs, but on *fake* tensors: they have a shape, a dtype and a storage with a size,
but no memory. The code of ``MemoryTracker`` counts them like real ones. Every layer of a deep model
does the same operations. So two short traces, of three and of four layers, are enough to compute
the trace of all layers, event by event, where they prove it (see ``extrapolation.py``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..compat.compiled import is_compiled
from ..compat.trees import tree_leaves
from ..display import pictures
from ..measure.timeline import BY, PHASE, TOTAL, MemorySnapshot, Timeline
from ..model.configs import find_model, skeleton
from ..model.inputs import most_positions
from ..names import CATEGORIES, PHASES, check_choice
from ..techniques.losses import packed_by_position
from ..training.recipe import Recipe
from ..training.step import check_loss_in_pieces
from ..units import check_positive_int
from . import allocator
from .garbage import without_collections
from .loop import Loop
from .notes import notes_of
from .question import CannotTrace, Question, Source
from .running_loop import check_loop
from .short_traces import (
    MICRO_BATCHES,
    ShortTraces,
    Traced,
    requests_of_more_layers,
    trace_step,
)
from .trace import traced

TARGETS = ("cpu", "cuda")
# A module with a larger step is not asked by its real values, since that takes memory and time.
MOST_ASKED = 2**30  # bytes
MOST_SAMPLES = 2**17  # of a timeline: more than an ordinary step has, and 9 MiB


@dataclass(frozen=True)
class Prediction:
    """The memory that a training step will need, in the form of a ``MemoryTracker`` after the step.
    All figures are bytes.

    The step is not the first one: the optimizer's states exist. Attributes: ``target``;
    ``timeline`` (if it has very many samples, only the largest of each window); ``peak``;
    ``peak_by_phase``; ``current`` (the bytes that stay between steps: its ``"parameters"``, with
    buffers, are what is there after loading); ``offload_traffic_bytes``
    (the bytes that cross the bus for ``recipe.offload``, in both directions together); ``title``;
    ``traced_layers`` (the numbers of layers in the short traces; empty for a full trace);
    ``notes`` (sentences about settings of the module that change the figures).
    """

    target: str
    timeline: Timeline
    peak: MemorySnapshot
    peak_by_phase: dict[str, int]
    current: MemorySnapshot
    offload_traffic_bytes: int = 0
    title: str = ""
    traced_layers: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    _question: Any = field(default=None, repr=False, compare=False)
    # the requests of a full trace; empty if it was not made
    _recorded_requests: tuple = field(default=(), repr=False, compare=False)
    # the traces that this was computed from; None after a full trace
    _short: ShortTraces | None = field(default=None, repr=False, compare=False)

    def replay_allocator(self) -> int | None:
        """For a card: the bytes that the caching allocator will have reserved from the driver;
        ``None`` for the CPU. It replays the allocator's rules over the requests of the whole step.
        If short traces do not prove these, a full trace is made, which takes seconds for a deep
        model. It is an estimate, since frees happen in the trace's order. It
        does not count what libraries and the driver keep (``allocator.workspace``, ``CONTEXT``).
        """
        if self.target != "cuda":
            return None
        with without_collections():
            return allocator.replayed(self.requests())

    def requests(self) -> tuple[int, ...]:
        """The step's requests to an allocator, in order, after those for what exists before it: see
        ``allocator.replayed``. Micro-batches and chunks of a loss that are like others are left
        out, since they reserve nothing more.
        """
        return self._requests

    @cached_property
    def _requests(self) -> tuple[int, ...]:
        if self._recorded_requests:
            return self._recorded_requests
        if self._short is not None and self.target == "cuda":
            source = self._question.source
            from_short = self._short.requests()
            if from_short is None and not source.requests_need_all_layers:
                from_short = requests_of_more_layers(self._question, self.traced_layers)
                source.requests_need_all_layers = from_short is None
            if from_short is not None:
                return from_short
        question, micro_batches = self._question, None
        many = question.recipe.accumulation > MICRO_BATCHES
        if many and not question.source.is_user_module:
            # The second may find other free blocks than the first. Those after the third do not
            # reserve more.
            micro_batches = MICRO_BATCHES
        return traced(question, micro_batches).requests

    def plot(self) -> Any:
        """The timeline as a matplotlib ``Figure``."""
        return pictures().plot_timeline(self.timeline, title=self.title)

    def show(self) -> None:
        """Display the timeline as the interactive view."""
        pictures().show_timeline(self.timeline, title=self.title, budget=None, peak=self.peak)

    def _repr_html_(self) -> str:
        return pictures().prediction_table(self)


def predict(
    model_or_config: Any,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    recipe: Recipe | None = None,
    target: str | None = None,
    batch: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    items: Callable[[Any], Any] | str | int | None = None,
    full: bool = False,
    ranks: int | None = None,
    rank: int = 0,
    loop: Loop | None = None,
) -> Prediction:
    """The memory of one training step with ``recipe``, to the byte, without allocating the model.

    Args:
        model_or_config: a transformers config; a well-known name such as ``"Llama-2-7B"``, a
            folder or a hub id; or any ``nn.Module``, which is copied without its memory and does
            not change. Settings of a module stay in the prediction: checkpoints of its layers, and
            a key-value cache (``config.use_cache``), which ``make_trainer`` would switch off.
        batch_size: rows of one optimizer step, before ``recipe.accumulation`` cuts them.
        seq_len: tokens in a row; not needed for images.
        recipe: a ``Recipe``; ``None`` is the default one.
        target: ``"cpu"``: what ``MemoryTracker`` measures here. ``"cuda"``: what a card's allocator
            counts as allocated, without the inside of 8- and 4-bit operators (35 and 14 MB; 0 in
            bitsandbytes). ``None``: ``"cuda"`` if there is a card, else ``"cpu"``.
        batch: for modules that are not transformers models: the module's arguments (a dict by name,
            a tuple, or one tensor), real tensors or on ``device="meta"``, and flags. Only sizes
            matter, with two exceptions, for which masks are built: whether a real
            ``attention_mask`` (by that name) hides a token, and whether ``position_ids`` restart
            within a row. And if a recipe cuts a batch with values, of a module with values whose
            step needs less than a GiB, a few rows are computed for real, to refuse a loss that
            must not be cut.
        loss: ``loss(model, micro_batch)`` returns the scalar to minimise, if the module's output
            does not have it.
        items: what the loss is divided by, as in ``step``.
        full: trace every layer, even if short traces would be enough.
        ranks: the number of processes that train together by ``recipe.sharding``. The prediction is
            for one of them, ``rank``, and ``batch_size`` is the rows of that rank's step.
        loop: the order of the training loop (``zero_grad``, what a variable keeps, clipping).
            ``None``: that of ``Recipe``'s own step.

    Raises ``ValueError`` for settings that cannot be combined or a model that is not found, and
    ``CannotTrace``, which names the operation, if the model's operations depend on values.
    """
    recipe = Recipe() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe is {type(recipe).__name__}: give a Recipe, such as Recipe(precision='bf16')"
        )
    if any(map(torch.is_autocast_enabled, TARGETS)):
        raise ValueError(
            "predict was called inside torch.autocast, whose copies of the weights would stay "
            "from one step to the next: leave that block, and ask for autocast in the recipe, "
            "Recipe(precision='autocast-bf16')"
        )
    if target is None:
        target = "cuda" if torch.cuda.is_available() else "cpu"
    check_choice("target", target, TARGETS)
    if recipe.precision is None and not isinstance(model_or_config, (nn.Module, Source)):
        raise ValueError(
            "Recipe(precision=None) takes a module in the dtypes that it has, and a config has "
            "none: name a precision, such as Recipe(precision='bf16'), or give the module (under "
            "torch.device('meta') it costs no memory)"
        )
    source = source_of(model_or_config)
    if target == "cuda" and any(map(_is_trained_and_recurrent, source.skeleton.modules())):
        raise CannotTrace(
            "measure one real step with MemoryTracker: a recurrent layer of cuDNN keeps a "
            "workspace for backward whose size only cuDNN knows"
        )
    if isinstance(batch, Mapping):
        batch = packed_by_position(dict(batch))
    _check_ranks(recipe, ranks, rank)
    batch_size, seq_len = _checked_sizes(source, recipe, batch, batch_size, seq_len)
    loop = Loop() if loop is None else loop
    check_loop(loop, recipe)
    question = Question(
        source, recipe, batch_size, seq_len, target, batch, loss, ranks or 1, rank, loop
    )
    step = trace_step(question, full)
    peak = step.rows[:, TOTAL].max()
    if source.is_user_module and batch is not None and peak <= MOST_ASKED:
        check_loss_in_pieces(source.skeleton, batch, recipe, loss, items)
    return _prediction(question, step)


def _is_trained_and_recurrent(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and any(p.requires_grad for p in module.parameters())


def _check_ranks(recipe: Recipe, ranks: int | None, rank: int) -> None:
    """Raises ``ValueError`` unless there are ranks exactly if the recipe shards over them."""
    if recipe.sharding is None:
        right = ranks is None
    else:
        right = type(ranks) is int and rank in range(ranks)
    if not right:
        raise ValueError(
            f"ranks={ranks!r}, rank={rank!r} and Recipe(sharding={recipe.sharding!r}): several "
            "processes train one model as a sharding says. Give how many and which one, 0 to "
            "ranks - 1: predict(..., recipe=Recipe(sharding='fsdp'), ranks=8), or none of these"
        )


def _checked_sizes(
    source: Source, recipe: Recipe, batch: Any, batch_size: int | None, seq_len: int | None
) -> tuple[int, int | None]:
    """The rows of the batch, and the tokens of a row, or ``None`` where a row has no such length.

    Raises ``ValueError`` if one of them is missing or does not fit.
    """
    if batch is not None:
        leaves = tree_leaves(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        if not tensors:
            raise ValueError(
                f"batch is {type(batch).__name__} without a tensor of rows in it: give a dict, a "
                "tuple or a tensor; torch.empty(..., device='meta') costs no memory"
            )
        recipe.micro_batch(len(tensors[0]))
        return len(tensors[0]), None
    if getattr(source.skeleton, "config", None) is None:
        raise ValueError(
            f"{type(source.skeleton).__name__} is no transformers model, so its inputs are not "
            "known: give batch=, a dict, a tuple or a tensor as the module takes it "
            "(torch.empty(..., device='meta') costs no memory)"
        )
    recipe.micro_batch(batch_size)
    if getattr(source.skeleton, "main_input_name", "") == "pixel_values":
        return batch_size, None
    check_positive_int("seq_len", seq_len, 2048, "tokens in a row")
    positions = most_positions(source.skeleton)
    if positions and seq_len > positions:
        raise ValueError(
            f"seq_len={seq_len:,} is beyond the {positions:,} positions of this model: shorten the "
            "sequences, or, if its positions are rotary, set max_position_embeddings in its config "
            "as you will for RoPE scaling, which needs no more bytes"
        )
    return batch_size, seq_len


def source_of(model_or_config: Any) -> Source:
    if isinstance(model_or_config, Source):
        return model_or_config
    if isinstance(model_or_config, nn.Module):
        if any(is_compiled(module) for module in model_or_config.modules()):
            raise CannotTrace(
                f"{type(model_or_config).__name__} is compiled with torch.compile, whose code has "
                "its own memory plan: give the module as it was before (compiled._orig_mod)"
            )
        return Source(model_or_config, type(model_or_config).__name__, is_user_module=True)
    config, title = find_model(model_or_config)
    return Source(skeleton(config), title, is_user_module=False)


def _prediction(question: Question, step: Traced) -> Prediction:
    rows = step.rows
    peaks = {}
    for i, name in enumerate(PHASES):
        peaks[name] = int(rows[rows[:, PHASE] == i, TOTAL].max(initial=0))
    rank_text = f", rank {question.rank} of {question.ranks}" if question.recipe.sharding else ""
    return Prediction(
        target=question.target,
        timeline=Timeline(rows).decimate(MOST_SAMPLES),
        peak=_snapshot(rows[rows[:, TOTAL].argmax()]),
        peak_by_phase=peaks,
        current=replace(_snapshot(rows[-1]), phase="idle"),
        offload_traffic_bytes=step.offload_traffic_bytes,
        title=f"{question.source.title}, predicted for {question.target}{rank_text}",
        traced_layers=step.layers,
        notes=notes_of(question),
        _question=question,
        _recorded_requests=step.requests,
        _short=step.short,
    )


def _snapshot(row: np.ndarray) -> MemorySnapshot:
    by = dict(zip(CATEGORIES, row[BY].tolist(), strict=True))
    return MemorySnapshot(int(row[TOTAL]), by, PHASES[row[PHASE]])
