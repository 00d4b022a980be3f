"""``gradmem run``: the script's output and exit status are its own, and there is a report."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

from gradmem_lib.__main__ import main
from gradmem_lib.measure.tracker import MemoryTracker

HERE = Path(__file__).parent
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
print(sys.argv[1:], __name__, os.path.basename(__file__), __spec__ and __spec__.name)
"""
# The name of a program, its last lines, and the exit status that they mean.
ENDS = {
    "end": ("", 0),
    "status": ("sys.exit(3)", 3),
    "chain": ("try:\n    model(1)\nexcept TypeError as e:\n    raise ValueError('own') from e", 1),
    "syntax": ("def broken(:", 1),
}
EARLY = """
import torch
model = torch.nn.Linear(64, 64)
scores = model(torch.randn(256, 64))
torch.nn.functional.cross_entropy(scores, torch.zeros(1))
"""
# An evaluation that fails has shown what it needs.
LATE = """
import torch
model, results = torch.nn.Linear(64, 64), []
with torch.no_grad():
    for _ in range(9):
        results.append(model(torch.randn(256, 64)))
results[9]
"""
RECIPE = """
from transformers import LlamaConfig, LlamaForCausalLM
from gradmem_lib import Recipe, make_trainer
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
rows = [{"input_ids": list(range(length))} for length in (5, 9, 7, 3)] * 4
trainer = make_trainer(model, Recipe(), batch_size=4, train_dataset=rows, progress=False)
trainer.train()
print(trainer.state.global_step, trainer.memory.peak.total > 0)
"""
COMPILES = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
whole = torch.compile(lambda x: model(x).relu(), fullgraph=True, backend="eager")
part = torch.compile(lambda x: model(x).sin(), backend="eager")
for _ in range(2):
    loss = (whole(torch.randn(4, 8)) + part(torch.randn(4, 8))).sum()
    loss.backward()
    print(loss.item(), model.weight.grad.sum().item())
"""
COND = """
loss = torch.cond(torch.ones(()) > 0, lambda x: model(x), lambda x: -model(x), (torch.ones(1, 8),))
loss.sum().backward()
"""
# A request that is refused, and given up, before the script begins.
RETRIES = f"""
import torch
try:
    torch.zeros(2**20)
except torch.OutOfMemoryError:
    pass
{TRAINS}
"""
FORKS = f"""{TRAINS}
if os.fork() == 0:
    print(model(torch.ones(1, 64)).shape)
else:
    os.wait()
