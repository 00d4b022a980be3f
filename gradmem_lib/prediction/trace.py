"""Traces one step on fake tensors, counted like real ones."""

import logging
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self
from unittest.mock import patch
from weakref import ref

import torch
from torch import Tensor, nn

from ..compat import operators
from ..compat.fake_ranks import fake_process_group
from ..compat.fake_tensors import NO_VALUES
from ..compat.transformers_models import attention_by_values, attention_of
from ..model.inputs import example_batch
from ..names import is_flash
from ..techniques.data_parallel import Processes
from ..techniques.second_run import watched_modules
from ..training.prepare import caching_configs, prepare, set_attention
from ..training.step import (
    autocast,
    check_own_loss,
    cut_batch,
    loss_of,
    offload_context,
    step,
)
from . import cuda_kernels, fakes
from .changed_views import ChangedViews
from .chunks import FewChunks
from .copies import fake_batch, fake_copy, missing_graph_error
from .draws import restored_generators, same_for_all_draws
from .extrapolation import LeftOut, Trace, has_equal_chunks
from .garbage import without_collections
from .loop import Loop
from .question import CannotTrace, Question
from .recorders import recorder_class
from .running_loop import RunningLoop
from .surroundings import left_alone

# What is read as a number from a fake tensor. A counter of steps is 2 in the second step; with 1,
# as in a first one, NAdam divides by 0.
ANY_NUMBER = 2.0


def traced(
    question: Question, micro_batches: int | None = None, *, few_chunks: bool = False
) -> Trace:
    """The trace of one step, after a warm-up.

    ``micro_batches``: only so many are traced. With ``few_chunks``, of a loss in chunks only a few
    chunks are, if this proves the others.

    Raises ``CannotTrace``, which names the operation, if its operations depend on values.
    """

    def trace() -> Trace:
        found = _recorded(question, micro_batches, few_chunks)
        if found is None:  # the chunks are not alike
            found = _recorded(question, micro_batches, few_chunks=False)
        return found

    with _explained_errors(question), without_collections():
        if question.recipe.sharding is not None and not question.source.is_user_module:
            # PyTorch's fake collectives draw the numbers of their requests: nothing is decided.
            with restored_generators():
                return trace()
        # One trace is enough, unless the step draws numbers by which it may decide.
        name = type(question.source.skeleton).__name__
        return same_for_all_draws(trace, _are_alike, name)


def _are_alike(one: Trace, other: Trace) -> bool:
    """Whether two steps need the same bytes in the same order."""
    return one.changes().equal(other.changes()) and one.requests == other.requests


def _recorded(question: Question, micro_batches: int | None, few_chunks: bool) -> Trace | None:
    """As ``traced``; ``None`` if few chunks do not prove the others."""
    trace, changes_views = _record_once(question, micro_batches, few_chunks)
    if changes_views:
        # Few steps do. Only they pay for a mode that every function call passes through.
        views = ChangedViews()
        trace, _ = _record_once(question, micro_batches, few_chunks, views)
    return trace


def _record_once(
    question: Question,
    micro_batches: int | None,
    few_chunks: bool,
    views: ChangedViews | None = None,
) -> tuple[Trace | None, bool]:
    """The trace, and whether the step changes views in place: without ``views``, it is then wrong.

    The trace is ``None`` if few chunks do not prove the others.
    """
    # Most models need no step as warm-up: it is enough to create the optimizer's states. In a
    # first step, a user's module may make tensors that it keeps, and PyTorch's sharding does.
    quick = not question.source.is_user_module and question.recipe.sharding is None
    if quick and question.loop == Loop():
        with _FakeStep(question, views) as fake_step:
            fake_step.make_states()
            trace = fake_step.record(micro_batches, few_chunks)
        if fake_step.is_steady:
            return trace, fake_step.changes_views
    with _FakeStep(question, views) as fake_step:
        fake_step.run(None if question.source.is_user_module else 1)
        fake_step.check_graphs()
        trace = fake_step.record(micro_batches, few_chunks)
    return trace, fake_step.changes_views


@contextmanager
def _explained_errors(question: Question) -> Iterator[None]:
    """Turn errors of a step into sentences that say what to do."""
    try:
        yield
    except NO_VALUES as error:
        func = getattr(error, "func", error)
        reason = "has a result whose size depends on values"
        if func is operators.read_value:
            reason = "reads a tensor's value, as .item(), int(), bool() and if do"
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


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised ``error``, and not the model or a library that it calls."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return raised_in.startswith(os.path.dirname(os.path.dirname(__file__)))


def _where(error: BaseException) -> str:
    """The line of the model, or of the loss, that raised ``error``."""
    ours = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours)
    ]
    if not frames:
        return ""
    return f" (line {frames[-1].lineno} of {frames[-1].filename}: {frames[-1].line})"


