"""How transformers reads a GGUF file, with its slow parts done once: parsing the header, and the map of names.

transformers opens a file anew for the configuration, the weights and the tokenizer, and makes the map of all tensor names
for each module of the model. Both take longer than the weights of a small model. Inside `opened_once` the library gets one
reader and one map for each number of layers. One thread at a time is inside.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_ONE_THREAD = threading.RLock()  # the library's functions are replaced for the whole process


@contextmanager
def opened_once(file: Path) -> Iterator[Any]:
    """Yield a reader of the file, which transformers uses too inside this context. Other files are opened as usual."""
    import gguf

    with _ONE_THREAD:
        open_file = gguf.GGUFReader
        reader = open_file(file)

        def find_reader(path: Any, *options: Any) -> Any:
            return reader if Path(path) == file else open_file(path, *options)

        names = functools.cache(gguf.get_tensor_name_map)
        with patch.object(gguf, "GGUFReader", find_reader), patch.object(gguf, "get_tensor_name_map", names):
            yield reader


@contextmanager
def replaced_values(values_of: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let the library get `values_of(data, type)` in this thread, wherever it asks for the values of a tensor."""
    import gguf

    with _ONE_THREAD:
        unpack, owner = gguf.dequantize, threading.get_ident()

        def dequantize(data: Any, kind: Any) -> Any:
            return (values_of if threading.get_ident() == owner else unpack)(data, kind)

        with patch.object(gguf, "dequantize", dequantize):
            yield


@contextmanager
def counted_tensors(count: Callable[[Any], None]) -> Iterator[None]:
    """Call `count` with each tensor that the library has read, in the place of its progress bar."""
    from transformers import modeling_gguf_pytorch_utils as library

    def read(tensors: Any, **_: Any) -> Iterator[Any]:
        for tensor in tensors:
            yield tensor
            count(tensor)

    with _ONE_THREAD, patch.object(library, "tqdm", read, create=True):
        yield
