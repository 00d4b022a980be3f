"""Lesson 08's answers: what recomputing a part or moving everything saves at the size of a 7B, what
"auto" does, and a cache.

Bytes are predicted for a CUDA card; operations are counted on a block of full size under fake
tensors.
"""

from contextlib import nullcontext
from functools import cache, partial
from math import ceil

from torch import nn

from ....planning.cards import CARDS
from ....planning.cost import FLOPS_UTILIZATION
from ....prediction.fit import fit
from ....prediction.predict import predict
from ....techniques.checkpointing import checkpoint_layers
from ....techniques.selective import checkpoint_parts
from ...ledger import Finding, answers
from ...ledger.finding import GB, Figure, about, between, each, gb, more, none
from ...ledger.saved_tensors import block_operations
from ...material import accounting
from ...material.shapes import SHAPES
from ..lesson_01.claims import SEVEN
from ..shared.claim_runs import activations, predicted, switched_on, tiny, trained


def _step(attention: str, tokens: int, **changes):
    """A step of Llama-2-7B on one row."""
    return predicted("Llama-2-7B", 1, tokens, attention=attention, **changes)


def part_of_the_saving(part: str, attention: str, tokens: int) -> float:
    """How much a checkpoint around ``part`` of each layer reduces activations, as a share of the
    reduction by whole layers.
    """
    none, some, whole = (
        activations(_step(attention, tokens, checkpointing=how))
        for how in (None, part, "per-layer")
    )
    return (none - some) / (none - whole)


@cache
def layer_operations(part: str | None, attention: str, tokens: int) -> int:
    """The operations of one layer's forward and backward on one row, with ``part`` of it in a
    checkpoint (``"per-layer"``: all).
    """
    whole = partial(checkpoint_layers, every=1)
    again = whole if part == "per-layer" else partial(checkpoint_parts, part=part)
    how = nullcontext if part is None else again
    return block_operations(SEVEN, tokens, attention, lambda block: how(nn.ModuleList([block])))


def extra_work(part: str, attention: str, tokens: int) -> float:
    """The operations that it adds, as a share of a layer's step."""
    return layer_operations(part, attention, tokens) / layer_operations(None, attention, tokens) - 1


@answers("C45")
def attention_alone() -> Finding:
    share = {}
    for setting in (
        ("attention", "eager", 2048),
        ("attention", "eager", 8192),
        ("attention", "fused", 2048),
        ("mlp", "fused", 2048),
    ):
        share[setting] = part_of_the_saving(*setting)
    work = {}
    for setting in (("attention", "eager"), ("per-layer", "eager"), ("mlp", "fused")):
        work[setting] = extra_work(*setting, 2048)
    return Finding(
        own=(
            between(
                "share of the saving, 7B, 1 x 2048, eager",
                "60 to 80%",
                share["attention", "eager", 2048],
            ),
            between("extra operations", "10 to 15%", work["attention", "eager"]),
        ),
        elsewhere=between(
            "share of the saving, fused", "60 to 80%", share["attention", "fused", 2048]
        ),
        says=f"""
            only if: attention stores its scores (eager); with fused attention, the MLP saves more.
            fails: Attention alone keeps a different share of the saving, or costs a different
                amount of work.
            why: The advice is for stored scores, and with them the share grows with length:
                {share["attention", "eager", 8192]:.0%} at 8,192 tokens. With fused attention,
                checkpointing the MLP alone keeps {share["mlp", "fused", 2048]:.0%} of the saving
                for {work["mlp", "fused"]:.0%} more operations; whole layers cost
                {work["per-layer", "eager"]:.0%}.
            """,
        figures=each("share of the saving: {}, {}, {} tokens", share, "{:.1%}")
        | each("extra operations of a layer's step, 2048 tokens: {}, {}", work, "{:.1%}"),
    )


def _fitted(share: float) -> str:
    """The layers that ``every="fit"`` recomputes if a step gets this share of the bytes that it
    needs without checkpoints.
    """
    asked = {"batch_size": 64, "seq_len": 32}
    room = predict(tiny(), **asked).peak.total
    return (fit(tiny(), int(share * room), **asked).checkpointing or "no layer").replace(
        "first-", "the first "
    )


def _layers(on: str) -> int:
    """How many layers such a text names."""
    return 0 if on == "no layer" else on.count(",") + 1


