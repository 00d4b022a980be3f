"""What lessons 00 to 04 say in figures, orders and optima, recomputed from what their cells printed
or from code.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import sqrt

import pytest
import torch
from support.lesson_text import lesson, notes, on_sheet
from support.paths import ROOT

from gradmem_lib import BudgetExceeded, MemoryTracker, accounting, next_token_loss, split
from gradmem_lib.course import ledger, models, window_setting
from gradmem_lib.units import MiB

SMOLLM2 = 134_515_008  # parameters
VOCABULARY, HIDDEN = 49_152, 576  # of SmolLM2


# 01


def test_01_sixteen_bytes_a_parameter_and_the_step_counters():
    said = lesson("01")
    model = models.tiny_llama()
    n, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    assert said.answer("1.a") == 16 * n + 4 * tensors
    assert said.says("sixteen bytes a parameter: 4 for the weight, 4 for its gradient, 8 for")
    assert said.says("That sum is sixteen bytes a parameter:")
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (1, 1000)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    adam = torch.optim.AdamW(weights)
    adam.step()
    assert [adam.state[weight]["step"].nbytes for weight in weights] == [4, 4]
    assert said.says("4 bytes, however large the tensor.")


def test_01_the_peak_of_smollm2_is_two_tables_above_what_stays():
    said = lesson("01")
    table = 4 * VOCABULARY * HIDDEN
    assert said.says(f"A band of temporaries, {table / MiB:.0f} MiB high")
    assert said.says(f"three tensors of {table / MiB:.0f} MiB are alive: both gradients and their")
    # what stays has one of the three, the gradient that is there when the second one comes
    over = said.answer("1.b") - 16 * SMOLLM2
    assert 2 * table <= over < 2 * table + 4000  # counters and token ids, too
    phases = next(line for line in said.printed.splitlines() if "most bytes in each phase" in line)
    backward, step = re.search(r"'backward': (\d+), 'optimizer_step': (\d+)", phases).groups()
    assert abs(int(backward) - int(step)) < 100
    assert said.says("backward and the optimizer's step are almost level")
    assert 2 * table <= int(step) - 16 * SMOLLM2 < 2 * table + 4000
    assert said.says(
        "AdamW's loop needs at least two temporaries as large as the largest parameter"
    )
    assert "two more tables as large as the embedding (108 MiB each)" in notes()
    assert accounting.SHAPES["SmolLM2-135M"].tied
    assert said.says("In SmolLM2 this weight *is* the embedding table (tied), so it is used twice.")


@pytest.mark.parametrize("tied", [True, False])
def test_01_the_gradient_of_a_tied_table_waits_through_all_of_backward(tied):
    said = "A band of temporaries, 108 MiB high, runs through all of backward: the gradient of the"
    assert lesson("01").says(said)
    model = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64, vocab=512, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, 512, (2, 4))
    with MemoryTracker(model, optimizer, live=False) as tracker:
        model(input_ids=ids, labels=ids).loss.backward()
    seen = tracker.timeline
    table = model.lm_head.weight.nbytes
    waits = [
        held >= table
        for held, phase in zip(seen.by_category["temporaries"], seen.phases, strict=True)
        if phase == "backward"
    ]
    if tied:
        made = waits.index(True)
        assert all(waits[made:-10]) and made < 0.1 * len(waits)
    else:
        assert not any(waits)


def test_01_which_moment_wins_depends_on_the_tokens():
    said = lesson("01")
    rows = re.findall(r"^(\d+) × (\d+) +(optimizer_step|backward) ", said.printed, re.MULTILINE)
    tokens = [int(batch) * int(length) for batch, length, _ in rows]
    phases = [phase for *_, phase in rows]
    assert tokens == sorted(tokens)
    assert phases == sorted(phases, reverse=True) and len(set(phases)) == 2
    assert said.says("With few tokens the peak is in the optimizer's step, with many at the loss")
    largest = said.figures(r"^ +([\d,]+) (?:activations|temporaries).* aten\.")
    assert largest == [[4 * 8 * 256 * 8192]] * 3
    assert said.says(
        "The three largest tensors have one size, and none belongs to a Transformer block"
    )
    held = re.findall(r"^ +67,108,864 (.*)$", said.printed, re.MULTILINE)
    assert len(held) == 3 and not any("layers." in line for line in held)
    assert said.says("When backward begins, three tensors of that shape are alive at once:")
    assert said.says("8 × 256 × 8192 numbers of 4 bytes")
    [[spike]] = said.figures(r"SmolLM2 at 8 × 1024 tokens: ([\d.]+) GiB")
    assert spike == 3 * 4 * 8 * 1024 * VOCABULARY / 2**30
    assert said.says("A model of half a gigabyte asks for gigabytes")
    assert round(4 * SMOLLM2 / 1e9, 1) == 0.5


def test_01_what_a_block_saves():
    said = lesson("01")
    tokens, hidden, wide, heads = 2 * 128, 256, 688, 8
    assert said.says("T = 2 × 128 tokens, hidden size h = 256, MLP width f = 688")
    assert said.says(f"The block's input has T·h numbers, which are {4 * tokens * hidden:,} bytes")
    rows = [
        2 * tokens * hidden + tokens,
        tokens * hidden,
        4 * tokens * hidden + tokens * heads,
        2 * tokens * hidden + tokens,
        tokens * hidden,
        4 * tokens * wide,
    ]
    assert 4 * sum(rows) == said.answer("1.d")
    assert said.says("The sum of the column, times 4 bytes, is the formula.")
    assert (
        f"how many *inputs* each guess is: the block's is {4 * tokens * hidden:,} bytes." in notes()
    )
    assert said.says("about 10 T·h + 4 T·f numbers")
    assert 10 * tokens * hidden + 4 * tokens * wide == pytest.approx(sum(rows), rel=0.01)
    lines = said.figures(r"^2 × (\d+) +fused +([\d,]+) eager +([\d,]+)")
    for (_, fused, eager), (_, fused_2, eager_2) in pairwise(lines):
        assert fused_2 == 2 * fused and eager_2 > 2 * eager
    assert said.says("With fused attention, twice the sequence takes twice the bytes.")
    saved = accounting.block_activations(accounting.SHAPES["SmolLM2-135M"], 1, 64)
    assert 3 * saved["attention: key"] == 3 * saved["attention: value"] == saved["attention: query"]
    assert said.says("so k and v are a third as large as q")


def test_01_precision_recipes():
    said = lesson("01")
    rows = {
        name: [float(part.replace(",", "")) for part in rest.split()]
        for name, rest in re.findall(
            r"^(float32|bf16|autocast-bf16) +((?:[\d]+,[\d,]+ *){4})$", said.printed, re.MULTILINE
        )
    }
    full, half, autocast = (rows[name] for name in ("float32", "bf16", "autocast-bf16"))
    assert sum(half[:3]) == pytest.approx(sum(full[:3]) / 2, rel=1e-4)
    assert 0.8 * full[3] < half[3] < full[3] < autocast[3]
    assert autocast[:3] == full[:3]
    assert said.says("Pure bf16 halves the residents.")
    assert said.says("In this small model it takes only a little off the activations, because the")
    assert said.says("Autocast halves *nothing* of the residents, and here its activations *grow*.")
    shape = accounting.SHAPES["Llama-2-7B"]
    per_parameter = {}
    for recipe in ("float32", "autocast-bf16", "bf16", "float32-master"):
        kept = sum(accounting.resident_bytes(shape, precision=recipe).values())
        per_parameter[recipe] = round(kept / shape.parameters, 3)
    assert per_parameter == {"float32": 16, "autocast-bf16": 16, "bf16": 8, "float32-master": 16}
    assert said.says("16 bytes a parameter in float32 *and* in autocast, 8 in pure bf16, 16 with")
    assert "16 bytes a parameter stay in float32, and under autocast too" in on_sheet("01")


def most_activations(rows: int, length: int, dtype=torch.float32, autocast=False, **sizes) -> int:
    """The most bytes of activations in the forward of a tiny Llama."""
    model = models.tiny_llama(dtype=dtype, **sizes)
    ids = torch.randint(0, 8192, (rows, length))
    with MemoryTracker(model, live=False) as tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        del loss
    return max(tracker.timeline.by_category["activations"])


def test_01_when_16_bits_save_activations():
    """A deep model has more to halve, and a large batch more than the weights' copies."""
    said = lesson("01")
    assert said.says("In this small model it takes only a little off the activations")
    shallow, deep = (
        most_activations(1, 64, torch.bfloat16, layers=n) / most_activations(1, 64, layers=n)
        for n in (4, 16)
    )
    assert 0.5 < deep < 0.7 < 0.8 < shallow < 1
    assert said.says("With a small batch the copies add more than the blocks lose.")
    assert most_activations(2, 128, autocast=True) > most_activations(2, 128)
    assert most_activations(8, 256, autocast=True) < most_activations(8, 256)


