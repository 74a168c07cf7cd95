"""What kind of work a kernel, or on a CPU an operator, does: by its name."""

from __future__ import annotations

import re

MATMUL, ATTENTION, MEMORY, OPTIMIZER = "matmul", "attention", "memory-bound", "optimizer"
COMMUNICATION, COPIES, IDLE = "communication", "copies", "idle"
CLASSES = (MATMUL, ATTENTION, MEMORY, OPTIMIZER, COMMUNICATION, COPIES, IDLE)

UPDATE = "redline.update"  # the range that the optimizer's work lies in

# The first that is found in a name, in lower case. Attention before matmul: cuDNN's has "gemm" in some of its names.
_KINDS = (
    (COMMUNICATION, r"nccl|gloo|all_?reduce|all_?gather|reduce_?scatter|broadcast_"),
    (COPIES, r"^memcpy|^memset|aten::copy_$|aten::_to_copy|pin_memory"),
    (ATTENTION, r"sdpa|fmha|flash|flex_attention|attention|own_block"),
    (MATMUL, r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(add)?(mm|bmm)|baddbmm|_scaled_mm|mkldnn.*linear"),
)


def kind_of(name: str) -> str:
    """What is none of the others moves memory: norms, activations, losses, sums."""
    lowered = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lowered)), MEMORY)
