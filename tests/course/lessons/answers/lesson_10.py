"""Answers to the exercises of lesson 10 as people write them; see lesson_00.py."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from gradmem_lib.techniques.sharding import shard
from gradmem_lib.training.recipe import Recipe

RIGHT, WRONG = {}, {}


def _table(parameters, ranks, way):
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}[way]
    return (
        2 * parameters // (ranks if stage == 3 else 1),
        2 * parameters // (ranks if stage >= 2 else 1),
        12 * parameters // (ranks if stage >= 1 else 1),
    )


def _loop(parameters, ranks, way):
    held = [2 * parameters, 2 * parameters, 4 * parameters + 8 * parameters]
    for i in reversed(range(3)):
        if way == "ddp":
            break
        held[i] /= ranks
        if way == f"zero{3 - i}":
            break
    return held


RIGHT["10.1"] = {
    "table": _table,
    "loop": _loop,
    "tensor": lambda P, N, way: (
        torch.tensor([2.0, 2, 12], dtype=torch.float64)
        * P
        / torch.tensor(
            {"ddp": [1, 1, 1], "zero1": [1, 1, N], "zero2": [1, N, N], "fsdp": [N, N, N]}[way]
        )
    ),
}


def _parts(weights=2, gradients=2, states=12, *, order=("zero1", "zero2", "fsdp"), shape=tuple):
    def answer(parameters, ranks, way):
        stage = 1 + order.index(way) if way in order else 0
        found = [
            weights * parameters / (ranks if stage >= 3 else 1),
            gradients * parameters / (ranks if stage >= 2 else 1),
            states * parameters / (ranks if stage >= 1 else 1),
        ]
        return shape(found)

    return answer


WRONG["10.1"] = {
    "no copy": (_parts(states=8), "copy"),
    "float32": (_parts(4, 4, 8), "bf16"),
    "float32 gradients": (_parts(gradients=4), "gradients"),
    "float32 but for the states": (_parts(4, 4, 12), "weights and gradients are in float32"),
    "ddp as fsdp": (
        lambda P, N, way: _table(P, N, "fsdp" if way == "ddp" else way),
        "ddp cuts nothing",
    ),
    "copy among the weights": (_parts(weights=6, states=8), "copy"),
    "numbers": (_parts(1, 1, 3), "bytes"),
    "the sum": (_parts(shape=sum), "three"),
    "zero2 has one stage more": (_parts(order=("zero2", "zero1", "fsdp")), "zero1|zero2"),
    "nothing cut": (lambda P, N, way: (2 * P, 2 * P, 12 * P), "ranks|cut"),
    "all cut": (lambda P, N, way: (2 * P / N, 2 * P / N, 12 * P / N), "everything is cut"),
    "fsdp keeps the weights": (lambda P, N, way: (2 * P, *_table(P, N, way)[1:]), "weights"),
    "cut twice": (
        lambda P, N, way: tuple(n / (N if way == "fsdp" else 1) for n in _table(P, N, way)),
        "for|got",
    ),
    "moments in bf16": (_parts(states=4), "float32|bf16|copy"),
    "GB": (lambda P, N, way: tuple(n / 1e9 for n in _table(P, N, way)), "return bytes"),
}


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def _bucket(model, *, scale=None, back=True):
    trained = _trained(model)
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
    bucket = torch.cat(parts)
    dist.all_reduce(bucket)
    bucket /= scale or dist.get_world_size()
    if back:
        for p, part in zip(trained, bucket.split([p.numel() for p in trained]), strict=True):
            p.grad = part.view_as(p).clone()


def _async(model):
    works = []
    for _, p in model.named_parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = p.new_zeros(p.shape)
            p.grad /= dist.get_world_size()
            works.append(dist.all_reduce(p.grad, async_op=True))
    for work in works:
        work.wait()


def _average_op(model):
    for p in _trained(model):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def _gathered(model):
    for p in _trained(model):
        own = torch.zeros_like(p) if p.grad is None else p.grad
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        p.grad = torch.stack(everyone).mean(0)


def _reduced(model):
    for p in _trained(model):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.reduce(p.grad, dst=0)
        p.grad.div_(dist.get_world_size())
        dist.broadcast(p.grad, src=0)


def _objects(model):
    own = [None if p.grad is None else p.grad.tolist() for p in _trained(model)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for i, p in enumerate(_trained(model)):
        total = sum(
            torch.tensor(each[i], dtype=torch.float64) for each in everyone if each[i] is not None
        )
        p.grad = (total / len(everyone)).to(p.dtype)


RIGHT["10.2"] = {
    "in one bucket": _bucket,
    "all at once, divided before": _async,
    "by AVG": _average_op,
    "gathered": _gathered,
    "to one and back": _reduced,
    "as objects": _objects,
}


def _all(model, do, of=_trained):
    for p in of(model):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        do(p)


def _each(do, of=_trained):
    return lambda model: _all(model, do, of)


def _sum(p):
    dist.all_reduce(p.grad)


def _product(p):
    dist.all_reduce(p.grad, op=dist.ReduceOp.PRODUCT)


def _mean(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def _where_there_is_one(model):
    for p in model.parameters():
        if p.grad is not None:
            _mean(p)


def _on_rank_0(p):
    own = p.grad.clone()
    dist.reduce(p.grad, dst=0)
    p.grad = p.grad / dist.get_world_size() if dist.get_rank() == 0 else own


def _step(p):
    _mean(p)
    p.data -= 0.1 * p.grad


def _only_one_rank(model):
    if dist.get_rank() == 0:
        _all(model, _mean)


def _zeros_on_the_way(model):
    for p in _trained(model):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


WRONG["10.2"] = {
    "sum": (_each(_sum), "sum"),
    "by 2": (lambda model: _bucket(model, scale=2), "2"),
    "bucket not written back": (
        lambda model: _bucket(model, back=False),
        "write|have not changed|copy",
    ),
    "where there is one": (_where_there_is_one, "zeros"),
    "zeros on the way": (_zeros_on_the_way, "does not keep the mean"),
    "frozen too": (_each(_mean, of=lambda model: model.parameters()), "[Ff]rozen"),
    "rank 0 alone": (_each(_on_rank_0), "rank 0"),
    "nothing sent": (_each(lambda p: p.grad.div_(dist.get_world_size())), "added up|all_reduce"),
    "twice": (_each(lambda p: (_mean(p), p.grad.div_(dist.get_world_size()))), "twice"),
    "weights too": (_each(lambda p: (_mean(p), dist.all_reduce(p.data))), "weights"),
    "a step": (_each(_step), "weights"),
    "one rank": (_only_one_rank, "same calls"),
    "largest": (_each(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)), "combined by MAX"),
    "smallest": (
        _each(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.MIN)),
        "combined by MIN",
    ),
    "product, divided": (
        _each(lambda p: (_product(p), p.grad.div_(dist.get_world_size()))),
        "combined by PRODUCT",
    ),
    "None": (lambda model: [_mean(p) for p in model.parameters()], "None"),
    "copied, and left": (
        _each(lambda p: p.grad.clone()),
        "not yet: the gradients have not changed: all_reduce",
    ),
}


def _whole(own):
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def _mine(whole, *, mean=True):
    own = whole.new_empty(len(whole) // dist.get_world_size(), whole.shape[1])
    dist.reduce_scatter_tensor(own, whole.contiguous())
    return own / dist.get_world_size() if mean else own


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, own):
        ctx.save_for_backward(x, own)
        return F.linear(x, _whole(own))

    @staticmethod
    def backward(ctx, d_out):
        x, own = ctx.saved_tensors
        d_whole = torch.einsum("...o,...i->oi", d_out, x)
        return d_out.matmul(_whole(own)), _mine(d_whole)


class _Cut(nn.Module):
    def __init__(self, linear):
        super().__init__()
        size = linear.out_features // dist.get_world_size()
        rank = dist.get_rank()
        self.own = nn.Parameter(linear.weight[rank * size : (rank + 1) * size].detach().clone())

    def forward(self, x):
        return _Product.apply(x, self.own)


def _cut(forward=None, **members):
    return type("ShardedLinear", (_Cut,), members | ({"forward": forward} if forward else {}))


class _Gather(torch.autograd.Function):
    """The weight alone goes through a function of its own, and a checkpoint gathers it again."""

    @staticmethod
    def forward(ctx, own):
        return _whole(own)

    @staticmethod
    def backward(ctx, d_whole):
        return _mine(d_whole)


def _by_checkpoint(self, x):
    return checkpoint(
        lambda x, own: F.linear(x, _Gather.apply(own)), x, self.own, use_reentrant=False
    )


class _Hooked(nn.Module):
    """The shard is a plain parameter, its gradient comes from a hook on the whole weight, which a
    checkpoint makes again.
    """

    def __init__(self, linear):
        super().__init__()
        own = linear.weight.detach().view(dist.get_world_size(), -1, linear.in_features)[
            dist.get_rank()
        ]
        self.weight = nn.Parameter(own.clone())

    def forward(self, x):
        return _by_checkpoint(self, x)

    @property
    def own(self):
        return self.weight


RIGHT["10.3"] = {
    "einsum": _Cut,
    "a checkpoint gathers again": _cut(_by_checkpoint),
    "named weight": _Hooked,
}


def _in_sight(self, x):
    return F.linear(x, _Gather.apply(self.own))


def _but(**wrong):
    """A function with another ``forward`` or ``backward``."""
    function = type(torch.autograd.Function)(
        "Product", (_Product,), {k: staticmethod(f) for k, f in wrong.items()}
    )
    return _cut(lambda self, x: function.apply(x, self.own))


def _backward(of):
    def backward(ctx, d_out):
        x, own = ctx.saved_tensors
        return of(x, own, d_out, d_out.flatten(0, -2).T @ x.flatten(0, -2))

    return backward


def _keeps_all(self, linear):
    nn.Module.__init__(self)
    self.own = nn.Parameter(_rows(linear.weight.detach()))
    self.register_buffer("whole", linear.weight.detach().clone())


def _rows(weight):
    return weight.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _columns(self, linear):
    nn.Module.__init__(self)
    self.own = nn.Parameter(
        linear.weight.detach().T.chunk(dist.get_world_size())[dist.get_rank()].clone()
    )


def _reversed(self, linear):
    nn.Module.__init__(self)
    ranks = dist.get_world_size()
    self.own = nn.Parameter(
        linear.weight.detach().chunk(ranks)[ranks - 1 - dist.get_rank()].clone()
    )


class _Once(_Product):
    @staticmethod
    def forward(ctx, x, own, kept):
        kept.append(_whole(own)) if not kept else None
        ctx.save_for_backward(x, own)
        ctx.kept = kept
        return F.linear(x, kept[0])

    @staticmethod
    def backward(ctx, d_out):
        x = ctx.saved_tensors[0]
        return d_out @ ctx.kept[0], _mine(torch.einsum("...o,...i->oi", d_out, x)), None


class _Stale(_Cut):
    def __init__(self, linear):
        super().__init__(linear)
        self.kept = []

    def forward(self, x):
        return _Once.apply(x, self.own, self.kept)


WRONG["10.3"] = {
    "kept for backward": (_cut(_in_sight), "kept|again|bytes"),
    "not reduced": (
        _but(backward=_backward(lambda x, own, d, dw: (d @ _whole(own), _rows(dw)))),
        "other ranks|reduce_scatter",
    ),
    "sum": (
        _but(backward=_backward(lambda x, own, d, dw: (d @ _whole(own), _mine(dw, mean=False)))),
        "sum",
    ),
    "the whole gradient": (
        _but(backward=_backward(lambda x, own, d, dw: (d @ _whole(own), dw))),
        "another shape than the shard",
    ),
    "no gradient for x": (
        _but(backward=_backward(lambda x, own, d, dw: (None, _mine(dw)))),
        "x.grad",
    ),
    "no gradient for the shard": (
        _but(backward=_backward(lambda x, own, d, dw: (d @ _whole(own), None))),
        "shard",
    ),
    "swapped": (
        _but(backward=_backward(lambda x, own, d, dw: (_mine(dw), d @ _whole(own)))),
        "shape|order|gradient",
    ),
    "autograd": (_cut(lambda self, x: F.linear(x, _whole(self.own))), "autograd|gather"),
    "the whole as well": (_cut(__init__=_keeps_all), "more than"),
    "columns": (_cut(__init__=_columns), "rows|shape|transpose"),
    "another order": (_cut(__init__=_reversed), "order"),
    "stale": (_Stale, "anew|update|kept"),
    "only its own rows": (_cut(lambda self, x: F.linear(x, self.own)), "output|shape"),
    "flat x alone": (
        _but(
            backward=lambda ctx, d: (
                d @ _whole(ctx.saved_tensors[1]),
                _mine(d.T @ ctx.saved_tensors[0]),
            )
        ),
        "dimensions|shape",
    ),
}


def _wrapped(
    model, mesh, *, checkpoints=True, layers=True, root=True, late=False, reentrant=False, **options
):
    if checkpoints and not late:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if layers:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, **options)
    if root:
        fully_shard(model, mesh=mesh, **options)
    if late:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model


def _but_wrapped(**options):
    return lambda model, mesh: _wrapped(model, mesh, **options)


def _ends_too(model, mesh):
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(model.lm_head, mesh=mesh)
    return _wrapped(model, mesh)


def _by_hand(model, mesh):
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )
    return _wrapped(model, mesh, checkpoints=False)


def _by_library(model, mesh):
    model.gradient_checkpointing_enable()
    return shard(model, "fsdp", mesh=mesh)


RIGHT["10.4"] = {
    "the other kind of checkpoint": _but_wrapped(reentrant=True),
    "checkpoints afterwards": _but_wrapped(late=True),
    "embedding and head too": _ends_too,
    "by hand": _by_hand,
    "the library's": _by_library,
}


def _root_first(model, mesh):
    fully_shard(model, mesh=mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return model


def _every_linear(model, mesh):
    model.activation_checkpointing_enable()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _all_in_one(model, mesh):
    model.activation_checkpointing_enable()
    fully_shard(list(model.model.layers), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _evaluated(model, mesh):
    return _wrapped(model, mesh).eval()


def _inner(model, mesh):
    _wrapped(model, mesh, root=False)
    return fully_shard(model.model, mesh=mesh)


WRONG["10.4"] = {
    "the inner model": (_inner, "the model that it was given"),
    "no checkpoints": (_but_wrapped(checkpoints=False), "switch on checkpointing"),
    "root alone": (_but_wrapped(layers=False), "one unit|layer"),
    "layers alone": (_but_wrapped(root=False), "whole on every rank"),
    "gathered until backward": (
        _but_wrapped(reshard_after_forward=False),
        "reshard_after_forward|stays? whole",
    ),
    "bf16": (_but_wrapped(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "bf16"),
    "root first": (_root_first, "layers come first"),
    "every linear layer": (_every_linear, "small|one unit"),
    "all layers in one": (_all_in_one, "bytes|one unit"),
    "returns nothing": (
        lambda model, mesh: (_wrapped(model, mesh), None)[1],
        "is a `return` missing",
    ),
    "checkpoints alone": (
        lambda model, mesh: (model.gradient_checkpointing_enable(), model)[1],
        "nothing is sharded|whole",
    ),
    "ddp": (lambda model, mesh: shard(model, "ddp", mesh=mesh), "whole|sharded"),
    "head frozen": (
        lambda model, mesh: (model.lm_head.requires_grad_(False), _wrapped(model, mesh))[1],
        "gradients|requires_grad",
    ),
    "in eval": (_evaluated, "bytes|checkpoint|train"),
    "no mesh is one": (lambda model, mesh: fully_shard(model, mesh=2), "ndim"),
    "forgot the model's": (
        lambda model, mesh: [fully_shard(layer, mesh=mesh) for layer in model.model.layers],
        "return|whole|list",
    ),
}


def _labels(micro_batches):
    return sum((labels != -100).sum() for labels in micro_batches)


def _sent(count, op=dist.ReduceOp.SUM):
    total = torch.as_tensor(count).clone()
    dist.all_reduce(total, op=op)
    return total


def _by_objects(micro_batches):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(labels.ne(-100).sum().item() for labels in micro_batches))
    return len(counts) / sum(counts)


def _gathered_counts(micro_batches):
    own = _labels(micro_batches)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, own)
    return len(counts) / torch.stack(counts).sum()


RIGHT["10.5"] = {
    "objects": _by_objects,
    "gathered": _gathered_counts,
    "one over the mean": lambda micro_batches: (
        1 / _sent(_labels(micro_batches).double(), dist.ReduceOp.AVG)
    ),
    "bincount": lambda m: (
        dist.get_world_size() / _sent(torch.cat([x.flatten() for x in m]).ne(-100).count_nonzero())
    ),
}


def _on_rank_zero(micro_batches):
    return (
        dist.get_world_size() / _labels(micro_batches)
        if dist.get_rank()
        else _everyone(micro_batches)
    )


def _everyone(micro_batches):
    return dist.get_world_size() / _sent(_labels(micro_batches)).item()


def _each_micro_batch(micro_batches):
    return dist.get_world_size() / sum(_sent((labels != -100).sum()) for labels in micro_batches)


WRONG["10.5"] = {
    "own": (lambda m: 1 / max(int(_labels(m)), 1), "own|mean of means"),
    "own times ranks": (lambda m: dist.get_world_size() / max(int(_labels(m)), 1), "own"),
    "not averaged": (lambda m: 1 / _sent(_labels(m)), "averaged|multiply"),
    "divided": (lambda m: 1 / (_sent(_labels(m)) * dist.get_world_size()), "multiply"),
    "the divisor": (lambda m: _sent(_labels(m)) / dist.get_world_size(), "factor"),
    "all labels": (lambda m: dist.get_world_size() / _sent(sum(x.numel() for x in m)), "-100"),
    "rows": (lambda m: dist.get_world_size() / _sent(sum(len(x) for x in m)), "rows"),
    "the largest": (
        lambda m: dist.get_world_size() / _sent(_labels(m), dist.ReduceOp.MAX),
        "of the rank that has most of them",
    ),
    "one micro-batch": (
        lambda m: dist.get_world_size() / _sent((m[0] != -100).sum()),
        "micro-batch",
    ),
    "by micro-batches too": (lambda m: _everyone(m) / len(m), "micro-batch"),
    "each micro-batch by itself": (_each_micro_batch, "same calls|as often"),
    "two ranks": (lambda m: 2 / _sent(_labels(m)), "2|ranks|for"),
    "a list": (lambda m: [_everyone(m)] * len(m), "one number|number is"),
    "rank 0 alone": (_on_rank_zero, "same calls"),
    "own, as a tensor": (
        lambda m: dist.get_world_size() / torch.tensor(float(_labels(m))),
        "divides by 0",
    ),
    "own without a guard": (lambda m: 1 / int(_labels(m)), "no label|0"),
    "a share": (lambda m: _labels(m) / _sent(_labels(m)), "share"),
    "one over micro-batches": (lambda m: 1 / len(m), "micro-batches are counted"),
    "nan": (lambda m: float("nan"), "not yet: the result is not a number"),
    "ranks over micro-batches": (
        lambda m: dist.get_world_size() / len(m),
        "micro-batches are counted",
    ),
}


def _passes(way, k):
    return {"ddp": 2, "zero2": 2 * k, "fsdp": 3 * k}[way]


def _ring(way, nbytes, ranks, micro_batches, bandwidth):
    step = nbytes / ranks / bandwidth
    gather = reduce = (ranks - 1) * step
    if way == "ddp":
        return gather + reduce
    return micro_batches * (gather + reduce + (gather if way == "fsdp" else 0))


RIGHT["10.6"] = {
    "ring": _ring,
    "dictionary": lambda way, n, N, k, b: _passes(way, k) * n * (1 - 1 / N) / b,
    "tensor": lambda way, n, N, k, b: (
        torch.tensor(float(n), dtype=torch.float64) * _passes(way, k) * (N - 1) / (N * b)
    ),
}
WRONG["10.6"] = {
    "ddp each time": (
        lambda way, n, N, k, b: (2 if way != "fsdp" else 3) * k * n * (N - 1) / N / b,
        "no_sync|micro-batch",
    ),
    "once": (
        lambda way, n, N, k, b: _passes(way, 1) * n * (N - 1) / N / b,
        "once an update|micro-batch",
    ),
    "fsdp alone once": (
        lambda way, n, N, k, b: _passes(way, 1 if way == "fsdp" else k) * n * (N - 1) / N / b,
        "fsdp sends once an update",
    ),
    "no share": (lambda way, n, N, k, b: _passes(way, k) * n / b, "share"),
    "everyone to everyone": (lambda way, n, N, k, b: _passes(way, k) * n * (N - 1) / b, "ring"),
    "gathered once": (
        lambda way, n, N, k, b: (2 if way == "ddp" else 2 * k) * n * (N - 1) / N / b,
        "twice|again",
    ),
    "one pass": (
        lambda way, n, N, k, b: (_passes(way, k) - (way == "ddp")) * n * (N - 1) / N / b,
        "two passes",
    ),
    "bits": (lambda way, n, N, k, b: 8 * _ring(way, n, N, k, b), "bits"),
    "bytes": (lambda way, n, N, k, b: _ring(way, n, N, k, b) * b, "bytes"),
    "both ways at once": (lambda way, n, N, k, b: _ring(way, n, N, k, b) / 2, "half"),
    "zero2 as fsdp": (
        lambda way, n, N, k, b: _ring("fsdp" if way == "zero2" else way, n, N, k, b),
        "zero2|stay",
    ),
    "zero2 reduced once": (
        lambda way, n, N, k, b: (
            (k + 1 if way == "zero2" else _passes(way, k)) * n * (N - 1) / N / b
        ),
        "one of zero2's two passes",
    ),
    "reduced once": (
        lambda way, n, N, k, b: (
            {"ddp": 2, "zero2": k + 1, "fsdp": 2 * k + 1}[way] * n * (N - 1) / N / b
        ),
        "every micro-batch|reduce",
    ),
    "a GB/s": (lambda way, n, N, k, b: _ring(way, n, N, k, b) / 1e9, "small"),
    "ways forgotten": (lambda way, n, N, k, b: 2 * n * (N - 1) / N / b, "zero2|fsdp|way|micro"),
}


_TWO = dict(
    precision="bf16", sharding="fsdp", lora_rank=16, quantized_base=True, checkpointing="per-layer"
)


def _recipe(**changed):
    return lambda: Recipe(**_TWO | changed)


RIGHT["10.7"] = {
    "the usual": _recipe(),
    "SGD": _recipe(optimizer="sgd"),
    "accumulated": _recipe(accumulation=1, optimizer="adamw"),
}
WRONG["10.7"] = {
    "one card": (_recipe(sharding=None), "one card"),
    "ddp": (_recipe(sharding="ddp"), "copy"),
    "zero1": (_recipe(sharding="zero1"), "copy"),
    "zero2": (_recipe(sharding="zero2"), "zero2"),
    "16 bits": (_recipe(quantized_base=False), "4 bits"),
    "every weight": (_recipe(lora_rank=None, quantized_base=False), "every weight"),
    "not checkpointed": (_recipe(checkpointing=None), "activations"),
    "float32": (_recipe(precision="float32"), "float32"),
    "rank 64": (_recipe(lora_rank=64), "rank 16"),
    "attention alone": (_recipe(lora_targets=("q_proj", "v_proj")), "every linear"),
    "two recipes": (lambda: (_recipe()(), _recipe()()), "one Recipe"),
    "a dictionary": (lambda: _TWO, "one Recipe"),
}


def _parts_of_a_rank(parameters, ranks, way, *, of_all=1, less=0):
    parts = [2 * parameters, 2 * parameters, 12 * parameters]
    first_cut = 3 - ["ddp", "zero1", "zero2", "fsdp"].index(way)
    cut = [part / max(1, ranks - less) if i >= first_cut else part for i, part in enumerate(parts)]
    return [of_all * part for part in cut]


def _each_update(way, nbytes, ranks, micro_batches, bandwidth):
    passes = {"ddp": 2, "zero2": 2 * micro_batches, "fsdp": 3 * micro_batches}[way]
    return passes * nbytes / bandwidth * (1 - 1 / ranks)


def _over_all(count):
    def loss_scale(micro_batches):
        number = torch.tensor(float(count(micro_batches)))
        dist.all_reduce(number)
        return dist.get_world_size() / number.item()

    return loss_scale


def _not_ignored(micro_batches):
    return sum(int((labels != -100).sum()) for labels in micro_batches)


def _in_one_tensor(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
    )
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    for p, part in zip(trained, whole.split([p.numel() for p in trained]), strict=True):
        p.grad = part.view_as(p)


RIGHT["10.1"] |= {"a list of parts": _parts_of_a_rank}
RIGHT["10.2"] |= {"in one tensor": _in_one_tensor}
RIGHT["10.5"] |= {"over all": _over_all(_not_ignored)}
RIGHT["10.6"] |= {"1 less a share": _each_update}
WRONG["10.1"] |= {
    "all ranks together": (
        lambda parameters, ranks, way: _parts_of_a_rank(parameters, ranks, way, of_all=ranks),
        "all ranks together",
    ),
    "one rank less": (partial(_parts_of_a_rank, less=1), "divided by ranks - 1"),
}
WRONG["10.5"] |= {
    "at least one label": (
        _over_all(lambda micro_batches: max(1, _not_ignored(micro_batches))),
        "a rank without a label counts as one label",
    ),
    "at least one label in each": (
        _over_all(lambda micro_batches: sum(max(1, _not_ignored([own])) for own in micro_batches)),
        "a micro-batch without a label counts as one label",
    ),
    "micro-batches over ranks": (_over_all(len), "micro-batches are counted"),
}
WRONG["10.6"] |= {
    "of one micro-batch": (
        lambda *given: _each_update(*given) / given[3],
        "divided by the micro-batches",
    ),
    "of each token of a share": (
        lambda way, nbytes, ranks, k, bandwidth: _each_update(way, nbytes, ranks, k, 1),
        "these are bytes",
    ),
}


def _median(p):
    gradients = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(gradients, p.grad)
    p.grad = torch.stack(gradients).median(0).values


WRONG["10.2"] |= {"median": (_each(_median), "combined by their median")}


def _each_label(count):
    """The right factor for what is counted of each micro-batch's labels."""
    return _over_all(lambda micro_batches: sum(int(count(labels)) for labels in micro_batches))


