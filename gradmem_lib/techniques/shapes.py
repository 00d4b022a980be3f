"""Shapes of well-known models, to count with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes that decide a decoder's memory. ``norm`` is ``"rms"`` (Llama) or ``"layer"`` (GPT-2).

    ``tied``: the output layer is the embedding matrix itself. ``gated``: the MLP has three matrices, not two.
    ``biases``: linear layers carry biases. ``positions``: rows of a learned position table, 0 for rotary.
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
        """Width of the keys (and of the values): smaller than ``hidden`` under grouped-query attention."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, int]:
        """Entries of each weight matrix of one block."""
        h, f = self.hidden, self.intermediate
        names = {
            "query": h * h,
            "key": h * self.kv_hidden,
            "value": h * self.kv_hidden,
            "attention output": h * h,
        }
        return names | ({"gate": h * f} if self.gated else {}) | {"up": h * f, "down": f * h}

    @property
    def norm_parameters(self) -> int:
        """A weight per feature, and for LayerNorm a bias too."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def block_parameters(self) -> int:
        bias = (
            self.hidden
            + 2 * self.kv_hidden
            + self.hidden
            + self.intermediate * (1 + self.gated)
            + self.hidden
        )
        return sum(self.matrices.values()) + bias * self.biases + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """The token table; the output layer has as many again unless it is tied to it."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Trainable numbers, each storage once: equal to ``sum(p.numel() for p in model.parameters())``."""
        tables = self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        return tables + self.layers * self.block_parameters + self.norm_parameters

    @property
    def tensors(self) -> int:
        """Parameter tensors: AdamW keeps a step counter of 4 bytes for each. GPT-2 holds query, key and
        value in one."""
        matrices = len(self.matrices) - 2 * bool(self.positions)
        per_block = matrices * (1 + self.biases) + 2 * (1 + (self.norm == "layer"))
        return (
            (1 if self.tied else 2)
            + bool(self.positions)
            + self.layers * per_block
            + 1
            + (self.norm == "layer")
        )

    @property
    def largest_tensor(self) -> int:
        """Entries of the largest parameter tensor: an optimizer that works tensor by tensor needs room for
        it."""
        return max(
            self.embedding_parameters, 3 * self.hidden**2 * bool(self.positions), *self.matrices.values()
        )

    @classmethod
    def from_config(cls, config, name: str | None = None) -> Shape:
        """The shape of a Hugging Face ``LlamaConfig`` or ``GPT2Config``. ``ValueError`` for any other
        architecture."""
        kind = getattr(config, "model_type", type(config).__name__)
        name = name or getattr(config, "name_or_path", "") or kind
        tied = bool(config.tie_word_embeddings) if hasattr(config, "tie_word_embeddings") else True
        if kind == "gpt2":
            h = config.n_embd
            return cls(
                name, config.vocab_size, h, config.n_layer, config.n_head, config.n_head, config.n_inner or 4 * h,
                tied=tied, gated=False, norm="layer", biases=True, positions=config.n_positions,
            )  # fmt: skip
        plain = kind == "llama" and not config.attention_bias and not config.mlp_bias
        if not plain or config.head_dim * config.num_attention_heads != config.hidden_size:
            raise ValueError(
                "the closed forms know GPT-2 and Llama (no biases, heads x head_dim = hidden), not this "
                f"{kind!r} config: give one of those, or describe the model yourself with Shape(...)"
            )
        return cls(
            name, config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
            config.num_key_value_heads, config.intermediate_size, tied=tied,
        )  # fmt: skip

    def config(self, *, positions: int = 131072, dropout: float = 0.0):
        """A transformers config of this shape: ``from_config`` turned round.

        ``positions``: the longest sequence, for rotary positions; a learned table has its own length. ``dropout`` is GPT-2's
        alone, in all three places.
        """
        from transformers import GPT2Config, LlamaConfig

        if self.positions:
            return GPT2Config(
                vocab_size=self.vocab, n_embd=self.hidden, n_layer=self.layers, n_head=self.heads,
                n_inner=self.intermediate, n_positions=self.positions, tie_word_embeddings=self.tied,
                resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            )  # fmt: skip
        return LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied, max_position_embeddings=positions,
        )  # fmt: skip


def _gpt2(
    name: str, hidden: int, layers: int, heads: int, vocab: int = 50257, positions: int = 1024
) -> Shape:
    return Shape(
        name, vocab, hidden, layers, heads, heads, 4 * hidden,
        tied=True, gated=False, norm="layer", biases=True, positions=positions,
    )  # fmt: skip


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("tiny Llama", 8192, 256, 4, 8, 8, 688),
        Shape("SmolLM2-135M", 49152, 576, 30, 9, 3, 1536, tied=True),
        Shape("Llama-3.2-1B", 128256, 2048, 16, 32, 8, 8192, tied=True),
        Shape("Llama-2-7B", 32000, 4096, 32, 32, 32, 11008),
        Shape("Llama-2-13B", 32000, 5120, 40, 40, 40, 13824),
        Shape("Llama-2-70B", 32000, 8192, 80, 64, 8, 28672),
        _gpt2("GPT-2", 768, 12, 12),
        _gpt2("GPT-2 XL", 1600, 48, 25),
    )
}
