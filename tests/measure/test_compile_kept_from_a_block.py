"""A script may take ``torch.compile`` inside a tracker's block and call it when that has ended."""

import subprocess
import sys

import pytest

BEGIN = """
import sys
import torch
from torch import nn
from gradmem_lib.measure.tracker import MemoryTracker

original = torch.compile
assert "torch._dynamo.eval_frame" not in sys.modules

def double(x):
    return 2 * x

def is_refused(compiled):
    try:
        compiled(torch.ones(3))
    except RuntimeError as error:
        return "is compiled with torch.compile" in str(error)
    return False

with MemoryTracker():
    from torch import compile
"""
AFTER_THE_BLOCK = """
assert torch.compile is original
compiled = compile(double, backend="eager")
assert compiled(torch.ones(3)).sum() == 6
assert torch.compile is original
from torch._dynamo import eval_frame
assert eval_frame._callback_from_stance.__module__ == eval_frame.__name__
"""
IN_ANOTHER_BLOCK = """
with MemoryTracker():
    assert is_refused(compile(double, backend="eager"))
assert torch.compile is original
assert compile(double, backend="eager")(torch.ones(3)).sum() == 6
"""
AS_A_DECORATOR_WITH_ARGUMENTS = """
    decorate = compile(backend="eager")
assert decorate(double)(torch.ones(3)).sum() == 6
with MemoryTracker():
    assert is_refused(decorate(double))
"""
WRAPPED_BY_THE_SCRIPT = """
    def logged(*args, **kwargs):
        return compile(*args, **kwargs)
    torch.compile = logged
assert torch.compile is logged  # the script's own, which the block leaves alone
assert torch.compile(double, backend="eager")(torch.ones(3)).sum() == 6
assert torch.compile is logged
"""
ONE_BLOCK_IN_ANOTHER = """
from gradmem_lib.compat.compiled import watch_compiled_calls
called = []
with watch_compiled_calls(called.append, run_eagerly=True):
    with watch_compiled_calls(called.append, run_eagerly=False):
        decorated = torch.compile(double, backend="eager")
        decorated(torch.ones(3))
        assert len(called) == 1
    decorated(torch.ones(3))
    assert len(called) == 2
decorated(torch.ones(3))
assert len(called) == 2
assert torch.compile is original
"""
PROGRAMS = {
    "after the block": AFTER_THE_BLOCK,
    "in another block": IN_ANOTHER_BLOCK,
    "as a decorator": AS_A_DECORATOR_WITH_ARGUMENTS,
    "one block in another": ONE_BLOCK_IN_ANOTHER,
    "wrapped by the script": WRAPPED_BY_THE_SCRIPT,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kept_compile_acts_only_while_a_block_runs(name):
    program = BEGIN + PROGRAMS[name]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
