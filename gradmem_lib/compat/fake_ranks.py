"""A process group of which only one rank exists."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed = torch.distributed
    with _without_other_ranks(), _without_process_groups():
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        yield distributed.init_device_mesh("cpu", (ranks,))


@contextmanager
def _without_process_groups() -> Iterator[None]:
    """While the block runs, torch knows only the process groups that the block makes."""
    c10d = torch.distributed.distributed_c10d
    outer = c10d._world
    # Tables of the process: a new world has the same ones.
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    tables = [getattr(outer, name) for name in names]
    saved = [dict(table) for table in tables]
    count, hook = outer.group_count, sys.excepthook
    with patch.object(c10d, "_world", c10d._World()):
        for table in tables:
            table.clear()
        try:
            yield
        finally:
            for name in list(outer.pg_names.values()):
                c10d._unregister_process_group(name)
            for table, entries in zip(tables, saved, strict=True):
                table.clear()
                table.update(entries)
            outer.group_count, sys.excepthook = count, hook
            c10d._update_default_pg(outer.default_pg)


@contextmanager
def _without_other_ranks() -> Iterator[None]:
    """While the block runs, DDP reads nothing that other ranks would have to send, and no dispatch
    mode sees how DTensor computes shapes.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    # Torch 2.11 computes shapes under the caller's fake mode, where these tensors would be seen and
    # counted.
    shapes = "_propagate_tensor_meta_non_cached"
    unwatched = without_modes()(getattr(ShardingPropagator, shapes))
    with (
        patch.object(ShardingPropagator, shapes, unwatched),
        patch.object(torch.distributed, "Reducer", _Reducer),
        patch("torch.distributed._verify_params_across_processes"),
        patch("torch.nn.parallel.distributed._sync_module_states"),
    ):
        yield
