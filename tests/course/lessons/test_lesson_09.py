"""Lesson 09's exercises beside the library and torch: what they call right is what runs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib.course.lessons.lesson_09 import (
    exercises as lesson_09,
)
from gradmem_lib.course.lessons.lesson_09 import (
    exercises_adapters,
    exercises_capstone,
    exercises_galore,
    exercises_lion,
    exercises_loss,
)
from gradmem_lib.course.lessons.lesson_09.exercises_backward import clip_in_backward, clip_setting
from gradmem_lib.measure.storages import tensors_in
from gradmem_lib.techniques import optimizers
from gradmem_lib.techniques.quantized import BLOCK, SCALES_BLOCK, Linear4bit


@pytest.mark.parametrize("signed", [True, False])
def test_exercise_9_1_stores_what_the_8_bit_optimizer_stores(signed):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x, code = x if signed else x * x, optimizers.code_table(signed, None)
    indices, absmax, back = lesson_09.quantize(x, code, optimizers.BLOCK)
    theirs = optimizers.quantized_blocks(x, code)
    assert torch.equal(indices, theirs[0]) and torch.equal(absmax, theirs[1])
    assert torch.equal(back, optimizers.dequantized_blocks(*theirs, code))


def test_exercise_9_2_is_torchs_adafactor_where_no_eps_matters():
    p = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
    row, column, beta2 = torch.zeros(5).double(), torch.zeros(3).double(), 0.0
    optimizer = torch.optim.Adafactor([p], lr=1.0, beta2_decay=-0.8, eps=(1e-30, 1e-3), d=1e9)
    for step in (1, 2):
        beta2 = 1 - step**-0.8
        p.grad = torch.randn(
            p.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        before, rho = p.detach().clone(), max(1e-3, p.detach().norm().item() / math.sqrt(p.numel()))
        optimizer.step()
        v = lesson_09.adafactor_second_moment(p.grad, row, column, beta2, 0.0)
        moved = (before - p.detach()) / (rho * min(1.0, 1 / math.sqrt(step)))
        assert torch.allclose(moved, p.grad / v.sqrt(), rtol=1e-6)


def test_exercise_9_3_keeps_one_state_and_moves_every_weight_by_lr():
    p = nn.Parameter(torch.ones(100, 10))
    optimizer = exercises_lion.Lion([p], lr=0.1)
    p.grad = torch.full_like(p, -3.0)
    optimizer.step()
    (m,) = optimizer.state[p].values()
    assert m.nbytes == p.nbytes and torch.allclose(p, torch.tensor(1.1))


def test_exercise_9_4_takes_the_step_that_clipping_everything_at_once_takes():
    with torch.random.fork_rng(devices=[]):
        (mine, x), (theirs, _) = clip_setting(), clip_setting()
    norm = clip_in_backward(mine, lambda model: model(x).square().mean(), 0.1, 2.0)
    theirs(x).square().mean().backward()
    trained = [p for p in theirs.parameters() if p.requires_grad]
    whole = nn.utils.clip_grad_norm_(trained, 2.0)
    torch.optim.SGD(trained, lr=0.1).step()
    assert norm == pytest.approx(whole.item(), rel=1e-5) and norm > 2.0
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 512), (33, 17), (100, 1000)])
def test_exercise_9_6_counts_the_bytes_of_a_layer_in_4_bits(shape):
    layer = Linear4bit(nn.Linear(*shape, bias=False).requires_grad_(False))
    bytes_ = sum(p.nbytes for p in layer.parameters())
    assert exercises_adapters.nf4_bytes(math.prod(shape), BLOCK, SCALES_BLOCK) == bytes_


def test_exercise_9_7_is_autograds_loss_and_its_logits_are_what_the_card_has_not():
    hidden, weight, labels = exercises_loss._batch(1000, 32, 3000, torch.float32, 5)
    exercises_loss.ChunkedLoss.apply(hidden, weight, labels, 5.0).backward()
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logits = 5.0 * torch.tanh(hidden @ weight.T / 5.0)
    F.cross_entropy(logits, labels).backward()
    for mine, theirs in zip(found, (hidden.grad, weight.grad), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert logits.nbytes == 12_000_000 > exercises_loss.LOSS_CARD


def test_the_recipes_that_exercise_9_8_takes_for_right_are_right():
    (layers, every_weight), adapters = exercises_capstone.under_300()
    assert exercises_capstone.what_is_in_the_way(layers, every_weight) == ""
    assert exercises_capstone.what_is_in_the_way(*adapters) == ""
    assert (
        exercises_capstone.smollm2_peak(layers + 1, every_weight).total
        > exercises_capstone.CARD_300
    )


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (7, 7)])
def test_exercise_9_9_is_torchs_adam_between_two_projections(shape):
    """On the small matrix itself, with directions that come from the squared gradient."""
    rank, lr, scale = 2, 0.1, 0.25
    mine = nn.Parameter(
        torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    )
    wide, theirs, state = shape[0] <= shape[1], mine.detach().clone(), {}
    small = nn.Parameter(torch.zeros((rank, shape[1]) if wide else (shape[0], rank)).double())
    optimizer, P = torch.optim.Adam([small], lr=lr * scale), None
    for number in range(3):
        chance = torch.Generator().manual_seed(10 + number)
        mine.grad = torch.randn(shape, generator=chance, dtype=torch.float64)
        exercises_galore.galore_step(mine, state, rank, 200, lr, scale)
        if P is None:
            square = mine.grad @ mine.grad.T if wide else mine.grad.T @ mine.grad
            P = torch.linalg.eigh(square).eigenvectors[:, -rank:]
        small.grad, before = P.T @ mine.grad if wide else mine.grad @ P, small.detach().clone()
        optimizer.step()
        way = small.detach() - before
        theirs += P @ way if wide else way @ P.T
        assert torch.allclose(mine, theirs, rtol=1e-9)
    kept = [tensor.untyped_storage().nbytes() for tensor in tensors_in([state])]
    assert sum(kept) == 8 * rank * (min(shape) + 2 * max(shape))


def test_a_right_answer_to_9_9_may_have_any_signs_and_a_wrong_one_may_not():
    """The old moments meet each new direction with either sign; which one a decomposition gives is
    its own affair.
    """
    galore, seen = exercises_galore, []
    for signs in ((1, 1), (1, -1), (-1, -1)):
        name = next(iter(galore.CASES))
        seen.append(galore._moves(galore._signed(signs), name))
    assert torch.equal(seen[0][1], seen[1][1]) and not torch.allclose(seen[0][2], seen[1][2])
    canonical = [galore._whatever_the_signs(name, moves)[2] for moves in seen]
    assert torch.equal(canonical[0], canonical[1]) and torch.equal(canonical[0], canonical[2])
    again = galore._moves(galore._galore(forget=True), name)
    assert galore._whatever_the_signs(name, again) is again
