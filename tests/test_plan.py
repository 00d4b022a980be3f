"""The plan: what it recommends fits, what it refuses does not, and the code that it prints runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gradmem_lib.__main__ import main
from gradmem_lib.course import claims, models
from gradmem_lib.measure.budget import BudgetExceeded
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.planning.cards import CARDS, Card, find_card, room
from gradmem_lib.planning.code import code
from gradmem_lib.planning.cost import beyond, count, resident_bytes, seconds_per_token
from gradmem_lib.planning.models import find_model, known_model
from gradmem_lib.planning.options import EQUAL_TIME, METHODS, Option, describe
from gradmem_lib.planning.plan import plan
from gradmem_lib.planning.search import Search
from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.techniques import quantized
from gradmem_lib.training.prepare import prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step
from gradmem_lib.units import GiB

SMALL = dict(layers=2, hidden=64, heads=4, intermediate=172, vocab=512)


def small(**changes):
    model = models.tiny_llama(**SMALL | changes)
    model.config.max_position_embeddings = 256
    return model


@pytest.fixture(scope="module")
def config():
    return small().config


def needs(config, recipe, rows, seq_len) -> int:
    """Predicted anew, by the whole trace."""
    return predict(
        config, batch_size=rows, seq_len=seq_len, recipe=recipe, target="cpu", full=True
    ).peak.total


def track(option, seq_len, rows, budget):
    """Two real steps of the option, the second under the budget."""
    with torch.random.fork_rng():
        model, optimizer, undo = prepare(small(), option.recipe)
        ids = torch.randint(0, 512, (rows, seq_len))
        batch = {"input_ids": ids, "labels": ids}
        step(model, optimizer, batch, option.recipe)
        try:
            with MemoryTracker(model, optimizer, budget=budget, live=False) as tracker:
                step(model, optimizer, batch, option.recipe)
        finally:
            undo.close()
    return tracker


@pytest.fixture(scope="module")
def tight(config):
    """A card on which QLoRA has to give something up."""
    whole = needs(
        config, Recipe(precision="bf16", lora_rank=16, quantized_base=True, optimizer="adamw-fused"), 4, 128
    )
    return plan(config, card=whole // 2, seq_len=128, global_batch=4, method="qlora", target="cpu")


def test_best_fits_and_next_faster_does_not_predicted_independently(config, tight):
    best, faster = tight.best, tight.next_faster
    assert best.recipe.accumulation * best.micro_batch == 4
    assert best.needs == needs(config, best.recipe, 4, 128) <= tight.card.nbytes
    assert faster.seconds < best.seconds
    assert faster.needs == needs(config, faster.recipe, 4, 128) > tight.card.nbytes
    assert best.spare == tight.card.nbytes - best.needs


def test_best_runs_under_the_card_and_the_refused_one_exceeds_it(tight):
    tracker = track(tight.best, 128, 4, tight.card.nbytes)
    assert tracker.peak.total == tight.best.needs
    with pytest.raises(BudgetExceeded):
        track(tight.next_faster, 128, 4, tight.card.nbytes)


def test_a_card_of_just_the_bytes_needed_fits(tight):
    best = tight.best
    assert replace(best, card_bytes=best.needs).fits and replace(best, card_bytes=best.needs).spare == 0
    assert not replace(best, card_bytes=best.needs - 1).fits


def test_options_are_in_order_of_time_but_for_those_that_count_as_equal(tight):
    seconds = [o.seconds for o in tight.fits]
    assert all(b * EQUAL_TIME >= a for a, b in pairwise(seconds))
    assert tight.best is tight.fits[0] and tight.closest is tight.best


def test_refusals_say_what_is_missing_in_bytes(tight):
    text = tight.next_faster.why_not()
    assert "more than there is" in text and "activations" in text
    assert str(tight.next_faster) in str(tight) and "estimates" in str(tight)
    assert tight._repr_html_().startswith("<pre>")


def test_no_fit_names_the_closest_and_what_would_do(config):
    made = plan(config, card="400 KB", seq_len=128, global_batch=4, method="full", target="cpu")
    assert made.best is None and not made.fits and made.code == ""
    assert made.closest.needs > 400_000
    assert made.ruled_out and "alone" in made.ruled_out[0].why
    assert any("RTX 2060" in line for line in made.advice)
    assert "Nothing fits" in str(made)


def test_an_optimizer_in_backward_gets_the_whole_batch_at_once_and_advice_to_shrink_it(config):
    work = count(config)
    weights = resident_bytes(work, Recipe(precision="bf16"))["parameters"]
    made = plan(config, card=int(weights * 1.9), seq_len=8, global_batch=1, target="cpu")
    kept = made.best or made.closest
    assert kept.recipe.in_backward and kept.recipe.accumulation == 1


def test_roomy_card_gets_plain_training(config):
    made = plan(config, card="24 GiB", seq_len=16, global_batch=4, method="qlora", target="cpu")
    recipe = made.best.recipe
    assert recipe.checkpointing is None and recipe.every_n_layers is None and recipe.accumulation == 1
    assert made.next_faster is None


# --- counting ----------------------------------------------------------------------------------------


def test_operations_are_those_that_torch_counts(config):
    card = Card("one operation a second, endless bandwidth", 1, 2.0, 2.0, float("inf"))
    model = small(attention="eager")  # torch does not count the fused kernel's products on a CPU
    ids = torch.randint(0, 512, (2, 64))
    with FlopCounterMode(display=False) as flops:
        model(input_ids=ids, labels=ids).loss.backward()
    # Torch counts whole matrices of scores, also where half of them is masked.
    work = replace(count(config), causal=False)
    found = seconds_per_token(work, Recipe(precision="bf16"), card, 2, 64) * 2 * 64
    assert found == pytest.approx(flops.get_total_flops(), rel=1e-9)


def test_resident_bytes_are_what_training_keeps(config):
    for recipe in (
        Recipe(),
        Recipe(precision="bf16"),
        Recipe(precision="bf16", lora_rank=16),
        Recipe(optimizer="adafactor"),
        Recipe(optimizer="adafactor-torch", precision="bf16"),
        Recipe(optimizer="adamw-8bit"),
    ):
        found = predict(config, batch_size=1, seq_len=8, recipe=recipe, target="cpu").current.by_category
        estimated = resident_bytes(count(config), recipe)
        assert estimated["parameters"] == found["parameters"]
        assert estimated["optimizer"] == pytest.approx(found["optimizer"], rel=0.1)
    recipe = Recipe(precision="bf16", lora_rank=16, quantized_base=True)
    found = predict(config, batch_size=1, seq_len=8, recipe=recipe, target="cpu").current.by_category
    assert resident_bytes(count(config), recipe)["parameters"] == pytest.approx(found["parameters"], rel=0.01)


def test_time_grows_with_what_is_run_again_and_with_smaller_micro_batches(config):
    work, card = count(find_model("Llama-3.2-1B")[0]), CARDS["RTX 4090 24GB"]

    def seconds(micro, **changes):
        return seconds_per_token(work, Recipe(precision="bf16", **changes), card, micro, 2048)

    plain = seconds(8)
    assert plain < seconds(8, every_n_layers=2) < seconds(8, checkpointing="per-layer") < 1.4 * plain
    assert plain < seconds(1, accumulation=8)
    assert seconds(8, lora_rank=16) < plain
    assert seconds_per_token(work, Recipe(), card, 8, 2048) > plain


# --- 4 bits --------------------------------------------------------------------------------------------


def test_nf4_keeps_weights_near_and_bytes_as_documented():
    torch.manual_seed(0)
    base = nn.Linear(512, 384, bias=False).requires_grad_(False)
    small = quantized.Linear4bit(base)
    values = quantized.nf4_values()
    assert len(values) == 16 and values[0] == -1 and values[7] == 0 and values[15] == 1
    assert values[8].item() == pytest.approx(0.0795803, abs=1e-6)  # appendix E of the paper
    assert values[1].item() == pytest.approx(-0.6961928, abs=1e-6)
    error = (small.dequantized() - base.weight).abs().max() / base.weight.abs().max()
    assert error < 0.18  # half the widest gap between values, and the magnitudes' own rounding
    nbytes = {name: p.numel() * p.itemsize for name, p in small.named_parameters()}
    n = 512 * 384
    assert nbytes == {"packed": n // 2, "magnitudes": n // 64, "scales": 4 * (n // 64 // 256), "offset": 4}


def test_gradients_go_through_a_4bit_layer_as_through_its_written_out_weight():
    torch.manual_seed(0)
    layer = quantized.Linear4bit(nn.Linear(96, 33).requires_grad_(False))
    x = torch.randn(5, 96, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    plain = nn.functional.linear(x, layer.dequantized(), layer.bias)
    (wanted,) = torch.autograd.grad(plain.square().sum(), x)
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(x.grad, wanted)


def test_a_4bit_layer_keeps_nothing_for_backward():
    layer, kept = quantized.Linear4bit(nn.Linear(96, 33).requires_grad_(False)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(5, 96, requires_grad=True))
    assert not kept


def test_writing_a_4bit_weight_out_needs_its_own_bytes_and_little_more():
    """By the CPU allocator's events, which see inside an operator."""
    layer = quantized.Linear4bit(nn.Linear(2048, 4096, bias=False))
    layer.dequantized(torch.bfloat16)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        result = layer.dequantized(torch.bfloat16)
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak - result.nbytes < 30 * quantized.SLICE  # all at once, it would be eight times as much


