"""Lesson 08's exercises against the library and transformers, and the figures that its text
states.
"""

import weakref

import torch
from support.paths import ROOT

from gradmem_lib import MemoryTracker, accounting, count_operations, offload_activations, tiled
from gradmem_lib.course.lessons.lesson_08 import exercises as lesson_08
from gradmem_lib.course.material import models
from gradmem_lib.units import parse_bytes

TEXT = ROOT / "solutions" / "08_recompute_or_move.py"


def peak(run, model) -> int:
    with MemoryTracker(model, live=False) as tracker:
        run()
    return tracker.peak.total


def test_what_runs_again_is_what_the_library_counts():
    with torch.random.fork_rng(devices=[]):
        layer, x = lesson_08.Attention(), torch.randn(2, 3, 5, 6)
    plain, checkpointed = lesson_08.both_steps(layer, *(x.clone().requires_grad_() for _ in "qkv"))
    again = count_operations(checkpointed) - count_operations(plain)
    # Two products of 3 heads of 6. The linear layer saves nothing that backward waits for.
    assert lesson_08.repeated(plain, checkpointed) == again == 2 * 2 * 2 * 3 * 5 * 5 * 6


def test_a_key_value_cache_is_as_large_as_a_real_one():
    model = models.tiny_llama(layers=3, hidden=64, heads=4, kv_heads=2, intermediate=96, vocab=32)
    with torch.no_grad():
        cache = model(torch.zeros(5, 7, dtype=torch.long), use_cache=True).past_key_values
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert lesson_08.kv_cache(model.config, 5, 7, 4) == real == 2 * 3 * 5 * 7 * 2 * 16 * 4
    for config in lesson_08.cache_configs().values():
        asked = config, 3, 100, 2
        assert lesson_08.kv_cache(*asked) == accounting.kv_cache_bytes(*asked)


def test_the_second_model_fits_with_five_layers_run_again_and_not_with_four():
    peaks = [lesson_08.recomputed_peak(k) for k in range(lesson_08.LAYERS + 1)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[5] <= parse_bytes(lesson_08.RECOMPUTE_CARD) < peaks[4]


def test_the_library_moves_and_tiles_within_the_exercises_budgets():
    model, ids = lesson_08.disk_setting()

    def moved():
        with offload_activations(model=model):
            loss = model(ids).square().mean()
        loss.backward()

    assert peak(moved, model) <= parse_bytes(lesson_08.DISK_CARD)
    mlp, x = lesson_08.tiled_setting()
    with tiled(mlp, lesson_08.TILES):
        tiles = peak(lambda: mlp(x).square().sum().backward(), mlp)
    assert tiles <= parse_bytes(lesson_08.TILED_CARD)


def test_cards_and_peaks_that_the_lesson_states_are_those_of_its_checks():
    text = " ".join(TEXT.read_text(encoding="utf-8").replace("#", " ").split())
    for card in (
        lesson_08.DISK_CARD,
        lesson_08.TILED_CARD,
        lesson_08.RECOMPUTE_CARD,
    ):
        assert f"**{card}**" in text
    model, ids = lesson_08.disk_setting()
    mlp, x = lesson_08.tiled_setting()
    step = peak(lambda: model(ids).square().mean().backward(), model)
    assert f"A step takes {step / 1e6:.1f} MB now." in text
    assert f"Its budget is **{lesson_08.DISK_CARD}**" in text
    plain = peak(lambda: mlp(x).square().sum().backward(), mlp)
    assert (
        f"The budget for 250 tokens in {lesson_08.TILES} tiles is "
        f"**{lesson_08.TILED_CARD}**, where the plain MLP takes {plain / 1e6:.1f} MB."
    ) in text
    assert x.shape[1] == 250
    assert (
        f"Then a GPT-2 of {lesson_08.LAYERS} layers trains with your `k`, in "
        f"**{lesson_08.RECOMPUTE_CARD}**."
    ) in text


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
