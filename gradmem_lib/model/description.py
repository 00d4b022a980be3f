"""What predictions and plans know of a model: its config, and the sizes that are counted on it."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ..compat.transformers_models import takes_fused_attention
from ..hf_names import PARTS
from .classes import predicts_next_token
from .linear import linear_layers, linear_sizes, output_layer
from .wrappers import inside_peft


@dataclass(eq=False)
class Description:
    """``skeleton``: the model, built from a config without memory, or the user's own. PEFT may be
    around it, and no other wrapper.

    Its sizes are in numbers, not bytes. Each is counted once, when it is asked for: a module that
    changes afterwards needs a new description.
    """

    skeleton: nn.Module

    @cached_property
    def config(self) -> Any:
        """``None`` if the model has none. Raises ``ValueError`` as ``inside_peft`` does."""
        return getattr(inside_peft(self.skeleton), "config", None)

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.skeleton.parameters())

    @cached_property
    def trained_shapes(self) -> Counter[tuple[int, ...]]:
        """How many parameters of each shape need a gradient."""
        return Counter(tuple(p.shape) for p in self.skeleton.parameters() if p.requires_grad)

    @cached_property
    def frozen(self) -> int:
        """How many numbers need no gradient."""
        return self.parameters - sum(map(math.prod, self.trained_shapes.elements()))

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
        """The entries of the linear layers, without the head, each layer's by itself."""
        return sum(i * o for i, o in self.linear.values())

    @cached_property
    def trained_matrices(self) -> int:
        """Those of trained weights. A weight that two layers share counts once here."""
        found = {}
        for layer in linear_layers(self.skeleton).values():
            if layer.weight.requires_grad:
                found[id(layer.weight)] = layer.weight.numel()
        return sum(found.values())

    @cached_property
    def attention(self) -> tuple[str, ...]:
        """The names of the attention modules, each with a dot, as the names inside begin."""
        ends = PARTS["attention"]
        modules = self.skeleton.named_modules()
        return tuple(f"{name}." for name, part in modules if type(part).__name__.endswith(ends))

    @cached_property
    def attended(self) -> int:
        """The entries of the linear layers in attention."""
        sizes = self.linear.items()
        return sum(i * o for name, (i, o) in sizes if name.startswith(self.attention))

    # From here on, of models that transformers builds.

    @cached_property
    def causal(self) -> bool:
        """Whether it is a causal language model: its tokens attend to those before them."""
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
