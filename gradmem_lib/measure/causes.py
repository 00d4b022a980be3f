"""Why a run needs as much memory as it does: one function for each cause, in the order in which
they are looked for.

Each function reads the facts of a run, and returns a ``Cause`` with its evidence, or ``None``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..units import format_bytes
from .facts import (
    BETWEEN_STEPS,
    EVALUATION,
    IN_BACKWARD,
    IN_OPTIMIZER_STEP,
    LOSS,
    TRAINING_FORWARD,
    Facts,
    total,
)
from .source_lines import SourceLine
from .timeline import ForwardPass, Holder

WORTH = 0.02  # of the peak; less is no reason to change a script
# Bytes that grow by this part of the peak double it in a thousand steps.
GROWS = 0.001
DOMINATES = 0.25  # of the peak
ALMOST_ALL = 0.9
LINES = 3  # that are shown
LATE = 0.75  # if bytes grow until a run's end, its peak is in the last quarter of its steps
OLD_STEPS = 3  # a tensor of the last two steps may be a variable that is not overwritten yet
FORWARDS_IN_A_ROW = 3


@dataclass(frozen=True)
class Cause:
    """``name``, and the ``evidence`` for it in words; ``nbytes`` at the peak that the ``remedy``
    takes away; ``lines``: the user's lines that made them, the largest first.
    """

    name: str
    nbytes: int
    evidence: str
    remedy: str
    lines: tuple[SourceLine, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.evidence}"]
        lines += [f"  at {line}" for line in self.lines[:LINES]]
        lines.append(f"  Remedy: {self.remedy}")
        return "\n".join(lines)


def find_causes(facts: Facts) -> list[Cause]:
    """The causes that the facts show, in the order of ``CAUSES``."""
    if not facts.peak.total:
        return []
    found = []
    for find in CAUSES:
        cause = find(facts)
        if cause is not None:
            found.append(cause)
    return found


# Bytes that stay


def growing_bytes(facts: Facts) -> Cause | None:
    """Tensors of the same kind from many earlier steps: losses, outputs, metrics, kept graphs."""
    if facts.peak.step < LATE * (facts.steps - 1):
        return None  # later steps did not need more
    kinds = defaultdict(list)
    for holder in facts.at_peak:
        if 0 <= holder.step < facts.peak.step and not _belongs_to_training(holder):
            kinds[holder.line, holder.op, holder.shape, holder.dtype].append(holder)
    growing = [kind for kind in kinds.values() if _since_the_first_steps(kind)]
    holders = [holder for kind in growing for holder in kind]
    nbytes = total(holders)
    if not holders:
        return None
    steps = {holder.step for holder in holders}
    each = nbytes // len(steps)
    if nbytes < WORTH * facts.peak.total and each < GROWS * facts.peak.total:
        return None
    kinds_in_words = [_in_words(kind[0]) for kind in sorted(growing, key=lambda k: -total(k))]
    more = f" and {len(kinds_in_words) - LINES} more" if len(kinds_in_words) > LINES else ""
    evidence = (
        f"{format_bytes(nbytes)} at the peak were made in {len(steps)} earlier steps, about "
        f"{format_bytes(each)} a step: {'; '.join(kinds_in_words[:LINES])}{more}."
    )
    remedy = (
        "something of each step is kept, such as a list of losses, outputs or metrics, or a sum of "
        "losses. Keep numbers instead of tensors: loss.item(), or tensor.detach().cpu() for what "
        "has to stay a tensor."
    )
    if any(_larger_than_its_tensor(holder) for holder in holders):
        remedy += (
            " A loss of one number can lie in a storage as large as the tensor that it was computed"
            " from, and .detach() keeps this storage: use .item()."
        )
    return Cause("Bytes grow from step to step", nbytes, evidence, remedy, _lines(holders))


def evaluation_results(facts: Facts) -> Cause | None:
    """Results that an evaluation collects on the device."""
    passes, collected, cache = _kept_by_evaluation(facts)
    if not passes or total(cache) > total(collected):
        return None
    nbytes, each = total(collected), _growth(passes) // (len(passes) - 1)
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
    return Cause("An evaluation collects its results", nbytes, evidence, remedy, _lines(collected))


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
        "Generation keeps keys and values", nbytes, evidence, remedy, _lines_of(passes[-1:])
    )


# Graphs


def unused_forward(facts: Facts) -> Cause | None:
    """A forward that records gradients, though no backward goes through it."""
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, BETWEEN_STEPS):
        return None
    unused, others = [], []
    for done in facts.forwards:
        has_unused_graph = done.has_graph and not done.used
        if has_unused_graph and _no_backward_will_come(done, facts):
            unused.append(done)
        else:
            others.append(done)
    # What was made before the first call in the list belongs to earlier ones of a long evaluation.
    nbytes = facts.peak.by_category["activations"] - sum(p.kept_at_peak for p in others)
    of_this_step = [p for p in unused if p.step == facts.peak.step]
    at_the_peak = [p for p in of_this_step if p.peak >= ALMOST_ALL * facts.peak.total]
    if not at_the_peak or nbytes < WORTH * facts.peak.total:
        return None
    # A loss is no forward of its own, unless it is all that there is.
    blamed = [p for p in at_the_peak if p.has_weights] or at_the_peak
    evidence = (
        f"{format_bytes(nbytes)} of activations at the peak are kept for a backward that never "
        f"comes: {len(blamed)} forward{'s' * (len(blamed) > 1)} recorded gradients, and nothing "
        "used them."
    )
    remedy = (
        "put the evaluation, sampling or metric under torch.no_grad() (with torch.no_grad(): "
        "around the loop, or @torch.no_grad() above the function). model.eval() does not do this."
    )
    return Cause("A forward's graph is never used", nbytes, evidence, remedy, _lines_of(blamed))


def several_graphs(facts: Facts) -> Cause | None:
    """Losses that are added up over several forwards, and one backward for all of them."""
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD):
        return None
    passes = _alive_together(facts)
    if len(passes) < FORWARDS_IN_A_ROW:
        return None
    each = (passes[-1].live_before - passes[0].live_before) // (len(passes) - 1)
    nbytes = each * (len(passes) - 1)
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"the graphs of {len(passes)} forwards of one step are alive at once, about "
        f"{format_bytes(each)} each."
    )
    remedy = (
        "call backward after each forward, (loss / n).backward() for n of them, and step the "
        "optimizer after the last: the gradients add up by themselves. (If one loss compares the "
        "outputs of all these forwards, this is not possible.)"
    )
    return Cause(
        "Losses are added up before one backward", nbytes, evidence, remedy, _lines_of(passes[-1:])
    )


# Copies


def copy_in_another_module(facts: Facts) -> Cause | None:
    """Parameters of another module, with the shapes of the tracked model's."""
    copies = [c for c in _copies(facts) if facts.of_another_model(c[0])]
    remedy = (
        "for an EMA, keep the averaged weights on the host (.to('cpu')). For a reference model or "
        "a teacher, compute its outputs once before the training (precompute_ref_log_probs=True in "
        "trl), or train with LoRA, where the model without its adapters is the reference."
    )
    return _copied(copies, facts, "parameters of a module that is not the tracked one", remedy)


