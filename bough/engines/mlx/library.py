"""mlx-lm for this engine: every file of the engine imports the library from here.

Importing it lowers the number of files that the whole process may open, for good where the process has no privileges: a
server needs them for its clients and its pages. So that one call is kept from having an effect while the import runs.

On CUDA MLX would multiply float32 in ten bits, in which cached and uncached answers drift apart: it is told not to.
"""

from __future__ import annotations

import os
import resource
from typing import Any
from unittest.mock import patch

os.environ.setdefault("MLX_ENABLE_TF32", "0")

with patch.object(resource, "setrlimit", lambda *_: None):
    import mlx.nn
    import mlx_lm
    from mlx_lm import utils
    from mlx_lm.models import base, cache, falcon_h1, gpt_oss, llama, mamba2, rope_utils

nn: Any = mlx.nn  # which is not typed
VERSION: str = mlx_lm.__version__

__all__ = ["VERSION", "base", "cache", "falcon_h1", "gpt_oss", "llama", "mamba2", "mlx_lm", "nn", "rope_utils", "utils"]