def test_slices_of_a_4bit_weight_are_the_weight(monkeypatch):
    layer = quantized.Linear4bit(nn.Linear(37, 29, bias=False))
    whole = layer.dequantized()
    monkeypatch.setattr(quantized, "SLICE", 128)
    assert torch.equal(layer.dequantized(), whole)


def test_on_a_card_the_allocator_and_the_driver_need_room_too(config):
    made = plan(config, card="8 GiB", seq_len=16, global_batch=1, method="qlora", target="cuda")
    best = made.best
    assert best.needs == best.prediction.peak.total + sum(best.parts.values())
    assert (
        best.needs >= best.prediction.replay_allocator() + best.prediction.workspace + best.prediction.context
    )
    cards = Card("one byte less", best.needs - 1, 1e12, 1e12, 1e12)
    refused = plan(config, card=cards, seq_len=16, global_batch=1, method="qlora", target="cuda")
    assert best.recipe not in [o.recipe for o in refused.fits]


def test_whatever_is_listed_for_a_card_was_replayed(config):
    made = plan(config, card="2 GiB", seq_len=64, global_batch=4, method="any", target="cuda")
    assert len(made.fits) >= 2
    for option in made.fits:
        found = option.prediction
        assert (
            option.needs == max(found.replay_allocator(), found.peak.total) + found.workspace + found.context
        )


