"""What a step of a model computes and holds, for each token or row."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..compat.dispatch_modes import without_modes
from ..model.inputs import example_batch, takes_tokens_alone, unknown_inputs
from ..model.layers import Named, layers_of
from ..prediction.predict import source_of
from ..prediction.question import Source
from ..techniques.call_overrides import refuse_checkpointed
from ..techniques.splitting import count_rows
from ..training.adapters import has_adapters
from ..training.items import find_rule
from ..training.losses import check_chunked_loss, check_pieces, usual_rule
from ..training.prepare import refuse_frozen
from ..training.recipe import Recipe
from ..training.tiny import tiny_model
from ..units import check_positive_int
from .own_layers import find_own_layers
from .rows import Passed, count_row, rows_like

LORA_RANK = 16  # of the adapters that a plan adds


@dataclass(frozen=True, eq=False)
class Work:
    """What a step of a model computes and holds, in numbers.

    ``sized``: the model whose sizes are counted, as its config has it, or an own module as it is.
    ``adapted``: the given model, if it has adapters already.

    ``row``: what a row passes, if rows are more than tokens. Costs are then counted for a row, and
    otherwise for a token. ``example``: one row or more of the inputs. ``batch`` and ``loss`` are as
    they were given. ``uncut``: why the batch must go through in one piece, or an empty string.

    ``named``: the names of the lists of layers in a module of the user's own, as ``Recipe.layers``.
    ``problems``: a sentence about each list whose layers cannot run again.
    """

    sized: Source
    adapted: Source | None = None
    row: Passed | None = None
    example: Any = None
    batch: Any = None
    loss: Callable | None = None
    uncut: str = ""
    named: Named = ()
    problems: tuple[str, ...] = ()

    @property
    def has_adapters(self) -> bool:
        return self.adapted is not None

    @property
    def source(self) -> Source:
        """What is predicted."""
        return self.adapted or self.sized

    @property
    def unit(self) -> str:
        """What costs are counted for: a token, or a row."""
        return "token" if self.row is None else "row"

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The layers of all lists: first-k counts over several lists."""
        return layers_of(self.sized.skeleton, self.named)

    @cached_property
    def layers(self) -> int:
        named_by_config = 0
        if not self.sized.is_user_module:
            text = self.sized.config.get_text_config()
            named_by_config = getattr(text, "num_hidden_layers", 0)
        return len(self.blocks) or named_by_config

    @property
    def has_layers(self) -> bool:
        """Whether there are layers that may run again. A model that takes tokens alone has them."""
        return self.row is None or bool(self.row.layers)

    @cached_property
    def root(self) -> int:
        """How many parameters are outside of all layers."""
        inside = sum(p.numel() for block in self.blocks for p in block.parameters())
        return self.sized.parameters - inside

    @cached_property
    def linear(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the linear layers that have adapters, or may get them."""
        linear = self.source.linear
        if self.has_adapters:
            adapted = (".base_layer", ".base")
            linear = {name: sizes for name, sizes in linear.items() if name.endswith(adapted)}
        return linear

    @property
    def linear_widths(self) -> int:
        """Their inputs and outputs together."""
        return sum(map(sum, self.linear.values()))

    @property
    def parameters(self) -> int:
        """How many numbers the model has, without its adapters."""
        return self.source.frozen if self.has_adapters else self.sized.parameters

    @cached_property
    def chunked(self) -> bool:
        """Whether the step may take its loss in chunks: a second, for a config that is new."""
        if self.row is not None or self.sized.head is None:
            return False
        try:
            check_chunked_loss(self.source.skeleton)
        except ValueError:
            return False
        return True

    @cached_property
    def bytes_per_number(self) -> tuple[float, float]:
        """The mean bytes of a frozen number, and of a trained one. Without adapters, LoRA would
        freeze and train numbers of the same width.
        """
        numbers, nbytes = Counter[bool](), Counter[bool]()
        for parameter in self.source.skeleton.parameters():
            numbers[parameter.requires_grad] += parameter.numel()
            nbytes[parameter.requires_grad] += parameter.nbytes
        if not self.has_adapters:
            width = nbytes.total() / max(numbers.total(), 1)
            return width, width
        frozen, trained = (nbytes[one] / max(numbers[one], 1) for one in (False, True))
        return frozen, trained

    def units_of_row(self, seq_len: int | None) -> int:
        """The number of a row's units: its tokens, or 1."""
        if self.row is not None or seq_len is None:
            return 1
        return seq_len

    def passed(self, seq_len: int) -> Passed:
        """What a token passes, or a row. Only ``attention`` depends on ``seq_len``."""
        if self.row is not None:
            return self.row
        sized = self.sized
        # Scores and their weighted sums: two products, of 2 operations for each pair of tokens.
        attention = 4 * seq_len * sized.scores
        if sized.causal:  # half of the pairs, in the mean
            attention /= 2
        return Passed(
            products=sized.matrices + sized.experts,
            attended=sized.attended,
            attention=attention,
            head=sized.head_entries,
            logits=sized.vocabulary,
        )

    def inputs(self, rows: int, seq_len: int | None, recipe: Recipe) -> dict[str, Any]:
        """The arguments of ``predict`` for ``rows`` rows. Inputs have the dtype of the weights."""
        if self.batch is None:
            return {"batch_size": rows, "seq_len": seq_len}
        return {"batch": rows_like(self.batch, rows, recipe.weight_dtype), "loss": self.loss}

    def adapts(self, recipe: Recipe) -> bool:
        return self.has_adapters or recipe.lora_rank is not None

    def trained(self, recipe: Recipe) -> int:
        """The number of trained numbers."""
        if recipe.lora_rank:
            return self.linear_widths * recipe.lora_rank
        return self.source.parameters - self.source.frozen

    def bytes_each(self, recipe: Recipe) -> tuple[float, float]:
        """The bytes of a weight that LoRA freezes, and of a trained one."""
        if recipe.weight_dtype is None:
            return self.bytes_per_number
        return recipe.weight_dtype.itemsize, recipe.weight_dtype.itemsize


def _check_cut(model: nn.Module, config, example: dict | None = None) -> None:
    """Raise ``ValueError`` if micro-batches would train something else, since the loss of a tiny
    copy of ``model`` is no mean over labels or rows.

    Where the tiny copy does not run, ``make_trainer`` asks the whole model before its first window.
    """
    flags = {}  # CLIP's return_loss=True, say
    for name, value in (example or {}).items():
        if isinstance(value, bool):
            flags[name] = value
    check_pieces(model, flags, "accumulation")
    # The caller's modes, autocast and random numbers have no part in this.
    autocast = torch.autocast("cpu", enabled=False)
    with without_modes(), autocast, torch.random.fork_rng([]):
        torch.manual_seed(0)
        try:
            tiny = tiny_model(type(model), config)
            batch = example_batch(tiny, 4, 16)
            tiny.eval()(**batch)
        except Exception:
            return

        def loss_of(asked: nn.Module, part: dict) -> torch.Tensor:
            return asked(**part).loss

        how = "accumulation, which a plan may choose,"
        find_rule(tiny, [batch], loss_of, usual_rule(tiny), how=how)


def count(
    config: Any,
    seq_len: int | None = None,
    batch: Any = None,
    loss: Callable | None = None,
    module: nn.Module | None = None,
) -> Work:
    """The work of a model without memory that is built from ``config``, or of a ``module`` that
    transformers cannot build.

    For a model that takes more than tokens with labels, and for a ``batch`` that is given, what a
    row passes is counted as well. Only this needs ``seq_len``. Raises ``ValueError`` if the config
    does not tell the inputs, and if the loss of a language model must not be cut.
    """
    source = source_of(config if module is None else module)  # refuses a compiled one
    work = Work(source)
    if module is not None:
        count_rows(batch)  # raises ValueError for tensors that cannot be cut
        named, problems = _layers_of_module(module, batch, loss)
        work = replace(work, named=named, problems=tuple(problems))
    if batch is None and takes_tokens_alone(source.skeleton):
        _check_cut(source.skeleton, config)
        return work
    return _with_rows(work, config, seq_len, batch, loss)


def _layers_of_module(
    module: nn.Module, batch: Any, loss: Callable | None
) -> tuple[Named, list[str]]:
    """The names of the lists of layers, and why other lists are left alone.

    There are no names for an ``nn.Sequential``, and for a module with transformers' layers.
    """
    if layers_of(module):
        return (), []
    return find_own_layers(module, batch, loss)


def _with_rows(
    work: Work,
    config: Any,
    seq_len: int | None,
    batch: Any,
    loss: Callable | None,
) -> Work:
    """``work`` with what a row passes, counted in a forward."""
    model = work.sized.skeleton
    example = batch
    uncut = ""
    if batch is None:
        if model.main_input_name != "pixel_values":
            check_positive_int("seq_len", seq_len, 448, "tokens in a row of labels")
        example = example_batch(model, 1, seq_len)
    count_rows(example)  # raises ValueError for tensors that cannot be cut
    try:
        if batch is None:
            _check_cut(model, config, example)
        else:  # the step itself asks the model, before it takes a batch in pieces
            check_pieces(model, batch, "accumulation")
    except ValueError as error:
        uncut = str(error)
    try:
        row = count_row(work.sized, example, loss, work.named)
    except ValueError as error:
        if batch is not None:
            raise
        raise ValueError(unknown_inputs(model)) from error
    return replace(work, row=row, example=example, batch=batch, loss=loss, uncut=uncut)


def with_adapters(work: Work, given, method: str | None = None) -> Work:
    """``work`` for training the LoRA that ``given`` has already; unchanged if it has none. Raises
    ``ValueError`` for what plan cannot train: PEFT's other adapters, a base in 4 bits, another
    ``method``, and weights that are frozen or not the config's.
    """
    if not isinstance(given, nn.Module):
        return work
    refuse_checkpointed([given])
    if has_adapters(given):
        _check_adapters(given, method)
        refuse_frozen(given)
        row = work.row
        if row is not None:  # which layers have adapters is not looked up
            row = replace(row, vectors=row.fewest_vectors)
        adapted = replace(source_of(given), is_user_module=work.sized.is_user_module)
        return replace(work, adapted=adapted, row=row)
    _check_weights(work, given, freezes=method in ("lora", "qlora"))
    return work


def _check_weights(work: Work, given: nn.Module, freezes: bool) -> None:
    """Raise ``ValueError`` unless ``given`` has the weights of its config. ``freezes``: the method
    freezes all of them, so that it does not matter which ones are trained.
    """

    def weights(model: nn.Module) -> set[tuple]:
        return {(n, p.shape, freezes or p.requires_grad) for n, p in model.named_parameters()}

    if weights(given) != weights(work.sized.skeleton):
        raise ValueError(
            f"plan trains all weights of the config, and in this {type(given).__name__} some "
            "are frozen or different: predict each recipe with predict(model, "
            "recipe=Recipe(...), batch_size=..., seq_len=...)"
        )


def _check_adapters(given: nn.Module, method: str | None) -> None:
    """Raise ``ValueError`` unless the adapters are LoRA on weights in floating point, and
    ``method`` is none that a plan would add.
    """
    kinds = {config.peft_type.value for config in getattr(given, "peft_config", {}).values()}
    refusals = sorted(kinds - {"LORA"})
    if method in ("full", "qlora"):
        refusals.append(f"method={method!r}")
    if not all(p.is_floating_point() for p in given.parameters()):
        refusals.append("a base in 4 bits")
    if refusals:
        raise ValueError(
            "for a model with adapters, plan has only method='lora': training LoRA on weights in "
            f"floating point. This one has {' and '.join(refusals)}: measure one step of it with "
            "MemoryTracker, or plan for the model without adapters"
        )
