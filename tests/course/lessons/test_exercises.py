"""Every exercise of the course is fit to be given."""

import gc
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from course.judge.toy_exercise import AREA, exercise_of
from support.paths import ROOT

from gradmem_lib.course.catalogue import UnknownExercise, all_exercises, get, lessons
from gradmem_lib.course.judge import verdict
from gradmem_lib.course.judge.exercise import Mistake
from gradmem_lib.course.judge.verdict import PASSED, WRONG
from gradmem_lib.course.learner.check import check
from gradmem_lib.course.lessons.audit import audit
from gradmem_lib.course.lessons.shared.settings import quietly

EXERCISES = all_exercises()


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_every_exercise_is_fit_to_be_given(exercise, monkeypatch):
    if not os.environ.get("GRADMEM_ALL") and EXERCISES.index(exercise) % 4 != 1:
        observe_mistakes_once(monkeypatch)
    assert audit(exercise) == []


def observe_mistakes_once(monkeypatch) -> None:
    """What a known mistake does as an answer is taken for what it does as a known mistake. In a
    quarter of the exercises, and every night in all, each runs twice, which must come to the same.
    """
    run, runs = verdict._run, {}

    def once(exercise, candidate, **how):
        known = [mistake.name for mistake in exercise.mistakes if mistake.function is candidate]
        if not known:
            return run(exercise, candidate, **how)
        if known[0] not in runs:
            runs[known[0]] = run(exercise, candidate, **how)
        return runs[known[0]]

    monkeypatch.setattr(verdict, "_run", once)


def test_ids_are_unique_and_belong_to_their_lesson():
    for lesson in lessons():
        ids = [exercise.id for exercise in all_exercises(lesson)]
        assert ids and len(set(ids)) == len(ids)
        assert all(id.startswith(f"{int(lesson)}.") for id in ids)


def test_lesson_00_shows_all_three_outcomes(capsys):
    def tensor_bytes(shape, bytes_per_element):
        raise NotImplementedError

    given = check("0.1", tensor_bytes)
    assert given((2, 3), 4) == 24
    check("0.1", lambda shape, size: sum(shape) * size)
    mine = lambda shape, size: torch.empty(shape, dtype=torch.int8).numel() * float(size)  # noqa: E731
    assert check("0.1", mine) is mine
    assert capsys.readouterr().out.splitlines() == [
        "○ 0.1 not attempted yet: the bytes of one tensor (later cells use the reference solution)",
        "✗ 0.1 not yet: this adds the sides of the shape: a 2 × 3 tensor has 6 elements, not 5.",
        "✓ 0.1 passed: the bytes of one tensor",
    ]


@pytest.mark.parametrize("once", [False, True])
def test_the_audit_finds_what_is_wrong_with_an_exercise(once, monkeypatch):
    if once:
        observe_mistakes_once(monkeypatch)
    assert audit(AREA) == []
    assert "1 known mistakes: four or more" in audit(replace(AREA, mistakes=AREA.mistakes[:1]))[0]
    assert "the same name" in audit(replace(AREA, mistakes=AREA.mistakes * 2))[0]
    same = Mistake("sum again", lambda w, h: h + w, "this is the same mistake.")
    assert (
        "'sum again' is not named as itself"
        in audit(replace(AREA, mistakes=(*AREA.mistakes, same)))[0]
    )
    right = Mistake("right", lambda w, h: h * w, "this is right, in fact.")
    assert (
        "'right' is not named as itself: ✓"
        in audit(replace(AREA, mistakes=(*AREA.mistakes, right)))[0]
    )
    assert "the id" in audit(replace(AREA, difficulty=4))[0]
    assert "what the exercise trains" in audit(replace(AREA, trains=""))[0]
    long = Mistake("no stop", lambda w, h: 0, "no full stop")
    assert "full stop" in audit(replace(AREA, mistakes=(*AREA.mistakes, long)))[0]

    counter = iter(range(1000))
    assert any(
        "the reference does not pass" in problem
        for problem in audit(replace(AREA, observe=lambda f: next(counter)))
    )
    # A reference that does nothing cannot be told from a stub.
    lazy = exercise_of(lambda x: None, lambda f: 1, *AREA.mistakes)
    assert any("does not pass" in problem for problem in audit(lazy))


def test_a_stub_is_one_even_where_it_happens_to_be_right():
    def observe(function):
        try:
            return function(1, 2) and None
        except NotImplementedError:
            return None

    assert audit(replace(AREA, observe=observe, mistakes=())) == [
        "0 known mistakes: four or more are asked for"
    ]


