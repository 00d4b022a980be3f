"""What a loss is the mean of: the model is asked, with a few small forwards.

Accumulation weighs each micro-batch's mean by its number of items. A model's name does not say what
its items are: predicted tokens, labels or rows. Its losses do. A few rows have one loss together,
and each row has a loss alone. A rule of counting is right if the mean of the losses alone, weighed
by the rule's counts, is the loss together. If no rule is right, the loss is no mean over items, and
must not be cut.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import compat
from ..hf_names import IGNORED_PIXEL
from ..measure.storages import tensors_in
from ..names import IGNORED
from ..techniques.data_parallel import Processes
from ..techniques.pieces import (
    DRAWS_RANDOM_NUMBERS,
    as_in_evaluation,
    first_line,
    other_weights,
    rounding,
)
from ..techniques.shared_statistics import batch_norms
from ..techniques.splitting import count_rows, split

MOST_ROWS = 4  # of one probe: more of them show more classes


# The rules. Each returns the number of items in a batch, or None where it does not apply.


def _labels_of(batch: Any) -> Tensor | None:
    """What a dict or a namedtuple has as ``labels``."""
    named = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    return named if isinstance(named, Tensor) else None


def _with_labels(batch: Any, labels: Tensor) -> Any:
    if isinstance(batch, Mapping):
        return {**batch, "labels": labels}
    return batch._replace(labels=labels)


def _whole_labels(batch: Any) -> Tensor | None:
    """The labels of ``batch`` if they are whole numbers."""
    labels = _labels_of(batch)
    return None if labels is None or labels.is_floating_point() else labels


def predicted_tokens(model: nn.Module, batch: Any) -> int | None:
    """The labels after the shift: the first token of a row is not predicted."""
    labels = _whole_labels(batch)
    if labels is None or labels.dim() != 2:
        return None
    if labels.shape[1] == 1:
        return 0  # also in a prediction, whose labels have no values
    return int((labels[:, 1:] != IGNORED).sum())


def labels(model: nn.Module, batch: Any) -> int | None:
    found = _whole_labels(batch)
    return None if found is None else int((found != IGNORED).sum())


def rows(model: nn.Module, batch: Any) -> int | None:
    try:
        return count_rows(batch)
    except (TypeError, ValueError):
        return None


def elements(model: nn.Module, batch: Any) -> int | None:
    """All labels, such as one for each pixel."""
    found = _labels_of(batch)
    return None if found is None or found.dim() < 2 else found.numel()


def pixels(model: nn.Module, batch: Any) -> int | None:
    """The labels that are not the config's own ignored one."""
    found, config = _labels_of(batch), getattr(model, "config", None)
    if found is None or found.dim() != 3:
        return None
    for name in IGNORED_PIXEL:
        if hasattr(config, name):
            return int((found != getattr(config, name)).sum())
    return None


def _counted_in_the_mask(batch: Any) -> Tensor | None:
    """For each label, whether it is not -100 and the attention mask shows it."""
    found = _whole_labels(batch)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if found is None or not isinstance(mask, Tensor) or mask.shape != found.shape:
        return None
    return (found != IGNORED) & (mask == 1)


def labels_in_the_mask(model: nn.Module, batch: Any) -> int | None:
    """The labels that the attention mask shows: some models count no other ones."""
    counted = _counted_in_the_mask(batch)
    return None if counted is None else int(counted.sum())


def predicted_in_the_mask(model: nn.Module, batch: Any) -> int | None:
    """The same after the shift: the first token of a row is not predicted."""
    counted = _counted_in_the_mask(batch)
    if counted is None or counted.dim() != 2:
        return None
    return int(counted[:, 1:].sum())


def masked_words(model: nn.Module, batch: Any) -> int | None:
    """The labels without those that ModernBERT ignores besides -100."""
    found = _whole_labels(batch)
    own = getattr(model, "sparse_pred_ignore_index", None)
    if found is None or own is None:
        return None
    return int(((found != IGNORED) & (found != own)).sum())


def numbers(model: nn.Module, batch: Any) -> int | None:
    """The labels of a regression that are numbers: a missing one is often nan."""
    found = _labels_of(batch)
    if found is None or not found.is_floating_point():
        return None
    return int((~found.isnan()).sum())


