"""Selective checkpointing: of each layer a part runs again in backward, and what the rest computed is kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..compat import FakeTensor, plain_call, replace_call, schema, without_modes
from ..names import SELECTIVE, choose
from ..units import whole
from .checkpointing import CACHE_LEFT_OUT, Again, refuse_checkpointed, without_cache
from .layers import find_layers

PARTS = {"attention": ("Attention",), "mlp": ("MLP", "LayerFF")}  # how the names of their classes end
PRODUCTS = tuple(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))


def checkpoint_parts(layers_or_model: nn.Module, part: str) -> CheckpointedParts:
    """Run a part of each layer again in backward while it trains, until ``.remove()`` or the end of a ``with`` block.

    Args:
        layers_or_model: as for ``checkpoint_layers``.
        part: a key of ``SELECTIVE``: ``"attention"`` and ``"mlp"`` put that module of each layer into a checkpoint, and
            ``"elementwise"`` the whole layer into one that keeps the results of matrix products and of fused attention.

    In training, an empty key-value cache is left out, with a warning. Copies of the model (``copy.deepcopy``) have checkpoints of
    their own. Raises ``ValueError`` for another part, or where a layer has no module of that kind, and ``RuntimeError`` where
    layers are checkpointed or compiled already, and in backward where a layer has changed in place what was kept (``x += y``).
    """
    choose("part", part, SELECTIVE)
    layers = [layer for several, _ in find_layers(layers_or_model).values() for layer in several]
    refuse_checkpointed(layers)
    whole = part == "elementwise"
    modules = layers if whole else [module for layer in layers for module in find_parts(layer, part)]
    warned: list[str] = []
    return CheckpointedParts([replace_call(module, Part(module, whole, warned)) for module in modules])


def tiled(module: nn.Module, tiles: int) -> CheckpointedParts:
    """Run ``module``, which treats each token by itself (an MLP), over so many slices of its tokens while it trains, each in a
    checkpoint, until ``.remove()`` or the end of a ``with`` block: what it computes inside exists for one slice at a time.

    It takes and returns a tensor (..., tokens, width). Gradients of weights are added up slice by slice: the same up to rounding.
    ``ValueError`` for a number of tiles below 1, and at the first call where a token's output depends on another token, or the
    module takes or returns something else than such a tensor.
    """
    whole("tiles", tiles, 8, "slices")
    refuse_checkpointed([module])
    return CheckpointedParts([replace_call(module, Tiled(module, tiles))])


class CheckpointedParts(ExitStack):
    """Parts of layers that run again; made by ``checkpoint_parts`` and ``tiled``."""

    def __init__(self, undo: list[Callable[[], None]]):
        super().__init__()
        for each in undo:
            self.callback(each)

    def remove(self) -> None:
        """Give the parts their own forward back. Calling it again does nothing."""
        self.close()


class Part(Again):
    """What stands in for a module's ``__call__``."""

    def __init__(self, module: nn.Module, keeps_products: bool, warned: list[str]):
        self.module, self.keeps_products, self.warned = module, keeps_products, warned

    def __call__(self, *args, **kwargs):
        run = plain_call(self.module)
        if not (torch.is_grad_enabled() and self.module.training):
            return run(*args, **kwargs)
        args, kwargs, left_out = without_cache(args, kwargs)
        if left_out and not self.warned:
            self.warned.append(CACHE_LEFT_OUT)  # once for all parts of a model
            warnings.warn(CACHE_LEFT_OUT, stacklevel=2)
        kept = {"context_fn": partial(create_selective_checkpoint_contexts, Policy())}
        how = kept if self.keeps_products else {}
        return checkpoint(partial(run, *args, **kwargs), use_reentrant=False, **how)


class Tiled(Again):
    """What stands in for the ``__call__`` of a module that runs over slices."""

    def __init__(self, module: nn.Module, tiles: int):
        self.module, self.tiles, self.checked = module, tiles, False

    def __call__(self, x: Tensor) -> Tensor:
        run = plain_call(self.module)
        if not (torch.is_grad_enabled() and self.module.training):
            return run(x)
        if not self.checked and not isinstance(x, FakeTensor):
            # A checkpoint of the whole layer around this call must not notice.
            with without_modes(), saved_tensors_hooks(lambda t: t, lambda t: t), torch.random.fork_rng():
                # Nor what transformers collects of a forward, by a context variable.
                few = max(2, min(16, x.shape[-2] - 1))  # a slice, with the strides of one
                Context().run(self._check, run, x[..., :few, :].detach().requires_grad_())
        parts = x.chunk(self.tiles, dim=-2)
        return torch.cat([checkpoint(run, part, use_reentrant=False) for part in parts], dim=-2)

    def _check(self, run: Callable, few: Tensor) -> None:
        """There is an output for each token, and the gradient of the first one's, and of the last one's, is 0 at all others."""
        name, shape = type(self.module).__name__, (*few.shape,)
        try:
            out = run(few)
        except RuntimeError as error:
            raise ValueError(
                f"{name} cannot run on a slice of shape {shape} ({error}): tile a module that takes (..., tokens, width) in any "
                "strides, such as an MLP. A mixture's block may take slices of one row, and of several not"
            ) from error
        if not isinstance(out, Tensor) or out.shape[:-1] != few.shape[:-1]:
            what = f"shape {(*out.shape,)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(
                f"{name} returned {what} for a slice of shape {shape}, and what slices return is joined token by token: tile a "
                "module that returns one tensor (..., tokens, width), such as an MLP"
            )
        for i in (0, -1):
            one = out[..., i, :]
            (found,) = torch.autograd.grad(one, few, torch.rand_like(one), retain_graph=True)
            found[..., i, :] = 0
            if found.any():
                raise ValueError(
                    f"in {name}, a token's output depends on another token, and slices would change it: tile a module that treats "
                    "each token by itself, such as an MLP"
                )
        self.checked = few.shape[-2] > 1  # one token alone says nothing of longer rows


class Policy:
    """Keep what is costly to compute. ``matmul`` returns a product under a count of changes of its own, which is kept too."""

    last = ""

    def __call__(self, ctx, op, *args, **kwargs) -> CheckpointPolicy:
        before, self.last = self.last, schema(op).name
        kept = self.last in PRODUCTS or "attention" in self.last
        kept = kept or (before in PRODUCTS and self.last == "aten::_unsafe_view")
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def find_parts(layer: nn.Module, part: str) -> list[nn.Module]:
    """The modules of ``layer`` that are its attention (two in a decoder that looks at an encoder), or its MLP."""
    found: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if type(module).__name__.endswith(PARTS[part]) and not inside:
            found[name] = module
    if not found:
        raise ValueError(
            f"a {type(layer).__name__} has no {part} of its own: no module in it has a class named "
            f"{' or '.join(f'...{end}' for end in PARTS[part])}. Checkpoint whole layers, or 'elementwise'"
        )
    return list(found.values())
