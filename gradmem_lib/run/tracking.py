"""A tracker that a script does not know of: it finds the models, and it refuses nothing.

Where a ``MemoryTracker`` stops a program whose bytes it cannot count, this one goes on, and its
report says what is missing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import UntypedStorage, nn
from torch.optim import Optimizer

from .. import names
from ..compat.autograd import next_sequence_nr
from ..compat.compiled import INSIDE_OF_COND
from ..compat.dispatch_modes import innermost_mode
from ..compat.tensors import plain_tensors, storage_key
from ..compat.threads import threads_run_in
from ..measure.budget import BudgetExceeded
from ..measure.meter import Meter
from ..measure.operations import Owner
from ..measure.paths import longest_graph
from ..measure.recording import NEW, Recording
from ..measure.source_lines import calling_line
from ..measure.storages import storages_of, tensors_in
from ..measure.timeline import BY, MOMENT, TOTAL
from ..measure.tracker import MemoryTracker
from ..measure.watch import Watch
from ..model.structure import Structure
from ..names import IN_BACKWARD, LOSS, TRAINING_FORWARD
from ..units import format_bytes
from .host import Host
from .models import FoundModels
from .steps import StepPeak, StepPeaks

# Graphs of fewer steps are ordinary: a running mean over a window has one.
MANY_STEPS = 10
FIRST_LOOK = 16  # steps, when graphs are looked at; then after four times as many, and at the end
STEPS_OF_GRAPHS = 10_000


class ScriptRecording(Recording):
    """Counts the CPU's bytes until the script uses an accelerator, and from then on only that one.

    To ask for an accelerator at the beginning would start its driver, which a script may want to
    configure first. ``cards``: the numbers of the cards whose bytes are counted.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.cards: set[int] = set()

    def size(self, storage: UntypedStorage) -> int:
        kind = storage.device.type
        if self.device.type == "cpu" and kind not in ("cpu", "meta"):
            self._begin_again(torch.device(kind))
        nbytes = super().size(storage)
        if nbytes and kind != "cpu":
            self.cards.add(storage.device.index or 0)
        return nbytes

    def _begin_again(self, device: torch.device) -> None:
        self.live.clear()  # the Meter has a reference to it
        self.past.clear()
        self.total = 0
        self.device, self._type, self._index = device, device.type, device.index
        self._flushed = self._flushed[:0]
        self._rows, self._lifetimes = [], []
        self._stride, self._capacity = 1, NEW * self.max_samples
        self.restart()


def shielded(method: Callable) -> Callable:
    """A method of ``ScriptMeter`` whose own errors do not reach the script. A budget's does."""

    @wraps(method)
    def call(meter: ScriptMeter, *args: Any) -> Any:
        try:
            return method(meter, *args)
        except BudgetExceeded:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            meter.note(f"the measurement met an error of its own, and may miss bytes ({what})")
            return None

    return call


