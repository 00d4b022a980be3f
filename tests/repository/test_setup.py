"""The files that set the course up agree with each other, and the Makefile's commands do what they
say.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from support.paths import ROOT

from gradmem_lib.course.material import models

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {*re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()}


def lines(name: str) -> list[str]:
    """The lines of a requirements file that are not comments."""
    return [
        line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")
    ]


def pins(*names: str) -> dict[str, str]:
    """Package -> the one version pinned in the requirements files ``names``."""
    pinned = [line.split("==") for name in names for line in lines(name) if line != "-e ."]
    return {package.lower(): version for package, version in pinned}


def test_every_declared_dependency_is_pinned_within_its_range():
    of_the_course = pins("requirements.txt")
    of_tests = pins("requirements.txt", "requirements-test.txt")
    wrong = []
    for declared, pinned in (
        (PROJECT["dependencies"], of_the_course),
        (EXTRAS["run"], of_the_course),
        (EXTRAS["course"], of_the_course),
        (EXTRAS["test"], of_tests),
    ):
        for requirement in map(Requirement, declared):
            if requirement.name == "gradmem":
                continue  # another extra, which stands in this table, too
            version = pinned.get(requirement.name)
            if version is None or version not in requirement.specifier:
                wrong.append(f"{requirement} is pinned to {version}")
    assert not wrong


def test_the_course_itself_installs_everything_that_is_pinned_for_it():
    ours = [*PROJECT["dependencies"], *EXTRAS["run"], *EXTRAS["course"]]
    brought_by_others = {"tokenizers", "ipykernel"}
    assert set(pins("requirements.txt")) - brought_by_others == {
        Requirement(line).name for line in ours
    } - {"gradmem"}


def test_the_model_package_is_the_one_that_the_library_names():
    assert lines("requirements-model.txt") == [models.WHEEL]


def test_conda_installs_the_same_and_says_the_last_step():
    text = (ROOT / "environment.yml").read_text()
    *rest, pip = [line.strip() for line in text.splitlines() if line.startswith(" ")]
    assert pip == "- -r requirements.txt", "pip takes everything from the one list of pins"
    assert f"- python{PROJECT['requires-python']}" in rest
    assert "pip install --no-deps -r requirements-model.txt" in text


def test_workflows_run_the_makefiles_targets():
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        called = re.findall(r"\bmake ([a-z]+)", workflow.read_text())
        assert called and TARGETS.issuperset(called), workflow.name


def test_the_parts_of_a_pull_requests_tests_are_all_tests():
    workflow = ROOT / ".github" / "workflows" / "pull_request.yml"
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    parts = " ".join(jobs["test"]["strategy"]["matrix"]["part"]).split()
    folders = {path.relative_to(ROOT).parts[1] for path in ROOT.glob("tests/*/**/test_*.py")}
    assert sorted(parts) == sorted(["solutions", *(f"tests/{name}" for name in folders)])


def test_what_github_reads_is_yaml_and_agrees_with_the_project():
    for path in [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
    windows = (ROOT / ".github" / "workflows" / "systems.yml").read_text()
    for command in re.findall(
        r"^(pip install [-\w.= ]*[\w.]) *(?:#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE
    ):
        assert command in windows, command


def test_help_names_every_target():
    assert {*re.findall(r'echo "make ([a-z]+) ', MAKEFILE)} == TARGETS - {"help", "browser"}


# The Makefile, with stand-ins for what takes minutes.

STAND_IN = """#!/bin/sh
echo "$0 $*" >> "{log}"
case "$*" in {failing}) exit 1;; esac
"""


@pytest.fixture
def course(tmp_path):
    """A copy of the Makefile with an environment that only writes down how it is called."""
    for name in (
        "Makefile",
        "requirements.txt",
        "requirements-model.txt",
        "requirements-test.txt",
        "pyproject.toml",
    ):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "calls").write_text("")
    return tmp_path


def make(course: Path, *arguments: str, failing: str = "nothing", **environment: str):
    """Run make there, each call that matches ``failing`` failing; returns the process and the calls
    of Python.
    """
    (course / "calls").write_text("")
    for name in ("python", "lint-imports"):
        program = course / ".venv" / "bin" / name
        program.write_text(STAND_IN.format(log=course / "calls", failing=failing))
        program.chmod(0o755)
    told = "MAKE|MFLAGS|CI$|DISPLAY|WAYLAND|SSH|(INSTALL|PYTHON|TORCH_FLAGS|WORKERS|MODULE|TESTS)$"
    clean = {k: v for k, v in os.environ.items() if not re.match(told, k)}
    done = subprocess.run(
        [shutil.which("make"), *arguments],
        cwd=course,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, [line.partition(" ")[2] for line in (course / "calls").read_text().splitlines()]


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed here")


@needs_make
def test_the_first_run_installs_in_order_and_the_second_nothing(course):
    done, calls = make(course, "lab", DISPLAY=":0")
    assert done.returncode == 0, done.stderr
    assert [call for call in calls if "pip" in call] == [
        "-m pip install torch==2.13.0",
        "-m pip install -r requirements.txt",
        "-m pip install --no-deps -r requirements-model.txt",
    ]
    _, calls = make(course, "lab", DISPLAY=":0")
    assert calls == ["-m gradmem_lib lab gradmem-lessons"]


@needs_make
def test_what_failed_and_changed_pins_are_installed(course):
    done, _ = make(course, "lab", failing="*--no-deps*")
    assert done.returncode != 0
    assert "-m pip install --no-deps -r requirements-model.txt" in make(course, "lab")[1]
    stamp = course / ".venv" / ".ready-to-learn"
    os.utime(stamp, (stamp.stat().st_mtime - 100,) * 2)
    (course / "requirements.txt").touch()
    assert "-m pip install -r requirements.txt" in make(course, "lab")[1]


ALWAYS = ("ruff check", "ruff format --check", "--no-logo", "build_notebooks.py --check", "-m mypy")
STEPS = {"check": (*ALWAYS, "--quick tests"), "test": (*ALWAYS, "--nbval ")}


@needs_make
@pytest.mark.parametrize("target", STEPS)
def test_every_step_runs_and_the_target_fails_if_one_does(course, target):
    done, calls = make(course, target)
    assert done.returncode == 0 and "All of it passed." in done.stdout
    ran = sorted(call for call in calls if "pip" not in call)  # two of them at the same time
    for step in STEPS[target]:
        assert any(step in call for call in calls), step
        done, with_failure = make(course, target, failing=f"*{step.replace(' ', '?')}*")
        assert done.returncode != 0 and "Failed:" in done.stdout, step
        assert sorted(with_failure) == ran, step


@needs_make
def test_one_pool_of_workers_runs_library_and_solutions(course):
    _, calls = make(course, "test", "WORKERS=3")
    pools = [call for call in calls if "-m pytest" in call]
    assert len(pools) == 1 and "-n 3" in pools[0] and pools[0].endswith("tests solutions --turns")


@needs_make
@pytest.mark.parametrize(
    ("more", "installs"), [((), False), (("INSTALL=1",), True)], ids=["alone", "told to"]
)
def test_system_packages_are_installed_only_when_told_to(course, tmp_path, more, installs):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("apt-get", "id"):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/system"; echo 0\n')
        (tools / name).chmod(0o755)
    for name in ("sh", "touch", "grep", "sed", "printf"):
        (tools / name).symlink_to(shutil.which(name))
    done, _ = make(course, "test", *more, failing="*playwright*", PATH=str(tools))
    assert done.returncode != 0 and "make test INSTALL=1" in done.stdout
    asked = (tmp_path / "system").read_text() if (tmp_path / "system").exists() else ""
    assert ("apt-get install -y chromium" in asked) == installs


@needs_make
def test_an_old_python_is_named_with_what_to_do(course):
    shutil.rmtree(course / ".venv")
    old = course / "python-old"
    as_if = "import sys; sys.version_info = (3, 9, 2); $2"
    old.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo Python 3.9.2;; -c) exec {sys.executable} -c '
        f'"{as_if}";; esac\n'
    )
    old.chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not re.match("MAKE|MFLAGS", k)}
    done = subprocess.run(
        ["make", "lab", f"PYTHON={old}"],
        cwd=course,
        env=clean,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stdout and "is Python 3.9.2" in done.stdout
    assert "make PYTHON=python3.12 lab" in done.stdout
    assert not (course / ".venv").exists()