@pytest.mark.parametrize("checkpointing", [None, "per-layer"])
def test_qlora_predicted_equals_tracked(config, checkpointing):
    recipe = Recipe(precision="bf16", lora_rank=4, quantized_base=True, checkpointing=checkpointing)
    predicted = predict(config, batch_size=2, seq_len=64, recipe=recipe, target="cpu")

    class Option:
        pass

    option = Option()
    option.recipe = recipe
    assert track(option, 64, 2, None).peak == predicted.peak


def test_quantized_base_needs_lora_and_no_autocast():
    with pytest.raises(ValueError, match="lora_rank"):
        Recipe(quantized_base=True, precision="bf16")
    with pytest.raises(ValueError, match="precision='bf16'"):
        Recipe(quantized_base=True, lora_rank=4, precision="autocast-bf16")
    with pytest.raises(ValueError, match="add LoRA first"):
        quantized.quantize_base(small())


# --- code that runs ---------------------------------------------------------------------------------------


class _Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        ids = torch.arange(16) + i
        return {"input_ids": ids, "labels": ids}


def option_of(config, recipe, method, rows):
    """A plan that has chosen this recipe: what is printed for it must run."""
    made = plan(config, card="24 GiB", seq_len=16, global_batch=rows, method="qlora", target="cpu")
    search = Search(count(config), made.card, 16, rows, "cpu")
    return replace(made, fits=[search.option(recipe, method, 1 if not recipe.in_backward else rows)])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(precision="autocast-bf16", optimizer="adamw-fused", every_n_layers=2),
        Recipe(precision="bf16", optimizer="adamw-fused", chunked_loss=True, checkpointing="per-layer"),
        Recipe(precision="bf16", optimizer="adafactor-torch", checkpointing="per-layer"),
        Recipe(precision="bf16", optimizer="adamw-8bit"),
        Recipe(precision="bf16", optimizer="adamw-fused", lora_rank=16, quantized_base=True),
    ],
    ids=["autocast", "chunked", "adafactor", "8bit", "qlora"],
)
def test_printed_code_needs_what_was_predicted(config, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = option_of(config, recipe, "qlora" if recipe.quantized_base else "full", 2)
    more = ", max_steps=2, live=False, progress=False"
    text = made.code.replace("train_dataset=train_dataset", "train_dataset=train_dataset" + more)
    space = {"config": config, "train_dataset": _Texts()}
    exec(compile(text, "plan", "exec"), space)
    assert space["trainer"].state.global_step == 2
    expected, found = made.best.prediction.peak, space["trainer"].memory.by_step[2]
    assert found.phase == expected.phase
    for category, nbytes in expected.by_category.items():
        # The loader's tensors and the loss's few numbers apart.
        assert 0 <= found.by_category[category] - nbytes <= (4096 if category == "other" else 16), category


def text_of(given, config, recipe, target) -> str:
    option = Option(recipe, "full", 2, 0.0, 0, None, {}, 0)
    return code(option, given, config, target)


def test_printed_code_word_for_word():
    config = known_model("Llama-2-7B")[1]
    recipe = Recipe(precision="bf16", optimizer="adamw-8bit", every_n_layers=2, accumulation=8)
    assert text_of("llama 2 7b", config, recipe, "cuda") == (
        "from transformers import LlamaForCausalLM\n"
        "\n"
        "from gradmem_lib import Recipe, make_trainer\n"
        "\n"
        'model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")\n'
        "recipe = Recipe(\n"
        '    precision="bf16",\n'
        '    optimizer="adamw-8bit",\n'
        "    every_n_layers=2,\n"
        "    accumulation=8,\n"
        ")\n"
        "trainer = make_trainer(model, recipe, batch_size=16, train_dataset=train_dataset, use_cpu=False)\n"
        "trainer.train()\n"
    )
    recipe = Recipe(in_backward=True, chunked_loss=True)
    assert text_of(config, config, recipe, "cuda") == (
        "from torch.utils.data import DataLoader\n"
        "from transformers import LlamaForCausalLM, default_data_collator\n"
        "\n"
        "from gradmem_lib import Recipe, prepare, step\n"
        "\n"
        "model = LlamaForCausalLM(config)\n"
        "recipe = Recipe(\n"
        '    precision="float32",\n'
        '    optimizer="adamw",\n'
        "    in_backward=True,\n"
        "    chunked_loss=True,\n"
        ")\n"
        "model, optimizer, undo = prepare(model, recipe)\n"
        'model.to("cuda")\n'
        "loader = DataLoader(train_dataset, 2, shuffle=True, collate_fn=default_data_collator)\n"
        "for rows in loader:\n"
        '    loss = step(model, optimizer, {name: tensor.to("cuda") for name, tensor in rows.items()}, recipe)\n'
    )


def test_printed_code_loads_the_model_as_it_was_given(config, tmp_path, monkeypatch):
    recipe = Recipe()
    whole, sizes = tmp_path / "whole", tmp_path / "sizes"
    small().save_pretrained(whole)
    config.save_pretrained(sizes)
    for given in (str(whole), whole, whole / "config.json"):
        assert f'model = LlamaForCausalLM.from_pretrained("{whole}")' in text_of(given, config, recipe, "cpu")
    for given in (sizes, sizes / "config.json"):
        text = text_of(given, config, recipe, "cpu")
        assert f'config = AutoConfig.from_pretrained("{given}")\nmodel = LlamaForCausalLM(config)\n' in text
        space = {}
        exec(text.partition("recipe =")[0], space)
        assert space["model"].num_parameters() == small().num_parameters()
    text = text_of("tiny llama", config, recipe, "cpu")
    assert 'config = known_model("tiny Llama")[1]' in text
    exec(text.partition("trainer =")[0], {})
    chat = text_of("Qwen/Qwen2.5-7B-Instruct", known_model("Qwen2.5-7B")[1], recipe, "cpu")
    assert 'Qwen2ForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct")' in chat
    model = plan(small(), card="1 GiB", seq_len=16, global_batch=1, method="qlora", target="cpu")
    assert (
        "model =" not in model.code
        and "from_pretrained" not in model.code
        and "transformers" not in model.code
    )


# --- cards and bad input --------------------------------------------------------------------------------------


def test_cards_by_name_by_part_of_it_and_by_bytes():
    names = ("RTX 4090", "4090", "nvidia geforce rtx 4090", "RTX4090 24GB", "NVIDIA GeForce RTX 4090")
    assert {find_card(name).name for name in names} == {"RTX 4090 24GB"}
    assert find_card("NVIDIA A100-SXM4-80GB") is CARDS["A100 80GB"]
    assert find_card("NVIDIA H100 80GB HBM3") is CARDS["H100 80GB"]
    assert find_card("L4").name == "L4 24GB" and find_card("Tesla T4").nbytes < 16 * GiB
    assert find_card("24 GiB").nbytes == 24 * GiB and find_card(10**9).nbytes == 10**9
    with pytest.raises(ValueError, match="'A100 40GB' or 'A100 80GB'"):
        find_card("A100")


@pytest.mark.parametrize("other", ["GTX 9999", "RTX 4060", "RTX 4080 SUPER", "L40", "A10", "", None])
def test_a_card_that_is_not_in_the_table_is_not_taken_for_one_that_is(other):
    with pytest.raises(ValueError, match=r"no card is known as .*RTX 3060|without a unit"):
        find_card(other)


@pytest.mark.parametrize("number", ["24576", "24", 24, 5.5, "143,771", "4060"])
def test_a_small_number_without_a_unit_is_no_card(number):
    """24576 is what nvidia-smi shows, and was once taken for 24 KiB."""
    with pytest.raises(ValueError, match=r"without a unit .*'24 GiB' or card='24576 MiB'"):
        find_card(number)


def test_the_table_of_cards_is_the_data_sheets():
    """Memory by PyTorch's messages; dense half and single precision in Tflop/s, GB/s and the compute capability as published."""
    published = {
        "RTX 2060 6GB": (26, 6.5, 336, 7.5),
        "RTX 3070 8GB": (40.6, 20.3, 448, 8.6),
        "RTX 3080 10GB": (59.5, 29.8, 760, 8.6),
        "RTX 3060 12GB": (25.5, 12.7, 360, 8.6),
        "T4 16GB": (65, 8.1, 320, 7.5),
        "V100 16GB": (125, 15.7, 900, 7.0),
        "RTX 4060 Ti 16GB": (44.1, 22.1, 288, 8.9),
        "RTX 4080 16GB": (97.5, 48.7, 716.8, 8.9),
        "L4 24GB": (121, 30.3, 300, 8.9),
        "A10G 24GB": (70, 35, 600, 8.6),
        "RTX 3090 24GB": (71, 35.6, 936, 8.6),
        "RTX 4090 24GB": (165.2, 82.6, 1008, 8.9),
        "RTX 5090 32GB": (209.5, 104.8, 1792, 12.0),
        "A100 40GB": (312, 19.5, 1555, 8.0),
        "L40S 48GB": (362, 91.6, 864, 8.9),
        "A100 80GB": (312, 19.5, 2039, 8.0),
        "H100 80GB": (989, 67, 3350, 9.0),
        "H200 141GB": (989, 67, 4800, 9.0),
    }
    assert list(CARDS) == list(published)
    for name, (half, single, bandwidth, capability) in published.items():
        card = CARDS[name]
        found = (card.half / 1e12, card.single / 1e12, card.bandwidth / 1e9)
        assert found == pytest.approx((half, single, bandwidth), rel=0.025), name
        assert card.capability == divmod(round(10 * capability), 10) and card.bf16 == (capability >= 8)
        nominal = int(name.rpartition(" ")[2].removesuffix("GB"))
        least = (
            0.91 if name.startswith(("L4", "A10G", "T4")) else 0.96
        )  # error correction takes a part of GDDR6
        assert least * nominal * GiB < card.nbytes < nominal * GiB, name


def test_room_is_what_the_context_the_workspace_and_the_allocator_leave():
    hopper = Card("h", 80 * GiB, 1e15, 1e14, 1e12, (9, 0))
    assert room(hopper) == int((80 * GiB - (500 + 2 * 32) * 2**20) / 1.05)
    ampere = replace(hopper, capability=(8, 6))
    assert room(ampere) == int((80 * GiB - (500 + 2 * 8) * 2**20 - 2 * 128 * 1024) / 1.05)
    assert room("RTX 2060") < 5.1 * GiB and room("1 MiB") == 0
    # What a prediction for a card needs is what fits its room.
    found = predict(find_model("tiny Llama")[0], batch_size=1, seq_len=8, target="cuda")
    needs = found.peak.total + sum(beyond(found, (8, 6), replay=False).values())
    assert room(replace(ampere, nbytes=needs)) == pytest.approx(found.peak.total, abs=1)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"card": "Voodoo 2"}, "no card is known"),
        ({"method": "dora"}, "method='dora' is not known"),
        ({"global_batch": 2.5}, "give a whole number of rows"),
        ({"global_batch": 0}, "at least 1"),
        ({"seq_len": 100_000}, "beyond the 256 positions"),
        ({"seq_len": None}, "number of tokens"),
        ({"target": "tpu"}, "target='tpu'"),
    ],
)
def test_bad_input_is_a_sentence(config, changes, says):
    asked = {"card": "1 GiB", "seq_len": 16, "global_batch": 2, "method": "qlora", "target": "cpu"} | changes
    with pytest.raises(ValueError, match=says):
        plan(config, **asked)


