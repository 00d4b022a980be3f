"""Selective checkpointing: backward recomputes a part of each layer, and the rest is saved."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from ..compat.dispatch_modes import without_modes
from ..compat.fake_tensors import FakeTensor
from ..compat.modules import original_call
from ..compat.operators import schema
from ..hf_names import PARTS
from ..model.layers import Named, find_layers, layers_in
from ..names import SELECTIVE, check_choice
from ..units import check_positive_int
from .call_overrides import CallOverride, Checkpoints, refuse_checkpointed
from .counts import described
from .layer_arguments import without_cache
from .module_state import left_as_it_was
from .second_run import FirstRun, checkpoint_again

PRODUCTS = tuple(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))


def checkpoint_parts(
    layers_or_model: nn.Module, part: str | type[nn.Module], *, layers: Named = ()
) -> Checkpoints:
    """Recompute a part of each layer in backward while it trains, until ``.remove()`` or the end of
    a ``with`` block.

    Args:
        layers_or_model: as for ``checkpoint_layers``.
        part: a key of ``SELECTIVE``. ``"attention"`` and ``"mlp"`` put that module of each layer
            into a checkpoint; they are found by the ends of their classes' names, as transformers
            names them. ``"elementwise"`` puts the whole layer into one, which keeps the results of
            matrix products and fused attention. Or the class of the modules, for layers whose parts
            have other names.
        layers: as for ``checkpoint_layers``.

    In training, an empty key-value cache is left out, with a warning. Copies of the model
    (``copy.deepcopy``) have their own checkpoints. Raises ``ValueError`` for another part, or if a
    layer has no module of that kind, and ``RuntimeError`` if layers are checkpointed or compiled
    already, and in backward if a layer has changed a kept result in place (``x += y``).
    """
    if not isinstance(part, type):
        check_choice("part", part, SELECTIVE)
    found = layers_in(find_layers(layers_or_model, layers))
    refuse_checkpointed(found)
    whole_layers = False
    if not isinstance(part, type):
        whole_layers = SELECTIVE[part].keeps_products
    modules = found
    if not whole_layers:
        modules = [module for layer in found for module in find_parts(layer, part)]
    return Checkpoints([Part(module, whole_layers) for module in modules])


def tiled(module: nn.Module, tiles: int) -> Checkpoints:
    """Run ``module`` on ``tiles`` slices of its tokens while it trains, each in a checkpoint, until
    ``.remove()`` or the end of a ``with`` block. The activations inside exist for one slice at a
    time. The module must treat each token by itself, as an MLP.

    It takes and returns a tensor (..., tokens, width). Gradients of weights are added up slice by
    slice: the same up to rounding. Raises ``ValueError`` for a number of tiles below 1; and, at the
    first call, if a token's output depends on another token, or if the module takes or returns
    something other than such a tensor.
    """
    check_positive_int("tiles", tiles, 8, "slices")
    refuse_checkpointed([module])
    return Checkpoints([Tiled(module, tiles)])


class Part(CallOverride):
    """The override of a module that is recomputed in backward."""

    def __init__(self, module: nn.Module, keeps_products: bool):
        self.module, self.keeps_products = module, keeps_products

    def __call__(self, *args, **kwargs):
        run = original_call(self.module)
        if not (torch.is_grad_enabled() and self.module.training):
            return run(*args, **kwargs)
        args, kwargs = without_cache(args, kwargs)
        options = {}
        if self.keeps_products:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, Policy())
        run_again = partial(run, *args, **kwargs)
        return checkpoint_again([self.module], run_again, given=(args, kwargs), **options)


class Tiled(CallOverride):
    """The override of a module that runs on slices."""

    def __init__(self, module: nn.Module, tiles: int):
        self.module, self.tiles, self.checked = module, tiles, False

    def __call__(self, x: Tensor) -> Tensor:
        run = original_call(self.module)
        if not (torch.is_grad_enabled() and self.module.training):
            return run(x)
        if not self.checked and not isinstance(x, FakeTensor):
            self._check_unseen(run, x)
        parts = x.chunk(self.tiles, dim=-2)
        return torch.cat([checkpoint_again([self.module], run, part) for part in parts], dim=-2)

    def _check_unseen(self, run: Callable, x: Tensor) -> None:
        """Check that slices may run one by one, on a few tokens of ``x`` (..., tokens, width).

        A checkpoint of the whole layer around this call must not see it, and it draws no numbers.
        """
        tokens = max(2, min(16, x.shape[-2] - 1))
        sample = x[..., :tokens, :]  # a view, with the strides that slices have
        sample = sample.detach().requires_grad_()
        unseen = saved_tensors_hooks(lambda t: t, lambda t: t)
        others = FirstRun([self.module]).found_again()
        state = left_as_it_was(self.module)
        with without_modes(), unseen, torch.random.fork_rng(), others, state:
            # In a new context: transformers collects a forward's outputs through a context
            # variable.
            Context().run(self._check, run, sample)

    def _check(self, run: Callable, sample: Tensor) -> None:
        """``ValueError`` if a slice does not give one tensor, or a token depends on another one."""
        why, raised = "", None
        try:
            out = run(sample)
        except RuntimeError as error:
            why, raised = f"cannot run on a slice of shape {(*sample.shape,)} ({error})", error
        else:
            if not isinstance(out, Tensor) or out.shape[:-1] != sample.shape[:-1]:
                why = f"returned {described(out)} for a slice of shape {(*sample.shape,)}"
            elif any(_reads_others(out, sample, token) for token in (0, -1)):
                why = "has a token whose output depends on another token"
        if why:
            raise ValueError(
                "tile a module that treats each token by itself, and takes and returns one tensor "
                "(..., tokens, width) in any strides, such as an MLP (a mixture's block may take "
                f"slices of one row, but not of several): {type(self.module).__name__} {why}"
            ) from raised
        self.checked = sample.shape[-2] > 1  # a single token says nothing about longer rows


def _reads_others(out: Tensor, sample: Tensor, token: int) -> bool:
    """Whether the output of ``token`` has a gradient at other tokens."""
    one = out[..., token, :]
    (found,) = torch.autograd.grad(one, sample, torch.rand_like(one), retain_graph=True)
    found[..., token, :] = 0
    return bool(found.any())


class Policy:
    """Saves the results that are costly to compute, and recomputes the others.

    It also saves ``matmul``'s view of its product, so that PyTorch notices changes in place.
    """

    last = ""

    def __call__(self, ctx, op, *args, **kwargs) -> CheckpointPolicy:
        previous, self.last = self.last, schema(op).name
        costly = self.last in PRODUCTS or "attention" in self.last
        view_of_product = previous in PRODUCTS and self.last == "aten::_unsafe_view"
        if costly or view_of_product:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def find_parts(layer: nn.Module, part: str | type[nn.Module]) -> list[nn.Module]:
    """The modules inside ``layer`` that are its ``part``: its attention (two in a decoder with
    cross-attention), its MLP, or the modules of a class.

    A module inside one that is found is not returned itself. Raises ``ValueError`` if there is
    none.
    """

    def is_wanted(module: nn.Module) -> bool:
        if isinstance(part, type):
            return isinstance(module, part)
        return type(module).__name__.endswith(PARTS[part])

    found: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        if module is layer:
            continue  # named_modules begins with it, and a part is less than a whole layer
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if is_wanted(module) and not inside:
            found[name] = module
    if found:
        return list(found.values())

    if isinstance(part, type):
        wanted = part.__name__
    else:
        wanted = " or ".join(f"...{end}" for end in PARTS[part])
    raise ValueError(
        "give the class of a part of each layer, as in checkpoint_parts(model, Mlp), or checkpoint "
        f"whole layers, or 'elementwise': no module inside a {type(layer).__name__} is a {wanted}"
    )
