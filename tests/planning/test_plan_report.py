"""What a plan says, word for word, and the order of what fits: from options written by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from gradmem_lib import CARDS, MemorySnapshot, Plan, Recipe, format_bytes
from gradmem_lib.names import CATEGORIES
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.held import ROUGHLY
from gradmem_lib.planning.options import Option, RuledOut, changes, describe, ordered
from gradmem_lib.planning.plan import ROUNDED, _advice, _notes
from gradmem_lib.units import GiB, MiB

CARD = Card("Tiny 2GB", 2 * GiB, 2e12, 1e12, 1e11, (8, 6))
CONTEXT = {"CUDA context": 500 * MiB}
PLAIN = Recipe(precision="bf16", optimizer="adamw-fused")


def option(
    recipe=PLAIN, micro_batch=1, microseconds=1.0, mib=1000, phase="backward", parts=None, **by
) -> Option:
    """One with ``mib`` MiB live at the peak: ``by`` category, the rest parameters."""
    by = {name: by.get(name, 0) * MiB for name in CATEGORIES}
    by["parameters"] += mib * MiB - sum(by.values())
    peak = SimpleNamespace(peak=MemorySnapshot(mib * MiB, by, phase), offload_traffic_bytes=0)
    return Option(recipe, micro_batch, microseconds / 1e6, CARD.nbytes, peak, parts or {})


FITS = option(
    replace(PLAIN, every_n_layers=2, accumulation=4),
    2,
    12.345,
    1400,
    activations=900,
    parts=CONTEXT,
)
SLOW = option(replace(PLAIN, checkpointing="per-layer", accumulation=8), 1, 20.0, 1000)
FASTER = option(
    replace(PLAIN, accumulation=4),
    2,
    12.0,
    1900,
    "optimizer_step",
    activations=1000,
    other=38,
    gradients=37,
    parts=CONTEXT,
)
FASTEST = option(PLAIN, 8, 10.0, 5000)
RULED_OUT = [
    RuledOut(
        replace(PLAIN, precision="autocast-bf16"),
        3 * GiB,
        "weights (3.00 GiB) alone are 1.00 GiB more than the card has",
    ),
    RuledOut(replace(PLAIN, optimizer="adamw-8bit"), 3 * GiB, "some operation reads values"),
    RuledOut(Recipe(), 4 * GiB, "weights (3.00 GiB) alone are 1.00 GiB more than the card has"),
]


def plan_of(**changes) -> Plan:
    given = dict(
        title="a model",
        card=CARD,
        seq_len=2048,
        global_batch=8,
        method="full",
        target="cuda",
        fits=[FITS, SLOW],
        refused=[FASTER, FASTEST],
        ruled_out=RULED_OUT,
        advice=[],
        given=None,
        config=None,
    )
    return Plan(**given | changes)


def test_an_option_by_hand():
    assert (FITS.needs, FITS.spare, FITS.fits) == (1900 * MiB, 148 * MiB, True)
    assert (FASTER.needs, FASTER.spare, FASTER.fits) == (2400 * MiB, -352 * MiB, False)
    just = replace(FITS, card_bytes=FITS.needs)
    assert just.spare == 0 and just.fits and not replace(FITS, card_bytes=FITS.needs - 1).fits


def test_a_plan_word_for_word():
    assert (
        str(plan_of())
        == repr(plan_of())
        == (
            "a model on Tiny 2GB (2,147,483,648 bytes), global batch 8 x 2,048 tokens, method "
            "full, target cuda\n"
            "\n"
            "Fits, fastest first. Times are estimates, from counted operations and bytes moved; of "
            "those within 10 %\n"
            "of each other, the recipe that changes training least comes first.\n"
            "  us/token      needs      spare   recipe\n"
            "     12.35   1.86 GiB 148.00 MiB   full, bf16, adamw-fused, every_n_layers=2, "
            "micro-batch 2 x 4\n"
            "     20.00 1000.00 MiB   1.02 GiB   full, bf16, adamw-fused, checkpointing=per-layer, "
            "micro-batch 1 x 8\n"
            "\n"
            "The next faster one of the same kind does not fit: full, bf16, adamw-fused, "
            "micro-batch 2 x 4\n"
            "  It needs 352.00 MiB more than there is: at the peak, in optimizer step, activations "
            "1000.00 MiB, parameters\n"
            "  825.00 MiB, CUDA context 500.00 MiB, other 38.00 MiB.\n"
            "\n"
            "Ruled out without a prediction:\n"
            "  * full, autocast-bf16, adamw-fused; full, float32, adamw: weights (3.00 GiB) alone "
            "are 1.00 GiB more than\n    the card has.\n"
            "  * full, bf16, adamw-8bit: some operation reads values."
        )
    )
    assert plan_of()._repr_html_() == f"<pre>{plan_of()}</pre>"
    assert "a &lt;b&gt;" in plan_of(title="a <b>")._repr_html_()


def test_a_plan_for_a_cpu_shows_no_times():
    """The rates behind them are a card's."""
    text = str(plan_of(target="cpu"))
    assert "fastest first" not in text and "us/token" not in text and "12.35" not in text
    assert "\n       needs      spare   recipe\n    1.86 GiB 148.00 MiB   full" in text


