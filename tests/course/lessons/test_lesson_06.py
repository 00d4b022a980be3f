"""What lesson 06 says in figures that none of its cells prints."""

import inspect
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lesson_facts import lessons
from support import oom_programs as programs
from support.paths import ROOT

from gradmem_lib import (
    BudgetExceeded,
    MemoryTracker,
    Recipe,
    diagnose,
    explain,
    find_card,
    known_model,
    predict,
)
from gradmem_lib.course.ledger import published
from gradmem_lib.course.lessons.lesson_01 import exercises_leak as leak_01
from gradmem_lib.course.lessons.lesson_03 import exercises_leak as leak_03
from gradmem_lib.course.lessons.lesson_05 import exercises_leak as leak_05
from gradmem_lib.course.lessons.lesson_06 import exercises
from gradmem_lib.course.lessons.lesson_06.exercises import REAL_MESSAGE, read_error
from gradmem_lib.prediction.allocator import CONTEXT
from gradmem_lib.units import GiB, MiB

SOURCE = ROOT / "solutions" / "06_before_you_rent.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())


def asked(model: str, rows: int, tokens: int, **recipe):
    config = known_model(model)[1]
    recipe = Recipe(precision="bf16", **recipe)
    return predict(config, batch_size=rows, seq_len=tokens, recipe=recipe, target="cuda").peak


def loss_of(model, batch):
    if isinstance(batch, dict):
        return model(**batch).loss
    images, labels = batch
    return F.cross_entropy(model(images), labels)


@pytest.mark.parametrize("setting", [exercises.classifier_setting, exercises.t5_setting])
def test_cards_and_peaks_of_its_exercises(setting):
    model, optimizer, *batch = setting()
    batch = batch[0] if isinstance(batch[0], dict) else tuple(batch)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        loss_of(model, batch).backward()
    if isinstance(batch, dict):
        assert (
            f"takes {tracker.peak.total / 1e6:.1f} MB" in TEXT
            and f"**{exercises.T5_CARD}**" in TEXT
        )
    else:
        assert (
            "The plain step of section 3 takes twice that" in TEXT
            and f"**{exercises.CLASSIFIER_CARD}**" in TEXT
        )
        assert 1.9 < tracker.peak.total / MiB / float(exercises.CLASSIFIER_CARD.split()[0]) < 2.1


def test_the_explorers_first_question():
    card = find_card("RTX 4090 24GB").nbytes - CONTEXT
    xl, seven = asked("GPT-2 XL", 1, 512), asked("Llama-2-7B", 1, 512)
    assert xl.total < card < asked("Llama-2-7B", 1, 512).total
    assert f"GPT-2 XL, with {xl.total / GiB:.0f} GiB." in TEXT
    states = (
        sum(seven.by_category[name] for name in ("parameters", "optimizer")) + 2 * 6_738_415_616
    )
    assert f"gradients and states alone are {states / GiB:.0f}." in TEXT


def test_the_explorers_second_and_third_question():
    def more_than_half(rows, tokens):
        peak = asked("SmolLM2-135M", rows, tokens, attention="eager")
        return peak.by_category["activations"] > peak.total / 2

    assert "With 4 rows, they do so between 128 and 256 tokens." in TEXT
    assert "With one row, they do so a little above 512." in TEXT
    crossed = [more_than_half(*size) for size in ((4, 128), (4, 256), (1, 512), (1, 576))]
    assert crossed == [False, True, False, True]
    parts = asked("Llama-3.2-1B", 8, 1024).by_category
    logits = 8 * 1024 * 128_256 * 4
    assert max(parts, key=lambda name: parts[name]) == "activations"
    assert (
        f"Activations, {parts['activations'] / GiB:.0f} GiB, of which the log-softmax of the "
        f"logits has {logits / GiB:.0f}."
    ) in TEXT
    assert (
        math.isclose(parts["temporaries"], 2 * logits, rel_tol=0.001)
        and f"come {2 * logits / GiB:.0f} GiB of temporaries" in TEXT
    )


