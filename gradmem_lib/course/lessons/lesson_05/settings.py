"""Lesson 05: the models, batches and cards of its exercises, made afresh on each call."""

import torch

from ...material import models
from ..shared.residual_net import labelled_rows, residual_net
from ..shared.settings import seeded, sgd, text_batch, with_large_gradients

CHECKPOINTING_CARD = "5 MiB"


def checkpointing_setting():
    """A tiny Llama of six layers as ``from_pretrained`` leaves a model, and token ids (4, 64)."""
    model = models.tiny_llama(layers=6, hidden=64, heads=4, intermediate=172, vocab=256)
    model.config.use_cache = True
    with seeded(1):
        return model.eval(), torch.randint(256, (4, 64))


LOG_CARD = "1.4 MB"


def log_setting():
    """A tiny Llama and a window of six micro-batches of unequal lengths."""
    lengths = [(32, 30), (4, 3), (9, 5), (17, 6), (28, 20), (2, 32)]
    window = [text_batch(*each, vocab=512, seed=seed) for seed, each in enumerate(lengths)]
    model = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64, vocab=512)
    with_large_gradients(model.lm_head, 30)
    return model, window


def bf16_setting():
    """A tiny Llama whose weights are bf16, its head tied to its embedding, and three batches."""
    model = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64, vocab=128, tied=True)
    batches = [text_batch(16, 16, vocab=128, seed=seed) for seed in range(3)]
    return model.to(torch.bfloat16), batches


LORA_CARD = "4.5 MiB"


def lora_setting():
    """A tiny Llama of three layers, not tied, and token ids (2, 24)."""
    with seeded(3):
        ids = torch.randint(2048, (2, 24))
    return models.tiny_llama(layers=3, hidden=64, heads=4, intermediate=172, vocab=2048), ids


BACKWARD_CARD = "6 MiB"


def backward_setting(tied):
    """A tiny Llama of eight layers, and three rows for ``Trainer``; ``tied``: two layers, one
    embedding, the first layer frozen.
    """
    model = models.tiny_llama(
        layers=2 if tied else 8, hidden=64, heads=4, intermediate=172, vocab=256, tied=tied
    )
    model.model.layers[0].requires_grad_(not tied)
    with seeded(4):
        ids = torch.randint(256, (3, 16))
    return model, [{"input_ids": row, "labels": row} for row in ids]


EVAL_CARD = "2.5 MiB"


def evaluation_setting():
    """A tiny GPT-2 with dropout and a key-value cache, in the middle of its training, and 18 rows
    of unequal lengths.
    """
    model = models.tiny_gpt2(layers=4, hidden=64, heads=4, positions=64, vocab=256, dropout=0.1)
    model.config.use_cache = True
    # rows that differ in their loss, as after training
    with_large_gradients(model.get_input_embeddings(), 20)
    return model, text_batch(*(2 + i * i % 61 for i in range(17)), 64, vocab=256)


RANDOM_CARD = "1.1 MiB"


def random_setting():
    """A residual net with dropout and drop path in training mode, its SGD, and 64 labelled rows."""
    model = residual_net(blocks=12, width=32)
    return model, sgd(model), labelled_rows(64, width=32)
