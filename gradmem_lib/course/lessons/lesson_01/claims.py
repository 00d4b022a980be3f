"""Lesson 01's answers: what a step's residents weigh, what autograd really saves, and when
activations rule.

Real objects answer wherever they fit on a CPU, and closed forms of ``accounting`` for whole models.
"""

from functools import partial
from math import log

import torch
from torch import nn

from ....compat.tensors import storage_key
from ....measure.tracker import MemoryTracker
from ....training.prepare import prepare
from ....training.recipe import Recipe
from ...ledger import Finding, answers
from ...ledger.finding import GB, Figures, about, between, each, gb, more, none, some, yes
from ...ledger.saved_tensors import saved_tensors
from ...material import accounting, models
from ...material.shapes import SHAPES, Shape
from ..shared.claim_runs import adam_step, name_of, peak_of
from ..shared.settings import seeded

# What autocast-bf16 keeps, autocast-fp16 keeps too.
PRECISIONS = ("float32", "bf16", "autocast-bf16", "float32-master")
SEVEN = SHAPES["Llama-2-7B"]


@answers("C01")
def seven_billion() -> Finding:
    figures: Figures = {"parameters of Llama-2-7B, count": SEVEN.parameters}
    kept, saved = {}, {}
    for name in ("bf16", "autocast-bf16", "float32-master"):
        parts = accounting.resident_bytes(SEVEN, name).values()
        kept[name] = sum(parts)
        saved[name] = sum(accounting.model_activations(SEVEN, 1, 2048, precision=name).values())
        peak = peak_of(SEVEN, 1, 2048, name)
        figures |= {
            f"{name}: parameters + gradients + Adam": "{:,} + {:,} + {:,}".format(*parts),
            f"{name}: activations of 1 x 2048 tokens": saved[name],
            f"{name}: peak without accumulation ({peak.moment})": peak.total,
        }
    mixed = kept["float32-master"]
    without = mixed - 4 * SEVEN.parameters
    return Finding(
        own=(
            about("7B before activations", "84 GB", min(kept["autocast-bf16"], mixed)),
            between(
                "all four, accumulating 1 x 2048", "104 to 124 GB", mixed + saved["float32-master"]
            ),
        ),
        where=about("without float32 weights", "84 GB", without),
        says=f"""
            only if: no weights are kept in FP32; mixed precision keeps them, instead of FP16 ones
                (autocast) or beside them.
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
    """The share of a layer's weights that is not finite in float16 after one AdamW step, weights
    and states in ``states``.
    """
    weight, _ = adam_step(states, foreach=False)
    return (~torch.isfinite(weight.detach().half())).float().mean().item()


@answers("C02")
def adam_state_dtype() -> Finding:
    chosen = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for option, on in (("foreach", False), ("foreach", True), ("fused", True)):
            weight, optimizer = adam_step(dtype, **{option: on})
            moment = optimizer.state[weight]["exp_avg_sq"]
            chosen[name_of(dtype), option, on] = name_of(moment.dtype)
    weight, optimizer = adam_step(torch.float16, foreach=False)
    second = optimizer.state[weight]["exp_avg_sq"]
    return Finding(
        own=(
            some("weights lost in a step with FP16 states", _destroyed(torch.float16)),
            none("the same, FP32 states", _destroyed(torch.float32), "%"),
        ),
        elsewhere=some("weights lost, BF16 states", _destroyed(torch.bfloat16)),
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
        figures=each("{} weights, {}={}: states in", chosen),
    )


@answers("C03")
def adam_over_gradients() -> Finding:
    per = {name: accounting.bytes_per_parameter(name) for name in PRECISIONS}
    single, half, master = per["float32"], per["bf16"], per["float32-master"]
    return Finding(
        own=about("FP32 states / 16-bit gradients", "4×", single["optimizer"] / half["gradients"]),
        elsewhere=(
            about("states / gradients, one dtype", "4×", half["optimizer"] / half["gradients"]),
            about("with an FP32 master copy", "4×", master["optimizer"] / master["gradients"]),
        ),
        says="""
            only if: states are in FP32 and gradients in 2 bytes, as in its example; in one
                dtype, states take twice as much.
            fails: FP32 states are not 4 times as large as 2-byte gradients.
            """,
        figures=each(
            "{}: optimizer / gradients, bytes per parameter", per, "{0[optimizer]} / {0[gradients]}"
        ),
    )


def _moving_average(name: str, whole: float):
    """The shares of the new value that Adam's ``name`` takes, and of itself that it keeps.
    ``whole``: what met a state of 0 in the first step, a gradient of 1e-4 or its square.
    """
    weight, optimizer = adam_step(torch.float64)
    moment = optimizer.state[weight][name]
    first = moment.clone()
    weight.grad = torch.zeros_like(weight)
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
            about("Adam's m keeps", "90%", m_keeps, within=1e-9),
            about("v keeps", "99.9%", v_keeps, within=1e-9),
            yes("the rest of each is new", rest < 1e-9),
        ),
        says=f"""
            holds: PyTorch's Adam does this by default.
            fails: A step of PyTorch's Adam with its default betas does something else.
            why: In other words, m forgets half of a gradient in {half_of_m:.1f} steps,
                and v forgets half of a squared gradient in {half_of_v:.0f}.
            """,
    )


def _five_modules():
    """The document's network, and a row for it."""
    with seeded():
        net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    return net, torch.tensor([[1.0, 2.0]])


def _storages(tensors) -> set:
    return {storage_key(tensor.untyped_storage()) for tensor in tensors}


@answers("C05")
def five_modules() -> Finding:
    net, x = _five_modules()
    saved, _ = saved_tensors(lambda: net(x))
    storages = _storages(saved)
    parameters = storages & _storages(net.parameters())
    intermediate = storages - parameters - _storages([x])
    return Finding(
        own=about("intermediate tensors kept", "5", len(intermediate), within=0),
        says=f"""
            fails: Only {len(intermediate)} are kept, the outputs of the two ReLUs.
            holds: Each module's output is kept.
            why: Autograd saves {len(saved)} tensors in {len(storages)} storages: the input,
                {len(parameters)} weight matrices, and {len(intermediate)} intermediate
                results. Each of these results is used twice, by its ReLU and by the next Linear.
                The outputs of the Linears are not kept; a loss may keep the last one.
            """,
        figures={
            "tensors handed to autograd, count": len(saved),
            "distinct storages, count": len(storages),
            "of these parameters, count": len(parameters),
            "of these intermediate results, count": len(intermediate),
        },
    )


@answers("C06")
def no_fit() -> Finding:
    return Finding(
        own=yes("a PyTorch module has fit", hasattr(nn.Module, "fit")),
        says="""
            fails: A PyTorch module has no fit(); model(X) runs the forward pass.
            holds: This version of PyTorch has nn.Module.fit.
            why: In libraries that have a fit(), such as Keras, it runs the whole training loop,
                not one forward pass.
            """,
    )


def _gradients_and_activations(attention: str, batch_size: int, seq_len: int):
    """Bytes of a tiny Llama's gradients, and of what autograd saves for them."""
    model = models.tiny_llama(
        layers=1, hidden=64, heads=4, intermediate=176, vocab=256, attention=attention
    )
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
    run = partial(model, input_ids=ids, labels=ids)
    _, saved = saved_tensors(run, but_not=model.parameters())
    run().loss.backward()
    return sum(parameter.grad.nbytes for parameter in model.parameters()), saved


@answers("C07")
def gradients_and_batch() -> Finding:
    found = {}
    for name, attention in (("fused", "sdpa"), ("eager", "eager")):
        for batch, seq in ((1, 64), (4, 64), (1, 256)):
            found[name, batch, seq] = _gradients_and_activations(attention, batch, seq)
    gradients, activations = found["fused", 1, 64]
    more_gradients, of_batch = found["fused", 4, 64]
    fused = found["fused", 1, 256][1] / activations
    eager = found["eager", 1, 256][1] / found["eager", 1, 64][1]
    return Finding(
        own=(
            about("gradients, 4 times the batch", "1×", more_gradients / gradients, within=0),
            more("activations, 4 times the batch", of_batch / activations),
            more("activations, 4 times the sequence", fused),
        ),
        says=f"""
            holds: Gradients have the shapes of the parameters; each token adds activations.
            fails: Gradients or activations behave differently here.
            why: With four times the sequence, activations grow {fused:.1f} times under fused
                attention but {eager:.1f} times under eager attention, whose scores grow with the
                square of the sequence.
            """,
        figures=each("{}, {} x {}: gradients / activations", found, "{:,} / {:,}"),
    )


def states_after_a_step(optimizer: str) -> int:
    """Bytes of the states that a recipe's ``optimizer`` has for a float32 matrix of 512 x 512 after
    a real step.
    """
    layer = nn.Linear(512, 512, bias=False)
    layer.weight.grad = torch.full_like(layer.weight, 1e-4)
    made = prepare(layer, Recipe(optimizer=optimizer)).optimizer
    with MemoryTracker(layer, made, live=False) as tracker:
        made.step()
    return tracker.current.by_category["optimizer"]


def _over_parameters(optimizer: str, momentum: float = 0.0):
    """States / parameters, for each of ``PRECISIONS``."""
    found = []
    for name in PRECISIONS:
        per = accounting.bytes_per_parameter(name, optimizer, momentum)
        found.append(per["optimizer"] / per["parameters"])
    return tuple(found)


@answers("C32")
def states_over_parameters() -> Finding:
    adam, sgd = _over_parameters("adamw"), _over_parameters("sgd", 0.9)
    others = ("adamw-8bit", "adafactor-torch", "sgd")
    steps = {name: (states_after_a_step(name), 4 * 512 * 512) for name in others}
    return Finding(
        own=(
            between("Adam's states / parameters, one dtype", "2 to 8×", min(adam)),
            between("the same, FP32 master copy", "2 to 8×", max(adam)),
        ),
        elsewhere=between("states / parameters, SGD with momentum", "2 to 8×", min(sgd)),
        says="""
            only if: the optimizer is Adam, its own example; without a master copy, SGD,
                Adafactor and 8-bit AdamW keep about the parameters' size, or less.
            fails: Adam's states are outside that range.
            why: No recipe here reaches 8 times. A recipe that also keeps a float32 copy of the
                gradients does.
            """,
        figures=each(
            "{}: optimizer / parameters",
            {"adamw": adam, "sgd, momentum 0.9": sgd},
            ", ".join(f"{{:g}} ({name})" for name in PRECISIONS),
        )
        | each(
            "{}, a matrix of 512 x 512 after a real step: states / parameters, bytes",
            steps,
            "{:,} / {:,}",
        ),
    )


@answers("C33")
def one_point_three_billion() -> Finding:
    totals = {}
    for name in PRECISIONS:
        totals[name] = sum(accounting.bytes_per_parameter(name).values()) * 13 * GB // 10
    return Finding(
        own=about("1.3B in its own loop (autocast)", "10.4 GB", totals["autocast-bf16"]),
        where=about("all in 2 bytes", "10.4 GB", totals["bf16"]),
        says="""
            only if: all numbers take 2 bytes, even Adam's states; its own loop uses
                autocast, which keeps twice as much.
            fails: No recipe keeps that much.
            why: Autocast multiplies in bf16 and keeps weights, gradients and states in float32.
                A recipe with a float32 master copy needs the same total.
            """,
        figures=each("1.3e9 parameters, {}", totals),
    )


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


def _over_residents(precision: str, attention: str, checkpointing: str | None = None) -> float:
    """Activations of that model on 4 x 2048 tokens / its parameters and states."""
    options = {"precision": precision, "attention": attention, "checkpointing": checkpointing}
    saved = accounting.model_activations(GPT_1_3B, 4, 2048, **options)
    kept = accounting.resident_bytes(GPT_1_3B, precision)
    return sum(saved.values()) / (kept["parameters"] + kept["optimizer"])


@answers("C36")
def activations_rule() -> Finding:
    fused, eager = (_over_residents("autocast-bf16", how) for how in ("fused", "eager"))
    checkpointed = _over_residents("autocast-bf16", "fused", "per-layer")
    kept = accounting.resident_bytes(GPT_1_3B, "autocast-bf16")
    return Finding(
        own=(
            more("activations / parameters and states, fused", fused),
            more("the same, eager", eager),
        ),
        elsewhere=more("activations / both, checkpointed", checkpointed),
        says=f"""
            only if: nothing is checkpointed, as in its own 1.3B model.
            fails: At 4 x 2048 tokens activations stay below parameters and optimizer states.
            why: In pure bf16, parameters and states take half, and the ratio is
                {_over_residents("bf16", "fused"):.1f} with fused attention and
                {_over_residents("bf16", "eager"):.1f} with eager attention.
            """,
        figures={"autocast-bf16: parameters + optimizer": kept["parameters"] + kept["optimizer"]},
    )