def test_01_which_recipe_the_guide_has():
    said = lesson("01")
    assert said.says("a well-known guide has a table with 14 + 14 + 56 GB plus activations")
    billion, guide = 7, (14, 14, 56)
    assert [round(part / billion) for part in guide] == [2, 2, 4 + 4]
    assert said.says("16-bit weights and gradients, float32 moments, and no master copy.")
    printed = said.figures(r"^[\w-]+ +(\d+\.\d) +(\d+\.\d) +(\d+\.\d)$")
    assert len(printed) == 4
    for row in printed:
        assert any(abs(found - stated) > 3 for found, stated in zip(row, guide, strict=True))
    assert said.says("The guide's table is none of the four")


def test_01_the_largest_tensors_and_the_largest_layer():
    said = lesson("01")
    for shape in accounting.SHAPES.values():
        saved = accounting.block_activations(shape, 1, 64)
        others = [nbytes for name, nbytes in saved.items() if not name.startswith("mlp: ")]
        assert max(saved.values()) > max(others), shape.name
    assert said.says("With fused attention the largest tensors of a block are in the MLP.")
    for name in ("tiny Llama", "SmolLM2-135M", "GPT-2", "Llama-3.2-1B"):
        shape = accounting.SHAPES[name]
        block = sum(accounting.block_activations(shape, 1, 64, precision="float32").values())
        assert 12 * 64 * shape.vocab > 4 * block, name
    assert said.says("**The logits** are the largest layer of a small model:")
    [[spike]] = said.figures(r"SmolLM2 at 8 × 1024 tokens: ([\d.]+) GiB")
    assert spike * 2**30 == 12 * (8 * 1024) * VOCABULARY
    assert said.says("12 bytes for every token and every word.")