WRONG["10.5"] |= {
    "those that do not count": (_each_label(lambda x: (x == -100).sum()), "only labels of -100"),
    "not zero": (_each_label(torch.count_nonzero), "of -100 are counted, and those of 0"),
    "their sum": (_each_label(lambda x: x[x != -100].sum()), "token ids are added up"),
    "different ones": (_each_label(lambda x: len({*x[x >= 0].tolist()})), "each token counts once"),
    "places of a row": (_each_label(lambda x: x.shape[1]), "the longest row of each"),
    "without the last place": (_each_label(lambda x: (x[:, :-1] >= 0).sum()), "the last label of"),
    "one more": (
        _each_label(lambda x: (x >= 0).sum() + 1),
        "this factor is 2 ranks / 25, but all ranks together have 23 labels",
    ),
    "rows, not averaged": (lambda mine: 1 / _sent(sum(map(len, mine))).item(), "rows are counted"),
    "one rank less": (
        lambda mine: (dist.get_world_size() - 1) * _over_all(_not_ignored)(mine),
        "look at what is counted, and at the ranks",
    ),
    "its own number": (
        lambda mine: (dist.get_rank() + 1) * _over_all(_not_ignored)(mine),
        "the ranks return different factors",
    ),
}


def _labels_in_one_tensor(join):
    def scale(micro_batches):
        total = join(micro_batches).ne(-100).sum()
        dist.all_reduce(total)
        return dist.get_world_size() / total.item()

    return scale


