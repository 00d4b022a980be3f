"""Offloading: tensors that autograd saves for backward are moved to files or to the host's memory.

On the CPU they are moved to files, from a card to the host, and backward reloads them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdRef

from ..compat.autograd import next_sequence_nr, saved_by_checkpoint
from ..compat.tensors import base_of, is_zero_tensor, storage_key, version
from ..measure.storages import own_storage, storages_of
from ..names import OFFLOAD, check_choice

# fully_shard moves the shards
ACTIVATION_OFFLOADS = tuple(name for name, row in OFFLOAD.items() if not row.shards)


class offload_activations(saved_tensors_hooks):
    """``with offload_activations(model=model) as moved:`` around a forward moves the tensors that
    autograd saves, until backward.

    On the CPU, tensors are moved to files: one file for each storage, of equally many bytes. On a
    card, they are moved to the host's pinned memory, by copies on the computing stream. A tensor
    that is later changed in place is reloaded unchanged.

    Args:
        folder: the folder in which the files get their own folder. ``None``: the system's folder
            for temporary files. A file is deleted with its graph, and the folder with its last
            file. ``.close()`` and an exception in the block delete both.
        model: its parameters and buffers are not moved. Without a model, no ``nn.Parameter`` is
            moved.
        what: ``"activations"`` or ``"boundaries"`` (``OFFLOAD``).

    Attributes: ``bytes`` moved so far, and ``tensors``, the number of storages that were moved,
    each of them once. Backward reloads a storage each time that it needs it, and raises
    ``RuntimeError`` if its file is gone.
    """

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        *,
        model: nn.Module | None = None,
        what: str = "activations",
    ):
        check_choice("what", what, ACTIVATION_OFFLOADS)
        super().__init__(self._pack, _unpack)
        self.bytes = self.tensors = 0
        self._parent_folder, self._model, self._what = folder, model, what
        self._folder: Path | None = None
        self._offloaded: dict[int, weakref.ref[_OffloadedStorage]] = {}  # by storage
        self._excluded: set[int] = set()
        self._operation = -1  # the number of the one that saves now
        self._unfinished: list[_OffloadedStorage] = []

    def __enter__(self) -> offload_activations:
        self._excluded = set()
        if self._model is not None:
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                self._excluded |= {storage_key(storage) for storage in storages_of(tensor)}
        super().__enter__()
        return self

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._finish()
        if error[0] is not None:
            self.close()

    def close(self) -> None:
        """Delete the files that are left. A backward that needs them then raises an error."""
        self._offloaded.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _pack(self, tensor: Tensor) -> tuple:
        if not self._should_offload(tensor):
            # Detached, since with its graph it would keep itself alive.
            return None, (tensor if tensor.is_leaf else tensor.detach(), version(tensor))
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if self._operation != next_sequence_nr():
            self._finish()
            self._operation = next_sequence_nr()
        offloaded = self._offloaded.get(key, lambda: None)()
        if offloaded is None or not offloaded.is_copy_of(tensor):
            offloaded = _OffloadedStorage(tensor, self._path)
            self._unfinished.append(offloaded)
            if tensor.requires_grad:
                offloaded.finish()
            self._offloaded[key] = weakref.ref(offloaded)
            self.bytes, self.tensors = self.bytes + storage.nbytes(), self.tensors + 1
        return offloaded, (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _finish(self) -> None:
        """Write what the last operation has saved. Some fill it after that, as RReLU does with its
        random numbers, so a tensor without a gradient waits for the next operation.
        """
        for offloaded in self._unfinished:
            offloaded.finish()
        self._unfinished.clear()

    def _should_offload(self, tensor: Tensor) -> bool:
        if not OFFLOAD[self._what].all_saved and not saved_by_checkpoint():
            return False
        if isinstance(base_of(tensor), nn.Parameter):
            return False
        storage = own_storage(tensor) if tensor.layout == torch.strided else None
        if storage is None or not storage.nbytes() or storage_key(storage) in self._excluded:
            return False
        if tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor):  # not as it is stored
            return False
        return not tensor.is_quantized

    def _path(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gradmem-", dir=self._parent_folder))
        self._folder.mkdir(mode=0o700, exist_ok=True)  # it may have been deleted with its last file
        return self._folder / str(self.tensors)


def _unpack(packed: tuple) -> Tensor:
    offloaded, geometry = packed
    if offloaded is not None:
        return offloaded.tensor(*geometry)
    tensor, before = geometry
    if version(tensor) != before:  # autograd does not check this where hooks are used
        raise RuntimeError(
            f"a {tensor.dtype} tensor of shape {(*tensor.shape,)}, which stayed in memory for this "
            "backward, has been changed in place since the forward: run backward first, or change "
            "a copy"
        )
    return tensor


class _OffloadedStorage:
    """A storage's bytes in a file, or in the host's memory."""

    def __init__(self, tensor: Tensor, new_path: Callable[[], Path]):
        storage = tensor.untyped_storage()
        self._base, self._version = weakref.ref(base_of(tensor)), version(tensor)
        self._unwritten: Tensor | None = tensor.detach()
        self._nbytes, self._device = storage.nbytes(), tensor.device
        self._host: Tensor | None = None
        self._reloaded: Any = lambda: None  # a weak reference to the storage that was reloaded
        self._version_probe: Tensor  # an empty tensor that shares the version counter
        self._fake = storage.device.type == "meta"
        if self._device.type != "cpu":
            self._host = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        elif not self._fake:
            self._path = new_path()
            # first, so that an interrupt leaves no file
            weakref.finalize(self, _remove, self._path)

    def finish(self) -> None:
        if self._unwritten is None:
            return
        storage, self._unwritten = self._unwritten.untyped_storage(), None
        if self._host is not None:
            device_bytes = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            self._host.copy_(device_bytes, non_blocking=True)
        elif not self._fake:  # without a torch operation, which trackers would count
            self._path.write_bytes((ctypes.c_char * self._nbytes).from_address(storage.data_ptr()))

    def is_copy_of(self, tensor: Tensor) -> bool:
        # Chunks of one storage may each count their own changes, as in a GRU: so the base tensor
        # has to be the same too.
        return self._base() is base_of(tensor) and self._version == version(tensor)

    def tensor(self, dtype: torch.dtype, *geometry) -> Tensor:
        """The saved tensor of this dtype, offset, shape and stride.

        Tensors of one storage share a reloaded copy until it is changed in place.
        """
        # so that a tracker counts it as an activation, like one that is recomputed
        with torch.enable_grad():
            storage = self._reload()
            # A tensor made by detach() shares the probe's version counter. A change of it in place
            # is then seen at the probe.
            tensor = self._version_probe.detach()
            empty = torch.empty(0, dtype=dtype, device=self._device)
            tensor.data = empty.set_(storage, *geometry)
            return tensor

    def _reload(self) -> torch.UntypedStorage:
        """The storage's bytes, in memory again: the copy of before, if one is alive unchanged."""
        self.finish()
        storage = self._reloaded()
        if storage is not None and not version(self._version_probe):
            return storage
        flat = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._fill(flat.data)
        storage = flat.untyped_storage()
        self._version_probe = flat.detach()
        self._version_probe.data = flat.new_empty(0)  # it must not keep the bytes alive
        # Weakly, and the storage: autograd makes new tensors of it.
        self._reloaded = WeakIdRef(storage)
        return storage

    def _fill(self, flat: Tensor) -> None:
        if self._host is not None:
            flat.copy_(self._host, non_blocking=True)
        elif not self._fake:
            try:
                with open(self._path, "rb") as file:
                    file.readinto(flat.numpy())
            except FileNotFoundError as error:
                raise RuntimeError(
                    "what this backward needs was moved to a file that is gone: the block of "
                    "offload_activations ended with an exception, or was closed. Run the forward "
                    "again"
                ) from error


def _remove(path: Path) -> None:
    with suppress(OSError):  # the folder has other files, or file and folder are gone already
        path.unlink()
        path.parent.rmdir()
