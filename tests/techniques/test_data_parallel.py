"""accumulate_gradients in two real processes, replicated and sharded, against the full batch's
gradient.
"""

import os
from contextlib import suppress

import psutil
import pytest
import torch
import torch.distributed as dist
from support.gradients import error, own_loss, ragged
from support.gradients import gradient as flat_gradient
from support.refusals import refusal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradmem_lib import accumulate_gradients, next_token_loss, split
from gradmem_lib.compat.fake_ranks import fake_process_group
from gradmem_lib.course import models, run_ranks, torchrun
from gradmem_lib.course.machine.thread_ranks import on_ranks
from gradmem_lib.techniques.data_parallel import (
    Processes,
    Sharded,
    check_trained_together,
    processes_of,
)

BATCH = ragged((2, 12, 5, 9, 7), 31)
ROWS = list(split(BATCH, 1))
ROWS.append(ROWS[0] | {"labels": torch.full((1, 12), -100)})  # row -1 has no label


def tiny():
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 31, "positions": 12}
    return models.tiny_gpt2(dtype=torch.float64, **sizes)


def whole_batch():
    """The full batch's gradient, loss and number of labels, in one process."""
    alone = tiny()
    loss = own_loss(alone, BATCH)
    loss.backward()
    return flat_gradient(alone), loss.item(), own(range(5))


def pieces(rows):
    return [ROWS[row] for row in rows]


def own(rows):
    return sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in pieces(rows))


def window(model, gradient, rows, **options):
    """How far gradient, loss and number of labels are from the full batch's."""
    full, loss, items = whole_batch()
    model.zero_grad(set_to_none=True)
    done = accumulate_gradients(
        iter(pieces(rows)), lambda m: next_token_loss(model, m), model=model, **options
    )
    return error(gradient(), full), done.loss - loss, done.items - items


def said(model, rows, loss_and_count=None):
    loss_and_count = loss_and_count or (lambda m: next_token_loss(model, m))
    return refusal(accumulate_gradients, pieces(rows), loss_and_count, model=model)


def replicated():
    model, rank = tiny(), dist.get_rank()
    parallel = DistributedDataParallel(model)

    def gradient():
        return flat_gradient(model)

    shares = ([0, 1, 2], [3, 4])[rank]  # three micro-batches here, two there
    last_empty = ([0, 1], [2, 3, 4, -1])[rank]
    found = {"corrected after": window(parallel, gradient, shares)}
    for name, rows in (("total known", shares), ("and an empty last one", last_empty)):
        found[name] = window(parallel, gradient, rows, total_items=own(rows))
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
            return flat_gradient(model)

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
        "FSDP": fsdp1(),
        "fully_shard": fsdp2(),
        "divided by 4": fsdp2(4.0, reshard_after_forward=False),
    }.items():
        for options in ({}, {"total_items": own(mine)}):
            found[f"{name}, {options}"] = window(model, gradient, mine, **options)
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


def test_numbers_are_summed_over_every_group():
    def summed(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        both = Processes(torch.nn.Linear(1, 1), [pairs[rank // 2], across[rank % 2]])
        return both.divisor, both.sums(2.0**rank, rank == 3, 2**53)

    assert on_ranks(summed, 4) == [(4, [15, 1, 2.0**55])] * 4


def parts_and_whole(mesh):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.PReLU())
    for part in (model[0], model[1], model):
        fully_shard(part, mesh=mesh)
    return model


def test_a_model_says_how_it_is_trained():
    with fake_process_group(3, 1) as mesh:
        plain = torch.nn.Linear(2, 2)
        parallel = DistributedDataParallel(plain, process_group=mesh.get_group())
        with pytest.raises(ValueError, match=r"only a part of the model, '1'.* DistributedData"):
            processes_of(torch.nn.Sequential(plain, parallel))
        model = parts_and_whole(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        check_trained_together(model, optimizer)
        check_trained_together(model, [optimizer])  # those of layers, in backward
        with pytest.raises(ValueError, match="that prepare"):
            check_trained_together(model, torch.optim.SGD(plain.parameters(), lr=1.0))
        frozen = torch.nn.Sequential(model[0], torch.nn.Linear(2, 2).requires_grad_(False))
        assert type(processes_of(frozen)) is Sharded
        model[0].set_gradient_divide_factor(5.0)
        with pytest.raises(ValueError, match="by different numbers"):
            processes_of(model)


def in_two_processes():
    return replicated(), sharded()


def test_two_processes_get_the_full_batchs_gradient_replicated_and_sharded():
    found, parts = run_ranks(in_two_processes)[0]
    assert found.pop("syncs") == 1  # one bucket, sent with the last micro-batch alone
    assert "was not told the model" in found.pop("without model")
    assert 'reduction="sum"' in found.pop("no gradient to send with")
    assert "1 of 2 processes have another micro-batch" in parts.pop("unequally many")
    assert "have gradients from before" in parts.pop("before")
    assert "call fully_shard on the whole model too" in parts.pop("layers alone")
    assert "give the whole to FullyShardedDataParallel" in parts.pop("wrapped inside")
    assert (len(found), len(parts)) == (4, 6)
    for name, (far, loss, items) in (found | parts).items():
        assert far <= 1e-12 and abs(loss) <= 1e-12 and items == 0, name


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_processes_of_torchrun(tmp_path):
    name = str(tmp_path / "pid")
    with pytest.raises(KeyboardInterrupt):
        torchrun(
            f"import os, signal, time; open({name!r}, 'w').write(str(os.getpid())); "
            f"os.kill({os.getpid()}, signal.SIGINT); time.sleep(600)",
            processes=1,
        )
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(20)
