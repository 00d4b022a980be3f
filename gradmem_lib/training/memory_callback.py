"""Watching any ``Trainer`` with a ``MemoryTracker``."""

from contextlib import ExitStack
from typing import Any, Self

from transformers import TrainerCallback

from ..measure.timeline import MemorySnapshot
from ..measure.tracker import MemoryTracker


class MemoryCallback(TrainerCallback):
    """Watch a ``Trainer`` with a ``MemoryTracker``: live plot, budget, and the peak of every step::

        with MemoryCallback(budget="2 GiB") as memory:
            Trainer(model, args, train_dataset=rows, callbacks=[memory]).train()
        print(memory.peak)

    The ``with`` block removes the tracker, whatever ends the run. Training outside such a block
    raises ``RuntimeError``. ``budget``, ``live`` and ``title`` are those of ``MemoryTracker``. All
    figures are bytes.

    It measures and changes nothing. Whether a trainer's own loss is the same one with accumulation
    is asked by ``check_accumulation(trainer)``, since ``Trainer`` gives itself to no callback.

    Attributes: ``tracker`` (of the last training, or ``None``) and ``by_step``, from step number to
    the ``MemorySnapshot`` of its peak. An evaluation outside of training is measured by a
    ``MemoryTracker(trainer.model)`` around it.
    """

    def __init__(
        self, *, budget: int | str | None = None, live: bool | None = None, title: str = ""
    ):
        self._tracker_settings: dict[str, Any] = {"budget": budget, "live": live, "title": title}
        self.tracker: MemoryTracker | None = None
        self.by_step: dict[int, MemorySnapshot] = {}
        self._exit_stack: Any = None  # an ExitStack inside the with
        # Whether `gradmem run`, which measures a script, goes on to do so. Then ``tracker`` is its
        # own, and ``by_step`` stays empty.
        self.gives_way = False

    def __enter__(self) -> Self:
        self._exit_stack = ExitStack()
        return self

    def __exit__(self, *raised) -> None:
        inside, self._exit_stack = self._exit_stack, None
        inside.__exit__(*raised)

    @property
    def peak(self) -> MemorySnapshot:
        """The highest snapshot of the run. Raises ``RuntimeError`` before the first run."""
        if self.tracker is None:
            raise RuntimeError(
                "nothing was trained yet: give this callback to a Trainer (callbacks=[memory]) and "
                "call its train(). An evaluation alone is measured by a "
                "MemoryTracker(trainer.model) around it"
            )
        return self.tracker.peak

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **more: Any,
    ) -> None:
        if self._exit_stack is None:
            raise RuntimeError(
                "MemoryCallback works inside its with block, which takes the tracker away also "
                "after an error: write `with MemoryCallback() as memory:` and call "
                "trainer.train() in it"
            )
        self._exit_stack.close()
        self.by_step = {}
        if self.gives_way and MemoryTracker.of_script() is not None:
            self.tracker = MemoryTracker.of_script()
            return
        own = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the optimizer
        self.tracker = MemoryTracker(model, own, **self._tracker_settings)
        self._exit_stack.enter_context(self.tracker)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not self.tracker.measures_a_script:  # whose laps are its own
            self.tracker.window_peak()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not self.tracker.measures_a_script:
            self.by_step[state.global_step] = self.tracker.window_peak()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._exit_stack.close()
