"""The figures of the README and of the pages that go on from it are those of the ledger and of the
recorded benchmarks, and what they point to is there.
"""

from __future__ import annotations

import json
import re

from PIL import Image
from support.paths import ROOT

from gradmem_lib.__main__ import parser

README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
OWN_CODE = (ROOT / "docs" / "own_code.md").read_text(encoding="utf-8")
FIRST_LINES = 30  # with a heading, two blocks of commands and the links they need: 600 pixels


def plain(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


def recorded(name: str) -> dict:
    return json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )


def commands(text: str) -> list[str]:
    """The lines of its blocks of commands, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    typed = "".join(block for language, block in blocks if not language)
    lines = [line.partition("#")[0].strip() for line in typed.splitlines()]
    return [line for line in lines if line]


def test_the_first_screen_says_what_to_type_and_the_picture_comes_after_it():
    picture = re.search(r"!\[[^]]{100,}\]\(([^)]+)\)", README)
    before = README[: picture.start()]
    assert before.count("\n") <= FIRST_LINES
    typed = commands(before)
    assert [line.split()[:2] for line in typed] == [
        ["pip", "install"],
        ["gradmem", "explain"],
        ["gradmem", "run"],
        ["gradmem", "plan"],
        ["make", "lab"],
    ]
    path = ROOT / picture[1]
    assert path.stat().st_size <= 1_000_000
    with Image.open(path) as film:
        assert film.n_frames >= 20 and film.info["loop"] == 0, "it moves, and goes on"


def test_the_commands_are_those_of_the_command_line():
    for text in (README, OWN_CODE):
        typed = [line.split()[1:] for line in commands(text) if line.startswith("gradmem ")]
        assert typed
        for words in typed:
            assert parser().parse_args(words).run, words


def test_every_lesson_is_in_the_course_map():
    lessons = sorted(path.name for path in (ROOT / "lessons").glob("*.ipynb"))
    assert re.findall(r"^\| \[\d\d .*?\]\(lessons/(.*?)\)", README, re.MULTILINE) == lessons


def test_the_five_surprising_lines_have_the_ledgers_figures():
    ledger = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    section = MEASURED.partition("## Five lines of the ledger")[2].partition("\n## ")[0]
    lines = re.findall(
        r"^- \*\*(?:.*?)\*\* \((C\d\d)\) (.*?)(?=^- |\Z)", section, re.MULTILINE | re.DOTALL
    )
    assert len(lines) == 5
    missing = []
    for claim, text in lines:
        entry = ledger.partition(f"### {claim}\n")[2].partition("\n### ")[0]
        figures = re.findall(r"\d[\d.,]*\d%?|\d%?", plain(text))
        assert entry and figures, claim
        for figure in figures:  # whole: 32 is no part of 4,032 or of 1.32
            if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d%]|[.,]\d)", entry):
                missing.append(f"{claim}: {figure}")
    assert not missing


def test_the_results_are_the_recorded_ones():
    overhead = recorded("tracker_overhead")["ratios"]["smollm2"]
    seven = recorded("predict")["speed"]["Llama-2-7B"]
    chain = recorded("checkpointing")["settings"]["chain"]["variants"]
    tuned = recorded("finetune")
    naive, hf, ours = (tuned["ways"][way] for way in tuned["ways"])
    to_naive = list(tuned["to naive"].values())
    moved = {name: one["ways"] for name, one in recorded("recompute_or_move")["settings"].items()}
    shares = [
        ("full", "per layer"),
        ("full", "first 15"),
        ("full", "attention"),
        ("full", "all moved"),
        ("adapters", "per layer"),
    ]
    expected = [
        f"{overhead['tracked / untracked']:.2f} times",
        f"{overhead['MemTracker / untracked']:.1f} times",
        (
            f"{seven['first answer']['seconds']:.2f} s, then "
            f"{seven['later answers, median']['seconds']:.2f} s"
        ),
        f"{chain['non-uniform']['peak / none']:.1%}",
        f"{chain['sqrt (k=8)']['peak / none']:.1%}",
        f"{ours['peak bytes'] / naive['peak bytes']:.1%} of the naive run's",
        f"{hf['peak bytes'] / naive['peak bytes']:.1%}",
        f"{ours['tokens/s'] / naive['tokens/s']:.2f} times",
        f"{hf['tokens/s'] / naive['tokens/s']:.2f} times",
        f"{naive['held-out loss before']:.2f} to {ours['held-out loss after']:.2f}",
        f"naive {naive['held-out loss after']:.2f}",
    ] + [
        f"{moved[on][way]['kept / none']:.0%} at {moved[on][way]['time / none']:.2f}"
        for on, way in shares
    ]
    fewer = recorded("optimizers")
    three = [fewer["optimizers"][name] for name in ("adamw", "adamw-8bit", "lion")]
    best = ", ".join(f"{min(row['held-out loss, by learning rate'].values()):.3f}" for row in three)
    expected += [
        ", ".join(f"{row['state bytes a parameter']:.1f}" for row in three) + ";",
        f"{best}, from {fewer['held-out loss before']:.3f}",
    ]
    alone, room = recorded("classroom")["rooms"]
    first, last = room["seconds of the lesson"]["first"], room["seconds of the lesson"]["last"]
    expected += [
        f"{room['kernels']} learners' kernels at once",
        (
            f"{room['held together, most'] / 2**30:.1f} GiB together; each was through after "
            f"{first:.0f} to {last:.0f} s"
        ),
        f"one alone after {alone['seconds of the lesson']['median']:.0f} s",
    ]
    assert len(to_naive) == 3 and all(tuned["holds"].values())
    section = plain(MEASURED.partition("\n## ")[0])
    for figure in expected:
        assert figure in section, figure


def test_lesson_05_states_the_recorded_run_which_is_its_own():
    from gradmem_lib.course.lessons.lesson_04 import claims_price
    from gradmem_lib.course.material import smollm2_runs
    from gradmem_lib.training.recipe import Recipe

    source = (ROOT / "solutions" / "05_fine_tuning.py").read_text(encoding="utf-8")
    text, tuned = " ".join(source.replace("\n#", "\n").split()), recorded("finetune")
    naive, _, ours = tuned["ways"].values()
    losses = (
        naive["held-out loss before"],
        naive["held-out loss after"],
        ours["held-out loss after"],
    )
    said = "fell from {:.2f} to {:.2f} (naive) and {:.2f} (all of it)".format(*losses)
    assert f"{said}, at {ours['peak bytes'] / naive['peak bytes']:.1%} of the naive peak" in text
    assert (
        f"{ours['tokens/s'] / naive['tokens/s']:.2f} times the naive run's tokens a second" in text
    )
    times = claims_price._times("per layer").values()
    assert f"{min(times):.2f} to {max(times):.2f} times as long" in text
    # The same recipe, rates, updates and rows held out.
    built: dict = {}
    for line in re.findall(r"^(?:cut, rerun|recipe) \|?= .*", source, re.M):
        exec(line, built)
    assert Recipe(**built["recipe"]) == Recipe(**tuned["our recipe"])
    rates = [float(rate) for rate in re.findall(r'"learning_rate": ([\d.e-]+)', source)]
    assert rates == [naive["learning rate"], ours["learning rate"]]
    benchmark = (ROOT / "benchmarks" / "finetune.py").read_text(encoding="utf-8")
    assert (
        tuned["steps"],
        int(re.search(r"^HELD_OUT = (\d+)", benchmark, re.M)[1]),
        False,
    ) == smollm2_runs.LONG


def test_the_published_peaks_are_the_recorded_ones():
    from gradmem_lib.course.ledger import published

    off = [abs(row.predicted / row.published - 1) for row in published.rows()]
    near, far = sum(part <= 0.01 for part in off), sum(part > 0.05 for part in off)
    assert published.table() in MEASURED
    said = (
        f"{len(off)} peaks that others measured on their cards | predicted without one: {near} "
        f"within 1%, all but {far} within 5%;"
    )
    assert said in plain(MEASURED)
    assert (
        f"what {len(off)} figures of their runs were on their cards. Our predictions, made without "
        f"a card, are within 1% for {near} of them, and within 5% for all but {far}."
    ) in plain(README)


def test_predicted_needs_of_an_8b_are_the_recorded_ones():
    cases = recorded("finetune")["predicted for a card"]["cases"]
    adafactor, lora, qlora = (
        min(
            case["live bytes and workspace"]
            for case in cases
            if case["way"] == "ours" and fits(case["recipe"])
        )
        for fits in (
            lambda recipe: recipe["optimizer"] == "adafactor-torch",
            lambda recipe: recipe.get("lora_rank") == 8 and "quantized_base" not in recipe,
            lambda recipe: recipe.get("lora_rank") == 8 and "quantized_base" in recipe,
        )
    )
    needs = [f"{nbytes / 2**30:.1f} GiB" for nbytes in (adafactor, lora, qlora)]
    said = re.search(
        (
            r"needs ([\d.]+ GiB) to train every .*, ([\d.]+ GiB) with LoRA of rank 8, and "
            r"([\d.]+ GiB) with its base"
        ),
        plain(OWN_CODE),
    )
    assert list(said.groups()) == needs


def test_the_numbers_of_combinations_are_those_of_the_tests():
    from measure import test_tracker
    from prediction import test_predict

    trackers = 2 * 3 * len(test_tracker.OPTIMIZERS) * len(test_tracker.MODELS)
    assert f"0 bytes apart in {trackers} combinations;" in plain(MEASURED)
    assert (
        f"0 bytes apart in {len(test_predict.TABLE)} combinations of models and recipes"
        in plain(MEASURED)
    )


def test_the_published_table_is_explained_as_far_as_the_readme_says():
    from gradmem_lib.course.ledger import bert_large

    furthest = max(abs(row.difference) / row.run.mib for row in bert_large.rows())
    assert f"at most {100 * furthest:.1f}% off" in plain(MEASURED)
