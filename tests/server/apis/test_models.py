"""The list of models as Anthropic's client reads it, on the paths that it shares with OpenAI's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import anthropic
import openai
import pytest
import uvicorn

from bough.config import Settings
from bough.models import ModelFiles, ModelFolder
from bough.server.app import make_app, make_service
from bough.server.http.listening import bind, url_of
from tests.server.in_process import make_words_folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Five names: a model, three copies of it, and the model that the server was started with."""
    folder = tmp_path_factory.mktemp("models_of_anthropic")
    store = ModelFolder(folder / "models")
    with store.making("a") as making:
        make_words_folder(making.folder)
        making.commit("a test", "", 0, "F32")
    for name in "bcd":
        store.copy("a", name)
    return Settings(data_folder=folder, cache_folder=folder / "cache", aliases="claude-*=a")


@pytest.fixture(scope="module")
def url(settings: Settings, words_model: ModelFiles) -> Iterator[str]:
    """The application on a thread of this process: listing loads no model."""
    app = make_app(settings, make_service(settings, words_model))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        yield url_of(bound)
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=2) as made:
        yield made


def test_all_models_are_listed_page_by_page(client):
    first = client.models.list(limit=2)

    assert [each.id for each in first.data] == ["a", "b"]
    assert (first.has_more, first.first_id, first.last_id) == (True, "a", "b")
    assert {each.type for each in first.data} == {"model"}
    assert [each.id for each in client.models.list(limit=2)] == ["a", "b", "c", "d", "tiny"]


def test_pages_go_backwards_too(client):
    page = client.models.list(limit=2, before_id="d")

    assert [each.id for each in page.data] == ["b", "c"]
    assert page.has_more
    assert not client.models.list(limit=3, before_id="d").has_more


def test_one_model_is_found_by_any_name(client):
    assert client.models.retrieve("a").display_name == "a"
    assert client.models.retrieve("claude-sonnet-4-5").id == "claude-sonnet-4-5"


def test_errors_have_the_shape_of_anthropic(client):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("nothing")
    with pytest.raises(anthropic.BadRequestError, match="there is no such model"):
        client.models.list(after_id="nothing")

    assert missing.value.body["error"] == {
        "type": "not_found_error",
        "message": "model 'nothing' not found; there are: a, b, c, d, tiny",
    }


def test_clients_of_openai_still_see_their_own_list(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=2) as client:
        assert [each.id for each in client.models.list()] == ["a", "b", "c", "d", "tiny"]
        assert client.models.retrieve("b:latest").object == "model"
        with pytest.raises(openai.NotFoundError, match="there are: a, b, c, d, tiny"):
            client.models.retrieve("nothing")
