"""Losses of many fields, in pieces: the gradient is the full batch's to the last digits of float64,
or a refusal whose way out works.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import TrainerCallback

from gradmem_lib import (
    Recipe,
    accumulate_gradients,
    check_pieces_add_up,
    make_trainer,
    predict,
    split,
    step,
)

ROWS, WIDTH, CLASSES, STEPS = 8, 6, 5, 7
RECIPE = Recipe(precision=None, optimizer="sgd", accumulation=4, attention=None)
LENGTHS = torch.tensor([7, 3, 5, 2, 7, 6, 1, 4])


def random(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(*shape, seed=2):
    return torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(seed))


def mlp(outputs=CLASSES, inputs=WIDTH):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)).double()


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def full(model, batch, loss):
    model = copy.deepcopy(model)
    loss(model, batch).backward()
    return gradient(model)


def stepped(model, batch, loss, items=None):
    """The gradient that ``step`` puts together from 4 micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, optimizer, batch, RECIPE, loss=loss, items=items, keep_gradients=True)
    return gradient(model)


def same(found, expected):
    return (found - expected).norm() <= 1e-10 * expected.norm()


def classified():
    return {"x": random(ROWS, WIDTH), "labels": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])}


def tagged():
    """Words with labels; rows are filled up with -100."""
    labels = classes(ROWS, STEPS).masked_fill(torch.arange(STEPS) >= LENGTHS[:, None], -100)
    return {"x": random(ROWS, STEPS, WIDTH), "labels": labels}


def noised():
    """Rows that bring their own noise and time."""
    time = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {"x": random(ROWS, WIDTH), "noise": random(ROWS, WIDTH, seed=4), "time": time}


# Right in pieces.


def connectionist(model, micro):
    """CTC divides each row by its own length; the labels have no -100."""
    log_p = model(micro["x"]).log_softmax(-1).transpose(0, 1)
    steps = torch.full((len(micro["x"]),), 12)
    return F.ctc_loss(log_p, micro["labels"], steps, micro["lengths"])


def transcribed():
    lengths = torch.tensor([5, 2, 3, 4, 1, 5, 3, 2])
    labels = torch.randint(1, CLASSES, (ROWS, 5), generator=torch.Generator().manual_seed(2))
    return {"x": random(ROWS, 12, WIDTH), "labels": labels, "lengths": lengths}


def smoothed(model, micro):
    logits, labels = model(micro["x"]).flatten(0, 1), micro["labels"].flatten()
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def dice_of_rows(model, micro):
    p, labels = model(micro["x"]).sigmoid(), micro["labels"]
    both = (p * labels).sum(1)
    return (1 - (2 * both + 1) / (p.sum(1) + labels.sum(1) + 1)).mean()


def segmented():
    return {"x": random(ROWS, WIDTH), "labels": (random(ROWS, 9, seed=3) > 0.5).long()}


TEACHER = mlp().requires_grad_(False)


def distilled(model, micro):
    logits = model(micro["x"])
    soft = (TEACHER(micro["x"]) / 2).softmax(-1)
    far = F.kl_div((logits / 2).log_softmax(-1), soft, reduction="batchmean")
    return F.cross_entropy(logits, micro["labels"]) + 4 * far


def denoised(model, micro):
    """Diffusion: the noise is predicted at the time of the row."""
    time, noise = micro["time"], micro["noise"]
    seen = (1 - time) * micro["x"] + time * noise
    return F.mse_loss(model(torch.cat([seen, time], 1)), noise)


def penalized(model, micro):
    """A critic's gradient penalty, which needs gradients in its forward."""
    time, noise = micro["time"], micro["noise"]
    between = ((1 - time) * micro["x"] + time * noise).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return model(noise).mean() - model(micro["x"]).mean() + 10 * penalty


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.head = nn.GRU(WIDTH, 8, batch_first=True), nn.Linear(8, CLASSES)


