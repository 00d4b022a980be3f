"""Which micro-batches a gradient is made of, and with which weights: read off the gradient itself,
however it was made.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...judge.hints import times

NO_STEP = "optimizer.step() is missing: the weights never move."
ANOTHER_STEP = "the weights move, but not by the given optimizer: call step() on that one."
NOTHING = (
    "no gradient is left in .grad: backward is not called, or the gradients are zeroed after it."
)
NO_BACKWARD = (
    "no backward goes through a loss of loss_and_count. If you loop over split(...), map(...) or "
    "another generator twice, the second loop gets nothing: put it in a list first, as list(...) "
    "does."
)
STEP_FIRST = (
    "step() runs before backward, when .grad is still empty: backward comes first, then step(), "
    "then zero_grad()."
)
ZEROED = (
    "the gradient is zero at the step, although backward ran before it: call zero_grad() after "
    "step(), and not between backward and step()."
)


def weights_of(
    gradient: torch.Tensor, parts: Sequence[torch.Tensor], slack: float = 1e-5
) -> list[float] | None:
    """The w with gradient = w[0] * parts[0] + …, for parts that are each the gradient of a summed
    loss; ``None`` if there are none.
    """
    import numpy

    if any(part.shape != gradient.shape for part in parts):
        return None
    left, right = torch.stack(list(parts), 1).double().numpy(), gradient.double().numpy()
    found = numpy.linalg.lstsq(left, right, rcond=None)[0]
    off = abs(left @ found - right).max()
    return [float(w) for w in found] if off <= slack * max(abs(right).max(), 1e-12) else None


def factor_between(
    gradient: torch.Tensor, wanted: torch.Tensor, slack: float = 1e-5
) -> float | None:
    """The f with gradient = f * wanted; ``None`` if no factor holds everywhere."""
    weights = weights_of(gradient.flatten(), [wanted.flatten()], slack)
    return weights[0] if weights else None


def before_each_update(optimizer: torch.optim.Optimizer, look: Callable[[], None]):
    """``look()`` before the optimizer changes the weights, and after the closure that ``step()``
    may have been given, which is where some answers compute their gradients. Returns the handle of
    the hook.
    """

    def hook(optimizer, args, kwargs):
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            look()
            return None

        def closure_and_look():
            loss = closure()
            look()
            return loss

        return (optimizer, closure_and_look), {}

    return optimizer.register_step_pre_hook(hook)


def parts_of(
    loss_and_count: Callable, micro_batches: Sequence, parameters: Sequence
) -> tuple[list, list[int]]:
    """For each micro-batch the gradient of its summed loss, in a row, and its count; nothing is
    left in ``.grad``.
    """
    parts, counts = [], []
    for micro in micro_batches:
        loss, count = loss_and_count(micro)
        found = torch.autograd.grad(loss, parameters)
        parts.append(torch.cat([gradient.double().flatten() for gradient in found]))
        counts.append(int(count))
    return parts, counts


LIMITS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)  # what people clip gradients to


def why_clipped(gradient: torch.Tensor, right: torch.Tensor) -> str | None:
    """What is said of a clipped gradient where the exercise asks for none. ``right`` must be longer
    than each of ``LIMITS``, and one of its numbers larger than 1.
    """
    size, whole = gradient.norm().item(), right.norm().item()
    if not 0 < size < whole or gradient.shape != right.shape:
        return None
    largest = gradient.abs().max().item()
    if torch.allclose(gradient, right.clamp(-largest, largest), atol=1e-3 * largest):
        return (
            f"each number of the gradient is clipped to {largest:.3g}: the exercise asks for no "
            "clipping."
        )
    if not any(math.isclose(size, limit, rel_tol=1e-3) for limit in LIMITS):
        return None
    if torch.allclose(gradient / size, right / whole, atol=1e-3):
        return (
            f"the gradient is clipped to a norm of {size:.3g}: the exercise asks for no clipping."
        )
    return (
        f"the gradient is clipped to a norm of {size:.3g} before the last backward: the exercise "
        "asks for no clipping."
    )


def why(weights: Sequence[float], counts: Sequence[int], what: str = "gradient") -> str | None:
    """What is wrong with the weights of a window's micro-batches, in a sentence; ``None`` where it
    is not known, or nothing.
    """
    k, total = len(counts), sum(counts)
    used = [(w * total, count) for w, count in zip(weights, counts, strict=True) if count]
    gone = [
        i
        for i, (w, n) in enumerate(zip(weights, counts, strict=True), 1)
        if n and abs(w * total) < 1e-6
    ]
    if len(gone) == len(used):
        return NOTHING if what == "gradient" else None
    if gone:
        return _missing(gone, k, what)
    ratios = [ratio for ratio, _ in used]
    if _same(ratios):
        return _all_times(ratios[0], counts, what)
    # 1: every mean has the weight 1 / K
    by_count = [ratio * count / total * k for ratio, count in used]
    if _same(by_count):
        return _mean_of_means(by_count[0], counts, what)
    return _why_uneven(weights, counts, what)


def _why_uneven(weights: Sequence[float], counts: Sequence[int], what: str) -> str | None:
    """What is said where neither each sum nor each mean has the same weight."""
    k, total = len(counts), sum(counts)
    used = [(w * total, count) for w, count in zip(weights, counts, strict=True) if count]
    running = [sum(counts[: i + 1]) for i in range(k) if counts[i]]
    if _same([ratio / total * so_far for (ratio, _), so_far in zip(used, running, strict=True)]):
        return (
            "this divides by the items seen so far, a running total: the total of the whole "
            "window must be known before the first backward."
        )
    again = [w * total / (k - i) for i, w in enumerate(weights) if counts[i]]
    if what == "gradient" and _same([1.0, *again]):
        return (
            f"the first micro-batch counts {k} times in the gradient, the next one {k - 1} times, "
            "and the last one once. Does backward go through a running sum? Call it on each loss "
            "alone."
        )
    if _same([ratio / count for ratio, count in used]):
        return (
            "each sum is multiplied by its count: a sum already has that weight, so only divide "
            "it by the total."
        )
    if _same([ratio * count**2 for ratio, count in used]):
        return (
            "the weights are upside down: each mean is divided by its count, but must be "
            "multiplied by it."
        )
    return None


def _mean_of_means(weight: float, counts: Sequence[int], what: str) -> str:
    """What is said where each mean has the same weight, here times K."""
    k, total = len(counts), sum(counts)
    if math.isclose(weight, k, rel_tol=1e-3):
        return (
            f"this adds up the means of the micro-batches: with {k} of them the {what} is "
            f"about {k} times too large."
        )
    if math.isclose(weight, k / total, rel_tol=1e-3):
        return (
            "means are divided by the total here, as if they were sums: a mean is already "
            "divided by its own count, so multiply it by that count first."
        )
    if not math.isclose(weight, 1, rel_tol=1e-3):
        return (
            f"the mean of every micro-batch has the same weight in the {what}, {weight / k:.3g}, "
            "however many items it has: multiply each mean by its own count, and divide by the "
            "total."
        )
    return (
        f"every micro-batch has the same weight in the {what} (loss / K, a mean of means): an "
        "item of a small one then counts more than one of a large one; divide sums by the "
        "total."
    )


def _missing(gone: list[int], k: int, what: str) -> str:
    if gone == list(range(1, k)):
        lost = (
            " (a zero_grad inside the window, or backward after the loop?)"
            if what == "gradient"
            else ""
        )
        return f"only the last micro-batch counts in the {what}: those before it are lost{lost}."
    if gone == list(range(2, k + 1)):
        return f"only the first micro-batch counts in the {what}."
    which = "the last one" if gone == [k] else f"number {' and '.join(map(str, gone))} of {k}"
    return f"a micro-batch is missing from the {what}: {which}."


def _all_times(ratio: float, counts: Sequence[int], what: str) -> str | None:
    """The sentence for a gradient, or a loss, that is ``ratio`` times what it should be."""
    k, total = len(counts), sum(counts)
    known = [
        (1.0, None),
        (
            total,
            (
                f"no division: this is the {what} of the sum, as many times too large as there are "
                "tokens."
            ),
        ),
        (
            k,
            (
                f"the {what} is K = {k} times too large: this divides by the mean count, or adds "
                "up means; divide by the total."
            ),
        ),
        (
            total / k,
            f"sums are divided by K = {k}: divide them by the number of items, {total} here.",
        ),
        (1 / k, f"this divides twice, by the total and by K: the {what} is {k} times too small."),
    ]
    if one := _one_count(ratio, counts):
        known.append((ratio, f"this divides by {one}: the {what} needs the total of all."))
    if what == "gradient":
        known += [
            (-1.0, "the gradient has the wrong sign: this increases the loss."),
            (
                total + 1,
                (
                    "backward runs in both passes, on the sums and again on the divided losses: "
                    "count without backward."
                ),
            ),
            (2.0, "the gradient is twice too large: backward runs twice for everything."),
        ]
    for wanted, says in known:
        if math.isclose(ratio, wanted, rel_tol=1e-3):
            return says
    return f"the {what} is {times(ratio)} for every micro-batch: look at what it is divided by."


def _one_count(ratio: float, counts: Sequence[int]) -> str:
    """Which single count was divided by; several words where the same number has several."""
    names = {
        "the count of the first micro-batch": counts[0],
        "the count of the last micro-batch": max(counts[-1], 1),
        "the largest count": max(counts),
    }
    fit = [
        name
        for name, count in names.items()
        if count and math.isclose(ratio, sum(counts) / count, rel_tol=1e-3)
    ]
    if len(fit) < 2:
        return "".join(fit)
    return "the count of one micro-batch"


def _same(numbers: Sequence[float]) -> bool:
    return all(math.isclose(number, numbers[0], rel_tol=1e-3) for number in numbers)


def why_loss(loss: float, sums: Sequence[float], counts: Sequence[int]) -> str | None:
    """What a returned loss is that is not the mean over all items, from each micro-batch's summed
    loss and count.
    """
    means = [total / count for total, count in zip(sums, counts, strict=True) if count]
    k, mean = len(counts), sum(sums) / sum(counts)
    known = (
        (sum(means) / len(means), "an unweighted average of the micro-batches' means"),
        (sum(means) / k, "an unweighted average of the micro-batches' means"),
        (sum(means), "the sum of the micro-batches' means"),
        (means[-1], "only the last micro-batch's mean"),
        (means[-1] / k, "the last micro-batch's mean, divided by K"),
        (means[0], "only the first micro-batch's mean"),
        (sums[-1] / sum(counts), "only the last micro-batch's part"),
        (sum(sums), "the sum over all items, not divided by their number"),
        (sum(sums) / k, "the sum over all items, divided by K and not by the number of items"),
        (mean / k, "the mean, divided by K once more"),
        (mean / sum(counts), "divided by the number of items twice"),
        (math.exp(min(mean, 700)), "the perplexity, exp of the mean: return the mean itself"),
    )
    if not isinstance(loss, (int, float)):
        return None
    return next((what for value, what in known if math.isclose(loss, value, rel_tol=1e-5)), None)


def count_backwards(loss: torch.Tensor, note: Callable[[], None]) -> None:
    """``note()`` each time a gradient goes back through ``loss``."""
    if loss.requires_grad:
        loss.register_hook(lambda _: note())


class Graphs:
    """``loss_and_count`` that notices how many graphs of earlier losses are alive when it is
    called: ``most``. ``backwards``: how often a gradient went back through one of its losses.
    ``note`` is called each time.
    """

    def __init__(self, loss_and_count: Callable):
        self.loss_and_count, self.most = loss_and_count, 0
        self.backwards = 0
        self.note: Callable[[], None] = lambda: None
        self._alive: list[weakref.ref] = []

    def __call__(self, micro):
        self.most = max(self.most, sum(graph() is not None for graph in self._alive))
        mark = _Mark()
        # What a graph has saved holds the mark; backward, or letting go of the loss, lets go of it.
        with saved_tensors_hooks(
            lambda tensor, mark=mark: (mark, tensor.detach()), lambda packed: packed[1]
        ):
            result = self.loss_and_count(micro)
        self._alive.append(weakref.ref(mark))
        count_backwards(result[0], self._note_backward)
        return result

    def _note_backward(self) -> None:
        self.backwards += 1
        self.note()

    @property
    def kept(self) -> int:
        """Graphs kept beside the one that is in work: 0 for an answer that lets go of each."""
        return max(0, self.most - 1)


class _Mark:
    pass
