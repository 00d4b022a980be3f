"""accumulate_gradients in two real processes, replicated and sharded, against the full batch's gradient."""

import json

import pytest

from gradmem_lib.course.processes import torchrun

SCRIPT = """
import json, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gradmem_lib.course import models
from gradmem_lib import accumulate_gradients, next_token_loss

dist.init_process_group("gloo")
rank = dist.get_rank()
model = models.tiny_gpt2(layers=1, hidden=16, heads=2, vocab=31, positions=12, dtype=torch.float64)
parallel = DistributedDataParallel(model)
ids = torch.randint(0, 31, (5, 12), generator=torch.Generator().manual_seed(0))
lengths = torch.tensor([2, 12, 5, 9, 7])
labels = ids.masked_fill(torch.arange(12) >= lengths[:, None], -100)
loss, items = next_token_loss(model, {"input_ids": ids, "labels": labels})
(loss / items).backward()
full = torch.cat([p.grad.flatten() for p in model.parameters()])

def window(rows, **options):
    parallel.zero_grad(set_to_none=True)
    micro_batches = [{"input_ids": ids[[r]], "labels": labels[[r]] if r >= 0 else labels[[r]] * 0 - 100} for r in rows]
    result = accumulate_gradients(iter(micro_batches), lambda m: next_token_loss(parallel, m), model=parallel, **options)
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    return [((got - full).norm() / full.norm()).item(), result.loss - (loss / items).item(), result.items - items]

shares = ([0, 1, 2], [3, 4])  # three micro-batches here, two there
last_empty = ([0, 1], [2, 3, 4, -1])
own = lambda shares: int((labels[[r for r in shares[rank] if r >= 0], 1:] != -100).sum())
found = {
    "corrected after": window(shares[rank]),
    "total known": window(shares[rank], total_items=own(shares)),
    "an empty last one": window(last_empty[rank]),
    "an empty last one, total known": window(last_empty[rank], total_items=own(last_empty)),
}
syncs = []
parallel.register_comm_hook(None, lambda state, bucket: (syncs.append(1),
    dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / 2))[1])
found["a counting hook"] = window(shares[rank])
found["syncs"] = len(syncs)
try:
    accumulate_gradients([0], lambda _: None)
except ValueError as error:
    found["without model"] = str(error)
parallel.zero_grad()
try:
    accumulate_gradients([0], lambda _: (torch.zeros(()), 0), model=parallel)
except ValueError as error:
    found["no gradient to send with"] = str(error)
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def test_two_processes_with_unequal_shares_get_the_full_batchs_gradient():
    found = json.loads(torchrun(SCRIPT))
    assert found.pop("syncs") == 1  # one bucket, sent with the last micro-batch alone
    assert "was not told the model" in found.pop("without model")
    assert 'reduction="sum"' in found.pop("no gradient to send with")
    assert len(found) == 5
    for name, (far, loss, items) in found.items():
        assert far <= 1e-12 and abs(loss) <= 1e-12 and items == 0, name


SHARDED = """
import json, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
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

def pieces(rows):
    return [{"input_ids": ids[[r]], "labels": labels[[r]] if r >= 0 else labels[[r]] * 0 - 100} for r in rows]

shares = ([0, 1, -1], [2, 3, 4])  # as many micro-batches on each, not as many labels
mine = shares[rank]
own = int((labels[[r for r in mine if r >= 0], 1:] != -100).sum())
found = {}
for name, (model, gradient) in {
    "FSDP": fsdp1(), "fully_shard": fsdp2(), "kept whole": fsdp2(reshard_after_forward=False), "divided by 4": fsdp2(4.0)
}.items():
    for way, options in {"corrected after": {}, "total known": {"total_items": own}}.items():
        model.zero_grad(set_to_none=True)
        done = accumulate_gradients(iter(pieces(mine)), lambda m: next_token_loss(model, m), model=model, **options)
        far = ((gradient() - full).norm() / full.norm()).item()
        found[f"{name}, {way}"] = [far, done.loss - (loss / items).item(), done.items - items]

def said(model, rows):
    try:
        accumulate_gradients(pieces(rows), lambda m: next_token_loss(model, m), model=model)
    except ValueError as error:
        return str(error)

model, _ = fsdp2()
found["unequally many"] = said(model, mine[: 3 - rank])
model.zero_grad()
if rank == 0:  # gradients of before on one process alone: no other waits for it
    for p in model.parameters():
        p.grad = torch.ones_like(p)
found["before"] = said(model, mine)
found["layers alone"] = said(fsdp2(root=False)[0], mine)
found["wrapped inside"] = said(torch.nn.Sequential(fsdp1()[0]), mine)
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def test_sharded_over_two_processes_it_is_the_full_batchs_gradient():
    found = json.loads(torchrun(SHARDED))
    assert "1 of 2 processes have another micro-batch" in found.pop("unequally many")
    assert "have gradients from before" in found.pop("before")
    assert "call fully_shard on the whole model too" in found.pop("layers alone")
    assert "give the whole to FullyShardedDataParallel" in found.pop("wrapped inside")
    assert len(found) == 8
    for name, (far, loss, items) in found.items():
        assert far <= 1e-12 and abs(loss) <= 1e-12 and items == 0, name


def test_a_process_that_fails_is_reported():
    with pytest.raises(RuntimeError, match=r"one of the 1 processes failed(.|\n)*no such batch"):
        torchrun("raise ValueError('no such batch')", processes=1)
