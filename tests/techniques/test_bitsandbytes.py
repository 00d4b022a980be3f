"""8 and 4 bits beside bitsandbytes' own CPU build, where it is installed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, Recipe, predict
from gradmem_lib.course.material import models
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.techniques import quantized
from gradmem_lib.techniques.lora import linear_layers
from gradmem_lib.techniques.optimizers import AdamW8bit, code_table

bitsandbytes = pytest.importorskip("bitsandbytes")
functional = pytest.importorskip("bitsandbytes.functional")


@pytest.mark.parametrize("signed", [True, False])
def test_the_256_values_are_theirs(signed):
    torch.testing.assert_close(
        code_table(signed, None), functional.create_dynamic_map(signed), rtol=0, atol=2e-7
    )


def test_8bit_adamw_goes_where_theirs_goes():
    """After 20 steps within 0.2 % of the way, where the way of either is 1.1 % off that of float32
    states; and as many bytes.
    """
    ends, states, settings = [], [], {"lr": 1e-2, "weight_decay": 0.01}
    start = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    for kind in (torch.optim.AdamW, AdamW8bit, bitsandbytes.optim.AdamW8bit):
        p, chance = nn.Parameter(start.clone()), torch.Generator().manual_seed(2)
        optimizer = kind([p], **settings)
        for _ in range(20):
            p.grad = 0.1 * torch.randn(128, 64, generator=chance) + 0.05
            optimizer.step()
        ends.append(p.detach())
        tensors = [s for s in optimizer.state[p].values() if isinstance(s, torch.Tensor)]
        states.append(sum(t.nbytes for t in tensors))
    exact, ours, theirs = ends
    way = (exact - start).norm()
    assert (ours - theirs).norm() / way < 0.002
    assert all(0.008 < (end - exact).norm() / way < 0.014 for end in (ours, theirs))
    assert states[1] == states[2]


def test_nf4_keeps_the_weights_that_theirs_keeps():
    """99 of 100 codes are equal, all within one step: ours divide by the magnitude as it is kept,
    theirs by the one before it was rounded.
    """
    torch.manual_seed(0)
    base = nn.Linear(512, 384, bias=False)
    nn.init.normal_(base.weight)
    layer, weight = quantized.Linear4bit(base), base.weight.detach()
    packed, state = functional.quantize_4bit(
        weight, quant_type="nf4", blocksize=64, compress_statistics=True
    )
    pairs = [torch.stack([t.view(-1) >> 4, t.view(-1) & 15]).int() for t in (layer.packed, packed)]
    assert (pairs[0] == pairs[1]).float().mean() > 0.99 and (pairs[0] - pairs[1]).abs().max() <= 1
    errors = [
        (kept - weight).norm() / weight.norm()
        for kept in (layer.dequantized(), functional.dequantize_4bit(packed, state))
    ]
    assert errors[0] <= errors[1] == pytest.approx(0.0920, abs=2e-4)
    theirs = [packed, state.absmax, state.state2.absmax, state.offset]
    assert [p.nbytes for p in layer.parameters()] == [t.nbytes for t in theirs]


@pytest.mark.parametrize("scales_in_8_bits", [False, True])
def test_a_base_in_their_4_bits_is_tracked_with_its_scales_and_no_prediction(scales_in_8_bits):
    layer = bitsandbytes.nn.Linear4bit(
        256, 256, bias=False, compress_statistics=scales_in_8_bits
    ).to("cpu")
    state, model = layer.weight.quant_state, nn.Sequential(nn.Linear(256, 256), layer)
    kept = [layer.weight, state.absmax, state.code, model[0].weight, model[0].bias]
    if scales_in_8_bits:
        kept += [state.offset, state.state2.absmax, state.state2.code]
    with MemoryTracker(model, live=False) as tracker:
        assert tracker.current.by_category["parameters"] == sum(t.nbytes for t in kept)
    with pytest.raises(
        CannotTrace, match=r"the model holds a Params4bit.*measure one real step with MemoryTracker"
    ):
        predict(model, batch=torch.randn(2, 256), target="cpu")


def in_their_4_bits(model: nn.Module) -> int:
    """Replace the linear layers but the head as ``from_pretrained(load_in_4bit=True)`` does.

    Returns their number.
    """
    layers = linear_layers(model)
    for name, layer in layers.items():
        small = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16
        )
        small.weight = bitsandbytes.nn.Params4bit(
            layer.weight.data, requires_grad=False, quant_type="nf4"
        )
        model.set_submodule(name, small.to("cpu"))
    model.is_loaded_in_4bit = True
    return len(layers)


@pytest.mark.parametrize("checkpointing", [None, "per-layer"])
def test_qlora_as_peft_prepares_it_takes_the_bytes_of_the_recipe(checkpointing, monkeypatch):
    """PEFT asks whether autocast is on for cards; here it is told of the CPU."""
    peft = pytest.importorskip("peft")
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": is_enabled(device))
    model = models.tiny_llama(layers=4, hidden=128, heads=4, intermediate=384, vocab=512)
    config = copy.deepcopy(model.config)
    layers = in_their_4_bits(model.to(torch.bfloat16))
    model = peft.prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=checkpointing is not None,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapters).train()
    model.config.use_cache = False
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    ids = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        step()
    recipe = Recipe("autocast-bf16", lora_rank=16, quantized_base=True, checkpointing=checkpointing)
    predicted = predict(config, batch_size=4, seq_len=64, recipe=recipe, target="cpu").peak
    theirs, ours = tracker.peak.by_category, predicted.by_category
    # Each of their layers has its own tables of 256 and of 16 float32 values.
    assert theirs.pop("parameters") == ours.pop("parameters") + layers * 4 * (256 + 16)
    assert abs(theirs.pop("other") - ours.pop("other")) <= 64  # counters and labels
    assert theirs == ours
