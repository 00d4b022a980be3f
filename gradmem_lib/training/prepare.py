"""Prepares a model and its optimizer for training by a recipe.

Works on real tensors and on fake ones.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..compat.dispatch_modes import without_modes
from ..compat.modules import is_persistent, own_tensors
from ..compat.transformers_models import attention_of, checkpointing_name
from ..hf_names import hf_class
from ..model.wrappers import inside_peft, inside_wrapper
from ..names import ATTENTION, SELECTIVE, is_flash
from ..optimizers import OPTIMIZERS
from ..techniques.checkpointing import checkpoint_layers
from ..techniques.data_parallel import processes_of
from ..techniques.lora import add_lora
from ..techniques.quantized import quantize_base
from ..techniques.selective import checkpoint_parts
from ..techniques.sharding import shard, shard_optimizer_states
from .adapters import has_adapters
from .losses import check_chunked_loss
from .recipe import Recipe

RATE = 5e-5  # of transformers' Trainer


class Prepared(NamedTuple):
    """``model`` (the given one, changed in place, or the ``DistributedDataParallel`` around it),
    ``optimizer`` (an ``Optimizer``, or a list of them for ``in_backward``), and ``undo``, whose
    ``close()`` removes checkpoints and the hooks that step.
    """

    model: nn.Module
    optimizer: Optimizer | list[Optimizer]
    undo: ExitStack


def prepare(
    model: nn.Module,
    recipe: Recipe,
    *,
    lr: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float = 0.0,
    groups: Callable[[str, nn.Parameter], dict | None] | None = None,
    mesh: DeviceMesh | None = None,
) -> Prepared:
    """Change ``model`` in place as ``recipe`` says, and make its optimizer. Raises ``ValueError``
    if the two do not match.

    Works on fake models too. With ``recipe.sharding``, every process of the group must call it.

    The optimizer is the one that ``make_trainer`` makes, with the same defaults. They are those of
    transformers' ``Trainer``, so that a model trains alike by either, and by a ``Trainer`` of one's
    own: a learning rate of 5e-5, no decay, betas of (0.9, 0.999). Clipping and a schedule belong to
    the loop: ``step`` takes them, and has none by default; ``Trainer`` clips at 1.0, and its rate
    falls to 0.

    Args:
        lr: the learning rate. ``None``: that of the optimizer's row, or else ``RATE``.
        betas, eps: Adam's. ``None``: those of its class, (0.9, 0.999) and 1e-8.
        weight_decay: of all parameters but biases and those of norms, as in ``Trainer``.
        groups: ``groups(name, parameter)`` returns the settings in which a parameter differs from
            the others, such as ``{"lr": 1e-3}``, or ``None``.
        mesh: is passed to ``shard``.
    """
    if lr is None:
        lr = usual_rate(recipe)
    if recipe.sharding is not None and processes_of(model).groups:
        raise ValueError(
            f"this {type(model).__name__} is trained by several processes together already: "
            "load the model again, and prepare it once"
        )
    with ExitStack() as undo:  # closed after an error
        exact = change_model(model, recipe)
        set_checkpointing(model, recipe, undo)
        if recipe.sharding is not None:  # after checkpoints: a recomputed layer is gathered again
            model = shard(
                model,
                recipe.sharding,
                mesh=mesh,
                compute_dtype=recipe.gathered_dtype,
                offload=recipe.offloads_shards,
                layers=recipe.layers,
            )
        alike = parameter_groups(model, weight_decay, groups, betas=betas, eps=eps)
        if not recipe.in_backward:
            optimizer = make_optimizer(alike, recipe, lr, mesh, exact)
            return Prepared(model, optimizer, undo.pop_all())
        optimizers = []
        for group in alike:
            for parameter in group["params"]:
                alone = [group | {"params": [parameter]}]
                optimizers.append(make_optimizer(alone, recipe, lr, exact=exact))
                step_and_free = partial(_step_and_free, optimizers[-1])
                hook = parameter.register_post_accumulate_grad_hook(step_and_free)
                undo.callback(hook.remove)
        return Prepared(model, optimizers, undo.pop_all())


def usual_rate(recipe: Recipe) -> float:
    rate = OPTIMIZERS[recipe.optimizer].learning_rate
    return RATE if rate is None else rate


def parameter_groups(
    model: nn.Module, weight_decay: float, groups: Callable | None, **common: Any
) -> list[dict[str, Any]]:
    """The trained parameters, those with the same settings in one group. ``common`` are settings of
    all of them, where not ``None``; the others are those of ``prepare``.
    """
    common = {name: value for name, value in common.items() if value is not None}
    decayed = _decayed_names(model) if weight_decay else set()
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in inside_wrapper(model).named_parameters():
        if not parameter.requires_grad:
            continue
        # Always said: without it, the classes of optimizers have unlike defaults.
        settings = {"weight_decay": weight_decay if name in decayed else 0.0, **common}
        if groups is not None:
            settings |= groups(name, parameter) or {}
        group = found.setdefault(str(settings), {"params": [], **settings})
        group["params"].append(parameter)
    return list(found.values())


def _decayed_names(model: nn.Module) -> set[str]:
    """The parameters that ``Trainer`` lets weight decay make smaller."""
    with without_modes():  # imported only if needed, as in optimizer_class
        from transformers import Trainer

    names: Any = Trainer.get_decay_parameter_names  # reads nothing of the trainer
    return set(names(None, inside_wrapper(model)))


def left_in_eval_mode(model: nn.Module) -> list[nn.Module]:
    """The models of transformers inside ``model`` that are in eval mode, as ``from_pretrained``
    leaves them, and have something to train. PEFT or a class of one's own may be around them.

    Other parts in eval mode are somebody's choice.
    """
    found = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # what is outside comes first
        if module in inside or not isinstance(module, hf_class("PreTrainedModel")):
            continue
        inside.update(module.modules())
        has_trained = any(parameter.requires_grad for parameter in module.parameters())
        if has_trained and not module.training:
            found.append(module)
    return found


def change_model(model: nn.Module, recipe: Recipe) -> dict[nn.Parameter, Tensor]:
    """The permanent part of ``prepare``, in place: key-value cache off, attention, dtype, LoRA,
    4-bit base. Raises ``ValueError`` if nothing would be trained, or if LoRA is asked for on a
    model that has it already (this library's or PEFT's).

    Returns the weights from before they were rounded to 16 bits, where the optimizer keeps masters.
    """
    inside_peft(model)  # refuses trained prompts
    if recipe.lora_rank is not None and has_adapters(model):
        raise ValueError(
            "this model has LoRA already: load it again, or merge_adapters(model) first"
        )
    if not model.training:
        model.train()
    for part in left_in_eval_mode(model):
        part.train()
    for config in caching_configs(model):
        config.use_cache = False
    attention = recipe.attention
    if attention is not None and not is_flash(attention):
        attention = ATTENTION[attention].in_transformers
    set_attention(model, attention)
    if recipe.chunked_loss:
        check_chunked_loss(model)  # trains a tiny copy, so not during a first step that is measured
    if recipe.lora_rank is not None:  # which may refuse, so before weights are rounded
        add_lora(
            model,
            recipe.lora_rank,
            recipe.lora_targets,
            recipe.weight_dtype,
            alpha=recipe.lora_alpha,
            dropout=recipe.lora_dropout,
        )
    exact = _exact_weights(model, recipe)
    if recipe.weight_dtype is not None:
        cast_weights(model, recipe.weight_dtype)
    if recipe.storage is not None:
        quantize_base(model, recipe.storage, recipe.dtype_of_products)
    refuse_frozen(model)
    return exact


def caching_configs(model: nn.Module) -> list[Any]:
    """The configs, of ``model`` and of parts such as a decoder, that ask for a key-value cache."""
    caching = []
    for module in model.modules():
        config = getattr(module, "config", None)
        is_of_transformers = isinstance(module, hf_class("PreTrainedModel"))
        if is_of_transformers and getattr(config, "use_cache", False):
            caching.append(config)
    return caching


def _exact_weights(model: nn.Module, recipe: Recipe) -> dict[nn.Parameter, Tensor]:
    """What a cast to 16 bits would round, if the optimizer keeps masters of it."""
    trained = []
    if recipe.keeps_masters and recipe.lora_rank is None:  # LoRA freezes what it is given
        trained = [p for p in model.parameters() if p.requires_grad]
    return {p: p.data for p in trained if p.dtype.itemsize > 2}


def refuse_frozen(model: nn.Module) -> None:
    """Raise ``ValueError`` if no parameter of ``model`` is trained."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "there is nothing to train: every parameter is frozen, set requires_grad on some"
        )


