"""Runs programs one after the other, each in a fork of this process, where torch is imported.

    python forked.py FOLDER < runs.json

``runs.json`` has a list of runs: name, and the words after ``python``. Each run has a folder of its
own, with its ``stdout`` and ``stderr``. The exit statuses are printed as JSON. A fork saves the
seconds that importing torch and transformers takes.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import peft  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401
from transformers import Trainer  # noqa: F401


def run(words: list[str]) -> None:
    """What ``python words`` does."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def status_of(words: list[str], folder: Path) -> int:
    folder.mkdir(parents=True)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    code = 1
    try:
        run(words)
        code = 0
    except SystemExit as leave:
        code = leave.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    runs = json.load(sys.stdin)
    root = Path(sys.argv[1])
    statuses = {name: status_of(words, root / name) for name, words in runs.items()}
    print(json.dumps(statuses))