def test_half_the_rows_need_what_it_says():
    config = known_model("SmolLM2-135M")[1]
    four, two = (
        predict(config, batch_size=rows, seq_len=256, recipe=Recipe(), target="cuda").peak.total
        for rows in (4, 2)
    )
    assert f"half the rows need {100 * two / four:.0f} % of the bytes" in TEXT


def test_what_it_says_of_the_published_rows():
    off = {
        (row.source.split(",")[0], row.run): row.predicted / row.published - 1
        for row in published.rows()
    }
    worst = max(off, key=lambda name: abs(off[name]))
    assert (
        worst == ("torchtune", "LoRA")
        and f"torchtune's LoRA, is {100 * off[worst]:.1f} % too high" in TEXT
    )
    assert sum(abs(error) < 0.01 for error in off.values()) > len(off) / 2


# The table of symptoms.

LESSONS = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("solutions/[0-9]*.py")}
MESSAGE = " ".join(
    re.search(r'message = """(.*?)"""', SOURCE.read_text(encoding="utf-8"), re.DOTALL)[1].split()
)


def symptoms() -> dict[str, tuple[str, str]]:
    """What one sees: the cause, and where it is taught."""
    text = SOURCE.read_text(encoding="utf-8")
    table = text.partition("| what you see |")[2].partition("\n#\n")[0]
    rows = [line.strip("# |").split(" | ") for line in table.splitlines()[2:]]
    return {seen: (cause, where) for seen, cause, where in rows}


def first_cause(program) -> str:
    return diagnose(program()).causes[0].name


# Of each leak: the script, its arguments, and the budget that it exceeds.
HISTORY = leak_01.with_history, leak_01.history_setting, leak_01.HISTORY_BUDGET
WINDOW = leak_03.with_entropy, leak_03.window_setting, leak_03.WINDOW_BUDGET
RESUME = leak_05.resume, leak_05.resume_setting, leak_05.RESUME_BUDGET
LOGITS = exercises.evaluate, exercises.evaluation_leak_setting, exercises.EVALUATION_BUDGET


def traced(leak) -> MemoryTracker:
    script, setting, _ = leak
    model, *rest = setting()
    optimizer = rest[0] if isinstance(rest[0], torch.optim.Optimizer) else None
    with MemoryTracker(model, optimizer, live=False) as tracker:
        script(model, *rest)
    return tracker


# For each symptom: programs that have it, with the cause that `diagnose` names first.
CAUSES = {
    "memory grows in every step": [
        (programs.losses_in_a_list, "Bytes grow from step to step"),
        (programs.outputs_in_a_list, "Bytes grow from step to step"),
        (programs.metrics_with_their_graph, "Bytes grow from step to step"),
        (partial(traced, HISTORY), "Bytes grow from step to step"),
    ],
    "accumulation saves too little": [
        (programs.losses_added_up, "Losses are added up before one backward"),
        (
            partial(traced, WINDOW),
            "Forwards stay in memory after their own backward",
        ),
    ],
    "it fails in the first step": [
        (programs.first_step, "The first optimizer step makes its states")
    ],
    "it fails only in evaluation": [
        (programs.logits_in_a_list, "An evaluation collects its results"),
        (programs.validation_with_gradients, "A forward's graph is never used"),
        (partial(traced, LOGITS), "An evaluation collects its results"),
    ],
    "it fails only after a resume": [
        (programs.checkpoint_after_resume, "The weights are there more than once"),
        (partial(traced, RESUME), "The weights are there more than once"),
    ],
    "it fails when it saves": [
        (programs.deepcopy_at_save, "The weights are there more than once"),
        (programs.cloned_state_dict, "The weights are there more than once"),
    ],
    "LoRA or QLoRA saves too little": [
        (programs.frozen_float32, "Weights are wider than needed"),
        (programs.reentrant_on_frozen_inputs, "Checkpointing is on and does nothing"),
    ],
}


def test_each_symptom_has_a_program_or_a_message():
    assert set(symptoms()) == {
        *CAUSES,
        "it fails only on a colleague's card",
        "`nvidia-smi` shows more than PyTorch",
    }


@pytest.mark.parametrize("symptom", CAUSES)
def test_the_cause_in_the_table_is_the_one_that_is_found(symptom):
    assert symptom in symptoms()
    assert [first_cause(program) for program, _ in CAUSES[symptom]] == [
        cause for _, cause in CAUSES[symptom]
    ]