def _step_and_free(optimizer: Optimizer, parameter: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def set_attention(model: nn.Module, name: str | None) -> None:
    """Switch a transformers model to the attention ``name``. ``None`` changes nothing, and other
    modules do not change.

    Raises ``ValueError`` if transformers has no such attention for the model.
    """
    if name is None or not hasattr(model, "set_attn_implementation") or attention_of(model) == name:
        return
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} has no fused attention: give attention=None, which keeps "
            f"its own ({attention_of(model)!r})"
        ) from error


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and persistent floating-point buffers to ``dtype``, in place. Tied weights
    stay tied. Rotary frequencies stay float32, as with ``from_pretrained``.
    """
    for module in model.modules():
        for name, tensor in own_tensors(module):
            if tensor.is_floating_point() and is_persistent(module, name):
                tensor.data = tensor.data.to(dtype)


def set_checkpointing(model: nn.Module, recipe: Recipe, undo: ExitStack) -> None:
    """Switch checkpointing on: per layer by transformers, if the model can; segments and parts of
    layers by this library.
    """
    if recipe.checkpointing in SELECTIVE:
        parts = checkpoint_parts(model, recipe.checkpointing, layers=recipe.layers)
        undo.callback(parts.remove)
        return
    every, name = recipe.checkpoint_interval, checkpointing_name(model)
    if every is None and recipe.checkpointing is None:
        return
    by_transformers = name is not None and getattr(model, "supports_gradient_checkpointing", True)
    if every is not None and by_transformers and not recipe.layers:
        enable, disable = (getattr(model, f"{name}_{verb}") for verb in ("enable", "disable"))
        options = {}
        if every > 1:
            options["every_n_layers"] = every
        enable({"use_reentrant": False}, **options)
        undo.callback(disable)
    elif recipe.every_n_layers is not None:
        what = f"{type(model).__name__} is none"
        if recipe.layers:
            what = f"layers={recipe.layers} chooses some of any model's"
        raise ValueError(
            f"every_n_layers={every} is an option of transformers models, and {what}: choose "
            "checkpointing='per-layer', or a list of segment lengths"
        )
    else:
        schedule: Any = every or recipe.checkpointing
        undo.callback(checkpoint_layers(model, schedule, layers=recipe.layers).remove)


def make_optimizer(
    parameters: list[nn.Parameter] | list[dict[str, Any]],
    recipe: Recipe,
    lr: float,
    mesh: DeviceMesh | None = None,
    exact: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
) -> Optimizer:
    """The optimizer that ``recipe`` names, made as its row in ``OPTIMIZERS`` says.

    ``exact``: what masters start from, in place of the rounded weights. Raises ``ValueError`` for a
    group's setting that the optimizer does not have.
    """
    if recipe.shards_only_states:
        alone = replace(recipe, sharding=None)
        on_one = partial(make_optimizer, recipe=alone, lr=lr, exact=exact)
        return shard_optimizer_states(parameters, on_one, mesh and mesh.get_group())
    row = OPTIMIZERS[recipe.optimizer]
    made_by, settings = row.made_by, dict(row.settings)
    if recipe.keeps_masters:
        made_by = row.master
    if row.takes_momentum:
        settings["momentum"] = recipe.momentum
    optimizer = optimizer_class(made_by)(parameters, lr=lr, **settings)
    for group in optimizer.param_groups:
        for name, value in group.items():
            if value and name not in ("params", *optimizer.defaults):
                raise ValueError(
                    f"optimizer={recipe.optimizer!r} has no {name}: leave it out, or choose among "
                    f"{', '.join(optimizer.defaults)}"
                )
        for parameter in group["params"]:
            if parameter in exact:
                optimizer.state[parameter]["master"] = exact[parameter]
    return optimizer


def optimizer_class(made_by: Any) -> Callable[..., Optimizer]:
    """The class that a row of ``OPTIMIZERS`` names, with its module: torch's, or one of ours in
    ``techniques``.
    """
    if callable(made_by):
        return made_by
    if made_by.startswith("techniques."):
        made_by = f"{__package__.partition('.')[0]}.{made_by}"
    # Imported only if needed: transformers takes a second. It may import peft, which must not get
    # the fake tensors of a prediction as constants.
    with without_modes():
        return resolve_name(made_by)
