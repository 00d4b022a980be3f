"""All of it combined on Hugging Face's ``Trainer``, which trains by a recipe, and can be watched,
interrupted and resumed.
"""

import inspect
import math
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import has_length

from ..compat import checkpointing_name
from ..display import in_kernel, live_enabled
from ..hf_names import CHECKPOINTING_METHODS
from ..measure.timeline import MemorySnapshot
from ..measure.tracker import MemoryTracker
from ..optimizers import OPTIMIZERS
from ..techniques.accumulation import accumulate_gradients
from ..techniques.data_parallel import NO_ITEMS_ERROR, Processes
from ..techniques.sharding import NO_PROCESS_GROUP
from ..techniques.splitting import count_rows, split
from .adapters import adapters_of, save_adapters
from .changed_loss import LossBeforeTheWindow
from .item_rules import Rule
from .item_rules import rows as by_rows
from .items import find_rule
from .losses import check_pieces, chunked_loss, count_items, predicts_next_token, usual_rule
from .prepare import change_model, make_optimizer, set_checkpointing
from .recipe import Recipe
from .step import check_loss, offload_context

CHECKPOINTING_ARGUMENT = checkpointing_name(PreTrainedModel)
HOW = "accumulation or several processes"  # what cuts a batch, for error messages


def arguments(recipe: Recipe, micro_batch: int) -> dict[str, Any]:
    """The fields of ``TrainingArguments`` that ``recipe`` decides, for micro-batches of
    ``micro_batch`` rows.

    ``Trainer`` has no argument for segments or torch's Adafactor: ``make_trainer`` adds them.
    """
    chosen: dict[str, Any] = {"per_device_train_batch_size": micro_batch}
    chosen["gradient_accumulation_steps"] = recipe.accumulation
    row = OPTIMIZERS[recipe.optimizer]
    if row.trainer_name is not None:
        chosen["optim"] = row.trainer_name
    if recipe.autocast_dtype is not None:
        switch = {torch.bfloat16: "bf16", torch.float16: "fp16"}[recipe.autocast_dtype]
        chosen[switch] = True
    if every := recipe.checkpoint_interval:
        chosen[CHECKPOINTING_ARGUMENT] = True
        more = {"every_n_layers": every} if every > 1 else {}
        chosen[f"{CHECKPOINTING_ARGUMENT}_kwargs"] = {"use_reentrant": False} | more
    return chosen


class MemoryCallback(TrainerCallback):
    """Watch a ``Trainer`` with a ``MemoryTracker``: live plot, budget, and the peak of every step::

        with MemoryCallback(budget="2 GiB") as memory:
            Trainer(model, args, train_dataset=rows, callbacks=[memory]).train()
        print(memory.peak)

    The ``with`` block removes the tracker, whatever ends the run. Training outside such a block
    raises ``RuntimeError``. ``budget``, ``live`` and ``title`` are those of ``MemoryTracker``. All
    figures are bytes.

    Attributes: ``tracker`` (of the last training, or ``None``); ``by_step``, from step number to
    the ``MemorySnapshot`` of its peak; ``evaluation``, the peak of the last ``evaluate()`` or
    ``predict()`` that ``make_trainer``'s trainer ran outside of training (one inside is a part of
    its training), or ``None``. A stock ``Trainer`` does not say when such an evaluation begins.
    """

    def __init__(
        self, *, budget: int | str | None = None, live: bool | None = None, title: str = ""
    ):
        self._tracker_settings: dict[str, Any] = {"budget": budget, "live": live, "title": title}
        self.tracker: MemoryTracker | None = None
        self.by_step: dict[int, MemorySnapshot] = {}
        self.evaluation: MemorySnapshot | None = None
        self._exit_stack: Any = None  # an ExitStack inside the with

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
                "nothing was trained yet: give this callback to a Trainer "
                "(callbacks=[memory]) and call its train(). The peak of an evaluation alone is in "
                "memory.evaluation, or, with a Trainer that make_trainer did not make, in a "
                "MemoryTracker(trainer.model) around it"
            )
        return self.tracker.peak

    @contextmanager
    def watch_evaluation(self, model: nn.Module) -> Iterator[None]:
        """Measure an evaluation that no tracker measures already; nothing is drawn."""
        if MemoryTracker.any_runs():
            yield
            return
        self.evaluation = None
        settings = self._tracker_settings | {"live": False}
        with MemoryTracker(model, **settings) as tracker:
            yield
        self.evaluation = tracker.peak

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
        own = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the optimizer
        self.tracker = MemoryTracker(model, own, **self._tracker_settings)
        self._exit_stack.enter_context(self.tracker)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.tracker.window_peak()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.by_step[state.global_step] = self.tracker.window_peak()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._exit_stack.close()


