"""What one row needs in a model whose rows are more than tokens: pictures, spectrograms, or a batch
that is given.

The number of its tokens does not say how much such a row is: Whisper's encoder has 1,500 positions
in each row, whatever the number of labels, and a Swin's first stage has four times as many as the
next one. So the model computes two rows of fake tensors, which have shapes and no memory, and what
it does is counted.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..compat.dispatch_modes import without_modes
from ..compat.fake_tensors import FakeTensorMode
from ..compat.trees import tree_map
from ..model.description import Description
from ..model.layers import Named, layers_of
from ..model.linear import linear_layers
from ..prediction.surroundings import left_alone
from ..techniques.module_state import left_as_it_was
from ..techniques.splitting import count_rows
from ..training.recipe import Recipe
from ..training.step import check_loss, loss_of

COUNTED_ROWS = 2  # a batch norm in training needs more than one
HEAD = ""  # in place of the name of the layer that makes the logits
MULTIPLY_ADD = 2  # operations for each entry of a weight and each vector
# Operators that multiply with weights. What else is counted are products of tokens with tokens.
WITH_WEIGHTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution)


class LayerShare(NamedTuple):
    """The parts of a whole row that one layer has, from 0 to 1.

    ``products``: of ``Passed.products``. ``linear_widths``: of the numbers that go into linear
    layers and come out of them.
    """

    products: float
    linear_widths: float


@dataclass(frozen=True)
class Passed:
    """What one row meets in a forward; in a language model, what one token meets.

    ``products``: the entries of the weights that it is multiplied with, each as often as it is
    used. The output layer's entries are not among them: these are ``head``. ``attended``: those of
    ``products`` that are in attention. ``attention``: operations between tokens. ``logits``:
    numbers that the output layer makes.

    ``vectors``: how many vectors of a row go through a linear layer, in the mean over the layers,
    where wide layers weigh more. ``fewest_vectors``: the same of the layer with the fewest.
    ``layers``: the share of each layer that can run again. For a token there are no shares, since
    all layers are alike there; for a row, none means that no layer can run again.
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
    """Make ``rows`` rows like those of ``batch``.

    Floating-point tensors become meta tensors, in ``dtype`` if it is given. Whole numbers are
    repeated with their values, since a mask decides what is computed. A tensor that is in the
    batch twice is in the result twice, too. Raises ``ValueError`` if tensors have unequal numbers
    of rows.
    """
    given = count_rows(batch)
    made: dict[int, Tensor] = {}

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if id(value) not in made:
            made[id(value)] = _repeated(value, given, rows, dtype)
        return made[id(value)]

    return tree_map(like, batch)


def _repeated(value: Tensor, given: int, rows: int, dtype: torch.dtype | None) -> Tensor:
    """``value`` with ``rows`` rows in place of the ``given`` ones."""
    if value.is_floating_point() or value.is_meta:
        new_dtype = value.dtype
        if dtype is not None and value.is_floating_point():
            new_dtype = dtype
        return torch.empty((rows, *value.shape[1:]), dtype=new_dtype, device="meta")
    return value[torch.arange(rows, device=value.device) % given]


class WithLoss(nn.Module):
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
    sized: Description, batch: Any, loss: Callable | None = None, layers: Named = ()
) -> Passed:
    """Count what a row of ``batch`` passes in the model ``sized``, which does not change.

    ``layers``: the names of its lists of layers, as for ``find_layers``. Raises ``ValueError`` if
    the forward fails.
    """
    watched = linear_layers(sized.skeleton)
    if sized.head is not None:
        watched[HEAD] = sized.head
    seen: Counter[nn.Module] = Counter()  # by layer, the vectors that passed it

    def count_vectors(layer: nn.Module, args: tuple, output: Tensor) -> None:
        seen[layer] += output.shape[:-1].numel()

    with ExitStack() as stack:
        for layer in watched.values():
            stack.callback(layer.register_forward_hook(count_vectors).remove)
        # The counter does not know the CPU's fused attention.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        counter = FlopCounterMode(display=False)
        with torch.no_grad():
            run_on_fakes(WithLoss(sized.skeleton, loss), batch, counter)
    vectors = {name: seen[layer] / COUNTED_ROWS for name, layer in watched.items()}
    return _passed(sized, vectors, counter.get_flop_counts(), layers)


