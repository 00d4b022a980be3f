"""What checkpointing saves and what it costs: schedules side by side, as ratios to a step without
any.

    python benchmarks/checkpointing.py [--rounds 3] [--settings chain adapters full]

Bytes are a tracker's, beyond what is there before the step (weights, batch): the peak is of the
whole step, kept is what lives on after the forward, moved is what went to files. Operations are
those of matrix products and fused attention. Forward calls are per layer and step, counted. Times
are CPU time of one thread, or wall time on a CUDA device; the ways take turns, and each figure is
the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import NamedTuple

import torch
import torch.nn.functional as F
from shared import CLOCK, ON_CARD, in_turns, one_thread, parser, ratio, record, seconds
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from gradmem_lib.course.material import models, texts
from gradmem_lib.course.material.flops import count_operations
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.offload import offload_activations
from gradmem_lib.techniques.schedules import schedule_peak, uniform_segments

DEVICE = "cuda" if ON_CARD else "cpu"
LAYERS, ROWS, WIDTH = 64, 512, 128
SEQ_LEN, RANK = 256, 8
SAVED = ("mm", "addmm", "bmm", "baddbmm")  # and whatever attention kernel runs
NONE = "none"


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of two thin ones beside it (LoRA)."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, device=base.weight.device)
        self.up = nn.Linear(RANK, base.out_features, bias=False, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Setting(NamedTuple):
    """A model, its layers, and a forward whose backward leaves gradients behind.

    ``batch``: every tensor that the step is given from outside of the model.
    """

    what: str
    model: nn.Module
    layers: nn.Module
    batch: torch.Tensor | tuple[torch.Tensor, ...]
    forward: Callable[[], torch.Tensor]

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


class Way(NamedTuple):
    """``on(setting)``: what runs again.

    ``moves``: what goes to files, a key of ``names.OFFLOAD``.
    """

    on: Callable[[Setting], AbstractContextManager] = lambda setting: nullcontext()
    moves: str | None = None


def layers(every, keep_last: bool | None = None) -> Way:
    return Way(lambda setting: checkpoint_layers(setting.layers, every, keep_last=keep_last))


def chain() -> Setting:
    net = models.chain(LAYERS, width=WIDTH, keeps=5).to(DEVICE)
    x = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    weights = torch.rand_like(x)

    def forward():
        x.grad = None
        return (net(x) * weights).sum()

    what = f"chain of {LAYERS} equal frozen layers that keep five boundaries each"
    return Setting(what, net, net, (x, weights), forward)


def smollm2(*, adapters: bool) -> Setting:
    model, tokenizer = models.smollm2()
    model.to(DEVICE)
    ids = texts.batch(tokenizer, batch_size=1, seq_len=SEQ_LEN).to(DEVICE)
    if adapters:
        model.requires_grad_(False)
        for attention in (layer.self_attn for layer in model.model.layers):
            attention.q_proj = Adapter(attention.q_proj)
            attention.v_proj = Adapter(attention.v_proj)

    def forward():
        logits = model(input_ids=ids[:, :-1], logits_to_keep=1).logits
        return F.cross_entropy(logits[:, -1], ids[:, -1])

    trained = f"adapters of rank {RANK}" if adapters else "all parameters"
    what = f"SmolLM2-135M, float32, 1 x {SEQ_LEN} tokens, {trained} trained, loss on the last token"
    return Setting(what, model, model.model.layers, ids, forward)


SETTINGS: dict[str, Callable[[], Setting]] = {
    "chain": chain,
    "adapters": lambda: smollm2(adapters=True),
    "full": lambda: smollm2(adapters=False),
}


def saves_matmuls(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    name = op.name().removeprefix("aten::").split(".")[0]
    keep = name in SAVED or "scaled_dot_product" in name
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def each_layer_called(setting: Setting, call: Callable):
    """Layer i runs as ``call(i, forward, *args, **kwargs)``."""
    try:
        for i, layer in enumerate(setting.layers):
            layer.forward = partial(call, i, layer.forward)
        yield
    finally:
        for layer in setting.layers:
            layer.__dict__.pop("forward", None)


def selective(setting: Setting) -> AbstractContextManager:
    """Every layer checkpointed, but for the results of matrix products and attention, which are
    kept.
    """
    context_fn = partial(create_selective_checkpoint_contexts, saves_matmuls)

    def call(i, forward, x, **kwargs):
        return checkpoint(forward, x, use_reentrant=False, context_fn=context_fn, **kwargs)

    return each_layer_called(setting, call)


def sequential(segments: int, setting: Setting) -> AbstractContextManager:
    """torch's checkpoint_sequential, with all layers as its list of functions: called when the
    first layer is.
    """

    def call(i, forward, x, **kwargs):
        if i:
            return x
        runs = [partial(type(layer).forward, layer, **kwargs) for layer in setting.layers]
        return checkpoint_sequential(runs, segments, x, use_reentrant=False)

    return each_layer_called(setting, call)


@contextmanager
def one_in(k: int, setting: Setting):
    """transformers' every_n_layers: one layer in k is checkpointed, the others keep everything."""
    setting.model.activation_checkpointing_enable(every_n_layers=k)
    try:
        yield
    finally:
        setting.model.activation_checkpointing_disable()


