"""Modules that make one micro-batch's gradient depend on the other micro-batches, or on how the
batch is cut: they normalize by the rows that they are given, or change in each forward.

``accumulate_gradients`` warns of them, since it cannot see how large the difference is.
"""

import warnings
import weakref

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


class ChangedBuffers:
    """Notices buffers that a forward in training has changed.

    It looks at their version counters, which takes no bytes. Make one before a forward, and call
    ``warn()`` after it.
    """

    def __init__(self, model: nn.Module | None):
        self.model = model
        # The names of module and buffer, the buffer, and its version. Weakly: a buffer that is
        # replaced must not stay in memory.
        self.before: list[tuple[str, str, weakref.ref[Tensor], int]] = []
        if model is None:
            return
        have_a_warning = dict(batch_norms(model))
        for name, module in model.named_modules():
            if name in have_a_warning or _is_instance_norm(module):
                continue
            for buffer_name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    row = (name, buffer_name, weakref.ref(buffer), version(buffer))
                    self.before.append(row)

    def warn(self, stacklevel: int) -> None:
        """Warn of the first module whose buffers have changed."""
        changed: dict[str, list[str]] = {}
        for name, buffer_name, reference, version_before in self.before:
            buffer = getattr(self.model.get_submodule(name), buffer_name)
            if reference() is not buffer or version(buffer) != version_before:
                changed.setdefault(name, []).append(buffer_name)
        if not changed:
            return
        name, buffers = next(iter(changed.items()))
        kind = type(self.model.get_submodule(name)).__name__
        module = f"model.get_submodule({name!r})" if name else "model"
        warnings.warn(
            f"before a window, run one forward in training, and call {module}.eval(); call its "
            "train() after the window. Each forward in training changes buffers "
            f"of {name or 'the model'} ({kind}): {', '.join(buffers)}. If the loss depends on "
            "them, as with a spectral norm, each micro-batch is computed with other numbers",
            stacklevel=stacklevel,
        )
