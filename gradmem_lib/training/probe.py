"""The forwards that ask a model what its loss is a mean of.

A few rows have one loss together, and each row has a loss alone. These are observed once, and each
rule of counting is judged by the same table: the losses alone are averaged with the rule's counts,
and compared with the loss together.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compat.transformers_models import inside_peft
from ..techniques.asking import ROUNDING, SHORT_DTYPES, Observation, asking, other_weights
from ..techniques.data_parallel import Processes
from ..techniques.splitting import split
from .item_rules import Rule
from .probe_rows import twice


class Row(NamedTuple):
    """A row of the table: the losses of a few rows of the batch."""

    parts: list[Any]  # each of them, as a batch
    together: float
    alone: list[float]

    @property
    def scale(self) -> float:
        """The largest loss. Losses of unlike signs cancel, as with advantages, and their rounding
        does not.
        """
        numbers = [abs(loss) for loss in (self.together, *self.alone) if math.isfinite(loss)]
        return max(numbers, default=0.0)


@dataclass
class Answer:
    """What a few rows have shown about the rules."""

    # For each rule, how far its mean is from the loss of all rows together, relative; inf if the
    # rule does not apply.
    differences: list[float]
    noise: float = 0.0  # a difference up to here is rounding, as it was seen
    limit: float = 0.0  # a difference up to here may be rounding
    sentence: str = ""  # the difference of the rule that is nearest to right
    error: Exception | None = None  # of the model's code
    table: list[Row] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether the loss of all rows is a number."""
        return not self.table or math.isfinite(self.table[0].together)

    @property
    def shows_nothing(self) -> bool:
        """Whether all losses are 0: then each rule looks right."""
        all_zero = not any(row.scale for row in self.table)
        return self.finite and self.error is None and all_zero

    @property
    def fits(self) -> bool:
        """Whether a rule may be right."""
        return not self.shows_nothing and min(self.differences) <= self.limit


def ask(
    model: nn.Module,
    batches: list[Any],
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes,
) -> Answer:
    """How far each rule is from right for ``batches`` of a few rows. All processes call this
    together.

    The weights get other numbers first, since those that the training starts from may hide what
    the loss does.
    """
    others = other_weights(model, processes)
    with_others = _answer(model, batches, loss_of, rules, processes, others)
    is_enough = not batches or (with_others.finite and with_others.fits)
    if not processes.sums(not is_enough)[0]:
        return with_others
    # Either the model cannot have such weights, and its own decide. Or no rule is right, and the
    # error should quote a loss that the user knows, unless the own weights hide the difference.
    with_its_own = _answer(model, batches, loss_of, rules, processes, nullcontext())
    if is_enough:
        return with_others
    if with_others.finite and not with_others.shows_nothing and with_its_own.fits:
        if with_others.sentence:
            context = "with a few other numbers in its weights, "
            with_others.sentence = context + with_others.sentence
        return with_others
    return with_its_own


def _answer(
    model: nn.Module,
    batches: list[Any],
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes,
    weights: AbstractContextManager,
) -> Answer:
    """What the batches show with these ``weights`` of the model."""
    answer = Answer([0.0] * len(rules))
    dtypes = set()

    def loss(batch: Any) -> float:
        value = loss_of(model, batch)
        dtypes.add(value.dtype)
        return float(value)

    groups = [[batch, *split(batch, 1)] for batch in batches]
    repeated = []  # of the first group
    for group in groups[:1]:
        repeated = [twice(row) for row in group[1:3]]
    with asking(model, loss, processes) as question, weights:
        *observed, again = question.observe_each(*groups, repeated)
        for (_, *rows), found in zip(groups, observed, strict=True):
            (together, *alone), errors = zip(*found, strict=True)
            error = next(filter(None, errors), None)
            is_first = not answer.table
            if is_first:
                answer.error = error
            if is_first or error is None:  # labels that the model does not take prove nothing
                answer.table.append(Row(rows, together, alone))
        answer.limit = question.rounding
        short = [torch.finfo(dtype).eps for dtype in dtypes & SHORT_DTYPES]
        if short:  # the items' losses are rounded, and then their mean
            answer.limit = 2 * max(answer.limit, *short)
        # Rows together and alone differ a little more than rows alone and twice. The loss itself
        # is rounded, too.
        least = max([min(ROUNDING, answer.limit / 10), *short])
        noise = _noise(answer.table, again)
        answer.noise = min(8 * noise + least, answer.limit)
        _judge(answer, inside_peft(model), rules)
    return answer


def _noise(table: list[Row], repeated: Iterable[Observation]) -> float:
    """The largest relative difference between the loss of a row and of the same row twice."""
    largest = 0.0
    for row in table[:1]:
        for once, (again, _) in zip(row.alone, repeated, strict=False):
            if math.isfinite(once) and math.isfinite(again) and once:
                largest = max(largest, abs(again - once) / abs(once))
    return largest


def _judge(answer: Answer, model: nn.Module, rules: Sequence[Rule]) -> None:
    """Write into ``answer`` how far each rule is from right."""
    nearest = math.inf
    for number, rule in enumerate(rules):
        worst, said = 0.0, ""
        for row in answer.table:
            difference, sentence = _difference(rule, model, row)
            answer.differences[number] = max(answer.differences[number], difference)
            if sentence and difference > max(worst, answer.limit):
                worst, said = difference, sentence
        if said and (answer.differences[number] < nearest or not answer.sentence):
            nearest, answer.sentence = answer.differences[number], said


def _difference(rule: Rule, model: nn.Module, row: Row) -> tuple[float, str]:
    """How far ``rule`` is from right, also in words; inf and no words if it does not apply."""
    weighed = _weighed(row.alone, [rule(model, part) for part in row.parts])
    if weighed is None:
        return math.inf, ""
    sentence = (
        f"{len(row.parts)} rows have the loss {row.together:.6g} together, and {weighed:.6g} as "
        "the mean of their losses alone"
    )
    if not (math.isfinite(weighed) and math.isfinite(row.together)):
        return math.inf, sentence
    return abs(weighed - row.together) / (row.scale or 1.0), sentence


def _weighed(losses: Sequence[float], counts: Sequence[int | float | None]) -> float | None:
    """The mean of ``losses`` weighed by ``counts``; ``None`` if a rule does not apply, or if there
    is nothing to count.
    """
    if None in counts or not any(counts):
        return None
    total = 0.0
    for loss, count in zip(losses, counts, strict=True):
        if count:  # the mean of nothing is not a number
            total += loss * count
    return total / sum(counts)
