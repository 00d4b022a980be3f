"""Progress survives crashes, corruption, two notebooks at once, and a place where nothing can be
written.
"""

import json
import os
import stat
import subprocess
import sys

import pytest

from gradmem_lib.course.learner import progress
from gradmem_lib.course.learner.check import check
from gradmem_lib.course.setup.summary import summary
from gradmem_lib.course.teacher import class_board


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "progress.json"
    monkeypatch.setenv("GRADMEM_PROGRESS", str(path))
    monkeypatch.setattr(progress, "_warned", set())
    return path


def test_what_is_recorded_is_found_again(file, capsys):
    assert progress.load() == {"version": 1, "checks": {}, "guesses": {}, "puzzles": {}}
    assert not file.exists()  # looking leaves nothing behind
    progress.record_check("0.1", "not yet")
    progress.record_check("0.1", "passed")
    progress.record_check("0.1", "not yet")
    progress.record_check("0.2", "not attempted")
    progress.record_guess("1.a", 1000)
    progress.record_guess("1.a", 1000, 500)
    assert progress.load()["checks"] == {"0.1": {"outcome": "passed", "tries": 3}}
    assert progress.load()["guesses"] == {"1.a": {"guess": 1000, "measured": 500, "unit": "bytes"}}
    assert json.loads(file.read_text()) == progress.load()
    assert capsys.readouterr() == ("", "")


def test_the_place_is_the_users_data_folder_unless_told_otherwise(monkeypatch, tmp_path):
    import platformdirs

    monkeypatch.delenv("GRADMEM_PROGRESS", raising=False)
    assert (
        progress.location() == (platformdirs.user_data_path("gradmem") / "progress.json").resolve()
    )
    monkeypatch.setenv("GRADMEM_PROGRESS", "~/mine.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert progress.location() == tmp_path.resolve() / "mine.json"


def test_the_file_may_be_a_link(file, tmp_path, monkeypatch):
    link = tmp_path / "link.json"
    file.parent.mkdir()
    file.write_text('{"version": 1, "checks": {}, "guesses": {}}')
    link.symlink_to(file)
    monkeypatch.setenv("GRADMEM_PROGRESS", str(link))
    progress.record_check("0.1", "passed")
    assert link.is_symlink() and "0.1" in file.read_text()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"3",
        b'{"version": 2, "checks": {}, "guesses": {}}',
        b'{"version": 1, "checks": {}}',
        b'{"version": 1, "checks": [], "guesses": {}}',
        b"[" * 100_000 + b"]" * 100_000,
    ],
)
@pytest.mark.parametrize("first", ["reading", "writing"])
def test_a_corrupt_file_is_moved_aside_and_not_lost(file, capsys, content, first):
    file.parent.mkdir()
    file.write_bytes(content)
    taken = file.with_name("progress.json.corrupt-1")
    taken.write_text("from an earlier accident")
    if first == "reading":
        assert progress.load()["checks"] == {}
    progress.record_check("0.1", "passed")
    assert progress.load()["checks"] == {"0.1": {"outcome": "passed", "tries": 1}}
    assert file.with_name("progress.json.corrupt-2").read_bytes() == content
    assert taken.read_text() == "from an earlier accident"
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "corrupt-2" in err


PASSED = {"outcome": "passed", "tries": 1}