def best_of(setting: Setting):
    """The handle of the best schedule, which knows what a layer keeps."""
    with checkpoint_layers(setting.layers, "best") as best:
        setting.forward().backward()
    setting.clear()
    return best


def schedules(setting: Setting) -> dict[str, Way]:
    n, best = len(setting.layers), best_of(setting)

    def peak(k: int) -> int:
        return schedule_peak(uniform_segments(n, k), best.internal, best.boundary)

    k, root = min(range(1, n + 1), key=peak), max(1, round(n**0.5))
    print(f"  a/x {best.internal[1] / best.boundary[1]:.2f}, best {best.segments}")
    ways = {
        NONE: Way(),
        "per layer": layers(1),
        f"sqrt (k={root})": layers("sqrt"),
        f"best uniform (k={k})": layers(k),
        "non-uniform": layers(best.segments),
        f"checkpoint_sequential ({n // root} segments)": Way(partial(sequential, n // root)),
        "selective": Way(selective),
    }
    enable = getattr(setting.model, "activation_checkpointing_enable", None)
    if enable is not None and "every_n_layers" in signature(enable).parameters:
        ways["every_n_layers=2"] = Way(partial(one_in, 2))
    return ways


def step(setting: Setting, way: Way, after_forward: Callable = lambda moved: None) -> None:
    """Forward and backward. ``after_forward`` is given the bytes that were moved."""
    with ExitStack() as moving:
        moved = None
        if way.moves:
            moved = moving.enter_context(offload_activations(model=setting.model, what=way.moves))
        loss = setting.forward()
    after_forward(0 if moved is None else moved.bytes)
    loss.backward()


def measured(setting: Setting, way: Way) -> dict[str, int]:
    """Of one step: bytes kept after its forward, its peak, bytes moved, and operations."""
    found: dict[str, int] = {}
    with way.on(setting):
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


def forward_calls(setting: Setting, way: Way) -> float:
    """How often a layer runs in a step."""
    calls = 0

    def count(module, args):
        nonlocal calls
        calls += 1

    # The first leaf that runs in a layer: also a layer that early stopping leaves before its end is
    # counted.
    leaves = [
        next(m for m in layer.modules() if not list(m.children())) for layer in setting.layers
    ]
    hooks = [leaf.register_forward_pre_hook(count) for leaf in leaves]
    with way.on(setting):
        step(setting, way)
    for hook in hooks:
        hook.remove()
    setting.clear()
    return calls / len(leaves)


def timed(setting: Setting, way: Way) -> float:
    with way.on(setting):
        spent = seconds(partial(step, setting, way))
    setting.clear()
    return spent


def times(setting: Setting, ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Of each way, the median over rounds of its step's time to that of ``none`` in the
    same round.
    """
    taken = in_turns({name: partial(timed, setting, way) for name, way in ways.items()}, rounds)
    found: dict[str, float] = {}
    for name in ways:
        found[name] = ratio(taken, name, NONE)
    return found


def show(rows: dict[str, dict]) -> None:
    for name, row in rows.items():
        print(f"  {name:<36}" + "".join(f"{key}: {value:<8}" for key, value in row.items()))


def compare(setting: Setting, rounds: int) -> dict:
    print(setting.what, flush=True)
    ways = schedules(setting)
    found = {name: measured(setting, way) for name, way in ways.items()}
    taken, most, rows = times(setting, ways, rounds), found[NONE]["peak"], {}
    for name, way in ways.items():
        rows[name] = {
            "peak / none": round(found[name]["peak"] / most, 3),
            "forward calls": round(forward_calls(setting, way), 3),
            "time / none": taken[name],
        }
    show(rows)
    return {"what": setting.what, "peak of none in bytes": most, "variants": rows}


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    asked = command.parse_args(arguments)
    torch.manual_seed(0)
    found = {}
    with one_thread():
        for name in asked.settings:
            found[name] = compare(SETTINGS[name](), asked.rounds)
    record("checkpointing", {"clock": CLOCK, "rounds": asked.rounds, "settings": found})


if __name__ == "__main__":
    main()
