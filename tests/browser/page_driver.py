"""What a person does on the page, as tests call it."""

from __future__ import annotations

import os
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

SCREENSHOTS = os.environ.get("SCREENSHOTS")  # a folder; `make screenshots` gives it


class Chat:
    """One page with its chat and its tree."""

    def __init__(self, page: Page) -> None:
        self.page = page
        expect(page.get_by_text("connected", exact=True)).to_be_visible()

    @property
    def composer(self) -> Locator:
        return self.page.get_by_role("textbox", name="Message", exact=True).first

    @property
    def answers(self) -> Locator:
        return self.page.get_by_role("article", name="Answer", exact=True)

    @property
    def tree(self) -> Locator:
        return self.page.get_by_role("tree", name="Tree of prefixes")

    @property
    def tree_counts(self) -> str:
        """The line above the tree: how many tokens in how many nodes."""
        return self.page.locator(".live-totals").inner_text()

    def send(self, text: str, *, forks: int = 1) -> None:
        self.composer.fill(text)
        if forks > 1:
            self.page.get_by_role("combobox", name="Number of answers").first.select_option(str(forks))
        self.composer.press("Enter")

    def ask(self, text: str) -> Locator:
        """Send a message and wait for the whole answer, which is returned."""
        number = self.answers.count()
        self.send(text)
        answer = self.answers.nth(number)
        wait_for_end(answer)
        return answer

    def set_limit(self, num_tokens: int) -> None:
        """Answers of this conversation have at most so many tokens: what the model writes is of no interest here."""
        self.set("Max tokens", str(num_tokens))

    def set(self, name: str, value: str) -> None:
        """Choose a setting of this conversation."""
        self.page.get_by_role("button", name="Settings of this conversation").first.click()
        self.page.get_by_label(name).fill(value)
        self.page.keyboard.press("Escape")

    def write_system(self, text: str) -> None:
        self.page.get_by_role("button", name="System prompt", exact=True).first.click()
        self.page.get_by_role("textbox", name="System prompt").fill(text)
        self.page.get_by_role("button", name="Save", exact=True).click()

    def screenshot(self, name: str) -> bytes:
        """A picture of the page; kept for the docs if a folder was given."""
        self.page.wait_for_timeout(600)  # until nothing moves
        path = Path(SCREENSHOTS) / f"{name}.png" if SCREENSHOTS else None
        return self.page.screenshot(path=path)


def wait_for_end(answer: Locator) -> None:
    expect(answer.get_by_text("computed", exact=False).first).to_be_visible()
    expect(answer.get_by_role("button", name="Stop")).to_have_count(0)
