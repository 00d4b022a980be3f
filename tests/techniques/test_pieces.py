"""check_pieces_add_up: losses of one's own that are right in pieces pass, and others are refused.

Each is compared with accumulate_gradients against the full batch: what passes is exact.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib import accumulate_gradients, check_pieces_add_up, split
from gradmem_lib.course import models, run_ranks
from gradmem_lib.techniques.pieces import as_in_evaluation, rounding

WEIGHT = torch.tensor([0.3, 1.0, 4.7], dtype=torch.float64)


def model_and_batch(rows=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(rows, 5, dtype=torch.float64)
    labels = torch.tensor([0, 0, 2, 1, 0, 2])[:rows]
    return model, {"x": x, "labels": labels, "weight": torch.rand(rows).double()}


# Right ones: a function that gives the full batch's mean, and the one for pieces.


def class_weights(model, micro):
    loss = F.cross_entropy(model(micro["x"]), micro["labels"], weight=WEIGHT)
    return loss, WEIGHT[micro["labels"]].sum()


def row_weights(model, micro):
    each = F.cross_entropy(model(micro["x"]), micro["labels"], reduction="none")
    weight = micro["weight"]
    return (each * weight).sum() / weight.sum(), weight.sum()


def some_ignored(model, micro):
    labels = torch.where(micro["labels"] == 1, -100, micro["labels"])
    loss = F.cross_entropy(model(micro["x"]), labels, ignore_index=-100)
    return loss, (labels != -100).sum()


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


RIGHT = [class_weights, row_weights, some_ignored, smoothed, cancelling, two_means]

# Wrong ones.


def weights_by_rows(model, micro):
    return class_weights(model, micro)[0], len(micro["labels"])


def in_batch_negatives(model, micro):
    a = F.normalize(model(micro["x"]), dim=-1)
    b = F.normalize(model(micro["x"].flip(1)), dim=-1)
    return F.cross_entropy(a @ b.T / 0.05, torch.arange(len(a))), len(a)


def decorrelated(model, micro):
    return model(micro["x"]).var(0, unbiased=False).sum(), len(micro["x"])


def two_means_as_one(model, micro):
    pairs = two_means(model, micro)
    return pairs[0][0] + pairs[1][0], pairs[0][1]


def count_of_another(model, micro):
    return smoothed(model, micro)[0], 2


def no_pair(model, micro):
    return smoothed(model, micro)[0]


def drops_out(model, micro):
    logits = model(F.dropout(micro["x"], 0.5))
    return F.cross_entropy(logits, micro["labels"]), len(logits)


def own_generator(model, micro, generator=torch.Generator().manual_seed(3)):  # noqa: B008
    noise = torch.randn(micro["x"].shape, generator=generator).double()
    return (model(micro["x"] + noise) - 1).square().mean(), len(noise)


def of_python(model, micro):
    return smoothed(model, micro)[0] * random.random() * np.random.rand(), len(micro["labels"])


WRONG = {
    weights_by_rows: r"weight\[labels\]\.sum.* its sum is .* for all rows together",
    in_batch_negatives: "accumulate_through_embeddings",
    decorrelated: "its sum is",
    two_means_as_one: "a list of pairs",
    count_of_another: r"the count of all rows is 2, and those of its pieces are 2 and 2",
    no_pair: "TypeError: loss_and_count must return two things",
    drops_out: "^draw random numbers .*: the same rows have another loss each time",
    own_generator: "^draw random numbers",
    of_python: "^draw random numbers",
}


def gradient(model):
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def state(model):
    torch_state, of_numpy = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    modes = [module.training for module in model.modules()]
    weights = [p.tolist() for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    return torch_state, random.getstate(), of_numpy, modes, weights, grads


def reduced(loss, reduction):
    """``loss`` as sums, or as it is."""

    def sums(model, micro):
        found = loss(model, micro)
        if isinstance(found, list):
            return [(mean * count, count) for mean, count in found]
        return (found[0] * found[1], found[1]) if isinstance(found, tuple) else found

    return loss if reduction == "mean" else sums


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", RIGHT, ids=lambda f: f.__name__)
def test_what_is_right_in_pieces_passes(loss, reduction):
    model, batch = model_and_batch()
    model[1].eval()  # modules may have unlike modes
    before = state(model)

    def loss_and_count(micro):
        return reduced(loss, reduction)(model, micro)

    assert check_pieces_add_up(model, batch, loss_and_count, reduction=reduction) is None
    assert state(model) == before
    found = loss(model, batch)
    full = sum(mean for mean, _ in found) if isinstance(found, list) else found[0]
    full.backward()
    expected = gradient(model)
    totals = [float(n) for _, n in found] if isinstance(found, list) else float(found[1])
    pieces = (piece for piece in split(batch, 2))  # can be read once
    accumulate_gradients(pieces, loss_and_count, total_items=totals, reduction=reduction)
    assert (gradient(model) - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", WRONG, ids=lambda f: f.__name__)
def test_what_is_not_is_refused_in_a_sentence_and_nothing_changes(loss, reduction):
    model, batch = model_and_batch()
    before = state(model)

    def loss_and_count(micro):
        return reduced(loss, reduction)(model, micro)

    with pytest.raises(ValueError, match=WRONG[loss]):
        check_pieces_add_up(model, batch, loss_and_count, reduction=reduction)
    assert state(model) == before


def test_a_refusal_of_noise_does_not_say_that_rows_are_compared():
    model, batch = model_and_batch()
    with pytest.raises(ValueError) as raised:
        check_pieces_add_up(model, batch, lambda m: drops_out(model, m), reduction="mean")
    assert "accumulate_through_embeddings" not in str(raised.value)


def test_three_forwards_without_a_graph_in_eval_mode():
    model, batch = model_and_batch()
    seen = []

    def loss_and_count(micro):
        loss, count = smoothed(model, micro)
        seen.append((count, loss.requires_grad, model.training))
        return loss, count

    check_pieces_add_up(model, batch, loss_and_count, reduction="mean")
    assert seen == [(6, False, False), (5, False, False), (1, False, False)]
    assert model.training


def test_a_batch_that_shows_nothing_is_refused():
    model, batch = model_and_batch()
    with pytest.raises(ValueError, match="give at least two rows"):
        check_pieces_add_up(model, next(split(batch, 1)), lambda m: smoothed(model, m))
    batch["labels"][-1] = 1  # the one that is ignored
    with pytest.raises(ValueError, match="give rows that all have labels"):
        check_pieces_add_up(model, batch, lambda m: some_ignored(model, m), reduction="mean")
    with pytest.raises(ValueError, match="reduction='none'"):
        check_pieces_add_up(model, batch, lambda m: smoothed(model, m), reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_are_not_refused(dtype):
    model, batch = model_and_batch()
    model.to(dtype)

    def loss_and_count(micro):
        logits = model(micro["x"].to(dtype)).float()
        return F.cross_entropy(logits, micro["labels"], weight=WEIGHT.float(), reduction="sum"), (
            WEIGHT[micro["labels"]].sum()
        )

    check_pieces_add_up(model, batch, loss_and_count)


def preferences():
    """A policy, its reference, and pairs of a chosen and a rejected text of unequal lengths."""
    sizes = dict(layers=1, hidden=16, heads=2, vocab=31, dtype=torch.float64)
    policy, reference = models.tiny_gpt2(seed=0, **sizes), models.tiny_gpt2(seed=1, **sizes)
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for name, lengths in (("chosen", (9, 3, 6, 12)), ("rejected", (4, 12, 7, 5))):
        ids = torch.randint(0, 31, (4, 12), generator=generator)
        seen = torch.arange(12) < torch.tensor(lengths)[:, None]
        pairs |= {name: ids, f"{name}_labels": ids.masked_fill(~seen, -100)}
    return policy, reference.requires_grad_(False), pairs


def log_p(model, ids, labels):
    """Of each row, the sum over its tokens: (rows,)."""
    found = model(ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    picked = found.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (picked * (targets != -100)).sum(-1)


def dpo(policy, reference, micro):
    """Rafailov et al. 2023, equation 7, for each pair."""

    def margin(model):
        chosen = log_p(model, micro["chosen"], micro["chosen_labels"])
        return chosen - log_p(model, micro["rejected"], micro["rejected_labels"])

    return -F.logsigmoid(0.5 * (margin(policy) - margin(reference)))


@pytest.mark.parametrize("size", [1, 3])
def test_preferences_are_a_mean_over_pairs(size):
    policy, reference, pairs = preferences()
    dpo(policy, reference, pairs).mean().backward()
    expected = gradient(policy)

    def loss_and_count(micro):
        each = dpo(policy, reference, micro)
        return each.sum(), len(each)

    check_pieces_add_up(policy, pairs, loss_and_count)
    found = accumulate_gradients(split(pairs, size), loss_and_count)
    assert found.items == 4
    assert (gradient(policy) - expected).norm() <= 1e-12 * expected.norm()
    assert all(p.grad is None for p in reference.parameters())


def test_preferences_in_one_stack_are_no_rows_of_their_own():
    """The first half chosen, the second rejected, as some trainers stack them: rows cannot be cut
    from it.
    """
    policy, _, pairs = preferences()
    stacked = {
        "ids": torch.cat([pairs["chosen"], pairs["rejected"]]),
        "labels": torch.cat([pairs["chosen_labels"], pairs["rejected_labels"]]),
    }

    def loss_and_count(micro):
        each = log_p(policy, micro["ids"], micro["labels"])
        half = len(each) // 2
        found = -F.logsigmoid(0.5 * (each[:half] - each[half : 2 * half]))
        return found.sum(), half

    with pytest.raises(ValueError, match=r"would train another loss$"):
        check_pieces_add_up(policy, stacked, loss_and_count)


def in_two_processes():
    """Rank 1 alone finds a difference."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, batch = model_and_batch()
    ddp = DistributedDataParallel(model)
    loss = [smoothed, weights_by_rows][dist.get_rank()]
    said = []
    for each in (smoothed, loss):
        try:
            check_pieces_add_up(ddp, batch, lambda m, each=each: each(ddp, m), reduction="mean")
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_all_processes_refuse_together():
    for rank, said in enumerate(run_ranks(in_two_processes, ranks=2)):
        assert said[0] == ""
        assert ["another process found", "its sum is"][rank] in said[1]


