"""What a forward changes besides its result is put back after a question."""

from contextlib import nullcontext

import pytest
import torch
from support.keeps_much import KeepsMuch
from torch import nn

from gradmem_lib import Recipe, prepare, step
from gradmem_lib.techniques.asking import as_in_evaluation
from gradmem_lib.techniques.module_state import left_as_it_was


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
