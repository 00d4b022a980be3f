"""Lesson 03's answers: what accumulation saves and what it does not, what to divide by, and what
"equal" needs.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import nn

from ....measure.tracker import MemoryTracker
from ....techniques.accumulation import accumulate_gradients, split
from ....techniques.losses import next_token_loss
from ...ledger import Finding, answers
from ...ledger.finding import Figure, about, each, less, none, yes
from ...material import models
from ..shared.claim_runs import adam_step, checkpointed, error, gradient, token_ids
from ..shared.settings import rows, seeded, tiny_llama

SIZES = 2, 512  # layers, vocabulary


def tokens(batch_size: int, seq_len: int = 32, vocab: int = 512) -> dict[str, torch.Tensor]:
    ids = token_ids(batch_size, seq_len, vocab)
    return {"input_ids": ids, "labels": ids}


def window(
    batch_size: int, k: int, seq_len: int = 32, set_to_none: bool = True, attention: str = "sdpa"
):
    """A tiny Llama, its AdamW, and a function: an update on a batch in ``k`` micro-batches."""
    model = tiny_llama(*SIZES, attention=attention)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch, total = tokens(batch_size, seq_len), batch_size * (seq_len - 1)

    def update():
        micro_batches = split(batch, batch_size // k)
        accumulate_gradients(micro_batches, partial(next_token_loss, model), total_items=total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    return model, optimizer, update


@cache
def _update(*setting) -> MemoryTracker:
    """The second update of ``window(*setting)``, tracked."""
    model, optimizer, update = window(*setting)
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


def _exact(what: str, found: float) -> Figure:
    """A relative error that is claimed to be none; what rounding leaves in float64 is none."""
    if found < 1e-12:
        found, unit = 0, ""
    else:
        found, unit = float(f"{found:.2g}"), "of its length"
    return Figure(what, "0", found, high=0, unit=unit)


@answers("C08")
def gradients_stay_as_they_are() -> Finding:
    most = {k: _most(_update(32, k), "gradients") for k in (1, 4, 32)}
    return Finding(
        own=less("bytes of gradients, 32 micro-batches / one", most[32] / most[1]),
        says="""
            fails: Gradients have the shapes of the parameters, with or without accumulation.
            holds: Gradients take fewer bytes with accumulation.
            why: Each new gradient is added in place, into the same bytes. Accumulation makes
                only the activations smaller.
            """,
        figures=each("32 sequences in {} micro-batches: most bytes of gradients", most),
    )


@answers("C09")
def gradients_live_longer() -> Finding:
    one, cut = _update(32, 1), _update(32, 4)
    before, after = _forward_with_gradients(one), _forward_with_gradients(cut)
    return Finding(
        own=(
            less(
                "bytes of gradients, 4 micro-batches / one",
                _most(cut, "gradients") / _most(one, "gradients"),
            ),
            Figure(
                "forward operations with gradients alive",
                "less",
                after,
                high=before - 0.01,
                unit="%",
            ),
        ),
        says="""
            fails: Accumulation needs the same bytes for gradients and keeps them longer.
            holds: Gradients take fewer bytes with accumulation and are kept no longer.
            why: With one batch, the gradients are freed before the next forward begins. With
                accumulation, they are kept through every forward of the window except the first.
            """,
        figures=each(
            "{}: share of forward's operations with gradients alive",
            {"one batch of 32": before, "4 x 8": after},
        ),
    )


def _accumulated_error(model: nn.Module, loss_of: Callable, batch: dict, size: int) -> float:
    """How far the gradient of micro-batches of ``size`` rows is from the whole batch's, relative to
    its length. ``loss_of``: a batch's summed loss by ``model``, and its number of items.
    """
    loss, count = loss_of(model, batch)
    (loss / count).backward()
    full = gradient(model)
    accumulate_gradients(split(batch, size), partial(loss_of, model))
    return error(gradient(model), full)


def _mean_loss(model: nn.Module, micro: dict):
    """What a loop without counts adds up: the mean over a micro-batch's tokens, as one item."""
    loss, count = next_token_loss(model, micro)
    return loss / count, 1


