"""The ledger's sentences with a figure or an order that nobody fills in, recomputed from the
figures of the page or from code.
"""

from __future__ import annotations

import math
import re
from functools import cache
from itertools import product

import pytest
import torch
from support.paths import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import known_model
from gradmem_lib.course.ledger import bert_large
from gradmem_lib.course.lessons.lesson_03 import claims_time
from gradmem_lib.course.lessons.lesson_04 import claims as lesson_04
from gradmem_lib.course.lessons.lesson_04 import claims_price
from gradmem_lib.course.lessons.lesson_08 import claims as lesson_08
from gradmem_lib.course.lessons.shared import claim_runs
from gradmem_lib.course.material import accounting
from gradmem_lib.planning.cards import BUSES, CARDS
from gradmem_lib.planning.held import NCCL
from gradmem_lib.prediction import allocator
from gradmem_lib.units import GiB, MiB

GB = 10**9
SEVEN, GPT2_XL = accounting.SHAPES["Llama-2-7B"], accounting.SHAPES["GPT-2 XL"]


@cache
def page() -> dict[str, str]:
    """The ledger's entries by claim."""
    text = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    found = re.split(r"^### (?=C\d\d$)", text, flags=re.MULTILINE)
    return {entry[:3]: entry for entry in found[1:]}


def says(claim_id: str, sentence: str) -> bool:
    return sentence in page()[claim_id]


def row(claim_id: str, name: str) -> list[float]:
    """The numbers of a row of a claim's table."""
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", page()[claim_id], re.MULTILINE)
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", found)]


def one(claim_id: str, name: str) -> float:
    """The number of a row that has one."""
    (number,) = row(claim_id, name)
    return number


def shown(claim_id: str, name: str) -> float:
    """A figure that a claim's card shows beside the claimed one."""
    (found,) = re.findall(rf"^- {re.escape(name)}: ([\d,.]+)", page()[claim_id], re.MULTILINE)
    return float(found.replace(",", ""))


def test_c01():
    assert says("C01", "Autocast keeps the weights in float32, and other recipes keep a float32")
    assert says("C01", "Both need 16 bytes a parameter.")
    parameters = one("C01", "parameters of Llama-2-7B, count")
    assert says("C01", "Without accumulation, the peak is less than the sum of all four")
    for name, moment in (("autocast-bf16", "loss, backward"), ("float32-master", "optimizer step")):
        kept = sum(row("C01", f"{name}: parameters + gradients + Adam"))
        assert kept / parameters == pytest.approx(16, rel=1e-6)
        activations = one("C01", f"{name}: activations of 1 x 2048 tokens")
        peak = one("C01", f"{name}: peak without accumulation ({moment})")
        assert peak < kept + activations


def test_c03_c32_and_c33():
    assert says("C03", "in one dtype, states take twice as much.")
    assert shown("C03", "states / gradients, one dtype") == 2
    assert says("C32", "No recipe here reaches 8 times.")
    for precision in accounting.PRECISIONS:
        per = accounting.bytes_per_parameter(precision, "adamw")
        assert per["optimizer"] / per["parameters"] < 8
    per = accounting.bytes_per_parameter("float32-master", "adamw")
    # with a float32 copy of the gradients, as the next sentence says
    assert (per["optimizer"] + 4) / per["parameters"] == 8
    assert says("C32", "without a master copy, SGD, Adafactor and 8-bit AdamW keep about the")
    assert says("C32", "parameters' size, or less.")
    for precision in ("float32", "bf16", "autocast-bf16"):
        per = accounting.bytes_per_parameter(precision, "sgd", 0.9)
        assert per["optimizer"] == per["parameters"]
    for name in ("adafactor-torch", "adamw-8bit"):
        after = f"{name}, a matrix of 512 x 512 after a real step: states / parameters, bytes"
        states, parameters = row("C32", after)
        assert states < 1.05 * parameters / 2  # 2 bytes a parameter, in bf16
    assert says("C33", "autocast, which keeps twice as much.")
    autocast = one("C33", "1.3e9 parameters, autocast-bf16")
    pure = one("C33", "1.3e9 parameters, bf16")
    assert autocast == 2 * pure


