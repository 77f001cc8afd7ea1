"""The code in the documents runs: Python as it stands, curl and safe commands against a server, and all commands parse.

Blocks with `<!-- not run: why -->` before them are not run, but their commands have to parse all the same.
"""

from __future__ import annotations

import gc
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

import bough
from benchmarks.__main__ import app as benchmarks
from bough.cli.main import app
from bough.models import ModelFiles
from tests.code_blocks import MARK, SHELL, Block, Command, find_blocks, find_commands
from tests.server.servers import Server, running
from tests.tiny_encoders import make_encoder, make_reranker, pooling, write_modules

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")])
BLOCKS = {page: find_blocks(page) for page in PAGES}
COMMANDS = {
    page: [command for block in blocks if block.language in SHELL for command in find_commands(block)]
    for page, blocks in BLOCKS.items()
}
WITH_PYTHON = [page for page, blocks in BLOCKS.items() if any(block.language == "python" for block in blocks)]
ADDRESS = "127.0.0.1:11435"  # that the pages name
MOST_NOT_RUN = 0.25  # of all blocks with code

FILTERS = {"cat", "grep"}
"""Programs that only feed a command or read its output."""

NEVER_RUN = {"serve", "pull", "show", "rm", "bench", "replay", "launch"}
"""Commands that load a model here, fetch or delete one, or do not end: they are parsed alone. So is a chat."""

LOCAL_FLAGS = {"--local", "--watch", "--resume"}


def shows(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=shows)
def test_blocks_of_code_say_their_language(page: Path) -> None:
    """A block without a language is text: drawings and output. What is code is checked, and coloured in the site."""
    code = re.compile(r"^(\$ |bough [a-z]|curl |pip install|make [a-z]|python |import |from \w+ import)", re.MULTILINE)
    assert [str(block) for block in BLOCKS[page] if not block.language and code.search(block.text)] == []


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    code = [block for blocks in BLOCKS.values() for block in blocks if block.language in (*SHELL, "python")]
    marked = [block for block in code if block.reason]
    marks = sum(len(MARK.findall(page.read_text(encoding="utf-8"))) for page in PAGES)

    assert marks == len(marked), "a mark stands on the line before a block of bash, console or python, and says why"
    assert len(marked) <= MOST_NOT_RUN * len(code), [str(block) for block in marked]


@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page]], ids=shows)
def test_commands_in_the_documents_exist(page: Path) -> None:
    for command in COMMANDS[page]:
        check_command(command)


def check_command(command: Command) -> None:
    """Fail for what is known to be wrong with a command, and for a program that nothing is known about."""
    match command.program:
        case "bough":
            parse(app, command, command.words[1:])
        case "python" if command.words[1:3] == ("-m", "benchmarks"):
            parse(benchmarks, command, command.words[3:])
        case "pip":
            for extras in re.findall(r"\[(.+?)\]", " ".join(command.words)):
                assert set(extras.split(",")) <= _extras(), f"{command}: an extra that pyproject.toml does not have"
        case "make":
            targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
            assert set(command.words[1:]) <= targets, f"{command}: a target that the Makefile does not have"
        case "python":
            assert command.words[1] == "-m" or (ROOT / command.words[1]).is_file(), f"{command}: there is no such file"
        case "curl":
            read_curl(command)
        case program:
            known = command.block.reason or program in FILTERS or program == "export"
            assert known, f"{command}: nothing is known about {program}: mark the block with <!-- not run: why -->"


def parse(program: typer.Typer, command: Command, words: tuple[str, ...]) -> None:
    """Read the command's words as the program does, and do nothing."""
    try:
        context: Any = typer.main.get_command(program).make_context(command.program, list(words))
        while hasattr(context.command, "resolve_command"):  # a group
            name, found, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
            context = found.make_context(name, rest, parent=context)
    except Exception as error:
        error.add_note(f"in {command}")
        raise


def _extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


@pytest.fixture(scope="module")
def runner(smollm2_files: ModelFiles) -> Iterator[bough.Runner]:
    """One runner for all examples: loading takes longer than they do."""
    with bough.load() as runner:
        yield runner


@pytest.fixture(scope="module")
def server(smollm2_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model as the pages serve it, in a data folder of its own, with short answers."""
    folder = tmp_path_factory.mktemp("docs")
    models = folder / "data" / "models"
    models.mkdir(parents=True)
    (models / "smollm2").symlink_to(smollm2_files.folder)
    settings = {"data_folder": folder / "data", "max_tokens": 12, "aliases": "claude-*=smollm2,gpt-*=smollm2"}
    with running("smollm2", folder, **settings) as started:
        yield started


@pytest.fixture
def home(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the commands read, where `bough` finds the server."""
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(server.cache_folder))
    monkeypatch.setenv("BOUGH_DATA_FOLDER", str(server.cache_folder.parent / "data"))
    monkeypatch.setenv("BOUGH_PORT", server.url.rpartition(":")[2])
    monkeypatch.delenv("BOUGH_DISK")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("Bees eat nectar.")
    (tmp_path / "mario").mkdir()
    (tmp_path / "mario" / "Modelfile").write_text("FROM smollm2\nSYSTEM You are Mario.")
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"river": {"type": "string", "maxLength": 8}}}')
    return tmp_path


