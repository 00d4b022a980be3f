"""A forward that runs twice is the same step to the bit: its gradients, and what it reads and
writes beside its inputs. What it writes is put back after a question.
"""

import random
import warnings
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib import Recipe, accumulate_through_embeddings, checkpoint_parts, prepare, step
from gradmem_lib.techniques.asking import as_in_evaluation
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.module_state import left_as_it_was
from gradmem_lib.techniques.second_run import nearly_same

OF_ALL = torch.Generator()
SHARED = random.Random(0)
NUMBERS = np.random.default_rng(3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Draws(Layer):
    """Draws from each generator that a second run finds again."""

    def __init__(self):
        super().__init__()
        self.shared, self.own = SHARED, np.random.default_rng(3)
        self.generators = [torch.Generator().manual_seed(3)]

    def forward(self, x):
        y = F.dropout(self.linear(x + torch.randn(x.shape, generator=self.generators[0])))
        if self.shared.random() < 0.5:
            y = y + x
        y = y * (random.random() + 0.5) * float(np.random.rand() + 0.5)
        return y * torch.tensor(self.own.random(8)) * torch.empty(8).uniform_(generator=OF_ALL)


class Keeps(Layer):
    """Writes buffers in place, through ``.data`` as vector quantization does, and by putting others
    in their place; sets a weight in its first batch as ActNorm does, and counts its calls.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(self.linear)
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("codes", torch.zeros(3, 8))
        self.register_buffer("average", torch.zeros(8))
        self.gain, self.is_set, self.calls = nn.Parameter(torch.ones(8)), False, 0

    def forward(self, x):
        if not self.is_set:
            self.codes.data.copy_(x.detach()[:3])
            self.gain.data.copy_(1 / x.detach().std(0))
            self.is_set = True
            x = 2 * x
        self.calls += 1
        found = self.codes[torch.cdist(x.detach(), self.codes).argmin(1)]
        self.codes.data.mul_(0.9)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return F.gelu(self.norm(self.linear(x * self.gain - self.average) + found)) / self.calls


class Graph(Layer):
    """Sums over neighbours: what its backward needs is sparse, and complex."""

    def __init__(self):
        super().__init__()
        self.edges = torch.eye(6).roll(1, 0).double().to_sparse()

    def forward(self, x):
        of_neighbours = torch.sparse.mm(self.edges, self.linear(x))
        return torch.fft.ifft(torch.fft.fft(of_neighbours) ** 2).real.tanh()


@dataclass
class Counted:
    calls: int = 0


class KeepsMuch(Layer):
    """As MoCo's queue and second encoder, a cache of masks and counters do."""

    normalizes = False

    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4, 8))
        self.register_buffer("norms", torch.zeros(8))
        self.counted, self.usage, self.last = Counted(), torch.zeros(8), torch.zeros(8)
        self.seen, self.means, self.masks = deque(maxlen=4), [], {"widths": set()}

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.queue[self.counted.calls % 4] = y[0]
            for key, weight in zip(self.keys.parameters(), self.linear.parameters(), strict=True):
                key.mul_(0.9).add_(weight, alpha=0.1)
            self.norms.data.mul_(0.9).add_(self.keys(x).norm(dim=0))  # this changes no version
            if self.normalizes:
                self.linear.weight.data = F.normalize(self.linear.weight.data)
        self.counted.calls += 1
        self.usage += (y > 0).sum(0)
        self.seen.append(len(x))
        self.means.append(y.mean().item())
        self.masks[len(x)] = torch.ones(len(x))
        self.masks["widths"].add(x.shape[1])
        self.last = 0.9 * self.last + 0.1 * y.detach().mean(0)
        return y.tanh()

    def kept(self):
        tensors = [*self.state_dict().values(), self.usage, self.last]
        containers = [*self.seen], [*self.means], [*self.masks], {*self.masks["widths"]}
        return [tensor.tolist() for tensor in tensors], self.counted.calls, containers


WAYS = {
    "one by one": lambda net: checkpoint_layers(net, 1),
    "in segments": lambda net: checkpoint_layers(net, [2, 3], keep_last=False),
    "best": lambda net: checkpoint_layers(net, "best", keep_last=False),
    "but for products": lambda net: checkpoint_parts(net, "elementwise"),
    "a part": lambda net: checkpoint_parts(nn.ModuleList(map(nn.Sequential, net)), type(net[0])),
}