def positions(model: nn.Module, batch: Any) -> int | None:
    """The tokens that the attention mask shows: at these, a distillation compares logits, say."""
    mask = _mask_of(batch)
    return None if mask is None else int((mask == 1).sum())


def predicted_positions(model: nn.Module, batch: Any) -> int | None:
    """The same without the first token of each row: the tokens that a policy has sampled, say."""
    mask = _mask_of(batch)
    return None if mask is None else int((mask[:, 1:] == 1).sum())


def _mask_of(batch: Any) -> Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


RULES = (
    predicted_tokens,
    labels,
    pixels,
    labels_in_the_mask,
    predicted_in_the_mask,
    masked_words,
    rows,
    elements,
    numbers,
    positions,
    predicted_positions,
)

Rule = Callable[[nn.Module, Any], int | None]
_found: WeakKeyDictionary[nn.Module, dict[Any, Rule]] = WeakKeyDictionary()


def count_by(rule: Rule, model: nn.Module, batch: Any) -> int:
    """The number of items in ``batch`` by ``rule``.

    Where the rule does not apply, it is the number of labels if each pixel has one, and otherwise
    that of rows. It is 1 for a batch that has no rows either.
    """
    inside = compat.inside_peft(unwrapped(model))
    found = _labels_of(batch)
    rules = [rule, rows]
    if found is not None and found.dim() > 2:
        rules = [rule, elements, rows]
    for each in rules:
        count = each(inside, batch)
        if count is not None:
            return count
    return 1


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``."""
    return model.module if isinstance(getattr(model, "module", None), nn.Module) else model


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

    Args:
        micro_batches: what is about to be trained on; some of their rows are tried.
        loss_of: ``loss_of(model, batch)`` returns the mean loss.
        default: the rule that is tried first.
        how: what cuts the batch, for the error.
        key: what is found is kept for this model and key, unless it is ``None``.
        processes: all of them must call this together, and agree.

    Raises ``ValueError`` if no rule is right: pieces of such a loss do not add up to it.
    """
    inner = unwrapped(model)
    known = _found.setdefault(inner, {})
    if key is not None and key in known:
        return known[key]
    if not _have_values(inner, micro_batches):
        return None
    processes = processes or Processes()
    whole = some_rows(micro_batches)
    rules = [default, *(rule for rule in RULES if rule is not default)]
    answer = _Answer([1] * len(rules))
    usable = whole is not None and has_labels(whole)
    if whole is not None:
        answer = _ask(inner, whole, loss_of, rules, processes)
    fits = answer.fits
    if not usable:
        fits = [1] * len(rules)  # this process has nothing to say, so it objects to no rule
    *agreeing, everybody, usable_anywhere = processes.sums(*fits, 1, usable)
    if not usable_anywhere:
        if whole is None:
            _check_uncuttable(inner, micro_batches, default, how)
        return None  # no label anywhere, or no rows: the next window is asked
    for rule, votes in zip(rules, agreeing, strict=True):
        if votes == everybody:
            if key is not None:
                known[key] = rule
            return rule
    raise ValueError(_refusal(inner, whole, loss_of, how, answer)) from answer.error


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


class _Answer(NamedTuple):
    """What a few rows have shown about the rules."""

    fits: list[int]  # for each rule, 1 if it is right
    difference: str = ""  # between the rows together and alone
    error: Exception | None = None  # of the model's code
    finite: bool = True  # whether the loss of all rows is a number


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
    return (
        f"{how} cuts the batch, and the loss of {name} is no mean over labels or rows: "
        f"{answer.difference or 'another process found it'}. Such a loss compares rows with each "
        "other, weighs classes, adds several means, or is the mean of something else than the "
        "batch's 'labels', its rows or its attention mask. Use accumulation=1 and no sharding, "
        "with checkpointing to save memory. Or write the loop with accumulate_gradients: it takes "
        "a sum with what it is divided by (a sum of weights, for example), and a list of such "
        "pairs for several means. A loss that compares rows goes through "
        "accumulate_through_embeddings"
    )


