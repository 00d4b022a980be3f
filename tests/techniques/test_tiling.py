"""An MLP over slices of the sequence: same gradients, fewer bytes, as predicted, and refusals."""

import copy
from functools import partial

import pytest
import torch
from support.families import tiny_config
from support.predicted import assert_predicted, example_batch, model_class
from torch import nn

from gradmem_lib import MemoryTracker, checkpoint_layers, checkpoint_parts, tiled
from gradmem_lib.course import models

ROWS, TOKENS, WIDTH, INSIDE = 2, 64, 32, 256


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INSIDE), nn.GELU(), nn.Linear(INSIDE, WIDTH)
    )


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    (module(x) * torch.linspace(0, 1, WIDTH)).sum().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [((TOKENS, WIDTH), 7), ((ROWS, TOKENS, WIDTH), 4), ((ROWS, 1, WIDTH), 100)],
)
def test_gradients_are_the_same(shape, tiles):
    module, x = mlp(), torch.randn(shape)
    expected = gradients(module, x)
    with tiled(module, tiles):
        found = gradients(module, x)
    torch.testing.assert_close(found, expected)
    assert all(map(torch.equal, gradients(module, x), expected))


def peak(module: nn.Module) -> int:
    x = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    with MemoryTracker(module, live=False) as tracker:
        tracker.watch(x, "other")
        before = tracker.current.total
        module(x).sum().backward()
    module.zero_grad(set_to_none=True)
    return tracker.peak.total - before


def test_one_slice_exists_inside_at_a_time():
    module = mlp().requires_grad_(False)
    inside = ROWS * TOKENS * INSIDE * 4
    plain, most = peak(module), []
    for tiles in (1, 2, 4, 8):
        with tiled(module, tiles):
            most.append(peak(module))
    less = [most[i] - most[i + 1] for i in range(3)]
    assert most[0] == plain and less[0] == 2 * less[1] == 4 * less[2] > inside
    # input, output and the gradient between them
    assert plain - 2 * less[0] < 3 * ROWS * TOKENS * WIDTH * 4


class Summed(nn.Module):
    """Each token takes the sum of those before it."""

    def forward(self, x):
        return x.cumsum(-2)


class Delayed(nn.Module):
    """Each token takes what one four places before it was: beyond a slice's first two."""

    def forward(self, x):
        return x + nn.functional.pad(x, (0, 0, 4, 0))[..., :-4, :]


class Halved(nn.Module):
    """Every second token is left out."""

    def forward(self, x):
        return x[..., ::2, :]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Summed(), "Summed has a token whose output"),
        (Delayed(), "Delayed has a token whose output"),
        (nn.Sequential(nn.BatchNorm1d(WIDTH)), "Sequential has a token whose output"),
        (Halved(), r"Halved returned a tensor of shape \(\d+, 32\) for a slice"),
        (nn.GRU(WIDTH, WIDTH), "GRU returned tuple for a slice"),
        (nn.Conv1d(TOKENS, 7, 1), r"Conv1d cannot run on a slice .*channels"),
    ],
)
def test_what_does_not_give_a_tensor_by_token_is_refused(module, says):
    with tiled(module, 2), pytest.raises(ValueError, match=says):
        module(torch.randn(TOKENS, WIDTH))


def test_a_mixtures_block_takes_slices_of_one_row_and_says_so():
    cfg = tiny_config("mixtral")
    block = model_class(cfg)(cfg).train().model.layers[0].mlp
    x = torch.randn(2, TOKENS, cfg.hidden_size)
    expected = block(x[:1])
    with tiled(block, 2):
        torch.testing.assert_close(block(x[:1]), expected)
    for tokens in (TOKENS, 4):
        with (
            tiled(block, 2),
            pytest.raises(ValueError, match=r"of one row.*cannot run on a slice"),
        ):
            block(x[:, :tokens])


def test_in_eval_and_without_gradients_nothing_is_cut():
    module, x, sizes = mlp(), torch.randn(TOKENS, WIDTH), []
    module[0].register_forward_pre_hook(lambda m, args: sizes.append(len(args[0])))
    tiled(module, 4)
    with torch.no_grad():
        module(x)
    module.eval()(x)
    assert sizes == [TOKENS, TOKENS]
    copied = copy.deepcopy(module).train()
    copied(x)
    assert sizes[-4:] == [TOKENS // 4] * 4


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.calls, self.tokens = torch.zeros(()), []

    def forward(self, x):
        self.calls += 1
        self.tokens.append(x.shape[-2])
        return super().forward(x)


def test_neither_the_check_nor_the_second_run_is_counted():
    module = Counting()
    with tiled(module, 3):
        module(torch.randn(2, 9, 4)).sum().backward()
    assert module.calls == 3 and module.tokens == [3, 3, 3]


@pytest.mark.parametrize("tiles", [0, 2.0])
def test_a_number_of_tiles_is_whole(tiles):
    with pytest.raises(ValueError, match="whole number of slices"):
        tiled(mlp(), tiles)


@pytest.mark.parametrize(
    "around", [partial(checkpoint_layers, every=1), partial(checkpoint_parts, part="elementwise")]
)
def test_in_layers_that_run_again(around):
    model = models.tiny_llama(layers=2, hidden=64, heads=4, intermediate=256, vocab=128)
    model.config.use_cache = False
    batch = example_batch(model, 4, 64)

    def step() -> tuple[list[torch.Tensor], int]:
        with MemoryTracker(model, live=False) as tracker:
            grads = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
        return grads, max(tracker.timeline.by_category["activations"])

    with around(model):
        expected, whole = step()
        for layer in model.model.layers:
            tiled(layer.mlp, 4)
            with pytest.raises(RuntimeError, match="checkpointed already"):
                tiled(layer.mlp, 2)
        for _ in range(2):
            found, cut = step()
            torch.testing.assert_close(found, expected)
            assert cut < whole
    assert_predicted(model, batch)
