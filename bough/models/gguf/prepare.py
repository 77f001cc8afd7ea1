"""Makes the model folder of a GGUF file for the torch engine, which uses the file as it is where it can.

The folder has what transformers needs beside the weights, all of it small and from the header: configuration, tokenizer,
chat template, sampling defaults. `packed.json` says where the rows of each weight are in the file, and
`floats.safetensors` has the small weights that are no rows of it. No large weight is read, and none is written.

Some architectures transform their weights on the way from the file to the transformers model, and some mix types in one
weight: such a file is converted to safetensors instead. Quantized weights become float32; 16-bit weights stay as they are.
`from_pretrained(gguf_file=…)` is not used because it needs one more package and marks the model as quantized.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bough.errors import ModelError, UnsupportedModel
from bough.models.files import FLOATS_FILE, one_line
from bough.models.gguf.folder import MadeModel, describe_type, save_sampling, save_tokenizer
from bough.models.gguf.reading import RowsNotFound, make_empty_model, opened_once, read_weights, report_reading
from bough.models.gguf.rotation import add_scaling
from bough.models.weights.gguf_header import GgufModel
from bough.models.weights.packed import GgufPart, write_packed
from bough.types import Progress


def prepare(model: GgufModel, parts: Sequence[GgufPart], folder: Path, progress: Progress) -> MadeModel:
    """Write the folder of a model. `parts` are its files as the table is to name them, with their hashes.

    Raises UnsupportedModel if the file cannot be read, or its architecture is not known, and RowsNotFound if its weights
    are no rows of the file: then it must be converted.
    """
    from safetensors.numpy import save_file

    from bough.models.gguf.row_table import map_weights  # numpy, which other commands do not need

    with report_reading(f"Reading {model.file.name}", model.file, progress):
        empty = make_empty_model(model)
        add_scaling(empty.config, model)
        try:
            mapped = map_weights(model, empty)
        except (RowsNotFound, ModelError):
            raise
        except Exception as error:  # such as a reshape to the full width of what has one column
            raise RowsNotFound(f"{type(error).__name__}: {one_line(error)}") from error
        folder.mkdir(parents=True, exist_ok=True)
        _save_small_files(model, empty, folder)
        save_file(dict(mapped.floats), folder / FLOATS_FILE)
        (folder / FLOATS_FILE).chmod(0o644)
        write_packed(folder, parts, mapped.rows)
    return MadeModel(sum(each.numel() for each in empty.parameters()), describe_type(model.header), is_packed=True)


def import_library() -> None:
    """Import what `prepare` needs while a file is hashed. A missing package is reported by `prepare`."""
    with suppress(ImportError):
        import gguf  # noqa: F401
        from transformers import (  # noqa: F401
            AutoModelForCausalLM,
            AutoTokenizer,
            modeling_gguf_pytorch_utils,
            modeling_utils,
        )


def convert(model: GgufModel, folder: Path, progress: Progress, reason: str) -> MadeModel:
    """Write the model to `folder` as safetensors, with tokenizer and chat template, and the reason for it.

    Raises UnsupportedModel if the file cannot be read, the architecture is not known or a weight is missing, and ModelError
    before anything is written if the disk has no room for the result.
    """
    with report_reading(f"Converting {model.file.name}, once", model.file, progress):
        empty = make_empty_model(model)
        add_scaling(empty.config, model)
        _require_room(model, folder, empty.dtype.itemsize * model.header.num_parameters)
        filled = fill(model, empty)
        filled.save_pretrained(folder, max_shard_size="1000TB")
        for weights in folder.glob("*.safetensors"):
            weights.chmod(0o644)
        _save_small_files(model, filled, folder)
        write_packed(folder, [], {}, reason)
    return MadeModel(sum(each.numel() for each in filled.parameters()), describe_type(model.header))


def fill(model: GgufModel, empty: Any) -> Any:
    """Give the model its weights, as transformers reads them from the file. Raises UnsupportedModel if one is missing."""
    found = read_weights(model, empty)
    empty.load_state_dict({name: each.to(empty.dtype) for name, each in found.items()}, strict=False, assign=True)
    empty.tie_weights()
    missing = [name for name, each in empty.named_parameters() if each.is_meta]
    if missing:
        num_weights = len(list(empty.parameters()))
        raise UnsupportedModel(f"{model.file.name} lacks {len(missing)} of {num_weights} weights, among them {missing[0]}")
    return empty


def _require_room(model: GgufModel, folder: Path, needed_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ModelError(
            f"converting {model.file.name} needs about {needed_bytes:,} bytes in {folder.parent}, "
            f"and the disk has {free_bytes:,} bytes free"
        )


def _save_small_files(model: GgufModel, empty: Any, folder: Path) -> None:
    """Write configuration, tokenizer, template and sampling defaults."""
    from transformers import AutoTokenizer

    empty.config.architectures = [type(empty).__name__]
    empty.config.save_pretrained(folder)
    if getattr(empty, "generation_config", None) is not None:
        empty.generation_config.save_pretrained(folder)
    with opened_once(model) as file:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    save_tokenizer(tokenizer, model.header, folder)
    save_sampling(model.header, folder)