class RecipeTrainer(Trainer):
    """A ``Trainer`` that trains by its ``recipe`` and is watched by ``memory``. ``make_trainer``
    returns it.

    It computes the full batch's gradients with ``accumulate_gradients``, also for models that
    always return a mean.
    """

    def __init__(self, *given, recipe: Recipe, memory: MemoryCallback, **named):
        self.recipe, self.memory, self._interrupt = recipe, memory, _StopAfterStep()
        self._pending_micro_batches: list[Any] = []
        self._rule: Rule | None = None  # what counts as an item, once it was asked
        self._was_checked = False  # whether a window's forwards leave the loss as it was
        self._windows = self._empty_windows = 0  # of this training
        self._calls = 0  # of training_step in this window
        self._rule_refused = False
        self._evaluated: list[tuple[float, float]] = []  # summed loss and items of each batch
        super().__init__(*given, **named)
        self.offload_hooks = offload_context(self.model, recipe)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} cards are in sight, and Trainer would cut each micro-batch "
                "over them (DataParallel), whose mean of means is another loss: set "
                "CUDA_VISIBLE_DEVICES=0 for one, or start with torchrun --nproc-per-node for all"
            )
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"):
            raise ValueError(
                f"accelerate was told to use FSDP, which make_trainer does not set up{_FSDP_ADVICE}"
            )
        if recipe.sharding == "ddp" and not dist.is_initialized():
            raise ValueError(NO_PROCESS_GROUP.format("ddp"))
        if recipe.chunked_loss and self.args.world_size > 1:
            raise ValueError(
                "chunked_loss goes around the wrapper that averages gradients over "
                f"{self.args.world_size} processes: leave it out"
            )
        self.add_callback(memory)
        self.add_callback(self._interrupt)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:  # type: ignore[has-type]
            model, args = self.model if model is None else model, self.args
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            # only matrices
            decayed = self.get_decay_parameter_names(model) if args.weight_decay else []
            own: dict[str, Any] = {}
            if OPTIMIZERS[self.recipe.optimizer].adam_settings:
                own = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            groups = []
            for decays in (True, False):
                if part := [p for name, p in trained if (name in decayed) == decays]:
                    groups.append(
                        {"params": part, "weight_decay": decays * args.weight_decay, **own}
                    )
            self.optimizer = make_optimizer(groups, self.recipe, args.learning_rate)
        return self.optimizer

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Called for each micro-batch of a step.

        The last call accumulates all gradients and returns the mean loss, others 0.
        """
        if not isinstance(inputs, _NoRows):
            self._pending_micro_batches.append(inputs)
        self._calls += 1
        if self._calls < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        micro_batches, self._pending_micro_batches, self._calls = self._pending_micro_batches, [], 0
        loss_before = None
        if not self._was_checked and self._in_pieces(micro_batches):
            loss_before = LossBeforeTheWindow(
                self.model, micro_batches, self._loss_of, HOW, self._processes()
            )
        rule = self._find_rule(micro_batches)
        model.train()
        counts = [count_items(self.model, micro, rule) for micro in micro_batches]
        self._windows += 1
        if not self._processes().sums(sum(counts))[0]:
            return self._skip_window()

        def loss_and_count(numbered):
            micro, count = numbered
            loss = self.compute_loss(model, self._prepare_inputs(micro))
            self._interrupt.on_substep_end(self.args, self.state, self.control)
            # A mean over no items is nan. As a 0, it still sends other gradients to other
            # processes.
            return loss if count or loss.isfinite() else loss.nan_to_num(0.0), count

        result = accumulate_gradients(
            list(zip(micro_batches, counts, strict=True)),
            loss_and_count,
            total_items=sum(counts),
            reduction="mean",
            model=model,
            scaler=self.accelerator.scaler,
            float32_sums=self.recipe.float32_sums,
        )
        if loss_before is not None:
            loss_before.check()
            self._was_checked = True
        return torch.tensor(result.loss, device=self.args.device)

    def _in_pieces(self, micro_batches: list[Any]) -> bool:
        return len(micro_batches) > 1 or self.args.world_size > 1

    def _find_rule(self, micro_batches: list[Any]) -> Rule | None:
        """What the loss is a mean of, asked before the first window in pieces.

        Raises ``ValueError`` if it is not the mean of its pieces.
        """
        if not self._in_pieces(micro_batches):
            return self._rule
        for micro in micro_batches:
            check_pieces(self.model, micro, HOW)
        if self._rule is None:
            usual = usual_rule(self.model)
            processes = self._processes()
            self._rule = find_rule(
                self.model, micro_batches, self._loss_of, usual, how=HOW, processes=processes
            )
        return self._rule

    def _loss_of(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.compute_loss(model, self._prepare_inputs(batch))

    def _processes(self) -> Processes:
        groups = [dist.group.WORLD] if self.args.world_size > 1 else []
        return Processes(self.model, groups)

    def _skip_window(self) -> torch.Tensor:
        """A window without any label changes no weight: the optimizer finds no gradients."""
        self._empty_windows += 1
        if self._empty_windows == 1:
            warnings.warn(
                f"no row of step {self.state.global_step + 1} has a label: it changes no weights, "
                "and neither do later ones like it. Are labels cut off by truncation? "
                "trainer.empty_windows counts such steps",
                stacklevel=2,
            )
        # Trainer puts the mean of the steps before in the place of a nan.
        loss = math.nan if self.args.logging_nan_inf_filter else 0.0
        return torch.tensor(loss, device=self.args.device)

    @property
    def empty_windows(self) -> int:
        """How many steps of the last training had no label, and changed nothing."""
        return self._empty_windows

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of a window, which ends with its epoch.

        Where data have no length, ``Trainer`` does not know that an epoch's last window is shorter:
        it would step in the next epoch. So the window is filled up with micro-batches of no rows.
        """
        micro_batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if micro_batches and not has_length(self.train_dataset):
            filler = _NoRows(_without_rows(micro_batches[-1]))
            micro_batches += [filler] * (num_batches - len(micro_batches))
        return micro_batches, items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean loss of these rows."""
        with self.offload_hooks, self.accelerator.autocast():
            if self.recipe.chunked_loss:
                outputs = {"loss": chunked_loss(self.model, inputs)}
            elif self.compute_loss_func is not None:
                loss, outputs = super().compute_loss(model, dict(inputs), return_outputs=True)
                outputs = {"loss": loss, **dict(outputs, loss=loss)}
            else:
                outputs = model(**inputs)
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
            if self.label_smoother is not None and "labels" in inputs:
                shifted = predicts_next_token(self.model)
                loss = self.label_smoother(outputs, inputs["labels"], shift_labels=shifted)
        check_loss(loss, self.model)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *given, metric_key_prefix="eval", **named):
        """``eval_loss`` is the mean over all items, whatever the evaluation's batch: summed losses
        divided once by their number.
        """
        self._evaluated = []
        with self.memory.watch_evaluation(self.model):
            output = super().evaluation_loop(*given, metric_key_prefix=metric_key_prefix, **named)
        loss_sum, items = 0.0, 0.0
        for batch_sum, batch_items in self._evaluated:
            loss_sum += batch_sum
            items += batch_items
        loss_sum, items = self._processes().sums(loss_sum, items)
        name = f"{metric_key_prefix}_loss"
        if name in output.metrics and items:
            output.metrics[name] = loss_sum / items
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if found[0] is not None:
            self._evaluated.append(self._sum_and_items(inputs, found[0]))
        return found

    def _sum_and_items(self, inputs: Any, loss: torch.Tensor) -> tuple[float, float]:
        if self._rule is None and not self._rule_refused:
            self._ask_in_evaluation(inputs)
        rows = self._own_rows(inputs)
        if rows is not None:
            if not rows:
                return 0.0, 0.0
            inputs = next(split(inputs, rows))
            with torch.no_grad():
                loss = self._loss_of(self.model, inputs)
        rule = by_rows if self._rule_refused else self._rule
        count = count_items(self.model, inputs, rule)
        return (loss.item() * count, count) if count else (0.0, 0.0)

    def _ask_in_evaluation(self, inputs: Any) -> None:
        """An evaluation also works with a loss that must not be cut: it is weighed by rows."""
        try:
            self._rule = find_rule(
                self.model,
                [inputs],
                self._loss_of,
                usual_rule(self.model),
                how="an evaluation",
                processes=self._processes(),
            )
        except ValueError as error:
            self._rule_refused = True
            warnings.warn(
                f"eval_loss depends on the evaluation's batch size, since {error}", stacklevel=2
            )

    def _own_rows(self, inputs: Any) -> int | None:
        """Of an evaluation's last batch, in which several processes get some rows twice: the number
        of this process's first rows that nobody else has. ``None``: all.
        """
        state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return None
        size = count_rows(inputs)
        return min(max(state.remainder - self.args.process_index * size, 0), size)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for ``from_pretrained``. With LoRA, write only the additions, as PEFT's
        ``save_pretrained`` does.

        To write the whole model, use ``merge_adapters(model).save_pretrained(folder)``. The
        checkpoints that ``Trainer`` itself writes have all weights, for ``resume_from_checkpoint``.
        """
        if _internal_call or not adapters_of(self.model):
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            save_adapters(self.model, output_dir or self.args.output_dir)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(output_dir or self.args.output_dir)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """Train. Checkpointing, tracker and signal handler are removed afterwards, whatever ends
        the training.

        The first Ctrl-C (or the notebook's stop button) lets the step finish, saves a checkpoint in
        ``args.output_dir`` and raises ``KeyboardInterrupt``. ``train(resume_from_checkpoint=True)``
        resumes from there. A second Ctrl-C stops at once.
        """
        self._pending_micro_batches, self._calls = [], 0
        self._windows = self._empty_windows = 0
        with self.memory, self._interrupt, ExitStack() as undo:
            undo.callback(self.offload_hooks.close)
            set_checkpointing(self.model, self.recipe, undo)
            try:
                result = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            except BaseException:
                self.model.zero_grad(set_to_none=True)
                self.is_in_train = False
                raise
        if self._windows and self._windows == self._empty_windows:
            raise ValueError(NO_ITEMS_ERROR)
        if self._interrupt.stopped:
            raise KeyboardInterrupt(
                f"stopped after step {self.state.global_step}, saved in {self.args.output_dir}; to "
                "go on: trainer.train(resume_from_checkpoint=True)"
            )
        if self._interrupt.stop_requested:
            raise KeyboardInterrupt("asked to stop after the last step: the training is complete")
        return result


