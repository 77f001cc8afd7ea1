"""`bough tree` and `bough explain`: without a server the tree on disk, and no model is loaded. Trees are watched."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bough.cache.disk import Disk
from bough.cache.tree.address import Address
from bough.cache.tree.state import PAGE_TOKENS, Group, Kind
from bough.config import load_settings
from bough.models import ModelFolder
from bough.models.fingerprint import tree_folder
from bough.tokens import pack
from tests.cli.conftest import add_model
from tests.models.tiny_tokenizer import CHATML, byte_level
from tests.models.web_server import Site, serving
from tests.waiting import wait_until

TEXT = "<|im_start|>user\nhello there<|im_end|>\n"


@pytest.fixture
def hf(home: Path) -> Any:
    return byte_level(CHATML)


def grow(name: str, hf: Any, text: str = TEXT, salt: str = "", mark: str = "1f" * 32) -> Disk:
    """A tree on disk of one edge with this text."""
    folder = tree_folder(load_settings(), name, mark)
    groups = [Group(0, Kind.FULL, bytes_per_token=4)]
    options: dict[str, Any] = {"page_tokens": PAGE_TOKENS, "groups": groups, "budget_bytes": 2**30, "floor_bytes": 0}
    disk = Disk(folder, fingerprint=mark, model=name, **options)
    tokens = pack(hf.encode(text, add_special_tokens=False))
    assert len(tokens) < 4 * PAGE_TOKENS
    root = disk.root(salt)
    disk.put(Address(root, disk.digests(root, b"")[0], tokens, 0, 0, len(tokens) // 4), lambda: b"rows", 4)
    assert disk.flush(10)
    return disk


def add_tokenizer(store: ModelFolder, name: str, hf: Any) -> None:
    hf.save_pretrained(add_model(store, name).folder)


def test_the_tree_of_the_default_model_is_drawn_from_disk(invoke, store, hf, monkeypatch):
    monkeypatch.setenv("BOUGH_MODEL", "small")
    add_tokenizer(store, "small", hf)
    grow("small", hf).close()
    grow("other", hf, "bye").close()

    result = invoke("tree", env={"COLUMNS": "100"})

    length = len(hf.encode(TEXT, add_special_tokens=False))
    assert result.exit_code == 0
    text = "<|im_start|>user hello there<|im_end|>"
    assert result.stdout == f'root\n└─ [0, {length}) "{text}"  {length} tokens · on disk · used once\n'
    assert result.stderr == "the tree on disk small-1f1f1f1f1f1f\n"


def test_a_tree_in_use_is_drawn_and_its_owner_told(invoke, store, hf):
    add_tokenizer(store, "small", hf)
    with grow("small", hf):
        result = invoke("tree", "small", "--json")

    (node,) = json.loads(result.stdout)["roots"][""]
    assert (node["text"], node["tiers"]) == (TEXT, {"disk": 1})
    assert f"in use by process {os.getpid()}" in result.stderr


def test_a_tree_whose_model_is_gone_is_drawn_without_texts(invoke, hf):
    grow("small", hf).close()

    result = invoke("tree", env={"COLUMNS": "60"})

    assert result.exit_code == 0
    assert "tokens · on disk" in result.stdout and '"' not in result.stdout
    assert "the files of small are not here: no texts" in result.stderr


def test_of_several_trees_the_one_that_was_used_last_is_drawn(invoke, hf):
    grow("small", hf).close()
    grow("small", hf, mark="2f" * 32).close()

    assert "small-2f2f2f2f2f2f was used last; there are small-1f1f1f1f1f1f, too" in invoke("tree", "small").stderr
    assert "tree on disk small-1f1f1f1f1f1f\n" in invoke("tree", "small-1f1f1f1f1f1f").stderr


def test_a_salt_has_its_own_tree(invoke, store, hf):
    add_tokenizer(store, "small", hf)
    grow("small", hf, salt="alice").close()

    assert "hello there" in invoke("tree", "--salt", "alice", env={"COLUMNS": "100"}).stdout
    assert invoke("tree", "--salt", "bob").stdout == "(empty)\n"


def test_which_tree_is_meant_must_be_told_where_there_are_several_models(invoke, hf):
    assert invoke("tree").stderr == "error: no server is running, and there are no trees on disk yet\n"
    for name in ("one", "two"):
        grow(name, hf).close()

    result = invoke("tree")

    assert result.exit_code == 1
    assert result.stderr == "error: no server is running, and 'smollm2' has no tree on disk; there are one, two\n"


def watch(url: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "bough", "tree", "--watch", "--url", url], **options)


def test_a_watched_tree_is_written_again_when_it_has_changed_until_ctrl_c(home):
    site = Site(files={"/api/cache/tree": b"root"})
    with serving(site), watch(site.url, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"root\n"
        site.asked.clear()
        wait_until(lambda: len(site.asked) > 1)  # the same tree was found once more
        site.files["/api/cache/tree"] = b"another"

        assert process.stdout.readline() == b"another\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_on_a_terminal_a_watched_tree_begins_at_the_top_of_the_screen_and_cannot_control_it(home):
    site = Site(files={"/api/cache/tree": "\n".join(["first \x1b[2J", *"x" * 30, "last"]).encode()})
    terminal, its_end = pty.openpty()
    screen = {"TERM": "xterm", "COLUMNS": "40", "LINES": "10"}
    with serving(site), watch(site.url, stdout=its_end, env=os.environ | screen) as process:
        os.close(its_end)
        shown = b""
        while shown.count(b"x") < 5:
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    os.close(terminal)

    assert "first ␛[2J" in shown.decode() and "last" not in shown.decode()


def test_a_tree_on_disk_is_not_watched(invoke):
    result = invoke("tree", "--watch", "--local")

    assert (result.exit_code, result.stderr) == (1, "error: --watch needs a running server; `bough serve` starts one\n")


def test_explain_matches_a_prompt_against_the_tree_on_disk(invoke, store, hf):
    add_tokenizer(store, "small", hf)
    text = hf.apply_chat_template([{"role": "user", "content": "hello there"}], tokenize=False)
    grow("small", hf, text).close()

    found = json.loads(invoke("explain", "hello there", "--model", "small", "--json").stdout)
    other = invoke("explain", "hello you", "--model", "small").stdout

    length = len(hf.encode(text, add_special_tokens=False))
    assert (found["matched_tokens"], found["cached_tokens"], found["tree_goes_on"]) == (length, length, [])
    assert other.startswith("small: the prompt leaves the tree after")
    assert json.loads(invoke("explain", text, "--raw", "-m", "small", "--json").stdout)["matched_tokens"] == length


def test_explain_takes_a_word_that_is_no_model_as_the_prompt(invoke, store, hf, monkeypatch):
    monkeypatch.setenv("BOUGH_MODEL", "small")
    add_tokenizer(store, "small", hf)
    text = hf.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    grow("small", hf, text).close()

    found = json.loads(invoke("explain", "hello", "--json").stdout)
    model_only = invoke("explain", "small", env={"COLUMNS": "200"})

    assert found["matched_tokens"] == len(hf.encode(text, add_special_tokens=False))
    assert (model_only.exit_code, "'small' is a model" in model_only.stderr) == (2, True)


def test_explain_does_not_take_a_misspelt_model_for_a_prompt(invoke):
    assert invoke("explain", "smolm2").stderr == "error: there is no model 'smolm2'; did you mean smollm2?\n"


def test_explain_needs_the_tokenizer(invoke, hf):
    grow("small", hf).close()

    result = invoke("explain", "hello there", "--model", "small")

    assert (result.exit_code, "the files of small are not here" in result.stderr) == (1, True)


def test_drawing_a_tree_imports_neither_torch_nor_transformers(home, store, hf):
    add_tokenizer(store, "small", hf)
    grow("small", hf).close()
    code = "import sys; from bough.cli.main import app; app(['tree'], standalone_mode=False)"
    code += "; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, "<|im_start|>" in done.stdout) == (0, True), done.stderr
