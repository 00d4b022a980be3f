"""Ctrl-C in a training: the current step is finished and saved, and the training stops after it."""

import signal
import threading
from contextlib import ExitStack

from transformers import TrainerCallback


class StopAfterStep(TrainerCallback):
    """Turns Ctrl-C into a request: the current step is finished and saved, and training stops after
    it.
    """

    stop_requested = False

    def __enter__(self) -> None:
        self.stop_requested = self.stopped = self._announced = False
        self._undo = ExitStack()
        # Signals reach only the main thread, and only there may a handler be set. A shell tells a
        # background run to ignore Ctrl-C, which is meant for another program.
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._undo.callback(
                signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, self._on_sigint)
            )

    def __exit__(self, *raised) -> None:
        self._undo.close()

    def _on_sigint(self, number, frame) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt(
                "stopped at once: what was done since the last checkpoint is not saved"
            )
        self.stop_requested = True

    def on_substep_end(self, args, state, control, **kwargs):
        # Not printed in the handler, since the signal may come in the middle of another print.
        if self.stop_requested and not self._announced:
            self._announced = True
            step = state.global_step + 1
            print(
                f"Finishing step {step}, then saving; interrupt again to stop at once.", flush=True
            )

    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args, state, control, **kwargs):
        if self.stop_requested:
            control.should_save = control.should_training_stop = self.stopped = True
