"""Segmentation: the scores of all pixels are named, and their loss in pieces keeps the promise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.measure.remedied_peak import peak_without

NAME = "The scores of all positions are the largest part"


def segmentation(classes: int, size: int, pieces: int = 1, sliced: bool = False) -> MemoryTracker:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    head = nn.Conv2d(8, classes, 1)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.Adam(model.parameters())

    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            x = torch.randn(2, 3, size, size)
            y = torch.randint(0, classes, (2, size, size))
            if pieces == 1:
                loss = F.cross_entropy(model(x), y)
            else:
                loss = loss_in_pieces(head, body(x), y, pieces, sliced)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return tracker


def loss_in_pieces(head, features, labels, pieces: int, sliced: bool) -> torch.Tensor:
    def loss_of(features, labels):
        return F.cross_entropy(head(features), labels, reduction="sum")

    lines = features.shape[2] // pieces
    losses = []
    for i in range(pieces):
        rows = slice(i * lines, (i + 1) * lines)
        piece = features[:, :, rows] if sliced else features.chunk(pieces, 2)[i]
        losses.append(checkpoint(loss_of, piece, labels[:, rows], use_reentrant=False))
    return sum(losses) / labels.numel()


@pytest.mark.parametrize(("classes", "size"), [(150, 64), (21, 64), (400, 32)])
def test_scores_of_pixels_are_named_and_pieces_keep_the_promise(classes, size):
    before = diagnose(segmentation(classes, size))
    cause = before.causes[0]
    assert cause.name == NAME
    assert cause.nbytes == 3 * 4 * 2 * classes * size * size  # and their two gradients
    promised = peak_without(cause, before.facts)[0]
    for sliced in (False, True):
        for pieces in (8, 16):
            after = segmentation(classes, size, pieces, sliced)
            assert after.peak.total <= promised < before.peak.total


class Enlarged(nn.Module):
    """Scores of a smaller size, enlarged to the image's."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, 4, padding=1), nn.Conv2d(8, 50, 1)

    def forward(self, x):
        return F.interpolate(self.head(self.body(x).relu()), x.shape[2:], mode="bilinear")


class Pooled(nn.Module):
    """A classifier: its convolutions of size 1 are followed by a matrix."""

    def __init__(self):
        super().__init__()
        self.body, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 50, 1)
        self.head = nn.Linear(50, 10)

    def forward(self, x):
        return self.head(self.wide(self.body(x).relu()).mean((2, 3)))


@pytest.mark.parametrize("make", [Enlarged, Pooled])
def test_other_maps_are_not_accused(make):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            scores = model(torch.randn(2, 3, 32, 32))
            labels = torch.randint(0, scores.shape[1], (2, *scores.shape[2:]))
            F.cross_entropy(scores, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert NAME not in [cause.name for cause in diagnose(tracker).causes]


def ctc_loss(scores):
    lengths, targets = torch.full((8,), 400), torch.randint(1, 60, (8, 20))
    log_probabilities = scores.log_softmax(1).permute(2, 0, 1)
    return F.ctc_loss(log_probabilities, targets, lengths, torch.full((8,), 20))


def heatmaps(scores):
    """For each of the second dimension, one of all positions is the right one."""
    targets = torch.randint(0, 400, (8, 60, 1))
    return -scores.log_softmax(2).gather(2, targets).mean()


@pytest.mark.parametrize("loss_of", [ctc_loss, heatmaps])
def test_a_loss_that_needs_all_positions_at_once_has_no_pieces(loss_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 60, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            loss_of(model(torch.randn(8, 4, 400))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert NAME not in [cause.name for cause in diagnose(tracker).causes]