def test_01_all_claims_are_in_the_ledger():
    assert lesson("01").says(
        f"three claims at most, and `docs/ledger.md` has all {len(ledger.CLAIMS)}"
    )


def test_01_thirty_lines_count_as_the_tracker_does():
    said = lesson("01")
    [[small]] = said.figures(r"^peak by thirty lines +([\d,]+)")
    [[tracker]] = said.figures(r"^peak by MemoryTracker +([\d,]+)")
    assert small == tracker and said.says("The two peaks are the same, to the byte.")
    [[still]] = said.figures(r"^alive by thirty lines +([\d,]+)")
    [[none]] = said.figures(r"^alive by MemoryTracker +([\d,]+)")
    assert (still, none) == (4 * MiB, 0) and said.says("Thirty lines still count 4 MiB")
    source = (ROOT / "solutions" / "01_memory_accounting.py").read_text(encoding="utf-8")
    section = source.partition("# ## Optional: a tracker in thirty lines")[2]
    classes = section.partition("That is all.")[0]
    code = [line for line in classes.splitlines() if line.strip() and not line.startswith("#")]
    assert 25 <= len(code) <= 34


def test_01_dropout_almost_triples_what_an_mlp_saves():
    from gradmem_lib.course.lessons.lesson_01.exercises import mlp_bytes

    ratio = mlp_bytes(16, 8, True) / mlp_bytes(16, 8, False)
    assert 2.7 < ratio < 3
    assert lesson("01").says("almost three times as much as in evaluation mode")
    assert mlp_bytes(16, 8, True) == 4 * (1 + 4 + 4 + 4 + 1) * 16 * 8
    assert mlp_bytes(16, 8, False) == 4 * (1 + 4) * 16 * 8
    assert lesson("01").says("1 + 4 + 4 + 4 + 1 times tokens · hidden numbers. Evaluation: 1 + 4.")
    assert lesson("01").says("1 + 4 + 4 + 4 + 1 times tokens · hidden numbers.")