def loaded_copy(facts: Facts) -> Cause | None:
    """A loaded checkpoint that stays alive after resume."""
    copies = [c for c in _copies(facts) if c[0].step < 0 and not facts.of_another_model(c[0])]
    remedy = (
        "if this is a loaded checkpoint, load it to the host (torch.load(..., "
        "map_location='cpu')), and `del` it after load_state_dict."
    )
    return _copied(copies, facts, "tensors that were there before this run read them", remedy)


def copy_made_here(facts: Facts) -> Cause | None:
    """A deepcopy, a clone of the state dict, an EMA's store(), a merge."""
    copies = [c for c in _copies(facts) if c[0].step >= 0 and not facts.of_another_model(c[0])]
    remedy = (
        "copy to the host (parameter.detach().cpu()), and `del` the copy as soon as it is written "
        "or restored. A deepcopy, a clone of the state dict, the store() of an EMA and a merge all "
        "hold the weights twice."
    )
    return _copied(copies, facts, "made in the tracked run and still alive", remedy)


def second_model(facts: Facts) -> Cause | None:
    """Parameters of a module that is not the tracked one, with other shapes."""
    if facts.structure is None or not facts.structure.shapes:
        return None
    copied = {id(holder) for copy in _copies(facts) for holder in copy}
    holders = []
    for holder in facts.at_peak:
        foreign = facts.of_another_model(holder) and holder.category == "other"
        if foreign and id(holder) not in copied:
            holders.append(holder)
    nbytes = total(holders)
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak are {len(holders)} parameters of modules that are not "
        "in the tracked model."
    )
    remedy = (
        "compute the second model's outputs once before the training, and free it; or load it in a "
        "narrower dtype (dtype=torch.bfloat16), which halves float32 weights."
    )
    return Cause("A second model is in memory", nbytes, evidence, remedy, _lines(holders))


