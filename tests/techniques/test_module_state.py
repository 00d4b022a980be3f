"""What a forward changes besides its result is put back after a question."""

from collections import deque
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib import Recipe, prepare, step
from gradmem_lib.techniques.asking import as_in_evaluation
from gradmem_lib.techniques.module_state import left_as_it_was


class KeepsMuch(nn.Module):
    """As MoCo's queue and second encoder, a cache of masks and counters do, each in its way."""

    normalizes = True

    def __init__(self):
        super().__init__()
        self.linear, self.keys = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4, 8))
        self.register_buffer("norms", torch.zeros(8))
        self.calls, self.seen, self.masks = 0, deque(maxlen=4), {"widths": set()}

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.queue[self.calls % 4] = y[0]
            for key, weight in zip(self.keys.parameters(), self.linear.parameters(), strict=True):
                key.mul_(0.9).add_(weight, alpha=0.1)
            self.norms.data.mul_(0.9).add_(self.keys(x).norm(dim=0))  # this changes no version
            if self.normalizes:
                self.linear.weight.data = F.normalize(self.linear.weight.data)
        self.calls += 1
        self.seen.append(len(x))
        self.masks[len(x)] = torch.ones(len(x))
        self.masks["widths"].add(x.shape[1])
        self.last = y.detach()
        return y.square().mean()

    def kept(self):
        tensors = [tensor.tolist() for tensor in self.state_dict().values()]
        return tensors, self.calls, list(self.seen), [*self.masks], {*self.masks["widths"]}


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_what_a_forward_keeps_is_as_before(error):
    model = KeepsMuch()
    model(torch.randn(3, 8))
    before, names, last = model.kept(), {*vars(model)}, model.last
    queue, memory = model.queue, model.linear.weight.data_ptr()
    with pytest.raises(error) if error else nullcontext(), left_as_it_was(model):
        model(torch.randn(2, 8))
        assert model.kept() != before and model.linear.weight.data_ptr() != memory
        model.added, model.part = 1, nn.Dropout()  # as BigBird's for short rows
        del model.masks
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
    model.normalizes = False
    run = prepare(model, recipe)
    step(run.model, run.optimizer, torch.randn(6, 8), recipe)
    assert (model.calls, list(model.seen)) == (3, [2, 2, 2])
    assert (model.queue[3:] == 0).all() and (model.queue[:3] != 0).any(1).all()
    run.undo.close()
