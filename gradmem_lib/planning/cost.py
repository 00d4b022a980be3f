"""What a recipe costs on a card: residents by count, time by estimate, and what lies beside the live bytes."""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .. import compat
from ..names import SELECTIVE
from ..prediction import allocator
from ..prediction.configs import skeleton
from ..prediction.predict import Prediction
from ..techniques.lora import linear_layers, linear_sizes
from ..techniques.schedules import first_layers
from ..techniques.selective import PARTS
from ..training.losses import chunked_loss_refusal, predicts_next_token
from ..training.recipe import Recipe
from .cards import Card, seconds_over_bus

LORA_RANK = 16
ROUGHLY = "allocator, about"
ALLOCATOR_ROUGHLY = 0.05  # of the live bytes: what the allocator holds beside them, before it is replayed
OPERATIONS_KEPT = (
    0.5  # of a data sheet's operations a second: what training steps reach on most cards, roughly
)


@dataclass(frozen=True, eq=False)
class Work:
    """A model's sizes, counted on its skeleton. ``matrices``: entries of linear layers but the ``head``'s; ``experts``: those of
    experts that a token goes through; ``scores``: heads x head size, summed over layers, of which attention makes its products;
    ``attended``: entries of ``matrices`` that are in attention; ``patches``: of an image, with the class token, ``None`` for text."""

    config: Any
    parameters: int
    sizes: tuple[tuple[int, ...], ...]
    matrices: int
    head: int
    adapters: int
    layers: int
    scores: int
    causal: bool
    chunked: bool
    vocabulary: int
    fused: bool
    patches: int | None
    experts: float
    attended: int


