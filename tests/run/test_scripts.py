"""Scripts as others write them: under ``gradmem run`` each prints and ends as it does alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = {  # with the arguments that each is given
    "mingpt_trainer.py": ["2"],
    "hf_trainer.py": [],
    "accelerate_nlp.py": ["--cpu"],
    "lightning_loop.py": [],
    "diffusion_train.py": [],
    "word_language_model.py": ["--interrupt"],
    "peft_lora.py": [],
}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forks")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder with all runs, and their exit statuses."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {}
    for name, arguments in SCRIPTS.items():
        words = [str(HERE / "scripts" / name), *arguments]
        runs[f"alone/{name}"] = words
        runs[f"measured/{name}"] = ["-m", "gradmem_lib", "run", "--out", "report.html", *words]
    done = subprocess.run(
        [sys.executable, HERE / "forked.py", folder],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_and_ends_as_it_does_alone(ran, name):
    folder, statuses = ran
    alone, measured = folder / "alone" / name, folder / "measured" / name
    stderr = (measured / "stderr").read_text()
    assert statuses[f"measured/{name}"] == statuses[f"alone/{name}"] == 0, stderr
    assert (measured / "stdout").read_text() == (alone / "stdout").read_text() != ""
    assert "error of its own" not in stderr and "The peak is" in stderr
    page = (measured / "report.html").read_text()
    assert len(page) < 3_000_000 and "http" not in page.replace("http-equiv", "")
    assert stderr.count("gradmem run ") == 1  # workers that load data write no report


@pytest.mark.parametrize(
    ("name", "cause", "text"),
    [
        ("lightning_loop.py", "Bytes grow from step to step", "loss = F.mse_loss(x_hat, x, red"),
        ("hf_trainer.py", "An evaluation collects its results", "trainer.train()"),
        ("diffusion_train.py", "A second model is in memory", "nn.Conv2d(64, 256, 3, padding=1)"),
    ],
)
def test_a_cause_is_found_with_its_line(ran, name, cause, text):
    stderr = (ran[0] / "measured" / name / "stderr").read_text()
    script = (HERE / "scripts" / name).read_text().splitlines()
    number = next(n for n, line in enumerate(script, start=1) if text in line)
    after = stderr.partition(f"\n{cause}: ")[2]
    assert f"at {name}:{number}" in after.partition("Remedy")[0]
