"""What stands on each lesson's sheet for the wall: a picture, three numbers and one rule.

Every figure is taken from what the lesson's cells printed, so that sheet and lesson cannot tell
different stories.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from build_notebooks import ROOT
from lesson_facts import Lesson

from gradmem_lib.names import CATEGORIES


@dataclass(frozen=True)
class Bar:
    """One row of a picture: ``parts`` are pairs of a category (or "" for none) and a length;
    ``strong`` marks the point.
    """

    name: str
    parts: tuple[tuple[str, float], ...]
    says: str
    strong: bool = False


@dataclass(frozen=True)
class Bars:
    rows: list[Bar]
    limits: tuple[tuple[float, str], ...] = ()  # upright lines, each with its name
    legend: dict[str, str] = field(default_factory=dict)  # categories that have another name here


@dataclass(frozen=True)
class Curves:
    lines: dict[str, list[tuple[float, float]]]
    across: str


@dataclass(frozen=True)
class Bits:
    rows: list[tuple[str, int, int]]  # dtype, exponent bits, fraction bits


@dataclass(frozen=True)
class Sheet:
    caption: str
    picture: Bars | Curves | Bits
    numbers: tuple[tuple[str, str], ...]
    rule: str


class Printed:
    """The figures of a lesson, found by patterns that name them."""

    def __init__(self, lesson: Lesson):
        self.lesson = lesson

    def rows(self, pattern: str) -> list[tuple[str, ...]]:
        """The groups of every place where the pattern matches.

        ``LookupError`` if it does nowhere.
        """
        found = [m.groups() for m in re.finditer(pattern, self.lesson.printed, re.MULTILINE)]
        if not found:
            raise LookupError(
                f"{self.lesson.source.name} prints nothing like {pattern!r} any more: mend "
                "sheet_facts.py"
            )
        return found

    def one(self, pattern: str) -> str:
        """The first group of the first match."""
        return self.rows(pattern)[0][0]

    def stated(self, pattern: str) -> str:
        """As ``one``, from the lesson's prose."""
        return re.search(pattern, "\n".join(cell.source for cell in self.lesson.cells))[1]

    def answer(self, id: str) -> str:
        """What a prediction found."""
        return next(asked.found for asked in self.lesson.asked if asked.id == id)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def megabytes(text: str) -> str:
    return f"{number(text) / 1e6:,.0f} MB"


def _bars(pairs, strong=(), says="{:g}", **more) -> Bars:
    """Plain bars from (name, length) pairs; those named in ``strong`` are dark."""
    rows = [Bar(name, (("", value),), says.format(value), name in strong) for name, value in pairs]
    return Bars(rows, **more)


def lesson_00(found: Printed) -> Sheet:
    four, card = found.rows(r"^4 fits: the peak is ([\d,]+) of ([\d,]+) bytes")[0]
    parts = found.rows(
        r"parameters ([\d,]+), optimizer ([\d,]+), activations ([\d,]+), temporaries ([\d,]+),"
    )
    full = found.rows(
        r"^ +([\d,]+) bytes  parameters\n +([\d,]+) bytes  optimizer\n +([\d,]+) bytes  activations"
    )
    names = ("parameters", "optimizer", "activations", "temporaries")
    fits, fails = (
        [(n, number(v)) for n, v in zip(names, values, strict=False)]
        for values in (parts[0], full[0])
    )
    asked = number(found.one(r"asked for ([\d,]+) bytes"))
    rows = [
        Bar("4 rows", tuple(fits), "fit"),
        Bar("16 rows", (*fails, ("activations", asked)), "too large"),
    ]
    return Sheet(
        (
            "A tiny Llama on a card of 192 MiB: at the peak with 4 rows, and when 16 rows run out "
            "of memory"
        ),
        Bars(rows, limits=((number(card), "the card"),)),
        (
            (found.answer("0.a"), "of parameters: 4 bytes for each float32 number"),
            (megabytes(four), "at the peak of a step with 4 rows, in backward"),
            ("4", "rows fit the card. Five do not."),
        ),
        "Guess first. Then count. Change one thing, and count again.",
    )


