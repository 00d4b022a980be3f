"""Losses of causal language models: a sum with its number of tokens, and a mean whose logits never
exist as a whole.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat.dispatch_modes import without_modes
from ..compat.fake_tensors import has_numbers
from ..model.wrappers import inside_wrapper
from ..names import IGNORED

CHUNK_TOKENS = 128  # of 128,256 words in float32: 63 MiB


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The summed cross-entropy of a causal language model on ``batch``, and the number of tokens
    that it predicts.

    ``batch`` has ``input_ids`` and ``labels`` (rows, tokens), and ``attention_mask`` if there is
    padding. A label of -100 is ignored. The logits at position t are compared with the label at t +
    1.
    """
    # Without a cache, transformers sees from position_ids where the texts of a packed row begin.
    inputs = dict(packed_by_position(_without_labels(batch)))
    if takes_argument(model, "use_cache"):
        inputs["use_cache"] = False
    output, labels = model(**inputs), batch["labels"]
    logits = output.logits
    if getattr(output, "aux_loss", None) is not None:
        raise ValueError(
            "set model.config.output_router_logits = False, or train the model's own loss, "
            "model(**batch).loss, without accumulation: it has a part that balances the experts "
            "and compares all tokens of a batch, which this sum does not have"
        )
    if logits.shape[1] != labels.shape[1]:
        raise ValueError(
            f"take the model's own loss, model(**batch).loss: it made logits of {logits.shape[1]} "
            f"tokens in a row, and there are {labels.shape[1]} labels. Prompt tuning, for example, "
            "puts tokens before each row"
        )
    logits, labels = logits[:, :-1], labels[:, 1:]
    # bf16 has too few digits for a sum
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, count_targets(batch["labels"])


def count_targets(labels: Tensor) -> int:
    """How many tokens a causal language model predicts: the labels (rows, tokens) that are not
    -100. Labels at position 0 do not count, since no token comes before them.
    """
    return int((labels[:, 1:] != IGNORED).sum())


def takes_argument(model: nn.Module, name: str) -> bool:
    """Whether ``model`` has an argument of this name, also inside the wrappers of several processes
    and of ``peft``.
    """
    while True:
        arguments = inspect.signature(model.forward).parameters
        if name in arguments:
            return True
        inside = inside_wrapper(model)
        if inside is model:
            inside = getattr(model, "base_model", None)
        if not isinstance(inside, nn.Module) or inside is model:
            return False
        model = inside


def _without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def packed_by_position(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """``batch`` without its attention mask of ones, if several texts are packed in one row.

    Where ``position_ids`` (rows, tokens) start again inside a row, another text begins. Models of
    transformers see that only if they get no mask: with one, each text sees those before it. Raises
    ``ValueError`` if the mask of such a batch has zeros.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    for given in (mask, positions):
        if not isinstance(given, Tensor) or not has_numbers(given):
            return batch
    if mask.dim() != 2 or positions.shape not in (mask.shape, (1, mask.shape[1])):
        return batch
    with without_modes():  # a tracker measures the model's step
        shown = mask.bool()
        of_text = positions.expand_as(mask).masked_fill(~shown, -1)
        highest = of_text.cummax(1).values  # up to each token
        begins_again = bool((shown[:, 1:] & (of_text[:, 1:] <= highest[:, :-1])).any())
        has_zeros = not shown.all()
    if not begins_again:
        return batch
    if has_zeros:
        raise ValueError(
            "leave attention_mask out of rows with several texts, and give padding the position 0: "
            "position_ids start again inside a row, and with a mask that has zeros each text would "
            "see those before it"
        )
    return {name: value for name, value in batch.items() if name != "attention_mask"}


class LogitForm(NamedTuple):
    """What a model makes of the output of its head, z: ``scale * z``; with a cap,
    ``cap * tanh(scale * z / cap)``.
    """

    scale: float = 1.0
    cap: float | None = None

    def of(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits, and the tanh of capped ones. Takes the memory of ``z``."""
        if self.scale != 1:
            z *= self.scale
        if self.cap is None:
            return z, None
        tanh = z.div_(self.cap).tanh_()
        return tanh * self.cap, tanh

    def gradient(self, d_logits: Tensor, tanh: Tensor | None) -> Tensor:
        """The gradient of z, in the memory of ``d_logits``. Takes the memory of ``tanh``."""
        if tanh is not None:
            d_logits *= tanh.square_().neg_().add_(1)
        if self.scale != 1:
            d_logits *= self.scale
        return d_logits


PLAIN = LogitForm()


def loss_in_chunks(model: nn.Module, batch: dict[str, Tensor], form: LogitForm = PLAIN) -> Tensor:
    """The mean cross-entropy of a causal language model on ``batch`` (as above), with the logits in
    chunks. ``training.losses.chunked_loss`` first asks the model for its ``form``.
    """
    inputs = packed_by_position(_without_labels(batch))
    hidden = model.base_model(**inputs).last_hidden_state
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    head = model.get_output_embeddings()
    return chunked_cross_entropy(
        hidden.flatten(0, 1), head.weight, labels.flatten(), bias=head.bias, form=form
    )


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tokens: int = CHUNK_TOKENS,
    *,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN,
) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T + bias`` in this ``form`` against ``labels``, with
    the logits of ``tokens`` rows at a time.

    ``hidden`` (T, h), ``weight`` (vocab, h), ``labels`` (T,) with -100 for rows that do not count,
    ``bias`` (vocab,). Gradients are computed in forward, since a chunk's logits are not kept. torch
    2.13's ``F.linear_cross_entropy`` does the same without a form, in one operator, in which the
    bytes of a chunk cannot be seen.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, (tokens, form))


