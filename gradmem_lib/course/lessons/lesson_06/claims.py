"""Lesson 06's answers: what the techniques need together, on which card, and which of them comes
first.

Needs are predicted for a CUDA card: exact live bytes of the second and later steps. The bytes that
the allocator, cuBLAS and the driver add are left out, so that "does not fit" is certain. Times are
estimated from counts, not measured.
"""

from bisect import bisect_right

from ....model.configs import find_model
from ....planning.cards import CARDS
from ....planning.cost import seconds_per_token
from ....planning.work import LORA_RANK, count
from ....prediction.predict import predict
from ....training.recipe import Recipe
from ....units import GiB, MiB
from ...ledger import Finding, answers, bert_large
from ...ledger.finding import Figure, about, between, each, fits, gb, less, more
from ...material import accounting
from ...material.shapes import SHAPES, Shape
from ..shared.claim_runs import peak_of, predicted, resident, trio


@answers("C23")
def gpt2_xl() -> Finding:
    shape = SHAPES["GPT-2 XL"]
    kept = resident(shape, "bf16")
    need, saved = {}, {}
    for rows, how in ((32, None), (32, "per-layer"), (8, "per-layer")):
        peak = peak_of(shape, rows, 1024, checkpointing=how, accumulated=rows == 8)
        need[rows, how], saved[rows, how] = peak.total, peak.by_category["activations"]
    whole, checkpointed, both = need.values()
    return Finding(
        own=(
            about("GPT-2 1.5B, 32 x 1024", "60 GB", whole, within=0.2),
            about("checkpointed", "32 GB", checkpointed, within=0.2),
            about("8 rows at a time, too", "22 GB", both, within=0.2),
        ),
        says=f"""
            fails: Without any technique, the batch needs almost three times as much; the other
                two are about right.
            holds: All three are about right, in bf16.
            why: The figures are for pure bf16 with fused attention, where the claimed ones come
                nearest. The first has {gb(saved[32, None])} of activations, the second
                {gb(saved[32, "per-layer"])}. Weights, gradients and states take {gb(kept)}; under
                autocast they take twice as much.
            """,
        figures={"weights, gradients and Adam states, bf16": kept}
        | each("{} rows at a time, checkpointing {}: closed-form peak", need)
        | each("{} rows at a time, checkpointing {}: activations at the peak", saved),
    )