def count(config) -> Work:
    """Count the parameters and matrices of ``config``'s model, without memory for it. ``ValueError`` where rows are neither tokens
    nor images cut into patches of one size, of which the time is estimated."""
    model = skeleton(config)
    patches = _patches(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    sizes = {name: linear_sizes(layer) for name, layer in linear_layers(model).items()}
    linear = list(filter(None, sizes.values()))
    attention = [f"{n}." for n, m in model.named_modules() if type(m).__name__.endswith(PARTS["attention"])]
    text = config.get_text_config()
    hidden, layers = getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0)
    heads = getattr(text, "num_attention_heads", 1)
    # An encoder with a decoder has as many layers in each, and the decoder's attend twice.
    attentions = 3 * layers if config.is_encoder_decoder else layers
    return Work(
        config=config,
        parameters=sum(p.numel() for p in model.parameters()),
        sizes=tuple(tuple(p.shape) for p in model.parameters()),
        matrices=sum(i * o for i, o in linear),
        head=math.prod(head.weight.shape) if isinstance(head, nn.Linear) else 0,
        adapters=sum(LORA_RANK * (i + o) for i, o in linear),
        layers=layers,
        scores=attentions * heads * (getattr(text, "head_dim", None) or hidden // heads),
        causal=predicts_next_token(model),
        chunked=head is not None and chunked_loss_refusal(type(model), config) is None,
        vocabulary=head.weight.shape[0] if isinstance(head, nn.Linear) else 0,
        fused=compat.takes_fused_attention(model),
        patches=patches,
        experts=_experts(model),
        attended=sum(i * o for name, (i, o) in sizes.items() if name.startswith(tuple(attention))),
    )


def _patches(model: nn.Module) -> int | None:
    """Tokens that an image becomes, with the class token; ``None`` for text."""
    taken, config = getattr(model, "main_input_name", "input_ids"), model.config
    if taken == "input_ids":
        return None
    sizes = [getattr(config, name, None) for name in ("image_size", "patch_size")]
    if taken != "pixel_values" or None in sizes or getattr(config, "depths", None) is not None:
        raise ValueError(
            f"plan estimates times for rows of tokens, or images cut into patches of one size, and {type(model).__name__} takes "
            f"{taken}: predict the recipes that you think of, with predict(model, batch_size=..., recipe=Recipe(...))"
        )
    (height, width), (tall, wide) = (
        size if isinstance(size, (list, tuple)) else (size, size) for size in sizes
    )
    return (height // tall) * (width // wide) + 1


def _experts(model: nn.Module) -> float:
    """Entries of the experts' matrices (experts, out, in) that one token goes through."""
    text = model.config.get_text_config()
    most = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    if not most:
        return 0.0
    entries = sum(p.numel() for p in model.parameters() if p.dim() == 3 and len(p) == most)
    return entries * (getattr(text, "num_experts_per_tok", None) or most) / most


def resident_bytes(work: Work, recipe: Recipe) -> dict[str, int]:
    """Bytes that no cut of the batch makes smaller: weights, gradients (all alive at the end of a backward, unless the
    optimizer steps in it), optimizer states."""
    width = recipe.weight_dtype.itemsize
    weights = width * work.parameters
    trained, sizes = work.parameters, work.sizes
    if recipe.lora_rank:
        trained, sizes = work.adapters, ()
        weights += width * work.adapters
        if recipe.quantized_base:
            weights += round((0.5 + 1 / 64) * work.matrices) - width * work.matrices
    states = {"adamw-8bit": 2 + 8 / 256, "sgd": 0}.get(recipe.optimizer, 2 * width) * trained
    if recipe.optimizer.startswith("adafactor"):
        own = 4 if recipe.optimizer == "adafactor" else width
        states = sum(own * (sum(s[-2:]) * math.prod(s[:-2]) if len(s) > 1 else math.prod(s)) for s in sizes)
    return {
        "parameters": weights,
        "gradients": 0 if recipe.in_backward else width * trained,
        "optimizer": round(states),
    }


def seconds_per_token(
    work: Work, recipe: Recipe, card: Card, micro_batch: int, seq_len: int, moved: float | None = None
) -> float:
    """The estimated time of a training step, by token: operations in matrix products at half the data sheet's rate, bytes of
    weights, gradients and states at its bandwidth, and ``moved`` bytes of the token over the bus and back, one after the other.
    Without ``moved`` it is as much as is moved at least, by the sizes alone.

    Elementwise work, launching kernels and waiting are left out. It serves to put recipes in order, not to plan a night.
    """
    tokens = micro_batch * seq_len
    attention = 4 * seq_len * work.scores / (2 if work.causal else 1)
    layers = 2 * (work.matrices + work.experts) + attention
    forward = layers + 2 * work.head
    again = run_again(work, recipe)
    if recipe.lora_rank:
        forward += 2 * work.adapters
        backward = forward + attention + 2 * work.adapters
    else:
        backward = 2 * forward
    half = recipe.precision != "float32" and (card.bf16 or recipe.precision == "autocast-fp16")
    rate = OPERATIONS_KEPT * (card.half if half else card.single)
    scores = {"attention": 1, "mlp": 0}.get(recipe.checkpointing, again)
    operations = (forward + backward + again * (layers - attention) + scores * attention) / rate

    width = recipe.weight_dtype.itemsize
    passes = 2 + again
    read = width * work.parameters
    if recipe.autocast_dtype:
        read += (2 + 2) * (work.matrices + work.head)
    if recipe.quantized_base:
        read += (0.5 + 2) * work.matrices
    trained = work.adapters if recipe.lora_rank else work.parameters
    micro = passes * read + 3 * width * trained
    # Weights are read and written, gradients read; then the states. Adafactor's dozen operations on float32 copies of a
    # tensor read or write it 17 times, those of torch's Adafactor 14 times.
    states = {"adamw-8bit": 4, "adafactor": 17 * 4, "adafactor-torch": 14 * width, "sgd": 0}.get(
        recipe.optimizer, 4 * width
    )
    step = (3 * width + states) * trained
    read_written = (micro + step / recipe.accumulation) / tokens
    if moved is None:
        inputs = (4 if recipe.precision == "float32" else 2) * work.scores
        kept = kept_by_a_token(work, replace(recipe, offload=None))
        moved = {None: 0, "boundaries": inputs, "activations": kept}[recipe.offload]
    return operations + read_written / card.bandwidth + 2 * seconds_over_bus(moved, card)


def run_again(work: Work, recipe: Recipe) -> float:
    """The part of the layers' products with weights that runs twice."""
    if recipe.every_n_layers and work.layers:
        return -(-work.layers // recipe.every_n_layers) / work.layers
    if recipe.checkpointing in SELECTIVE:
        share = work.attended / max(work.matrices + work.experts, 1)
        return {"attention": share, "mlp": 1 - share}.get(recipe.checkpointing, 0.0)
    first = first_layers(recipe.checkpointing)
    if first is not None and work.layers:
        return min(first / work.layers, 1.0)
    return 1.0 if recipe.checkpointing is not None else 0.0


def kept_by_a_token(work: Work, recipe: Recipe) -> float:
    """Bytes that backward needs of each token at least, by the sizes alone: half of what linear layers take and return, and the
    logits; where layers are checkpointed, half of one layer's."""
    layers = work.adapters / LORA_RANK / 2
    logits = 0 if recipe.chunked_loss else work.vocabulary
    if recipe.offload == "activations":
        return 0.0
    kept = 0.5 if recipe.checkpointing == "elementwise" else 1 - run_again(work, recipe)
    numbers = max(kept * layers + logits, layers / max(work.layers, 1))
    return (4 if recipe.precision == "float32" else 2) * numbers


def beyond(
    prediction: Prediction, capability: tuple[int, int] = (8, 0), replay: bool = True
) -> dict[str, int]:
    """What a card must hold beside the live bytes, in bytes; empty for target "cpu".

    ``replay``: follow the allocator through the whole step (seconds for a deep model); else its part is a rough one.
    """
    if prediction.target == "cpu":
        return {}
    return beside(prediction.peak.total, capability, prediction.replay_allocator() if replay else None)


def beside(live: int, capability: tuple[int, int], reserved: int | None = None) -> dict[str, int]:
    """What a card of ``capability`` must hold beside ``live`` bytes, of which its allocator has ``reserved`` (``None``: roughly
    so many)."""
    if reserved is None:
        held = {ROUGHLY: round(ALLOCATOR_ROUGHLY * live)}
    else:
        held = {"allocator, reserved and free": max(reserved - live, 0)}
    return {
        **held,
        "cuBLAS workspace": allocator.workspace(capability),
        "CUDA context": allocator.CONTEXT,
    }
