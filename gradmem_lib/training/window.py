"""A window: the micro-batches of one update, whose losses are one mean over all their items.

Before a model's first window in pieces, its loss is asked what it is a mean of. After it, the loss
is asked whether the window's forwards have changed it, though no trained weight has changed: they
may have changed what the loss reads, such as a queue of embeddings, a counter, or an average of the
weights. Then each micro-batch reads what those before it have left, and the full batch does not.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..model.wrappers import inside_wrapper
from ..techniques.accumulation import Accumulated, accumulate_gradients
from ..techniques.asking import asking_loss
from ..techniques.data_parallel import Processes
from ..techniques.shared_statistics import batch_norms
from ..techniques.splitting import split
from .item_rules import Rule, has_labels
from .items import NotFinite, find_rule, forget, have_values, known_rule
from .losses import count_items, usual_rule
from .probe_rows import some_rows

# The keys of ``find_rule`` with which a model has been through a window.
_checked: WeakKeyDictionary[nn.Module, set] = WeakKeyDictionary()


@dataclass
class Window:
    """The micro-batches of one update. ``ask``, where they are pieces of a batch; ``accumulate``;
    then ``check``, before the weights change.
    """

    model: nn.Module
    micro_batches: Sequence[Any]
    loss_of: Callable[[nn.Module, Any], Tensor]  # a mean
    processes: Processes  # all of them call the methods together
    key: Any  # stands for the loss: each is asked once
    how: str = ""  # what cuts the batch, for errors
    rule: Rule | None = None
    loss_before: float | None = None  # before the first window
    rows_to_ask: list[Any] = field(default_factory=list)  # a batch of a few rows, or nothing
    undecided: NotFinite | None = None  # the rows that were asked have no finite loss
    loss: float = math.nan  # of this window

    def __post_init__(self) -> None:
        self.rule = known_rule(self.model, self.key)

    def ask(self, how: str, items: Any, *, weights_stay: bool = True) -> None:
        """Find what the loss is a mean of, as ``find_rule`` does. ``weights_stay``: whether the
        weights are the same in the whole window.
        """
        self.how, inner = how, inside_wrapper(self.model)
        if weights_stay and self.key not in _checked.get(inner, ()):
            # A BatchNorm changes its running averages in each forward, and the loss reads them only
            # in evaluation, as here. It has a warning of its own.
            if have_values(inner, self.micro_batches) and not batch_norms(inner):
                rows = some_rows(self.micro_batches)
                self.rows_to_ask = [] if rows is None else [rows]
            self.loss_before, _ = self._loss_now(math.nan)
        try:
            self.rule = find_rule(
                self.model,
                self.micro_batches,
                self.loss_of,
                usual_rule(self.model),
                how=how,
                items=items,
                key=self.key,
                processes=self.processes,
            )
        except NotFinite as error:
            if not weights_stay:  # they have changed when the window ends
                raise
            self.undecided = error

    def counts(self) -> list[int | float]:
        """The number of items in each micro-batch."""
        return [count_items(self.model, micro, self.rule) for micro in self.micro_batches]

    def accumulate(self, loss_of_one: Callable, counts: list, **options: Any) -> Accumulated:
        """``accumulate_gradients`` of the first micro-batches, as many as there are ``counts``.

        ``loss_of_one(micro_batch, count)`` returns a mean. ``options`` are passed on.
        """

        def loss_and_count(numbered: tuple[Any, int | float]) -> tuple[Tensor, int | float]:
            return loss_of_one(*numbered), numbered[1]

        found = accumulate_gradients(
            zip(self.micro_batches[: len(counts)], counts, strict=True),
            loss_and_count,
            total_items=sum(counts),
            reduction="mean",
            **options,
        )
        self.loss = found.loss
        return found

    def check(self, not_finite: str = "") -> None:
        """Raise ``ValueError`` if the loss of the window, or a gradient, is ``not_finite`` (in
        words), or if the window has changed what the loss reads.
        """
        if not_finite:
            raise self.not_finite(not_finite)
        if self.undecided is not None:
            if math.isfinite(self.loss):
                raise self.undecided
            return  # the window has no finite loss either, and a scaler skips it
        if self.loss_before is None:
            return
        after, differs = self._loss_now(self.loss_before)
        inner = inside_wrapper(self.model)
        if self.processes.sums(differs)[0]:
            forget(inner)  # ask again if it is tried again
            raise ValueError(
                "write what the model keeps (a queue, a counter, an average of weights) after "
                "optimizer.step(), outside of forward; or use accumulation=1 and no sharding: "
                f"{self.how} cuts the batch, and the forwards of the first window have changed the "
                f"loss of {type(inner).__name__} from {self.loss_before:.6g} to {after:.6g} on the "
                "same rows, though no trained weight has changed"
            )
        _checked.setdefault(inner, set()).add(self.key)

    def not_finite(self, what: str) -> ValueError:
        """The error to raise before a step with ``what``, the words for a loss or a gradient."""
        where = ""
        if not self.processes.groups:  # several would have to run each forward together
            with suppress(TypeError, ValueError):  # what cannot be cut into rows
                where = self._first_not_finite()
        return ValueError(
            "look for rows with very large or missing numbers, or lower the learning rate: "
            f"{what}, and a step would make every weight nan, so none was made{where}. In float16, "
            "give scaler=GradScaler(), which skips such a step and lowers its factor"
        )

    def _first_not_finite(self) -> str:
        """Where the first row with labels is that has, alone, a loss that is not finite."""
        with asking_loss(self.model, self.loss_of) as question:
            for number, micro in enumerate(self.micro_batches, 1):
                for place, row in enumerate(split(micro, 1), 1):
                    [(loss, error)] = question.observe(row)
                    if error is None and not math.isfinite(loss) and has_labels(row):
                        return f" (row {place} of micro-batch {number} alone shows it)"
        return ""

    def _loss_now(self, before: float) -> tuple[float, bool]:
        """The loss of a few rows, not a number if nothing can be asked; and whether it differs from
        the one ``before``. Also a process without such rows asks together with the others.
        """
        if not self.processes.sums(bool(self.rows_to_ask))[0]:
            return math.nan, False
        with asking_loss(inside_wrapper(self.model), self.loss_of, self.processes) as question:
            found = question.observe(*self.rows_to_ask)
            loss = found[0].value if found else math.nan
            return loss, question.differ(before, loss)
