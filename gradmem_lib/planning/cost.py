"""The cost of a recipe on a card: resident bytes, estimated time, and overhead in bytes."""

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import compat
from ..hf_names import PARTS
from ..names import CHECKPOINTING, OFFLOAD, PRECISIONS, SELECTIVE, SHARDING, check_choice
from ..optimizers import OPTIMIZERS
from ..prediction import allocator
from ..prediction.configs import example_batch, labels_of, skeleton, title_of, unknown_inputs
from ..prediction.predict import Prediction, source_of
from ..prediction.question import Source
from ..techniques import quantized
from ..techniques.call_overrides import refuse_checkpointed
from ..techniques.layers import find_layers
from ..techniques.lora import linear_layers, linear_sizes
from ..techniques.schedules import first_layers
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
from ..units import MiB, check_positive_int
from .cards import Card, seconds_between, seconds_over_bus
from .rows import LayerShare, Passed, count_row, output_layer, rows_like

LORA_RANK = 16
FLOAT32 = 4  # bytes of a number
ROUGHLY = "allocator, about"
# the allocator's overhead as a share of the live bytes, until it is replayed
ALLOCATOR_ROUGHLY = 0.05
# the share of a data sheet's rate that training reaches on most cards, roughly
FLOPS_UTILIZATION = 0.5
# outside PyTorch's allocator, on each of two A100s (NVIDIA/nccl#964); less over PCIe
NCCL = 544 * MiB


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

    @property
    def unit(self) -> str:
        """What costs are counted for: a token, or a row."""
        return "token" if self.row is None else "row"

    @property
    def has_layers(self) -> bool:
        """Whether there are layers that may run again. A model that takes tokens alone has them."""
        return self.row is None or bool(self.row.layers)

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
    with compat.without_modes(), autocast, torch.random.fork_rng([]):
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
    """Count parameters and matrices, on a model without memory that is built from ``config``, or on
    a ``module`` that transformers cannot build.

    For a model that takes more than tokens with labels, and for a ``batch`` that is given, what a
    row passes is counted as well. Only this needs ``seq_len``. Raises ``ValueError`` if the config
    does not tell the inputs, and if the loss of a language model must not be cut.
    """
    model = skeleton(config) if module is None else module
    head = output_layer(model)
    sizes = {name: linear_sizes(layer) for name, layer in linear_layers(model).items()}
    linear = list(filter(None, sizes.values()))
    ends = PARTS["attention"]
    attention = tuple(f"{n}." for n, m in model.named_modules() if type(m).__name__.endswith(ends))
    trained = [p for p in model.parameters() if p.requires_grad]
    root = parameters = sum(p.numel() for p in model.parameters())
    layers = 0
    if module is None:
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    with suppress(ValueError):  # layers of all lists, since first-k counts over several lists
        blocks = [block for several, _ in find_layers(model).values() for block in several]
        layers = len(blocks)
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
        layers=layers,
        scores=0,
        causal=False,
        chunked=False,
        vocabulary=0 if head is None else head.weight.shape[0],
        fused=compat.takes_fused_attention(model),
        experts=0.0,
        attended=sum(i * o for name, (i, o) in sizes.items() if name.startswith(attention)),
        root=root,
        frozen=parameters - sum(p.numel() for p in trained),
    )
    if batch is None and _takes_tokens_alone(model):
        return _with_tokens(work, config)
    return _with_rows(work, config, seq_len, batch, loss, attention)


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
        row = count_row(model, example, loss, attention)
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
    if not has_adapters(given):
        # which freezes all weights
        models, lora = (given, work.source.skeleton), method in ("lora", "qlora")
        both = [
            {(n, p.shape, lora or p.requires_grad) for n, p in m.named_parameters()} for m in models
        ]
        if both[0] != both[1]:
            raise ValueError(
                f"plan trains all weights of the config, and in this {type(given).__name__} some "
                "are frozen or different: predict each recipe with predict(model, "
                "recipe=Recipe(...), batch_size=..., seq_len=...)"
            )
        return work
    kinds = {config.peft_type.value for config in getattr(given, "peft_config", {}).values()} - {
        "LORA"
    }
    refusals = sorted(kinds) + [f"method={method!r}"] * (method in ("full", "qlora"))
    refusals += ["a base in 4 bits"] * any(not p.is_floating_point() for p in given.parameters())
    if refusals:
        raise ValueError(
            "for a model with adapters, plan has only method='lora': training LoRA on weights in "
            f"floating point. This one has {' and '.join(refusals)}: measure one step of it with "
            "MemoryTracker, or plan for the model without adapters"
        )
    refuse_frozen(given)
    parts = [[p for p in given.parameters() if p.requires_grad == own] for own in (False, True)]
    frozen, own = numbers = [sum(p.numel() for p in part) for part in parts]
    bytes_per_number = [
        sum(p.nbytes for p in part) / max(n, 1) for part, n in zip(parts, numbers, strict=True)
    ]
    layers = linear_layers(given).items()
    bases = [
        linear_sizes(layer) for name, layer in layers if name.endswith((".base_layer", ".base"))
    ]
    counted = {"parameters": frozen, "adapter_parameters": own, "chunked": False}
    counted["bytes_per_number"] = tuple(bytes_per_number)
    counted["linear_widths"] = sum(map(sum, bases))
    if work.row is not None:  # which layers have adapters is not looked up
        counted["row"] = replace(work.row, vectors=work.row.fewest_vectors)
    with suppress(ValueError):  # raised for an adapter on the output layer
        check_chunked_loss(given)
        counted["chunked"] = work.chunked
    source = replace(source_of(given), is_user_module=work.source.is_user_module)
    return replace(work, source=source, **counted)


