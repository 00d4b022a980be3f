"""Answers to the exercises of lesson 10 that nobody had in mind when its checks were written."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from gradmem_lib import Recipe

RIGHT, WRONG = {}, {}
WAYS = ("ddp", "zero1", "zero2", "fsdp")


def _bits(parameters, ranks, way):
    """One bit for each part: is it cut?"""
    cut = {"ddp": 0b000, "zero1": 0b100, "zero2": 0b110, "fsdp": 0b111}[way]
    return [
        each * parameters // (ranks if cut >> i & 1 else 1) for i, each in enumerate((2, 2, 12))
    ]


def _held(weights=2, gradients=2, states=12, gather=0):
    def bytes_per_rank(parameters, ranks, way):
        stage = WAYS.index(way)
        whole = [weights, gradients, states]
        found = [n * parameters / (ranks if stage >= 3 - i else 1) for i, n in enumerate(whole)]
        found[0] += gather * parameters
        return tuple(found)

    return bytes_per_rank


RIGHT["10.1"] = {"bits": _bits}
WRONG["10.1"] = {
    "in bits": (_held(16, 16, 96), "look like bits"),
    "SGD": (_held(2, 2, 4), "only its two moments"),
    "8-bit moments": (_held(2, 2, 6), "12 bytes a parameter"),
    "a gathered copy too": (_held(gather=2), "2 bytes a parameter"),
    "GiB": (lambda p, n, w: tuple(x / 2**30 for x in _held()(p, n, w)), "look like GiB|not kB"),
}


def _stacked(model):
    """All gradients of one dtype as one tensor, by views of a flat buffer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
    )
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    at = 0
    for p in trained:
        p.grad = flat[at : at + p.numel()].view_as(p).clone()
        at += p.numel()


def _averaged(form):
    def average_gradients(model):
        n = dist.get_world_size()
        for p in model.parameters():
            if not p.requires_grad:
                continue
            if form == "those that have one":
                has = torch.tensor(float(p.grad is not None))
                dist.all_reduce(has)
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= has.clamp(min=1)
                continue
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if form == "divided twice":
                p.grad /= n
            if form == "max":
                dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)
                continue
            dist.all_reduce(p.grad)
            if form == "rank 0 divides" and dist.get_rank():
                continue
            if form == "new tensor":
                p.grad / n
                continue
            p.grad /= n

    return average_gradients


RIGHT["10.2"] = {"one buffer": _stacked}
WRONG["10.2"] = {
    "of those that have one": (_averaged("those that have one"), "counts as zeros"),
    "divided twice": (_averaged("divided twice"), "divided twice"),
    "rank 0 divides": (_averaged("rank 0 divides"), "last rank"),
    "a new tensor": (_averaged("new tensor"), "the sum over the ranks"),
}


def _scale(form):
    def loss_scale(micro_batches):
        own = sum(int((y != -100).sum()) for y in micro_batches)
        n = dist.get_world_size()
        count = torch.tensor(own)
        dist.all_reduce(count)
        if form == "shifted":
            count = torch.tensor(sum(int((y[..., 1:] != -100).sum()) for y in micro_batches))
            dist.all_reduce(count)
        return {
            "right": n / count,
            "mean count": count / n,
            "own share": own / count,
            "squared": n * n / count,
            "shifted": n / count,
            "not ranks": 1 / count,
        }[form]

    return loss_scale


RIGHT["10.5"] = {"a tensor": _scale("right")}
WRONG["10.5"] = {
    "the inverse": (_scale("mean count"), "number to divide by"),
    "shifted": (_scale("shifted"), "not shifted"),
    "without ranks": (_scale("not ranks"), "multiply by it"),
}


def _seconds(
    ddp=2, zero2=lambda k: 2 * k, fsdp=lambda k: 3 * k, share=lambda n: (n - 1) / n, unit=1
):
    def communication_seconds(way, nbytes, ranks, micro_batches, bandwidth):
        passes = {"ddp": ddp, "zero2": zero2(micro_batches), "fsdp": fsdp(micro_batches)}[way]
        return unit * passes * nbytes * share(ranks) / bandwidth

    return communication_seconds


RIGHT["10.6"] = {"a function of ways": _seconds()}
WRONG["10.6"] = {
    "milliseconds": (_seconds(unit=1000), "1000 times"),
    "zero2 gathers once an update": (_seconds(zero2=lambda k: 1 + k), "one of zero2's two passes"),
    "fsdp gathers forward alone": (_seconds(fsdp=lambda k: 2 * k), "again in backward"),
    "fsdp reduces once": (_seconds(fsdp=lambda k: 2 * k + 1), "three passes"),
    "one of n": (_seconds(share=lambda n: 1 / n), "twice the `ranks`"),
    "ddp reduces half": (_seconds(ddp=1), "two passes"),
}


def _wrapped(model, mesh):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    kind = type(model.model.layers[0])
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: isinstance(m, kind)
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


RIGHT["10.4"] = {"wrappers": _wrapped}
WRONG["10.4"] = {
    "every second layer": (
        lambda model, mesh: (
            model.gradient_checkpointing_enable({"use_reentrant": False}),
            [fully_shard(layer, mesh=mesh) for layer in model.model.layers[::2]],
            fully_shard(model, mesh=mesh),
        )[2],
        "each layer is a unit",
    ),
}


def _by_average(micro_batches):
    count = torch.tensor(float(sum((labels != -100).sum() for labels in micro_batches)))
    dist.all_reduce(count, op=dist.ReduceOp.AVG)
    return 1 / count.item()


