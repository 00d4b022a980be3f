"""The sizes of a model, counted on a skeleton without memory, and what a token or a row passes."""

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..compat.dispatch_modes import without_modes
from ..compat.transformers_models import takes_fused_attention
from ..hf_names import PARTS
from ..prediction.configs import example_batch, labels_of, skeleton, title_of, unknown_inputs
from ..prediction.predict import source_of
from ..prediction.question import Source
from ..techniques.call_overrides import refuse_checkpointed
from ..techniques.layers import Named, find_layers
from ..techniques.lora import linear_layers, linear_sizes
from ..techniques.splitting import count_rows
from ..training.adapters import has_adapters
from ..training.items import find_rule
from ..training.losses import (
    check_chunked_loss,
    check_pieces,
    chunked_loss_refusal,
    predicts_next_token,
    usual_rule,
)
from ..training.prepare import refuse_frozen
from ..training.recipe import Recipe
from ..training.tiny import tiny_model
from ..units import check_positive_int
from .own_layers import check_own_layers, find_own_layers
from .rows import Passed, count_row, output_layer, rows_like

LORA_RANK = 16  # of the adapters that a plan adds


@dataclass(frozen=True, eq=False)
class Work:
    """A model's sizes, counted on its skeleton.

    ``matrices``: entries of the linear layers without the ``head``. ``linear_widths``: sum of
    inputs and outputs of the linear layers that have adapters, or may get them. ``experts``:
    entries of the experts that a token passes. ``scores``: heads x head size, summed over
    attentions. ``attended``: entries of ``matrices`` in attention. ``root``: parameters outside the
    layers. If the model has adapters already, ``adapter_parameters`` numbers are trained,
    ``parameters`` counts the others, and ``bytes_per_number`` are the mean bytes of a frozen number
    and of a trained one. ``frozen``: parameters that the model's own code does not train.

    ``row``: what a row passes, if rows are more than tokens. Costs are then counted for a row, and
    otherwise for a token. ``example``: one row or more of the inputs. ``batch`` and ``loss`` are as
    they were given. ``uncut``: why the batch must go through in one piece, or an empty string.

    ``named``: the names of the lists of layers in a module of the user's own, as ``Recipe.layers``.
    ``problems``: a sentence about each list whose layers cannot run again.
    """

    source: Source
    parameters: int
    sizes: tuple[tuple[int, ...], ...]
    matrices: int
    head: int
    linear_widths: int
    layers: int
    scores: int
    causal: bool
    chunked: bool
    vocabulary: int
    fused: bool
    experts: float
    attended: int
    root: int
    adapter_parameters: int | None = None
    bytes_per_number: tuple[float, float] = (0, 0)
    frozen: int = 0
    row: Passed | None = None
    example: Any = None
    batch: Any = None
    loss: Callable | None = None
    uncut: str = ""
    named: Named = ()
    problems: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What costs are counted for: a token, or a row."""
        return "token" if self.row is None else "row"

    @property
    def has_layers(self) -> bool:
        """Whether there are layers that may run again. A model that takes tokens alone has them."""
        return self.row is None or bool(self.row.layers)

    @cached_property
    def trained_matrices(self) -> int:
        """The entries of the linear layers' weights that are trained, without the head. A weight of
        two layers counts once.
        """
        found = {}
        for layer in linear_layers(self.source.skeleton).values():
            if layer.weight.requires_grad:
                found[id(layer.weight)] = layer.weight.numel()
        return sum(found.values())

    def units_of_row(self, seq_len: int | None) -> int:
        """How many of what costs are counted for a row has: its tokens, or 1."""
        if self.row is not None or seq_len is None:
            return 1
        return seq_len

    def passed(self, seq_len: int) -> Passed:
        """What a token passes, or a row. Only ``attention`` depends on ``seq_len``."""
        if self.row is not None:
            return self.row
        # Scores and their weighted sums: two products, of 2 operations for each pair of tokens.
        attention = 4 * seq_len * self.scores
        if self.causal:  # half of the pairs, in the mean
            attention /= 2
        return Passed(
            products=self.matrices + self.experts,
            attended=self.attended,
            attention=attention,
            head=self.head,
            logits=self.vocabulary,
        )

    def inputs(self, rows: int, seq_len: int | None, recipe: Recipe) -> dict[str, Any]:
        """The arguments of ``predict`` for ``rows`` rows. Inputs have the dtype of the weights."""
        if self.batch is None:
            return {"batch_size": rows, "seq_len": seq_len}
        return {"batch": rows_like(self.batch, rows, recipe.weight_dtype), "loss": self.loss}

    def adapts(self, recipe: Recipe) -> bool:
        return self.adapter_parameters is not None or recipe.lora_rank is not None

    def trained(self, recipe: Recipe) -> int:
        """The number of trained numbers."""
        trained = self.parameters - self.frozen
        if self.adapter_parameters is not None:
            trained = self.adapter_parameters
        return self.linear_widths * recipe.lora_rank if recipe.lora_rank else trained

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
    check_pieces(model, flags, "micro-batches")
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
    layers: Any = None,
) -> Work:
    """Count parameters and matrices, on a model without memory that is built from ``config``, or on
    a ``module`` that transformers cannot build. ``layers``: the lists of its layers, if they are
    given; else they are looked for.

    For a model that takes more than tokens with labels, and for a ``batch`` that is given, what a
    row passes is counted as well. Only this needs ``seq_len``. Raises ``ValueError`` if the config
    does not tell the inputs, and if the loss of a language model must not be cut.
    """
    model = skeleton(config) if module is None else module
    named: Named = ()
    problems: list[str] = []
    if module is not None:
        count_rows(batch)  # raises ValueError for tensors that cannot be cut
        named, problems = _layers_of_module(module, batch, loss, layers)
    head = output_layer(model)
    sizes = {name: linear_sizes(layer) for name, layer in linear_layers(model).items()}
    linear = list(filter(None, sizes.values()))
    ends = PARTS["attention"]
    attention = tuple(f"{n}." for n, m in model.named_modules() if type(m).__name__.endswith(ends))
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters = sum(p.numel() for p in model.parameters())
    root = parameters  # those outside of all layers: the layers' are taken off below
    num_layers = 0
    if module is None:
        num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    with suppress(ValueError):  # layers of all lists, since first-k counts over several lists
        lists = find_layers(model, named).values()
        blocks = [block for several, _ in lists for block in several]
        num_layers = len(blocks)
        root -= sum(p.numel() for block in blocks for p in block.parameters())
    if module is None:
        source = Source(model, title_of(config, config), is_user_module=False)
    else:
        source = source_of(module)  # refuses a compiled one
    work = Work(
        source=source,
        parameters=parameters,
        sizes=tuple(tuple(p.shape) for p in trained),
        matrices=sum(i * o for i, o in linear),
        head=0 if head is None else math.prod(head.weight.shape),
        linear_widths=sum(map(sum, linear)),
        layers=num_layers,
        scores=0,
        causal=False,
        chunked=False,
        vocabulary=0 if head is None else head.weight.shape[0],
        fused=takes_fused_attention(model),
        experts=0.0,
        attended=sum(i * o for name, (i, o) in sizes.items() if name.startswith(attention)),
        root=root,
        frozen=parameters - sum(p.numel() for p in trained),
        named=named,
        problems=tuple(problems),
    )
    if batch is None and _takes_tokens_alone(model):
        return _with_tokens(work, config)
    return _with_rows(work, config, seq_len, batch, loss, attention)


def _layers_of_module(
    module: nn.Module, batch: Any, loss: Callable | None, layers: Any
) -> tuple[Named, list[str]]:
    """The names of the lists of layers, and why other lists are left alone.

    There are no names for an ``nn.Sequential``, and for a module with transformers' layers.
    """
    if layers is not None:
        return check_own_layers(module, batch, loss, layers), []
    with suppress(ValueError):
        find_layers(module)
        return (), []
    return find_own_layers(module, batch, loss)


def _takes_tokens_alone(model: nn.Module) -> bool:
    """Whether a row is token ids with labels."""
    labels = {"ends": "start_positions", None: None}.get(labels_of(model), "labels")
    named = labels in inspect.signature(model.forward).parameters
    return named and getattr(model, "main_input_name", "input_ids") == "input_ids"


def _with_tokens(work: Work, config: Any) -> Work:
    """``work`` with what a token passes, by the config's sizes."""
    model = work.source.skeleton
    _check_cut(model, config)
    text = config.get_text_config()
    hidden, layers = getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0)
    heads = getattr(text, "num_attention_heads", 1)
    # Encoder and decoder have equally many layers, and each layer of the decoder attends twice.
    attentions = 3 * layers if config.is_encoder_decoder else layers
    has_head = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None
    return replace(
        work,
        scores=attentions * heads * (getattr(text, "head_dim", None) or hidden // heads),
        causal=predicts_next_token(model),
        chunked=has_head and chunked_loss_refusal(type(model), config) is None,
        experts=_experts(model),
    )


def _with_rows(
    work: Work,
    config: Any,
    seq_len: int | None,
    batch: Any,
    loss: Callable | None,
    attention: tuple[str, ...],
) -> Work:
    """``work`` with what a row passes, counted in a forward."""
    model = work.source.skeleton
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
            check_pieces(model, batch, "micro-batches")
    except ValueError as error:
        uncut = str(error)
    try:
        row = count_row(model, example, loss, attention, work.named)
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
        return _with_counted_adapters(work, given)
    _check_weights(work, given, freezes=method in ("lora", "qlora"))
    return work


def _check_weights(work: Work, given: nn.Module, freezes: bool) -> None:
    """Raise ``ValueError`` unless ``given`` has the weights of its config. ``freezes``: the method
    freezes all of them, so that it does not matter which ones are trained.
    """

    def weights(model: nn.Module) -> set[tuple]:
        return {(n, p.shape, freezes or p.requires_grad) for n, p in model.named_parameters()}

    if weights(given) != weights(work.source.skeleton):
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


def _with_counted_adapters(work: Work, given: nn.Module) -> Work:
    """``work`` with what is counted on the model that has the adapters."""
    numbers = {False: 0, True: 0}  # by whether they are trained
    nbytes = {False: 0, True: 0}
    for parameter in given.parameters():
        numbers[parameter.requires_grad] += parameter.numel()
        nbytes[parameter.requires_grad] += parameter.nbytes
    frozen_bytes, own_bytes = (nbytes[one] / max(numbers[one], 1) for one in (False, True))
    linear_widths = 0
    for name, layer in linear_layers(given).items():
        if name.endswith((".base_layer", ".base")):
            linear_widths += sum(linear_sizes(layer) or ())
    row = work.row
    if row is not None:  # which layers have adapters is not looked up
        row = replace(row, vectors=row.fewest_vectors)
    chunked = False
    with suppress(ValueError):  # raised for an adapter on the output layer
        check_chunked_loss(given)
        chunked = work.chunked
    return replace(
        work,
        source=replace(source_of(given), is_user_module=work.source.is_user_module),
        parameters=numbers[False],
        adapter_parameters=numbers[True],
        bytes_per_number=(frozen_bytes, own_bytes),
        linear_widths=linear_widths,
        row=row,
        chunked=chunked,
    )


def _experts(model: nn.Module) -> float:
    """The entries of the experts' matrices (experts, out, in) that one token passes."""
    text = model.config.get_text_config()
    num_experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    if not num_experts:
        return 0.0
    entries = sum(p.numel() for p in model.parameters() if p.dim() == 3 and len(p) == num_experts)
    return entries * (getattr(text, "num_experts_per_tok", None) or num_experts) / num_experts