class LossBeforeTheWindow:
    """Compares the loss of a few rows before the first window with their loss after it.

    No trained weight changes in a window. If the loss changes all the same, the window's forwards
    have changed what the loss reads: a queue of embeddings, a counter, an average of the weights.
    Then each micro-batch reads what those before it have left, and the full batch does not.

    Models with a ``BatchNorm`` are left out: its running averages change in each forward, but the
    loss reads them only in eval mode, in which it is computed here. They have a warning of their
    own.
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batches: Sequence[Any],
        loss_of: Callable,
        how: str,
        processes: Processes,
    ):
        self.model, self.loss_of = unwrapped(model), loss_of
        self.how, self.processes = how, processes
        self.limit = 0.0  # two losses are the same if they are so near, relative
        self.rows = None  # what is asked; None: nothing can be
        if _have_values(self.model, micro_batches) and not batch_norms(self.model):
            self.rows = some_rows(micro_batches)
        self.before = self._loss()

    def _loss(self) -> float:
        """The loss of the rows now; not a number if nothing can be asked."""
        if self.rows is None:
            return math.nan
        with as_in_evaluation(self.model) as autocasts:
            loss, _ = _loss(self.model, self.rows, self.loss_of)
            self.limit = rounding(self.model, autocasts)
        return loss

    def check(self) -> None:
        """Call this after the window, before the weights change. All processes call it together.

        Raises ``ValueError`` if the loss is another one.
        """
        after = self._loss()
        numbers = math.isfinite(self.before) and math.isfinite(after)
        differs = numbers and not math.isclose(self.before, after, rel_tol=self.limit)
        if self.processes.sums(differs)[0]:
            _found.pop(self.model, None)  # ask again if it is tried again
            raise ValueError(
                f"{self.how} cuts the batch, and the forwards of the first window have changed the "
                f"loss of {type(self.model).__name__}, though no trained weight has changed: the "
                f"same rows had the loss {self.before:.6g} before the window, and have {after:.6g} "
                "now. A forward in training writes what the next one reads (a queue, a counter, an "
                "average of weights), so each micro-batch reads what those before it have left. "
                "Write it after optimizer.step(), outside of forward; or use accumulation=1 and "
                "no sharding"
            )


def was_asked(model: nn.Module, key: Any) -> bool:
    """Whether ``find_rule`` has found the rule of this model and key."""
    return key in _found.get(unwrapped(model), {})


def _have_values(model: nn.Module, micro_batches: Sequence[Any]) -> bool:
    """Whether there are numbers to compute with: a prediction has shapes and no values."""
    # Its weights may be sharded, and its batch is not.
    tensors = (*model.parameters(), *tensors_in(micro_batches))
    return not any(isinstance(tensor, compat.FakeTensor) for tensor in tensors)


def _differs_from_itself(model: nn.Module, whole: Any, loss_of: Callable) -> bool:
    """Whether the same rows have another loss when they are computed again.

    Asked only before a refusal, so that random numbers are not taken for a comparison of rows.
    """
    with as_in_evaluation(model) as autocasts:
        first, _ = _loss(model, whole, loss_of)
        second, _ = _loss(model, whole, loss_of)
    numbers = math.isfinite(first) and math.isfinite(second)
    return numbers and not math.isclose(first, second, rel_tol=rounding(model, autocasts))


def has_labels(batch: Any) -> bool:
    found = _whole_labels(batch)
    if found is None:
        return True
    if found.dim() == 2 and found.shape[1] > 1:
        found = found[:, 1:]  # a model that shifts the labels does not predict the first
    return bool((found != IGNORED).any())


def some_rows(micro_batches: Sequence[Any]) -> Any:
    """A few rows with labels as one batch, with different labels where the data have them. ``None``
    if the micro-batches cannot be cut into rows.

    Rows of several micro-batches are cut to their common width. A single row is taken twice.
    """
    for micro in micro_batches:
        if rows(nn.Module(), micro) is None:
            return None
    found = list(islice(_unlike_rows(micro_batches), MOST_ROWS))
    if not found:
        found = [next(split(micro_batches[0], 1))]
    if len(found) == 1:
        found = [found[0], _another_class(found[0])]
    return _joined(found)


def _unlike_rows(micro_batches: Sequence[Any]) -> Iterator[Any]:
    """The rows with labels. Of those with a single label, the first of each class."""
    classes: set[Any] = set()
    for micro in micro_batches:
        for row in split(micro, 1):
            if not has_labels(row):
                continue
            labels = _whole_labels(row)
            if labels is not None and labels.numel() == 1:
                if labels.item() in classes:
                    continue
                classes.add(labels.item())
            yield row


def _another_class(row: Any) -> Any:
    """``row`` with another label, if it has one label: classes may be weighed."""
    labels = _whole_labels(row)
    if labels is None or labels.dim() != 1 or labels.item() == IGNORED:
        return row
    other = torch.zeros_like(labels) if labels.item() else labels + 1
    return _with_labels(row, other)


def _joined(parts: list[Any]) -> Any:
    """Rows of unequal widths, cut to the least width and put together."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        joined = [_joined([part[i] for part in parts]) for i in range(len(first))]
        if type(first) in (tuple, list):
            return type(first)(joined)
        return type(first)(*joined)  # a namedtuple
    if not isinstance(first, Tensor) or not first.dim():
        return first
    shapes = [part.shape[1:] for part in parts]
    least = [min(sizes) for sizes in zip(*shapes, strict=True)]
    inside = tuple(slice(size) for size in least)
    return torch.cat([part[:, *inside] for part in parts])


