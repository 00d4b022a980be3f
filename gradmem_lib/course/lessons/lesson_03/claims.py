"""Lesson 03's answers: what accumulation saves and what it does not, what to divide by, and what
"equal" needs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from ....measure.tracker import MemoryTracker
from ....techniques.accumulation import accumulate_gradients, split
from ....techniques.losses import next_token_loss
from ...ledger import Finding, answers
from ...ledger.finding import Figure, Figures, about, in_unit, less, none, yes
from ...material import models
from ..shared.claim_runs import error, gradient, seeded, token_ids
from ..shared.settings import rows

SIZES = dict(layers=2, hidden=64, heads=4, intermediate=172, vocab=512)


def tokens(batch_size: int, seq_len: int = 32) -> dict[str, torch.Tensor]:
    ids = token_ids(batch_size, seq_len)
    return {"input_ids": ids, "labels": ids}


def window(
    batch: dict[str, torch.Tensor], k: int, set_to_none: bool = True, **model_sizes
) -> tuple[nn.Module, torch.optim.Optimizer, Callable]:
    """A tiny Llama, its AdamW, and a function: an update on ``batch`` in ``k`` micro-batches."""
    model = models.tiny_llama(**SIZES, **model_sizes)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    rows, seq_len = batch["input_ids"].shape

    def update():
        accumulate_gradients(
            split(batch, rows // k),
            lambda m: next_token_loss(model, m),
            total_items=rows * (seq_len - 1),
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    return model, optimizer, update


@cache
def _update(batch_size: int, k: int, seq_len: int = 32, set_to_none: bool = True) -> MemoryTracker:
    """The second AdamW update of a tiny Llama on ``batch_size`` sequences in ``k`` micro-batches,
    tracked.
    """
    model, optimizer, update = window(tokens(batch_size, seq_len), k, set_to_none)
    update()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        update()
    return tracker


def _most(tracker: MemoryTracker, category: str) -> int:
    return max(tracker.timeline.by_category[category])


def _forward_with_gradients(tracker: MemoryTracker) -> float:
    """The share of the forward pass's operations during which gradients are alive."""
    timeline = tracker.timeline
    pairs = zip(timeline.by_category["gradients"], timeline.phases, strict=True)
    alive = [nbytes > 0 for nbytes, phase in pairs if phase == "forward"]
    return sum(alive) / len(alive)


def _exact(what: str, error: float) -> Figure:
    """A relative error that is claimed to be none; what rounding leaves in float64 is none."""
    return Figure(
        what,
        "0",
        float(f"{error:.2g}") if error > 1e-12 else 0,
        high=0,
        unit="of its length" if error > 1e-12 else "",
    )


@answers("C08")
def gradients_stay_as_they_are() -> Finding:
    most = {k: _most(_update(32, k), "gradients") for k in (1, 4, 32)}
    figures: Figures = {
        f"32 sequences in {k} micro-batches: most bytes of gradients": nbytes
        for k, nbytes in most.items()
    }
    figures["parameters"] = _most(_update(32, 1), "parameters")
    return Finding(
        own=(less("bytes of gradients, 32 micro-batches / one", most[32] / most[1]),),
        says="""
            fails: Gradients have the shapes of the parameters, with or without accumulation.
            holds: Gradients take fewer bytes with accumulation.
            why: Each new gradient is added in place, into the same bytes. Accumulation makes
                only the activations smaller.
            """,
        figures=figures,
    )


@answers("C09")
def gradients_live_longer() -> Finding:
    one, cut = _update(32, 1), _update(32, 4)
    before, after = _forward_with_gradients(one), _forward_with_gradients(cut)
    return Finding(
        own=(
            less(
                "bytes of gradients, 4 x 8 / 32", _most(cut, "gradients") / _most(one, "gradients")
            ),
            Figure(
                "forward that finds gradients, 4 x 8", "less", after, high=before - 0.01, unit="%"
            ),
        ),
        says="""
            fails: Accumulation needs the same bytes for gradients and keeps them longer.
            holds: Gradients take fewer bytes with accumulation and are kept no longer.
            why: With one batch, the gradients are freed before the next forward begins. With
                accumulation, they are kept through every forward of the window except the first.
            """,
        figures={
            "one batch of 32: most bytes of gradients": _most(one, "gradients"),
            "4 x 8: most bytes of gradients": _most(cut, "gradients"),
            "one batch of 32: share of forward's operations with gradients alive": before,
            "4 x 8: share of forward's operations with gradients alive": after,
        },
    )


