"""Causes: one kind of tensor that is larger than all others."""

from __future__ import annotations

from collections import Counter

from ..compat.operators import SOFTMAX_OF_SDPA
from ..units import format_bytes
from .cause import (
    DOMINATES,
    FILLED,
    IN_PIECES,
    Cause,
    dtype_of,
    in_words,
    lines_of,
    numel,
    pieces_of,
)
from .causes_of_gradients import gradients_of_rows
from .facts import BETWEEN_STEPS, Facts, total
from .timeline import Holder

# What computes the same without a large tensor, by the operations that make one.
INSTEAD = (
    (
        FILLED,
        "F.cross_entropy takes class numbers in place of one-hot targets, and scores.gather(1, "
        "labels[:, None]) picks what a one-hot mask selects. Zeros that are filled piece by piece, "
        "such as the scores of a whole image, can be off the card: torch.zeros(..., "
        "device='cpu').",
    ),
    (("im2col",), "F.conv2d computes a convolution without the patches that F.unfold makes."),
    (
        ("aten.index", "aten.gather"),
        "Messages along the edges of a graph are summed up by a sparse matrix: "
        "torch.sparse.mm(adjacency, x).",
    ),
    (
        ("upsample",),
        "The loss of upsampled scores can be computed at the smaller size, with labels[..., ::4, "
        "::4] for a factor of 4, or for one image at a time.",
    ),
)
# Operations that can repeat rows. repeat_interleave is an index_select, or the clone of an expanded
# view.
REPEATS = ("aten.repeat", "aten.clone", "aten.index_select", "aten.index.Tensor")
IN_GENERAL = (
    "Often an operation does it without the large tensor: torch.cdist for distances (without the "
    "differences of all pairs in each feature), F.cross_entropy with class numbers for one-hot "
    "targets, is_causal=True or a mask of (1, 1, tokens, tokens) for attention."
)


def large_logits(facts: Facts) -> Cause | None:
    """Logits: a number for each token of each row and each entry of the vocabulary."""
    logits = []
    for holder in facts.at_peak:
        # Older logits are outputs that something has kept: no loss needs them any more.
        is_in_use = facts.time_of(holder) >= facts.peak_time - 1
        if is_in_use and facts.is_logits(holder):
            logits.append(holder)
    nbytes = total(logits)
    if nbytes < DOMINATES * facts.peak.total or facts.outside_of_training:
        return None
    dtypes = Counter(dtype_of(h) for h in logits)
    copies = ", ".join(f"{n} in {dtype}" for dtype, n in dtypes.most_common())
    evidence = (
        f"{format_bytes(nbytes)} at the peak are logits, their copies and their gradients "
        f"({copies}), with {logits[0].shape[-1]:,} numbers for each token."
    )
    if facts.loss_of_whole_rows:
        remedy = (
            "this loss (CTC) needs all frames of a row at once, but each row for itself: compute "
            "the head and the loss for a few rows at a time, each under "
            "torch.utils.checkpoint.checkpoint, with reduction='sum' and divided by all rows."
        )
    else:
        remedy = (
            "compute the loss in chunks of tokens, so that the logits of all tokens never exist at "
            "once: Recipe(chunked_loss=True) for a causal language model. A loss of your own can "
            "be computed in chunks if it is a sum over tokens, each chunk under "
            "torch.utils.checkpoint.checkpoint."
        )
    name = "The logits are the largest part"
    lines = lines_of(logits)
    # Each piece makes a gradient of the whole head, and autograd adds it to the sum of the earlier
    # ones: this sum, the new gradient and the new sum are there at once.
    stays = min(pieces_of(nbytes) + 3 * _gradient_of_the_head(logits, facts), nbytes)
    return Cause(name, nbytes, evidence, remedy, lines, logits, stays=stays, condition=IN_PIECES)


def _gradient_of_the_head(logits: list[Holder], facts: Facts) -> int:
    """The bytes of the gradient of the matrix that makes the logits, if it is trained."""
    outputs = {holder.shape[-1] for holder in logits}
    largest = 0
    for name in facts.trained:
        shape = facts.structure.shapes[name]
        if len(shape) == 2 and outputs & set(shape):
            largest = max(largest, numel(shape) * facts.structure.dtypes[name].itemsize)
    return largest