def lesson_01(found: Printed) -> Sheet:
    table = found.rows(
        r"^(float32|bf16|autocast-bf16|float32-master) +(\d+\.\d) +(\d+\.\d) +(\d+\.\d)$"
    )
    names = ("parameters", "gradients", "optimizer")
    rows = []
    for recipe, *values in table:
        parts = tuple(zip(names, map(float, values), strict=True))
        rows.append(Bar(recipe, parts, f"{sum(map(float, values)):.0f} GB"))
    return Sheet(
        "What stays of a 7B in training, before the first token, by precision recipe",
        Bars(rows),
        (
            (
                found.answer("1.e").replace(" B", " bytes"),
                "a parameter stay in float32, and under autocast too",
            ),
            (
                found.one(r"8 × 1024 tokens: ([\d.]+ GiB)"),
                "of logits and their gradients: SmolLM2, 8 × 1024 tokens",
            ),
            (
                found.answer("1.c").split()[0],
                "tensors kept by five modules. Count storages, not layers.",
            ),
        ),
        "The peak is a moment. Ask when it is, and who is there.",
    )


def lesson_02(found: Printed) -> Sheet:
    table = found.rows(r"^ +(\d+) +([\d.e-]+) +([\d.e-]+) +([\d.e-]+)$")
    names = ("float32", "bf16")
    lines = {name: [(float(r[0]), float(r[i])) for r in table] for i, name in enumerate(names, 1)}
    return Sheet(
        (
            "AdamW's v. The gradient is 1, and from step 2,000 on 0.01. In bf16, v stops and never "
            "falls"
        ),
        Curves(lines, "step"),
        (
            (
                f"{float(found.answer('2.a').split()[0]):.3g} ×",
                "lr is the first step of v alone, without bias correction",
            ),
            (found.answer("2.b"), "of states for SmolLM2: 8 bytes for each parameter"),
            (
                found.one(r"^foreach +([\d.]+ ×)"),
                "the largest tensor: a foreach step copies the model",
            ),
        ),
        "m gives the direction, v the length. In bf16 and with β₂ = 0.999, v never falls.",
    )


def lesson_03(found: Printed) -> Sheet:
    table = found.rows(r"^ *(\d+ × \d+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) in \w+")
    names = ("activations", "gradients", "optimizer")
    rows = []
    for cut, *values, _ in table:
        parts = tuple((n, number(v) / 1e6) for n, v in zip(names, values, strict=True))
        rows.append(Bar(cut, parts[1:] + parts[:1], f"{parts[0][1]:.0f} MB"))
    return Sheet(
        (
            "16 rows in micro-batches. Of these parts only activations shrink: their MB are beside "
            "each bar"
        ),
        Bars(rows),
        (
            (
                found.answer("3.b").replace(" percent", " %"),
                "lower is the peak with 4 × 4 rows instead of 16 at once",
            ),
            (
                f"{found.one(r'^unequal lengths: relative error ([0-9.]+)$')} ×",
                "the gradient: the error of loss/K with unequal lengths",
            ),
            (
                found.answer("3.e").replace(" times", " ×"),
                "too large: a classifier's gradient in Trainer, 4 steps",
            ),
        ),
        "Add up sums. Divide once, by the items of the whole window.",
    )


def lesson_04(found: Printed) -> Sheet:
    table = found.rows(r"^ +(\d+) +[\d,]+ +([\d,]+)$")
    best = min(table, key=lambda row: number(row[1]))[0]
    pairs = [(f"k = {k}", number(nbytes) / 1e6) for k, nbytes in table]
    root, one = found.rows(r"^Llama-2-7B +32 layers +[\d.]+ +(\d+): [\d.]+ +(\d+): ")[0]
    whole = found.one(r"^(\d+) boundaries, +0 more calls: 64$")
    unequal = found.one(r"^ *(\d+) boundaries, .*: 5 5 5")
    return Sheet(
        "64 layers that keep only their input, in segments of k layers: MB at the peak",
        _bars(pairs, (f"k = {best}",), "{:.1f}"),
        (
            (one, f"layer a segment is best for Llama-2-7B. √n says {root}."),
            (f"{whole} → {unequal}", "boundaries at the peak: 64 layers, long segments first"),
            (
                found.answer("4.d").replace(" percent", " %"),
                "saved in all of SmolLM2, 64 tokens: its peak is gradients",
            ),
        ),
        "A checkpoint saves only what is outside the segment that runs again.",
    )


