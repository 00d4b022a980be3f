"""A base in 4 bits: its values, its bytes, and gradients through it."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from support.families import tiny_config
from support.nightly import each
from support.predicted import assert_same, measured
from torch import nn

from gradmem_lib import AdamW8bit, Recipe, predict
from gradmem_lib.course import models
from gradmem_lib.model.classes import model_class
from gradmem_lib.names import QUANTIZED
from gradmem_lib.techniques import quantized
from gradmem_lib.techniques.lora import add_lora
from gradmem_lib.techniques.optimizers import code_table, nearest


def test_the_16_values_of_nf4_are_the_papers():
    values = quantized.nf4_values()
    assert len(values) == 16 and values[0] == -1 and values[7] == 0 and values[15] == 1
    assert values[8].item() == pytest.approx(0.0795803, abs=1e-6)  # appendix E of the paper
    assert values[1].item() == pytest.approx(-0.6961928, abs=1e-6)


@pytest.mark.parametrize("shape", [(37, 29), (151, 128)])  # and more blocks than a scale is for
def test_each_4_bits_are_the_nearest_value_times_its_blocks_magnitude(shape):
    """By brute force, also where neither 64 nor 2 divides the size."""
    torch.manual_seed(0)
    base = nn.Linear(*reversed(shape), bias=False)
    layer, values, code = quantized.Linear4bit(base), quantized.nf4_values(), code_table(True, None)
    blocks = base.weight.detach().flatten().split(64)
    largest = torch.stack([block.abs().max() for block in blocks])
    kept = []
    for some in (largest - largest.mean()).split(256):
        scale = some.abs().max()
        nearest_codes = (some[:, None] / scale.clamp(min=1e-38) - code).abs().argmin(1)
        kept += (code[nearest_codes] * scale + largest.mean()).tolist()
    nibbles = [(b[:, None] / k - values).abs().argmin(1) for b, k in zip(blocks, kept, strict=True)]
    packed = torch.stack([layer.packed // 16, layer.packed % 16], dim=1).flatten()[
        : base.weight.numel()
    ]
    assert torch.equal(packed.long(), torch.cat(nibbles))
    wanted = torch.cat([values[n] * k for n, k in zip(nibbles, kept, strict=True)]).view(shape)
    torch.testing.assert_close(layer.dequantized(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_the_8_bit_values_are_middles_of_equal_intervals_of_decades(signed):
    """Seven decades up to 1; where signs take half of the values, each decade has half as many."""
    found = [0.0, 1.0]
    for decade in range(7):
        intervals = 2**decade if signed else 2 ** (decade + 1)
        for i in range(intervals):
            middle = 10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / intervals)
            found += [middle, -middle] if signed else [middle]
    expected = torch.tensor(sorted(found))
    torch.testing.assert_close(code_table(signed, None), expected, rtol=1e-6, atol=0)


def most_at_once(run) -> int:
    """By the CPU allocator's events, which see inside an operator."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def test_what_the_operators_take_inside_is_as_documented():
    """``predict`` names both figures, which are those of one slice: all at once, it would be more
    for larger weights.
    """
    layer = quantized.Linear4bit(nn.Linear(2048, 4096, bias=False))
    layer.dequantized(torch.bfloat16)
    result, magnitudes = 2048 * 4096 * 2, 2048 * 4096 // quantized.BLOCK * 4
    inside = most_at_once(lambda: layer.dequantized(torch.bfloat16)) - result - magnitudes
    assert 13e6 < inside < 14e6
    weight = nn.Parameter(torch.randn(2**22).bfloat16())
    weight.grad = torch.randn(2**22).bfloat16()
    optimizer = AdamW8bit([weight])
    optimizer.step()
    assert 34e6 < most_at_once(optimizer.step) < 35e6
    assert all(figure in predict.__doc__ for figure in ("35 and 14 MB", "8- and 4-bit"))


def test_slices_of_a_4bit_weight_are_the_weight(monkeypatch):
    layer = quantized.Linear4bit(nn.Linear(37, 29, bias=False))
    whole = layer.dequantized()
    monkeypatch.setattr(quantized, "SLICE", 128)
    assert torch.equal(layer.dequantized(), whole)


@pytest.mark.parametrize(
    "code", [code_table(True, None), code_table(False, None), quantized.nf4_values()]
)
def test_the_table_finds_what_a_binary_search_finds(code):
    """At every middle and beside it, and at both ends of all floats that begin alike."""
    middles = (code[1:] + code[:-1]) / 2
    beside = [torch.nextafter(middles, middles + sign) for sign in (-1, 1)]
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    ends = torch.cat([upper, upper | 0xFFFF]).view(torch.float32)
    values = torch.cat([middles, *beside, ends[ends.abs() <= 1], torch.tensor([torch.nan])])
    assert torch.equal(nearest(values, code), torch.bucketize(values, middles).to(torch.uint8))


