"""Answers to the exercises of lesson 10 about weights that are cut, as people write them; see
answers_numbers.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from gradmem_lib.techniques.sharding import shard

RIGHT, WRONG = {}, {}


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


RIGHT["10.3"] = {
    "einsum": _Cut,
    "a checkpoint gathers again": _cut(_by_checkpoint),
    "named weight": _Hooked,
}
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


RIGHT["10.4"] = {
    "the other kind of checkpoint": _but_wrapped(reentrant=True),
    "checkpoints afterwards": _but_wrapped(late=True),
    "embedding and head too": _ends_too,
    "by hand": _by_hand,
    "the library's": _by_library,
}
WRONG["10.4"] = {
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
