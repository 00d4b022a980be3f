"""The ledger: every claim listed, every answer computed again, and the page equal to what the answers say now."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmem_lib import claims
from gradmem_lib.claims import lesson_01
from gradmem_lib.claims.__main__ import main

LEDGER = Path(__file__).parent.parent / "LEDGER.md"
VERDICT = {
    "C01": "holds only if",
    "C02": "does not hold",
    "C03": "holds only if",
    "C04": "holds",
    "C05": "does not hold",
    "C06": "does not hold",
    "C07": "holds",
    "C32": "holds only if",
    "C33": "holds only if",
    "C36": "holds only if",
    "C37": "does not hold",
    "C38": "does not hold",
    "C52": "holds only if",
}


def test_all_58_claims_are_listed_in_order():
    assert list(claims.CLAIMS) == [f"C{number:02}" for number in range(1, 59)]
    for claim in claims.CLAIMS.values():
        assert claim.says.endswith(".") and claim.lesson and claim.how
        assert all(key in claims.DOCUMENTS for key in claim.documents)
    assert claims.CLAIMS["C10"].document.count(";") == 2


@pytest.mark.parametrize("claim_id", VERDICT)
def test_verdicts_of_lesson_01(claim_id):
    finding = claims.find(claim_id)
    assert finding.verdict == VERDICT[claim_id]
    assert finding.summary.endswith(".") and finding.figures


def test_figures_that_lesson_01_leans_on():
    five = claims.find("C05").figures
    assert five["distinct storages, count"] == 5
    assert five["of these intermediate results, count"] == 2
    layer = claims.find("C37").figures
    assert layer["block with fused attention, traced"] == layer["block with fused attention, closed form"]
    assert layer["block with eager attention, traced"] == layer["block with eager attention, closed form"]
    assert layer["feed-forward by its product"] == 536_870_912
    assert claims.find("C52").figures["equal to the real block traced at this size"] == "yes"
    assert claims.find("C38").figures["one bf16 copy of the scores, batch 8"] == 32 * 1024**3


def test_the_full_size_trace_sees_what_the_closed_form_leaves_out(monkeypatch):
    """The equality above is no tautology: a form that forgets the second copy of the softmax disagrees."""
    whole = lesson_01.accounting.attention_activations

    def forgetful(*args, **options):
        items = whole(*args, **options)
        return {name: n for name, n in items.items() if name != "attention: softmax in bf16"}

    monkeypatch.setattr(lesson_01.accounting, "attention_activations", forgetful)
    figures = lesson_01.one_layer().figures
    assert figures["block with eager attention, traced"] > figures["block with eager attention, closed form"]


def test_ledger_page_is_current():
    assert LEDGER.read_text(encoding="utf-8") == claims.page(), "run: python -m gradmem_lib.claims --write"


def test_page_lists_every_claim_once_and_no_open_one_as_answered():
    page = claims.page()
    for claim_id in claims.CLAIMS:
        heading, row = page.count(f"\n### {claim_id}: "), page.count(f"\n| {claim_id} |")
        assert (heading, row) == ((1, 0) if claim_id in claims.answered() else (0, 1))


def test_write_and_check(tmp_path, capsys):
    path = tmp_path / "LEDGER.md"
    assert main(["--check", "--path", str(path)]) == 1
    assert main(["--write", "--path", str(path)]) == 0
    assert main(["--check", "--path", str(path)]) == 0
    path.write_text(path.read_text(encoding="utf-8").replace("does not hold", "holds", 1), encoding="utf-8")
    assert main(["--check", "--path", str(path)]) == 1
    assert "--write" in capsys.readouterr().out


def test_show_prints_claim_verdict_and_figures_the_same_each_time(capsys):
    claims.show("C05", "C50", figures=True)
    first = capsys.readouterr().out
    claims.show("C05", "C50", figures=True)
    assert capsys.readouterr().out == first
    claims.show("C05")
    assert capsys.readouterr().out.rstrip().endswith("neither is the network's output."), (
        "figures only when asked for"
    )
    assert "C05 claims: A Sequential" in first
    assert "DOES NOT HOLD" in first
    assert "distinct storages, count" in first
    assert "Open: lesson 04 answers it." in first or "C50" in claims.answered()


def test_unknown_claims_second_answers_and_odd_verdicts_are_refused():
    with pytest.raises(KeyError, match="C01 to C58"):
        claims.show("C99")
    with pytest.raises(ValueError, match="two answers"):
        claims.answers("C05")(lambda: claims.Finding("holds", "It does."))
    with pytest.raises(ValueError, match="holds only if"):
        claims.Finding("maybe", "Who knows.")


def test_answers_run_again_give_the_same_finding():
    assert lesson_01.five_modules() == claims.find("C05")
    assert lesson_01.adam_state_dtype() == claims.find("C02")
