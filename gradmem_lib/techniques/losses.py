"""Losses of language models: how many labels count, and a cross-entropy whose logits never exist as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import compat
from ..names import IGNORED
from .tiny import VOCABULARY, tiny_model

CHUNK_TOKENS = 128  # of 128,256 words in float32: 63 MiB


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The summed cross-entropy of a causal language model on ``batch``, and how many tokens it predicts.

    ``batch`` has ``input_ids`` and ``labels`` (rows, tokens), and ``attention_mask`` where there is padding. A label
    of -100 is ignored. The logits at position t are compared with the label at t + 1.
    """
    logits = model(**_without_labels(batch)).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 has too few digits for a sum
    labels = batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, count_targets(batch["labels"])


def count_targets(labels: Tensor) -> int:
    """How many tokens a causal language model predicts: the labels (rows, tokens) that are not -100, without those
    at position 0, which nothing comes before."""
    return int((labels[:, 1:] != IGNORED).sum())


def _without_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def label_count(model: nn.Module, batch: Any) -> Tensor | None:
    """How many labels of ``batch`` count, a whole number of shape (): those that are not -100, after the shift where
    the model shifts them. ``None`` where the batch has no tensor of labels by that name."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        return None
    shifted = labels.dim() == 2 and predicts_next_token(model)
    return ((labels[:, 1:] if shifted else labels) != IGNORED).sum()


def predicts_next_token(model: nn.Module) -> bool:
    """Whether labels are shifted by one inside the model, as transformers' causal language models do."""
    model = getattr(model, "module", model)  # of DistributedDataParallel
    name = type(model).__name__
    if name.endswith("ForConditionalGeneration"):
        # Vision-language models shift too, pairs of an encoder and a decoder do not.
        return not model.config.is_encoder_decoder
    return name.endswith(("ForCausalLM", "LMHeadModel"))


