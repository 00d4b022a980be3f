"""What a loss is the mean of is found by asking the model: in pieces, losses of many fields have
the full batch's gradient to the last digits of float64, or are refused, with a way out that works.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from support.families import with_dropout
from support.gradients import error, gradient, own_loss, ragged, taken_gradient
from support.refusals import refusal
from support.trainers import LastGradient, trainer_for
from torch import nn

from gradmem_lib import (
    Recipe,
    accumulate_gradients,
    check_pieces_add_up,
    predict,
    prepare,
    split,
    step,
)
from gradmem_lib.course import run_ranks
from gradmem_lib.model.classes import predicts_next_token
from gradmem_lib.training.item_rules import labels
from gradmem_lib.training.items import find_rule
from gradmem_lib.training.probe_rows import fewer_labels, groups_of_rows
from gradmem_lib.training.step import _identity
from gradmem_lib.training.tiny import VOCABULARY, tiny_model

ROWS, WIDTH, CLASSES, STEPS = 8, 6, 5, 7
EXACT = 1e-10
RECIPE = Recipe(precision=None, optimizer="sgd", accumulation=4, attention=None)
LENGTHS = torch.tensor([7, 3, 5, 2, 7, 6, 1, 4])
SHOWN = torch.arange(STEPS) < LENGTHS[:, None]
REFUSED = "accumulation=1.*(is no mean over labels or rows|it is 0 for a few rows)"


def random(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mlp(outputs=CLASSES, inputs=WIDTH):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)).double()


def full(model, batch, loss):
    model = copy.deepcopy(model)
    loss(model, batch).backward()
    return gradient(model)


def stepped(model, batch, loss=None, items=None, pieces=4):
    """The gradient that ``step`` puts together from micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.zero_grad()
    recipe = replace(RECIPE, accumulation=pieces)
    step(model, optimizer, batch, recipe, loss=loss, items=items, keep_gradients=True)
    return gradient(model)


# Batches.


def numbers(**more):
    return {"x": random(ROWS, WIDTH)} | more


def classified():
    return numbers(labels=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]))


def tagged():
    """Words with labels; rows are filled up with -100."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(0, CLASSES, (ROWS, STEPS), generator=generator)
    return {"x": random(ROWS, STEPS, WIDTH), "labels": drawn.masked_fill(~SHOWN, -100)}


def noised():
    """Rows that bring their own noise and time."""
    return numbers(noise=random(ROWS, WIDTH, seed=4), time=random(ROWS, 1, seed=3).sigmoid())


def segmented():
    return numbers(labels=(random(ROWS, 9, seed=3) > 0.5).long())


# Right in pieces.


def mean_of_means(model, micro):
    targets = micro["labels"].clamp(min=0)
    losses = F.cross_entropy(model(micro["x"]).transpose(1, 2), targets, reduction="none")
    there = micro["labels"] != -100
    return ((losses * there).sum(1) / there.sum(1)).mean()


def head_of_zeros():
    """At the start, all words have the same loss."""
    model = mlp()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return model


def penalized(model, micro):
    """A critic's gradient penalty, which needs gradients in its forward."""
    time, noise = micro["time"], micro["noise"]
    between = ((1 - time) * micro["x"] + time * noise).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return model(noise).mean() - model(micro["x"]).mean() + 10 * penalty


def heads():
    torch.manual_seed(0)
    named = {"classes": nn.Linear(WIDTH, CLASSES), "number": nn.Linear(WIDTH, 1)}
    return nn.ModuleDict(named).double()


def policy_gradient(model, micro):
    """Advantages whose mean is 0: the loss is 0 too, and has a gradient all the same."""
    log_p = model(micro["x"]).log_softmax(-1).gather(1, micro["labels"][:, None])[:, 0]
    return -(micro["advantage"] * (log_p - log_p.detach() + 0.1)).mean()