A, B = {"precision": "autocast-bf16"}, {"precision": "bf16"}


@pytest.mark.parametrize(
    ("family", "fields"),
    each(
        2,
        [
            ("llama", A | {"quantized_base": True, "checkpointing": "per-layer"}),
            ("gpt2", {"precision": "float32", "quantized_base": "nf4", "compute_dtype": "bf16"}),
            # T5 looks at its wo.weight; mixers of states multiply by weights without a call.
            ("t5", B | {"quantized_base": True}),
            ("mamba", B | {"quantized_base": True}),
            ("mixtral", B | {"quantized_base": "fp4-double", "compute_dtype": "float32"}),
            ("vit", A | {"quantized_base": True}),
        ],
    ),
)
def test_a_4bit_base_is_predicted(family, fields):
    recipe = Recipe(lora_rank=2, attention=None, **fields)
    seq_len = None if family == "vit" else 16
    torch.manual_seed(0)
    asked = predict(tiny_config(family), batch_size=2, seq_len=seq_len, recipe=recipe, target="cpu")
    assert_same(asked, measured(tiny_config(family), recipe, 2, seq_len))


def test_under_autocast_a_4bit_layer_multiplies_in_16_bits_and_keeps_the_dtype_of_its_input():
    torch.manual_seed(0)
    layer = quantized.Linear4bit(nn.Linear(64, 48))
    x = torch.randn(3, 64, requires_grad=True)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        narrow = layer(x.detach().bfloat16())
    assert y.dtype == torch.float32 and narrow.dtype == torch.bfloat16 and not kept
    assert torch.equal(y, narrow.float())
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    weight = layer.dequantized(torch.bfloat16)
    expected = torch.ones(3, 48, dtype=torch.bfloat16) @ weight
    assert gradient.dtype == torch.float32 and torch.equal(gradient, expected.float())


@pytest.mark.parametrize("storage", ["nf4", "nf4-double", "fp4", "fp4-double"])
def test_each_storage_has_its_bytes_and_keeps_what_it_can(storage):
    torch.manual_seed(0)
    base = nn.Linear(512, 256, bias=False)
    layer = quantized.Linear4bit(base, storage, torch.bfloat16)
    n, spec = 512 * 256, QUANTIZED[storage]
    nbytes = sum(p.nbytes for p in layer.parameters())
    assert 0 <= nbytes - spec.bytes_each * n <= (4 * n / 64 / 256 + 4) * spec.double
    largest = base.weight.abs().max()
    widest = 0.34 if spec.floating_point else 0.31  # between two of the 16 values
    assert (layer.dequantized() - base.weight).abs().max() < (widest / 2 + 0.02) * largest
    y = layer(torch.randn(3, 512))
    assert y.dtype == torch.float32 and torch.equal(y, y.bfloat16().float())


def test_a_bitsandbytes_config_is_read():
    """transformers makes one only where bitsandbytes is installed; its defaults are FP4, no double
    quantization, and float32.
    """
    fields = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float32",
    }
    usual = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    usual["bnb_4bit_compute_dtype"] = "bfloat16"
    for given, storage, compute in (({}, "fp4", "float32"), (usual, "nf4-double", "bf16")):
        config = SimpleNamespace(to_dict=lambda given=given: fields | given)
        recipe = Recipe(lora_rank=2, quantized_base=config)
        assert recipe == Recipe(lora_rank=2, quantized_base=storage, compute_dtype=compute)
    with pytest.raises(ValueError, match="computes in 'bf16': give one of the two"):
        Recipe(lora_rank=2, quantized_base=config, compute_dtype="fp16")
    fields["load_in_4bit"] = False
    with pytest.raises(ValueError, match="does not load in 4 bits"):
        Recipe(lora_rank=2, quantized_base=config)


def test_a_mixtures_experts_stay_as_they_are():
    with pytest.raises(ValueError, match="add LoRA first"):
        quantized.quantize_base(models.tiny_llama())
    model = model_class(tiny_config("mixtral"))(tiny_config("mixtral"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_lora(model, 2)
    assert quantized.quantize_base(model) == 2 * 4  # attention's
    experts = [name for name in before if ".experts." in name]
    assert experts and all(torch.equal(model.get_parameter(n), before[n]) for n in experts)
