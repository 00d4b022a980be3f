"""Models and trainers of transformers, and the models that peft wraps."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from ..hf_names import CHECKPOINTING_METHODS


def attention_of(model_or_config) -> str | None:
    """The name of the attention that a transformers model uses; ``None`` for a model without that
    choice.
    """
    config = getattr(model_or_config, "config", model_or_config)
    return getattr(config, "_attn_implementation", None)


def use_sdpa(config) -> None:
    """Let models of ``config`` use PyTorch's own fused attention."""
    config._attn_implementation = "sdpa"


def checkpointing_name(of: Any) -> str | None:
    """The name of checkpointing in a model's (or its class's) methods: transformers 5.23 renamed
    it. ``None``: it has none.
    """
    for name in CHECKPOINTING_METHODS:
        if hasattr(of, f"{name}_enable"):
            return name
    return None


def takes_fused_attention(model: nn.Module) -> bool:
    return bool(getattr(model, "_supports_sdpa", True))


def checkpoints_reentrant(module: nn.Module) -> bool:
    """Whether transformers' checkpoints on this layer run reentrant."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant"))


@contextmanager
def attention_by_values(
    masked: bool = False, packed: bool = False, takes_no_mask: bool = False
) -> Iterator[str]:
    """While the block runs, transformers knows a fused attention by this name, which works the same
    under fake tensors.

    With real tensors, transformers checks whether any token is masked and whether several sequences
    are packed in a row. It builds no mask if neither is so. Fake tensors have no values to check,
    so it would build a mask: sequence x sequence bytes that no real run has. ``masked`` and
    ``packed`` answer in their place. A window shorter than the sequence needs a mask anyway (one
    for each row, if the batch has an ``attention_mask``), except for a kernel that
    ``takes_no_mask``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name, find_packed = "gradmem_fused", masking_utils.find_packed_sequence_indices

    def mask(*args, **kwargs):
        return None if takes_no_mask else masking_utils.sdpa_mask(*args, **kwargs)

    def are_packed(position_ids):
        found = find_packed(position_ids)  # called in any case: its search takes memory too
        return found if packed else None

    def causal_left_out(
        padding_mask, q_length, kv_length, q_offset, kv_offset, local_attention_size=None
    ):
        has_cache = q_length not in (1, kv_length) and q_offset > 0
        if has_cache or _has_window(kv_length, local_attention_size):
            return False
        return _hides_nothing(padding_mask, masked, masking_utils.fast_all)

    def left_out(padding_mask, kv_length, local_attention_size=None):
        hides_nothing = _hides_nothing(padding_mask, masked, Tensor.all)
        return hides_nothing and not _has_window(kv_length, local_attention_size)

    with ExitStack() as undo:
        for table, function in (
            (AttentionInterface, sdpa_attention_forward),
            (AttentionMaskInterface, mask),
        ):
            table.register(name, function)
            undo.callback(table._global_mapping.pop, name, None)  # there is no public way
        undo.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", are_packed))
        undo.enter_context(patch.object(masking_utils, "_ignore_causal_mask_sdpa", causal_left_out))
        undo.enter_context(patch.object(masking_utils, "_ignore_bidirectional_mask_sdpa", left_out))
        yield name


def _has_window(kv_length: int, size: int | None) -> bool:
    """Whether transformers builds the mask of a window: for rows of ``size`` tokens or more."""
    return size is not None and kv_length >= size


def _hides_nothing(padding_mask: Tensor | None, masked: bool, are_all: Callable) -> bool:
    """``are_all``: what transformers asks the mask with here. Its answer has no value, but it takes
    memory.
    """
    if padding_mask is None:
        return True
    are_all(padding_mask)
    return not masked


def prepared_inputs(trainer: Any, batch: Any) -> Any:
    """``batch`` as ``trainer``'s ``compute_loss`` gets it: on its device, and as a subclass makes
    it. transformers 5.
    """
    return trainer._prepare_inputs(batch)
