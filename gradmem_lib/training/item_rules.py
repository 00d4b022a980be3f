"""Rules that count the items of a batch: the labels, the predicted tokens, the rows, and others.

``items.py`` asks the model which of them is right for its loss.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..hf_names import IGNORED_LABELS
from ..model.wrappers import without_wrappers
from ..names import IGNORED
from ..techniques.counts import check_count
from ..techniques.splitting import count_rows

Rule = Callable[[nn.Module, Any], int | float | None]
Which = Callable[[nn.Module, Any], Tensor | None]


def labels_of(batch: Any, name: str = "labels") -> Tensor | None:
    """The tensor that a dict or a namedtuple has as ``labels``, or by another name."""
    if isinstance(batch, Mapping):
        found = batch.get(name)
    else:
        found = getattr(batch, name, None)
    return found if isinstance(found, Tensor) else None


def with_labels(batch: Any, labels: Tensor) -> Any:
    if isinstance(batch, Mapping):
        return {**batch, "labels": labels}
    return batch._replace(labels=labels)


def whole_labels(batch: Any) -> Tensor | None:
    """The labels of ``batch`` if they are whole numbers."""
    labels = labels_of(batch)
    return None if labels is None or labels.is_floating_point() else labels


# Which labels or tokens count, as True and False; None where there are no such ones.


def _not_ignored(model: nn.Module, batch: Any) -> Tensor | None:
    found = whole_labels(batch)
    return None if found is None else found != IGNORED


def _not_ignored_by_config(model: nn.Module, batch: Any) -> Tensor | None:
    """The labels without those that the model's config names as ignored besides -100."""
    counted = _not_ignored(model, batch)
    if counted is None:
        return None
    for name in IGNORED_LABELS:
        own = getattr(getattr(model, "config", None), name, IGNORED)
        counted = counted & (labels_of(batch) != own)
    return counted


def _numbers(model: nn.Module, batch: Any) -> Tensor | None:
    """The labels of a regression that are numbers: a missing one is often nan."""
    found = labels_of(batch)
    if found is None or not found.is_floating_point():
        return None
    return ~found.isnan()


def _shown(model: nn.Module, batch: Any) -> Tensor | None:
    """The tokens that the attention mask shows: at these, a distillation compares logits, say."""
    mask = labels_of(batch, "attention_mask")
    return None if mask is None or mask.dim() != 2 else mask == 1


def _shown_labels(model: nn.Module, batch: Any) -> Tensor | None:
    """The labels that the attention mask shows: some models count no other ones."""
    counted, shown = _not_ignored(model, batch), _shown(model, batch)
    if counted is None or shown is None or counted.shape != shown.shape:
        return None
    return counted & shown


# The rules. Each returns the number of items in a batch, or None where it does not apply.


def each(counted: Which) -> Rule:
    def rule(model: nn.Module, batch: Any) -> int | None:
        found = counted(model, batch)
        return None if found is None else int(found.sum())

    return rule


def after_shift(counted: Which) -> Rule:
    """The same without the first token of a row, which is not predicted."""

    def rule(model: nn.Module, batch: Any) -> int | None:
        found = counted(model, batch)
        if found is None or found.dim() != 2:
            return None
        if found.shape[1] == 1:
            return 0  # also in a prediction, whose labels have no values
        return int(found[:, 1:].sum())

    return rule


def rows(model: nn.Module, batch: Any) -> int | None:
    try:
        return count_rows(batch)
    except (TypeError, ValueError):
        return None


def elements(model: nn.Module, batch: Any) -> int | None:
    """All labels, such as one for each pixel."""
    found = labels_of(batch)
    return None if found is None or found.dim() < 2 else found.numel()


labels = each(_not_ignored)
predicted_tokens = after_shift(_not_ignored)
RULES = (
    predicted_tokens,
    labels,
    each(_not_ignored_by_config),
    each(_shown_labels),
    after_shift(_shown_labels),
    rows,
    elements,
    each(_numbers),
    each(_shown),
    after_shift(_shown),  # what a policy has sampled, say
)


def rules_of(items: Any) -> list[Rule]:
    """``items`` of ``step`` as rules, of which the model is asked for the right one."""

    def entry(batch: Any) -> Tensor:
        try:
            return batch[items]
        except (KeyError, IndexError, TypeError):
            names = list(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ValueError(
                f"items={items!r} is no entry of the batch: give a function of the batch, or a "
                f"key of it ({names})"
            ) from None

    def said(model: nn.Module, batch: Any) -> int | float:
        return check_count(items(batch), "items(batch)")

    def not_ignored(model: nn.Module, batch: Any) -> Tensor:
        return entry(batch) != IGNORED

    def weights(model: nn.Module, batch: Any) -> float:
        return entry(batch).sum().item()

    def weights_after_shift(model: nn.Module, batch: Any) -> float | None:
        found = entry(batch)
        return found[:, 1:].sum().item() if found.dim() > 1 else None

    if callable(items):
        return [said]
    # after the shift too: a mask of targets is as long as the labels
    return [each(not_ignored), after_shift(not_ignored), weights, weights_after_shift]


def count_by(rule: Rule, model: nn.Module, batch: Any) -> int | float:
    """The number of items in ``batch`` by ``rule``.

    Where the rule does not apply, it is the number of labels if each pixel has one, and otherwise
    that of rows. It is 1 for a batch that has no rows either.
    """
    inside = without_wrappers(model)
    found = labels_of(batch)
    rules = [rule, rows]
    if found is not None and found.dim() > 2:
        rules = [rule, elements, rows]
    for one in rules:
        count = one(inside, batch)
        if count is not None:
            return count
    return 1


def has_labels(batch: Any) -> bool:
    found = whole_labels(batch)
    if found is None:
        return True
    if found.dim() == 2 and found.shape[1] > 1:
        found = found[:, 1:]  # a model that shifts the labels does not predict the first
    return bool((found != IGNORED).any())