# States and weights


def first_optimizer_step(facts: Facts) -> Cause | None:
    """The optimizer makes its states at the peak."""
    if facts.peak.moment != IN_OPTIMIZER_STEP:
        return None
    states = []
    for holder in facts.at_peak:
        existed = not holder.op  # an optimizer had it when the block began
        if holder.step == facts.peak.step and is_state(holder, facts) and not existed:
            states.append(holder)
    nbytes = total(states)
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} of optimizer states are made in this step, and stay: the forwards "
        "before it ran without them."
    )
    remedy = (
        "SGD keeps no states, and SGD with momentum one number a parameter, where Adam keeps two. "
        "8-bit states (optim='adamw_8bit') and factored ones (Adafactor) keep less, and LoRA trains"
        " fewer parameters. A smaller batch and checkpointing do not change this."
    )
    return Cause("The first optimizer step makes its states", nbytes, evidence, remedy)


def is_state(holder: Holder, facts: Facts) -> bool:
    """Whether it is an optimizer's state, or zeros that will be one."""
    if holder.category == "optimizer":
        return True
    if facts.structure is None or facts.peak.moment != IN_OPTIMIZER_STEP:
        return False
    zeros = holder.category == "temporaries" and "zeros" in holder.op
    return zeros and holder.shape in facts.structure.shapes.values()


