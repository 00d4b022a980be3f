"""What a diagnosis has to know of a model, without keeping the model alive."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import nn

from ..compat.modules import call_override
from ..compat.transformers_models import checkpoints_reentrant
from ..hf_names import LAYER_SWITCH

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Checkpoints:
    """The modules whose checkpoints are switched on.

    ``switched_on``: their names; ``training``: those of them that are in training mode;
    ``reentrant``: those that recompute by the reentrant method, which needs an input with a
    gradient.
    """

    switched_on: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    reentrant: tuple[str, ...] = ()


@dataclass(frozen=True)
class Structure:
    """``layers``: the names of the modules in lists (``nn.Sequential``, ``nn.ModuleList``), which
    checkpoints can be put on.

    ``shapes``, ``dtypes``: of each parameter, by name. ``trained``: the names of the parameters
    that need a gradient. ``outputs``: how many features come out of the matrices at the model's
    end, such as the number of tokens that it knows, or how many rows a table of embeddings has, for
    scores of all of them.
    """

    layers: frozenset[str]
    shapes: dict[str, Shape]
    dtypes: dict[str, torch.dtype]
    trained: frozenset[str]
    outputs: frozenset[int]
    checkpoints: Checkpoints

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """What is known of ``model``."""
        layers = set[str]()
        for name, module in model.named_modules():
            if isinstance(module, (nn.Sequential, nn.ModuleList)):
                inner = f"{name}." if name else ""
                layers.update(inner + item for item, _ in module.named_children())
        shapes, dtypes = dict[str, Shape](), dict[str, torch.dtype]()
        trained = set[str]()
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                continue
            shapes[name], dtypes[name] = tuple(parameter.shape), parameter.dtype
            if parameter.requires_grad:
                trained.add(name)
        return cls(
            frozenset(layers),
            shapes,
            dtypes,
            frozenset(trained),
            _outputs(model, layers),
            _checkpoints(model),
        )

    def nbytes(self, name: str) -> int:
        """The bytes of the parameter of this name."""
        return prod(self.shapes[name]) * self.dtypes[name].itemsize

    def in_layers(self, module: str) -> bool:
        """Whether the module (or parameter) of this name is in a list of layers."""
        return within(module, self.layers)


NO_MODEL = Structure(frozenset(), {}, {}, frozenset(), frozenset(), Checkpoints())


def within(name: str, outer: Any) -> bool:
    """Whether ``name``, or a module that contains it, is among ``outer``."""
    while name:
        if name in outer:
            return True
        name = name.rpartition(".")[0]
    return False


def _outputs(model: nn.Module, layers: set[str]) -> frozenset[int]:
    """The features that come out of the matrices at the model's end.

    Such a matrix has more outputs than inputs. It is in no list of layers, or it is the last matrix
    of all. And no other matrix takes its outputs, nor halves or thirds of them, as attention takes
    queries, keys and values from one matrix.
    """
    matrices = dict[str, list[Shape]]()  # each module's own
    rows = set[int]()  # of the tables whose rows are shorter than that: users, items, tokens
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):  # no matrix: its rows are looked up
            if module.num_embeddings > module.embedding_dim:
                rows.add(module.num_embeddings)
            continue
        for parameter in module.parameters(recurse=False):
            if not nn.parameter.is_lazy(parameter) and parameter.dim() == 2:
                matrices.setdefault(name, []).append(tuple(parameter.shape))
    last = next(reversed(matrices), None)
    widening, taken = set[int](), set[int]()
    for name, shapes in matrices.items():
        for n_out, n_in in shapes:
            taken |= {n_in, 2 * n_in, 3 * n_in}
            at_the_end = name == last or not within(name, layers)
            # a recurrent cell has several matrices, for its gates
            if n_out > n_in and len(shapes) == 1 and at_the_end:
                widening.add(n_out)
    return frozenset((widening | rows) - taken)


def _checkpoints(model: nn.Module) -> Checkpoints:
    switched_on, training, reentrant = list[str](), list[str](), list[str]()
    for name, module in model.named_modules():
        # transformers' switch, or a function of this library in place of the module's own call
        own_switch = getattr(module, LAYER_SWITCH, False) is True
        if not own_switch and call_override(module) is None:
            continue
        switched_on.append(name)
        if module.training:
            training.append(name)
        if checkpoints_reentrant(module):
            reentrant.append(name)
    return Checkpoints(tuple(switched_on), tuple(training), tuple(reentrant))
