"""Causes: bytes that stay, of earlier steps, of an evaluation, or of data that waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from ..units import format_bytes
from .cause import (
    ALMOST_ALL,
    DOMINATES,
    FILLED,
    LINES,
    WORTH,
    Cause,
    belongs_to_training,
    in_words,
    larger_than_its_tensor,
    lines_of,
    lines_of_forwards,
)
from .facts import (
    EVALUATION,
    IN_BACKWARD,
    IN_OPTIMIZER_STEP,
    LOSS,
    READ_IN_PARTS,
    TRAINING_FORWARD,
    Facts,
    total,
)
from .timeline import ForwardPass, Holder, Turn

# Bytes that grow by this part of the peak double it in a thousand steps.
GROWS = 0.001
LATE = 0.75  # if bytes grow until a run's end, its peak is in the last quarter of its steps
OLD_STEPS = 3  # a tensor of the last two steps may be a variable that is not overwritten yet
FORWARDS_IN_A_ROW = 3
MANY = 3  # tensors of one kind are a list
GROWTH = "Bytes grow from step to step"


def growing_bytes(facts: Facts) -> Cause | None:
    """Tensors of the same kind from many earlier steps: losses, outputs, metrics, kept graphs."""
    if facts.peak_time < LATE * (facts.times - 1):
        return None  # later steps did not need more
    growing = _kinds_that_grow(facts)
    holders = [holder for kind in growing for holder in kind]
    nbytes = total(holders)
    if not holders:
        return None
    times = {facts.time_of(holder) for holder in holders}
    each = nbytes // len(times)
    if nbytes < WORTH * facts.peak.total and each < GROWS * facts.peak.total:
        return None
    largest_first = sorted(growing, key=total, reverse=True)
    kinds_in_words = [in_words(kind[0]) for kind in largest_first]
    more = ""
    if len(kinds_in_words) > LINES:
        more = f" and {len(kinds_in_words) - LINES} more"
    evidence = (
        f"{format_bytes(nbytes)} at the peak were made in {len(times)} earlier {facts.unit}s, "
        f"about {format_bytes(each)} a {facts.unit}: {'; '.join(kinds_in_words[:LINES])}{more}."
    )
    remedy = _remedy_of_growth(holders, facts)
    return Cause(GROWTH, nbytes, evidence, remedy, lines_of(holders), tuple(holders))


def growing_holders(facts: Facts) -> tuple[Holder, ...]:
    """The storages that pictures show as a band of their own.

    A tensor that a longer one replaces has no band: the shorter ones are no longer known.
    """
    for find in (growing_bytes, evaluation_results):
        cause = find(facts)
        if cause is not None:
            return cause.growing
    return ()


def _kinds_that_grow(facts: Facts) -> list[list[Holder]]:
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in facts.at_peak:
        if not 0 <= facts.time_of(holder) < facts.peak_time:
            continue  # it was there before the first step, or is of the peak's own step
        if holder.category in ("gradients", "optimizer"):
            # one parameter has gradients or states of several steps
            kinds[holder.category, holder.module, holder.shape, holder.dtype].append(holder)
        elif holder.category == "parameters":
            # models of earlier rounds; the parameters of one model are made at the same time
            kinds["parameters", holder.line, holder.shape, holder.dtype].append(holder)
        else:
            # In a cache, each tensor may have another shape.
            kinds[holder.line, holder.op, holder.dtype].append(holder)
    growing = []
    for kind in kinds.values():
        if belongs_to_training(kind[0]):
            newest = max(map(facts.time_of, kind))  # the ones in use
            kind = [holder for holder in kind if facts.time_of(holder) < newest]
        if _from_first_to_last(kind, facts):
            growing.append(kind)
    return growing


def _from_first_to_last(holders: list[Holder], facts: Facts) -> bool:
    """Whether they come from several steps, with the first and the last ones among them.

    A window for an average keeps the last n of something. It does not grow for ever, since the
    first ones are gone. Neither does a list of the first n, such as examples for a picture.
    """
    steps = sorted({facts.time_of(holder) for holder in holders})
    if len(steps) < OLD_STEPS:
        return False
    gap = max(after - before for before, after in pairwise(steps))  # more than 1: every n steps
    begins_early = steps[0] <= gap
    goes_on = facts.peak_time - steps[-1] <= gap + 1  # the peak's own step may keep nothing so far
    return begins_early and goes_on


def _remedy_of_growth(holders: list[Holder], facts: Facts) -> str:
    categories = Counter[str]()
    for holder in holders:
        categories[holder.category] += holder.nbytes
    largest = categories.most_common(1)[0][0]
    if largest == "gradients":
        return (
            "the gradients of earlier steps are kept. Keep a number of each, p.grad.norm().item(), "
            "or copies off the card: p.grad.cpu()."
        )
    if largest == "optimizer":
        return (
            "the states of earlier optimizers are kept. Make one optimizer before the loop, or "
            "drop the old one before the new one is made. If a model of each round is kept as well,"
            " keep its results, and its weights on the host."
        )
    if largest == "parameters":
        return (
            "the models of earlier rounds are kept. Keep their results as numbers, and weights "
            "that are needed again on the host: {name: t.cpu() for name, t in "
            "model.state_dict().items()}."
        )
    remedy = (
        "something of each step is kept, such as a list of losses, outputs or metrics, what a hook "
        "stores, or a sum of losses. Keep numbers instead of tensors: loss.item(), or "
        "tensor.detach().cpu() for what has to stay a tensor."
    )
    inside = {holder.op for holder in holders if holder.category == "activations" and holder.module}
    shapes = {holder.shape for holder in holders}
    if len(inside) <= 1 and 2 * len(shapes) > len(holders):
        remedy += " A cache with an entry for each shape or length needs a limit (maxsize=...)."
    if len(inside) > 1:
        remedy += (
            " Whole graphs of earlier steps are alive: what goes from one step to the next, such as"
            " a running loss or a hidden state, keeps them, so detach it (hidden.detach())."
            " An exception that is kept does the same: its traceback has the tensors of the step"
            " that failed, so keep str(error)."
        )
    if any(larger_than_its_tensor(holder) for holder in holders):
        remedy += (
            " A loss of one number can lie in a storage as large as the tensor that it was computed"
            " from, and .detach() keeps this storage: use .item()."
        )
    return remedy


def growing_tensor(facts: Facts) -> Cause | None:
    """One tensor that a longer one replaces in each step, as ``torch.cat([history, new])`` does."""
    starts = _beginnings_of_steps(facts)
    if len(starts) <= OLD_STEPS:
        return None
    rises = [after.live > before.live for before, after in pairwise(starts)]
    growth = starts[-1].live - starts[0].live
    if sum(rises) < ALMOST_ALL * len(rises) or growth < WORTH * facts.peak.total:
        return None
    survivors = []
    for holder in facts.at_peak:
        # A batch is made before the step that it belongs to, but it is no sum of earlier ones.
        joined = holder.op == "aten.cat" and not belongs_to_training(holder)
        survived = facts.time_of(holder) == facts.peak_time - 1
        if joined and survived and holder.nbytes >= growth // 2:
            survivors.append(holder)
    if not survivors:
        return None
    old = max(survivors, key=lambda holder: holder.nbytes)
    holders = [old]
    for holder in facts.at_peak:
        same = (holder.line, holder.op, holder.dtype) == (old.line, old.op, old.dtype)
        if same and facts.time_of(holder) == facts.peak_time and holder.nbytes > old.nbytes:
            holders.append(holder)  # the longer one, which is being made
    evidence = (
        f"{format_bytes(total(holders))} at the peak are a tensor that becomes longer in each "
        f"{facts.unit}: {in_words(holders[-1])}. {format_bytes(starts[0].live)} were live when the "
        f"second {facts.unit} began, and {format_bytes(starts[-1].live)} when the peak's began."
    )
    remedy = (
        "keep only numbers of it, or put the pieces into a list off the card, "
        "history.append(x.detach().cpu()), and join them once at the end."
    )
    return Cause(GROWTH, total(holders), evidence, remedy, lines_of(holders))


def _beginnings_of_steps(facts: Facts) -> list[Turn]:
    """The first turn of each step from the second step on, until the peak. The first step makes
    the optimizer's states.
    """
    starts: list[Turn] = []
    for turn in facts.turns:
        by_step = facts.has_optimizer
        new = not starts or not by_step or turn.step > starts[-1].step
        if turn.number <= facts.peak.turn and new and (turn.step > 0 or not by_step):
            starts.append(turn)
    return starts


def evaluation_results(facts: Facts) -> Cause | None:
    """Results that an evaluation collects on the device."""
    passes, collected, cache = _kept_by_evaluation(facts)
    if not passes or total(cache) > total(collected):
        return None
    nbytes, each = total(collected), _growth(passes) // (len(passes) - 2)
    evidence = (
        f"{format_bytes(nbytes)} at the peak are results that forwards without gradients have made,"
        f" about {format_bytes(each)} more after each forward."
    )
    remedy = (
        "move each result off the card, or keep less of it: outputs.cpu() or outputs.argmax(-1) in "
        "your own loop. In a Trainer: preprocess_logits_for_metrics=lambda logits, labels: "
        "logits.argmax(-1), or TrainingArguments(eval_accumulation_steps=1), or "
        "prediction_loss_only=True if no metric needs the logits. A smaller batch does not help."
    )
    name = "An evaluation collects its results"
    in_a_list = min(Counter(map(_kind, collected)).values()) >= FORWARDS_IN_A_ROW
    growing = tuple(collected) if in_a_list else ()
    return Cause(name, nbytes, evidence, remedy, lines_of(collected), growing)


def results_in_training(facts: Facts) -> Cause | None:
    """Results of forwards without gradients that are still there in the training's own peak."""
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP):
        return None
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in facts.at_peak:
        if holder.made_in == EVALUATION and holder.category == "temporaries":
            kinds[_kind(holder)].append(holder)
    left, nbytes = [], 0
    for kind in kinds.values():
        left += kind
        nbytes += total(kind)
        if len(kind) >= MANY:
            nbytes -= kind[0].nbytes  # the last one may be in use, and all are equally large
    if nbytes < DOMINATES * facts.peak.total:
        return None
    words = list(dict.fromkeys(in_words(holder) for holder in left))
    evidence = (
        f"{format_bytes(nbytes)} at the peak are {len(left)} results of forwards without gradients:"
        f" {'; '.join(words[:LINES])}."
    )
    remedy = (
        "keep less of each: outputs.argmax(-1), or of log-probabilities those of the chosen tokens "
        "alone; and `del` the rest before the training goes on. What a loss needs later can wait "
        "off the card (outputs.cpu()), or be computed for one micro-batch at a time."
    )
    return Cause(
        "Results of an evaluation stay during the training",
        nbytes,
        evidence,
        remedy,
        lines_of(left),
    )