@pytest.mark.model
@pytest.mark.parametrize("page", WITH_PYTHON, ids=shows)
def test_python_in_the_documents_runs(
    page: Path, runner: bough.Runner, home: Path, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All blocks of a page in order, as one program: later ones use the names of earlier ones."""
    stand_ins = {
        "BAAI/bge-small-en-v1.5": write_modules(make_encoder(tmp_path / "encoder"), pooling("cls"), ("Normalize", {})),
        "BAAI/bge-reranker-base": make_reranker(tmp_path / "reranker", "xlm-roberta"),
    }
    load = bough.load
    monkeypatch.setattr(bough, "load", lambda name=None, **settings: load(stand_ins[name]) if name else runner)
    monkeypatch.setattr(runner, "close", lambda: None)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # clients leave connections open, and warn of each other
        for block in BLOCKS[page]:
            if block.language == "python" and not block.reason:
                run_python(block, names, server)
        names.clear()
        gc.collect()  # here, or what is open is found by the next test that collects, where warnings fail


def run_python(block: Block, names: dict[str, Any], server: Server) -> None:
    code = block.text.replace(ADDRESS, server.url.removeprefix("http://"))
    try:
        exec(compile("\n" * block.line + code, str(block.page), "exec", dont_inherit=True), names)
    except Exception as error:
        error.add_note(f"in the code of {block}")
        raise


@pytest.mark.model
def test_the_first_lines_of_readme_and_library_print_what_they_say(
    runner: bough.Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bough, "load", lambda name=None, **settings: runner)
    monkeypatch.setattr(runner, "close", lambda: None)
    for page in (ROOT / "README.md", ROOT / "docs" / "library.md"):
        first = [block.text for block in BLOCKS[page] if block.language == "python"][:2]
        exec("\n".join(first) if page.name == "library.md" else first[0], {})
        assert capsys.readouterr().out.splitlines()[0] == "The capital of France is Paris."


@pytest.mark.model
@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page]], ids=shows)
def test_curl_and_safe_commands_in_the_documents_run(page: Path, home: Path, server: Server) -> None:
    for command in COMMANDS[page]:
        if command.block.reason:
            continue
        if command.program == "curl":
            run_curl(command, server)
        elif command.program == "bough" and is_safe(command):
            run_bough(command, home)


def is_safe(command: Command) -> bool:
    """Whether a command ends by itself, and changes nothing but the server's tree and the working folder."""
    words = command.words[1:]
    is_chat = words[0] == "run" and len(words) == 1
    fetches = any(re.fullmatch(r"[\w.-]+[:/][\w.:/-]+", word) for word in words)  # a model of the hub
    deletes = words[:2] == ("cache", "clear")
    return not (words[0] in NEVER_RUN or is_chat or fetches or deletes or LOCAL_FLAGS & set(words))


def run_bough(command: Command, home: Path) -> None:
    piped = (home / command.piped_from[1]).read_text() if command.piped_from[:1] == ("cat",) else ""
    done = CliRunner().invoke(app, list(command.words[1:]), input=piped)
    assert done.exit_code == 0, f"{command} ended with {done.exit_code}: {done.output}"


def read_curl(command: Command) -> httpx.Request:
    """The request that curl would send. Options that it does not know are an error."""
    method, url, body, headers = "", "", None, {}
    words = iter(command.words[1:])
    for word in words:
        if word in ("-d", "--data"):
            body = next(words)
            headers.setdefault("Content-Type", "application/x-www-form-urlencoded")  # as curl does
        elif word in ("-H", "--header"):
            name, _, value = next(words).partition(":")
            headers[name] = value.strip()
        elif word in ("-X", "--request"):
            method = next(words)
        elif word.startswith("-"):
            assert set(word[1:]) <= set("sSNf"), f"{command}: the test does not know {word}"
        else:
            url = word
    return httpx.Request(method or ("GET" if body is None else "POST"), url, content=body, headers=headers)


def run_curl(command: Command, server: Server) -> None:
    wanted = read_curl(command)
    assert f"{wanted.url.host}:{wanted.url.port}" == ADDRESS, f"{command}: the pages' server is at {ADDRESS}"
    wanted.url = wanted.url.copy_with(port=httpx.URL(server.url).port)
    wanted.headers["Host"] = f"{wanted.url.host}:{wanted.url.port}"
    with httpx.Client(timeout=120) as client:
        answer = client.send(wanted)
    assert answer.status_code < 400, f"{command}: {answer.status_code} {answer.text}"
