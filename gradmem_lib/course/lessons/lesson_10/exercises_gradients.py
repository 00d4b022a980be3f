"""Lesson 10's exercises about gradients over several ranks: DDP by hand, and the divisor of uneven
ranks.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....names import IGNORED
from ...judge.compare import plain
from ...judge.exercise import Exercise, HiddenCase, Mistake
from ..shared.gradient_weights import factor_between
from ..shared.settings import flat
from .thread_ranks import APART, UNFIT, on_ranks


def average_gradients(model):
    """After backward on every rank: let each gradient be the mean over the ranks, one that is
    missing counting as zeros.
    """
    _averaged()(model)


def _every(model):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            yield p


def _every_trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def _each(model):
    return [p for p in model.parameters() if p.grad is not None]


def _averaged(
    *, of=_every, tensor=lambda p: p.grad, over=dist.get_world_size, send=dist.all_reduce
):
    def wrong(model):
        for p in of(model):
            t = tensor(p)
            send(t)
            t.div_(over())

    return wrong


def _of_those_that_have_one(model):
    for p in model.parameters():
        if not p.requires_grad:
            continue
        has = torch.tensor(float(p.grad is not None))
        dist.all_reduce(has)
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= has.clamp(min=1).item()


@torch.no_grad()
def _weights(model):
    for p in model.parameters():
        dist.all_reduce(p)
        p /= dist.get_world_size()


def _broadcast(tensor):
    dist.broadcast(tensor, src=0)


class Experts(nn.Module):
    """A frozen table, and two layers of which a rank uses both, or the first alone.

    Ids (rows,) to (rows, 3).
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        # The one that may have no gradient comes first, so that no rank sends it last by chance.
        self.second = nn.Linear(5, 3, bias=False)
        self.table = nn.Embedding(7, 5).requires_grad_(False)  # between those that are trained
        self.first = nn.Linear(5, 3)
        generator = torch.Generator().manual_seed(10)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator).to(dtype)

    def forward(self, ids, both: bool):
        x = self.table(ids)
        return self.first(x) + self.second(x).sin() if both else self.first(x).square()


def _trained(ranks: int, dtype: torch.dtype, both: tuple[int, ...]) -> list[Experts]:
    """A model for each rank after its backward; those in ``both`` have a gradient for every trained
    weight.
    """
    models = [Experts(dtype) for _ in range(ranks)]
    for rank, model in enumerate(models):
        model.second.weight.data.mul_(1 + rank / 8)  # so that a mean of weights is seen
        model(torch.arange(rank, rank + 3) % 7, rank in both).sum().backward()
    return models


def _observe_average(candidate):
    found: dict = {}
    for name, ranks, dtype, both in (
        ("2 ranks", 2, torch.float64, (0, 1)),
        ("3 ranks", 3, torch.float64, (0, 1, 2)),
        ("2 ranks, in bf16", 2, torch.bfloat16, (0, 1)),
        ("3 ranks, of which the last has no gradient for some weights", 3, torch.float64, (0, 1)),
        (HiddenCase("4 ranks"), 4, torch.float64, (3,)),
    ):
        models = _trained(ranks, dtype, both)
        before = flat(models[-1].parameters())
        on_ranks(lambda rank, models=models: candidate(models[rank]), ranks)
        gradients = [
            flat(p.new_zeros(p.shape) if p.grad is None else p.grad for p in model.parameters())
            for model in models
        ]
        found[name] = {"gradients on rank 0": gradients[0]}
        found[name] |= {
            "gradients on the last rank": gradients[-1],
            "weights": flat(models[-1].parameters()) - before,
        }
        found[name]["frozen weights with a gradient"] = sum(
            m.table.weight.grad is not None for m in models
        )
    return found


def _explain_average(got, expected):
    mine, right = got["3 ranks"], expected["3 ranks"]
    if mine["weights"].any():
        return (
            "the weights have changed: average only the gradients, and leave the weights to the "
            "optimizer."
        )
    own = []  # each rank's gradient, as its backward has left it
    for model in _trained(3, torch.float64, (0, 1, 2)):
        gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]
        own.append(flat(gradients))
    first, last = mine["gradients on rank 0"], mine["gradients on the last rank"]
    mean = right["gradients on rank 0"]
    says = (
        _why_own(first, last, own, mean)
        or _why_no_sum(first, own)
        or _why_multiple(first, last, own[2], mean)
    )
    if says:
        return says
    if mine["frozen weights with a gradient"]:
        return (
            "frozen weights get a gradient, which costs memory and time on the link: leave out "
            "weights that require no gradient."
        )
    return None


