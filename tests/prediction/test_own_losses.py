"""Losses of one's own: what each keeps and computes is predicted as the tracker measures it, or
refused.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.nightly import each
from support.oracle import allocator_peak
from support.predicted import assert_predicted, tracked
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap

from gradmem_lib import Recipe, predict, prepare, step
from gradmem_lib.prediction.question import CannotTrace

ROWS, FEATURES, CLASSES = 6, 8, 4
X, LABELS = torch.rand(ROWS, FEATURES), torch.arange(ROWS) % CLASSES
TARGETS, WEIGHTS = torch.rand(ROWS, CLASSES), torch.rand(CLASSES)
ELSEWHERE = torch.ones(ROWS, FEATURES)


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


# By row.


def focal(net: Net, batch: tuple) -> Tensor:
    x, labels = batch
    losses = F.cross_entropy(net(x), labels, reduction="none")
    return ((1 - (-losses).exp()).square() * losses).mean()


def tasks_with_learned_weights(net: Net, batch: tuple) -> Tensor:
    x, labels = batch
    scores = net(x)
    losses = torch.stack([F.cross_entropy(scores, labels), scores.square().mean()])
    return (losses * (-net.tasks).exp() + net.tasks).sum()


def distillation(net: Net, batch: tuple) -> Tensor:
    x, labels = batch
    scores = net(x)
    with torch.no_grad():
        target = net.teacher(x).softmax(-1)
    imitation = F.kl_div(scores.log_softmax(-1), target, reduction="batchmean")
    return imitation + F.cross_entropy(scores, labels)


def policy(net: Net, batch: tuple) -> Tensor:
    """``torch.distributions`` checks its arguments, and so reads values."""
    x, labels = batch
    chosen = torch.distributions.Categorical(logits=net(x))
    return -(chosen.log_prob(labels) + chosen.entropy()).mean()


# Between rows.


def contrastive(net: Net, batch: tuple) -> Tensor:
    x, _ = batch
    one, other = F.normalize(net(x), dim=-1), F.normalize(net(x + 0.1), dim=-1)
    return F.cross_entropy(one @ other.T * net.temperature.exp(), torch.arange(len(x)))


def smoothed_labels(net: Net, batch: tuple) -> Tensor:
    x, labels = batch
    return F.cross_entropy(net(x), labels, weight=net.classes, label_smoothing=0.1)


BY_ROW = [focal, tasks_with_learned_weights, distillation, policy]
BETWEEN_ROWS = [contrastive, smoothed_labels]
WHOLE = [{}, {"checkpointing": "per-layer", "layers": "layers"}, {"precision": "autocast-bf16"}]
CUT = [{"accumulation": 2}, {"accumulation": 2, "precision": "autocast-bf16"}]
CASES = [*product(BY_ROW, WHOLE + CUT), *product(BETWEEN_ROWS, WHOLE)]


@pytest.mark.parametrize(("loss", "fields"), each(5, CASES))
def test_a_loss_is_predicted(loss, fields):
    assert_predicted(Net(), (X, LABELS), Recipe(**fields), loss)


@pytest.mark.parametrize("loss", BETWEEN_ROWS)
def test_what_must_not_be_cut_is_refused_as_in_a_step(loss):
    cut = Recipe(accumulation=2)
    with pytest.raises(ValueError, match="is no mean over labels or rows"):
        predict(Net(), batch=(X, LABELS), recipe=cut, loss=loss, target="cpu")
    with pytest.raises(ValueError, match="is no mean over labels or rows"):
        tracked(Net(), (X, LABELS), cut, loss)


FUNCTIONS = (
    F.mse_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.l1_loss,
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.kl_div,
    F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
)


@pytest.mark.parametrize(
    ("function", "reduction"), each(2, product(FUNCTIONS, ["mean", "sum", "none"]))
)
def test_a_loss_may_keep_more_than_its_number(function, reduction):
    def loss(net, batch):
        return function(net(batch[0]).sigmoid(), batch[1], reduction=reduction).mean()

    assert_predicted(Net(), (X, TARGETS), loss=loss)


# With derivatives: by torch.func, in forward mode, and as a penalty on a gradient.


def along_ones(net, x):
    return jvp(net, (x,), (torch.ones_like(x),))


def slope_in_forward_mode(net, x):
    value, slope = along_ones(net, x)
    return value.square().mean() + slope.square().mean()


def all_columns(net, x):
    return jacfwd(lambda y: net(y).sum(0))(x).square().mean()


def curvature(net, x):
    return hessian(lambda y: net(y).mean())(x[0]).square().mean()


def gradients_of_rows(net, x):
    def loss(weights, row):
        return functional_call(net.layers, weights, (row,)).square().mean()

    found = vmap(grad(loss), in_dims=(None, 0))(dict(net.layers.named_parameters()), x)
    return sum(gradient.square().sum() for gradient in found.values())


def gradient_penalty(critic, x):
    """The loss of a Wasserstein critic: Gulrajani et al., 2017, equation 3."""
    real, generated = x, x.flip(0)
    share = torch.rand(len(x), 1)
    between = (share * real + (1 - share) * generated).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return critic(generated).mean() - critic(real).mean() + 10 * penalty


def penalty_after_the_loss(critic, x):
    """The gradient is the last that the loss takes: between it and backward, memory is freed."""
    loss = critic(x).mean()
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(critic(point).sum(), point, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + loss


# Of other tensors than the batch's.


def short_range(net, x):
    """As a Dice loss reads the dimensions that it sums over."""
    dimensions = torch.arange(1, x.dim()).tolist()
    numbers = [int(n) for n in torch.arange(0, 7, 3)]
    return net(x).sin().sum(dimensions).mean() * sum(numbers)


def given_from_elsewhere(net, x):
    return net(ELSEWHERE).mean() + net(x).mean()


@pytest.mark.parametrize(
    "loss",
    [
        slope_in_forward_mode,
        all_columns,
        curvature,  # no earlier prediction's zeros of forward mode are taken for its own
        gradients_of_rows,
        gradient_penalty,
        penalty_after_the_loss,
        short_range,
        given_from_elsewhere,
        lambda net, x: F.cross_entropy(net(x), LABELS, weight=WEIGHTS),
    ],
)
def test_a_loss_of_inputs_alone_is_predicted(loss):
    assert_predicted(Net(), X, loss=loss)


@pytest.mark.parametrize("loss", [slope_in_forward_mode, all_columns, gradients_of_rows])
def test_the_allocator_gives_out_as_much(loss):
    net, recipe = Net(), Recipe()
    found = predict(net, batch=X, loss=loss, target="cpu")
    run = prepare(net, recipe)

    def one_step():
        step(run.model, run.optimizer, X, recipe, loss=loss)

    one_step()
    assert allocator_peak(one_step, before=1) == found.peak.total - found.current.total


def range_that_is_written_to(net, x):
    counts = torch.arange(3)
    counts[1] = x.argmax()
    return net(x).mean() * counts[1].item()


def ctc(net, x):
    """Its longest target decides how large its tables are."""
    scores = net(x.expand(10, *x.shape)).log_softmax(-1)
    lengths = torch.full((ROWS,), 3)
    return F.ctc_loss(scores, torch.ones(ROWS, 3, dtype=torch.int64), lengths + 7, lengths)


def teacher_of_another_module(net, x, teacher=nn.Linear(FEATURES, CLASSES)):  # noqa: B008
    return F.mse_loss(net(x), teacher(x))


REFUSED = {
    range_that_is_written_to: "reads a tensor's value",
    ctc: r"ctc_loss.*has a result whose size",
    teacher_of_another_module: "a parameter that is not in the module: give one module",
    lambda net, x: (net(x) * ELSEWHERE[:, :4]).mean(): r"a real tensor that is not a parameter",
    lambda net, x: net(x + ELSEWHERE.view(ROWS, -1)).mean(): r"a real tensor .*as a buffer",
}


@pytest.mark.parametrize("loss", REFUSED)
def test_what_cannot_be_predicted_is_refused_and_works(loss):
    with pytest.raises(CannotTrace, match=REFUSED[loss]):
        predict(Net(), batch=X, loss=loss, target="cpu")
    tracked(Net(), X, loss=loss)
