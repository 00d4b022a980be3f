"""Dispatch modes, which see every operation of their thread: trackers and fake tensors are such
modes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

# The number of dispatch modes that are active in this thread.
num_active_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The dispatch mode of this thread that sees operations first.
innermost_mode: Callable[[], Any] = _get_current_dispatch_mode
# While this context is open, no dispatch mode (a tracker, fake tensors) sees the operations.
without_modes = _disable_current_modes


class WithoutDynamoGuard:
    """A mixin for dispatch modes without Dynamo's guard against compilation.

    The guard takes longer than a fake operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