def _why_own(first, last, own: list[Tensor], mean) -> str | None:
    """What is said of ranks that keep their own gradients, and of a mean divided twice. ``first``
    and ``last``: the gradients on rank 0 and on the last of 3 ranks.
    """
    if torch.equal(last, own[2]):
        if torch.equal(first, own[0]):
            return "the gradients have not changed: write the mean back, into p.grad of every rank."
        if torch.allclose(first, mean):
            return (
                "only rank 0 has the mean: every rank makes the same update, so every rank needs "
                "it."
            )
    if torch.allclose(3 * first, own[0]) and torch.allclose(3 * last, own[2]):
        return "each rank divides its own gradient, but nothing is added up: all_reduce first."
    if torch.allclose(first, mean / 3) and torch.allclose(first, last):
        return "the sum is divided twice by the number of ranks: divide once."
    return None


def _why_no_sum(first, own: list[Tensor]) -> str:
    """What is said if the ranks' gradients are combined by another operation than their sum."""
    gradients = torch.stack(own)
    for operation, combined in (
        ("MAX", gradients.amax(0)),
        ("MIN", gradients.amin(0)),
        ("PRODUCT", gradients.prod(0)),
        ("their median", gradients.median(0).values),
    ):
        for divided in (1, len(own)):
            if torch.allclose(first, combined / divided):
                return (
                    f"the gradients are combined by {operation}, place by place: the mean is their "
                    "sum (ReduceOp.SUM, the default) divided by the number of ranks."
                )
    return ""


def _why_multiple(first, last, own, mean) -> str | None:
    """What is said of gradients of 3 ranks that are a multiple of the mean, or of ``own``, the last
    rank's.
    """
    if not first.any() and not last.any():
        return "every gradient is zero or missing afterwards: leave the mean in p.grad."
    if torch.allclose(first, mean) and torch.allclose(3 * last, own):
        return (
            "only rank 0 has the mean: reduce leaves the sum on one rank, and all_reduce leaves "
            "it on all of them."
        )
    factors = [factor_between(each, mean) for each in (first, last)]
    if None in factors or all(abs(factor - 1) < 1e-6 for factor in factors):
        return None
    if abs(factors[0] - factors[1]) > 1e-6:
        return (
            "the ranks divide the sum by different numbers: each divides by the number of ranks, "
            "dist.get_world_size()."
        )
    return (
        f"with 3 ranks the gradients are {factors[0]:.3g} times the mean: divide their sum by the "
        "number of ranks, dist.get_world_size()."
    )


def loss_scale(micro_batches):
    """What each summed loss is multiplied by, so that gradients which are averaged over ranks are
    those of the mean loss over every label of all ranks. ``micro_batches``: this rank's labels, a
    tensor for each; -100 does not count.
    """
    return _scaled()(micro_batches)


def _count(micro_batches):
    return sum(int((labels != IGNORED).sum()) for labels in micro_batches)


def _everyone(count):
    total = torch.tensor(float(count), dtype=torch.float64)
    dist.all_reduce(total)
    return total


def _scaled(
    *, count=_count, total=_everyone, scale=lambda own, total, mine: dist.get_world_size() / total
):
    def wrong(micro_batches):
        own = count(micro_batches)
        return scale(own, total(own), micro_batches)

    return wrong


def _labels(*lengths: int, seed: int) -> Tensor:
    """(rows, longest), -100 where a row has ended."""
    ids = torch.randint(
        0, 9, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed)
    )
    return ids.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], IGNORED)


def _batches() -> dict[str, list[list[Tensor]]]:
    return {
        "2 ranks of 1 micro-batch": [[_labels(5, 3, seed=1)], [_labels(2, 9, 4, seed=2)]],
        "2 ranks of 3": [
            [_labels(5, 3, seed=1), _labels(7, seed=3), _labels(1, 1, seed=4)],
            [_labels(2, 2, seed=5), _labels(8, 3, seed=6), _labels(6, 2, 2, seed=7)],
        ],
        "3 ranks, of which one has fewer micro-batches": [
            [_labels(4, seed=8), _labels(3, 9, seed=9)],
            [_labels(6, seed=1)],
            [_labels(2, 5, seed=2), _labels(7, 1, seed=3)],
        ],
        HiddenCase("a rank without a label"): [
            [_labels(4, 6, seed=4), torch.full((1, 4), IGNORED)],
            [torch.full((2, 3), IGNORED)],
        ],
    }