class _NoRows(dict):
    """Fills up the last window of an epoch: a micro-batch of no rows, which is not trained on."""


def _without_rows(batch: Mapping) -> dict[str, Any]:
    """``batch`` with its tensors' rows left out, so that its tokens count as none."""
    return {
        name: value[:0] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in batch.items()
    }


class _StopAfterStep(TrainerCallback):
    """Turns Ctrl-C into a request: the current step is finished and saved, and training stops after
    it.
    """

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
            message = (
                f"Finishing step {state.global_step + 1}, then saving; once more to stop at once."
            )
            print(message, flush=True)

    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args, state, control, **kwargs):
        if self.stop_requested:
            control.should_save = control.should_training_stop = self.stopped = True


_FSDP_ADVICE = (
    " (on the CPU, Trainer and accelerate turn FSDP into DDP without a word, and on cards "
    "accelerate's plugin, not the recipe, says what is cut, in which dtype and where it lies): "
    "use gradmem_lib's prepare(model, recipe) and step(...) with this Recipe(sharding=...) under "
    "torchrun, or sharding='ddp' here"
)
# Arguments of Trainer that a recipe decides, or that it cannot respect.
_REFUSED_ARGUMENTS = {
    "model_init": "the recipe has changed this model: make the model first, and a trainer for each",
    "optimizers": (
        "the recipe makes the optimizer: choose it there, and the schedule by lr_scheduler_type"
    ),
    "optimizer_cls_and_kwargs": "the recipe makes the optimizer: choose it there",
    **dict.fromkeys(
        ("deepspeed", "parallelism_config", "torch_empty_cache_steps"),
        "its own step knows nothing of it",
    ),
    "fsdp": f"FSDP is not set up by make_trainer{_FSDP_ADVICE}",
}


