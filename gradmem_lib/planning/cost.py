"""The estimated time of a recipe's training step on a card."""

from dataclasses import astuple, dataclass, replace

import torch

from ..names import OFFLOAD, SELECTIVE, SHARDING
from ..optimizers import OPTIMIZERS
from ..training.recipe import Recipe
from .cards import BUS_UTILIZATION, NETWORK, Card, seconds_between, seconds_over_bus
from .held import (
    FLOAT32,
    gathered_width,
    input_bytes_per_token,
    resident_bytes,
    saved_bytes_per_token,
    state_width,
    width_of_activations,
)
from .recomputed import recompute_fraction
from .work import Work

# the share of a data sheet's rate that training reaches on most cards, roughly
FLOPS_UTILIZATION = 0.5


def sent_bytes(work: Work, recipe: Recipe, cards: int) -> float:
    """Bytes that each of ``cards`` cards in a ring sends to the next in a step (NVIDIA/nccl-tests,
    doc/PERFORMANCE.md).

    An all-gather, and a reduce-scatter, send all but the rank's own part once. DDP does both with
    the gradients, once at the end of the step. zero1 also gathers the trained weights.
    ``fully_shard`` reduces and scatters the gradients of every micro-batch. It gathers all weights
    before each forward, and (fsdp) the weights of each layer before its backward.
    """
    unsharded = replace(recipe, sharding=None, offload=None, in_backward=False)
    width = work.bytes_each(unsharded)[0]
    weights = resident_bytes(work, unsharded)["parameters"]
    gradients = _bytes_of_gradients(work, recipe)
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


def sent_between_machines(work: Work, recipe: Recipe, machines: int) -> float:
    """Bytes that each of ``machines`` sends over the network in a step.

    Each has a copy of the model, and the copies' gradients are summed by an all-reduce, which sends
    all but a machine's own part twice: once a step by DDP, and after every micro-batch where a
    machine's cards share a copy (hybrid sharding).
    """
    times = recipe.accumulation if SHARDING[recipe.sharding].weights else 1
    return 2 * (1 - 1 / machines) * times * _bytes_of_gradients(work, recipe)


def _bytes_of_gradients(work: Work, recipe: Recipe) -> float:
    """The bytes of all gradients in the dtype in which they are sent."""
    unsharded = replace(recipe, sharding=None, offload=None, in_backward=False)
    held, width = resident_bytes(work, unsharded)["gradients"], work.bytes_each(unsharded)[1]
    return held / width * work.bytes_each(recipe)[1]


@dataclass(frozen=True)
class Cost:
    """The estimated time of a training step, for each token: six terms, in seconds.

    ``products``: operations in matrix products at half the data sheet's rate. ``weights``: in each
    micro-batch, bytes of weights and gradients at its bandwidth. ``optimizer_step``: the same for
    weights, gradients and states. ``between_cards``: what the cards of a machine send each other.
    ``bus``: what is offloaded, in both directions together. ``between_machines``: what machines
    send each other. Elementwise work, kernel launches and waiting are left out.
    """

    products: float
    weights: float
    optimizer_step: float
    between_cards: float
    bus: float
    between_machines: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(astuple(self))


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
    machines: int = 1,
    network: float = NETWORK,
) -> Cost:
    """The estimated time of a training step, for each token.

    ``micro_batch`` is that of one card. ``offload_bytes``: bytes of the token that cross the bus;
    ``None``: their lower bound, from the sizes. ``cards``: those of each of ``machines``.
    ``network``: bytes a second that a machine sends to the others.

    Use it to compare recipes, not to schedule a run.
    """
    if offload_bytes is None:
        offload_bytes = _offload_bytes_per_token(work, recipe)
    tokens = micro_batch * seq_len
    tokens_of_step = tokens * recipe.accumulation
    # If the host steps, its memory is assumed to be as fast for each card as the bus.
    rate_of_step = card.bus if recipe.offloads_shards else card.bandwidth
    sent = sent_bytes(work, recipe, cards) if cards > 1 else 0.0
    sent_far = sent_between_machines(work, recipe, machines) if machines > 1 else 0.0
    of_one_card = {
        "products": _operations_per_token(work, recipe, seq_len) / _rate(recipe, card),
        "weights": _bytes_of_micro_batch(work, recipe) / card.bandwidth / tokens,
        "optimizer_step": _bytes_of_step(work, recipe, cards) / rate_of_step / tokens_of_step,
        "between_cards": seconds_between(sent, card) / tokens_of_step,
        "bus": seconds_over_bus(offload_bytes, card),
        "between_machines": sent_far / (BUS_UTILIZATION * network) / tokens_of_step,
    }
    return Cost(**{term: seconds / (cards * machines) for term, seconds in of_one_card.items()})


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
    half = width_of_activations(recipe) < FLOAT32
    if half and not card.bf16:
        half = recipe.autocast_dtype == torch.float16
    return FLOPS_UTILIZATION * (card.half if half else card.single)


def _bytes_of_micro_batch(work: Work, recipe: Recipe) -> float:
    """Bytes of weights and gradients that one micro-batch reads and writes."""
    bytes_read = gathered_width(work, recipe) * work.parameters
    if recipe.autocast_dtype:  # copies of the matrices in 16 bits are written and read
        copied = work.sized.head_entries
        if not recipe.quantized_base:  # matrices in 4 bits have no float32 to copy from
            copied += work.sized.matrices
        bytes_read += (2 + 2) * copied
    if recipe.quantized_base:
        bytes_read += (0.5 + 2) * work.sized.matrices
    width = work.bytes_each(recipe)[1]
    return (2 + recompute_fraction(work, recipe)) * bytes_read + 3 * width * work.trained(recipe)


def _bytes_of_step(work: Work, recipe: Recipe, cards: int) -> float:
    """Bytes that the optimizer reads and writes on each card, once a step."""
    # Weights are read and written, gradients are read; then come the states.
    width = work.bytes_each(recipe)[1]
    row = OPTIMIZERS[recipe.optimizer]
    states = row.bytes_of_a_step(state_width(recipe, width), recipe.momentum)
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