def test_a_module_without_a_config_is_sent_to_predict():
    with pytest.raises(ValueError, match="plan is for transformers models"):
        plan(nn.Linear(2, 2), card="1 GiB", seq_len=16, global_batch=1)


# --- command line --------------------------------------------------------------------------------------------


def command(capsys, *words) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_command_predict_prints_a_table_and_json(capsys, tmp_path, config):
    config.save_pretrained(tmp_path)
    words = [
        "predict",
        str(tmp_path),
        "--batch-size",
        "2",
        "--seq-len",
        "32",
        "--target",
        "cpu",
        "--precision",
        "bf16",
    ]
    code, out, _ = command(capsys, *words)
    wanted = predict(config, batch_size=2, seq_len=32, recipe=Recipe(precision="bf16"), target="cpu")
    assert code == 0 and f"{wanted.peak.total:,}" in out
    code, out, _ = command(capsys, "predict", str(tmp_path / "config.json"), *words[2:], "--json")
    assert json.loads(out)["peak"]["total"] == json.loads(out)["needs"] == wanted.peak.total
    code, out, _ = command(capsys, *words, "--checkpointing", "1,1", "--json")
    assert json.loads(out)["peak"]["total"] < wanted.peak.total


def test_command_plan_prints_what_fits_with_code_and_json(capsys, tmp_path, config):
    config.save_pretrained(tmp_path)
    words = [
        "plan", str(tmp_path), "--card", "1GiB", "--seq-len", "32", "--global-batch", "2", "--method", "qlora",
        "--target", "cpu",
    ]  # fmt: skip
    code, out, _ = command(capsys, *words)
    assert code == 0 and "Fits, fastest first" in out and "make_trainer(" in out
    code, out, _ = command(capsys, *words, "--json")
    found = json.loads(out)
    assert found["fits"][0]["needs"] <= found["card"]["nbytes"] == GiB and found["method"] in METHODS
    words[3] = "100KB"
    code, out, _ = command(capsys, *words)
    assert code == 1 and "Nothing fits" in out


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["plan", "tiny-llama", "--card", "GTX9", "--seq-len", "8", "--global-batch", "2"],
            "no card is known",
        ),
        (["plan", "tiny-llama", "--card", "1GiB", "--seq-len", "8", "--global-batch", "-1"], "at least 1"),
        (["plan", "tiny-llama", "--card", "1GiB", "--seq-len", "9999", "--global-batch", "1"], "positions"),
        (
            ["predict", "tiny-llama", "--batch-size", "2", "--seq-len", "8", "--lora-rank", "0"],
            "nothing to train",
        ),
        (
            ["predict", "tiny-llama", "--batch-size", "3", "--seq-len", "8", "--accumulation", "2"],
            "multiple of 2",
        ),
        (
            ["predict", "tiny-llama", "--batch-size", "3", "--seq-len", "8", "--checkpointing", "0"],
            "at least 1",
        ),
        (["predict", "tiny-llama", "--batch-size", "3"], "seq_len"),
        (
            [
                "predict",
                "tiny-llama",
                "--batch-size",
                "4",
                "--seq-len",
                "8",
                "--accumulation",
                "2",
                "--in-backward",
            ],
            "choose one of the two",
        ),
    ],
)
def test_command_refuses_bad_input_in_a_sentence(capsys, words, says):
    code, out, err = command(capsys, *words)
    assert code == 2 and says in err and not out and "Traceback" not in err


