"""Bars and the explorer: what they draw, say and refuse."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ET

import pytest
from matplotlib.colors import to_hex
from support.nightly import each

from gradmem_lib.course.learner import explorer
from gradmem_lib.course.material import accounting
from gradmem_lib.names import CATEGORIES
from gradmem_lib.planning.cards import CARDS, find_card
from gradmem_lib.planning.held import overhead_of_prediction
from gradmem_lib.prediction import allocator
from gradmem_lib.units import GiB, format_bytes
from gradmem_lib.view import bars
from gradmem_lib.view.style import COLORS, HATCHES, INK

SVG = "{http://www.w3.org/2000/svg}"

# Bars.


def test_bars_are_in_proportion_and_described():
    parts = {"parameters": 14 * GiB, "gradients": 7 * GiB, "optimizer": 28 * GiB}
    picture = bars.plot_bar("a < b", parts, "24 GB card", 24 * GiB)
    axes = picture.axes[0]
    boxes = dict(zip(parts, axes.patches, strict=True))
    for name, box in boxes.items():
        assert box.get_width() * GiB == parts[name]
        look = (to_hex(box.get_facecolor()), box.get_hatch() or "")
        assert look == (COLORS[name], HATCHES[name])
    assert boxes["optimizer"].get_x() == 21
    assert axes.lines[0].get_xdata()[0] == 24
    assert "optimizer\n28.00 GiB" in [text.get_text() for text in axes.texts]
    root = ET.fromstring(picture.svg("T & U"))
    assert root.get("role") == "img"
    named = {e.get("id"): e.text for e in root.iter() if e.get("id") and e.text}
    title, description = (named[key] for key in root.get("aria-labelledby").split())
    assert title == "T & U"
    assert "a < b: 49.00 GiB" in description and "24 GB card, 24.00 GiB" in description


def test_bars_as_svg_are_small_have_hatches_and_follow_the_page():
    svg = bars.plot_bar("x", {"activations": GiB, "gradients": GiB}, "card", GiB).svg("x")
    assert "\N{NO-BREAK SPACE}2.00 GiB<" in svg  # away from the bar's end, or from the card's line
    assert len(svg) < 15_000 and INK not in svg and "currentColor" in svg
    root = ET.fromstring(svg)
    patterns = [f"url(#{e.get('id')})" for e in root.iter(f"{SVG}pattern")]
    assert len(patterns) == len([hatch for hatch in HATCHES.values() if hatch])
    # a box of the bar and one of the legend, or the legend's alone
    uses = [svg.count(f"fill: {pattern}") for pattern in patterns]
    assert sorted(uses) == [1, 1, 1, 2, 2]


def test_bars_are_the_same_every_time_and_do_not_share_names():
    first, second, again = (
        bars.plot_bar("x", {"activations": n * GiB}, "card", GiB).svg("x") for n in (1, 2, 1)
    )
    assert first == again
    ids = [{e.get("id") for e in ET.fromstring(svg).iter()} for svg in (first, second)]
    assert ids[0] & ids[1] == {None}


def test_bars_refuse_a_category_without_a_colour():
    with pytest.raises(ValueError, match="no colour for logits: the categories are parameters"):
        bars.plot_bar("x", {"logits": 1}, "card", GiB)


# The explorer.


def test_verdict_changes_at_the_last_byte():
    card = CARDS["RTX 3070 8GB"]
    room = card.nbytes - allocator.CONTEXT - allocator.workspace(card.capability)
    last, over = (explorer.Answer({"parameters": n}, "", reserved=n) for n in (room, room + 1))
    assert explorer.verdict(last, card.name).startswith("Fits with 0 B to spare") and explorer.fits(
        last, card.name
    )
    assert explorer.verdict(over, card.name).startswith("Exceeds by 1 B") and not explorer.fits(
        over, card.name
    )


def test_verdict_is_that_of_plan_where_the_tensors_alone_would_fit():
    settings = explorer.DEFAULTS | {"batch_size": 1, "seq_len": 4096, "card": "6 GiB"}
    card, found = find_card("6 GiB"), explorer.answer(settings)
    prediction = explorer.trace(settings)
    needs = prediction.peak.total + sum(
        overhead_of_prediction(prediction, card.capability).values()
    )
    assert found.total < card.nbytes < needs
    assert explorer.verdict(found, "6 GiB").startswith(
        f"Exceeds by {format_bytes(needs - card.nbytes)}: "
    )
    assert "CUDA context" in explorer.detail(found, settings)
    assert explorer.verdict(explorer.preview(settings), "6 GiB").startswith("Exceeds by")


@pytest.mark.parametrize("model", accounting.SHAPES)
def test_every_model_has_a_bar_of_all_that_its_verdict_counts(model):
    for checkpointing in explorer.CHECKPOINTING.values():
        settings = explorer.DEFAULTS | {"model": model, "checkpointing": checkpointing}
        found = explorer.preview(settings)
        axes = explorer.picture(settings, found).axes[0]
        widths = dict(zip(filter(found.by_category.get, CATEGORIES), axes.patches, strict=True))
        unit = widths["parameters"].get_width() / found.by_category["parameters"]
        for name, box in widths.items():
            beside = box.get_width() / unit - found.by_category[name]
            assert (abs(beside) > 1) == (name == "other")
        needed = explorer.verdict(found, settings["card"]).split(" needed")[0].split(": ")[1]
        assert needed in [text.get_text().strip() for text in axes.texts]
        assert found.total == explorer.estimate(settings).total


@pytest.mark.parametrize("model", accounting.SHAPES)
def test_a_shape_and_its_config_are_the_same_model(model):
    shape = accounting.SHAPES[model]
    assert accounting.Shape.from_config(shape.config(), model) == shape


TINY = {"model": "tiny Llama", "batch_size": 4, "seq_len": 256}


@pytest.mark.parametrize(
    "changed",
    each(
        2,
        [
            *({"precision": name} for name in accounting.PRECISIONS),
            *(
                {"optimizer": name, "batch_size": 1, "seq_len": 32}
                for name in explorer.OPTIMIZERS.values()
            ),
            {"attention": "eager"},
            {"checkpointing": "per-layer"},
            {"checkpointing": 2},
            {"model": "GPT-2", "seq_len": 2048, "batch_size": 1, "checkpointing": 16},
        ],
        start=1,
    ),
    ids=str,
)
def test_the_trace_is_of_what_the_closed_form_describes(changed):
    settings = explorer.DEFAULTS | TINY | changed
    formula, found = explorer.estimate(settings), explorer.answer(settings)
    assert found.total == pytest.approx(formula.total, rel=0.02)
    assert (
        "by an exact trace" in found.words
        and f"{abs(formula.total - found.total):,} bytes" in found.words
    )


def test_what_no_recipe_can_train_keeps_the_closed_form_and_says_why():
    settings = explorer.DEFAULTS | TINY | {"precision": "float32-master", "optimizer": "sgd"}
    found = explorer.answer(settings)
    assert found.by_category == explorer.estimate(settings).by_category
    assert "no exact figure: float32-master is written for AdamW" in found.words


def test_controls_change_picture_and_words(monkeypatch):
    monkeypatch.setattr(explorer, "answer", explorer.preview)
    shown = explorer.Explorer(model="Llama-2-7B", card="A100 80GB", batch_size=3)
    shown.widget()
    picture, before = shown.answer, shown.answer.svg
    assert picture.fits
    assert all(control.label for control in shown.controls.values()), (
        "every control shows what is chosen"
    )
    shown.controls["precision"].value = "float32"
    assert picture.svg != before and not picture.fits and picture.verdict.startswith("Exceeds by")
    for name in (
        "model",
        "card",
        "batch_size",
        "seq_len",
        "optimizer",
        "attention",
        "checkpointing",
    ):
        before = picture.svg
        options = [o[1] if isinstance(o, tuple) else o for o in shown.controls[name].options]
        shown.controls[name].value = next(o for o in options if o != shown.controls[name].value)
        assert picture.svg != before, name


def test_only_where_a_slider_comes_to_rest_is_traced(monkeypatch):
    asked = []

    def traced(settings):
        asked.append(settings["batch_size"])
        return explorer.Answer({"parameters": settings["batch_size"]}, "Traced.")

    monkeypatch.setattr(explorer, "answer", traced)
    timers = []

    class Timer:
        def __init__(self, act):
            self.act, self.cancelled = act, False
            timers.append(self)

        def cancel(self):
            self.cancelled = True

    class Loop:
        call_soon_threadsafe = staticmethod(lambda act: act())
        call_later = staticmethod(lambda seconds, act: Timer(act))

    shown = explorer.Explorer()
    shown._loop = Loop()
    shown.widget()
    picture, controls = shown.answer, shown.controls
    for size in (8, 16, 32):
        controls["batch_size"].value = size
        assert picture.pending and "By the closed form" in picture.detail
    assert [timer.cancelled for timer in timers] == [True, True, True, False] and not asked
    timers[-1].act()
    assert asked == [32] and not picture.pending
    assert "Traced." in picture.detail and "of 32 bytes" in picture.detail
    controls["card"].value = "RTX 2060 6GB"
    assert not picture.pending, "another card needs no new trace"
    controls["batch_size"].value = 64
    assert picture.pending
    controls["batch_size"].value = 32
    assert not picture.pending and "Traced." in picture.detail, "what was traced is kept"
    assert asked == [32]


def test_a_trace_that_comes_too_late_is_kept_and_not_shown(monkeypatch):
    async def drag():
        shown = explorer.Explorer()
        shown.widget()

        def slow(settings):  # the slider moves while this is computed
            if settings["batch_size"] == 8:
                shown.controls["batch_size"].value = 16
            return explorer.Answer({"parameters": settings["batch_size"]}, "Traced.")

        monkeypatch.setattr(explorer, "answer", slow)
        drawn = []
        shown.answer.observe(lambda change: drawn.append(change.new), "detail")
        shown.controls["batch_size"].value = 8
        while shown.answer.pending:
            await asyncio.sleep(0.01)
        assert "of 16 bytes" in drawn[-1] and not any("of 8 bytes" in words for words in drawn)
        shown.controls["batch_size"].value = 8
        assert not shown.answer.pending and "of 8 bytes" in drawn[-1]

    asyncio.run(asyncio.wait_for(drag(), 60))


WRONG = """
model="GPT-9" -> model is 'GPT-9': choose one of 'tiny Llama'
card="abacus" -> no card is known as 'abacus'
precision="fp3" -> precision is 'fp3'
colour=1 -> no setting named colour: choose from model
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_explorer_says_what_is_wrong(row):
    wrong, says = row.split(" -> ")
    error = TypeError if "no setting" in says else ValueError
    with pytest.raises(error, match=says):
        explorer.explore(**eval(f"dict({wrong})"))


@pytest.mark.parametrize("name", ["optimizer", "checkpointing"])
def test_choosing_none_stays_readable_in_the_menu(monkeypatch, name):
    monkeypatch.setattr(explorer, "answer", explorer.preview)
    shown = explorer.Explorer()
    shown.widget()
    menu = shown.controls[name]
    labels = [label for label, _ in menu.options]
    row = next(row for row, label in enumerate(labels) if label.startswith("none"))
    menu.index = 1 if row == 0 else 0
    menu.index = row
    assert menu.label == labels[row] and shown._now()[name] is None


def test_without_a_step_no_optimizer_is_named_that_nobody_chose():
    settings = {**explorer.DEFAULTS, "optimizer": None, "precision": "float32-master"}
    with pytest.raises(ValueError, match="there is no step") as refused:
        explorer.recipe_of(settings)
    assert "sgd" not in str(refused.value)
