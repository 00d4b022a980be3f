"""Modules that make one micro-batch's gradient depend on the other micro-batches, or on how the
batch is cut: they normalize by the rows that they are given, or change in each forward.

``accumulate_gradients`` warns of them, since it cannot see how large the difference is.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..compat.tensors import version


def warn_of_shared_statistics(
    model: nn.Module | None, *, between_ranks: bool, stacklevel: int
) -> None:
    """Warn of a ``BatchNorm`` that is trained: between the micro-batches of one process, or
    ``between_ranks``.
    """
    if model is None:
        return
    rows = "each micro-batch"
    if between_ranks:
        rows = "each micro-batch of each rank"
    for name, module in batch_norms(model):
        # SyncBatchNorm averages over ranks, but not over micro-batches.
        if between_ranks and isinstance(module, nn.SyncBatchNorm):
            continue
        warnings.warn(
            f"{name} is a {type(module).__name__}, which normalizes {rows} by its own rows: "
            "the gradient is not the full batch's. Freeze its statistics (its eval()), or use "
            "GroupNorm or LayerNorm",
            stacklevel=stacklevel,
        )
        return


def batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules, with their names, that normalize by the statistics of a batch."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    found = []
    for name, module in model.named_modules():
        if module.training and isinstance(module, kinds):
            found.append((name, module))
    return found


def _is_instance_norm(module: nn.Module) -> bool:
    """Whether ``module`` normalizes each row by itself in training. The running statistics that it
    may keep are read in evaluation only.
    """
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    return module.training and isinstance(module, kinds)


@contextmanager
def warning_of_changed_buffers(model: nn.Module | None, stacklevel: int) -> Iterator[None]:
    """Around a forward in training: warns of the first module whose buffers it has changed.

    It looks at their version counters, which takes no bytes.
    """
    # Weakly: a buffer that is replaced must not stay in memory.
    before: list[tuple[str, str, weakref.ref[Tensor], int]] = []
    if model is not None:
        have_a_warning = dict(batch_norms(model))
        for name, module in model.named_modules():
            if name in have_a_warning or _is_instance_norm(module):
                continue
            for buffer_name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    before.append((name, buffer_name, weakref.ref(buffer), version(buffer)))
    yield
    for name, buffer_name, reference, version_before in before:
        module = model.get_submodule(name)
        buffer = getattr(module, buffer_name)
        if reference() is buffer and version(buffer) == version_before:
            continue
        path = f"model.get_submodule({name!r})" if name else "model"
        warnings.warn(
            f"before a window, run one forward in training, and call {path}.eval(); call its "
            f"train() after the window. Each forward in training changes a buffer of "
            f"{name or 'the model'} ({type(module).__name__}): {buffer_name}. If the loss depends "
            "on it, as with a spectral norm, each micro-batch is computed with other numbers",
            stacklevel=stacklevel,
        )
        return
