"""The closed form of a key-value cache against the storages of transformers' own, after a
forward.
"""

from dataclasses import replace

import pytest
import torch

from gradmem_lib.course.material.accounting import SHAPES, kv_cache_bytes
from gradmem_lib.model.classes import model_class

ROWS, TOKENS = 2, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tiny Llama", "Llama-3.2-1B", "GPT-2"])
def test_as_many_bytes_as_the_real_one(name, dtype):
    """GPT-2's heads share nothing, and four of Llama-3.2's share a key and a value."""
    shape = replace(SHAPES[name], vocab=64, layers=2)
    model = model_class(shape.config())(shape.config()).eval().to(dtype)
    with torch.no_grad():
        ids = torch.ones(ROWS, TOKENS, dtype=torch.long)
        cache = model(input_ids=ids, use_cache=True).past_key_values
    storages = {t.untyped_storage() for layer in cache.layers for t in (layer.keys, layer.values)}
    held = sum(storage.nbytes() for storage in storages)
    assert held == kv_cache_bytes(shape, ROWS, TOKENS, dtype.itemsize)


def test_by_hand():
    """Llama-2-7B: 32 layers, a key and a value of 4,096 numbers of two bytes.

    Llama-3.2-1B: 8 of 32 heads are kept.
    """
    assert kv_cache_bytes(SHAPES["Llama-2-7B"], 1, 1) == 32 * 2 * 4096 * 2 == 524_288
    assert kv_cache_bytes(SHAPES["Llama-3.2-1B"], 1, 1) == 16 * 2 * 512 * 2
