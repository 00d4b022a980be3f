"""Lesson 11's puzzles: what is recorded of them is true, sentences that judge are right, and stars
are given and kept.
"""

import os
from dataclasses import replace

import pytest
import record_puzzles

from gradmem_lib import Recipe
from gradmem_lib.course import puzzle, stars
from gradmem_lib.course.catalogue import get
from gradmem_lib.course.learner import progress
from gradmem_lib.course.learner.check import check
from gradmem_lib.course.lessons.lesson_11 import puzzles
from gradmem_lib.course.lessons.lesson_11.exercises import AGAIN, BF16, CHUNKS, LORA, in_the_way
from gradmem_lib.course.setup.summary import summary
from gradmem_lib.names import PRECISIONS
from gradmem_lib.planning.held import resident_bytes

POSSIBLE = [f"11.{number}" for number in range(1, 12)]
ALL = os.environ.get("GRADMEM_ALL")
QUICK = ["11.1", "11.9"]  # in a second or two each
# Of other versions only the best one is known.
of_these_versions = pytest.mark.skipif(
    len(puzzles.records()["11.1"]) == 1, reason="the records are those of the pinned versions"
)


def line(capsys, id, answer):
    check(id, answer)
    return capsys.readouterr().out.replace("\n", " ").strip()


@pytest.mark.parametrize("id", POSSIBLE)
def test_the_recorded_best_is_right_and_takes_the_time_that_plan_estimates(id):
    one, (recipe, weighed) = puzzle(id), puzzle(id).best()
    assert one.judge(recipe) == ("", weighed) and weighed.spare >= 0
    assert sum(weighed.held.values()) == weighed.needs
    assert puzzles.written(recipe) not in get(id).mistakes
    if recipe.offload is None:  # else the bytes that move are predicted
        assert puzzles.search(one).seconds(recipe) == pytest.approx(weighed.seconds, rel=1e-12)


@of_these_versions
@pytest.mark.parametrize("id", POSSIBLE if ALL else QUICK)
def test_what_is_recorded_is_predicted_again_to_the_byte(id):
    for recipe, weighed in list(puzzles.records()[id].items())[: None if ALL else 2]:
        found = puzzles.predicted(puzzle(id), recipe, quickly=False)
        assert found.seconds == pytest.approx(weighed.seconds, rel=1e-12)  # a sum of floats
        assert replace(found, seconds=weighed.seconds) == weighed, puzzles.written(recipe)


@of_these_versions
@pytest.mark.parametrize("one", map(puzzle, puzzles.records()))
def test_all_that_is_tempting_is_recorded(one):
    wanted = [
        one.best()[0],
        *record_puzzles.tempting(one),
        *record_puzzles.in_pieces(one, one.best()[0]),
    ]
    assert list(dict.fromkeys(wanted)) == list(puzzles.records()[one.id])


@pytest.mark.skipif(not ALL, reason="a plan for each puzzle")
@pytest.mark.parametrize("id", POSSIBLE)
def test_the_recorded_best_is_what_the_planner_finds(id):
    assert record_puzzles.solve(puzzle(id)) == puzzle(id).best()[0]


# Sentences that judge.


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (BF16, "weights and gradients alone do not fit"),
        (BF16 | {"lora_rank": 200}, "optimizer states do not fit"),
        (BF16 | {"lora_rank": 10**5}, "the weights alone do not fit"),
        (LORA | AGAIN, "the logits of a micro-batch"),
        (LORA | CHUNKS, "the activations that every layer keeps"),
    ],
)
def test_what_does_not_fit_says_why_and_by_how_much_and_who_holds_it(answer, why, capsys):
    said = line(capsys, "11.1", answer)
    weighed = str(puzzle("11.1").weigh(Recipe(**answer)))
    assert said.startswith("✗ 11.1 not yet: ") and said.count(why) == 1
    assert weighed[1:] in said and "more than the available 512.00 MiB: at the peak, in" in weighed


