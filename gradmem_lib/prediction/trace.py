"""Traces one step on fake tensors, counted like real ones."""

import logging
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Self
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import compat
from ..compat import storage_key
from ..measure.recording import Recording
from ..measure.storages import storages_of
from ..measure.tracker import checked_optimizers
from ..measure.watch import Meter
from ..names import OPTIMIZER_STEP
from ..techniques.data_parallel import Processes
from ..training.prepare import prepare, set_attention
from ..training.recipe import Recipe
from ..training.step import autocast, cut_batch, loss_of, offload_context, step
from . import allocator, cuda_kernels, fakes
from .configs import example_batch
from .copies import fake_batch, fake_copy
from .extrapolation import Trace
from .question import CannotTrace, Question


class CpuRecorder(Recording):
    """Counts the fake storages of a step as ``MemoryTracker`` counts real ones.

    It keeps every sample.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | list[Optimizer]):
        super().__init__(torch.device("cpu"))
        self.optimizers = checked_optimizers(optimizer)
        self.meter = Meter(model, self.optimizers, self)
        self.operations: list[str] = []
        # the bytes of an allocation; or -1 - n: the storage of request n was freed
        self.requests: list[int] = []
        self.starts = [0]
        self.offload_traffic_bytes = 0

    def __enter__(self) -> Self:
        self.meter.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.meter.__exit__(*error)
        self.drain()
        self.sample()

    def mark(self, part: str) -> None:
        self.drain()
        self.starts.append(self.count)

    def size(self, storage) -> int:
        # A fake tensor's device says "cpu", but its storage's device says "meta".
        if storage.device.type != "meta" and storage.nbytes():
            raise CannotTrace(f"a module was given {fakes.REAL_TENSOR}")
        return storage.nbytes()

    def sample(self, func="") -> None:
        super().sample(func)
        self.operations.append(str(func))

    def trace(self, offload_traffic_bytes: int = 0) -> Trace:
        return Trace(
            self.rows(),
            tuple(self.operations),
            tuple(self.starts),
            tuple(self.requests),
            offload_traffic_bytes,
        )


class CudaRecorder(CpuRecorder):
    """Counts like a card's allocator: storages in blocks of 512 bytes, and scratch memory too."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | list[Optimizer]):
        super().__init__(model, optimizer)
        self._host_keys: set[int] = set()
        self._numbers: dict[int, int] = {}  # the number of each entry's request
        self._num_requests = 0

    def __enter__(self) -> Self:
        # AdamW keeps its step counters in the host's memory, unless it is fused.
        for optimizer in self.optimizers:
            if not any(
                getattr(optimizer, "fused", False) or g.get("fused") for g in optimizer.param_groups
            ):
                counters = [state.get("step") for state in optimizer.state.values()]
                self._host_keys |= {
                    storage_key(c.untyped_storage()) for c in counters if isinstance(c, Tensor)
                }
        return super().__enter__()

    def size(self, storage) -> int:
        if storage_key(storage) in self._host_keys:
            return 0
        return allocator.rounded(super().size(storage))

    def scratch(self, func, args) -> int:
        if nbytes := cuda_kernels.scratch(func, args):
            self.requests += [nbytes, -1 - self._num_requests]
            self._num_requests += 1
        return nbytes

    def after_alloc(self, entry) -> None:
        self._numbers[id(entry)] = self._num_requests
        self.requests.append(entry.nbytes)
        self._num_requests += 1

    def after_free(self, entry) -> None:
        self.requests.append(-1 - self._numbers.pop(id(entry)))


class OffloadedRecorder(CudaRecorder):
    """Counts like a card's allocator, with FSDP's offload of shards, gradients and states.

    What is in the host's memory has no bytes on the card. ``offload_traffic_bytes`` counts the
    copies in both directions.
    """

    def __enter__(self) -> Self:
        self._host, self._copying_to_host, to = WeakValueDictionary(), False, Tensor.to
        hosts = storages_of([*self.meter.model.parameters(), *(o.state for o in self.optimizers)])
        self._host.update((storage_key(storage), storage) for storage in hosts)

        def to_and_count(tensor, *args, **kwargs):
            if "non_blocking" not in kwargs or not isinstance(args[0], torch.device):
                return to(tensor, *args, **kwargs)
            self._copying_to_host = self.size(tensor.untyped_storage()) > 0
            self.offload_traffic_bytes += tensor.nbytes
            out, self._copying_to_host = tensor.clone(), False
            return out

        super().__enter__()
        # FSDP's copies between host and card, which are one memory here.
        self.meter.exit_stack.enter_context(patch.object(Tensor, "to", to_and_count))
        return self

    def size(self, storage) -> int:
        if self._copying_to_host or self.phase == OPTIMIZER_STEP:  # the host steps its shards
            self._host[storage_key(storage)] = storage
        return 0 if self._host.get(storage_key(storage)) is storage else super().size(storage)


