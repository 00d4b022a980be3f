"""Lesson 01's answers: what a step's residents weigh, what autograd really saves, and when
activations rule.

Real objects answer wherever they fit on a CPU, and closed forms of ``accounting`` for whole models.
"""

from __future__ import annotations

from functools import partial
from math import log

import torch
from torch import nn

from ....compat.tensors import storage_key
from ....training.prepare import prepare
from ....training.recipe import Recipe
from ...ledger import Finding, answers
from ...ledger.finding import GB, Figures, about, between, gb, in_unit, more, none, some, yes
from ...ledger.saved_tensors import saved_tensors
from ...material import accounting
from ...material.shapes import SHAPES, Shape
from ..shared.claim_runs import name_of, peak_of, resident, seeded

# What autocast-bf16 keeps, autocast-fp16 keeps too.
PRECISIONS = ("float32", "bf16", "autocast-bf16", "float32-master")
SEVEN = SHAPES["Llama-2-7B"]
# The sizes of a GPT of 1.3 billion parameters, with the width (2048) and context (2048) of the
# document that claims.
GPT_1_3B = Shape(
    "GPT 1.3B",
    50257,
    2048,
    24,
    16,
    16,
    8192,
    tied=True,
    gated=False,
    norm="layer",
    biases=True,
    positions=2048,
)


def adam_states(dtype: torch.dtype, **options) -> tuple[nn.Linear, torch.optim.AdamW]:
    """A small layer in ``dtype`` after one real AdamW step on gradients of 1e-4."""
    with seeded():
        layer = nn.Linear(64, 64, bias=False, dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), **options)
    layer.weight.grad = torch.full_like(layer.weight, 1e-4)
    optimizer.step()
    return layer, optimizer


