"""Operations are counted in every kernel that multiplies matrices, or refused."""

import pytest
import torch
from support.families import tiny_config
from torch import nn

from gradmem_lib import count_operations
from gradmem_lib.model.classes import model_class

X, W, V = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4)
PAIRS = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
# How many products of two numbers each has.
PRODUCTS = {
    "X @ W": 3 * 4 * 5,
    "X @ V": 3 * 4,
    "V @ V": 4,
    "torch.addmv(torch.ones(3), X, V)": 3 * 4,
    "torch.addbmm(torch.ones(3, 5), *PAIRS)": 2 * 3 * 4 * 5,
}


@pytest.mark.parametrize("step", PRODUCTS)
def test_each_product_counts(step):
    assert count_operations(lambda: eval(step)) == 2 * PRODUCTS[step]


def test_grouped_experts_count_what_experts_one_by_one_do():
    cfg, found = tiny_config("mixtral"), {}
    for how in ("eager", "grouped_mm"):
        torch.manual_seed(0)
        model = model_class(cfg)(cfg)
        model.set_experts_implementation(how)
        ids = torch.arange(32).view(2, 16)
        found[how] = count_operations(
            lambda model=model, ids=ids: model(ids, labels=ids, use_cache=False).loss.backward()
        )
    assert found["grouped_mm"] == found["eager"]


HIDDEN = {
    "mkldnn_rnn_layer": lambda: nn.LSTM(4, 5)(torch.ones(3, 2, 4)),
    "_trilinear": lambda: nn.Bilinear(4, 4, 2)(X, X),
    "_transformer_encoder_layer_fwd": torch.no_grad()(
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()(torch.ones(2, 3, 16))
    ),
}


@pytest.mark.parametrize("kernel", HIDDEN)
def test_a_kernel_that_hides_its_products_is_refused(kernel):
    with pytest.raises(RuntimeError, match=f"aten.{kernel} multiplies matrices inside one kernel"):
        count_operations(HIDDEN[kernel])
