"""Process groups whose ranks are threads, for checks. The part of ``compat`` that the course alone needs: private names of
torch, seen in 2.13.0."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


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