RIGHT["10.5"] |= {"an average": _by_average}
WRONG["10.1"] |= {
    "all but ddp": (
        lambda p, n, way: tuple(k * p / (1 if way == "ddp" else n) for k in (2, 2, 12)),
        "as only fsdp does",
    ),
}


def _divided_by(number):
    def average_gradients(model):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= number()

    return average_gradients


def _reduced(model):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.reduce(p.grad, 0)
            p.grad /= dist.get_world_size()


WRONG["10.2"] |= {
    "by one less": (_divided_by(lambda: max(dist.get_world_size() - 1, 1)), "1.5 times the mean"),
    "by the rank": (_divided_by(lambda: dist.get_rank() + 1), "different numbers"),
    "reduce": (_reduced, "only rank 0 has the mean"),
}


def _label_scale(count, factor=lambda own, total: dist.get_world_size() / total):
    def loss_scale(micro_batches):
        own = count(micro_batches)
        total = torch.tensor(float(own))
        dist.all_reduce(total)
        return factor(own, total.item())

    return loss_scale


def _labels(micro_batches):
    return int(sum((labels != -100).sum() for labels in micro_batches))


WRONG["10.5"] |= {
    "the first alone": (_label_scale(lambda mine: _labels(mine[:1])), "only one micro-batch"),
    "positive labels": (
        _label_scale(lambda mine: int(sum((labels > 0).sum() for labels in mine))),
        "labels of 0",
    ),
    "ranks squared": (
        _label_scale(_labels, lambda own, total: dist.get_world_size() ** 2 / total),
        "in it twice",
    ),
    "by its own share": (
        _label_scale(_labels, lambda own, total: own * dist.get_world_size() / total),
        "own labels too",
    ),
}


def _gather(shard):
    whole = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard.detach().contiguous())
    return whole


def _own_mean(whole):
    parts = list(whole.chunk(dist.get_world_size()))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own / dist.get_world_size()


def _sharded_linear(*, forward=None, of_weight=_own_mean, keep=None, rows=torch.clone):
    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard):
            ctx.save_for_backward(x, shard)
            whole = _gather(shard)
            if keep == "ctx":
                ctx.whole = whole
            return forward(x, shard) if forward else x @ whole.T

        @staticmethod
        def backward(ctx, d_out):
            x, shard = ctx.saved_tensors
            d_weight = torch.einsum("...o,...i->oi", d_out, x)
            return d_out @ _gather(shard), of_weight(d_weight)

    class ShardedLinear(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            own = linear.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
            self.shard = torch.nn.Parameter(rows(own))
            self.kept = [linear] if keep == "a list" else []

        def forward(self, x):
            return Gathered.apply(x, self.shard)

    return ShardedLinear


def _by_broadcast(x, shard):
    """Each rank's rows one after the other: the whole weight is never there in forward."""
    parts = []
    for rank in range(dist.get_world_size()):
        rows = shard.detach().clone()
        dist.broadcast(rows, rank)
        parts.append(x @ rows.T)
    return torch.cat(parts, -1)


def _first_rows(whole):
    dist.all_reduce(whole)
    return whole.chunk(dist.get_world_size())[0].clone() / dist.get_world_size()


RIGHT["10.3"] = {"by broadcasts": _sharded_linear(forward=_by_broadcast)}
WRONG["10.3"] = {
    "kept in ctx": (_sharded_linear(keep="ctx"), "whole weights stay after they are used"),
    "kept in a list": (_sharded_linear(keep="a list"), "whole weights stay after they are used"),
    "a view": (_sharded_linear(rows=lambda own: own), "is a view of the whole weight"),
    "of two ranks": (
        _sharded_linear(of_weight=lambda w: _own_mean(w) * dist.get_world_size() / 2),
        "1.5 times what it should be",
    ),
    "the first rows": (_sharded_linear(of_weight=_first_rows), "the shard's gradient is wrong"),
}


def _wrap_but(*, before=lambda model: model, checkpointed=lambda layer, i: layer, after=None):
    def wrap(model, mesh):
        model = before(model)
        for i, layer in enumerate(model.model.layers):
            part = checkpointed(layer, i)
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if after:
            after(model)
        return model

    return wrap


def _eager(model):
    model.config._attn_implementation = "eager"
    return model


RIGHT["10.4"] |= {"eager attention": _wrap_but(before=_eager)}
WRONG["10.4"] |= {
    "a copy": (_wrap_but(before=copy.deepcopy), "a copy is sharded"),
    "checkpoints on MLPs": (
        _wrap_but(checkpointed=lambda layer, i: layer.mlp),
        "run only once",
    ),
    "whole after backward": (
        _wrap_but(after=lambda model: model.set_reshard_after_backward(False)),
        "after backward, weights are still whole",
    ),
}
_TWO_CARDS = {
    "precision": "bf16",
    "sharding": "fsdp",
    "lora_rank": 16,
    "quantized_base": True,
    "checkpointing": "per-layer",
}
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RIGHT["10.7"] = {
    "all linear layers by name": lambda: Recipe(**_TWO_CARDS, lora_targets=_ALL),
    "segments of two": lambda: Recipe(**_TWO_CARDS | {"checkpointing": 2}),
}
WRONG["10.7"] = {
    "one layer in twenty": (
        lambda: Recipe(**_TWO_CARDS | {"checkpointing": None, "every_n_layers": 20}),
        "most layers have no checkpoint",
    ),
    "root segments": (
        lambda: Recipe(**_TWO_CARDS | {"checkpointing": "sqrt"}),
        "all layers of a segment",
    ),
}
