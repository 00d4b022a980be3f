"""What lesson 09 says in figures that none of its cells prints."""

import json
from dataclasses import replace

import pytest
import torch
from support.paths import ROOT
from torch import nn
from transformers import AutoModelForCausalLM

from gradmem_lib import MemoryTracker, Recipe, known_model, predict, prepare, step
from gradmem_lib.course import smollm2_peak
from gradmem_lib.course.material import models
from gradmem_lib.techniques.optimizers import SMALLEST_8BIT
from gradmem_lib.techniques.quantized import Linear4bit, nf4_values
from gradmem_lib.units import GiB, MiB

SOURCE = ROOT / "solutions" / "09_optimizers_and_adapters.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())
SEVEN = known_model("Llama-2-7B")[1]
BF16 = Recipe(precision="bf16", optimizer="adamw-fused")


def most_gradients(recipe: Recipe) -> int:
    llama, ids = models.tiny_llama(), torch.zeros(1, 16, dtype=torch.long)
    optimizer = prepare(llama, recipe).optimizer
    with MemoryTracker(llama, optimizer, live=False) as tracker:
        step(llama, optimizer, {"input_ids": ids, "labels": ids}, recipe)
    return max(tracker.timeline.by_category["gradients"])


def test_the_gradients_that_are_left_by_a_step_in_backward():
    left, all_of_them = (most_gradients(Recipe(in_backward=way)) for way in (True, False))
    assert (
        f"At most the largest gradient exists: on the tiny Llama, {left / 1e6:.1f} of "
        f"{all_of_them / 1e6:.1f} MB."
    ) in TEXT


@pytest.mark.parametrize("recipe", [{"accumulation": 2}, {"precision": "autocast-fp16"}])
def test_a_recipe_refuses_what_needs_all_gradients(recipe):
    with pytest.raises(ValueError, match="in_backward"):
        Recipe(in_backward=True, **recipe)


def test_small_tensors_stay_in_float32():
    assert f"below {SMALLEST_8BIT:,} numbers it saves nothing" in TEXT
    for numbers, dtype in ((SMALLEST_8BIT - 1, torch.float32), (SMALLEST_8BIT, torch.uint8)):
        layer = nn.Linear(numbers, 1, bias=False)
        optimizer = prepare(layer, Recipe(optimizer="adamw-8bit")).optimizer
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        assert optimizer.state[layer.weight]["exp_avg"].dtype == dtype


def seven(recipe: Recipe):
    found = predict(SEVEN, batch_size=1, seq_len=2048, recipe=recipe, target="cpu")
    return found.peak.total, {part: max(n) for part, n in found.timeline.by_category.items()}


def test_what_lora_takes_off_a_7b():
    every_weight, parts = seven(BF16)
    lora, left = seven(replace(BF16, lora_rank=16))
    assert f"activations are at most {parts['activations'] / GiB:.2f} GiB." in TEXT
    notebook = (ROOT / "solutions" / "09_optimizers_and_adapters.ipynb").read_text(encoding="utf-8")
    assert f"predicted  {left['activations'] / GiB:.2f} GiB" in notebook
    gone = sum(parts[name] - left[name] for name in ("gradients", "optimizer"))
    assert f"LoRA removes {gone / GiB:.0f} GiB of gradients and states" in TEXT
    rerun = {"checkpointing": "per-layer"}
    assert seven(replace(BF16, **rerun))[0] == pytest.approx(every_weight, rel=1e-3)
    checkpointed = seven(replace(BF16, lora_rank=16, **rerun))[0]
    assert f"With LoRA they take {100 * (1 - checkpointed / lora):.0f} % off." in TEXT
    few = seven(replace(BF16, lora_rank=16, lora_targets=("q_proj", "v_proj")))[1]["activations"]
    assert f"on queries and values alone, activations are {few / GiB:.2f} GiB" in TEXT


def test_float32_adapters_keep_more():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SEVEN, dtype=torch.bfloat16)
    recipe = replace(BF16, precision=None, lora_rank=16)
    found = predict(model, batch_size=1, seq_len=2048, recipe=recipe, target="cpu")
    most = max(found.timeline.by_category["activations"])
    assert f"and activations are {most / GiB:.2f} GiB." in TEXT


