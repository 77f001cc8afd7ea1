"""Lets transformers read a GGUF file through Bough's own header.

transformers opens a file with the package gguf, whose reader is slow, maps the file and knows nothing of split files. It
does so anew for the configuration, the weights and the tokenizer, and makes the map of all tensor names for each module of
the model. Inside `opened_once` the library gets our header instead, and one map for each number of layers. The values of a
weight are what the caller's function returns. One thread at a time is inside.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from bough.errors import ModelError, UnsupportedModel
from bough.models.files import one_line, quiet_transformers
from bough.models.weights.gguf_header import GgufModel, GgufTensor
from bough.system.distribution import install_command
from bough.types import Progress

_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_ONE_THREAD = threading.RLock()  # the library's functions are replaced for the whole process

ValuesOf = Callable[[GgufTensor], Any]
"""Returns the values of a weight as an array of numpy."""


class RowsNotFound(Exception):
    """A weight of the model is neither rows of the file nor small, or is not in the file at all."""


class _Field:
    """A value of the header as the library takes it, but already parsed. A list is one part, so that it is not copied."""

    types: tuple[int, ...] = ()
    data = (0,)

    def __init__(self, value: Any) -> None:
        is_single = isinstance(value, list) and len(value) == 1  # which the library takes for a number
        self.parts = value if is_single else [value]


@contextmanager
def report_reading(label: str, file: Path, progress: Progress) -> Iterator[None]:
    """Report work on a file, and turn every error of a library into one of Bough's."""
    try:
        with quiet_transformers():
            progress.start(label, None)
            yield
    except (ModelError, RowsNotFound):
        raise
    except ImportError as error:
        install = "gguf: pip install gguf" if error.name == "gguf" else f"torch: {install_command('torch')}"
        raise UnsupportedModel(f"{file.name} needs {install} ({one_line(error)})") from error
    except Exception as error:  # the library raises anything for a malformed file
        raise UnsupportedModel(f"cannot read {file.name}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        progress.finish()


def make_empty_model(model: GgufModel) -> Any:
    """The transformers model of the file on the meta device, with the type of most of its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    dtype = getattr(torch, _PLAIN_TYPES.get(model.header.main_type, "float32"))
    with opened_once(model) as file:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        return auto.from_config(config, dtype=dtype)


def read_weights(model: GgufModel, empty: Any, values_of: ValuesOf | None = None) -> dict[str, Any]:
    """The weights of `empty` that the library makes of the file, by name, as tensors of torch."""
    from transformers import modeling_gguf_pytorch_utils

    library: Any = modeling_gguf_pytorch_utils
    with opened_once(model, values_of) as file:
        found: dict[str, Any] = library.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=empty)["tensors"]
    return found


@contextmanager
def opened_once(model: GgufModel, values_of: ValuesOf | None = None) -> Iterator[Path]:
    """Let transformers read this model through our header inside this context. Other files are read as usual.

    Yields a link to the model's first file in a folder of its own: the library would take other files in the folder for
    the model's tokenizer. Without `values_of`, weights have their own values.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    library: Any = modeling_gguf_pytorch_utils
    values_of = values_of or functools.partial(unpack_tensor, model)

    with _ONE_THREAD, TemporaryDirectory() as folder:
        link = Path(folder) / model.file.name
        link.symlink_to(model.file.resolve())
        open_file, unpack, parse = gguf.GGUFReader, gguf.dequantize, library._gguf_parse_value
        reader = SimpleNamespace(
            fields={name: _Field(value) for name, value in model.header.values.items()},
            tensors=[
                SimpleNamespace(name=each.name, tensor_type=each.type, data=functools.partial(values_of, each))
                for each in model.header.tensors
            ],
        )

        def find_reader(path: Any, *options: Any) -> Any:
            return reader if Path(path) == link else open_file(path, *options)

        def find_values(data: Any, kind: Any) -> Any:
            return data() if isinstance(data, functools.partial) else unpack(data, kind)

        def find_value(value: Any, types: Any) -> Any:
            return parse(value, types) if types else value

        names = functools.cache(gguf.get_tensor_name_map)
        with (
            _own_metadata(model, link),
            patch.object(gguf, "GGUFReader", find_reader),
            patch.object(gguf, "dequantize", find_values),
            patch.object(gguf, "get_tensor_name_map", names),
            patch.object(library, "_gguf_parse_value", find_value),
            patch.object(library, "tqdm", lambda tensors, **_: tensors, create=True),
        ):
            yield link


@contextmanager
def _own_metadata(model: GgufModel, link: Path) -> Iterator[None]:
    """Replace the second reader that newer versions of transformers have, for configurations and tokenizers."""
    package: Any = importlib.import_module("transformers.integrations.gguf")
    read = getattr(package, "read_gguf_metadata", None)
    if read is None:
        yield
        return
    reader: Any = importlib.import_module("transformers.integrations.gguf.reader")

    def find_metadata(path: Any, string_arrays: Any = ()) -> Any:
        if Path(path) != link:
            return read(path, string_arrays)
        values = {name: _as_read(value, name in string_arrays) for name, value in model.header.values.items()}
        return values, tuple(tensor.name for tensor in model.header.tensors)

    with (
        patch.object(package, "read_gguf_metadata", find_metadata),
        patch.object(reader, "read_gguf_metadata", find_metadata),
    ):
        yield


def _as_read(value: Any, is_wanted: bool) -> Any:
    """A value as that reader gives it: a list of texts that are not wanted is its length."""
    is_texts = isinstance(value, list) and bool(value) and isinstance(value[0], str)
    return len(value) if is_texts and not is_wanted else value


def unpack_tensor(model: GgufModel, tensor: GgufTensor) -> Any:
    """The values of a weight in float32. Raises UnsupportedModel if the file is shorter than its header said."""
    import gguf
    import numpy as np

    data = np.frombuffer(read_bytes(model.files[tensor.file], tensor.offset, tensor.num_bytes), np.uint8)
    kind = gguf.GGMLQuantizationType[tensor.type]
    return gguf.dequantize(data.reshape(*tensor.shape[:-1], -1), kind).astype(np.float32, copy=False).reshape(tensor.shape)


def read_bytes(path: Path, offset: int, num_bytes: int) -> bytes:
    """Bytes of a file. Raises UnsupportedModel if it ends before."""
    with path.open("rb") as stream:
        stream.seek(offset)
        found = stream.read(num_bytes)
    if len(found) < num_bytes:
        raise UnsupportedModel(
            f"{path} ends at byte {offset + len(found):,}, and bytes up to {offset + num_bytes:,} are needed"
        )
    return found