def _gradient_error(lengths: tuple[int, ...], by_items: bool) -> float:
    """How far K micro-batches of one sequence are from the full batch: relative error of the
    gradient, in float64.
    """
    model = models.tiny_gpt2(
        layers=1, hidden=16, heads=2, vocab=64, positions=128, dtype=torch.float64
    )
    labels = rows(*lengths, vocab=64)
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    loss, count = next_token_loss(model, batch)
    (loss / count).backward()
    full = gradient(model)
    if by_items:
        accumulate_gradients(split(batch, 1), lambda m: next_token_loss(model, m))
    else:
        for micro in split(batch, 1):
            loss, count = next_token_loss(model, micro)
            (loss / count / len(lengths)).backward()
    return error(gradient(model), full)


@answers("C10")
def dividing_by_k() -> Finding:
    ragged = (8, 16, 64, 128)
    equal, unequal, by_items = (
        _gradient_error((64,) * 4, False),
        _gradient_error(ragged, False),
        _gradient_error(ragged, True),
    )
    return Finding(
        own=(_exact("gradient's error, equal micro-batches", equal),),
        elsewhere=(_exact("error, 8, 16, 64 and 128 tokens", unequal),),
        beyond=(_exact("the same, divided by tokens", by_items),),
        says="""
            only if: all micro-batches have the same number of tokens, as in the documents' own
                loops; otherwise the gradient is far off.
            fails: Even with equal micro-batches the gradient differs.
            why: The error is the length of the difference, divided by the gradient's length.
                The right way for any micro-batches is to divide each summed loss by the predicted
                tokens of the whole window. No example's result may depend on the others (see C30).
            """,
    )


@answers("C18")
def global_batch() -> Finding:
    micro, steps, gpus = 8, 4, 2
    alone, window = _update(micro, 1), _update(micro * steps, steps)
    rows = gpus * len(tokens(micro * steps)["input_ids"])
    others = 1 - window.peak.by_category["activations"] / window.peak.total
    return Finding(
        own=(
            about("8 x 4 x 2 sequences", 64, rows, within=0),
            about(
                "activations of 4 x 8 / of 8",
                1,
                _most(window, "activations") / _most(alone, "activations"),
                "times",
                within=0.01,
            ),
        ),
        elsewhere=(none("of the peak, not activations", others, "%"),),
        says="""
            only if: activations are meant, which are those of 8 samples; weights, gradients and
                states are in memory for any batch.
            fails: The activations of the whole window take more than those of one mini-batch.
            why: Every GPU and every window must be full. Where they are not, divide by the
                counted items; then the last window is right, too.
            """,
        figures={
            "activations of 8 sequences alone": _most(alone, "activations"),
            "activations of 4 x 8 sequences": _most(window, "activations"),
            "everything else at that window's peak": window.peak.total
            - window.peak.by_category["activations"],
        },
    )


@answers("C22")
def three_quarters() -> Finding:
    figures: Figures = {}
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
        own=(about("activations saved by 4 x 8", 0.75, cuts["activations", 32], "%", within=0.02),),
        elsewhere=(
            about("saved of the peak, 32 tokens a row", 0.75, cuts["peak", 32], "%"),
            about("of the peak, 8 tokens a row", 0.75, cuts["peak", 8], "%"),
        ),
        says="""
            only if: activations are meant, as in its own formula, batch x sequence x hidden;
                the whole peak falls by less.
            fails: The activations of 8 sequences are not a quarter of those of 32.
            why: Parameters, gradients and optimizer states do not shrink. With fewer tokens,
                there is less to save.
            """,
        figures=figures,
    )


def _normalised(norm: nn.Module) -> tuple[float, int]:
    """Relative gradient error of 4 micro-batches against one batch, and how often running
    statistics were updated.
    """
    with seeded():
        net = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 1)).double()
        x, y = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
        other = copy.deepcopy(net)
        nn.functional.mse_loss(net(x), y).backward()
        accumulate_gradients(
            list(zip(x.split(8), y.split(8), strict=True)),
            lambda m: (nn.functional.mse_loss(other(m[0]), m[1], reduction="sum"), len(m[0])),
        )
    updates = int(getattr(other[1], "num_batches_tracked", 0))
    return error(gradient(other), gradient(net)), updates


