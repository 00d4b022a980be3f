"""Which storages hold a tensor's bytes.

A storage is the block of bytes behind one or more tensors. Views and tied weights share one, so bytes are counted by storage.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..compat import inner_tensors, sparse_parts, under_transform

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_META = torch.device("meta")
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def tensors_in(values: Iterable) -> Iterator[torch.Tensor]:
    """The tensors in ``values``, and in the lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def storages_of(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    """What holds the bytes of ``tensor``: its storage, or those of the tensors inside it (sparse, DTensor, quantized)."""
    storage = own_storage(tensor)
    if storage is not None:
        return (storage,)
    return [storage for part in _parts(tensor) for storage in storages_of(part)]


def own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of ``tensor``; ``None`` for one that has none of its own, or one with a size and no memory (a wrapper)."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return storage if type(tensor) in _PLAIN or has_memory(storage) else None


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether there is anything behind a storage's size: not in wrappers, nor in the zeros of forward-mode differentiation."""
    try:
        # A fake tensor's storage is on "meta", and is what it is taken for.
        return storage.nbytes() == 0 or storage.device == _META or storage.data_ptr() != 0
    except RuntimeError:
        return False


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors inside a tensor without a storage; nothing for those that hide their memory or have none."""
    under = under_transform(tensor)
    if under is not None:
        return (under,)
    if tensor.layout == torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in _COMPRESSED:
        return [getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]]
    inner = inner_tensors(tensor)
    # A tensor that does not name its parts has them among its attributes; a DTensor names its mesh too, which is no tensor.
    return tensors_in(vars(tensor).values() if inner is None else inner)