def _observe_scale(candidate):
    found: dict = {}
    for name, batches in _batches().items():
        scales = on_ranks(lambda rank, batches=batches: candidate(batches[rank]), len(batches))
        found[name] = {f"on rank {rank}": plain(scale) for rank, scale in enumerate(scales)}
    return found


def _explain_scale(got, expected):
    scales = [scale for case in expected for scale in got[case].values()]
    if not all(isinstance(scale, (int, float)) for scale in scales):
        return "return one number, by which each summed loss is multiplied."
    if not all(map(math.isfinite, scales)):
        return (
            "a rank that has no label divides by 0: divide by the labels of all ranks, which "
            "all_reduce adds up."
        )
    largest = {name: max(map(_count, batches)) for name, batches in _batches().items()}
    if all(_all_are(got[name], len(each) / largest[name]) for name, each in _batches().items()):
        return (
            "only the labels of the rank that has most of them are counted: all_reduce adds up "
            "those of all ranks (ReduceOp.SUM, the default)."
        )
    return _why_ranks(got) or _why_count(got) or _why_apart(got)


def _why_ranks(got) -> str | None:
    """What is said if the labels are right, and the same number stands over them in each case."""
    numbers = []
    for name, batches in _batches().items():
        labels = sum(map(_count, batches))
        numbers += [scale * labels for scale in got[name].values()]
    if numbers[0] and all(math.isclose(number, numbers[0], rel_tol=1e-5) for number in numbers):
        return (
            f"this factor is {numbers[0]:.4g} / labels, however many ranks there are: use "
            "dist.get_world_size()."
        )
    return None


def _why_count(got) -> str | None:
    """What is said if every rank divides by the same number in each case, but by that of something
    else than labels.
    """
    batches = _batches()
    for _, says, count in _COUNTS:
        # Each of these may come with another mistake: the number of ranks once less, or twice.
        for power in (1, 0, -1, 2):
            if all(
                _all_are(got[name], _factor(count, each, power)) for name, each in batches.items()
            ):
                return says
    for name, each in batches.items():
        first = next(iter(got[name].values()))
        if not first or not _all_are(got[name], first):
            return None
        divisor, labels = len(each) / first, sum(map(_count, each))
        if not math.isclose(divisor, labels, rel_tol=1e-5) and not isinstance(name, HiddenCase):
            return (
                f"this factor is {len(each)} ranks / {divisor:.6g}, but all ranks together have "
                f"{labels} labels that are not -100: look at what is counted, and at the ranks."
            )
    return None


def _why_apart(got) -> str | None:
    for scales in got.values():
        if not _all_are(scales, next(iter(scales.values()))):
            return (
                "the ranks return different factors: a label counts the same on every rank, so "
                "all of them divide by the labels of all ranks."
            )
    return None


def _factor(count, batches, power: int) -> float:
    """The number of ranks, to some power, over all that is counted of each rank."""
    total = sum(map(count, batches))
    return len(batches) ** power / total if total else math.inf


def _all_are(scales, wanted: float) -> bool:
    return all(math.isclose(scale, wanted, rel_tol=1e-5) for scale in scales.values())


_OWN_LABELS = (
    "each rank divides by its own labels: all_reduce their number first, so that a label counts "
    "the same everywhere."
)
_AND_MICRO_BATCHES = (
    "the loss is divided by the number of micro-batches too: the labels of all of them are counted "
    "already."
)
_MICRO_BATCHES = (
    "micro-batches are counted: the loss is a sum over labels, and micro-batches have different "
    "numbers of labels."
)


def _in_each(count):
    """What is counted of one micro-batch's labels, added up over a rank's."""
    return lambda micro_batches: sum(int(count(labels)) for labels in micro_batches)


