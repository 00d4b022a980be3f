"""Lesson 07's exercises about autocast: a loss that is scaled, and the copies that
autocast keeps.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from ...judge.compare import describe, difference
from ...judge.exercise import Exercise, HiddenCase, Mistake, Seen, measure
from ..shared.gradient_weights import LIMITS
from ..shared.settings import flat

FEATURES_CARD = "4.9 MB"
WIDTH = 256


def scaled_step(optimizer, scale, good, patience):
    """Divide all gradients by ``scale`` and step, unless one is not finite.

    Returns the next (scale, good steps in a row).
    """
    gradients = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    for gradient in gradients:
        gradient.div_(scale)
    if not all(gradient.isfinite().all() for gradient in gradients):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)


def _scaled(
    *,
    finite=lambda gradient: bool(gradient.isfinite().all()),
    divide=True,
    skip=True,
    halve=True,
    looks_at=lambda gradients: gradients,
    streak=True,
    grow=lambda good, patience: good + 1 == patience,
    again=True,
    multiply=False,
):
    def wrong(optimizer, scale, good, patience):
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        for gradient in gradients if divide else ():
            gradient.mul_(scale) if multiply else gradient.div_(scale)
        fine = all(map(finite, looks_at(gradients)))
        if fine or not skip:
            optimizer.step()
        if not fine:
            return scale / 2 if halve else scale, 0 if streak else good
        if grow(good, patience):
            return scale * 2, 0 if again else good + 1
        return scale, good + 1

    return wrong


def _first_group(optimizer, scale, good, patience):
    """Only the first group's gradients are divided, and asked."""
    gradients = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    for gradient in gradients:
        gradient.div_(scale)
    if not all(gradient.isfinite().all() for gradient in gradients):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)


def _stops_at_the_first(optimizer, scale, good, patience):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            p.grad.div_(scale)
            if not p.grad.isfinite().all():
                return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)


def _a_step_each(optimizer, scale, good, patience):
    """The loop over the gradients also steps, and counts, once for each of them."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            p.grad.div_(scale)
            if p.grad.isfinite().all():
                optimizer.step()
                good += 1
            else:
                scale /= 2
                good = 0
    return (scale * 2, 0) if good == patience else (scale, good)


def _steps_in_the_loop(optimizer, scale, good, patience):
    """As above, and counted once."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            p.grad.div_(scale)
            if not p.grad.isfinite().all():
                return scale / 2, 0
            optimizer.step()
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)


def _doubles_before(optimizer, scale, good, patience):
    """The streak is asked before the step."""
    if good == patience:
        scale, good = scale * 2, 0
    return scaled_step(optimizer, scale, good, math.inf)


def _divides_by_the_next(optimizer, scale, good, patience):
    """By the scale that has doubled, if this step is the last of a streak."""
    gradients = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    if not all(gradient.isfinite().all() for gradient in gradients):
        return scale / 2, 0
    good += 1
    if good == patience:
        scale, good = scale * 2, 0
    for gradient in gradients:
        gradient.div_(scale)
    optimizer.step()
    return scale, good


_A_STEP_EACH = (
    "the optimizer steps once for each gradient: the loop only divides and looks, and after it all "
    "gradients together decide about one step."
)
_STOPS = (
    "where a gradient is not finite, some gradients are divided and others are still scaled: "
    "divide all of them first, and then decide about the step."
)
_NOT_BEGUN_AGAIN = "`good` does not begin again at 0 when the scale has doubled."
_SOME_SCALED = "how many gradients are still scaled, where others are not"


def _still_scaled(weights, given, scale) -> int:
    """How many gradients are as they were ``given``, where others have been divided by ``scale``.

    An answer that asks first and divides nothing before it skips the step leaves all of them alike.
    """
    divided = still = 0
    for p, was in zip(weights, given, strict=True):
        if was is None or p.grad is None:
            continue
        if torch.allclose(p.grad, was / scale, atol=0, equal_nan=True):
            divided += 1
        elif torch.equal(p.grad.nan_to_num(), was.nan_to_num()):
            still += 1
    return still if divided else 0