class ScriptMeter(Meter):
    """``at_limit`` is called when ``limit`` optimizer steps are done and the next forward begins.
    It is also called when the script measures its own memory from here on.

    ``notes``: what the report has to say of this measurement, in the order in which it came up.
    """

    def __init__(self, model: None, optimizers: list, recording: Recording, **settings: Any):
        super().__init__(model, optimizers, recording, **settings)
        self.model: Any = FoundModels(recording)
        self.models = self.model  # stays when the meter drops its model
        self.steps = StepPeaks()
        self.host = Host()
        self.step_begins = list[int]()  # autograd's next number when each step began
        self.long_graph = "", 0
        self.next_look = FIRST_LOOK
        self.limit: int | None = None
        self.at_limit: Callable[[], None] | None = None
        self.notes: dict[str, None] = {}

    def note(self, what: str) -> None:
        self.notes[what] = None

    seconds_for_walks = 2.0
    measures_a_script = True

    # What a tracker refuses

    runs_compiled_eagerly = True

    def on_compiled_call(self, name: str) -> None:
        if name == INSIDE_OF_COND:  # uncompiled, it would train nothing
            raise RuntimeError(
                "gradmem run cannot measure torch.cond with gradients, since its inside has to be "
                "compiled: put `if` in its place, or run the script without gradmem run"
            )
        self.note(
            "what torch.compile has compiled was run uncompiled here: compiled code has its own "
            "memory plan, which is often smaller"
        )

    def on_other_thread(self, module: nn.Module) -> None:
        self.note(
            "modules ran in another thread than the script's first one: what they made there is "
            "counted if the run has started it, and how they used it is not known"
        )

    def __enter__(self) -> None:
        super().__enter__()
        self.exit_stack.enter_context(threads_run_in(lambda: Watch(self.observe_elsewhere)))

    @shielded
    def observe_elsewhere(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        """Called after every operation of another thread: count what it has made."""
        recording, category = self.recording, names.OTHER
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args)):
            category = names.ACTIVATIONS
        with self.lock:
            if not self.is_running:
                return
            recording.drain()
            before = recording.total
            for tensor in tensors_in((out,)):
                for storage in storages_of(tensor):
                    if storage_key(storage) not in recording.live:
                        recording.on_alloc(storage, category, "", func, tensor, calling_line())
            if recording.total != before:
                recording.sample(func)

    def on_moved(self, name: str, device: torch.device) -> None:
        """A parameter on another device is not counted, and that is all."""

    # What it finds

    def structure(self) -> Structure:
        return self.models.knowledge_at_peak().structure

    def untrained(self) -> frozenset[str]:
        return self.models.knowledge_at_peak().untrained

    def as_owner(self, module: nn.Module) -> Owner:
        return self.models.name_of(module) or super().as_owner(module)

    @shielded
    def observe(self, func: Any, args: tuple, kwargs: dict | None, out: Any) -> None:
        super().observe(func, args, kwargs, out)

    def begin_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._is_at_limit():
            self.at_limit()
            return
        self._find(module)
        self._begin_found_forward(module, args, kwargs)

    @shielded
    def _find(self, module: nn.Module) -> None:
        with_grad = torch.is_grad_enabled()
        if self.models.add(module, with_grad):
            self.look_for_wrappers()
        finished = self.recording.step + self.position.has_stepped
        self.look_at_the_host(finished)
        if with_grad and len(self.step_begins) <= min(finished, STEPS_OF_GRAPHS):
            self.step_begins.append(next_sequence_nr())
        if finished >= self.next_look and self.walks.has_time():
            self.next_look *= 4
            self._look_at_graphs(sys._getframe(1), None)
        if with_grad and finished > self.steps.count:  # a new step begins
            with self.lock:
                self.steps.add(self.recording.next_window(), self.recording.total, finished)

    @shielded
    def look_at_the_host(self, steps: int, at_the_end: bool = False) -> None:
        counted = None
        if self.recording.device.type == "cpu":
            # what was free once stays with the process
            counted = self.recording.run_peak.total
        self.host.look(steps, counted, at_the_end)

    @shielded
    def _begin_found_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        super().begin_forward(module, args, kwargs)

    @shielded
    def end_forward(self, out: Any) -> None:
        super().end_forward(out)

    @shielded
    def note_weights(self, module: nn.Module) -> None:
        super().note_weights(module)

    @shielded
    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> Any:
        if self.models.note_step(optimizer):
            self.sync()
        return super().before_step(optimizer, args, kwargs)

    @shielded
    def _tag_parameter(self, parameter: torch.Tensor) -> None:
        super()._tag_parameter(parameter)

    @shielded
    def after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        super().after_step(optimizer, args, kwargs)

    def sync(self, states: bool = True) -> None:
        super().sync(states)
        with plain_tensors():
            for name, parameter in self.models.other_parameters():
                self.recording.tag(parameter, names.OTHER, name)

    @shielded
    def walk_at_the_end(self, error: BaseException | None) -> None:
        """Ask who holds what is left, also behind the names of libraries."""
        with self.lock:
            self.recording.drain()
            self.walks.walk(sys._getframe(1), error, everywhere=True)
            self._look_at_graphs(sys._getframe(1), error)

    def _look_at_graphs(self, frame: FrameType, error: BaseException | None) -> None:
        """Find the number with the longest graph. One that was found before in a variable of a
        function that has ended stays.
        """
        began = time.process_time()
        found = longest_graph(frame, error, self.step_begins)
        self.walks.spent += time.process_time() - began
        if found[1]:
            self.long_graph = found

    def find_waiting_optimizers(self) -> None:
        super().find_waiting_optimizers()
        for optimizer in self.waiting_optimizers:
            self.models.note_step(optimizer)

    def can_end(self) -> bool:
        """Whether the measurement could end here: a mode that the script has entered ends first."""
        return innermost_mode() is self.watch

    def _is_at_limit(self) -> bool:
        if self.limit is None or not self.can_end():
            return False
        return self.recording.step + self.position.has_stepped >= self.limit


