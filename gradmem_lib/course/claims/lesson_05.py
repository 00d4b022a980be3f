"""Lesson 05's answers: what the techniques need together, on which card, and which of them comes first.

Needs are predicted for a CUDA card: live bytes of the second and later steps, exact; what the allocator, cuBLAS and the driver add
is left out, so that "does not fit" is certain. Times are counted, not measured.
"""

from __future__ import annotations

from functools import cache

from ...planning.cards import CARDS
from ...planning.cost import LORA_RANK, count, seconds_per_token
from ...planning.models import find_model
from ...prediction.predict import Prediction, predict
from ...techniques import accounting
from ...techniques.shapes import SHAPES, Shape
from ...training.recipe import Recipe
from ...units import GiB, MiB
from . import Finding, answers, bert_large
from .lesson_01 import gb

CARD_24 = 24 * GiB


def recipe(**changes) -> Recipe:
    return Recipe(**({"precision": "bf16", "optimizer": "adamw-fused"} | changes))


@cache
def predicted(model: str, rows: int, seq_len: int, recipe: Recipe) -> Prediction:
    return predict(find_model(model)[0], batch_size=rows, seq_len=seq_len, recipe=recipe, target="cuda")


def activations(prediction: Prediction) -> int:
    """The most bytes of activations at any moment."""
    return max(prediction.timeline.by_category["activations"])


@answers("C23")
def gpt2_xl() -> Finding:
    mixed = {"precision": "autocast-bf16"}
    whole = predicted("GPT-2 XL", 32, 1024, recipe(**mixed))
    checkpointed = predicted("GPT-2 XL", 32, 1024, recipe(**mixed, checkpointing="per-layer"))
    both = predicted("GPT-2 XL", 16, 1024, recipe(**mixed, checkpointing="per-layer", accumulation=2))
    resident = accounting.resident_bytes(SHAPES["GPT-2 XL"], "autocast-bf16", "adamw")
    figures: dict[str, int | float | str] = {
        "weights, gradients and Adam states (float32)": sum(resident.values()),
    }
    for name, found in (
        ("32 rows", whole),
        ("32 rows, checkpointed", checkpointed),
        ("8 rows at a time, checkpointed", both),
    ):
        figures[f"{name}: activations"] = activations(found)
        figures[f"{name}: peak"] = found.peak.total
    return Finding(
        "does not hold",
        f"In mixed precision 32 x 1024 tokens leave {gb(activations(whole))} of activations, and the step peaks at "
        f"{gb(whole.peak.total)}; with checkpointing it is {gb(checkpointed.peak.total)}, with 8 rows at a time too "
        f"{gb(both.peak.total)}. No technique of the three goes below the {gb(sum(resident.values()))} that weights, gradients and "
        "states take.",
        figures,
    )