def lesson_05(found: Printed) -> Sheet:
    names = re.findall(
        r"^ *bar\(\s*\"([^\"]+)\"", "\n".join(c.source for c in found.lesson.cells), re.MULTILINE
    )
    peaks = [number(peak) for (peak,) in found.rows(r"^measured +([\d,.]+) MiB, in")]
    pairs = dict(zip(names, peaks, strict=True))
    shown = {name: peak for name, peak in pairs.items() if not name.startswith(("or:", "without"))}
    share = found.one(r"^([\d.]+%) of the naive run's peak")
    return Sheet(
        "SmolLM2-135M, 8 × 128 tokens an update: MiB at the peak, one technique at a time",
        _bars(shown.items(), (list(shown)[-1],), "{:,.0f}", limits=((0.8 * 1024, "the card"),)),
        (
            (share.replace("%", " %"), "of the naive run's peak, with everything combined"),
            (found.answer("5.c"), "lower by 30 checkpoints: activations were not the peak"),
            (
                found.answer("5.d").replace(" percent", " %"),
                "lower by bf16=True: all weights stay float32",
            ),
        ),
        "Look where the peak is. Then choose.",
    )


def lesson_06(found: Printed) -> Sheet:
    table = found.rows(
        r"^(\S.*?) {2,} *[\d.]+ +([\d.]+)[ *]* {2}(?:activations|optimizer|parameters) "
    )
    pairs = [(name, float(needs)) for name, needs in table]
    four_bits = dict(pairs)["+ base in 4 bits"]
    return Sheet(
        "Llama-2-7B, 8 rows of 2,048 tokens an update: GiB that a card needs",
        _bars(pairs, [n for n, needs in pairs if needs <= 24], limits=((24, "24 GiB"),)),
        (
            (found.answer("6.d"), "at the peak, bf16 and checkpointed: still too much"),
            (f"{four_bits:g} GiB", "with LoRA on a base in 4 bits"),
            (
                found.one(r"the prediction is ([\d,]+ bytes) off"),
                "between the predicted peak and the measured one",
            ),
        ),
        "An error shows the first request too many, not the last. Predict the rest.",
    )


def lesson_07(found: Printed) -> Sheet:
    text = "\n".join(cell.source for cell in found.lesson.cells)
    table = re.findall(
        r"^\| (float32|bf16|float16) \| (\d+) \| (\d+) \| ([^|]+) \|", text, re.MULTILINE
    )
    largest = {name: value for name, *_, value in table}
    thousand = float(found.one(r"a thousand times 1.0 in bf16: ([\d.]+)"))
    nearest, chance = found.rows(r"^nearest ([\d.]+) +by chance ([\d.]+)")[0]
    return Sheet(
        "The bits of a number: exponent bits are the range, fraction bits are the precision",
        Bits([(name, int(exponent), int(fraction)) for name, exponent, fraction, _ in table]),
        (
            (f"{thousand:g}", "is a thousand times 1.0 added up in bf16"),
            (largest["float16"].strip(), "is the largest float16. Small gradients need a scaler."),
            (f"{nearest} | {chance}", "1 + 100 × 0.001 in bf16: to the nearest | by chance"),
        ),
        "float16 loses small gradients. bf16 loses small changes.",
    )


def lesson_08(found: Printed) -> Sheet:
    table = found.rows(r"^([a-z√].*?) +([\d,]+) bytes +([\d,]+) operations")
    least = number(table[0][2])
    rows = []
    for name, nbytes, operations in table:
        more = number(operations) / least - 1
        rows.append(
            Bar(
                name,
                (("", number(nbytes) / 1e6),),
                f"+{more:.0%} work",
                name == "every second product",
            )
        )
    ratio = found.one(r"^H100 80GB +[\d.]+ +[\d.]+ +([\d.]+) ")  # over PCIe 5, which it has
    return Sheet(
        "Nine layers of SmolLM2: activations kept (the bar), and operations on top",
        Bars(rows),
        (
            (
                f"{float(ratio):.0f} ×",
                "slower than recomputing: a 7B's layer over an H100's PCIe 5",
            ),
            (
                found.answer("8.b").replace(" percent", " %"),
                "of the activations stay if all that is saved moves",
            ),
            (
                found.answer("8.e").replace(" times", " ×"),
                "the work: 28 frozen layers run again for an unused gradient",
            ),
        ),
        "Repeat what is cheap. Move what is small. A fast card makes the trip dear.",
    )