def test_the_code_that_it_makes_is_nf4s():
    def quantiles(n):
        return torch.special.ndtri(torch.linspace(0.5, 0.9677083, n))

    made = torch.cat([-quantiles(8)[1:].flip(0), quantiles(9)]) / quantiles(9)[-1]
    torch.testing.assert_close(made, nf4_values(), atol=1e-6, rtol=1e-5)


def test_the_bytes_of_a_weight_in_4_bits():
    layer = Linear4bit(nn.Linear(1024, 1024, bias=False).requires_grad_(False))
    nbytes = sum(p.nbytes for p in layer.parameters()) - 4  # one float32 for the mean
    assert nbytes / 2**20 == 0.5 + 1 / 64 + 4 / (64 * 256)
    assert "0.5 + 4/64 = 0.5625" in TEXT and f"4/(64 · 256) = {nbytes / 2**20:.4f} bytes" in TEXT


def test_the_weights_in_4_bits_and_what_they_save():
    config = known_model("SmolLM2-135M")[1]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        prepare(model, Recipe(precision="bf16", lora_rank=32, quantized_base=True))
    count = sum(
        m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear4bit)
    )
    assert f"SmolLM2 has {count:,} weights in 4 bits" in TEXT
    assert f"QLoRA saves {count * (2 - 0.5159) / MiB:.0f} MiB at any length" in TEXT


def test_what_is_at_the_peak_of_300_mib():
    small = {"precision": "bf16", "checkpointing": "per-layer", "chunked_loss": True}
    recipe = Recipe(optimizer="adafactor-torch", in_backward=True, **small)
    parts = smollm2_peak(12, recipe).by_category
    assert f"the embedding and twelve layers are {parts['parameters'] / MiB:.0f} MiB." in TEXT
    tables = [parts[name] / MiB for name in ("gradients", "activations", "temporaries")]
    assert (
        tables == pytest.approx([54] * 3, abs=0.1)
        and "three tables of the embedding's size, 54 MiB each" in TEXT
    )
    assert smollm2_peak(13, recipe).total > 300 * MiB and "Thirteen layers do not fit" in TEXT


def test_the_record_of_the_optimizers():
    record = json.loads(
        (ROOT / "benchmarks" / "results" / "optimizers.json").read_text(encoding="utf-8")
    )
    rows = record["optimizers"]
    assert (
        f"In our record of the full run, the loss falls from {record['held-out loss before']:.3f} "
        "to"
    ) in TEXT
    for names, text in {
        ("adamw", "adamw-8bit"): "(AdamW and 8-bit AdamW)",
        ("lion",): "(Lion)",
        ("muon",): "(Muon)",
        ("adafactor-torch", "sgd, momentum 0.9"): "(Adafactor and momentum)",
    }.items():
        for name in names:
            best = min(rows[name]["held-out loss, by learning rate"].values())
            assert f"{best:.3f} {text}" in TEXT, name
    time = rows["muon"]["time of a step, to AdamW's"]
    assert f"a step of Muon takes {time:.0f} times as long as AdamW's." in TEXT


def test_the_products_of_muon_cost_what_so_many_tokens_cost():
    """Five rounds of Newton and Schulz on each matrix of the layers; a token's forward and backward
    multiply three times by each matrix and by the head.
    """
    config = known_model("SmolLM2-135M")[1]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rounds = 0
    for matrix in matrices:
        short, long = sorted(matrix.shape)
        # X Xᵀ, its square, and the result times X: two operations for each product and sum
        rounds += 5 * 2 * (short * short * long + short**3 + short * short * long)
    trained = sum(p.numel() for p in matrices) + model.lm_head.weight.numel()
    assert f"its products cost what {round(rounds / (6 * trained), -2):,.0f} tokens" in TEXT


def test_galores_directions_keep_less_of_more_tokens():
    from gradmem_lib.course import texts

    model, tokenizer = models.smollm2()
    model.requires_grad_(False)
    weight = model.model.layers[20].mlp.down_proj.weight.requires_grad_()
    rows, _ = texts.datasets(tokenizer, seq_len=64, rows=8, held_out=2)
    for ids in rows.ids.split(2):
        model(input_ids=ids, labels=ids).loss.backward()
    values = torch.linalg.svdvals(weight.grad).square()
    kept = (values[:4].sum() / values.sum()).sqrt()
    assert rows.ids.numel() == 512
    share = f"four directions keep {100 * kept:.0f} %"
    assert f"with 512 tokens, the largest {share} of G's norm" in TEXT
    assert f"With 512 tokens, {share}." in TEXT