# A puzzle, an answer, and what is said of it; in braces, a condition's words.
NO_RECIPES = """
11.1: {"precision": "bf17"} -> precision='bf17' is not known
11.1: {"rank": 3} -> a Recipe has no 'rank': its options are precision,
11.3: {"lora_rank": 16} -> {full[2]}
11.4: LORA | {"quantized_base": True} -> {16 bits[2]}
11.5: {"every_n_layers": 2} -> {once[2]}
11.6: {"offload": "activations"} -> {on the card[2]}
11.12: {"in_backward": True} -> {after[2]}
11.1: "bf16" -> or the Recipe itself, but 'bf16' was given
11.2: {"accumulation": 3} -> accumulation=3 must divide the number of rows of a card, which is 8
11.10: {"sharding": "fsdp", "accumulation": 4} -> the number of rows of a card, which is 2.
11.3: {"in_backward": True, "accumulation": 2} -> choose one of the two
"""


@pytest.mark.parametrize("row", NO_RECIPES.strip().splitlines())
def test_what_is_no_recipe_here_hears_why(row):
    id, given = row.split(": ", 1)
    text, says = given.split(" -> ")
    answer, says = eval(text), says.format_map(puzzles.CONDITIONS)
    assert says in puzzle(id).judge(answer)[0] and says in str(puzzle(id).show(answer))


def test_the_impossible_one_is_impossible_and_wants_a_name(capsys):
    here = puzzles.search(puzzle("11.12"))
    for precision in PRECISIONS:
        held = resident_bytes(here.work, Recipe(precision=precision))
        assert held["parameters"] + held["gradients"] > here.card.nbytes
    said = line(capsys, "11.12", "Gradients ")
    assert "✓ 11.12 passed" in said and "12.55 GiB" in said and "25.10 GiB" in said
    assert "the name of one category, parameters, " in line(capsys, "11.12", Recipe())


def test_an_error_that_asks_has_no_full_stop_behind_its_question(capsys):
    assert line(capsys, "11.10", {"sharding": "zero3"}).endswith("did you mean 'fsdp'?")


def test_the_activations_are_blamed_only_where_they_alone_are_too_many():
    one, recipe = puzzle("11.9"), Recipe(**LORA, accumulation=8)
    weighed = one.weigh(recipe)
    assert in_the_way(one, recipe, weighed) == "kept"
    fewer = replace(weighed, held=weighed.held | {"activations": 2**30})
    assert in_the_way(one, recipe, fewer) == "beside"


# Stars.


def test_stars_are_given_by_time_and_kept(capsys):
    best, weighed = puzzle("11.1").best()
    assert "★★★ (" in line(capsys, "11.1", best)
    assert "★☆☆ (" in line(capsys, "11.1", LORA | AGAIN | CHUNKS | {"accumulation": 4})
    kept = progress.load()["puzzles"]["11.1"]  # the faster one stays
    assert kept == {"seconds": weighed.seconds, "recipe": puzzles.written(best)}
    assert eval(kept["recipe"]) == best
    table = str(stars()).splitlines()
    assert len(table) == 12 and table[0].split()[:2] == ["11.1", "★★★"]
    assert "Stars of lesson 11's puzzles" in summary() and "★★★" in summary()


def test_who_beats_the_planner_is_told_and_shown_with_the_recipe():
    faster = puzzle("11.4").best()[1].seconds / 1.05
    progress.record_puzzle("11.4", faster, "Recipe(precision='bf16')")
    row = str(stars()).splitlines()[3]
    assert "you beat the planner, with Recipe(precision='bf16')" in row
    assert puzzles.micros(faster) in row


# The picture.


def test_the_picture_shows_the_card_with_and_without_a_recipe():
    one, (best, weighed) = puzzle("11.4"), puzzle("11.4").best()
    assert "no recipe yet" in str(one.show())
    assert not any(one.show().parts().values())
    full = one.show(best)
    assert sum(full.parts().values()) == weighed.needs
    assert "left over" in str(full) and "★★★" in str(full)
    assert full.picture().alt.startswith("right: 11.4 a 7B in 16 bits")
    against = one.show(LORA | {"quantized_base": True} | AGAIN | {"accumulation": 8})
    assert "condition is broken" in str(against) and "★" not in str(against)
    assert against.picture().alt.startswith("not yet: ")
    assert sum(against.parts().values())
