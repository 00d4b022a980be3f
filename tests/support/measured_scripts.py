"""A text, run as a script is under ``gradmem run``, and what is said of it."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import NamedTuple

from gradmem_lib import diagnose
from gradmem_lib.measure.remedied_peak import peak_without
from gradmem_lib.run.tracking import ScriptMeter, ScriptTracker

START = """
import collections, copy, functools, gc, queue, threading, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
opt = torch.optim.SGD(net.parameters(), 0.1)
def step(x):
    out = net(x)
    opt.zero_grad()
    out.square().mean().backward()
    opt.step()
    return out
"""


class Said(NamedTuple):
    """What is said of a cause, in plain values that can be sent to another process."""

    name: str
    evidence: str  # with the holder
    remedy: str
    line: int  # of the script; 0 if none is known
    promised: int | None  # the peak with the remedy, at most


class Measured(NamedTuple):
    peak: int
    causes: list[Said]
    growing_graph: str


def measure(text: str, folder: Path) -> Measured:
    """Run a text as a script under `gradmem run`'s tracker."""
    file = folder / "script.py"
    file.write_text(START + text)
    module = types.ModuleType("script")
    module.__file__ = str(file)
    sys.modules["script"] = module
    code = compile(START + text, str(file), "exec")
    ScriptMeter.seconds_for_walks = 999  # nothing here may depend on the speed of the machine
    tracker = ScriptTracker(None)
    tracker.__enter__()
    ended_by = None
    try:
        exec(code, vars(module))
    except ZeroDivisionError as error:  # a script's own
        ended_by = error
    tracker.end(ended_by)
    gc.enable()
    found = diagnose(tracker)
    causes = []
    for cause in found.causes:
        line = cause.lines[0].line if cause.lines else 0
        promised = None if cause.stays is None else peak_without(cause, found.facts)[0]
        evidence = f"{cause.evidence} held by {cause.held}"
        causes.append(Said(cause.name, evidence, cause.remedy, line, promised))
    return Measured(found.peak.total, causes, tracker.growing_graph)
