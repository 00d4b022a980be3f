"""All of it combined on Hugging Face's ``Trainer``, which trains by a recipe, and can be watched,
interrupted and resumed.
"""

import inspect
import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import has_length

from ..display import in_kernel, live_enabled
from ..model.classes import predicts_next_token
from ..optimizers import OPTIMIZERS
from ..techniques.data_parallel import NO_ITEMS_ERROR, Processes
from ..techniques.losses import packed_by_position
from ..techniques.sharding import NO_PROCESS_GROUP
from ..techniques.splitting import count_rows, split
from .adapters import adapters_of, save_adapters
from .item_rules import Rule
from .item_rules import rows as by_rows
from .items import NotFinite, find_rule
from .losses import check_pieces, chunked_loss, count_items, usual_rule
from .memory_callback import MemoryCallback
from .prepare import change_model, make_optimizer, parameter_groups, set_checkpointing
from .recipe import Recipe
from .step import check_loss, offload_context
from .stop_after_step import StopAfterStep
from .text_rows import collate_text
from .trainer_arguments import (
    FSDP_ADVICE,
    REFUSED_ARGUMENTS,
    check_recipe,
    training_arguments,
)
from .window import Window

HOW = "accumulation or several processes"  # what cuts a batch, for error messages


class RecipeTrainer(Trainer):
    """A ``Trainer`` that trains by its ``recipe`` and is watched by ``memory``. ``make_trainer``
    returns it.

    It computes the full batch's gradients with ``accumulate_gradients``, also for models that
    always return a mean.
    """

    def __init__(
        self, *given, recipe: Recipe, memory: MemoryCallback, items, groups, exact, **named
    ):
        self.recipe = recipe
        self.memory = memory
        self._items = items
        self._groups = groups  # settings of a parameter, by its name
        self._exact = exact  # weights from before they were rounded, for the masters
        self._interrupt = StopAfterStep()
        self._pending_micro_batches: list[Any] = []
        self._key = object()  # stands for this trainer's loss
        self._windows = self._empty_windows = 0  # of this training
        self._calls = 0  # of training_step in this window
        self._rule_refused = False
        self._evaluated: list[tuple[float, float]] = []  # summed loss and items of each batch
        super().__init__(*given, **named)
        self.offload_hooks = offload_context(self.model, recipe)
        self._check_devices()
        self.add_callback(memory)
        self.add_callback(self._interrupt)

    def _check_devices(self) -> None:
        """Refuse cards and processes that would be used otherwise than the recipe says."""
        recipe = self.recipe
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} cards are in sight, and Trainer would cut each micro-batch "
                "over them (DataParallel), whose mean of means is another loss: set "
                "CUDA_VISIBLE_DEVICES=0 for one, or start with torchrun --nproc-per-node for all"
            )
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"):
            raise ValueError(
                f"accelerate was told to use FSDP, which make_trainer does not set up{FSDP_ADVICE}"
            )
        if recipe.sharding == "ddp" and not dist.is_initialized():
            raise ValueError(NO_PROCESS_GROUP.format("ddp"))
        if recipe.chunked_loss and self.args.world_size > 1:
            raise ValueError(
                "chunked_loss goes around the wrapper that averages gradients over "
                f"{self.args.world_size} processes: leave it out"
            )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:  # type: ignore[has-type]
            args, settings = self.args, {}
            if OPTIMIZERS[self.recipe.optimizer].adam_settings:
                settings = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            asked = self.model if model is None else model
            groups = parameter_groups(asked, args.weight_decay, self._groups, **settings)
            self.optimizer = make_optimizer(
                groups, self.recipe, args.learning_rate, exact=self._exact
            )
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
        micro_batches = self._pending_micro_batches
        self._pending_micro_batches, self._calls = [], 0
        window = Window(self.model, micro_batches, self._loss_of, self._processes(), self._key)
        if len(micro_batches) > 1 or self.args.world_size > 1:
            for micro in micro_batches:
                check_pieces(self.model, micro, HOW)
            window.ask(HOW, self._items)
        model.train()
        counts = window.counts()
        self._windows += 1
        if not window.processes.sums(sum(counts))[0]:
            return self._skip_window()

        def loss_of_one(micro, count):
            loss = self._loss_of(model, micro)
            self._interrupt.on_substep_end(self.args, self.state, self.control)
            # A mean over no items is nan. As a 0, it still sends other gradients to other
            # processes.
            return loss if count or loss.isfinite() else loss.nan_to_num(0.0)

        scaler = self.accelerator.scaler
        result = window.accumulate(
            loss_of_one,
            counts,
            model=model,
            scaler=scaler,
        )
        overflows = scaler is None and not math.isfinite(result.loss)
        window.check("the loss is not finite" if overflows else "")
        return torch.tensor(result.loss, device=self.args.device)

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
        inputs = packed_by_position(inputs)
        with self.offload_hooks, self.accelerator.autocast():
            if self.recipe.chunked_loss:
                outputs = {"loss": chunked_loss(self.model, inputs)}
            elif self.compute_loss_func is not None:
                labels = inputs.get("labels")
                outputs = model(**{n: v for n, v in inputs.items() if n != "labels"})
                items = torch.tensor(count_items(self.model, inputs))
                loss = self.compute_loss_func(outputs, labels, num_items_in_batch=items)
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
        output = super().evaluation_loop(*given, metric_key_prefix=metric_key_prefix, **named)
        loss_sum, items = 0.0, 0.0
        for batch_sum, batch_items in self._evaluated:
            loss_sum += batch_sum
            items += batch_items
        loss_sum, items = self._processes().sums(loss_sum, items)
        name = "_".join((metric_key_prefix, "loss"))
        if name in output.metrics and items:
            output.metrics[name] = loss_sum / items
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if found[0] is not None:
            self._evaluated.append(self._sum_and_items(inputs, found[0]))
        return found

    def _sum_and_items(self, inputs: Any, loss: torch.Tensor) -> tuple[float, float]:
        rule = self._rule_in_evaluation(inputs)
        rows = self._own_rows(inputs)
        if rows is not None:
            if not rows:
                return 0.0, 0.0
            inputs = next(split(inputs, rows))
            with torch.no_grad():
                loss = self._loss_of(self.model, inputs)
        count = count_items(self.model, inputs, rule)
        return (loss.item() * count, count) if count else (0.0, 0.0)

    def _rule_in_evaluation(self, inputs: Any) -> Rule | None:
        """An evaluation also works with a loss that must not be cut: it is weighed by rows."""
        if self._rule_refused:
            return by_rows
        try:
            return find_rule(
                self.model,
                [inputs],
                self._loss_of,
                usual_rule(self.model),
                how="an evaluation",
                items=self._items,
                key=self._key,
                processes=self._processes(),
            )
        except NotFinite:  # the next batch is asked
            return by_rows
        except ValueError as error:
            self._rule_refused = True
            warnings.warn(
                f"eval_loss depends on the evaluation's batch size, since {error}", stacklevel=2
            )
            return by_rows

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