class _FakeStep:
    """The step that a question asks for, on fake tensors. It exists while its block runs.

    ``is_steady``: in the recorded step, every trained parameter got a gradient, modules held the
    same tensors before and after it, and no checkpoint met a module for the first time. Then the
    next step is like it. ``changes_views``: the
    recorded step changed views in place, so that its trace is right only with ``views``.
    """

    def __init__(self, question: Question, views: ChangedViews | None = None):
        self.question, self.recipe = question, question.recipe
        if is_flash(self.recipe.attention):  # saves what the fused one saves, and may not be there
            self.recipe = replace(self.recipe, attention="fused")
        self.views = views
        self.is_steady = False
        self.changes_views = False
        # Copies of tensors without their graph (see `fake_copy`). Only a user's module may have
        # them, since its warm-up is a whole step, which replaces them.
        self.without_graph: list[ref[Tensor]] | None = None
        if question.source.is_user_module:
            self.without_graph = []
        self._exit_stack = ExitStack()

    def __enter__(self) -> Self:
        source = self.question.source
        with self._exit_stack as stack:
            if source.is_user_module:
                stack.enter_context(left_alone(source.skeleton))
            self._enter(stack)
            self._exit_stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._exit_stack.close()

    def _enter(self, stack: ExitStack) -> None:
        question, source = self.question, self.question.source
        # transformers logs remarks about training, and here nothing trains. Failures are reported
        # by exceptions.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        attention = None
        if attention_of(source.skeleton) is not None:  # else transformers is not needed
            attention = stack.enter_context(attention_by_values(*_mask_flags(question)))
        mesh = _fake_ranks(question, stack)
        self.mode = stack.enter_context(fakes.QuickFakeMode(question.target))
        keep = Counter[nn.Module]()
        for one in question.kept:
            keep[one.several.layers] += one.count
        model = fake_copy(source.skeleton, keep, self.without_graph)
        self.lists = self._kept_layers(model)
        modes = {module: module.training for module in model.modules()}
        caching = caching_configs(model)
        prepared = prepare(model, self.recipe, mesh=mesh)
        stack.callback(prepared.undo.close)
        if source.is_user_module:
            _restore_settings(prepared.model, model, modes, caching)
        if attention_of(model) == "sdpa":
            set_attention(model, attention)
        if question.batch is None:
            self.batch = example_batch(model, question.batch_size, question.seq_len)
        else:
            self.batch = fake_batch(question.batch)
        if question.loss is None:  # step does not see it, since RunningLoop gives it a loss
            check_own_loss(model, self.batch, self.recipe)
        on_card = question.target == "cuda"
        if on_card:
            stack.enter_context(cuda_kernels.kernels(self.recipe.autocast_dtype))
        self.model, self.optimizer = prepared.model, prepared.optimizer
        self.loop = RunningLoop(
            question.loop, self.model, self.optimizer, self.recipe, question.loss, foreach=on_card
        )
        self.offload_hooks = offload_context(self.model, self.recipe)

    def _kept_layers(self, model: nn.Module) -> list[tuple[list[nn.Module], int]]:
        """The copies of the kept layers, by list, with the number of layers in a unit."""
        names = {module: name for name, module in self.question.source.skeleton.named_modules()}
        kept = []
        for one in self.question.kept:
            layers = list(model.get_submodule(names[one.several.layers]))
            kept.append((layers[-one.count :] if one.at_end else layers[: one.count], one.unit))
        return kept

    def make_states(self) -> None:
        """Create the optimizer's states without a forward and a backward.

        It is enough if every parameter gets a gradient.
        """
        if self.recipe.checkpointing == "best":
            self.mode.value = None
            # in a first forward, "best" measures the layers and chooses a schedule
            with autocast("cpu", self.recipe):
                loss_of(self.model, next(cut_batch(self.batch, self.recipe)), self.recipe)
        self.mode.value = ANY_NUMBER
        for optimizer in self.loop.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def run(self, micro_batches: int | None, recorder=None) -> None:
        """Run one step, or its first ``micro_batches``."""

        def mark(part: str) -> None:
            # In the model, values may decide what is computed. Elsewhere, any number needs the
            # same bytes: the number of labels, the loss, Adafactor's scales.
            self.mode.value = None if part == "forward" else ANY_NUMBER
            if recorder is not None:
                recorder.begin_part()
            self.loop.begin_part(part)

        self.mode.value = ANY_NUMBER
        try:
            step(
                self.model,
                self.optimizer,
                self.batch,
                self.recipe,
                loss=self.loop.loss,
                mark=mark,
                micro_batches=micro_batches,
                offload=self.offload_hooks,
                keep_gradients=self.loop.keeps_gradients,
            )
        except ValueError as error:
            if _is_ours(error):
                raise
            # The model's own words, about an input that it lacks or numbers that do not fit, say
            # neither where nor what to do.
            raise ValueError(
                f"a step of {type(self.model).__name__} fails{_where(error)}: {error} If the model "
                "needs an input that its config does not tell, give batch=, a dict of its inputs "
                "and labels as tensors"
            ) from error

    def check_graphs(self) -> None:
        """Raise ``CannotTrace`` if a tensor without its graph is left after the warm-up."""
        for reference in self.without_graph or ():
            tensor = reference()
            if tensor is not None:
                raise missing_graph_error("the model", tensor)

    def record(self, micro_batches: int | None, few_chunks: bool) -> Trace | None:
        """The trace of a step, or of its first ``micro_batches``.

        With ``few_chunks``, few chunks of a loss are traced, and the result is ``None`` if they do
        not prove the others.
        """
        on_host = self.recipe.offloads_shards
        kind = recorder_class(self.question.target, on_host)
        recorder = kind(self.model, self.optimizer, self.lists)
        trained, with_gradient = 0, set[int]()
        for optimizer in recorder.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    trained += 1
                    parameter.register_post_accumulate_grad_hook(lambda p: with_gradient.add(id(p)))
        held, watched = _module_tensors(self.model), watched_modules(self.model)
        offloaded_before = getattr(self.offload_hooks, "bytes", 0)
        chunks = FewChunks(recorder.marks)
        recorder.views = self.views
        with ExitStack() as modes:
            modes.enter_context(recorder)
            if few_chunks:
                modes.enter_context(chunks)
            if self.views is not None:
                modes.enter_context(self.views)
            self.run(micro_batches, recorder)
        self.changes_views = recorder.changes_views
        offloaded = getattr(self.offload_hooks, "bytes", 0) - offloaded_before
        self.is_steady = (
            len(with_gradient) == trained
            and held == _module_tensors(self.model)
            and watched == watched_modules(self.model)
        )
        # 2: what is offloaded is also reloaded
        trace = recorder.trace(2 * offloaded + recorder.offload_traffic_bytes)
        return _with_left_out(trace, chunks)


