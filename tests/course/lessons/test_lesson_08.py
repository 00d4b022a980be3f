"""Lesson 08's exercises against the library and transformers, and the figures that its text
states.
"""

import weakref

import torch
from support.paths import ROOT

from gradmem_lib import MemoryTracker, accounting, count_operations, offload_activations, tiled
from gradmem_lib.course.lessons.lesson_08 import (
    exercises as lesson_08,
)
from gradmem_lib.course.lessons.lesson_08 import (
    exercises_moving,
    exercises_numbers,
)
from gradmem_lib.course.material import models
from gradmem_lib.units import parse_bytes

TEXT = ROOT / "solutions" / "08_recompute_or_move.py"


def peak(run, model) -> int:
    with MemoryTracker(model, live=False) as tracker:
        run()
    return tracker.peak.total


def test_what_runs_again_is_what_the_library_counts():
    with torch.random.fork_rng(devices=[]):
        layer, x = lesson_08.Attention(), torch.randn(2, 5, 12)
    plain, checkpointed = lesson_08._steps(layer, x, x)
    again = count_operations(checkpointed) - count_operations(plain)
    # Three projections (the fourth saves nothing that backward waits for), and two products of 3
    # heads of 6.
    assert (
        lesson_08.repeated(plain, checkpointed)
        == again
        == 2 * (2 * 5 * 3 * 12 * 18 + 2 * 2 * 3 * 5 * 5 * 6)
    )


def test_a_key_value_cache_is_as_large_as_a_real_one():
    model = models.tiny_llama(layers=3, hidden=64, heads=4, kv_heads=2, intermediate=96, vocab=32)
    with torch.no_grad():
        cache = model(torch.zeros(5, 7, dtype=torch.long), use_cache=True).past_key_values
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert exercises_numbers.kv_cache(model.config, 5, 7, 4) == real == 2 * 3 * 5 * 7 * 2 * 16 * 4
    for config in exercises_numbers.cache_configs().values():
        asked = config, 3, 100, 2
        assert exercises_numbers.kv_cache(*asked) == accounting.kv_cache_bytes(*asked)


def test_the_second_model_fits_with_five_layers_run_again_and_not_with_four():
    peaks = [exercises_numbers.recomputed_peak(k) for k in range(exercises_numbers.LAYERS + 1)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[5] <= parse_bytes(exercises_numbers.RECOMPUTE_CARD) < peaks[4]


def test_the_library_moves_and_tiles_within_the_exercises_budgets():
    model, ids = exercises_moving.disk_setting()

    def moved():
        with offload_activations(model=model):
            loss = model(ids).square().mean()
        loss.backward()

    assert peak(moved, model) <= parse_bytes(exercises_moving.DISK_CARD)
    mlp, x = exercises_moving.tiled_setting()
    with tiled(mlp, exercises_moving.TILES):
        tiles = peak(lambda: mlp(x).square().sum().backward(), mlp)
    assert tiles <= parse_bytes(exercises_moving.TILED_CARD)


def test_cards_and_peaks_that_the_lesson_states_are_those_of_its_checks():
    text = " ".join(TEXT.read_text(encoding="utf-8").replace("#", " ").split())
    for card in (
        exercises_moving.DISK_CARD,
        exercises_moving.TILED_CARD,
        exercises_numbers.RECOMPUTE_CARD,
    ):
        assert f"**{card}**" in text
    model, ids = exercises_moving.disk_setting()
    mlp, x = exercises_moving.tiled_setting()
    step = peak(lambda: model(ids).square().mean().backward(), model)
    assert f"A step takes {step / 1e6:.1f} MB now." in text
    assert f"Its budget is **{exercises_moving.DISK_CARD}**" in text
    plain = peak(lambda: mlp(x).square().sum().backward(), mlp)
    assert (
        f"The budget for 250 tokens in {exercises_moving.TILES} tiles is "
        f"**{exercises_moving.TILED_CARD}**, where the plain MLP takes {plain / 1e6:.1f} MB."
    ) in text
    assert x.shape[1] == 250
    assert (
        f"Then a GPT-2 of {exercises_numbers.LAYERS} layers trains with your `k`, in "
        f"**{exercises_numbers.RECOMPUTE_CARD}**."
    ) in text


def test_the_weights_of_8_3_live_as_long_as_the_answer_that_knows_their_addresses():
    """Else a tensor made later may lie where a weight lay, and a right answer that compares
    addresses keeps it in memory.
    """
    gone = []

    class Watched(exercises_moving.Disk):
        def __init__(self, folder, weights):
            super().__init__(folder, weights)
            self.alive = [weakref.ref(weight) for weight in weights]

        def pack(self, tensor):
            gone.extend(ref for ref in self.alive if ref() is None)
            return super().pack(tensor)

    exercises_moving._observe_disk(Watched)
    assert not gone
