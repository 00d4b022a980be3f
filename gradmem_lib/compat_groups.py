"""Process groups without processes: one rank of many that are not there, and ranks that are threads. The other half of
``compat``: private names of torch, seen in 2.13.0."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


class _Reducer(torch.distributed.Reducer):
    """DDP's, which reads tensors to put its buckets into another order after a first step. They are as large in the first."""

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[Any]:
    """While the block runs, this process is ``rank`` of ``ranks`` that are not there, and whose messages arrive at once.

    A process group that exists is put aside, and knows nothing of it. Yields the ranks' mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d = torch.distributed.distributed_c10d
    there = c10d._world
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    tables = [(getattr(there, name), dict(getattr(there, name))) for name in names]
    count, hook = there.group_count, sys.excepthook
    with ExitStack() as undo:
        undo.enter_context(patch.object(c10d, "_world", c10d._World()))
        for table, _ in tables:
            table.clear()
        try:
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            undo.enter_context(patch.object(torch.distributed, "Reducer", _Reducer))
            for module, name in (
                (torch.distributed, "_verify_params_across_processes"),
                (torch.nn.parallel.distributed, "_sync_module_states"),
            ):
                undo.enter_context(patch.object(module, name, lambda *args, **kwargs: None))
            yield torch.distributed.init_device_mesh("cpu", (ranks,))
        finally:
            for name in list(there.pg_names.values()):
                c10d._unregister_process_group(name)
            for table, was in tables:
                table.clear()
                table.update(was)
            there.group_count, sys.excepthook = count, hook
            c10d._update_default_pg(there.default_pg)


@contextmanager
def groups_of_threads(compare: Callable[[Any, Any], None]) -> Iterator[Any]:
    """While the block runs, each thread makes process groups of its own, as a rank does, which meet those of the other
    threads. Groups that were there before are out of sight, and come back.

    What comes are two functions: ``meet(group, rank, call, data)``, of which ``call.work`` gets everyone's ``data``, and
    ``stop(error)``, after which whoever waits for others leaves by ``SystemExit``. ``compare(call, call)`` sees what meets.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    groups = threaded.ProcessLocalGroup
    begin = groups._start_coll

    def begun(call, group):
        met = begin(call, group)
        compare(met._collective, call)
        return met

    def reduce(self, tensors, options):
        """Which torch's own lacks."""
        copies = [tensor.clone() for tensor in tensors]
        work = self.allreduce(copies, options)
        if self.rank() == options.rootRank:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        return work

    threaded._install_threaded_pg()
    isolate(True)
    try:
        with patch.multiple(groups, _start_coll=begun, reduce=reduce, create=True):
            yield lambda group, rank, call, data: begun(call, group).join(rank, data), groups.exception_handle
    finally:
        groups.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
