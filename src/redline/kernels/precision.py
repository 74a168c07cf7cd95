"""Names of compute precisions."""

from __future__ import annotations

import torch

# in fp8 the matmuls alone are in eight bits
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}