# By step: which weight's gradient holds what, beside numbers.
_STEPS = (
    (1, 1.0),
    (1, math.inf),
    (1, 2.0),
    (3, 0.5),
    (0, math.nan),
    (1, 1.0),
    (1, 3.0),
    (3, -math.inf),
    (0, 1.0),
    (1, 1.0),
    (0, math.inf),
    (1, 1.0),
    (1, 1.0),
    (3, math.nan),
    (1, 0.25),
    (1, -math.inf),
)


# Patience, momentum, the scale to begin with, and the kind of key. A scale has no limits, and the
# hidden ones are beyond the limits that people write.
_SETTINGS: tuple[tuple[int, float, float, type[str]], ...] = (
    (3, 0.0, 2.0**10, str),
    (2, 0.5, 2.0**17, str),
    (4, 0.0, 1.0, str),
    (1, 0.0, 2.0**32, HiddenCase),
    (5, 0.0, 2.0**-24, HiddenCase),
)


def _observe_scaled(candidate):
    found: dict = {}
    for patience, momentum, scale, key in _SETTINGS:
        weights = [
            nn.Parameter(torch.ones(3)),
            nn.Parameter(torch.ones(2, 2)),
            nn.Parameter(torch.ones(1)),  # gets no gradient
            nn.Parameter(torch.ones(2)),
        ]
        groups = [{"params": weights[:1]}, {"params": weights[1:]}]
        optimizer = torch.optim.SGD(groups, lr=0.125, momentum=momentum)
        good = 0
        for number, (place, odd) in enumerate(_STEPS, 1):
            weights[0].grad = torch.tensor([1.0, -2.0, 0.5]) * scale
            weights[1].grad = torch.tensor([[0.5, 2.0], [1.0, 1.0]]) * scale
            weights[3].grad = torch.tensor([-1.0, 0.25]) * scale
            weights[place].grad.view(-1)[1] = odd * scale
            given = [None if p.grad is None else p.grad.clone() for p in weights]
            before = float(scale)
            scale, good = candidate(optimizer, scale, good, patience)
            found[key(f"patience {patience}, after step {number} ({_said(odd)})")] = {
                "weights": flat(weights),
                "scale": float(scale),
                "good": int(good),
                _SOME_SCALED: _still_scaled(weights, given, before),
            }
    return found


def _explain_scaled(got, expected):
    some_scaled = False  # and nothing else is wrong in any case
    for case, right in expected.items():
        mine = got[case]
        if difference(mine | {_SOME_SCALED: 0}, right):
            return _why_scaled(case, got, expected)
        some_scaled = some_scaled or mine[_SOME_SCALED] > 0
    return _STOPS if some_scaled else None


def _why_scaled(case: str, got, expected) -> str | None:
    """What is said of ``case``, the first one that is wrong."""
    mine, right = got[case], expected[case]
    if (mine["scale"], mine["good"]) == (right["good"], right["scale"]):
        return "the two results are swapped: return the scale first, and then `good`."
    same_scale = mine["scale"] == right["scale"]
    says = _why_gradients(case, mine, right) or _why_good(case, mine, right)
    if says:
        return says
    skipped = not case.endswith("(all finite)")
    other_weights = difference(mine["weights"], right["weights"])
    if skipped and same_scale and other_weights and torch.isfinite(mine["weights"]).all():
        return (
            "weights move in a step that must be skipped: with one gradient that is not finite, "
            "no weight moves, and zeros in its place are a step too."
        )
    if skipped and same_scale and not other_weights:
        return (
            f"after a skipped step, `good` is {mine['good']} and should be {right['good']}: it "
            "counts the steps since the last one that was skipped."
        )
    if same_scale:
        return None
    scales = {name: seen["scale"] for name, seen in got.items()}
    starts = {name: scale for name, scale in scales.items() if "after step 1 " in name}
    patiences = {name.partition(",")[0]: scale for name, scale in starts.items()}
    if all(scale == patiences[name.partition(",")[0]] for name, scale in scales.items()):
        return "the scale that is returned never changes: halve it, or double it, and return that."
    return _why_scale(case, scales, expected)


