"""Lesson 01's answers: what a step's residents weigh, what autograd really saves, and when activations rule.

Real objects answer wherever they fit on a CPU. Blocks of full size are run under fake tensors, which carry
shapes and storages but no numbers: their saved bytes are then compared with the closed forms of
``accounting``.
"""

from __future__ import annotations

from math import log

import torch
from torch import nn

from ...compat import storage_key
from ...techniques import accounting
from ...techniques.shapes import SHAPES, Shape
from ...units import GiB
from . import Finding, answers
from .saved import block_saves, saved_tensors

GB = 10**9
# What autocast-bf16 keeps, autocast-fp16 keeps too.
PRECISIONS = ("float32", "bf16", "autocast-bf16", "float32-master")
SEVEN = SHAPES["Llama-2-7B"]
# The sizes of a GPT of 1.3 billion parameters, with the width (2048) and context (2048) of the document that claims.
GPT_1_3B = Shape(
    "GPT 1.3B", 50257, 2048, 24, 16, 16, 8192,
    tied=True, gated=False, norm="layer", biases=True, positions=2048,
)  # fmt: skip


def gb(nbytes: float) -> str:
    """Bytes in the documents' own unit, powers of 1000."""
    return f"{nbytes / GB:.1f} GB"


def adam_states(dtype: torch.dtype, **options) -> tuple[nn.Linear, torch.optim.AdamW]:
    """A small layer in ``dtype`` after one real AdamW step on gradients of 1e-4."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False, dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), **options)
    layer.weight.grad = torch.full_like(layer.weight, 1e-4)
    optimizer.step()
    return layer, optimizer


def _moments_of(optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


@answers("C01")
def seven_billion() -> Finding:
    figures: dict[str, int | float | str] = {"parameters of Llama-2-7B, count": SEVEN.parameters}
    totals = {}
    for name in ("bf16", "autocast-bf16", "float32-master"):
        kept = accounting.resident_bytes(SEVEN, name)
        saved = sum(accounting.model_activations(SEVEN, 1, 2048, precision=name).values())
        peak = accounting.estimate(SEVEN, batch_size=1, seq_len=2048, precision=name)
        totals[name] = sum(kept.values())
        figures[f"{name}: parameters + gradients + Adam"] = " + ".join(f"{n:,}" for n in kept.values())
        figures[f"{name}: activations of 1 x 2048 tokens"] = saved
        if accounting.PRECISIONS[name].autocast:
            copies = accounting.block_activations(SEVEN, 1, 2048, precision=name)[
                "bf16 copies of the weights"
            ]
            figures[f"{name}: of these, bf16 copies of the blocks' weights"] = SEVEN.layers * copies
        figures[f"{name}: peak ({peak.moment})"] = peak.total
    nominal = sum(7 * GB * n for n in (2, 2, 8))
    sequence = sum(accounting.model_activations(SEVEN, 1, 2048, precision="bf16").values())
    return Finding(
        "holds only if",
        f"weights and gradients take 2 bytes, Adam's states 8 and no float32 copy of the weights exists: that is {gb(nominal)} "
        "before activations, and PyTorch's AdamW does not work so by itself. The recipes that exist keep "
        + ", ".join(f"{gb(total)} ({name})" for name, total in totals.items())
        + f"; 20 to 40 GB of activations are {20 * GB / sequence:.1f} to {40 * GB / sequence:.1f} sequences of 2048 tokens. "
        "And the peak is no sum of all four: gradients arrive while activations leave.",
        figures,
    )


@answers("C02")
def adam_state_dtype() -> Finding:
    figures: dict[str, int | float | str] = {}
    kinds = set()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            layer, optimizer = adam_states(dtype, **options)
            found = {str(moment.dtype).removeprefix("torch.") for moment in _moments_of(optimizer)}
            figures[
                f"{str(dtype).removeprefix('torch.')} weights, {next(iter(options.items()))}: states in"
            ] = "".join(found)
            kinds |= {(dtype, moment.dtype) for moment in _moments_of(optimizer)}
    layer, optimizer = adam_states(torch.float16, foreach=False)
    second = optimizer.state[layer.weight]["exp_avg_sq"]
    broken = int((~torch.isfinite(layer.weight)).sum())
    figures["float16, gradients of 1e-4: largest entry of v after a step"] = float(second.max())
    figures["float16, gradients of 1e-4: weights that are no longer finite, count"] = broken
    verdict = "does not hold" if all(weight == state for weight, state in kinds) else "holds only if"
    return Finding(
        verdict,
        "PyTorch's AdamW (plain, foreach and fused) makes its states in the dtype of the parameters, so a half-precision model "
        "gets half-precision states; they are float32 when the weights are (as under autocast) or where a recipe adds a float32 "
        f"master copy. The reason that the claim gives is sound: in float16, v of a gradient of 1e-4 rounds to {second.max():.0f} "
        f"and the plain step leaves {broken:,} of {layer.weight.numel():,} weights infinite or not a number.",
        figures,
    )


@answers("C03")
def adam_over_gradients() -> Finding:
    figures: dict[str, int | float | str] = {}
    for dtype in (torch.float32, torch.bfloat16):
        layer, optimizer = adam_states(dtype)
        states = sum(moment.nbytes for moment in _moments_of(optimizer))
        name = str(dtype).removeprefix("torch.")
        figures[f"{name} layer after a real step: states / gradients"] = (
            f"{states:,} / {layer.weight.grad.nbytes:,}"
        )
    times = {}
    for name in PRECISIONS:
        per = accounting.bytes_per_parameter(name, "adamw")
        times[name] = per["optimizer"] / per["gradients"]
        figures[f"{name}: optimizer / gradients, bytes per parameter"] = (
            f"{per['optimizer']} / {per['gradients']}"
        )
    master = accounting.PRECISIONS["float32-master"]
    return Finding(
        "holds only if",
        f"the states are float32 beside gradients of 2 bytes ({2 * master.state} / {master.gradient} = "
        f"{2 * master.state / master.gradient:.0f}). With one dtype for both it is {times['bf16']:.0f} times, in pure bf16 and in "
        f"float32 alike, and with the float32 master copy counted {times['float32-master']:.0f} times.",
        figures,
    )


@answers("C04")
def moving_averages() -> Finding:
    layer, optimizer = adam_states(torch.float64)
    state = optimizer.state[layer.weight]
    m, v = (state[name].clone() for name in ("exp_avg", "exp_avg_sq"))
    layer.weight.grad = torch.full_like(layer.weight, 3e-4)
    optimizer.step()
    g = layer.weight.grad
    error_m = (state["exp_avg"] - (0.9 * m + 0.1 * g)).abs().max() / state["exp_avg"].abs().max()
    error_v = (state["exp_avg_sq"] - (0.999 * v + 0.001 * g * g)).abs().max() / state["exp_avg_sq"].max()
    agrees = max(error_m.item(), error_v.item()) < 1e-9
    half_m, half_v = (log(0.5) / log(beta) for beta in (0.9, 0.999))
    return Finding(
        "holds" if agrees else "does not hold",
        "With PyTorch's default betas a real step does exactly that. In other words, m forgets half of a gradient in "
        f"{half_m:.1f} steps and v half of its square in {half_v:.0f}.",
        {
            "default betas": str(optimizer.defaults["betas"]),
            "half-life of m, steps": half_m,
            "half-life of v, steps": half_v,
        },
    )


def _five_modules() -> tuple[nn.Sequential, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
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
        "does not hold",
        f"Autograd is handed {len(saved)} tensors in {len(storages)} storages: the input, {len(storages & parameters)} weight "
        f"matrices, and only {len(intermediate)} intermediate results, the outputs of the two ReLUs. Each of those serves twice, "
        "for its ReLU and for the next Linear; what a Linear puts out is not kept, and neither is the network's output.",
        {
            "tensors handed to autograd, count": len(saved),
            "distinct storages, count": len(storages),
            "of these parameters, count": len(storages & parameters),
            "of these the input, count": len(storages & {given}),
            "of these intermediate results, count": len(intermediate),
            "final output saved": "yes" if made in storages else "no",
            "bytes of the intermediate results": nbytes,
        },
    )


@answers("C06")
def no_fit() -> Finding:
    net, x = _five_modules()
    try:
        net.fit()
    except AttributeError as error:
        message = str(error)
    else:
        return Finding("holds", "This version of PyTorch has nn.Module.fit.")
    return Finding(
        "does not hold",
        f"PyTorch answers AttributeError: {message}. Calling the module, net(x), runs the forward pass; where a library has a "
        "fit method, it is the whole training loop.",
        {"shape of net(x)": str(tuple(net(x).shape))},
    )


@answers("C07")
def gradients_and_batch() -> Finding:
    from ..models import tiny_llama

    figures: dict[str, int | float | str] = {}
    gradients, activations = {}, {}
    for attention in ("sdpa", "eager"):
        model = tiny_llama(layers=1, hidden=64, heads=4, intermediate=176, vocab=256, attention=attention)
        for batch_size, seq_len in ((1, 64), (2, 64), (4, 64), (1, 128), (1, 256)):
            ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
            loss: list[torch.Tensor] = []
            _, saved = saved_tensors(
                lambda model=model, ids=ids, loss=loss: loss.append(model(input_ids=ids, labels=ids).loss),
                but_not=model.parameters(),
            )
            loss[0].backward()
            key = (attention, batch_size, seq_len)
            gradients[key] = sum(parameter.grad.nbytes for parameter in model.parameters())
            activations[key] = saved
            model.zero_grad(set_to_none=True)
            label = {"sdpa": "fused", "eager": "eager"}[attention]
            figures[f"{label}, {batch_size} x {seq_len}: gradients / activations"] = (
                f"{gradients[key]:,} / {saved:,}"
            )
    grows = activations["sdpa", 4, 64] > activations["sdpa", 2, 64] > activations["sdpa", 1, 64]
    fused, eager = (activations[name, 1, 256] / activations[name, 1, 64] for name in ("sdpa", "eager"))
    return Finding(
        "holds" if grows and len(set(gradients.values())) == 1 else "does not hold",
        "Gradients have the shapes of the parameters whatever the batch. Activations grow in step with the batch; with four times "
        f"the sequence they grow {fused:.1f} times under fused attention but {eager:.1f} times under eager, whose scores grow with "
        "the square.",
        figures,
    )


@answers("C32")
def states_over_parameters() -> Finding:
    figures: dict[str, int | float | str] = {}
    times = {}
    for optimizer, momentum in (("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)):
        key = f"{optimizer}, momentum {momentum}" if momentum else optimizer
        for name in PRECISIONS:
            per = accounting.bytes_per_parameter(name, optimizer, momentum)
            times[key, name] = per["optimizer"] / per["parameters"]
        figures[f"{key}: optimizer / parameters"] = ", ".join(f"{times[key, n]:g} ({n})" for n in PRECISIONS)
    adam = sorted({n for (optimizer, _), n in times.items() if optimizer == "adamw"})
    return Finding(
        "holds only if",
        f"the optimizer is Adam: its states are {adam[0]:g} times the parameters when both have one dtype and {adam[-1]:g} times "
        f"with a float32 master copy beside bf16 weights; none of these recipes reaches 8. SGD keeps {times['sgd', 'bf16']:g}, "
        f"SGD with momentum {times['sgd, momentum 0.9', 'bf16']:g} times in one dtype.",
        figures,
    )


@answers("C33")
def one_point_three_billion() -> Finding:
    nominal = 13 * GB // 10
    totals = {
        name: sum(accounting.bytes_per_parameter(name, "adamw").values()) * nominal for name in PRECISIONS
    }
    real = {name: sum(accounting.resident_bytes(GPT_1_3B, name).values()) for name in PRECISIONS}
    return Finding(
        "holds only if",
        f"everything is in 2 bytes, Adam's states too (pure bf16): {gb(totals['bf16'])}. The same document's training loop uses "
        f"autocast, and that keeps {gb(totals['autocast-bf16'])}, as does a float32 master copy ({gb(totals['float32-master'])}).",
        {f"1.3e9 parameters, {name}": total for name, total in totals.items()}
        | {"parameters of a GPT of 24 x 2048, count": GPT_1_3B.parameters}
        | {f"that GPT, {name}": total for name, total in real.items()},
    )


def batch_to_exceed(shape: Shape, **options) -> int:
    """The fewest sequences of 2048 tokens whose saved activations exceed parameters and optimizer states
    in pure bf16."""
    kept = accounting.resident_bytes(shape, "bf16")
    limit = kept["parameters"] + kept["optimizer"]
    batch_size = 1
    while sum(accounting.model_activations(shape, batch_size, 2048, **options).values()) <= limit:
        batch_size += 1
    return batch_size


@answers("C36")
def activations_rule() -> Finding:
    kept = accounting.resident_bytes(GPT_1_3B, "bf16")
    limit = kept["parameters"] + kept["optimizer"]
    figures: dict[str, int | float | str] = {"parameters + optimizer, pure bf16": limit}
    first, times = {}, {}
    for attention in ("fused", "eager"):
        for checkpointing in (None, "per-layer"):
            key, options = (
                (attention, checkpointing),
                {"attention": attention, "checkpointing": checkpointing},
            )
            first[key] = batch_to_exceed(GPT_1_3B, **options)
            own = sum(accounting.model_activations(GPT_1_3B, 4, 2048, **options).values())
            times[key] = own / limit
            label = f"{attention}, checkpointing {checkpointing or 'off'}"
            figures[f"{label}: activations of 4 x 2048"] = own
            figures[f"{label}: first batch of 2048 that exceeds, sequences"] = first[key]
    return Finding(
        "holds only if",
        "nothing is checkpointed. For a GPT of 1.3B at the document's own 4 x 2048 tokens in bf16, activations are "
        f"{times['fused', None]:.1f} times parameters and optimizer states with fused attention, {times['eager', None]:.1f} with "
        f"eager, and they exceed them from batch {first['fused', None]} ({first['eager', None]}) on; with every layer "
        f"checkpointed they are {times['fused', 'per-layer']:.2f} times, and exceed them from batch "
        f"{first['fused', 'per-layer']} on.",
        figures,
    )


def _halves(batch_size: int, seq_len: int, attention: str) -> tuple[int, int]:
    """Saved bytes of the attention half and of the MLP half of a Llama-2-7B block in bf16."""
    options = {"attention": attention, "precision": "bf16"}
    first = accounting.attention_activations(SEVEN, batch_size, seq_len, **options)
    second = accounting.mlp_activations(SEVEN, batch_size, seq_len, precision="bf16")
    return sum(first.values()), sum(second.values())


@answers("C37")
def one_layer() -> Finding:
    batch, seq, width, heads, layers = 8, 2048, 4096, 32, 32
    qkv, scores, ffn = 3 * batch * seq * width * 2, batch * heads * seq**2 * 2, batch * seq * 4 * width * 2
    real = {attention: sum(_halves(batch, seq, attention)) for attention in ("fused", "eager")}
    traced = {attention: block_saves(SEVEN, batch, seq, attention) for attention in real}
    softmax = sum(
        n
        for name, n in accounting.block_activations(SEVEN, batch, seq, attention="eager").items()
        if "softmax" in name
    )
    same = (
        "as the real block traced at this size does"
        if traced == real
        else f"but the real block saves {traced}"
    )
    return Finding(
        "does not hold",
        f"The document's own products are {gb(qkv)}, {gb(scores)} and {gb(ffn)} (not 0.8), {gb(layers * (qkv + scores + ffn))} over "
        f"32 layers. A Llama-2-7B block saves {gb(real['fused'])} with fused attention, which keeps no scores at all, and "
        f"{gb(real['eager'])} with eager attention, whose softmax is kept twice, in float32 and in bf16 ({gb(softmax)}), {same}. "
        f"Over 32 layers that is {gb(layers * real['fused'])}, close to the claim by accident, or {gb(layers * real['eager'])}.",
        {
            "queries, keys and values by the document's product": qkv,
            "scores by its product": scores,
            "feed-forward by its product": ffn,
            "block with fused attention, closed form": real["fused"],
            "block with fused attention, traced": traced["fused"],
            "block with eager attention, closed form": real["eager"],
            "block with eager attention, traced": traced["eager"],
            "of which softmax": softmax,
        },
    )


@answers("C38")
def long_sequence() -> Finding:
    heads, seq = SEVEN.heads, 8192
    one_copy = {batch: batch * heads * seq**2 * 2 for batch in (1, 2, 8)}
    eager = accounting.attention_activations(SEVEN, 8, seq, attention="eager", precision="bf16")
    softmax = sum(n for name, n in eager.items() if "softmax" in name)
    lse = accounting.attention_activations(SEVEN, 8, seq, precision="bf16")["attention: log-sum-exp"]
    return Finding(
        "does not hold",
        f"At the document's batch of 8, one bf16 copy of the scores is {gb(one_copy[8])} a layer; 8 GiB is batch 2. Four times the "
        f"sequence of its 2 GB example is 16 times the scores, not 4. Eager attention really keeps {gb(softmax)}, fused attention "
        f"{lse:,} bytes: one number a row.",
        {f"one bf16 copy of the scores, batch {batch}": n for batch, n in one_copy.items()}
        | {
            "saved by eager attention, batch 8: softmax": softmax,
            "saved by fused attention, batch 8: log-sum-exp": lse,
        },
    )


@answers("C52")
def attention_over_mlp() -> Finding:
    batch, seq, width = 8, 4096, 4096
    head, ffn = seq * seq * batch * 2, batch * seq * 4 * width * 2
    scores = SEVEN.heads * head
    halves = {attention: _halves(batch, seq, attention) for attention in ("fused", "eager")}
    traced = {attention: block_saves(SEVEN, batch, seq, attention) for attention in halves}
    ratio = {attention: a / m for attention, (a, m) in halves.items()}
    same = all(traced[name] == sum(halves[name]) for name in halves)
    return Finding(
        "holds only if",
        f"attention is eager and one copy of the scores is all that is counted: {head // 2**20} MiB a head, {scores / GiB:.0f} GiB, "
        f"{scores / ffn:.0f} to 1 against {ffn / GiB:.0f} GiB. A Llama-2-7B block saves {ratio['eager']:.1f} times as much in its "
        f"attention half as in its MLP half with eager attention, but {ratio['fused']:.2f} times with fused attention: there the "
        "MLP is the larger half.",
        {"one head": head, "all heads": scores, "feed-forward by the document's product": ffn}
        | {f"{name}: attention half / MLP half": f"{a:,} / {m:,}" for name, (a, m) in halves.items()}
        | {"equal to the real block traced at this size": "yes" if same else "no"},
    )
