"""The picture of what comes next shows the rules of ``diagnose``, and nothing besides."""

from types import SimpleNamespace

from gradmem_lib import diagnose, show_decisions
from gradmem_lib.measure.diagnosis import TECHNIQUES
from gradmem_lib.measure.timeline import MemorySnapshot

PARTS = {
    "parameters": 10,
    "gradients": 10,
    "optimizer": 20,
    "activations": 0,
    "temporaries": 14,
    "other": 0,
}


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_there_is_a_mark_for_each_part_that_a_technique_can_shrink_and_a_price_for_each():
    figure = show_decisions()
    marks = [
        (t.name, phase, part)
        for t in TECHNIQUES
        for part, phases in t.shrinks.items()
        for phase in ("backward", "optimizer_step")
        if phase in phases
        and part != "other"
        and (phase, part) != ("optimizer_step", "activations")
    ]
    bars = [patch for patch in figure.axes[0].patches if patch.get_height() < 0.9]
    assert len(bars) == len(marks) > 20
    assert all(technique.price in texts(figure) for technique in TECHNIQUES)
    alt = figure._repr_mimebundle_()[1]["image/png"]["alt"]
    assert (
        "checkpointing (peak in forward or backward: activations), at the price of up to a third "
        "more work"
    ) in alt


def test_a_run_has_the_lowest_peak_beside_each_and_a_mark_where_that_fits():
    run = SimpleNamespace(peak=MemorySnapshot(sum(PARTS.values()), PARTS, "optimizer_step"))
    shown = texts(show_decisions(run, card=30))
    lowest = diagnose(run).lowest
    assert [text for text in shown if text.endswith(" B ✓")] == [
        f"{n} B ✓" for n in lowest.values() if n <= 30
    ]
    assert lowest["checkpointing"] == 54 and "54 B" in shown and "20 B ✓" in shown
    assert not any("✓" in text for text in texts(show_decisions(run)))