def wide_weights(facts: Facts) -> Cause | None:
    """Weights in float64, or frozen ones in float32."""
    if facts.structure is None:
        return None
    double, frozen = 0, 0
    for holder in facts.at_peak:
        dtype = facts.structure.dtypes.get(holder.module)
        if holder.category != "parameters":
            continue
        if dtype is torch.float64:
            double += holder.nbytes
        elif dtype is torch.float32 and holder.module not in facts.structure.trained:
            frozen += holder.nbytes
    if double >= WORTH * facts.peak.total:
        evidence = f"{format_bytes(double)} of weights are in float64."
        remedy = f"model.float() halves them, to {format_bytes(double // 2)}, and all that follows."
        return Cause("Weights are wider than needed", double // 2, evidence, remedy)
    if frozen < DOMINATES * facts.peak.total:
        return None
    evidence = f"{format_bytes(frozen)} of frozen weights are in float32."
    remedy = (
        "a frozen weight is never updated, so bf16 rounds it only once: load the model with "
        f"dtype=torch.bfloat16, which leaves {format_bytes(frozen // 2)} of these bytes."
    )
    return Cause("Weights are wider than needed", frozen // 2, evidence, remedy)


# One kind of tensor


def large_logits(facts: Facts) -> Cause | None:
    """Logits: a number for each token of each row and each entry of the vocabulary."""
    logits = [h for h in facts.at_peak if facts.is_logits(h)]
    nbytes = total(logits)
    if nbytes < DOMINATES * facts.peak.total or facts.outside_of_training:
        return None
    dtypes = Counter(_dtype(h) for h in logits)
    copies = ", ".join(f"{n} in {dtype}" for dtype, n in dtypes.most_common())
    evidence = (
        f"{format_bytes(nbytes)} at the peak are logits, their copies and their gradients "
        f"({copies}), with {logits[0].shape[-1]:,} numbers for each token."
    )
    remedy = (
        "compute the loss in chunks of tokens, so that the logits of all tokens never exist at "
        "once: Recipe(chunked_loss=True) for a causal language model. A loss of your own can be "
        "computed in chunks if it is a sum over tokens, each chunk under "
        "torch.utils.checkpoint.checkpoint."
    )
    return Cause("The logits are the largest part", nbytes, evidence, remedy, _lines(logits))


def eager_scores(facts: Facts) -> Cause | None:
    """Attention scores, with a number for each pair of tokens."""
    # The lengths of sequences. Without them, a square image would look like scores.
    tokens = {
        h.shape[-2] for h in facts.at_peak if len(h.shape) >= 2 and h.shape[-1] != h.shape[-2]
    }
    shapes = set()
    for holder in facts.at_peak:
        square = len(holder.shape) >= 3 and holder.shape[-1] == holder.shape[-2]
        if square and "softmax" in holder.op and holder.shape[-1] in tokens:
            shapes.add(holder.shape[-2:])
    scores = [
        h
        for h in facts.at_peak
        if len(h.shape) >= 3
        and h.shape[-2:] in shapes
        and h.category in ("activations", "temporaries")
    ]
    nbytes = total(scores)
    if not scores or nbytes < DOMINATES * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak are attention scores and what is computed from them "
        f"({len(scores)} tensors with {scores[0].shape[-1]:,} × {scores[0].shape[-1]:,} numbers "
        "for each head of each row)."
    )
    remedy = (
        "use attention that never stores the scores: from_pretrained(..., "
        "attn_implementation='sdpa'), or F.scaled_dot_product_attention in your own module."
    )
    return Cause("Attention stores its scores", nbytes, evidence, remedy, _lines(scores))


# Switches without an effect


def idle_checkpoints(facts: Facts) -> Cause | None:
    """Checkpointing is switched on, and nothing was recomputed."""
    if facts.structure is None:
        return None
    checkpoints = facts.structure.checkpoints
    if not checkpoints.switched_on or facts.recomputed or not facts.had_backward:
        return None
    nbytes = total(h for h in facts.at_peak if h.category == "activations" and facts.in_layers(h))
    trained_layers = any(facts.structure.in_layers(name) for name in facts.structure.trained)
    # The reentrant method then runs the layers without gradients: they keep nothing, and learn
    # nothing.
    cut_off = bool(checkpoints.reentrant and checkpoints.training and trained_layers)
    if nbytes < WORTH * facts.peak.total and not cut_off:
        return None
    evidence = (
        f"it is switched on in {len(checkpoints.switched_on)} modules, but no backward has "
        f"recomputed anything; {format_bytes(nbytes)} of activations in the layers are kept."
    )
    if not checkpoints.training:
        remedy = "these modules are in eval mode, where it is not used: call model.train()."
    elif cut_off:
        remedy = (
            "the reentrant method needs an input with a gradient, and the layers' input is frozen, "
            "so the layers get no gradients and learn nothing: set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or call "
            "model.enable_input_require_grads()."
        )
    elif not trained_layers:
        remedy = "no layer is trained, so nothing is recomputed: freeze less, or switch it off."
    else:
        remedy = (
            "the model's forward does not use the switch, or does not call these modules: give "
            "checkpoint_layers the list that forward loops over."
        )
    return Cause("Checkpointing is on and does nothing", nbytes, evidence, remedy)


def evaluation_batch(facts: Facts) -> Cause | None:
    """A forward without gradients is the peak by itself, and nothing grows."""
    if facts.peak.moment != EVALUATION:
        return None
    passes = [p for p in facts.forwards if not p.with_grad and p.step == facts.peak.step]
    largest = max(passes, key=lambda p: p.peak, default=None)
    if largest is None or largest.peak < facts.peak.total:
        return None
    nbytes = largest.peak - largest.live_before
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"one forward without gradients needs {format_bytes(nbytes)}, on top of the "
        f"{format_bytes(largest.live_before)} that were live before it."
    )
    remedy = (
        "give the evaluation a smaller batch: per_device_eval_batch_size in a Trainer. The "
        "training's own batch does not change this."
    )
    return Cause("An evaluation is the peak", nbytes, evidence, remedy, _lines_of([largest]))


