"""The benchmarks' own arithmetic, and the run on a card as far as it goes without one."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.nightly import ALL, each
from support.paths import ROOT
from transformers import LlamaConfig

from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.model.inputs import example_batch
from gradmem_lib.names import CATEGORIES, OPTIMIZERS, PRECISIONS
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step

# Whatever a plain checkout on a machine with torch and transformers may lack.
BARE = """
import runpy, sys
class Lacking:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in {absent}
        return None if absent else self.finder.find_spec(name, path, target)
installed = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.meta_path = [Lacking(finder) for finder in installed]
sys.path.insert(0, {folder!r})
for sys.argv in {scripts}:
    try:
        runpy.run_path({folder!r} + "/" + sys.argv[0], run_name="__main__")
    except SystemExit as left:
        assert not left.code, sys.argv
"""
ABSENT = (
    "anywidget",
    "ipywidgets",
    "traitlets",
    "IPython",
    "ipykernel",
    "matplotlib",
    "platformdirs",
    "gguf",
    "psutil",
    "accelerate",
    "peft",
    "nbformat",
    "jupytext",
    "pytest",
    "hypothesis",
)


def from_a_plain_checkout(folder: Path, *scripts: list[str]) -> str:
    """What ``scripts`` with their arguments print there, one after the other; all must end well."""
    code = BARE.format(absent=ABSENT, folder=str(ROOT / "benchmarks"), scripts=scripts)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    assert len({r.checkpointing for r in recipes}) >= 4
    for case in cases:
        config = gpu.config_of(case.model, tiny=False)
        limit = getattr(config, "max_position_embeddings", None)
        assert limit is None or case.seq_len <= limit, case


def test_without_a_card_it_says_so_and_writes_nothing(gpu, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert "No CUDA card here" in capsys.readouterr().out and not list(tmp_path.iterdir())


def written() -> dict[Path, int]:
    """The records, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks/results").iterdir()}


def test_dry_runs_from_a_plain_checkout_are_as_predicted_and_write_nothing(tmp_path):
    before = written()
    only = each(2, ["vit 32x", "llama-7b", "qwen3 8x1024", "gqa 4x1024", "adamw-8bit"])
    dry = "--dry-run"
    printed = from_a_plain_checkout(
        tmp_path,
        ["gpu_predict.py", dry, "--only", *only],
        ["optimizers.py", dry, "--steps", "1"],
        ["recompute_or_move.py", dry, "--rounds", "1", "--settings", "chain", "full"],
    )
    measured = 6 if ALL else 3
    assert f"{measured} measured, 0 left out, 0 failed" in printed
    assert f"0 of {measured} not as predicted, to the byte" in printed
    assert printed.count(" states ") == 10 and "muon" in printed
    assert printed.count("time / none") == 9 + 11
    assert written() == before
    assert not list(tmp_path.iterdir())


def test_what_a_quantized_model_is_built_from_never_was_larger(gpu):
    """No matrix of the base in 16 bits at any time, and a loss that is a number."""
    recipe = Recipe(precision="bf16", lora_rank=16, quantized_base=True, chunked_loss=True)
    config = LlamaConfig(**gpu.TINY, tie_word_embeddings=True)
    with MemoryTracker(live=False) as tracker:
        run = gpu.built(config, recipe, "cpu")
    assert run.model.lm_head.weight is run.model.model.embed_tokens.weight
    kept = sum({p.untyped_storage().data_ptr(): p.nbytes for p in run.model.parameters()}.values())
    assert tracker.peak.total < 1.1 * kept + 4096
    batch = example_batch(run.model, 4, 16)
    assert torch.isfinite(step(run.model, run.optimizer, batch, recipe))
    run.undo.close()


def test_an_error_is_a_result(gpu):
    case, config = gpu.Case("llama", 2, 16), LlamaConfig(**gpu.TINY)
    place = gpu.DryRun()
    found = gpu.outcome(lambda: gpu.trained(case, config, place, deadline=0.0))
    assert "left out" in found

    def breaks():
        raise ValueError("no such thing\nat all")

    assert gpu.outcome(breaks) == {"error": "ValueError: no such thing"}


MEASURED = {"allocated": 1010, "reserved": 2500, "between steps": 10}


def run_pretended(gpu, monkeypatch, *arguments, total=2**40, first=None) -> int:
    """On a card of ``total`` bytes whose allocator counts one part in a hundred more than
    predicted. ``first``: what the first case finds instead.
    """
    place = SimpleNamespace(tiny=True, target="cpu", total=total)
    place.left, place.clear = lambda: 10, lambda: None
    found = iter([first or MEASURED])
    monkeypatch.setattr(gpu, "place_of", lambda dry: place)
    monkeypatch.setattr(gpu, "trained", lambda *asked: next(found, MEASURED))

    def predicted(case, config, place):
        return {"tensors": 1000, "allocated": 1000 + case.rows, "reserved": 2000}

    monkeypatch.setattr(gpu, "predicted", predicted)
    return gpu.main(list(arguments))


def test_what_is_written_and_printed(gpu, monkeypatch, tmp_path, capsys):
    assert run_pretended(gpu, monkeypatch) == 0
    written = json.loads((tmp_path / "gpu_predict.json").read_text())
    assert {"device", "torch", "transformers", "date"} <= set(written["where"])
    assert len(written["cases"]) == written["summary"]["measured"] == len(gpu.cases())
    one = written["cases"][0]
    assert one["error %"] == {
        "allocated": round(100 * (1004 / 1010 - 1), 4),
        "tensors": 0.0,
        "reserved": -20.0,
    }
    assert "reserved: median error 20.0 %, largest 20.0 %" in capsys.readouterr().out


def test_one_that_fails_is_written_down_and_the_next_begins(gpu, monkeypatch, tmp_path, capsys):
    run_pretended(gpu, monkeypatch, first={"out of memory": "full"})
    cases = json.loads((tmp_path / "gpu_predict.json").read_text())["cases"]
    assert cases[0]["out of memory"] == "full" and "error %" in cases[1]
    assert "1 failed" in capsys.readouterr().out


def test_what_does_not_fit_is_left_out_and_time_is_kept(gpu, monkeypatch, tmp_path, capsys):
    run_pretended(gpu, monkeypatch, total=500)
    cases = json.loads((tmp_path / "gpu_predict.json").read_text())["cases"]
    assert all("the card has 500 B" in case["left out"] for case in cases)
    run_pretended(gpu, monkeypatch, "--seconds", "-1")
    assert f"{len(cases)} of {len(cases)} cases were not begun" in capsys.readouterr().out


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
    assert calls == [f"{python} benchmarks/gpu_predict.py"]


def test_a_figure_is_the_median_of_the_ratios_within_a_round(load):
    shared = load("shared")
    clock = iter([1, 3, 10, 20, 2, 20])  # of two variants, in three rounds
    turns = shared.in_turns({name: lambda: next(clock) for name in ("one", "other")}, 3)
    assert shared.ratio(turns, "other", "one") == 3 and shared.ratio(turns, "one", "one") == 1


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
        assert e["recipe"] and e["us_per_token"] > 0 and set(e["parts"]) & set(CATEGORIES)
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
