"""What lesson 07 says in figures, orders and comparisons: against torch, the exercises and the
stored outputs.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch
from lesson_facts import lessons
from support.paths import ROOT
from torch.utils._python_dispatch import TorchDispatchMode

from gradmem_lib import MemoryTracker, Recipe, predict
from gradmem_lib.course.lessons.lesson_07 import exercises, exercises_scaling
from gradmem_lib.course.material import models
from gradmem_lib.units import MiB, parse_bytes

SOURCE = ROOT / "solutions" / "07_mixed_precision.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def printed() -> str:
    """What the cells of the stored notebook printed."""
    return next(lesson for lesson in lessons() if lesson.number == "07").printed


def numbers(row: tuple[str, ...]) -> list[float]:
    return [float(figure.replace(",", "")) for figure in row]


def bits(dtype: torch.dtype) -> tuple[int, int]:
    """Of the exponent, and of the fraction."""
    fraction = round(-torch.log2(torch.tensor(torch.finfo(dtype).eps)).item())
    return torch.finfo(dtype).bits - 1 - fraction, fraction


def test_the_table_of_formats():
    rows = re.findall(r"\| (float32|bf16|float16) \| (\d+) \| (\d+) \| ([^|]+) \| ([^|]+) \|", TEXT)
    assert [name for name, *_ in rows] == list(DTYPES)
    assert "| dtype | exponent bits | fraction bits | largest | smallest above 0 |" in TEXT
    assert "| float16 | 5 | 10 | 65,504 | 6.0e-8 |" in TEXT
    for name, exponent, fraction, largest, smallest in rows:
        dtype = DTYPES[name]
        assert (int(exponent), int(fraction)) == bits(dtype)
        found = float(largest.replace(",", ""))
        assert found == pytest.approx(torch.finfo(dtype).max, rel=0.01)
        # half of the smallest is halfway to 0, and rounds to it
        least = torch.tensor(float(smallest), dtype=dtype)
        assert least > 0 and (least.float() / 2).to(dtype) == 0
        assert least.item() == pytest.approx(float(smallest), rel=0.02)


def test_the_gaps_between_bf16_numbers():
    every = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    between = every[(every >= 1) & (every < 2)]
    assert f"Between 1 and 2 there are {len(between)} bf16 numbers, with gaps of 1/128." in TEXT
    assert torch.all(between.diff() == 1 / 128)
    assert "If you add less than half a gap, nothing changes." in TEXT
    assert torch.equal((between + 0.499 / 128).bfloat16().float(), between)
    assert torch.all((between + 0.501 / 128).bfloat16().float() > between)
    above = every[(every >= 256) & (every <= 512)]
    assert "From 256 to 512 a gap is 2." in TEXT and torch.all(above.diff() == 2)
    assert "257 lies in the middle" in TEXT and "rounded to the even one, 256." in TEXT
    assert torch.tensor(257.0).bfloat16() == 256
    assert "updates of 0.001, about an eighth of a gap each" in TEXT
    assert pytest.approx(1 / 8, rel=0.05) == 0.001 / (1 / 128)


def test_a_bf16_number_is_the_upper_half_of_a_float32_number():
    assert "A bf16 number is the upper 16 bits of a float32 number." in TEXT
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    upper = numbers.view(torch.int16).int() << 16
    assert torch.equal(upper.view(torch.float32), numbers.float())


def test_a_tenth_of_a_gap_moves_one_weight_in_ten():
    assert "a tenth of a gap, it moves one weight in ten by a whole gap." in TEXT
    gap, generator = 1 / 128, torch.Generator().manual_seed(0)
    after = exercises.round_by_chance(torch.full((100_000,), 1 + gap / 10), generator).float()
    assert after.unique().tolist() == [1, 1 + gap]
    assert (after > 1).float().mean() == pytest.approx(0.1, abs=0.005)


def test_the_sum_that_stops_and_the_rounding_that_arrives(printed):
    assert "a thousand times 1.0 in bf16: 256.0" in printed
    assert "Section 3 added 1.0 a thousand times in bf16, and the sum stopped at 256." in TEXT
    assert "nearest 1.00   by chance 1.10" in printed and "Only rounding by chance arrives" in TEXT


def test_what_float16_and_bf16_lose_of_gradients(printed):
    rows = re.findall(r"^scale +([\d,]+) +float16 loses ([\d.]+) % +bf16 ([\d.]+) %", printed, re.M)
    lost = {int(scale.replace(",", "")): (float(a), float(b)) for scale, a, b in rows}
    assert "float16 drops the smallest gradients, unless they are multiplied by a large" in TEXT
    assert lost[1][0] > 10 * lost[2**16][0]
    assert "If that number is too large, others overflow." in TEXT
    assert lost[2**24][0] > lost[2**16][0]
    assert "bf16 needs no scale." in TEXT and all(bf16 == 0 for _, bf16 in lost.values())


def test_which_operation_gets_which_dtype(printed):
    rows = re.findall(r"^(\w+) +(\w+) -> (\w+) +(\d+) times", printed, re.M)
    times = {(name, given, made): int(count) for name, given, made, count in rows}
    narrow, wide = ("bfloat16", "bfloat16"), ("float32", "float32")
    assert "**bf16**: the matrix products (`mm`) and attention" in TEXT
    assert times["mm", *narrow] == 8 and ("mm", *wide) not in times
    attention = [kinds for name, *kinds in times if name.startswith("scaled_dot_product")]
    assert attention == [list(narrow)]
    assert "`silu` gets the bf16 result of a product" in TEXT and ("silu", *narrow) in times
    for name in ("pow", "mean", "rsqrt", "log_softmax"):
        assert f"`{name}`" in TEXT and (name, *wide) in times and (name, *narrow) not in times
    assert times["to_copy", "float32", "bfloat16"] == 8 + 6 + 2


class _Copies(TorchDispatchMode):
    """What is copied to bf16: matrices of the model, (rows, tokens, width), or heads."""

    def __init__(self, model):
        super().__init__()
        self.weights = {p.data_ptr() for p in model.parameters()}
        self.seen = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            is_weight = args[0].data_ptr() in self.weights
            self.seen["matrix" if is_weight else args[0].ndim] += 1
        return out


def test_what_autocast_copies():
    block = models.tiny_llama(layers=1, hidden=64, heads=4, intermediate=172, vocab=512)
    ids = torch.zeros((2, 32), dtype=torch.long)
    with _Copies(block) as copies, torch.autocast("cpu", dtype=torch.bfloat16):
        block(input_ids=ids, labels=ids)
    assert "a bf16 copy of each of the eight matrices, of the six inputs that are not" in TEXT
    assert "bf16 already, and of attention's queries and keys." in TEXT
    assert copies.seen == {"matrix": 8, 3: 6, 4: 2}


def test_the_budgets_are_those_of_the_checks():
    cards = (exercises.SUMS_CARD, exercises.MASTER_CARD, exercises_scaling.FEATURES_CARD)
    stated = re.findall(r"\*\*([\d.]+ MB)\*\*", TEXT)
    assert sorted(map(parse_bytes, stated)) == sorted(map(parse_bytes, cards))
    assert "**3.0 MB** in all, so make float32 copies of one tensor at a time." in TEXT
    assert parse_bytes("3.0 MB") == exercises.MASTER_CARD
    assert "**2.45 MB**, which holds the weights, the sums and all gradients." in TEXT
    assert parse_bytes("2.45 MB") == exercises.SUMS_CARD
    weights = exercises._weights()
    narrow = sum(p.nbytes for p in weights)  # weights, or all of their gradients
    wide = 2 * narrow  # masters, sums, or all gradients in float32
    assert narrow + wide + narrow < exercises.SUMS_CARD
    given = narrow + narrow + wide
    one = 2 * max(p.nbytes for p in weights)
    assert given + one < exercises.MASTER_CARD < given + wide
    assert "without a graph, within **4.9 MB**." in TEXT
    assert exercises_scaling.FEATURES_CARD == "4.9 MB"
    model, _ = exercises_scaling.features_setting()
    held = sum(p.nbytes for p in model.parameters())
    assert f"The weights alone are {held / 1e6:.1f} MB, and stay float32." in TEXT


def test_a_scaler_doubles_after_two_thousand_steps():
    scaler = torch.amp.GradScaler("cpu")
    assert "`growth_interval`, which is 2,000 by default" in TEXT
    assert scaler.get_growth_interval() == 2000


def test_a_first_step_is_skipped(printed):
    rows = re.findall(r"^step \d: scale +([\d,]+) +skipped (\w+) +then ([\d,]+)", printed, re.M)
    assert "A skipped first step is normal." in TEXT
    assert [skipped for _, skipped, _ in rows] == ["True", "False", "False", "False"]
    before, after = numbers((rows[0][0], rows[0][2]))
    assert after == before / 2


def test_what_six_recipes_hold(printed):
    rows = re.findall(r"^(\w.*?) +peak +([\d,]+) +states +([\d,]+) +in (\w+)", printed, re.M)
    peaks = {name: int(peak.replace(",", "")) for name, peak, _, _ in rows}
    states = {name: int(nbytes.replace(",", "")) for name, _, nbytes, _ in rows}
    config = models.smollm2()[0].config
    parameters = models.smollm2()[0].num_parameters()
    table = config.vocab_size * config.hidden_size  # the embedding
    assert "Autocast and the master copy hold 16 bytes a parameter, as float32 does" in TEXT
    for name in ("float32", "autocast bf16", "autocast float16"):
        assert peaks[name] == pytest.approx(16 * parameters, rel=0.11)
        assert states[name] == pytest.approx(8 * parameters, rel=1e-4)
    assert states["bf16, master"] == pytest.approx(12 * parameters, rel=1e-4)
    assert "The second way keeps the exact weights beside the rounded ones, for 4 bytes a" in TEXT
    masters = states["bf16, master"] - states["float32"]
    assert masters == pytest.approx(4 * parameters, rel=1e-4)
    assert "The master's peak also has the embedding's gradient in float32." in TEXT
    more = peaks["bf16, master"] - peaks["autocast bf16"]
    assert more == pytest.approx(4 * table, rel=1e-4)
    assert "Rounding by chance costs no more than all bf16." in TEXT
    assert peaks["bf16, by chance"] == peaks["all bf16"]


def peak(rows: int, precision: str):
    """Of SmolLM2 on rows of 128 tokens."""
    config = models.smollm2()[0].config
    ask = {"batch_size": rows, "seq_len": 128, "target": "cpu"}
    return predict(config, recipe=Recipe(precision=precision), **ask).peak


def test_from_which_batch_on_autocast_saves(printed):
    rows = re.findall(r"^ +(\d+) +([\d,]+) +([\d,]+) +([\d,]+)$", printed, re.M)
    table = {int(n): numbers(row) for n, *row in rows}
    saved = {n: full - cast for n, (full, cast, _) in table.items()}
    assert "**One row.**" in TEXT and saved[1] == 0
    assert "and autocast needs *more* there" in TEXT and saved[4] < 0
    assert "**From five rows on** it saves, and more with every row." in TEXT
    for n in (5, 6, 7):
        saved[n] = (peak(n, "float32").total - peak(n, "autocast-bf16").total) / MiB
    shares = [saved[n] / n for n in (5, 6, 7, 8, 32)]
    assert shares[0] > 0 and shares == sorted(shares)
    assert "All bf16 halves the residents at any batch" in TEXT
    assert table[1][2] == pytest.approx(table[1][0] / 2, rel=0.01)
    assert "From four rows on, the peak falls by less than half" in TEXT
    assert all(full / 2 < narrow < full for n, (full, _, narrow) in table.items() if n >= 4)
    float32_logits = peak(8, "bf16").by_category["activations"]
    assert float32_logits > peak(8, "float32").by_category["activations"] / 2


def test_where_the_peak_is_with_one_row_and_with_four():
    assert "**One row.** The peak is at the end of backward, where activations are almost" in TEXT
    one = peak(1, "float32").by_category
    weights = one["parameters"]
    assert one["activations"] < 0.01 * weights and one["gradients"] > 0.99 * weights
    assert "**Four rows.** The peak is at the beginning of backward" in TEXT
    four, cast = (peak(4, kind).by_category for kind in ("float32", "autocast-bf16"))
    assert four["gradients"] < 0.01 * weights and cast["gradients"] < 0.01 * weights
    copies = weights / 2
    assert four["activations"] < cast["activations"] < four["activations"] + copies


def test_what_trainers_flags_change(printed):
    parts = re.split(r"^loaded in torch\.(\w+), no flag: all (.*)$", printed, flags=re.M)
    loaded = {parts[1]: (parts[2], parts[3]), parts[4]: (parts[5], parts[6])}
    assert "In training, weights, gradients and states have the dtype in which the model is" in TEXT
    for dtype, (plain, flags) in loaded.items():
        assert plain == dtype and "fp16=True: changes nothing" in flags
    wide, narrow = loaded["float32"][1], loaded["bfloat16"][1]
    assert "bf16=True: products bfloat16\n" in wide
    assert "bf16_full_eval=True: weights after an evaluation bfloat16\n" in wide
    assert narrow.count("changes nothing") == 3


def test_the_old_weight_comes_from_the_cache(printed):
    assert "the new weight is seen inside: False" in printed
    assert "and in a new block: True" in printed


def test_the_losses_of_six_recipes_stay_close(printed):
    held_out = re.findall(r"^\w.*? +held out ([\d.]+) +losses", printed, re.M)
    assert "all six losses are within 0.2 % of each other" in TEXT and len(held_out) == 6
    losses = numbers(tuple(held_out))
    assert max(losses) - min(losses) < 0.002 * min(losses)


def test_how_many_weights_rounding_to_the_nearest_moves(printed):
    shares = dict(re.findall(r"^rate (\S+): ([\d.]+) % moved", printed, re.M))
    assert f"rounding to the nearest moves {shares['1e-05']} % of all bf16 weights" in TEXT
    assert "lr=1e-5" in TEXT and "learning rate (1e-5)" in TEXT


def test_a_weight_changes_when_its_master_has_moved_by_half_a_gap():
    weights = [torch.ones(1).bfloat16()]
    masters, gap = [torch.ones(1)], 1 / 128
    moved = []
    for _ in range(10):  # a tenth of a gap each
        weights[0].grad = torch.full((1,), -gap / 10).bfloat16()
        exercises.master_step(weights, masters, lr=1.0)
        moved.append(weights[0].item() > 1)
    assert "only when its master has moved by half a gap" in TEXT
    assert moved.index(True) in (4, 5)


def test_over_5000_updates_most_weights_have_changed():
    assert "Over 5,000 updates, most masters move that far, even if each update is random." in TEXT
    model, _ = models.smollm2()
    weights = torch.cat([p.detach().flatten()[::100] for p in model.parameters()])
    before = weights.bfloat16()
    steps = np.random.default_rng(0).binomial(5000, 0.5, len(weights)) * 2 - 5000
    masters = before.float() + 1e-5 * torch.from_numpy(steps).float()
    changed = (masters.bfloat16() != before).float().mean()
    assert 0.55 < changed < 0.75


def bytes_in_a_forward(*, trained: bool) -> tuple[int, int]:
    """What an autocast forward of equal layers has kept when its ``with`` block ends: just before
    the end, and just after it.
    """
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
    x = torch.ones(1, 256)
    with MemoryTracker(net, live=False) as tracker, torch.set_grad_enabled(trained):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
            inside = tracker.current.total
        after = tracker.current.total
    assert out.dtype == torch.bfloat16
    return inside, after


def test_the_graph_holds_the_copies_in_training_and_the_cache_alone_without_a_graph():
    assert "In training the graph holds most of them anyway." in TEXT
    copies = 8 * 2 * 256 * 256
    inside, after = bytes_in_a_forward(trained=True)
    assert inside - after < copies / 2
    assert "Without a graph, the cache alone does." in TEXT
    inside, after = bytes_in_a_forward(trained=False)
    assert inside - after == copies
