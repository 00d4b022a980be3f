"""The ledger: every claim listed, every answer computed again, every verdict following its figures,
and the page equal to what the answers say now.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from itertools import product

import pytest
from course.ledger.claim_moves import moves
from support.families import OLDER
from support.paths import ROOT

from gradmem_lib.course import ledger
from gradmem_lib.course.ledger import display as cards
from gradmem_lib.course.ledger import finding
from gradmem_lib.course.ledger import markdown as ledger_page
from gradmem_lib.course.ledger.__main__ import main
from gradmem_lib.course.lessons.lesson_01 import claims as lesson_01
from gradmem_lib.course.lessons.lesson_06 import claims as lesson_06
from gradmem_lib.course.lessons.lesson_09 import claims as lesson_09
from gradmem_lib.course.lessons.lesson_10 import claims as lesson_10
from gradmem_lib.course.lessons.shared import claim_runs
from gradmem_lib.course.machine.compat import enable_checkpointing
from gradmem_lib.course.machine.run_ranks import run_ranks
from gradmem_lib.training.trainer_arguments import CHECKPOINTING_ARGUMENT
from gradmem_lib.units import MiB

LEDGER = ROOT / "docs" / "ledger.md"
LESSONS = ROOT / "gradmem_lib" / "course" / "lessons"
HOLDS = "C04 C07 C17 C28 C29 C34 C39 C42 C49"
ONLY_IF = (
    "C01 C02 C03 C10 C11 C13 C14 C15 C16 C18 C19 C20 C22 C25 C26 C27 C30 C31 C32 C33 C35 C36 C40 "
    "C43 C44 C45 C48 C50 C51 C52 C53 C54 C55 C57 C58"
)
NOT = "C05 C06 C08 C09 C12 C21 C23 C24 C37 C38 C41 C46 C47 C56"
VERDICT = {
    claim_id: verdict
    for verdict, ids in zip(ledger.VERDICTS, (HOLDS, ONLY_IF, NOT), strict=True)
    for claim_id in ids.split()
}


def test_all_claims_are_listed_in_order_and_answered():
    assert list(ledger.CLAIMS) == [f"C{number:02}" for number in range(1, len(VERDICT) + 1)]
    for claim in ledger.CLAIMS.values():
        assert claim.says.endswith(".") and all(key in ledger.DOCUMENTS for key in claim.documents)
    assert ledger.CLAIMS["C10"].document.count(";") == 2
    assert ledger.answered() == sorted(VERDICT) == list(ledger.CLAIMS)


@pytest.mark.parametrize("claim_id", sorted(VERDICT))
def test_verdict_and_its_sentence(claim_id):
    found = ledger.find(claim_id)
    assert found.verdict == VERDICT[claim_id]
    assert found.summary.endswith(".") and found.summary != finding.OTHER_SENTENCE
    assert len(found.sentence.split()) <= 40, "nobody reads that in ten seconds"
    for figure in found.shown:
        assert figure.claimed and figure.text and "nan" not in figure.text


def agreeing(figure):
    """The figure with a number that the claim would agree with."""
    low, high = figure.low, figure.high
    return dataclasses.replace(figure, found=low if low > -float("inf") else high)


def disagreeing(figure):
    """The figure with a number outside of what the claim would agree with, or None where there is
    none.
    """
    if figure.low > -float("inf"):
        return dataclasses.replace(figure, found=figure.low - 1)
    return (
        dataclasses.replace(figure, found=figure.high + 1) if figure.high < float("inf") else None
    )


@pytest.mark.parametrize("claim_id", sorted(VERDICT))
def test_no_verdict_stays_when_its_figures_move(claim_id):
    found = ledger.find(claim_id)
    everywhere = tuple(map(agreeing, found.elsewhere))
    true = dataclasses.replace(found, own=tuple(map(agreeing, found.own)), elsewhere=everywhere)
    assert true.verdict == "holds"
    for i, figure in enumerate(found.elsewhere):
        moved = (*everywhere[:i], disagreeing(figure), *everywhere[i + 1 :])
        assert dataclasses.replace(true, elsewhere=moved).verdict == "holds sometimes"
    for i, figure in enumerate(found.own):
        moved = (*true.own[:i], disagreeing(figure), *true.own[i + 1 :])
        assert moved[i] is not None, f"nothing could make {figure.what!r} disagree"
        assert dataclasses.replace(true, own=moved).verdict != "holds"
    false = dataclasses.replace(found, own=tuple(map(disagreeing, found.own)))
    where = tuple(map(agreeing, found.where))
    expected = "holds sometimes" if where else "does not hold"
    assert dataclasses.replace(false, where=where).verdict == expected
    for i, figure in enumerate(found.where):
        moved = (*where[:i], disagreeing(figure), *where[i + 1 :])
        assert dataclasses.replace(false, where=moved).verdict == "does not hold"


FOUND_AT = {
    "about": 2,
    "between": 2,
    "at_least": 2,
    "fits": 3,
    "more": 1,
    "less": 1,
    "some": 1,
    "none": 1,
    "yes": 1,
    "Figure": 2,
}


def test_no_figure_and_no_verdict_is_typed():
    """What a verdict rests on is worked out from something, and so is every figure below it."""
    files = sorted(LESSONS.glob("lesson_*/claims*.py"))
    assert len(files) >= 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                assert node.value not in ledger.VERDICTS, (file, node.lineno)
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in FOUND_AT and len(node.args) > FOUND_AT[node.func.id]:
                assert not plain(node.args[FOUND_AT[node.func.id]]), (file, node.lineno)
            if node.func.id == "Finding":
                for figures in dicts_in(node):
                    assert not any(map(plain, figures.values)), (file, figures.lineno)


def dicts_in(finding: ast.Call) -> list[ast.Dict]:
    return [
        inner
        for keyword in finding.keywords
        for inner in ast.walk(keyword.value)
        if isinstance(inner, ast.Dict)
    ]


def plain(node: ast.AST) -> bool:
    """A number or a text that was written down, or arithmetic on nothing but those."""
    return not any(
        isinstance(inner, (ast.Name, ast.Call, ast.JoinedStr)) for inner in ast.walk(node)
    )


@pytest.mark.parametrize(
    "claim_id, name, verdict, value", moves(), ids=[f"{move[0]}-{move[2]}" for move in moves()]
)
def test_a_verdict_follows_what_is_measured(claim_id, name, verdict, value, monkeypatch):
    assert VERDICT[claim_id] != verdict
    monkeypatch.setattr(name, value)
    assert ledger._ANSWERS[claim_id]().verdict == verdict


def test_bert_large_holds_no_longer_where_the_replay_is_off(monkeypatch):
    rows = lesson_06.bert_large.rows()
    off = [
        dataclasses.replace(row, parts=row.parts | {"today": row.parts["today"] + 500})
        for row in rows
    ]
    monkeypatch.setattr(lesson_06.bert_large, "rows", lambda: off)
    assert [
        lesson_06.bert_large_accumulated().verdict,
        lesson_06.bert_large_checkpointed().verdict,
    ] == ["does not hold"] * 2


def test_figures_of_lesson_01():
    five = ledger.find("C05").figures
    assert five["distinct storages, count"] == 5
    assert five["of these intermediate results, count"] == 2
    layer = ledger.find("C37").figures
    assert layer["feed-forward by its product"] == 536_870_912
    assert ledger.find("C38").figures["one bf16 copy of the scores, batch 8"] == 32 * 1024**3


def test_fp16_leaves_weights_gradients_and_states_in_float32_and_may_need_more():
    found = ledger.find("C11").figures
    trained, narrow = 0, {}
    for name, dtype in found.items():
        if name.endswith("on the CPU"):
            trained += 1
            if dtype != "float32":
                narrow[name] = dtype
    assert trained == 15 and narrow == {
        "products with bf16=True on the CPU": "bfloat16",
        "weights after an evaluation with bf16_full_eval=True on the CPU": "bfloat16",
    }
    assert "FP16 gradients" in found["the loss scaler, given weights in float16"]
    both = found["BERT-large, 1 x 4, checkpointing: peak in float32 / with fp16"]
    full, half = map(int, both.replace(",", "").split(" / "))
    # A float16 copy of every weight that is multiplied: 24 blocks, pooler, classifier, biases with
    # them.
    h, copies = 1024, 2 * (24 * (12 * 1024**2 + 9 * 1024) + 1024**2 + 1024 + 2 * 1024 + 2)
    assert (
        half > full
        and copies > 600e6
        and half - 16 * bert_large_parameters() < copies + 24 * 512 * h * 4 + 2**26
    )


def bert_large_parameters() -> int:
    """BERT-large with two classes, by its sizes: tables and their norm, 24 blocks, pooler,
    classifier.
    """
    h, f = 1024, 4096
    block = 4 * (h * h + h) + 2 * h * f + f + h + 2 * 2 * h
    return (30522 + 512 + 2) * h + 2 * h + 24 * block + h * h + h + 2 * h + 2


def test_figures_of_lesson_06_against_arithmetic():
    seven = 6_738_415_616  # parameters of Llama-2-7B
    found = ledger.find("C12").figures
    assert found["weights, gradients and Adam states"] == 16 * seven + 4 * 291
    assert found["float16 weights"] == 2 * (seven - 32000 * 4096)
    assert found["dtype that from_pretrained gives a checkpoint in float16"] == "float16"
    floor = "weights, gradients and Adam states in float32"
    assert (
        ledger.find("C14").figures[floor]
        == ledger.find("C24").figures[floor]
        == 16 * bert_large_parameters()
    )
    assert (
        ledger.find("C53").figures["cache of 32 x 2048 tokens, bf16"]
        == 2 * 80 * 8 * 128 * 2 * 32 * 2048
    )
    which = ledger.find("C57").figures
    times = {}
    for tokens in (2048, 64):
        for way in ("accumulated", "checkpointed"):
            name = f"Llama-3.2-1B, 16 x {tokens}, {way}: estimated time / whole batch at once"
            times[tokens, way] = float(which[name])
    assert times[2048, "accumulated"] < times[2048, "checkpointed"] < 4 / 3
    assert times[64, "accumulated"] > times[64, "checkpointed"]


def test_adapters_under_a_checkpoint():
    """Four combinations, and PEFT's own part of it where PEFT is installed."""
    # whether reentrant, whether enabled, whether by hand
    for way in product((True, False), repeat=3):
        reentrant, enable, by_hand = way
        learn = lesson_09.adapters_step(reentrant=reentrant, enable=enable, by_hand=by_hand)
        assert (learn > 0) == (enable or not reentrant), way
    peft = pytest.importorskip("peft")
    model = claim_runs.tiny()
    enable_checkpointing(model, {"use_reentrant": True})
    model.disable_input_require_grads()
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert model.get_input_embeddings()(claim_runs.token_ids()).requires_grad