def _gradient_error(lengths: tuple[int, ...], loss_of: Callable = _mean_loss) -> float:
    """The same for a GPT-2 in float64 and micro-batches of one sequence."""
    model = models.tiny_gpt2(
        layers=1, hidden=16, heads=2, vocab=64, positions=128, dtype=torch.float64
    )
    labels = rows(*lengths, vocab=64)
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    return _accumulated_error(model, loss_of, batch, 1)


@answers("C10")
def dividing_by_k() -> Finding:
    ragged = (8, 16, 64, 128)
    return Finding(
        own=_exact("gradient's error, equal micro-batches", _gradient_error((64,) * 4)),
        elsewhere=_exact("gradient's error, 8 to 128 tokens", _gradient_error(ragged)),
        beyond=_exact("the same, divided by tokens", _gradient_error(ragged, next_token_loss)),
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
    own, ours = _most(alone, "activations"), _most(window, "activations")
    rows = gpus * len(tokens(micro * steps)["input_ids"])
    others = 1 - window.peak.by_category["activations"] / window.peak.total
    return Finding(
        own=(
            about("8 x 4 x 2 sequences", "64", rows, within=0),
            about("activations of 4 x 8 / of 8", "1×", ours / own, within=0.01),
        ),
        elsewhere=none("of the peak, not activations", others, "%"),
        says="""
            only if: activations are meant, which are those of 8 samples; weights, gradients and
                states are in memory for any batch.
            fails: The activations of the whole window take more than those of one mini-batch.
            why: Every GPU and every window must be full. Where they are not, divide by the
                counted items; then the last window is right, too.
            """,
        figures={"activations of 8 sequences alone": own, "activations of 4 x 8 sequences": ours},
    )


@answers("C22")
def three_quarters() -> Finding:
    found = {}
    for seq_len in (32, 8):
        full, cut = _update(32, 1, seq_len), _update(32, 4, seq_len)
        for name, before, after in (
            ("activations", _most(full, "activations"), _most(cut, "activations")),
            ("peak", full.peak.total, cut.peak.total),
        ):
            found[seq_len, name] = before, after, 1 - after / before
    return Finding(
        own=about("activations saved by 4 x 8", "75%", found[32, "activations"][2], within=0.02),
        elsewhere=(
            about("saved of the peak, 32 tokens a row", "75%", found[32, "peak"][2]),
            about("of the peak, 8 tokens a row", "75%", found[8, "peak"][2]),
        ),
        says="""
            only if: activations are meant, as in its own formula; the whole peak falls by less.
            fails: The activations of 8 sequences are not a quarter of those of 32.
            why: Parameters, gradients and optimizer states do not shrink. With fewer tokens,
                activations are a smaller share of the peak.
            """,
        figures=each("rows of {} tokens: {}, 32 / 4 x 8", found, "{:,} / {:,}, {:.0%} less"),
    )


def _squared_error(net: nn.Module, batch: dict):
    """A batch's summed loss, and its number of items."""
    return (net(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


def _same_with_checkpoints(model: nn.Module, loss_of: Callable, batch: dict) -> bool:
    """Is the gradient the same to the bit with a checkpoint around each layer?"""
    gradients = []
    for every in (None, 1):
        with seeded(), checkpointed(model, every):
            loss_of(model, batch)[0].backward()
        gradients.append(gradient(model))
    return torch.equal(*gradients)


@answers("C30")
def any_architecture() -> Finding:
    errors, same = {}, {}
    for name, extra in (
        ("dropout", nn.Dropout(0.5)),
        ("layer norm", nn.LayerNorm(8)),
        ("batch norm", nn.BatchNorm1d(8)),
    ):
        with seeded():
            net = nn.Sequential(nn.Linear(4, 8), extra, nn.ReLU(), nn.Linear(8, 1)).double()
            x, y = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
        batch = {"x": x, "y": y}
        errors[name] = _accumulated_error(net, _squared_error, batch, 8)
        same[name] = _same_with_checkpoints(net, _squared_error, batch)
    tied = models.tiny_gpt2(layers=2, hidden=32, heads=2, vocab=64)
    same["GPT-2 with tied weights"] = _same_with_checkpoints(
        tied, next_token_loss, tokens(2, 8, 64)
    )
    return Finding(
        own=_exact("gradient's error, batch norm accumulated", errors["batch norm"]),
        where=(
            _exact("the same, layer norm", errors["layer norm"]),
            yes("same gradient to the bit with checkpoints", all(same.values())),
        ),
        says="""
            only if: no example's result depends on the others: batch normalization and losses
                that compare examples see only the micro-batch.
            holds: Both give the same result with batch normalization, too.
            fails: The gradient differs even where no example's result depends on the others.
            why: Accumulation updates the running statistics of batch normalization 4
                times instead of once; checkpoints update them 2 times. With accumulation,
                dropout draws other masks: the gradient is equal in the mean over masks, but not in
                one run. With checkpoints, dropout draws the same masks again.
            """,
        figures={"dropout, other masks: relative error above 0.1": errors["dropout"] > 0.1}
        | each("checkpointing, {}: gradient the same to the bit", same),
    )


@answers("C34")
def tokens_per_update() -> Finding:
    per_micro = 4 * 2048
    steps, rest = divmod(524288, per_micro)
    return Finding(
        own=(
            about("accumulation steps", "64", steps, within=0),
            about("tokens left over", "0", rest),
        ),
        says="""
            holds: 64 micro-batches of 8,192 tokens have exactly that many tokens.
            fails: 64 micro-batches of 8,192 tokens have another number of tokens.
            why: On several GPUs, also divide by their number. If tokens are left over, round
                the steps up, and count the tokens that the update really got. The model predicts
                2,047 of every sequence's 2,048 tokens.
            """,
        figures={"predicted tokens of 64 micro-batches": steps * 4 * 2047},
    )


def _momentum_moves_on(set_to_none: bool) -> bool:
    """Does Adam move a parameter that gets no gradient in its second update?"""
    weight, optimizer = adam_step(torch.float32)
    optimizer.zero_grad(set_to_none=set_to_none)
    before = weight.detach().clone()
    optimizer.step()
    return not torch.equal(weight, before)


def _logged(short: int, long: int) -> float:
    """What a loop logs of two micro-batches of so many tokens before it divides, their mean, over
    the loss of the update. The model has learned the long one, as models know some rows better than
    others.
    """
    model = tiny_llama(*SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    known = tokens(1, long)
    for _ in range(5):
        loss, count = next_token_loss(model, known)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    new = {name: ids.flip(1) for name, ids in tokens(1, short).items()}
    with torch.no_grad():
        (first, few), (second, many) = (next_token_loss(model, micro) for micro in (new, known))
    logged, update = (first / few + second / many) / 2, (first + second) / (few + many)
    return round((logged / update).item(), 2)


@answers("C35")
def log_and_clear() -> Finding:
    peaks = {}
    for name, k in (("one batch", 1), ("4 micro-batches", 4)):
        none, zeros = _update(32, k), _update(32, k, 32, False)
        peaks[name] = none.peak.total, zeros.peak.total
    kept = none.current.total / zeros.current.total
    moves = {"None": _momentum_moves_on(True), "zeros": _momentum_moves_on(False)}
    return Finding(
        own=(
            about("loss logged before dividing / the update's", "1×", _logged(32, 32), within=0.01),
            less("between updates, None / zeros", kept),
        ),
        elsewhere=about("loss logged, of 8 and 128 tokens", "1×", _logged(8, 128), within=0.01),
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
        figures=each("{}: peak with None / with zeros", peaks, "{:,} / {:,}")
        | each("Adam moves a parameter without a gradient: {}", moves),
    )
