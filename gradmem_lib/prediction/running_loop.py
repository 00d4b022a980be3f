"""A loop while a predicted step runs, and the loops that a step cannot have."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ..training.recipe import Recipe
from ..training.step import loss_of
from .loop import Loop


class RunningLoop:
    """A ``Loop`` while it runs. ``step`` calls ``loss`` and ``begin_part``."""

    def __init__(
        self,
        loop: Loop,
        model: nn.Module,
        optimizer: Optimizer | list[Optimizer],
        recipe: Recipe,
        user_loss: Callable[[nn.Module, Any], Tensor] | None,
        foreach: bool,
    ):
        self.loop, self.model, self.recipe, self.user_loss = loop, model, recipe, user_loss
        self.foreach = foreach  # whether the target's optimizers work on lists of tensors
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.keeps_gradients = loop.zero_grad != "after step"
        self._kept: Any = None  # what the loop's variable holds
        self._first = True  # whether the first micro-batch has not begun its backward
        if loop.keeps == "outputs":
            model.register_forward_hook(self._keep_output)

    def _keep_output(self, model: nn.Module, args: tuple, output: Any) -> None:
        self._kept = output

    def begin_part(self, part: str) -> None:
        """Called before a ``"forward"``, a ``"backward"`` and the optimizer's ``"step"``."""
        if self._first and self.loop.zero_grad == f"before {part}":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        if part == "step" and self.loop.clips:
            clip_grad_norm_(self.model.parameters(), 1.0, foreach=self.foreach)
        if part == "backward":
            self._first = False
        elif part == "step":
            self._first = True  # of the next step

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.user_loss is not None:
            value = self.user_loss(model, batch)
        else:
            value = loss_of(model, batch, self.recipe)
        if self.loop.keeps == "loss":
            self._kept = value
        return value


def check_loop(loop: Loop, recipe: Recipe) -> None:
    """Raise ``ValueError`` for a loop that this step cannot have."""
    if not isinstance(loop, Loop):
        raise TypeError(
            f"loop is {type(loop).__name__}: give a Loop, such as Loop(zero_grad='before forward')"
        )
    if recipe.in_backward and (loop.clips or loop.zero_grad != "after step"):
        raise ValueError(
            "in_backward=True steps and frees each gradient during backward, so that none is left "
            f"to clip or to keep, and the loop has clips={loop.clips}, "
            f"zero_grad={loop.zero_grad!r}: leave these out"
        )
