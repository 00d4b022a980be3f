"""Causes: one kind of tensor that is larger than all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import torch

from ..compat.operators import SOFTMAX_OF_SDPA
from .cause import (
    DOMINATES,
    FILLED,
    IN_PIECES,
    MUCH,
    PIECES_LEAVE,
    WORTH,
    Group,
    Row,
    dtype_of,
    lines_of,
    those,
)
from .facts import BETWEEN_STEPS, IN_BACKWARD, OF_A_TRAINING_STEP, Facts, total
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
IN_GENERAL = (
    "Often an operation does it without the large tensor: torch.cdist for distances (without the "
    "differences of all pairs in each feature), F.cross_entropy with class numbers for one-hot "
    "targets, is_causal=True or a mask of (1, 1, tokens, tokens) for attention."
)
COMPUTED = ("activations", "temporaries")


def _is_double(holder: Holder, facts: Facts) -> bool:
    """Numpy's numbers are float64, and so is what ``.double()`` makes. An optimizer may have wider
    states than weights.
    """
    dtypes = facts.structure.dtypes.values()
    is_chosen = holder.category == "optimizer" and torch.float64 not in dtypes
    return bool(dtypes) and holder.dtype is torch.float64 and not is_chosen


def _from_data_on(double: list[Holder], facts: Facts) -> Group:
    # Lines of data come first: float64 most often begins there.
    data = [h for h in double if h.category == "other" and not h.computed_from]
    lines = tuple(dict.fromkeys((*lines_of(data), *lines_of(double))))
    return Group(double, changes={"lines": lines})


DOUBLE = Row(
    "Tensors are in float64",
    "{size} at the peak are in float64. What is computed from a float64 tensor and a float32 one "
    "is float64.",
    "numpy's numbers are float64 by default: torch.from_numpy(array.astype(np.float32)), or "
    "torch.tensor(..., dtype=torch.float32), halves them and all that is computed from them. Where "
    ".double() or dtype=torch.float64 has made them, as weights, model.float() leaves half.",
    those(_is_double, _from_data_on),
    least=2 * WORTH,
    stays=0.5,
    condition="If these tensors are in float32",
)


def _logits(free: Sequence[Holder], facts: Facts) -> Group | None:
    """Logits: a number for each token of each row and each entry of the vocabulary."""
    # Older logits are outputs that something has kept: no loss needs them any more.
    newest = facts.peak_time - 1
    logits = [h for h in free if facts.time_of(h) >= newest and facts.is_logits(h)]
    if not logits:
        return None
    dtypes = Counter(map(dtype_of, logits))
    copies = ", ".join(f"{n} in {dtype}" for dtype, n in dtypes.most_common())
    # Each piece makes a gradient of the whole head, and autograd adds it to the sum of the earlier
    # ones: this sum, the new gradient and the new sum are there at once.
    nbytes, head = total(logits), _gradient_of_the_head(logits, facts)
    changes: dict = {"stays": min(int(PIECES_LEAVE * nbytes) + 3 * head, nbytes)}
    if facts.loss_of_whole_rows:
        changes["remedy"] = (
            "this loss (CTC) needs all frames of a row at once, but each row for itself: compute "
            "the head and the loss for a few rows at a time, each under "
            "torch.utils.checkpoint.checkpoint, with reduction='sum' and divided by all rows."
        )
    return Group(logits, {"copies": copies, "numbers": f"{logits[0].shape[-1]:,}"}, changes)


LOGITS = Row(
    "The logits are the largest part",
    "{size} at the peak are logits, their copies and their gradients ({copies}), with {numbers} "
    "numbers for each token.",
    "compute the loss in chunks of tokens, so that the logits of all tokens never exist at once: "
    "Recipe(chunked_loss=True) for a causal language model. A loss of your own can be computed in "
    "chunks if it is a sum over tokens, each chunk under torch.utils.checkpoint.checkpoint.",
    _logits,
    least=DOMINATES,
    moments=OF_A_TRAINING_STEP,
    condition=IN_PIECES,
    claims=False,  # a variable may hold those of the step before
)


def _gradient_of_the_head(logits: list[Holder], facts: Facts) -> int:
    """The bytes of the gradient of the matrix that makes the logits, if it is trained."""
    outputs = {holder.shape[-1] for holder in logits}
    largest = 0
    for name in facts.trained:
        shape = facts.structure.shapes[name]
        if len(shape) == 2 and outputs & set(shape):
            largest = max(largest, facts.structure.nbytes(name))
    return largest


def _scores(free: Sequence[Holder], facts: Facts) -> Group | None:
    """Attention scores, with a number for each pair of tokens."""
    # The lengths of sequences. Without them, a square image would look like scores.
    tokens = set()
    for holder in facts.at_peak:
        shape = holder.shape
        is_image = len(shape) >= 3 and shape[-2] == shape[-3]  # with its channels last
        if len(shape) >= 2 and shape[-1] != shape[-2] and not is_image:
            tokens.add(shape[-2])
    square = []
    for holder in free:
        shape = holder.shape
        is_square = len(shape) >= 3 and shape[-1] == shape[-2] and shape[-1] in tokens
        if is_square and holder.category in COMPUTED:
            square.append(holder)
    normalized = [h for h in square if "softmax" in h.op or h.op == "aten.exp"]
    sizes = {holder.shape[-1] for holder in normalized}
    scores = [holder for holder in square if holder.shape[-1] in sizes]
    if not scores:
        return None
    changes = {}
    if any(holder.is_result for holder in scores):
        changes["remedy"] = RETURNED
    # F.scaled_dot_product_attention has a softmax of its own where it stores scores.
    in_forward = [holder for holder in normalized if "backward" not in holder.op]
    by_sdpa = [holder for holder in in_forward if SOFTMAX_OF_SDPA in holder.op]
    if 2 * total(by_sdpa) > total(in_forward):
        changes["remedy"] = THAT_RUNS_ALREADY
        if len(by_sdpa[0].shape) == 3:
            changes["remedy"] = OF_THREE
    return Group(scores, {"tokens": f"{scores[0].shape[-1]:,}"}, changes)


RETURNED = (
    "the model returns its scores: leave that out (output_attentions=False), since attention that "
    "never stores them, attn_implementation='sdpa', cannot return them."
)
OF_THREE = (
    "F.scaled_dot_product_attention runs already, and stores scores since its inputs have three "
    "dimensions: give it four, (rows, heads, tokens, features), with x.unsqueeze(1) for one head."
)
THAT_RUNS_ALREADY = (
    "F.scaled_dot_product_attention runs already. On the CPU it stores scores where it drops some "
    "of them, so set the dropout of the attention to 0 (attn_pdrop, attention_dropout, dropout_p), "
    "or expect these bytes on the CPU alone: a card's fused kernels drop scores without storing "
    "them. A mask that needs a gradient, or another backend that is chosen by sdpa_kernel, stores "
    "them as well."
)
SCORES = Row(
    "Attention stores its scores",
    "{size} at the peak are attention scores and what is computed from them ({count} tensors with "
    "{tokens} × {tokens} numbers for each head of each row).",
    "use attention that never stores the scores: from_pretrained(..., attn_implementation='sdpa'), "
    "or F.scaled_dot_product_attention in your own module. Its inputs need four dimensions, (rows, "
    "heads, tokens, features): with three, it stores the scores as well.",
    _scores,
    least=DOMINATES,
    stays=None,
)


def _expanded(free: Sequence[Holder], facts: Facts) -> Group | None:
    """A tensor that an operation makes from much smaller ones: one-hot numbers, distances of all
    pairs, a mask for each head.
    """
    expanded, holders = [], []
    for holder in free:
        # a batch is made before the first forward of its step
        filled_now = holder.op in FILLED and facts.time_of(holder) >= facts.peak_time - 1
        # the first state of a recurrent layer has the shape of all that follow
        is_large = holder.nbytes >= MUCH * facts.peak.total
        filled_now = filled_now and is_large and holder.category in ("activations", "other")
        if filled_now or (holder.expanded and not _is_augmented(holder, facts)):
            expanded.append(holder)
    if facts.peak.moment == IN_BACKWARD:
        # its gradient is as large, when the tensor itself may be gone
        of_the_step = [h for h in facts.others if h.expanded and h.step == facts.peak.step]
        expanded += [holder for holder in of_the_step if holder.category == "activations"]
    for holder in free:
        can_be = holder.category in (*COMPUTED, "other")
        if can_be and any(_is_of_kind(holder, example) for example in expanded):
            holders.append(holder)
    remedy = EXPANDED.remedy + _without_the_large_tensor(expanded)
    return Group(holders, changes={"remedy": remedy, "lines": lines_of(expanded)})


EXPANDED = Row(
    "One kind of tensor is the largest part",
    "{size} at the peak are of a kind of tensor that is several times larger than what it was "
    "computed from: {kinds}.",
    "do not make it as a whole: compute it for a few rows at a time, and reduce each piece at once "
    "(in training, each under torch.utils.checkpoint.checkpoint). ",
    _expanded,
    least=DOMINATES,
    stays=PIECES_LEAVE,
    condition=IN_PIECES,
)


def _is_augmented(holder: Holder, facts: Facts) -> bool:
    """Whether it is a batch of rows that were repeated, and then augmented.

    These are different rows, and the training needs all of them.
    """
    fewer_rows = (h for h in facts.at_peak if h.shape < holder.shape and h.category == "other")
    of_data = any((h.shape[1:], h.dtype) == (holder.shape[1:], holder.dtype) for h in fewer_rows)
    return holder.made_in == BETWEEN_STEPS and of_data


def _is_of_kind(holder: Holder, expanded: Holder) -> bool:
    """Whether it has the shape of an expanded tensor, or at least as many bytes for its rows."""
    if holder.shape == expanded.shape:
        return True
    of_same_rows = prod(holder.shape[:-1]) == prod(expanded.shape[:-1])
    is_followed = expanded.expanded and len(expanded.shape) > 2  # zeros may be of any size
    return is_followed and of_same_rows and holder.nbytes >= expanded.nbytes


def _without_the_large_tensor(expanded: list[Holder]) -> str:
    """What computes the same without it, for the operations that have made it."""
    advice = []
    for operations, sentence in INSTEAD:
        if any(name in holder.op for holder in expanded for name in operations):
            advice.append(sentence)
    if not advice:
        advice.append(IN_GENERAL)
    if any(_looks_like_a_mistake(holder) for holder in expanded):
        advice.append(
            "If one number for each row was meant, two shapes did not fit, such as (rows, 1) and "
            "(rows,): give both the same one with targets.view_as(outputs)."
        )
    return " ".join(advice)


def _looks_like_a_mistake(holder: Holder) -> bool:
    """Whether two operands of n numbers each make a matrix of n × n."""
    elementwise = any(name in holder.op for name in ("aten.sub", "aten.add", "aten.mul", "aten.eq"))
    return elementwise and len(holder.shape) == 2 and holder.shape[0] == holder.shape[1]


def _of_an_embedding(holder: Holder, facts: Facts) -> bool:
    return "embedding_dense_backward" in holder.op and holder.category in (
        "gradients",
        "temporaries",
    )


EMBEDDING = Row(
    "The gradient of an embedding is the largest part",
    "{size} at the peak are gradients of embeddings ({kinds}), with a row for each entry of the "
    "table.",
    "nn.Embedding(..., sparse=True) makes a gradient with the batch's rows only. It needs "
    "torch.optim.SparseAdam, or SGD without momentum, and a table that no other layer shares.",
    those(_of_an_embedding),
    least=DOMINATES,
    stays=None,  # a sparse gradient has a row for each entry of a batch: these may be more
)