ONE_TENSOR = "they do not fit into one tensor"
WRONG["10.5"] |= {
    "torch.cat": (_labels_in_one_tensor(torch.cat), ONE_TENSOR),
    "torch.stack": (_labels_in_one_tensor(torch.stack), ONE_TENSOR),
}


def _zeros_in_float32(model):
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros(p.shape)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def _gradients_joined(join):
    def average(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        whole = join(gradients)
        dist.all_reduce(whole)
        for p, mean in zip(trained, whole / dist.get_world_size(), strict=True):
            p.grad = mean

    return average


WRONG["10.2"] |= {
    "zeros in float32": (_zeros_in_float32, "a gradient has the dtype of its weight"),
    "torch.stack": (_gradients_joined(torch.stack), ONE_TENSOR),
    "torch.cat": (_gradients_joined(torch.cat), ONE_TENSOR),
}


def _gather_rows(shard):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts)


def _mean_of_rows(whole):
    parts = [part.contiguous() for part in whole.chunk(dist.get_world_size())]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own / dist.get_world_size()


def _cut_layer(
    *, forward=_gather_rows, backward=_gather_rows, own_x=lambda d_x: d_x, reduce=_mean_of_rows
):
    """``forward``, ``backward``: what is multiplied there in place of the shard."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard):
            ctx.save_for_backward(x, shard)
            return x @ whole_in_forward(shard).T

        @staticmethod
        def backward(ctx, d_out):
            x, shard = ctx.saved_tensors
            d_weight = d_out.flatten(0, -2).T @ x.flatten(0, -2)
            return own_x(d_out @ backward(shard)), reduce(d_weight)

    whole_in_forward = forward

    class Layer(nn.Module):
        def __init__(self, linear):
            super().__init__()
            rows = linear.weight.detach().chunk(dist.get_world_size())
            self.shard = nn.Parameter(rows[dist.get_rank()].clone())

        def forward(self, x):
            return Function.apply(x, self.shard)

    return Layer


def _as_it_is(shard):
    return shard


RIGHT["10.3"] |= {"by parts": _cut_layer()}
WRONG["10.3"] |= {
    "not gathered in backward": (_cut_layer(backward=_as_it_is), r"in backward too, gather\(shard"),
    "not gathered in forward": (
        _cut_layer(forward=_as_it_is),
        "forward returns only this rank's outputs",
    ),
    "never gathered": (
        _cut_layer(forward=_as_it_is, backward=_as_it_is),
        "so that d_out has all outputs, and call own_mean once",
    ),
    "never gathered nor reduced": (
        _cut_layer(forward=_as_it_is, backward=_as_it_is, reduce=lambda d_shard: d_shard),
        "forward returns only this rank's outputs",
    ),
    "a mean for x": (_cut_layer(own_x=_mean_of_rows), "has another shape than x"),
}


def _all_counts_at_once(micro_batches):
    """The ranks have different numbers of micro-batches."""
    counts = torch.tensor([int((labels != -100).sum()) for labels in micro_batches])
    dist.all_reduce(counts)
    return counts.sum()


def _gradients_that_exist_at_once(model):
    trained = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
    joined = torch.cat([p.grad.flatten() for p in trained])
    dist.all_reduce(joined)
    begin = 0
    for p in trained:
        p.grad.copy_(joined[begin : begin + p.numel()].view_as(p) / dist.get_world_size())
        begin += p.numel()


WRONG["10.5"] |= {"all counts at once": (_all_counts_at_once, "the ranks do not make the same")}
WRONG["10.2"] |= {
    "those that exist": (_gradients_that_exist_at_once, "the ranks do not make the same calls")
}


def _zeros_at_the_end(model):
    """Each rank sends the gradients that it has, and then zeros for the others."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in sorted(trained, key=lambda p: p.grad is None):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


WRONG["10.2"] |= {"zeros at the end": (_zeros_at_the_end, "in the same order")}