def chain(kind):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    OF_ALL.manual_seed(7)
    SHARED.seed(5)
    return nn.Sequential(*(kind() for _ in range(5))).double()


def random_states(net):
    """What all random numbers that the layers may draw would be next."""
    states = [random.getstate(), repr(np.random.get_state()), SHARED.getstate()]
    states += [torch.get_rng_state().tolist(), OF_ALL.get_state().tolist()]
    for layer in net:
        if isinstance(layer, Draws):
            states.append(repr(layer.own.bit_generator.state))
            states.append(layer.generators[0].get_state().tolist())
    return states


def trained(kind, way=None):
    """Gradients, buffers and random states after each of three steps."""
    net, after = chain(kind), []
    if way is not None:
        way(net)
    for x in torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)).double():
        net.zero_grad()
        net(x).square().mean().backward()
        numbers = [*(p.grad for p in trained_weights(net)), *net.buffers()]
        kept = [layer.kept() for layer in net if isinstance(layer, KeepsMuch)]
        after.append([*(number.tolist() for number in numbers), *random_states(net), *kept])
        with torch.no_grad():
            for parameter in trained_weights(net):
                parameter -= 0.05 * parameter.grad
    return after


def trained_weights(net):
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [Draws, Keeps, Graph, KeepsMuch])
def test_a_step_with_checkpoints_is_the_step_without(kind, way):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(kind, way) == trained(kind)


@dataclass
class State:
    x: torch.Tensor


class ChangesWhatItIsGiven(Layer):
    """Writes its output into the dict and the object that it is given, and a norm into a list."""

    def forward(self, state, norms):
        state["object"].x = self.linear(state["object"].x * state["scale"]).tanh()
        state["scale"] = state["scale"] * 1.1
        norms.append(state["object"].x.norm())
        return state


@pytest.mark.parametrize("every", [1, [2, 3], "best"], ids=str)
def test_a_second_run_is_given_what_the_first_was(every):
    found = []
    for checkpoints in (lambda layers: None, lambda layers: checkpoint_layers(layers, every)):
        layers = nn.ModuleList(chain(ChangesWhatItIsGiven))
        checkpoints(layers)
        state, norms = {"object": State(torch.ones(6, 8).double()), "scale": 1.0}, []
        for layer in layers:
            state = layer(state, norms)
        (state["object"].x.sum() + sum(norms)).backward()
        grads = [parameter.grad.tolist() for parameter in layers.parameters()]
        found.append([grads, [norm.item() for norm in norms], state["scale"]])
    assert found[0] == found[1]


class AddsTo(Layer):
    """As a router that counts the tokens of its experts for all layers."""

    def forward(self, x, load, within=True):
        y = self.linear(x)
        if within:
            load += y.detach().sum(0)
        return (y + load).tanh()


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("every", [1, [2, 3], "best"], ids=str)
def test_an_argument_that_is_changed_in_place_is_refused(every, within):
    layers, load = nn.ModuleList(chain(AddsTo)), torch.zeros(8).double()
    checkpoint_layers(layers, every, keep_last=False)
    with pytest.raises(RuntimeError, match="in place"):
        x = torch.ones(6, 8).double()
        for layer in layers:
            x = layer(x, load, within)
        load += 1
        x.sum().backward()


class MeanOfBatches(Layer):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.linear(x - self.mean)


class Mask(Layer):
    """Each second run hides as many numbers, at other places."""

    def forward(self, x):
        hidden = torch.zeros(x.shape, dtype=torch.bool)
        hidden[:, NUMBERS.permutation(8)[:3]] = True
        return self.linear(x).masked_fill(hidden, 0)


class InPlace(Layer):
    def forward(self, x):
        y = self.linear(x).exp()
        twice = y * 2
        return (twice + y.add_(1)).tanh()


class Fills(Layer):
    def forward(self, x):
        return F.rrelu(self.linear(x), training=True)


OTHER_NUMBERS = "the second run of a checkpointed layer has computed"