def make_trainer(
    model: nn.Module,
    recipe: Recipe,
    *,
    batch_size: int,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    output_dir: str = "out",
    budget: int | str | None = None,
    live: bool | None = None,
    title: str = "",
    progress: bool | None = None,
    **given: Any,
) -> RecipeTrainer:
    """A ``Trainer`` for a transformers model that trains by ``recipe``. ``model`` is changed in
    place, as by ``prepare``.

    Args:
        model: is trained on its own device, or on the card with ``use_cpu=False``.
        batch_size: rows of one optimizer step (in each process), which ``recipe.accumulation`` cuts
            into micro-batches. With ``auto_find_batch_size=True`` the rows become fewer until a
            step fits the card, or ``budget``.
        train_dataset, eval_dataset: rows with ``labels``, such as those of ``texts.datasets``.
        budget, live, title: for the tracker (``MemoryCallback``).
        progress: show a progress bar and the losses. ``None``: yes, except in a notebook whose
            plots do not move.
        given: all other arguments of ``Trainer`` (``data_collator``, ``compute_metrics``,
            ``callbacks``, ...) or ``TrainingArguments`` (``max_steps``, ...; ``learning_rate`` of
            torch's Adafactor is relative to a weight's size).

    By default, an evaluation keeps no logits of language models and takes as many rows as a
    micro-batch: more of either would exceed the memory that the recipe was chosen for
    (``compute_metrics`` gets the logits). Raises ``ValueError`` for an argument that contradicts
    the recipe or that the recipe cannot respect, and for an optimizer in backward.
    """
    given.setdefault("use_cpu", next(model.parameters()).device.type == "cpu")
    _check_recipe(recipe, given["use_cpu"])
    own = inspect.signature(Trainer.__init__).parameters
    for_trainer = {
        name: given.pop(name)
        for name in list(given)
        if name in own and name not in _REFUSED_ARGUMENTS
    }
    progress = live_enabled() or not in_kernel() if progress is None else progress
    loss_only = predicts_next_token(model) and "compute_metrics" not in for_trainer
    ours = {
        "output_dir": output_dir,
        "prediction_loss_only": loss_only,
        "disable_tqdm": not progress,
    }
    args = TrainingArguments(
        **_training_arguments(recipe, recipe.micro_batch(batch_size), ours | given)
    )
    change_model(model, recipe)
    own_loss = for_trainer.get("compute_loss_func") or args.label_smoothing_factor
    if recipe.chunked_loss and own_loss:
        raise ValueError(
            "chunked_loss computes the model's own loss, and compute_loss_func and "
            "label_smoothing_factor are other ones: leave chunked_loss out"
        )
    memory = MemoryCallback(budget=budget, live=live, title=title)
    data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    trainer = RecipeTrainer(model, args, recipe=recipe, memory=memory, **data, **for_trainer)
    if not progress:
        trainer.remove_callback(PrinterCallback)
    return trainer


