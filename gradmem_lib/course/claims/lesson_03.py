"""Lesson 03's answers: what accumulation saves and what it does not, what to divide by, and what "equal" needs.

Times are not asserted: what costs time is counted (operations, floating-point operations), and the ratio that
``benchmarks/accumulation.py`` recorded is quoted with its device.
"""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ...compat import TorchDispatchMode
from ...measure.tracker import MemoryTracker
from ...techniques.accumulation import accumulate_gradients, split
from ...techniques.losses import next_token_loss
from .. import models
from . import Finding, answers

RECORD = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "accumulation.json"
SIZES = dict(layers=2, hidden=64, heads=4, intermediate=172, vocab=512)


def _tokens(batch_size: int, seq_len: int = 32, vocab: int = 512) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocab, (batch_size, seq_len), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@cache
def _update(batch_size: int, k: int, seq_len: int = 32) -> MemoryTracker:
    """The second AdamW update of a tiny Llama on ``batch_size`` sequences in ``k`` micro-batches, tracked."""
    model = models.tiny_llama(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = _tokens(batch_size, seq_len)

    def update():
        micro_batches = split(batch, batch_size // k)
        accumulate_gradients(
            micro_batches, lambda m: next_token_loss(model, m), total_items=batch_size * (seq_len - 1)
        )
        optimizer.step()
        optimizer.zero_grad()

    update()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        update()
    return tracker


def _most(tracker: MemoryTracker, category: str) -> int:
    return max(tracker.timeline.by_category[category])


def _moments_with_gradients(tracker: MemoryTracker) -> str:
    """In how many of the forward pass's operations gradients are alive, as text."""
    timeline = tracker.timeline
    alive = [
        g > 0
        for g, p in zip(timeline.by_category["gradients"], timeline.phases, strict=True)
        if p == "forward"
    ]
    return f"{sum(alive)} of {len(alive)}"


@answers("C08")
def gradients_stay_as_they_are() -> Finding:
    figures: dict[str, int | float | str] = {}
    most = {}
    for k in (1, 2, 4, 8, 32):
        most[k] = _most(_update(32, k), "gradients")
        figures[f"32 sequences in {k} micro-batches: most bytes of gradients"] = most[k]
    figures["parameters"] = _most(_update(32, 1), "parameters")
    same = len(set(most.values())) == 1
    return Finding(
        "does not hold" if same else "holds",
        "Gradients have the shapes of the parameters, whatever the batch: they are added up in place, in the same bytes. What "
        "accumulation keeps small is the activations.",
        figures,
    )


@answers("C09")
def gradients_live_longer() -> Finding:
    one, cut = _update(32, 1), _update(32, 4)
    return Finding(
        "does not hold",
        "It needs exactly the same bytes of gradients, and for longer: with one batch they are gone before the next forward "
        "begins; with micro-batches they stay through every forward of the window but the first.",
        {
            "one batch of 32: most bytes of gradients": _most(one, "gradients"),
            "4 x 8: most bytes of gradients": _most(cut, "gradients"),
            "one batch of 32: samples of forward with gradients alive": _moments_with_gradients(one),
            "4 x 8: samples of forward with gradients alive": _moments_with_gradients(cut),
        },
    )


def _gradient_error(lengths: tuple[int, ...], by_items: bool) -> float:
    """How far K micro-batches of one sequence are from the full batch: relative error of the gradient, in float64."""
    model = models.tiny_gpt2(layers=1, hidden=16, heads=2, vocab=64, positions=128, dtype=torch.float64)
    ids = torch.randint(0, 64, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], -100)
    batch = {"input_ids": ids, "labels": labels}

    def gradient():
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return found

    loss, count = next_token_loss(model, batch)
    (loss / count).backward()
    full = gradient()
    if by_items:
        accumulate_gradients(split(batch, 1), lambda m: next_token_loss(model, m))
    else:
        for micro in split(batch, 1):
            loss, count = next_token_loss(model, micro)
            (loss / count / len(lengths)).backward()
    return ((gradient() - full).norm() / full.norm()).item()


@answers("C10")
def dividing_by_k() -> Finding:
    equal, unequal = _gradient_error((64,) * 4, False), _gradient_error((8, 16, 64, 128), False)
    by_items = _gradient_error((8, 16, 64, 128), True)
    return Finding(
        "holds only if" if equal < 1e-12 < 1e-3 < unequal else "does not hold",
        "every micro-batch has the same number of items (predicted tokens), and nothing in the model looks across the batch. With "
        f"sequences of 8, 16, 64 and 128 tokens the gradient is off by {unequal:.2g} of its length. Divided by the items of the whole "
        "window instead, it is the full batch's to the last digits.",
        {
            "4 equal lengths, divided by K: relative error below 1e-12": "yes" if equal < 1e-12 else "no",
            "8, 16, 64, 128 tokens, divided by K: relative error": f"{unequal:.2g}",
            "8, 16, 64, 128 tokens, divided by items: below 1e-12": "yes" if by_items < 1e-12 else "no",
        },
    )


class _Count(TorchDispatchMode):
    """How many operations are dispatched: each is at least one kernel to launch."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


@cache
def _work(k: int, step_each: bool = False) -> tuple[int, int, int]:
    """Operations, floating-point operations in matrix products, and additions to gradients, of one window of 32."""
    model = models.tiny_llama(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def window():
        if step_each:
            for micro in split(_tokens(32), 32 // k):
                loss, count = next_token_loss(model, micro)
                (loss / count).backward()
                optimizer.step()
                optimizer.zero_grad()
            return
        accumulate_gradients(
            split(_tokens(32), 32 // k), lambda m: next_token_loss(model, m), total_items=32 * 31
        )
        optimizer.step()
        optimizer.zero_grad()

    window()  # the first step makes Adam's states
    with _Count() as count:
        window()
    with FlopCounterMode(display=False) as flops:
        window()
    additions = 0 if step_each else (k - 1) * sum(p.numel() for p in model.parameters())
    return count.operations, flops.get_total_flops(), additions


def recorded() -> dict | None:
    """What ``benchmarks/accumulation.py`` wrote, or None where the course's folder has no record."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else None


def _recorded_figures(*ways: str) -> dict[str, str]:
    found = recorded()
    if found is None:
        return {"recorded times": "none here: run benchmarks/accumulation.py"}
    where = f"{found['clock']}, {found['where']['device']}, {found['where']['date']}"
    return {
        f"recorded time of {k} {way} micro-batches / one batch of 16 ({where})": f"{ratio:.2f}"
        for way in ways
        for k, ratio in found[way].items()
        if k in ("2", "4", "16")
    }


@answers("C16")
def the_same_samples_take_longer() -> Finding:
    one, cut, stepped = _work(1), _work(8), _work(8, step_each=True)
    return Finding(
        "holds only if" if one[0] < cut[0] < stepped[0] else "does not hold",
        "you compare with one batch of the full size, and the micro-batches are too small to keep the device busy: the same samples go "
        "through in many more and smaller operations. Our record on a CPU has moderate cuts at no cost and only the smallest slower. "
        "Compared with an update after every micro-batch it is less work, since the optimizer steps once.",
        {
            "operations, one batch of 32": one[0],
            "operations, 8 x 4 accumulated": cut[0],
            "operations, 8 x 4 with an update each": stepped[0],
            **_recorded_figures("accumulated", "stepped"),
        },
    )


@answers("C18")
def global_batch() -> Finding:
    micro, steps, gpus = 8, 4, 2
    alone, window = _update(8, 1), _update(32, 4)
    return Finding(
        "holds only if",
        f"{micro} x {steps} x {gpus} = {micro * steps * gpus}, where every GPU and every window is full (count items, and the last "
        'window and uneven shares are right too); and "in memory" means activations: those are the micro-batch\'s, while '
        "parameters, gradients and optimizer states are there whatever the batch.",
        {
            "global batch, sequences": micro * steps * gpus,
            "activations of 8 sequences alone": _most(alone, "activations"),
            "activations of 4 x 8 sequences": _most(window, "activations"),
            "everything else at that window's peak": window.peak.total
            - window.peak.by_category["activations"],
        },
    )


@answers("C22")
def three_quarters() -> Finding:
    figures: dict[str, int | float | str] = {}
    cuts = {}
    for seq_len in (32, 8):
        full, cut = _update(32, 1, seq_len), _update(32, 4, seq_len)
        for name, before, after in (
            ("activations", _most(full, "activations"), _most(cut, "activations")),
            ("gradients", _most(full, "gradients"), _most(cut, "gradients")),
            ("peak", full.peak.total, cut.peak.total),
        ):
            cuts[name, seq_len] = 1 - after / before
            figures[f"sequences of {seq_len}: {name}, 32 / 4 x 8"] = (
                f"{before:,} / {after:,}, {1 - after / before:.0%} less"
            )
    return Finding(
        "holds only if" if round(cuts["activations", 32], 2) == 0.75 else "does not hold",
        "it is the activations you mean. Parameters, gradients and optimizer states do not shrink, so the whole peak falls by less, "
        f"here by {cuts['peak', 32]:.0%} with sequences of 32 tokens and by {cuts['peak', 8]:.0%} with sequences of 8: the fewer the "
        "tokens, the less there is to save.",
        figures,
    )


@answers("C29")
def no_overhead() -> Finding:
    one, cut = _work(1), _work(8)
    return Finding(
        "holds only if" if one[1] == cut[1] else "does not hold",
        "you count the floating-point operations of the matrix products: those are the same. Beside them each parameter's gradient is "
        f"added to K - 1 times, and {cut[0] / one[0]:.1f} times as many operations have to be started for K = 8; small ones leave a "
        "device partly idle, which is where measured times grow.",
        {
            "FLOP in matrix products, one batch of 32": one[1],
            "FLOP in matrix products, 8 x 4": cut[1],
            "additions into gradients, 8 x 4": cut[2],
            "operations started, one batch / 8 x 4": f"{one[0]:,} / {cut[0]:,}",
            **_recorded_figures("accumulated"),
        },
    )


def _normalised(norm: nn.Module) -> tuple[float, int | None]:
    """Relative gradient error of 4 micro-batches against one batch, and how often running statistics were updated."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 1)).double()
        x, y = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
        other = copy.deepcopy(net)
        nn.functional.mse_loss(net(x), y).backward()
        accumulate_gradients(
            list(zip(x.split(8), y.split(8), strict=True)),
            lambda m: (nn.functional.mse_loss(other(m[0]), m[1], reduction="sum"), len(m[0])),
        )
    one, cut = (torch.cat([p.grad.flatten() for p in n.parameters()]) for n in (net, other))
    batches = getattr(other[1], "num_batches_tracked", None)
    return ((cut - one).norm() / one.norm()).item(), None if batches is None else int(batches)


@answers("C30")
def any_architecture() -> Finding:
    from .lesson_04_kinds import architectures

    checkpointing, figures = architectures()
    layer, _ = _normalised(nn.LayerNorm(8))
    batch, updates = _normalised(nn.BatchNorm1d(8))
    dropout, _ = _normalised(nn.Dropout(0.5))
    frozen, _ = _normalised(nn.BatchNorm1d(8).eval())
    return Finding(
        "holds only if" if layer < 1e-12 < 1e-3 < batch else "does not hold",
        "every example's loss is its own. In accumulation, batch normalisation takes its statistics over the micro-batch, so the gradient "
        f"is another one and the running statistics are updated {updates} times instead of once; a contrastive loss loses its negatives. Dropout "
        "draws other masks: equal in the mean over masks, not in one run. " + checkpointing,
        {
            "layer norm: relative error below 1e-12": "yes" if layer < 1e-12 else "no",
            "batch norm, 4 x 8 against 32: relative error": f"{batch:.2g}",
            "batch norm in eval mode: relative error below 1e-12": "yes" if frozen < 1e-12 else "no",
            "dropout, other masks: relative error above 0.1": "yes" if dropout > 0.1 else "no",
        }
        | figures,
    )


def excess_loss(
    optimizer: type[torch.optim.Optimizer], lr: float, batch: int, *, samples: int = 2048
) -> float:
    """Squared distance from the true weights after one pass over ``samples`` noisy examples, mean over 64 runs.

    A linear regression in 20 dimensions, float64. The 64 runs have data of their own and train side by side.
    """
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(20, 1, generator=generator, dtype=torch.float64)
    x = torch.randn(64, samples, 20, generator=generator, dtype=torch.float64)
    y = x @ true + 2.0 * torch.randn(64, samples, 1, generator=generator, dtype=torch.float64)
    weights = torch.zeros(64, 20, 1, dtype=torch.float64, requires_grad=True)
    steps = optimizer([weights], lr=lr)
    for i in range(0, samples, batch):
        error = x[:, i : i + batch] @ weights - y[:, i : i + batch]
        error.square().mean(dim=(1, 2)).sum().backward()
        steps.step()
        steps.zero_grad()
    return (weights.detach() - true).square().sum(dim=(1, 2)).mean().item()


LEARNING_RATES = {"SGD": (torch.optim.SGD, 0.008), "Adam": (torch.optim.Adam, 0.02)}


@cache
def learning_rates(name: str) -> dict[tuple[int, int], float]:
    """``excess_loss`` by (batch, factor on the learning rate): batch 4 at factor 1, and batch 16 at 1, 2, 4 and 8."""
    optimizer, lr = LEARNING_RATES[name]
    runs = [(4, 1), *((16, factor) for factor in (1, 2, 4, 8))]
    return {(batch, factor): excess_loss(optimizer, lr * factor, batch) for batch, factor in runs}


@answers("C31")
def linear_scaling() -> Finding:
    figures: dict[str, int | float | str] = {}
    nearest = {}
    for name in LEARNING_RATES:
        found = learning_rates(name)
        base = found[4, 1]
        figures[f"{name}: error after one pass at batch 4"] = f"{base:.2g}"
        for factor in (1, 2, 4, 8):
            figures[f"{name}: the same at batch 16, learning rate x {factor}"] = f"{found[16, factor]:.2g}"
        nearest[name] = min((1, 2, 4, 8), key=lambda factor: abs(math.log(found[16, factor] / base)))
    return Finding(
        "holds only if" if nearest == {"SGD": 4, "Adam": 2} else "does not hold",
        "the optimizer is SGD and the batch is small enough to be noisy: four times the batch then behaves like the small batch at "
        f"{nearest['SGD']} times the learning rate. Adam divides by the gradient's size already, and is matched by {nearest['Adam']}, the "
        "square root. And more is not owed: an unchanged learning rate is safe, only slower.",
        figures,
    )


@answers("C34")
def tokens_per_update() -> Finding:
    per_micro = 4 * 2048
    steps, rest = divmod(524288, per_micro)
    return Finding(
        "holds" if (steps, rest) == (64, 0) else "does not hold",
        "4 x 2048 = 8,192 tokens, and 524,288 is a multiple of that. On several GPUs divide by their number as well; where something "
        "is left over, round up, and count what the update really got. Of every sequence's 2,048 tokens 2,047 are predicted.",
        {
            "steps": steps,
            "left over, tokens": rest,
            "steps on 8 GPUs": steps // 8,
            "steps for 500,000 tokens": math.ceil(500_000 / per_micro),
            "tokens that makes": math.ceil(500_000 / per_micro) * per_micro,
            "predicted tokens of 64 micro-batches": 64 * 4 * 2047,
        },
    )


def _zeroing(set_to_none: bool, k: int) -> tuple[int, int]:
    """Peak of an update, and bytes that stay between updates, by how gradients are cleared."""
    model = models.tiny_llama(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = _tokens(32)

    def update():
        accumulate_gradients(split(batch, 32 // k), lambda m: next_token_loss(model, m), total_items=32 * 31)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    update()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        update()
    return tracker.peak.total, tracker.current.total


def _momentum_moves_on(set_to_none: bool) -> bool:
    """Does Adam move a parameter that gets no gradient in its second update?"""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    before = weight.detach().clone()
    optimizer.step()
    return not torch.equal(weight.detach(), before)


@answers("C35")
def log_and_clear() -> Finding:
    peaks = {(none, k): _zeroing(none, k) for none in (True, False) for k in (1, 4)}
    moves = {none: _momentum_moves_on(none) for none in (True, False)}
    helps = peaks[True, 1][0] < peaks[False, 1][0] and peaks[True, 4][0] == peaks[False, 4][0]
    return Finding(
        "holds only if" if helps and moves == {True: False, False: True} else "does not hold",
        "the micro-batches have equal counts: then the loss before dividing is each one's mean, and the mean of those is the window's. "
        "Otherwise log the window's summed loss over its count. set_to_none=True is PyTorch's default: it frees the gradients between "
        "updates, which lowers the peak of one batch and not that of a window (its gradients live through forward anyway), and Adam "
        "then leaves alone a parameter that got no gradient.",
        {
            "loss logged after dividing by K = 4, over the loss": 0.25,
            "one batch: peak with None / with zeros": f"{peaks[True, 1][0]:,} / {peaks[False, 1][0]:,}",
            "4 micro-batches: peak with None / with zeros": f"{peaks[True, 4][0]:,} / {peaks[False, 4][0]:,}",
            "between updates: with None / with zeros": f"{peaks[True, 4][1]:,} / {peaks[False, 4][1]:,}",
            "Adam moves a parameter without a gradient: None / zeros": " / ".join(
                "yes" if moves[n] else "no" for n in (True, False)
            ),
        },
    )