def _why_gradients(case: str, mine, right) -> str | None:
    """What is said if the first step moves the weights wrongly. All of them were 1 before it."""
    if not case.endswith("after step 1 (all finite)") or not difference(
        mine["weights"], right["weights"]
    ):
        return None
    moved, update = mine["weights"] - 1, right["weights"] - 1
    scale = right["scale"]
    if scale > 1 and not difference(moved * scale, update, 1e-2):
        return (
            "the gradients are divided by the scale twice: once for each gradient is enough, in "
            "one place of the code."
        )
    # The learning rate of the exercise is 0.125.
    size, whole = moved.norm().item(), update.norm().item()
    is_shorter = 0 < size < whole and not difference(moved / size, update / whole, 1e-3)
    if is_shorter and any(math.isclose(size / 0.125, limit, rel_tol=1e-3) for limit in LIMITS):
        return (
            f"the gradient is clipped to a norm of {size / 0.125:.3g}: clip_grad_norm_ changes the "
            "gradients, and get_total_norm only looks at them."
        )
    return None


def _why_good(case: str, mine, right) -> str | None:
    """What is said if only `good` is wrong, and too large."""
    same = mine["scale"] == right["scale"] and not difference(mine["weights"], right["weights"])
    if not same or mine["good"] <= right["good"]:
        return None
    if right["good"] == 0 and case.endswith("(all finite)"):  # so the scale has doubled
        return _NOT_BEGUN_AGAIN
    if right["good"] > 0:
        return (
            "`good` grows more than once in a step: one step counts 1, in one place of the code, "
            "however many gradients and groups it has."
        )
    return None


def _why_scale(case: str, scales: dict[str, float], expected) -> str | None:
    """What is said of a scale that is wrong first in ``case``, by what comes before it."""
    should = {name: seen["scale"] for name, seen in expected.items()}
    grows = [name for name in scales if should[name] > _before(name, should)]
    shrinks = [name for name in scales if should[name] < _before(name, should)]
    mine, before = scales[case], _before(case, scales)
    upper_limit = (
        f"your scale stops at {mine:,.0f}: set no upper limit. A scale that is too large is halved "
        "by the next step that overflows."
    )
    change = f"the scale goes from {describe(before)} to {describe(mine)}"
    if case in grows:
        if mine < should[case] and mine == max(scales[name] for name in grows):
            return upper_limit
        if mine not in (before, before / 2):
            return f"after `patience` good steps in a row {change}: double it."
    if case in shrinks:
        if mine > should[case] and mine == min(scales[name] for name in shrinks):
            return (
                f"your scale stops at {mine:g}: set no lower limit, and halve it after every "
                "skipped step."
            )
        if mine not in (before, before * 2):
            return f"after a skipped step {change}: halve it."
    stays = case not in grows and case not in shrinks
    if stays and mine < should[case] and mine == max(scales.values()):
        return upper_limit
    return None


def _before(case: str, scales: dict[str, float]) -> float:
    """The scale that the step of ``case`` is given."""
    setting = case.partition(",")[0]
    own = [name for name in scales if name.startswith(f"{setting},")]
    if case != own[0]:
        return scales[own[own.index(case) - 1]]
    starts = {f"patience {patience}": scale for patience, _, scale, _ in _SETTINGS}
    return starts[setting]


def _said(odd: float) -> str:
    return "all finite" if math.isfinite(odd) else f"one gradient is {odd}"


_GRAPH = (
    "a graph is built, and it keeps every layer's input and weight for a backward that never "
    "comes: torch.no_grad()."
)