def test_autocast_inside_of_the_loss_rounds_more():
    model = nn.Linear(64, 512)
    x = torch.randn(8, 64)
    with as_in_evaluation(model) as autocasts:
        model(x)
        assert rounding(model, autocasts) == 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    assert rounding(model, autocasts) == torch.finfo(torch.bfloat16).eps
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(KeyboardInterrupt), as_in_evaluation(model):
        raise KeyboardInterrupt
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks


def test_a_whole_number_of_items_is_compared_exactly():
    model = nn.Linear(4, 4).bfloat16()  # whose losses may differ by 0.8 %

    def shifted_once(x):
        return model(x).float().square().sum(), x.shape[0] * 512 - 1

    with pytest.raises(ValueError, match=r"2047.*1535 and 511"):
        check_pieces_add_up(model, torch.randn(4, 4, dtype=torch.bfloat16), shifted_once)


class MakesAPart(nn.Module):
    """Makes a module of its own in its first forward, as BigBird does for rows that are short."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        if not hasattr(self, "part"):
            self.part = nn.Sequential(nn.Dropout(0.5))
            self.part.train(self.training)
        return self.part(self.linear(x))


@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_a_forward_makes_is_not_kept(training):
    """It was made for the rows of a question, and has its mode: the training makes its own."""
    model = nn.Sequential(MakesAPart()).train(training)
    with as_in_evaluation(model):
        model(torch.ones(1, 2))
    assert all(module.training == training for module in model.modules())
    assert len([*model.modules()]) == 3
    model(torch.ones(1, 2))
    assert all(module.training == training for module in model.modules())
    assert len([*model.modules()]) == 5


def test_a_loss_that_is_not_finite_is_said_first():
    model, batch = model_and_batch()
    batch["x"][2] = torch.nan
    with pytest.raises(ValueError, match="look for very large or missing numbers"):
        check_pieces_add_up(model, batch, lambda micro: smoothed(model, micro), reduction="mean")