# What is counted in place of the labels: (name, sentence, the number for a rank's micro-batches).
_COUNTS = (
    (
        "all labels",
        "labels of -100 are counted: they have no loss.",
        _in_each(torch.numel),
    ),
    (
        "shifted",
        (
            "the first label of each row is left out: these labels are not shifted, and "
            "every one that is not -100 counts."
        ),
        _in_each(lambda labels: (labels[..., 1:] != IGNORED).sum()),
    ),
    (
        "shifted to the left",
        (
            "the last label of each row is left out: these labels are not shifted, and "
            "every one that is not -100 counts."
        ),
        _in_each(lambda labels: (labels[..., :-1] != IGNORED).sum()),
    ),
    (
        "rows",
        (
            "rows are counted: the loss is a sum over labels, and rows have different "
            "numbers of them."
        ),
        _in_each(len),
    ),
    (
        "longest rows",
        (
            "the longest row of each micro-batch is counted: the loss is a sum over the labels of "
            "all rows."
        ),
        _in_each(lambda labels: labels.shape[-1]),
    ),
    (
        "last",
        "only one micro-batch is counted: the update uses all of them.",
        lambda mine: _count(mine[-1:]),
    ),
    (
        "first",
        "only one micro-batch is counted: the update uses all of them.",
        lambda mine: _count(mine[:1]),
    ),
    (
        "no label 0",
        "labels of 0 are left out: 0 is a token, and only -100 does not count.",
        _in_each(lambda labels: (labels > 0).sum()),
    ),
    (
        "not zero",
        (
            "labels of -100 are counted, and those of 0 are not: 0 is a token, and only -100 "
            "does not count."
        ),
        _in_each(torch.count_nonzero),
    ),
    (
        "turned round",
        "only labels of -100 are counted: these do not count, and all others do.",
        _in_each(lambda labels: (labels == IGNORED).sum()),
    ),
    (
        "token ids",
        "the token ids are added up: their number is needed, not their sum.",
        _in_each(lambda labels: labels[labels != IGNORED].sum()),
    ),
    (
        "different tokens",
        "each token counts once, however often it is there: every label that is not -100 counts.",
        _in_each(lambda labels: labels[labels != IGNORED].unique().numel()),
    ),
    (
        "at least one label of a rank",
        (
            "a rank without a label counts as one label: it adds nothing, so add up the labels as "
            "they are, and divide by the sum."
        ),
        lambda mine: max(1, _count(mine)),
    ),
    (
        "at least one label of a micro-batch",
        "a micro-batch without a label counts as one label: it adds nothing to the loss.",
        _in_each(lambda labels: max(1, _count([labels]))),
    ),
    ("micro-batches", _MICRO_BATCHES, len),
)
# torch.stack and torch.cat of tensors of different shapes. In a call between ranks, the same error
# comes after `UNFIT`, so that is asked first.
_JOINED = r"stack expects each tensor|Sizes of tensors must match except|same number of dimensions"
_APART = (
    (
        f"{APART}|{UNFIT}",
        (
            "the ranks do not make the same calls: each of them calls all_reduce as often as the "
            "others, for tensors of the same shapes."
        ),
    ),
    (
        _JOINED,
        (
            "micro-batches have rows of different lengths, so they do not fit into one tensor: "
            "count each one's labels, and add up the counts."
        ),
    ),
)

