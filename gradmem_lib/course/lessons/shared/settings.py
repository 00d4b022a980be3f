"""What the exercises run on: small models, their batches and their cards, made afresh on each call.

Lessons show them too.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

import torch
import torch.nn.functional as F
from torch import nn

from ....names import IGNORED
from ...material import models


def flat(tensors) -> torch.Tensor:
    """All tensors in a row, as float64; nothing for ``None``."""
    parts = [t.detach().double().flatten() for t in tensors if t is not None]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def weights_of(module: nn.Module) -> torch.Tensor:
    """All parameters in a row."""
    return flat(module.parameters())


def trained_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in module.parameters() if p.requires_grad]


def have_graphs(losses) -> bool:
    """Whether a loss, or one in a list, still refers to its graph."""
    if isinstance(losses, (list, tuple)):
        return any(map(have_graphs, losses))
    return getattr(losses, "grad_fn", None) is not None


def gradients_of_updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Grows by all gradients in a row with each update, also where a closure computes them."""
    found: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: found.append(gradients_of(model)))
    return found


def with_large_gradients(head: nn.Module, factor: float) -> None:
    """Enlarge the weights of a model's ``head``, so that the loss has a gradient which is longer
    than what people clip to. An update that is clipped unasked is another one then.
    """
    with torch.no_grad():
        head.weight.mul_(factor)


def gradients_of(module: nn.Module) -> torch.Tensor:
    """All gradients in a row; zeros where there is none."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """The same random numbers each time in the block, and outside those that there would be."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, foreach=False)


@contextmanager
def collecting_new_objects_only() -> Iterator[None]:
    """``gc.collect()`` looks only at what is made in the block, and not at all objects of the
    kernel, which takes most of a second.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def quiet() -> Iterator[None]:
    """A block without what transformers says on the way, which is not the learner's output.

    ``Trainer`` has the garbage collector look at all that lives, at the end of each run, which in a
    kernel is most of its time: it is shown what the block has made alone.
    """
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with collecting_new_objects_only():
            yield
    finally:
        logging.set_verbosity(level)


def quietly(cases):
    """``cases`` of an exercise, in a ``quiet()`` block."""

    @wraps(cases)
    def quiet_cases(answer):
        with quiet():
            yield from cases(answer)

    return quiet_cases


def rows(*lengths: int, seed: int = 0, vocab: int = 11) -> torch.Tensor:
    """Token ids (batch, longest) of sequences of these lengths, with -100 where a sequence has
    ended.
    """
    with seeded(seed):
        ids = torch.randint(vocab, (len(lengths), max(lengths)))
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


def tiny_llama(layers: int, vocab: int, **options):
    """A Llama of 64 features and 4 heads; ``options``: those of ``models.tiny_llama``."""
    sizes = {"hidden": 64, "heads": 4, "intermediate": 172}
    return models.tiny_llama(layers=layers, vocab=vocab, **sizes, **options)


def bigrams() -> nn.Sequential:
    """The smallest language model: the next token from this one, among 11.

    Ids (batch, sequence) to logits, in float64.
    """
    with seeded():
        return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)).double()


def bigram_loss(model: nn.Module):
    """``loss_and_count`` for token ids whose padding is -100: (summed loss, predicted tokens)."""

    def loss_and_count(labels):
        logits, targets = model(labels.clamp(min=0))[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, int((targets != IGNORED).sum())

    return loss_and_count