def generation_cache(facts: Facts) -> Cause | None:
    """Keys and values that a generation keeps for each token."""
    passes, collected, cache = _kept_by_evaluation(facts)
    if not passes or total(cache) <= total(collected):
        return None
    nbytes = total(cache)
    evidence = (
        f"{format_bytes(nbytes)} at the peak were made in the layers, by forwards without "
        "gradients, and they grow with each forward."
    )
    remedy = (
        "generate for fewer rows at a time, or fewer tokens (max_new_tokens): the bytes are "
        "proportional to both."
    )
    return Cause(
        "Generation keeps keys and values", nbytes, evidence, remedy, lines_of_forwards(passes[-1:])
    )


def waiting_data(facts: Facts) -> Cause | None:
    """A data set, a replay buffer or a row of batches on the device."""
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in facts.at_peak:
        if holder.category == "other" and holder.op and not facts.of_another_model(holder):
            kinds[holder.line, holder.op, holder.shape, holder.dtype].append(holder)
    waiting: list[Holder] = []
    for kind in kinds.values():
        is_taken_from = kind[0].op == READ_IN_PARTS
        times = {facts.time_of(holder) for holder in kind}
        wait = len(times) == 1 and max(times) < facts.peak_time and len(kind) > MANY
        filled_long_ago = kind[0].op in FILLED and max(times) < facts.peak_time - 1
        if is_taken_from or wait or filled_long_ago:
            waiting += kind
    nbytes = total(waiting)
    if nbytes < DOMINATES * facts.peak.total:
        return None
    words = list(dict.fromkeys(in_words(holder) for holder in waiting))
    evidence = (
        f"{format_bytes(nbytes)} at the peak are {len(waiting)} tensors from which batches are "
        f"taken, or which wait to be used: {'; '.join(words[:LINES])}."
    )
    remedy = (
        "keep the data set (or the replay buffer, or the prefetched batches) off the card, and move"
        " one batch at a time: data[indices].to(device)."
    )
    return Cause("Data waits on the device", nbytes, evidence, remedy, lines_of(waiting))