def _experts(model: nn.Module) -> float:
    """The entries of the experts' matrices (experts, out, in) that one token passes."""
    text = model.config.get_text_config()
    num_experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    if not num_experts:
        return 0.0
    entries = sum(p.numel() for p in model.parameters() if p.dim() == 3 and len(p) == num_experts)
    return entries * (getattr(text, "num_experts_per_tok", None) or num_experts) / num_experts


def resident_bytes(work: Work, recipe: Recipe, cards: int = 1) -> dict[str, int]:
    """Bytes that do not depend on the micro-batch: weights, gradients (all alive at the end of
    backward, unless the optimizer steps in backward), and optimizer states. With several ``cards``,
    a lower bound for one of them under ``recipe.sharding``.
    """
    frozen_bytes, width = work.bytes_each(recipe)
    weights, trained, sizes = frozen_bytes * work.parameters, work.trained(recipe), work.sizes
    if work.adapts(recipe):
        weights, sizes = weights + width * trained, ()
    if recipe.quantized_base:
        weights += round((0.5 + 1 / quantized.BLOCK) * work.matrices) - width * work.matrices
    row = OPTIMIZERS[recipe.optimizer]
    with_states = trained
    if row.factored:  # additions of LoRA have few rows and columns, which are left out
        with_states = sum(row.numbers_with_states(shape) for shape in sizes)
    states = row.bytes_of_states(_state_width(recipe, width), recipe.momentum) * with_states
    if recipe.keeps_masters:
        states += FLOAT32 * trained
    cut = cards if recipe.fully_sharded else 1
    if recipe.fully_sharded and not SHARDING[recipe.sharding].frees_layers:
        # whole until backward, in the computing dtype
        weights = weights * _gathered(work, recipe) // frozen_bytes * cards
    gradient_width = FLOAT32 if recipe.float32_sums else width
    gradients = 0 if recipe.in_backward else round(gradient_width * trained) // cut
    states = round(states) // (cards if recipe.shards_states else 1)
    held = {"parameters": round(weights) // cut, "gradients": gradients, "optimizer": states}
    return dict.fromkeys(held, 0) if recipe.offloads_shards else held


def _state_width(recipe: Recipe, width: float) -> float:
    """Bytes of a number of the states that have the dtype of the weights."""
    return FLOAT32 if recipe.keeps_masters else width


def _gathered(work: Work, recipe: Recipe) -> float:
    """Bytes of a weight in the dtype that computes."""
    if recipe.gathered_dtype is not None:
        return recipe.gathered_dtype.itemsize
    return work.bytes_each(recipe)[0]


def sent_bytes(work: Work, recipe: Recipe, cards: int) -> float:
    """Bytes that each of ``cards`` cards in a ring sends to the next in a step (NVIDIA/nccl-tests,
    doc/PERFORMANCE.md).

    An all-gather, and a reduce-scatter, send all but the rank's own part once. DDP does both with
    the gradients, once at the end of the step. zero1 also gathers the trained weights.
    ``fully_shard`` reduces and scatters the gradients of every micro-batch. It gathers all weights
    before each forward, and (fsdp) the weights of each layer before its backward.
    """
    unsharded = replace(recipe, sharding=None, offload=None, in_backward=False)
    held, (width, trained_width) = resident_bytes(work, unsharded), work.bytes_each(unsharded)
    weights = held["parameters"]
    gradients = held["gradients"] / trained_width * work.bytes_each(recipe)[1]
    row = SHARDING[recipe.sharding]
    times = 1
    if row.weights:
        times = recipe.accumulation
        sent = weights + gradients
        if row.frees_layers:
            sent = 2 * weights - width * work.root + gradients
    else:
        sent = 3 * gradients if row.states else 2 * gradients
    return (1 - 1 / cards) * times * sent


@dataclass(frozen=True)
class Cost:
    """The estimated time of a training step, for each token: five terms, in seconds.

    ``products``: operations in matrix products at half the data sheet's rate. ``weights``: in each
    micro-batch, bytes of weights and gradients at its bandwidth. ``optimizer_step``: the same for
    weights, gradients and states. ``between_cards``: what the cards send each other. ``bus``: what
    is offloaded, in both directions together. Elementwise work, kernel launches and waiting are
    left out.
    """

    products: float
    weights: float
    optimizer_step: float
    between_cards: float
    bus: float

    @property
    def seconds(self) -> float:
        return self.products + self.weights + self.optimizer_step + self.between_cards + self.bus


def seconds_per_token(
    work: Work,
    recipe: Recipe,
    card: Card,
    micro_batch: int,
    seq_len: int,
    *,
    offload_bytes: float | None = None,
    cards: int = 1,
) -> float:
    """The sum of the terms of ``cost_per_token``."""
    cost = cost_per_token(
        work, recipe, card, micro_batch, seq_len, offload_bytes=offload_bytes, cards=cards
    )
    return cost.seconds


def cost_per_token(
    work: Work,
    recipe: Recipe,
    card: Card,
    micro_batch: int,
    seq_len: int,
    *,
    offload_bytes: float | None = None,
    cards: int = 1,
) -> Cost:
    """The estimated time of a training step, for each token.

    ``micro_batch`` is that of one card. ``offload_bytes``: bytes of the token that cross the bus;
    ``None``: their lower bound, from the sizes.

    Use it to compare recipes, not to schedule a run.
    """
    if offload_bytes is None:
        offload_bytes = _offload_bytes_per_token(work, recipe)
    tokens = micro_batch * seq_len
    tokens_of_step = tokens * recipe.accumulation
    # If the host steps, its memory is assumed to be as fast for each card as the bus.
    rate_of_step = card.bus if recipe.offloads_shards else card.bandwidth
    sent = sent_bytes(work, recipe, cards) if cards > 1 else 0.0
    of_one_card = {
        "products": _operations_per_token(work, recipe, seq_len) / _rate(recipe, card),
        "weights": _bytes_of_micro_batch(work, recipe) / card.bandwidth / tokens,
        "optimizer_step": _bytes_of_step(work, recipe, cards) / rate_of_step / tokens_of_step,
        "between_cards": seconds_between(sent, card) / tokens_of_step,
        "bus": seconds_over_bus(offload_bytes, card),
    }
    return Cost(**{term: seconds / cards for term, seconds in of_one_card.items()})


def _operations_per_token(work: Work, recipe: Recipe, seq_len: int) -> float:
    """Operations in matrix products: forward, backward, and what is recomputed."""
    passed = work.passed(seq_len)
    attention = passed.attention
    layers = 2 * passed.products + attention
    forward = layers + 2 * passed.head
    backward = 2 * forward
    if work.adapts(recipe):
        added = 2 * passed.vectors * work.trained(recipe)
        forward += added
        backward = forward + attention + added
    recomputed = recompute_fraction(work, recipe)
    scores = recomputed
    if recipe.checkpointing in SELECTIVE:
        scores = 1 if SELECTIVE[recipe.checkpointing].attention else 0
    return forward + backward + recomputed * (layers - attention) + scores * attention


def _rate(recipe: Recipe, card: Card) -> float:
    """Operations a second that training reaches on ``card``."""
    half = _width_of_activations(recipe) < FLOAT32
    if half and not card.bf16:
        half = recipe.autocast_dtype == torch.float16
    return FLOPS_UTILIZATION * (card.half if half else card.single)


def _bytes_of_micro_batch(work: Work, recipe: Recipe) -> float:
    """Bytes of weights and gradients that one micro-batch reads and writes."""
    bytes_read = _gathered(work, recipe) * work.parameters
    if recipe.autocast_dtype:
        bytes_read += (2 + 2) * (work.matrices + work.head)
    if recipe.quantized_base:
        bytes_read += (0.5 + 2) * work.matrices
    width = work.bytes_each(recipe)[1]
    return (2 + recompute_fraction(work, recipe)) * bytes_read + 3 * width * work.trained(recipe)


def _bytes_of_step(work: Work, recipe: Recipe, cards: int) -> float:
    """Bytes that the optimizer reads and writes on each card, once a step."""
    # Weights are read and written, gradients are read; then come the states.
    width = work.bytes_each(recipe)[1]
    row = OPTIMIZERS[recipe.optimizer]
    states = row.bytes_of_a_step(_state_width(recipe, width), recipe.momentum)
    if recipe.keeps_masters:
        states += 2 * FLOAT32
    trained = work.trained(recipe)
    if recipe.shards_states:
        trained /= cards
    return (3 * width + states) * trained


def _offload_bytes_per_token(work: Work, recipe: Recipe) -> float:
    """The least bytes that cross the bus for each token, there and back."""
    if recipe.offload is None or recipe.offloads_shards:
        return 0
    if OFFLOAD[recipe.offload].all_saved:
        return 2 * saved_bytes_per_token(work, replace(recipe, offload=None))
    return 2 * input_bytes_per_token(work, recipe)


def input_bytes_per_token(work: Work, recipe: Recipe) -> float:
    """The bytes of the inputs of all layers."""
    return _width_of_activations(recipe) * work.scores


def recompute_fraction(work: Work, recipe: Recipe) -> float:
    """The share of the layers' products with weights that is recomputed."""
    if recipe.checkpointing in SELECTIVE:
        passed = work.passed(0)
        share = passed.attended / max(passed.products, 1)
        part = SELECTIVE[recipe.checkpointing]
        if part.keeps_products:
            return 0.0
        return (share if part.attention else 0.0) + (1 - share if part.mlp else 0.0)
    if work.row is not None:
        return math.fsum(share.products for share in _checkpointed_shares(work.row, recipe))
    return _checkpointed_part(work, recipe)


def freed_fraction(work: Work, recipe: Recipe) -> float:
    """The share of the linear layers' inputs and outputs that is freed until backward."""
    if recipe.checkpointing in SELECTIVE:
        return recompute_fraction(work, recipe)
    if work.row is not None:
        return math.fsum(share.linear_widths for share in _checkpointed_shares(work.row, recipe))
    return _checkpointed_part(work, recipe)


def _checkpointed_shares(row: Passed, recipe: Recipe) -> tuple[LayerShare, ...]:
    """The shares of the layers that ``recipe`` recomputes."""
    if not _checkpoints_layers(recipe):
        return ()
    first = first_layers(recipe.checkpointing)
    shares = row.layers
    if first is not None:
        shares = shares[:first]
    if recipe.every_n_layers:
        shares = shares[:: recipe.every_n_layers]
    return shares  # in segments of any lengths, every layer is recomputed


def _checkpointed_part(work: Work, recipe: Recipe) -> float:
    """The part of the layers that ``recipe`` recomputes, where all layers are alike."""
    if not _checkpoints_layers(recipe):
        return 0.0
    every, first = recipe.every_n_layers, first_layers(recipe.checkpointing)
    if every and work.layers:
        return -(-work.layers // every) / work.layers
    if first is not None and work.layers:
        return min(first / work.layers, 1.0)
    return 1.0


def _checkpoints_layers(recipe: Recipe) -> bool:
    """Whether whole layers run again. Raises ``ValueError`` for an unknown schedule."""
    schedule = recipe.checkpointing
    if schedule is None:
        return bool(recipe.every_n_layers)
    if isinstance(schedule, str) and first_layers(schedule) is None:
        check_choice("checkpointing", schedule, CHECKPOINTING)
    return True


def saved_bytes_per_token(work: Work, recipe: Recipe) -> float:
    """A lower bound for the bytes that autograd saves for each token, or row, from the sizes.

    It is half of the linear layers' inputs and outputs, and the logits. If all layers are
    checkpointed, it is half of one layer's inputs and outputs.
    """
    passed = work.passed(0)
    layers = work.linear_widths * passed.vectors / 2
    logits = 0 if recipe.chunked_loss else passed.logits
    if recipe.offload is not None and OFFLOAD[recipe.offload].all_saved:
        return 0.0
    kept = 1 - freed_fraction(work, recipe)
    if recipe.checkpointing in SELECTIVE and SELECTIVE[recipe.checkpointing].keeps_products:
        kept = 0.5  # their results stay, and their inputs are recomputed
    one_layer = layers / max(work.layers, 1)
    if passed.layers:  # the largest of them: linear layers outside of the lists are in none
        one_layer = layers * max(share.linear_widths for share in passed.layers)
    numbers = max(kept * layers + logits, one_layer)
    return _width_of_activations(recipe) * numbers


def _width_of_activations(recipe: Recipe) -> int:
    """Bytes of a number in the layers; at least, if the model keeps its own dtypes."""
    return 2 if recipe.precision is None else PRECISIONS[recipe.precision].compute


def overhead_of_prediction(
    prediction: Prediction, capability=(8, 0), replay: bool = True, cards: int = 1
) -> dict[str, int]:
    """The bytes that a card must hold in excess of live tensors; empty for target "cpu".

    ``replay``: replay the allocator over the whole step (seconds for a deep model). Else its part
    is a rough estimate.
    """
    if prediction.target == "cpu":
        return {}
    reserved = prediction.replay_allocator() if replay else None
    return overhead_bytes(prediction.peak.total, capability, reserved, cards)


def overhead_bytes(
    live: int, capability: tuple[int, int], reserved: int | None = None, cards=1
) -> dict[str, int]:
    """Allocator overhead, cuBLAS workspace, CUDA context and NCCL buffers, in bytes.

    ``live``: bytes of live tensors. ``reserved``: what the card's allocator has reserved; ``None``
    estimates its overhead.
    """
    if reserved is None:
        held = {ROUGHLY: round(ALLOCATOR_ROUGHLY * live)}
    else:
        held = {"allocator, reserved and free": max(reserved - live, 0)}
    held |= {"cuBLAS workspace": allocator.workspace(capability), "CUDA context": allocator.CONTEXT}
    return held | ({"NCCL, about": NCCL} if cards > 1 else {})
