"""Which file of a GGUF repository is meant: the one with a quantization, or the usual one.

Such a repository has one file for each quantization, with its name at the end: `Model-Q4_K_M.gguf`. A large one may
be split into parts, `Model-Q8_0-00001-of-00003.gguf`, which cannot be read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from bough.errors import ModelNotFound, UnsupportedModel

_USUAL = ("Q4_K_M", "Q4_0", "Q8_0", "Q5_K_M", "Q6_K", "Q4_K_S", "Q5_K_S", "Q5_0", "Q4_1", "Q5_1", "Q3_K_M")
_AFTER_USUAL = ("F16", "BF16", "F32")
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|FP16|F32))$", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")  # other files that such repositories have


def choose_file(repository: str, files: Iterable[str], tag: str = "") -> str:
    """The file with the quantization `tag`, or whose own name is `tag`; without a tag, the usual quantization.

    Raises ModelNotFound, which lists the quantizations that there are, or UnsupportedModel if the file is split.
    """
    models = [file for file in files if file.endswith(".gguf") and not _stem(file).lower().startswith(_NO_MODELS)]
    if not models:
        raise ModelNotFound(f"{repository} has no GGUF file")
    whole = {file: quantization_of(file) for file in models if not _PART.search(_stem(file))}
    if not tag:
        return _choose_usual(repository, whole, models)
    for file, quantization in whole.items():
        if tag.lower() in (quantization.lower(), PurePosixPath(file).name.lower()):
            return file
    split = [file for file in models if quantization_of(file).lower() == tag.lower()]
    if split:
        raise UnsupportedModel(
            f"{tag} of {repository} is split into {len(split)} files, which cannot be read; {_list(whole.values())}"
        )
    raise ModelNotFound(f"{repository} has no file with the quantization {tag}; {_list(whole.values())}")


def quantization_of(file: str) -> str:
    """The quantization in a file's name, in capitals; empty if it has none."""
    found = _QUANTIZATION.search(_PART.sub("", _stem(file)))
    return found[1].upper() if found else ""


def _choose_usual(repository: str, whole: dict[str, str], models: list[str]) -> str:
    if not whole:
        raise UnsupportedModel(
            f"the {len(models)} GGUF files of {repository} are parts of split ones, which cannot be read"
        )
    others = sorted(set(whole.values()) - {*_USUAL, *_AFTER_USUAL})
    order = (*_USUAL, *others, *_AFTER_USUAL)
    return min(whole, key=lambda file: (order.index(whole[file]), file))


def _list(quantizations: Iterable[str]) -> str:
    found = ", ".join(sorted({each for each in quantizations if each}))
    return f"there are {found}" if found else "none of its files has one in its name"


def _stem(file: str) -> str:
    return PurePosixPath(file).stem
