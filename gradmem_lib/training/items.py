"""What a loss is the mean of: the model is asked, with a few small forwards.

Accumulation weighs each micro-batch's mean by its number of items. A model's name does not say what
its items are: predicted tokens, labels or rows. Its losses do. A few rows have one loss together,
and each row has a loss alone. A rule of counting is right if the mean of the losses alone, weighed
by the rule's counts, is the loss together. If no rule is right, the loss is no mean over items, and
must not be cut.

``item_rules.py`` has the rules, ``probe_rows.py`` chooses the rows, and ``changed_loss.py`` asks
again after the first window.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import compat
from ..measure.storages import tensors_in
from ..techniques.data_parallel import Processes
from ..techniques.pieces import (
    DRAWS_RANDOM_NUMBERS,
    ROUNDING,
    as_in_evaluation,
    first_line,
    other_weights,
    rounding,
    with_graph_if_needed,
)
from ..techniques.splitting import split
from .item_rules import RULES, Rule, has_labels, unwrapped
from .probe_rows import (
    MOST_CLASSES,
    fewer_labels,
    groups_of_rows,
    have_ignored_labels,
    twice,
)


class _Found(NamedTuple):
    rule: Rule
    ignored_labels: bool  # whether the loss was also asked about labels of -100


# Of each model, the rules that were found, by the key that its loss has.
_found: WeakKeyDictionary[nn.Module, dict[Any, _Found]] = WeakKeyDictionary()


def find_rule(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    default: Rule,
    *,
    how: str,
    key: Any = None,
    processes: Processes | None = None,
) -> Rule | None:
    """The rule by which ``model``'s loss is a mean over items; ``None`` if these micro-batches
    cannot tell, since they have no labels, or no values.

    It costs forwards of 1 to 4 rows without gradients, in eval mode (``groups_of_rows``), once for
    each model and ``key``. What a loss does in training alone is not seen, nor a difference that is
    smaller than rounding: about 1e-6 of the loss, or 1e-5 with weights in 16 bits. Losses are
    compared, and not gradients, so a comparison of rows that cancels in the loss is not seen.

    Args:
        micro_batches: what is about to be trained on; some of their rows are tried.
        loss_of: ``loss_of(model, batch)`` returns the mean loss.
        default: the rule that is tried first.
        how: what cuts the batch, for the error.
        key: what is found is kept for this model and key, unless it is ``None``.
        processes: all of them must call this together, and agree.

    Raises ``ValueError`` if no rule is right: pieces of such a loss do not add up to it. Warns if
    one is almost right, and rounding does not explain the difference.
    """
    inner = unwrapped(model)
    processes = processes or Processes()
    if key is not None and was_asked(inner, key):
        found = _found[inner][key]
        # The first -100 of the data is new. Several processes would have to see it together.
        is_new = not found.ignored_labels and not processes.groups
        if not (is_new and have_ignored_labels(inner, micro_batches)):
            return found.rule
    if not have_values(inner, micro_batches):
        return None
    ignored_labels = bool(processes.sums(have_ignored_labels(inner, micro_batches))[0])
    rules = [default, *(rule for rule in RULES if rule is not default)]
    groups = _as_many_as_others(groups_of_rows(micro_batches), processes)
    usable = bool(groups) and has_labels(groups[0])
    answer = _Answer([0.0] * len(rules))
    if groups:
        answer = _ask(inner, _Rows(groups, ignored_labels), loss_of, rules, processes)
    opinions = _opinions(answer, usable)
    *votes, everybody, usable_anywhere = processes.sums(*opinions, 1, usable)
    if not usable_anywhere:
        if not groups:
            _check_uncuttable(inner, micro_batches, default, how)
        return None  # no label anywhere, or no rows: the next window is asked
    agreed = [place for place, vote in enumerate(votes) if vote == everybody]
    if not agreed:
        whole = groups[0] if groups else None
        raise ValueError(_refusal(inner, whole, loss_of, how, answer)) from answer.error
    number = agreed[0] % len(rules)
    if agreed[0] >= len(rules):
        _warn_of_a_small_difference(inner, how, answer.differences[number])
    if key is not None:
        _found.setdefault(inner, {})[key] = _Found(rules[number], ignored_labels)
    return rules[number]


def _opinions(answer: "_Answer", usable: bool) -> list[bool]:
    """For each rule, whether this process finds it right; then, whether it may be right."""
    if not usable:  # this process has nothing to say, so it objects to no rule
        return [True] * 2 * len(answer.differences)
    right = [difference <= answer.noise for difference in answer.differences]
    may_be_right = [difference <= answer.limit for difference in answer.differences]
    if answer.shows_nothing:
        return [False] * (len(right) + len(may_be_right))
    return right + may_be_right


def _warn_of_a_small_difference(model: nn.Module, how: str, difference: float) -> None:
    warnings.warn(
        f"{how} cuts the batch, and the loss of a few rows of {type(model).__name__} differs from "
        f"the mean of their losses alone by {difference:.1e} of it, more than rounding seems to "
        "explain. If the loss adds a small part with a mean of its own, such as a z-loss over all "
        "tokens or a router's loss, that part's gradient is not the full batch's. Use "
        "accumulation=1, or accumulate_gradients, where loss_and_count returns a list with a "
        "sum and a count for each mean",
        stacklevel=4,
    )


def _as_many_as_others(groups: list[Any], processes: Processes) -> list[Any]:
    """``groups``, the first of them repeated until each process has as many, since the processes of
    a sharded model run each forward together.
    """
    most = MOST_CLASSES + 1
    have_one = processes.sums(*[number < len(groups) for number in range(most)])
    missing = sum(count > 0 for count in have_one) - len(groups)
    return groups + groups[:1] * missing


def was_asked(model: nn.Module, key: Any) -> bool:
    """Whether ``find_rule`` has found the rule of this model and key."""
    return key in _found.get(unwrapped(model), {})


def forget(model: nn.Module) -> None:
    """Ask ``model`` again if it is trained again."""
    _found.pop(unwrapped(model), None)


def have_values(model: nn.Module, micro_batches: Sequence[Any]) -> bool:
    """Whether there are numbers to compute with: a prediction has shapes and no values."""
    # Its weights may be sharded, and its batch is not.
    tensors = (*model.parameters(), *tensors_in(micro_batches))
    return not any(isinstance(tensor, compat.FakeTensor) for tensor in tensors)


class _Rows(NamedTuple):
    """What the model is asked about."""

    groups: list[Any]
    ignored_labels: bool  # whether labels may be replaced by -100


@dataclass
class _Answer:
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


def _ask(
    model: nn.Module,
    rows: _Rows,
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes,
) -> _Answer:
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
    rows: _Rows,
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes | None,
) -> _Answer:
    """How far each rule is from right for each group, and for it with fewer labels in its first
    row.

    If ``processes`` is ``None``, the model has its own weights, and otherwise other ones.
    """
    inside = compat.inside_peft(model)
    answer = _Answer([0.0] * len(rules))
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
            if dtypes & {torch.bfloat16, torch.float16}:
                answer.limit *= 2  # the items' losses are rounded, and then their mean
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
    answer.noise = min(8 * answer.noise + least, answer.limit)
    return answer


def _batches(model: nn.Module, rows: _Rows) -> Iterator[tuple[Any, bool]]:
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
    answer: _Answer,
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


def _weighed(losses: Sequence[float], counts: Sequence[int | None]) -> float | None:
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


def _differs_from_itself(model: nn.Module, whole: Any, loss_of: Callable) -> bool:
    """Whether the same rows have another loss when they are computed again.

    Asked only before a refusal, so that random numbers are not taken for a comparison of rows.
    """
    with as_in_evaluation(model) as autocasts:
        first, _ = loss_and_error(model, whole, loss_of)
        second, _ = loss_and_error(model, whole, loss_of)
    numbers = math.isfinite(first) and math.isfinite(second)
    return numbers and not math.isclose(first, second, rel_tol=rounding(model, autocasts))


def _refusal(model: nn.Module, whole: Any, loss_of: Callable, how: str, answer: _Answer) -> str:
    """What was found, and what to do."""
    name = f"{type(model).__name__}"
    if answer.error is not None:
        return (
            f"{how} cuts the batch, so the loss of {name} was computed for a few rows together and "
            f"for each of them alone, and this raised {first_line(answer.error)}. The model has to "
            "take any number of rows: see the error above. Or use accumulation=1 and no sharding"
        )
    if whole is not None and _differs_from_itself(model, whole, loss_of):
        return (
            f"{how} cuts the batch, and it cannot be seen whether the loss of {name} may be cut: "
            f"{DRAWS_RANDOM_NUMBERS}. Or use accumulation=1 and no sharding; or "
            "accumulate_gradients, which does not check your loss and its count"
        )
    if answer.shows_nothing:
        return (
            f"{how} cuts the batch, and it cannot be seen whether the loss of {name} may be cut: "
            "it is 0 for a few rows together and for each of them alone, as of a loss that "
            "compares rows and finds no pair. Use accumulation=1 and no sharding; or "
            "accumulate_gradients, which does not check your loss and its count"
        )
    return (
        f"{how} cuts the batch, and the loss of {name} is no mean over labels or rows: "
        f"{answer.sentence or 'another process found it'}. Such a loss compares rows with each "
        "other, weighs classes, adds several means, or is the mean of something else than the "
        "batch's 'labels', its rows or its attention mask. Use accumulation=1 and no sharding, "
        "with checkpointing to save memory. Or write the loop with accumulate_gradients: it takes "
        "a sum with what it is divided by (a sum of weights, for example), and a list of such "
        "pairs for several means. A loss that compares rows goes through "
        "accumulate_through_embeddings"
    )


def _check_uncuttable(
    model: nn.Module, micro_batches: Sequence[Any], default: Rule, how: str
) -> None:
    """Warn that the usual rule is taken for batches without rows; refuse where it does not apply.

    A batch has no rows if it is packed rows with the places where they begin, or graphs with their
    edges.
    """
    inside = compat.inside_peft(model)
    name = f"{type(model).__name__}"
    why = (
        f"{how} cuts the batch, and the loss of {name} could not be computed for single rows, "
        "since the tensors of its batches have different numbers of rows"
    )
    for micro in micro_batches:
        if default(inside, micro) is None:
            raise ValueError(
                f"{why}. The batch also has no labels of whole numbers, over which the loss could "
                "be a mean. Use accumulation=1 and no sharding; or accumulate_gradients, which "
                "does not check your loss and its count"
            )
    warnings.warn(
        f"{why}. The loss is taken as the mean over the labels that are not -100. If it is another "
        "mean, use accumulate_gradients with its count",
        stacklevel=4,
    )
