"""Rules that count the items of a batch: the labels, the predicted tokens, the rows, and others.

``items.py`` asks the model which of them is right for its loss.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..compat.data_parallel import inside_wrapper
from ..compat.transformers_models import inside_peft
from ..hf_names import IGNORED_PIXEL
from ..names import IGNORED
from ..techniques.counts import check_count
from ..techniques.splitting import count_rows

# The rules. Each returns the number of items in a batch, or None where it does not apply.


def labels_of(batch: Any) -> Tensor | None:
    """What a dict or a namedtuple has as ``labels``."""
    named = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    return named if isinstance(named, Tensor) else None


def with_labels(batch: Any, labels: Tensor) -> Any:
    if isinstance(batch, Mapping):
        return {**batch, "labels": labels}
    return batch._replace(labels=labels)


def whole_labels(batch: Any) -> Tensor | None:
    """The labels of ``batch`` if they are whole numbers."""
    labels = labels_of(batch)
    return None if labels is None or labels.is_floating_point() else labels


def predicted_tokens(model: nn.Module, batch: Any) -> int | None:
    """The labels after the shift: the first token of a row is not predicted."""
    labels = whole_labels(batch)
    if labels is None or labels.dim() != 2:
        return None
    if labels.shape[1] == 1:
        return 0  # also in a prediction, whose labels have no values
    return int((labels[:, 1:] != IGNORED).sum())


def labels(model: nn.Module, batch: Any) -> int | None:
    found = whole_labels(batch)
    return None if found is None else int((found != IGNORED).sum())


def rows(model: nn.Module, batch: Any) -> int | None:
    try:
        return count_rows(batch)
    except (TypeError, ValueError):
        return None


def elements(model: nn.Module, batch: Any) -> int | None:
    """All labels, such as one for each pixel."""
    found = labels_of(batch)
    return None if found is None or found.dim() < 2 else found.numel()


def pixels(model: nn.Module, batch: Any) -> int | None:
    """The labels that are not the config's own ignored one."""
    found, config = labels_of(batch), getattr(model, "config", None)
    if found is None or found.dim() != 3:
        return None
    for name in IGNORED_PIXEL:
        if hasattr(config, name):
            return int((found != getattr(config, name)).sum())
    return None


def _counted_in_the_mask(batch: Any) -> Tensor | None:
    """For each label, whether it is not -100 and the attention mask shows it."""
    found = whole_labels(batch)
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
    found = whole_labels(batch)
    own = getattr(model, "sparse_pred_ignore_index", None)
    if found is None or own is None:
        return None
    return int(((found != IGNORED) & (found != own)).sum())


def numbers(model: nn.Module, batch: Any) -> int | None:
    """The labels of a regression that are numbers: a missing one is often nan."""
    found = labels_of(batch)
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

Rule = Callable[[nn.Module, Any], int | float | None]


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

    def not_ignored(model: nn.Module, batch: Any) -> int:
        return int((entry(batch) != IGNORED).sum())

    def not_ignored_after_shift(model: nn.Module, batch: Any) -> int | None:
        found = entry(batch)
        return int((found[:, 1:] != IGNORED).sum()) if found.dim() == 2 else None

    def weights(model: nn.Module, batch: Any) -> float:
        return entry(batch).sum().item()

    return [said] if callable(items) else [not_ignored, not_ignored_after_shift, weights]


def count_by(rule: Rule, model: nn.Module, batch: Any) -> int | float:
    """The number of items in ``batch`` by ``rule``.

    Where the rule does not apply, it is the number of labels if each pixel has one, and otherwise
    that of rows. It is 1 for a batch that has no rows either.
    """
    inside = inside_peft(inside_wrapper(model))
    found = labels_of(batch)
    rules = [rule, rows]
    if found is not None and found.dim() > 2:
        rules = [rule, elements, rows]
    for each in rules:
        count = each(inside, batch)
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