def of_samples(model, micro):
    """Over the words that the mask shows after the first, without labels."""
    log_p = model(micro["x"])[:, :-1].log_softmax(-1)[..., 0]
    there = micro["attention_mask"][:, 1:]
    ratio = (log_p - log_p.detach()).exp()
    return -(ratio * micro["advantage"][:, None] * there).sum() / there.sum()


ADVANTAGE = torch.tensor([1.0, -2.0, 4.0, -3.0, 2.0, -1.0, -4.0, 3.0])
SAMPLED = tagged() | {"attention_mask": SHOWN.long(), "advantage": ADVANTAGE}
del SAMPLED["labels"]


def regression(model, micro):
    """Missing targets are nan or -100."""
    x, targets = (micro["x"], micro["labels"]) if isinstance(micro, dict) else micro
    there = ~targets.isnan() & (targets != -100)
    return F.mse_loss(model(x)[there], targets[there])


# Rows of which the first ones look alike, and later ones show what the loss is.


def words(**more):
    return {"x": random(12, 6, 3)} | more


def flagged(model, batch):
    """Flags only weigh rows. The first rows have a loss of 0."""
    losses = F.cross_entropy(model(batch["x"]).mean(1), batch["target"], reduction="none")
    return (losses * batch["counts"]).mean()


def hidden_words():
    mask = torch.ones(12, 6).double()
    mask[9, 2:] = 0
    mask[11, 1:] = 0
    return words(mask=mask)


def of_hidden_words(model, batch):
    errors = model(batch["x"]).square().mean(-1)
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


# The weighted class is neither the smallest nor the largest.
WEIGHTED = words()["x"], torch.tensor([0, 3, 0, 3, 1, 3, 1, 3, 2, 2, 0, 3])


def weighted_class(model, batch):
    weights = torch.tensor([1.0, 1.0, 7.0, 1.0]).double()
    return F.cross_entropy(model(batch[0]).mean(1), batch[1], weight=weights)


def of_known_targets(model, batch):
    known = ~batch["target"].isnan()
    return F.huber_loss(model(batch["x"]).mean((1, 2))[known], batch["target"][known])


FLAGGED = words(target=torch.arange(12) % 4, counts=torch.arange(12) > 8)
LATE_NAN = words(target=random(12, seed=2).index_fill(0, torch.tensor([8, 9]), math.nan))
Named = namedtuple("Named", "x labels")
KNOWN = random(ROWS, WIDTH) > 0
WITH_NAN = numbers(labels=random(ROWS, WIDTH, seed=2).masked_fill(~KNOWN, math.nan))
WITH_MASK = WITH_NAN | {
    "labels": WITH_NAN["labels"].nan_to_num(-100.0),
    "attention_mask": KNOWN.long(),
}

