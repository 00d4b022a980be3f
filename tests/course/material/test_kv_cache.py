"""The closed form of a key-value cache against the storages of transformers' own, after a
forward.
"""

import copy
import os

import pytest
import torch
from support.families import MIXTURES, OLDER, PAIRS, STATES, TEXT, tiny_config

from gradmem_lib.course.material.accounting import SHAPES, kv_cache_bytes
from gradmem_lib.model.classes import model_class

ROWS, FEW, MANY = 2, 5, 12  # some families have a window of 8 tokens
CAUSAL = [
    family for family in [*TEXT, *MIXTURES, *STATES] if not (OLDER and family == "zamba2")
]  # which refuses two layers
USUAL = ["llama", "gpt2", "gemma", "mistral", "qwen3", "gemma2", "mixtral"]
EXACT_AT_LEAST = 35


def held(config, tokens: int, dtype=torch.float32) -> int:
    """Bytes behind what the cache holds after one forward."""
    model = model_class(config)(copy.deepcopy(config)).eval().to(dtype)
    with torch.no_grad():
        cache = model(
            input_ids=torch.ones(ROWS, tokens, dtype=torch.long), use_cache=True
        ).past_key_values
    storages = {t.untyped_storage() for layer in cache.layers for t in (layer.keys, layer.values)}
    return sum(storage.nbytes() for storage in storages)


def formula(config, tokens: int, width: int = 4) -> int | None:
    try:
        return kv_cache_bytes(config, ROWS, tokens, width)
    except ValueError as error:
        assert "no closed form" in str(error) and repr(config.model_type) in str(error)
        return None


@pytest.mark.parametrize("family", CAUSAL if os.environ.get("GRADMEM_ALL") else USUAL)
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_as_many_bytes_as_the_real_one_or_a_refusal(family, tokens):
    config = tiny_config(family)
    expected = formula(config, tokens)
    if expected is not None:
        assert held(config, tokens) == expected
    if family in USUAL:
        window = getattr(config, "sliding_window", None)
        assert (expected is None) == (window is not None and tokens >= window)


def test_most_families_have_a_closed_form():
    found = [family for family in CAUSAL if formula(tiny_config(family), FEW)]
    assert len(found) >= EXACT_AT_LEAST
    assert not {"deepseek_v3", "mamba", "jamba", "gpt_bigcode", "falcon", "minimax"} & set(found)
    assert not any(formula(tiny_config(family), FEW) for family in PAIRS)


def test_two_bytes_a_number():
    config = tiny_config("llama")
    assert (
        held(config, FEW, torch.bfloat16)
        == kv_cache_bytes(config, ROWS, FEW)
        == formula(config, FEW) / 2
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_and_its_config_are_one(name):
    shape = SHAPES[name]
    assert kv_cache_bytes(shape, 3, 100) == kv_cache_bytes(shape.config(), 3, 100)


def test_by_hand():
    """Llama-2-7B: 32 layers, a key and a value of 4,096 numbers of two bytes.

    Llama-3.2-1B: 8 of 32 heads are kept.
    """
    assert kv_cache_bytes(SHAPES["Llama-2-7B"], 1, 1) == 32 * 2 * 4096 * 2 == 524_288
    assert kv_cache_bytes(SHAPES["Llama-3.2-1B"], 1, 1) == 16 * 2 * 512 * 2