# A family of Llamas that grows in width and depth alike, as published ones do: 128 features a head, 2.7 x in the MLP.
def _llama(layers: int) -> Shape:
    hidden = 128 * layers
    return Shape(f"{layers} layers", 32000, hidden, layers, layers, layers, -(-hidden * 8 // 3 // 128) * 128)


def _largest(rows: int, checkpointing: str | None, budget: int) -> Shape:
    """The largest of the family whose step of ``rows`` x 2048 tokens in one piece fits, by the closed forms."""
    fits = None
    for layers in range(1, 64):
        shape = _llama(layers)
        need = accounting.estimate(
            shape, batch_size=rows, seq_len=2048, precision="autocast-bf16", checkpointing=checkpointing
        )
        if need.total > budget:
            break
        fits = shape
    return fits


@answers("C25")
def larger_models() -> Finding:
    figures: dict[str, int | float | str] = {}
    ratios = []
    for card in (CARD_24, 80 * GiB):
        together = _largest(1, "per-layer", card)
        for rows in (1, 8, 16):
            alone = _largest(rows, None, card)
            ratios.append(together.parameters / alone.parameters)
            figures[
                f"{card // GiB} GiB, global batch {rows} x 2048: millions of parameters, neither / both"
            ] = f"{alone.parameters / 1e6:,.0f} / {together.parameters / 1e6:,.0f}, {ratios[-1]:.1f} times"
    return Finding(
        "holds only if" if min(ratios) < 4 <= max(ratios) else "does not hold",
        "the batch is large: accumulation and checkpointing shrink activations alone, so with one row there is little to win, and "
        "weights, gradients and states set the limit at 16 bytes a parameter, with or without them. On 24 GiB (closed forms, mixed "
        f"precision, 2,048 tokens a row) both together are worth {ratios[0]:.1f} times at a global batch of 1, {ratios[1]:.1f} times "
        f"at 8 and {ratios[2]:.1f} times at 16.",
        figures,
    )


@answers("C51")
def thirteen_billion() -> Finding:
    shape = SHAPES["Llama-2-13B"]
    weights = 2 * shape.parameters
    per = accounting.resident_bytes(shape, "bf16", "adamw")
    qlora = {"lora_rank": LORA_RANK, "quantized_base": True}
    plain = predicted("Llama-2-13B", 1, 2048, recipe(**qlora))
    checkpointed = predicted("Llama-2-13B", 1, 2048, recipe(**qlora, checkpointing="per-layer"))
    return Finding(
        "does not hold",
        f"The weights alone take {gb(weights)} in bf16, and checkpointing does nothing about them; full fine-tuning keeps "
        f"{gb(sum(per.values()))} before any activation. 15 GB is possible with a base of 4 bits: then 1 x 2,048 tokens need "
        f"{gb(plain.peak.total)} without checkpoints and {gb(checkpointed.peak.total)} with them.",
        {
            "weights in bf16": weights,
            "weights, gradients and Adam states in bf16": sum(per.values()),
            "an A100 40GB has (as the driver says)": CARDS["A100 40GB"].nbytes,
            "QLoRA, rank 16, 1 x 2048: peak": plain.peak.total,
            "the same, each layer checkpointed": checkpointed.peak.total,
        },
    )


@answers("C53")
def key_value_cache() -> Finding:
    shape, tokens = SHAPES["Llama-2-70B"], 32 * 2048
    per_token = 2 * shape.layers * shape.kv_hidden * 2
    cache, weights = per_token * tokens, 2 * shape.parameters
    return Finding(
        "does not hold",
        f"A 70B Llama keeps {per_token:,} bytes a token in bf16, since 8 heads of keys and values serve 64 of queries: "
        f"{gb(cache)} for 32 x 2,048 tokens, next to {gb(weights)} of weights. It would take {-(-weights // (per_token * 2048))} such "
        f"rows to outweigh them. About 40 GB is what float32 would need; one head of keys and values for each of queries, "
        f"{gb(cache * shape.heads // shape.kv_heads)}.",
        {
            "bytes of keys and values a token, bf16": per_token,
            "cache of 32 x 2048 tokens, bf16": cache,
            "the same in float32": 2 * cache,
            "the same in bf16 without shared heads": cache * shape.heads // shape.kv_heads,
            "weights in bf16": weights,
            "rows of 2048 tokens that weigh as much as the weights, count": -(-weights // (per_token * 2048)),
        },
    )


@answers("C54")
def seven_billion_on_24() -> Finding:
    shape = SHAPES["Llama-2-7B"]
    both = 2 * 2 * shape.parameters
    trio = {"checkpointing": "per-layer", "accumulation": 2}
    resident = sum(accounting.resident_bytes(shape, "bf16", "adamw").values())
    lora = predicted("Llama-2-7B", 2, 2048, recipe(**trio, lora_rank=LORA_RANK))
    backward = predicted(
        "Llama-2-7B",
        1,
        2048,
        recipe(optimizer="adafactor-torch", in_backward=True, checkpointing="per-layer"),
    )
    return Finding(
        "does not hold",
        f"Weights and gradients alone are {gb(both)} in bf16, and the card has {gb(CARD_24)} at most: accumulation needs the gradients "
        f"to stay, so no micro-batch is small enough. With AdamW's states it is {gb(resident)}. What does fit: the same trio "
        f"around LoRA, {gb(lora.peak.total)}; or every weight, where Adafactor steps in backward and frees each gradient at once, "
        f"without accumulation, {gb(backward.peak.total)}.",
        {
            "weights and gradients in bf16": both,
            "24 GiB": CARD_24,
            "weights, gradients and Adam states in bf16": resident,
            "bf16, checkpointing, accumulation of rows of 2048, LoRA of rank 16: peak": lora.peak.total,
            "1 x 2048, Adafactor in backward, checkpointing: peak": backward.peak.total,
        },
        needs="a 24 GB card to be seen running; the bytes are predicted",
    )


@answers("C55")
def seven_billion_on_80() -> Finding:
    trio = {"checkpointing": "per-layer", "accumulation": 2}
    bf16 = predicted("Llama-2-7B", 2, 4096, recipe(**trio))
    mixed = accounting.resident_bytes(SHAPES["Llama-2-7B"], "autocast-bf16", "adamw")
    card = CARDS["A100 80GB"].nbytes
    return Finding(
        "holds only if" if bf16.peak.total < card < sum(mixed.values()) else "does not hold",
        f"Adam's states are in bf16 too, as they are when the weights were loaded in bf16: the peak is {gb(bf16.peak.total)} of the "
        f"{gb(card)} that the driver has. With float32 weights and states, which bf16=True means for a float32 checkpoint, "
        f"{gb(sum(mixed.values()))} are needed before the first activation.",
        {
            "bf16 throughout, rows of 4096 accumulated, checkpointing: peak": bf16.peak.total,
            "float32 weights, gradients and states": sum(mixed.values()),
            "an A100 80GB has (as the driver says)": card,
        },
        needs="an 80 GB card to be seen running; the bytes are predicted",
    )


def _times(model: str, seq_len: int, rows: int) -> dict[str, float]:
    """Estimated time of a token on an RTX 4090, relative to the whole batch at once."""
    work, card = count(find_model(model)[0]), CARDS["RTX 4090 24GB"]
    whole = recipe(precision="autocast-bf16")
    ways = {
        "whole": (whole, rows),
        "accumulated": (recipe(precision="autocast-bf16", accumulation=rows), 1),
        "checkpointed": (recipe(precision="autocast-bf16", checkpointing="per-layer"), rows),
    }
    found = {name: seconds_per_token(work, way, card, micro, seq_len) for name, (way, micro) in ways.items()}
    return {name: seconds / found["whole"] for name, seconds in found.items()}


@answers("C57")
def which_first() -> Finding:
    long, short = _times("Llama-3.2-1B", 2048, 16), _times("Llama-3.2-1B", 64, 16)
    figures: dict[str, int | float | str] = {}
    for seq_len, found in ((2048, long), (64, short)):
        for way in ("accumulated", "checkpointed"):
            figures[f"Llama-3.2-1B, 16 x {seq_len}, {way}: estimated time / whole batch at once"] = (
                f"{found[way]:.2f}"
            )
    shape = SHAPES["Llama-3.2-1B"]
    for rows, checkpointing in ((16, None), (1, None), (16, "per-layer"), (1, "per-layer")):
        need = accounting.estimate(
            shape, batch_size=rows, seq_len=2048, precision="autocast-bf16", checkpointing=checkpointing
        )
        figures[f"Llama-3.2-1B, {rows} x 2048, checkpointing {checkpointing or 'off'}: closed-form peak"] = (
            need.total
        )
    return Finding(
        "holds only if"
        if long["accumulated"] < long["checkpointed"] and short["accumulated"] > short["checkpointed"]
        else "does not hold",
        "one row alone is too much, or rows are so short that a micro-batch leaves the card waiting for its weights. Otherwise "
        "accumulate first: rows of 2,048 tokens one at a time cost "
        f"{long['accumulated'] - 1:.0%} more time by count, checkpointing {long['checkpointed'] - 1:.0%}; at 64 tokens a row it is "
        f"{short['accumulated'] - 1:.0%} against {short['checkpointed'] - 1:.0%}.",
        figures,
    )


@answers("C58")
def fit_table() -> Finding:
    figures: dict[str, int | float | str] = {}
    base = SHAPES["Llama-3.2-1B"]
    deep = Shape(
        "four times as deep",
        base.vocab,
        base.hidden,
        4 * base.layers,
        base.heads,
        base.kv_heads,
        base.intermediate,
        tied=True,
    )
    saved = {}
    for name, shape, rows, seq_len in (
        ("1 x 2048", base, 1, 2048),
        ("16 x 2048", base, 16, 2048),
        ("1 x 8192", base, 1, 8192),
        ("1 x 2048, four times as deep", deep, 1, 2048),
    ):
        for how in (None, "per-layer"):
            items = accounting.model_activations(shape, rows, seq_len, checkpointing=how)
            saved[name, how] = items["blocks"]
            figures[f"{name}: saved in blocks, checkpointing {how or 'off'}"] = items["blocks"]
    states = {
        p: sum(accounting.resident_bytes(base, p, "adamw").values())
        for p in ("float32", "autocast-bf16", "bf16")
    }
    for precision, nbytes in states.items():
        figures[f"weights, gradients and Adam states, {precision}"] = nbytes
    for rows in (1, 16):
        for precision in ("float32", "autocast-bf16"):
            items = accounting.model_activations(base, rows, 128, precision=precision)
            figures[f"{rows} x 128: saved for backward, {precision}"] = sum(items.values())
    batch = saved["16 x 2048", None] == 16 * saved["1 x 2048", None]
    return Finding(
        "holds only if" if batch and states["float32"] == states["autocast-bf16"] else "does not hold",
        "mixed precision is not expected to shrink the states: weights, gradients and Adam's states stay as they are, "
        f"{gb(states['autocast-bf16'])} for a 1.2B Llama, and bf16 copies of the weights join them. The other two are right: cutting 16 rows into 1 "
        "divides what is saved by 16, but no cut helps where one row is too long or the model too deep; there, checkpointing takes "
        f"{gb(saved['1 x 8192', None])} to {gb(saved['1 x 8192', 'per-layer'])} at 8,192 tokens.",
        figures,
    )


def _published(*names: str) -> tuple[dict[str, int | float | str], list[bert_large.Row]]:
    found = [row for name in names for row in bert_large.rows() if row.run.name == name]
    figures: dict[str, int | float | str] = {}
    for row in found:
        name = row.run.name
        figures[f"{name}: published / explained, MiB"] = f"{row.run.mib:,} / {row.total:,.0f}"
        figures[f"{name}: predicted peak of a step with today's software"] = round(row.parts["today"] * MiB)
        figures[f"{name}: 512 rows / published seconds, published rows a second"] = (
            f"{bert_large.SAMPLES / row.run.seconds:.2f}, {row.run.per_second:.2f}"
        )
    return figures, found


@answers("C13")
def bert_large_accumulated() -> Finding:
    figures, (whole, cut) = _published("batch 4", "1 x 4")
    near = all(abs(row.difference) < 0.01 * row.run.mib for row in (whole, cut))
    return Finding(
        "holds only if" if near else "does not hold",
        "the software is that of January 2022, and the driver's context and the allocator's idle blocks count. Replayed without a card, "
        f"the two runs come to {whole.total:,.0f} and {cut.total:,.0f} MiB, which is what the published MB are. "
        f"{whole.parts['zeroed'] + whole.parts['softmax']:,.0f} MiB of the first are gradients that were zeroed rather than freed and "
        f"inputs that softmax no longer keeps: today's step needs {whole.parts['today']:,.0f} and {cut.parts['today']:,.0f} MiB of tensors. "
        f"The time is a V100's; accumulation took {cut.run.seconds / whole.run.seconds - 1:.0%} longer.",
        figures,
        needs="a card for the times; the bytes are replayed",
    )


@answers("C14")
def bert_large_checkpointed() -> Finding:
    figures, (cut, row) = _published("1 x 4", "1 x 4, checkpointing")
    floor = 4 * 4 * sum(p.numel() for p in bert_large.model().parameters())
    figures["weights, gradients and Adam states in float32"] = floor
    left = row.total - floor / MiB - row.parts["context"]
    return Finding(
        "holds only if" if abs(row.difference) < 0.01 * row.run.mib else "does not hold",
        f"context and idle blocks count, as in C13: the replay comes to {row.total:,.0f} MiB. Of these "
        f"{floor / MiB:,.0f} are weights, gradients and states and {row.parts['context']:,.0f} the context; checkpointing works on the {left:,.0f} that remain. "
        f"Against accumulation alone, the published times are {row.run.seconds / cut.run.seconds - 1:.0%} longer, not 20 %.",
        figures,
        needs="a card for the time; the bytes are replayed",
    )


@answers("C24")
def bert_large_16_rows() -> Finding:
    figures: dict[str, int | float | str] = {}
    needs = {}
    four = {"accumulation": 2}  # the second micro-batch of 4 rows has all that a third and fourth would have
    ways = {"16 x 512": {}, "4 x 4": four, "4 x 4, checkpointed": {**four, "checkpointing": "per-layer"}}
    for attention in ("eager", "fused"):
        for way, changes in ways.items():
            if attention == "eager" and "checkpointing" in changes:
                continue  # needs more than with fused attention
            recipe = Recipe(precision="autocast-fp16", attention=attention, **changes)
            found = _bert(4 * recipe.accumulation if changes else 16, recipe).peak.total
            needs[attention, way] = found
            figures[f"{way}, fp16, {attention} attention: peak"] = found
    floor = 4 * 4 * sum(p.numel() for p in bert_large.model().parameters())
    figures["weights, gradients and Adam states in float32"] = floor
    return Finding(
        "does not hold",
        f"No setting gives all three. In mixed precision with attention as it was, 16 rows need {gb(needs['eager', '16 x 512'])}, as claimed, "
        f"but then 4 x 4 needs {gb(needs['eager', '4 x 4'])}; with fused attention 4 x 4 needs {gb(needs['fused', '4 x 4'])}, and 16 rows "
        f"only {gb(needs['fused', '16 x 512'])}. 5 GB is out of reach of AdamW: weights, gradients and states are {gb(floor)}, and with "
        f"checkpointing it is {gb(needs['fused', '4 x 4, checkpointed'])}. C13's 14,949 MB for 4 rows do not fit to 24 GB for 16 either.",
        figures,
        needs="a card to be seen running; the bytes are predicted",
    )


@cache
def _bert(rows: int, recipe: Recipe) -> Prediction:
    return predict(bert_large.config(), batch=bert_large.batch(rows), recipe=recipe, target="cuda")
