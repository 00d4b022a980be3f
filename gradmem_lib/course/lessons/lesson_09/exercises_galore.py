"""Lesson 09's exercise about moments of a gradient that is projected to a few directions."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from ...judge.compare import difference
from ...judge.exercise import Exercise, HiddenCase, Mistake, Seen

STEPS = 4  # with one renewal of P in each case


def adam_update(
    g: Tensor, state: dict, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
) -> Tensor:
    """Adam's update (without lr) for a gradient ``g`` of any shape. The moments and their count
    live in ``state["adam_update"]``, so that all other names in ``state`` are free.
    """
    own = state.setdefault("adam_update", {})
    own["t"] = t = own.get("t", 0) + 1
    m = own.setdefault("m", torch.zeros_like(g)).lerp_(g, 1 - beta1)
    v = own.setdefault("v", torch.zeros_like(g)).lerp_(g * g, 1 - beta2)
    return m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)


def galore_step(p, state, rank, every, lr, scale) -> None:
    """Adam on ``p``'s gradient, projected to ``rank`` directions of its shorter side (Zhao et al.
    2024, algorithm 2).
    """
    _galore()(p, state, rank, every, lr, scale)


def _first(directions: Tensor, rank: int) -> Tensor:
    return directions[:, :rank].clone()


def _galore(
    *,
    left=lambda rows, columns: rows <= columns,
    pick=_first,
    new=lambda call, every: call % every == 0,
    update=lambda g, P, state: P @ adam_update(P.T @ g, state),
    forget=False,
    by=lambda lr, scale: lr * scale,
):
    """``galore_step``, or a wrong one: which side is projected, which directions are kept, when
    they are renewed, the update.
    """

    @torch.no_grad()
    def step(p, state, rank, every, lr, scale):
        side = left(*p.shape)
        g = p.grad if side else p.grad.T
        call = state["call"] = state.get("call", -1) + 1
        if "P" not in state or new(call, every):
            U, _, Vh = torch.linalg.svd(p.grad, full_matrices=False)
            state["P"] = pick(U if side else Vh.T, rank)
            if forget:
                state.pop("adam_update", None)
        change = by(lr, scale) * update(g, state["P"], state)
        p.sub_(change if side else change.T)

    return step


def _full_moments(g, P, state):
    return P @ (P.T @ adam_update(g, state))


def _of_what_is_kept(g, P, state):
    return adam_update(P @ (P.T @ g), state)


@torch.no_grad()
def _by_qr(p, state, rank, every, lr, scale):
    wide = p.shape[0] <= p.shape[1]
    g = p.grad if wide else p.grad.T
    call = state["call"] = state.get("call", -1) + 1
    if call % every == 0:
        state["P"] = torch.linalg.qr(g).Q[:, :rank].clone()
    P = state["P"]
    change = lr * scale * (P @ adam_update(P.T @ g, state))
    p.sub_(change if wide else change.T)


def _tensors(held) -> list[Tensor]:
    if isinstance(held, dict):
        held = list(held.values())
    if isinstance(held, (list, tuple)):
        return [tensor for entry in held for tensor in _tensors(entry)]
    return [held] if isinstance(held, Tensor) and held.numel() > 1 else []


def _numbers_behind(tensor: Tensor) -> int:
    """The numbers of a tensor's storage, of which a view shows some. Their dtype is free."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


CASES = {  # rows, columns, rank, every, lr, scale
    "wide, 6 x 20, rank 2, a new P every 2 steps": (6, 20, 2, 2, 0.1, 0.25),
    "tall, 15 x 5, rank 3, a new P every 3 steps": (15, 5, 3, 3, 0.02, 0.5),
    HiddenCase("tall, another rank"): (24, 8, 2, 4, 0.3, 2.0),
}


def _case(name: str, number: int) -> Tensor:
    """The weights of a case (``number`` 0), or the gradient of a step."""
    rows, columns, *_ = CASES[name]
    generator = torch.Generator().manual_seed(100 * rows + number)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _moves(step, name: str) -> list[Tensor]:
    """How a matrix moves in each step, in lr * scale."""
    p, state, (_, _, *settings, lr, scale) = nn.Parameter(_case(name, 0)), {}, CASES[name]
    moves = []
    for number in range(1, STEPS + 1):
        before, p.grad = p.detach().clone(), _case(name, number)
        step(p, state, *settings, lr, scale)
        moves.append((p.detach() - before) / (lr * scale))
    return moves


