"""A guess is read kindly, kept, and shown beside the formula and the measured value; the input
works in a real kernel.
"""

import re
from ast import literal_eval

import numpy as np
import pytest
import torch

from gradmem_lib.course.learner import progress
from gradmem_lib.course.learner.guesses import Guess, _widget, how_far, predict_first
from gradmem_lib.course.setup.summary import summary


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    path = tmp_path / "progress.json"
    monkeypatch.setenv("GRADMEM_PROGRESS", str(path))
    return path


@pytest.mark.parametrize(
    ("guess", "nbytes"),
    [
        ("1.5 GiB", 1_610_612_736),
        ("600e6", 600_000_000),
        (42, 42),
        (4.2e6, 4_200_000),
        ("1,024", 1024),
        ("0", 0),
        (0, 0),
        (torch.tensor(7), 7),
        (np.int64(7), 7),
        ("4*7358720", 29_434_880),
        ("4 × 7,358,720", 29_434_880),
        ("2 * 1.5 GiB", 3_221_225_472),
        ("(3 + 1) * 2**20", 4_194_304),
        ("3*4*8*256*49152", 1_207_959_552),
    ],
)
def test_a_guess_in_bytes(capsys, guess, nbytes):
    asked = Guess("1.a", "How many bytes?")
    asked.guess(guess)
    assert asked.value == nbytes and type(asked.value) is int
    said = capsys.readouterr().out
    assert said.startswith("recorded: ") and f"{nbytes:,} bytes; run the next cell\n" in said
    assert progress.load()["guesses"]["1.a"]["guess"] == nbytes


@pytest.mark.parametrize(
    ("unit", "guess", "number"),
    [
        ("layers", "1.5", 1.5),
        ("layers", "3 layers", 3),
        ("layers", "1e3", 1000),
        ("layers", -2, -2),
        ("layers", 0, 0),
        ("layers", "2*6", 12),
        ("layers", "12/5 layers", 2.4),
        ("layers", "007", 7),
        ("percent", "40%", 40),
        ("percent", "40 percent", 40),
        ("%", "12.5 %", 12.5),
        ("", "40%", 0.4),
        ("times", "150%", 1.5),
    ],
)
def test_a_guess_in_another_unit(unit, guess, number):
    asked = Guess("1.b", "How many?", unit=unit)
    asked.guess(guess)
    assert asked.value == pytest.approx(number)


# What is no calculation is not run either.
BAD = ["", "a lot", "2 gigs", None, float("nan"), float("inf"), "nan", True, [3]]
BAD += ["40%", "2**2**99", "9**9**9", "1/0", "f(2)", "2 *", "[1]*9", "__import__('os')"]


@pytest.mark.parametrize("unit", ["bytes", "layers"])
@pytest.mark.parametrize("guess", BAD)
def test_a_bad_guess_is_one_sentence_and_is_not_kept(unit, guess):
    asked = Guess("1.a", "How many?", unit=unit)
    with pytest.raises(ValueError, match=r"cannot read .*: give"):
        asked.guess(guess)
    assert asked.value is None and progress.load()["guesses"] == {}


def test_a_guess_is_remembered_under_its_id_and_unit():
    Guess("1.a", "How many bytes?").guess("2 KiB")
    assert Guess("1.a", "How many bytes, again?").value == 2048
    assert Guess("1.a", "How many layers?", unit="layers").value is None
    assert Guess("1.b", "How many bytes?").value is None


def test_the_reveal_lines_up_guess_formula_and_measured(capsys):
    asked = Guess("1.a", "How many bytes?")
    asked.guess("1.5 GiB")
    capsys.readouterr()
    asked.reveal(formula=768_000_000, measured=torch.tensor(768_000_512))
    assert capsys.readouterr().out == (
        """\
Prediction 1.a
  guess     1,610,612,736 bytes    1.50 GiB  2.1 times too high
  formula     768,000,000 bytes  732.42 MiB  within 0.1 %
  measured    768,000,512 bytes  732.42 MiB
"""
    )
    assert progress.load()["guesses"]["1.a"] == {
        "guess": 1_610_612_736,
        "measured": 768_000_512,
        "unit": "bytes",
    }


def test_a_value_is_not_called_exact_beside_itself(capsys):
    Guess("1.c", "How much?", unit="GiB").reveal(formula=22.1, measured=22.1, what="predicted")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("exact") and lines[3].split() == ["predicted", "22.1", "GiB"]


def test_the_reveal_without_a_guess_says_so_and_records_nothing(capsys, file):
    Guess("1.b", "How many layers?", unit="layers").reveal(measured=12)
    first, guess, measured, advice = capsys.readouterr().out.splitlines()
    assert (first, guess.split(), measured.split()) == (
        "Prediction 1.b",
        ["guess", "none"],
        ["measured", "12", "layers"],
    )
    assert advice.startswith("No guess was made.")
    assert not file.exists()


