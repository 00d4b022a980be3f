"""accumulate_gradients in two real processes, replicated and sharded, against the full batch's gradient."""

import json

import pytest

from gradmem_lib.course.processes import torchrun

START = """
import json, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from gradmem_lib.course import models
from gradmem_lib import accumulate_gradients, next_token_loss

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
tiny = lambda: models.tiny_gpt2(layers=2, hidden=16, heads=2, vocab=31, positions=12, dtype=torch.float64)
ids = torch.randint(0, 31, (5, 12), generator=torch.Generator().manual_seed(0))
lengths = torch.tensor([2, 12, 5, 9, 7])
labels = ids.masked_fill(torch.arange(12) >= lengths[:, None], -100)
alone = tiny()
loss, items = next_token_loss(alone, {"input_ids": ids, "labels": labels})
(loss / items).backward()
full = torch.cat([p.grad.flatten() for p in alone.parameters()])

def pieces(rows):
    return [{"input_ids": ids[[r]], "labels": labels[[r]] if r >= 0 else labels[[r]] * 0 - 100} for r in rows]

def own(rows):
    return int((labels[[r for r in rows if r >= 0], 1:] != -100).sum())

def window(model, gradient, rows, **options):
    model.zero_grad(set_to_none=True)
    done = accumulate_gradients(iter(pieces(rows)), lambda m: next_token_loss(model, m), model=model, **options)
    far = ((gradient() - full).norm() / full.norm()).item()
    return [far, done.loss - (loss / items).item(), done.items - items]

def said(model, rows, loss_and_count=None):
    try:
        accumulate_gradients(pieces(rows), loss_and_count or (lambda m: next_token_loss(model, m)), model=model)
    except ValueError as error:
        return str(error)
"""

REPLICATED = """
model = tiny()
parallel = DistributedDataParallel(model)
gradient = lambda: torch.cat([p.grad.flatten() for p in model.parameters()])
shares = ([0, 1, 2], [3, 4])[rank]  # three micro-batches here, two there
last_empty = ([0, 1], [2, 3, 4, -1])[rank]
replicated = {
    "corrected after": window(parallel, gradient, shares),
    "total known": window(parallel, gradient, shares, total_items=own(shares)),
    "an empty last one": window(parallel, gradient, last_empty),
    "an empty last one, total known": window(parallel, gradient, last_empty, total_items=own(last_empty)),
}
syncs = []
parallel.register_comm_hook(None, lambda state, bucket: (syncs.append(1),
    dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / 2))[1])
replicated["a counting hook"] = window(parallel, gradient, shares)
replicated["syncs"] = len(syncs)
replicated["without model"] = said(None, [0], lambda _: None)
parallel.zero_grad()
replicated["no gradient to send with"] = said(parallel, [0], lambda _: (torch.zeros(()), 0))
"""

SHARDED = """
def fsdp1():
    model = FullyShardedDataParallel(tiny(), device_id=torch.device("cpu"), use_orig_params=True)
    def gradient():
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return torch.cat([p.grad.flatten() for p in model.parameters()])
    return model, gradient

def fsdp2(divide=None, root=True, **options):
    model = tiny()
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh, **options)
    if root:
        fully_shard(model, mesh=mesh, **options)
    if divide:
        for part in [*model.transformer.h, model]:
            part.set_gradient_divide_factor(divide)
    return model, lambda: torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])

mine = ([0, 1, -1], [2, 3, 4])[rank]  # as many micro-batches on each, not as many labels
sharded = {}
for name, (model, gradient) in {
    "FSDP": fsdp1(), "fully_shard": fsdp2(), "kept whole": fsdp2(reshard_after_forward=False), "divided by 4": fsdp2(4.0)
}.items():
    for way, options in {"corrected after": {}, "total known": {"total_items": own(mine)}}.items():
        sharded[f"{name}, {way}"] = window(model, gradient, mine, **options)
model, _ = fsdp2()
sharded["unequally many"] = said(model, mine[: 3 - rank])
model.zero_grad()
if rank == 0:  # gradients of before on one process alone: no other waits for it
    for p in model.parameters():
        p.grad = torch.ones_like(p)
sharded["before"] = said(model, mine)
sharded["layers alone"] = said(fsdp2(root=False)[0], mine)
sharded["wrapped inside"] = said(torch.nn.Sequential(fsdp1()[0]), mine)
"""

END = """
if rank == 0:
    print(json.dumps([replicated, sharded]))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found():
    return json.loads(torchrun(START + REPLICATED + SHARDED + END))


def equal_to_the_full_batch(windows):
    for name, (far, loss, items) in windows.items():
        assert far <= 1e-12 and abs(loss) <= 1e-12 and items == 0, name


def test_two_processes_with_unequal_shares_get_the_full_batchs_gradient(found):
    replicated, _ = found
    assert replicated.pop("syncs") == 1  # one bucket, sent with the last micro-batch alone
    assert "was not told the model" in replicated.pop("without model")
    assert 'reduction="sum"' in replicated.pop("no gradient to send with")
    assert len(replicated) == 5
    equal_to_the_full_batch(replicated)


def test_sharded_over_two_processes_it_is_the_full_batchs_gradient(found):
    _, sharded = found
    assert "1 of 2 processes have another micro-batch" in sharded.pop("unequally many")
    assert "have gradients from before" in sharded.pop("before")
    assert "call fully_shard on the whole model too" in sharded.pop("layers alone")
    assert "give the whole to FullyShardedDataParallel" in sharded.pop("wrapped inside")
    assert len(sharded) == 8
    equal_to_the_full_batch(sharded)


def test_a_process_that_fails_is_reported():
    with pytest.raises(RuntimeError, match=r"one of the 1 processes failed(.|\n)*no such batch"):
        torchrun("raise ValueError('no such batch')", processes=1)
