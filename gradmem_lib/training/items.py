"""What a loss is the mean of: the model is asked, with a few small forwards.

Accumulation weighs each micro-batch's mean by its number of items. Which things a model counts as
items (predicted tokens, labels, rows) is no matter of its name: two rows have one loss together and
one each alone, and a rule of counting is right if the weighed mean of the latter is the former. If
no rule is right, the loss is no mean over items, and must not be cut.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import compat
from ..hf_names import IGNORED_PIXEL
from ..measure.storages import tensors_in
from ..names import IGNORED
from ..techniques.accumulation import count_rows, split
from ..techniques.data_parallel import Processes, device_of

ROUNDING = 1e-5  # float32 losses of the same rows, computed together and alone, differ by less
MOST_ROWS = 4  # of one probe: more of them show more classes


# The rules. Each returns the number of items in a batch, or None where it does not apply.


def _labels_of(batch: Any) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) else None


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
    for name in IGNORED_PIXEL:
        if found is not None and found.dim() == 3 and hasattr(config, name):
            return int((found != getattr(config, name)).sum())
    return None


def _seen(batch: Any, like: Tensor) -> Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.shape != like.shape:
        return None
    return mask == 1


def labels_in_the_mask(model: nn.Module, batch: Any) -> int | None:
    """Models that do not count a label if the attention mask hides it."""
    found = _whole_labels(batch)
    seen = None if found is None else _seen(batch, found)
    return None if seen is None else int(((found != IGNORED) & seen).sum())


def predicted_in_the_mask(model: nn.Module, batch: Any) -> int | None:
    found = _whole_labels(batch)
    seen = None if found is None or found.dim() != 2 else _seen(batch, found)
    return None if seen is None else int(((found != IGNORED) & seen)[:, 1:].sum())


def masked_words(model: nn.Module, batch: Any) -> int | None:
    """ModernBERT's, which leaves out a label of its own too."""
    found = _whole_labels(batch)
    own = getattr(model, "sparse_pred_ignore_index", None)
    if found is None or own is None:
        return None
    return int(((found != IGNORED) & (found != own)).sum())


RULES = (
    predicted_tokens,
    labels,
    pixels,
    labels_in_the_mask,
    predicted_in_the_mask,
    masked_words,
    rows,
    elements,
)

Rule = Callable[[nn.Module, Any], int | None]
_found: WeakKeyDictionary[nn.Module, dict[Any, Rule]] = WeakKeyDictionary()


def count_by(rule: Rule, model: nn.Module, batch: Any) -> int:
    """The items of ``batch`` by ``rule``. Where the rule does not apply: all labels if there is a
    number for each pixel, else rows; 1 for a batch that has no labels and cannot be cut.
    """
    inside = compat.inside_peft(unwrapped(model))
    found = _labels_of(batch)
    others = (elements, rows) if found is not None and found.dim() > 2 else (rows,)
    for each in (rule, *others):
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
    # A prediction has shapes and no values. Its weights may be sharded, and its batch is not.
    tensors = (*inner.parameters(), *tensors_in(micro_batches))
    if any(isinstance(tensor, compat.FakeTensor) for tensor in tensors):
        return None
    processes = processes or Processes()
    whole = some_rows(micro_batches)
    rules = [default, *(rule for rule in RULES if rule is not default)]
    fits, difference = [1] * len(rules), ""
    usable = whole is not None and has_labels(whole)
    if whole is not None:
        fits, difference = _which_fit(inner, whole, loss_of, rules)
    if not usable:
        fits = [1] * len(rules)  # this process has nothing to say
    votes = processes.sums(*fits, 1, usable)
    if not votes[-1]:
        return None  # no label anywhere: the next window is asked
    for rule, agreeing in zip(rules, votes, strict=False):
        if agreeing == votes[-2]:
            if key is not None:
                known[key] = rule
            return rule
    if not difference:
        difference = "another process found it"
    raise ValueError(
        f"{how} cuts the batch, and the loss of {type(inner).__name__} is no mean over labels or "
        f"rows: {difference}. A loss that compares rows with each other, weighs classes, or adds "
        "several means differs in pieces. Use accumulation=1 and no sharding, with checkpointing "
        "to save memory; or accumulate_gradients, whose counts may be sums of weights and several "
        "for several means; or accumulate_through_embeddings, for a loss that compares rows"
    )