def test_what_is_shown_was_replayed():
    """By the estimate it needs more than there is; by its requests it leaves 48 MiB of the card."""
    prediction = SimpleNamespace(
        **vars(FITS.prediction), replay_allocator=lambda: (1400 + 100) * MiB
    )
    parts = {ROUGHLY: 500 * MiB} | FITS.parts
    rough = replace(FITS, prediction=prediction, parts=parts, seconds=FITS.seconds / 2, margin=0.03)
    assert rough.why_not().startswith("needs about 352.00 MiB more than there is")
    made = plan_of(refused=[rough])
    assert made.next_faster.why_not().startswith("leaves 48.00 MiB, and the margin of 3.0%")
    assert "about" not in str(made)


def test_a_plan_for_several_cards_says_so():
    best = replace(FITS, recipe=replace(FITS.recipe, sharding="fsdp"), cards=4)
    text = str(plan_of(fits=[best], cards=4))
    assert text.startswith(
        "a model on 4 x Tiny 2GB (2,147,483,648 bytes each), global batch 8 x 2,048 tokens"
    )
    assert "adamw-fused, sharding=fsdp, every_n_layers=2, micro-batch 2 x 4 x 4 cards\n" in text
    assert (
        "\nStart the code of the first one with: torchrun --nproc-per-node=4 train.py, or: "
        "accelerate launch "
        "--multi_gpu --num_processes=4 train.py\n" in text
    )
    assert "cards" not in str(plan_of()) and "torchrun" not in str(plan_of())


def test_the_next_faster_is_the_slowest_of_those_that_are_faster():
    made = plan_of(refused=[FASTEST, FASTER, replace(FASTER, seconds=FITS.seconds)])
    assert made.best is made.closest is FITS and made.next_faster is FASTER
    assert plan_of(refused=[]).next_faster is None


def test_what_is_faster_in_another_way_is_not_called_the_next_one():
    """Between the two may lie recipes that were never predicted."""
    other = replace(FASTER, recipe=replace(FASTER.recipe, accumulation=2))
    made = plan_of(refused=[other])
    assert made.next_faster is other and not made.is_of_the_best_ones_kind(other)
    assert "\nA faster one of another kind does not fit: full, bf16, adamw-fused" in str(made)
    assert "next faster" not in str(made)


def test_a_plan_as_plain_values():
    made = plan_of(fits=[], advice=["Go."])
    found = json.loads(json.dumps(made.to_dict()))
    assert Card(**found.pop("card") | {"capability": (8, 6)}) == CARD
    first, last = found.pop("refused")
    assert first.pop("why") == FASTER.why_not() and last["needs"] == FASTEST.needs
    assert first == found.pop("closest")
    assert Recipe(**first.pop("recipe")) == FASTER.recipe
    peak = FASTER.prediction.peak
    assert first == {
        "method": "full",
        "micro_batch": 2,
        "needs": 2400 * MiB,
        "spare": -352 * MiB,
        "kept_free": 0,
        "estimated_seconds_per_token": 12e-6,
        "estimated_terms": None,
        "peak": {"total": peak.total, "phase": peak.phase} | peak.by_category,
        "beyond_the_peak": CONTEXT,
        "moved": 0,
    }
    assert found.pop("ruled_out") == [
        {"recipe": str(row), "needs_at_least": row.needs, "why": row.why} for row in RULED_OUT
    ]
    assert found.pop("model") == "a model"
    for name, value in found.items():
        assert value == getattr(made, name), name