@pytest.mark.parametrize(
    ("kind", "way", "says"),
    [
        (MeanOfBatches, "best", OTHER_NUMBERS),
        (Mask, "in segments", OTHER_NUMBERS),
        (InPlace, "one by one", "^make a new tensor.*in place"),
        (Fills, "one by one", "fills what it has saved.*RReLU"),
    ],
)
def test_a_layer_whose_second_run_is_another_one_is_refused(kind, way, says):
    with pytest.raises(RuntimeError, match=says):
        trained(kind, WAYS[way])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_no_other_number_and_another_dropout_is(dtype):
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(64, 64, generator=generator).double()
    rounded = first * (1 + torch.finfo(dtype).eps * torch.rand(64, 64, generator=generator))
    torch.manual_seed(0)
    assert nearly_same(rounded.sum(0), first.sum(0), dtype)
    assert not nearly_same(F.dropout(first, 0.1).sum(0), first.sum(0), dtype)


def test_a_second_backward_through_a_kept_graph_runs_from_the_same_state():
    net = chain(Keeps)
    checkpoint_layers(net, [5], keep_last=False)
    loss = net(torch.randn(6, 8).double()).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    assert all(map(torch.equal, [p.grad for p in net.parameters()], [2 * g for g in once]))


class Later(Layer):
    """Begins to write its buffer in the second forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.counts = False

    def forward(self, x):
        if self.counts:
            self.seen += 1
        return self.linear(x)


def test_a_buffer_that_is_written_later_is_written_once_and_said():
    net = chain(Later)
    checkpoint_layers(net, 2)
    x = torch.randn(6, 8).double()
    net(x).sum().backward()
    net[1].counts = True
    with pytest.warns(UserWarning, match="the first in which a Later changes its buffer seen"):
        net(x).sum().backward()
    assert net[1].seen == 1
    net(x).sum().backward()  # no second warning
    assert net[1].seen == 2


@pytest.mark.parametrize("kind", [Draws, Keeps])
def test_two_passes_are_one_pass_in_pieces(kind):
    """With a loss that is a sum over rows, ``accumulate_through_embeddings`` is an accumulation."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).double()

    def result(net):
        grads = torch.cat([p.grad.flatten() for p in net.parameters()])
        return [*net.buffers(), grads], random_states(net)

    net = chain(kind)
    torch.cat([net(piece) for piece in x.split(3)]).square().sum().backward()
    expected, states = result(net)
    net = chain(kind)
    accumulate_through_embeddings([*x.split(3)], net, lambda rows: rows.square().sum(), model=net)
    found, states_after = result(net)
    assert states_after == states
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


# What modules keep is put back after a question.


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_what_a_forward_keeps_is_as_before(error):
    model = KeepsMuch()
    model.normalizes = True
    model(torch.randn(3, 8))
    before, names, last = model.kept(), {*vars(model)}, model.last
    queue, memory = model.queue, model.linear.weight.data_ptr()
    with pytest.raises(error) if error else nullcontext(), left_as_it_was(model):
        model(torch.randn(2, 8))
        assert model.kept() != before and model.linear.weight.data_ptr() != memory
        model.added, model.part = 1, nn.Dropout()  # as BigBird's for short rows
        del model.masks, model.usage
        if error:
            raise error
    assert model.kept() == before
    assert ({*vars(model)}, model.last) == (names, last)
    assert model.queue is queue and model.linear.weight.data_ptr() == memory
    assert model.seen.maxlen == 4 and len([*model.modules()]) == 3


def test_no_more_is_copied_than_twice_the_trained_weights():
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(1000))
    model.register_buffer("expanded", torch.zeros(1).expand(1000))
    model.register_buffer("count", torch.zeros(()))
    with left_as_it_was(model):
        model.table += 1
        model.count += 1
    assert model.count == 0
    assert model.table[0] == 1  # as the docstring says


class Merges(nn.Linear):
    """As loralib's layers: in eval mode, the adapter is part of the weight."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_an_eval_of_a_modules_own_is_not_called():
    model = Merges(2, 2)
    with as_in_evaluation(model):
        assert not model.training and not model.merged
    assert model.training and not model.merged


def test_a_step_in_pieces_keeps_what_its_own_micro_batches_leave():
    """The questions about the loss are no part of the training."""
    model, recipe = KeepsMuch(), Recipe(accumulation=3)
    run = prepare(model, recipe)
    given = {"loss": lambda model, x: model(x).square().mean()}
    step(run.model, run.optimizer, torch.randn(6, 8), recipe, **given)
    assert (model.counted.calls, list(model.seen)) == (3, [2, 2, 2])
    assert (model.queue[3:] == 0).all() and (model.queue[:3] != 0).any(1).all()
    run.undo.close()
