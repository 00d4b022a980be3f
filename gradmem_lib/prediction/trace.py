"""One step on fake tensors, watched as real ones are."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging import CRITICAL, getLogger

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import compat
from ..compat import storage_key
from ..measure.recording import Recording
from ..measure.tracker import checked_optimizers
from ..measure.watch import Meter, Watch
from ..training.prepare import Prepared, prepare, set_attention
from ..training.recipe import Recipe
from ..training.step import autocast, cut_batch, loss_of, step
from . import allocator, corrections, cuda_kernels, fakes
from .configs import example_batch
from .copies import fake_batch, fake_copy
from .extrapolation import Trace
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
        return Trace(self.rows(), tuple(self.operations), tuple(self.starts), tuple(self.requests))


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
    """The trace of one step; ``CannotTrace``, naming the operation, where its course depends on values."""
    try:
        trace = _traced(question, layers, micro_batches, real_warm_up=question.source.key is None)
        return trace or _traced(question, layers, micro_batches, real_warm_up=True)
    except compat.NO_VALUES as error:
        raise _cannot_trace(error) from error
    except (ValueError, CannotTrace):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise CannotTrace(
            f"a step of {type(question.source.skeleton).__name__} with this recipe fails in its prediction, and would most likely "
            f"fail for real{_where(error)}: {what}. Try one real step, and measure it with MemoryTracker if it works"
        ) from error


def _traced(
    question: Question, layers: int | None, micro_batches: int | None, real_warm_up: bool
) -> Trace | None:
    """The trace. Without a real step before it, ``None`` where that matters: parameters that were given states get no gradient, or
    a module keeps something from its first step."""
    recipe = question.recipe
    with ExitStack() as stack:
        stack.enter_context(_without_remarks())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        name = stack.enter_context(attention_without_mask())
        mode = stack.enter_context(fakes.QuickFakeMode(corrections.OF[question.target]))
        model = fake_copy(question.source.skeleton, mode, question.source.layers, layers)
        cache = getattr(getattr(model, "config", None), "use_cache", None)
        prepared = prepare(model, recipe)
        stack.callback(prepared.undo.close)
        if cache and question.source.key is None:
            model.config.use_cache = True  # a module is taken as it is, and so is what its own loop would do
        if compat.attention_of(model) == "sdpa":
            set_attention(model, name)
        if question.batch is None:
            batch = example_batch(model, question.batch_size, question.seq_len)
        else:
            batch = fake_batch(question.batch)
        recorder = CpuRecorder(model, prepared.optimizer)
        if question.target == "cuda":
            stack.enter_context(cuda_kernels.kernels(recipe.autocast_dtype))
            recorder = CudaRecorder(model, prepared.optimizer)
        _warm_up(prepared, question, batch, mode, real_warm_up)
        used, kept = _used(prepared, stack), _kept(model)
        with recorder:
            step(
                model, prepared.optimizer, batch, recipe,
                loss=question.loss, mark=_answering(mode, recorder.mark), micro_batches=micro_batches,
            )  # fmt: skip
        settled = len(used) == len(_trained(prepared)) and kept == _kept(model)
        return recorder.trace() if real_warm_up or settled else None


def _trained(prepared: Prepared) -> list[Tensor]:
    return [p for o in _optimizers(prepared) for group in o.param_groups for p in group["params"]]


def _used(prepared: Prepared, stack: ExitStack) -> set[int]:
    """Fills with the ids of the parameters that get a gradient."""
    used: set[int] = set()
    for parameter in _trained(prepared):
        note = parameter.register_post_accumulate_grad_hook(lambda p: used.add(id(p)))
        stack.callback(note.remove)
    return used


def _kept(model: nn.Module) -> list[int]:
    """What modules hold besides their parameters."""
    held = [[*vars(module).values(), *module.buffers(recurse=False)] for module in model.modules()]
    return [id(value) for values in held for value in values if isinstance(value, Tensor)]


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

    before, fakes_log = logging.get_verbosity(), getLogger("torch._subclasses.fake_tensor")
    level = fakes_log.level
    logging.set_verbosity_error()
    fakes_log.setLevel(CRITICAL)  # what fails is said in one sentence, by an exception
    try:
        yield
    finally:
        logging.set_verbosity(before)
        fakes_log.setLevel(level)


def _warm_up(prepared: Prepared, question: Question, batch, mode: fakes.QuickFakeMode, real: bool) -> None:
    """Bring the optimizer's states, and whatever a module keeps from its first step, into being.

    ``real``: by a step. It can be spared where every parameter gets a gradient."""
    recipe, marked = question.recipe, _answering(mode)
    if real:
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


def _where(error) -> str:
    """The line of the model, or of the loss, that has raised ``error``."""
    home = os.path.dirname(torch.__file__)
    here = os.path.dirname(os.path.dirname(__file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((home, here))]
    return f" (line {frames[-1].lineno} of {frames[-1].filename}: {frames[-1].line})" if frames else ""


def _cannot_trace(error) -> CannotTrace:
    where = _where(error)
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
    from transformers import masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def mask(*args, attention_mask=None, **kwargs):
        return masking_utils.sdpa_mask(*args, **kwargs)

    def none_packed(find_packed, position_ids):
        find_packed(position_ids)  # for the memory that looking takes
        return None

    name = "gradmem_fused"
    with (
        compat.registered_attention(name, sdpa_attention_forward, mask),
        compat.packed_sequences_by(none_packed),
        compat.masks_without_padding(),
    ):
        yield name