RECORDERS = {"cpu": CpuRecorder, "cuda": CudaRecorder, "offloaded": OffloadedRecorder}


def traced(question: Question, layers: int | None, micro_batches: int | None = None) -> Trace:
    """The trace of one step.

    Raises ``CannotTrace``, which names the operation, if its operations depend on values.
    """
    try:
        trace = _traced(
            question, layers, micro_batches, real_warm_up=question.source.is_user_module
        )
        return trace or _traced(question, layers, micro_batches, real_warm_up=True)
    except compat.NO_VALUES as error:
        func = getattr(error, "func", error)
        reads = "reads a tensor's value, as .item(), int(), bool() and if do"
        reason = reads if func is compat.read_value else "has a result whose size depends on values"
        raise CannotTrace(
            f"the operation {func} {reason}{_where(error)}, and a prediction has shapes but no "
            "values. Predict a variant of the model without it, or measure one real step with "
            "MemoryTracker"
        ) from error
    except (ValueError, CannotTrace):
        raise
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0]
        raise CannotTrace(
            f"a step of {type(question.source.skeleton).__name__} with this recipe fails in its "
            f"prediction, and would most likely fail for real{_where(error)}: "
            f"{type(error).__name__}: {message}. Try one real step, and measure it with "
            "MemoryTracker if it works"
        ) from error


def _where(error) -> str:
    """The line of the model, or of the loss, that raised ``error``."""
    ours = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
    ]
    return (
        f" (line {frames[-1].lineno} of {frames[-1].filename}: {frames[-1].line})" if frames else ""
    )


def _traced(
    question: Question, layers: int | None, micro_batches, real_warm_up: bool
) -> Trace | None:
    """The trace of one step, after a warm-up.

    ``None`` if it needs a real step as warm-up: if parameters get no gradients, or modules keep
    tensors of a step.
    """
    recipe = question.recipe
    with ExitStack() as stack:
        # transformers logs remarks about training, and here nothing trains. Failures are reported
        # by exceptions.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        name = stack.enter_context(compat.attention_by_values(*_mask_flags(question)))
        mesh = _fake_ranks(question, stack)
        # in a first step, PyTorch's engines allocate what they keep
        real_warm_up |= mesh is not None
        mode = stack.enter_context(fakes.QuickFakeMode(question.target))
        model = fake_copy(question.source.skeleton, question.source.layers, layers)
        cache = getattr(getattr(model, "config", None), "use_cache", None)
        prepared = prepare(model, recipe, mesh=mesh)
        stack.callback(prepared.undo.close)
        if cache and question.source.is_user_module:
            # a given module keeps its settings, as in its own training loop
            model.config.use_cache = True
        if compat.attention_of(model) == "sdpa":
            set_attention(model, name)
        given, sizes = question.batch, (question.batch_size, question.seq_len)
        batch = example_batch(model, *sizes) if given is None else fake_batch(given)
        if question.target == "cuda":
            stack.enter_context(cuda_kernels.kernels(recipe.autocast_dtype))
        model = prepared.model
        _check_buckets(question, layers, model)
        offloaded = question.target == "cuda" and recipe.offloads_shards
        recorder = RECORDERS["offloaded" if offloaded else question.target](
            model, prepared.optimizer
        )
        offload_hooks = offload_context(model, recipe)

        def one_step(notify: Callable[[str], None], micro_batches: int | None = None) -> None:
            def mark(part: str) -> None:
                # In the model, values may decide what is computed. Elsewhere, any number needs the
                # same bytes: the number of labels, the loss, Adafactor's scales.
                mode.value = None if part == "forward" else 1.0
                notify(part)

            options = {
                "loss": question.loss,
                "mark": mark,
                "micro_batches": micro_batches,
                "offload": offload_hooks,
            }
            step(model, prepared.optimizer, batch, recipe, **options)

        mode.value = 1.0
        if real_warm_up:
            one_step(lambda part: None, None if question.source.is_user_module else 1)
        else:
            _warm_up(recorder, model, batch, recipe, mode)
        trained = [
            p for o in recorder.optimizers for group in o.param_groups for p in group["params"]
        ]
        with_gradient: set[int] = set()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: with_gradient.add(id(p)))
        held, before = _module_tensors(model), getattr(offload_hooks, "bytes", 0)
        with recorder:
            one_step(recorder.mark, micro_batches)
        steady = len(with_gradient) == len(trained) and held == _module_tensors(model)
        if not (real_warm_up or steady):
            return None
        offloaded = getattr(offload_hooks, "bytes", 0) - before
        # 2: what is offloaded is also reloaded
        return recorder.trace(2 * offloaded + recorder.offload_traffic_bytes)


