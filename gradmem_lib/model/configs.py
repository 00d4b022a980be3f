"""Finds a model's config, and builds the model of a config without memory."""

import copy
import os
import socket
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from ..compat.transformers_models import attention_of, use_sdpa
from ..names import is_flash
from .classes import model_class
from .known import known_model, similar_names
from .wrappers import inside_peft


def find_model(model_or_config) -> tuple[Any, str]:
    """(config, title) of a model, a config, a well-known name, a folder or a hub id. The id of a
    well-known model is found in the table, without a network.

    Raises ``ValueError`` for a name that nobody knows.
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
    if named:
        known = known_model(model_or_config)
        if known is not None:
            title, config, _ = known
            return config, title
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


def title_of(given, config) -> str:
    return (
        os.path.basename(os.fspath(given))
        if isinstance(given, (str, os.PathLike))
        else config.model_type
    )


def find_config(given):
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(given, PretrainedConfig):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            "give a transformers config, a well-known name, a folder, a hub id or an nn.Module: "
            f"a model is asked for, and was given {type(given).__name__}"
        )
    name = os.fspath(given)
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(
            f"the folder {name} has no config.json: give one that save_pretrained has written"
        )
    try:
        try:
            return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError):
            if os.path.exists(name) or not _hub_answers():
                raise
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"no model is known as {name!r} ({reason}). Give a well-known name, such as "
            "'Llama-2-7B', a folder with a config.json, the id of a model on the hub (needs a "
            "network, and for some a login), or a config: LlamaConfig(hidden_size=4096, ...)"
        ) from error


def _hub_answers() -> bool:
    """Whether the hub can be reached. If it cannot, its client would try for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return not constants.HF_HUB_OFFLINE  # a proxy may reach it
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def skeleton(config) -> nn.Module:
    """The model of ``config`` on the meta device: its structure without memory."""
    if getattr(config, "quantization_config", None):
        raise ValueError(
            "the config has a quantization_config, and a recipe says how a base is stored: give "
            "the model as it was before, or a config without that field. To keep it in 4 bits: "
            "plan's method='qlora', Recipe(precision='float32', lora_rank=16, "
            "quantized_base='nf4', compute_dtype='bf16'), or a BitsAndBytesConfig as quantized_base"
        )
    kind = model_class(config)
    copied = copy.deepcopy(config)
    if is_flash(attention_of(copied)):
        use_sdpa(copied)  # the kernel's package may not be there
    try:
        with torch.device("meta"):
            return kind(copied)
    except Exception as error:
        raise ValueError(
            f"transformers cannot build {kind.__name__} from this config ({type(error).__name__}: "
            f"{error}): change the setting that causes this error"
        ) from error
