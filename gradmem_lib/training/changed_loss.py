"""What is asked before the first window in pieces, and after it: whether the window's forwards have
changed the loss, though no trained weight has changed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..compat.data_parallel import inside_wrapper
from ..techniques.asking import asking_loss
from ..techniques.data_parallel import Processes
from ..techniques.shared_statistics import batch_norms
from .item_rules import Rule
from .items import find_rule, forget, have_values
from .losses import usual_rule
from .probe_rows import some_rows

# The keys of ``find_rule`` with which a model has been through a window.
_checked: WeakKeyDictionary[nn.Module, set] = WeakKeyDictionary()


def ask_before_window(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_of: Callable,
    *,
    how: str,
    items: Any,
    key: Any,
    processes: Processes,
    weights_stay: bool = True,
) -> tuple[Rule | None, "LossBeforeTheWindow | None"]:
    """What the loss is a mean of (``find_rule``, which has the same arguments), and before the
    first window also how large it is.

    ``weights_stay``: whether the weights are the same in the whole window.
    """
    loss_before = None
    if weights_stay and key not in _checked.get(inside_wrapper(model), ()):
        loss_before = LossBeforeTheWindow(model, micro_batches, loss_of, how, processes, key)
    rule = find_rule(
        model,
        micro_batches,
        loss_of,
        usual_rule(model),
        how=how,
        items=items,
        key=key,
        processes=processes,
    )
    return rule, loss_before


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
        key: Any,
    ):
        self.model, self.loss_of = inside_wrapper(model), loss_of
        self.how, self.processes, self.key = how, processes, key
        self.batches = []  # what is asked: a few rows, or nothing
        if have_values(self.model, micro_batches) and not batch_norms(self.model):
            rows = some_rows(micro_batches)
            self.batches = [] if rows is None else [rows]
        self.before, _ = self._loss_now()

    def _loss_now(self, before: float = math.nan) -> tuple[float, bool]:
        """The loss of the rows, not a number if nothing can be asked; and whether it differs from
        the one ``before``. Also a process without such rows asks together with the others.
        """
        if not self.processes.sums(bool(self.batches))[0]:
            return math.nan, False
        with asking_loss(self.model, self.loss_of, self.processes) as question:
            found = question.observe(*self.batches)
            loss = found[0].value if found else math.nan
            return loss, question.differ(before, loss)

    def check(self) -> None:
        """Call this after the window, before the weights change. All processes call it together.

        Raises ``ValueError`` if the loss is another one.
        """
        after, differs = self._loss_now(self.before)
        if self.processes.sums(differs)[0]:
            forget(self.model)  # ask again if it is tried again
            raise ValueError(
                "write what the model keeps (a queue, a counter, an average of weights) after "
                "optimizer.step(), outside of forward; or use accumulation=1 and no sharding: "
                f"{self.how} cuts the batch, and the forwards of the first window have changed the "
                f"loss of {type(self.model).__name__} from {self.before:.6g} to {after:.6g} on the "
                "same rows, though no trained weight has changed"
            )
        _checked.setdefault(self.model, set()).add(self.key)
