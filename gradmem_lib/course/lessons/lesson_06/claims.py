"""Lesson 06's answers: what the techniques need together, on which card, and which of them comes
first.

Needs are predicted for a CUDA card: exact live bytes of the second and later steps. The bytes that
the allocator, cuBLAS and the driver add are left out, so that "does not fit" is certain. Times are
estimated from counts, not measured.
"""

from __future__ import annotations

from dataclasses import replace

from ....planning.cards import CARDS
from ....planning.cost import seconds_per_token
from ....planning.models import find_model
from ....planning.work import LORA_RANK, count
from ....prediction.predict import predict
from ....training.recipe import Recipe
from ....units import GiB, MiB
from ...ledger import Finding, answers, bert_large
from ...ledger.finding import GB, Figure, Figures, about, between, fits, gb, less, more
from ...material import accounting
from ...material.shapes import SHAPES, Shape
from ..shared.claim_runs import peak_of, predicted, recipe, resident

CARD_24 = 24 * GiB


@answers("C23")
def gpt2_xl() -> Finding:
    shape = SHAPES["GPT-2 XL"]
    parts = accounting.resident_bytes(shape)
    figures: Figures = {"weights, gradients and Adam states, bf16": sum(parts.values())}
    need = {
        (rows, how): peak_of(shape, rows, 1024, checkpointing=how)
        for rows, how in ((32, None), (32, "per-layer"), (8, "per-layer"))
    }
    for (rows, how), found in need.items():
        figures[f"{rows} rows, checkpointing {how or 'off'}: closed-form peak ({found.moment})"] = (
            found.total
        )
    # From the second micro-batch on, all gradients are there at this moment, too.
    cut = need[8, "per-layer"]
    both = cut.total - cut.by_category["gradients"] + parts["gradients"]
    figures["8 rows at a time, gradients of earlier ones there: closed-form peak"] = both
    return Finding(
        own=(
            about("GPT-2 1.5B, 32 x 1024", 60 * GB, need[32, None].total, "GB", within=0.2),
            about("checkpointed", 32 * GB, need[32, "per-layer"].total, "GB", within=0.2),
            about("8 rows at a time, too", 22 * GB, both, "GB", within=0.2),
        ),
        says=f"""
            fails: Without any technique, the batch needs almost three times as much.
            holds: All three are about right, in bf16.
            why: The figures are for pure bf16 with fused attention, where the claimed ones come
                nearest. Here weights, gradients and states take {gb(sum(parts.values()))}; under
                autocast they take twice as much.
            """,
        figures=figures,
    )