# A guess, what was measured, and how far off that is.
FAR = """
10                     10      exact
10001                  10000   within 0.1 %
103                    100     within 3 %
97                     100     within 3 %
1005                   1000    within 1 %
110                    100     within 10 %
111                    100     11 % too high
60                     100     40 % too low
210                    100     2.1 times too high
100                    400     4.0 times too low
5000000                10      500,000 times too high
100000000000000000000  3       more than 1e+15 times too high
1e308                  1e-300  more than 1e+15 times too high
1e-300                 3       more than 1e+15 times too low
0                      10      too low
10                     0       too high
-5                     5       too low
"""


@pytest.mark.parametrize("row", FAR.strip().splitlines())
def test_how_far_off_is_said_in_words(row):
    guess, measured, words = row.split(maxsplit=2)
    assert how_far(literal_eval(guess), literal_eval(measured)) == words


@pytest.mark.parametrize("guess", ["1e308", "-1e308", "10**30", 10.0**18])
def test_a_guess_out_of_all_proportion_is_one_short_line_everywhere(capsys, guess):
    asked = Guess("1.b", "How many layers?", unit="layers")
    asked.guess(guess)
    asked.reveal(formula=5, measured=3)
    print(summary())
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if re.search(r"^recorded|guess +-?\d", line)
    ]
    assert len(lines) == 3 and all("e+" in line and len(line) < 80 for line in lines)


def test_without_a_kernel_one_line_says_how_to_guess(capsys):
    asked = predict_first("1.a", "How many bytes?")
    line = 'Prediction 1.a: How many bytes? (commit to a number with .guess("1.5 GiB"))\n'
    assert capsys.readouterr().out == line
    asked.guess(3)
    capsys.readouterr()
    predict_first("1.a", "How many bytes?")
    assert capsys.readouterr().out == line  # the same on every run, whatever was guessed


def test_the_input_records_and_advises():
    asked = Guess("1.a", "Is 1 < 2 GiB?")
    question, row, status = _widget(asked, "1.5 GiB").children
    field, button = row.children
    assert "1 &lt; 2 GiB" in question.value and status.value == ""
    field.value = "2 gigs"  # what Enter does
    assert status.value.startswith("cannot read") and asked.value is None
    field.value = "<b>"
    assert "&lt;b&gt;" in status.value
    field.value = "1.5 GiB"
    assert status.value == "recorded: 1.50 GiB = 1,610,612,736 bytes; run the next cell"
    asked.value = None
    button.click()
    assert asked.value == 1_610_612_736

    *_, status = _widget(Guess("1.a", "Again?"), "1.5 GiB").children
    assert status.value.startswith("your guess so far: 1.50 GiB = 1,610,612,736 bytes")


@pytest.mark.parametrize("live", ["0", "1"])
def test_in_a_real_kernel_the_same_text_stands_under_the_input(live, file, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("GRADMEM_LIVE", live)
    cells = [
        (
            "from gradmem_lib import check, predict_first\nasked = predict_first('1.a', 'How many "
            "bytes?')"
        ),
        "asked.reveal(measured=2048)",
        "asked.guess('2 KiB')\nasked.reveal(measured=2048)",
        """\
from IPython.display import display
def tensor_bytes(shape, bytes_per_element):
    print('not shown')
    display('nor this')
    return shape.numel()""",
        "tensor_bytes = check('0.1', tensor_bytes)\nprint(tensor_bytes((2, 3), 4))",
        (
            "class Mine:\n    pass\n\ndef tensor_bytes(shape, size):\n    raise "
            "NotImplementedError\n\n_ = check('0.1', tensor_bytes)"
        ),
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells]
    )
    # A slow kernel sends what a cell prints in pieces.
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", coalesce_streams=True)
    client.execute()
    outputs = [cell.outputs for cell in notebook.cells]

    (shown,) = outputs[0]
    assert shown.output_type == "display_data"
    text = 'Prediction 1.a: How many bytes? (commit to a number with .guess("1.5 GiB"))'
    assert shown.data["text/plain"] == text
    assert set(shown.data) - {"text/plain"} == ({"text/html"} if live == "1" else set())
    if live == "1":  # what was guessed later is in the saved notebook
        assert "Your guess: 2.00 KiB = 2,048 bytes" in shown.data["text/html"]
    assert "No guess was made." in outputs[1][0].text
    assert "guess     2,048 bytes  2.00 KiB  exact" in outputs[2][0].text
    raised = (
        "✗ 0.1 not yet: Your code raised AttributeError at line 5 of its cell: 'tuple' object has\n"
        "no attribute 'numel'."
    )
    (judged,) = outputs[4]
    assert judged.text == f"{raised}\n24\n"
    (judged,) = outputs[5]
    assert judged.text.startswith("○ 0.1 not attempted yet")
    assert progress.load()["guesses"]["1.a"] == {"guess": 2048, "measured": 2048, "unit": "bytes"}