def packed(model, micro):
    rows = nn.utils.rnn.pack_padded_sequence(
        micro["x"], micro["lengths"], batch_first=True, enforce_sorted=False
    )
    out, _ = model.gru(rows)
    out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=STEPS)
    return F.cross_entropy(model.head(out).flatten(0, 1), micro["labels"].flatten())


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(WIDTH, 6), nn.Linear(3, WIDTH)


def evidence(model, micro):
    mean, log_var = model.encoder(micro["x"]).chunk(2, -1)
    drawn = mean + micro["noise"][:, :3] * (log_var / 2).exp()
    far = -0.5 * (1 + log_var - mean.square() - log_var.exp()).mean()
    return F.mse_loss(model.decoder(drawn), micro["x"]) + far


class Uncertain(nn.Module):
    """Two heads, weighed by what the model learns of their noise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.number = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))


def weighed_by_uncertainty(model, micro):
    first, second = model.log_variances
    named = F.cross_entropy(model.classes(micro["x"]), micro["labels"])
    squared = F.mse_loss(model.number(micro["x"])[:, 0], micro["score"])
    return named * (-first).exp() + first + squared * (-second).exp() + second


def scored():
    return classified() | {"score": random(ROWS, seed=5)}


RIGHT = {
    "ctc": (mlp(), transcribed(), connectionist),
    "smoothing": (mlp(), tagged(), smoothed),
    "dice of rows": (mlp(9), segmented(), dice_of_rows),
    "distillation": (mlp(), classified(), distilled),
    "diffusion": (mlp(WIDTH, WIDTH + 1), noised(), denoised),
    "gradient penalty": (mlp(1), noised(), penalized),
    "packed GRU": (Recurrent().double(), tagged() | {"lengths": LENGTHS}, packed),
    "VAE": (Variational().double(), noised(), evidence),
    "uncertainty": (Uncertain().double(), scored(), weighed_by_uncertainty),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_mean_over_items_is_the_full_batchs(kind):
    model, batch, loss = RIGHT[kind]
    model = copy.deepcopy(model)
    expected = full(model, batch, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(stepped(model, batch, loss), expected)


# Refused, with a way out that works: sums with their counts.


def masked(model, micro):
    """Sum of squares where the mask is, and the size of the mask."""
    off = (model(micro["x"]) - micro["target"]).square() * micro["mask"]
    return [(off.sum(), micro["mask"].sum())]


def with_mask():
    mask = random(ROWS, 4, seed=5) > -0.3
    return {"x": random(ROWS, WIDTH), "target": random(ROWS, 4, seed=4), "mask": mask}


def focal(model, micro):
    """Detection: divided by the number of objects."""
    logits, labels = model(micro["x"])[:, 0], micro["labels"].double()
    p = logits.sigmoid()
    hit = p * labels + (1 - p) * (1 - labels)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return [(((1 - hit) ** 2 * losses).sum(), labels.sum())]


def detected():
    return {"x": random(ROWS, WIDTH), "labels": torch.tensor([0, 1, 0, 1, 1, 0, 0, 1])}


CLASS_WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 1.0, 5.0], dtype=torch.float64)


def rare_class(model, micro):
    """Only the fifth class has another weight."""
    labels = micro["labels"]
    summed = F.cross_entropy(model(micro["x"]), labels, weight=CLASS_WEIGHTS, reduction="sum")
    return [(summed, CLASS_WEIGHTS[labels].sum())]


def with_rare_class():
    return {"x": random(ROWS, WIDTH), "labels": torch.tensor([0, 1, 2, 3, 0, 1, 2, 4])}


def z_loss(model, micro):
    """Of all tokens, while the cross-entropy has its labels."""
    logits, labels = model(micro["x"]), micro["labels"].flatten()
    named = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    sizes = logits.logsumexp(-1).square()
    return [(named, (labels != -100).sum()), (1e-4 * sizes.sum(), sizes.numel())]


def two_heads(model, micro):
    """A label is missing for some rows, and a score for none."""
    labels = micro["labels"]
    named = F.cross_entropy(model.classes(micro["x"]), labels, reduction="sum")
    squared = (model.number(micro["x"])[:, 0] - micro["score"]).square().sum()
    return [(named, (labels != -100).sum()), (squared, len(labels))]


def partly_labelled():
    return scored() | {"labels": torch.tensor([0, -100, 2, 3, 4, -100, 1, 2])}


SUMS = {
    "mask": (mlp(4), with_mask(), masked),
    "focal": (mlp(1), detected(), focal),
    "rare class": (mlp(), with_rare_class(), rare_class),
    "row without a label": (Uncertain().double(), partly_labelled(), two_heads),
}


@pytest.mark.parametrize("kind", SUMS)
def test_what_step_refuses_is_exact_as_sums_with_their_counts(kind):
    model, batch, pairs = SUMS[kind]
    model = copy.deepcopy(model)

    def loss(asked, micro):
        return sum(total / count for total, count in pairs(asked, micro))

    expected = full(model, batch, loss)
    with pytest.raises(ValueError, match="is no mean over labels or rows"):
        stepped(model, batch, loss)
    model.zero_grad()
    several = list(split(batch, 2))
    shown = next(split(batch, 4))
    check_pieces_add_up(model, shown, lambda micro: pairs(model, micro))

    def counts(micro):
        return tuple(count for _, count in pairs(model, micro))

    accumulate_gradients(several, lambda micro: pairs(model, micro), count_items=counts)
    assert same(gradient(model), expected)


def test_a_small_part_with_a_mean_of_its_own_is_said_and_exact_as_a_second_pair():
    model, batch = mlp(), tagged()

    def loss(asked, micro):
        return sum(total / count for total, count in z_loss(asked, micro))

    expected = full(model, batch, loss)
    with pytest.warns(UserWarning, match="more than rounding seems to explain"):
        found = stepped(model, batch, loss)
    assert not same(found, expected)  # the warning is true
    model.zero_grad()

    def counts(micro):
        return (micro["labels"] != -100).sum(), micro["labels"].numel()

    accumulate_gradients(
        list(split(batch, 2)), lambda micro: z_loss(model, micro), count_items=counts
    )
    assert same(gradient(model), expected)


# Refused: rows are compared. Uncut, each of them is right.


def dice(model, micro):
    p, labels = model(micro["x"]).sigmoid(), micro["labels"]
    return 1 - (2 * (p * labels).sum() + 1) / (p.sum() + labels.sum() + 1)


def hardest_triplets(model, micro):
    embedded = F.normalize(model(micro["x"]), dim=-1)
    far = (embedded[:, None] - embedded[None]).square().sum(-1)
    same_class = micro["labels"][:, None] == micro["labels"][None]
    nearest = far.masked_fill(same_class, 10.0).min(1).values
    return F.relu((far * same_class).max(1).values - nearest + 0.2).mean()


def in_pairs():
    return {"x": random(ROWS, WIDTH), "labels": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])}


def normalized_rewards(model, micro):
    reward = micro["x"][:, 0]
    advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 1e-6)
    log_p = model(micro["x"]).log_softmax(-1).gather(1, micro["labels"][:, None])[:, 0]
    return -(advantage * log_p).mean()


def above_the_mean(model, micro):
    """Of two rows, one is as far above their mean as the other is below."""
    score = 5 * model(micro["x"])[:, 0]
    return (1 - torch.sigmoid(score - score.detach().mean())).mean()


def mixed(model, micro):
    other = torch.arange(len(micro["x"])).flip(0)
    logits = model(0.7 * micro["x"] + 0.3 * micro["x"][other])
    labels = micro["labels"]
    return 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels[other])


def root(model, micro):
    return F.mse_loss(model(micro["x"]), micro["x"]).sqrt()


def balanced_experts(model, micro):
    chosen = model(micro["x"]).softmax(-1)
    used = F.one_hot(chosen.argmax(-1), CLASSES).double().mean(0)
    named = F.cross_entropy(model(micro["x"]), micro["labels"])
    return named + 1e-4 * CLASSES * (used * chosen.mean(0)).sum()


COMPARED = {
    "dice": (mlp(9), segmented(), dice),
    "triplets": (mlp(4), in_pairs(), hardest_triplets),
    "rewards": (mlp(), classified(), normalized_rewards),
    "above the mean": (mlp(1), {"x": random(ROWS, WIDTH)}, above_the_mean),
    "mixup": (mlp(), classified(), mixed),
    "root": (mlp(WIDTH), {"x": random(ROWS, WIDTH)}, root),
    "router": (mlp(), classified(), balanced_experts),
}


@pytest.mark.parametrize("kind", COMPARED)
def test_a_loss_that_compares_rows_is_refused(kind):
    model, batch, loss = COMPARED[kind]
    model = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"is no mean over labels or rows|it is 0 for a few rows"):
        stepped(model, batch, loss)


def test_a_first_ignored_label_in_a_later_batch_is_asked_about():
    """Equally long rows do not show that each row has a mean of its own."""

    def mean_of_means(asked, micro):
        losses = F.cross_entropy(
            asked(micro["x"]).transpose(1, 2), micro["labels"].clamp(min=0), reduction="none"
        )
        there = micro["labels"] != -100
        return ((losses * there).sum(1) / there.sum(1)).mean()

    model = mlp()
    stepped(model, {"x": random(ROWS, STEPS, WIDTH), "labels": classes(ROWS, STEPS)}, mean_of_means)
    model.zero_grad()
    expected = full(model, tagged(), mean_of_means)
    assert same(stepped(model, tagged(), mean_of_means), expected)


# The same through make_trainer: the model returns its loss, and rows come from a data set.


class Returning(nn.Module):
    def __init__(self, inner, loss):
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, **batch):
        return {"loss": self.loss(self.inner, batch)}


class RowsOf(torch.utils.data.Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["x"])

    def __getitem__(self, i):
        return {name: rows[i] for name, rows in self.batch.items()}


class LastGradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.found = gradient(model)


def trained(model, batch, loss, folder, items=None):
    """The gradient of the one step of ``make_trainer``'s trainer, from 4 micro-batches."""
    last = LastGradient()
    trainer = make_trainer(
        Returning(copy.deepcopy(model), loss),
        RECIPE,
        batch_size=ROWS,
        items=items,
        train_dataset=RowsOf(batch),
        max_steps=1,
        max_grad_norm=0.0,
        output_dir=str(folder),
        callbacks=[last],
        live=False,
        progress=False,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    return last.found


@pytest.mark.parametrize("kind", RIGHT)
def test_make_trainer_has_the_full_batchs_gradient(kind, tmp_path):
    model, batch, loss = RIGHT[kind]
    assert same(trained(model, batch, loss, tmp_path), full(model, batch, loss))


@pytest.mark.parametrize("kind", COMPARED)
def test_make_trainer_refuses_what_compares_rows(kind, tmp_path):
    model, batch, loss = COMPARED[kind]
    with pytest.raises(ValueError, match=r"is no mean over labels or rows|it is 0 for a few rows"):
        trained(model, batch, loss, tmp_path)


# Losses whose count nobody can guess, with items= that say it: one that is right, one that is not.
def tokens(ignored, key="labels"):
    """Steps of unlike lengths, with a label for each."""
    hidden = torch.arange(STEPS) >= LENGTHS[:, None]
    return {
        "x": random(ROWS, STEPS, WIDTH),
        key: classes(ROWS, STEPS).add(1).masked_fill(hidden, ignored) % (CLASSES + 1),
    }


def token_mean(ignored, key="labels", shift=0):
    def loss(model, batch):
        logits = model(batch["x"])[:, : STEPS - shift].flatten(0, 1)
        return F.cross_entropy(logits, batch[key][:, shift:].flatten(), ignore_index=ignored)

    return loss


def weighed_rows(model, batch):
    each = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
    return (each * batch["weight"]).sum() / batch["weight"].sum()


def of_shown(model, batch):
    """A mean over what the batch's own mask shows."""
    errors = (model(batch["x"]) - batch["y"]).square().mean(-1)
    return (errors * batch["shown"]).sum() / batch["shown"].sum()


def hundreds(key):
    batch = tokens(0, key)
    return batch | {key: torch.where(batch[key] == 0, -100, batch[key] - 1)}


def with_rows(**more):
    return classified() | more


def not_zero(batch):
    return (batch["labels"] != 0).sum()


SHOWN = torch.arange(STEPS) < LENGTHS[:, None]
STEPPED = {"x": random(ROWS, STEPS, WIDTH), "y": random(ROWS, STEPS, CLASSES, seed=5)}
WEIGHED = with_rows(weight=random(ROWS, seed=6).abs() + 0.1)
SAID = {
    "0 is ignored": (tokens(0), token_mean(0), not_zero, lambda batch: batch["labels"].numel()),
    "0 is ignored, after the shift": (
        tokens(0),
        token_mean(0, shift=1),
        lambda batch: (batch["labels"][:, 1:] != 0).sum().item(),
        not_zero,
    ),
    "labels of another name": (hundreds("y"), token_mean(-100, "y"), "y", "x"),
    "the same after the shift": (hundreds("y"), token_mean(-100, "y", shift=1), "y", "x"),
    "weights of rows": (WEIGHED, weighed_rows, "weight", "labels"),
    "their sum": (WEIGHED, weighed_rows, lambda batch: batch["weight"].sum(), len),
    "a mask": (STEPPED | {"shown": SHOWN}, of_shown, "shown", "y"),
}


@pytest.mark.parametrize("kind", SAID)
def test_a_count_that_is_said_is_exact_and_a_wrong_one_is_refused(kind, tmp_path):
    batch, loss, right, wrong = SAID[kind]
    model = mlp(CLASSES + 1 if "labels" in batch and "weight" not in batch else CLASSES)
    expected = full(model, batch, loss)
    assert same(stepped(copy.deepcopy(model), batch, loss, right), expected)
    assert same(trained(model, batch, loss, tmp_path, right), expected)
    for items, says in ((None, "labels or rows"), (wrong, "what items= counts")):
        with pytest.raises(ValueError, match=rf"^say what .* items=.*is no mean over {says}: "):
            stepped(copy.deepcopy(model), batch, loss, items)
        with pytest.raises(ValueError, match=f"no mean over {says}"):
            predict(model, batch=batch, loss=loss, recipe=RECIPE, items=items, target="cpu")
    predict(model, batch=batch, loss=loss, recipe=RECIPE, items=right, target="cpu")


@pytest.mark.parametrize("items", [1, lambda batch: (batch[1] != -1).sum()], ids=["key", "count"])
def test_a_tuple_as_batch_has_a_count_too(items):
    batch = hundreds("y")
    pair = (batch["x"], batch["y"])
    ignored = -100
    if callable(items):
        ignored = -1
        pair = (batch["x"], batch["y"].clamp(min=-1))

    def loss(model, pair):
        return token_mean(ignored, 1)(model, {"x": pair[0], 1: pair[1]})

    model = mlp()
    assert same(stepped(copy.deepcopy(model), pair, loss, items), full(model, pair, loss))
    with pytest.raises(ValueError, match=r"^say what the loss is divided by: items="):
        stepped(model, pair, loss)


def test_what_items_cannot_be_is_said():
    batch = hundreds("y")
    for items, says in (
        ("targets", r"items='targets' is no entry of the batch.*\['x', 'y'\]"),
        (lambda batch: "many", r"items\(batch\) must be a number of items"),
        (lambda batch: -1, r"items\(batch\) was -1"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            stepped(mlp(), batch, token_mean(-100, "y"), items)