# A family of Llamas that grows in width and depth alike, as published ones do: 128 features a head,
# 2.7 x in the MLP.
def _llama(layers: int) -> Shape:
    hidden = 128 * layers
    return Shape(
        f"{layers} layers", 32000, hidden, layers, layers, layers, -(-hidden * 8 // 3 // 128) * 128
    )


def _largest(tokens: tuple[int, int], checkpointing: str | None, budget: int) -> Shape:
    """The largest of the family whose step of ``tokens`` (rows, each so long) in one piece fits, by
    the closed forms.
    """
    fits = None
    for layers in range(1, 64):
        shape = _llama(layers)
        need = peak_of(shape, *tokens, "autocast-bf16", checkpointing)
        if need.total > budget:
            break
        fits = shape
    return fits


@answers("C25")
def larger_models() -> Finding:
    figures: Figures = {}
    times = {}
    for card in (CARD_24, 40 * GiB, 80 * GiB):
        for rows in (1, 8, 32):
            micro = min(rows, 8)
            together = _largest((micro, 1024), "per-layer", card).parameters
            alone = _largest((rows, 1024), None, card).parameters
            times[card, rows] = together / alone
            figures[f"{card // GiB} GiB, {rows} x 1024: millions of parameters, neither / both"] = (
                f"{alone / 1e6:,.0f} / {together / 1e6:,.0f}, {times[card, rows]:.1f} times"
            )
    return Finding(
        own=(
            between(
                "larger model, 32 x 1024 as 4 x 8, 40 GiB", 4, 10, times[40 * GiB, 32], "times"
            ),
            between("the same, 80 GiB", 4, 10, times[80 * GiB, 32], "times"),
        ),
        elsewhere=(between("larger model, one row, 80 GiB", 4, 10, times[80 * GiB, 1], "times"),),
        says=f"""
            only if: batch and card are large, as its own 32 in 4 micro-batches of 8; a small
                batch gains nothing.
            fails: Its own batch of 32 in 4 micro-batches of 8 gives another factor.
            why: Both techniques shrink only activations. With or without them, weights,
                gradients and states set the limit at 16 bytes a parameter. On 24 GiB the factor is
                {times[CARD_24, 32]:.1f} (closed forms, mixed precision, a family of Llamas).
            """,
        figures=figures,
    )


def _int8_base(shape: Shape) -> int:
    """How many more bytes frozen linear layers take in 8 bits (a float32 scale for each row) than
    in 4 (``quantized``'s layout).
    """
    weights = shape.layers * sum(shape.matrices.values())
    rows = shape.layers * (3 * shape.hidden + 2 * shape.kv_hidden + 2 * shape.intermediate)
    return round(weights * (1 - 0.5 - 1 / 64 - 4 / (64 * 256))) + 4 * rows


@answers("C51")
def thirteen_billion() -> Finding:
    shape = SHAPES["Llama-2-13B"]
    all_weights = resident(shape, "bf16")
    qlora = {"lora_rank": LORA_RANK, "quantized_base": True}
    plain = predicted("Llama-2-13B", 1, 2048, recipe(**qlora)).peak.total
    checkpointed = predicted(
        "Llama-2-13B", 1, 2048, recipe(**qlora, checkpointing="per-layer")
    ).peak.total
    wider = _int8_base(shape)
    return Finding(
        own=(about("13B, all weights, before activations", 35 * GB, all_weights, "GB"),),
        where=(
            about("LoRA, 8-bit base", 35 * GB, plain + wider, "GB"),
            about("the same, checkpointed", 15 * GB, checkpointed + wider, "GB"),
        ),
        says=f"""
            only if: adapters are trained on an 8-bit base; training all weights needs far more.
            fails: Neither all weights nor adapters on an 8-bit base need that much.
            holds: All weights can be trained in that memory.
            why: Checkpointing does not shrink weights, gradients and states. With a 4-bit base,
                1 x 2,048 tokens need {gb(plain)} without checkpoints and {gb(checkpointed)} with
                them; the figures for 8 bits add the extra bytes of the larger base.
            needs: a card to see it run; the bytes are predicted
            """,
        figures={
            "weights in bf16": 2 * shape.parameters,
            "weights, gradients and Adam states in bf16": all_weights,
            "an A100 40GB has (as the driver says)": CARDS["A100 40GB"].nbytes,
            "QLoRA, rank 16, 1 x 2048: peak": plain,
            "the same, each layer checkpointed": checkpointed,
            "the base in 8 bits instead of 4: more bytes": wider,
        },
    )


@answers("C54")
def seven_billion_on_24() -> Finding:
    shape = SHAPES["Llama-2-7B"]
    both = 2 * 2 * shape.parameters
    trio = {"checkpointing": "per-layer", "accumulation": 2}
    all_weights = resident(shape, "bf16")
    lora = predicted("Llama-2-7B", 2, 2048, recipe(**trio, lora_rank=LORA_RANK))
    backward = predicted(
        "Llama-2-7B",
        1,
        2048,
        recipe(optimizer="adafactor-torch", in_backward=True, checkpointing="per-layer"),
    )
    card = CARDS["RTX 4090 24GB"].nbytes
    return Finding(
        own=(fits("7B, weights and gradients alone", "to fit 24 GB", card, both),),
        beyond=(
            fits("the trio around LoRA", "to fit 24 GB", card, lora.peak.total),
            fits(
                "Adafactor in backward, no accumulation", "to fit 24 GB", card, backward.peak.total
            ),
        ),
        says=f"""
            fails: Weights and gradients alone exceed the card; with LoRA, the same three fit.
            holds: Weights and gradients leave room on the card.
            why: Accumulation keeps the gradients, so no micro-batch is small enough. With
                AdamW's states, the sum is {gb(all_weights)}. All weights can be trained if
                Adafactor steps in backward and frees each gradient at once.
            needs: a 24 GB card to see it run; the bytes are predicted
            """,
        figures={
            "weights and gradients in bf16": both,
            "an RTX 4090 has (as the driver says)": card,
            "weights, gradients and Adam states in bf16": all_weights,
            (
                "bf16, checkpointing, accumulation of rows of 2048, LoRA of rank 16: peak"
            ): lora.peak.total,
            "1 x 2048, Adafactor in backward, checkpointing: peak": backward.peak.total,
        },
    )


@answers("C55")
def seven_billion_on_80() -> Finding:
    trio = {"checkpointing": "per-layer", "accumulation": 2}
    bf16 = predicted("Llama-2-7B", 2, 4096, recipe(**trio))
    mixed = resident(SHAPES["Llama-2-7B"], "autocast-bf16")
    card = CARDS["A100 80GB"].nbytes
    return Finding(
        own=(fits("7B loaded in bf16", "to fit 80 GB", card, bf16.peak.total),),
        elsewhere=(fits("7B loaded in float32", "to fit 80 GB", card, mixed),),
        says="""
            only if: the weights are loaded in bf16, as in its own code: then Adam's states are,
                too.
            fails: Even if the model is loaded in bf16, it exceeds the card.
            why: bf16=True alone is not enough: for weights in float32 it means autocast, and
                weights, gradients and states stay in float32.
            needs: an 80 GB card to see it run; the bytes are predicted
            """,
        figures={
            "bf16 throughout, rows of 4096 accumulated, checkpointing: peak": bf16.peak.total,
            "float32 weights, gradients and states": mixed,
            "an A100 80GB has (as the driver says)": card,
        },
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
    found = {
        name: seconds_per_token(work, way, card, micro, seq_len)
        for name, (way, micro) in ways.items()
    }
    return {name: seconds / found["whole"] for name, seconds in found.items()}


@answers("C57")
def which_first() -> Finding:
    long, short = _times("Llama-3.2-1B", 2048, 16), _times("Llama-3.2-1B", 64, 16)
    figures: Figures = {}
    for seq_len, found in ((2048, long), (64, short)):
        for way in ("accumulated", "checkpointed"):
            figures[
                f"Llama-3.2-1B, 16 x {seq_len}, {way}: estimated time / whole batch at once"
            ] = f"{found[way]:.2f}"
    shape = SHAPES["Llama-3.2-1B"]
    for rows, checkpointing in ((16, None), (1, None), (16, "per-layer"), (1, "per-layer")):
        need = peak_of(shape, rows, 2048, "autocast-bf16", checkpointing)
        figures[
            f"Llama-3.2-1B, {rows} x 2048, checkpointing {checkpointing or 'off'}: closed-form peak"
        ] = need.total
    at_2048 = long["accumulated"] / long["checkpointed"]
    at_64 = short["accumulated"] / short["checkpointed"]
    return Finding(
        own=(more("time, micro-batches / checkpoints, 2k tokens", at_2048),),
        where=(more("the same, 64 tokens a row", at_64),),
        says=f"""
            only if: rows are so short that a micro-batch leaves the card idle, or one row does
                not fit; otherwise micro-batches cost less time.
            holds: Checkpoints cost less time than micro-batches at 2,048 tokens a row.
            fails: Micro-batches cost less time even where rows are short.
            why: By estimate, one row of 2,048 tokens at a time costs
                {long["accumulated"] - 1:.0%} more time, and checkpointing costs
                {long["checkpointed"] - 1:.0%}. At 64 tokens a row, these cost
                {short["accumulated"] - 1:.0%} and {short["checkpointed"] - 1:.0%}. Where one row
                does not fit, no micro-batch is small enough.
            """,
        figures=figures,
    )


@answers("C58")
def fit_table() -> Finding:
    figures: Figures = {}
    base = SHAPES["Llama-3.2-1B"]
    deep = replace(base, name="four times as deep", layers=4 * base.layers)
    saved = {}
    for name, shape, rows, seq_len in (
        ("1 x 2048", base, 1, 2048),
        ("16 x 2048", base, 16, 2048),
        ("1 x 8192", base, 1, 8192),
        ("1 x 2048, four times as deep", deep, 1, 2048),
    ):
        for how in (None, "per-layer"):
            parts = accounting.model_activations(shape, rows, seq_len, checkpointing=how)
            saved[name, how] = parts["blocks"]
            figures[f"{name}: saved in blocks, checkpointing {how or 'off'}"] = parts["blocks"]
    peak = {}
    for precision in ("float32", "autocast-bf16", "bf16"):
        peak[precision] = peak_of(SHAPES["GPT-2 XL"], 8, 1024, precision, "per-layer").total
        figures[f"GPT-2 1.5B, 8 x 1024, checkpointed, {precision}: closed-form peak"] = peak[
            precision
        ]
    cut = saved["1 x 2048", None] / saved["16 x 2048", None]
    long = max(
        saved[name, "per-layer"] / saved[name, None]
        for name in ("1 x 8192", "1 x 2048, four times as deep")
    )
    return Finding(
        own=(
            less("left by micro-batches, by checkpoints", max(cut, long)),
            less("checkpointed GPT-2, mixed / float32", peak["autocast-bf16"] / peak["float32"]),
        ),
        where=(less("the same, all in bf16 / float32", peak["bf16"] / peak["float32"]),),
        says=f"""
            only if: mixed precision means 16-bit weights and states: its own GPT-2,
                checkpointed in micro-batches, gains nothing from autocast.
            holds: Each of the three does what it is meant for.
            fails: One of the three does not do what it is meant for.
            why: Under autocast, weights, gradients and states stay in float32, and 16-bit
                copies of the weights are added. The other two are right: 1 row instead of 16 leaves
                1/{1 / cut:.0f} of the saved bytes, and where one row is too long or the model too
                deep, checkpointing reduces {gb(saved["1 x 8192", None])} to
                {gb(saved["1 x 8192", "per-layer"])} at 8,192 tokens.
            """,
        figures=figures,
    )


def _published(*names: str) -> tuple[Figures, list[bert_large.Row]]:
    found = [row for name in names for row in bert_large.rows() if row.run.name == name]
    figures: Figures = {}
    for row in found:
        name = row.run.name
        figures[f"{name}: published / explained, MiB"] = f"{row.run.mib:,} / {row.total:,.0f}"
        figures[f"{name}: predicted peak of a step with today's software"] = round(
            row.parts["today"] * MiB
        )
        figures[f"{name}: 512 rows / published seconds, published rows a second"] = (
            f"{bert_large.SAMPLES / row.run.seconds:.2f}, {row.run.per_second:.2f}"
        )
    return figures, found


def _explained(what: str, row: bert_large.Row) -> Figure:
    return about(what, row.run.mib * MiB, row.total * MiB, "MB", within=0.01)


def _today(what: str, row: bert_large.Row) -> Figure:
    return about(what, row.run.mib * MiB, row.parts["today"] * MiB, "MB", within=0.01)


@answers("C13")
def bert_large_accumulated() -> Finding:
    figures, (whole, cut) = _published("batch 4", "1 x 4")
    return Finding(
        own=(
            _explained("BERT-large, batch 4, replayed", whole),
            _explained("1 x 4, replayed", cut),
        ),
        elsewhere=(_today("BERT-large, batch 4, today's step", whole),),
        says=f"""
            only if: the software is that of January 2022, with all that its V100 held; today's
                step needs less.
            fails: A replay with the software of January 2022 gives other figures.
            why: The published MB are MiB. A replay without a card gives {whole.total:,.0f} and
                {cut.total:,.0f} MiB, with the driver's context and the allocator's idle blocks.
                {whole.parts["zeroed"] + whole.parts["softmax"]:,.0f} MiB of the first figure are
                gradients that were zeroed rather than freed, and inputs that softmax no longer
                keeps. Today's step needs {whole.parts["today"]:,.0f} and {cut.parts["today"]:,.0f}
                MiB for tensors. Accumulation took {cut.run.seconds / whole.run.seconds - 1:.0%}
                longer.
            needs: a card for the times; the bytes are replayed
            """,
        figures=figures,
    )


@answers("C14")
def bert_large_checkpointed() -> Finding:
    figures, (cut, row) = _published("1 x 4", "1 x 4, checkpointing")
    floor = 4 * 4 * sum(p.numel() for p in bert_large.model().parameters())
    figures["weights, gradients and Adam states in float32"] = floor
    remain = row.total - floor / MiB - row.parts["context"]
    return Finding(
        own=(_explained("BERT-large, 1 x 4 checkpointed, replayed", row),),
        elsewhere=(_today("BERT-large, checkpointed, today's step", row),),
        says=f"""
            only if: the software is that of January 2022, with the driver's context, as in C13.
            fails: A replay with the software of January 2022 gives another figure.
            why: In the replay, {floor / MiB:,.0f} MiB are weights, gradients and states, and
                {row.parts["context"]:,.0f} MiB are the context. Checkpointing affects only the
                other {remain:,.0f} MiB. The published time is
                {row.run.seconds / cut.run.seconds - 1:.0%} longer than with accumulation alone.
            needs: a card for the time; the bytes are replayed
            """,
        figures=figures,
    )


@answers("C24")
def bert_large_16_rows() -> Finding:
    needs = {}
    # the second micro-batch of 4 rows has all that a third and fourth would have
    four = {"accumulation": 2}
    ways = {
        "16 x 512": {},
        "4 x 4": four,
        "4 x 4, checkpointed": {**four, "checkpointing": "per-layer"},
    }
    for attention, names in (("eager", ways), ("fused", ("4 x 4",))):
        for way in names:
            way_recipe = Recipe(precision="autocast-fp16", attention=attention, **ways[way])
            rows = 4 * way_recipe.accumulation if ways[way] else 16
            found = predict(
                bert_large.config(), batch=bert_large.batch(rows), recipe=way_recipe, target="cuda"
            )
            needs[attention, way] = found.peak.total
    floor = 4 * 4 * sum(p.numel() for p in bert_large.model().parameters())
    whole, cut, checkpointed = (needs["eager", way] for way in ways)
    return Finding(
        own=(
            about("BERT-large, 16 x 512, fp16", 24 * GB, whole, "GB", within=0.2),
            about("BERT-large, 4 x 4", 8 * GB, cut, "GB", within=0.2),
            about("the same, checkpointed", 5 * GB, checkpointed, "GB", within=0.2),
        ),
        says=f"""
            fails: The first figure is right in mixed precision with eager attention; the other
                two need at least a quarter more.
            holds: All three are about right in mixed precision.
            why: With fused attention, 4 x 4 needs {gb(needs["fused", "4 x 4"])}, as claimed,
                but then 16 rows keep no scores either. Weights, gradients and Adam's states alone
                take {gb(floor)}, so AdamW cannot reach 5 GB. By C13's 14,949 MB for 4 rows in
                float32, 16 rows need more than 24 GB.
            needs: a card to see it run; the bytes are predicted
            """,
        figures={
            f"{way}, fp16, {attention} attention: peak": n for (attention, way), n in needs.items()
        }
        | {"weights, gradients and Adam states in float32": floor},
    )
