"""Lesson 08's answers: what recomputing a part or moving everything saves at the size of a 7B, what
"auto" does, and a cache.

Bytes are predicted for a CUDA card; operations are counted on a block of full size under fake
tensors.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial

from torch import nn

from ....planning.cards import CARDS
from ....planning.cost import FLOPS_UTILIZATION
from ....prediction.fit import fit
from ....prediction.predict import predict
from ....techniques.checkpointing import checkpoint_layers
from ....techniques.selective import checkpoint_parts
from ...ledger import Finding, answers
from ...ledger.finding import GB, Figure, about, between, gb, more, yes
from ...ledger.saved_tensors import block_operations
from ...material import accounting
from ...material.shapes import SHAPES
from ..lesson_01.claims import SEVEN
from ..shared.claim_runs import activations, predicted, recipe, switched_on, tiny, trained


def _predicted(attention: str, tokens: int, **changes):
    """A step of Llama-2-7B on one row."""
    return predicted("Llama-2-7B", 1, tokens, recipe(attention=attention, **changes))


def part_of_the_saving(part: str, attention: str, tokens: int) -> float:
    """How much a checkpoint around ``part`` of each layer reduces activations, as a share of the
    reduction by whole layers.
    """
    none, some, whole = (
        activations(_predicted(attention, tokens, checkpointing=how))
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


def _half_of_the_saving(half: str, attention: str, tokens: int) -> float:
    """The same by the closed forms, with the half's norm inside its checkpoint: each layer keeps
    the half's input.
    """
    options = {"precision": "bf16", "attention": attention}
    block = sum(accounting.block_activations(SEVEN, 1, tokens, **options).values())
    mlp = sum(accounting.mlp_activations(SEVEN, 1, tokens, precision="bf16").values())
    runs_again = mlp if half == "mlp" else block - mlp
    boundary = 2 * tokens * SEVEN.hidden
    saved = SEVEN.layers * (runs_again - boundary) - runs_again
    return saved / (SEVEN.layers * (block - boundary) - block)


@answers("C45")
def attention_alone() -> Finding:
    share = {
        (part, attention, tokens): part_of_the_saving(part, attention, tokens)
        for part, attention, tokens in (
            ("attention", "eager", 2048),
            ("attention", "eager", 8192),
            ("attention", "fused", 2048),
            ("mlp", "fused", 2048),
        )
    }
    work = {
        (part, attention): extra_work(part, attention, 2048)
        for part, attention in (("attention", "eager"), ("per-layer", "eager"), ("mlp", "fused"))
    }
    halves = {
        (
            f"by the closed forms, its norm in the checkpoint: {half}, {attention}, {tokens} tokens"
        ): f"{_half_of_the_saving(half, attention, tokens):.0%}"
        for half, attention, tokens in share
    }
    return Finding(
        own=(
            between(
                "share of the saving, 7B, 1 x 2048, eager",
                0.6,
                0.8,
                share["attention", "eager", 2048],
                "%",
            ),
            between("extra operations", 0.1, 0.15, work["attention", "eager"], "%"),
        ),
        elsewhere=(
            between("share with fused attention", 0.6, 0.8, share["attention", "fused", 2048], "%"),
        ),
        says=f"""
            only if: attention is eager, and stores scores; with fused attention, recompute the
                MLP instead.
            fails: Attention alone keeps a different share of the saving, or costs a different
                amount of work.
            why: The advice is for stored scores, and with them the share grows with length:
                {share["attention", "eager", 8192]:.0%} at 8,192 tokens. With fused attention,
                checkpointing the MLP alone keeps {share["mlp", "fused", 2048]:.0%} of the saving
                for {work["mlp", "fused"]:.0%} more operations; whole layers cost
                {work["per-layer", "eager"]:.0%}.
            """,
        figures={
            f"share of the saving: {part}, {attention}, {tokens} tokens": f"{found:.1%}"
            for (part, attention, tokens), found in share.items()
        }
        | {
            f"extra operations of a layer's step, 2048 tokens: {part}, {attention}": f"{found:.1%}"
            for (part, attention), found in work.items()
        }
        | halves,
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


@answers("C47")
def checkpointing_auto() -> Finding:
    found = {
        value: switched_on(trained(gradient_checkpointing=value)) for value in ("auto", "no", False)
    }
    fitted = {share: _fitted(share) for share in (1, 0.8, 0.5)}
    return Finding(
        own=(yes('"auto" leaves it off where there is room', found["auto"] == found[False]),),
        beyond=(
            yes('"no" leaves it off', found["no"] == found[False]),
            yes('every="fit" leaves it off where there is room', fitted[1] == found[False]),
        ),
        says=f"""
            fails: No code looks at the memory: any text always switches checkpointing on.
            holds: It stays off where there is room.
            why: The code only tests if the value is true, and every string with letters is
                true, even "no". This model is tiny and far from any limit. checkpoint_layers(model,
                every="fit", budget=...) predicts the step: with half the bytes that it needs,
                {fitted[0.5]} of 4 layers are recomputed.
            """,
        figures={f"gradient_checkpointing={value!r} switches on": on for value, on in found.items()}
        | {
            f'every="fit" with {share:.0%} of the bytes runs again': layers
            for share, layers in fitted.items()
        },
    )


def taken_off(what: str, tokens: int, **how) -> float:
    """The share by which moving, or another way, reduces the activations of a step, or its whole
    ``"peak"``.
    """
    size = (lambda step: step.peak.total) if what == "peak" else activations
    share = 1 - size(_predicted("fused", tokens, **how)) / size(_predicted("fused", tokens))
    # moving leaves a handful of bytes, and no share has the sign of -0
    return round(share, 4) + 0.0


@answers("C48")
def moved_activations() -> Finding:
    moving, boundaries = (
        {"offload": "activations"},
        {"checkpointing": "per-layer", "offload": "boundaries"},
    )
    crossing = _predicted("fused", 2048, **moving).offload_traffic_bytes
    inputs_crossing = _predicted("fused", 2048, **boundaries).offload_traffic_bytes
    again = SEVEN.layers * (
        layer_operations("per-layer", "fused", 2048) - layer_operations(None, "fused", 2048)
    )
    card = CARDS["A100 80GB"]
    needed = crossing / (again / (FLOPS_UTILIZATION * card.half))
    ways = {
        "moved": moving,
        "checkpointed": {"checkpointing": "per-layer"},
        "checkpointed, and their inputs moved": boundaries,
    }
    return Finding(
        own=(
            between(
                "off the activations of a 7B, 1 x 2,048",
                0.8,
                0.9,
                taken_off("activations", 2048, **moving),
                "%",
                within=0.1,
            ),
        ),
        elsewhere=(
            between(
                "off the peak of a step, all weights trained",
                0.8,
                0.9,
                taken_off("peak", 2048, **moving),
                "%",
            ),
        ),
        beyond=(Figure("over the bus, away and back", "traffic", crossing, unit="GB"),),
        says=f"""
            only if: activations are meant; the peak of a step falls only where activations
                cause it.
            fails: Moving saves a different share of the activations.
            why: One checkpoint per layer saves
                {taken_off("activations", 2048, checkpointing="per-layer"):.0%} without a bus. To be
                as fast as recomputing on an A100 at half its rated speed, a bus must carry
                {needed / GB:.0f} GB a second. Moving only the inputs of checkpointed layers sends
                {gb(inputs_crossing)} over it.
            needs: a card to measure the time; the bytes are predicted
            """,
        figures={
            (
                f"off {'its peak' if what == 'peak' else 'the activations'}, 1 x {tokens}, {name}"
            ): f"{taken_off(what, tokens, **how):.1%}"
            for tokens in (2048, 8192)
            for what in ("activations", "peak")
            for name, how in ways.items()
        }
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
    return Finding(
        own=(about("70B, 32 x 2,048 tokens", 40 * GB, cached, "GB"),),
        where=(
            about(
                "32 x 4,096 tokens",
                40 * GB,
                accounting.kv_cache_bytes(shape, rows, 2 * tokens),
                "GB",
            ),
            more("cache / weights, no shared heads", unshared / weights),
        ),
        says=f"""
            only if: the prompt has 2k tokens, too; at a batch of 32, the cache exceeds the
                weights only in models without shared heads.
            fails: Neither 2k tokens nor 4k tokens take that much.
            holds: 2k tokens take that much.
            why: A 70B Llama keeps {per_token:,} bytes a token in bf16, since 64 query heads
                share 8 heads of keys and values. Its weights take {gb(weights)}: a cache of that
                size needs {-(-weights // (per_token * tokens))} rows of 2,048 tokens.
            """,
        figures={
            "bytes of keys and values a token, bf16": per_token,
            "cache of 32 x 2048 tokens, bf16": cached,
            "the same in bf16 without shared heads": unshared,
            "weights in bf16": weights,
            "rows of 2048 tokens that weigh as much as the weights, count": -(
                -weights // (per_token * tokens)
            ),
        },
    )
