"""The one way to ask a loss: a few forwards in eval mode, of which nothing stays.

No name says what a loss is the mean of, whether it may be cut, or whether a forward changes it. So
the loss is computed for a few rows, together, alone or again, and what was observed is compared.
Who asks, and about which rows:

- ``pieces``: the sums and counts of a batch, and of all its rows but the last and of the last one;
- ``training.probe``: the means of a few unlike rows together, and of each alone;
- ``training.own_trainers``: a step of a ``Trainer`` in one micro-batch, and in pieces;
- ``training.window``: the same rows before a window and after it, and each row alone.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..compat.data_parallel import is_sharded
from ..compat.dispatch_modes import without_modes
from .data_parallel import Processes, Sharded, device_of
from .module_state import left_as_it_was
from .second_run import FirstRun

CHANGED_NUMBERS = 2**18  # of each weight: their copies are smaller than the gradients will be
ROUNDING = 1e-5  # float32 losses of the same rows, computed together and alone, differ by less
SHORT_DTYPES = {torch.bfloat16, torch.float16}

# What to do where a loss differs from call to call, and what was found.
RANDOM = (
    "draw random numbers in the data's collator, or only in training "
    "(F.dropout(x, p, training=self.training)), and leave what the loss reads as it is"
)
PAIRS = "make rows that belong together one row, as {'chosen': ..., 'rejected': ...} does"
SAME_ROWS = "is another one each time for the same rows, also in eval mode"


class Observation(NamedTuple):
    """What ``ask`` returned for a batch; nan if it raised an error."""

    value: Any
    error: Exception | None


class Observations(NamedTuple):
    """What ``ask`` returned for each batch of a list, and the first error."""

    values: list[Any]
    error: Exception | None


@dataclass
class Question:
    """What is asked in a block of ``asking``."""

    model: nn.Module
    ask: Callable[[Any], Any]
    processes: Processes  # which ask together
    autocasts: set[torch.dtype]  # those that the model was called in

    def observe(self, *batches: Any) -> list[Observation]:
        """What is found for each batch, also after an error.

        The processes of a sharded model run each forward together, so one with fewer batches asks
        about its last one again.
        """
        found: list[Observation] = []
        for number in count():
            if not self.processes.sums(number < len(batches))[0]:
                break
            now = batches[number : number + 1] or batches[-1:]  # none, if there are no batches
            answers = list(map(self._answer, now))
            has_failed = any(answer.error is not None for answer in answers)
            if self.processes.sums(has_failed)[0]:
                # Some losses need a graph: a gradient penalty, or forces. All processes ask again,
                # since they run each forward together.
                with torch.enable_grad():
                    answers = list(map(self._answer, now))
            found += answers
        return found[: len(batches)]

    def _answer(self, batch: Any) -> Observation:
        try:
            return Observation(self.ask(batch), None)
        except Exception as error:  # the loss's own code may raise anything
            return Observation(math.nan, error)

    def observe_lists(self, *lists: list[Any]) -> list[Observations]:
        """The same for lists of batches."""
        observed = self.observe(*chain(*lists))
        found = []
        for batches in lists:
            values: list[Any] = []
            error = None
            for one in observed[: len(batches)]:
                values.append(one.value)
                error = error or one.error
            found.append(Observations(values, error))
            observed = observed[len(batches) :]
        return found

    def observe_with_other_weights(
        self, *lists: list[Any], shows: Callable[[list[Observations]], bool]
    ) -> tuple[list[Observations], bool]:
        """What is found for lists of batches, with a few other numbers in the weights
        (``other_weights``), and whether the weights had them.

        If the first list of some process then raises an error, or what is found shows nothing, the
        model cannot have such weights, and all processes ask it with its own.
        """
        with other_weights(self.model, self.processes):
            found = self.observe_lists(*lists)
        nothing = found[0].error is not None or not shows(found)
        if self.processes.sums(nothing)[0]:
            return self.observe_lists(*lists), False
        return found, True

    def changes(self, *batches: Any, differ: Callable[[Any, Any], bool] | None = None) -> bool:
        """Whether one of ``batches`` has another loss when it is computed again, with its own
        weights or with others: a head of zeros hides random numbers.

        Asked only before a refusal, so that random numbers are not taken for a comparison of rows.
        ``differ``: whether two values do, if they are no numbers.
        """
        differ, changed = differ or self.differ, False
        for weights in (nullcontext(), other_weights(self.model, self.processes)):
            with weights:
                found = self.observe(*batches, *batches)
            for once, again in zip(found, found[len(batches) :], strict=False):
                if once.error is None and again.error is None:
                    changed |= differ(once.value, again.value)
        return changed

    @property
    def rounding(self) -> float:
        """The relative difference of two losses that rounding alone explains.

        A matrix product of more rows adds in another order. In 16 bits, rounding changes each loss
        by up to half of ``eps``, the gap after 1, so the two may be ``eps`` apart.
        """
        dtypes = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        narrow = (dtypes | self.autocasts) & SHORT_DTYPES
        return max([ROUNDING, *(torch.finfo(dtype).eps for dtype in narrow)])

    def differ(self, one: float, other: float) -> bool:
        """Whether two losses differ by more than rounding. What is not finite shows nothing."""
        numbers = math.isfinite(one) and math.isfinite(other)
        return numbers and not math.isclose(one, other, rel_tol=self.rounding)


@contextmanager
def asking(
    model: nn.Module, ask: Callable[[Any], Any], processes: Processes | None = None
) -> Iterator[Question]:
    """In the block, ``ask(batch)``, which calls ``model``, may be asked as in evaluation.

    ``processes``: those that ask together, all of them the same questions in the same order.
    """
    with as_in_evaluation(model) as autocasts:
        yield Question(model, ask, processes or Processes(), autocasts)


def asking_loss(
    model: nn.Module, loss_of: Callable, processes: Processes | None = None
) -> AbstractContextManager[Question]:
    """The same for ``loss_of(model, batch)``, which returns a tensor of one element."""
    return asking(model, lambda batch: loss_of(model, batch).item(), processes)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


@contextmanager
def as_in_evaluation(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """In the block, there are no gradients, no dropout and no tracker. Afterwards all is as before:
    what a forward has changed in the model is put back (``left_as_it_was``), except if the model is
    sharded.

    The block gets a set, which collects the dtype of each autocast that a module is called in.
    """
    kind = device_of(model).type
    autocasts = set[torch.dtype]()

    def note_autocast(module: nn.Module, args: tuple) -> None:
        if torch.is_autocast_enabled(kind):
            autocasts.add(torch.get_autocast_dtype(kind))

    before = set(model.modules())
    training = [module for module in before if module.training]
    cuda = [device_of(model)] if kind == "cuda" else []
    others = FirstRun([model]).found_again()  # the random numbers that are not torch's own
    # For every module, since the loss may call a wrapper around the model.
    hook = register_module_forward_pre_hook(note_autocast)
    # FSDP keeps what it has gathered in attributes of its own, which must not be put back.
    state = nullcontext() if is_sharded(model) else left_as_it_was(model)
    try:
        with torch.no_grad(), without_modes(), torch.random.fork_rng(cuda), others, state:
            for module in before:
                module.training = False  # a module's own eval() may do more, as loralib's merges
            yield autocasts
    finally:
        hook.remove()
        for module in training:
            module.training = True
        for module in model.modules():
            for child in module.children():
                if child not in before:  # made in a forward of a sharded model
                    child.train(module.training)
            if hasattr(module, "reshard"):  # fully_shard gathers the root's weights in a forward
                module.reshard()


@contextmanager
def other_weights(model: nn.Module, processes: Processes) -> Iterator[None]:
    """In the block, a part of each trained weight has other numbers. Afterwards it has its own.

    The weights that a training starts from may hide what a loss does. A head of zeros gives all
    tokens the same loss, and then each way to weigh them looks right. With preferences, the model
    is its own reference at first, and all pairs have the loss log 2. Almost any other weights show
    the difference.

    Shards stay as they are, since some kinds of sharding keep the weights that they have gathered.
    """
    if isinstance(processes, Sharded):
        yield
        return
    generator = torch.Generator().manual_seed(0)
    changed = []
    try:
        for parameter in model.parameters():
            part = _first_numbers(parameter)
            if part is None:
                continue
            changed.append((part, part.clone()))
            if parameter.dim() == 1:
                size = 0.1  # a gain of 1 stays positive
            else:
                size = parameter[0].numel() ** -0.5  # outputs are about as large as inputs
            noise = torch.randn(len(part), generator=generator) * size
            part.add_(noise.to(part))
        yield
    finally:
        for part, numbers in changed:
            part.copy_(numbers)
        if changed:
            torch.clear_autocast_cache()  # the caller's autocast may have cast the other numbers


def _first_numbers(parameter: nn.Parameter) -> torch.Tensor | None:
    """The first numbers of a trained weight, as a view; ``None`` for any other kind of weight."""
    data = parameter.data
    plain = type(data) is torch.Tensor and data.is_floating_point() and data.is_contiguous()
    if not parameter.requires_grad or not plain or not data.dim() or not data.numel():
        return None
    return data.view(-1)[:CHANGED_NUMBERS]