# A family of Llamas that grows in width and depth alike, as published ones do: 128 features a head,
# 2.7 x in the MLP.
def _llama(layers: int) -> Shape:
    hidden = 128 * layers
    return Shape(
        f"{layers} layers", 32000, hidden, layers, layers, layers, -(-hidden * 8 // 3 // 128) * 128
    )


def _largest(rows: int, checkpointing: str | None, budget: int, accumulated: bool = False) -> int:
    """Parameters of the largest of the family whose step fits, by the closed forms, with ``rows``
    of 1,024 tokens in one piece or, ``accumulated``, in the later micro-batches.
    """
    how = "autocast-bf16", checkpointing

    def need(layers: int) -> int:
        return peak_of(_llama(layers), rows, 1024, *how, accumulated=accumulated).total

    return _llama(bisect_right(range(1, 64), budget, key=need)).parameters


@answers("C25")
def larger_models() -> Finding:
    found = {}
    for size in (24, 40, 80):
        for rows in (1, 8, 32):
            alone = _largest(rows, None, size * GiB)
            together = _largest(min(rows, 8), "per-layer", size * GiB, accumulated=rows > 8)
            found[size, rows] = alone / 1e6, together / 1e6, together / alone
    return Finding(
        own=(
            between("larger model, 32 x 1024 as 4 x 8, 40 GiB", "4 to 10×", found[40, 32][2]),
            between("the same, 80 GiB", "4 to 10×", found[80, 32][2]),
        ),
        elsewhere=between("larger model, one row, 80 GiB", "4 to 10×", found[80, 1][2]),
        says=f"""
            only if: the batch is large, as its own 32 in 4 micro-batches of 8; one row gains
                nothing.
            fails: Its own batch of 32 in 4 micro-batches of 8 gives another factor.
            why: Both techniques shrink only activations. With or without them, weights,
                gradients and states set the limit at 16 bytes a parameter. On 24 GiB the factor is
                {found[24, 32][2]:.1f}. All factors are closed forms for Llamas of many sizes, in
                mixed precision.
            """,
        figures=each(
            "{} GiB, {} x 1024: millions of parameters, neither / both",
            found,
            "{:,.0f} / {:,.0f}, {:.1f} times",
        ),
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
    plain = predicted("Llama-2-13B", 1, 2048, **qlora).peak.total
    checkpointed = predicted("Llama-2-13B", 1, 2048, checkpointing="per-layer", **qlora).peak.total
    wider = _int8_base(shape)
    return Finding(
        own=about("13B, all weights, before activations", "35 GB", all_weights),
        where=(
            about("LoRA, 8-bit base", "35 GB", plain + wider),
            about("the same, checkpointed", "15 GB", checkpointed + wider),
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
            "weights, gradients and Adam states in bf16": all_weights,
            "QLoRA, rank 16, 1 x 2048: peak": plain,
            "the same, each layer checkpointed": checkpointed,
            "the base in 8 bits instead of 4: more bytes": wider,
        },
    )


@answers("C54")
def seven_billion_on_24() -> Finding:
    shape = SHAPES["Llama-2-7B"]
    both = 2 * 2 * shape.parameters
    all_weights = resident(shape, "bf16")
    lora = trio(lora_rank=LORA_RANK).peak.total
    one_row = {"optimizer": "adafactor-torch", "in_backward": True, "checkpointing": "per-layer"}
    backward = predicted("Llama-2-7B", 1, 2048, **one_row).peak.total
    card = CARDS["RTX 4090 24GB"].nbytes
    return Finding(
        own=fits("7B, weights and gradients alone", "to fit 24 GB", card, both),
        where=fits("the trio around LoRA", "to fit 24 GB", card, lora),
        beyond=fits("Adafactor in backward, no accumulation", "to fit 24 GB", card, backward),
        says=f"""
            only if: adapters are trained; weights and gradients alone exceed the card.
            fails: Even adapters alone exceed the card.
            holds: Weights and gradients leave room on the card.
            why: Accumulation keeps the gradients, so no micro-batch is small enough. With
                AdamW's states, the sum is {gb(all_weights)}. All weights can be trained if
                Adafactor steps in backward and frees each gradient at once.
            needs: a 24 GB card to see it run; the bytes are predicted
            """,
        figures={
            "an RTX 4090 has (as the driver says)": card,
            "bf16, checkpointing, accumulation of rows of 2048, LoRA of rank 16: peak": lora,
            "1 x 2048, Adafactor in backward, checkpointing: peak": backward,
        },
    )


@answers("C55")
def seven_billion_on_80() -> Finding:
    bf16 = trio(4096).peak.total
    mixed = resident(SHAPES["Llama-2-7B"], "autocast-bf16")
    card = CARDS["A100 80GB"].nbytes
    return Finding(
        own=fits("7B loaded in bf16", "to fit 80 GB", card, bf16),
        elsewhere=fits("7B loaded in float32", "to fit 80 GB", card, mixed),
        says="""
            only if: the weights are loaded in bf16, as in its own code: then Adam's states are,
                too.
            fails: Even if the model is loaded in bf16, it exceeds the card.
            why: bf16=True alone is not enough: for weights in float32 it means autocast, and
                weights, gradients and states stay in float32.
            needs: an 80 GB card to see it run; the bytes are predicted
            """,
        figures={
            "bf16 throughout, rows of 4096 accumulated, checkpointing: peak": bf16,
            "an A100 80GB has (as the driver says)": card,
        },
    )


def _times(seq_len: int) -> dict[str, float]:
    """Estimated times of a token of Llama-3.2-1B on an RTX 4090, one row of 16 at a time and with
    checkpoints, relative to the whole batch at once.
    """
    work, card = count(find_model("Llama-3.2-1B")[0]), CARDS["RTX 4090 24GB"]

    def seconds(rows: int, **changes) -> float:
        recipe = Recipe(precision="autocast-bf16", optimizer="adamw-fused", **changes)
        return seconds_per_token(work, recipe, card, rows, seq_len)

    return {
        "accumulated": seconds(1, accumulation=16) / seconds(16),
        "checkpointed": seconds(16, checkpointing="per-layer") / seconds(16),
    }


@answers("C57")
def which_first() -> Finding:
    long, short = _times(2048), _times(64)
    return Finding(
        own=more(
            "time, micro-batches / checkpoints, 2k tokens",
            long["accumulated"] / long["checkpointed"],
        ),
        where=more("the same, 64 tokens a row", short["accumulated"] / short["checkpointed"]),
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
        figures=each(
            "Llama-3.2-1B, 16 x 2048, {}: estimated time / whole batch at once", long, "{:.2f}"
        )
        | each("Llama-3.2-1B, 16 x 64, {}: estimated time / whole batch at once", short, "{:.2f}"),
    )


@answers("C58")
def fit_table() -> Finding:
    saved = {}
    for rows, seq_len in ((1, 2048), (16, 2048), (1, 8192)):
        for how in (None, "per-layer"):
            parts = accounting.model_activations(
                SHAPES["Llama-3.2-1B"], rows, seq_len, checkpointing=how
            )
            saved[rows, seq_len, how] = parts["blocks"]
    peak = {}
    for precision in ("float32", "autocast-bf16", "bf16"):
        peak[precision] = peak_of(SHAPES["GPT-2 XL"], 8, 1024, precision, "per-layer").total
    cut = saved[1, 2048, None] / saved[16, 2048, None]
    long, again = saved[1, 8192, None], saved[1, 8192, "per-layer"]
    return Finding(
        own=(
            less("activations left by either, at most", max(cut, again / long)),
            less("checkpointed GPT-2, mixed / float32", peak["autocast-bf16"] / peak["float32"]),
        ),
        where=less("the same, all in bf16 / float32", peak["bf16"] / peak["float32"]),
        says=f"""
            only if: mixed precision means 16-bit weights and states: its own GPT-2,
                checkpointed in micro-batches, gains nothing from autocast.
            holds: Each of the three does what it is meant for.
            fails: One of the three does not do what it is meant for.
            why: Under autocast, weights, gradients and states stay in float32, and 16-bit
                copies of the weights are added. The other two are right. In Llama-3.2-1B, 1 row
                instead of 16 leaves 1/{1 / cut:.0f} of the saved bytes. If one row is still too
                much, checkpointing reduces {gb(long)} to {gb(again)} at 8,192 tokens.
            """,
        figures=each("{} x {}: saved in blocks, checkpointing {}", saved)
        | each("GPT-2 1.5B, 8 x 1024, checkpointed, {}: closed-form peak", peak),
    )


def _published(name: str) -> bert_large.Row:
    (found,) = (row for row in bert_large.rows() if row.run.name == name)
    return found


def _near(what: str, row: bert_large.Row, mib: float) -> Figure:
    return about(what, f"{row.run.mib:,} MB", mib * MiB, within=0.01)


@answers("C13")
def bert_large_accumulated() -> Finding:
    whole, cut = _published("batch 4"), _published("1 x 4")
    return Finding(
        own=(
            _near("BERT-large, batch 4, replayed", whole, whole.total),
            _near("1 x 4, replayed", cut, cut.total),
        ),
        elsewhere=_near("BERT-large, batch 4, today's step", whole, whole.parts["today"]),
        says=f"""
            only if: the step runs on the software of its year, and all that the card held is
                counted; today's step needs less.
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
    )


def _bert_floor() -> int:
    return 4 * 4 * sum(p.numel() for p in bert_large.model().parameters())


@answers("C14")
def bert_large_checkpointed() -> Finding:
    cut, row = _published("1 x 4"), _published("1 x 4, checkpointing")
    floor = _bert_floor()
    remain = row.total - floor / MiB - row.parts["context"]
    today = row.parts["today"] + row.parts["context"]
    return Finding(
        own=_near("BERT-large checkpointed, replayed", row, row.total),
        elsewhere=_near("BERT-large checkpointed, tensors alone", row, row.parts["today"]),
        says=f"""
            only if: the driver's context is counted, as in C13.
            fails: A replay with the software of January 2022 gives another figure.
            why: In the replay, {floor / MiB:,.0f} MiB are weights, gradients and states, and
                {row.parts["context"]:,.0f} MiB are the context. Checkpointing affects only the
                other {remain:,.0f} MiB. Today's tensors and this context come to {today:,.0f} MiB:
                here, unlike in C13, the software of January 2022 matters little. The published
                time is
                {row.run.seconds / cut.run.seconds - 1:.0%} longer than with accumulation alone.
            needs: a card for the time; the bytes are replayed
            """,
        figures={"weights, gradients and Adam states in float32": floor},
    )


def _bert_peak(rows: int, attention: str = "eager", **changes) -> int:
    """A step's peak in float16's autocast."""
    recipe = Recipe(precision="autocast-fp16", attention=attention, **changes)
    batch = bert_large.batch(rows)
    return predict(bert_large.config(), batch=batch, recipe=recipe, target="cuda").peak.total


@answers("C24")
def bert_large_16_rows() -> Finding:
    # the second micro-batch of 4 rows has all that a third and fourth would have
    needs = {
        "16 x 512, fp16, eager": _bert_peak(16),
        "4 x 4, fp16, eager": _bert_peak(8, accumulation=2),
        "4 x 4, checkpointed, fp16, eager": _bert_peak(
            8, accumulation=2, checkpointing="per-layer"
        ),
    }
    whole, cut, checkpointed = needs.values()
    fused, floor = _bert_peak(8, "fused", accumulation=2), _bert_floor()
    whole_fused = _bert_peak(16, "fused")
    return Finding(
        own=(
            about("BERT-large, 16 x 512, fp16", "24 GB", whole, within=0.2),
            about("BERT-large, 4 x 4", "8 GB", cut, within=0.2),
            about("the same, checkpointed", "5 GB", checkpointed, within=0.2),
        ),
        says=f"""
            fails: The first figure is right in mixed precision with eager attention; the other
                two need at least a quarter more.
            holds: All three are about right in mixed precision.
            why: With fused attention, 4 x 4 needs {gb(fused)}, as claimed,
                but then 16 rows keep no scores either, and need {gb(whole_fused)}. Weights,
                gradients and Adam's states alone take {gb(floor)}, so AdamW cannot reach 5 GB. By
                C13's 14,949 MB for 4 rows in float32, 16 rows need more than 24 GB.
            needs: a card to see it run; the bytes are predicted
            """,
        figures=each("{} attention: peak", needs)
        | {
            "4 x 4, fp16, fused attention: peak": fused,
            "weights, gradients and Adam states in float32": floor,
        },
    )