def scores_of_positions(facts: Facts) -> Cause | None:
    """Scores of each pixel, as in segmentation: a number for each class, (rows, classes, ...)."""
    if facts.structure is None or not facts.structure.maps or facts.outside_of_training:
        return None
    scores = []
    # Whether a cross-entropy over the second dimension was computed from them. It sums over
    # positions, which a CTC loss and a softmax over the positions do not.
    of_a_loss = False
    for holder in (*facts.at_peak, *facts.others):
        shape = holder.shape
        is_map = len(shape) >= 3 and shape[1] in facts.structure.maps
        if not is_map or facts.time_of(holder) < facts.peak_time - 1:
            continue
        if "upsample" in holder.op:
            return None  # a piece of enlarged scores needs scores around it
        if "nll_loss2d" in holder.op:
            of_a_loss = True
    for holder in facts.at_peak:
        is_map = len(holder.shape) >= 3 and holder.shape[1] in facts.structure.maps
        is_in_use = facts.time_of(holder) >= facts.peak_time - 1
        if is_map and is_in_use and holder.category in ("activations", "temporaries"):
            scores.append(holder)
    nbytes = total(scores)
    if not of_a_loss or not scores or nbytes < DOMINATES * facts.peak.total:
        return None
    largest = max(scores, key=lambda holder: holder.nbytes)
    classes = largest.shape[1]
    evidence = (
        f"{format_bytes(nbytes)} at the peak are scores, what is computed from them and their "
        f"gradients, with {classes:,} numbers for each position (pixel)."
    )
    remedy = (
        "the last convolution has size 1, so compute it and the loss for a few lines of pixels at "
        "a time: loss_of(features[:, :, rows], labels[:, rows]) under "
        "torch.utils.checkpoint.checkpoint, with reduction='sum' and divided by the number of all "
        "labels. A loss of your own can be computed so if it is a sum over pixels."
    )
    # Each piece makes a gradient of all features and of the head: the sum of earlier ones, this
    # gradient and the new sum are there at once.
    inputs = facts.structure.maps[classes]
    features = largest.nbytes // classes * inputs
    width = 4 if largest.dtype is None else largest.dtype.itemsize
    head = (inputs + 1) * classes * width
    stays = min(pieces_of(nbytes) + 3 * (features + head), nbytes)
    name = "The scores of all positions are the largest part"
    lines = lines_of(scores)
    return Cause(name, nbytes, evidence, remedy, lines, scores, stays=stays, condition=IN_PIECES)


def repeated_rows(facts: Facts) -> Cause | None:
    """A batch in which each row is there several times, such as a context for many samples."""
    for repeated in facts.at_peak:
        is_data = repeated.category == "other" and not repeated.computed_from
        if not is_data or not any(name in repeated.op for name in REPEATS):
            continue
        for original in facts.at_peak:
            times = _times_repeated(original, repeated)
            if times < 2:
                continue
            cause = _cause_of_repetition(original, times, repeated, facts)
            if cause is not None:
                return cause
    return None


def _times_repeated(original: Holder, repeated: Holder) -> int:
    """How often each row of ``original`` is in ``repeated``; 0 if it is no repetition of it."""
    same_kind = original.dtype == repeated.dtype and original.category == "other"
    if not same_kind or len(original.shape) < 2 or not numel(original.shape):
        return 0
    rows, *rest = original.shape
    times = numel(repeated.shape) // numel(original.shape)
    if repeated.shape in [(rows * times, *rest), (rows, times, *rest), (times, rows, *rest)]:
        return times
    return 0


