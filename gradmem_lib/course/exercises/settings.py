"""What the exercises run on: small models, their batches and their cards, made afresh on each call.

Lessons show them too.
"""

from __future__ import annotations

import gc
from functools import wraps

import torch
import torch.nn.functional as F
from torch import nn

from ...names import IGNORED
from .. import models


def flat(tensors) -> torch.Tensor:
    """All tensors in a row, as float64; nothing for ``None``."""
    parts = [t.detach().double().flatten() for t in tensors if t is not None]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def gradients_of(module: nn.Module) -> torch.Tensor:
    """All gradients in a row; zeros where there is none."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())


def quietly(observe):
    """``observe``, or ``explain``, without what transformers says on the way, which is not the
    learner's output.

    ``Trainer`` has the garbage collector look at all that lives, at the end of each run, which in a
    kernel is most of its time: it is shown what the run has made alone.
    """

    @wraps(observe)
    def quiet(*seen):
        from transformers.utils import logging

        level = logging.get_verbosity()
        logging.set_verbosity_error()
        gc.freeze()
        try:
            return observe(*seen)
        finally:
            gc.unfreeze()
            logging.set_verbosity(level)

    return quiet


def rows(*lengths: int, seed: int = 0, vocab: int = 11) -> torch.Tensor:
    """Token ids (batch, longest) of sequences of these lengths, with -100 where a sequence has
    ended.
    """
    ids = torch.randint(
        0, vocab, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed)
    )
    return ids.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], IGNORED)


def text_batch(*lengths: int, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels`` of sequences of these lengths, padded on the
    right.
    """
    labels = rows(*lengths, seed=seed, vocab=vocab)
    return {
        "input_ids": labels.clamp(min=0),
        "attention_mask": (labels != IGNORED).long(),
        "labels": labels,
    }


class Bigrams(nn.Module):
    """The smallest language model: the next token from this one.

    Ids (batch, sequence) to logits, in float64.
    """

    def __init__(self, vocab: int = 11, hidden: int = 4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(
            torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
        )
        self.head = nn.Parameter(
            torch.randn(hidden, vocab, generator=generator, dtype=torch.float64)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, sequence); the result: (batch, sequence, vocabulary)."""
        return self.table[ids] @ self.head


def bigram_loss(model: Bigrams):
    """``loss_and_count`` for token ids whose padding is -100: (summed loss, predicted tokens)."""

    def loss_and_count(labels):
        logits, targets = model(labels.clamp(min=0))[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, int((targets != IGNORED).sum())

    return loss_and_count


def train_setting() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    """The tiny Llama, its optimizer and three batches of exercise 1.6."""
    model = models.tiny_llama(layers=2, hidden=64, heads=4, intermediate=172, vocab=2048)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    ids = torch.randint(0, 2048, (3, 4, 64), generator=torch.Generator().manual_seed(1))
    return model, optimizer, list(ids)


CARD = "8 MiB"


def batch_setting() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """Exercise 3.7's tiny Llama, its optimizer and a batch of 64 sequences of unequal lengths."""
    model = models.tiny_llama(layers=1, hidden=64, heads=4, intermediate=172, vocab=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return model, optimizer, text_batch(*(2 + i * i % 31 for i in range(64)), vocab=1024)


# the last layer is a head, whose logits are VOCAB times as wide as a boundary
DEPTH, KEEPS, VOCAB = 64, 5, 5
CHAIN_ROWS, CHAIN_WIDTH = 256, 32
CHAIN_BOUNDARY = CHAIN_ROWS * CHAIN_WIDTH * 4
CHAIN_CARD = 41.5  # boundaries beside the weights


def chain_setting() -> tuple[nn.Sequential, torch.Tensor]:
    """63 frozen layers that keep 5 boundaries each (their input is one), a frozen head, and the
    input, which is what is trained.
    """
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(CHAIN_ROWS, CHAIN_WIDTH, generator=generator)
    head = nn.Linear(CHAIN_WIDTH, VOCAB * CHAIN_WIDTH, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / 8)
    return models.chain(DEPTH - 1, width=CHAIN_WIDTH, keeps=KEEPS).append(head), x.requires_grad_()


def chain_budget() -> int:
    """Bytes: the weights of ``chain_setting`` and ``CHAIN_CARD`` boundaries."""
    layers, _ = chain_setting()
    return sum(p.nbytes for p in layers.parameters()) + int(CHAIN_CARD * CHAIN_BOUNDARY)


CHECKPOINTING_CARD = "5 MiB"


def checkpointing_setting() -> tuple[nn.Module, torch.Tensor]:
    """A tiny Llama of six layers as ``from_pretrained`` leaves a model, and token ids (4, 64)."""
    model = models.tiny_llama(layers=6, hidden=64, heads=4, intermediate=172, vocab=256)
    model.config.use_cache = True
    return model.eval(), torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))


LOG_CARD = "1.4 MB"


def log_setting(kind: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A tiny Llama and a window of six micro-batches, of ``"equal"`` or ``"unequal"`` lengths."""
    lengths = [(24, 24)] * 6
    if kind == "unequal":
        lengths = [(32, 30), (4, 3), (9, 5), (17, 6), (28, 20), (2, 32)]
    window = [text_batch(*each, vocab=512, seed=seed) for seed, each in enumerate(lengths)]
    return models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64, vocab=512), window


def bf16_setting() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A tiny Llama whose weights are bf16, its head tied to its embedding, and three batches."""
    model = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64, vocab=128, tied=True)
    batches = [text_batch(16, 16, vocab=128, seed=seed) for seed in range(3)]
    return model.to(torch.bfloat16), batches


LORA_CARD = "4.5 MiB"


def lora_setting() -> tuple[nn.Module, torch.Tensor]:
    """A tiny Llama of three layers, not tied, and token ids (2, 24)."""
    ids = torch.randint(0, 2048, (2, 24), generator=torch.Generator().manual_seed(3))
    return models.tiny_llama(layers=3, hidden=64, heads=4, intermediate=172, vocab=2048), ids


BACKWARD_CARD = "6 MiB"


def backward_setting(tied: bool) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A tiny Llama of eight layers, and three rows for ``Trainer``; ``tied``: two layers, one
    embedding, the first layer frozen.
    """
    model = models.tiny_llama(
        layers=2 if tied else 8, hidden=64, heads=4, intermediate=172, vocab=256, tied=tied
    )
    model.model.layers[0].requires_grad_(not tied)
    ids = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(4))
    return model, [{"input_ids": row, "labels": row} for row in ids]


EVAL_CARD = "2.5 MiB"
EVAL_ROWS = 4  # which fit


def evaluation_setting() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny GPT-2 with dropout and a key-value cache, in the middle of its training, and 18 rows
    of unequal lengths.
    """
    model = models.tiny_gpt2(layers=4, hidden=64, heads=4, positions=64, vocab=256)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    model.config.use_cache = True
    with torch.no_grad():
        # rows that differ in their loss, as after training
        model.get_input_embeddings().weight.mul_(20)
    return model.train(), text_batch(*(2 + i * i % 61 for i in range(17)), 64, vocab=256)
