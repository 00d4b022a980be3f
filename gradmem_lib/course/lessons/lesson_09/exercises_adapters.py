"""Lesson 09's exercises about adapters: LoRA from its formula, and the bytes of a base in
4 bits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, Seen, calls, measure
from ...judge.hints import shares
from ..shared.gradient_weights import factor_between

NF4_CASES = (1000, 64, 256), (4096 * 11008, 64, 256), (77, 16, 3)
NF4_HIDDEN = (455, 10, 4), (64 * 256, 64, 256)
ADAPTER_CARD = 1_400_000  # bytes: a matrix of 1,048,576 and what rank 8 needs beside it


class LoRA(nn.Module):
    """``base(x) + alpha / rank * B(A(x))``; ``base``, an ``nn.Linear``, is frozen, and B starts at
    zero.
    """

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.A), self.B)


def _but(begin=lambda layer, rank, alpha: None, forward=None):
    """A wrong ``LoRA``: what it does after its ``__init__``, or its ``forward``."""

    def init(self, base, rank, alpha):
        LoRA.__init__(self, base, rank, alpha)
        begin(self, rank, alpha)

    return type("LoRA", (LoRA,), {"__init__": init} | ({"forward": forward} if forward else {}))


def _alpha_alone(layer, rank, alpha):
    layer.scale = alpha


def _written_out(self, x):
    return F.linear(x, self.base.weight + self.scale * self.B @ self.A, self.base.bias)


def _case(inside: int, outside: int, bias: bool) -> tuple[nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(inside)
    with torch.random.fork_rng(devices=[]):
        base = nn.Linear(inside, outside, bias=bias)
    with torch.no_grad():
        for p in base.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return base, torch.randn(2, 5, inside, generator=generator)


def _addition(layer: nn.Module, trained: list, base: nn.Linear, x: torch.Tensor, rank: int):
    """What ``layer`` adds to ``base``, and to the gradient of ``x``, with known numbers in A and B,
    whatever their names and whichever way round they lie.
    """
    generator = torch.Generator().manual_seed(rank)
    for size in (base.in_features, base.out_features):
        known = torch.randn(rank, size, generator=generator)
        found = [p for p in trained if sorted(p.shape) == sorted(known.shape)]
        if len(found) != 1:
            return None, None
        found[0].data.copy_(known if found[0].shape == known.shape else known.T)
    outs, gradients = [], []
    for run in (layer, base):
        given = x.detach().clone().requires_grad_()
        out = run(given)
        if out.requires_grad:
            out.sum().backward()
        outs.append(out.detach())
        gradients.append(torch.zeros_like(x) if given.grad is None else given.grad)
    return outs[0] - outs[1], gradients[0] - gradients[1]


def _begins(trained: list, base: nn.Linear) -> str:
    """How A and B start, told apart by their shapes."""
    words = []
    for name, size in (("A", base.in_features), ("B", base.out_features)):
        numbers = torch.cat(
            [p.detach().flatten() for p in trained if size in p.shape] or [torch.zeros(0)]
        )
        if len(numbers.unique()) > 1:
            kind = "random"
        else:
            kind = "all the same" if numbers.any() else "zero"
        words.append(f"{name} is {kind}")
    return ", ".join(words)


def _observe_lora(candidate):
    found: dict = {}
    frozen = []  # for each layer, how many matrices as large as A or B require no gradient
    for inside, outside, rank, alpha in ((12, 20, 4, 8), (30, 7, 3, 1.5)):
        base, x = _case(inside, outside, bias=rank == 4)
        right = base(x.requires_grad_()).detach()
        layer = candidate(base, rank, alpha)
        trained = [p for p in layer.parameters() if p.requires_grad]
        sizes = sorted((rank, inside)), sorted((rank, outside))
        others = [p for p in layer.parameters() if not p.requires_grad]
        frozen.append(sum(sorted(p.shape) in sizes for p in others))
        seen = {
            "numbers trained": sum(p.numel() for p in trained),
            "of the base": sum(p.requires_grad for p in base.parameters()),
            "output before the first update": layer(x),
        }
        name = f"{inside} to {outside}, rank {rank}, alpha {alpha}"
        found[name] = seen
        if not trained:
            continue
        seen["at the start"] = _begins(trained, base)
        optimizer = torch.optim.SGD(trained, lr=0.01)
        for step in (1, 2):
            out = layer(x)
            if out.requires_grad:
                (out - right - 1).square().mean().backward()
            seen[f"matrices with a gradient, step {step}"] = sum(
                p.grad is not None and bool(p.grad.any()) for p in trained
            )
            if step == 1:
                seen["x gets a gradient (1 is yes)"] = int(
                    x.grad is not None and bool(x.grad.any())
                )
            optimizer.step()
            optimizer.zero_grad()
        added = _addition(layer, trained, base, x, rank)
        seen["what A and B add"], seen[_THROUGH] = added
    if any(not seen["numbers trained"] for seen in found.values()):
        return Seen(found, frozen=frozen)
    base, x = _case(512, 512, bias=False)
    layer = candidate(base, 8, 16)
    run = measure(lambda: layer(x).sum().backward(), budget=ADAPTER_CARD, model=layer)
    found["the card"] = type(run)(None, run.peak, run.budget)
    return Seen(found, frozen=frozen)


_THROUGH = "what A and B add to the gradient of x"


_FROM_THE_BASE = (
    "the model has changed before its first update: B must start at zero, so that "
    "training starts from the base."
)
_WRITTEN = (
    "B @ A makes a matrix as large as the base, and its gradient is as large: multiply x by A "
    "first, then by B."
)


def _explain_lora(got, expected):
    name = next(iter(expected))
    mine, right = got[name], expected[name]
    says = _why_trained(mine, right, got.notes["frozen"])
    if says:
        return says
    over = got["the card"].over and not expected["the card"].over
    if over and difference(mine, right, 1e-4) is None:
        return _WRITTEN
    return _why_start(mine, right) or _why_added(got, expected) or _why_x(got, expected)


def _why_trained(mine, right, frozen) -> str | None:
    """What is said of the parameters that are trained. ``frozen``: how many matrices as large as A
    or B are parameters without a gradient, of each layer.
    """
    if not mine["numbers trained"] and min(frozen) >= 2:
        return (
            "A and B are parameters, but they require no gradient: freeze the base alone, "
            "base.requires_grad_(False)."
        )
    if not mine["numbers trained"]:
        return (
            "there is nothing to train: a tensor becomes a parameter of its module by nn.Parameter."
        )
    if mine["of the base"]:
        return "the base is trained as well: base.requires_grad_(False)."
    if mine["numbers trained"] < right["numbers trained"]:
        return "only one of the two matrices is trained: both A and B must be parameters."
    if mine["numbers trained"] > right["numbers trained"]:
        return "more is trained than A and B: they have no bias, so nn.Linear needs bias=False."
    return None


def _why_start(mine, right) -> str | None:
    """What is said of the outputs and matrices before the first update."""
    before = "output before the first update"
    changed = difference(mine[before], right[before], 1e-4)
    if changed and mine["matrices with a gradient, step 1"] == 2:
        return _FROM_THE_BASE
    if changed:
        return (
            "before the first update the output must be base(x) itself: with its bias, and not "
            "scaled."
        )
    if mine["at the start"] != right["at the start"]:
        return (
            f"at the start {mine['at the start'].replace(',', ' and')}: A must be random, so "
            "that its rows differ, and B must be zero."
        )
    if not mine["x gets a gradient (1 is yes)"]:
        return (
            "x gets no gradient from the base, so the layers before it learn nothing: the base "
            "must be frozen, but not under no_grad."
        )
    return None


def _why_added(got, expected) -> str | None:
    """What is said of what A and B add: by which factor it is wrong, if by one."""
    factors = []
    for case in got:
        if case == "the card":
            continue
        added, wanted = (seen[case].get("what A and B add") for seen in (got, expected))
        if added is None or wanted is None:
            continue
        factor = factor_between(added, wanted, 1e-4)
        if factor is None:
            return None
        factors.append(factor)
    wrong = [factor for factor in factors if abs(factor - 1) > 1e-3]
    if not wrong:
        return None
    return (
        f"what A and B add is {wrong[0]:.3g} times what it should be: B(A(x)) times alpha / "
        "rank, a fraction."
    )


def _why_x(got, expected) -> str | None:
    """What is said where A and B add what they should, and nothing to the gradient of x."""
    cases = [case for case in expected if case != "the card"]
    added = "what A and B add"
    if any(difference(got[case][added], expected[case][added], 1e-4) for case in cases):
        return None
    if any(got[case][_THROUGH].any() for case in cases):
        return None
    return (
        "x gets no gradient through A and B, so the layers before it do not learn from them: do "
        "not detach x."
    )


def nf4_bytes(numbers, block, group) -> int:
    """The bytes of a matrix of ``numbers`` in NF4 with double quantization: 4 bits each; a byte for
    each ``block`` of them; a float32 for each ``group`` of these bytes; and one for their mean.
    """
    return _nf4()(numbers, block, group)


def _nf4(*, first=2, second=1, scale=4, mean=4, up=lambda n, by: -(-n // by), of_weights=False):
    def wrong(numbers, block, group):
        blocks = up(numbers, block)
        return (
            up(numbers, first)
            + second * blocks
            + scale * up(numbers if of_weights else blocks, group)
            + mean
        )

    return wrong


# The parts of a matrix in NF4, in the order of ``_parts``: (bytes of one, what it is, why).
_BYTES = (
    (1, "each pair of numbers", "two numbers of 4 bits share one byte"),
    (1, "each block's absmax", "double quantization makes it one byte"),
    (4, "each group's scale", "it is a float32, of 4 bytes"),
    (4, "the mean of all absmax values", "it is a float32, of 4 bytes"),
)


def _parts(numbers, block, group) -> tuple[int, ...]:
    """How many pairs of numbers, blocks, groups and means there are."""
    blocks = -(-numbers // block)
    return -(-numbers // 2), blocks, -(-blocks // group), 1


# Other numbers of blocks and groups: (sentence, how many there are).
_OTHER_BLOCKS = (
    (
        "one block too many is counted where the last one is full, and so is one group: "
        "-(-a // b) rounds up, and a // b + 1 adds one always.",
        lambda numbers, block, group: (numbers // block + 1, (numbers // block + 1) // group + 1),
    ),
    (
        "a block is made of bytes here: it is made of numbers, of which two share a byte.",
        lambda numbers, block, group: _parts(-(-numbers // 2), block, group)[1:3],
    ),
)


def _explain_nf4(got, expected):
    over = [mine - right for mine, right in zip(got.values(), expected.values(), strict=True)]
    if min(over) >= -8 and max(over) <= 0 and len(set(over)) > 1:
        return (
            "bytes are lost in rounding: an odd number, a last block and a last group that are "
            "not full count too, so round up each."
        )
    cases = dict(zip(expected, (*NF4_CASES, *NF4_HIDDEN), strict=True))
    return _why_blocks(got, cases) or _why_bytes(got, over, cases)


def _why_blocks(got, cases) -> str | None:
    """What is said if there are more or fewer blocks, or groups, than should be."""
    for says, count in _OTHER_BLOCKS:
        nbytes = []
        for numbers, block, group in cases.values():
            blocks, groups = count(numbers, block, group)
            nbytes.append(-(-numbers // 2) + blocks + 4 * groups + 4)
        if list(got.values()) == nbytes:
            return says
    return None


def _why_bytes(got, over: list, cases) -> str | None:
    """Which part has other bytes than it should, if it has the same in every case. ``over``: the
    bytes that are too many, of each case.
    """
    of_a_number = set()  # its bytes, if all else is right
    for extra, given in zip(over, cases.values(), strict=True):
        of_a_number.add(round((extra + _parts(*given)[0]) / given[0], 6))
    if len(of_a_number) == 1 and of_a_number != {0}:
        return (
            f"a number has {_bytes(of_a_number.pop())} here: two numbers of 4 bits share one byte."
        )
    terms = [{case: _parts(*given)[i] for case, given in cases.items()} for i in range(len(_BYTES))]
    found = shares(got, *terms)
    if found is None:
        return None
    for nbytes, (right, what, why) in zip(found, _BYTES, strict=True):
        nbytes = round(nbytes, 4)
        if nbytes == 0:
            return f"{what} is missing: {why}."
        if nbytes != right:
            return f"{what} has {_bytes(nbytes)} here: {why}."
    return None


def _bytes(number: float) -> str:
    return f"{number:g} byte{'s' * (number != 1)}"


EXERCISES = (
    Exercise(
        id="9.5",
        title="LoRA from its formula",
        difficulty=2,
        minutes=4,
        trains="what trains, where it starts, and what the first step moves",
        reference=LoRA,
        observe=_observe_lora,
        explain=_explain_lora,
        tolerance=1e-4,
        raises=(
            (
                r"shapes cannot be multiplied|size mismatch",
                (
                    "the formula has x as one column, but here each matrix acts on the last "
                    "dimension of x (..., in). With A (rank, in) and B (out, rank), this is x @ "
                    "A.T @ B.T, or F.linear(F.linear(x, A), B): F.linear transposes by itself."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "B random",
                _but(lambda layer, rank, alpha: nn.init.normal_(layer.B)),
                _FROM_THE_BASE,
            ),
            Mistake(
                "both zero",
                _but(lambda layer, rank, alpha: nn.init.zeros_(layer.A)),
                "A and B are both zero, so that neither ever gets a gradient: A starts random.",
            ),
            Mistake(
                "alpha alone",
                _but(_alpha_alone),
                (
                    "what A and B add is multiplied by alpha: multiply by alpha / rank, so that "
                    "another rank does not change the learning rate."
                ),
            ),
            Mistake(
                "no scale",
                _but(lambda layer, rank, alpha: setattr(layer, "scale", 1.0)),
                "alpha has no effect: multiply what A and B add by alpha / rank.",
            ),
            Mistake("written out", _but(forward=_written_out), _WRITTEN),
            Mistake(
                "alone",
                _but(forward=lambda self, x: self.scale * F.linear(F.linear(x, self.A), self.B)),
                "the base has no effect on the output: add A and B's part to base(x).",
            ),
        ),
    ),
    Exercise(
        id="9.6",
        title="the bytes of NF4",
        difficulty=1,
        minutes=3,
        trains="adding up what a quantized matrix keeps beside its 4 bits",
        reference=nf4_bytes,
        observe=calls(*NF4_CASES, hidden=NF4_HIDDEN),
        explain=_explain_nf4,
        mistakes=(
            Mistake(
                "once",
                lambda numbers, block, group: -(-numbers // 2) + 4 * -(-numbers // block),
                (
                    "a block's magnitude has 4 bytes here: double quantization makes it one byte, "
                    "and keeps one float32 for each group of magnitudes."
                ),
            ),
            Mistake(
                "no mean",
                _nf4(mean=0),
                "the mean of the magnitudes, one float32 of 4 bytes, is missing.",
            ),
            Mistake(
                "rounded down",
                _nf4(up=lambda n, by: n // by),
                "a last block or group that is not full counts too: round up.",
            ),
            Mistake(
                "a byte each",
                _nf4(first=1),
                "a number takes one byte here: two numbers of 4 bits share one byte.",
            ),
            Mistake(
                "groups of weights",
                _nf4(of_weights=True),
                (
                    "a group is made of magnitudes, not of weights: there is one float32 for each "
                    "`group` blocks."
                ),
            ),
            Mistake(
                "half", _nf4(scale=2), "a group's scale has 2 bytes here: it is a float32, of 4."
            ),
        ),
    ),
)
