"""Well-known models by name: their sizes, without a network."""

import difflib
import json
import re
from importlib.resources import files
from typing import Any


def model_table() -> dict[str, dict[str, Any]]:
    """By name: ``ids`` on the hub (the first one is loaded), and the settings of the published
    config that differ from transformers' defaults.

    The rows up to Phi-3.5-MoE were taken on 25 November 2026, and those below it on 29 November
    2026, from FLAN-T5 on one day later, from configs that public repositories keep. Each has the
    published number of parameters.
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
