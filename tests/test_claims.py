"""The ledger: every claim listed, every answer computed again, and the page equal to what the answers say now."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmem_lib.course import claims
from gradmem_lib.course.claims import lesson_01, lesson_05_switches
from gradmem_lib.course.claims.__main__ import main

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


# The rows of lesson 05 that are about transformers as installed, and about BERT-large.
VERDICT_05 = {
    "C11": "does not hold",
    "C12": "does not hold",
    "C13": "holds only if",
    "C14": "holds only if",
    "C24": "does not hold",
    "C43": "holds only if",
    "C46": "does not hold",
    "C47": "does not hold",
    "C56": "does not hold",
}


@pytest.mark.parametrize("claim_id", VERDICT_05)
def test_verdicts_of_lesson_05(claim_id):
    finding = claims.find(claim_id)
    assert finding.verdict == VERDICT_05[claim_id]
    assert finding.summary.endswith(".") and finding.figures


def test_fp16_leaves_weights_gradients_and_states_in_float32_and_may_need_more():
    found = claims.find("C11").figures
    assert [d for name, d in found.items() if "Trainer step" in name] == ["float32"] * 3
    assert "FP16 gradients" in found["the loss scaler, given weights in float16"]
    full, half = (
        int(n)
        for n in found["BERT-large, 1 x 4, checkpointing: peak in float32 / with fp16"]
        .replace(",", "")
        .split(" / ")
    )
    # A float16 copy of every weight that is multiplied: 24 blocks, pooler, classifier, biases with them.
    h, copies = 1024, 2 * (24 * (12 * 1024**2 + 9 * 1024) + 1024**2 + 1024 + 2 * 1024 + 2)
    assert (
        half > full
        and copies > 600e6
        and half - 16 * lesson_05_parameters() < copies + 24 * 512 * h * 4 + 2**26
    )


def lesson_05_parameters() -> int:
    """BERT-large with two classes, by its sizes: tables and their norm, 24 blocks, pooler, classifier."""
    h, f = 1024, 4096
    block = 4 * (h * h + h) + 2 * h * f + f + h + 2 * 2 * h
    return (30522 + 512 + 2) * h + 2 * h + 24 * block + h * h + h + 2 * h + 2


def test_figures_of_lesson_05_against_arithmetic():
    seven = 6_738_415_616  # parameters of Llama-2-7B
    found = claims.find("C12").figures
    assert found["weights, gradients and Adam states"] == 16 * seven + 4 * 291
    assert found["float16 weights"] == 2 * (seven - 32000 * 4096)
    assert found["dtype that from_pretrained gives a checkpoint in float16"] == "float16"
    floor = "weights, gradients and Adam states in float32"
    assert (
        claims.find("C14").figures[floor] == claims.find("C24").figures[floor] == 16 * lesson_05_parameters()
    )
    assert (
        claims.find("C13").figures["batch 4: 512 rows / published seconds, published rows a second"]
        == "8.86, 8.86"
    )


def test_transformers_as_installed():
    cache = claims.find("C43").figures
    on, off = (
        cache[f"checkpointing as transformers does it: peak, use_cache={switch}"] for switch in (True, False)
    )
    assert on == off and cache["gradients equal in every bit"] == "yes"
    assert cache["config.use_cache, set to True, after a Trainer was made"] == "False"
    kwargs = claims.find("C46").figures
    assert kwargs["every_n_layers=2 switches on"] == "layers 0, 2 of 4"
    assert kwargs["use_reentrant=False, modules=['self_attn'] switches on"] == "layers 0, 1, 2, 3 of 4"
    assert kwargs["modules=['self_attn'] alone"].startswith("ValueError")
    assert [kwargs[f"kind of checkpoint with {n} given"] for n in ("nothing", "preserve_rng_state=True")] == [
        "not reentrant",
        "reentrant",
    ]
    assert claims.find("C47").figures["gradient_checkpointing='no' switches on"] == "layers 0, 1, 2, 3 of 4"
    assert "max_seq_length" in claims.find("C56").figures["TrainingArguments(max_seq_length=4096)"]


def test_a_trainer_for_a_claim_prints_nothing(capfd):
    trainer = lesson_05_switches._trainer(activation_checkpointing=True)
    assert lesson_05_switches._switched_on(trainer) == "layers 0, 1, 2, 3 of 4"
    printed = capfd.readouterr()
    assert not printed.out and not printed.err


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
    assert LEDGER.read_text(encoding="utf-8") == claims.page(), (
        "run: python -m gradmem_lib.course.claims --write"
    )


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
