"""accumulate_gradients in two real processes, replicated and sharded, against the full batch's gradient."""

import os
from contextlib import suppress

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradmem_lib import accumulate_gradients, next_token_loss
from gradmem_lib.course import models, run_ranks, torchrun

ids = torch.randint(0, 31, (5, 12), generator=torch.Generator().manual_seed(0))
lengths = torch.tensor([2, 12, 5, 9, 7])
labels = ids.masked_fill(torch.arange(12) >= lengths[:, None], -100)


def tiny():
    return models.tiny_gpt2(layers=2, hidden=16, heads=2, vocab=31, positions=12, dtype=torch.float64)


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def whole_batch():
    """The full batch's gradient, loss and number of labels, in one process."""
    alone = tiny()
    loss, items = next_token_loss(alone, {"input_ids": ids, "labels": labels})
    (loss / items).backward()
    return gradient_of(alone), (loss / items).item(), items


def pieces(rows):
    return [{"input_ids": ids[[r]], "labels": labels[[r]] if r >= 0 else labels[[r]] * 0 - 100} for r in rows]


def own(rows):
    return int((labels[[r for r in rows if r >= 0], 1:] != -100).sum())


def window(model, gradient, rows, **options):
    """How far gradient, loss and number of labels are from the full batch's."""
    full, loss, items = whole_batch()
    model.zero_grad(set_to_none=True)
    done = accumulate_gradients(
        iter(pieces(rows)), lambda m: next_token_loss(model, m), model=model, **options
    )
    far = ((gradient() - full).norm() / full.norm()).item()
    return far, done.loss - loss, done.items - items


def said(model, rows, loss_and_count=None):
    try:
        accumulate_gradients(
            pieces(rows), loss_and_count or (lambda m: next_token_loss(model, m)), model=model
        )
    except ValueError as error:
        return str(error)


def replicated():
    model, rank = tiny(), dist.get_rank()
    parallel = DistributedDataParallel(model)

    def gradient():
        return gradient_of(model)

    shares = ([0, 1, 2], [3, 4])[rank]  # three micro-batches here, two there
    last_empty = ([0, 1], [2, 3, 4, -1])[rank]
    found = {
        "corrected after": window(parallel, gradient, shares),
        "total known": window(parallel, gradient, shares, total_items=own(shares)),
        "an empty last one": window(parallel, gradient, last_empty),
        "an empty last one, total known": window(parallel, gradient, last_empty, total_items=own(last_empty)),
    }
    syncs = []

    def counted(state, bucket):
        syncs.append(1)
        sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return sent.then(lambda future: future.value()[0] / 2)

    parallel.register_comm_hook(None, counted)
    found["a counting hook"] = window(parallel, gradient, shares)
    found["syncs"] = len(syncs)
    found["without model"] = said(None, [0], lambda _: None)
    parallel.zero_grad()
    found["no gradient to send with"] = said(parallel, [0], lambda _: (torch.zeros(()), 0))
    return found


def fsdp1():
    model = FullyShardedDataParallel(tiny(), device_id=torch.device("cpu"), use_orig_params=True)

    def gradient():
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return gradient_of(model)

    return model, gradient


def fsdp2(divide=None, root=True, **options):
    model, options = tiny(), {"mesh": init_device_mesh("cpu", (2,)), **options}
    for layer in model.transformer.h:
        fully_shard(layer, **options)
    if root:
        fully_shard(model, **options)
    if divide:
        for part in [*model.transformer.h, model]:
            part.set_gradient_divide_factor(divide)
    return model, lambda: torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])


def sharded():
    rank = dist.get_rank()
    mine = ([0, 1, -1], [2, 3, 4])[rank]  # as many micro-batches on each, not as many labels
    found = {}
    for name, (model, gradient) in {
        "FSDP": fsdp1(), "fully_shard": fsdp2(), "kept whole": fsdp2(reshard_after_forward=False), "divided by 4": fsdp2(4.0),
    }.items():  # fmt: skip
        for way, options in {"corrected after": {}, "total known": {"total_items": own(mine)}}.items():
            found[f"{name}, {way}"] = window(model, gradient, mine, **options)
    model, _ = fsdp2()
    found["unequally many"] = said(model, mine[: 3 - rank])
    model.zero_grad()
    if rank == 0:  # gradients of before on one process alone: no other waits for it
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    found["before"] = said(model, mine)
    found["layers alone"] = said(fsdp2(root=False)[0], mine)
    found["wrapped inside"] = said(torch.nn.Sequential(fsdp1()[0]), mine)
    return found


def equal_to_the_full_batch(windows):
    for name, (far, loss, items) in windows.items():
        assert far <= 1e-12 and abs(loss) <= 1e-12 and items == 0, name


def test_two_processes_with_unequal_shares_get_the_full_batchs_gradient():
    found = run_ranks(replicated)[0]
    assert found.pop("syncs") == 1  # one bucket, sent with the last micro-batch alone
    assert "was not told the model" in found.pop("without model")
    assert 'reduction="sum"' in found.pop("no gradient to send with")
    assert len(found) == 5
    equal_to_the_full_batch(found)


def test_sharded_over_two_processes_it_is_the_full_batchs_gradient():
    found = run_ranks(sharded)[0]
    assert "1 of 2 processes have another micro-batch" in found.pop("unequally many")
    assert "have gradients from before" in found.pop("before")
    assert "call fully_shard on the whole model too" in found.pop("layers alone")
    assert "give the whole to FullyShardedDataParallel" in found.pop("wrapped inside")
    assert len(found) == 8
    equal_to_the_full_batch(found)


def test_a_process_that_fails_is_reported():
    with pytest.raises(RuntimeError, match=r"one of the 1 processes failed(.|\n)*no such batch"):
        torchrun("raise ValueError('no such batch')", processes=1)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_processes_of_torchrun(tmp_path):
    name = str(tmp_path / "pid")
    with pytest.raises(KeyboardInterrupt):
        torchrun(
            f"import os, signal, time; open({name!r}, 'w').write(str(os.getpid())); os.kill({os.getpid()}, signal.SIGINT); "
            "time.sleep(600)",
            processes=1,
        )
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(20)