def test_c05():
    assert says("C05", "Each of these results is used twice, by its ReLU and by the next Linear.")
    tensors = one("C05", "tensors handed to autograd, count")
    weights = one("C05", "of these parameters, count")
    results = one("C05", "of these intermediate results, count")
    assert tensors == weights + 1 + 2 * results  # the input, and each result twice


def test_c11_and_c12():
    alone, with_fp16 = row("C11", "BERT-large, 1 x 4, checkpointing: peak in float32 / with fp16")
    more = with_fp16 / alone - 1
    assert says("C11", "BERT-large, checkpointed and with one row at a time, needs 8% more.")
    assert f"{more:.0%}" == "8%"
    table = {run.name: run.mib for run in bert_large.RUNS}
    without, fp16 = table["1 x 4, checkpointing"], table["1 x 4, checkpointing, fp16"]
    assert says("C11", f"{without:,} MB without fp16, {fp16:,} with it.") and fp16 > without
    copy = one("C12", "float16 weights")
    most = one("C12", "the same: activations at most, float16 weights among them")
    assert says(
        "C12", f"One row of 2,048 tokens and a float16 copy of the weights ({copy / GB:.1f}"
    )
    assert most > copy
    peak = one("C12", "1 row of 2048 accumulated, each layer checkpointed, fp16: peak")
    (name,) = (name for name, card in CARDS.items() if card.nbytes > peak)
    assert says("C12", f"Of the cards that the course knows, {name} has room.")


def test_c14():
    (found,) = (one for one in bert_large.rows() if one.run.name == "1 x 4, checkpointing")
    with_context = found.parts["today"] + found.parts["context"]
    assert says("C14", f"Today's tensors and this context come to {with_context:,.0f} MiB:")
    assert says("C14", "here, unlike in C13, the software of January 2022 matters little.")
    assert with_context == pytest.approx(found.total, rel=0.01)
    assert shown("C13", "BERT-large, batch 4, today's step") + found.parts["context"] < 0.9 * 14_931


def test_c16_and_c29():
    whole = one("C16", "operations, one batch of 32")
    cut = one("C16", "operations, 8 x 4 accumulated")
    assert says("C16", f"{cut / whole:.1f} times as many for 8 micro-batches.")
    added = one("C29", "additions into gradients, 4 x 8")
    products = one("C29", "FLOP in matrix products, 4 x 8")
    assert says("C29", "Besides the products, there are K - 1 additions to each gradient,")
    assert says("C29", f"{added / products:.1%} of the operations here.")
    whole, cut = row("C29", "operations started, one batch / 4 x 8")
    assert says("C29", f"For K = 4, {cut / whole:.1f} times as many operations have to be started")


def test_c17():
    short, long = one("C17", "peak, 1,024 tokens"), one("C17", "peak, 2,048 tokens")
    card = one("C17", "a card has (as the driver says)")
    assert says("C17", "Rows of 1,024 tokens fit, with a checkpoint in every layer.")
    assert short + GB < card
    assert says("C17", "Rows of 2,048 do not, with CUDA's context and NCCL's buffers.")
    assert long < card < long + allocator.CONTEXT + NCCL
    assert card < long + GB
    assert says("C17", "A card keeps half of the base, and half of embeddings and head in bf16.")
    # See test_a_70b_on_two_cards_by_hand.


def test_c20_and_c40():
    assert says("C20", "The extra work is at most one forward: a third of a step where all weights")
    assert says("C20", "one checkpoint per layer saves more.")
    every = one("C20", "BERT-large, 24 layers, segments of 1: saved")
    assert every > one("C20", "BERT-large, 24 layers, segments of 5: saved")
    extra = claims_price._more(True, 4), claims_price._more(False, 4)
    # The first layer's input needs a gradient here, so that backward is two forwards, or one.
    assert 0.25 < extra[0] < 1 / 3 and 0.4 < extra[1] < 1 / 2
    assert says("C40", "with frozen weights, backward is half as long.")
    trained = claims_price._operations(True, None) / claims_price._operations(False, None)
    assert trained == pytest.approx(3 / 2, abs=0.03)  # 1 + 2 and 1 + 1 forwards
    assert says("C40", "The extra operations are a little less than a third, since PyTorch stops")
    assert 0.3 < shown("C40", "more operations, a checkpoint every 4") / 100 < 1 / 3


