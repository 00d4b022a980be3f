"""What the teacher's notes and the sheets for the wall say in figures and orders, where no test of
a lesson recomputes it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest
import torch
from build_notebooks import read_source
from lesson_facts import lessons
from support.lesson_text import lesson, notes, on_sheet
from support.nightly import ALL
from support.paths import ROOT

from gradmem_lib.course.lessons.lesson_03.exercises import plan_window
from gradmem_lib.course.lessons.lesson_11 import puzzles
from gradmem_lib.units import GiB


def largest_peak(printed: str) -> float:
    """The largest peak that a lesson's cells measured, in GiB."""
    figures = re.findall(r"(?:measured|peak) +([\d,]{9,})\b", printed)
    return max((int(figure.replace(",", "")) for figure in figures), default=0) / GiB


def test_what_a_learner_needs():
    peaks = {found.number: largest_peak(found.printed) for found in lessons()}
    assert max(peaks, key=peaks.get) == "05"
    assert "Later lessons need more memory, lesson 05 most." in notes()
    assert f"Lesson 05 alone has {peaks['05']:.2f} GiB of tensors at its peak." in notes()
    assert f"The naive run needs {peaks['05']:.2f} GiB" in notes()
    python = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    machine = (ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8")
    assert python["requires-python"] == ">=3.11" and '"memory": "8gb"' in machine
    assert peaks["05"] * GiB < 8e9 / 2  # room for Python, the browser and the system
    assert "Each learner needs Python 3.11 or newer and 8 GB of memory." in notes()


@pytest.mark.skipif(not ALL, reason="a process that runs a lesson: every night")
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux counts it")
def test_what_a_kernel_of_lesson_00_holds():
    """The lesson's cells in a process of their own: its memory that no other process shares."""
    assert "each kernel that runs lesson 00 has 0.5 to 0.6 GiB of its own" in notes()
    source = ROOT / "solutions" / "00_start_here.py"
    code = [cell.source for cell in read_source(source).cells if cell.cell_type == "code"]
    code.append("import psutil; print(psutil.Process().memory_full_info().uss)")
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    held = int(ran.stdout.splitlines()[-1]) / GiB
    assert 0.4 < held < 0.65, held


def test_what_exercises_ask_for():
    tokens = 4 * 2048
    _, exact = plan_window(64 * tokens, 4, 2048, 1)
    _, rounded = plan_window(64 * tokens + 1, 4, 2048, 1)
    assert exact == 64 * tokens and rounded == 65 * tokens
    assert "The tokens of an update may then be more than asked for." in notes()
    (stated,) = [e for lesson in lessons() for e in lesson.exercises if e.id == "4.1"]
    assert stated.minutes == 10
    assert "Exercise 4.1 may take longer than its ten minutes." in notes()
    assert "many say 1,000, which is 1 / (1 − β)." in notes() and round(1 / (1 - 0.999)) == 1000
    assert "Draw the 16 bits that are cut off" in notes()
    assert torch.finfo(torch.float32).bits - torch.finfo(torch.bfloat16).bits == 16


def test_what_16_bits_lose():
    assert torch.finfo(torch.float16).max == 65_504
    said = lesson("07")
    lost = said.figures(r"^scale +[\d,]+ +float16 loses ([\d.]+) % +bf16 ([\d.]+) %")
    assert lost[0][0] > 100 * lost[1][0] and all(bf16 == 0 for _, bf16 in lost)
    assert "65,504 is the largest float16. Small gradients need a scaler." in on_sheet("07")
    [[nearest, chance]] = said.figures(r"^nearest ([\d.]+) +by chance ([\d.]+)$")
    assert nearest == 1 and chance == pytest.approx(1 + 100 * 0.001)
    assert "float16 loses small gradients. bf16 loses small changes." in on_sheet("07")


def test_what_adapters_save():
    sheet = on_sheet("09")
    assert "Adapters save states and gradients, and hardly any activations." in sheet
    with_lora, without = re.search(
        r"([\d.]+) GiB of activations with LoRA, ([\d.]+) GiB", sheet
    ).groups()
    assert f"{with_lora} GiB of activations with LoRA, {without} GiB without it (7B)" in sheet
    [[predicted]] = lesson("09").figures(r"Prediction 9.b\n.*\n +predicted +([\d.]+) GiB")
    assert float(with_lora) == predicted
    assert lesson("09").says(f"activations are at most {without} GiB")
    assert 0.9 < float(with_lora) / float(without) < 1
    assert f"{0.5 + 1 / 64 + 4 / (64 * 256):.3f} bytes a weight: NF4 with double" in sheet


def test_where_units_and_copies_cost_more():
    said = lesson("10")
    rows = said.figures(r"^(?:alone|ddp|zero1|zero2|fsdp) +([\d.]+) +([\d.]+) +[\d.]+ +[\d.]+$")
    (alone, peak), (ddp, _), *_, (fsdp, _) = rows
    assert ddp / alone == pytest.approx(said.answer("10.a") / 12, rel=0.01)
    assert "16 bytes a weight on each rank under DDP. Alone it is 12." in on_sheet("10")
    assert fsdp == pytest.approx(alone / 2, rel=0.01)
    assert "DDP copies, FSDP cuts. Count the bytes on every rank." in on_sheet("10")
    assert said.answer("10.b") > peak
    assert "MiB with FSDP as one unit: more than a process alone" in on_sheet("10")


def test_what_is_left_of_the_card_makes_the_run_faster():
    path = ROOT / "gradmem_lib" / "course" / "lessons" / "lesson_11" / "puzzles.json"
    record = json.loads(path.read_text(encoding="utf-8"))["puzzles"]["11.0"]
    best, *steps = (entry["weighed"] for entry in record)  # the planner's, and the lesson's steps
    again, once = steps[-2:]
    assert again["needs"] < once["needs"] <= once["room"]
    assert best["seconds"] <= once["seconds"] < again["seconds"]
    assert best["seconds"] / once["seconds"] > puzzles.THREE
    assert f"{once['seconds'] * 1e6:.0f} µs a token with states in 8 bits." in on_sheet("11")
    assert f"With checkpoints it is {again['seconds'] * 1e6:.0f}." in on_sheet("11")
    assert "Make it fit. Then make it fast: unused memory is time given away." in on_sheet("11")
    three = f"{100 * puzzles.THREE:.0f} % of the planner's speed is worth three stars"
    assert three in on_sheet("11")