def features_setting() -> tuple[nn.Sequential, torch.Tensor]:
    """16 blocks of float32 weights, and rows (8, 256)."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(16)
    ]
    return nn.Sequential(*blocks), torch.randn(8, WIDTH)


def features(model, x):
    """``model(x)`` under bf16 autocast, without a graph and without a bf16 copy of every weight."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return model(x)


def _features(*, cache=False, dtype=torch.bfloat16, grad=False, enabled=True):
    def wrong(model, x):
        with (
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype=dtype, cache_enabled=cache, enabled=enabled),
        ):
            return model(x)

    return wrong


def _in_place(model, x):
    with torch.no_grad():
        return model.bfloat16()(x.bfloat16())


def _copied(model, x):
    with torch.no_grad():
        return copy.deepcopy(model).bfloat16()(x.bfloat16())


def _rounded_at_the_end(model, x):
    with torch.no_grad():
        return model(x).bfloat16()


def _observe_features(candidate):
    with torch.random.fork_rng(devices=[]):
        model, x = features_setting()
    graphs, caches, norms, weights = [], [], [], []

    def look(module, args):
        graphs.append(torch.is_grad_enabled() and module.weight.requires_grad)
        caches.append(torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled())
        if isinstance(module, nn.LayerNorm):
            norms.append(args[0].dtype)
        weights.append(module.weight.dtype)

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_pre_hook(look)
    measured = measure(lambda: candidate(model, x), budget=FEATURES_CARD, model=model)
    out = measured.value
    found = {
        "what is returned": {
            "numbers": out.detach().float(),
            "dtype": str(out.dtype),
            "hangs on a graph (1 is yes)": int(out.requires_grad),
        },
        "the weights": {"dtypes": " and ".join(sorted({str(p.dtype) for p in model.parameters()}))},
        "its bytes": type(measured)(None, measured.peak, measured.budget),
    }
    return Seen(
        found,
        graphs=any(graphs),
        caches=any(caches),
        first_input=norms[0] if norms else None,
        bf16_weights=torch.bfloat16 in weights,
    )


def _explain_features(got, expected):
    notes = got.notes
    if difference(got["what is returned"], expected["what is returned"]):
        if notes["bf16_weights"]:
            return (
                "weights are bf16 while the model runs: autocast leaves all weights in float32, "
                "and casts the inputs of matrix products."
            )
        if notes["first_input"] == torch.bfloat16:
            return (
                "the model gets x in bf16, so digits are lost before its first norm: give it x as "
                "it is, since autocast casts the inputs of matrix products by itself."
            )
        return None
    if notes["graphs"]:
        return (
            "gradients are on while the model runs, so a graph keeps every layer's input and "
            "weight until the end: run the model under torch.no_grad(). .detach() comes too late."
        )
    return _CACHED if notes["caches"] else None


_CACHED = (
    "autocast's cache keeps a bf16 copy of every weight until the with statement of autocast ends, "
    "which adds half of the weights' bytes: cache_enabled=False."
)