def starts_of_chunks(num_rows: int, tokens: int) -> Iterable[int]:
    """The first row of each chunk. A prediction replaces this function: it needs few chunks."""
    return range(0, num_rows, tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, options):
        tokens, form = options
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        exact = torch.promote_types(dtype, torch.float32)
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(dtype)
            gradients = []
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False):
                gradients.append(torch.zeros_like(tensor) if needed else None)
            total = hidden.new_zeros((), dtype=exact)
            count = (labels != IGNORED).sum()
            if exact == torch.float64:
                count = count.double()  # a quotient of whole numbers has float32
            for start in starts_of_chunks(len(hidden), tokens):
                rows, target = (
                    hidden[start : start + tokens].to(dtype),
                    labels[start : start + tokens],
                )
                counted = (target != IGNORED)[:, None]
                target = target.clamp(min=0)[:, None]
                logits = rows @ matrix.T
                if bias is not None:
                    logits += bias.to(dtype)
                logits, tanh = form.of(logits)
                logits = logits.to(exact)
                log_p = logits.log_softmax(1)
                del logits
                total -= (log_p.gather(1, target) * counted).sum()
                if not any(ctx.needs_input_grad):
                    continue
                d_logits = log_p.exp_()
                d_logits.scatter_add_(1, target, -torch.ones_like(target, dtype=exact))
                d_logits = d_logits.mul_(counted / count).to(dtype)
                _add_gradients(gradients, start, form.gradient(d_logits, tanh), rows, matrix)
                del log_p, d_logits, tanh, rows
        ctx.save_for_backward(*gradients)
        return total / count

    @staticmethod
    def backward(ctx, d_loss):
        # In place, to save memory. Therefore a second backward through the same graph is an error,
        # not a wrong gradient.
        gradients = [d if d is None else d.mul_(d_loss.to(d.dtype)) for d in ctx.saved_tensors]
        return *gradients, None, None


def _add_gradients(
    gradients: list[Tensor | None], start: int, d_product: Tensor, rows: Tensor, matrix: Tensor
) -> None:
    """Add those of the rows from ``start`` on to the gradients of hidden states, weight and bias.

    ``d_product`` (tokens, vocab): the gradient of the head's output.
    """
    d_hidden, d_weight, d_bias = gradients
    if d_hidden is not None:
        d_hidden[start : start + len(rows)] = d_product @ matrix
    if d_weight is not None and d_weight.dtype == rows.dtype:
        # += would need a second gradient of the same size
        d_weight.addmm_(d_product.T, rows)
    elif d_weight is not None:
        d_weight += d_product.T @ rows
    if d_bias is not None:
        d_bias += d_product.sum(0)