RIGHT = {
    "head of zeros": (head_of_zeros(), tagged(), mean_of_means),
    "gradient penalty": (mlp(1), noised(), penalized),
    "policy gradient": (mlp(), classified() | {"advantage": ADVANTAGE}, policy_gradient),
    "samples": (mlp(), SAMPLED, of_samples),
    "missing targets": (mlp(WIDTH), Named(**WITH_NAN), regression),
    "hidden targets": (mlp(WIDTH), WITH_MASK, regression),
    "flags": (mlp(4, 3), FLAGGED, flagged),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_mean_over_items_is_the_full_batchs(kind):
    model, batch, loss = RIGHT[kind]
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error(stepped(model, batch, loss), full(model, batch, loss)) <= EXACT


@pytest.mark.parametrize(("rows", "sizes"), [(5, [2, 1, 1, 1]), (3, [1, 1, 1])])
def test_a_last_batch_that_does_not_come_out_even_is_exact(rows, sizes):
    batch, seen = {name: values[:rows] for name, values in classified().items()}, []

    def loss(model, micro):
        if torch.is_grad_enabled():
            seen.append(len(micro["x"]))
        return F.cross_entropy(model(micro["x"]), micro["labels"])

    expected = full(mlp(), batch, loss)
    seen.clear()
    assert error(stepped(mlp(), batch, loss), expected) <= 1e-12
    assert seen == sizes


# transformers' models, whose names say nothing.


def texts():
    return ragged((3, 20, 9, 14), VOCABULARY)


def tiny(cls, **options):
    torch.manual_seed(0)
    return tiny_model(cls, with_dropout(cls.config_class(**options), 0.0)).train()


NEXT_TOKEN = {
    "LlamaForCausalLM": True,
    "BertForMaskedLM": False,
    "BertForSequenceClassification": False,
    "DistilBertForTokenClassification": False,
    "PhiForCausalLM": True,
}


@pytest.mark.parametrize("family", NEXT_TOKEN)
def test_a_renamed_subclass_trains_as_its_parent(family):
    model = tiny(type("MyModel", (getattr(transformers, family),), {"__module__": __name__}))
    batch = texts()
    if family.endswith("SequenceClassification"):
        batch["labels"] = torch.tensor([0, 1, 1, 0])
    if family.endswith("TokenClassification"):
        batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["labels"] % 2)
    assert predicts_next_token(model) == NEXT_TOKEN[family]
    # The models' losses are computed in float32.
    for dtype, limit in ((torch.float64, 1e-5), (torch.bfloat16, 0.03)):
        model.to(dtype)
        expected = full(model, batch, partial(own_loss, shifted=NEXT_TOKEN[family]))
        assert error(stepped(model, batch), expected) <= limit


IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(1))
TAUGHT = torch.arange(12) <= 1 + 3 * torch.arange(4)[:, None]  # unlike numbers in each row
# What the config has besides, and the batch: one -100.0 is a number like any other.
COUNTED = {
    "BertForSequenceClassification": (
        {"num_labels": 1},
        {"labels": torch.tensor([1.0, -100.0, 2.0, 3.0])},
    ),
    "ModernBertForMaskedLM": (
        {"sparse_prediction": True, "sparse_pred_ignore_index": 0},
        {"labels": IDS.masked_fill(~TAUGHT, 0).masked_fill(IDS < 9, -100)},
    ),
    "BioGptForTokenClassification": (
        {"num_labels": 60},
        {"labels": IDS, "attention_mask": TAUGHT.long()},
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_labels_that_count_are_those_of_the_models_own_loss(name):
    options, batch = COUNTED[name]
    model, batch = tiny(getattr(transformers, name), **options), {"input_ids": IDS} | batch
    for p in model.parameters():  # else some give every label the same loss
        nn.init.normal_(p, std=0.3)
    expected = full(model, batch, lambda model, batch: model(**batch).loss)
    assert error(stepped(model, batch), expected) <= 1e-5


@pytest.mark.filterwarnings("error:.*more than rounding seems")
def test_a_loss_that_is_itself_in_bf16_is_not_refused():
    """Each item's loss is rounded, and then their mean: by more than half of eps."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = tiny_model(transformers.BertForMaskedLM, transformers.BertConfig())
        batch = ragged((120, 120, 60, 10), VOCABULARY)
        assert stepped(model.to(torch.bfloat16), batch).isfinite().all()


# Refused, with a way out that works: sums with their counts.


def two_heads(model, micro):
    """A label is missing for some rows, and a score for none."""
    targets = micro["labels"]
    named = F.cross_entropy(model["classes"](micro["x"]), targets, reduction="sum")
    squared = (model["number"](micro["x"])[:, 0] - micro["score"]).square().sum()
    return [(named, (targets != -100).sum()), (squared, len(targets))]


def z_loss(model, micro):
    """Of all words, while the cross-entropy has its labels: a small part."""
    logits, targets = model(micro["x"]), micro["labels"].flatten()
    named = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    sizes = logits.logsumexp(-1).square()
    return [(named, (targets != -100).sum()), (1e-4 * sizes.sum(), sizes.numel())]


SUMS = {
    "row without a label": (
        heads(),
        numbers(labels=torch.tensor([0, -100, 2, 3, 4, -100, 1, 2]), score=random(ROWS, seed=5)),
        two_heads,
    ),
    "z-loss": (mlp(), tagged(), z_loss),
}


@pytest.mark.parametrize("kind", SUMS)
def test_what_step_refuses_is_exact_as_sums_with_their_counts(kind):
    model, batch, pairs = SUMS[kind]
    model = copy.deepcopy(model)

    def loss(asked, micro):
        return sum(total / count for total, count in pairs(asked, micro))

    def loss_and_count(micro):
        return pairs(model, micro)

    def counts(micro):
        return tuple(float(count) for _, count in pairs(model, micro))

    expected = full(model, batch, loss)
    if kind == "z-loss":
        with pytest.warns(UserWarning, match="more than rounding seems to explain"):
            found = stepped(model, batch, loss)
        assert error(found, expected) > EXACT  # the warning is true
    else:
        with pytest.raises(ValueError, match="is no mean over labels or rows"):
            stepped(model, batch, loss)
    model.zero_grad()
    check_pieces_add_up(model, next(split(batch, 4)), loss_and_count)
    for total in ({"count_items": counts}, {"total_items": counts(batch)}):
        found = accumulate_gradients(list(split(batch, 2)), loss_and_count, **total)
        assert error(taken_gradient(model), expected) <= EXACT
        assert found.items == pytest.approx(counts(batch))


# Refused: rows are compared. Uncut, each of them is right.


def dice(model, micro):
    p, targets = model(micro["x"]).sigmoid(), micro["labels"]
    return 1 - (2 * (p * targets).sum() + 1) / (p.sum() + targets.sum() + 1)


def above_the_mean(model, micro):
    """Of two rows, one is as far above their mean as the other is below."""
    score = 5 * model(micro["x"])[:, 0]
    return (1 - torch.sigmoid(score - score.detach().mean())).mean()


def summed(model, micro):
    return F.cross_entropy(model(micro["x"]), micro["labels"], reduction="sum")


def balanced_experts(model, micro, weight=1e-4):
    chosen = model(micro["x"]).softmax(-1)
    used = F.one_hot(chosen.argmax(-1), CLASSES).double().mean(0)
    named = F.cross_entropy(model(micro["x"]), micro["labels"])
    return named + weight * CLASSES * (used * chosen.mean(0)).sum()


def balanced_scores(model, micro):
    """Experts that are all alike at the start."""
    chosen = model(micro["x"]).softmax(-1).mean(0)
    return F.cross_entropy(model(micro["x"]), micro["labels"]) + chosen.square().sum()


def of_pairs(model, micro):
    score = model(micro["x"])[:, 0]
    return -F.logsigmoid(score[0::2] - score[1::2]).mean()


def noisy(model, batch):
    noise = torch.randn_like(batch["x"])
    return (model(batch["x"] + noise) - noise).square().mean()


def no_pair(model, micro):
    return 0 * model(micro["x"]).square().mean()


AT_THE_START = "accumulation=1.*with a few other numbers in its weights"
COMPARED = {
    "dice": (mlp(9), segmented(), dice, REFUSED),
    "above the mean": (mlp(1), numbers(), above_the_mean, REFUSED),
    "sum": (mlp(), classified(), summed, "accumulation=1.*is a sum"),
    "router": (mlp(), classified(), balanced_experts, REFUSED),
    "router at the start": (head_of_zeros(), classified(), balanced_scores, AT_THE_START),
    "pairs": (mlp(1), numbers(), of_pairs, "^make rows that belong together one row"),
    "noise": (mlp(WIDTH), numbers(), noisy, "draw random numbers in the data's collator"),
    "no pair": (mlp(WIDTH), numbers(), no_pair, "it is 0 for a few rows together"),
    "hidden words": (mlp(4, 3), hidden_words(), of_hidden_words, REFUSED),
    "a weighted class": (mlp(4, 3), WEIGHTED, weighted_class, REFUSED),
    "late missing targets": (mlp(4, 3), LATE_NAN, of_known_targets, REFUSED),
}


@pytest.mark.parametrize("kind", COMPARED)
def test_a_loss_that_compares_rows_is_refused_and_left_alone(kind):
    model, batch, loss, says = COMPARED[kind]
    model = copy.deepcopy(model)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match=says):
        stepped(model, batch, loss)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    stepped(model, batch, loss, pieces=1)


def test_rows_that_belong_together_are_told_so_by_the_check_too():
    model = mlp(1)
    with pytest.raises(ValueError, match=r"make rows that belong together one row.*: its loss"):
        check_pieces_add_up(
            model, numbers(), lambda micro: (of_pairs(model, micro), 1), reduction="mean"
        )


def test_a_first_ignored_label_in_a_later_batch_is_asked_about():
    """Equally long rows do not show that each row has a mean of its own."""
    model, batch = mlp(), tagged()
    stepped(model, batch | {"labels": batch["labels"].clamp(min=0)}, mean_of_means)
    found = stepped(model, batch, mean_of_means)
    assert error(found, full(model, batch, mean_of_means)) <= EXACT


def test_the_same_code_with_another_word_is_asked_again():
    def reduced(how):
        return lambda model, micro: F.mse_loss(model(micro["x"]), micro["x"], reduction=how)

    model = mlp(WIDTH)
    stepped(model, numbers(), reduced("mean"))
    with pytest.raises(ValueError, match="is a sum"):
        stepped(model, numbers(), reduced("sum"))


@dataclass
class Job:
    """A loss without a hash."""

    criterion: nn.Module

    def loss(self, model, batch):
        return self.criterion(model(batch["x"]), batch["labels"])

    __call__ = loss


class Weighted:
    """A loss with a hash, and with a tensor or none."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["labels"], weight=self.weight)


criterion: nn.Module = nn.CrossEntropyLoss()


def global_loss(model, batch):
    return criterion(model(batch["x"]), batch["labels"])


def test_another_criterion_is_another_loss(monkeypatch):
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0, 1.0, 1.0]).double())
    model = mlp()

    # each is gone after its step, and the next one may have its address
    for make in (
        Job,
        lambda one: Job(one).loss,
        lambda one: Weighted(one.weight),
        lambda one: global_loss,
    ):
        monkeypatch.setitem(globals(), "criterion", plain := nn.CrossEntropyLoss())
        stepped(model, classified(), make(plain))
        monkeypatch.setitem(globals(), "criterion", weighted)
        with pytest.raises(ValueError, match="weighs classes"):
            stepped(model, classified(), make(weighted))
    assert _identity(Job(plain)) != _identity(Job(weighted))  # one after the other