def test_c21():
    assert says("C21", "One checkpoint looks best only if you measure right after forward.")
    for moment, best in (("after forward", True), ("at the peak", False)):
        around = f"16 layers, a = 5 x, checkpoint around {{}}: bytes {moment}"
        whole = one("C21", around.format("the whole model"))
        each = one("C21", around.format("each layer"))
        assert (whole < each) == best


def test_c23_and_c24():
    (claimed,) = re.findall(
        r"^- GPT-2 1.5B, 32 x 1024: [\d.]+ GB \(claimed (\d+) GB\)", page()["C23"], re.M
    )
    assert says("C23", "Without any technique, the batch needs almost three times as much;")
    assert 2.7 < shown("C23", "GPT-2 1.5B, 32 x 1024") / float(claimed) < 3

    assert says("C23", "the other two are about right.")
    assert 32 < shown("C23", "checkpointed") < 1.2 * 32
    assert 22 > shown("C23", "8 rows at a time, too") > 0.8 * 22

    def off(precision: str, attention: str) -> float:
        """How far the three figures are from the claimed ones, as ratios."""
        ways = ((32, None, 60), (32, "per-layer", 32), (8, "per-layer", 22))
        total = 0.0
        for rows, checkpointing, said in ways:
            found = accounting.estimate(
                GPT2_XL,
                batch_size=rows,
                seq_len=1024,
                precision=precision,
                attention=attention,
                checkpointing=checkpointing,
            ).total
            total += abs(math.log(found / GB / said))
        return total

    assert says(
        "C23", "The figures are for pure bf16 with fused attention, where the claimed ones come"
    )
    ways = product(("bf16", "autocast-bf16", "float32", "float32-master"), ("fused", "eager"))
    assert min(ways, key=lambda way: off(*way)) == ("bf16", "fused")

    assert says("C24", "the other two need at least a quarter more.")
    for name, said in (("BERT-large, 4 x 4", 8), ("the same, checkpointed", 5)):
        assert shown("C24", name) / said > 1.25
    fused = one("C24", "4 x 4, fp16, fused attention: peak")
    assert says("C24", f"With fused attention, 4 x 4 needs {fused / GB:.1f} GB, as claimed")
    assert fused / GB == pytest.approx(8, rel=0.05)
    floor = one("C24", "weights, gradients and Adam states in float32")
    assert says("C24", f"take {floor / GB:.1f} GB, so AdamW cannot reach 5 GB.") and floor > 5 * GB
    assert says("C24", "By C13's 14,949 MB for 4 rows in float32, 16 rows need more than 24 GB.")
    table = {run.name: run.mib for run in bert_large.RUNS}
    assert table["batch 4"] == 14949
    driver = 1343 * MiB  # its context, in what was published
    published = table["batch 4"] * MiB - driver
    (today,) = (one.parts["today"] * MiB for one in bert_large.rows() if one.run.name == "batch 4")
    for four_rows in (published, today):
        assert floor + 4 * (four_rows - floor) > 24 * GB


def test_c25():
    assert says(
        "C25", "With or without them, weights, gradients and states set the limit at 16 bytes"
    )
    for size in (24, 40, 80):
        for rows in (1, 8, 32):
            alone, both, _ = row(
                "C25", f"{size} GiB, {rows} x 1024: millions of parameters, neither / both"
            )
            assert 16e6 * alone <= 16e6 * both <= size * GiB
    factor = row("C25", "24 GiB, 32 x 1024: millions of parameters, neither / both")[2]
    assert says("C25", f"On 24 GiB the factor is {factor}. All factors are closed forms")