def _ask(
    model: nn.Module,
    whole: Any,
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes,
) -> _Answer:
    """Whether each rule is right for ``whole``.

    The weights get other numbers first, since those that the training starts from may hide what
    the loss does.
    """
    with_others = _which_fit(model, whole, loss_of, rules, processes)
    if with_others.finite and any(with_others.fits):
        return with_others
    # Either the model cannot have such weights, and its own decide. Or no rule is right, and the
    # error should quote a loss that the user knows, unless the own weights hide the difference.
    with_its_own = _which_fit(model, whole, loss_of, rules, None)
    if with_others.finite and any(with_its_own.fits):
        return with_others._replace(
            difference=f"with a few other numbers in its weights, {with_others.difference}"
        )
    return with_its_own


def _which_fit(
    model: nn.Module,
    whole: Any,
    loss_of: Callable,
    rules: Sequence[Rule],
    processes: Processes | None,
) -> _Answer:
    """Whether each rule is right for ``whole``, and for ``whole`` with fewer labels in its first
    row.

    If ``processes`` is ``None``, the model has its own weights, and otherwise other ones.
    """
    inside = compat.inside_peft(model)
    fits, difference, first_error, finite = [1] * len(rules), "", None, True
    weights = nullcontext() if processes is None else other_weights(model, processes)
    with as_in_evaluation(model) as autocasts, weights:
        for place, batch in enumerate((whole, *fewer_labels(inside, whole))):
            together, alone, error = _losses(model, batch, loss_of)
            is_changed = place > 0
            if is_changed and error:  # the model does not take such labels: they prove nothing
                continue
            if not is_changed:
                finite, first_error = math.isfinite(together), error
            limit = rounding(model, autocasts)
            # Losses of unlike signs cancel, as with advantages, and their rounding does not.
            largest = max([0.0, *(abs(loss) for loss in alone if math.isfinite(loss))])
            parts = list(split(batch, 1))
            for number, rule in enumerate(rules):
                counts = [rule(inside, part) for part in parts]
                weighed = _weighed(alone, counts)
                right = weighed is not None and math.isclose(
                    weighed, together, rel_tol=limit, abs_tol=limit * largest
                )
                if not right and not difference and weighed is not None:
                    difference = (
                        f"{len(parts)} rows have the loss {together:.6g} together, and "
                        f"{weighed:.6g} as the mean of their losses alone"
                    )
                fits[number] &= right
    return _Answer(fits, difference, first_error, finite)


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
        value, error = _loss(model, part, loss_of)
        found.append(value)
        first = first or error
    return found[0], found[1:], first


def _loss(model: nn.Module, batch: Any, loss_of: Callable) -> tuple[float, Exception | None]:
    """The loss, which is not a number if there was an error; and this error."""
    try:
        return float(loss_of(model, batch)), None
    except Exception as error:  # the model's own code may raise anything
        return math.nan, error


def fewer_labels(model: nn.Module, batch: Any) -> Iterator[Any]:
    """``batch`` with fewer labels in its first row, so that counting rows and counting labels give
    different means.

    Once -100 takes the place of labels, as most losses ignore it; and once the padding token.
    """
    found = _whole_labels(batch)
    if found is None or found.dim() != 2 or found.shape[1] < 4:
        return
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    length = max([0, *found[0].ne(IGNORED).nonzero().flatten().tolist()])
    for ignored in (IGNORED, padding or 0):
        changed = found.clone()
        changed[0, max(2, length // 3) :] = ignored
        yield _with_labels(batch, changed)
