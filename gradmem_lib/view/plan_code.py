"""Writes Python that trains by a plan's recipe.

It runs the library's own step, so it needs the bytes that were predicted.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from ..model.classes import model_class
from ..model.known import known_model
from ..planning.options import Option
from ..training.recipe import Recipe
from .template import text_from

PROGRAM = """\
{% if cards > 1 %}
# Save this as train.py, and start it {{ start }}
{% endif %}
{% if loop and cards > 1 %}
from torch.distributed import destroy_process_group, init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
{% elif loop %}
from torch.utils.data import DataLoader
{% endif %}
{% if transformers_names %}
from transformers import {{ transformers_names | join(", ") }}
{% endif %}
{% if cards > 1 or loop or transformers_names %}

{% endif %}
from gradmem_lib import {{ library_names | join(", ") }}

{% if loop and cards > 1 %}
mesh = init_device_mesh("{{ target }}", {{ mesh }})  # meets the other processes
{% endif %}
{% for line in loading %}
{{ line }}
{% endfor %}
recipe = Recipe(
{% for name, value in chosen.items() %}
    {{ name }}={{ value }},
{% endfor %}
)
{% if row is not none %}
# A row of train_dataset:
{% for words in row %}
#   {{ words }}
{% endfor %}
{% endif %}
{% if not loop %}
trainer = make_trainer(model, recipe, batch_size={{ batch_size }}, \
train_dataset=train_dataset{{ place }})
trainer.train()
{% else %}
model, optimizer, undo = prepare(model, recipe{{ ", mesh=mesh" if cards > 1 }})
{% if target == "cuda" and cards == 1 %}
{# on several cards, prepare has moved the model #}
model.to("cuda")
{% endif %}
loader = DataLoader(train_dataset, {{ batch_size }}, {{ order }})
for rows in loader:
{% if with_loss %}
    {# `loss` is the user's function #}
    value = step(model, optimizer, {{ batch }}, recipe, loss=loss)
{% else %}
    loss = step(model, optimizer, {{ batch }}, recipe)
{% endif %}
{% if cards > 1 %}
destroy_process_group()
{% endif %}
{% endif %}
"""


def plan_code(
    option: Option, given, config, target: str, example: Any = None, with_loss: bool = False
) -> str:
    """Python that trains the model ``given``, with this ``config``, by ``option``.

    It uses ``make_trainer`` if a ``Trainer`` can do it, else ``step``: for steps in backward, which
    ``Trainer`` does not have, for sharding, which it does differently, and for a module or a loss
    that it does not know. The user defines ``train_dataset`` (rows with ``labels``, or like those
    of ``example``), ``model`` or ``config`` if ``given`` is one of these, and ``loss`` if there was
    one. ``config`` is ``None`` for a module that transformers does not know. For several cards the
    program is a script, and its first line says how to start it.
    """
    recipe = option.recipe
    # make_trainer has no loss=, and Trainer's batches have tensors only.
    trainer_knows_it = config is not None and not with_loss and not _flags(example)
    trainer_does_it = not recipe.in_backward and recipe.sharding in (None, "ddp")
    loop = not (trainer_knows_it and trainer_does_it)
    name = type(given).__name__ if config is None else model_class(config).__name__
    loading, transformers_names, library_names = _loading(given, name)
    library_names += ["prepare", "step"] if loop else ["make_trainer"]
    if loop and example is None:
        transformers_names.append("default_data_collator")
    place, order = "", "shuffle=True"
    if target == "cuda":
        # The model is moved after the cast, so that the card does not hold it in float32.
        place = ", use_cpu=False"
    if option.cards > 1:
        order = "sampler=DistributedSampler(train_dataset), drop_last=True"
    if example is None:
        order += ", collate_fn=default_data_collator"
    return text_from(
        PROGRAM,
        cards=option.cards,
        start=launch(option.cards, option.machines),
        loop=loop,
        transformers_names=sorted(transformers_names),
        library_names=["Recipe", *sorted(library_names)],
        target=target,
        mesh=_mesh(option),
        loading=loading,
        chosen=_chosen(recipe),
        row=None if example is None else row_text(example, recipe).split(", "),
        batch_size=option.micro_batch * recipe.accumulation,
        batch=_batch(example, '.to("cuda")' if target == "cuda" else ""),
        with_loss=with_loss,
        place=place,
        order=order,
    )


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


def _mesh(option: Option) -> str:
    """The shape of the mesh of processes. Hybrid sharding has two dimensions: the machines, which
    have a copy each, and the cards that share a copy.
    """
    if option.machines > 1 and option.recipe.fully_sharded:
        return f'({option.machines}, {option.cards}), mesh_dim_names=("copies", "shards")'
    return f"({option.machines * option.cards},)"


def _loading(given, name: str) -> tuple[list[str], list[str], list[str]]:
    """The lines that load the model, and the names that they import from transformers and from this
    library.
    """
    if isinstance(given, nn.Module):
        return [], [], []
    build = f"model = {name}(config)"
    if isinstance(given, PretrainedConfig):
        return [build], [name], []
    weights = given
    if os.path.exists(given):
        weights = Path(given) if os.path.isdir(given) else Path(given).parent
        if not any(weights.glob("*.safetensors")) and not any(weights.glob("pytorch_model*.bin")):
            config = f"config = AutoConfig.from_pretrained({_quoted(given)})"
            return [config, build], ["AutoConfig", name], []
    elif known := known_model(os.fspath(given)):
        title, _, weights = known
        if not weights:
            return [f"config = known_model({_quoted(title)})[1]", build], [name], ["known_model"]
    return [f"model = {name}.from_pretrained({_quoted(weights)})"], [name], []


def _quoted(path: str | os.PathLike) -> str:
    """``path`` as a string in Python, in double quotes."""
    return json.dumps(os.fspath(path), ensure_ascii=False)


def _chosen(recipe: Recipe) -> dict[str, str]:
    """What a program says of its recipe: precision, optimizer, and what is not the default."""
    if recipe.checkpointing is None and not recipe.fully_sharded:
        recipe = replace(recipe, layers=())  # nothing asks where the layers are
    chosen = {}
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in ("precision", "optimizer") or value != field.default:
            chosen[field.name] = f'"{value}"' if isinstance(value, str) else repr(value)
    return chosen


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