def test_c26_c27_and_c50():
    assert says("C26", "in Transformers, more checkpoints need less memory.")
    many, few = row("C26", "tiny Llama, 16 layers, 16 / 4 checkpoints: bytes of activations")
    assert many < few
    assert says(
        "C26", "layers keep little besides their input and segments are shorter than sqrt(n)"
    )
    peaks = {}
    for n in (64, 16, 8, 4):
        name = f"64 layers, a = x, {n} checkpoints: bytes at the peak / forward calls"
        peaks[n], _ = row("C26", name)
    assert peaks[64] > peaks[16] > peaks[8] < peaks[4]  # 8 is the root of 64
    assert says(
        "C27", "a Transformer layer keeps 20 to 30 times its input, so segments of one or two"
    )
    shapes = [*accounting.SHAPES.values(), lesson_04.GPT3, lesson_04.BERT_LARGE]
    for shape in shapes:
        a, x = lesson_04.block(shape)
        assert 20 < a / x < 30, shape.name
        assert lesson_04.best_length(shape) in (1, 2), shape.name
    assert says("C50", "A Transformer block keeps more than 20 times its input.")
    assert says(
        "C27", "The best equal segments have sqrt(n x / a) layers, if a layer keeps a bytes"
    )
    for keeps in (1, 5):
        best = one(
            "C27",
            f"64 layers, a = {keeps if keeps > 1 else ''} x: best equal segments".replace(
                "=  x", "= x"
            ),
        )
        lengths = (1, 2, 4, 8, 16, 32, 64)
        root = math.sqrt(64 / keeps)
        assert best == min(lengths, key=lambda k: abs(math.log(k / root)))
    assert says("C50", "The shares are right: segments of 6 of 32 layers leave about 20%.")
    assert says("C50", "They are not the least (see C27).")
    assert says("C50", "in a Transformer, one checkpoint per layer leaves less.")
    six, single = row("C50", "Llama-2-7B: left with segments of 6 / of 1")
    assert six == pytest.approx(20, rel=0.05) and single < six
    assert says("C50", "layers keep little besides their input")
    assert row("C27", "64 layers, a = x: best equal segments") == [8]


