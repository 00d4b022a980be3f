"""A model and an optimizer that train as a recipe says. Works on real tensors and on fake ones alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import compat
from ..compat import is_persistent, own_tensors
from ..techniques.lora import LoRALinear, add_lora, freeze_base
from ..techniques.losses import check_chunked_loss
from ..techniques.optimizers import AdamW8bit, MasterAdamW
from .recipe import Recipe

RATE = 1e-4
# Of torch's Adafactor, relative to a weight's size: T5's in fine-tuning (Raffel et al. 2020). The default, 1e-2, is that
# of its pretraining.
RELATIVE_RATE = 1e-3
# And what is added where a gradient is zero. The default is the rounding unit of the weights' dtype, 0.0078 in bf16: above
# nearly every gradient, so that none would be normalized. The square of this is still a number in bf16.
ADAFACTOR_EPS = (1e-16, 1e-3)


class Prepared(NamedTuple):
    """``model`` (the one given, changed in place), ``optimizer`` (an ``Optimizer``, or a list of them for ``in_backward``),
    and ``undo``: ``undo.close()`` takes away checkpointing and the hooks that step in backward."""

    model: nn.Module
    optimizer: Optimizer | list[Optimizer]
    undo: ExitStack


def prepare(model: nn.Module, recipe: Recipe, *, lr: float | None = None) -> Prepared:
    """Change ``model`` in place as ``recipe`` says, and make its optimizer. Raises ``ValueError`` where they do not fit.

    Casts parameters and persistent buffers (rotary frequencies stay in float32, as ``from_pretrained`` leaves them), sets the
    attention, adds LoRA, freezes, and switches checkpointing on. The key-value cache is switched off: training has no use
    for it. Works on fake models too. Without ``lr`` the learning rate is ``RATE``, and ``RELATIVE_RATE`` for torch's Adafactor.
    """
    if lr is None:
        lr = RELATIVE_RATE if recipe.optimizer == "adafactor-torch" else RATE
    undo = ExitStack()
    change_model(model, recipe)
    set_checkpointing(model, recipe, undo)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not recipe.in_backward:
        return Prepared(model, make_optimizer(trained, recipe, lr), undo)
    optimizers = []
    for parameter in trained:
        optimizers.append(make_optimizer([parameter], recipe, lr))
        hook = parameter.register_post_accumulate_grad_hook(_step_and_free(optimizers[-1]))
        undo.callback(hook.remove)
    return Prepared(model, optimizers, undo)


def change_model(model: nn.Module, recipe: Recipe) -> None:
    """The lasting part of ``prepare``, in place: cache off, attention, dtype, LoRA, 4-bit base, frozen base.

    ``ValueError`` where nothing would be trained, and for LoRA on a model that has it: the additions would get additions.
    """
    if recipe.lora_rank is not None and any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError(
            "this model has LoRA already: load it anew, or write its additions into the weights first "
            "(merge_adapters(model))"
        )
    model.train()
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    set_attention(model, {"fused": "sdpa"}.get(recipe.attention, recipe.attention))
    if recipe.chunked_loss:
        check_chunked_loss(model)  # which trains a tiny copy: now, and not in a first step that is measured
    cast_weights(model, recipe.weight_dtype)
    if recipe.lora_rank is not None:
        add_lora(model, recipe.lora_rank, recipe.lora_targets)
    if recipe.quantized_base:
        from ..techniques.quantized import quantize_base

        quantize_base(model)
    if recipe.frozen_base:
        freeze_base(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "there is nothing to train: every parameter is frozen. Leave frozen_base out, or set requires_grad on some of them"
        )


def _step_and_free(optimizer: Optimizer) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return hook


def set_attention(model: nn.Module, name: str | None) -> None:
    """Switch a transformers model to the attention ``name``; other modules, and ``None``, are left as they are.

    ``ValueError`` where transformers has no such attention for the model."""
    if name is None or not hasattr(model, "set_attn_implementation") or compat.attention_of(model) == name:
        return
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} has no fused attention: give Recipe(attention=None), which leaves it what it has "
            f"({compat.attention_of(model)!r})"
        ) from error


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and persistent floating-point buffers to ``dtype``, in place; ties stay ties."""
    for module in model.modules():
        for name, tensor in own_tensors(module):
            if tensor.is_floating_point() and is_persistent(module, name):
                tensor.data = tensor.data.to(dtype)


def set_checkpointing(model: nn.Module, recipe: Recipe, undo: ExitStack) -> None:
    """Per layer as transformers does it, where the model knows how; segments through ``checkpoint_layers``."""
    every = recipe.every_n_layers or (1 if recipe.checkpointing == "per-layer" else None)
    if every is not None and hasattr(model, "gradient_checkpointing_enable"):
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
            undo.callback(model.activation_checkpointing_disable)
        elif every == 1:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            undo.callback(model.gradient_checkpointing_disable)
        else:
            raise ValueError(
                f"every_n_layers={every} needs transformers 5.23 or newer: update it, or choose checkpointing='per-layer'"
            )
    elif recipe.every_n_layers is not None:
        raise ValueError(
            f"every_n_layers is an option of transformers models, and {type(model).__name__} is none: choose checkpointing="
            "'per-layer', or a list of segment lengths"
        )
    elif every is not None or recipe.checkpointing is not None:
        from ..techniques.checkpointing import checkpoint_layers

        schedule = every or recipe.checkpointing
        handle = checkpoint_layers(model, every=schedule)  # type: ignore[arg-type]
        undo.callback(handle.remove)


def make_optimizer(parameters: list[nn.Parameter], recipe: Recipe, lr: float) -> Optimizer:
    """The optimizer that ``recipe`` names, its variant always explicit: torch would choose by device otherwise."""
    how: Any = {
        "adamw": {"foreach": False, "fused": False},
        "adamw-foreach": {"foreach": True, "fused": False},
        "adamw-fused": {"foreach": False, "fused": True},
    }.get(recipe.optimizer)
    if recipe.precision == "float32-master":
        return MasterAdamW(parameters, lr=lr, **how)
    if how is not None:
        return torch.optim.AdamW(parameters, lr=lr, **how)
    if recipe.optimizer == "adamw-8bit":
        return AdamW8bit(parameters, lr=lr)
    if recipe.optimizer == "adafactor-torch":
        return torch.optim.Adafactor(parameters, lr=lr, eps=ADAFACTOR_EPS, foreach=False)
    if recipe.optimizer == "adafactor":
        # The one that transformers' Trainer uses, with its settings.
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=lr, scale_parameter=False, relative_step=False)
    return torch.optim.SGD(parameters, lr=lr, momentum=recipe.momentum, foreach=False)
