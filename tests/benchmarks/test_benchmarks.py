"""The benchmarks' own arithmetic, and the run on a card as far as it goes without one."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess

import pytest
import torch
import transformers
from benchmarks.benchmark_runs import ROOT, from_a_plain_checkout
from support.nightly import ALL, each

from gradmem_lib.course.material.shapes import SHAPES, Shape
from gradmem_lib.names import OPTIMIZERS, PRECISIONS
from gradmem_lib.training.recipe import Recipe


@pytest.fixture
def gpu(load_writing_elsewhere):
    return load_writing_elsewhere("gpu_predict")


def test_enough_cases_of_every_kind(gpu):
    cases = gpu.cases()
    assert len(set(map(str, cases))) == len(cases) >= 40
    recipes = [case.recipe for case in cases]
    assert {case.model for case in cases} >= set(gpu.FAMILIES)
    assert {r.precision for r in recipes} == set(PRECISIONS) and {
        r.optimizer for r in recipes
    } == set(OPTIMIZERS)
    assert len({r.checkpointing for r in recipes}) >= 4 and any(case.rows is None for case in cases)
    for case in cases:
        limit = getattr(
            gpu.config_of(case.model, tiny=False), "max_position_embeddings", case.seq_len
        )
        assert case.seq_len <= limit, case


def test_without_a_card_it_says_so_and_writes_nothing(gpu, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == gpu.NO_CARD + "\n" and not list(tmp_path.iterdir())


def test_dry_run_from_a_plain_checkout(tmp_path):
    words = each(2, ["vit 32x", "llama-7b", "qwen3 8x1024", "gqa 4x1024", "adamw-8bit"])
    printed = from_a_plain_checkout(tmp_path, "gpu_predict.py", "--dry-run", "--only", *words)
    assert (
        f"{6 if ALL else 3} measured, 0 left out, 0 failed" in printed and "to the byte" in printed
    )


class Pretended:
    """Stands in for a card whose allocator counts one part in a hundred more than predicted."""

    tiny, target, device, total = True, "cpu", "cpu", 2**40

    def clear(self):
        pass

    def predicted(self, config, ask):
        return {
            "tensors": 1000,
            "allocated": 1000 + ask["batch_size"],
            "reserved": 2000,
            "between steps": 10,
        }

    def measured(self, run, batch, recipe):
        return {"allocated": 1010, "reserved": 2500, "between steps": 10}

    def left(self):
        return 10


def run_pretended(gpu, monkeypatch, place, *arguments) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(gpu, "Card", lambda: place)
    monkeypatch.setattr(
        gpu, "measure", lambda case, config, place, deadline: place.measured(None, None, None)
    )
    monkeypatch.setattr(gpu, "with_rows", lambda case, config, place: gpu.replace(case, rows=3))
    return gpu.main(list(arguments))


def test_what_is_written_and_printed(gpu, monkeypatch, tmp_path, capsys):
    assert run_pretended(gpu, monkeypatch, Pretended()) == 0
    written = json.loads((tmp_path / "gpu_predict.json").read_text())
    assert {"device", "torch", "transformers", "date"} <= set(written["where"]) and written[
        "where"
    ]["device"] == "a card"
    assert len(written["cases"]) == len(gpu.cases()) and written["summary"]["measured"] == len(
        gpu.cases()
    )
    one = written["cases"][0]
    assert one["error %"] == {
        "allocated": round(100 * (1004 / 1010 - 1), 4),
        "tensors": 0.0,
        "reserved": -20.0,
    }
    assert "reserved: median error 20.0 %, largest 20.0 %" in capsys.readouterr().out


def test_one_that_fails_is_written_down_and_the_next_begins(gpu, monkeypatch, tmp_path, capsys):
    class Fails(Pretended):
        def measured(self, run, batch, recipe):
            if recipe is None and not self.__dict__.setdefault("failed", []):
                self.failed.append(1)
                raise torch.OutOfMemoryError("full")
            return super().measured(run, batch, recipe)

    run_pretended(gpu, monkeypatch, Fails())
    cases = json.loads((tmp_path / "gpu_predict.json").read_text())["cases"]
    assert cases[0]["error"] == "OutOfMemoryError: full" and "error %" in cases[1]
    assert "1 failed" in capsys.readouterr().out


def test_what_does_not_fit_is_left_out_and_time_is_kept(gpu, monkeypatch, tmp_path, capsys):
    place = Pretended()
    place.total = 500
    run_pretended(gpu, monkeypatch, place)
    cases = json.loads((tmp_path / "gpu_predict.json").read_text())["cases"]
    assert all("the card has 500 B" in case["left out"] for case in cases)
    run_pretended(gpu, monkeypatch, Pretended(), "--seconds", "-1")
    assert f"{len(cases)} of {len(cases)} cases were not begun" in capsys.readouterr().out


def test_the_peak_of_a_part_that_comes_twice_is_the_larger(gpu, monkeypatch):
    """Two micro-batches: forward, backward, forward, backward, step; the card's peak starts anew at
    each.
    """
    allocated = iter([1, 5, 9, 7, 8, 6])  # the first is what there was before the first forward
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3)

    def step(model, optimizer, batch, recipe, *, mark):
        for part in ("forward", "backward", "forward", "backward", "step"):
            mark(part)

    class Run:
        model = optimizer = None

    monkeypatch.setattr(gpu, "step", step)
    found = gpu.Card.measured(object.__new__(gpu.Card), Run, None, Recipe())
    assert found["by phase"] == {"forward": 7, "backward": 9, "optimizer_step": 6}
    assert (found["allocated"], found["reserved"], found["between steps"]) == (9, 20, 3)


def test_rows_fill_the_card_and_no_more(gpu, monkeypatch):
    class Found:
        def __init__(self, rows):
            self.peak = self
            self.total = max(1000, 100 + 30 * rows)  # the optimizer's step, or activations

    monkeypatch.setattr(gpu, "predict", lambda config, *, batch_size, **ask: Found(batch_size))
    place = Pretended()
    place.total = 10_000
    rows = gpu.with_rows(gpu.Case("llama", None, 128), None, place).rows
    assert 0.95 * gpu.FILL * place.total < Found(rows).total <= gpu.FILL * place.total


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed here")
@pytest.mark.parametrize(
    "own", [True, False], ids=["recent torch of one's own", "the course's environment"]
)
def test_make_gpu_takes_a_python_that_has_torch(tmp_path, own):
    """Neither case may build anything."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in (
        "requirements.txt",
        "requirements-model.txt",
        "pyproject.toml",
        ".venv/.ready-to-learn",
    ):
        (tmp_path / name).touch()
    for path, has_torch in (("mine", own), (".venv/bin/python", True)):
        text = (
            f'#!/bin/sh\necho "{path} $*" >> calls\ncase "$1" in -c) exit '
            f"{int(not has_torch)};; esac\n"
        )
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not re.match("MAKE|MFLAGS", k)}
    done = subprocess.run(
        ["make", "gpu", "PYTHON=./mine"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    calls = [c for c in (tmp_path / "calls").read_text().splitlines() if " -c " not in c]
    python = "mine" if own else ".venv/bin/python"
    assert calls == [f"{python} benchmarks/gpu_predict.py", f"{python} benchmarks/gpu_finetune.py"]


def test_formulas_by_hand(load):
    """Two layers of width 8 with 2 heads, an MLP of 32 and 10 words, on 4 tokens."""
    bench = load("predict")
    shape = Shape("small", 10, 8, 2, 2, 2, 32, gated=False, norm="layer", tied=True)
    parameters = 80 + 2 * (4 * 64 + 2 * 8 * 32 + 2 * 16) + 16
    assert shape.parameters == parameters
    eager, kept = Recipe(attention="eager"), Recipe(precision="bf16")
    layered = Recipe(checkpointing="per-layer")
    tokens, h = 4, 8
    ends = tokens * h + 4 * tokens * h + 4 * tokens * 10
    states = 16 * parameters
    assert (
        bench.korthikanti(shape, eager, 4, 1)
        == states + 2 * (34 * tokens * h + 5 * 2 * 4 * 4) + ends
    )
    assert bench.korthikanti(shape, layered, 4, 1) == states + 2 * 2 * tokens * h + ends
    assert bench.korthikanti(shape, kept, 4, 1) == 8 * parameters + 2 * 34 * tokens * h + ends
    assert bench.eleutherai(shape, layered, 4, 1) == states + 2 * 2 * tokens * h
    assert bench.eleutherai(shape, eager, 4, 1) == states + 2 * (34 * tokens * h + 5 * 2 * 4 * 4)
    activations = 2 * 34 * tokens * h + 8 * tokens + tokens * h + 2 * tokens * (10 + h)
    assert bench.megatron(shape, eager, 4, 1) == pytest.approx(18 * parameters + 1.05 * activations)


def test_the_benchmarks_shapes_are_the_courses(load):
    bench = load("predict")
    for name in ("Llama-2-7B", "Llama-2-70B"):
        assert Shape.from_config(bench.config_of(name), name) == SHAPES[name]
    assert 174e9 < Shape.from_config(bench.config_of("GPT-3"), "GPT-3").parameters < 176e9


def test_a_room_holds_what_its_kernels_hold_and_ends_with_the_last(load):
    classroom = load("classroom")
    found = classroom.room(2, ["kept = bytearray(b'1') * (64 << 20)", "import time; time.sleep(3)"])
    assert (
        found["held together, most"] >= 2 * 64 * 2**20
        and found["a resident set, most"] >= 64 * 2**20
    )
    assert 3 <= found["seconds of the lesson"]["first"] <= found["seconds of the lesson"]["last"]
    with pytest.raises(RuntimeError, match="kernel 0: division by zero in\n1 / 0"):
        classroom.room(1, ["1 / 0"])


def test_what_fits_which_card_adds_up_and_a_row_is_found_again(load):
    bench = load("fits")
    table = json.loads((ROOT / "benchmarks" / "results" / "fits.json").read_text(encoding="utf-8"))
    sizes = {card["name"]: card["nbytes"] for card in table["cards"]}
    rows = {(e["model"], e["card"], e["method"]): e for e in table["entries"]}
    assert set(rows) == set(itertools.product(table["models"], sizes, table["methods"]))
    for (model, card, method), e in rows.items():
        assert e["needs"] == sum(e["parts"].values()) == sizes[card] - e["spare"]
        assert e["fits"] == (e["spare"] >= 0) == (e["code"] is not None) == (e["why_not"] == "")
        larger = [
            rows[model, name, method]["fits"]
            for name, n in sizes.items()
            if n > sizes[card] + 2**28
        ]
        assert all(larger) or not e["fits"], (model, card, method)
    if (
        table["versions"]["transformers"] != transformers.__version__
        or table["versions"]["torch"] != torch.__version__
    ):
        pytest.skip("other versions than those of the table")
    asked = "SmolLM2-135M", "H100 80GB", "lora"
    assert bench.entries(asked[0], asked[1:2], asked[2:]) == [rows[asked]]
