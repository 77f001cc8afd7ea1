"""The local model folder: one directory per model, each with a `bough.json` that says where it came from.

A model's name is the name of its directory, with `org--name` for `org/name` and `name@tag` for `name:tag`. `name` and
`name:latest` are the same model, and so are `huggingface.co/org/name:q4_0` and `hf.co/org/name:Q4_0`. An alias is a file
`.alias-NAME` (see aliases). If there is a directory of the same name, only the overlay of the alias counts.

Always true:
- every directory with a `bough.json` and no leading dot is a complete model: it is made elsewhere, synced, then renamed;
- a `.replaced-` directory is complete too: the next access restores it if a process died before the new model was there;
- one process at a time makes or removes a given model; others wait for it;
- unfinished files of a killed process (`.making-`, `.removed-`, `.writing-`) are deleted by the next process that makes or
  loads a model, under the lock that their owner would hold; the next run continues from parts of a download;
- removing a model that has aliases gives its directory to one of them: at every moment each alias leads to its weights;
- no name leads out of the folder, and every OSError becomes a ModelError.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from bough.errors import ModelNotFound, RequestError, UnsupportedModel
from bough.models.aliases import WRITING, Alias, Overlay, read_alias, write_alias
from bough.models.files import ModelFiles, read_json, sync_file, translate_os_errors

RECORD_FILE = "bough.json"
_FORMAT = 1
_COMMIT_FILE = ".left-by"
_REPLACED = ".replaced-"
_ALIAS = ".alias-"
_MAKING = ".making-"
_REMOVED = ".removed-"
_LOCK = ".lock-"
_ALIASES_LOCK = f"{_LOCK}.aliases"  # no model has such a name
_SHOWN_NAMES = 10
_LONGEST_NAME = 200  # the file name gets a prefix, and most file systems allow 255 characters
HUB = "hf.co/"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(hf\.co/(?=.*/))?{_WORD}(/{_WORD})?(:{_WORD})?")


def plain_name(name: str) -> str:
    """The name without `:latest`, and a name on the hub in one spelling. Raises ModelNotFound for a path or the like."""
    plain = _spell_hub_name(name.removesuffix(":latest"))
    if len(plain) > _LONGEST_NAME:
        raise ModelNotFound(
            f"{name[:20]!r}… is not a model name: it has {len(plain)} characters, more than {_LONGEST_NAME}"
        )
    if not _NAME.fullmatch(plain) or "--" in plain:
        raise ModelNotFound(
            f"{name!r} is not a model name: letters, digits, '.', '_' and '-', with at most one '/' between, and a ':tag'"
        )
    return plain


def _spell_hub_name(name: str) -> str:
    """A name on the hub begins with `hf.co/`, with its quantization in capitals. A file's name as a tag stays as it is."""
    name = re.sub(r"^huggingface\.co/", HUB, name)
    repository, colon, tag = name.partition(":")
    return repository + colon + tag.upper() if name.startswith(HUB) and not name.endswith(".gguf") else name


def tagged_name(name: str) -> str:
    """The name as Ollama's clients list it, with a tag."""
    return name if ":" in name else f"{name}:latest"


def describe_names(names: Iterable[str]) -> str:
    """The first ten names, and the number of the others."""
    known = sorted(names)
    more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
    return ", ".join(known[:_SHOWN_NAMES]) + more