"""
# What other scripts do, and the options of the run.
OTHERS = {
    "forks": (FORKS, []),
    "nothing": ("print('hello')", []),
    "early": (EARLY, []),
    "late": (LATE, []),
    "recipe": (RECIPE, ["--steps", "2"]),
    "compiles": (COMPILES, []),
    "cond": (COMPILES + COND, []),
    "retries": (RETRIES, ["--budget", "150 KiB"]),
}
RUN = ["-m", "gradmem_lib", "run"]
# Scripts as others write them, with the arguments that each is given.
SCRIPTS = {
    "mingpt_trainer.py": ["2"],
    "hf_trainer.py": [],
    "accelerate_peft.py": ["--cpu"],
    "word_language_model.py": ["--interrupt"],
}


def python(*words, folder):
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=os.environ, capture_output=True, text=True
    )


def test_a_script_prints_and_ends_as_without_it(tmp_path, interruptible):
    """In processes of their own: torch is not imported when the script begins."""
    places = "print(__file__, sys.path[0], before)\n"
    interrupt = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
    (tmp_path / "train.py").write_text(TRAINS + places + interrupt)
    alone = python("train.py", "--lr", "1", folder=tmp_path)
    measured = python(*RUN, "train.py", "--lr", "1", folder=tmp_path)
    assert measured.returncode == alone.returncode != 0
    assert measured.stdout == alone.stdout and "False" in alone.stdout
    assert measured.stderr.startswith(alone.stderr) and "KeyboardInterrupt" in alone.stderr
    assert "Ctrl-C ended the script" in measured.stderr
    assert "Bytes grow from step to step" in measured.stderr
    assert "train.py:10" in measured.stderr
    page = (tmp_path / "gradmem-train.html").read_text()
    assert "train.py:10" in page and "http://" not in page and len(page) < 3_000_000


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder with all runs, and their exit statuses."""
    if not hasattr(os, "fork"):
        pytest.skip("runs are forks")
    folder = tmp_path_factory.mktemp("runs")
    runs = {}

    def both(name, words, *options):
        runs[f"alone/{name}"] = words
        runs[f"measured/{name}"] = [*RUN, *options, *words]

    for name, (last, _) in ENDS.items():
        script = folder / f"{name}.py"
        script.write_text(f"{TRAINS}\n{last}\n")
        both(name, [str(script), "--lr", "1"])
    for name, arguments in SCRIPTS.items():
        both(name, [str(HERE / "scripts" / name), *arguments], "--out", "report.html")
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(f"from . import __name__ as outer\n{TRAINS}")
    both("-m package.inner", ["-m", "package.inner", "--lr", "1"])
    end = runs["alone/end"]
    two = ["--steps", "2", "--out", "two.html", "--snapshot", "two.pickle"]
    runs["steps"] = [*RUN, *two, *end]
    runs["budget"] = [*RUN, "--budget", "150 KiB", *end]
    for name, (code, options) in OTHERS.items():
        (folder / f"{name}.py").write_text(code)
        runs[name] = [*RUN, *options, str(folder / f"{name}.py")]
    runs["alone/compiles"] = [str(folder / "compiles.py")]
    done = subprocess.run(
        [sys.executable, HERE / "forked.py", folder],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def said(folder, name, stream):
    return (folder / name / stream).read_text()


@pytest.mark.parametrize("name", [*ENDS, "-m package.inner"])
def test_an_end_is_the_scripts_own(ran, name):
    folder, statuses = ran
    _, status = ENDS.get(name, ("", 0))
    measured = f"measured/{name}"
    assert statuses[measured] == statuses[f"alone/{name}"] == status
    assert said(folder, measured, "stdout") == said(folder, f"alone/{name}", "stdout")
    stderr = said(folder, measured, "stderr")
    if name == "syntax":
        assert stderr.startswith("  File ") and "SyntaxError" in stderr
        assert "nothing of torch was run" in stderr
    else:
        assert "Bytes grow from step to step" in stderr
    before, _, _ = stderr.partition("gradmem run ")
    assert "gradmem_lib" not in before.replace(str(folder), "")  # no frame of the library
    assert ("ValueError: own" in before) == (name == "chain")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_others_prints_and_ends_as_it_does_alone(ran, name):
    folder, statuses = ran
    measured = f"measured/{name}"
    stderr = said(folder, measured, "stderr")
    assert statuses[measured] == statuses[f"alone/{name}"] == 0, stderr
    assert said(folder, measured, "stdout") == said(folder, f"alone/{name}", "stdout") != ""
    assert "error of its own" not in stderr and "The peak is" in stderr
    page = (folder / measured / "report.html").read_text()
    assert len(page) < 3_000_000 and "http" not in page.replace("http-equiv", "")
    assert stderr.count("gradmem run ") == 1  # workers that load data write no report


def test_a_cause_is_found_with_its_line(ran):
    stderr = said(ran[0], "measured/hf_trainer.py", "stderr")
    script = (HERE / "scripts" / "hf_trainer.py").read_text().splitlines()
    number = script.index("    trainer.train()") + 1
    after = stderr.partition("\nAn evaluation collects its results: ")[2]
    assert f"at hf_trainer.py:{number}" in after.partition("Remedy")[0]


def test_after_the_given_steps_the_script_goes_on_alone(ran):
    folder, statuses = ran
    assert statuses["steps"] == 0
    assert said(folder, "steps", "stdout") == said(folder, "alone/end", "stdout")
    stderr = said(folder, "steps", "stderr")
    assert "2 optimizer steps" in stderr and "the script goes on" in stderr
    assert stderr.count("Report: ") == 1
    assert (folder / "steps" / "two.html").exists()


def test_a_budget_ends_the_script_where_a_card_of_that_size_would(ran):
    folder, statuses = ran
    assert statuses["budget"] == 1
    stderr = said(folder, "budget", "stderr")
    assert "BudgetExceeded: out of budget" in stderr
    assert "BudgetExceeded ended the script" in stderr
    assert (folder / "budget" / "gradmem-end.html").exists()
    # The moment is explained that has ended the script, not a higher one that it has survived.
    peaks = []
    for name in ("budget", "retries"):
        peaks += re.findall("^The peak is .*", said(folder, name, "stderr"), re.MULTILINE)
    assert len(peaks) == 2 and peaks[0] == peaks[1]


def test_a_script_that_fails_before_its_first_step_gets_no_advice(ran):
    folder, statuses = ran
    assert statuses["early"] == 1
    stderr = said(folder, "early", "stderr")
    assert "The peak is" in stderr and "Next: fix the error." in stderr
    page = (folder / "early" / "gradmem-early.html").read_text()
    for text in (stderr, page):
        assert "lower it" not in text and "Remedy" not in text
    assert "An evaluation collects its results" in said(folder, "late", "stderr")
    # a budget's error is about memory, at any time
    assert "fix the error" not in said(folder, "budget", "stderr")


def test_a_fork_and_a_script_without_torch_write_no_report(ran):
    folder, statuses = ran
    assert statuses["forks"] == 0
    assert "torch.Size([1, 8])" in said(folder, "forks", "stdout")
    assert said(folder, "forks", "stderr").count("Report: ") == 1
    assert statuses["nothing"] == 0
    assert "nothing of torch was run" in said(folder, "nothing", "stderr")
    assert not list((folder / "nothing").glob("*.html"))


def test_a_snapshot_is_what_pytorchs_own_tools_read(ran):
    folder, _ = ran
    with (folder / "steps" / "two.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    [trace] = snapshot["device_traces"]
    live, peak = {}, 0
    for event in trace:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
        else:
            assert live.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(live.values()))
    page = (folder / "steps" / "two.html").read_text()
    assert f"({peak:,} bytes)" in page
    assert live == {segment["address"]: segment["total_size"] for segment in snapshot["segments"]}
    assert "end.py" in {frame["filename"] for event in trace for frame in event["frames"]}
    assert f"{len(trace)} entries" in torch.cuda._memory_viz.trace(snapshot)
    assert "active_allocated" in json.dumps(snapshot)


def test_a_trainer_that_watches_itself_gives_way(ran):
    """What ``plan`` prints is measured by the command that it names, and trains to its end."""
    folder, statuses = ran
    assert statuses["recipe"] == 0
    assert "gradmem run recipe.py: 2 optimizer steps" in said(folder, "recipe", "stderr")
    assert said(folder, "recipe", "stdout").split()[-2:] == ["12", "True"]


ASKS_FIRST = """
import importlib.util
assert importlib.util.find_spec("torch") is not None
import torch
torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
"""


def test_a_script_that_asks_for_torch_before_it_imports_it_is_measured(tmp_path):
    """As transformers does, where it is the first import of a script."""
    (tmp_path / "asks.py").write_text(ASKS_FIRST)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "asks.py").write_text(ASKS_FIRST)
    for words, page in ((["asks.py"], "asks"), (["-m", "package.asks"], "package.asks")):
        measured = python(*RUN, *words, folder=tmp_path)
        assert measured.returncode == 0, measured.stderr
        assert "The peak by category" in measured.stderr
        assert (tmp_path / f"gradmem-{page}.html").exists()


