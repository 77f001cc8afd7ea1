"""The local model folder: one directory per model, each with a `bough.json` that says where it came from.

A model's name is the name of its directory, with `org--name` for `org/name` and `name@tag` for `name:tag`. `name` and
`name:latest` are the same model, and so are `huggingface.co/org/name:q4_0` and `hf.co/org/name:Q4_0`.
An alias is a file `.alias-NAME` (see aliases), which stands for a model. A directory of the same name comes first; only the
overlay of the alias then counts.
Always true:
- every directory with a `bough.json` and no leading dot is a complete model: it is made elsewhere, synced, then renamed;
- a `.replaced-` directory is complete too: the next access restores it if a process died before the new model was there;
- one process at a time makes or removes a given model; others wait for it;
- what a killed process left half made (`.making-`, `.removed-`, `.writing-`) is deleted by the next one that makes or loads
  a model, under the lock that its owner would hold; parts of a download stay, for the next run to go on from;
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
from bough.models.aliases import WRITING, Alias, Overlay, make_alias, read_alias, write_alias
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
    """The name without `:latest`, and a name on the hub in one spelling: `hf.co/org/name:Q4_K_M`.

    Raises ModelNotFound for anything that is not a name, such as a path.
    """
    plain = _one_spelling(name.removesuffix(":latest"))
    if len(plain) > _LONGEST_NAME:
        raise ModelNotFound(
            f"{name[:20]!r}… is not a model name: it has {len(plain)} characters, more than {_LONGEST_NAME}"
        )
    if not _NAME.fullmatch(plain) or "--" in plain:
        raise ModelNotFound(
            f"{name!r} is not a model name: letters, digits, '.', '_' and '-', with at most one '/' between, and a ':tag'"
        )
    return plain


def _one_spelling(name: str) -> str:
    """A name on the hub begins with `hf.co/`, with its quantization in capitals. A file's name as a tag stays as it is."""
    if name.startswith("huggingface.co/"):
        name = HUB + name.removeprefix("huggingface.co/")
    if not name.startswith(HUB) or name.endswith(".gguf"):
        return name
    repository, colon, tag = name.partition(":")
    return repository + colon + tag.upper()


def tagged_name(name: str) -> str:
    """The name as Ollama's clients list it, with a tag."""
    return name if ":" in name else f"{name}:latest"


def describe_names(names: Iterable[str]) -> str:
    """The names in a row, the first ten of them."""
    known = sorted(names)
    more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
    return ", ".join(known[:_SHOWN_NAMES]) + more


