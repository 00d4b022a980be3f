"""Well-known models by name: their sizes, without a network."""

import copy
import json
import os
import re
from importlib.resources import files
from typing import Any

from torch import nn

from .. import compat
from ..prediction.configs import find_config, title_of


def model_table() -> dict[str, dict[str, Any]]:
    """By name: ``ids`` on the hub (the first one is loaded), and the settings of the published
    config that differ from transformers' defaults.
    """
    return json.loads(files(__package__).joinpath("models.json").read_text(encoding="utf-8"))


def known_model(name: str) -> tuple[str, Any, str] | None:
    """(name, config, hub id) of a well-known model, however its name or its id is written; ``None``
    for other models.

    The config has the model's sizes and needs no network. If an id was given, the hub id is that
    one.
    """
    from transformers import AutoConfig

    wanted = _plain(name)
    for known, row in model_table().items():
        hub = row.pop("ids")
        ids = {}
        for hub_id in hub:
            for written in (hub_id, hub_id.rpartition("/")[2]):  # with and without the owner
                ids[_plain(written)] = hub_id
        ids[_plain(known)] = next(iter(hub), "")
        if wanted in ids:
            return known, AutoConfig.for_model(**row), ids[wanted]
    return None


def _plain(name: str) -> str:
    return " ".join(re.findall(r"[0-9]+(?:\.[0-9]+)?|[a-z]+", name.lower()))  # 1.7 is not 17


def find_model(model_or_config) -> tuple[Any, str]:
    """(config, title) of a model, a config, a well-known name, a folder or a hub id.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(model_or_config, nn.Module):
        inside = compat.inside_peft(model_or_config)
        if (config := getattr(inside, "config", None)) is None:
            raise ValueError(
                f"{type(model_or_config).__name__} has no config: plan is for transformers models. "
                "For other modules, predict each recipe with "
                "predict(model, batch=..., recipe=Recipe(...))"
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
        start = _plain(model_or_config.rpartition("/")[2])[:5] if named else ""
        if not (
            similar := [name for name in model_table() if len(start) > 2 and start in _plain(name)]
        ):
            raise
        listed = ", ".join(similar)
        raise ValueError(f"{error}. Known by name, without a network: {listed}") from error
    except Exception as error:  # transformers' checks of a config's fields may raise anything
        if not isinstance(model_or_config, str | os.PathLike):
            raise
        message = (str(error).strip().splitlines() or [""])[-1].strip()
        raise ValueError(
            f"the config of {model_or_config} is not valid ({type(error).__name__}: {message})"
        ) from error
