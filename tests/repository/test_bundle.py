"""The archive for a room without a network.

That it installs and runs, ``make bundle`` tries on each that it makes.
"""

from __future__ import annotations

import subprocess
import sysconfig
import zipfile

import bundle
import pytest

WHEELS = ["gradmem-0.1.0-py3-none-any.whl", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"]


@pytest.fixture
def archive(tmp_path):
    """A bundle of wheels without content."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in WHEELS:
        (wheels / name).write_text(name)
    bundle.pack(wheels, tmp_path / "room.zip")
    return tmp_path / "room.zip"


def test_it_holds_the_wheels_their_pins_and_a_two_line_install(archive):
    with zipfile.ZipFile(archive) as packed:
        inside = {name: packed.read(name).decode() for name in packed.namelist()}
    assert inside.keys() == {f"room/{name}" for name in ("README.txt", "requirements.txt")} | {
        f"room/wheels/{name}" for name in WHEELS
    }
    assert inside["room/requirements.txt"] == "gradmem==0.1.0\ntorch==2.13.0+cpu\n"
    said = inside["room/README.txt"]
    assert f"for {sysconfig.get_platform()} and Python {sysconfig.get_python_version()}:" in said
    commands = [line.split() for line in said.splitlines() if line.startswith("    ")]
    assert [line[1:3] for line in commands] == [["-m", "venv"], ["-m", "pip"], ["lab", "lessons"]]
    assert commands[1][1:] == bundle.INSTALL and "--no-index" in bundle.INSTALL


def test_one_that_does_not_install_is_an_error(archive, tmp_path, monkeypatch):
    """The environment is empty, and nothing in this one's settings may fill it."""
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    ran = []

    def run(command, *, cwd, env, check):
        ran.append(command)
        assert (
            check and cwd == tmp_path / "room" / "room" and str(bundle.OFFLINE) == env["PYTHONPATH"]
        )
        assert not {name for name in env if name.startswith("PIP_")} - {"PIP_CONFIG_FILE"}
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(bundle.venv, "create", lambda path, with_pip: path.mkdir())
    monkeypatch.setattr(bundle.subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        bundle.prove(archive, tmp_path / "room")
    assert ran == [(bundle.programs(str(tmp_path / "room" / "room" / "room"))[0], *bundle.INSTALL)]
