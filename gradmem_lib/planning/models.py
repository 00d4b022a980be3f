"""Well-known models by name: their sizes, without a network."""

import copy
import difflib
import json
import os
import re
from importlib.resources import files
from typing import Any

from torch import nn

from ..compat.transformers_models import inside_peft
from ..prediction.configs import find_config, model_class, title_of


def model_table() -> dict[str, dict[str, Any]]:
    """By name: ``ids`` on the hub (the first one is loaded), and the settings of the published
    config that differ from transformers' defaults.

    The rows up to Phi-3.5-MoE were taken on 25 November 2026, and those below it on 29 November
    2026, from configs that public repositories keep. Each has the published number of parameters.
    """
    return json.loads(files(__package__).joinpath("models.json").read_text(encoding="utf-8"))


# Words of a name that say how a model was tuned or stored, and not what its sizes are.
_NOT_A_SIZE = (
    "instruct",
    "it",
    "chat",
    "pt",
    "hf",
    "bnb",
    "unsloth",
    "gguf",
    "gptq",
    "awq",
    "int4",
    "int8",
    "4bit",
    "8bit",
    "fp8",
    "fp16",
    "bf16",
    "f16",
    "f32",
    "mlx",
    "w4a16",
    "w8a8",
)
# Owners on the hub that publish models of others in other formats, with the sizes unchanged.
_MIRRORS = (
    "bartowski",
    "ggml-org",
    "hugging-quants",
    "lmstudio-community",
    "mlx-community",
    "neuralmagic",
    "nousresearch",
    "redhatai",
    "thebloke",
    "unsloth",
)


def known_model(name: str) -> tuple[str, Any, str] | None:
    """(name, config, hub id) of a well-known model, however its name or its id is written; ``None``
    for other models.

    Case, separators, the owner, and words such as "Instruct" or "bnb-4bit" do not matter. The
    config has the model's sizes and needs no network. If an id was given, the hub id is that one;
    if a mirror's was given, it is the maker's.
    """
    from transformers import AutoConfig

    owner, _, rest = name.rpartition("/")
    mirrored = owner.lower() in _MIRRORS
    wanted = _plain(rest if mirrored else name)
    wanted_sizes = _sizes_of(rest) if mirrored or not owner else None
    of_these_sizes = None
    for known, row in model_table().items():
        hub = row.pop("ids")
        ids = {known: next(iter(hub), "")}
        for hub_id in hub:
            ids[hub_id] = hub_id
            ids.setdefault(hub_id.rpartition("/")[2], hub_id)  # without the owner
        for written, hub_id in ids.items():
            if _plain(written) == wanted:
                return known, AutoConfig.for_model(**row), hub_id
            if of_these_sizes is None and _sizes_of(written) == wanted_sizes:
                of_these_sizes = known, row, hub_id
    if of_these_sizes is None:
        return None
    known, row, hub_id = of_these_sizes
    return known, AutoConfig.for_model(**row), hub_id


def _plain(name: str) -> str:
    return " ".join(re.findall(r"[0-9]+(?:\.[0-9]+)?|[a-z]+", name.lower()))  # 1.7 is not 17


def _sizes_of(name: str) -> str:
    """``name`` without the words that say nothing of the sizes: of "Qwen3-8B-bnb-4bit" it is
    "qwen 3 8 b".
    """
    words = [word for word in re.split(r"[\s/_-]+", name.lower()) if word not in _NOT_A_SIZE]
    return _plain(" ".join(words))


def similar_names(name: str) -> list[str]:
    """The names of at most three well-known models that are written most like ``name``."""
    by_plain_name = {_plain(known): known for known in model_table()}
    nearest = difflib.get_close_matches(_plain(name.rpartition("/")[2]), by_plain_name, n=3)
    return [by_plain_name[plain] for plain in nearest]


def is_own_module(given: object) -> bool:
    """Whether ``given`` is a module that transformers could not build from its config."""
    from transformers import PretrainedConfig

    if not isinstance(given, nn.Module):
        return False
    inside = inside_peft(given)
    config = getattr(inside, "config", None)
    if not isinstance(config, PretrainedConfig):
        return True
    config = copy.deepcopy(config)
    config.architectures = [type(inside).__name__]
    try:
        return model_class(config) is not type(inside)
    except ValueError:
        return True


def find_model(model_or_config) -> tuple[Any, str]:
    """(config, title) of a model, a config, a well-known name, a folder or a hub id.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(model_or_config, nn.Module):
        inside = inside_peft(model_or_config)
        if (config := getattr(inside, "config", None)) is None:
            raise ValueError(
                f"{type(model_or_config).__name__} has no config, so its inputs are not known: "
                "give batch=, a row or more of what it takes (torch.empty(..., device='meta') "
                "costs no memory), and loss= if its output has no loss; or predict each recipe "
                "with predict(model, batch=..., recipe=Recipe(...))"
            )
        config = copy.deepcopy(config)
        config.architectures = [type(inside).__name__]
        return config, type(inside).__name__
    named = isinstance(model_or_config, str) and not os.path.exists(model_or_config)
    if (known := known_model(model_or_config) if named else None) is not None:
        return known[1], known[0]
    try:
        config = find_config(model_or_config)
        return config, title_of(model_or_config, config)
    except ValueError as error:
        nearest = similar_names(model_or_config) if named else []
        if not nearest:
            raise
        raise ValueError(
            f"{error}. Known by name, without a network, and written most like it: "
            f"{', '.join(nearest)}"
        ) from error
    except Exception as error:  # transformers' checks of a config's fields may raise anything
        if not isinstance(model_or_config, str | os.PathLike):
            raise
        message = (str(error).strip().splitlines() or [""])[-1].strip()
        raise ValueError(
            f"the config of {model_or_config} is not valid ({type(error).__name__}: {message})"
        ) from error