class ScriptTracker(MemoryTracker):
    """Measures the process from here on, until it is told to end."""

    recording_class, meter_class = ScriptRecording, ScriptMeter
    measures_a_script = True

    def __init__(self, budget: int | None):
        super().__init__(budget=budget, live=False, device="cpu")
        self.meter: Any = self._meter
        self.recording: Any = self._recording

    def end(self, error: BaseException | None = None, *, goes_on: bool = False) -> None:
        """``error`` ended the program. ``goes_on``: the program runs on without being measured."""
        self.device = self._recording.device  # which may have become an accelerator
        self.meter.find_waiting_optimizers()
        self.meter.walk_at_the_end(error)
        self.meter.look_at_the_host(self.steps, True)
        self.__exit__(None, None, None)
        at_its_end = error is None or isinstance(error, SystemExit)
        self._interrupted = goes_on or not at_its_end
        with self.meter.lock:
            last = self._recording.next_window()
            self.meter.steps.add(last, self._recording.total, self.steps)

    def on_another(self) -> None:
        """The script enters a tracker of its own, which takes over."""
        if not self.meter.can_end():
            super().on_another()
        self.meter.note("the script measures its own memory with a MemoryTracker from here on")
        self.meter.at_limit()

    @property
    def step_peaks(self) -> list[StepPeak]:
        return self.meter.steps.peaks

    @property
    def moment_peaks(self) -> dict[str, int]:
        """The highest number of live bytes in each moment that occurred, however long the run."""
        peaks = self._recording.moment_peaks
        return {names.MOMENTS[moment]: total for moment, total in sorted(peaks.items())}

    @property
    def host(self) -> Host:
        return self.meter.host

    @property
    def growing_graph(self) -> str:
        """A sentence on a number whose graph reaches back over many steps; empty if there is none.

        Such a graph may have no tensors, and so no bytes that are counted.
        """
        name, steps = self.meter.long_graph
        if steps < MANY_STEPS:
            return ""
        return (
            f"A graph grows from step to step: that of the number `{name}` has nodes of {steps} "
            "steps, which need the host's memory and hold on to what autograd has saved in them. "
            "Add up x.item() or x.detach()."
        )

    @property
    def notes(self) -> list[str]:
        found = [*self.meter.notes]
        cards = len(self._recording.cards)
        if cards > 1:
            found.append(
                f"the script uses {cards} cards, and their bytes are added up: for one card alone, "
                "start the script with CUDA_VISIBLE_DEVICES=0, or with one process a card "
                "(torchrun)"
            )
        if self.steps == 1:
            found += self._of_the_second_step()
        return found

    def _of_the_second_step(self) -> list[str]:
        """A note for a run of one step: from the second on, states are there in forward too."""
        rows = self._recording.rows()
        states = rows[:, BY][:, names.CATEGORIES.index("optimizer")]
        made = int(states.max(initial=0))
        in_step = np.isin(rows[:, MOMENT], (TRAINING_FORWARD, LOSS, IN_BACKWARD))
        highest = int((rows[:, TOTAL] - states)[in_step].max(initial=0))
        if not made or not highest:
            return []
        return [
            f"one optimizer step was seen, and it made {format_bytes(made)} of states: from the "
            "second step on they are there in forward and backward as well, which then need at "
            f"least {format_bytes(highest + made)}"
        ]

    def leave_fork(self) -> None:
        """In a fork of the process (a worker that loads data): run on as without a tracker."""
        if self.meter.can_end():
            self.meter.lock = threading.RLock()  # a thread that is not in the fork may hold it
            with suppress(Exception):
                self._undo.close()
