"""Writes Python that trains by a plan's recipe.

It runs the library's own step, so it needs the bytes that were predicted.
"""

import json
import os
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig

from ..planning.models import known_model
from ..planning.options import Option
from ..prediction.configs import model_class
from ..training.recipe import Recipe


def plan_code(option: Option, given, config, target: str) -> str:
    """Python that trains the model ``given``, with this ``config``, by ``option``.

    It uses ``make_trainer`` if a ``Trainer`` can do it, else ``step``. The user defines
    ``train_dataset`` (rows with ``labels``), and ``model`` or ``config`` if ``given`` is one of
    these. For several cards it is a script, and its first line says how to start it.
    """
    recipe = option.recipe
    loop = recipe.in_backward or recipe.sharding not in (None, "ddp")
    uses, write_training = (["prepare", "step"], _loop) if loop else (["make_trainer"], _trainer)
    loading, transformers, library_names = _loading(given, model_class(config).__name__)
    imports, setup = [], []
    if option.cards > 1:
        imports.append(f"# Save this as train.py, and start it with: {launch(option.cards)}")
    if loop and option.cards > 1:
        imports.append("from torch.distributed import destroy_process_group, init_device_mesh")
        imports.append("from torch.utils.data import DataLoader, DistributedSampler")
        setup = [
            f'mesh = init_device_mesh("{target}", ({option.cards},))  # meets the other processes'
        ]
    elif loop:
        imports.append("from torch.utils.data import DataLoader")
    transformers += ["default_data_collator"] if loop else []
    if transformers:
        imports.append(f"from transformers import {', '.join(sorted(transformers))}")
    if imports:
        imports.append("")
    names = ["Recipe", *sorted([*uses, *library_names])]
    lines = [
        *imports,
        f"from gradmem_lib import {', '.join(names)}",
        "",
        *setup,
        *loading,
        *_recipe(recipe),
    ]
    return "\n".join([*lines, *write_training(option, target)]) + "\n"


def launch(cards: int, script: str = "train.py") -> str:
    """Two commands, each of which starts ``script`` once for each of this machine's ``cards``.
    accelerate has to be told the cards: if it finds none, it would start one process instead of
    two. The recipe does not use its other settings.
    """
    return (
        f"torchrun --nproc-per-node={cards} {script}, or: accelerate launch --multi_gpu "
        f"--num_processes={cards} {script}"
    )


def _loading(given, name: str) -> tuple[list[str], list[str], list[str]]:
    """The lines that load the model, and the names that they import from transformers and from this
    library.
    """
    if isinstance(given, nn.Module):
        return [], [], []
    if isinstance(given, PretrainedConfig):
        return [f"model = {name}(config)"], [name], []
    if not os.path.exists(given):
        known = known_model(os.fspath(given))
        if known is not None and not known[2]:
            return (
                [f"config = known_model({_quoted(known[0])})[1]", f"model = {name}(config)"],
                [name],
                ["known_model"],
            )
        return (
            [f"model = {name}.from_pretrained({_quoted(known[2] if known else os.fspath(given))})"],
            [name],
            [],
        )
    folder = Path(given) if os.path.isdir(given) else Path(given).parent
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return [f"model = {name}.from_pretrained({_quoted(folder)})"], [name], []
    lines = [f"config = AutoConfig.from_pretrained({_quoted(given)})", f"model = {name}(config)"]
    return lines, ["AutoConfig", name], []


def _quoted(path: str | os.PathLike) -> str:
    """``path`` as a string in Python, in double quotes."""
    return json.dumps(os.fspath(path), ensure_ascii=False)


def _recipe(recipe: Recipe) -> list[str]:
    plain = Recipe()
    chosen = {
        name: getattr(recipe, name)
        for name in Recipe.__dataclass_fields__
        if name in ("precision", "optimizer") or getattr(recipe, name) != getattr(plain, name)
    }
    shown = (f'"{v}"' if isinstance(v, str) else repr(v) for v in chosen.values())
    return ["recipe = Recipe(", *(f"    {k}={v}," for k, v in zip(chosen, shown, strict=True)), ")"]


def _trainer(option: Option, target: str) -> list[str]:
    rows = option.micro_batch * option.recipe.accumulation
    given = f"model, recipe, batch_size={rows}, train_dataset=train_dataset"
    # The model is moved after the cast, so that the card does not hold it in float32 without need.
    given += ", use_cpu=False" if target == "cuda" else ""
    return [f"trainer = make_trainer({given})", "trainer.train()"]


def _loop(option: Option, target: str) -> list[str]:
    """The training loop without ``Trainer``.

    It is for steps in backward, which ``Trainer`` does not have, and for sharding, which it does
    differently.
    """
    place = f'.to("{target}")' if target == "cuda" else ""
    batch = "{name: tensor" + place + " for name, tensor in rows.items()}" if place else "rows"
    rows, several = option.micro_batch * option.recipe.accumulation, option.cards > 1
    order = (
        "sampler=DistributedSampler(train_dataset), drop_last=True" if several else "shuffle=True"
    )
    return [
        f"model, optimizer, undo = prepare(model, recipe{', mesh=mesh' if several else ''})",
        *([f"model{place}"] if place and not several else []),
        f"loader = DataLoader(train_dataset, {rows}, {order}, collate_fn=default_data_collator)",
        "for rows in loader:",
        f"    loss = step(model, optimizer, {batch}, recipe)",
        *(["destroy_process_group()"] if several else []),
    ]
