"""As few layers run again as a budget allows, by prediction."""

from dataclasses import replace

from torch import nn

from ..techniques import checkpointing
from ..techniques.layers import find_layers
from ..training.recipe import Recipe
from ..units import format_bytes, parse_bytes
from .configs import find_config, skeleton
from .predict import predict


def fit(model_or_config, budget: int | str, *, recipe: Recipe | None = None, **asked) -> Recipe:
    """``recipe`` with the fewest layers that must run again: ``checkpointing`` ``None`` or ``"first-k"``.

    The peak that ``predict`` says for it is at most ``budget``, and above it for one layer less. It is the first layers that run
    again: backward comes to them last, when what the others kept is gone.

    Args:
        budget: bytes, or text such as ``"800 MiB"``: of live tensors, as a ``MemoryTracker``'s. On a card, what its allocator
            holds beside them, workspace and context need room too (``plan`` adds them up).
        asked: ``batch_size``, ``seq_len``, ``batch``, ``loss``, ``target``: see ``predict``, which says what else they raise.

    ``ValueError`` for a recipe with checkpoints of its own, and, with the lowest peak, where no number of layers is enough.
    """
    recipe, limit = Recipe() if recipe is None else recipe, parse_bytes(budget)
    if recipe.checkpointing is not None or recipe.every_n_layers is not None:
        raise ValueError(
            "fit chooses the checkpoints: give a recipe without checkpointing and every_n_layers"
        )
    model = (
        model_or_config if isinstance(model_or_config, nn.Module) else skeleton(find_config(model_or_config))
    )
    n = sum(len(layers) for layers, _ in find_layers(model).values())
    recipes = [replace(recipe, checkpointing=f"first-{k}" if k else None) for k in range(n + 1)]
    peaks: dict[int, int] = {}

    def fits(k: int) -> bool:
        if k not in peaks:
            peaks[k] = predict(model_or_config, recipe=recipes[k], **asked).peak.total
        return peaks[k] <= limit

    if fits(0):
        return recipes[0]
    enough = next((k for k in range(n, 0, -1) if fits(k)), None)  # n, but for bytes that a checkpoint adds
    if enough is None:
        lowest = min(peaks.values())
        raise ValueError(
            f"budget={budget!r} is less than any number of layers run again needs: at least {lowest:,} bytes "
            f"({format_bytes(lowest)}). Take a smaller batch (accumulation), another precision or optimizer, or chunked_loss"
        )
    too_few = 0
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return recipes[enough]


def checkpoint_layers(
    layers_or_model: nn.Module,
    every,
    *,
    keep_last: bool | None = None,
    budget: int | str | None = None,
    **asked,
) -> checkpointing.CheckpointedLayers:
    """Run layers in checkpointed segments while they train, until ``.remove()`` or the end of a ``with`` block.

    Args:
        every: ``"fit"``: as few layers as ``budget`` allows (see ``fit``, which takes ``asked``; without a ``recipe``, the model is
            trained as it is, with AdamW). All else, and ``keep_last``, as ``techniques.checkpointing.checkpoint_layers`` says.
    """
    if every == "fit":
        if budget is None:
            raise ValueError(
                'every="fit" needs a budget, such as budget="800 MiB", and batch_size and seq_len, or a batch'
            )
        as_it_is = Recipe(precision=None, attention=None)
        every = fit(layers_or_model, budget, **{"recipe": as_it_is} | asked).checkpointing or "first-0"
    elif budget is not None or asked:
        raise ValueError(
            f'every={every!r} takes no {", ".join(["budget"] * (budget is not None) + [*asked])}: they are for "fit"'
        )
    return checkpointing.checkpoint_layers(layers_or_model, every, keep_last=keep_last)
