"""Losses that compare rows, through cached embeddings: the full batch's gradient in float64."""

import random

import pytest
import torch
import torch.nn.functional as F
from support.gradients import error
from support.gradients import taken_gradient as gradient
from torch import nn

from gradmem_lib import Accumulated, MemoryTracker, accumulate_through_embeddings, split

VOCAB, TOKENS, WIDTH = 31, 6, 16
LIMIT = 1e-12


class Encoder(nn.Module):
    """Token ids (rows, tokens) to embeddings (rows, 8)."""

    def __init__(self, hidden=WIDTH):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.inside = nn.Linear(WIDTH, hidden)
        self.out = nn.Linear(hidden, 8)
        self.temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, ids):
        return self.out(self.inside(self.words(ids)).tanh()).mean(1)


def encoder(**settings):
    torch.manual_seed(0)
    return Encoder(**settings).double()


def pairs(rows=7):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (rows, 2 * TOKENS), generator=generator)
    classes = torch.arange(rows) % 3
    return {"query": ids[:, :TOKENS], "passage": ids[:, TOKENS:], "class": classes}


def in_batch_negatives(model):
    """Every other passage is a negative; the temperature is trained (CLIP)."""

    def loss_of(queries, passages):
        similar = F.normalize(queries, dim=-1) @ F.normalize(passages, dim=-1).T
        return F.cross_entropy(similar / model.temperature.exp(), torch.arange(len(queries)))

    return loss_of


def decorrelated(queries, passages):
    """Barlow twins: columns over the batch."""
    a, b = ((e - e.mean(0)) / e.std(0) for e in (queries, passages))
    crossed = a.T @ b / len(a)
    return (crossed - torch.eye(len(crossed), dtype=torch.float64)).square().sum()


def both(model):
    return lambda micro: (model(micro["query"]), model(micro["passage"]))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", ["in-batch negatives", "decorrelated"])
def test_the_gradient_is_the_full_batchs(loss, size):
    model, batch = encoder(), pairs()
    loss_of = decorrelated if loss == "decorrelated" else in_batch_negatives(model)
    mean = loss_of(*both(model)(batch))
    mean.backward()
    expected = gradient(model)
    model.words.weight.grad = torch.ones_like(model.words.weight)  # from before
    found = accumulate_through_embeddings(list(split(batch, size)), both(model), loss_of)
    model.words.weight.grad -= 1
    assert error(gradient(model), expected) <= LIMIT
    assert isinstance(found, Accumulated) and found.items == 7
    assert found.loss == pytest.approx(mean.item(), rel=LIMIT)


def test_embeddings_may_be_complex():
    layer, rows = nn.Linear(5, 4, dtype=torch.complex128), torch.randn(7, 5, dtype=torch.complex128)

    def loss_of(embedded):
        return (embedded @ embedded.conj().T).abs().mean()

    loss_of(layer(rows)).backward()
    expected, layer.weight.grad = layer.weight.grad, None
    accumulate_through_embeddings(list(split(rows, 3)), layer, loss_of)
    torch.testing.assert_close(layer.weight.grad, expected)


def test_the_activations_are_those_of_one_micro_batch():
    model, batch = encoder(hidden=256), pairs(16)
    loss_of, most = in_batch_negatives(model), []
    for size in (8, 4, 2):
        with MemoryTracker(model, live=False) as tracker:
            accumulate_through_embeddings(list(split(batch, size)), both(model), loss_of)
        most.append(max(tracker.timeline.by_category["activations"]))
        model.zero_grad()
    one_row = 2 * TOKENS * 256 * 8  # what tanh keeps of a query and of a passage, in float64
    assert most[0] - most[1] >= 4 * one_row and most[1] - most[2] >= 2 * one_row


def test_batch_norm_is_said():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(6, 3)
    with pytest.warns(UserWarning, match="1 is a BatchNorm1d") as said:
        accumulate_through_embeddings(x.split(3), model, torch.std, model=model)
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"micro_batches": (n for n in [1])}, "generator can be read once"),
        ({"micro_batches": []}, "there is no micro-batch"),
        ({"embed": lambda m: 3}, "embed must return a tensor .* returned int"),
        ({"embed": lambda m: m["query"].sum()}, r"a tensor of shape \(\)"),
        ({"embed": lambda m: (torch.ones(1),) * len(m["query"])}, "zip"),
        ({"embed": lambda m: torch.ones(3)}, "no embedding has a gradient"),
        ({"loss_of": lambda rows: rows}, r"a tensor of shape \(7, 8\)"),
        ({"loss_of": lambda rows: 1.0}, "returned float"),
    ],
)
def test_what_cannot_be_right_is_said(given, says):
    model = encoder()
    arguments = {
        "micro_batches": list(split(pairs(), 3)),
        "embed": lambda micro: model(micro["query"]),
        "loss_of": torch.std,
    }
    with pytest.raises((TypeError, ValueError), match=says):
        accumulate_through_embeddings(**(arguments | given))


def test_other_embeddings_in_the_second_pass_are_refused_and_the_random_state_is_kept():
    model, numbers = encoder(), random.Random(0)

    def embed(micro):
        return model(micro["query"]) * numbers.random()

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="other embeddings for the same micro-batch"):
        accumulate_through_embeddings(list(split(pairs(), 3)), embed, torch.std)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = []

    def interrupted(micro):
        drawn.append(torch.rand(()))
        if len(drawn) == 4:  # the first of the second pass
            raise KeyboardInterrupt
        return model(micro["query"])

    torch.manual_seed(5)
    torch.rand(3)
    expected = torch.rand(())  # as after one pass
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        accumulate_through_embeddings(list(split(pairs(), 3)), interrupted, torch.std)
    assert torch.rand(()) == expected