class Store:
    """The models in one folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self) -> list[ModelFiles]:
        """Every complete model, by name. A directory whose record cannot be read is left out."""
        with translate_os_errors(self.folder):
            names = {path.name.removeprefix(_REPLACED) for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        found = (self._read(self.folder / name) for name in names if not name.startswith("."))
        return sorted((model for model in found if model), key=lambda model: model.name)

    def find(self, name: str) -> ModelFiles | None:
        """The model of that very name, or None."""
        return self._read(self._folder_of(name))

    def resolve(self, name: str) -> ModelFiles | None:
        """The model that a name stands for, be it the model's own or an alias; None if there is none."""
        alias = self.find_alias(name)
        if alias is None:
            return self.find(name)
        moved = self.find_alias(alias.target)  # while another process gives the weights to this alias
        return self.find(alias.target) or (moved and self.find(moved.target)) or self.find(name)

    def find_alias(self, name: str) -> Alias | None:
        """The record of an alias of that name, or None."""
        return read_alias(self._alias_file(name))

    def aliases(self) -> Sequence[Alias]:
        """Every alias that leads to a model, by name."""
        with translate_os_errors(self.folder):
            files = list(self.folder.glob(f"{_ALIAS}*")) if self.folder.is_dir() else []
        found = (read_alias(file) for file in files)
        return sorted((each for each in found if each and self.resolve(each.name)), key=lambda each: each.name)

    def names(self) -> set[str]:
        """The names of all models and aliases."""
        return {model.name for model in self.list()} | {alias.name for alias in self.aliases()}

    def find_made_from(self, sha256: str) -> ModelFiles | None:
        """A model that was converted from the file with this hash, or None."""
        return next((model for model in self.list() if model.sha256 == sha256), None)

    def find_stamped(self, stamp: str) -> ModelFiles | None:
        """A model that was converted from the file with this stamp, or None."""
        return next((model for model in self.list() if model.stamp == stamp), None)

    def remove(self, name: str) -> int:
        """Delete a model or an alias; returns the bytes that were freed. Raises ModelNotFound if there is none.

        The weights of a model that has aliases stay: one of the aliases becomes the model's name.
        """
        if self.find(name) is None and self.find_alias(name) is not None:
            with translate_os_errors(self.folder):
                self._alias_file(name).unlink(missing_ok=True)
            return 0
        self._require(name)  # an unknown name creates no lock file
        with self._locked(self._folder_of(name)):
            model = self._require(name)  # another process may have removed it
            others = [each for each in self.aliases() if each.target == model.name and self.find(each.name) is None]
            with translate_os_errors(model.folder):
                size_bytes = 0 if others else model.size_bytes
                if others:
                    self._give_to_alias(model, others)
                else:
                    _delete(model.folder, model.folder)
                self._alias_file(name).unlink(missing_ok=True)
        return size_bytes

    def _give_to_alias(self, model: ModelFiles, aliases: Sequence[Alias]) -> None:
        """Rename a model to the oldest of its aliases, rather one without an overlay, and let the others lead there.

        Until the directory is renamed, the others lead to it by way of that alias. Raises OSError.
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
        """Give the model that `source` stands for the name `target`, too; None if that is its name already.

        An alias of that name is replaced, and the overlay of `source` goes with the copy. Raises ModelNotFound, or
        RequestError if `target` is a model with weights of its own.
        """
        known = self.find_alias(source)
        return self.add_alias(target, source, known.overlay if known else Overlay())

    def add_alias(self, name: str, source: str, overlay: Overlay) -> Alias | None:
        """Let `name` stand for the model that `source` stands for, with this overlay. As `copy`."""
        model, wanted = self._require_resolved(source), plain_name(name)
        if wanted == model.name and overlay.is_empty and self.find_alias(name) is None:
            return None
        if self.find(wanted) is not None:
            raise RequestError(f"{wanted!r} is a model with weights of its own: delete it first, or choose another name")
        with self._locked(model.folder):  # so that the model is not removed meanwhile
            alias = make_alias(wanted, self._require(model.name).name, overlay)
            with translate_os_errors(self.folder):
                self._write_alias(alias)
        return alias

    def _write_alias(self, alias: Alias) -> None:
        """Write a record, while no other process writes one. Raises OSError."""
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
                if not commit or _is_bare(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def clean(self) -> None:
        """Delete what killed processes have left half made. A folder that cannot be written stays as it is.

        Whoever is at work on something holds its lock: that stays, and nothing is waited for.
        """
        with suppress(OSError):
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
            for name in names:
                for prefix in (_MAKING, _REMOVED):
                    if name.startswith(prefix):
                        self._delete_unowned([name], _LOCK + name.removeprefix(prefix))
            written = [name for name in names if name.startswith(WRITING)]
            if written:
                self._delete_unowned(written, _ALIASES_LOCK)

    def _delete_unowned(self, names: Iterable[str], lock_name: str) -> None:
        """Delete folders, but for downloads to go on from, and files, unless another process holds their lock.

        Raises OSError.
        """
        with suppress(Timeout), FileLock(self.folder / lock_name, timeout=0):
            for path in (self.folder / name for name in names):
                if path.is_dir() and not (path / _COMMIT_FILE).is_file():
                    shutil.rmtree(path)
                elif not path.is_dir():
                    path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Hold the lock of the model in `folder`, after a repair of what a killed process left."""
        with ExitStack() as held:
            with translate_os_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(self.folder / f"{_LOCK}{folder.name}"))
                _repair(folder)
            yield

    def _require(self, name: str) -> ModelFiles:
        return self._known(self.find(name), name)

    def _require_resolved(self, name: str) -> ModelFiles:
        return self._known(self.resolve(name), name)

    def _known(self, model: ModelFiles | None, name: str) -> ModelFiles:
        if model is None:
            raise ModelNotFound(f"no local model {name!r}; {self.describe()}")
        return model

    def _folder_of(self, name: str) -> Path:
        return self.folder / plain_name(name).replace("/", "--").replace(":", "@")

    def _alias_file(self, name: str) -> Path:
        return self.folder / f"{_ALIAS}{self._folder_of(name).name}"

    def forget_alias(self, name: str) -> None:
        """Delete the record of an alias, if there is one: a model takes its name. Raises OSError."""
        self._alias_file(name).unlink(missing_ok=True)

    def _read(self, folder: Path) -> ModelFiles | None:
        with translate_os_errors(folder):
            needs_repair = not folder.exists() and _replaced(folder).exists()
        if needs_repair:
            with self._locked(folder):
                pass  # repaired
        try:
            record = read_json(folder / RECORD_FILE)
            created = datetime.fromisoformat(record["created"])
            return ModelFiles(
                name=_name_of(folder),  # not that of the record: an alias may have taken over the folder since
                folder=folder,
                source=str(record["source"]),
                sha256=str(record["sha256"]),
                num_parameters=int(record["num_parameters"]),
                quantization=str(record["quantization"]),
                created=created,
                stamp=str(record.get("stamp", "")),
            )
        except (UnsupportedModel, KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class Making:
    """A model that is being made: fill `folder`, then commit."""

    name: str
    folder: Path
    final: Path
    store: Store

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
            self._put_in_place()
        model = self.store.find(self.name)
        assert model is not None, f"{self.final} was just written"
        return model

    def commit_again(self, model: ModelFiles) -> ModelFiles:
        """As `commit`, with the record of the model that this one replaces."""
        return self.commit(model.source, model.sha256, model.num_parameters, model.quantization, model.stamp)

    def _put_in_place(self) -> None:
        if self.final.exists():
            self.final.replace(_replaced(self.final))
        else:
            self.store.forget_alias(self.name)
        try:
            self.folder.replace(self.final)
        finally:
            _repair(self.final)


def _name_of(folder: Path) -> str:
    return folder.name.replace("--", "/").replace("@", ":")


def _prepare(folder: Path, commit: str) -> None:
    """Make the folder empty, or keep the files that an earlier run for this commit left in it."""
    note = folder / _COMMIT_FILE
    is_ours = bool(commit) and note.is_file() and note.read_text(encoding="utf-8") == commit
    if folder.exists() and not is_ours:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if commit:
        note.write_text(commit, encoding="utf-8")


def _is_bare(folder: Path) -> bool:
    return folder.exists() and all(path.name == _COMMIT_FILE for path in folder.iterdir())


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
    """Delete a model. It is first renamed to a name that is never read, so that readers see all of it or nothing."""
    removed = folder.with_name(_REMOVED + folder.name)
    shutil.rmtree(removed, ignore_errors=True)
    shutil.rmtree(model.replace(removed), ignore_errors=True)