def test_command_without_a_network_says_what_to_give(capsys, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, _, err = command(
        capsys, "plan", "nobody/nothing", "--card", "T4", "--seq-len", "8", "--global-batch", "1"
    )
    assert code == 2 and "no model is known as 'nobody/nothing'" in err and "config.json" in err
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = command(capsys, "predict", str(empty), "--batch-size", "1", "--seq-len", "8")
    assert code == 2 and "has no config.json" in err


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"model_type": "llama", "hidden_size": "x"}, "the config of .* is not valid .*hidden_size"),
        ({"model_type": "llama", "num_attention_heads": 0}, "the config of .* is not valid .*zero"),
        ({"model_type": "llama", "hidden_size": 65}, "the config of .* is not valid .*not a multiple"),
        ({"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}, "patches of one size"),
        ({"model_type": "swin", "architectures": ["SwinForImageClassification"]}, "patches of one size"),
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            "takes input_features",
        ),
        ({"size": 1}, "no model is known as"),
    ],
)
def test_command_plan_refuses_models_in_a_sentence(capsys, tmp_path, fields, says):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    words = ["plan", str(tmp_path), "--card", "4090", "--seq-len", "8", "--global-batch", "1"]
    code, out, err = command(capsys, *words)
    assert code == 2 and re.search(says, err) and not out and "Traceback" not in err