def test_the_error_of_a_packages_own_import_is_shown(tmp_path):
    (tmp_path / "foobar").mkdir()
    (tmp_path / "foobar" / "__init__.py").write_text("import foob")
    measured = python(*RUN, "-m", "foobar.train", folder=tmp_path)
    assert measured.returncode == 1
    assert "No module named 'foob'" in measured.stderr


def test_compiled_functions_run_as_they_are_written(ran):
    folder, statuses = ran
    explained = said(folder, "compiles", "stderr")
    assert statuses["alone/compiles"] == statuses["compiles"] == 0, explained
    printed = said(folder, "alone/compiles", "stdout")
    assert said(folder, "compiles", "stdout") == printed != ""
    assert "was run uncompiled here" in explained


def test_cond_with_gradients_is_refused_in_a_sentence(ran):
    folder, statuses = ran
    assert statuses["cond"] == 1
    assert "gradmem run cannot measure torch.cond with gradients" in said(folder, "cond", "stderr")


RANKS = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.full((4 + 4 * rank, 32), float(rank + step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with open(f"{os.environ['NAMED']}{rank}", "w") as file:
    file.write(repr(loss.item()))
dist.destroy_process_group()
"""


def last_losses() -> list[float]:
    """The losses of the two ranks, computed in one process: they average their gradients."""
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        losses = []
        for rank in (0, 1):
            x = torch.full((4 + 4 * rank, 32), float(rank + step))
            loss = model(x).square().mean()
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_each_rank_has_a_report_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(RANKS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    monkeypatch.setenv("NAMED", "loss")
    measured = python(*launch, *RUN, "ranks.py", folder=tmp_path)
    assert measured.returncode == 0, measured.stderr
    expected = last_losses()
    assert expected[0] != expected[1]
    for rank in (0, 1):
        loss = float((tmp_path / f"loss{rank}").read_text())
        assert loss == pytest.approx(expected[rank], rel=1e-5)
        page = (tmp_path / f"gradmem-ranks.rank{rank}.html").read_text()
        assert "3 optimizer steps" in page and "DistributedDataParallel.module.weight" in page
    assert "error of its own" not in measured.stderr


LESSON = ROOT / "lessons" / "00_start_here.ipynb"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "needs a script"),
        (["run", "missing.py"], "missing.py: there is no such file"),
        (["run", str(LESSON)], f"Then: gradmem run {LESSON.with_suffix('.py')}"),
        (["run", "-m", "no_such_module_here"], "there is no such module"),
        (["run", "--out", "missing/r.html", "a.py"], "missing does not exist"),
        (["run", "--steps", "0", "a.py"], "is not a whole number of at least 1"),
        (["run", "--budget", "much", "a.py"], "cannot read 'much'"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(words, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        status = main(words)
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    assert says in capsys.readouterr().err.replace("\n", " ")
    assert MemoryTracker._running is None
    assert not list(tmp_path.iterdir())
