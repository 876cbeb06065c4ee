"""A compiled kernel of Triton without the way that leads to it.

To find the kernel for its arguments, Triton takes twice as long as to launch it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

trusted = [True]
"""Whether it was right so far: whoever tries it on a small tensor says where it is not."""

Launch = Callable[[int, int, int, int], None]
"""Takes the number of programs and the addresses of three tensors."""


def launcher(compiled: Any, device: int | None, arguments: tuple[Any, ...]) -> Launch | None:
    """Launches what a call of a kernel returned, with the same arguments behind the three tensors; ``None`` where
    this Triton has no such thing.

    Whoever uses it sees that the addresses are as well aligned as those of the call: it was compiled for those.
    """
    if not trusted[0] or torch.version.hip is not None:  # where kernels are compiled for sizes of memory, too
        return None
    try:
        from triton.runtime import driver

        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        stream = driver.active.get_current_stream
    except Exception:  # not there, or not as it was
        return None

    def launch(programs: int, one: int, two: int, three: int) -> None:
        # As its own call does it; without the hooks of its profiler.
        run(programs, 1, 1, stream(device), function, metadata, None, None, None, one, two, three, *arguments)

    return launch
