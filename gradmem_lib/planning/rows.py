"""What one row needs in a model whose rows are more than tokens: pictures, spectrograms, or a batch
that is given.

The number of its tokens does not say how much such a row is: Whisper's encoder has 1,500 positions
in each row, whatever the number of labels, and a Swin's first stage has four times as many as the
next one. So the model computes two rows of fake tensors, which have shapes and no memory, and what
it does is counted.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .. import compat
from ..techniques.accumulation import count_rows
from ..techniques.layers import find_layers
from ..techniques.lora import linear_layers, linear_sizes
from ..training.recipe import Recipe
from ..training.step import check_loss, loss_of

COUNTED_ROWS = 2  # a batch norm in training needs more than one
WITH_WEIGHTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution)


@dataclass(frozen=True)
class Passed:
    """What a row passes in a forward; in a language model, what a token passes.

    ``products``: entries of weights that it is multiplied with, without the output layer's, which
    are ``head``. ``attended``: those of ``products`` that are in attention. ``attention``:
    operations between tokens. ``logits``: numbers that the output layer makes. ``vectors``: how
    many vectors pass a linear layer, in the mean; ``fewest_vectors``: at least. ``layers``: for
    each layer that can run again, its shares of ``products``, and of the inputs and outputs of
    linear layers; empty: all layers are alike, and there is nothing else.
    """

    products: float
    attended: float
    attention: float
    head: float
    logits: float
    vectors: float = 1.0
    fewest_vectors: float = 1.0
    layers: tuple[tuple[float, float], ...] = ()


def rows_like(batch: Any, rows: int, dtype: torch.dtype | None = None) -> Any:
    """``rows`` rows like those of ``batch``.

    Floating-point tensors have no memory, and ``dtype`` if it is given. Whole numbers are repeated
    with their values, since a mask matters. A tensor that occurs twice does so in the result.
    Raises ``ValueError`` if tensors have unequal numbers of rows.
    """
    given = count_rows(batch)
    made: dict[int, Tensor] = {}

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if id(value) not in made:
            made[id(value)] = _repeated(value, given, rows, dtype)
        return made[id(value)]

    return compat.tree_map(like, batch)


def _repeated(value: Tensor, given: int, rows: int, dtype: torch.dtype | None) -> Tensor:
    if value.is_floating_point() or value.is_meta:
        floating = dtype if value.is_floating_point() else None
        shape = (rows, *value.shape[1:])
        return torch.empty(shape, dtype=floating or value.dtype, device="meta")
    return value[torch.arange(rows, device=value.device) % given]


class _WithLoss(nn.Module):
    """A model and its loss as one module."""

    def __init__(self, model: nn.Module, loss: Callable | None):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> None:
        if self.loss is None:
            found = loss_of(self.model, batch, Recipe())
        else:
            found = self.loss(self.model, batch)
        check_loss(found, self.model)


def count_row(
    model: nn.Module, batch: Any, loss: Callable | None = None, attention: tuple[str, ...] = ()
) -> Passed:
    """What a row of ``batch`` passes in ``model``, which does not change.

    ``attention``: with what the names of its layers in attention begin. Raises ``ValueError`` if
    the forward fails.
    """
    together = _WithLoss(model, loss)
    held = dict(together.named_parameters()) | dict(together.named_buffers())
    linear = linear_layers(model)
    head = output_layer(model)
    seen: Counter[nn.Module] = Counter()  # by linear layer, the vectors that passed it
    with ExitStack() as stack:
        for layer in (*linear.values(), *([] if head is None else [head])):
            hook = layer.register_forward_hook(
                lambda layer, args, output: seen.update({layer: output.shape[:-1].numel()})
            )
            stack.callback(hook.remove)
        stack.enter_context(compat.without_modes())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.no_grad())
        # The counter does not know the CPU's fused attention.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(compat.FakeTensorMode(allow_non_fake_inputs=True))
        fakes = {name: torch.empty_like(tensor, device="cpu") for name, tensor in held.items()}
        rows = compat.tree_map(_fake, rows_like(batch, COUNTED_ROWS))
        counter = stack.enter_context(FlopCounterMode(display=False))
        try:
            torch.func.functional_call(together, fakes, (rows,))
        except Exception as error:  # the model's own code may raise anything
            message = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"plan counts what {type(model).__name__} computes for two rows of tensors without "
                f"values, and that fails ({type(error).__name__}: {message}): give a batch that "
                "the model takes, or predict one recipe after the other with predict(model, "
                "batch=..., recipe=Recipe(...))"
            ) from error
    return _passed(model, linear, head, seen, counter.get_flop_counts(), attention)


def _fake(value: Any) -> Any:
    return torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else value


def output_layer(model: nn.Module) -> nn.Linear | None:
    """The layer that makes the logits of words; ``None`` if there is none."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if isinstance(head, nn.Linear) else None


def _passed(
    model: nn.Module,
    linear: dict[str, nn.Module],
    head: nn.Linear | None,
    seen: Counter[nn.Module],
    flops: dict[str, dict],
    attention: tuple[str, ...],
) -> Passed:
    vectors = {name: seen[layer] / COUNTED_ROWS for name, layer in linear.items()}
    sizes = {name: linear_sizes(layer) or (0, 0) for name, layer in linear.items()}
    widths = {name: sum(sizes[name]) for name in linear}
    all_widths = sum(widths.values())
    passed_widths = sum(widths[name] * vectors[name] for name in linear)
    attended = 0.0
    for name, (inputs, outputs) in sizes.items():
        if name.startswith(attention):
            attended += inputs * outputs * vectors[name]
    of_all, between_tokens = _operations(flops, "Global")
    of_head, logits = 0.0, 0.0
    if head is not None:
        of_head = head.weight.numel() * seen[head] / COUNTED_ROWS
        logits = head.out_features * seen[head] / COUNTED_ROWS
    products = of_all / 2 - of_head
    layers = []
    for name in _layer_names(model):
        own, _ = _operations(flops, f"{_WithLoss.__name__}.model.{name}")
        inside = [one for one in linear if one.startswith(f"{name}.")]
        own_widths = sum(widths[one] * vectors[one] for one in inside)
        layers.append((own / 2 / max(products, 1), own_widths / max(passed_widths, 1)))
    return Passed(
        products=products,
        attended=attended,
        attention=between_tokens,
        head=of_head,
        logits=logits,
        vectors=passed_widths / max(all_widths, 1),
        fewest_vectors=min(vectors.values(), default=0.0),
        layers=tuple(layers),
    )


def _operations(flops: dict[str, dict], part: str) -> tuple[float, float]:
    """The operations of a row in a part of the model: with weights, and between tokens."""
    with_weights, between_tokens = 0.0, 0.0
    for operator, count in flops.get(part, {}).items():
        if operator in WITH_WEIGHTS:
            with_weights += count / COUNTED_ROWS
        else:
            between_tokens += count / COUNTED_ROWS
    return with_weights, between_tokens


def _layer_names(model: nn.Module) -> list[str]:
    """The names of the layers that can run again one by one."""
    names = {module: name for name, module in model.named_modules()}
    try:
        lists = find_layers(model)
    except ValueError:
        return []
    return [names[layer] for layers, _ in lists.values() for layer in layers]