EXERCISES = (
    Exercise(
        id="7.5",
        title="a scaler by hand",
        difficulty=3,
        minutes=6,
        trains="when a step is skipped, and how the scale finds its size",
        reference=scaled_step,
        observe=_observe_scaled,
        explain=_explain_scaled,
        raises=(
            (
                r"NoneType",
                "a parameter may have no gradient, and its p.grad is None: leave it out.",
            ),
        ),
        mistakes=(
            Mistake(
                "steps anyway",
                _scaled(skip=False),
                (
                    "the optimizer steps on gradients that are not finite, which destroys the "
                    "weights: skip that step."
                ),
            ),
            Mistake(
                "never divides",
                _scaled(divide=False),
                (
                    "the gradients that the optimizer gets are still scaled: divide them by the "
                    "scale first, in place."
                ),
            ),
            Mistake(
                "first alone",
                _scaled(looks_at=lambda gradients: gradients[:1]),
                "only one parameter is checked: every gradient of every group must be finite.",
            ),
            Mistake(
                "last alone",
                _scaled(looks_at=lambda gradients: gradients[-1:]),
                (
                    "only the last gradient decides: the loop must remember if any gradient of any "
                    "group is not finite."
                ),
            ),
            Mistake(
                "first group",
                _first_group,
                (
                    "only the first group's gradients are divided: optimizer.param_groups is a "
                    "list of groups, so go through all of them."
                ),
            ),
            Mistake("stops at the first", _stops_at_the_first, _STOPS),
            Mistake("a step each", _a_step_each, _A_STEP_EACH),
            Mistake("a step each, counted once", _steps_in_the_loop, _A_STEP_EACH),
            Mistake(
                "doubles before",
                _doubles_before,
                (
                    "`good` is compared with `patience` before the step: the scale doubles one "
                    "step late, and this step's gradients are divided by the doubled scale. "
                    "Divide and step first, then count and compare."
                ),
            ),
            Mistake(
                "divides by the next",
                _divides_by_the_next,
                (
                    "where the scale doubles, the gradients are divided by the doubled scale: they "
                    "have the old one, so divide and step first, and then double."
                ),
            ),
            Mistake(
                "not in a row",
                _scaled(streak=False),
                (
                    "good steps are counted across a skipped one: they must be in a row, so begin "
                    "again at 0."
                ),
            ),
            Mistake(
                "inf alone",
                _scaled(finite=lambda gradient: not gradient.isinf().any()),
                (
                    "NaN passes this check, but it is not finite either (inf - inf gives NaN): "
                    "isfinite() finds both."
                ),
            ),
            Mistake(
                "nan alone",
                _scaled(finite=lambda gradient: not gradient.isnan().any()),
                "inf passes this check, and it is not finite: isfinite() finds inf and NaN.",
            ),
            Mistake(
                "multiplies",
                _scaled(multiply=True),
                "the gradients are multiplied by the scale: the loss was, so divide them by it.",
            ),
            Mistake(
                "one step late",
                _scaled(grow=lambda good, patience: good == patience),
                (
                    "the scale doubles one step late: count this step first, and then compare with "
                    "`patience`."
                ),
            ),
            Mistake(
                "does not begin again",
                _scaled(again=False),
                _NOT_BEGUN_AGAIN,
            ),
            Mistake(
                "never halves",
                _scaled(halve=False),
                (
                    "the scale stays as it was after a gradient that is not finite, so the next "
                    "step fails too: halve it."
                ),
            ),
        ),
    ),
    Exercise(
        id="7.6",
        title="autocast without its copies",
        difficulty=2,
        minutes=4,
        trains="how long autocast keeps a bf16 copy of a weight",
        reference=features,
        observe=_observe_features,
        explain=_explain_features,
        mistakes=(
            Mistake("cached", _features(cache=True), _CACHED),
            Mistake("graph", _features(grad=True), _GRAPH),
            Mistake("graph and cache", _features(grad=True, cache=True), _GRAPH),
            Mistake(
                "float32",
                _features(enabled=False),
                "everything runs in float32: nothing is computed under autocast.",
            ),
            Mistake(
                "rounded at the end",
                _rounded_at_the_end,
                (
                    "everything runs in float32, and only the result is rounded: let autocast "
                    "multiply the matrices in bf16."
                ),
            ),
            Mistake(
                "float16",
                _features(dtype=torch.float16),
                "this computes in float16, but bf16 was asked for.",
            ),
            Mistake(
                "cast",
                _in_place,
                (
                    "the weights of the model were float32 and are now bf16: autocast casts an "
                    "operation's inputs, and does not change the weights."
                ),
            ),
            Mistake(
                "copied",
                _copied,
                (
                    "this makes a bf16 copy of the whole model, with norms in bf16: it does not "
                    "fit, and autocast computes something else."
                ),
            ),
        ),
    ),
)
