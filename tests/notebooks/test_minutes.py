"""How a learner's minutes are counted."""

import pytest
from minutes import CODE, PROSE, of_cells

WORDS = " ".join(["word"] * PROSE)
TOKENS = "\n".join(["x"] * CODE)


def test_the_pace_of_a_learner():
    assert (PROSE, CODE) == (130, 40)
    assert of_cells([("markdown", WORDS)]).total == pytest.approx(1)
    assert of_cells([("code", TOKENS)]).total == pytest.approx(1)


def test_an_exercise_takes_longer_than_it_says():
    found = of_cells(
        [
            ("markdown", "●○○ · 6 minutes · trains: adding"),
            ("markdown", "●●● · 10 minutes · optional · trains: more"),
            ("code", "# your code here\n" + TOKENS),  # belongs to the exercise's minutes
            ("code", "check('1.1', f)\n" + TOKENS),
        ]
    )
    assert found.exercises == 9 and found.code == 0
    assert found.optional == 15


def test_each_guess_and_each_claim_card_takes_a_minute():
    code = """
a = predict_first("1.a", "How many?")
b = predict_first(
    "1.b", question, unit="times"
)
claims.show("C01", "C02")  # claims.show("C03")
claims.show("C04")
"""
    found = of_cells([("code", code)])
    assert (found.guesses, found.claims) == (2, 3)
    assert found.total == pytest.approx(5 + len(code.split()) / CODE)


def test_optional_sections_are_counted_apart():
    cells = [
        ("markdown", f"## 1 · Needed\n\n{WORDS}\n\n## Optional: more\n\n{WORDS}"),
        ("code", TOKENS + "\npredict_first('1.c', 'How many?')\nclaims.show('C05')"),
        ("markdown", "●○○ · 4 minutes · trains: something"),
        ("markdown", "## 2 · Needed again"),
    ]
    found = of_cells(cells)
    assert found.total == pytest.approx((PROSE + 4 + 5) / PROSE)
    assert (found.guesses, found.claims, found.exercises) == (0, 0, 0)
    # prose, code, guess, claim and the exercise, rounded up
    assert found.optional == 11
    assert of_cells(cells[:1]).optional == 2
