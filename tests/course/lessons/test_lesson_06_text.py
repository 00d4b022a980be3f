"""What lesson 06 says in figures and orders: against its cells' outputs, its exercises' settings
and predictions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.lesson_text import lesson

from gradmem_lib import (
    MemoryTracker,
    Recipe,
    accounting,
    checkpoint_layers,
    known_model,
    predict,
    split,
)
from gradmem_lib.course import bert_large
from gradmem_lib.course.lessons.lesson_06 import exercises
from gradmem_lib.units import GiB, parse_bytes

SMOLLM2 = 134_515_008  # parameters
LLAMA, SEVEN_B = accounting.SHAPES["Llama-2-7B"], 6_738_415_616


def test_the_step_and_the_context_do_not_fit_the_card():
    said = lesson("06")
    assert said.says("the tensors of the whole step and the context are more than the card has")
    [[step]] = said.figures(r"^  predicted  ([\d,]+) bytes  3\.")
    [[context]] = said.figures(r"'context': (\d+), 'others'")
    card = 4 * GiB
    assert step < card < step + context
    assert "'in_pieces': True" in said.printed
    assert said.says("Here this setting could serve the one request")


def test_the_blocks_hold_most_of_the_classifiers_peak():
    said = lesson("06")
    assert said.says("The activations of the blocks are most of the peak.")
    [[peak]] = said.figures(r"^The peak is ([\d.]+) MiB, in backward: 8\d% activations")
    [[without_blocks]] = said.figures(r"^  checkpointing +([\d.]+) MiB$")
    assert without_blocks < peak / 4


def test_a_checkpoint_a_block_is_best_for_the_classifier():
    said = lesson("06")
    assert said.says(
        "A checkpoint on each block is best here: what a block keeps is much larger than"
    )
    rows = re.findall(r"^every=(\w+) +([\d,]+) bytes", said.printed, re.MULTILINE)
    peaks = {every: int(peak.replace(",", "")) for every, peak in rows}
    assert min(peaks.values()) == peaks["1"] and sorted(peaks.values())[2] > 1.1 * peaks["1"]
    net, _, images, labels = exercises.classifier_setting()
    with checkpoint_layers(net.blocks, "best") as best:
        torch.nn.functional.cross_entropy(net(images), labels).backward()
    assert best.internal[0] > 5 * best.boundary[0]


def test_the_cards_of_the_exercises():
    said = lesson("06")
    assert said.says("mean loss of all 30 images, which returns that mean, under **22 MiB**.")
    assert exercises.CLASSIFIER_CARD == "22 MiB"
    _, _, images, _ = exercises.classifier_setting()
    assert len(images) == 30
    assert said.says("gradient, which returns the loss, under **10.5 MB**.")
    assert exercises.T5_CARD == "10.5 MB"
    assert said.says(
        "a classifier with 1,000 classes, on 40 batches of 16 rows (the last one has 5)."
    )
    net, batches = exercises.evaluation_leak_setting()
    assert net(batches[0][0]).shape == (16, 1000)
    assert [len(x) for x, _ in batches] == [16] * 39 + [5]
    assert said.says("stays within 1 MiB, however many batches there are")
    assert exercises.EVALUATION_BUDGET == "1 MiB"


def test_what_a_7b_holds_before_the_first_token():
    said = lesson("06")
    assert LLAMA.parameters == SEVEN_B
    assert said.says("6,738,415,616 weights.")
    assert said.says(f"weights and gradients are {2 * 2 * SEVEN_B / GiB:.0f} GiB before the first")
    assert said.says(
        "take Llama-2-7B, with 8 rows of 2,048 tokens an update, technique by technique"
    )
    assert (exercises.TOKENS_7B, exercises.BATCH_7B) == (2048, 8)


def test_an_evaluation_that_collects_is_not_saved_by_weights_in_4_bits():
    said = lesson("06")
    assert said.says("weights in 4 bits, which the error names, would only let a few more batches")
    _, _, error = said.printed.partition("An evaluation collects its results: ")
    assert "LoRA on weights in 4 bits" in error.partition("What could not: ")[0]
    [[collected, each]] = re.findall(r"^([\d.]+) KiB at the peak .* ([\d.]+) KiB more", error)
    before = said.printed.removesuffix(error)
    weights = re.findall(r"([\d,]+) bytes  parameters\n", before)[-1]
    room = float(collected) * 1024 + int(weights.replace(",", ""))  # if no weight took a byte
    _, held_out = exercises.evaluation_leak_setting()
    assert 2 * room / (float(each) * 1024) < len(held_out)


def test_which_cards_need_4_bits_and_what_they_leave():
    said = lesson("06")
    assert said.says(
        "The smaller cards need a base in 4 bits (QLoRA): each frozen weight is one of"
    )
    rows = re.findall(r"^(.{22}) +[\d.]+ +([\d.]+) [ *]+  \w+", said.printed, re.MULTILINE)
    needs = {name.strip(): float(need) for name, need in rows}
    wide = [need for name, need in needs.items() if "4 bits" not in name]
    assert len(wide) == 7 and 12 < min(wide) < 16
    four = needs["+ base in 4 bits"]
    assert four < 8
    assert said.says("On 16 GB, two thirds are then left.")
    assert 1 - four / 16 == pytest.approx(2 / 3, abs=0.02)


def test_each_rung_of_the_ladder_is_lower_until_the_smallest_card_is_enough():
    said = lesson("06")
    assert said.says("Then take the cheapest one that shrinks a large part, and ask again.")
    assert said.says("what each one takes away: checkpointing, and then 8-bit AdamW.")
    named = re.findall(r"^(\+ .+?) {2,}[\d.]+ GiB in backward +next: (.+)$", said.printed, re.M)
    assert named == [("+ 8 × 1", "QLoRA"), ("+ checkpointing", "LoRA"), ("+ 8-bit AdamW", "LoRA")]
    table = said.printed.partition("peak  needs")[2]
    rows = re.findall(r"^.{22} +([\d.]+) +([\d.]+) [ *]+  \w+", table, re.MULTILINE)
    peaks = [float(peak) for peak, _ in rows]
    assert len(peaks) == 8 and peaks == sorted(peaks, reverse=True)
    # all but one take off more than 15 per cent
    falls = [1 - after / before for before, after in pairwise(peaks)]
    assert sum(fall > 0.15 for fall in falls) == 6
    assert float(rows[-1][1]) <= 8


def test_from_two_rows_to_one_the_peak_is_all_gradients():
    said = lesson("06")
    assert said.says(
        "going from two rows to one saves less: the peak is then where all gradients are"
    )
    rows = said.figures(r"^(\d) × 256: expected ([\d,]+) MiB, predicted ([\d,]+) MiB, in backward$")
    peaks = {int(n): predicted for n, expected, predicted in rows if expected == predicted}
    assert peaks[2] - peaks[1] < peaks[3] - peaks[2] == peaks[4] - peaks[3]
    config = known_model("SmolLM2-135M")[1]
    one = predict(config, batch_size=1, seq_len=256, recipe=Recipe(), target="cuda").peak
    assert one.by_category["gradients"] >= 4 * SMOLLM2
    assert one.by_category["activations"] < 1e-4 * one.total


def test_the_first_rule_of_thumb():
    said = lesson("06")
    assert said.says("counts twice the bytes that pure bf16 keeps")
    found = said.figures(r"^  16 bytes a parameter +([\d,]+) +[-+]\d+%$")
    assert found == [[16 * SMOLLM2], [16 * SEVEN_B]]
    kept = sum(accounting.resident_bytes(LLAMA, precision="bf16").values())
    assert kept == pytest.approx(8 * SEVEN_B, rel=1e-6)  # it counts the step counters too


def test_the_second_rule_of_thumb():
    said = lesson("06")
    config, shape = known_model("SmolLM2-135M")[1], accounting.SHAPES["SmolLM2-135M"]
    recipe = Recipe(precision="bf16")
    peak = predict(config, batch_size=8, seq_len=1024, recipe=recipe, target="cpu").peak
    table = 4 * 8 * 1024 * 49_152
    blocks = shape.layers * sum(accounting.block_activations(shape, 8, 1024).values())
    # among the activations is the log-softmax, and the temporaries are the logits' gradients
    assert peak.by_category["activations"] == pytest.approx(blocks + table, rel=0.01)
    assert peak.by_category["temporaries"] == pytest.approx(2 * table, rel=1e-3)
    share = 3 * table / peak.total
    assert said.says(
        f"here SmolLM2's logits and their gradients are {100 * share:.0f} % of the peak"
    )
    [[llama]] = said.figures(
        r"^Llama-2-7B, bf16, 1 × 2048 tokens: ([\d,]+) bytes in optimizer_step$"
    )
    two_temporaries = 2 * 2 * 32_000 * 4096  # of the largest tensor's size
    assert said.says("All gradients are there, and the activations are gone: hence the 16 %.")
    assert llama == pytest.approx(8 * SEVEN_B + two_temporaries, rel=1e-4)
    rule = said.figures(r"^  states \+ 34·s·b·h +([\d,]+) +([-+]\d+)%$")[1]
    assert rule[1] == 16 == round(100 * (rule[0] / llama - 1))
    kept = sum(accounting.resident_bytes(LLAMA, precision="bf16").values())
    assert rule[0] - kept == 32 * 34 * 2048 * 4096


def neox_peaks() -> dict[str, list[float]]:
    rows = re.findall(r"^every=(\w+) +([\d,]+) +([\d,]+)$", lesson("06").printed, re.MULTILINE)
    return {every: [float(n.replace(",", "")) for n in peaks] for every, *peaks in rows}


def test_checkpoints_and_micro_batches_of_the_neox():
    said, peaks = lesson("06"), neox_peaks()
    whole, cut = peaks["None"]
    assert said.says("Either technique halves the peak.")
    assert cut < whole / 2 and peaks["1"][0] < whole / 2 and peaks["2"][0] < whole / 2
    assert said.says("With micro-batches, checkpoints still take off more than a quarter.")
    assert peaks["1"][1] < 0.75 * cut and peaks["2"][1] < 0.75 * cut
    assert said.says("because weights, gradients and states are most of what is left")
    one, two = peaks["1"][1], peaks["2"][1]
    assert one == pytest.approx(two, rel=0.02)
    hidden, layers, wide, vocabulary = 128, 6, 512, 2048
    block = 4 * hidden * (hidden + 1) + 2 * hidden * wide + wide + hidden + 4 * hidden
    parameters = layers * block + 2 * vocabulary * hidden + 2 * hidden
    assert 16 * parameters > 0.75 * two


def t5_peak(size: int, *, checkpoints: bool) -> int:
    model, optimizer, batch = exercises.t5_setting()
    handle = checkpoint_layers(model, 1) if checkpoints else None
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for micro in split(batch, size):
            model(**micro).loss.backward()
        optimizer.step()
    if handle is not None:
        handle.remove()
    return tracker.peak.total


def test_what_is_enough_for_the_t5():
    said = lesson("06")
    card = parse_bytes(exercises.T5_CARD)
    assert said.says(f"A plain step takes {t5_peak(16, checkpoints=False) / 1e6:.1f} MB.")
    assert said.says("Checkpoints alone are not enough.") and t5_peak(16, checkpoints=True) > card
    assert said.says("Micro-batches alone are enough only if each has a single row.")
    assert t5_peak(1, checkpoints=False) < card < t5_peak(2, checkpoints=False)


def test_more_than_one_recipe_trains_a_7b():
    assert lesson("06").says("There is more than one answer.")
    recipe = Recipe(
        precision="bf16",
        optimizer="adafactor-torch",
        in_backward=True,
        checkpointing="per-layer",
        chunked_loss=True,
    )
    for other in (recipe, replace(recipe, optimizer="sgd")):
        assert exercises.on_card(other, 8).fits


def test_what_kept_more_in_2022():
    assert lesson("06").says("Context and idle blocks are a good part of the published figures")
    printed = lesson("06").printed
    rows = re.findall(r"^(?:batch|1 x) .*?((?: +-?[\d,]+){10})$", printed, re.MULTILINE)
    assert len(rows) == len(bert_large.RUNS)
    shares = []
    for row in rows:
        numbers = [int(n.replace(",", "")) for n in row.split()]
        shares.append((numbers[5] + numbers[6]) / numbers[8])
    assert min(shares) > 0.09