# 03


def test_03_what_shrinks():
    said = lesson("03")
    rows = said.figures(r"^ *(\d+) × (\d+) +([\d,]+) +([\d,]+) +([\d,]+) ([\d,]+) in \w+")
    kept = [row[2] for row in rows]
    assert kept == sorted(kept, reverse=True)
    assert len({tuple(row[3:5]) for row in rows}) == 1
    assert said.says("The activations shrink with the micro-batch, and the other two columns do")
    assert "16 rows in micro-batches. Of these parts only activations shrink:" in on_sheet("03")
    four = next(row for row in rows if row[1] == 4)
    assert four[2] == pytest.approx(kept[0] / 4, rel=0.01)
    phases = re.findall(r"^ *\d+ × \d+ .* in (\w+)$", said.printed, re.MULTILINE)
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "optimizer_step"]


def test_03_a_window_of_four():
    """The activations climb four times; gradients stay from the first backward on, and the
    temporaries of the loss shrink as the activations do.
    """
    said = lesson("03")
    model = models.tiny_llama(layers=1, hidden=32, heads=2, intermediate=64, vocab=512)
    ids = torch.randint(0, 512, (16, 64))

    def window(rows):
        model.zero_grad()
        with MemoryTracker(model, live=False) as tracker:
            for micro in split({"input_ids": ids, "labels": ids}, rows):
                loss, _ = next_token_loss(model, micro)
                (loss / (16 * 63)).backward()
                del loss
        return tracker.timeline.by_category

    whole, cut = window(16), window(4)
    highest = max(cut["activations"])
    assert highest == pytest.approx(max(whole["activations"]) / 4, rel=0.02)
    is_high = [held > 0.9 * highest for held in cut["activations"]]
    climbs = sum(now and not before for before, now in pairwise([False, *is_high]))
    assert climbs == 4
    assert said.says("the activations climb four times, each time to a quarter of the left half's")
    all_of_them = sum(p.nbytes for p in model.parameters())
    complete = cut["gradients"].index(all_of_them)
    assert set(cut["gradients"][complete:]) == {all_of_them} and complete < len(is_high) / 3
    assert said.says("The gradients arrive with the first backward and **stay**: the second, third")
    temporaries = max(cut["temporaries"])
    assert temporaries == pytest.approx(max(whole["temporaries"]) / 4, rel=0.02)
    assert said.says("**Activations and the loss's temporaries follow the micro-batch.**")


def test_03_the_trap():
    said = lesson("03")
    assert said.answer("3.c") > 1 and said.says("The error is larger than the gradient.")
    assert "you show the value: the error is larger than the gradient." in notes()
    factors = [row[0] for row in said.figures(r"× ([\d.]+)$") if row[0] < 10][:4]
    assert said.says(f"counts {factors[0]:.1f} times as much as it should")
    assert factors[3] < 0.5 and said.says("a token of the longest less than half")
    assert sum(n - 1 for n in (8, 16, 64, 128)) == 212 == 22 + 190
    assert said.answer("3.e") == 4
    assert said.says("off by **exactly the number of accumulation steps**")


