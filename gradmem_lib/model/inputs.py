"""What a transformers model trains on: inputs, the labels of its head, the longest row."""

import inspect

import torch
from torch import Tensor, nn

from ..hf_names import LABELS_OF_HEAD, POSITION_TABLE
from .wrappers import inside_peft


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


def takes_tokens_alone(model: nn.Module) -> bool:
    """Whether a row is token ids with labels."""
    labels = {"ends": "start_positions", None: None}.get(labels_of(model), "labels")
    named = labels in inspect.signature(model.forward).parameters
    return named and getattr(model, "main_input_name", "input_ids") == "input_ids"


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
