"""Converts GGUF files to Hugging Face folders: weights, configuration, tokenizer and chat template.

transformers reads the file. We call `load_gguf_checkpoint` with a model on the meta device, because
`from_pretrained(gguf_file=…)` needs one more package and marks the model as quantized. Quantized weights become float32;
16-bit weights stay as they are. The result has one weights file, and beside it the GGUF file with the table of its rows
(see weights.packed): an engine may use either.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bough.errors import ModelError, UnsupportedModel
from bough.models.files import GGUF_FILE, link_or_copy, one_line, quiet_transformers
from bough.models.gguf.contents import Converted, main_type, save_sampling, save_tokenizer
from bough.models.gguf.reading import counted_tensors, opened_once
from bough.models.weights.packed import write_packed
from bough.system.distribution import install_command
from bough.types import Progress

_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def convert(file: Path, folder: Path, progress: Progress) -> Converted:
    """Write the model in `file` to `folder` as safetensors and as packed rows, with tokenizer and chat template.

    Raises UnsupportedModel if the file cannot be read, the architecture is not known or a weight is missing, and ModelError
    before anything is written if the disk has no room for the result.
    """
    with _told(f"Converting {file.name}, once", file, progress):
        return _convert(file, folder, progress)


def add_packed(file: Path, model_folder: Path, folder: Path, progress: Progress) -> None:
    """Write the GGUF file and the table of its rows to `folder`, for the model that was converted from it before.

    The model is read from `model_folder`. Raises UnsupportedModel if one of them cannot be read.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with _told(f"Finding the weights of {file.name}, once", file, progress), opened_once(file) as reader:
        _write_packed(file, reader, auto.from_pretrained(model_folder, dtype="auto"), folder, progress.advance)


@contextmanager
def _told(label: str, file: Path, progress: Progress) -> Iterator[None]:
    """Report the progress of work on a file, and turn every error into one of ours."""
    try:
        with quiet_transformers():
            progress.start(label, file.stat().st_size)
            yield
    except ModelError:
        raise
    except ImportError as error:
        install = "gguf: pip install gguf" if error.name == "gguf" else f"torch: {install_command('torch')}"
        raise UnsupportedModel(f"converting {file.name} needs {install} ({one_line(error)})") from error
    except Exception as error:  # the reader raises anything for a malformed file
        raise UnsupportedModel(f"cannot convert {file.name}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        progress.finish()


def _convert(file: Path, folder: Path, progress: Progress) -> Converted:
    from transformers import AutoTokenizer

    with opened_once(file) as reader:
        quantization = main_type(reader)
        dtype = _PLAIN_TYPES.get(quantization, "float32")
        _require_room(file, folder, _WEIGHT_BYTES[dtype] * sum(int(tensor.n_elements) for tensor in reader.tensors))
        with counted_tensors(lambda tensor: progress.advance(int(tensor.n_bytes) // 2)):
            model = _read_model(file, dtype)
        model.save_pretrained(folder, max_shard_size="1000TB")
        for weights in folder.glob("*.safetensors"):
            weights.chmod(0o644)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        save_tokenizer(tokenizer, reader, folder)
        save_sampling(reader, folder)
        _write_packed(file, reader, model, folder, lambda num_bytes: progress.advance(num_bytes // 2))
    return Converted(sum(each.numel() for each in model.parameters()), quantization)


def _write_packed(file: Path, reader: Any, model: Any, folder: Path, count: Callable[[int], None]) -> None:
    from bough.models.gguf.rows import find_packed  # numpy, which reading a table does not need

    tensors = find_packed(file, reader, model, count)
    (folder / GGUF_FILE).unlink(missing_ok=True)  # of an interrupted run
    link_or_copy(file, folder / GGUF_FILE)
    write_packed(folder, tensors)


def _require_room(file: Path, folder: Path, needed_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if file.stat().st_dev != folder.stat().st_dev:
        needed_bytes += file.stat().st_size  # it is copied
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
