"""The forwards that ask a model what its loss is a mean of.

A few rows have one loss together, and each row has a loss alone. These are observed once, and each
rule of counting is judged by the same table: the losses alone are averaged with the rule's counts,
and compared with the loss together. The weights get other numbers first, since those that the
training starts from may hide what the loss does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..model.wrappers import inside_peft
from ..techniques.asking import ROUNDING, SHORT_DTYPES, Observations, asking
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
        """Whether each loss of several rows is a number."""
        return all(math.isfinite(row.together) for row in self.table)

    @property
    def compares_rows(self) -> bool:
        """Whether a loss of rows together is above or below those of all its rows alone, as no mean
        of them is, whatever is counted; or no row alone has a loss that is a number.
        """
        for row in self.table:
            margin = self.limit * row.scale
            numbers = list(filter(math.isfinite, row.alone))
            if not numbers or not min(numbers) - margin <= row.together <= max(numbers) + margin:
                return True
        return False

    @property
    def needs_other_rows(self) -> bool:
        """Whether no row alone has a loss that is a number."""
        return not any(math.isfinite(loss) for row in self.table for loss in row.alone)

    @property
    def adds_up(self) -> bool:
        """Whether the losses of rows alone add up to that of all of them, as those of a sum do."""
        differences = [abs(sum(row.alone) - row.together) / (row.scale or 1) for row in self.table]
        return bool(differences) and max(differences) <= self.limit

    @property
    def shows_nothing(self) -> bool:
        """Whether all losses are 0: then each rule looks right."""
        all_zero = not any(row.scale for row in self.table)
        return self.finite and self.error is None and all_zero


def _shows(found: list[Observations]) -> bool:
    """Whether these losses can tell rules apart: together they are numbers, and not all are 0."""
    first_losses = found[0].values
    if first_losses and not any(first_losses):
        return False
    together = [one.values[0] for one in found if one.values and one.error is None]
    return all(map(math.isfinite, together))


def ask(
    model: nn.Module,
    batches: list[Any],
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes,
) -> Answer:
    """How far each rule is from right for ``batches`` of a few rows. All processes call this
    together.
    """
    dtypes = set()

    def loss(batch: Any) -> float:
        value = loss_of(model, batch)
        dtypes.add(value.dtype)
        return value.item()

    lists = []
    for batch in batches:
        lists.append([batch, *split(batch, 1)])
    repeated = []
    if lists:
        repeated = list(map(twice, lists[0][1:3]))

    answer = Answer([0.0] * len(rules))
    with asking(model, loss, processes) as question:
        (*found, again), with_others = question.observe_with_other_weights(
            *lists, repeated, shows=_shows
        )
        for (_, *rows), (losses, error) in zip(lists, found, strict=True):
            if not answer.table:
                answer.error = error
            elif error is not None:
                continue  # labels that the model does not take prove nothing
            answer.table.append(Row(rows, losses[0], losses[1:]))
        answer.limit = question.rounding
        short = [torch.finfo(dtype).eps for dtype in dtypes & SHORT_DTYPES]
        if short:  # the items' losses are rounded, and then their mean
            answer.limit = 2 * max(answer.limit, *short)
        # Rows together and alone differ a little more than rows alone and twice. The loss itself
        # is rounded, too.
        least = max([min(ROUNDING, answer.limit / 10), *short])
        noise = _noise(answer.table, again.values)
        answer.noise = min(8 * noise + least, answer.limit)
        _judge(answer, inside_peft(model), rules)
    if with_others and answer.sentence:
        answer.sentence = f"with a few other numbers in its weights, {answer.sentence}"
    return answer


def _noise(table: list[Row], repeated: list[float]) -> float:
    """The largest relative difference between the loss of a row and of the same row twice."""
    largest = 0.0
    for row in table[:1]:
        for once, again in zip(row.alone, repeated, strict=False):
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