def make_trainer(
    model: nn.Module,
    recipe: Recipe,
    *,
    batch_size: int,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    output_dir: str = "out",
    items: Callable[[Any], Any] | str | None = None,
    groups: Callable[[str, nn.Parameter], dict | None] | None = None,
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
        train_dataset, eval_dataset: rows with ``labels``, such as those of ``texts.datasets``. Rows
            of a language model may have no labels and any lengths (``collate_text``).
        items: what the loss is divided by, as in ``step``.
        groups: settings of some parameters, as in ``prepare``.
        budget, live, title: for the tracker (``MemoryCallback``).
        progress: show a progress bar and the losses. ``None``: yes, except in a notebook whose
            plots do not move.
        given: all other arguments of ``Trainer`` (``data_collator``, ``compute_metrics``,
            ``callbacks``, ...) or ``TrainingArguments`` (``max_steps``, ``max_grad_norm``,
            ``lr_scheduler_type``, ...; ``learning_rate`` of torch's Adafactor is relative to a
            weight's size). ``lr``, ``betas`` and ``eps`` are taken too, as by ``prepare``, with
            which it shares the optimizer and its defaults.

    By default, an evaluation keeps no logits of language models and takes as many rows as a
    micro-batch: more of either would exceed the memory that the recipe was chosen for
    (``compute_metrics`` gets the logits). Raises ``ValueError`` for an argument that contradicts
    the recipe or that the recipe cannot respect, and for an optimizer in backward.
    """
    given.setdefault("use_cpu", next(model.parameters()).device.type == "cpu")
    check_recipe(recipe, given["use_cpu"])
    own = inspect.signature(Trainer.__init__).parameters
    for_trainer = {
        name: given.pop(name)
        for name in list(given)
        if name in own and name not in REFUSED_ARGUMENTS
    }
    progress = live_enabled() or not in_kernel() if progress is None else progress
    of_text = predicts_next_token(model)
    if of_text and "processing_class" not in for_trainer:  # whose collator pads as it says
        for_trainer.setdefault("data_collator", collate_text)
    loss_only = of_text and "compute_metrics" not in for_trainer
    ours = {
        "output_dir": output_dir,
        "prediction_loss_only": loss_only,
        "disable_tqdm": not progress,
    }
    args = TrainingArguments(
        **training_arguments(recipe, recipe.micro_batch(batch_size), ours | given)
    )
    exact = change_model(model, recipe)
    own_loss = for_trainer.get("compute_loss_func") or args.label_smoothing_factor
    if recipe.chunked_loss and own_loss:
        raise ValueError(
            "chunked_loss computes the model's own loss, and compute_loss_func and "
            "label_smoothing_factor are other ones: leave chunked_loss out"
        )
    memory = MemoryCallback(budget=budget, live=live, title=title)
    memory.gives_way = budget is None
    trainer = RecipeTrainer(
        model,
        args,
        recipe=recipe,
        memory=memory,
        items=items,
        groups=groups,
        exact=exact,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **for_trainer,
    )
    if not progress:
        trainer.remove_callback(PrinterCallback)
    return trainer
