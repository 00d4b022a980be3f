"""What a recipe holds on a card: resident and saved bytes, and the overhead beside live tensors."""

from collections import Counter

from ..names import OFFLOAD, PRECISIONS, QUANTIZED, SELECTIVE, SHARDING
from ..optimizers import OPTIMIZERS
from ..prediction import allocator
from ..prediction.predict import Prediction
from ..training.recipe import Recipe
from ..units import MiB
from .recomputed import freed_fraction
from .work import Work

FLOAT32 = 4  # bytes of a number
IDLE, ROUGHLY = "allocator's idle blocks", "allocator (estimate)"
# the allocator's overhead as a share of the live bytes, until it is replayed
ALLOCATOR_ROUGHLY = 0.05
# outside PyTorch's allocator, on each of two A100s (NVIDIA/nccl#964); less over PCIe
NCCL = 544 * MiB


def resident_bytes(work: Work, recipe: Recipe, cards: int = 1) -> dict[str, int]:
    """Bytes that do not depend on the micro-batch: weights, gradients (all alive at the end of
    backward, unless the optimizer steps in backward), and optimizer states. With several ``cards``,
    a lower bound for one of them under ``recipe.sharding``.
    """
    frozen_bytes, width = work.bytes_each(recipe)
    weights, trained = frozen_bytes * work.parameters, work.trained(recipe)
    shapes = work.sized.trained_shapes
    if work.adapts(recipe):
        weights, shapes = weights + width * trained, Counter()
    if recipe.quantized_base:
        stored = QUANTIZED[recipe.storage].bytes_each
        weights += round(stored * work.sized.matrices) - width * work.sized.matrices
    row = OPTIMIZERS[recipe.optimizer]
    with_states = trained
    if row.factored:  # additions of LoRA have few rows and columns, which are left out
        with_states = sum(count * row.numbers_with_states(shape) for shape, count in shapes.items())
    states = row.bytes_of_states(state_width(recipe, width), recipe.momentum) * with_states
    if recipe.keeps_masters:
        states += FLOAT32 * trained
    cut = cards if recipe.fully_sharded else 1
    if recipe.fully_sharded and not SHARDING[recipe.sharding].frees_layers:
        # whole until backward, in the computing dtype
        weights = weights * gathered_width(work, recipe) // frozen_bytes * cards
    gradients = 0 if recipe.in_backward else round(width * trained) // cut
    states = round(states) // (cards if recipe.shards_states else 1)
    held = {"parameters": round(weights) // cut, "gradients": gradients, "optimizer": states}
    return dict.fromkeys(held, 0) if recipe.offloads_shards else held


def state_width(recipe: Recipe, width: float) -> float:
    """Bytes of a number of the states that have the dtype of the weights."""
    return FLOAT32 if recipe.keeps_masters else width


def gathered_width(work: Work, recipe: Recipe) -> float:
    """Bytes of a weight in the dtype that computes."""
    if recipe.gathered_dtype is not None:
        return recipe.gathered_dtype.itemsize
    return work.bytes_each(recipe)[0]


def saved_bytes_per_token(work: Work, recipe: Recipe) -> float:
    """A lower bound for the most bytes that are saved at one time for each token, or row.

    It comes from the sizes, and is the larger one of two: what a whole forward saves, and what one
    layer saves while backward runs it again, half of its inputs and outputs.
    """
    if moves_all_saved(recipe):
        return 0.0
    all_layers = _half_of_linear_layers(work)
    one_layer = all_layers / max(work.layers, 1)
    passed = work.passed(0)
    if passed.layers:  # the largest of them: linear layers outside of the lists are in none
        one_layer = all_layers * max(share.linear_widths for share in passed.layers)
    in_backward = width_of_activations(recipe) * one_layer
    return max(saved_by_forward_per_token(work, recipe), in_backward)


def saved_by_forward_per_token(work: Work, recipe: Recipe) -> float:
    """A lower bound for the bytes that a whole forward saves for each token, or row.

    It is half of the inputs and outputs of the linear layers that do not run again, and the logits.
    Where only the results of products stay, it is these results.
    """
    if moves_all_saved(recipe):
        return 0.0
    part = SELECTIVE.get(recipe.checkpointing)
    if part is not None and part.keeps_products:
        numbers = _results_of_linear_layers(work, recipe)
    else:
        numbers = (1 - freed_fraction(work, recipe)) * _half_of_linear_layers(work)
    if not recipe.chunked_loss:
        numbers += work.passed(0).logits
    return width_of_activations(recipe) * numbers


def copied_bytes(work: Work, recipe: Recipe) -> int:
    """A lower bound for the bytes of autocast's copies at the end of a forward.

    Autocast copies each trained matrix once, to 16 bits, and keeps the copy until the forward ends.
    A frozen one is copied again for each product, and sharded ones are gathered layer by layer.
    Where a row is more than tokens, it is not known which layers run: 0.
    """
    if recipe.autocast_dtype is None or work.adapts(recipe) or recipe.fully_sharded:
        return 0
    if work.row is not None:
        return 0
    return recipe.autocast_dtype.itemsize * work.sized.trained_matrices


def _half_of_linear_layers(work: Work) -> float:
    """Half of the numbers that go into the linear layers and come out of them, for each token."""
    return work.linear_widths * work.passed(0).vectors / 2


def _results_of_linear_layers(work: Work, recipe: Recipe) -> float:
    """A lower bound for the numbers that the linear layers return, for each token or row."""
    if work.row is not None or work.has_adapters or recipe.quantized_base:
        # how many vectors pass a layer, or what its product is, is not looked up
        return _half_of_linear_layers(work) / 2
    results = sum(outputs for _, outputs in work.linear.values())
    return 2 * results if recipe.lora_rank else results  # an adapter returns as many


def moves_all_saved(recipe: Recipe) -> bool:
    """Whether all that autograd saves is moved to the host."""
    if recipe.offload is None:
        return False
    return OFFLOAD[recipe.offload].all_saved


def input_bytes_per_token(work: Work, recipe: Recipe) -> float:
    """The bytes of the inputs of all layers; 0 for rows, whose layers are unlike one another."""
    if work.row is not None:
        return 0
    return width_of_activations(recipe) * work.sized.scores


def width_of_activations(recipe: Recipe) -> int:
    """Bytes of a number in the layers; at least, if the model keeps its own dtypes."""
    return 2 if recipe.precision is None else PRECISIONS[recipe.precision].compute


def overhead_of_prediction(
    prediction: Prediction,
    capability=(8, 0),
    replay: bool = True,
    cards: int = 1,
    hybrid: bool = False,
) -> dict[str, int]:
    """The bytes that a card must hold in excess of live tensors; empty for target "cpu".

    ``replay``: replay the allocator over the whole step (seconds for a deep model). Else its part
    is a rough estimate. ``cards`` and ``hybrid``: see ``overhead_bytes``.
    """
    if prediction.target == "cpu":
        return {}
    reserved = prediction.replay_allocator() if replay else None
    return overhead_bytes(prediction.peak.total, capability, reserved, cards, hybrid)


def overhead_bytes(
    live: int,
    capability: tuple[int, int],
    reserved: int | None = None,
    cards: int = 1,
    hybrid: bool = False,
) -> dict[str, int]:
    """Allocator overhead, cuBLAS workspace, CUDA context and NCCL buffers, in bytes.

    ``live``: bytes of live tensors. ``reserved``: what the card's allocator has reserved; ``None``
    estimates its overhead. ``cards``: those of one machine. NCCL has buffers for each group of
    processes: DDP has one, on however many machines. ``hybrid`` sharding on several machines has
    two: the cards of a machine; and the cards that hold the same shard, one on each machine.
    """
    if reserved is None:
        held = {ROUGHLY: round(ALLOCATOR_ROUGHLY * live)}
    else:
        held = {IDLE: max(reserved - live, 0)}
    held |= {"cuBLAS workspace": allocator.workspace(capability), "CUDA context": allocator.CONTEXT}
    if cards > 1:
        held["NCCL (estimate)"] = 2 * NCCL if hybrid else NCCL
    return held
