"""The arguments of Hugging Face's ``Trainer`` that a recipe decides, and those that it cannot
respect.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..compat.transformers_models import checkpointing_name
from ..hf_names import CHECKPOINTING_METHODS
from ..optimizers import OPTIMIZERS
from .prepare import usual_rate
from .recipe import Recipe

CHECKPOINTING_ARGUMENT = checkpointing_name(PreTrainedModel)

FSDP_ADVICE = (
    " (on the CPU, Trainer and accelerate turn FSDP into DDP without a word, and on cards "
    "accelerate's plugin, not the recipe, says what is cut, in which dtype and where it lies): "
    "use gradmem_lib's prepare(model, recipe) and step(...) with this Recipe(sharding=...) under "
    "torchrun, or sharding='ddp' here"
)
# Arguments of Trainer that a recipe decides, or that it cannot respect.
REFUSED_ARGUMENTS = {
    "model_init": "the recipe has changed this model: make the model first, and a trainer for each",
    "optimizers": (
        "the recipe makes the optimizer: choose it there, and the schedule by lr_scheduler_type"
    ),
    "optimizer_cls_and_kwargs": "the recipe makes the optimizer: choose it there",
    **dict.fromkeys(
        ("deepspeed", "parallelism_config", "torch_empty_cache_steps"),
        "its own step knows nothing of it",
    ),
    "fsdp": f"FSDP is not set up by make_trainer{FSDP_ADVICE}",
}


def arguments(recipe: Recipe, micro_batch: int) -> dict[str, Any]:
    """The fields of ``TrainingArguments`` that ``recipe`` decides, for micro-batches of
    ``micro_batch`` rows.

    ``Trainer`` has no argument for segments, torch's Adafactor or a class of optimizers:
    ``make_trainer`` adds them.
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
        options: dict[str, Any] = {"use_reentrant": False}
        if every > 1:
            options["every_n_layers"] = every
        chosen[f"{CHECKPOINTING_ARGUMENT}_kwargs"] = options
    return chosen


def check_recipe(recipe: Recipe, on_cpu: bool) -> None:
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
        raise ValueError(f"sharding={recipe.sharding!r} is not set up by make_trainer{FSDP_ADVICE}")
    if recipe.scales_loss and on_cpu:
        raise ValueError(
            "on the CPU, Trainer trains in float32 in spite of fp16=True: choose "
            "'autocast-bf16', or move the model to a card"
        )


def training_arguments(recipe: Recipe, micro_batch: int, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` plus what ``recipe`` decides, for ``TrainingArguments``.

    Raises ``ValueError`` if the two do not agree.
    """
    given = _in_trainers_words(given)
    chosen = arguments(recipe, micro_batch)
    decided = {"bf16": False, "fp16": False, CHECKPOINTING_ARGUMENT: False} | chosen
    of_adam = [name for name in given if name.startswith("adam_")]
    if of_adam and not isinstance(recipe.optimizer, str):
        raise ValueError(
            f"{', '.join(of_adam)}: give a class its settings as optimizer=functools.partial(...), "
            "as they are called there"
        )
    for name, value in given.items():
        if name in REFUSED_ARGUMENTS and value:
            raise ValueError(
                f"{name}={value!r} is not taken by make_trainer, since "
                f"{REFUSED_ARGUMENTS[name]}. Or use Trainer itself"
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
    defaults["learning_rate"] = usual_rate(recipe)
    if OPTIMIZERS[recipe.optimizer].trainer_package is not None:
        # The optimizer is this library's own: without the package, Trainer would refuse that name.
        chosen["optim"] = "adamw_torch"
    accepted = {name: value for name, value in given.items() if name not in REFUSED_ARGUMENTS}
    return defaults | chosen | accepted


def _in_trainers_words(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with the settings of ``prepare``, which has torch's words for them."""
    words = {"lr": "learning_rate", "eps": "adam_epsilon"}
    found = {words.get(name, name): value for name, value in given.items()}
    if "betas" in found:
        found["adam_beta1"], found["adam_beta2"] = found.pop("betas")
    return found
