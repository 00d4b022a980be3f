"""The part of ``compat`` that only the course needs: private names of torch, seen in 2.11.0 and
2.13.0.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...compat.transformers_models import checkpointing_name

checkpoint_hook = torch.utils.checkpoint._checkpoint_hook
_aten = torch.ops.aten
cpu_attention = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
# Products that torch's counter ignores, with the position of their first factor; and kernels with
# several products inside.
products_uncounted = {
    _aten.mv: 0,
    _aten.dot: 0,
    _aten.vdot: 0,
    _aten._int_mm: 0,
    _aten.addmv: 1,
    _aten.addbmm: 1,
}
products_inside = [
    getattr(_aten, name)
    for name in (
        "mkldnn_rnn_layer",
        "_cudnn_rnn",
        "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention",
        "_trilinear",
        "_sparse_addmm",
    )
]
# That are watching now, the outermost first.
dispatch_modes: Callable[[], list] = _get_current_dispatch_mode_stack

_GLOBAL_HOOKS = [
    hooks
    for name, hooks in vars(nn.modules.module).items()
    if name.startswith("_global") and isinstance(hooks, dict)
]


def model_from_config(cls, config, **options) -> nn.Module:
    """A model with random weights of the class ``cls`` itself.

    The public way uses the Auto classes.
    """
    return cls._from_config(config, **options)


def global_hooks() -> list[dict]:
    """The hooks that every module calls."""
    return [dict(hooks) for hooks in _GLOBAL_HOOKS]


def restore_global_hooks(before: list[dict]) -> None:
    for hooks, were in zip(_GLOBAL_HOOKS, before, strict=True):
        hooks.clear()
        hooks.update(were)


def saved_tensor_hooks() -> tuple[Callable, Callable] | None:
    """The innermost pair of hooks for tensors that are saved for backward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def restore_saved_tensor_hooks(before: tuple[Callable, Callable] | None) -> None:
    while saved_tensor_hooks() not in (before, None):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if saved_tensor_hooks() != before:
        torch._C._autograd._push_saved_tensors_default_hooks(*before)


def enable_checkpointing(model: nn.Module, kwargs: dict | None = None, **more: Any) -> None:
    """Switch on transformers' checkpoints for ``model``, under the name that the installed version
    uses.
    """
    getattr(model, f"{checkpointing_name(model)}_enable")(kwargs, **more)


# Process groups whose ranks are threads, for checks.


@contextmanager
def groups_of_threads(compare: Callable[[Any, Any], None]) -> Iterator[Any]:
    """While the block runs, each thread makes its own process groups, as a rank does, and these
    meet the groups of the other threads. Existing groups are set aside, and come back afterwards.

    It yields two functions. In ``meet(group, rank, call, data)``, ``call.work`` gets the ``data``
    of all threads. After ``stop(error)``, threads that wait for others leave with ``SystemExit``.
    ``compare(call, call)`` sees the calls that meet.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    groups, hook = threaded.ProcessLocalGroup, sys.excepthook
    begin = groups._start_coll

    def begun(call, group):
        met = begin(call, group)
        compare(met._collective, call)
        return met

    def reduce(self, tensors, options):
        """torch's own class lacks this method."""
        copies = [tensor.clone() for tensor in tensors]
        work = self.allreduce(copies, options)
        if self.rank() == options.rootRank:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        return work

    threaded._install_threaded_pg()
    isolate(True)
    try:
        # Torch 2.11 looks for ``comms`` at the end.
        with (
            patch.multiple(groups, _start_coll=begun, reduce=reduce, create=True),
            patch.object(threaded.ThreadLocalWorld, "comms", [], create=True),
        ):
            yield (
                lambda group, rank, call, data: begun(call, group).join(rank, data),
                groups.exception_handle,
            )
    finally:
        sys.excepthook = hook  # each group has put its rank before what the one before it prints
        groups.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
