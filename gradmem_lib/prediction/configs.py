"""Finds a model's config, the class to train it with, and an example batch for it."""

import copy
import inspect
import math
import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from ..compat.transformers_models import attention_of, inside_peft, use_sdpa
from ..hf_names import LABELS_OF_HEAD, PAIR_TABLES, POSITION_TABLE, TABLES
from ..names import is_flash


def model_class(config):
    """The class to train a model of ``config`` with: its first architecture, or else the usual
    class of its family.

    Encoder-decoder configs give a sequence-to-sequence model. Other configs give a masked or causal
    language model, a model of pairs of pictures and texts, an image classifier, or a speech model.
    """
    named = _named_class(config)
    if named is not None and not _is_picture_model_without_head(named, config):
        return named
    found = _usual_class(config) or named
    if found is None:
        raise ValueError(
            f"no training class is known for a {type(config).__name__}: language models, pairs of "
            "an encoder and a decoder, and image classifiers are. Name one in "
            "config.architectures, such as ['LlamaForSequenceClassification'], or build the module "
            "yourself and give it with batch={...}, a dict of example tensors (device='meta' "
            "costs no memory)"
        )
    return found


def _named_class(config):
    """The first class in ``config.architectures`` that transformers has; ``None`` if none is named.

    Raises ``ValueError`` if it has none of those that are named.
    """
    import transformers

    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None:
            return named
    if config.architectures:
        raise ValueError(
            f"the config is of {', '.join(config.architectures)}, which transformers does not "
            "have: name the class to train in config.architectures, set it to None for the "
            "family's usual class, or predict the model itself"
        )
    return None


def _is_picture_model_without_head(named, config) -> bool:
    """Whether class ``named`` has no loss, and the usual class of its family may take its place.

    A picture model's usual head is one linear layer. A language model without a head is not
    replaced: which head it gets decides its bytes.
    """
    from transformers.models.auto import modeling_auto as auto

    headless = auto.MODEL_MAPPING.get(type(config), None)
    return named is headless and named.main_input_name == "pixel_values"