CAUSES: tuple[Callable[[Facts], Cause | None], ...] = (
    growing_bytes,
    evaluation_results,
    generation_cache,
    unused_forward,
    several_graphs,
    copy_in_another_module,
    loaded_copy,
    copy_made_here,
    second_model,
    idle_checkpoints,
    first_optimizer_step,
    wide_weights,
    eager_scores,
    large_logits,
    evaluation_batch,
)


# How they reason


def _belongs_to_training(holder: Holder) -> bool:
    return holder.category in ("parameters", "gradients", "optimizer")


def _since_the_first_steps(holders: list[Holder]) -> bool:
    """Whether they come from several steps, the first ones included.

    The last n of something (a window for an average) do not grow for ever: the first ones are gone.
    """
    steps = sorted({holder.step for holder in holders})
    if len(steps) < OLD_STEPS:
        return False
    between = max(after - before for before, after in pairwise(steps))
    return steps[0] <= between


def _larger_than_its_tensor(holder: Holder) -> bool:
    if holder.dtype is None or holder.shape != ():
        return False
    return holder.nbytes > 8 * holder.dtype.itemsize


def _of_models(facts: Facts) -> list[ForwardPass]:
    """The forwards without those of losses and other modules that have no weights."""
    return [done for done in facts.forwards if done.has_weights]


def _growing_evaluation(facts: Facts) -> list[ForwardPass]:
    """Forwards without gradients, one after another, where after each of them more was live: those
    of the peak's step that came nearest to the peak.

    Empty if the peak is not theirs.
    """
    if not facts.outside_of_training:
        return []
    passes = [p for p in _of_models(facts) if not p.with_grad and p.step == facts.peak.step]
    passes = [p for p in passes if p.peak <= facts.peak.total]  # not from before a reset_peak()
    rows: list[list[ForwardPass]] = []
    for done in passes:
        previous = rows[-1][-1] if rows else None
        grows = previous is not None and done.live_before > previous.live_before
        if previous is not None and grows and done.module == previous.module:
            rows[-1].append(done)
        else:
            rows.append([done])
    long_rows = [row for row in rows if len(row) >= FORWARDS_IN_A_ROW]
    return max(long_rows, key=lambda row: row[-1].peak, default=[])


def _growth(passes: list[ForwardPass]) -> int:
    return passes[-1].live_before - passes[0].live_before


def _kept_by_evaluation(
    facts: Facts,
) -> tuple[list[ForwardPass], list[Holder], list[Holder]]:
    """The forwards of an evaluation in which bytes grow, the results that it has collected, and
    what its layers keep. The forwards are empty if they keep too little to matter.

    A list of results has one of the same kind from each forward. Keys and values are replaced by
    longer ones: there are only a few of a kind, and a layer has made them.
    """
    passes = _growing_evaluation(facts)
    if not passes or _growth(passes) < WORTH * facts.peak.total:
        return [], [], []
    made, of_a_kind = [], Counter[tuple]()
    for holder in facts.at_peak:
        if holder.step == facts.peak.step and not _belongs_to_training(holder):
            made.append(holder)
            of_a_kind[_kind(holder)] += 1
    collected, cache = [], []
    for holder in made:
        in_a_list = of_a_kind[_kind(holder)] >= FORWARDS_IN_A_ROW
        if in_a_list or not facts.in_layers(holder):
            collected.append(holder)
        else:
            cache.append(holder)
    # Most of what one forward needs for itself is gone when the next one begins.
    if _growth(passes) < max(total(collected), total(cache)) // 4:
        return [], [], []
    return passes, collected, cache


def _kind(holder: Holder) -> tuple:
    return holder.module, holder.op, holder.shape, holder.dtype


