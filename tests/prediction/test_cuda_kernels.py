"""What a trace takes for a card's kernels: which one it is by PyTorch's published rules, what it
was told, and bytes by hand.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.operations import Operations

from gradmem_lib.prediction import cuda_kernels
from gradmem_lib.prediction.fakes import QuickFakeMode

bf16, half, single = torch.bfloat16, torch.float16, torch.float32
FLASH, EFFICIENT = "flash", "efficient"


def attended(
    dtype, heads=(4, 4), size=16, wide=None, mask=None, grads=(True, True, True), seq=9, **asked
):
    """Attention over ``seq`` tokens as a trace for a card does it: its result, and what the kernels
    of attention are called with, each by its name.
    """
    with QuickFakeMode("cuda"), cuda_kernels.kernels():
        shapes = [
            (2, heads[0], seq, size),
            (2, heads[1], seq, size),
            (2, heads[1], seq, wide or size),
        ]
        q, k, v = (
            torch.rand(s, dtype=dtype, requires_grad=g) for s, g in zip(shapes, grads, strict=True)
        )
        bias = None if mask is None else torch.ones(seq, seq, dtype=mask)
        with Operations() as ran:
            out = F.scaled_dot_product_attention(
                q, k, v, bias, enable_gqa=heads[0] != heads[1], **asked
            )
    assert out.shape == (2, heads[0], seq, wide or size)
    calls = [(str(func), args, kwargs) for func, args, kwargs, _ in ran.seen]
    return out, [call for call in calls if "attention" in call[0]]


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        ({"dtype": bf16}, FLASH),
        ({"dtype": half, "heads": (4, 2)}, FLASH),
        ({"dtype": bf16, "size": 256}, FLASH),
        ({"dtype": bf16, "size": 20}, FLASH),
        ({"dtype": bf16, "size": 264}, EFFICIENT),
        ({"dtype": bf16, "wide": 24}, EFFICIENT),
        ({"dtype": bf16, "mask": torch.bool}, EFFICIENT),
        ({"dtype": single}, EFFICIENT),
        ({"dtype": single, "mask": single}, EFFICIENT),
        ({"dtype": single, "heads": (4, 2)}, None),
        ({"dtype": bf16, "heads": (4, 2), "mask": bf16}, None),
    ],
)
def test_which_kernel_a_card_takes(asked, kernel):
    out, told = attended(**asked)
    assert [name for name in (FLASH, EFFICIENT) for call in told if name in call[0]] == [kernel][
        : kernel is not None
    ]
    assert out.dtype == asked["dtype"]


@pytest.mark.parametrize("size", [16, 20])
def test_what_flash_attention_is_told(size):
    out, _ = attended(bf16, size=size, dropout_p=0.25, is_causal=True)
    inner = out.grad_fn if size == 16 else out.grad_fn.next_functions[0][0]
    assert (inner._saved_dropout_p, inner._saved_is_causal) == (0.25, True)
    assert inner._saved_query.shape[-1] == -(-size // 8) * 8  # the kernel takes whole blocks of 8
    if size == 20:
        assert inner._saved_scale == pytest.approx(20**-0.5)  # of the size before it was padded
    out, _ = attended(bf16, size=size, scale=0.5)
    inner = out.grad_fn if size == 16 else out.grad_fn.next_functions[0][0]
    assert (inner._saved_scale, inner._saved_is_causal, inner._saved_dropout_p) == (0.5, False, 0)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_efficient_kernel_keeps_sums_only_where_there_is_a_backward(which):
    name, args, kwargs = attended(single, grads=tuple(i == which for i in range(3)), scale=0.5)[1][
        0
    ]
    assert "efficient" in name and args[4] is True and kwargs["scale"] == 0.5
    assert attended(single, grads=(False,) * 3)[1][0][1][4] is False


@pytest.mark.parametrize("mask", [torch.bool, single])
@pytest.mark.parametrize(("seq", "row"), [(9, 16), (16, 16), (17, 32)])
def test_a_mask_is_once_for_all_rows_and_heads_in_rows_of_16(mask, seq, row):
    bias = attended(single, mask=mask, seq=seq)[1][0][1][3]
    assert bias.shape == (2, 4, seq, seq) and bias.dtype == single
    assert bias.stride() == (0, 0, row, 1) and bias.untyped_storage().nbytes() == 4 * seq * row


def test_single_operations_are_those_of_the_cpu():
    torch.manual_seed(0)
    q, k, v = torch.rand(2, 4, 9, 8), torch.rand(2, 2, 9, 8), torch.rand(2, 2, 9, 8)
    mask = torch.rand(9, 9)
    for asked in ({"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}):
        asked["enable_gqa"] = True
        plain = F.scaled_dot_product_attention(q, k, v, **asked)
        with cuda_kernels.kernels():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, **asked), plain)


def test_autocast_widens_what_is_on_its_list_in_both_kinds_of_arguments():
    x, ids = torch.rand(3, 4), torch.zeros(3, dtype=torch.int64)
    with cuda_kernels.kernels(bf16):
        for narrow in (x.bfloat16(), x.half()):
            assert torch.softmax(narrow, -1).dtype == narrow.dtype
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.softmax(narrow, -1).dtype == narrow.softmax(dim=-1).dtype == single
                assert F.mse_loss(input=narrow, target=narrow).dtype == single
                assert (narrow**2).dtype == single
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.exp(x.double()).dtype == torch.float64
            assert torch.sum(ids).dtype == torch.int64
    with cuda_kernels.kernels(), torch.autocast("cpu", torch.bfloat16):
        assert torch.exp(x.bfloat16()).dtype == bf16


def test_dropout_keeps_a_byte_a_number():
    x = torch.rand(8, 8, requires_grad=True)

    def kept(*args, **kwargs):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            out = F.dropout(*args, **kwargs)
        return out, [t.dtype for t in found]

    with cuda_kernels.kernels():
        for asked in ({}, {"p": 0.25}):
            out, dtypes = kept(x, **asked)
            assert dtypes == [torch.bool]
            left = out[out != 0]
            torch.testing.assert_close(left, (x / (1 - asked.get("p", 0.5)))[out != 0])
            assert 0 < left.numel() < x.numel()
        for asked in ({"training": False}, {"p": 0.0}):
            out, dtypes = kept(x, **asked)
            assert torch.equal(out, x) and torch.bool not in dtypes
        y = torch.ones(64)
        assert F.dropout(y, 0.5, True, True) is y and 0 < int((y == 0).sum()) < 64


def test_the_backward_of_softmax_multiplies_into_a_tensor_of_its_own():
    """Gradient times output (SoftMax.cu), in the wider of their dtypes, in blocks of 512 bytes."""
    backward = cuda_kernels.softmax_backward.default
    half, single = (torch.empty(3, 100, dtype=dtype) for dtype in (torch.half, torch.float32))
    assert cuda_kernels.scratch(backward, (half, half, -1, torch.half)) == 1024
    assert cuda_kernels.scratch(backward, (single, half, -1, torch.half)) == 1536


def test_bytes_inside_the_backward_of_flash_attention_by_hand():
    backward = cuda_kernels.flash_attention_backward.default

    def scratch(query, key, dtype=bf16):
        return cuda_kernels.scratch(
            backward, (None, torch.empty(query, dtype=dtype), torch.empty(key, dtype=dtype))
        )

    rows = 256  # 130, in whole blocks of 128; heads of 40 numbers in 64
    assert scratch((2, 4, 130, 40), (2, 4, 130, 40)) == 4 * 2 * 4 * rows * (64 + 1)
    assert scratch((1, 1, 128, 32), (1, 1, 128, 32)) == 4 * 128 * 33
    # Two heads share a key: gradients of keys and values for each of the four all the same,
    # 2 x 4 x 9 x 8 numbers in blocks of 512 bytes.
    shared = scratch((2, 4, 130, 8), (2, 2, 9, 8)) - 4 * 2 * 4 * rows * (32 + 1)
    assert shared == 2 * 1536  # 1,152 bytes each
    assert scratch((2, 4, 130, 8), (2, 2, 9, 8), single) - 4 * 2 * 4 * rows * 33 == 2 * 2560
    assert cuda_kernels.scratch(torch.ops.aten.mm.default, (None, None, None)) == 0
