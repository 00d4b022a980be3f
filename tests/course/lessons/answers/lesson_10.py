"""Answers to lesson 10's exercises: right ones in unusual forms, and wrong ones that were once
judged right or that few cases catch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from gradmem_lib import Recipe
from gradmem_lib.course.lessons.lesson_10.exercises import gather, own_mean
from gradmem_lib.techniques.sharding import shard

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def parts_as_bits(parameters, ranks, way):
    """One bit for each part: is it cut?"""
    cut = {"ddp": 0b000, "zero1": 0b100, "zero2": 0b110, "fsdp": 0b111}[way]
    held = [2 * parameters, 2 * parameters, 12 * parameters]
    for part in range(3):
        if cut >> part & 1:
            held[part] /= ranks
    return torch.tensor(held, dtype=torch.float64)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def in_one_bucket(model):
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(model)]
    bucket = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(bucket)
    for p, part in zip(trained(model), bucket.split([p.numel() for p in parts]), strict=True):
        p.grad = part.view_as(p) / dist.get_world_size()


def gathered_as_objects(model):
    own = [None if p.grad is None else p.grad.tolist() for p in trained(model)]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    for place, p in enumerate(trained(model)):
        there = [torch.tensor(each[place]) for each in of_ranks if each[place] is not None]
        p.grad = (sum(there) / len(of_ranks)).to(p.dtype)


def zeros_at_the_end(model):
    """Each rank sends the gradients that it has, and then zeros for the others."""
    for p in sorted(trained(model), key=lambda p: p.grad is None):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def checkpoints_by_hand(model, mesh):
    for layer in model.model.layers:
        layer.forward = of_a_checkpoint(layer.forward)
    return shard(model, "fsdp", mesh=mesh)


def of_a_checkpoint(forward):
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def checkpoints_of_mlps(model, mesh):
    for layer in model.model.layers:
        layer.mlp.forward = of_a_checkpoint(layer.mlp.forward)
    return shard(model, "fsdp", mesh=mesh)


def every_linear(model, mesh):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def recipe(**changed):
    usual = {"precision": "bf16", "sharding": "fsdp", "lora_rank": 16, "quantized_base": True}
    return lambda: Recipe(**usual | {"checkpointing": "per-layer"} | changed)


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        return gather(own)

    @staticmethod
    def backward(ctx, d_whole):
        return own_mean(d_whole)


class GathersInACheckpoint(nn.Module):
    def __init__(self, linear):
        super().__init__()
        size = linear.out_features // dist.get_world_size()
        first = dist.get_rank() * size
        self.weight = nn.Parameter(linear.weight[first : first + size].detach().clone())

    def product(self, x, own):
        return x @ Whole.apply(own).T

    def forward(self, x):
        return checkpoint(self.product, x, self.weight, use_reentrant=False)


class KeepsTheWhole(GathersInACheckpoint):
    def forward(self, x):
        return self.product(x, self.weight)


class GathersOnce(GathersInACheckpoint):
    """The weight is that of the first forward, after updates too."""

    first = None

    def product(self, x, own):
        now = Whole.apply(own)
        if self.first is None:
            self.first = now.detach().clone()
        return x @ (now + (self.first - now.detach())).T


def counted_as_objects(micro_batches):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(labels.ne(-100).sum().item() for labels in micro_batches))
    return torch.tensor(len(counts) / sum(counts))


COUNT = "int((labels != IGNORED).sum()) → "
RIGHT = {
    "10.1": [
        parts_as_bits,
        "states // ranks → states / ranks",
    ],
    "10.2": [
        in_one_bucket,
        gathered_as_objects,
        "p.grad /= dist.get_world_size() →\n"
        "dist.all_reduce(p.grad) → dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",
    ],
    "10.4": [
        checkpoints_by_hand,
        '"use_reentrant": False → "use_reentrant": True',
        "return fully_shard( → fully_shard(model.lm_head, mesh=mesh); return fully_shard(",
    ],
    "10.6": [
        "* (ranks - 1) / ranks → * (1 - 1 / ranks)",
        "return passes → return torch.tensor(passes, dtype=torch.float64)",
    ],
    "10.7": [
        recipe(optimizer="sgd"),
        recipe(lora_targets=LINEAR),
        recipe(checkpointing=2),
    ],
    "10.3": [
        GathersInACheckpoint,
        "d_out.flatten(0, -2).T @ x.flatten(0, -2) → torch.einsum('...o,...i->oi', d_out, x)",
    ],
    "10.5": [
        counted_as_objects,
        "count = torch.tensor( → count = torch.tensor(0.0 + \n"
        "all_reduce(count) → all_reduce(count, op=dist.ReduceOp.AVG)\n"
        "dist.get_world_size() / → 1 /",
    ],
}
WRONG = {
    "10.1": [
        "return weights, gradients, states → return weights + gradients + states",
        "return weights, gradients, states → return states, gradients, weights",
        "weights = weights // ranks →",
        "states = states // ranks → states = states // max(1, ranks - 1)",
        "2 * parameters, 2 * parameters, 12 → 2 * parameters, 4 * parameters, 12",
    ],
    "10.2": [
        zeros_at_the_end,
        "if p.requires_grad → if True",
        "p.grad = torch.zeros_like(p) → p.grad = torch.zeros(p.shape)",
        "dist.all_reduce(p.grad) → dist.all_reduce(p.grad); dist.all_reduce(p.data)",
        "dist.get_world_size() → (2 * dist.get_rank() + 2)",
        "dist.all_reduce(p.grad) → dist.all_reduce(p.grad, op=dist.ReduceOp.PRODUCT)",
    ],
    "10.4": [
        checkpoints_of_mlps,
        every_linear,
        lambda model, mesh: shard(model, "ddp", mesh=mesh),
        "in model.model.layers → in model.model.layers[::2]",
        "in model.model.layers → in [list(model.model.layers)]",
        "layer, mesh=mesh → layer",
        "return fully_shard → fully_shard",
        "enable_checkpointing(model → model = copy.deepcopy(model); enable_checkpointing(model",
        "return fully_shard(model, mesh=mesh) → return fully_shard(model, mesh=mesh).eval()",
    ],
    "10.6": [
        "/ bandwidth → / bandwidth / micro_batches",
        "(ranks - 1) / ranks → 1 / ranks",
        "2 * micro_batches → micro_batches + 1",
        "2 * micro_batches → 3 * micro_batches",
        "return passes → return 8 * passes",
    ],
    "10.7": [
        recipe(precision="float32"),
        recipe(lora_rank=64),
        recipe(lora_targets=LINEAR[:4]),
        recipe(checkpointing="sqrt"),
        recipe(checkpointing=None, every_n_layers=20),
        lambda: (recipe()(), recipe()()),
    ],
    "10.3": [
        KeepsTheWhole,
        GathersOnce,
        "rows.clone() → rows",
        "self.shard = → self.linear = linear; self.shard =",
        "dist.get_rank() → dist.get_world_size() - 1 - dist.get_rank()",
        "return d_out @ gather(shard), own → return None, own",
        "own_mean(d_weight) → own_mean(d_weight) * dist.get_world_size() / 2",
        "own_mean(d_weight) → None",
    ],
    "10.5": [
        COUNT + "int((labels > 0).sum())",
        COUNT + "int((labels[:, :-1] >= 0).sum())",
        COUNT + "max(1, int((labels >= 0).sum()))",
        "for labels in micro_batches → for labels in [torch.cat(micro_batches)]",
        "for labels in micro_batches → for labels in micro_batches[-1:]",
        "all_reduce(count) → all_reduce(count, op=dist.ReduceOp.MAX)",
        "dist.get_world_size() / → 2 /",
    ],
}
