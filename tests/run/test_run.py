"""``gradmem run``: the script's output and exit status are its own, and there is a report."""

import os
import subprocess
import sys

import pytest

TRAINS = """
import os, sys
before = "torch" in sys.modules
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(6):
    loss = model(torch.randn(256, 64)).square()
    kept.append(loss)  # the leak
    optimizer.zero_grad()
    loss.mean().backward()
    optimizer.step()
    print(step, loss.mean().item())
print(sys.argv[1:], __name__, __file__, sys.path[0], __spec__, before)
"""
ENDS = {"": 0, "sys.exit(3)": 3, "raise ValueError('own')": 1}


def python(*words, folder):
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=os.environ, capture_output=True, text=True
    )


@pytest.mark.parametrize("end", ENDS, ids=["to its end", "a status", "an error"])
def test_a_script_prints_and_ends_as_without_it(tmp_path, end):
    (tmp_path / "train.py").write_text(f"{TRAINS}\n{end}\n")
    alone = python("train.py", "--lr", "1", folder=tmp_path)
    measured = python("-m", "gradmem_lib", "run", "train.py", "--lr", "1", folder=tmp_path)
    assert measured.returncode == alone.returncode == ENDS[end]
    assert measured.stdout == alone.stdout and "5 " in alone.stdout
    assert measured.stderr.startswith(alone.stderr)
    assert "Bytes grow from step to step" in measured.stderr
    assert "train.py:10" in measured.stderr
    page = (tmp_path / "gradmem-train.html").read_text()
    assert "train.py:10" in page and "http://" not in page and len(page) < 3_000_000