class TokenClassifier(nn.Module):
    class config:  # of a base whose padding token is no class
        pad_token_id = 50_283


def test_a_model_is_asked_only_about_labels_that_it_has():
    labels = torch.arange(12).view(2, 6) % 3
    for changed in fewer_labels(TokenClassifier(), {"labels": labels}, True):
        assert changed["labels"].max() <= 2


def test_a_row_alone_is_asked_about_beside_another_class():
    for label, other in ((0, 1), (2, 0)):
        (group,) = groups_of_rows([{"x": torch.ones(1, 4), "labels": torch.tensor([label])}])
        assert group["labels"].tolist() == [label, other]


# What a forward leaves for the next one.


class Warming(nn.Linear):
    """The weight of its second part grows with each forward."""

    calls = 0

    def forward(self, x):
        self.calls += self.training
        embedded = super().forward(x)
        return embedded.square().mean() + self.calls / 100 * embedded.abs().mean()


def test_a_forward_that_changes_what_the_next_one_reads_is_refused():
    model = Warming(WIDTH, 4).double()
    before = [p.clone() for p in model.parameters()]
    for seed in (1, 2):  # trying again does not help
        with pytest.raises(
            ValueError, match=r"after optimizer\.step.*though no trained weight has"
        ):
            stepped(model, {"x": random(ROWS, WIDTH, seed=seed)})
    assert all(map(torch.equal, before, model.parameters()))
    stepped(model, numbers(), pieces=1)


