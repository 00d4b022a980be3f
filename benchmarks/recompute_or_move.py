"""Recompute or move: what each way keeps of a forward, and what it costs, as ratios to a step that
keeps everything.

    python benchmarks/recompute_or_move.py [--rounds 3] [--settings chain full adapters]
    python benchmarks/recompute_or_move.py --dry-run    with tiny models; writes nothing

Measured as in ``checkpointing.py``. The CPU time of moving to files is that of copying and of the
system's calls. A card's bus is another matter.
"""

from __future__ import annotations

import torch
from checkpointing import NONE, SETTINGS, Setting, Way, best_of, layers, measured, show, times
from shared import CLOCK, one_thread, parser, record
from torch import nn

from gradmem_lib.course.material import models
from gradmem_lib.techniques.selective import checkpoint_parts

NAMES = ("chain", "full", "adapters")
# By the name of a figure: what is measured, and of what step without checkpoints it is a share.
SHARES = {
    "kept / none": ("kept", "kept"),
    "peak / none": ("peak", "peak"),
    "moved / kept by none": ("moved", "kept"),
    "operations / none": ("operations", "operations"),
}


def parts(part: str) -> Way:
    return Way(lambda setting: checkpoint_parts(setting.layers, part))


def ways(setting: Setting) -> dict[str, Way]:
    best, n = best_of(setting), len(setting.layers)
    found = {
        NONE: Way(),
        "per layer": layers(1),
        "sqrt": layers("sqrt"),
        "best": layers(best.segments, best.keep_last),
        f"first {n // 4}": layers(f"first-{n // 4}"),
        f"first {n // 2}": layers(f"first-{n // 2}"),
        "elementwise": parts("elementwise"),
    }
    if not isinstance(setting.layers, nn.Sequential):
        found |= {"attention": parts("attention"), "mlp": parts("mlp")}
    found["all moved"] = Way(moves="activations")
    found["per layer, boundaries moved"] = layers(1)._replace(moves="boundaries")
    return found


def compare(setting: Setting, rounds: int) -> dict:
    print(setting.what, flush=True)
    taken = ways(setting)
    found = {name: measured(setting, way) for name, way in taken.items()}
    timed, base, rows = times(setting, taken, rounds), found[NONE], {}
    for name, one in found.items():
        rows[name] = {share: round(one[a] / base[b], 3) for share, (a, b) in SHARES.items()}
        rows[name]["time / none"] = timed[name]
    show(rows)
    return {"what": setting.what, "none": base, "ways": rows}


def tiny(name: str) -> Setting:
    """As small as it gets, for a dry run."""
    if name == "chain":
        net, x = models.chain(8, width=16, keeps=5), torch.randn(32, 16, requires_grad=True)
        return Setting("tiny chain", net, net, x, lambda: net(x).sum())
    model = models.tiny_llama(layers=4, hidden=32, heads=4, intermediate=48, vocab=64)
    model.config.use_cache = False
    if name == "adapters":
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.requires_grad_()
    ids, inner = torch.randint(0, 64, (2, 16)), model.model.layers
    return Setting(f"tiny Llama, {name}", model, inner, ids, lambda: model(ids, labels=ids).loss)


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--settings", nargs="+", choices=NAMES, default=list(NAMES))
    command.add_argument("--dry-run", action="store_true", help="tiny models; writes nothing")
    asked = command.parse_args(arguments)
    torch.manual_seed(0)
    found = {}
    with one_thread():
        for name in asked.settings:
            setting = tiny(name) if asked.dry_run else SETTINGS[name]()
            found[name] = compare(setting, asked.rounds)
    if not asked.dry_run:
        record("recompute_or_move", {"clock": CLOCK, "rounds": asked.rounds, "settings": found})


if __name__ == "__main__":
    main()
