"""A model's config, from wherever it was given, the class that trains on it, and a batch that it takes."""

from __future__ import annotations

import copy
import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn


def model_class(config):
    """The class that trains on ``config``: its first architecture, else the language model, else the image classifier."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in config.architectures or ():
        known = getattr(transformers, name, None)
        if known is not None:
            return known
    tables = ("CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION")
    causal, masked, image = (getattr(auto, f"MODEL_FOR_{t}_MAPPING") for t in tables)
    for table in (masked if type(config) in masked else causal, causal, image):
        if type(config) in table:
            found = table[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise ValueError(
        f"no training class is known for a {type(config).__name__}: language models and image classifiers are. Build the "
        "module yourself and give it with batch={...}, a dict of example tensors (device='meta' costs no memory)"
    )


def example_batch(model: nn.Module, batch_size: int, seq_len: int | None) -> dict[str, Tensor]:
    """What ``model`` trains on: token ids (batch_size, seq_len) as inputs and labels, or images and their classes.

    ``seq_len`` is ignored for images. Random and on the model's device; with fake tensors if fake mode is on.
    """
    config = model.config
    device = next(model.parameters()).device
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if hasattr(config, "image_size") and getattr(model, "main_input_name", "") == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        dtype = next(model.parameters()).dtype
        return {
            "pixel_values": torch.rand(
                batch_size, config.num_channels, height, width, device=device, dtype=dtype
            ),
            "labels": torch.randint(0, config.num_labels, (batch_size,), device=device),
        }
    ids = torch.randint(0, text.vocab_size, (batch_size, seq_len), device=device)
    return {"input_ids": ids, "labels": ids}


HUB_SECONDS = 5


def title_of(given, config) -> str:
    return os.path.basename(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else config.model_type


def find_config(given):
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(given, PretrainedConfig):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"predict takes a transformers config, a folder, a hub id or an nn.Module, and was given {type(given).__name__}"
        )
    name = os.fspath(given)
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(
            f"the folder {name} has no config.json: give a folder that save_pretrained has written"
        )
    try:
        try:
            return AutoConfig.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError):
            if os.path.exists(name) or not _hub_answers():
                raise
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"no model is known as {name!r} ({reason}). Give a folder with a config.json, the id of a model on the hub (needs "
            "a network, and for some models a login), or a config such as LlamaConfig(hidden_size=4096, ...)"
        ) from error


def _hub_answers() -> bool:
    """Whether there is a way to the hub: without one, its client would try for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True  # the way may lead through them
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=HUB_SECONDS).close()
    except OSError:
        return False
    return True


def skeleton(config) -> nn.Module:
    """The model of ``config`` on the meta device: its structure, and no memory."""
    with torch.device("meta"):
        return model_class(config)(copy.deepcopy(config))
