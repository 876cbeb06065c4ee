"""Every private name of torch that is used, once, each with what is done where it has vanished.

A name that is gone fails nothing at import: it gives a slower way to the same answer, or one clear error at the moment
it is needed. ``tests/test_torch.py`` takes each of them away in turn. What is asked for most is found here; beside it
stand, each for itself, ``compiler``, ``cuda``, ``foreach``, ``hooks``, ``launching`` and ``sharded``.
"""

import torch

from torchhook._torch import releases

releases.check(torch.__version__)  # before anything else of torch is looked for

from torchhook._torch.autograd import (  # noqa: E402
    after_backward,
    current_node,
    ended_tasks,
    graph_task,
    in_dual_level,
    next_sequence_number,
    saved_tensor_hooks,
    sequence_number,
    torch_task,
)
from torchhook._torch.checkpoints import (  # noqa: E402
    around_recomputation,
    bare_segments,
    caller,
    frames,
    innermost_module,
    loses_graph,
    runs_inside_itself,
    segments,
    times_running,
    understands_checkpoints,
    will_run_again,
)
from torchhook._torch.dispatch import dispatch_modes, kept_out, out_of_checkpoints  # noqa: E402
from torchhook._torch.func import (  # noqa: E402
    in_transform,
    is_wrapped,
    unwrapped,
)
from torchhook._torch.functional import (  # noqa: E402
    attention_weights,
    materialized,
    mode_is_on,
    modes_on,
    turn_off,
    turn_on,
    unheard,
)
from torchhook._torch.memory import (  # noqa: E402
    base,
    base_of,
    is_lazy_clone,
    is_only_owner,
    lazy_clone,
    start_of,
    storage_key,
    storage_ref,
    use_count,
    version,
    version_of,
)
from torchhook._torch.values import (  # noqa: E402
    pytree_nodes,
    quantized_per_channel,
    quantized_per_tensor,
    register_pytree_node,
    sparse_parts,
)

__all__ = [
    "after_backward",
    "around_recomputation",
    "attention_weights",
    "bare_segments",
    "base",
    "base_of",
    "caller",
    "current_node",
    "dispatch_modes",
    "ended_tasks",
    "frames",
    "graph_task",
    "in_dual_level",
    "in_transform",
    "innermost_module",
    "is_lazy_clone",
    "is_only_owner",
    "is_wrapped",
    "kept_out",
    "lazy_clone",
    "loses_graph",
    "materialized",
    "mode_is_on",
    "modes_on",
    "next_sequence_number",
    "out_of_checkpoints",
    "pytree_nodes",
    "quantized_per_channel",
    "quantized_per_tensor",
    "register_pytree_node",
    "runs_inside_itself",
    "saved_tensor_hooks",
    "segments",
    "sequence_number",
    "sparse_parts",
    "start_of",
    "storage_key",
    "storage_ref",
    "times_running",
    "torch_task",
    "turn_off",
    "turn_on",
    "understands_checkpoints",
    "unheard",
    "unwrapped",
    "use_count",
    "version",
    "version_of",
    "will_run_again",
]
