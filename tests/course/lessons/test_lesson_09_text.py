"""What lesson 09 says in figures and comparisons that none of its cells prints."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from support.lesson_text import Lesson
from torch import nn

from gradmem_lib import MemoryTracker, Recipe, known_model, predict, prepare
from gradmem_lib.course import smollm2_peak
from gradmem_lib.course.lessons.lesson_09 import (
    exercises,
    exercises_adapters,
    exercises_backward,
    exercises_capstone,
    exercises_loss,
)
from gradmem_lib.course.machine.compat import enable_checkpointing
from gradmem_lib.course.material import models
from gradmem_lib.units import GiB, MiB

SMALL = {"precision": "bf16", "checkpointing": "per-layer"}
QLORA = {"optimizer": "adamw-8bit", "lora_rank": 16, "quantized_base": True}


@pytest.fixture(scope="module")
def said() -> Lesson:
    return Lesson("09")


def test_an_adapters_product_is_never_written_out(said):
    budget = exercises_adapters.ADAPTER_CARD
    assert said.says(f"rank 8: **{budget / 1e6:.1f} MB**, so B · A must never be written out.")
    base = 512 * 512 * 4
    # B · A and its gradient are as large as the base.
    assert base < budget < 2 * base


def test_the_gradients_that_clipping_does_not_keep(said):
    model, _ = exercises_backward.clip_setting()
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    budget = exercises_backward.CLIP_CARD
    assert said.says(f"The budget is **{budget / 1e6:.1f} MB**.")
    assert said.says(
        f"The weights are {weights / 1e6:.1f} MB, and all gradients {gradients / 1e6:.1f} MB."
    )
    assert weights < budget < weights + gradients


def test_a_loss_in_chunks_has_no_room_for_the_logits(said):
    budget = exercises_loss.LOSS_CARD
    logits = 1000 * 3000 * 4
    assert said.says(f"The budget is **{budget / 1e6:.0f} MB**.")
    assert said.says(f"The logits alone are {logits / 1e6:.0f} MB.") and logits > budget


def test_a_gradient_in_float32_is_4_bytes(said):
    layer = nn.Linear(8, 8, bias=False)
    layer(torch.ones(1, 8)).sum().backward()
    assert said.says("In float32, gradients are 4 bytes a weight more.")
    assert layer.weight.grad.nbytes == 4 * layer.weight.numel()


def test_where_the_logits_are_the_largest_part(said):
    assert said.says("SmolLM2's logits and their gradients are the largest part (8 rows of 128")
    logits = 8 * 128 * known_model("SmolLM2-135M")[1].vocab_size * 4
    at_once = smollm2_peak(30, Recipe(**SMALL, **QLORA))
    in_chunks = smollm2_peak(30, Recipe(**SMALL, **QLORA, chunked_loss=True))
    assert at_once.by_category["temporaries"] == 2 * logits
    assert at_once.total - in_chunks.total > 2 * logits > at_once.total / 2
    assert said.says("A 7B's weights are still larger, on a row of 2,048.")
    seven = known_model("Llama-2-7B")[1]
    recipe = Recipe(**SMALL, **QLORA)
    peak = predict(seven, batch_size=1, seq_len=2048, recipe=recipe, target="cpu").peak
    assert max(peak.by_category, key=peak.by_category.get) == "parameters"
    assert peak.by_category["parameters"] > peak.total / 2


def test_8_bits_need_blocks_and_a_code_finer_towards_zero(said):
    x = (2 * torch.randn(8192, generator=torch.Generator().manual_seed(0))).exp()
    x[0] = 1e7  # a single large number
    equal = torch.linspace(0, 1, 256)
    ratios = torch.cat([torch.zeros(1), torch.logspace(-7, 0, 255)])

    def error(code, block) -> float:
        back = exercises.quantize(x, code, block)[2]
        return ((back - x).abs() / x).nanmedian().item()

    assert said.says("- **8 bits need blocks, and a code finer towards 0**.")
    assert error(ratios, 256) < 0.05 < error(equal, 256)
    # With one absmax, all others are pushed to 0.
    assert error(equal, len(x)) == 1.0


def test_the_two_ways_under_300_mib(said):
    (layers, every_weight), (more, adapters) = exercises_capstone.under_300()
    assert said.says("train SmolLM2 under 300 MiB, with every weight or with adapters.")
    assert said.says("and the card has **300 MiB**.")
    assert exercises_capstone.CARD_300 / MiB == 300
    assert said.says(f"at least {layers} layers with **every weight** trained, and at least {more}")
    weights = smollm2_peak(layers, every_weight).by_category["parameters"]
    peak = smollm2_peak(more, adapters)
    assert said.says("the weights of 40 layers are hardly larger, and the peak is in forward.")
    assert 1 < peak.by_category["parameters"] / weights < 1.05 and peak.phase == "forward"


def test_qlora_does_not_multiply_in_4_bits(said):
    layer = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    prepare(layer, Recipe(precision="bf16", lora_rank=2, quantized_base=True))
    (frozen,) = [module for module in layer.modules() if hasattr(module, "packed")]
    assert said.says("QLoRA does not multiply in 4 bits.")
    assert said.says("**4 bits are how QLoRA keeps a weight.")
    assert said.says("It multiplies in 16 bits.")
    assert frozen.packed.numel() == 64 * 64 // 2
    whole = frozen.dequantized(torch.bfloat16)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert whole.shape == (64, 64) and torch.equal(frozen(x), F.linear(x, whole))


def test_the_switch_makes_the_embeddings_output_need_a_gradient(said):
    assert said.says("transformers 5.23 calls it for you when you switch checkpoints on.")
    model = models.tiny_llama(layers=1, hidden=16, heads=2, intermediate=32, vocab=16)
    model.requires_grad_(False)
    embedding, ids = model.get_input_embeddings(), torch.zeros(1, 2, dtype=torch.long)
    assert not embedding(ids).requires_grad
    enable_checkpointing(model)
    assert embedding(ids).requires_grad


def most_activations(model, ids) -> int:
    with MemoryTracker(model, live=False) as tracker:
        model(input_ids=ids).logits.float().square().mean().backward()
    return max(tracker.timeline.by_category["activations"])


def test_what_peft_casts_to_float32_doubles_many_activations(said):
    assert said.says(
        "PEFT's `prepare_model_for_kbit_training` casts norms and embeddings to float32, which "
        "doubles many activations."
    )
    peft = pytest.importorskip("peft")
    model = models.tiny_llama(layers=4, vocab=64).bfloat16()
    ids = torch.zeros(1, 64, dtype=torch.long)
    prepare(model, Recipe(precision="bf16", lora_rank=4, quantized_base=True))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    before = most_activations(model, ids)
    # PEFT leaves bitsandbytes' weights in 4 bits as they are. Ours are numbers of another kind.
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model.model.norm.weight.dtype == torch.float32
    assert model.get_input_embeddings().weight.dtype == torch.float32
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    assert 1.5 < most_activations(model, ids) / before <= 2


def test_torchs_own_loss_in_chunks(said):
    assert said.says('PyTorch 2.13 has `F.linear_cross_entropy` ("theirs").')
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    assert hasattr(F, "linear_cross_entropy") == (version >= (2, 13))


def test_loras_peak_falls_by_less_than_what_it_removes(said):
    seven, bf16 = known_model("Llama-2-7B")[1], Recipe("bf16", "adamw-fused")
    ask = {"batch_size": 1, "seq_len": 2048, "target": "cpu"}
    every_weight = predict(seven, recipe=bf16, **ask)
    lora = predict(seven, recipe=Recipe("bf16", "adamw-fused", lora_rank=16), **ask)
    most = {
        part: max(every_weight.timeline.by_category[part]) - max(lora.timeline.by_category[part])
        for part in ("gradients", "optimizer", "activations")
    }
    gone = most["gradients"] + most["optimizer"]
    assert said.says(f"LoRA removes {gone / GiB:.0f} GiB of gradients and states, and hardly any")
    assert most["activations"] < 0.1 * max(every_weight.timeline.by_category["activations"])
    assert said.says("So the peak falls by less than that: it moves to where the activations are.")
    assert 0 < every_weight.peak.total - lora.peak.total < gone
    assert lora.peak.by_category["activations"] > every_weight.peak.by_category["activations"]


def test_what_keeping_inputs_costs_a_token(said):
    """The inputs are the slope's difference between the two columns, in MiB rounded to 1."""
    rows = said.figures(r"^ +(1024|2048) +([\d,]+) +([\d,]+) +([\d,]+) +[\d,]+$")
    (_, _, good, keeps), (_, _, good_long, keeps_long) = rows
    more = (keeps_long - good_long) - (keeps - good)
    config = known_model("SmolLM2-135M")[1]
    layers = config.num_hidden_layers
    mlp, down = config.hidden_size, config.intermediate_size
    assert said.says(f"`KeepsInput` keeps two bf16 tensors more in each of the {layers} layers")
    assert said.says(f"the MLP's input, {mlp} numbers a token, and `down_proj`'s, {down:,}.")
    assert more == pytest.approx(1024 * layers * 2 * (mlp + down) / MiB, abs=2)
