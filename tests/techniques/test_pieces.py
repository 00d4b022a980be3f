"""check_pieces_add_up: losses of one's own that are right in pieces pass, and others are refused.

Each is compared with accumulate_gradients against the full batch: what passes is exact.
"""

import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.gradients import error
from support.gradients import taken_gradient as gradient
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradmem_lib import accumulate_gradients, check_pieces_add_up, split
from gradmem_lib.course.machine.thread_ranks import on_ranks
from gradmem_lib.techniques.asking import as_in_evaluation, asking

WEIGHT = torch.tensor([0.3, 1.0, 4.7], dtype=torch.float64)


def model_and_batch(rows=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(rows, 5, dtype=torch.float64)
    labels = torch.tensor([0, 0, 2, 1, 0, 2])[:rows]
    return model, {"x": x, "labels": labels}


# Right ones: a function that gives the full batch's mean, and the one for pieces.


def class_weights(model, micro):
    loss = F.cross_entropy(model(micro["x"]), micro["labels"], weight=WEIGHT)
    return loss, WEIGHT[micro["labels"]].sum()


def smoothed(model, micro):
    loss = F.cross_entropy(model(micro["x"]), micro["labels"], label_smoothing=0.2)
    return loss, len(micro["labels"])


def cancelling(model, micro):
    """Advantages of unlike signs, as in policy gradients: the loss is near 0."""
    scores = model(micro["x"])[:, 0]
    return (micro["x"].sum(1) * (scores - scores.detach() + 1e-9)).mean(), len(scores)


def two_means(model, micro):
    logits = model(micro["x"])
    return [class_weights(model, micro), (logits.square().mean(1).mean(), len(logits))]


RIGHT = [cancelling, two_means]

# Wrong ones.


def weights_by_rows(model, micro):
    return class_weights(model, micro)[0], len(micro["labels"])


def in_batch_negatives(model, micro):
    a = F.normalize(model(micro["x"]), dim=-1)
    b = F.normalize(model(micro["x"].flip(1)), dim=-1)
    return F.cross_entropy(a @ b.T / 0.05, torch.arange(len(a))), len(a)


def two_means_as_one(model, micro):
    pairs = two_means(model, micro)
    return pairs[0][0] + pairs[1][0], pairs[0][1]


def count_of_another(model, micro):
    return smoothed(model, micro)[0], 2


def no_pair(model, micro):
    return smoothed(model, micro)[0]


def own_generator(model, micro, generator=torch.Generator().manual_seed(3)):  # noqa: B008
    noise = torch.randn(micro["x"].shape, generator=generator).double()
    return (model(micro["x"] + noise) - 1).square().mean(), len(noise)


def of_python(model, micro):
    return smoothed(model, micro)[0] * random.random() * np.random.rand(), len(micro["labels"])


WRONG = {
    weights_by_rows: r"weight\[labels\]\.sum.* its sum is .* for all rows together",
    in_batch_negatives: "accumulate_through_embeddings",
    two_means_as_one: "a list of pairs",
    count_of_another: r"the count of all rows is 2, and those of its pieces are 2 and 2",
    no_pair: "TypeError: loss_and_count must return two things",
    own_generator: "^draw random numbers .*: the loss is another one each time for the same rows",
    of_python: "^draw random numbers",
}


def state(model):
    torch_state, of_numpy = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    modes = [module.training for module in model.modules()]
    weights = [p.tolist() for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    return torch_state, random.getstate(), of_numpy, modes, weights, grads


@pytest.mark.parametrize("loss", RIGHT, ids=lambda f: f.__name__)
def test_what_is_right_in_pieces_passes(loss):
    """As means here. Below, and in test_items.py, sums pass."""
    model, batch = model_and_batch()
    model[1].eval()  # modules may have unlike modes
    before = state(model)

    loss_and_count = partial(loss, model)
    assert check_pieces_add_up(model, batch, loss_and_count, reduction="mean") is None
    assert state(model) == before
    found = loss(model, batch)
    full = sum(mean for mean, _ in found) if isinstance(found, list) else found[0]
    full.backward()
    expected = gradient(model)
    totals = [float(n) for _, n in found] if isinstance(found, list) else float(found[1])
    pieces = (piece for piece in split(batch, 2))  # can be read once
    accumulate_gradients(pieces, loss_and_count, total_items=totals, reduction="mean")
    assert error(gradient(model), expected) <= 1e-12


@pytest.mark.parametrize("loss", WRONG, ids=lambda f: f.__name__)
def test_what_is_not_is_refused_in_a_sentence_and_nothing_changes(loss):
    model, batch = model_and_batch()
    before = state(model)
    with pytest.raises(ValueError, match=WRONG[loss]):
        check_pieces_add_up(model, batch, partial(loss, model), reduction="mean")
    assert state(model) == before


@pytest.mark.parametrize(
    ("rows", "unlabelled", "reduction", "says"),
    [
        (1, [], "mean", "give at least two rows"),
        (2, [], "mean", None),  # which are enough
        (6, [-1], "mean", "give rows that all have labels"),
        (6, range(6), "sum", "give rows that all have labels"),
        (6, [], "none", "reduction='none'"),
    ],
)
def test_a_batch_that_shows_nothing_is_refused(rows, unlabelled, reduction, says):
    model, batch = model_and_batch(rows)
    batch["labels"][list(unlabelled)] = -100

    def of_labels(micro):
        loss = F.cross_entropy(model(micro["x"]), micro["labels"], reduction=reduction)
        return loss, (micro["labels"] != -100).sum()

    with pytest.raises(ValueError, match=says) if says else nullcontext():
        check_pieces_add_up(model, batch, of_labels, reduction=reduction)


def test_all_processes_refuse_together():
    """Rank 1 alone finds a difference."""

    def asked(rank):
        model, batch = model_and_batch()
        ddp = DistributedDataParallel(model)
        check_pieces_add_up(ddp, batch, lambda m: smoothed(ddp, m), reduction="mean")
        loss = [smoothed, weights_by_rows][rank]
        with pytest.raises(ValueError) as raised:
            check_pieces_add_up(ddp, batch, lambda m: loss(ddp, m), reduction="mean")
        return str(raised.value)

    first, second = on_ranks(asked, 2)
    assert "another process found" in first and "its sum is" in second


def test_autocast_inside_of_the_loss_rounds_more():
    model = nn.Linear(64, 512)
    x = torch.randn(8, 64)
    with asking(model, model) as question:
        question.observe(x)
        assert question.rounding == 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            question.observe(x)
    assert question.rounding == torch.finfo(torch.bfloat16).eps
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(KeyboardInterrupt), as_in_evaluation(model):
        raise KeyboardInterrupt
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks


def test_a_whole_number_of_items_is_compared_exactly():
    model = nn.Linear(4, 4).bfloat16()  # whose losses may differ by 0.8 %
    x = torch.randn(4, 4, dtype=torch.bfloat16)

    def loss_and_count(x, fewer=0):
        return model(x).float().square().sum(), x.shape[0] * 512 - fewer

    check_pieces_add_up(model, x, loss_and_count)
    with pytest.raises(ValueError, match=r"2047.*1535 and 511"):
        check_pieces_add_up(model, x, partial(loss_and_count, fewer=1))


def test_a_loss_that_is_not_finite_is_said_first():
    model, batch = model_and_batch()
    batch["x"][2] = torch.nan
    with pytest.raises(ValueError, match="look for very large or missing numbers"):
        check_pieces_add_up(model, batch, lambda micro: smoothed(model, micro), reduction="mean")
