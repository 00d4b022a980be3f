"""All that a tracker puts in the place of torch's own functions while it runs.

Everything else is seen by hooks and by a dispatch mode. Each function here says why these are not
enough for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import UntypedStorage, nn

from ..compat.compiled import watch_compiled_calls

Wrap = Callable[[Callable], Callable]


@contextmanager
def patched_torch(
    wrap_call: Wrap,
    wrap_resize: Wrap,
    on_compiled_call: Callable[[str], None],
    *,
    run_eagerly: bool,
) -> Iterator[None]:
    """Put wrappers in the place of torch's functions, until the block ends.

    Args:
        wrap_call: makes what a module's call becomes. Global hooks of modules take twice as long,
            and a hook on the model would be copied and pickled with it.
        wrap_resize: makes what the resize of a storage becomes. It is not dispatched, and FSDP
            frees memory with it.
        on_compiled_call: is called before a compiled function, which no dispatch mode sees inside.
        run_eagerly: compiled functions then run uncompiled.
    """
    with (
        patch.object(nn.Module, "__call__", wrap_call(nn.Module.__call__)),
        patch.object(UntypedStorage, "resize_", wrap_resize(UntypedStorage.resize_)),
        watch_compiled_calls(on_compiled_call, run_eagerly=run_eagerly),
    ):
        yield
