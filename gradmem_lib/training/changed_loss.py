"""A loss that the forwards of a window have changed, though no trained weight has changed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..compat.data_parallel import inside_wrapper
from ..techniques.data_parallel import Processes
from ..techniques.pieces import as_in_evaluation, rounding
from ..techniques.shared_statistics import batch_norms
from .items import forget, have_values
from .probe import loss_and_error
from .probe_rows import some_rows


class LossBeforeTheWindow:
    """Compares the loss of a few rows before the first window with their loss after it.

    No trained weight changes in a window. If the loss changes all the same, the window's forwards
    have changed what the loss reads: a queue of embeddings, a counter, an average of the weights.
    Then each micro-batch reads what those before it have left, and the full batch does not.

    Models with a ``BatchNorm`` are left out: its running averages change in each forward, but the
    loss reads them only in eval mode, in which it is computed here. They have a warning of their
    own.
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batches: Sequence[Any],
        loss_of: Callable,
        how: str,
        processes: Processes,
    ):
        self.model, self.loss_of = inside_wrapper(model), loss_of
        self.how, self.processes = how, processes
        self.limit = 0.0  # two losses are the same if they are so near, relative
        self.rows = None  # what is asked; None: nothing can be
        if have_values(self.model, micro_batches) and not batch_norms(self.model):
            self.rows = some_rows(micro_batches)
        self.before = self._loss()

    def _loss(self) -> float:
        """The loss of the rows now; not a number if nothing can be asked."""
        if self.rows is None:
            return math.nan
        with as_in_evaluation(self.model) as autocasts:
            loss, _ = loss_and_error(self.model, self.rows, self.loss_of)
            self.limit = rounding(self.model, autocasts)
        return loss

    def check(self) -> None:
        """Call this after the window, before the weights change. All processes call it together.

        Raises ``ValueError`` if the loss is another one.
        """
        after = self._loss()
        numbers = math.isfinite(self.before) and math.isfinite(after)
        differs = numbers and not math.isclose(self.before, after, rel_tol=self.limit)
        if self.processes.sums(differs)[0]:
            forget(self.model)  # ask again if it is tried again
            raise ValueError(
                "write what the model keeps (a queue, a counter, an average of weights) after "
                "optimizer.step(), outside of forward; or use accumulation=1 and no sharding: "
                f"{self.how} cuts the batch, and the forwards of the first window have changed the "
                f"loss of {type(self.model).__name__} from {self.before:.6g} to {after:.6g} on the "
                "same rows, though no trained weight has changed"
            )