def test_command_turns_what_no_check_has_foreseen_into_a_sentence(capsys, monkeypatch):
    from gradmem_lib.planning import plan as module

    def fails(*args, **kwargs):
        raise AttributeError("no attribute 'weight'")

    monkeypatch.setattr(module, "plan", fails)
    code, out, err = command(
        capsys, "plan", "tiny-llama", "--card", "T4", "--seq-len", "8", "--global-batch", "1"
    )
    assert code == 2 and not out
    assert "tiny-llama: AttributeError: no attribute 'weight'" in err and "python -X dev" in err


def test_a_family_that_cannot_be_predicted_is_ruled_out_and_the_others_are_tried(config, monkeypatch):
    def only_bf16(*args, recipe, **kwargs):
        if recipe.precision != "bf16":
            raise CannotTrace("some operation reads values")
        return predict(*args, recipe=recipe, **kwargs)

    monkeypatch.setattr("gradmem_lib.planning.search.predict", only_bf16)
    made = plan(config, card="1 GiB", seq_len=8, global_batch=1, method="lora", target="cpu")
    assert made.best.recipe.precision == "bf16"
    assert [(out.recipe.precision, out.why) for out in made.ruled_out] == [
        (precision, "some operation reads values") for precision in ("float32", "autocast-bf16")
    ]


