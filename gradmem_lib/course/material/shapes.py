"""Shapes of well-known models, for counting."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...model.known import model_table


@dataclass(frozen=True)
class Shape:
    """The sizes that decide a decoder's memory. ``norm`` is ``"rms"`` (Llama) or ``"layer"``
    (GPT-2).

    ``tied``: the output layer is the embedding matrix itself. ``gated``: the MLP has three
    matrices, not two. ``biases``: linear layers carry biases. ``positions``: rows of a learned
    position table, 0 for rotary.
    """

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    gated: bool = True
    norm: str = "rms"
    biases: bool = False
    positions: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_hidden(self) -> int:
        """Width of the keys (and of the values): smaller than ``hidden`` under grouped-query
        attention.
        """
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, int]:
        """Entries of each weight matrix of one block."""
        h, kv, f = self.hidden, self.kv_hidden, self.intermediate
        attention = {"query": h * h, "key": h * kv, "value": h * kv, "attention output": h * h}
        return attention | ({"gate": h * f} if self.gated else {}) | {"up": h * f, "down": f * h}

    @property
    def norm_parameters(self) -> int:
        """A weight per feature, and for LayerNorm a bias too."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def block_parameters(self) -> int:
        biases = 3 * self.hidden + 2 * self.kv_hidden + self.intermediate * (1 + self.gated)
        return sum(self.matrices.values()) + biases * self.biases + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """The token table; the output layer has as many again unless it is tied to it."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Trainable numbers, each storage once: equal to ``sum(p.numel() for p in
        model.parameters())``.
        """
        tables = self.embedding_parameters * (2 - self.tied) + self.positions * self.hidden
        return tables + self.layers * self.block_parameters + self.norm_parameters

    @property
    def tensors(self) -> int:
        """Parameter tensors: AdamW keeps a counter of 4 bytes for each.

        GPT-2 holds query, key and value in one.
        """
        norm = self.norm_parameters // self.hidden
        matrices = len(self.matrices) - 2 * bool(self.positions)
        tables = 2 - self.tied + bool(self.positions)
        return tables + self.layers * (matrices * (1 + self.biases) + 2 * norm) + norm

    @property
    def largest_tensor(self) -> int:
        """Entries of the largest parameter: an optimizer that works tensor by tensor needs room for
        it.
        """
        joined = 3 * self.hidden**2 * bool(self.positions)
        return max(self.embedding_parameters, joined, *self.matrices.values())

    @classmethod
    def from_config(cls, config: Any, name: str | None = None) -> Shape:
        """The shape of a ``LlamaConfig`` or ``GPT2Config``.

        ``ValueError`` for any other architecture.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        plain = kind == "llama" and not config.attention_bias and not config.mlp_bias
        if kind != "gpt2" and (
            not plain or config.head_dim * config.num_attention_heads != config.hidden_size
        ):
            raise ValueError(
                "the closed forms are for GPT-2 and Llama (no biases, heads x head_dim = hidden), "
                f"not for this {kind!r} config: use one of those, or describe the model yourself "
                "with Shape(...)"
            )
        name = name or getattr(config, "name_or_path", "") or kind
        width, heads = config.hidden_size, config.num_attention_heads
        sizes = (name, config.vocab_size, width, config.num_hidden_layers, heads)
        tied = bool(getattr(config, "tie_word_embeddings", True))
        if kind == "gpt2":
            inner = config.n_inner or 4 * width
            return cls(*sizes, heads, inner, tied=tied, positions=config.n_positions, **_GPT2)
        return cls(*sizes, config.num_key_value_heads, config.intermediate_size, tied=tied)

    def config(self, *, positions: int = 131072) -> Any:
        """A transformers config of this shape: the inverse of ``from_config``.

        ``positions``: the longest sequence, for rotary positions; a learned table has its own
        length. GPT-2 has no dropout here.
        """
        from transformers import GPT2Config, LlamaConfig

        if self.positions:
            return GPT2Config(
                vocab_size=self.vocab,
                n_embd=self.hidden,
                n_layer=self.layers,
                n_head=self.heads,
                n_inner=self.intermediate,
                n_positions=self.positions,
                tie_word_embeddings=self.tied,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
            max_position_embeddings=positions,
        )


_GPT2: dict[str, Any] = {"gated": False, "norm": "layer", "biases": True}


def _known(*names: str) -> dict[str, Shape]:
    """Llamas and GPT-2s of ``model/models.json``, read without transformers, which takes seconds
    to import.
    """
    table, found = model_table(), {}
    for name in names:
        row = table[name]
        head = row["hidden_size"] // row["num_attention_heads"]
        config = SimpleNamespace(**row, head_dim=head, attention_bias=False, mlp_bias=False)
        found[name] = Shape.from_config(config, name)
    return found


SHAPES = _known(
    "tiny Llama",
    "SmolLM2-135M",
    "Llama-3.2-1B",
    "Llama-2-7B",
    "Llama-2-13B",
    "Llama-2-70B",
    "GPT-2",
    "GPT-2 XL",
)
