"""Converts GGUF files to Hugging Face folders: weights, configuration, tokenizer and chat template.

transformers reads the file. We call `load_gguf_checkpoint` with a model on the meta device, because
`from_pretrained(gguf_file=…)` needs one more package and marks the model as quantized. Quantized weights become float32;
16-bit weights stay as they are. The result has one weights file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bough.errors import ModelError, UnsupportedModel
from bough.models.files import one_line, quiet_transformers
from bough.models.gguf.contents import Converted, main_type, save_sampling, save_tokenizer
from bough.types import Progress

_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def convert(file: Path, folder: Path, progress: Progress) -> Converted:
    """Write the model in `file` to `folder` as safetensors, with tokenizer and chat template.

    Raises UnsupportedModel if the file cannot be read, the architecture is not known or a weight is missing, and ModelError
    before anything is written if the disk has no room for the result.
    """
    try:
        with quiet_transformers():
            return _convert(file, folder, progress)
    except ModelError:
        raise
    except ImportError as error:
        install = "gguf: pip install gguf" if error.name == "gguf" else "torch: pip install 'bough[torch]'"
        raise UnsupportedModel(f"converting {file.name} needs {install} ({one_line(error)})") from error
    except Exception as error:  # the reader raises anything for a malformed file
        raise UnsupportedModel(f"cannot convert {file.name}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        progress.finish()


def _convert(file: Path, folder: Path, progress: Progress) -> Converted:
    import gguf
    from transformers import AutoTokenizer

    progress.start(f"Converting {file.name}, once", file.stat().st_size)
    reader = gguf.GGUFReader(file)
    quantization = main_type(reader)
    dtype = _PLAIN_TYPES.get(quantization, "float32")
    _require_room(file, folder, _WEIGHT_BYTES[dtype] * sum(int(tensor.n_elements) for tensor in reader.tensors))
    with _counted(progress):
        model = _read_model(file, dtype)
    model.save_pretrained(folder, max_shard_size="1000TB")
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    save_tokenizer(tokenizer, reader, folder)
    save_sampling(reader, folder)
    return Converted(sum(each.numel() for each in model.parameters()), quantization)


def _require_room(file: Path, folder: Path, needed_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ModelError(
            f"converting {file.name} needs about {needed_bytes:,} bytes in {folder.parent}, "
            f"and the disk has {free_bytes:,} bytes free"
        )


def _read_model(file: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, modeling_gguf_pytorch_utils

    auto: Any = AutoModelForCausalLM
    library: Any = modeling_gguf_pytorch_utils
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = auto.from_config(config, dtype=getattr(torch, dtype))
    tensors = library.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(
        {name: each.to(getattr(torch, dtype)) for name, each in tensors.items()}, strict=False, assign=True
    )
    model.tie_weights()
    missing = [name for name, each in model.named_parameters() if each.is_meta]
    if missing:
        num_weights = len(list(model.parameters()))
        raise UnsupportedModel(f"{file.name} lacks {len(missing)} of {num_weights} weights, among them {missing[0]}")
    return model


@contextmanager
def _counted(progress: Progress) -> Iterator[None]:
    """Report each tensor as the library reads it, by replacing the library's progress bar."""
    from transformers import modeling_gguf_pytorch_utils as library

    def count(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        for tensor in tensors:
            yield tensor
            progress.advance(int(tensor.n_bytes))

    with patch.object(library, "tqdm", count, create=True):
        yield