def gathers_on_a_rank():
    """The same as ``lesson_10.gathers`` on a real rank; and the largest error of its gradients,
    averaged over both.
    """
    import torch
    import torch.distributed as dist

    own = claim_runs.token_ids()[[dist.get_rank()]]
    found, whole = {}, claim_runs.tiny()
    whole(input_ids=claim_runs.token_ids(), labels=claim_runs.token_ids()).loss.backward()
    for name, mode in lesson_10.MODES.items():
        count, peak, _ = lesson_10.second_step(mode, claim_runs.token_ids())
        model = lesson_10.second_step(mode, own)[2]
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        off = max(
            (p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max() for p, q in pairs
        )
        found[name] = count, peak, float(torch.as_tensor(off))
    return found


def test_gathers_on_two_real_ranks():
    figures = ledger.find("C49").figures
    for found in run_ranks(gathers_on_a_rank):
        for name, (count, peak, off) in found.items():
            assert figures[f"{name}: all-gathers a step"] == count
            assert figures[f"{name}: peak of a rank of two"] == peak
            assert off < 1e-5


def test_a_70b_on_two_cards_by_hand():
    """A card's half of 80 layers in 4 bits and of embeddings and head in bf16; both of these whole
    besides; adapters.
    """
    linear, ends = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672), 2 * 32000 * 8192
    adapters = 80 * 16 * (2 * 2 * 8192 + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    floor = (linear * (0.5 + 1 / 64 + 4 / (64 * 256)) + 2 * ends + 6 * adapters) / 2
    figures = ledger.find("C17").figures
    short, long = figures["peak, 1,024 tokens"], figures["peak, 2,048 tokens"]
    boundaries = 2 * 80 * 8192
    assert floor + 2 * ends < short < floor + 2 * ends + 1024 * boundaries + 3e9
    assert 1024 * boundaries < long - short < 1.5 * 1024 * boundaries


def test_a_base_in_8_bits_by_hand():
    """Llama-2-13B: 40 layers of 5120 x 5120 (four) and 5120 x 13824 (three); a byte a weight, four
    a row of each matrix.
    """
    weights = 40 * (4 * 5120**2 + 3 * 5120 * 13824)
    in_8 = weights + 40 * 4 * (5 * 5120 + 2 * 13824)
    in_4 = weights * (0.5 + 1 / 64 + 4 / (64 * 256))
    found = ledger.find("C51").figures["the base in 8 bits instead of 4: more bytes"]
    assert found == round(in_8 - in_4)


def test_transformers_as_installed():
    cache = ledger.find("C43").figures
    peak = "checkpointing as transformers does it: peak, use_cache={}"
    assert cache[peak.format(True)] == cache[peak.format(False)]
    assert cache["gradients equal in every bit"]
    assert cache["config.use_cache, set to True, after a Trainer was made"] == "False"
    kwargs = ledger.find("C46").figures
    assert kwargs["every_n_layers=2 switches on"] == "layers 0, 2 of 4"
    assert (
        kwargs["use_reentrant=False, modules=['self_attn'] switches on"] == "layers 0, 1, 2, 3 of 4"
    )
    assert kwargs["modules=['self_attn'] alone"].startswith("ValueError")
    kind = "kind of checkpoint with {} given"
    assert kwargs[kind.format("nothing")] == "not reentrant"
    assert kwargs[kind.format("preserve_rng_state=True")] == "reentrant"
    assert (
        ledger.find("C47").figures["gradient_checkpointing='no' switches on"]
        == "layers 0, 1, 2, 3 of 4"
    )
    assert "max_seq_length" in ledger.find("C56").figures["TrainingArguments(max_seq_length=4096)"]
    kinds = ledger.find("C42").figures
    assert kinds["use_reentrant=True: warns where the input requires no gradient"]
    assert kinds["use_reentrant=True: compiles into one graph"]


def test_a_trainer_for_a_claim_prints_nothing(capfd):
    trainer = claim_runs.trained(**{CHECKPOINTING_ARGUMENT: True})
    assert claim_runs.switched_on(trainer) == "layers 0, 1, 2, 3 of 4"
    printed = capfd.readouterr()
    assert not printed.out and not printed.err


@pytest.mark.skipif(OLDER, reason="the page's figures are those of the pinned versions")
def test_ledger_page_is_current():
    assert LEDGER.read_text(encoding="utf-8") == ledger.page(), (
        "run: python -m gradmem_lib.course.ledger --write"
    )


def test_the_page_without_what_is_folded_is_short():
    page = ledger.page()
    visible = re.sub(r"<details><summary>(.*?)</summary>.*?</details>", r"\1", page, flags=re.S)
    assert len(visible.encode()) <= 25_500 < len(page.encode())


def test_page_opens_with_one_table_and_has_an_entry_for_every_answer():
    page = ledger.page()
    table, _, entries = page.partition("\n### ")
    for claim_id in ledger.CLAIMS:
        row = next(
            line
            for line in table.splitlines()
            if line.startswith(f"| [{claim_id}](#{claim_id.lower()}) |")
        )
        assert row.endswith(f"| {VERDICT[claim_id]} |") and row.count("|") == 5
        entry = f"### {entries}".partition(f"### {claim_id}\n")[2].partition("\n### ")[0]
        verdict = VERDICT[claim_id].capitalize().replace("sometimes", "only if")
        assert f"> {ledger.CLAIMS[claim_id].says}\n\n**{verdict}**" in entry
        assert entry.count("<details>") == entry.count("</details>") == 1


def test_lessons_named_in_the_page_exist_and_show_the_claim(tmp_path):
    page = ledger.page()
    shown = re.findall(r"Shown in lesson (\d\d(?: and \d\d)*)\.", page)
    numbers = {n for names in shown for n in names.split(" and ")} | set(
        re.findall(r"lesson (\d\d)", page)
    )
    assert numbers >= {"01", "05"} and all(
        list((ROOT / "lessons").glob(f"{n}_*.ipynb")) for n in numbers
    )
    cells = (
        '# %%\nclaims.show("C05", "C06")\n\n# %%\nclaims.show(\n    "C07"\n)\n# '
        'claims.show("C08")\n'
    )
    (tmp_path / "01_a.py").write_text(cells)
    (tmp_path / "03_b.py").write_text('claims.show("C05")\n')
    assert ledger_page.shown_in(tmp_path) == {"C05": ["01", "03"], "C06": ["01"], "C07": ["01"]}


def test_write_and_check(tmp_path, capsys):
    path = tmp_path / "ledger.md"
    assert main(["--check", "--path", str(path)]) == 1
    assert main(["--write", "--path", str(path)]) == 0
    assert main(["--check", "--path", str(path)]) == 0
    path.write_text(
        path.read_text(encoding="utf-8").replace("does not hold", "holds", 1), encoding="utf-8"
    )
    assert main(["--check", "--path", str(path)]) == 1
    assert "--write" in capsys.readouterr().out


def test_show_prints_claim_and_verdict_the_same_each_time(capsys):
    ledger.show("C05", "C17")
    first = capsys.readouterr().out
    ledger.show("C05", "C17")
    assert capsys.readouterr().out == first
    assert first.startswith("C05 does not hold: A Sequential")
    assert "- intermediate tensors kept: 2 (claimed 5)" in first
    assert "Autograd saves 7 tensors" in first and "C17 holds: FSDP" in first
    assert max(map(len, first.splitlines())) <= 100


def test_in_a_notebook_a_claim_is_one_line_that_unfolds(monkeypatch, capsys):
    display = pytest.importorskip("IPython.display")
    drawn = []
    monkeypatch.setattr(cards, "in_kernel", lambda: True)
    monkeypatch.setattr(display, "display", lambda data, raw: drawn.append(data))
    ledger.show("C05", "C36")
    plain, folded = drawn[0]["text/plain"], drawn[0]["text/html"]
    assert not capsys.readouterr().out
    assert [line.partition(":")[0] for line in plain.splitlines()] == [
        "C05 does not hold",
        "C36 holds sometimes",
    ]
    assert folded.count("<details>") == folded.count("</details>") == 2
    first = folded.partition("</details>")[0]
    heading, _, body = first.partition("</summary>")
    assert heading.startswith("<details><summary><b>C05 does not hold</b>: A Sequential")
    assert "Only 2 are kept" in body and "Autograd saves 7 tensors" in body


def test_units_of_figures():
    of = finding.in_unit
    assert [
        of(2.5e9, "GB"),
        of(14949 * MiB, "MB"),
        of(0.193, "%"),
        of(1.0, "%"),
        of(3, "×"),
    ] == [
        "2.5 GB",
        "14,949 MB",
        "19.3%",
        "100%",
        "3.00×",
    ]
    assert [of(True, "yes"), of(0, "yes"), of(1234, ""), of(1.23456, "")] == [
        "yes",
        "no",
        "1,234",
        "1.23",
    ]
    share, size = finding.between("a", "20 to 30%", 0.25), finding.about("a", "10.4 GB", 1.1e10)
    assert share.agrees and share.text == "25%" and share.high == pytest.approx(0.3)
    assert size.agrees and size.text == "11.0 GB" and not finding.about("a", "60 GB", 1).agrees
    assert finding.about("a", "14,949 MB", 14949 * MiB, within=0).text == "14,949 MB"
    assert finding.at_least("a", "2×", 2).agrees and not finding.at_least("a", "2×", 1.9).agrees
    assert not finding.more("a", 1.0).agrees and not finding.less("a", 1.0).agrees


def test_figures_of_several_settings():
    found = {(32, None): (1000, 0.5), (8, "fused"): (2, 0.25)}
    assert finding.each("{} rows, {}: bytes", found, "{:,}, {:.0%} less") == {
        "32 rows, off: bytes": "1,000, 50% less",
        "8 rows, fused: bytes": "2, 25% less",
    }
    assert finding.each("{} rows", {1: 5}) == {"1 rows": 5}
    assert [cards.value(x) for x in (True, 1234, 0.12345, "a")] == ["yes", "1,234", "0.123", "a"]


def test_what_says_nothing_is_refused():
    figure = finding.yes("a", True)
    with pytest.raises(ValueError, match="leaves nothing to judge by"):
        ledger.Finding(own=())
    with pytest.raises(ValueError, match="4 figures are too many"):
        ledger.Finding(own=(figure,) * 4)
    with pytest.raises(ValueError, match="not a number"):
        finding.more("a", float("nan"))
    assert ledger.Finding(own=(figure,), says="fails: It fails.").summary == finding.OTHER_SENTENCE
    with pytest.raises(KeyError, match=f"C01 to {max(VERDICT)}"):
        ledger.show("C99")
    with pytest.raises(ValueError, match="two answers"):
        ledger.answers("C05")(lambda: ledger.Finding(own=(figure,)))


def test_answers_run_again_give_the_same_finding():
    assert lesson_01.five_modules() == ledger.find("C05")
    assert lesson_01.adam_state_dtype() == ledger.find("C02")