def test_options_in_a_line_are_spelled_as_in_a_recipe():
    assert describe(Recipe(), "full", None) == "full, float32, adamw"
    recipe = Recipe(precision="bf16", in_backward=True, checkpointing="per-layer", chunked_loss=True)
    assert describe(recipe, "full", 4) == (
        "full, bf16, adamw, in_backward, checkpointing=per-layer, chunked_loss, micro-batch 4 x 1"
    )
    assert describe(Recipe(every_n_layers=2, accumulation=3), "lora", 1) == (
        "lora, float32, adamw, every_n_layers=2, micro-batch 1 x 3"
    )


def test_missing_options_leave_with_2(capsys):
    with pytest.raises(SystemExit) as left:
        main(["plan", "tiny-llama"])
    assert left.value.code == 2 and "--card" in capsys.readouterr().err


# --- lesson 05's claims ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "claim_id, verdict",
    [("C25", "holds only if"), ("C53", "does not hold"), ("C57", "holds only if"), ("C58", "holds only if")],
)
def test_verdicts_that_need_no_trace(claim_id, verdict):
    assert claims.find(claim_id).verdict == verdict


def test_figures_behind_them():
    assert claims.find("C53").figures["cache of 32 x 2048 tokens, bf16"] == 2 * 80 * 8 * 128 * 2 * 32 * 2048
    which = claims.find("C57").figures
    long, short = (f"Llama-3.2-1B, 16 x {n}, " for n in (2048, 64))
    times = [
        float(which[f"{start}{way}: estimated time / whole batch at once"])
        for start in (long, short)
        for way in ("accumulated", "checkpointed")
    ]
    assert times[0] < times[1] < 4 / 3 and times[2] > times[3]
