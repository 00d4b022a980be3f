"""Predictions for losses that compare rows, weigh classes, or train weights of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.nightly import each
from support.predicted import assert_predicted, tracked
from torch import Tensor, nn

from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.training.recipe import Recipe

ROWS, FEATURES, CLASSES = 6, 8, 4


class Net(nn.Module):
    """Scores of four classes, and what losses need: a temperature, weights, and a teacher."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.tasks = nn.Parameter(torch.zeros(2))
        self.register_buffer("classes", torch.rand(CLASSES))
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def triplet(net: Net, batch: tuple) -> Tensor:
    x, _ = batch
    return F.triplet_margin_loss(net(x), net(x + 0.1), net(x.square()))


def focal(net: Net, batch: tuple) -> Tensor:
    x, labels = batch
    losses = F.cross_entropy(net(x), labels, reduction="none")
    return ((1 - (-losses).exp()).square() * losses).mean()


def contrastive(net: Net, batch: tuple) -> Tensor:
    x, _ = batch
    one, other = F.normalize(net(x), dim=-1), F.normalize(net(x + 0.1), dim=-1)
    return F.cross_entropy(one @ other.T * net.temperature.exp(), torch.arange(len(x)))


def tasks_with_learned_weights(net: Net, batch: tuple) -> Tensor:
    x, labels = batch
    scores = net(x)
    losses = torch.stack([F.cross_entropy(scores, labels), scores.square().mean()])
    return (losses * (-net.tasks).exp() + net.tasks).sum()


def smoothed_labels(net: Net, batch: tuple) -> Tensor:
    x, labels = batch
    return F.cross_entropy(net(x), labels, weight=net.classes, label_smoothing=0.1)


def distillation(net: Net, batch: tuple) -> Tensor:
    x, labels = batch
    scores = net(x)
    with torch.no_grad():
        target = net.teacher(x).softmax(-1)
    imitation = F.kl_div(scores.log_softmax(-1), target, reduction="batchmean")
    return imitation + F.cross_entropy(scores, labels)


BY_ROW = [triplet, focal, tasks_with_learned_weights, distillation]
BETWEEN_ROWS = [contrastive, smoothed_labels]
RECIPES = [
    {},
    {"checkpointing": "per-layer", "layers": "layers"},
    {"precision": "autocast-bf16"},
    {"accumulation": 2},
    {"accumulation": 2, "precision": "autocast-bf16"},
]
CASES = [
    (loss, fields)
    for loss in BY_ROW + BETWEEN_ROWS
    for fields in RECIPES
    if loss in BY_ROW or "accumulation" not in fields
]


def a_batch() -> tuple[Tensor, Tensor]:
    return torch.rand(ROWS, FEATURES), torch.arange(ROWS) % CLASSES


@pytest.mark.parametrize("loss, fields", each(2, CASES))
def test_the_loss_is_predicted(loss, fields):
    assert_predicted(Net(), a_batch(), Recipe(**fields), loss)


@pytest.mark.parametrize("loss", BETWEEN_ROWS)
def test_what_must_not_be_cut_is_refused_as_in_a_step(loss):
    cut = Recipe(accumulation=2)
    with pytest.raises(ValueError, match="is no mean over labels or rows"):
        predict(Net(), batch=a_batch(), recipe=cut, loss=loss, target="cpu")
    with pytest.raises(ValueError, match="is no mean over labels or rows"):
        tracked(Net(), a_batch(), cut, loss)


def aligned(net: Net, batch: tuple) -> Tensor:
    """CTC, whose longest target decides how large its tables are."""
    sounds, words, lengths = batch
    scores = net(sounds).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, words, torch.full_like(lengths, sounds.shape[1]), lengths)


def test_ctc_is_refused():
    words = torch.ones(ROWS, 3, dtype=torch.int64)
    batch = torch.rand(ROWS, 10, FEATURES), words, torch.full((ROWS,), 3)
    with pytest.raises(CannotTrace, match=r"ctc_loss.*has a result whose size"):
        predict(Net(), batch=batch, loss=aligned, target="cpu")
    tracked(Net(), batch, loss=aligned)  # it is a loss that works