@pytest.mark.parametrize("id", ["0.9", "99.1", "one", "", 0.1, None])
def test_an_unknown_exercise_is_one_sentence_that_lists_those_there_are(id):
    with pytest.raises(KeyError) as caught:
        check(id, None)
    assert isinstance(caught.value, UnknownExercise)
    sentence = str(caught.value)
    assert sentence.startswith(f"there is no exercise {id!r}: ") and ("0.1" in sentence)


def test_an_exercise_that_moved_is_found_by_its_old_id():
    assert get("5.8") is get("6.5") and get("6.5").name == "recipe_7b"
    assert "5.8" not in {exercise.id for exercise in all_exercises(5)}


def test_the_recipe_that_a_first_check_takes_for_right_is_right():
    from gradmem_lib.course.lessons.lesson_06.exercises import recipe_7b, what_is_wrong

    assert what_is_wrong(*recipe_7b()) == ""


def test_ids_forgive_spaces_and_lessons_forgive_zeros():
    assert get(" 0.1 ").id == "0.1"
    assert all_exercises(0) == all_exercises("00") == all_exercises("0") != []


def test_importing_the_exercises_imports_nothing_heavy():
    code = (
        "import sys, gradmem_lib.course.learner.check as e; print([m for m in ('torch', 'IPython', "
        "'ipywidgets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_and_passed_are_the_words_the_progress_file_keeps():
    from gradmem_lib.course.learner import progress

    check("0.1", ...)
    assert progress.load()["checks"] == {}
    check("0.1", lambda s, b: 1)
    assert progress.load()["checks"]["0.1"] == {"outcome": WRONG, "tries": 1}
    check("0.1", get("0.1").reference)
    check("0.1", lambda s, b: 1)
    assert progress.load()["checks"]["0.1"] == {"outcome": PASSED, "tries": 3}


def test_cards_and_peaks_that_lesson_05_states_are_those_of_its_checks():
    from gradmem_lib.course.lessons.lesson_05 import settings
    from gradmem_lib.measure.tracker import MemoryTracker

    text = (ROOT / "solutions" / "05_fine_tuning.py").read_text(encoding="utf-8")
    for card in ("CHECKPOINTING_CARD", "LOG_CARD", "LORA_CARD", "BACKWARD_CARD", "EVAL_CARD"):
        assert f"**{getattr(settings, card)}**" in text, card

    def peak(setting, steps: int) -> str:
        model, ids = setting()
        model.train()
        with MemoryTracker(model, live=False) as tracker:
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for _ in range(steps):
                model(input_ids=ids, labels=ids).loss.backward()
                if steps > 1:
                    optimizer.step()
                    optimizer.zero_grad()
        return f"{tracker.peak.total / 2**20:.1f} MiB"

    assert f"where it takes {peak(settings.checkpointing_setting, 1)} now" in text
    assert f"every weight trained they take {peak(settings.lora_setting, 2)}" in text
    backward = get("5.9")
    ordinary = backward.observe(backward.mistakes[0].function)["the card"]
    assert f"where one AdamW takes {ordinary.peak / 2**20:.1f} MiB" in text


def test_checkpoints_beside_torchs_adafactor_save_what_lesson_05_says():
    from gradmem_lib.planning.models import known_model
    from gradmem_lib.prediction.predict import predict
    from gradmem_lib.training.recipe import Recipe

    recipe = Recipe(precision="bf16", optimizer="adafactor-torch", accumulation=8)
    ask = {"batch_size": 8, "seq_len": 128, "target": "cpu"}
    config = known_model("SmolLM2-135M")[1]
    without, checkpointed = (
        predict(config, recipe=replace(recipe, checkpointing=how), **ask).peak.total
        for how in (None, "per-layer")
    )
    text = (ROOT / "solutions" / "05_fine_tuning.py").read_text(encoding="utf-8")
    assert "less than one MiB lower." in " ".join(text.replace("#", " ").split())
    assert 0 < without - checkpointed < 2**20


def test_a_trainers_garbage_collection_looks_at_its_own_run_alone():
    seen = []

    def observe(fails):
        seen.append(gc.get_freeze_count())
        if fails:
            raise KeyboardInterrupt

    quietly(observe)(False)
    with pytest.raises(KeyboardInterrupt):
        quietly(observe)(True)
    assert min(seen) > 100_000 and gc.get_freeze_count() == 0
