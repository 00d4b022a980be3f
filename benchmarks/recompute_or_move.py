"""Recompute or move: what each way keeps of a forward, and what it costs, as ratios to a step that
keeps everything.

    python benchmarks/recompute_or_move.py [--rounds 3] [--settings chain full adapters]
    python benchmarks/recompute_or_move.py --dry-run    with tiny models; writes nothing

Bytes are a tracker's: kept is what lives on after the forward beyond what was there before the
step, the peak is of the whole step, moved is what went to files. Operations are those of matrix
products and fused attention. The ways take turns in each round, and a time is the median over
rounds of the ratio within a round: CPU time of one thread, which for files on a CPU is that of
copying and of the system's calls. A card's bus is another matter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from record import record
from torch import nn

# A plain checkout: the library is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpointing import SETTINGS, Setting, now

from gradmem_lib.course.material.flops import count_operations
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.offload import offload_activations
from gradmem_lib.techniques.selective import checkpoint_parts

NAMES = ("chain", "full", "adapters")
NONE, PARTS = "none", ("attention", "mlp")


class Way(NamedTuple):
    """``on(layers)``: what runs again.

    ``moves``: what goes to files, a key of ``names.OFFLOAD``.
    """

    on: Callable[[nn.Module], AbstractContextManager] = lambda layers: nullcontext()
    moves: str | None = None


def ways(setting: Setting) -> dict[str, Way]:
    def layers(every, keep_last: bool | None = None) -> Callable:
        return lambda given: checkpoint_layers(given, every, keep_last=keep_last)

    def parts(part) -> Callable:
        return lambda given: checkpoint_parts(given, part)

    with checkpoint_layers(setting.layers, "best") as best:
        setting.step()
    setting.clear()
    n = len(setting.layers)
    return {
        NONE: Way(),
        "per layer": Way(layers(1)),
        "sqrt": Way(layers("sqrt")),
        "best": Way(layers(best.segments, best.keep_last)),
        f"first {n // 4}": Way(layers(f"first-{n // 4}")),
        f"first {n // 2}": Way(layers(f"first-{n // 2}")),
        "elementwise": Way(parts("elementwise")),
        **{
            part: Way(parts(part))
            for part in PARTS
            if not isinstance(setting.layers, nn.Sequential)
        },
        "all moved": Way(moves="activations"),
        "per layer, boundaries moved": Way(layers(1), "boundaries"),
    }


def step(setting: Setting, way: Way, after_forward: Callable = lambda moved: None) -> None:
    """Forward and backward. ``after_forward`` is given the bytes that were moved."""
    moving = (
        offload_activations(model=setting.model, what=way.moves) if way.moves else nullcontext()
    )
    with moving as moved:
        loss = setting.forward()
    after_forward(moved.bytes if way.moves else 0)
    loss.backward()


def measured(setting: Setting, way: Way) -> dict[str, int]:
    """Of one step: bytes kept after its forward, its peak, bytes moved, and operations."""
    found: dict[str, int] = {}
    with way.on(setting.layers):
        found["operations"] = count_operations(lambda: step(setting, way))
        setting.clear()
        with MemoryTracker(setting.model, live=False) as tracker:
            tracker.watch(setting.batch, "other")
            before = tracker.current.total

            def look(moved: int) -> None:
                found["kept"], found["moved"] = tracker.current.total - before, moved

            step(setting, way, look)
        found["peak"] = tracker.peak.total - before
    setting.clear()
    return found


def times(setting: Setting, taken: dict[str, Way], rounds: int) -> dict[str, float]:
    """Of each way, the median over rounds of its step's time to that of ``none`` in the
    same round.
    """
    ratios: dict[str, list[float]] = {name: [] for name in taken}
    for _ in range(rounds):
        seconds = {}
        for name, way in taken.items():
            with way.on(setting.layers):
                began = now()
                step(setting, way)
                seconds[name] = now() - began
            setting.clear()
        for name in taken:
            ratios[name].append(seconds[name] / seconds[NONE])
    return {name: round(statistics.median(found), 2) for name, found in ratios.items()}


def compare(setting: Setting, rounds: int) -> dict:
    print(setting.what, flush=True)
    taken = ways(setting)
    found = {name: measured(setting, way) for name, way in taken.items()}
    timed = times(setting, taken, rounds)
    base, rows = found[NONE], {}
    for name, one in found.items():
        rows[name] = {
            "kept / none": round(one["kept"] / base["kept"], 3),
            "peak / none": round(one["peak"] / base["peak"], 3),
            "moved / kept by none": round(one["moved"] / base["kept"], 3),
            "operations / none": round(one["operations"] / base["operations"], 3),
            "time / none": timed[name],
        }
        print(
            f"  {name:<28}" + "".join(f"{key}: {value:<8}" for key, value in rows[name].items()),
            flush=True,
        )
    return {"what": setting.what, "none": base, "ways": rows}


def tiny(name: str) -> Setting:
    """As small as it gets, for a dry run."""
    from gradmem_lib.course.material import models

    if name == "chain":
        net, x = models.chain(8, width=16, keeps=5), torch.randn(32, 16, requires_grad=True)
        return Setting("tiny chain", net, net, x, lambda: net(x).sum())
    model = models.tiny_llama(layers=4, hidden=32, heads=4, intermediate=48, vocab=64)
    model.config.use_cache = False
    if name == "adapters":
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.requires_grad_()
    ids = torch.randint(0, 64, (2, 16))
    return Setting(
        f"tiny Llama, {name}", model, model.model.layers, ids, lambda: model(ids, labels=ids).loss
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--dry-run", action="store_true", help="tiny models; writes nothing")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        made = {
            name: (tiny(name) if options.dry_run else SETTINGS[name]()) for name in options.settings
        }
        found = {name: compare(setting, options.rounds) for name, setting in made.items()}
        if not options.dry_run:
            clock = "wall" if torch.cuda.is_available() else "CPU time of one thread"
            results = {"clock": clock, "rounds": options.rounds, "settings": found}
            print("wrote", record("recompute_or_move", results).name)
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