def test_03_the_recorded_times():
    from gradmem_lib.course.ledger import find

    said = lesson("03")
    assert said.says("4 micro-batches cost nothing, and 16 cost time")
    record = r"recorded time of (\d+) accumulated micro-batches / .*CPU"
    times = {}
    for name, value in find("C16").figures.items():
        if match := re.match(record, name):
            times[int(match[1])] = float(value)
    assert times[4] <= 1.02 < 1.1 < times[16]
    assert said.says("Take the largest micro-batch that fits.")


def test_03_dropout_and_drop_path():
    said = lesson("03")
    [[pieces]] = said.figures(r"^in 4 pieces: error ([\d.]+)$")
    [[checkpoints]] = said.figures(r"^checkpoints: error ([\d.]+)$")
    [[other]] = said.figures(r"^other seed: +error ([\d.]+)$")
    assert checkpoints == 0 and said.says("Checkpoints are exact")
    assert 0.75 < pieces / other < 1.33
    assert said.says("It is off about as far as the full batch with another seed.")
    assert "evaluation mode, in 4 pieces: error below 1e-12: True" in said.printed


def test_03_gradients_are_the_same_on_average_over_all_masks():
    """In pieces and at once, over many draws: the means come together as the draws grow."""
    from gradmem_lib.course import labelled_rows, residual_net

    net, batch = residual_net(blocks=1, width=4, dtype=torch.float64), labelled_rows(8, width=4)
    x, labels = batch["x"].double(), batch["labels"]

    def gradient(pieces):
        net.zero_grad()
        for part in torch.arange(8).chunk(pieces):
            loss = torch.nn.functional.cross_entropy(net(x[part]), labels[part], reduction="sum")
            (loss / 8).backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    draws = 400
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        once, cut = (sum(gradient(pieces) for _ in range(draws)) / draws for pieces in (1, 4))
        single = gradient(4) - gradient(1)
    assert (once - cut).norm() < 0.1 * once.norm() < single.norm()
    assert lesson("03").says("the same on average over all masks")


# 04


def test_04_boundaries_and_peaks():
    said = lesson("04")
    [[after]] = said.figures(r"^alive after forward: (\d+) boundaries$")
    assert after == 16 * 5 + 1 and said.answer("4.a") == 16 + 1
    [[yours]] = said.figures(r"^peak with your checkpoint: (\d+) boundaries$")
    assert yours == 16 + 5 + 9 and said.says("Your peak, 16 + 5 + 9 = 30,")
    rows = said.figures(r"^ +(\d+) +([\d,]+) +([\d,]+)  █")
    assert all(formula == measured for _, formula, measured in rows)
    assert min(rows, key=lambda row: row[2])[0] == 8 == said.answer("4.b") == sqrt(64)
    assert said.says("your formula is right to the byte")


def test_04_where_the_root_of_n_is_not_it():
    said = lesson("04")
    rows = said.figures(r"^\S+ +(\d+) layers +([\d.]+) +(\d+): ([\d.]+) +(\d+): ([\d.]+)$")
    assert all(ratio > 20 for _, ratio, *_ in rows)
    assert said.says("A block keeps more than twenty times its input.")
    assert all(1 < sqrt(n / ratio) < 2 for n, ratio, *_ in rows)
    times = [root / best for *_, root, _, best in rows]
    assert min(times) > 1.9 and max(times) < 3 and said.says("√n needs two to three times as much")
    found = dict(re.findall(r"(\d|'best'): ([\d.]+)", said.printed.split("boundaries: {")[1]))
    one, two, five = (float(found[k]) for k in "125")
    assert two < one < five and one < 1.1 * two
    assert said.says("pairs of layers are a little better than single ones")
    head = dict(re.findall(r"(\d|'best'): ([\d.]+)", said.printed.split("boundaries: {")[2]))
    one, two, five, best = (float(head[k]) for k in ("1", "2", "5", "'best'"))
    assert five < two < one and five < best <= one
    assert said.says("Now segments of five win, the opposite of section 5")


