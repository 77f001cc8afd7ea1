"""An hour of mixed use in a few minutes, and pictures of the page after it: `python -m tests.browser.hour FOLDER`.

Three programs and a person use one server with the default model: an agent with tools over Ollama's API, a script that
asks about a long document over OpenAI's, one that classifies short texts over Anthropic's, and chats on the page, long and
short, with forks, retries and an edit. What the model answers is of no interest here, so answers are short. The tree then
has some 65 nodes, and one edge of 8,000 tokens.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.conftest import ANSWER_MS, FLAGS, find_chromium
from tests.browser.page_driver import Chat, wait_for_end
from tests.server.servers import running

REQUEST_S = 300
AFTERGLOW_MS = 3_000  # paths of requests that have ended are highlighted for a while
NUM_COLOURS = 256
ANSWER_TOKENS = 14
DOCUMENT_WORDS = 7_200
SENTENCE = "the river carries sand past old willows and slow boats toward a harbour where gulls wait for bread"
WORDS = SENTENCE.split()
REVIEWS = (
    "The boat trip was wonderful.",
    "Cold soup, and nobody cared.",
    "It arrived on a Tuesday.",
    "My favourite museum by far!",
    "The map was wrong twice.",
    "A fair price for a small room.",
    "Never again.",
    "The guide knew every bird.",
    "Breakfast is at eight.",
    "Loud, dirty and late.",
    "A quiet beach and good bread.",
    "They lost my suitcase.",
    "The ferry has two decks.",
    "I would go again tomorrow.",
    "The tickets were sold twice.",
    "Our room had a view of the harbour.",
)
TASKS = (
    "Rename the function `area`.",
    "Why does the test of the parser fail?",
    "Write a README for this folder.",
    "Sort the imports.",
)
RESULTS = (
    "3 files: shapes.py, parser.py, test_parser.py",
    "def area(width, height): return width * height",
    "1 failed, 11 passed",
    "nothing to change",
)
TOOLS = ("list_files", "read_file", "run_tests")
OPTIONS = {"model": "smollm2", "stream": False, "options": {"num_predict": ANSWER_TOKENS}}
QUESTIONS = (
    "I plan a garden of 40 square metres. Which trees stay small?",
    "Which of them can stand in the shade?",
    "When do I plant them?",
    "And what grows below them?",
    "How often do I water?",
    "Write me a list of what to buy.",
)
SHORT_CHATS = (
    "Name a river in Spain.",
    "What does 'bough' mean?",
    "Convert 12 feet to metres.",
    "A rhyme for 'willow'?",
    "Who wrote Walden?",
    "Is a tomato a fruit?",
)


class Programs:
    """The three programs beside the page."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=REQUEST_S)

    def run_agent(self) -> None:
        """Sessions of a coding agent: the same instructions, another task, then results of its tools, one of them twice."""
        rules = " ".join(f"Rule {number}: {' '.join(WORDS[number % 9 :])}." for number in range(60))
        system = {"role": "system", "content": f"You are a coding agent. You read and change files with tools. {rules}"}
        for task, result in zip(TASKS, RESULTS, strict=True):
            messages = [system, {"role": "user", "content": task}]
            for name in TOOLS:
                answer = self._post("/api/chat", OPTIONS | {"messages": messages})["message"]
                messages += [answer, {"role": "tool", "tool_name": name, "content": f"{name}: {result}"}]
            for last in (messages[-1], messages[-1] | {"content": "It failed."}):
                self._post("/api/chat", OPTIONS | {"messages": [*messages[:-1], last]})

    def ask_about_document(self) -> None:
        """One document that nearly fills the context, and two questions about it."""
        document = " ".join(WORDS[number % len(WORDS)] for number in range(DOCUMENT_WORDS))
        for question in ("What is it about?", "Who waits for bread?"):
            messages = [
                {"role": "system", "content": f"Answer from this text:\n{document}"},
                {"role": "user", "content": question},
            ]
            body = {"model": "smollm2", "max_tokens": ANSWER_TOKENS, "messages": messages}
            self._post("/v1/chat/completions", body)

    def classify(self) -> None:
        system = "You classify reviews of a travel agency. Say whether the mood is good, bad or none."
        for review in REVIEWS:
            body = {"model": "smollm2", "max_tokens": 5, "system": system}
            self._post("/v1/messages", body | {"messages": [{"role": "user", "content": review}]})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found


def chat_on_page(page: Page) -> None:
    """Six short chats, and at last a long one with an edit, a retry and forks."""
    chat = Chat(page)
    for question in SHORT_CHATS:
        page.keyboard.press("Control+k")
        chat.set_limit(ANSWER_TOKENS)
        chat.set("Temperature", "1")  # so that answers to one question differ
        chat.ask(question)
        chat.answers.last.get_by_role("button", name="Answer again, beside this one").click()
        expect(chat.answers.last).to_contain_text("2/2")
        wait_for_end(chat.answers.last)
    page.keyboard.press("Control+k")
    chat.set_limit(24)
    chat.set("Temperature", "1")
    chat.write_system("You are a gardener. You answer in one short sentence.")
    for question in QUESTIONS:
        chat.ask(question)
    said = page.get_by_role("article", name="You")
    said.nth(2).get_by_role("button", name="Edit as a new branch").click()
    page.get_by_role("textbox", name="The new text").fill("When do I plant them, if the winter is hard?")
    page.get_by_role("button", name="Save and ask").click()
    wait_for_end(chat.answers.last)
    chat.answers.last.get_by_role("button", name="Answer again, beside this one").click()
    expect(chat.answers.last).to_contain_text("2/2")
    wait_for_end(chat.answers.last)
    chat.send("And in a pot?", forks=3)
    for number in range(3):
        wait_for_end(chat.answers.nth(2 + number))
    page.get_by_role("button", name="Go on with this one").nth(1).click()
    chat.ask("Thank you. What do I need first?")


def use_for_an_hour(url: str, page: Page) -> None:
    programs = Programs(url)
    programs.classify()
    programs.run_agent()
    chat_on_page(page)
    programs.ask_about_document()
    page.wait_for_timeout(AFTERGLOW_MS)


def take_pictures(page: Page, folder: Path) -> None:
    """The page with this conversation in light colours, and with everything in dark ones: wide and narrow."""
    for scheme, shown in (("light", "This conversation"), ("dark", "Everything")):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": 1400, "height": 900})
        page.get_by_role("radio", name=shown).check()
        take_picture(page, folder / f"hour-wide-{scheme}.png")
        page.set_viewport_size({"width": 400, "height": 800})
        page.get_by_role("navigation", name="Panes").get_by_role("button", name="Tree").click()
        take_picture(page, folder / f"hour-narrow-{scheme}.png")


def take_picture(page: Page, file: Path) -> None:
    page.wait_for_timeout(600)  # until nothing moves
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=ANSWER_MS)
    with (
        tempfile.TemporaryDirectory() as data,
        running("smollm2", Path(data), lanes=4) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(ANSWER_MS)
        page.goto(server.url)
        use_for_an_hour(server.url, page)
        take_pictures(page, folder)
        print(page.locator(".live-totals").inner_text())
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