def has_labels(batch: Any) -> bool:
    found = _whole_labels(batch)
    if found is None:
        return True
    if found.dim() == 2 and found.shape[1] > 1:
        found = found[:, 1:]  # a model that shifts the labels does not predict the first
    return bool((found != IGNORED).any())


def some_rows(micro_batches: Sequence[Any]) -> Any:
    """A few rows with labels, as one batch: with unlike labels, if there are. ``None`` if rows
    cannot be told apart.

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
    return {**row, "labels": torch.zeros_like(labels) if labels.item() else labels + 1}


def _joined(parts: list[Any]) -> Any:
    """Rows of unequal widths, cut to the least width and put together."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(_joined([part[i] for part in parts]) for i in range(len(first)))
    if not isinstance(first, Tensor) or not first.dim():
        return first
    shape = [min(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    cut = [part[tuple(slice(size) for size in (len(part), *shape[1:]))] for part in parts]
    return torch.cat(cut)


def _which_fit(
    model: nn.Module, whole: Any, loss_of: Callable, rules: Sequence[Rule]
) -> tuple[list[int], str]:
    """For each rule, 1 if it is right for ``whole`` and for ``whole`` with fewer labels in its
    first row; and what was found, for the error.
    """
    inside = compat.inside_peft(model)
    fits, difference = [1] * len(rules), ""
    with as_in_evaluation(model):
        for place, batch in enumerate((whole, *fewer_labels(inside, whole))):
            together, alone, error = _losses(model, batch, loss_of)
            if error and place:  # it does not take such labels: the data themselves were right
                continue
            limit = _rounding(model, together)
            parts = list(split(batch, 1))
            for number, rule in enumerate(rules):
                counts = [rule(inside, part) for part in parts]
                weighed = _weighed(alone, counts)
                right = weighed is not None and math.isclose(weighed, together, rel_tol=limit)
                if not right and not difference and (weighed is not None or error):
                    difference = error or (
                        f"{len(parts)} rows have the loss {together:.6g} together, and "
                        f"{weighed:.6g} as the mean of their losses alone"
                    )
                fits[number] &= right
    return fits, difference


def _weighed(losses: Sequence[float], counts: Sequence[int | None]) -> float | None:
    if None in counts or not any(counts):
        return None
    total = 0.0
    for loss, count in zip(losses, counts, strict=True):
        if count:  # the mean of nothing is not a number
            total += loss * count
    return total / sum(counts)


def _losses(model: nn.Module, batch: Any, loss_of: Callable) -> tuple[float, list[float], str]:
    """The loss of all rows together, of each alone, and an error if there was one.

    Always as many forwards: the processes of a sharded model run each of them together.
    """
    found, message = [], ""
    for part in (batch, *split(batch, 1)):
        value = math.nan
        try:
            value = float(loss_of(model, part))
        except Exception as error:  # the model's own code may raise anything
            message = message or f"{type(error).__name__}: {error}".strip().splitlines()[0]
        found.append(value)
    return found[0], found[1:], message


def _rounding(model: nn.Module, loss: float) -> float:
    """How far two right losses may be apart: relative, and by what a number is rounded to.

    A matrix product of more rows adds in another order. In 16 bits, each side is rounded to half a
    gap between two numbers, relative: both together to one gap, ``eps``.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    kind = device_of(model).type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    narrow = dtypes & {torch.bfloat16, torch.float16}
    return max([ROUNDING, *(torch.finfo(dtype).eps for dtype in narrow)])


def fewer_labels(model: nn.Module, batch: Any) -> Iterator[Any]:
    """``batch`` with fewer labels in its first row, so that rows and labels are not alike.

    A label is taken away as everybody does (-100), and as a padding token.
    """
    found = _whole_labels(batch)
    if found is None or found.dim() != 2 or found.shape[1] < 4:
        return
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    length = max([0, *found[0].ne(IGNORED).nonzero().flatten().tolist()])
    for ignored in (IGNORED, padding or 0):
        changed = found.clone()
        changed[0, max(2, length // 3) :] = ignored
        yield {**batch, "labels": changed}


@contextmanager
def as_in_evaluation(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, nobody who watches; afterwards all is as before."""
    training = [module for module in model.modules() if module.training]
    cuda = [device_of(model)] if device_of(model).type == "cuda" else []
    try:
        model.eval()
        with torch.no_grad(), compat.without_modes(), torch.random.fork_rng(cuda):
            yield
    finally:
        for module in training:
            module.training = True
        for module in model.modules():
            if hasattr(module, "reshard"):  # fully_shard gathers the root's weights in a forward
                module.reshard()
