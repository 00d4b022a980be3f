"""The doctor's findings, one by one with made-up facts, then the whole of it and the command line
as they are here.
"""

from __future__ import annotations

import importlib.abc
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from support.paths import ROOT

from gradmem_lib import __main__ as command
from gradmem_lib.course.material import models
from gradmem_lib.course.setup import doctor
from gradmem_lib.units import GiB


def test_python_must_be_new_enough():
    assert doctor.python_version((3, 11, 0)).state == "ok"
    old = doctor.python_version((3, 10, 14))
    assert (old.state, old.what) == (
        "missing",
        "Python 3.10.14 is too old",
    ) and "3.11" in old.advice


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [
        ("2.13.0+cpu", "ok", "torch 2.13.0+cpu"),
        ("2.14.0.dev1", "ok", "torch 2.14.0.dev1"),
        ("2.10.1", "missing", "torch 2.10.1, but the course needs >=2.11"),
        (None, "missing", "torch is not installed"),
    ],
)
def test_a_package_is_held_to_its_range(version, state, words):
    finding = doctor.package("torch", version, SpecifierSet(">=2.11"))
    assert (finding.state, finding.what) == (state, words)
    assert ("pip install" in finding.advice) == (state != "ok")


def test_packages_are_those_that_the_library_declares(monkeypatch):
    declared = ["torch>=2.11", "no-such-package-here>=1", 'pytest>=1; extra == "test"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: declared)
    assert [(finding.state, finding.what.split()[0]) for finding in doctor.packages()] == [
        ("ok", "torch"),
        ("missing", "no-such-package-here"),
    ]


def test_without_the_library_installed_the_advice_is_to_install_all(monkeypatch):
    def unknown(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", unknown)
    (finding,) = doctor.packages()
    assert finding.state == "missing" and "make lab" in finding.advice


class Absent(importlib.abc.MetaPathFinder):
    """Nothing can be imported that is named here, though pip may know it."""

    def __init__(self, *names: str):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", ["platformdirs", "psutil", "packaging", "numpy", "filelock"])
def test_what_is_missing_is_listed_and_nothing_is_said_that_it_would_tell(name, monkeypatch):
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Absent(name), *sys.meta_path])
    monkeypatch.setattr(doctor, "_device", lambda: [])
    found = doctor.examine()
    assert [f.what for f in found if f.state == "missing" and f.what.startswith(name)]
    assert not [f for f in found if "0 B" in f.what]


COMMANDS = [
    ("doctor", 1, "nor are torch, transformers, numpy"),
    ("explain CUDA out of memory. Tried to allocate 2.00 GiB", 0, "Type next"),
    ("plan GPT-2 --card 8GiB --seq-len 8 --global-batch 1", 2, "pip install -e ."),
    ("progress", 2, 'pip install -e ".[course]"'),
]