def _cause_of_repetition(
    original: Holder, times: int, repeated: Holder, facts: Facts
) -> Cause | None:
    """What was computed from the repeated rows, by its shape: (rows, length, ...), or without a
    dimension for the rows, (rows * length, ...).
    """
    rows, length = times * original.shape[0], original.shape[1]
    of_rows = []
    for holder in facts.at_peak:
        can_be = holder.category in ("activations", "temporaries", "other")
        in_rows = holder.shape[:2] == (rows, length)
        flat = holder.shape[:1] == (rows * length,)
        if can_be and (in_rows or flat):
            of_rows.append(holder)
    nbytes = total(of_rows)
    if nbytes < DOMINATES * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak were computed from {rows} rows of {length:,}, which "
        f"are {original.shape[0]} different rows, each {times} times."
    )
    remedy = (
        "compute what depends on these rows alone once for each, and repeat the result: "
        f"encode(x).repeat_interleave({times}, 0) in place of encode(x.repeat_interleave({times}, "
        "0)). A language model's keys and values of a prompt need one forward of the prompt, too."
    )
    name = "The same rows are in a batch several times"
    lines = lines_of([repeated])
    # What else goes into them, and has to be repeated, is not known.
    return Cause(name, nbytes, evidence, remedy, lines, of_rows, stays=None)


def eager_scores(facts: Facts) -> Cause | None:
    """Attention scores, with a number for each pair of tokens."""
    # The lengths of sequences. Without them, a square image would look like scores.
    tokens = set()
    for holder in facts.at_peak:
        shape = holder.shape
        is_image = len(shape) >= 3 and shape[-2] == shape[-3]  # with its channels last
        if len(shape) >= 2 and shape[-1] != shape[-2] and not is_image:
            tokens.add(shape[-2])
    normalized = []
    for holder in facts.at_peak:
        square = len(holder.shape) >= 3 and holder.shape[-1] == holder.shape[-2]
        is_softmax = "softmax" in holder.op or holder.op == "aten.exp"
        if square and is_softmax and holder.shape[-1] in tokens:
            normalized.append(holder)
    shapes = {holder.shape[-2:] for holder in normalized}
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
    remedy = _attention_without_scores(normalized)
    name = "Attention stores its scores"
    return Cause(name, nbytes, evidence, remedy, lines_of(scores), scores, stays=None)


def _attention_without_scores(normalized: list[Holder]) -> str:
    """How to do without the scores. ``normalized``: their softmax, for which
    F.scaled_dot_product_attention has an operation of its own where it stores scores.
    """
    in_forward = [holder for holder in normalized if "backward" not in holder.op]
    by_sdpa = [holder for holder in in_forward if SOFTMAX_OF_SDPA in holder.op]
    if 2 * total(by_sdpa) <= total(in_forward):
        return (
            "use attention that never stores the scores: from_pretrained(..., "
            "attn_implementation='sdpa'), or F.scaled_dot_product_attention in your own module. "
            "Its inputs need four dimensions, (rows, heads, tokens, features): with three, it "
            "stores the scores as well."
        )
    if len(by_sdpa[0].shape) == 3:
        return (
            "F.scaled_dot_product_attention runs already, and stores scores since its inputs have "
            "three dimensions: give it four, (rows, heads, tokens, features), with "
            "x.unsqueeze(1) for one head."
        )
    return (
        "F.scaled_dot_product_attention runs already. On the CPU it stores scores where it drops "
        "some of them, so set the dropout of the attention to 0 (attn_pdrop, attention_dropout, "
        "dropout_p), or expect these bytes on the CPU alone: a card's fused kernels drop scores "
        "without storing them. A mask that needs a gradient, or another backend that is chosen by "
        "sdpa_kernel, stores them as well."
    )


