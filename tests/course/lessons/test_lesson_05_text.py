"""What lesson 05 says in figures and orders: against its record, its cells' outputs, torch and
predictions.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache

import pytest
import torch
from support.lesson_text import lesson
from support.paths import ROOT
from torch.utils.flop_counter import FlopCounterMode

from gradmem_lib import (
    BudgetExceeded,
    MemoryTracker,
    Recipe,
    checkpoint_layers,
    known_model,
    predict,
)
from gradmem_lib.course import models, texts, trainer_dtypes
from gradmem_lib.course.lessons.lesson_05 import exercises, exercises_leak, settings
from gradmem_lib.course.material import smollm2_runs
from gradmem_lib.techniques.losses import CHUNK_TOKENS
from gradmem_lib.techniques.optimizers import AdamW8bit
from gradmem_lib.techniques.quantized import BLOCK, Linear4bit, nf4_values
from gradmem_lib.units import MiB, parse_bytes

SMOLLM2 = 134_515_008  # parameters
EMBEDDING = 49_152 * 576
LOGITS = 4 * 128 * 49_152  # of a micro-batch of one row, in float32
PIECES = {"accumulation": 8, "checkpointing": "per-layer"}
LORA = PIECES | {"precision": "bf16", "optimizer": "adamw-8bit", "lora_rank": 16}


@cache
def peak_of(**changes):
    config = known_model("SmolLM2-135M")[1]
    recipe = Recipe(**changes)
    return predict(config, batch_size=8, seq_len=128, recipe=recipe, target="cpu").peak


def record(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def test_the_run():
    size, kept = smollm2_runs.LONG, record("finetune.json")
    assert lesson("05").says("sixteen updates, of 8 rows of 128 tokens each")
    assert size.updates == kept["steps"] == 16
    assert (smollm2_runs.BATCH, smollm2_runs.SEQ_LEN) == (8, 128)
    assert kept["what"] == "Trainer on SmolLM2-135M, 8 x 128 tokens a step"


def test_what_stays_of_the_naive_run():
    assert lesson("05").says("states are 4 bytes each, for 134,515,008 parameters.")
    parts = peak_of().by_category
    assert parts["parameters"] == 4 * SMOLLM2
    assert parts["optimizer"] == pytest.approx(2 * 4 * SMOLLM2, rel=1e-4)


def test_the_forward_that_checkpoints_add():
    said = lesson("05")
    assert said.says("That is up to a third of a step's work, and up to half where the weights are")
    model, tokenizer = models.smollm2()
    ids = texts.batch(tokenizer, batch_size=1, seq_len=16)

    def work(every, inputs):
        with checkpoint_layers(model, every), FlopCounterMode(display=False) as counter:
            model(**inputs, labels=ids).loss.backward()
        model.zero_grad()
        return counter.get_total_flops()

    given = {"input_ids": ids}
    trained = work(1, given) / work([30], given) - 1
    model.requires_grad_(False)
    vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
    given = {"inputs_embeds": vectors}
    frozen = work(1, given) / work([30], given) - 1
    # the head has no checkpoint, and the second run of a layer stops before its last product
    assert 0.15 < trained < 1 / 3
    assert 1.4 * trained < frozen < 1 / 2


def test_the_recorded_times():
    settings_of_the_record = record("checkpointing.json")["settings"].values()
    ways = [setting["variants"]["per layer"] for setting in settings_of_the_record]
    times = [way["time / none"] for way in ways if "time / none" in way]
    assert len(times) == 3
    says = f"Our recorded runs took {min(times):.2f} to {max(times):.2f} times as long."
    assert lesson("05").says(says)


def test_the_temporaries_at_the_end_of_backward():
    said = lesson("05")
    assert said.says("The temporaries there are three times 49,152 × 576 numbers.")
    parts = re.findall(r"^\{'accumulation': 8\} .*'temporaries': (\d+)\}$", said.printed, re.M)
    assert parts == [str(3 * 4 * EMBEDDING // MiB)]


def peaks_of_bars() -> list[float]:
    return [peak for (peak,) in lesson("05").figures(r"^measured +([\d,.]+) MiB, in")]


def test_bf16_throughout_halves_everything():
    assert lesson("05").says("To halve everything, train in bf16 throughout")
    wide = peak_of(**PIECES).by_category
    narrow = peak_of(**PIECES, precision="bf16").by_category
    for part in ("parameters", "gradients", "optimizer", "temporaries"):
        assert narrow[part] == pytest.approx(wide[part] / 2, rel=1e-3), part
    checkpointed, bf16 = peaks_of_bars()[2], peaks_of_bars()[4]
    assert bf16 == pytest.approx(checkpointed / 2, rel=0.001)


def test_what_the_flag_bf16_changes():
    said = lesson("05")
    assert said.says("matrices are multiplied in 16 bits, and weights, gradients and states stay")
    plain, _ = trainer_dtypes(torch.float32)
    flagged, _ = trainer_dtypes(torch.float32, bf16=True)
    assert set(plain.values()) == {"float32"} and plain.keys() == flagged.keys()
    assert {name: kind for name, kind in flagged.items() if kind != "float32"} == {
        "products": "bfloat16"
    }


def test_the_dtype_in_which_a_model_is_loaded_halves_the_memory():
    said = lesson("05")
    assert said.says("What halves the memory is the dtype in which the model was *loaded*.")
    [[wide], _, [narrow], _] = said.figures(r"^loaded in torch\.\w+, bf16=\w+: ([\d,]+)$")
    assert narrow == pytest.approx(wide / 2, rel=0.1)


def test_a_small_update_in_bf16_is_rounded_away():
    assert lesson("05").says("in bf16 an update much smaller than 1/256 of its weight is rounded")
    weights = torch.linspace(0.5, 2, 10_000).bfloat16()
    assert torch.equal((weights.float() * (1 + 1 / 600)).bfloat16(), weights)
    assert torch.all((weights.float() * (1 + 1 / 200)).bfloat16() != weights)


def test_six_weights_in_seven_would_not_move():
    assert lesson("05").says("about six weights in seven would not move in bf16")
    model, batches = settings.bf16_setting()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after == before).float().mean() == pytest.approx(6 / 7, abs=0.02)


def test_the_states_of_8_bit_adamw():
    said = lesson("05")
    assert said.says("one byte a number: one of 256 values, times a scale that a block of")
    weights = torch.nn.Parameter(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)))
    optimizer = AdamW8bit([weights], lr=1e-3)
    weights.grad = weights.detach().clone()
    optimizer.step()
    tensors = [kept for kept in optimizer.state[weights].values() if isinstance(kept, torch.Tensor)]
    moments = [kept for kept in tensors if kept.dtype == torch.uint8]
    assert [moment.numel() for moment in moments] == [weights.numel()] * 2
    assert said.says("These states are half as large as in bf16, and rounded.")
    eight, sixteen = (
        peak_of(precision="bf16", optimizer=name).by_category["optimizer"]
        for name in ("adamw-8bit", "adamw")
    )
    assert eight == pytest.approx(sixteen / 2, rel=0.02)


def test_the_defaults_of_torchs_adafactor():
    said = lesson("05")
    defaults = inspect.signature(torch.optim.Adafactor).parameters
    assert said.says("One is the learning rate, 0.01.") and defaults["lr"].default == 0.01
    assert said.says("The other is `eps`, by default the dtype's machine epsilon.")
    assert defaults["eps"].default[0] is None
    assert said.says("that is 1/128, larger than almost every gradient")
    model, tokenizer = models.smollm2()
    ids = texts.batch(tokenizer, batch_size=1, seq_len=64)
    model(input_ids=ids, labels=ids).loss.backward()
    larger = sum((p.grad.abs() > 1 / 128).sum().item() for p in model.parameters())
    assert larger < 0.01 * SMOLLM2


def test_a_weight_in_4_bits():
    assert lesson("05").says("each is one of 16 values, times a scale that its block of 64 weights")
    assert len(nf4_values()) == 16 and BLOCK == 64
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    linear = torch.nn.Linear(128, 32, bias=False).requires_grad_(False)
    linear.weight.copy_(weight)
    for block in Linear4bit(linear).dequantized().view(-1, 64):
        scaled = block / block.abs().max()
        nearest = (scaled[:, None] - nf4_values()).abs().amin(1)
        assert nearest.max() < 1e-5


def test_the_cards_of_the_exercises():
    said = lesson("05")
    assert said.says("Two steps must stay under **4.5 MiB**") and settings.LORA_CARD == "4.5 MiB"
    assert said.says("of 18 rows of unequal lengths, under **2.5 MiB**")
    assert settings.EVAL_CARD == "2.5 MiB"
    _, rows = settings.evaluation_setting()
    lengths = rows["attention_mask"].sum(1).tolist()
    assert len(lengths) == 18 and len(set(lengths)) > 9
    assert said.says("trains the same weights, and stays within 3.75 MiB")
    assert exercises_leak.RESUME_BUDGET == "3.75 MiB"


def test_the_peak_of_lora():
    assert lesson("05").says("**The peak is less than half of the card.")
    lora = peaks_of_bars()[8]
    assert lora == pytest.approx(peak_of(**LORA).total / MiB, abs=0.3)
    assert lora < 0.8 * 1024 / 2


def test_the_tables_of_logits():
    said = lesson("05")
    whole, chunks = peak_of(**LORA), peak_of(**LORA, chunked_loss=True)
    assert said.says("the logits': two tables of 49,152 float32 numbers a token.")
    assert whole.by_category["temporaries"] == pytest.approx(2 * LOGITS, rel=1e-3)
    assert said.says("The loss keeps a third one among the activations.")
    assert LOGITS < whole.by_category["activations"] < 1.3 * LOGITS
    assert said.says("for 128 tokens at a time (here a whole row), and needs two tables, not three")
    assert CHUNK_TOKENS == smollm2_runs.SEQ_LEN == 128
    held = chunks.by_category["activations"] + chunks.by_category["temporaries"]
    assert 2 * LOGITS < held < 2.3 * LOGITS
    assert whole.total - chunks.total == pytest.approx(LOGITS, rel=0.02)


def test_accumulation_and_checkpoints_where_neither_activations_nor_logits_are_at_the_peak():
    assert lesson("05").says(
        "are worth nothing where neither activations nor logits are at the peak"
    )
    config, peaks = known_model("SmolLM2-135M")[1], []
    for recipe in (Recipe(), Recipe(accumulation=2), Recipe(checkpointing="per-layer")):
        found = predict(config, batch_size=2, seq_len=32, recipe=recipe, target="cpu").peak
        peaks.append(found.total)
        assert found.by_category["activations"] < 1000
    plain, cut, rerun = peaks
    # a second micro-batch finds the tied embedding's gradient, so that there are three tables
    assert cut - plain == pytest.approx(4 * EMBEDDING, rel=1e-4) and rerun == plain


def test_the_record_of_the_full_runs():
    said, kept = lesson("05"), record("finetune.json")
    naive, ours = kept["ways"]["naive"], kept["ways"]["ours"]
    faster = ours["tokens/s"] / naive["tokens/s"]
    assert said.says(f"this one makes {faster:.2f} times the naive run's tokens a second")
    losses = [
        f"{naive['held-out loss before']:.2f} nats a token to {naive['held-out loss after']:.2f}",
        f"(naive) and {ours['held-out loss after']:.2f} (all of it)",
        f"at {ours['peak bytes'] / naive['peak bytes']:.1%} of the naive peak",
    ]
    assert said.says(f"sixteen updates went from {losses[0]} {losses[1]}, {losses[2]}.")
    assert f"{ours['held-out loss before']:.2f}" == f"{naive['held-out loss before']:.2f}"
    assert said.says("so conclude no more than *not worse*")
    assert ours["held-out loss after"] < naive["held-out loss after"]


def test_a_run_from_the_beginning_fits_where_the_resumed_one_does_not():
    said = lesson("05")
    budget = exercises_leak.RESUME_BUDGET
    assert said.says("The run fits in 3.75 MiB if it starts from the beginning.")
    assert budget == "3.75 MiB"
    model, optimizer, _, batches = exercises_leak.resume_setting()
    with MemoryTracker(model, optimizer, budget=budget, live=False):
        exercises_leak.train_on(model, optimizer, batches)
    with pytest.raises(BudgetExceeded):
        model, optimizer, *rest = exercises_leak.resume_setting()
        with MemoryTracker(model, optimizer, budget=budget, live=False):
            exercises_leak.resume(model, optimizer, *rest)


def test_24_rows_where_5_fit():
    assert lesson("05").says("For 24 rows where 5 fit, it is 4 × 6: the largest size that fits and")
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "per_device_eval_batch_size",
    )
    given = dict(zip(names, (24, 1, 24), strict=True))
    found = exercises.on_one_card(given, 1, 5)
    assert [found[name] for name in names] == [4, 6, 4]


@pytest.mark.parametrize("kind", ["equal", "unequal"])
def test_the_log_has_no_room_for_the_logits_of_all_micro_batches(kind):
    assert lesson("05").says("is too small for the logits of all micro-batches at once")
    card = parse_bytes(settings.LOG_CARD)
    model, window = settings.log_setting(kind)
    with MemoryTracker(model, budget=card, live=False):
        exercises.train_and_log(model, window)
    model, window = settings.log_setting(kind)
    kept = []
    with MemoryTracker(model, live=False) as tracker:
        for micro in window:
            out = model(**micro)
            out.loss.backward()
            kept.append(out.logits.detach())
    assert tracker.peak.total > card


def peak_of_steps(setting, steps: int) -> str:
    model, ids = setting()
    model.train()
    with MemoryTracker(model, live=False) as tracker:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(steps):
            model(input_ids=ids, labels=ids).loss.backward()
            if steps > 1:
                optimizer.step()
                optimizer.zero_grad()
    return f"{tracker.peak.total / MiB:.1f} MiB"


def test_the_peaks_before_the_exercises():
    said = lesson("05")
    for card in ("CHECKPOINTING_CARD", "LOG_CARD", "LORA_CARD", "BACKWARD_CARD", "EVAL_CARD"):
        assert said.says(f"**{getattr(settings, card)}**"), card
    assert said.says(f"where it takes {peak_of_steps(settings.checkpointing_setting, 1)} now")
    peak = peak_of_steps(settings.lora_setting, 2)
    assert said.says(f"With every weight trained they take {peak}")
    model, rows = settings.backward_setting(tied=False)

    def ordinary(model, lr, steps):
        return torch.optim.AdamW(model.parameters(), lr=lr)

    run, _ = exercises.three_updates(ordinary, model, rows, lr=1e-3, steps=3)
    assert said.says(f"where one AdamW takes {run.peak / MiB:.1f} MiB")


def test_checkpoints_beside_torchs_adafactor():
    assert lesson("05").says("it would be less than one MiB lower.")
    changes = {"precision": "bf16", "optimizer": "adafactor-torch", "accumulation": 8}
    lower = peak_of(**changes).total - peak_of(**changes, checkpointing="per-layer").total
    assert 0 < lower < MiB