def test_what_the_table_says_of_other_cards_and_of_nvidia_smi_is_in_the_messages():
    said = explain(MESSAGE)
    assert "`nvidia-smi` shows more than PyTorch" in symptoms()
    assert said.cases[0] == "other process"
    assert tuple(read_error(*REAL_MESSAGE)) == ("context", "others", "in_pieces")
    assert said.figures["other_processes"] > 20 * said.figures["allocated"]
    # The card is not full of this run's tensors: on an empty one, they would be 3 per cent of it.
    assert said.figures["allocated"] < 0.03 * said.figures["total"]
    error = said.error
    process = error.this_process
    assert process > error.reserved  # what nvidia-smi shows, and what PyTorch counts
    assert process == said.figures["context"] + error.allocated + error.idle


def test_the_real_message_is_the_one_that_the_check_knows():
    error = explain(MESSAGE).error
    read = error.asked, error.total, error.free, error.this_process, error.allocated, error.idle
    assert read == REAL_MESSAGE
    found = read_error(*REAL_MESSAGE)
    figures = explain(MESSAGE).figures
    assert found["context"] == figures["context"]
    # A message rounds its figures, so that a sum of them may be off by a hundredth of a GiB.
    assert found["others"] == pytest.approx(figures["other_processes"], abs=0.02 * GiB)
    others = figures["other_processes"] / figures["allocated"]
    assert f"holds {others:.0f} times as much" in TEXT
    assert f"would change {figures['allocated'] / MiB:.0f} MiB" in TEXT
    assert f"The {figures['context'] / GiB:.1f} GiB of this process outside PyTorch" in TEXT


def test_each_row_leads_to_a_section_or_an_exercise_that_is_there():
    for cause, where in symptoms().values():
        assert cause
        links = re.findall(r"\[lesson (\d\d)\]\((\w+)\.ipynb\), \"([^\"]+)\"", where)
        below = re.findall(r"below, \"([^\"]+)\"", where)
        assert links or below
        places = [(name, title) for _, name, title in links]
        places += [(SOURCE.stem, title) for title in below]
        for number, name, _ in links:
            assert name.startswith(number)
        for name, title in places:
            heading = rf"^# ##+ (?:\d+ · |Exercise [\d.]+ · |Optional: ){re.escape(title)}$"
            assert re.search(heading, LESSONS[name], re.MULTILINE), (name, title)


@pytest.mark.parametrize(
    "leak, name",
    [
        (HISTORY, "01_memory_accounting"),
        (WINDOW, "03_gradient_accumulation"),
        (RESUME, "05_fine_tuning"),
        (LOGITS, "06_before_you_rent"),
    ],
    ids=["1.9", "3.10", "5.11", "6.7"],
)
def test_the_script_of_a_leak_is_the_one_in_its_lesson_and_runs_out_of_memory(leak, name):
    script, setting, budget = leak
    function = script.__name__
    shown = re.search(
        rf"^def {function}\(.*?\n(?=\n\n|\Z)", LESSONS[name], re.DOTALL | re.MULTILINE
    )[0]
    lines = shown.rstrip().splitlines()
    assert [int(line.rpartition("# ")[2]) for line in lines] == list(range(1, len(lines) + 1))
    bare = [line.rpartition("  # ")[0] for line in lines]
    own = inspect.getsource(script).rstrip().splitlines()
    del own[1]  # its docstring
    assert bare == own
    assert f'budget="{budget}"' in LESSONS[name]
    model, *rest = setting()
    with pytest.raises(BudgetExceeded), MemoryTracker(model, budget=budget, live=False):
        script(model, *rest)


def test_the_plan_that_is_printed_is_the_one_that_is_explained():
    printed = next(lesson for lesson in lessons() if lesson.number == "06").printed
    best, faster = map(int, re.findall(r"checkpointing=first-(\d+)", printed))
    assert f"With `first-{best}`, the first " in TEXT
    assert f"The other {32 - best} keep their activations." in TEXT
    assert "The next faster plan would repeat one layer less" in TEXT and faster == best - 1