def _signed(signs: tuple[int, ...]):
    """``galore_step`` with another sign of each new direction, which a decomposition is free to
    choose.
    """
    drawn = iter([(1,) * len(signs), signs])
    return _galore(pick=lambda U, rank: U[:, :rank] * torch.tensor(next(drawn), dtype=U.dtype))


def _whatever_the_signs(name: str, moves: list[Tensor]) -> list[Tensor]:
    """A right answer's ``moves`` as the reference has them: the old moments meet each new direction
    with either sign.
    """
    for signs in product((1, -1), repeat=CASES[name][2]):
        if not difference(moves, _moves(_signed(signs), name), 1e-6):
            return _moves(_galore(), name)
    return moves


def _observe(candidate):
    """Each case steps a matrix by turns with the others, each with a state of its own."""
    weights = {name: nn.Parameter(_case(name, 0)) for name in CASES}
    states, moves = {name: {} for name in CASES}, {name: [] for name in CASES}
    changed = 0
    for number in range(1, STEPS + 1):
        for name, (_, _, rank, every, lr, scale) in CASES.items():
            p, g = weights[name], _case(name, number)
            p.grad, before = g.clone(), p.detach().clone()
            candidate(p, states[name], rank, every, lr, scale)
            moves[name].append((p.detach() - before) / (lr * scale))
            changed += p.grad is None or not torch.equal(p.grad, g)
    found: dict = {"gradients that the step has changed": changed}
    own = {}
    for name, state in states.items():
        kept = _tensors(state)
        storages = {t.untyped_storage().data_ptr(): _numbers_behind(t) for t in kept}
        own[name] = sum(t.numel() for t in kept)
        steps = enumerate(_whatever_the_signs(name, moves[name]), 1)
        found[name] = {
            "numbers kept in state": sum(storages.values()),
            **{f"step {i}, in lr * scale": move for i, move in steps},
        }
    return Seen(found, own=own)


_SIDE = (
    "P is on the wrong side of the gradient: P has a row for each number of the shorter side, "
    "as (rows, rank) for a wide matrix."
)
_FULL = (
    "the moments are as large as the whole matrix: pass the small gradient to adam_update, and "
    "map its update back."
)


def _explain(got, expected):
    if got["gradients that the step has changed"]:
        return "the step changes p.grad: read it, and leave it to the caller."
    names = list(CASES)
    if not any(got[name]["numbers kept in state"] for name in names):
        return (
            "`state` has no tensor: keep P and both moments in `state`, which is the same dict "
            "in each call for one matrix."
        )
    if not any(got[name][_FIRST].any() for name in names):
        return (
            "no weight has moved: `p = …` names a new tensor; change p in place, as p.sub_(…) does."
        )
    if all(difference(-got[name][_FIRST], expected[name][_FIRST], 1e-4) is None for name in names):
        return _UPHILL
    moves = [key for key in got[names[0]] if key.startswith("step")]
    right = {}
    for name in names:
        mine, wanted = got[name], expected[name]
        right[name] = [key for key in moves if difference(mine[key], wanted[key], 1e-4) is None]
    everywhere = all(right[name] == moves for name in names)
    return _why_kept(got, expected, everywhere=everywhere) or _why_steps(right)


_FIRST = "step 1, in lr * scale"
_UPHILL = "the step has the wrong sign: it increases the loss."


def _why_kept(got, expected, *, everywhere) -> str | None:
    """What is said of the tensors in ``state``. ``everywhere``: the weights are right."""
    numbers_kept = "numbers kept in state"
    kept, wanted = ([seen[name][numbers_kept] for name in CASES] for seen in (got, expected))
    if kept != wanted and list(got.notes["own"].values()) == wanted:
        return "P is a view, and a view keeps all of the storage that it was cut from: .clone() it."
    for (_, _, rank, *_), mine, right in zip(CASES.values(), kept, wanted, strict=True):
        if mine != right and mine and mine * rank % right == 0:
            # P and both moments grow with the number of directions.
            return (
                f"P has rank {mine * rank // right} where `rank` is {rank}: take the first `rank` "
                "directions, no more and no fewer."
            )
    if everywhere and any(mine > right for mine, right in zip(kept, wanted, strict=True)):
        return (
            "the weights are right, but more is kept than P and two moments of the small "
            "gradient: free the rest after the step."
        )
    if everywhere:
        return (
            "the weights are right, but P or a moment is not in `state`: keep them there, "
            "because the next call gets the same dict."
        )
    return None