def test_c30():
    """The running statistics count the batches that they have seen."""
    norm, again = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for rows in torch.randn(8, 3).split(2):
        norm(rows)
    checkpoint(again, torch.randn(8, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert says(
        "C30",
        f"Accumulation updates the running statistics of batch normalization "
        f"{norm.num_batches_tracked} times instead of once; checkpoints update them "
        f"{again.num_batches_tracked} times.",
    )


def test_c31():
    assert says("C31", "an unchanged learning rate is safe, only slower.")
    for name, (optimizer, lr) in claims_time.LEARNING_RATES.items():
        small, _ = claims_time.learning_rates(name)
        soon = claims_time.excess_loss(optimizer, lr, 16, samples=2048)
        assert soon > small > claims_time.excess_loss(optimizer, lr, 16, samples=8192)


def test_c34():
    tokens = 64 * 4 * 2048
    assert says("C34", "64 micro-batches of 8,192 tokens have exactly that many tokens.")
    assert 64 * 8192 == tokens == 524_288 and "524,288 tokens" in page()["C34"]
    assert says("C34", "The model predicts 2,047 of every sequence's 2,048 tokens.")
    assert row("C34", "predicted tokens of 64 micro-batches") == [64 * 4 * 2047]


def test_c37_and_c38():
    assert says("C37", "Layers that store scores keep three times that much.")
    eager = one("C37", "block with eager attention, closed form")
    assert 32 * eager / (100 * GB) == pytest.approx(3, abs=0.1)
    total = one("C37", "queries, keys and values by the document's product")
    total += one("C37", "scores by its product") + one("C37", "feed-forward by its product")
    assert says("C37", f"{32 * total / GB:.1f} GB over 32 layers.")
    assert says("C37", "Eager attention keeps the softmax twice, in float32 and in bf16:")
    softmax = one("C37", "of which softmax")
    assert softmax == 8 * 32 * 2048**2 * (4 + 2)
    copy = one("C38", "one bf16 copy of the scores, batch 8")
    assert says("C38", "Its own batch of 8 needs four times as much:")
    assert copy / (8 * GiB) == 4 == copy / one("C38", "one bf16 copy of the scores, batch 2")
    assert says("C38", "4 times the sequence makes the scores 16 times as large, not 4.")
    assert copy / one("C37", "scores by its product") == 16


def longest(nbytes: int, every) -> int:
    return claims_price._longest(nbytes, checkpointing=every)


def test_c39():
    assert says("C39", "A 7B in bf16 with AdamW gains at least that on a card of 60 GB or more.")
    sizes = [size * GB for size in (60, 64, 72, 96, 192)]
    cards = [card.nbytes for card in CARDS.values() if card.nbytes >= 60 * GB]
    assert len(cards) >= 3
    for nbytes in (*sizes, *cards):
        assert longest(nbytes, 6) >= 2 * longest(nbytes, None)
    assert longest(57 * GB, 6) < 2 * longest(57 * GB, None)
    none = one("C39", "longest sequence on 141 GB, checkpointing off")
    root = one("C39", "longest sequence on 141 GB, checkpointing 6")
    assert says(
        "C39", f"On 141 GB the factor is {root / none:.1f}, by the closed forms of lesson 01."
    )
    none = one("C39", "longest sequence on 80 GB, checkpointing off")
    each = one("C39", "longest sequence on 80 GB, checkpointing per-layer")
    assert says("C39", f"One checkpoint per layer gives {each / none:.1f} times on 80 GB.")
    kept, less = (
        accounting.model_activations(SEVEN, 1, 2048, precision="bf16", checkpointing=every)
        for every in (None, "per-layer")
    )
    assert says("C39", "The activations shrink by more, but the logits do not.")
    assert sum(kept.values()) / sum(less.values()) > each / none
    assert kept["loss: log-softmax in float32"] == less["loss: log-softmax in float32"]


def test_c41():
    times = list(claims_price._times("per layer").values())
    left = one("C41", "Llama-2-7B, 8 x 2048, a checkpoint a layer: left, float32")
    assert says("C41", f"One checkpoint per layer leaves {left:.0f}% of the activations, not 20%")
    assert says("C41", f"records have {1 / max(times):.0%} to {1 / min(times):.0%} of the speed.")
    assert says("C41", f"Segments of 6 leave about 20% ({lesson_04.share_left(SEVEN, 6):.1%}).")
    many, few = row("C26", "tiny Llama, 16 layers, 16 / 4 checkpoints: more operations")
    speed = 100 / (1 + many / 100)
    assert says("C41", f"By operations, it has {speed:.0f}% of the speed ({many:.0f}% more")
    assert says("C41", "the claimed order is the other way round.") and many < few
    segments = list(claims_price._times("sqrt").values())
    assert says("C41", "Segments of sqrt(n) layers have")
    assert says("C41", f"have {1 / max(segments):.0%} to {1 / min(segments):.0%} of the speed.")


def test_c43():
    assert says("C43", "Eager attention, or a padding mask, then ends in an error.")
    model, ids = claim_runs.tiny(), claim_runs.token_ids()
    model.config.use_cache = True
    claim_runs.checkpoint_by_hand(False, model)
    padded = torch.ones_like(ids)
    padded[0, -5:] = 0
    with pytest.raises(RuntimeError, match="must match the size"), claim_runs.silent():
        model(input_ids=ids, attention_mask=padded, labels=ids).loss.backward()
    assert says("C43", "by hand, eager attention, use_cache=True | RuntimeError")
    by_hand = "by hand, use_reentrant={}: gradient's error, peak with the cache / without"
    assert says("C43", "with the reentrant kind the gradient is wrong, and with the other kind")
    wrong, _ = row("C43", by_hand.format(True))
    right, peak = row("C43", by_hand.format(False))
    assert wrong > 50 and right == 0 and peak > 1.1


def test_c45_and_c47():
    long = one("C45", "share of the saving: attention, eager, 8192 tokens")
    assert says("C45", f"{long:.0f}% at 8,192 tokens.")
    fused = lesson_08.extra_work("per-layer", "fused", 2048)
    assert says("C45", f"14% more operations; whole layers cost {fused:.0%}.")
    three = one("C47", 'every="fit" with 50% of the bytes runs again')
    assert says("C47", "with half the bytes that it needs, the first 3 of 4 layers are recomputed.")
    assert three == 3


def test_c48_and_c49():
    card = CARDS["A100 80GB"]
    moved = one("C48", "bytes over the bus, away and back")
    again = one("C48", "operations that checkpoints repeat")
    needed = moved / (again / (card.half / 2))
    assert says("C48", f"must carry {needed / GB:.0f} GB a second; PCIe 4 carries")
    assert says("C48", f"PCIe 4 carries {card.bus / GB:.0f}.") and card.bus == BUSES["PCIe 4"]
    assert says("C49", "A step gathers no more than without checkpoints.")
    without = one("C49", "without checkpoints: all-gathers a step")
    for way in ("use_reentrant=False", "use_reentrant=True"):
        assert one("C49", f"{way}: all-gathers a step") == without


def test_c51_c52_and_c53():
    resident = one("C51", "weights, gradients and Adam states in bf16")
    assert says("C51", "training all weights needs far more.") and resident > 2 * 35 * GB
    plain = one("C51", "QLoRA, rank 16, 1 x 2048: peak")
    checkpointed = one("C51", "the same, each layer checkpointed")
    assert says(
        "C51",
        f"With a 4-bit base, 1 x 2,048 tokens need {plain / GB:.1f} GB without checkpoints and "
        f"{checkpointed / GB:.1f} GB with them",
    )
    head, heads = one("C52", "one head"), one("C52", "all heads")
    ffn = one("C52", "feed-forward by the document's product")
    assert says(
        "C52",
        f"One head takes {head / MiB:.0f} MiB, 32 heads take {heads / GiB:.0f} GiB, and the "
        f"feed-forward part takes {ffn / GiB:.0f} GiB.",
    )
    assert heads == 32 * head
    assert says("C52", "with fused attention the feed-forward half is larger.")
    attention, mlp = row("C52", "fused: attention half / MLP half")
    assert mlp > attention
    config = known_model("Llama-2-70B")[1]
    token = one("C53", "bytes of keys and values a token, bf16")
    assert says(
        "C53",
        f"A 70B Llama keeps {token:,.0f} bytes a token in bf16, since "
        f"{config.num_attention_heads} query heads share {config.num_key_value_heads} heads",
    )
    weights = row("C53", "weights in bf16")[0]
    rows = math.ceil(weights / (2048 * token))
    assert says(
        "C53", f"Its weights take {weights / GB:.1f} GB: a cache of that size needs {rows} rows"
    )
    assert says(
        "C53", "at a batch of 32, the cache exceeds the weights only in models without shared"
    )
    unshared = row("C53", "the same in bf16 without shared heads")[0]
    assert 32 * 4096 * token < weights < unshared


def test_c57_and_c58():
    costs = {
        (tokens, way): row(
            "C57", f"Llama-3.2-1B, 16 x {tokens}, {way}: estimated time / whole batch at once"
        )[0]
        for tokens in (2048, 64)
        for way in ("accumulated", "checkpointed")
    }
    cut = 100 * (costs[2048, "accumulated"] - 1)
    again = 100 * (costs[2048, "checkpointed"] - 1)
    assert says(
        "C57", f"one row of 2,048 tokens at a time costs {cut:.0f}% more time, and checkpointing"
    )
    assert says("C57", f"costs {again:.0f}%.")
    cut, again = 100 * (costs[64, "accumulated"] - 1), 100 * (costs[64, "checkpointed"] - 1)
    assert says("C57", f"At 64 tokens a row, these cost {cut:.0f}% and {again:.0f}%.")
    peak = "GPT-2 1.5B, 8 x 1024, checkpointed, {}: closed-form peak"
    single, half = one("C58", peak.format("float32")), one("C58", peak.format("bf16"))
    mixed = one("C58", peak.format("autocast-bf16"))
    assert says(
        "C58", "mixed precision means 16-bit weights and states: its own GPT-2, checkpointed in"
    )
    assert half < single < mixed
    assert says("C58", "stay in float32, and 16-bit copies of the weights are added.")
    assert mixed - single < 2 * GPT2_XL.parameters
    first = one("C58", "1 x 2048: saved in blocks, checkpointing off")
    assert says("C58", "In Llama-3.2-1B, 1 row instead of 16 leaves 1/16 of the saved bytes.")
    assert 16 * first == one("C58", "16 x 2048: saved in blocks, checkpointing off")
    before = one("C58", "1 x 8192: saved in blocks, checkpointing off")
    after = one("C58", "1 x 8192: saved in blocks, checkpointing per-layer")
    assert says(
        "C58", f"checkpointing reduces {before / GB:.1f} GB to {after / GB:.2f} GB at 8,192 tokens."
    )