@pytest.mark.parametrize(("words", "code", "said"), COMMANDS, ids=lambda each: str(each)[:8])
def test_a_bare_python_answers_or_says_what_is_missing(words, code, said, tmp_path):
    alone = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "COLUMNS": "200"}
    call = [sys.executable, "-S", "-m", "gradmem_lib", *words.split()]
    done = subprocess.run(call, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_another_notebook_program_will_do():
    assert doctor.jupyterlab("4.6").state == "ok"
    assert doctor.jupyterlab(None).state == "warn"


class Card:
    name, total_memory = "Some Card", 24 * GiB


@pytest.mark.parametrize(
    ("cuda", "mps", "words"),
    [
        (True, False, "CUDA: Some Card with 24.00 GiB, Some Card with 24.00 GiB"),
        (False, True, "an Apple GPU, which the course does not use"),
        (
            False,
            False,
            "no CUDA card: everything in the course runs on the CPU, with real byte counts",
        ),
    ],
)
def test_the_card_is_named_or_said_not_to_be_needed(monkeypatch, cuda, mps, words):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    finding = doctor.device()
    assert finding.state == "ok" and words in finding.what


def test_a_torch_that_does_not_start_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = doctor.device()
    assert finding.state == "missing" and "torch does not start" in finding.what and finding.advice


@pytest.mark.parametrize(
    ("machine", "capability", "slow"),
    [
        ("x86_64", "AVX2", True),
        ("AMD64", "DEFAULT", True),
        ("x86_64", "AVX512", False),
        ("arm64", "DEFAULT", False),  # the names of its instructions say nothing about bf16
        ("aarch64", "SVE256", False),
    ],
)
def test_a_processor_without_avx_512_is_said_to_be_slow_in_bf16(machine, capability, slow):
    finding = doctor.processor(machine, capability)
    assert (finding is not None) == slow
    assert not slow or (finding.state == "warn" and capability in finding.what and finding.advice)


def test_the_list_says_that_bf16_is_slow_here(monkeypatch):
    import torch

    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert any("not AVX-512" in finding.what for finding in doctor.examine())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not any("not AVX-512" in finding.what for finding in doctor.examine())


def test_memory_is_held_against_what_training_smollm2_keeps():
    model, _ = models.smollm2()
    assert (
        4 * sum(p.numel() * p.element_size() for p in model.parameters()) == doctor.SMOLLM2_RESIDENT
    )
    assert doctor.memory(8 * GiB).state == "ok"
    little = doctor.memory(GiB)
    assert (
        little.state == "warn"
        and "1.00 GiB of memory free" in little.what
        and "2.00 GiB" in little.what
    )


@pytest.mark.parametrize(
    ("status", "writable", "free", "state", "words"),
    [
        ("ready", False, 0, "ok", "is unpacked in"),
        ("installed", True, 2 * GiB, "ok", "its first use unpacks it into"),
        ("installed", False, 2 * GiB, "missing", "cannot be written"),
        ("installed", True, GiB // 2, "missing", "has less than 1 GiB free"),
        ("missing", True, 2 * GiB, "missing", "is not installed"),
    ],
)
def test_smollm2_is_there_or_how_to_get_it(status, writable, free, state, words):
    finding = doctor.smollm2(status, "~/cache", writable=writable, free=free)
    assert finding.state == state and words in finding.what
    if state == "missing":
        remedy = models.INSTALL_COMMAND if status == "missing" else "GRADMEM_CACHE"
        assert remedy in finding.advice


def test_a_progress_file_that_cannot_be_written_is_a_limit_only():
    assert doctor.progress_file("~/p.json", writable=True).state == "ok"
    finding = doctor.progress_file("~/p.json", writable=False)
    assert finding.state == "warn" and "GRADMEM_PROGRESS" in finding.advice


def test_places_are_shown_without_the_name_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("GRADMEM_CACHE", raising=False)
    assert doctor.shown(Path.home() / "cache", "GRADMEM_CACHE") == str(Path("~", "cache"))
    assert doctor.shown(Path("/elsewhere"), "GRADMEM_CACHE") == str(Path("/elsewhere"))
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path))
    assert doctor.shown(tmp_path, "GRADMEM_CACHE") == "the place that GRADMEM_CACHE names"


def test_what_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert doctor.can_write(tmp_path / "new" / "folder" / "p.json")
    assert doctor.can_write(tmp_path / "file")
    assert not doctor.can_write(tmp_path / "file" / "p.json"), "a file is no folder"
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert not doctor.can_write(tmp_path / "p.json")


def test_the_report_gives_the_advice_below_and_a_verdict():
    findings = [
        doctor.Finding("ok", "this"),
        doctor.Finding("warn", "that", "do so"),
        doctor.Finding("missing", "it", "get it"),
    ]
    assert doctor.report(findings).splitlines() == [
        "ok       this",
        "warn     that",
        "         -> do so",
        "missing  it",
        "         -> get it",
        "",
        "To fix before the course can run: 1.",
    ]
    assert not doctor.can_run(findings) and doctor.can_run(findings[:2])
    assert doctor.report(findings[:2]).endswith("The course can run here.")


def test_the_notebook_form_prints_the_same(capsys):
    assert doctor.doctor() is None
    assert capsys.readouterr().out.splitlines()[0].startswith("ok       Python 3.")


@pytest.mark.parametrize("runs", [True, False])
def test_the_exit_code_says_whether_the_course_can_run(monkeypatch, capsys, runs):
    monkeypatch.setattr(
        doctor, "examine", lambda: [doctor.Finding("ok" if runs else "missing", "all")]
    )
    assert command.main(["doctor"]) == (0 if runs else 1)
    assert "all" in capsys.readouterr().out


def test_progress_is_shown_and_forgotten(capsys):
    from gradmem_lib.course.learner import progress

    progress.record_check("0.1", "passed")
    assert command.main(["progress"]) == 0
    assert "1 of 1   all passed" in capsys.readouterr().out
    assert command.main(["progress", "--reset"]) == 0
    assert "cleared" in capsys.readouterr().out
    assert progress.load()["checks"] == {}


def test_progress_that_cannot_be_forgotten_is_a_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GRADMEM_PROGRESS", str(tmp_path))
    assert command.main(["progress", "--reset"]) == 1
    said = capsys.readouterr().err
    assert "could not clear" in said and "GRADMEM_PROGRESS" in said


def test_the_command_line_from_outside(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gradmem_lib", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "doctor" in done.stdout and "progress" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "gradmem_lib", "docter"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "doctor" in done.stderr
