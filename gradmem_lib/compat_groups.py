"""A process group without processes: one rank of many. Part of ``compat``: private names of torch, seen in 2.13.0."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


class _Reducer(torch.distributed.Reducer):
    """DDP's, whose buckets stay in the first order, since another is found by reading tensors. They are as large."""

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[Any]:
    """The mesh of ``ranks`` that are not there but for this one, ``rank``; a group that exists is put aside meanwhile."""
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
            undo.enter_context(patch("torch.distributed._verify_params_across_processes"))
            undo.enter_context(patch("torch.nn.parallel.distributed._sync_module_states"))
            yield torch.distributed.init_device_mesh("cpu", (ranks,))
        finally:
            for name in list(there.pg_names.values()):
                c10d._unregister_process_group(name)
            for table, was in tables:
                table.clear()
                table.update(was)
            there.group_count, sys.excepthook = count, hook
            c10d._update_default_pg(there.default_pg)