GOOD = {
    "version": 1,
    "checks": {"0.1": PASSED},
    "guesses": {"1.a": {"guess": 42, "unit": "bytes", "measured": 40}},
    "puzzles": {"11.99": {"seconds": 1e-4, "recipe": "Recipe()"}},
}
# Written as JSON: what stands in the place of one value.
FORGED = {
    "400 digits": "1" + "0" * 400,
    "no number": "NaN",
    "no end": "Infinity",
    "past a float's range": "1e999",
    "nothing": "null",
    "true": "true",
    "half a surrogate pair": '"\\ud800"',
    "a line of its own": '"a\\nb"',
    "a list": "[]",
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_value_costs_its_entry_alone_wherever_it_stands(file, capsys, kind):
    """In each field of each section, as an entry, and as an entry's name: the rest is read and
    shown, and all of it is written again.
    """
    file.parent.mkdir()
    mark = '"what is forged"'
    for section in ("checks", "guesses", "puzzles"):
        (good,) = GOOD[section].values()
        for field in (None, "its name", *good):
            entry = mark
            if field is not None:
                entry = json.dumps(good).replace(json.dumps(good.get(field)), mark)
            name = mark if field == "its name" and FORGED[kind].startswith('"') else '"9.z"'
            text = json.dumps(GOOD).replace(f'"{section}": {{', f'"{section}": {{{name}: {entry}, ')
            file.write_text(text.replace(mark, FORGED[kind]))
            before = json.loads(file.read_text())
            class_board.Board(file.parent, file.parent / "board.html").write(0)
            assert "passed" in summary() and print(summary().encode()) is None
            progress.record_check("0.1", "passed")
            before["checks"]["0.1"] = {"outcome": "passed", "tries": 2}
            assert repr(json.loads(file.read_text())) == repr(sorted_as_written(before))
    assert not capsys.readouterr().err


def sorted_as_written(value):
    return json.loads(json.dumps(value, sort_keys=True))


def test_what_a_later_version_has_written_stays(file, capsys):
    later = GOOD | {"badges": {"first": [1, 2]}, "since": "2031"}
    later["checks"] = {"0.1": PASSED | {"when": 3}}
    file.parent.mkdir()
    file.write_text(json.dumps(later))
    progress.record_guess("1.b", 7)
    assert json.loads(file.read_text()) == later | {
        "guesses": GOOD["guesses"] | {"1.b": {"guess": 7, "unit": "bytes", "measured": None}}
    }
    assert capsys.readouterr().err == ""


def test_a_mark_of_an_editor_at_the_beginning_is_read_over(file, capsys):
    progress.record_check("0.1", "passed")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert progress.load()["checks"] == {"0.1": PASSED} and capsys.readouterr().err == ""


def test_what_is_no_file_is_not_read_and_stays(file, capsys):
    """To read a pipe is to wait for ever."""
    file.parent.mkdir()
    os.mkfifo(file)
    progress.record_check("0.1", "passed")
    assert progress.load()["checks"] == {} and "not being saved" in capsys.readouterr().err
    with pytest.raises(progress.ProgressError):
        progress.reset()
    class_board.Board(file.parent, file.parent / "board.html").write(0)
    assert stat.S_ISFIFO(file.stat().st_mode)


def test_a_path_that_no_file_can_have_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_warned", set())
    monkeypatch.setenv("GRADMEM_PROGRESS", "~nobody_of_this_name/progress.json")
    progress.record_check("0.1", "passed")
    progress.load()
    assert capsys.readouterr().err.count("\n") <= 1


def test_what_a_killed_run_left_goes_with_the_next_write(file):
    progress.record_check("0.1", "passed")
    (file.parent / ".progress.json-new").write_text("half of")
    progress.record_check("0.2", "passed")
    assert list(progress.load()["checks"]) == ["0.1", "0.2"]
    assert not list(file.parent.glob(".progress*"))


def test_a_lock_that_is_held_is_waited_for_once_and_not_for_ever(file, monkeypatch, capsys):
    import filelock

    monkeypatch.setattr(progress, "LOCK_SECONDS", 0.1)
    waited = []
    lock = filelock.FileLock
    monkeypatch.setattr(
        filelock, "FileLock", lambda path, timeout: waited.append(timeout) or lock(path, timeout)
    )
    file.parent.mkdir()
    with lock(str(file) + ".lock"):
        for _ in range(3):
            progress.record_check("0.1", "passed")
    assert progress.load()["checks"] == {} and "not being saved" in capsys.readouterr().err
    progress.record_check("0.1", "passed")
    progress.record_check("0.2", "passed")
    assert waited == [0.1, 0, 0, 0, 0.1]
    assert sorted(progress.load()["checks"]) == ["0.1", "0.2"]


def unwritable_places(tmp_path):
    blocker = tmp_path / "a file"
    blocker.write_text("not a folder")
    directory = tmp_path / "progress.json"
    directory.mkdir()
    (directory / "kept").write_text("kept")
    return {"parent is a file": blocker / "progress.json", "a folder stands there": directory}


@pytest.mark.parametrize("place", ["parent is a file", "a folder stands there"])
def test_an_unwritable_place_costs_one_sentence_and_the_course_goes_on(
    file, tmp_path, monkeypatch, capsys, place
):
    path = unwritable_places(tmp_path)[place]
    monkeypatch.setenv("GRADMEM_PROGRESS", str(path))
    assert progress.load()["checks"] == {}
    progress.record_check("0.1", "passed")
    progress.record_guess("1.a", 3)
    assert check("0.1", lambda shape, size: 0) is not None
    assert "Lesson 00: 0 of 1" in summary()
    out, err = capsys.readouterr()
    assert out.startswith("✗ 0.1 not yet: ") and out.count("✗") == 1
    assert err.count("\n") == 1 and "GRADMEM_PROGRESS" in err and str(path) in err
    with pytest.raises(progress.ProgressError, match="GRADMEM_PROGRESS"):
        progress.reset()
    assert list(tmp_path.rglob("kept")) == [tmp_path / "progress.json" / "kept"]


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_litter(file, monkeypatch, capsys):
    progress.record_check("0.1", "passed")
    before = file.read_bytes()

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    progress.record_check("0.1", "not yet")
    assert file.read_bytes() == before
    assert not list(file.parent.glob(".progress*"))
    assert "No space left on device" in capsys.readouterr().err


def test_processes_that_write_at_once_lose_nothing(file):
    code = (
        "import sys; from gradmem_lib.course import progress\n"
        "for i in range(15): progress.record_check('0.1', 'not yet'); "
        "progress.record_guess(f'{sys.argv[1]}.{i}', i)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert progress.load()["checks"]["0.1"]["tries"] == 45
    assert len(progress.load()["guesses"]) == 45


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.skipif(os.name == "nt", reason="there, permissions are another matter")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_new_file_has_the_permissions_of_the_umask(file, umask, mask, mode):
    umask(mask)
    progress.record_check("0.1", "passed")
    assert stat.S_IMODE(file.stat().st_mode) == mode
    progress.record_check("0.2", "passed")
    assert stat.S_IMODE(file.stat().st_mode) == mode


@pytest.mark.skipif(os.name == "nt", reason="there, permissions are another matter")
@pytest.mark.parametrize("mode", [0o600, 0o604, 0o664])
def test_a_file_keeps_the_permissions_that_it_has(file, umask, mode):
    progress.record_check("0.1", "passed")
    file.chmod(mode)
    progress.record_check("0.2", "passed")
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_reset_keeps_the_old_file(file):
    assert "no progress" in progress.reset()
    progress.record_check("0.1", "passed")
    old = file.read_bytes()
    backup = file.with_name("progress.json.bak")
    assert str(backup) in progress.reset()
    assert backup.read_bytes() == old and progress.load()["checks"] == {}


def test_the_summary_shows_exercises_and_guesses(file):
    rows = summary().splitlines()
    assert rows[0] == "Lesson 00: 0 of 1 exercises passed"
    assert rows[1].split() == ["0.1", "●○○", "open", "the", "bytes", "of", "one", "tensor"]
    assert "Predictions: none yet" in rows and rows[-1] == f"kept in {file}"
    progress.record_check("0.1", "not yet")
    assert "attempted (1 try)" in summary()
    progress.record_check("0.1", "not yet")
    assert "attempted (2 tries)" in summary()
    progress.record_check("0.1", "passed")
    progress.record_guess("1.a", 2048)
    progress.record_guess("1.b", 30, 10, unit="layers")
    text = summary()
    assert "Lesson 00: 1 of 1 exercises passed" in text
    assert "  1.a   guess 2.00 KiB = 2,048 bytes; not revealed yet" in text
    assert "  1.b   guess 30 layers; measured 10 layers: 3.0 times too high" in text
