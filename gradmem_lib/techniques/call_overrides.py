"""Functions that run in place of a module's own call, and what refuses a second one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..compat.compiled import is_compiled
from ..compat.modules import call_override, override_call
from ..hf_names import LAYER_SWITCH

ALREADY_CHECKPOINTED = (
    "some of these layers, or parts of them, are checkpointed already, and with a second schedule "
    "on top they would run three times: call .remove() on the first one, or where it is "
    "transformers' own, model.activation_checkpointing_disable() "
    "(gradient_checkpointing_disable() before 5.23), and leave it out of the Trainer's arguments"
)


class CallOverride:
    """A function that runs in place of the call of ``module``, and recomputes it in backward."""

    module: nn.Module
    __call__: Callable[..., Any]

    def install(self, undo: ExitStack) -> None:
        undo.callback(override_call(self.module, self))


class Checkpoints(ExitStack):
    """Overrides of modules' calls, undone by ``.remove()`` or at the end of a ``with`` block."""

    def __init__(self, overrides: Iterable[Any]):
        """``overrides``: what has ``install(undo)``. None of it stays after an error."""
        super().__init__()
        with ExitStack() as undo:
            for override in overrides:
                override.install(undo)
            self.push(undo.pop_all())

    def remove(self) -> None:
        """Restore the modules' own forward. A second call does nothing."""
        self.close()


def refuse_checkpointed(layers: list[nn.Module]) -> None:
    """Raise ``RuntimeError`` if a layer, or a part of one, is checkpointed or compiled already."""
    for part in [part for layer in layers for part in layer.modules()]:
        # In a copy, the override is the part's own call, and no checkpoint.
        ours = isinstance(call_override(part), CallOverride)
        if ours or getattr(part, LAYER_SWITCH, False):
            raise RuntimeError(ALREADY_CHECKPOINTED)
    if any(is_compiled(layer) or isinstance(layer, torch.jit.ScriptModule) for layer in layers):
        raise RuntimeError(
            "a layer is compiled on its own (torch.compile, torch.jit), and compiled code bypasses "
            "the checkpoints: checkpoint the layers before you compile them, or do not compile them"
        )