@answers("C47")
def checkpointing_auto() -> Finding:
    found = {on: switched_on(trained(gradient_checkpointing=on)) for on in ("auto", "no", False)}
    fitted = {share: _fitted(share) for share in (1, 0.8, 0.5)}
    return Finding(
        own=none('"auto" with room, layers checkpointed', _layers(found["auto"])),
        beyond=(
            none('the same, "no"', _layers(found["no"])),
            none('the same, every="fit"', _layers(fitted[1])),
        ),
        says=f"""
            fails: Transformers knows no "auto": any text, even "no", switches checkpointing on.
            holds: It stays off where there is room.
            why: The code only tests if the value is true, and every string with letters is
                true, even "no". The model here is tiny and far from any limit. The course's
                checkpoint_layers(model, every="fit", budget=...) predicts the step: with half the
                bytes that it needs, {fitted[0.5]} of 4 layers are recomputed.
            """,
        figures=each("gradient_checkpointing={!r} switches on", found)
        | each('every="fit" with {:.0%} of the bytes runs again', fitted),
    )


def taken_off(what: str, tokens: int, **how) -> float:
    """The share by which moving, or another way, reduces the activations of a step, or its whole
    ``"peak"``.
    """
    plain, step = _step("fused", tokens), _step("fused", tokens, **how)
    if what == "peak":
        left = step.peak.total / plain.peak.total
    else:
        left = activations(step) / activations(plain)
    # moving leaves a handful of bytes, and no share has the sign of -0
    return round(1 - left, 4) + 0.0


@answers("C48")
def moved_activations() -> Finding:
    moving = {"offload": "activations"}
    boundaries = {"checkpointing": "per-layer", "offload": "boundaries"}
    crossing = _step("fused", 2048, **moving).offload_traffic_bytes
    inputs_crossing = _step("fused", 2048, **boundaries).offload_traffic_bytes
    again = SEVEN.layers * (
        layer_operations("per-layer", "fused", 2048) - layer_operations(None, "fused", 2048)
    )
    card = CARDS["A100 80GB"]
    needed = crossing / (again / (FLOPS_UTILIZATION * card.half))
    off = {}
    for tokens in (2048, 8192):
        for what in ("activations", "peak"):
            off[what, tokens, "moved"] = taken_off(what, tokens, **moving)
            off[what, tokens, "checkpointed"] = taken_off(what, tokens, checkpointing="per-layer")
    return Finding(
        own=between(
            "off the activations of a 7B, 1 x 2,048",
            "80 to 90%",
            off["activations", 2048, "moved"],
            within=0.1,
        ),
        elsewhere=between(
            "off a step's peak, all weights trained", "80 to 90%", off["peak", 2048, "moved"]
        ),
        beyond=Figure("over the bus, away and back", "traffic", crossing, unit="GB"),
        says=f"""
            only if: activations are meant; a step's peak falls only where they cause it.
            fails: Moving saves a different share of the activations.
            why: One checkpoint per layer saves
                {off["activations", 2048, "checkpointed"]:.0%} without a bus. To be as fast as
                recomputing on an A100 at half its rated speed, a bus must carry
                {needed / GB:.0f} GB a second; PCIe 4 carries {card.bus / GB:.0f}. Moving only the
                inputs of checkpointed layers sends {gb(inputs_crossing)} over it.
            needs: a card to measure the time; the bytes are predicted
            """,
        figures=each("off the {}, 1 x {}, {}", off, "{:.1%}")
        | {
            "bytes over the bus, away and back": crossing,
            "operations that checkpoints repeat": again,
        },
    )


@answers("C53")
def key_value_cache() -> Finding:
    shape, rows, tokens = SHAPES["Llama-2-70B"], 32, 2048
    cached = accounting.kv_cache_bytes(shape, rows, tokens)
    per_token, weights = cached // (rows * tokens), 2 * shape.parameters
    unshared = cached * shape.heads // shape.kv_heads
    rows_like_weights = ceil(weights / (per_token * tokens))
    return Finding(
        own=about("70B, 32 x 2,048 tokens", "40 GB", cached),
        where=(
            about("32 x 4,096 tokens", "40 GB", 2 * cached),
            more("cache / weights, no shared heads", unshared / weights),
        ),
        says=f"""
            only if: the prompt has 2k tokens, too; at a batch of 32, the cache exceeds the
                weights only in models without shared heads.
            fails: Neither 2k tokens nor 4k tokens take that much.
            holds: 2k tokens take that much.
            why: A 70B Llama keeps {per_token:,} bytes a token in bf16, since 64 query heads
                share 8 heads of keys and values. Its weights take {gb(weights)}: a cache of that
                size needs {rows_like_weights} rows of 2,048 tokens.
            """,
        figures={
            "bytes of keys and values a token, bf16": per_token,
            "cache of 32 x 2048 tokens, bf16": cached,
            "the same in bf16 without shared heads": unshared,
            "weights in bf16": weights,
        },
    )