def test_a_recipe_in_a_line_is_spelled_as_in_a_recipe():
    assert describe(Recipe()) == "full, float32, adamw"
    recipe = Recipe(
        precision="bf16", in_backward=True, checkpointing="per-layer", chunked_loss=True
    )
    assert str(option(recipe, 4)) == (
        "full, bf16, adamw, in_backward, checkpointing=per-layer, chunked_loss, micro-batch 4 x 1"
    )
    assert describe(replace(recipe, chunked_loss=False, sharding="fsdp", offload="boundaries")) == (
        "full, bf16, adamw, in_backward, sharding=fsdp, checkpointing=per-layer, offload=boundaries"
    )
    assert describe(Recipe(precision=None), has_adapters=True) == "lora, precision=None, adamw"
    lora = Recipe(every_n_layers=2, accumulation=3, lora_rank=16)
    assert str(option(lora)) == "lora, float32, adamw, every_n_layers=2, micro-batch 1 x 3"
    assert describe(replace(lora, quantized_base=True)).startswith("qlora, float32")


def test_what_changes_training_more():
    """Each one more than the one before."""
    mixed = replace(PLAIN, precision="autocast-bf16")
    in_order = [
        replace(mixed, precision="float32"),
        replace(mixed, optimizer="adamw-8bit"),
        replace(mixed, optimizer="adafactor-torch"),
        PLAIN,
        replace(mixed, in_backward=True),
        replace(mixed, lora_rank=16),
        replace(PLAIN, lora_rank=16, quantized_base=True),
    ]
    assert changes(mixed) == changes(in_order[0]) == (0, 0, 0, 0)
    assert changes(replace(mixed, chunked_loss=True)) == changes(mixed)
    assert all(changes(a) < changes(b) for a, b in pairwise(in_order))


def test_options_in_order():
    """By time; within a tenth of the fastest, what changes training least; without what is
    beaten.
    """
    mixed = replace(PLAIN, precision="autocast-bf16")
    fast, equal = option(PLAIN, microseconds=10), option(mixed, microseconds=11)
    slower = option(replace(mixed, checkpointing="per-layer"), microseconds=11.5, mib=900)
    assert ordered([slower, fast, equal]) == [equal, fast, slower]
    assert ordered([fast, replace(equal, seconds=11.01e-6)])[0] is fast
    # Slower, with as many bytes, by a recipe that changes results no less.
    chunked = option(replace(PLAIN, chunked_loss=True), microseconds=10.5)
    assert ordered([chunked, fast]) == [fast]
    # As fast in chunks: the whole loss comes first. Faster in chunks, which change no result.
    as_fast = replace(chunked, seconds=fast.seconds, card_bytes=1)
    assert ordered([replace(as_fast, prediction=option(mib=900).prediction), fast])[0] is fast
    assert ordered([fast, replace(chunked, seconds=9e-6)])[0].recipe.chunked_loss
    assert ordered([replace(fast, seconds=10.5e-6), fast]) == [fast]
    assert ordered([option(PLAIN, microseconds=10.5, mib=999), fast])[0] is fast
    assert len(ordered([option(PLAIN, microseconds=10.5, mib=999), fast])) == 2
    assert ordered([]) == []


@pytest.mark.parametrize("category", CATEGORIES)
def test_what_stands_in_the_way_leaves_out_what_is_less_than_a_fiftieth(category):
    most = "other" if category == "parameters" else "parameters"
    by = {category: 20, most: 980}
    assert f"{category} 20.00 MiB" in option(**by, mib=1000).why_not()
    assert category not in option(**by | {most: 981}, mib=1001).why_not()