@answers("C30")
def any_architecture() -> Finding:
    from ..lesson_04.claims_kinds import architectures

    same, again, figures = architectures()
    layer, _ = _normalised(nn.LayerNorm(8))
    batch, updates = _normalised(nn.BatchNorm1d(8))
    dropout, _ = _normalised(nn.Dropout(0.5))
    frozen, _ = _normalised(nn.BatchNorm1d(8).eval())
    return Finding(
        own=(_exact("gradient's error, batch norm accumulated", batch),),
        where=(
            _exact("the same, layer norm", layer),
            yes("same gradient to the bit with checkpoints", same),
        ),
        says=f"""
            only if: no example's result depends on the others: batch normalization and losses
                that compare examples see only the micro-batch.
            holds: Both give the same result with batch normalization, too.
            fails: The gradient differs even where no example's result depends on the others.
            why: Accumulation updates the running statistics of batch normalization {updates}
                times instead of once; checkpoints update them {again} times. With accumulation,
                dropout draws other masks: the gradient is equal in the mean over masks, but not in
                one run. With checkpoints, dropout draws the same masks again.
            """,
        figures={
            "batch norm in eval mode: relative error below 1e-12": in_unit(frozen < 1e-12, "yes"),
            "dropout, other masks: relative error above 0.1": in_unit(dropout > 0.1, "yes"),
        }
        | figures,
    )


@answers("C34")
def tokens_per_update() -> Finding:
    per_micro = 4 * 2048
    steps, rest = divmod(524288, per_micro)
    return Finding(
        own=(about("accumulation steps", 64, steps, within=0), about("tokens left over", 0, rest)),
        says="""
            holds: 64 micro-batches of 8,192 tokens have exactly that many tokens.
            fails: 64 micro-batches of 8,192 tokens have another number of tokens.
            why: On several GPUs, also divide by their number. If tokens are left over, round
                the steps up, and count the tokens that the update really got. The model predicts
                2,047 of every sequence's 2,048 tokens.
            """,
        figures={
            "steps on 8 GPUs": steps // 8,
            "steps for 500,000 tokens": math.ceil(500_000 / per_micro),
            "tokens that makes": math.ceil(500_000 / per_micro) * per_micro,
            "predicted tokens of 64 micro-batches": steps * 4 * 2047,
        },
    )


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


def _logged(k: int = 4) -> tuple[float, float]:
    """What a loop logs of k equal micro-batches over the loss of the update: before dividing by k,
    and after.
    """
    model = models.tiny_llama(**SIZES)
    with torch.no_grad():
        total, count = next_token_loss(model, tokens(32))
        of_each = [next_token_loss(model, micro) for micro in split(tokens(32), 32 // k)]
    logged = torch.stack([loss / n for loss, n in of_each]).mean() / (total / count)
    return round(logged.item(), 4), round(logged.item() / k, 4)


def _logged_of_unequal() -> float:
    """The same before dividing, for micro-batches of 8 and of 128 tokens. The model has learned
    the long one, as models know some rows better than others.
    """
    model = models.tiny_llama(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    short, long = tokens(1, 8), tokens(1, 128)
    for _ in range(5):
        loss, count = next_token_loss(model, long)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    short = {name: ids.flip(1) for name, ids in short.items()}
    with torch.no_grad():
        losses = [next_token_loss(model, micro) for micro in (short, long)]
    logged = sum(loss / count for loss, count in losses) / 2
    update = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
    return round((logged / update).item(), 2)


@answers("C35")
def log_and_clear() -> Finding:
    updates = {(to, k): _update(32, k, 32, to) for to in (True, False) for k in (1, 4)}
    peaks = {key: update.peak.total for key, update in updates.items()}
    kept = {to: updates[to, 4].current.total for to in (True, False)}
    moves = {none: _momentum_moves_on(none) for none in (True, False)}
    before, after = _logged()
    return Finding(
        own=(
            about("loss logged before dividing / the update's", 1, before, "times", within=0.01),
            less("between updates, None / zeros", kept[True] / kept[False]),
        ),
        elsewhere=(
            about("loss logged, of 8 and 128 tokens", 1, _logged_of_unequal(), "times", 0.01),
        ),
        says="""
            only if: all micro-batches have equally many tokens; for others, log the window's
                summed loss divided by its tokens.
            fails: The mean of the logged losses is not the update's loss, or cleared gradients
                take as many bytes as zeros.
            why: set_to_none=True is PyTorch's default. It frees the gradients between updates.
                This lowers the peak of one batch, but not the peak of a window, where gradients are
                kept during forward anyway. Adam then does not change a parameter without a
                gradient.
            """,
        figures={
            "loss logged after dividing by 4 / the update's": after,
            ("one batch: peak with None / with zeros"): f"{peaks[True, 1]:,} / {peaks[False, 1]:,}",
            (
                "4 micro-batches: peak with None / with zeros"
            ): f"{peaks[True, 4]:,} / {peaks[False, 4]:,}",
            ("between updates: with None / with zeros"): f"{kept[True]:,} / {kept[False]:,}",
            "Adam moves a parameter without a gradient: None / zeros": " / ".join(
                in_unit(moves[none], "yes") for none in (True, False)
            ),
        },
    )