def test_04_long_segments_first():
    said = lesson("04")
    rows = said.figures(r"^ *(\d+) boundaries, +(\d+) more calls: ([\d]+)")
    _, ones, fours, unequal = rows
    assert unequal[0] < fours[0] < ones[0]
    assert 0.16 < 1 - unequal[0] / fours[0] < 0.2 and said.says("almost a fifth less")
    assert (unequal[1], fours[1]) == (63, 60) and said.says("63 more calls instead of 60")
    assert round(100 * (1 - 1 / sqrt(2))) == 29 and said.says("you save 29 %")


def test_04_the_price():
    said = lesson("04")
    rows = said.figures(r"^segments of +\d+: trained \+([\d.]+)%, frozen \+([\d.]+)%$")
    trained, frozen = zip(*rows, strict=True)
    assert max(trained) <= 100 / 3 and max(frozen) <= 50
    assert round(max(trained)) == 33 and max(frozen) > 49
    assert list(trained) == sorted(trained) and list(frozen) == sorted(frozen)
    assert said.says("up to 33 % where all weights are trained, and up to 50 % where they are")
    assert said.says("up to a third more work, and up to half where the weights are frozen")
    [[yours, theirs]] = said.figures(r"^relative error: yours ([\d.]+), PyTorch's ([\d.]+)$")
    assert (yours, theirs) == (0.1, 0) and said.says("so the gradient is off by a tenth")


def test_04_where_it_does_not_help():
    said = lesson("04")
    (kept, peak), (less, same) = said.figures(r"^most activations +([\d,]+), peak +([\d,]+)$")
    assert peak == same and said.answer("4.d") == 0 and said.says("Not at all, although")
    assert 0.2 < less / kept < 0.3 and said.says("the activations fell to about a quarter")


# Lines of the library that lessons show


def test_03_the_lines_of_trainer_factors():
    import inspect

    from gradmem_lib.course.lessons.shared.hf_trainer import trainer_logs

    said, lines = lesson("03"), inspect.getsource(trainer_logs)
    assert said.says("TrainingArguments(per_device_train_batch_size=4 // K, gradient_accumulation")
    assert "per_device_train_batch_size=len(examples) // accumulation_steps" in lines
    assert "gradient_accumulation_steps=accumulation_steps" in lines and "trainer.train()" in lines


def test_04_what_a_recorded_schedule_watches():
    import inspect

    from torch.utils._python_dispatch import TorchDispatchMode

    from gradmem_lib import record_schedule
    from gradmem_lib.measure.watch import Watch

    assert lesson("04").says("module hooks say which layer runs, and a dispatch mode, like")
    lines = inspect.getsource(record_schedule)
    for call in ("register_module_forward_pre_hook(", "register_module_forward_hook(", "Watch("):
        assert call in lines, call
    assert issubclass(Watch, TorchDispatchMode)


def test_03_memory_runs_out_in_the_seventh_micro_batch():
    """The lesson's own script, with a count of the micro-batches that its model has seen."""
    assert lesson("03").says(
        "The window has 16 micro-batches, and the memory runs out in the seventh."
    )
    source = (ROOT / "solutions" / "03_gradient_accumulation.py").read_text(encoding="utf-8")
    script = source[source.index("def with_entropy(") : source.index("net, net_sgd, batch =")]
    names = {"split": split, "cross_entropy": torch.nn.functional.cross_entropy}
    exec(script.partition("\n# %%")[0], names)
    net, optimizer, batch = window_setting()
    assert len(list(split(batch, 8))) == 16
    seen = []
    net.register_forward_pre_hook(lambda *given: seen.append(1))
    with pytest.raises(BudgetExceeded), MemoryTracker(net, optimizer, budget="2 MiB", live=False):
        names["with_entropy"](net, optimizer, batch)
    assert len(seen) == 7
