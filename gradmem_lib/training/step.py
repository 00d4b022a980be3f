"""The one training step: a batch cut into micro-batches, their gradients added up, one update."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..compat.dispatch_modes import without_modes
from ..compat.fake_tensors import has_numbers
from ..techniques.counts import described
from ..techniques.data_parallel import check_trained_together, device_of, processes_of
from ..techniques.losses import packed_by_position
from ..techniques.offload import ACTIVATION_OFFLOADS, offload_activations
from ..techniques.precision import GradScaler
from ..techniques.splitting import split_evenly
from .items import LossIsNoMean, NoLoss, find_rule
from .losses import check_pieces, chunked_loss, usual_rule
from .recipe import Recipe
from .window import Window


class _FixedScale:
    """Keeps small float16 gradients above 0 with a fixed factor, where ``GradScaler`` adapts it."""

    factor = 2.0**12

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def unscale_(self, optimizer: Optimizer) -> None:
        for grad in _gradients_of(optimizer):
            grad.div_(self.factor)


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients_of(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for p in _parameters_of(optimizer) if p.grad is not None]


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """``clip_grad_norm_``, also where some gradients are sparse, as of
    ``nn.Embedding(sparse=True)``. Returns the norm from before.
    """
    have_gradients: list[Any] = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # a row that came twice is one row
            have_gradients.append(SimpleNamespace(grad=parameter.grad.values()))
        else:
            have_gradients.append(parameter)
    return nn.utils.clip_grad_norm_(have_gradients, most)


class _Update:
    """What happens to the gradients of a window: they are unscaled, checked and clipped, and the
    optimizer and its scheduler step. ``scaler`` and the others are those of ``step``.
    """

    def __init__(self, optimizer: Any, recipe: Recipe, scaler: Any, clip: float | None, scheduler):
        self.optimizer, self.scaler, self.clip = optimizer, scaler, clip
        self.in_backward = isinstance(optimizer, list)  # then every parameter was stepped there
        self.schedulers = scheduler if isinstance(scheduler, list) else [scheduler]
        self.fixed_scale = None
        if scaler is None and recipe.scales_loss:
            self.fixed_scale = _FixedScale()
        optimizers = optimizer if self.in_backward else [optimizer]
        for stepped in (*optimizers, *filter(None, self.schedulers)):
            _check_step(stepped)
        if clip is not None and self.in_backward:
            raise ValueError(
                "leave max_grad_norm out, or in_backward=True, which steps before the norm of all "
                "gradients is known"
            )

    def finish_gradients(self, model: nn.Module, loss: float) -> str:
        """Unscale and clip. Returns in words what would make weights nan; empty if nothing does, or
        if a scaler skips the step.
        """
        to_check: list[Tensor] = []
        if self.fixed_scale is not None:
            self.fixed_scale.unscale_(self.optimizer)
            to_check = _gradients_of(self.optimizer)
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            # Also of what only the loss has, such as learned weights of several tasks.
            parameters = dict.fromkeys([*model.parameters(), *_parameters_of(self.optimizer)])
            to_check = [clip_gradients(parameters, self.clip)]
        if self.scaler is not None:
            return ""
        if not math.isfinite(loss):
            return "the loss is not finite"
        if not all(map(_is_finite, to_check)):
            return "a gradient is not finite"
        if not self.in_backward and not _gradients_of(self.optimizer):
            raise ValueError(
                "make the optimizer of model.parameters(): none of its parameters has a gradient, "
                "and a step would change nothing"
            )
        return ""

    def step(self, model: nn.Module, keep_gradients: bool) -> None:
        was_stepped = self.in_backward or self._step_optimizer()
        if not self.in_backward and not keep_gradients:
            self.optimizer.zero_grad(set_to_none=True)
            model.zero_grad(set_to_none=True)  # also of what this optimizer does not have
        for scheduler in self.schedulers:
            if scheduler is not None and was_stepped:
                scheduler.step()

    def _step_optimizer(self) -> bool:
        """Whether it has stepped: a scaler skips it, and then lowers its scale."""
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before


def _check_step(stepped: Any) -> None:
    """``ValueError`` for an optimizer or a scheduler whose ``step()`` needs something."""
    try:
        # The class's: a scheduler puts a function of its own around that of its optimizer.
        inspect.signature(type(stepped).step).bind(stepped)
    except TypeError as error:
        name = type(stepped).__name__
        raise ValueError(
            f"leave the {name} out of step, and call it in your own loop with "
            f"accumulate_gradients: of {name}.step(), there is {error}"
        ) from error


def _is_finite(tensor: Tensor) -> bool:
    """Whether no number is nan or inf."""
    if not has_numbers(tensor):
        return True
    with torch.no_grad(), without_modes():  # a tracker measures the model's step
        return bool(tensor.sum(dtype=torch.float32).isfinite())


def step(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    batch: Any,
    recipe: Recipe,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    mark: Callable[[str], None] = lambda part: None,
    items: Callable[[Any], Any] | str | int | None = None,
    micro_batches: int | None = None,
    scaler: GradScaler | torch.amp.GradScaler | None = None,
    max_grad_norm: float | None = None,
    scheduler: LRScheduler | list[LRScheduler] | None = None,
    offload: offload_activations | None = None,
    keep_gradients: bool = False,
) -> Tensor:
    """One optimizer step on ``batch``, its rows cut into ``recipe.accumulation`` micro-batches.
    Returns the mean loss, detached.

    The gradients are those of ``accumulate_gradients`` (lesson 03), also over several processes.

    Args:
        batch: the model's arguments: a dict by name, a tuple, or one tensor, each (rows, ...). Rows
            that do not come out even, as in an epoch's last batch, are cut as evenly as possible.
        loss: ``loss(model, micro_batch)`` returns the scalar to minimise: a mean over the
            micro-batch's labels that are not -100, over its rows, or over what its attention mask
            shows. Without ``loss``, the model's output has the scalar (``output.loss``, the first
            of a tuple, or the output itself).
        mark: called with ``"forward"``, ``"backward"`` and ``"step"`` before each of them begins.
        items: what the loss is divided by, if it is something else: a function of a batch that
            returns a number (``lambda batch: (batch[1] != -1).sum()``), or the key of the labels
            (those that are not -100 count, after the shift if the loss shifts them) or of weights,
            which are added up. It is asked as the usual counts are: a wrong one is refused.
        micro_batches: stop after this many micro-batches. Predictions use it, since the others are
            alike.
        scaler: adapts the factor of float16's loss from step to step, and skips a step whose
            gradients are not finite. Without a scaler the factor is fixed, and no step is skipped.
        max_grad_norm: make the gradients smaller if their norm, over all of them, is larger.
        scheduler: torch's, of ``optimizer`` (a list for a list). It steps after each step that a
            scaler has not skipped.
        offload: an ``offload_activations``, which counts the bytes that it moves. Without it, one
            is made.
        keep_gradients: leave ``.grad`` as it is after the step, for a loop that frees it later.

    Raises ``ValueError`` if the loss is not finite and no scaler can skip the step; if the batch is
    to be cut and the loss, which is asked before its first step (``find_rule``), is not a mean over
    labels or rows, as with CLIP; or if the forwards of that step have changed what the loss reads,
    such as a queue. After an error, no gradients are left.
    """
    _check_given(model, optimizer, batch, recipe, loss)
    update = _Update(optimizer, recipe, scaler, max_grad_norm, scheduler)
    offload_hooks = offload or offload_context(model, recipe)
    parts = list(cut_batch(batch, recipe))
    processes = processes_of(model)  # not later: a forward may leave the weights of shards gathered

    mean_loss = _mean_loss(device_of(model).type, recipe, loss)
    key = (*_identity(loss), *_identity(items), recipe.chunked_loss)
    window = Window(model, parts, mean_loss, processes, key)
    if how := _how_cut(recipe):
        # An optimizer in backward steps inside the window.
        window.ask(how, items, weights_stay=not update.in_backward)
    counts = window.counts()[:micro_batches]

    def loss_of_one(micro: Any, count: int | float) -> Tensor:
        mark("forward")
        with offload_hooks:
            value = mean_loss(model, micro)
        if update.in_backward:  # they step in all processes together
            [others] = processes.sums(not _is_finite(value))
            if others:
                raise window.not_finite("the loss is not finite")
        mark("backward")
        return value

    with _no_gradients_after_an_error(model), closing(offload_hooks):
        result = window.accumulate(
            loss_of_one,
            counts,
            model=model,
            scaler=scaler or update.fixed_scale,
        )
        window.check(update.finish_gradients(model, result.loss))
    mark("step")
    update.step(model, keep_gradients)
    return torch.tensor(result.loss)


def _mean_loss(device: str, recipe: Recipe, loss: Callable | None) -> Callable:
    def mean_loss(asked: nn.Module, micro: Any) -> Tensor:
        with autocast(device, recipe):
            value = loss_of(asked, micro, recipe) if loss is None else loss(asked, micro)
        check_loss(value, asked)
        return value

    return mean_loss


def _check_given(
    model: nn.Module, optimizer: Any, batch: Any, recipe: Recipe, loss: Callable | None
) -> None:
    if loss is None:
        check_own_loss(model, batch, recipe)
    if recipe.sharding is not None:
        check_trained_together(model, optimizer)


@contextmanager
def _no_gradients_after_an_error(model: nn.Module) -> Iterator[None]:
    """The next step would add to the gradients of a part of a window."""
    try:
        yield
    except BaseException:
        model.zero_grad(set_to_none=True)
        raise


def check_loss_in_pieces(
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    loss: Callable[[nn.Module, Any], Tensor] | None,
    items: Any = None,
) -> None:
    """Raise ``LossIsNoMean`` if ``step`` would, by its values, refuse to cut ``batch``.

    It costs a copy of the model and a few forwards of a few rows. What cannot be copied, and rows
    that the model does not take, prove nothing here.
    """
    how = _how_cut(recipe)
    if not how or recipe.chunked_loss:
        return  # nothing is cut, or the loss is this library's own, a mean over labels
    try:
        model = copy.deepcopy(model)  # a forward may count its calls, or keep something
    except RuntimeError:  # tensors with a graph
        return
    mean_loss = _mean_loss(device_of(model).type, recipe, loss)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a real step gives them
            parts = list(cut_batch(batch, recipe))
            find_rule(model, parts, mean_loss, usual_rule(model), how=how, items=items)
    except LossIsNoMean:
        raise
    except ValueError:
        pass  # nothing was shown, so a prediction goes on


def _identity(loss: Any) -> tuple:
    """A key for ``loss`` or ``items``: what was found for one holds for all with the same key.

    A function that is defined in a loop is a new one each time, but has the same code, so its code
    stands for it. Functions of the same code are different losses if they read different functions,
    modules or words (``reduction=how``) from around them, so these are in the key. Numbers and
    tensors change from step to step, and are left out.
    """
    if callable(loss) and not hasattr(loss, "__code__"):
        loss = loss.__call__  # an object is what its method reads
    if not hasattr(loss, "__code__"):
        return (loss if type(loss).__hash__ else id(loss),)
    found: list[Any] = [loss.__code__]
    for value in _read_from_around(loss):
        if isinstance(value, str | bool):
            found.append(value)
        elif isinstance(value, nn.Module):
            found.append(ref(value))  # which does not keep it, and differs from that of a later one
        elif hasattr(value, "__code__"):
            found.append(value.__code__)
        else:
            found.append(type(value))  # weights of classes, or None
    return tuple(found)


def _read_from_around(loss: Any) -> Iterator[Any]:
    """What a function reads that it was not given: its object or the attributes of it, variables
    around it, those of its file that it names, and defaults.
    """
    owner = getattr(loss, "__self__", None)
    yield owner
    if not isinstance(owner, nn.Module):
        yield from getattr(owner, "__dict__", {}).values()
    for name in loss.__code__.co_names:
        yield loss.__globals__.get(name)
    for cell in loss.__closure__ or ():
        with suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents
    yield from loss.__defaults__ or ()
    yield from (loss.__kwdefaults__ or {}).values()


def _how_cut(recipe: Recipe) -> str:
    """The settings that cut a batch into pieces, in words; empty if it stays whole."""
    if recipe.accumulation == 1 and recipe.sharding is None:
        return ""
    return f"accumulation={recipe.accumulation}, sharding={recipe.sharding!r}"


def check_own_loss(model: nn.Module, batch: Any, recipe: Recipe) -> None:
    """Raise ``ValueError`` if ``recipe`` cuts a batch for which the model's own loss differs in
    pieces.
    """
    if how := _how_cut(recipe):
        check_pieces(model, batch, how)


def autocast(device: str, recipe: Recipe) -> AbstractContextManager:
    return (
        torch.autocast(device, dtype=recipe.autocast_dtype)
        if recipe.autocast_dtype
        else nullcontext()
    )


def offload_context(model: nn.Module, recipe: Recipe) -> offload_activations | ExitStack:
    """The context for a forward whose activations are offloaded as ``recipe.offload`` says."""
    if recipe.offload in ACTIVATION_OFFLOADS:
        return offload_activations(model=model, what=recipe.offload)
    return ExitStack()


def cut_batch(batch: Any, recipe: Recipe) -> Iterator[Any]:
    """The micro-batches of ``batch``: views with equally many rows, of which the first ones have
    one row more if the rows do not come out even; or the uncut batch itself.
    """
    if recipe.accumulation == 1:
        return iter([batch])
    return split_evenly(batch, recipe.accumulation)


def loss_of(model: nn.Module, batch: Any, recipe: Recipe) -> Tensor:
    """The loss that the model returns for ``batch``, or whatever it returns instead."""
    if recipe.chunked_loss:
        return chunked_loss(model, batch)
    if isinstance(batch, Mapping):
        output = model(**packed_by_position(batch))
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(output, dict):
        output = output.get("loss")
    if isinstance(output, tuple) and output and not hasattr(output, "loss"):
        return output[0]  # as transformers' models return it with return_dict=False
    return getattr(output, "loss", output)


def check_loss(value: Any, model: nn.Module) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise NoLoss(
            "put labels into the batch, or give loss=lambda model, batch: ... that returns the "
            f"scalar: {type(model).__name__} returned {described(value)} where a scalar loss was "
            "expected"
        )