class ModelFolder:
    """The models in one folder, which may be missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self) -> list[ModelFiles]:
        """Every complete model, by name. A directory whose record cannot be read is left out."""
        with translate_os_errors(self.folder):
            names = {name.removeprefix(_REPLACED) for name in self._list_files()}
        found = (self._read(self.folder / name) for name in names if not name.startswith("."))
        return sorted(filter(None, found), key=lambda model: model.name)

    def find(self, name: str) -> ModelFiles | None:
        """The model of that name, not of an alias, or None."""
        return self._read(self._folder_of(name))

    def resolve(self, name: str) -> ModelFiles | None:
        """The model that a name, its own or an alias, stands for, or None."""
        alias = self.find_alias(name)
        if alias is None:
            return self.find(name)
        moved = self.find_alias(alias.target)  # while another process gives the weights to this alias
        return self.find(alias.target) or (moved and self.find(moved.target)) or self.find(name)

    def find_alias(self, name: str) -> Alias | None:
        return read_alias(self._alias_file(name))

    def aliases(self) -> Sequence[Alias]:
        """Every alias that leads to a model, by name."""
        with translate_os_errors(self.folder):
            files = [self.folder / name for name in self._list_files() if name.startswith(_ALIAS)]
        found = filter(None, map(read_alias, files))
        return sorted((each for each in found if self.resolve(each.name)), key=lambda each: each.name)

    def names(self) -> set[str]:
        return {model.name for model in self.list()} | {alias.name for alias in self.aliases()}

    def remove(self, name: str) -> int:
        """Delete a model or an alias, and return the number of bytes freed. Raises ModelNotFound if there is none.

        The weights of a model that has aliases stay: one of the aliases becomes the model's name.
        """
        if self.find(name) is None and self.find_alias(name) is not None:
            with translate_os_errors(self.folder):
                self.forget_alias(name)
            return 0
        self._require(self.find(name), name)  # an unknown name creates no lock file
        with self._locked(self._folder_of(name)):
            model = self._require(self.find(name), name)  # another process may have removed it
            others = [each for each in self.aliases() if each.target == model.name and self.find(each.name) is None]
            with translate_os_errors(model.folder):
                size_bytes = 0 if others else model.folder_bytes
                if others:
                    self._give_to_alias(model, others)
                else:
                    _delete(model.folder, model.folder)
                self.forget_alias(name)
        return size_bytes

    def _give_to_alias(self, model: ModelFiles, aliases: Sequence[Alias]) -> None:
        """Rename a model to the oldest of its aliases, preferring one without an overlay, and point the others to it.

        Until the directory is renamed, the others lead to it through that alias. Raises OSError.
        """
        heir, *others = sorted(aliases, key=lambda each: (not each.overlay.is_empty, each.created, each.name))
        for other in others:
            self._write_alias(replace(other, target=heir.name))
        model.folder.replace(self._folder_of(heir.name))
        if heir.overlay.is_empty:
            self._alias_file(heir.name).unlink()
        else:
            self._write_alias(replace(heir, target=heir.name))

    def copy(self, source: str, target: str) -> Alias | None:
        """Make `target` another name of the model that `source` stands for; None if that is its name already.

        An alias of that name is replaced, and the copy has the overlay of `source`. Raises ModelNotFound, or RequestError
        if `target` is a model with weights of its own.
        """
        known = self.find_alias(source)
        return self.add_alias(target, source, known.overlay if known else Overlay())

    def add_alias(self, name: str, source: str, overlay: Overlay) -> Alias | None:
        """As `copy`, with this overlay."""
        model, wanted = self._require(self.resolve(source), source), plain_name(name)
        if wanted == model.name and overlay.is_empty and self.find_alias(name) is None:
            return None
        if self.find(wanted) is not None:
            raise RequestError(f"{wanted!r} is a model with weights of its own: delete it first, or choose another name")
        with self._locked(model.folder):  # so that the model is not removed meanwhile
            target = self._require(self.find(model.name), model.name).name
            alias = Alias(wanted, target, datetime.now(UTC).replace(microsecond=0), overlay)
            with translate_os_errors(self.folder):
                self._write_alias(alias)
        return alias

    def _write_alias(self, alias: Alias) -> None:
        """Write a record under the lock of all records. Raises OSError."""
        with FileLock(self.folder / _ALIASES_LOCK):
            write_alias(self._alias_file(alias.name), alias)

    def describe(self) -> str:
        """The local models and aliases, as the end of a sentence."""
        names = self.names()
        return f"local models: {describe_names(names)}" if names else "there are no local models yet"

    @contextmanager
    def making(self, name: str, commit: str = "") -> Iterator[Making]:
        """A folder to make the model `name` in; `Making.commit` moves it into place.

        Waits for another process that makes the same model, so look for the model again inside. Files of an interrupted run
        are deleted, before and after. With a `commit` they stay, and the next run for the same commit continues from them.
        """
        final = self._folder_of(name)
        folder = final.with_name(_MAKING + final.name)
        with self._locked(final):
            self.clean()
            with translate_os_errors(folder):
                _prepare(folder, commit)
            try:
                yield Making(plain_name(name), folder, final, self)
            finally:
                if not (commit and folder.exists() and any(path.name != _COMMIT_FILE for path in folder.iterdir())):
                    shutil.rmtree(folder, ignore_errors=True)

    def clean(self) -> None:
        """Delete unfinished files of killed processes. A folder that cannot be written stays as it is.

        A process that is still at work on a file holds its lock: then the file stays, and nothing waits.
        """
        with suppress(OSError):
            for name in self._list_files():
                for prefix in (_MAKING, _REMOVED):
                    if name.startswith(prefix):
                        self._delete_unowned(name, _LOCK + name.removeprefix(prefix))
                if name.startswith(WRITING):
                    self._delete_unowned(name, _ALIASES_LOCK)

    def _delete_unowned(self, name: str, lock_name: str) -> None:
        """Delete a file, or a folder without a download to continue, unless another process holds the lock."""
        with suppress(Timeout), FileLock(self.folder / lock_name, timeout=0):
            path = self.folder / name
            if not path.is_dir():
                path.unlink(missing_ok=True)
            elif not (path / _COMMIT_FILE).is_file():
                shutil.rmtree(path)

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Hold the lock of the model in `folder`, after `_repair`."""
        with ExitStack() as held:
            with translate_os_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(self.folder / f"{_LOCK}{folder.name}"))
                _repair(folder)
            yield

    def _list_files(self) -> Sequence[str]:
        return [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []

    def _require(self, model: ModelFiles | None, name: str) -> ModelFiles:
        if model is None:
            raise ModelNotFound(f"no local model {name!r}; {self.describe()}")
        return model

    def _folder_of(self, name: str) -> Path:
        return self.folder / plain_name(name).replace("/", "--").replace(":", "@")

    def _alias_file(self, name: str) -> Path:
        return self.folder / f"{_ALIAS}{self._folder_of(name).name}"

    def forget_alias(self, name: str) -> None:
        """Delete the record of an alias, if there is one. Raises OSError."""
        self._alias_file(name).unlink(missing_ok=True)

    def _read(self, folder: Path) -> ModelFiles | None:
        with translate_os_errors(folder):
            needs_repair = not folder.exists() and _replaced(folder).exists()
        if needs_repair:
            with self._locked(folder):
                pass  # repaired
        try:
            record = read_json(folder / RECORD_FILE)
            return ModelFiles(
                name=folder.name.replace("--", "/").replace("@", ":"),  # the record may have an earlier name
                folder=folder,
                source=str(record["source"]),
                sha256=str(record["sha256"]),
                num_parameters=int(record["num_parameters"]),
                quantization=str(record["quantization"]),
                created=datetime.fromisoformat(record["created"]),
                stamp=str(record.get("stamp", "")),
            )
        except (UnsupportedModel, KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class Making:
    """A model that is being made: the caller fills `folder`, then commits."""

    name: str
    folder: Path
    final: Path
    store: ModelFolder

    def commit(self, source: str, sha256: str, num_parameters: int, quantization: str, stamp: str = "") -> ModelFiles:
        """Write the record, sync all files and rename the folder into place, over an older model of that name."""
        record = {
            "format": _FORMAT,
            "name": self.name,
            "source": source,
            "sha256": sha256,
            "num_parameters": num_parameters,
            "quantization": quantization,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "stamp": stamp,
        }
        with translate_os_errors(self.folder):
            (self.folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            for file in self.folder.rglob("*"):
                if file.is_file():
                    sync_file(file)
            (self.folder / _COMMIT_FILE).unlink(missing_ok=True)
            if self.final.exists():
                self.final.replace(_replaced(self.final))
            else:
                self.store.forget_alias(self.name)
            try:
                self.folder.replace(self.final)
            finally:
                _repair(self.final)
        model = self.store.find(self.name)
        assert model is not None, f"{self.final} was just written"
        return model


def _prepare(folder: Path, commit: str) -> None:
    """Make an empty folder, or keep the files of an earlier run for this commit."""
    note = folder / _COMMIT_FILE
    is_ours = bool(commit) and note.is_file() and note.read_text(encoding="utf-8") == commit
    if folder.exists() and not is_ours:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if commit:
        note.write_text(commit, encoding="utf-8")


def _replaced(folder: Path) -> Path:
    return folder.with_name(_REPLACED + folder.name)


def _repair(folder: Path) -> None:
    """Restore a model that was being replaced if the new one is missing, or else delete it. Needs the lock."""
    replaced = _replaced(folder)
    if replaced.exists() and folder.exists():
        _delete(replaced, folder)
    elif replaced.exists():
        replaced.replace(folder)


def _delete(model: Path, folder: Path) -> None:
    """Delete a model. It is first renamed to a name that is never read, so that readers see it whole or not at all."""
    removed = folder.with_name(_REMOVED + folder.name)
    shutil.rmtree(removed, ignore_errors=True)
    shutil.rmtree(model.replace(removed), ignore_errors=True)