def test_an_error_of_the_model_is_not_taken_for_its_loss():
    def breaks(model, micro):
        raise RuntimeError("size mismatch")

    with pytest.raises(ValueError, match=r"this raised RuntimeError: size mismatch") as raised:
        stepped(mlp(), numbers(), breaks)
    assert "compares rows" not in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_batches_without_rows_are_not_taken_at_their_word():
    """Packed rows with the places where they begin, or graphs with their edges."""
    micro = {"x": torch.randn(3, 6), "edges": torch.zeros(7, 2), "labels": torch.tensor([0, 1, 1])}
    ask = partial(find_rule, mlp(), loss_of=None, default=labels, how="accumulation=2")
    with pytest.warns(UserWarning, match="numbers of rows. The loss is taken as the mean"):
        assert ask([micro, micro]) is None
    with pytest.raises(ValueError, match=r"accumulation=1.*no labels of whole numbers"):
        ask([micro | {"labels": torch.randn(3)}])


class Pair(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out.square().mean(), out


def test_a_tuple_begins_with_the_loss():
    model, batch = Pair(WIDTH, 1).double(), numbers()
    assert error(stepped(model, batch), full(model, batch, lambda m, b: m(**b)[0])) <= EXACT


# The same through make_trainer: the model returns its loss, and rows come from a data set.


class Returning(nn.Module):
    """Has a part that it calls ``module``, as DistributedDataParallel does, and is asked itself."""

    def __init__(self, inner, loss):
        super().__init__()
        self.module, self.loss = inner, loss

    def forward(self, **batch):
        return {"loss": self.loss(self.module, batch)}


def trained(model, batch, loss, folder, items=None):
    """The gradient of the one step of ``make_trainer``'s trainer, from 4 micro-batches."""
    last = LastGradient()
    rows = [{name: values[i] for name, values in batch.items()} for i in range(ROWS)]
    given = {"train_dataset": rows, "remove_unused_columns": False, "max_steps": 1}
    given |= {"items": items, "callbacks": [last], "in_order": True}
    trainer_for(Returning(copy.deepcopy(model), loss), RECIPE, folder, **given).train()
    return last.found


@pytest.mark.parametrize("kind", ["gradient penalty", "samples"])
def test_make_trainer_has_the_full_batchs_gradient(kind, tmp_path):
    model, batch, loss = RIGHT[kind]
    assert error(trained(model, batch, loss, tmp_path), full(model, batch, loss)) <= EXACT


def test_make_trainer_refuses_what_compares_rows(tmp_path):
    model, batch, loss, says = COMPARED["router at the start"]
    with pytest.raises(ValueError, match=says):
        trained(model, batch, loss, tmp_path)


# Losses whose count nobody can guess, with items= that say it: one that is right, one that is not.


def token_mean(ignored, key="labels", shift=0):
    def loss(model, batch):
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        logits = model(x)[:, : STEPS - shift].flatten(0, 1)
        return F.cross_entropy(logits, batch[key][:, shift:].flatten(), ignore_index=ignored)

    return loss


def weighed_rows(model, batch):
    losses = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def of_masked(model, batch):
    """As in trl: the mask is as long as the labels, and its first number is not used."""
    targets, mask = batch["labels"][:, 1:].clamp(min=0), batch["mask"][:, 1:]
    losses = F.cross_entropy(model(batch["x"])[:, :-1].mT, targets, reduction="none")
    return (losses * mask).sum() / mask.sum()


ZEROS = tagged() | {"labels": tagged()["labels"].add(1).clamp(min=0) % CLASSES}
OTHER_NAME = {"x": tagged()["x"], "y": tagged()["labels"]}
WEIGHED = classified() | {"weight": random(ROWS, seed=6).abs() + 0.1}
MASKED = tagged() | {"mask": (tagged()["labels"] % 2).clamp(min=0)}
SAID = {
    "0 is ignored, after the shift": (
        ZEROS,
        token_mean(0, shift=1),
        lambda batch: (batch["labels"][:, 1:] != 0).sum().item(),
        lambda batch: (batch["labels"] != 0).sum(),
    ),
    "labels of another name, after the shift": (
        OTHER_NAME,
        token_mean(-100, "y", shift=1),
        "y",
        "x",
    ),
    "weights of rows": (WEIGHED, weighed_rows, "weight", "labels"),
    "a tuple": (tuple(OTHER_NAME.values()), token_mean(-100, key=1), 1, 0),
    "a mask of targets, after the shift": (MASKED, of_masked, "mask", "labels"),
}


@pytest.mark.parametrize("kind", SAID)
def test_a_count_that_is_said_is_exact_and_a_wrong_one_is_refused(kind, tmp_path):
    batch, loss, right, wrong = SAID[kind]
    model = mlp()
    expected = full(model, batch, loss)
    assert error(stepped(copy.deepcopy(model), batch, loss, right), expected) <= EXACT
    if kind == "weights of rows":
        assert error(trained(model, batch, loss, tmp_path, right), expected) <= EXACT
    for items, says in ((None, "labels or rows"), (wrong, "what items= counts")):
        with pytest.raises(ValueError, match=rf"^say what .* items=.*is no mean over {says}: "):
            stepped(copy.deepcopy(model), batch, loss, items)
        with pytest.raises(ValueError, match=f"no mean over {says}"):
            predict(model, batch=batch, loss=loss, recipe=RECIPE, items=items, target="cpu")
    predict(model, batch=batch, loss=loss, recipe=RECIPE, items=right, target="cpu")


@pytest.mark.parametrize(
    "items, says",
    [
        ("targets", r"items='targets' is no entry of the batch.*\['x', 'y'\]"),
        (lambda batch: "many", r"items\(batch\) must be a number of items"),
        (lambda batch: -1, r"items\(batch\) was -1"),
    ],
)
def test_what_items_cannot_be_is_said(items, says):
    with pytest.raises((TypeError, ValueError), match=says):
        stepped(mlp(), OTHER_NAME, token_mean(-100, "y"), items)


def breaks(model, batch):
    value = model(batch["x"]).sum()
    if dist.get_rank() == 1:
        raise KeyError("no such column")
    return value


def refused_on_a_rank() -> list[str]:
    """What is said where the rows of the second process alone show that the loss is no mean over
    rows, and where its loss alone raises an error; and of a model that counts its forwards.
    """
    batch, recipe = hidden_words(), replace(RECIPE, sharding="fsdp")
    if dist.get_rank() == 0:
        batch["mask"] = torch.ones(12, 6)
    run = prepare(mlp(4, 3), recipe)
    given = run.model, run.optimizer, batch, recipe
    said = [refusal(step, *given, loss=loss) for loss in (of_hidden_words, breaks)]
    warming = prepare(Warming(WIDTH, 4).double(), replace(RECIPE, sharding="ddp"))
    return [*said, refusal(step, warming.model, warming.optimizer, numbers(), RECIPE)]


def test_processes_that_compute_together_ask_equally_often():
    first, second = run_ranks(refused_on_a_rank)
    assert "another process found it" in first[0] and "mean of their losses alone" in second[0]
    assert "is a sum" in first[1] and "no such column" in second[1]
    assert all("though no trained weight has" in said[2] for said in (first, second))