def _with_left_out(trace: Trace, chunks: FewChunks) -> Trace | None:
    """``trace`` with the number of chunks that it leaves out, or ``None`` if it does not prove
    them.
    """
    left_out = set(chunks.left_out)
    if not any(left_out):
        return trace
    if len(left_out) > 1 or not has_equal_chunks(trace.changes(), chunks.num_losses):
        return None
    return replace(trace, left_out=LeftOut(chunks=left_out.pop()))


def _module_tensors(model: nn.Module) -> list[int]:
    """The identities of the tensors that modules hold besides their parameters."""
    held = [[*vars(module).values(), *module.buffers(recurse=False)] for module in model.modules()]
    return [id(value) for values in held for value in values if isinstance(value, Tensor)]


def _restore_settings(
    prepared: nn.Module, model: nn.Module, modes: dict[nn.Module, bool], caching: list[Any]
) -> None:
    """Give a user's module its own settings back: a loop of its own does not change them.

    Modules that ``prepare`` has added are in the mode of the whole model.
    """
    for module in prepared.modules():
        module.training = modes.get(module, modes[model])
    for config in caching:
        config.use_cache = True


def _mask_flags(question: Question) -> tuple[bool, bool, bool]:
    """The flags for which attention builds masks.

    They say whether the batch masks tokens, whether its rows hold several sequences, and whether
    the kernel takes no masks at all. Raises ``CannotTrace`` if only a part of the batch does.
    """
    batch, model = (
        question.batch if isinstance(question.batch, Mapping) else {},
        question.source.skeleton,
    )
    attention = question.recipe.attention or attention_of(model)
    if attention_of(model) is None:
        return False, False, False

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
    if makes_own_mask and attention != "eager":
        all_tokens.add(True)
    if len(all_tokens) > 1 or len(one_sequence) > 1:
        raise CannotTrace(
            "some micro-batches, or only encoder or decoder, have hidden tokens (attention_mask) "
            "or several sequences in a row (position_ids), for which attention builds masks, and "
            "others do not: predict a batch of one kind, or measure a real step"
        )
    if is_flash(attention) and False in all_tokens:
        raise CannotTrace(
            f"{attention} leaves the tokens out that attention_mask hides, and a prediction does "
            "not know how many: predict whole rows, or attention='fused'"
        )
    return False in all_tokens, False in one_sequence, is_flash(attention)


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
    return stack.enter_context(fake_process_group(question.ranks, question.rank))
