"""LoRA: a frozen linear layer plus a trained low-rank addition."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hf_names import hf_class
from ..model.linear import linear_layers, linear_sizes


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained addition: ``base(x) + scale * B(A(x))`` (Hu et al. 2021,
    section 4.1).

    ``A`` (rank, in) starts random and ``B`` (out, rank) at zero, so that training starts from the
    base model. Both have ``dtype``, by default float32 on a base in 16 bits, as in PEFT; ``x`` is
    cast to it. transformers' ``Conv1D`` (GPT-2) has a transposed weight.

    ``scale`` is ``alpha / rank``, by default 2. ``dropout`` is the share of the addition's inputs
    that training leaves out, with the others scaled up; the base sees all of them. A layer whose
    ``weight`` is read without a call (Mamba's ``dt_proj``) leaves none out.
    """

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float | None = None,
        dtype: torch.dtype | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        if (sizes := linear_sizes(base)) is None or rank < 1:
            raise ValueError(
                f"give an nn.Linear or Conv1D, and a rank of at least 1, not {base}, {rank}"
            )
        in_features, out_features = sizes
        self.base = base.requires_grad_(False)
        dtype = dtype or torch.promote_types(base.weight.dtype, torch.float32)
        self.A = nn.Parameter(base.weight.new_empty(rank, in_features, dtype=dtype))
        self.B = nn.Parameter(base.weight.new_zeros(out_features, rank, dtype=dtype))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = (2 * rank if alpha is None else alpha) / rank
        self.dropout = dropout
        # What a model was seen doing with this layer: PEFT's files are for layers that are called.
        self.was_called = self.weight_was_read = False

    @property
    def weight(self) -> Tensor:
        """``merged_weight``, for a model that reads the weight without calling the layer, as Mamba
        does with its ``dt_proj``.
        """
        self.weight_was_read = True
        return self.merged_weight()

    def merged_weight(self) -> Tensor:
        """Base plus addition as one new matrix in the base's shape, added in float32 and rounded
        once.
        """
        base = self.base.weight
        wide = torch.promote_types(base.dtype, torch.float32)
        addition = self.scale * (self.B.to(wide) @ self.A.to(wide))
        if isinstance(self.base, hf_class("Conv1D")):
            addition = addition.T
        return (base.to(wide) + addition).to(base.dtype)

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.base, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (..., in) to (..., out)."""
        self.was_called = True
        y = self.base(x)
        own = x if torch.is_autocast_enabled(x.device.type) else x.to(self.A.dtype)
        if self.dropout:
            own = F.dropout(own, self.dropout, self.training)
        return (y + F.linear(F.linear(own, self.A), self.B) * self.scale).to(y.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """The base with the addition written into its weight, for use after training.

        ``ValueError`` for a base in 4 bits.
        """
        if not isinstance(self.base.weight, nn.Parameter):
            raise ValueError(
                "the base is in 4 bits, and rounding to 4 bits would lose the additions: load the "
                "model in bf16 with a recipe without quantized_base, resume from a checkpoint or "
                "copy A and B over, and merge there"
            )
        self.base.weight.copy_(self.merged_weight())
        return self.base


def add_lora(
    model: nn.Module,
    rank: int,
    targets: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
) -> int:
    """Freeze ``model`` and replace its linear layers by ``LoRALinear`` in place. Returns their
    number.

    ``targets`` are names, or last parts of names (``"q_proj"``, ``"mlp.up_proj"``). Without any,
    all but the output layer. The others are those of ``LoRALinear``.
    """
    linear = linear_layers(model)
    chosen = list(linear)
    if targets:
        suffixes = tuple(f".{target}" for target in targets)
        chosen = [name for name in linear if f".{name}".endswith(suffixes)]
    missing = [t for t in targets if not any(f".{name}".endswith(f".{t}") for name in chosen)]
    if missing or not chosen:
        available = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"no linear layer is called {' or '.join(map(repr, missing)) or 'anything'}: "
            "lora_targets are the last parts of layers' names, and inside this model there is "
            f"{', '.join(map(repr, available)) or 'none'} (the output layer gets no additions)"
        )
    # All are made before the model changes: a refusal leaves it as it is.
    additions = [LoRALinear(linear[name], rank, alpha, dtype, dropout) for name in chosen]
    model.requires_grad_(False)
    for name, addition in zip(chosen, additions, strict=True):
        model.set_submodule(name, addition)
    return len(chosen)