def _check_recipe(recipe: Recipe, on_cpu: bool) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe is {type(recipe).__name__}: give a Recipe, such as Recipe(precision='bf16')"
        )
    if recipe.in_backward:
        raise ValueError(
            "in_backward=True steps during backward, which make_trainer does not set up: use "
            "gradmem_lib's prepare(model, recipe) and step(...), or a Trainer of your own with a "
            "LayerWiseDummyOptimizer"
        )
    if recipe.sharding not in (None, "ddp"):
        raise ValueError(
            f"sharding={recipe.sharding!r} is not set up by make_trainer{_FSDP_ADVICE}"
        )
    if recipe.scales_loss and on_cpu:
        raise ValueError(
            "on the CPU, Trainer trains in float32 in spite of fp16=True: choose "
            "'autocast-bf16', or move the model to a card"
        )


def _training_arguments(recipe: Recipe, micro_batch: int, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` plus what ``recipe`` decides, for ``TrainingArguments``.

    Raises ``ValueError`` if the two do not agree.
    """
    chosen = arguments(recipe, micro_batch)
    decided = {"bf16": False, "fp16": False, CHECKPOINTING_ARGUMENT: False} | chosen
    for name, value in given.items():
        if name in _REFUSED_ARGUMENTS and value:
            raise ValueError(
                f"{name}={value!r} is not taken by make_trainer, since "
                f"{_REFUSED_ARGUMENTS[name]}. Or use Trainer itself"
            )
        own = name.replace(CHECKPOINTING_METHODS[-1], CHECKPOINTING_ARGUMENT)
        if value != decided.get(own, value):
            raise ValueError(
                f"{name}={value!r} and the recipe says {decided[own]!r}: change the recipe or "
                "batch_size, and leave it out"
            )
    defaults = {
        "per_device_eval_batch_size": micro_batch,
        "report_to": "none",
        "save_strategy": "no",
    }
    defaults["dataloader_pin_memory"] = torch.cuda.is_available()
    row = OPTIMIZERS[recipe.optimizer]
    if row.learning_rate is not None:
        defaults["learning_rate"] = row.learning_rate
    if row.trainer_package is not None:
        # The optimizer is this library's own: without the package, Trainer would refuse that name.
        chosen["optim"] = "adamw_torch"
    accepted = {name: value for name, value in given.items() if name not in _REFUSED_ARGUMENTS}
    return defaults | chosen | accepted