def run_on_fakes(together: WithLoss, batch: Any, watch: AbstractContextManager) -> None:
    """Run the forward, and the loss, for ``COUNTED_ROWS`` rows of tensors that have no values.

    ``watch`` is active meanwhile. Raises ``ValueError`` if the forward fails.
    """
    with ExitStack() as stack:
        # A forward may keep a mask or a bias for the next one. Made from fake tensors, it would
        # break the next real step.
        stack.enter_context(left_as_it_was(together))
        stack.enter_context(left_alone(together))
        stack.enter_context(without_modes())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fakes = {}
        for name, tensor in (*together.named_parameters(), *together.named_buffers()):
            fakes[name] = torch.empty_like(tensor, device="cpu", requires_grad=tensor.requires_grad)
        rows = tree_map(_fake, rows_like(batch, COUNTED_ROWS))
        stack.enter_context(watch)
        try:
            torch.func.functional_call(together, fakes, (rows,))
        except Exception as error:  # the model's own code may raise anything
            message = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"plan counts what {type(together.model).__name__} computes for {COUNTED_ROWS} "
                "rows of tensors that have shapes and no values, and this forward fails with "
                f"{type(error).__name__}: {message}. Give a batch that the model takes, and loss= "
                "if the model's forward does not take the whole batch; or predict one recipe after "
                "the other with predict(model, batch=..., recipe=Recipe(...))"
            ) from error


def _fake(value: Any) -> Any:
    return torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else value


def _passed(
    sized: Description, vectors: dict[str, float], flops: dict[str, dict], named: Named
) -> Passed:
    """What the counted forward says of one row.

    ``vectors``: how many of a row pass each linear layer. ``flops`` are those of all rows.
    """
    of_head = sized.head_entries * vectors.get(HEAD, 0.0)
    attended = 0.0
    passed_widths: dict[str, float] = {}  # inputs and outputs for all vectors of a row
    for name, (inputs, outputs) in sized.linear.items():
        passed_widths[name] = (inputs + outputs) * vectors[name]
        if name.startswith(sized.attention):
            attended += inputs * outputs * vectors[name]
    all_widths = sum(map(sum, sized.linear.values()))
    all_passed_widths = sum(passed_widths.values())
    with_weights, between_tokens = _operations(flops, "Global")  # the counter's word for all
    products = with_weights / MULTIPLY_ADD - of_head

    layers = []
    for name in _layer_names(sized.skeleton, named):
        of_layer, _ = _operations(flops, f"{WithLoss.__name__}.model.{name}")
        own_widths = 0.0
        for inner, width in passed_widths.items():
            if inner.startswith(f"{name}."):
                own_widths += width
        share_of_products = of_layer / MULTIPLY_ADD / max(products, 1)
        layers.append(LayerShare(share_of_products, own_widths / max(all_passed_widths, 1)))
    return Passed(
        products=products,
        attended=attended,
        attention=between_tokens,
        head=of_head,
        logits=sized.vocabulary * vectors.get(HEAD, 0.0),
        vectors=all_passed_widths / max(all_widths, 1),
        fewest_vectors=min((vectors[name] for name in sized.linear), default=0.0),
        layers=tuple(layers),
    )


def _operations(flops: dict[str, dict], part: str) -> tuple[float, float]:
    """The operations of one row in a part of the model: those with weights, and those between
    tokens.
    """
    with_weights, between_tokens = 0.0, 0.0
    for operator, count in flops.get(part, {}).items():
        if operator in WITH_WEIGHTS:
            with_weights += count / COUNTED_ROWS
        else:
            between_tokens += count / COUNTED_ROWS
    return with_weights, between_tokens


def _layer_names(model: nn.Module, named: Named) -> list[str]:
    """The names of the layers that can run again one by one."""
    names = {module: name for name, module in model.named_modules()}
    return [names[layer] for layer in layers_of(model, named)]
