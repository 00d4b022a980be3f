"""One step on fake tensors, watched as real ones are."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compat import storage_key
from ..measure.recording import Recording
from ..measure.tracker import checked_optimizers
from ..measure.watch import Meter, Watch
from ..training.prepare import Prepared, prepare, set_attention
from ..training.recipe import Recipe
from ..training.step import autocast, cut_batch, loss_of, step
from . import allocator, cuda_kernels, fakes
from .configs import example_batch
from .copies import fake_batch, fake_copy
from .extrapolation import BY, Trace
from .question import CannotTrace, Question


class _WatchFakes(Watch):
    """Asking a fake tensor for its device is an operation too, and none that a real run has."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is fakes.DEVICE and type(args[0]) is fakes.FakeTensor:
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)


class CpuRecorder(Recording):
    """Counts the fake storages of a step as ``MemoryTracker`` counts real ones, and keeps every sample."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer | list[Optimizer]):
        super().__init__()
        self.optimizers = checked_optimizers(optimizer)
        self.meter = Meter(model, self.optimizers, self, device=torch.device("cpu"), mode=_WatchFakes)
        self.operations: list[str] = []
        self.requests: list[int] = []  # bytes asked for, or -1 - n where the storage of the nth request went
        self.starts = [0]

    def __enter__(self) -> CpuRecorder:
        self.meter.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.meter.__exit__(*error)
        self.meter.ledger.drain()
        self.meter.sample()

    def mark(self, part: str) -> None:
        self.meter.ledger.drain()
        self.starts.append(self.count)

    def size(self, storage) -> int:
        # A fake tensor says "cpu", and its storage what is behind it.
        return storage.nbytes() if storage.device.type == "meta" else 0

    def sampled(self, op, phase, total, by, func) -> None:
        super().sampled(op, phase, total, by, func)
        self.operations.append(str(func))

    def trace(self) -> Trace:
        rows = np.concatenate([self.rows(as_seen=True), self.rows()[:, BY]], axis=1)
        return Trace(rows, tuple(self.operations), tuple(self.starts), tuple(self.requests))


class CudaRecorder(CpuRecorder):
    """Counts as a card's allocator does: every storage in whole blocks of 512 bytes, scratch memory of kernels included."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer | list[Optimizer]):
        super().__init__(model, optimizer)
        self._on_host: set[int] = set()
        self._numbers: dict[int, int] = {}  # of requests, by entry
        self._asked = 0

    def __enter__(self) -> CudaRecorder:
        # AdamW keeps its step counters in the host's memory, unless it is fused.
        fused = any(group.get("fused") for o in self.optimizers for group in o.param_groups)
        fused |= any(getattr(o, "fused", False) for o in self.optimizers)
        for optimizer in [] if fused else self.optimizers:
            counters = [state.get("step") for state in optimizer.state.values()]
            self._on_host |= {storage_key(c.untyped_storage()) for c in counters if isinstance(c, Tensor)}
        super().__enter__()
        return self

    def size(self, storage) -> int:
        return 0 if storage_key(storage) in self._on_host else allocator.rounded(super().size(storage))

    def scratch(self, func, args) -> int:
        nbytes = cuda_kernels.scratch(func, args)
        if nbytes:
            self.requests += [nbytes, -1 - self._asked]
            self._asked += 1
        return nbytes

    def entered(self, entry) -> None:
        super().entered(entry)
        self._numbers[id(entry)] = self._asked
        self.requests.append(entry.nbytes)
        self._asked += 1

    def left(self, entry) -> None:
        super().left(entry)
        self.requests.append(-1 - self._numbers.pop(id(entry)))


def traced(question: Question, layers: int | None, micro_batches: int | None) -> Trace:
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
            if getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa":
                set_attention(model, name)
            if question.batch is None:
                batch = example_batch(model, question.batch_size, question.seq_len)
            else:
                batch = fake_batch(question.batch)
            recorder = CpuRecorder(model, prepared.optimizer)
            if question.target == "cuda":
                stack.enter_context(cuda_kernels.kernels(recipe.autocast_dtype))
                recorder = CudaRecorder(model, prepared.optimizer)
            _warm_up(prepared, question, batch, mode)
            with recorder:
                step(
                    model, prepared.optimizer, batch, recipe,
                    loss=question.loss, mark=_answering(mode, recorder.mark), micro_batches=micro_batches,
                )  # fmt: skip
            return recorder.trace()
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise _cannot_trace(error) from error


def _answering(mode: fakes.QuickFakeMode, mark: Callable[[str], None] = lambda part: None) -> Callable:
    """``mark`` that lets values be read outside the model's forward: the number of labels, the loss, Adafactor's scales.

    Any number needs the same bytes there. In the model it stays an error, since there it may decide what is computed."""

    def marked(part: str) -> None:
        mode.value = None if part == "forward" else 1.0
        mark(part)

    mode.value = 1.0
    return marked


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


def _warm_up(prepared: Prepared, question: Question, batch, mode: fakes.QuickFakeMode) -> None:
    """Bring the optimizer's states, and whatever a module keeps from its first step, into being."""
    recipe, marked = question.recipe, _answering(mode)
    if question.source.key is None:
        step(prepared.model, prepared.optimizer, batch, recipe, loss=question.loss, mark=marked)
        return
    if recipe.checkpointing == "best":
        mode.value = None
        first_forward(prepared.model, batch, recipe)  # in which it measures the layers and settles
        mode.value = 1.0
    for optimizer in _optimizers(prepared):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def first_forward(model: torch.nn.Module, batch, recipe: Recipe) -> None:
    with autocast(next(model.parameters()).device.type, recipe):
        loss_of(model, next(cut_batch(batch, recipe)), recipe)


def _cannot_trace(error) -> CannotTrace:
    home = os.path.dirname(torch.__file__)
    here = os.path.dirname(os.path.dirname(__file__))
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
