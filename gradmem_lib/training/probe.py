"""The forwards that ask a model what its loss is a mean of.

A few rows have one loss together, and each row has a loss alone. For each rule of counting, the
losses alone are averaged with the rule's counts, and compared with the loss together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat.transformers_models import inside_peft
from ..techniques.data_parallel import Processes
from ..techniques.pieces import (
    ROUNDING,
    as_in_evaluation,
    other_weights,
    rounding,
    with_graph_if_needed,
)
from ..techniques.splitting import split
from .item_rules import Rule
from .probe_rows import fewer_labels, twice

SHORT_DTYPES = {torch.bfloat16, torch.float16}


class ProbeRows(NamedTuple):
    """What the model is asked about."""

    groups: list[Any]
    ignored_labels: bool  # whether labels may be replaced by -100


@dataclass
class Answer:
    """What a few rows have shown about the rules."""

    # For each rule, how far its mean is from the loss of all rows together, relative; inf if the
    # rule does not apply.
    differences: list[float]
    noise: float = 0.0  # a difference up to here is rounding, as it was seen
    limit: float = 0.0  # a difference up to here may be rounding
    sentences: dict[int, str] = field(default_factory=dict)  # by rule, its difference in words
    context: str = ""  # stands before the sentence
    error: Exception | None = None  # of the model's code
    finite: bool = True  # whether the loss of all rows is a number
    largest: float = 0.0  # of all losses

    @property
    def shows_nothing(self) -> bool:
        """Whether all losses are 0: then each rule looks right."""
        return self.finite and self.error is None and self.largest == 0

    @property
    def sentence(self) -> str:
        """The difference of the rule that is nearest to right."""
        nearest = min(self.sentences, key=self.differences.__getitem__, default=None)
        return "" if nearest is None else self.context + self.sentences[nearest]

    @property
    def fits(self) -> bool:
        """Whether a rule may be right."""
        return not self.shows_nothing and min(self.differences) <= self.limit


def ask(
    model: nn.Module,
    rows: ProbeRows,
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes,
) -> Answer:
    """How far each rule is from right.

    The weights get other numbers first, since those that the training starts from may hide what
    the loss does.
    """
    with_others = _differences(model, rows, loss_of, rules, processes)
    if with_others.finite and with_others.fits:
        return with_others
    # Either the model cannot have such weights, and its own decide. Or no rule is right, and the
    # error should quote a loss that the user knows, unless the own weights hide the difference.
    with_its_own = _differences(model, rows, loss_of, rules, None)
    if with_others.finite and not with_others.shows_nothing and with_its_own.fits:
        with_others.context = "with a few other numbers in its weights, "
        return with_others
    return with_its_own


def _differences(
    model: nn.Module,
    rows: ProbeRows,
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes | None,
) -> Answer:
    """How far each rule is from right for each group, and for it with fewer labels in its first
    row.

    If ``processes`` is ``None``, the model has its own weights, and otherwise other ones.
    """
    inside = inside_peft(model)
    answer = Answer([0.0] * len(rules))
    weights = nullcontext() if processes is None else other_weights(model, processes)
    dtypes = set()

    def seen_loss(asked: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(asked, batch)
        dtypes.add(loss.dtype)
        return loss

    with as_in_evaluation(model) as autocasts, weights:
        for batch, is_first in _batches(inside, rows):
            together, alone, error = _losses(model, batch, seen_loss)
            answer.limit = rounding(model, autocasts)
            for dtype in dtypes & SHORT_DTYPES:
                # The items' losses are rounded, and then their mean.
                answer.limit = max(2 * answer.limit, 2 * torch.finfo(dtype).eps)
            if is_first:
                answer.finite = math.isfinite(together)
                answer.error = error
                repeated = []
                for row in list(split(batch, 1))[:2]:
                    repeated.append(loss_and_error(model, twice(row), seen_loss)[0])
                answer.noise = _noise(alone, repeated)
            elif error:  # the model does not take such labels: they prove nothing
                continue
            _compare(answer, inside, batch, together, alone, rules)
    # Rows together and alone differ a little more than rows alone and twice.
    least = min(ROUNDING, answer.limit / 10)
    for dtype in dtypes & SHORT_DTYPES:  # the loss itself is rounded, together and alone
        least = max(least, torch.finfo(dtype).eps)
    answer.noise = min(8 * answer.noise + least, answer.limit)
    return answer


def _batches(model: nn.Module, rows: ProbeRows) -> Iterator[tuple[Any, bool]]:
    """What is computed together and row by row, and whether it is the first."""
    for place, group in enumerate(rows.groups):
        yield group, place == 0
        for changed in fewer_labels(model, group, rows.ignored_labels):
            yield changed, False


def _noise(alone: list[float], repeated: list[float]) -> float:
    """The largest relative difference between the loss of a row and of the same row twice."""
    largest = 0.0
    for once, again in zip(alone, repeated, strict=False):
        if math.isfinite(once) and math.isfinite(again) and once:
            largest = max(largest, abs(again - once) / abs(once))
    return largest


def _compare(
    answer: Answer,
    model: nn.Module,
    batch: Any,
    together: float,
    alone: list[float],
    rules: Sequence[Rule],
) -> None:
    """Write into ``answer`` how far each rule is from right for ``batch``."""
    # Losses of unlike signs cancel, as with advantages, and their rounding does not.
    numbers = [abs(loss) for loss in (together, *alone) if math.isfinite(loss)]
    scale = max(numbers, default=0.0)
    answer.largest = max(answer.largest, scale)
    parts = list(split(batch, 1))
    for number, rule in enumerate(rules):
        weighed = _weighed(alone, [rule(model, part) for part in parts])
        difference = math.inf
        if weighed is not None and math.isfinite(weighed) and math.isfinite(together):
            difference = abs(weighed - together) / (scale or 1.0)
        if difference <= answer.differences[number]:
            continue
        answer.differences[number] = difference
        if weighed is not None and difference > answer.limit:
            answer.sentences[number] = (
                f"{len(parts)} rows have the loss {together:.6g} together, and "
                f"{weighed:.6g} as the mean of their losses alone"
            )


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


def _losses(
    model: nn.Module, batch: Any, loss_of: Callable
) -> tuple[float, list[float], Exception | None]:
    """The loss of all rows together, of each alone, and an error if there was one.

    Always as many forwards: the processes of a sharded model run each of them together.
    """
    found, first = [], None
    for part in (batch, *split(batch, 1)):
        value, error = loss_and_error(model, part, loss_of)
        found.append(value)
        first = first or error
    return found[0], found[1:], first


def loss_and_error(
    model: nn.Module, batch: Any, loss_of: Callable
) -> tuple[float, Exception | None]:
    """The loss, which is not a number if there was an error; and this error."""
    try:
        return float(with_graph_if_needed(lambda: loss_of(model, batch))), None
    except Exception as error:  # the model's own code may raise anything
        return math.nan, error


def differs_from_itself(model: nn.Module, whole: Any, loss_of: Callable) -> bool:
    """Whether the same rows have another loss when they are computed again.

    Asked only before a refusal, so that random numbers are not taken for a comparison of rows.
    """
    with as_in_evaluation(model) as autocasts:
        first, _ = loss_and_error(model, whole, loss_of)
        second, _ = loss_and_error(model, whole, loss_of)
    numbers = math.isfinite(first) and math.isfinite(second)
    return numbers and not math.isclose(first, second, rel_tol=rounding(model, autocasts))