@dataclass(eq=False)
class Sizes:
    """In place of a search: a row's token takes 8 MiB of full fine-tuning, 4 of LoRA, 1 of QLoRA,
    dealt over the cards.
    """

    work: SimpleNamespace
    card: Card
    seq_len: int
    global_batch: int
    target: str = "cuda"
    cards: int = 1
    margin: float = 0.0
    machines: int = 1
    network: float | None = None
    has_adapters = False

    def least_resident_recipes(self, methods):
        return [SimpleNamespace(method=methods[-1], in_backward=False)]

    def option(self, recipe):
        needs = {"full": 8, "lora": 4, "qlora": 1}[recipe.method] * self.seq_len * self.global_batch
        return Told(recipe, needs * MiB // self.cards, self.card.nbytes)

    def may_fit(self, recipe):
        return self.option(recipe).fits

    def refused(self):
        return [self.option(SimpleNamespace(method="full", in_backward=True))]


class Told(SimpleNamespace):
    def __init__(self, recipe, needs, room):
        super().__init__(recipe=recipe, needs=needs, fits=needs <= room, kept_free=0)

    def __str__(self):
        return self.recipe.method

    def replayed(self):
        return self


TOKENS = SimpleNamespace(row=None, uncut="", linear_widths=1)  # a model whose rows are tokens alone


def test_advice_by_hand(monkeypatch):
    """1 GiB and a card of 300 MiB: the next method that fits, the most rows, the longest row, the
    smallest card and number.
    """
    monkeypatch.setattr("gradmem_lib.planning.plan.Search", Sizes)
    small = replace(CARD, nbytes=300 * MiB)
    least = min(CARDS.values(), key=lambda card: card.nbytes)
    in_backward = (
        " An optimizer that steps in backward cannot accumulate: its batch goes through "
        "in one piece."
    )
    method = "method='qlora' would fit: qlora needs 128.00 MiB."
    rows = "global_batch=4 would fit, by the same recipe: full needs 256.00 MiB." + in_backward
    shorter = "seq_len=2 would fit, by the same recipe: full needs 256.00 MiB."
    larger = f"{least.name} would do: {format_bytes(least.nbytes)}."
    several = "cards=4 would fit: full needs 256.00 MiB."
    search = Sizes(TOKENS, small, 8, 16)
    assert _advice(search, ["full"]) == [method, rows, shorter, larger, several]
    assert _advice(search, ["full", "lora"])[0] == method
    assert _advice(search, ["full", "lora", "qlora"])[0] == rows
    search.has_adapters = True
    assert _advice(search, ["full"])[0] == rows
    # Two cards: rows go by twos, 12 are dealt to 4 cards and not to 8; half of a row of one token
    # is none.
    assert _advice(Sizes(TOKENS, small, 8, 12, cards=2), ["full"])[1:] == [
        "global_batch=6 would fit, by the same recipe: full needs 192.00 MiB." + in_backward,
        "seq_len=4 would fit, by the same recipe: full needs 192.00 MiB.",
        larger,
        "cards=4 would fit: full needs 192.00 MiB.",
    ]
    assert [line.split("=")[0] for line in _advice(Sizes(TOKENS, small, 1, 128), ["full"])] == [
        "method",
        "global_batch",
        larger,
        "cards",
    ]
    one_row = "global_batch=1 would fit, by the same recipe: full needs 296.00 MiB."
    assert one_row + in_backward in _advice(Sizes(TOKENS, small, 37, 16), ["full"])
    most = max(card.nbytes for card in CARDS.values())
    lines = _advice(Sizes(TOKENS, small, 8, most // (64 * MiB) + 1), ["qlora", "full"])
    needs = format_bytes(most // (64 * MiB) * 64 * MiB + 64 * MiB)
    assert f"No card of the table has {needs}: this model needs several." in lines


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (PLAIN, True),
        (replace(PLAIN, precision="float32-master"), False),
        (replace(PLAIN, precision="autocast-bf16"), False),
        (replace(PLAIN, lora_rank=16), False),
    ],
)
def test_a_first_answer_that_rounds_weights_says_what_is_lost(recipe, says):
    work = SimpleNamespace(uncut="", named=(), has_layers=True, problems=())
    best = option(recipe)
    best.prediction.notes = ()
    search = SimpleNamespace(work=work, has_adapters=False, fits=lambda: [best], refused=list)
    assert (ROUNDED in _notes(search)) is says
