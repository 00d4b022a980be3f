"""Numbers that are the same for every answer, and how what they lead to is shown."""

import torch

from ....compat.dispatch_modes import TorchDispatchMode
from ....units import format_bytes


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """The same normal numbers for every answer, whatever that has drawn."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_of(t: torch.Tensor) -> torch.Tensor | str:
    return "no gradient" if t.grad is None else t.grad.clone()


class OperationLog(TorchDispatchMode):
    """Names of the operations that are dispatched, with a space before each."""

    names = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += f" {func}"
        return func(*args, **(kwargs or {}))

    def collectives(self, word: str) -> int:
        """How many calls between ranks have ``word``, such as "allgather", in their name."""
        names = self.names.replace("_", "").split()
        return sum("c10d" in name and word in name for name in names)


def largest_first(held: dict[str, int]) -> str:
    """The bytes of a peak, "activations 2.30 GiB, parameters 1.00 GiB", but no part below half a
    percent.
    """
    parts = []
    for name, nbytes in sorted(held.items(), key=lambda part: -part[1]):
        if nbytes >= 0.005 * sum(held.values()):
            parts.append(f"{name} {format_bytes(nbytes)}")
    return ", ".join(parts)
