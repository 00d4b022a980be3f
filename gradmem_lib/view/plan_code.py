"""Writes Python that trains by a plan's recipe.

It runs the library's own step, so it needs the bytes that were predicted.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from ..planning.models import known_model
from ..planning.options import Option
from ..prediction.configs import model_class
from ..training.recipe import Recipe


def plan_code(
    option: Option, given, config, target: str, example: Any = None, with_loss: bool = False
) -> str:
    """Python that trains the model ``given``, with this ``config``, by ``option``.

    It uses ``make_trainer`` if a ``Trainer`` can do it, else ``step``. The user defines
    ``train_dataset`` (rows with ``labels``, or like those of ``example``), ``model`` or ``config``
    if ``given`` is one of these, and ``loss`` if there was one. ``config`` is ``None`` for a module
    that transformers does not know. For several cards the program is a script, and its first line
    says how to start it.
    """
    recipe = option.recipe
    # make_trainer has no loss=, and Trainer's batches have tensors only.
    trainer_knows_it = config is not None and not with_loss and not _flags(example)
    trainer_does_it = not recipe.in_backward and recipe.sharding in (None, "ddp")
    loop = not (trainer_knows_it and trainer_does_it)
    uses = ["prepare", "step"] if loop else ["make_trainer"]
    name = type(given).__name__ if config is None else model_class(config).__name__
    loading, transformers, library_names = _loading(given, name)
    imports, setup = [], []
    if option.cards > 1:
        how = launch(option.cards, option.machines)
        imports.append(f"# Save this as train.py, and start it {how}")
    if loop and option.cards > 1:
        imports.append("from torch.distributed import destroy_process_group, init_device_mesh")
        imports.append("from torch.utils.data import DataLoader, DistributedSampler")
        setup = [_mesh(option, target)]
    elif loop:
        imports.append("from torch.utils.data import DataLoader")
    if loop and example is None:
        transformers.append("default_data_collator")
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
    if example is not None:
        lines.append("# A row of train_dataset:")
        lines += [f"#   {words}" for words in row_text(example, recipe).split(", ")]
    if loop:
        lines += _loop(option, target, example, with_loss)
    else:
        lines += _trainer(option, target)
    return "\n".join(lines) + "\n"


def row_text(example: Any, recipe: Recipe | None = None) -> str:
    """The names and shapes of the tensors in a row of ``example``; with a ``recipe``, also their
    dtypes: floating-point inputs have that of the weights.
    """
    if isinstance(example, Mapping):
        named = list(example.items())
    elif isinstance(example, (tuple, list)):
        named = [(f"tensor {place}", value) for place, value in enumerate(example)]
    else:
        named = [("a tensor", example)]
    words = []
    for name, value in named:
        if not isinstance(value, Tensor):
            continue
        shape = " x ".join(map(str, value.shape[1:])) or "one number"
        word = f"{name} {shape}"
        if recipe is not None:
            dtype = value.dtype
            if dtype.is_floating_point and recipe.weight_dtype is not None:
                dtype = recipe.weight_dtype
            word += f" ({str(dtype).removeprefix('torch.')})"
        words.append(word)
    return ", ".join(words)


def _flags(example: Any) -> dict[str, Any]:
    """What a batch has besides tensors, such as ``return_loss=True``."""
    if not isinstance(example, Mapping):
        return {}
    return {name: value for name, value in example.items() if not isinstance(value, Tensor)}


def launch(cards: int, machines: int = 1, script: str = "train.py") -> str:
    """How to start ``script`` once for each of the ``cards`` of each of ``machines``, in words.

    On one machine, these are two commands. accelerate has to be told the cards: if it finds none,
    it would start one process instead of two. The recipe does not use its other settings.
    """
    if machines > 1:
        return (
            f"on each machine with: torchrun --nnodes={machines} --nproc-per-node={cards} "
            "--rdzv-backend=c10d --rdzv-endpoint=FIRST:29500 --rdzv-id=1 "
            f"{script} (FIRST is the name of the first machine)"
        )
    return (
        f"with: torchrun --nproc-per-node={cards} {script}, or: accelerate launch --multi_gpu "
        f"--num_processes={cards} {script}"
    )


def _mesh(option: Option, target: str) -> str:
    """The line that makes the mesh of processes. Hybrid sharding has two dimensions: the machines,
    which have a copy each, and the cards that share a copy.
    """
    if option.machines == 1:
        shape, named = f"({option.cards},)", ""
    elif option.recipe.fully_sharded:
        shape = f"({option.machines}, {option.cards})"
        named = ', mesh_dim_names=("copies", "shards")'
    else:
        shape, named = f"({option.machines * option.cards},)", ""
    return f'mesh = init_device_mesh("{target}", {shape}{named})  # meets the other processes'


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
    if recipe.checkpointing is None and not recipe.fully_sharded:
        recipe = replace(recipe, layers=())  # nothing asks where the layers are
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


def _loop(option: Option, target: str, example: Any, with_loss: bool) -> list[str]:
    """The training loop without ``Trainer``.

    It is for steps in backward, which ``Trainer`` does not have, for sharding, which it does
    differently, and for a module or a loss that it does not know.
    """
    place = f'.to("{target}")' if target == "cuda" else ""
    rows = option.micro_batch * option.recipe.accumulation
    mesh, order = "", "shuffle=True"
    if option.cards > 1:
        mesh, order = ", mesh=mesh", "sampler=DistributedSampler(train_dataset), drop_last=True"
    if example is None:
        order += ", collate_fn=default_data_collator"
    result, own_loss = "loss", ""
    if with_loss:  # `loss` is the user's function
        result, own_loss = "value", ", loss=loss"
    lines = [f"model, optimizer, undo = prepare(model, recipe{mesh})"]
    if place and option.cards == 1:  # on several cards, prepare has moved the model
        lines.append(f"model{place}")
    lines += [
        f"loader = DataLoader(train_dataset, {rows}, {order})",
        "for rows in loader:",
        f"    {result} = step(model, optimizer, {_batch(example, place)}, recipe{own_loss})",
    ]
    if option.cards > 1:
        lines.append("destroy_process_group()")
    return lines


def _batch(example: Any, place: str) -> str:
    """The expression that makes the model's batch from the ``rows`` that a loader gives."""
    if isinstance(example, Tensor):
        return f"rows{place}"
    if isinstance(example, (tuple, list)):
        return f"tuple(tensor{place} for tensor in rows)"
    batch = "rows"
    if place:
        batch = "{name: tensor" + place + " for name, tensor in rows.items()}"
    flags = _flags(example)
    if flags:
        batch += f" | {flags!r}"
    return batch
