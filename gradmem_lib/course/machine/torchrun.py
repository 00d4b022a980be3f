"""Several processes on this machine, started as ``torchrun`` starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from .course_files import IMPORT_ROOT
from .run_ranks import loopback_only

# A process that ends well exits like a rank of run_ranks, for the same reason. All exit with the
# kernel, which holds the only other end of their standard input.
_START = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
runpy.run_path({!r}, run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def torchrun(script: str, processes: int = 2, *, seconds: float = 240) -> str:
    """Run a Python ``script`` (its text) in several processes on this machine, as ``torchrun``
    does. Returns what it printed.

    They communicate only over the loopback address. Raises ``RuntimeError`` with the last lines of
    the errors if one fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = filter(None, (str(IMPORT_ROOT), os.environ.get("PYTHONPATH")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    env |= loopback_only()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as kept:
        line, ours = os.pipe()
        kept.callback(os.close, ours)
        kept.callback(os.close, line)
        path, start = Path(folder) / "script.py", Path(folder) / "start.py"
        path.write_text(script, encoding="utf-8")
        start.write_text(_START.format(str(path)), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={processes}",
            "--nnodes=1",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            str(start),
        ]
        done = subprocess.run(
            command, env=env, stdin=line, capture_output=True, text=True, timeout=seconds
        )
    if done.returncode:
        raise RuntimeError(f"one of the {processes} processes failed:\n{done.stderr[-30000:]}")
    return done.stdout