def chunked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a causal language model on ``batch`` (token ids and labels, each (rows, tokens)), its logits in
    chunks: the mean over the predicted tokens. ``ValueError`` for a model whose own loss is another."""
    tensors = isinstance(batch, Mapping) and all(isinstance(value, Tensor) for value in batch.values())
    if not tensors or "labels" not in batch:
        raise ValueError(
            "chunked_loss takes a dict of tensors with 'labels' in it, and no flags, which could change the model's "
            "loss: leave chunked_loss out"
        )
    check_chunked_loss(model)
    return _in_chunks(model, batch)


def check_chunked_loss(model: nn.Module) -> None:
    """``ValueError`` for a model whose own loss is another than ``chunked_loss``."""
    why = chunked_loss_refusal(type(model), getattr(model, "config", None))
    if why is not None:
        raise ValueError(f"{why}: leave chunked_loss out")


def _in_chunks(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    hidden = model.base_model(**_without_labels(batch)).last_hidden_state
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    return chunked_cross_entropy(hidden.flatten(0, 1), model.get_output_embeddings().weight, labels.flatten())


_refusals: dict[tuple[type, str], str | None] = {}


def chunked_loss_refusal(cls: type, config: Any) -> str | None:
    """Why ``chunked_loss`` is not the own loss of a model of class ``cls`` made from ``config``; ``None`` where it is.

    Found by running both, with their gradients, on a tiny copy of the model, once for each config: about a second.
    An output layer that is more than a matrix (a bias, scaled or capped logits) has another loss, and so has a model
    that adds something (a router's loss). A model that has no tiny copy is refused too.
    """
    if not hasattr(config, "to_json_string") or not issubclass(cls, nn.Module):
        return f"chunked_loss is for transformers' causal language models, and {cls.__name__} is none"
    key = (cls, config.to_json_string(use_diff=False))
    if key not in _refusals:
        # Whatever watches, replaces or records what is done outside has nothing to do with this.
        modes, autocast = compat.without_modes(), torch.autocast("cpu", enabled=False)
        with modes, torch.enable_grad(), autocast, torch.random.fork_rng([]):
            _refusals[key] = _compared(cls, config)
    return _refusals[key]


def _compared(cls: type, config: Any) -> str | None:
    for heads in (2, 8):  # some code wants more of them
        try:
            own, chunks = _both_losses(cls, config, heads)
            break
        except Exception as error:  # whatever the model's own code raises
            said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    else:
        return (
            f"no tiny copy of {cls.__name__} could be trained, to see whether chunks have its loss ({said})"
        )
    if all(math.isclose(a, b, rel_tol=limit) for a, b, limit in zip(own, chunks, (1e-5, 1e-3), strict=True)):
        return None
    return (
        f"the loss of {cls.__name__} with this config is more than a cross-entropy of hidden states times its output "
        f"matrix (on a tiny copy of it {own[0]:.4f}, in chunks {chunks[0]:.4f}: a bias, scaled or capped logits, or a "
        "router's loss)"
    )


def _both_losses(cls: type, config: Any, heads: int) -> list[tuple[float, float]]:
    """The loss and the norm of its gradient, by the model's own code and in chunks."""
    torch.manual_seed(0)
    model = tiny_model(cls, config, heads).train()
    head = model.get_output_embeddings()
    # Logits of a size that a cap would change, and a bias that is not 0 as at the beginning.
    head.weight.data.normal_(std=5 / head.weight.shape[1] ** 0.5)
    if getattr(head, "bias", None) is not None:
        head.bias.data.normal_()
    ids = torch.randint(3, VOCABULARY, (2, CHUNK_TOKENS * 5 // 8), device="cpu")  # two chunks
    labels = ids.masked_fill(torch.rand(ids.shape, device="cpu") < 0.2, IGNORED)
    found = []
    for loss_of in (lambda model, batch: model(**batch).loss, _in_chunks):
        torch.manual_seed(1)  # dropout
        loss = loss_of(model, {"input_ids": ids, "labels": labels})
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        found.append((loss.item(), norm.item()))
        model.zero_grad(set_to_none=True)
    return found


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` against ``labels``, with the logits of ``tokens`` rows at a time.

    ``hidden`` (T, h), ``weight`` (vocab, h), ``labels`` (T,) with -100 for rows that do not count. Gradients are
    computed on the way forward, since a chunk's logits will not come back. torch 2.13's ``F.linear_cross_entropy``
    does the same in one operator, where nobody can see the bytes of a chunk.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, tokens):
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(dtype)
            wants_hidden, wants_weight = ctx.needs_input_grad[:2]
            d_hidden = torch.empty_like(hidden) if wants_hidden else None
            d_weight = torch.zeros_like(weight) if wants_weight else None
            total = hidden.new_zeros((), dtype=torch.float32)
            count = (labels != IGNORED).sum()
            for start in range(0, len(hidden), tokens):
                rows, target = hidden[start : start + tokens].to(dtype), labels[start : start + tokens]
                counted = (target != IGNORED)[:, None]
                target = target.clamp(min=0)[:, None]
                log_p = (rows @ matrix.T).float().log_softmax(1)
                total -= (log_p.gather(1, target) * counted).sum()
                if not (wants_hidden or wants_weight):
                    continue
                d_logits = log_p.exp_()
                d_logits.scatter_add_(1, target, -torch.ones_like(target, dtype=torch.float32))
                d_logits = d_logits.mul_(counted / count).to(dtype)
                if wants_hidden:
                    d_hidden[start : start + tokens] = d_logits @ matrix
                if wants_weight and d_weight.dtype == dtype:
                    d_weight.addmm_(d_logits.T, rows)  # += would need a second gradient of the matrix's size
                elif wants_weight:
                    d_weight += d_logits.T @ rows
                del log_p, d_logits, rows
        ctx.save_for_backward(d_hidden, d_weight)
        return total / count

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        # In place, for the same reason. A second backward through the same graph is an error then, and not a wrong gradient.
        return (
            None if d_hidden is None else d_hidden.mul_(d_loss.to(d_hidden.dtype)),
            None if d_weight is None else d_weight.mul_(d_loss.to(d_weight.dtype)),
            None,
            None,
        )
