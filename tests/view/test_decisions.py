"""The table of what comes next shows the rules of ``diagnose``, and nothing besides."""

from types import SimpleNamespace
from xml.etree import ElementTree

from gradmem_lib import diagnose, show_decisions
from gradmem_lib.measure.diagnosis import TECHNIQUES
from gradmem_lib.measure.timeline import MemorySnapshot

BYTES = {
    "parameters": 10,
    "gradients": 10,
    "optimizer": 20,
    "activations": 0,
    "temporaries": 14,
    "other": 0,
}
COLUMNS = [
    *(("backward", part) for part in ("activations", "temporaries", "gradients")),
    *(("backward", part) for part in ("optimizer", "parameters")),
    *(("optimizer_step", part) for part in ("temporaries", "gradients", "optimizer")),
    ("optimizer_step", "parameters"),
]


def rows_of(table) -> list[list]:
    """The cells of each technique's row."""
    root = ElementTree.fromstring(table._repr_html_())
    return [list(row) for row in root.find("tbody")]


def test_there_is_a_mark_for_each_part_that_a_technique_can_shrink_and_a_price_for_each():
    for technique, (name, *cells, price) in zip(TECHNIQUES, rows_of(show_decisions()), strict=True):
        assert name.text.startswith(technique.name) and price.text == technique.price
        marked = [
            column
            for column, cell in zip(COLUMNS, cells, strict=True)
            if cell.find("span") is not None
        ]
        assert marked == [
            (phase, part) for phase, part in COLUMNS if phase in technique.shrinks.get(part, ())
        ]


def test_a_run_has_the_lowest_peak_beside_each_and_a_mark_where_that_fits():
    run = SimpleNamespace(peak=MemorySnapshot(sum(BYTES.values()), BYTES, "optimizer_step"))
    lowest = diagnose(run).lowest
    shown = {}
    for name, *_, best in rows_of(show_decisions(run, card=30)):
        shown[name.text.removesuffix(", of the layers")] = "".join(best.itertext())
    assert shown == {name: f"{n} B" + " ✓" * (n <= 30) for name, n in lowest.items()}
    assert lowest["checkpointing"] == 54 and "20 B ✓" in shown.values()
    assert "✓" not in show_decisions(run)._repr_html_()


def test_only_the_half_of_the_peaks_phase_is_strong_and_has_bytes():
    run = SimpleNamespace(peak=MemorySnapshot(sum(BYTES.values()), BYTES, "optimizer_step"))
    html = show_decisions(run)._repr_html_()
    assert html.count("optimizer 20 B") == 1 and html.count("opacity:0.6") == 5
    assert "opacity:0" not in show_decisions()._repr_html_()