def _moments_of(optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def states_after_a_step(optimizer: str) -> tuple[int, int]:
    """Bytes of a float32 matrix, and of the states that a recipe's ``optimizer`` has for it after a
    real step.
    """
    layer = nn.Linear(512, 512, bias=False)
    layer.weight.grad = torch.full_like(layer.weight, 1e-4)
    made = prepare(layer, Recipe(optimizer=optimizer)).optimizer
    made.step()
    states = {
        storage_key(t): t.untyped_storage().nbytes()
        for state in made.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    }
    return layer.weight.nbytes, sum(states.values())


@answers("C01")
def seven_billion() -> Finding:
    figures: Figures = {"parameters of Llama-2-7B, count": SEVEN.parameters}
    kept, saved = {}, {}
    for name in ("bf16", "autocast-bf16", "float32-master"):
        parts = accounting.resident_bytes(SEVEN, name)
        kept[name] = sum(parts.values())
        saved[name] = sum(accounting.model_activations(SEVEN, 1, 2048, precision=name).values())
        peak = peak_of(SEVEN, 1, 2048, name)
        figures[f"{name}: parameters + gradients + Adam"] = " + ".join(
            f"{n:,}" for n in parts.values()
        )
        figures[f"{name}: activations of 1 x 2048 tokens"] = saved[name]
        figures[f"{name}: peak without accumulation ({peak.moment})"] = peak.total
    mixed = min(kept["autocast-bf16"], kept["float32-master"])
    without = (
        kept["float32-master"] - accounting.PRECISIONS["float32-master"].master * SEVEN.parameters
    )
    together = kept["float32-master"] + saved["float32-master"]
    return Finding(
        own=(
            about("7B before activations", 84 * GB, mixed, "GB"),
            between("all four, accumulating 1 x 2048", 104 * GB, 124 * GB, together, "GB"),
        ),
        where=(about("without float32 weights", 84 * GB, without, "GB"),),
        says=f"""
            only if: Adam's states are in FP32 and the weights are not; PyTorch's mixed
                precision keeps the weights in FP32, too.
            why: Autocast keeps the weights in float32, and other recipes keep a float32 master
                copy beside 16-bit weights. Both need 16 bytes a parameter. Pure bf16 keeps
                {gb(kept["bf16"])}, with Adam's states in bf16. Without accumulation, the peak is
                less than the sum of all four, since backward frees activations while it adds
                gradients. With accumulation, the peak is the sum: from the second micro-batch on,
                forward keeps all gradients.
            """,
        figures=figures,
    )


def _destroyed(states: torch.dtype) -> float:
    """The share of a float16 layer's weights that is not finite after one AdamW step on gradients
    of 1e-4, states in ``states``.
    """
    layer, _ = adam_states(states, foreach=False)
    return (~torch.isfinite(layer.weight.detach().half())).float().mean().item()


@answers("C02")
def adam_state_dtype() -> Finding:
    figures: Figures = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for option, on in (("foreach", False), ("foreach", True), ("fused", True)):
            _, optimizer = adam_states(dtype, **{option: on})
            found = {name_of(moment.dtype) for moment in _moments_of(optimizer)}
            figures[f"{name_of(dtype)} weights, {option}={on}: states in"] = ", ".join(found)
    layer, optimizer = adam_states(torch.float16, foreach=False)
    widths = [moment.itemsize for moment in _moments_of(optimizer)]
    second = optimizer.state[layer.weight]["exp_avg_sq"]
    figures["float16, gradients of 1e-4: largest entry of v after a step"] = float(second.max())
    figures["bytes a state in PyTorch, FP16 model"] = max(widths)
    return Finding(
        own=(
            some("weights lost in a step with FP16 states", _destroyed(torch.float16)),
            none("the same, FP32 states", _destroyed(torch.float32), "%"),
        ),
        elsewhere=(some("weights lost, BF16 states", _destroyed(torch.bfloat16)),),
        says=f"""
            only if: the states would be in FP16, where one step destroys the weights; in BF16
                it stays finite.
            fails: A step with states in FP16 gives the right weights.
            why: In float16, the v of a gradient of 1e-4 rounds to {second.max():.0f}, and the
                step divides by almost 0. In bf16, the same step stays finite; lesson 02 shows what
                is lost there. Plain, foreach and fused AdamW choose the same dtype. The states are
                in float32 where the weights are (as under autocast), or where a recipe adds a
                float32 master copy.
            """,
        figures=figures,
    )


@answers("C03")
def adam_over_gradients() -> Finding:
    figures: Figures = {}
    states, gradients = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        layer, optimizer = adam_states(dtype)
        states[dtype] = sum(moment.nbytes for moment in _moments_of(optimizer))
        gradients[dtype] = layer.weight.grad.nbytes
        figures[f"{name_of(dtype)} layer after a real step: states / gradients"] = (
            f"{states[dtype]:,} / {gradients[dtype]:,}"
        )
    times = {}
    for name in PRECISIONS:
        per = accounting.bytes_per_parameter(name, "adamw")
        times[name] = per["optimizer"] / per["gradients"]
        figures[f"{name}: optimizer / gradients, bytes per parameter"] = (
            f"{per['optimizer']} / {per['gradients']}"
        )
    own = states[torch.float32] / gradients[torch.bfloat16]
    alike = max(states[dtype] / gradients[dtype] for dtype in states)
    return Finding(
        own=(about("FP32 states / 16-bit gradients", 4, own, "times"),),
        elsewhere=(
            about("states / gradients, one dtype", 4, alike, "times"),
            about("with an FP32 master copy", 4, times["float32-master"], "times"),
        ),
        says="""
            only if: states are in FP32 and gradients in 2 bytes, as in its example; in one
                dtype, states take twice as much.
            fails: FP32 states are not 4 times as large as 2-byte gradients.
            """,
        figures=figures,
    )


def _moving_average(name: str, whole: float) -> tuple[float, float]:
    """The shares of the new value that Adam's ``name`` takes, and of itself that it keeps.
    ``whole``: what met a state of 0 in the first step, a gradient of 1e-4 or its square.
    """
    layer, optimizer = adam_states(torch.float64)
    moment = optimizer.state[layer.weight][name]
    first = moment.clone()
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    return (first / whole).mean().item(), (moment / first).mean().item()


@answers("C04")
def moving_averages() -> Finding:
    m_takes, m_keeps = _moving_average("exp_avg", 1e-4)
    v_takes, v_keeps = _moving_average("exp_avg_sq", 1e-8)
    rest = max(abs(m_takes + m_keeps - 1), abs(v_takes + v_keeps - 1))
    half_of_m, half_of_v = log(0.5) / log(m_keeps), log(0.5) / log(v_keeps)
    return Finding(
        own=(
            about("Adam's m keeps", 0.9, m_keeps, "%", 1e-9),
            about("v keeps", 0.999, v_keeps, "%", 1e-9),
            yes("each takes the rest of the new one", rest < 1e-9),
        ),
        says=f"""
            holds: PyTorch's Adam does this by default.
            fails: A step of PyTorch's Adam with its default betas does something else.
            why: In other words, m forgets half of a gradient in {half_of_m:.1f} steps,
                and v forgets half of its square in {half_of_v:.0f}.
            """,
        figures={
            "default betas": str(adam_states(torch.float64)[1].defaults["betas"]),
            "half-life of m, steps": half_of_m,
            "half-life of v, steps": half_of_v,
        },
    )


def _five_modules() -> tuple[nn.Sequential, torch.Tensor]:
    with seeded():
        net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    return net, torch.tensor([[1.0, 2.0]])


@answers("C05")
def five_modules() -> Finding:
    net, x = _five_modules()
    output: list[torch.Tensor] = []
    saved, _ = saved_tensors(lambda: output.append(net(x)))
    storages = {storage_key(tensor.untyped_storage()) for tensor in saved}
    parameters = {storage_key(parameter.untyped_storage()) for parameter in net.parameters()}
    given, made = storage_key(x.untyped_storage()), storage_key(output[0].untyped_storage())
    intermediate = storages - parameters - {given}
    _, nbytes = saved_tensors(lambda: net(x), but_not=(x, *net.parameters()))
    return Finding(
        own=(about("intermediate tensors kept", 5, len(intermediate), within=0),),
        says=f"""
            fails: Only {len(intermediate)} are kept, the outputs of the two ReLUs.
            holds: Each module's output is kept.
            why: Autograd saves {len(saved)} tensors in {len(storages)} storages: the input,
                {len(storages & parameters)} weight matrices, and {len(intermediate)} intermediate
                results. Each of these results is used twice, by its ReLU and by the next Linear.
                The outputs of the Linears, and so the network's output, are not kept.
            """,
        figures={
            "tensors handed to autograd, count": len(saved),
            "distinct storages, count": len(storages),
            "of these parameters, count": len(storages & parameters),
            "of these the input, count": len(storages & {given}),
            "of these intermediate results, count": len(intermediate),
            "final output saved": in_unit(made in storages, "yes"),
            "bytes of the intermediate results": nbytes,
        },
    )


@answers("C06")
def no_fit() -> Finding:
    net, x = _five_modules()
    try:
        net.fit()
        message = "nothing"
    except AttributeError as error:
        message = f"AttributeError: {error}"
    return Finding(
        own=(yes("a PyTorch module has fit", message == "nothing"),),
        says="""
            fails: A PyTorch module has no fit(); the call net(x) runs the forward pass.
            holds: This version of PyTorch has nn.Module.fit.
            why: In libraries that have a fit(), it runs the whole training loop, not one
                forward pass.
            """,
        figures={"what net.fit() raises": message, "shape of net(x)": str(tuple(net(x).shape))},
    )


@answers("C07")
def gradients_and_batch() -> Finding:
    from ...material.models import tiny_llama

    figures: Figures = {}
    gradients, activations = {}, {}
    for attention, name in (("sdpa", "fused"), ("eager", "eager")):
        model = tiny_llama(
            layers=1, hidden=64, heads=4, intermediate=176, vocab=256, attention=attention
        )
        for batch_size, seq_len in ((1, 64), (4, 64), (1, 256)):
            ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
            run = partial(model, input_ids=ids, labels=ids)
            _, saved = saved_tensors(run, but_not=model.parameters())
            run().loss.backward()
            key = (name, batch_size, seq_len)
            gradients[key] = sum(parameter.grad.nbytes for parameter in model.parameters())
            activations[key] = saved
            model.zero_grad(set_to_none=True)
            figures[f"{name}, {batch_size} x {seq_len}: gradients / activations"] = (
                f"{gradients[key]:,} / {saved:,}"
            )
    fused, eager = (
        activations[name, 1, 256] / activations[name, 1, 64] for name in ("fused", "eager")
    )
    same = gradients["fused", 4, 64] / gradients["fused", 1, 64]
    return Finding(
        own=(
            about("gradients, 4 times the batch", 1, same, "times", within=0),
            more(
                "activations, 4 times the batch",
                activations["fused", 4, 64] / activations["fused", 1, 64],
            ),
            more("activations, 4 times the sequence", fused),
        ),
        says=f"""
            holds: Gradients have the shapes of the parameters for any batch.
            fails: Gradients or activations behave differently here.
            why: With four times the sequence, activations grow {fused:.1f} times under fused
                attention but {eager:.1f} times under eager attention, whose scores grow with the
                square of the sequence.
            """,
        figures=figures,
    )


@answers("C32")
def states_over_parameters() -> Finding:
    figures: Figures = {}
    times = {}
    for optimizer, momentum in (("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)):
        key = f"{optimizer}, momentum {momentum}" if momentum else optimizer
        for name in PRECISIONS:
            per = accounting.bytes_per_parameter(name, optimizer, momentum)
            times[key, name] = per["optimizer"] / per["parameters"]
        figures[f"{key}: optimizer / parameters"] = ", ".join(
            f"{times[key, n]:g} ({n})" for n in PRECISIONS
        )
    for name in ("adamw", "adamw-8bit", "adafactor-torch", "sgd"):
        weights, states = states_after_a_step(name)
        figures[f"{name}, a matrix of 512 x 512 after a real step: states / parameters, bytes"] = (
            f"{states:,} / {weights:,}"
        )
    adam = [n for (optimizer, _), n in times.items() if optimizer == "adamw"]
    return Finding(
        own=(
            between("Adam's states / parameters, one dtype", 2, 8, min(adam), "times"),
            between("the same, FP32 master copy", 2, 8, max(adam), "times"),
        ),
        elsewhere=(
            between(
                "states / parameters, SGD with momentum",
                2,
                8,
                times["sgd, momentum 0.9", "bf16"],
                "times",
            ),
        ),
        says="""
            only if: the optimizer is Adam, its own example; without a master copy, SGD,
                Adafactor and 8-bit AdamW keep about the parameters' size, or less.
            fails: Adam's states are outside that range.
            why: No recipe here reaches 8 times. A recipe that also keeps a float32 copy of the
                gradients does.
            """,
        figures=figures,
    )


@answers("C33")
def one_point_three_billion() -> Finding:
    nominal = 13 * GB // 10
    totals = {
        name: sum(accounting.bytes_per_parameter(name, "adamw").values()) * nominal
        for name in PRECISIONS
    }
    real = {name: resident(GPT_1_3B, name) for name in PRECISIONS}
    claimed = 104 * GB // 10
    return Finding(
        own=(about("1.3B in its own loop (autocast)", claimed, totals["autocast-bf16"], "GB"),),
        where=(about("all in 2 bytes", claimed, totals["bf16"], "GB"),),
        says="""
            only if: all numbers take 2 bytes, even Adam's states; the document's own loop uses
                autocast, which keeps twice as much.
            fails: No recipe keeps that much.
            why: Autocast multiplies in bf16 and keeps weights, gradients and states in float32.
                A recipe with a float32 master copy needs the same total.
            """,
        figures={f"1.3e9 parameters, {name}": total for name, total in totals.items()}
        | {"parameters of a GPT of 24 x 2048, count": GPT_1_3B.parameters}
        | {f"that GPT, {name}": total for name, total in real.items()},
    )


def batch_to_exceed(shape: Shape, **options) -> int:
    """The fewest sequences of 2048 tokens whose saved activations exceed parameters and optimizer
    states in pure bf16.
    """
    kept = accounting.resident_bytes(shape, "bf16")
    limit = kept["parameters"] + kept["optimizer"]
    batch_size = 1
    while sum(accounting.model_activations(shape, batch_size, 2048, **options).values()) <= limit:
        batch_size += 1
    return batch_size


@answers("C36")
def activations_rule() -> Finding:
    figures: Figures = {}
    times = {}
    for precision in ("autocast-bf16", "bf16"):
        kept = accounting.resident_bytes(GPT_1_3B, precision)
        limit = kept["parameters"] + kept["optimizer"]
        figures[f"{precision}: parameters + optimizer"] = limit
        for attention, checkpointing in (("fused", None), ("eager", None), ("fused", "per-layer")):
            options = {"attention": attention, "checkpointing": checkpointing}
            own = accounting.model_activations(GPT_1_3B, 4, 2048, precision=precision, **options)
            times[precision, attention, checkpointing] = sum(own.values()) / limit
            figures[
                f"{precision}, {attention}, checkpointing {checkpointing or 'off'}: activations"
            ] = sum(own.values())
            if precision == "bf16":
                figures[
                    (
                        f"{attention}, checkpointing {checkpointing or 'off'}: first batch that "
                        "exceeds, sequences"
                    )
                ] = batch_to_exceed(GPT_1_3B, **options)
    fused, eager, less_ = (
        times["autocast-bf16", *key]
        for key in (("fused", None), ("eager", None), ("fused", "per-layer"))
    )
    return Finding(
        own=(
            more("activations / parameters and states, fused", fused),
            more("the same, eager", eager),
        ),
        elsewhere=(more("activations / both, checkpointed", less_),),
        says=f"""
            only if: nothing is checkpointed, as in its own 1.3B model.
            fails: At 4 x 2048 tokens activations stay below parameters and optimizer states.
            why: In pure bf16, parameters and states take half, and the ratio is
                {times["bf16", "fused", None]:.1f} with fused attention and
                {times["bf16", "eager", None]:.1f} with eager attention.
            """,
        figures=figures,
    )
