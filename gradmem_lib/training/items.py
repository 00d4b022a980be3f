"""What a loss is the mean of: the model is asked, with a few small forwards.

Accumulation weighs each micro-batch's mean by its number of items. A model's name does not say what
its items are: predicted tokens, labels or rows. Its losses do. A few rows have one loss together,
and each row has a loss alone. A rule of counting is right if the mean of the losses alone, weighed
by the rule's counts, is the loss together. If no rule is right, the loss is no mean over items, and
must not be cut.

``item_rules.py`` has the rules, ``probe_rows.py`` chooses the rows, ``probe.py`` runs the forwards,
and ``window.py`` asks again after the first window.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..compat.fake_tensors import FakeTensor, has_numbers
from ..measure.storages import tensors_in
from ..model.wrappers import inside_peft, inside_wrapper
from ..techniques.asking import PAIRS, RANDOM, SAME_ROWS, asking_loss, first_line
from ..techniques.data_parallel import Processes
from .item_rules import RULES, Rule, has_labels, rules_of
from .probe import Answer, ask
from .probe_rows import groups_of_rows, have_ignored_labels, with_fewer_labels

UNCUT = "use accumulation=1 and no sharding, with checkpointing to save memory"
SUMS = "accumulate_gradients with a list of sums and what each is divided by"
UNCHECKED = "accumulate_gradients, which does not check your loss and its count"


class LossIsNoMean(ValueError):
    """A loss that must not be cut: a few rows show that the losses of pieces do not add up to the
    batch's, or the loss differs from call to call, so that nothing can be shown.
    """


class NotFinite(ValueError):
    """A few rows have a loss that is no number, which shows nothing about its pieces."""


class NoLoss(ValueError):
    """A model, or a loss that was given, has returned no scalar."""


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
    items: Any = None,
    key: Any = None,
    processes: Processes | None = None,
) -> Rule | None:
    """The rule by which ``model``'s loss is a mean over items; ``None`` if these micro-batches
    cannot tell, since they have no labels, or no values.

    With ``items``, what the user says is the only rule, or one of a few, and is asked as others
    are. It is the answer too where rows cannot tell.

    It costs forwards of 1 to 4 rows without gradients, in eval mode, once for each model and
    ``key``: each row is computed alone and in a group (``groups_of_rows``), so about two forwards
    of the window, and more time where rows are so small that a forward of one is no faster. What a
    loss does in training alone is not seen, nor a difference that is smaller than rounding: about
    1e-6 of the loss, or 1e-5 with weights in 16 bits. Losses are compared, and not gradients, so a
    comparison of rows that cancels in the loss is not seen.

    Args:
        micro_batches: what is about to be trained on.
        loss_of: ``loss_of(model, batch)`` returns the mean loss.
        default: the rule that is tried first.
        how: what cuts the batch, for the error.
        items: what the user says that the loss is divided by, as in ``step``.
        key: what is found is kept for this model and key, unless it is ``None``.
        processes: all of them must call this together, and agree.

    Raises ``ValueError`` if no rule is right: pieces of such a loss do not add up to it; and
    ``NotFinite`` if a few rows have no finite loss. Warns if a rule is almost right, and rounding
    does not explain the difference.
    """
    inner = inside_wrapper(model)
    processes = processes or Processes()
    found = _found_before(inner, key, micro_batches, processes)
    if found is not None:
        return found.rule
    if not have_values(inner, micro_batches):
        return None
    ignored_labels = bool(processes.sums(have_ignored_labels(inner, micro_batches))[0])
    rules = _candidates(default, items)
    groups = groups_of_rows(micro_batches)
    usable = bool(groups) and has_labels(groups[0])
    batches = with_fewer_labels(inside_peft(inner), groups, ignored_labels)
    answer = ask(inner, batches, loss_of, rules, processes)
    opinions = _opinions(answer, usable)
    *votes, everybody, usable_anywhere = processes.sums(*opinions, 1, usable)
    if not usable_anywhere:
        if items is None and not groups:
            _check_uncuttable(inner, micro_batches, default, how)
        # No label anywhere, or no rows: the next window is asked.
        return None if items is None else rules[0]
    agreed = [place for place, vote in enumerate(votes) if vote == everybody]
    if not agreed:
        if processes.sums(answer.error is None and not answer.finite)[0]:
            raise NotFinite(
                f"look for rows with very large or missing numbers, say by items= what the loss is "
                f"divided by if some rows have none of it, or {UNCUT}: {how} cuts the batch, and "
                f"the loss of a few rows of {type(inner).__name__} is no number, which shows "
                "nothing about its pieces"
            )
        with asking_loss(inner, loss_of, processes) as question:
            draws_numbers = question.changes(*groups[:1])
        if isinstance(answer.error, NoLoss):
            raise answer.error
        raise _refusal(inner, draws_numbers, how, items, answer) from answer.error
    number = agreed[0] % len(rules)
    if agreed[0] >= len(rules):
        _warn_of_a_small_difference(inner, how, answer.differences[number])
    if key is not None:
        _found.setdefault(inner, {})[key] = _Found(rules[number], ignored_labels)
    return rules[number]


def _candidates(default: Rule, items: Any) -> list[Rule]:
    """The rules that the model is asked about."""
    if items is not None:
        return rules_of(items)
    return [default, *(rule for rule in RULES if rule is not default)]


def _found_before(
    model: nn.Module, key: Any, micro_batches: Sequence[Any], processes: Processes
) -> _Found | None:
    found = _found.get(model, {}).get(key)
    if found is None:
        return None
    # The first -100 of the data is new. Several processes would have to see it together.
    is_new = not found.ignored_labels and not processes.groups
    return None if is_new and have_ignored_labels(model, micro_batches) else found


def _opinions(answer: Answer, usable: bool) -> list[bool]:
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
        "explain. If the loss adds a small part with a mean of its own (z-loss, router's loss), "
        f"that part's gradient is not the full batch's. Then use accumulation=1, or {SUMS}",
        stacklevel=4,
    )


def known_rule(model: nn.Module, key: Any) -> Rule | None:
    """The rule that ``find_rule`` has found for this model and key, if it was asked."""
    found = _found.get(inside_wrapper(model), {}).get(key)
    return None if found is None else found.rule


def forget(model: nn.Module) -> None:
    """Ask ``model`` again if it is trained again."""
    _found.pop(inside_wrapper(model), None)


def have_values(model: nn.Module, micro_batches: Sequence[Any]) -> bool:
    """Whether there are numbers to compute with. A prediction has shapes and no values, and so has
    a batch on the device meta.
    """
    in_batch = list(tensors_in(micro_batches))
    if not all(map(has_numbers, in_batch)):
        return False
    # The weights may be sharded, and the batch is not.
    return not any(isinstance(weight, FakeTensor) for weight in model.parameters())


def _refusal(
    model: nn.Module, draws_numbers: bool, how: str, items: Any, answer: Answer
) -> ValueError:
    """The error to raise: what to do, and what was found.

    A ``LossIsNoMean``, which a prediction raises too, or a ``ValueError`` that only a step raises.
    """
    kind: type[ValueError] = LossIsNoMean
    found = answer.sentence or "another process found it"
    if answer.error is not None:
        kind = ValueError
        advice = f"let the model take any number of rows, or {PAIRS}, or {UNCUT}"
        found = f"was computed for a few rows, and this raised {first_line(answer.error)}"
    elif draws_numbers:
        advice, found = f"{RANDOM}, or {UNCUT}", SAME_ROWS
    elif answer.shows_nothing:
        kind, advice = ValueError, f"{UNCUT}, or {UNCHECKED}"
        found = (
            "shows nothing: it is 0 for a few rows together and for each of them alone, as of a "
            "loss that compares rows and finds no pair"
        )
    elif answer.adds_up:
        advice = f"return a mean, the loss divided by its rows or labels, or {UNCUT}"
        found = f"is a sum: {found}"
    elif items is not None:
        advice = "say what the loss is divided by with another items="
        found = f"is no mean over what items= counts: {found}"
    elif answer.compares_rows:
        advice = f"{UNCUT}, or {SUMS}, or accumulate_through_embeddings"
        if answer.needs_other_rows:
            advice = f"{PAIRS}; or {advice}"
        found = (
            "compares rows with each other or adds several means, and is no mean over labels or "
            f"rows: {found}"
        )
    else:
        advice = (
            "say what the loss is divided by: items=lambda batch: (batch['labels'] != -1).sum(), "
            "or items='targets' for the name of labels or weights, or the sum of the labels' "
            f"weights if it weighs classes; or, if it adds several means, {SUMS}; or {UNCUT}"
        )
        found = f"is no mean over labels or rows: {found}"
    name = type(model).__name__  # to print it: no class's name decides anything here
    return kind(f"{advice}: {how} cuts the batch, and the loss of {name} {found}")


def _check_uncuttable(
    model: nn.Module, micro_batches: Sequence[Any], default: Rule, how: str
) -> None:
    """Warn that the usual rule is taken for batches without rows; refuse where it does not apply.

    A batch has no rows if it is packed rows with the places where they begin, or graphs with their
    edges.
    """
    inside = inside_peft(model)
    name = f"{type(model).__name__}"
    why = (
        f"{how} cuts the batch, and the loss of {name} could not be computed for single rows, "
        "since the tensors of its batches have different numbers of rows"
    )
    for micro in micro_batches:
        if default(inside, micro) is None:
            raise ValueError(
                f"{UNCUT}, or {UNCHECKED}: {why}, and the batch has no labels of whole numbers, "
                "over which the loss could be a mean"
            )
    warnings.warn(
        f"{why}. The loss is taken as the mean over the labels that are not -100. If it is another "
        "mean, use accumulate_gradients with its count",
        stacklevel=4,
    )
