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


INSIDE_OF_COND = "cond.<locals>._cond_op_wrapper"  # the function that torch.cond compiles


@contextmanager
def watch_compiled_calls(notify: Callable[[str], None], *, run_eagerly: bool) -> Iterator[None]:
    """While the block runs, a call of a compiled function calls ``notify(its name)``.

    ``run_eagerly``: it then runs uncompiled. Otherwise ``notify`` has to raise an error.

    A compiled function asks ``torch._dynamo.eval_frame._callback_from_stance`` at each call what to
    do. What ``torch.cond`` compiles may run uncompiled under ``no_grad``. With gradients, the
    tensors that its branches close over would get none.
    """
    undo, compiler = ExitStack(), torch.compile

    def install() -> None:
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

    def compile_first(*args, **kwargs):
        torch.compile = compiler
        install()
        return compiler(*args, **kwargs)

    if "torch._dynamo.eval_frame" in sys.modules:
        install()
    else:  # the import takes seconds, and nothing can be compiled before it
        torch.compile = compile_first
        undo.callback(setattr, torch, "compile", compiler)
    with undo:
        yield