def _usual_class(config):
    """The usual class to train a model of ``config``'s family with; ``None`` if none is known."""
    from transformers.models.auto import modeling_auto as auto

    tables = list(TABLES)
    if config.is_encoder_decoder:
        tables = [*PAIR_TABLES, *TABLES]
    for name in tables:
        table = getattr(auto, f"MODEL_FOR_{name}_MAPPING", {})
        if type(config) in table:
            found = table[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    return None


def example_batch(model: nn.Module, batch_size: int, seq_len: int | None) -> dict[str, Tensor]:
    """The inputs of ``model`` in training, by name: token ids (batch_size, seq_len), pictures or
    spectrograms, and labels.

    The name of the model's class decides the labels: one class a row, one class a token, the two
    ends of an answer, or the tokens themselves. ``seq_len`` is ignored if there are only pictures.
    Values are random, on the model's device; in a fake mode they are fake tensors. Raises
    ``ValueError``, which names ``batch=``, if the config does not tell the inputs.
    """
    model = inside_peft(model)
    config, inputs = model.config, set(inspect.signature(model.forward).parameters)
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config

    def numbers(*shape):
        return torch.rand(batch_size, *shape, device=parameter.device, dtype=parameter.dtype)

    def classes(n, *shape):
        return torch.randint(0, n, (batch_size, *shape), device=parameter.device)

    main, head = getattr(model, "main_input_name", "input_ids"), labels_of(model)
    if main == "input_features" and hasattr(config, "max_source_positions") and head == "tokens":
        # Whisper: two frames of the spectrogram are one position.
        spectrogram = numbers(config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": spectrogram, "labels": classes(text.vocab_size, seq_len)}
    if main == "pixel_values" and head == "class" and "labels" in inputs:
        return {
            "pixel_values": numbers(*picture_shape(config)),
            "labels": classes(config.num_labels),
        }
    pairs = {"pixel_values", "return_loss"} <= inputs
    if (
        main != "input_ids"
        or head is None
        or not (pairs or {"labels", "start_positions", "kwargs"} & inputs)
    ):
        raise ValueError(unknown_inputs(model))
    ids = classes(text.vocab_size, seq_len)
    if pairs:
        return {
            "input_ids": ids,
            "pixel_values": numbers(*picture_shape(config)),
            "return_loss": True,
        }
    if head == "ends":
        return {
            "input_ids": ids,
            "start_positions": classes(seq_len),
            "end_positions": classes(seq_len),
        }
    if head == "tokens":
        return {"input_ids": ids, "labels": ids}
    shape = (seq_len,) if head == "class of a token" else ()
    regression = config.num_labels == 1 and not shape
    return {
        "input_ids": ids,
        "labels": numbers() if regression else classes(config.num_labels, *shape),
    }


def unknown_inputs(model: nn.Module) -> str:
    """The words of the error that the config of ``model`` does not tell what it trains on."""
    main = getattr(model, "main_input_name", "input_ids")
    return (
        f"what {type(model).__name__} trains on cannot be told from its config (it takes {main}): "
        "give batch=, a dict of its inputs and labels as tensors (torch.empty(..., device='meta') "
        "costs no memory)"
    )


def labels_of(model: nn.Module) -> str | None:
    """The kind of labels that ``model`` takes; ``None`` if the name of its class does not say."""
    name = type(model).__name__
    return next((what for end, what in LABELS_OF_HEAD.items() if name.endswith(end)), "tokens")


def picture_shape(config) -> tuple[int, int, int]:
    """(channels, height, width) of the pictures that a model of ``config`` takes; 224 x 224 if it
    takes any size.
    """
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(vision, "num_channels", 3), height, width


def most_positions(model: nn.Module) -> int | None:
    """The largest number of tokens in a row; ``None`` for a model that takes any number.

    RoBERTa and similar models count positions from the padding token's id on, so their table is
    longer than a row.
    """
    config = model.config
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    for name, module in model.named_modules():
        if name.endswith(POSITION_TABLE) and getattr(module, "num_embeddings", None) == positions:
            return positions - (0 if module.padding_idx is None else module.padding_idx + 1)
    return positions


def stretched(config, rope_factor: float):
    """A copy of ``config`` for RoPE scaling: its model takes ``rope_factor`` times as many tokens
    in a row.

    Scaling divides the rotary frequencies when the model is built, so that its step needs the same
    bytes. Raises ``ValueError`` for a model whose positions are learned, or are not counted.
    """
    if not isinstance(rope_factor, int | float) or not 1 <= rope_factor < math.inf:
        raise ValueError(f"rope_factor={rope_factor!r}: give a number of at least 1, such as 4")
    longer = copy.deepcopy(config)
    text = longer.get_text_config(decoder=True) if hasattr(config, "get_text_config") else longer
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise ValueError(
            f"rope_factor={rope_factor} stretches the positions of a model, and the config of this "
            "one does not limit them: leave it out"
        )
    text.max_position_embeddings = int(positions * rope_factor)
    before, after = (sum(p.numel() for p in skeleton(c).parameters()) for c in (config, longer))
    if after != before:
        raise ValueError(
            f"rope_factor={rope_factor} stretches rotary positions, and this model has a learned "
            f"table of {positions:,} positions: shorten the rows, or give the config of a model "
            "with a larger table"
        )
    return longer


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
            "predict takes a transformers config, a folder, a hub id or an nn.Module, and was "
            f"given {type(given).__name__}"
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
            f"no model is known as {name!r} ({reason}). Give a folder with a config.json, the id "
            "of a model on the hub (needs a network, and for some a login), or a config: "
            "LlamaConfig(hidden_size=4096, ...), or such as known_model('Llama-2-7B')[1]"
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
