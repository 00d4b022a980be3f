"""What checkpointing saves and what it costs: schedules side by side, as ratios to a step without
any.

    python benchmarks/checkpointing.py [--rounds 3] [--settings chain adapters full wide language]

Peaks are bytes of one training step beyond what is there before it (weights, batch). Times are CPU
time of one thread, or wall time on a CUDA device; the variants take turns, so that whatever else
the machine does falls on all of them alike, and each figure is the median over the rounds of the
ratio within a round. Forward calls are per layer and step, counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature

import torch
import torch.nn.functional as F
from record import record
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from gradmem_lib.course.material import models, texts
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.schedules import schedule_peak, uniform_segments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, ROWS, WIDTH = 64, 512, 128
SEQ_LEN, RANK = 256, 8
SAVED = ("mm", "addmm", "bmm", "baddbmm")  # and whatever attention kernel runs


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of two thin ones beside it (LoRA)."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, device=base.weight.device)
        self.up = nn.Linear(RANK, base.out_features, bias=False, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Setting:
    """A model, its layers, and a step that leaves gradients behind.

    ``batch``: every tensor that the step is given from outside of the model.
    """

    def __init__(
        self,
        what: str,
        model: nn.Module,
        layers: nn.Module,
        batch: torch.Tensor | tuple[torch.Tensor, ...],
        forward: Callable[[], torch.Tensor],
    ):
        self.what, self.model, self.layers, self.batch, self.forward = (
            what,
            model,
            layers,
            batch,
            forward,
        )

    def step(self) -> None:
        self.forward().backward()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


def chain() -> Setting:
    net = models.chain(LAYERS, width=WIDTH, keeps=5).to(DEVICE)
    x = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    weights = torch.rand_like(x)

    def forward():
        x.grad = None
        return (net(x) * weights).sum()

    return Setting(
        f"chain of {LAYERS} equal frozen layers that keep five boundaries each",
        net,
        net,
        (x, weights),
        forward,
    )


def smollm2(*, adapters: bool, rows: int = 1, every_token: bool = False) -> Setting:
    model, tokenizer = models.smollm2()
    model.to(DEVICE)
    ids = texts.batch(tokenizer, batch_size=rows, seq_len=SEQ_LEN).to(DEVICE)
    if adapters:
        model.requires_grad_(False)
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj, attention.v_proj = (
                Adapter(attention.q_proj),
                Adapter(attention.v_proj),
            )

    def forward():
        if every_token:
            return model(input_ids=ids, labels=ids).loss
        return F.cross_entropy(
            model(input_ids=ids[:, :-1], logits_to_keep=1).logits[:, -1], ids[:, -1]
        )

    trained = f"adapters of rank {RANK}" if adapters else "all parameters"
    loss = "every token" if every_token else "the last token"
    what = f"SmolLM2-135M, float32, {rows} x {SEQ_LEN} tokens, {trained} trained, loss on {loss}"
    return Setting(what, model, model.model.layers, ids, forward)


SETTINGS = {
    "chain": chain,
    "adapters": lambda: smollm2(adapters=True),
    "full": lambda: smollm2(adapters=False),
    "wide": lambda: smollm2(adapters=False, rows=4),
    "language": lambda: smollm2(adapters=True, every_token=True),
}
PEAKS_ONLY = ("wide", "language")


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


@contextmanager
def sequential(setting: Setting, segments: int):
    """torch's checkpoint_sequential, with all layers as its list of functions: called when the
    first layer is.
    """

    def call(i, forward, x, **kwargs):
        if i:
            return x
        runs = [partial(type(layer).forward, layer, **kwargs) for layer in setting.layers]
        return checkpoint_sequential(runs, segments, x, use_reentrant=False)

    with each_layer_called(setting, call):
        yield


@contextmanager
def one_in(setting: Setting, k: int):
    """transformers' every_n_layers: one layer in k is checkpointed, the others keep everything."""
    setting.model.activation_checkpointing_enable(every_n_layers=k)
    try:
        yield
    finally:
        setting.model.activation_checkpointing_disable()


@contextmanager
def nothing():
    yield


def variants_of(setting: Setting) -> dict[str, Callable[[], AbstractContextManager]]:
    n = len(setting.layers)
    probe = checkpoint_layers(setting.layers, "best")
    with probe:
        setting.step()
    setting.clear()
    lengths = range(1, n + 1)
    k = min(
        lengths, key=lambda k: schedule_peak(uniform_segments(n, k), probe.internal, probe.boundary)
    )
    print(
        f"{setting.what}\n  a/x {probe.internal[1] / probe.boundary[1]:.2f}, best {probe.segments}"
    )
    root = max(1, round(n**0.5))
    variants = {
        "none": nothing,
        "per layer": lambda: checkpoint_layers(setting.layers, 1),
        f"sqrt (k={root})": lambda: checkpoint_layers(setting.layers, "sqrt"),
        f"best uniform (k={k})": lambda: checkpoint_layers(setting.layers, k),
        "non-uniform": lambda: checkpoint_layers(setting.layers, probe.segments),
        f"checkpoint_sequential ({n // root} segments)": lambda: sequential(setting, n // root),
        "selective": lambda: selective(setting),
    }
    enable = getattr(setting.model, "activation_checkpointing_enable", None)
    if enable is not None and "every_n_layers" in signature(enable).parameters:
        variants["every_n_layers=2"] = lambda: one_in(setting, 2)
    return variants


def measured(setting: Setting, variant: Callable[[], AbstractContextManager]) -> tuple[int, float]:
    """Peak bytes beyond what is there before the step, and forward calls per layer."""
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
    with variant(), MemoryTracker(setting.model, live=False) as tracker:
        tracker.watch(setting.batch, "other")
        before = tracker.current.total
        setting.step()
    for hook in hooks:
        hook.remove()
    setting.clear()
    return tracker.peak.total - before, calls / len(leaves)


def seconds(setting: Setting, variant: Callable[[], AbstractContextManager]) -> float:
    with variant():
        start = now()
        setting.step()
        spent = now() - start
    setting.clear()
    return spent


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def compare(setting: Setting, rounds: int) -> dict:
    variants = variants_of(setting)
    found = {name: measured(setting, variant) for name, variant in variants.items()}
    times = [
        {name: seconds(setting, variant) for name, variant in variants.items()}
        for _ in range(rounds)
    ]
    most = found["none"][0]
    rows = {
        name: {
            "peak / none": round(peak / most, 3),
            "forward calls": round(calls, 3),
        }
        for name, (peak, calls) in found.items()
    }
    for name, row in rows.items():
        if times:
            row["time / none"] = round(statistics.median(t[name] / t["none"] for t in times), 2)
        print(
            f"  {name:<36}" + "".join(f"{key}: {value:<8}" for key, value in row.items()),
            flush=True,
        )
    return {"what": setting.what, "peak of none in bytes": most, "variants": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {
        "clock": "wall" if DEVICE == "cuda" else "CPU time of one thread",
        "rounds": arguments.rounds,
        "settings": {
            name: compare(SETTINGS[name](), 0 if name in PEAKS_ONLY else arguments.rounds)
            for name in arguments.settings
        },
    }
    print("wrote", record("checkpointing", results).name)


if __name__ == "__main__":
    main()
