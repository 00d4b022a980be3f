"""One description of a model, made where it comes in: what it is called, whether it is its user's
own, and the sizes that are counted on it.
"""

import copy
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ..compat.transformers_models import takes_fused_attention
from ..hf_names import PARTS
from .classes import model_class, predicts_next_token
from .configs import find_config, title_of
from .known import known_model, similar_names
from .linear import linear_layers, linear_sizes, output_layer
from .wrappers import without_wrappers


@dataclass(eq=False)
class Description:
    """A model that is not trained here: a ``skeleton`` without memory, built from a config, or
    (``is_user_module``) the user's module. ``title``: its name for readers.

    Its sizes are counted once, when they are asked for, and in numbers, not bytes.
    """

    skeleton: nn.Module
    title: str
    is_user_module: bool

    @cached_property
    def config(self) -> Any:
        """The config of transformers; ``None`` for other modules."""
        return getattr(without_wrappers(self.skeleton), "config", None)

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.skeleton.parameters())

    @cached_property
    def trained_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters that need a gradient."""
        return tuple(tuple(p.shape) for p in self.skeleton.parameters() if p.requires_grad)

    @cached_property
    def frozen(self) -> int:
        """How many numbers need no gradient."""
        return self.parameters - sum(map(math.prod, self.trained_shapes))

    @cached_property
    def head(self) -> nn.Linear | None:
        """The layer that makes the logits of words."""
        return output_layer(self.skeleton)

    @cached_property
    def vocabulary(self) -> int:
        """How many logits the head makes for a token; 0 without a head."""
        return 0 if self.head is None else self.head.out_features

    @cached_property
    def head_entries(self) -> int:
        return 0 if self.head is None else self.head.weight.numel()

    @cached_property
    def linear(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each linear layer but the head, by name."""
        found = {}
        for name, layer in linear_layers(self.skeleton).items():
            found[name] = linear_sizes(layer)
        return found

    @cached_property
    def matrices(self) -> int:
        """The entries of the linear layers, without the head."""
        return sum(i * o for i, o in self.linear.values())

    @cached_property
    def trained_matrices(self) -> int:
        """Those of them that are trained. A weight of two layers counts once."""
        found = {}
        for layer in linear_layers(self.skeleton).values():
            if layer.weight.requires_grad:
                found[id(layer.weight)] = layer.weight.numel()
        return sum(found.values())

    @cached_property
    def attention(self) -> tuple[str, ...]:
        """The names of the attention modules, each with a dot: names inside begin so."""
        ends = PARTS["attention"]
        modules = self.skeleton.named_modules()
        return tuple(f"{name}." for name, part in modules if type(part).__name__.endswith(ends))

    @cached_property
    def attended(self) -> int:
        """The entries of the linear layers in attention."""
        sizes = self.linear.items()
        return sum(i * o for name, (i, o) in sizes if name.startswith(self.attention))

    @cached_property
    def causal(self) -> bool:
        """Whether each token attends only to those before it."""
        return predicts_next_token(self.skeleton)

    @cached_property
    def fused(self) -> bool:
        """Whether its attention may be fused."""
        return takes_fused_attention(self.skeleton)

    @cached_property
    def scores(self) -> int:
        """Heads x head size, summed over the attentions that the config names."""
        text = self.config.get_text_config()
        hidden, layers = getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0)
        heads = getattr(text, "num_attention_heads", 1)
        # Encoder and decoder have equally many layers, and each of the decoder's attends twice.
        attentions = 3 * layers if self.config.is_encoder_decoder else layers
        return attentions * heads * (getattr(text, "head_dim", None) or hidden // heads)

    @cached_property
    def experts(self) -> float:
        """The entries of the experts' matrices (experts, out, in) that one token passes."""
        text = self.config.get_text_config()
        count = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
        if not count:
            return 0.0
        tensors = [p for p in self.skeleton.parameters() if p.dim() == 3 and len(p) == count]
        passed = getattr(text, "num_experts_per_tok", None) or count
        return sum(p.numel() for p in tensors) * passed / count

    @cached_property
    def lengths(self) -> set[int]:
        """The numbers of layers that the config names."""
        return set(_lengths(self.config))


def _lengths(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):  # the config of a part of the model
            yield from _lengths(value)
        elif type(value) is int and "layer" in name:
            yield value


def is_own_module(given: object) -> bool:
    """Whether ``given`` is a module that transformers could not build from its config."""
    from transformers import PretrainedConfig

    if not isinstance(given, nn.Module):
        return False
    inside = without_wrappers(given)
    config = getattr(inside, "config", None)
    if not isinstance(config, PretrainedConfig):
        return True
    config = copy.deepcopy(config)
    config.architectures = [type(inside).__name__]
    try:
        return model_class(config) is not type(inside)
    except ValueError:
        return True


def find_model(model_or_config) -> tuple[Any, str]:
    """(config, title) of a model, a config, a well-known name, a folder or a hub id.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(model_or_config, nn.Module):
        inside = without_wrappers(model_or_config)
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
    if (known := known_model(model_or_config) if named else None) is not None:
        return known[1], known[0]
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
