"""Python that trains by a plan's recipe: what it runs is the library's own step, so it needs what was predicted."""

import os
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig

from ..planning.models import known_model
from ..planning.options import Option
from ..prediction.configs import model_class
from ..training.recipe import Recipe


def plan_code(option: Option, given, config, target: str) -> str:
    """Python that trains the model ``given``, of this ``config``, by ``option``: with ``make_trainer`` where a ``Trainer`` can, else
    with ``step``. ``train_dataset`` is yours: rows as the model takes them, with ``labels``. So is ``model`` or ``config``, where
    ``given`` is one."""
    recipe = option.recipe
    uses, how = (["prepare", "step"], _loop) if recipe.in_backward else (["make_trainer"], _trainer)
    loading, transformers, ours = _loading(given, model_class(config).__name__)
    transformers += ["default_data_collator"] if recipe.in_backward else []
    imports = ["from torch.utils.data import DataLoader"] if recipe.in_backward else []
    if transformers:
        imports.append(f"from transformers import {', '.join(sorted(transformers))}")
    if imports:
        imports.append("")
    names = ["Recipe", *sorted([*uses, *ours])]
    lines = [*imports, f"from gradmem_lib import {', '.join(names)}", "", *loading, *_recipe(recipe)]
    return "\n".join([*lines, *how(option, target)]) + "\n"


def _loading(given, name: str) -> tuple[list[str], list[str], list[str]]:
    """The lines that load the model, what they import from transformers, and what from here."""
    if isinstance(given, nn.Module):
        return [], [], []
    if isinstance(given, PretrainedConfig):
        return [f"model = {name}(config)"], [name], []
    if not os.path.exists(given):
        known = known_model(os.fspath(given))
        if known is not None and not known[2]:
            return (
                [f'config = known_model("{known[0]}")[1]', f"model = {name}(config)"],
                [name],
                ["known_model"],
            )
        return [f'model = {name}.from_pretrained("{known[2] if known else os.fspath(given)}")'], [name], []
    folder = Path(given) if os.path.isdir(given) else Path(given).parent
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return [f'model = {name}.from_pretrained("{folder}")'], [name], []
    lines = [f'config = AutoConfig.from_pretrained("{os.fspath(given)}")', f"model = {name}(config)"]
    return lines, ["AutoConfig", name], []


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
    # The model travels after it was cast, so that the card never holds it in float32 without need.
    given += ", use_cpu=False" if target == "cuda" else ""
    return [f"trainer = make_trainer({given})", "trainer.train()"]


def _loop(option: Option, target: str) -> list[str]:
    """For an optimizer in backward, which ``Trainer`` does not have."""
    place = f'.to("{target}")' if target == "cuda" else ""
    batch = "{name: tensor" + place + " for name, tensor in rows.items()}" if place else "rows"
    return [
        "model, optimizer, undo = prepare(model, recipe)",
        *([f"model{place}"] if place else []),
        f"loader = DataLoader(train_dataset, {option.micro_batch}, shuffle=True, collate_fn=default_data_collator)",
        "for rows in loader:",
        f"    loss = step(model, optimizer, {batch}, recipe)",
    ]
