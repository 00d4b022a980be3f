"""What lesson 08 says of its exercises' budgets, and what their checks rely on."""

import weakref

from support.paths import ROOT

from gradmem_lib import MemoryTracker
from gradmem_lib.course.lessons.lesson_08 import exercises as lesson_08
from gradmem_lib.units import parse_bytes

SOURCE = ROOT / "solutions" / "08_recompute_or_move.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())


def plain_peak(model, x) -> float:
    """The peak of a step without hooks or tiles, in MB."""
    with MemoryTracker(model) as tracker:
        model(x).square().mean().backward()
    return tracker.peak.total / 1e6


def test_cards_and_peaks_that_the_lesson_states_are_those_of_its_checks():
    assert f"A step takes {plain_peak(*lesson_08.disk_setting()):.1f} MB now." in TEXT
    assert f"Its budget is **{lesson_08.DISK_CARD}**" in TEXT
    assert (
        f"The budget for {lesson_08.TILED_TOKENS} tokens in {lesson_08.TILES} tiles is "
        f"**{lesson_08.TILED_CARD}**, where the plain MLP takes "
        f"{plain_peak(*lesson_08.tiled_setting()):.1f} MB."
    ) in TEXT
    assert (
        f"Then a GPT-2 of {lesson_08.LAYERS} layers trains with your `k`, in "
        f"**{lesson_08.RECOMPUTE_CARD}**."
    ) in TEXT


def test_the_second_model_fits_with_five_layers_run_again_and_not_with_four():
    card = parse_bytes(lesson_08.RECOMPUTE_CARD)
    assert lesson_08.recomputed_peak(5) <= card < lesson_08.recomputed_peak(4)


def test_the_weights_of_8_3_live_as_long_as_the_answer_that_knows_their_addresses():
    """Else a tensor made later may lie where a weight lay, and a right answer that compares
    addresses keeps it in memory.
    """
    gone = []

    class Watched(lesson_08.Disk):
        def __init__(self, folder, weights):
            super().__init__(folder, weights)
            self.alive = [weakref.ref(weight) for weight in weights]

        def pack(self, tensor):
            gone.extend(ref for ref in self.alive if ref() is None)
            return super().pack(tensor)

    dict(lesson_08.disk_cases(Watched))
    assert not gone