def lesson_09(found: Printed) -> Sheet:
    table = dict(found.rows(r"^(\S.*?) +states ([\d.]+) a weight"))
    pairs = [(name, float(value)) for name, value in table.items()]
    every = found.stated(r"activations are at most\s+([\d.]+ GiB)")
    return Sheet(
        "Bytes of states that an optimizer keeps for each float32 weight",
        _bars(sorted(pairs, key=lambda pair: -pair[1]), ("8-bit AdamW", "Adafactor"), "{:.3g}"),
        (
            (found.answer("9.b"), f"of activations with LoRA, {every} without it (7B)"),
            (
                f"{0.5 + 1 / 64 + 4 / (64 * 256):.3f}",
                "bytes a weight: NF4 with double quantization",
            ),
            (
                found.answer("9.c").split()[0],
                "tokens: then a QLoRA that keeps inputs needs more than LoRA",
            ),
        ),
        "Adapters save states and gradients, and hardly any activations.",
    )


def lesson_10(found: Printed) -> Sheet:
    table = found.rows(r"^(alone|ddp|zero1|zero2|fsdp) +([\d.]+) +([\d.]+) +[\d.]+ +[\d.]+$")
    rows = []
    for way, between, peak in table:
        parts = (("parameters", float(between)), ("temporaries", float(peak) - float(between)))
        rows.append(Bar(way, parts, f"{float(peak):.1f} MiB"))
    return Sheet(
        "A tiny Llama on one of two ranks: what it keeps between two steps, and its peak",
        Bars(rows, legend={"parameters": "between two steps", "temporaries": "more at the peak"}),
        (
            (
                found.answer("10.a").split()[0] + " bytes",
                "a weight on each rank under DDP. Alone it is 12.",
            ),
            (found.answer("10.b"), "with FSDP as one unit: more than a process alone"),
            (found.answer("10.f"), "on each of two cards: a 70B, adapters, base in 4 bits"),
        ),
        "DDP copies, FSDP cuts. Count the bytes on every rank.",
    )


def lesson_11(found: Printed) -> Sheet:
    record = json.loads(
        (ROOT / "gradmem_lib" / "course" / "lessons" / "lesson_11" / "puzzles.json").read_text(
            encoding="utf-8"
        )
    )
    best_and_steps = record["puzzles"]["11.0"]
    steps = [entry["weighed"] for entry in best_and_steps[1:]]  # without the planner's best
    twice, once = steps[-2:]  # each layer runs twice, or once
    names = ("bf16, 8 × 1", "+ checkpoints", "+ loss in chunks", "8-bit AdamW")
    rows = []
    for name, weighed in zip(names, steps, strict=True):
        parts = {category: weighed["held"].get(category, 0) for category in CATEGORIES}
        parts["other"] += weighed["needs"] - sum(parts.values())
        fits = weighed["needs"] <= weighed["room"]
        says = f"{weighed['seconds'] * 1e6:.0f} µs" if fits else "too large"
        rows.append(Bar(name, tuple(part for part in parts.items() if part[1]), says, fits))
    speeds = [f"{weighed['seconds'] * 1e6:.0f}" for weighed in (once, twice)]
    three = found.stated(r"with (\d+) % it has ★★★")
    return Sheet(
        "Every weight of Llama-3.2-1B on a card of 12 GB: what it needs, and the time of a token",
        Bars(rows, limits=((once["room"], "the card"),)),
        (
            (
                f"{speeds[0]} µs",
                f"a token with states in 8 bits. With checkpoints it is {speeds[1]}.",
            ),
            (f"{three} %", "of the planner's speed is worth three stars"),
            (found.answer("11.a"), "between the predicted and the measured peak of puzzle 11.1"),
        ),
        "Make it fit. Then make it fast: unused memory is time given away.",
    )


def sheet(lesson: Lesson) -> Sheet:
    """The sheet of a lesson. ``LookupError`` where the lesson does not print a figure any more."""
    make: Callable[[Printed], Sheet] = globals()[f"lesson_{lesson.number}"]
    return make(Printed(lesson))