def _no_backward_will_come(done: ForwardPass, facts: Facts) -> bool:
    """Whether it is known that no backward goes through this forward."""
    if done.step < facts.steps:
        return True  # the optimizer has stepped since then
    # Another call of this line was never used, or there is no training at all.
    same_line = [p for p in facts.forwards if p.line == done.line and p.has_graph and p is not done]
    never_used_before = any(p.step < facts.steps and not p.used for p in same_line)
    trains = facts.had_backward or facts.had_optimizer_step
    return never_used_before or (bool(same_line) and not trains)


def _alive_together(facts: Facts) -> list[ForwardPass]:
    """Forwards of one line in the peak's step, whose graphs were all alive after the last one."""
    together: list[ForwardPass] = []
    for done in _of_models(facts):
        is_last = done is facts.forwards[-1]  # it may run now, with a graph that is not finished
        if done.step != facts.peak.step or not (done.has_graph or is_last):
            continue
        if done.chained:
            return []  # it continues the one before
        previous = together[-1] if together else None
        if previous is not None and done.line == previous.line:
            kept = previous.live_after - previous.live_before
            if done.live_before >= previous.live_before + kept // 2:
                together.append(done)
                continue
        if len(together) >= FORWARDS_IN_A_ROW:
            break
        together = [done]
    return together


def _copies(facts: Facts) -> list[list[Holder]]:
    """Groups of tensors with the shapes of all parameters, each made by one line in one step.

    The parameters of another model, whose layers have a line each, are one group.
    """
    if facts.structure is None or not facts.structure.shapes:
        return []
    groups = defaultdict[Any, list[Holder]](list)
    for holder in facts.at_peak:
        if holder.category != "other":
            continue
        if holder.module in facts.untrained:
            groups["another model"].append(holder)
        else:
            groups[holder.line, holder.step, facts.of_another_model(holder)].append(holder)
    copies = []
    for group in groups.values():
        rest = group
        while copy := _with_shapes_of_the_model(rest, facts):
            copies.append(copy)
            in_copy = set(map(id, copy))
            rest = [holder for holder in rest if id(holder) not in in_copy]
    return copies


def _copied(copies: list[list[Holder]], facts: Facts, words: str, remedy: str) -> Cause | None:
    holders = [holder for copy in copies for holder in copy]
    nbytes = total(holders)
    if nbytes < WORTH * facts.peak.total:
        return None
    how_many = "a second copy" if len(copies) == 1 else f"{len(copies)} more copies"
    evidence = f"{format_bytes(nbytes)} at the peak are {how_many} of the model's weights, {words}."
    return Cause("The weights are there more than once", nbytes, evidence, remedy, _lines(holders))


def _with_shapes_of_the_model(holders: list[Holder], facts: Facts) -> list[Holder]:
    """Those of ``holders`` that have the shapes of the model's parameters, one for each.

    Empty if more than a tenth of the parameters' numbers has none.
    """
    missing = Counter(facts.structure.shapes.values())
    everything = sum(_numel(shape) * n for shape, n in missing.items())
    found, numbers = [], 0
    for holder in holders:
        if missing[holder.shape] > 0:
            missing[holder.shape] -= 1
            numbers += _numel(holder.shape)
            found.append(holder)
    return found if numbers >= ALMOST_ALL * everything else []


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


# Words


def _dtype(holder: Holder) -> str:
    return str(holder.dtype).removeprefix("torch.")


def _in_words(holder: Holder) -> str:
    shape = " × ".join(map(str, holder.shape)) or "one number"
    words = f"{_dtype(holder)} {shape}"
    if _larger_than_its_tensor(holder):
        words += f" in a storage of {format_bytes(holder.nbytes)}"
    operation = holder.op.removeprefix("aten.")
    return f"{words} ({operation})" if operation else words


def _lines(holders: Iterable[Holder]) -> tuple[SourceLine, ...]:
    """The lines that made ``holders``, those with the most bytes first."""
    nbytes = Counter[SourceLine]()
    for holder in holders:
        if holder.line is not None:
            nbytes[holder.line] += holder.nbytes
    return tuple(line for line, _ in nbytes.most_common())


def _lines_of(passes: Iterable[ForwardPass]) -> tuple[SourceLine, ...]:
    return tuple(dict.fromkeys(done.line for done in passes if done.line is not None))