def _why_steps(right) -> str:
    """``right``: which steps are right, for the wide matrix, the tall one, and others."""
    wide, tall, *_ = right.values()
    if all(_FIRST in steps for steps in right.values()):
        return (
            "the first step is right, but a later one is not: look at how P, its renewal and "
            "the moments change from call to call."
        )
    if _FIRST in wide and not tall:
        return (
            "the wide matrix is right, but the tall one is not: there the small gradient is G @ "
            "P, and P comes from Vh, which has the directions in its rows."
        )
    if _FIRST in tall and not wide:
        return (
            "the tall matrix is right, but the wide one is not: there the small gradient is P.T @ "
            "G, and P has a row for each row."
        )
    return "the first step is wrong: project, then adam_update, then back, then lr * scale."


EXERCISES = (
    Exercise(
        id="9.9",
        title="GaLore: moments of a small gradient",
        difficulty=3,
        minutes=6,
        trains="a projection, and the bytes of the states behind it",
        reference=galore_step,
        observe=_observe,
        explain=_explain,
        changes=("p", "state"),
        raises=(
            (r"KeyError", "`state` is empty in the first call: make P there before you read it."),
            (
                r"must match|cannot be multiplied|size mismatch|broadcast",
                (
                    "the shapes do not fit together: a wide matrix is projected as P.T @ G and "
                    "mapped back as P @ update, a tall one as G @ P and update @ P.T; Vh has the "
                    "directions in its rows."
                ),
            ),
        ),
        mistakes=(
            Mistake("the long side", _galore(left=lambda rows, columns: rows > columns), _SIDE),
            Mistake(
                "always left",
                _galore(left=lambda rows, columns: True),
                (
                    "a tall matrix is projected from the left too, along its longer side: for a "
                    "tall matrix P comes from Vh, and the small gradient is G @ P."
                ),
            ),
            Mistake(
                "no scale",
                _galore(by=lambda lr, scale: lr),
                "scale has no effect: p moves by lr * scale * update.",
            ),
            Mistake(
                "each step",
                _galore(new=lambda call, every: True),
                (
                    "P is renewed in each step: each time this costs an SVD, and the moments "
                    "belong to the old directions; renew it in every `every`-th call."
                ),
            ),
            Mistake(
                "once",
                _galore(new=lambda call, every: False),
                (
                    "P is never renewed: the gradient's directions change, so take new ones in "
                    "every `every`-th call."
                ),
            ),
            Mistake("full moments", _galore(update=_of_what_is_kept), _FULL),
            Mistake("full moments, projected back", _galore(update=_full_moments), _FULL),
            Mistake(
                "new moments",
                _galore(forget=True),
                "the moments begin again with each new P: replace only P, and keep the moments.",
            ),
            Mistake(
                "the smallest",
                _galore(pick=lambda U, rank: U[:, -rank:].clone()),
                "these are the smallest singular directions: the largest come first.",
            ),
            Mistake(
                "by QR",
                _by_qr,
                (
                    "QR keeps the order of the columns, not of their size: the largest directions "
                    "are the first ones of torch.linalg.svd."
                ),
            ),
            Mistake(
                "too early",
                _galore(new=lambda call, every: call > 0 and (call + 1) % every == 0),
                (
                    "P is renewed one step too early: renew it in the first call, and then in "
                    "every `every`-th after it."
                ),
            ),
            Mistake(
                "too late",
                _galore(new=lambda call, every: call > 1 and call % every == 1),
                (
                    "P is renewed one step too late: renew it in the first call, and then in every "
                    "`every`-th after it."
                ),
            ),
            Mistake(
                "no moments",
                _galore(update=lambda g, P, state: P @ (P.T @ g)),
                "the projected gradient itself is the step: pass it to adam_update first.",
            ),
            Mistake(
                "uphill",
                _galore(by=lambda lr, scale: -lr * scale),
                _UPHILL,
            ),
            Mistake(
                "no lr",
                _galore(by=lambda lr, scale: scale),
                "lr has no effect: p moves by lr * scale * update.",
            ),
            Mistake(
                "neither",
                _galore(by=lambda lr, scale: 1.0),
                "lr and scale have no effect: p moves by lr * scale * update.",
            ),
            Mistake(
                "divided",
                _galore(by=lambda lr, scale: lr / scale),
                "the update is divided by scale: p moves by lr * scale * update.",
            ),
        ),
    ),
)
