"""What torch.compile has compiled, and when a compiled function is called."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn


def runs_eagerly() -> bool:
    """Whether the program has switched compilation off, so that compiled functions run as written:
    ``torch.compiler.set_stance("force_eager")``, or ``TORCH_COMPILE_DISABLE=1``.
    """
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    return eval_frame.config.disable or eval_frame._stance.stance == "force_eager"


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` has compiled it."""
    if runs_eagerly():
        return False
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or type(module).__name__ == "OptimizedModule"


# What blocks that run have still to begin, at the first call of torch.compile.
_waiting: list[Callable[[], None]] = []

INSIDE_OF_COND = "cond.<locals>._cond_op_wrapper"  # the function that torch.cond compiles


@contextmanager
def watch_compiled_calls(notify: Callable[[str], None], *, run_eagerly: bool) -> Iterator[None]:
    """While the block runs, a call of a compiled function calls ``notify(its name)``.

    ``run_eagerly``: it then runs uncompiled. Otherwise ``notify`` has to raise an error.
    """
    undo, compiler = ExitStack(), torch.compile

    def begin() -> None:
        _watch_stance(notify, run_eagerly, undo)

    def compile_first(*args, **kwargs):
        # `from torch import compile` may outlive the block: it begins what waits now, if anything
        while _waiting:
            _waiting.pop(0)()  # the outermost block first
        return compiler(*args, **kwargs)

    def stop_waiting() -> None:
        if begin in _waiting:
            _waiting.remove(begin)
        if torch.compile is compile_first:  # and not a function that the script has put there
            torch.compile = compiler

    if "torch._dynamo.eval_frame" in sys.modules:
        begin()
    else:  # the import takes seconds, and nothing can be compiled before it
        _waiting.append(begin)
        torch.compile = compile_first
        undo.callback(stop_waiting)
    with undo:
        yield


def _watch_stance(notify: Callable[[str], None], run_eagerly: bool, undo: ExitStack) -> None:
    """Begin to watch what compiled functions ask, until ``undo`` is closed.

    A compiled function asks ``torch._dynamo.eval_frame._callback_from_stance`` at each call what to
    do. What ``torch.cond`` compiles may run uncompiled under ``no_grad``. With gradients, the
    tensors that its branches close over would get none.
    """
    eval_frame: Any = import_module("torch._dynamo.eval_frame")
    before = eval_frame._callback_from_stance
    switched_off = runs_eagerly()  # by the program itself
    if run_eagerly and not switched_off:
        undo.enter_context(torch.compiler.set_stance("force_eager"))

    def callback_from_stance(callback):
        if run_eagerly:
            skipped = switched_off
        else:
            skipped = runs_eagerly()
        if callback is None or callback is False or skipped:
            return before(callback)
        name = getattr(sys._getframe(1).f_locals.get("fn"), "__qualname__", "a function")
        if name != INSIDE_OF_COND or torch.is_grad_enabled():
            notify(name)
        return None

    eval_frame._callback_from_stance = callback_from_stance
    undo.callback(setattr, eval_frame, "_callback_from_stance", before)