def _mask_flags(question: Question) -> tuple[bool, bool]:
    """The two flags for which attention builds masks.

    They say whether the batch masks tokens, and whether its rows hold several sequences. Raises
    ``CannotTrace`` if only a part of the batch does.
    """
    batch, model = (
        question.batch if isinstance(question.batch, Mapping) else {},
        question.source.skeleton,
    )
    if (attention := compat.attention_of(model)) is None:
        return False, False

    def flags(test: Callable[[Tensor], Tensor], *names: str) -> set[bool]:
        real = [
            t
            for t in map(batch.get, names)
            if isinstance(t, Tensor) and t.dim() == 2 and not t.is_meta
        ]
        return {
            bool(test(part))
            for tensor in real
            for part in tensor.chunk(question.recipe.accumulation)
        }

    all_tokens = flags(Tensor.all, "attention_mask", "decoder_attention_mask")
    one_sequence = flags(lambda positions: (positions.diff() == 1).all(), "position_ids")
    # A decoder without a given mask makes one of ones. Only fused attention then leaves the causal
    # mask out.
    makes_own_mask = (
        getattr(model.config, "is_encoder_decoder", False)
        and batch.get("decoder_attention_mask") is None
    )
    if makes_own_mask and (question.recipe.attention or attention) != "eager":
        all_tokens.add(True)
    if len(all_tokens) > 1 or len(one_sequence) > 1:
        raise CannotTrace(
            "some micro-batches, or only encoder or decoder, have hidden tokens (attention_mask) "
            "or several sequences in a row (position_ids), for which attention builds masks, and "
            "others do not: predict a batch of one kind, or measure a real step"
        )
    return False in all_tokens, False in one_sequence


def _check_buckets(question: Question, layers: int | None, model: nn.Module) -> None:
    """Raise ``ValueError`` if the bytes of many layers cannot be computed from those of few."""
    extrapolated = layers is not None
    if not extrapolated or question.target != "cuda" or question.recipe.sharding != "ddp":
        return
    if any(p.requires_grad and p.nbytes % allocator.BLOCK for p in model.parameters()):
        raise ValueError(
            "DDP's buckets hold many layers and are rounded as a whole: trace all layers"
        )


def _fake_ranks(question: Question, stack: ExitStack):
    """A fake process group with a mesh of ranks, while ``stack`` is open.

    ``None`` for a single process.
    """
    if question.recipe.sharding is None:
        return None
    local_sums = Processes.sums

    def sums(self: Processes, *numbers: float) -> list[float]:
        local_sums(self, *numbers)  # called for the memory that it takes
        return [n * question.ranks for n in numbers]  # all ranks have the same numbers

    stack.enter_context(patch.object(Processes, "sums", sums))
    stack.enter_context(warnings.catch_warnings())
    # This warning, about layers that return views, is for a real run.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    return stack.enter_context(compat.fake_process_group(question.ranks, question.rank))


def _warm_up(recorder: CpuRecorder, model: nn.Module, batch, recipe: Recipe, mode) -> None:
    """Create the optimizer's states without a forward and a backward.

    It is enough if every parameter gets a gradient.
    """
    if recipe.checkpointing == "best":
        mode.value = None
        # in a first forward, "best" measures the layers and chooses a schedule
        with autocast("cpu", recipe):
            loss_of(model, next(cut_batch(batch, recipe)), recipe)
        mode.value = 1.0
    for optimizer in recorder.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _module_tensors(model: nn.Module) -> list[int]:
    """The identities of the tensors that modules hold besides their parameters."""
    held = [[*vars(module).values(), *module.buffers(recurse=False)] for module in model.modules()]
    return [id(value) for values in held for value in values if isinstance(value, Tensor)]
