"""Python that trains by a plan's recipe."""

from __future__ import annotations

import os

import torch
from torch import nn

from ..prediction.configs import model_class
from ..training.prepare import ADAFACTOR_EPS, RELATIVE_RATE
from ..training.recipe import Recipe
from .models import find_model, known_model
from .options import Option


def code(option: Option, given, target: str = "cuda") -> str:
    """Python that trains the model by ``option``, with transformers' ``Trainer`` where it can. ``train_dataset`` is yours."""
    recipe = option.recipe
    lines = _model_lines(recipe, given)
    if recipe.in_backward:
        lines = [] if isinstance(given, nn.Module) else lines  # prepare does the rest
        return "\n".join(_loop(option, lines, _auto_class(given), target)) + "\n"
    homes = {
        "cast_weights": "training.prepare",
        "add_lora": "techniques.lora",
        "chunked_loss": "techniques.losses",
    }
    imports, names, lora = [], [], []
    if any(line.startswith("cast_weights") for line in lines):
        names.append("cast_weights")
    if any("find_model(" in line for line in lines):
        imports.append("from gradmem_lib.planning.models import find_model")
    if recipe.lora_rank:
        names.append("add_lora")
        lora.append(f"add_lora(model, {recipe.lora_rank})")
    if recipe.quantized_base:
        imports.append("from gradmem_lib.techniques.quantized import quantize_base")
        lora.append("quantize_base(model)")
    trainer, loss = "Trainer", []
    if recipe.chunked_loss:
        trainer = "ChunkedLoss"
        names.append("chunked_loss")
        loss = [
            "class ChunkedLoss(Trainer):",
            "    def compute_loss(self, model, inputs, num_items_in_batch=None, **ignored):",
            "        with self.accelerator.autocast():",
            "            return chunked_loss(model, inputs, num_items_in_batch)",
            "",
            "",
        ]
    return (
        "\n".join(
            [
                "import torch",
                f"from transformers import {_auto_class(given)}, Trainer, TrainingArguments",
                *(f"from gradmem_lib.{homes[name]} import {name}" for name in names),
                *imports,
                "",
                *([""] if loss else []),
                *loss,
                *lines,
                *lora,
                *_training_arguments(option, target),
                *_trainer_lines(trainer, recipe),
                "trainer.train()",
            ]
        )
        + "\n"
    )


def _trainer_lines(name: str, recipe: Recipe) -> list[str]:
    given = "model=model, args=args, train_dataset=train_dataset"
    if recipe.optimizer != "adafactor-torch":
        return [f"trainer = {name}({given})"]
    return [
        f"trainer = {name}(",
        f"    {given},",
        "    optimizer_cls_and_kwargs=(",
        "        torch.optim.Adafactor,",
        f'        {{"lr": args.learning_rate, "eps": {ADAFACTOR_EPS}, "foreach": False}},',
        "    ),",
        ")",
    ]


def _auto_class(given) -> str:
    name = model_class(find_model(given)[0]).__name__
    for end in ("MaskedLM", "ImageClassification", "SequenceClassification", "TokenClassification"):
        if name.endswith(end):
            return f"AutoModelFor{end}"
    return "AutoModelForCausalLM"


def _model_lines(recipe: Recipe, given) -> list[str]:
    dtype = str(recipe.weight_dtype)
    attention = {"fused": "sdpa", None: "sdpa"}.get(recipe.attention, recipe.attention)
    if isinstance(given, nn.Module):
        cast = [] if recipe.weight_dtype == torch.float32 else [f"cast_weights(model, {dtype})"]
        return [*cast, f'model.set_attn_implementation("{attention}")', "model.config.use_cache = False"]
    source, config = "from_config(config", []
    if isinstance(given, (str, os.PathLike)):
        known = known_model(given) if isinstance(given, str) and not os.path.exists(given) else None
        if known and not known[2]:
            config = [f'config, _ = find_model("{known[0]}")']
        else:
            source = f'from_pretrained("{known[2] if known else os.fspath(given)}"'
    return [
        *config,
        f'model = {_auto_class(given)}.{source}, dtype={dtype}, attn_implementation="{attention}")',
        "model.config.use_cache = False",
    ]


def _training_arguments(option: Option, target: str) -> list[str]:
    from ..training.trainer import arguments

    chosen = {"output_dir": "out"} | arguments(option.recipe, option.micro_batch)
    if option.recipe.optimizer == "adafactor-torch":
        chosen["learning_rate"] = RELATIVE_RATE
    if target == "cpu":
        chosen["use_cpu"] = True
    shown = (f'"{v}"' if isinstance(v, str) else repr(v) for v in chosen.values())
    return ["args = TrainingArguments(", *(f"    {k}={v}," for k, v in zip(chosen, shown, strict=True)), ")"]


def _loop(option: Option, model: list[str], auto_class: str, target: str) -> list[str]:
    """For an optimizer in backward, which ``Trainer`` does not have: ``recipe.prepare`` and ``recipe.step``."""
    shown = ", ".join(
        f"{name}={getattr(option.recipe, name)!r}"
        for name in Recipe.__dataclass_fields__
        if getattr(option.recipe, name) != getattr(Recipe(), name)
    )
    device = "cuda" if target == "cuda" else "cpu"
    rate = RELATIVE_RATE if option.recipe.optimizer == "adafactor-torch" else 1e-5
    return [
        "import torch",
        "from torch.utils.data import DataLoader",
        f"from transformers import {auto_class}, default_data_collator",
        *(
            ["from gradmem_lib.planning.models import find_model"]
            if any("find_model(" in line for line in model)
            else []
        ),
        "from gradmem_lib import Recipe",
        "from gradmem_lib.training.prepare import prepare",
        "from gradmem_lib.training.step import step",
        "",
        *model,
        f"recipe = Recipe({shown})",
        f'model, optimizer, undo = prepare(model.to("{device}"), recipe, lr={rate})',
        f"for batch in DataLoader(train_dataset, {option.micro_batch}, shuffle=True, collate_fn=default_data_collator):",
        f'    loss = step(model, optimizer, {{k: v.to("{device}") for k, v in batch.items()}}, recipe)',
    ]
