"""Answers to the exercises of lesson 10 as people write them; see answers_numbers.py."""

import torch
import torch.distributed as dist

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
WRONG["10.1"] = {
    "no copy": (_parts(states=8), "copy"),
    "float32": (_parts(4, 4, 8), "bf16"),
    "float32 gradients": (_parts(gradients=4), "gradients"),
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
    "GB": (lambda P, N, way: tuple(n / 1e9 for n in _table(P, N, way)), "not kB"),
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


def _all(model, do, of=_trained):
    for p in of(model):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        do(p)


def _each(do, of=_trained):
    return lambda model: _all(model, do, of)


def _sum(p):
    dist.all_reduce(p.grad)


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


RIGHT["10.2"] = {
    "in one bucket": _bucket,
    "all at once, divided before": _async,
    "by AVG": _average_op,
    "gathered": _gathered,
    "to one and back": _reduced,
    "as objects": _objects,
}
WRONG["10.2"] = {
    "sum": (_each(_sum), "sum"),
    "by 2": (lambda model: _bucket(model, scale=2), "2"),
    "bucket not written back": (
        lambda model: _bucket(model, back=False),
        "write|have not changed|copy",
    ),
    "where there is one": (_where_there_is_one, "zeros"),
    "frozen too": (_each(_mean, of=lambda model: model.parameters()), "[Ff]rozen"),
    "rank 0 alone": (_each(_on_rank_0), "rank 0"),
    "nothing sent": (_each(lambda p: p.grad.div_(dist.get_world_size())), "added up|all_reduce"),
    "twice": (_each(lambda p: (_mean(p), p.grad.div_(dist.get_world_size()))), "twice"),
    "weights too": (_each(lambda p: (_mean(p), dist.all_reduce(p.data))), "weights"),
    "a step": (_each(_step), "weights"),
    "one rank": (_only_one_rank, "same calls"),
    "largest": (_each(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)), "for|got|tensor"),
    "None": (lambda model: [_mean(p) for p in model.parameters()], "None"),
    "copied, and left": (
        _each(lambda p: p.grad.clone()),
        "not yet: the gradients have not changed: all_reduce",
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
        "for|got",
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
        "as fsdp",
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