def expanded_tensors(facts: Facts) -> Cause | None:
    """A tensor that an operation makes from much smaller ones: one-hot numbers, distances of all
    pairs, a mask for each head.
    """
    if gradients_of_rows(facts):
        return None  # vmap expands all that it computes
    expanded = []
    for holder in facts.at_peak:
        # a batch is made before the first forward of its step
        filled_now = holder.op in FILLED and facts.time_of(holder) >= facts.peak_time - 1
        if _is_repeated_and_changed(holder, facts):
            continue
        if holder.expanded or (filled_now and holder.category in ("activations", "other")):
            expanded.append(holder)
    holders = []
    for holder in facts.at_peak:
        can_be = holder.category in ("activations", "temporaries", "other")
        if can_be and any(_is_of_kind(holder, example) for example in expanded):
            holders.append(holder)
    nbytes = total(holders)
    if nbytes < DOMINATES * facts.peak.total:
        return None
    words = list(dict.fromkeys(in_words(holder) for holder in expanded))
    evidence = (
        f"{format_bytes(nbytes)} at the peak are of a kind of tensor that is several times "
        f"larger than what it was computed from: {'; '.join(words)}."
    )
    remedy = (
        "do not make it as a whole: compute it for a few rows at a time, and reduce each piece at "
        "once (in training, each under torch.utils.checkpoint.checkpoint). "
    )
    remedy += _without_the_large_tensor(expanded)
    name = "One kind of tensor is the largest part"
    lines = lines_of(expanded)
    stays = pieces_of(nbytes)
    return Cause(name, nbytes, evidence, remedy, lines, holders, stays=stays, condition=IN_PIECES)


def _is_repeated_and_changed(holder: Holder, facts: Facts) -> bool:
    """Whether it is a batch of rows that were repeated, and then augmented.

    These are different rows, and the training needs all of them.
    """
    is_a_batch = holder.shape[:1] == (facts.batch_rows,)
    if holder.made_in != BETWEEN_STEPS or not is_a_batch:
        return False
    for original in facts.at_peak:
        same_rows = original.shape[1:] == holder.shape[1:] and original.dtype == holder.dtype
        has_fewer_rows = original.shape[:1] < holder.shape[:1]
        if original.category == "other" and same_rows and has_fewer_rows:
            return True
    return False


def _is_of_kind(holder: Holder, expanded: Holder) -> bool:
    """Whether it has the shape of an expanded tensor, or at least as many bytes for its rows."""
    if holder.shape == expanded.shape:
        return True
    of_same_rows = numel(holder.shape[:-1]) == numel(expanded.shape[:-1])
    is_followed = expanded.expanded and len(expanded.shape) > 2  # zeros may be of any size
    return is_followed and of_same_rows and holder.nbytes >= expanded.nbytes


def _without_the_large_tensor(expanded: list[Holder]) -> str:
    """What computes the same without it, for the operations that have made it."""
    advice = []
    for operations, sentence in INSTEAD:
        if any(name in holder.op for holder in expanded for name in operations):
            advice.append(sentence)
    if any(_looks_like_a_mistake(holder) for holder in expanded):
        advice.append(
            "If one number for each row was meant, two shapes did not fit, such as (rows, 1) and "
            "(rows,): give both the same one with targets.view_as(outputs)."
        )
    return " ".join(advice or [IN_GENERAL])


def _looks_like_a_mistake(holder: Holder) -> bool:
    """Whether two operands of n numbers each make a matrix of n × n."""
    elementwise = any(name in holder.op for name in ("aten.sub", "aten.add", "aten.mul", "aten.eq"))
    return elementwise and len(holder.shape) == 2 and holder.shape[0] == holder.shape[1]


def dense_embedding_gradient(facts: Facts) -> Cause | None:
    """The gradient of an embedding has a number for each entry, though a batch uses few."""
    gradients = []
    for holder in facts.at_peak:
        if "embedding_dense_backward" in holder.op and holder.category in (
            "gradients",
            "temporaries",
        ):
            gradients.append(holder)
    nbytes = total(gradients)
    if nbytes < DOMINATES * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak are gradients of embeddings "
        f"({in_words(gradients[0])}), with a row for each entry of the table."
    )
    remedy = (
        "nn.Embedding(..., sparse=True) makes a gradient with the batch's rows only. It needs "
        "torch.optim.SparseAdam, or SGD without momentum, and a table that no other layer shares."
    )
    name = "The gradient of an embedding is the largest part"
    # A sparse gradient has a row for each entry of a batch: it may have more than the table has.
    return Cause(name, nbytes, evidence, remedy, holders=gradients, stays=None)
