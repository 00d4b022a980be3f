"""A process group of which only one rank exists."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from .dispatch_modes import without_modes


class _Reducer(torch.distributed.Reducer):
    """DDP's reducer without a new order of its buckets, which DDP finds by reading tensors.

    Their sizes stay the same.
    """

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def fake_process_group(ranks: int, rank: int) -> Iterator[Any]:
    """A fake process group of ``ranks`` ranks of which only this one, ``rank``, exists.

    Yields its mesh. An existing process group is restored at the end.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d = torch.distributed.distributed_c10d
    outer = c10d._world
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    tables = [(getattr(outer, name), dict(getattr(outer, name))) for name in names]
    count, hook = outer.group_count, sys.excepthook
    with ExitStack() as undo:
        undo.enter_context(patch.object(c10d, "_world", c10d._World()))
        for table, _ in tables:
            table.clear()
        try:
            torch.distributed.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=ranks
            )
            # Torch 2.11 computes shapes under the caller's fake mode, where these tensors would be
            # seen and counted.
            shapes = "_propagate_tensor_meta_non_cached"
            unwatched = without_modes()(getattr(ShardingPropagator, shapes))
            undo.enter_context(patch.object(ShardingPropagator, shapes, unwatched))
            undo.enter_context(patch.object(torch.distributed, "Reducer", _Reducer))
            undo.enter_context(patch("torch.distributed._verify_params_across_processes"))
            undo.enter_context(patch("torch.nn.parallel.distributed._sync_module_states"))
            yield torch.distributed.init_device_mesh("cpu", (ranks,))
        finally:
            for name in list(outer.pg_names.values()):
                c10d._unregister_process_group(name)
            for table, saved in tables:
                table.clear()
                table.update(saved)
            outer.group_count, sys.excepthook = count, hook
            c10d._update_default_pg(outer.default_pg)