EXERCISES = (
    Exercise(
        id="10.2",
        title="DDP by hand",
        difficulty=2,
        minutes=4,
        trains="what every rank sends, and that all of them send the same",
        reference=average_gradients,
        observe=_observe_average,
        explain=_explain_average,
        raises=(
            (
                f"{APART}|{UNFIT}",
                (
                    "the ranks do not make the same calls: each must send every trained weight's "
                    "gradient, and zeros where it has none, in the same order."
                ),
            ),
            (
                _JOINED,
                (
                    "gradients have different shapes, so they do not fit into one tensor as they "
                    "are: send each one by a call of its own."
                ),
            ),
            (
                r"assign a gradient (with dtype|of type)",
                (
                    "a gradient has the dtype of its weight: where p.grad is None, put "
                    "torch.zeros_like(p) there."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "sum",
                _averaged(over=lambda: 1),
                (
                    "this is the sum over the ranks: divide it by their number, or the learning "
                    "rate grows with them."
                ),
            ),
            Mistake(
                "two",
                _averaged(over=lambda: 2),
                "the sum is divided by 2, however many ranks there are: use dist.get_world_size().",
            ),
            Mistake(
                "of those that have one",
                _of_those_that_have_one,
                (
                    "the sum is divided by the number of ranks that have a gradient: a rank "
                    "without one counts as zeros, so divide by the number of all ranks."
                ),
            ),
            Mistake(
                "weights",
                _weights,
                (
                    "the weights are averaged, not the gradients, so each rank still steps with "
                    "its own gradient."
                ),
            ),
            Mistake(
                "rank 0's",
                _averaged(send=_broadcast, over=lambda: 1),
                (
                    "every rank gets rank 0's gradient: the other gradients are lost. all_reduce "
                    "adds them up."
                ),
            ),
            Mistake(
                "a copy",
                _averaged(tensor=lambda p: p.grad.clone()),
                (
                    "the gradients have not changed: all_reduce p.grad itself, or write the mean "
                    "of a copy back into it."
                ),
            ),
            Mistake(
                "zeros alone",
                _averaged(
                    of=_every_trained,
                    tensor=lambda p: torch.zeros_like(p) if p.grad is None else p.grad,
                ),
                (
                    "a rank that sent zeros does not keep the mean: where p.grad is None, put the "
                    "zeros into p.grad, and send that."
                ),
            ),
            Mistake(
                "skips",
                _averaged(of=_each),
                (
                    "the ranks do not make the same calls: each must send every trained weight's "
                    "gradient, and zeros where it has none, in the same order."
                ),
            ),
        ),
    ),
    Exercise(
        id="10.5",
        title="uneven rows over uneven ranks",
        difficulty=2,
        minutes=4,
        trains="one mean over all labels, where each rank sees some",
        reference=loss_scale,
        observe=_observe_scale,
        explain=_explain_scale,
        raises=(
            (
                r"ZeroDivision|division by zero",
                "a rank may have no label at all: divide by the labels of all ranks.",
            ),
            *_APART,
        ),
        mistakes=(
            Mistake(
                "own",
                _scaled(total=lambda own: own, scale=lambda own, total, mine: 1 / max(own, 1)),
                (
                    "each rank divides by its own labels (a mean of means): a label on a rank "
                    "with few labels counts more. all_reduce the number of labels first."
                ),
            ),
            Mistake(
                "not averaged",
                _scaled(scale=lambda own, total, mine: 1 / total),
                (
                    "averaging the ranks' gradients afterwards divides by the number of ranks too: "
                    "multiply by it."
                ),
            ),
            Mistake(
                "divided",
                _scaled(scale=lambda own, total, mine: 1 / (total * dist.get_world_size())),
                "this divides by the number of ranks, but averaging does so too: multiply by it.",
            ),
            *(Mistake(name, _scaled(count=count), says) for name, says, count in _COUNTS),
            Mistake(
                "ranks twice",
                _scaled(scale=lambda own, total, mine: dist.get_world_size() ** 2 / total),
                "the number of ranks is in it twice: the factor is ranks / labels.",
            ),
            Mistake(
                "own share",
                _scaled(scale=lambda own, total, mine: own * dist.get_world_size() / total),
                (
                    "this multiplies by the rank's own labels too: the loss is a sum already, not "
                    "a mean, so the factor is ranks / labels."
                ),
            ),
            Mistake(
                "times micro-batches",
                _scaled(scale=lambda own, total, mine: len(mine) * dist.get_world_size() / total),
                (
                    "this multiplies by the number of micro-batches: their summed losses add up "
                    "already, so the factor is ranks / labels."
                ),
            ),
            Mistake(
                "the divisor",
                _scaled(scale=lambda own, total, mine: total / dist.get_world_size()),
                "this is the number to divide by: return the factor, ranks / labels.",
            ),
            Mistake(
                "own labels, times ranks",
                _scaled(scale=lambda own, total, mine: dist.get_world_size() / max(own, 1)),
                _OWN_LABELS,
            ),
            Mistake(
                "own labels, over ranks",
                _scaled(scale=lambda own, total, mine: 1 / max(own, 1) / dist.get_world_size()),
                _OWN_LABELS,
            ),
            Mistake(
                "over micro-batches",
                _scaled(scale=lambda own, total, mine: 1 / total / len(mine)),
                _AND_MICRO_BATCHES,
            ),
            Mistake(
                "right, over micro-batches",
                _scaled(scale=lambda own, total, mine: dist.get_world_size() / total / len(mine)),
                _AND_MICRO_BATCHES,
            ),
            Mistake(
                "ranks alone",
                _scaled(scale=lambda own, total, mine: 1 / dist.get_world_size()),
                (
                    "no label is counted: the summed loss must become a mean over the labels of "
                    "all ranks."
                ),
            ),
            Mistake(
                "micro-batches alone",
                _scaled(scale=lambda own, total, mine: 1 / len(mine)),
                _MICRO_BATCHES,
            ),
            Mistake(
                "ranks over micro-batches",
                _scaled(scale=lambda own, total, mine: dist.get_world_size() / len(mine)),
                _MICRO_BATCHES,
            ),
            Mistake(
                "micro-batches of all ranks",
                _scaled(scale=lambda own, total, mine: 1 / len(mine) / dist.get_world_size()),
                _MICRO_BATCHES,
            ),
            Mistake(
                "a share",
                _scaled(scale=lambda own, total, mine: own / total),
                (
                    "this is the rank's share of the labels: a summed loss already grows with the "
                    "number of labels."
                ),
            ),
            Mistake(
                "labels",
                _scaled(scale=lambda own, total, mine: total),
                "this is the number of labels: the factor is ranks / labels.",
            ),
        ),
    ),
)
