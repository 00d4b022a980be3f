"""The room that a plan leaves: as much as predictions of published runs were off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.predicted import tiny

from gradmem_lib import plan
from gradmem_lib.course.ledger import published
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.margin import MARGIN, MARGIN_OF_SEVERAL_CARDS, check_margin
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count
from gradmem_lib.units import GiB

ASKED = {"seq_len": 64, "global_batch": 2, "method": "qlora", "target": "cuda"}


@pytest.fixture(scope="module")
def config():
    return tiny().config


@pytest.fixture(scope="module")
def ample(config):
    return plan(config, card="8 GiB", **ASKED)


def test_published_runs_reserved_no_more_above_their_predictions():
    """As far as they are recorded: those of one card, and those of FSDP."""
    missed = {False: [], True: []}
    for row in published.rows():
        if "reserved" in row.what or "held by" in row.what or row.what == "peak":
            missed["FSDP" in row.run].append(row.published / row.predicted - 1)
    assert 0.01 < max(missed[False]) < MARGIN < max(missed[True]) < MARGIN_OF_SEVERAL_CARDS


def test_the_margin_decides_what_fits(config, ample):
    """A card with room for exactly the best recipe's bytes and their margin, and one byte less."""
    assert ample.margin == MARGIN and ample.best.kept_free > 0.03 * ample.best.needs - 1
    recipe, needed = ample.best.recipe, ample.best.needs + ample.best.kept_free
    work = count(config)
    for nbytes, margin, fits in (
        (needed, MARGIN, True),
        (needed - 1, MARGIN, False),
        (ample.best.needs, 0, True),
        (ample.best.needs - 1, 0, False),
    ):
        card = Card("exact", nbytes, 1e14, 1e13, 1e12)
        search = Search(work, card, 64, 2, "cuda", margin=margin)
        assert search.option(recipe).fits is fits
        assert search.may_fit(recipe) or not fits


def test_the_answer_shows_it(ample):
    assert "Margin: 3.0% of what a recipe needs stays free" in str(ample)
    assert ample.to_dict()["margin"] == MARGIN
    assert ample.to_dict()["fits"][0]["kept_free"] == ample.best.kept_free
    assert "Margin" not in str(replace(ample, margin=0.0))


def test_live_bytes_on_the_cpu_are_exact_and_need_none():
    assert check_margin(None, "cpu", 1) == check_margin(0, "cuda", 8) == 0
    assert check_margin(None, "cuda", 2) == MARGIN_OF_SEVERAL_CARDS
    assert check_margin(0.2, "cpu", 1) == 0.2


@pytest.mark.parametrize("margin", [-0.01, 1, 3, "3 %", True, float("nan"), GiB])
def test_a_margin_that_is_no_share_is_refused(margin):
    with pytest.raises(ValueError, match="share of the needed bytes"):
        check_margin(margin, "cuda", 1)
