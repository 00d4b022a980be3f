"""Lesson 09's right answers beside the library and torch, and a limit that its text states."""

import math

import pytest
import torch
from torch import nn

from gradmem_lib import AdamW8bit
from gradmem_lib.course.lessons.lesson_09 import exercises
from gradmem_lib.techniques import optimizers
from gradmem_lib.techniques.quantized import BLOCK, SCALES_BLOCK, Linear4bit


@pytest.mark.parametrize("signed", [True, False])
def test_exercise_9_1_stores_what_the_8_bit_optimizer_stores(signed):
    x = exercises.drawn(0, 1000)
    if not signed:
        x = x.square()
    code = optimizers.code_table(signed, None)
    indices, absmax, back = exercises.quantize(x, code, optimizers.BLOCK)
    theirs = optimizers.quantized_blocks(x, code)
    assert torch.equal(indices, theirs[0])
    assert torch.equal(absmax, theirs[1])
    assert torch.equal(back, optimizers.dequantized_blocks(*theirs, code))


@pytest.mark.parametrize("numbers, dtype", [(4095, torch.float32), (4096, torch.uint8)])
def test_small_tensors_stay_in_float32(numbers, dtype):
    p = nn.Parameter(torch.zeros(numbers))
    p.grad = torch.ones(numbers)
    optimizer = AdamW8bit([p])
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == dtype


def test_exercise_9_4_takes_the_step_that_clipping_everything_at_once_takes():
    with torch.random.fork_rng(devices=[]):
        mine, x = exercises.clip_setting()
        theirs, _ = exercises.clip_setting()
    norm = exercises.clip_in_backward(mine, lambda model: model(x).square().mean(), 0.1, 2.0)
    theirs(x).square().mean().backward()
    trained = [p for p in theirs.parameters() if p.requires_grad]
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(trained, 2.0).item(), rel=1e-5)
    torch.optim.SGD(trained, lr=0.1).step()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 512), (33, 17), (100, 1000)])
def test_exercise_9_6_counts_the_bytes_of_a_layer_in_4_bits(shape):
    layer = Linear4bit(nn.Linear(*shape, bias=False).requires_grad_(False))
    nbytes = sum(p.nbytes for p in layer.parameters())
    assert exercises.nf4_bytes(math.prod(shape), BLOCK, SCALES_BLOCK) == nbytes