def _growing_evaluation(facts: Facts) -> list[ForwardPass]:
    """Forwards without gradients, one after another, where after each of them more was live: those
    of the peak's step that came nearest to the peak.

    Empty if the peak is not theirs.
    """
    if not facts.outside_of_training:
        return []
    passes = [p for p in facts.of_models if not p.with_grad and p.step == facts.peak.step]
    passes = [p for p in passes if p.peak <= facts.peak.total]  # not from before a reset_peak()
    rows: list[list[ForwardPass]] = []
    for done in passes:
        previous = rows[-1][-1] if rows else None
        grows = previous is not None and done.live_before > previous.live_before
        if previous is not None and grows and done.number == previous.number:
            rows[-1].append(done)
        else:
            rows.append([done])
    long_rows = [row for row in rows if len(row) >= FORWARDS_IN_A_ROW]
    return max(long_rows, key=lambda row: row[-1].peak, default=[])


def _growth(passes: list[ForwardPass]) -> int:
    """How many bytes more were live before the last forward than before the second one.

    What one forward leaves (a variable that the next one overwrites) is there from the second on.
    """
    return passes[-1].live_before - passes[1].live_before


def _kept_by_evaluation(
    facts: Facts,
) -> tuple[list[ForwardPass], list[Holder], list[Holder]]:
    """The forwards of an evaluation in which bytes grow, the results that it has collected, and
    what its layers keep. The forwards are empty if they keep too little to matter.

    A list of results has one of the same kind from each forward. Keys and values are replaced by
    longer ones: there are only a few of a kind, and a module has made them.
    """
    passes = _growing_evaluation(facts)
    if len(passes) < FORWARDS_IN_A_ROW or _growth(passes) < WORTH * facts.peak.total:
        return [], [], []
    made, of_a_kind = [], Counter[tuple]()
    for holder in facts.at_peak:
        if holder.step == facts.peak.step and not belongs_to_training(holder):
            made.append(holder)
            of_a_kind[_kind(holder)] += 1
    collected, cache = [], []
    for holder in made:
        in_a_list = of_a_kind[_kind(holder)] >= FORWARDS_IN_A_ROW
        if in_a_list or not holder.module:
            collected.append(holder)
        else:
            cache.append(holder)
    # Most of what one forward needs for itself is gone when the next one begins.
    if _growth(passes) < max(total(collected), total(cache)) // 4:
        return [], [], []
    return passes, collected, cache


def _kind(holder: Holder) -> tuple:
    return holder.module, holder.op, holder.shape, holder.dtype
