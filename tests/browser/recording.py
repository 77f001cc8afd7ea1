"""Record the tree at work, for the README: `python -m tests.browser.recording docs/images/tree-at-work.png`.

A real server with the default model answers three questions under one system prompt and two forks. The frames become one
animated PNG.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.conftest import ANSWER_MS, FLAGS, find_chromium
from tests.browser.page_driver import Chat, wait_for_end
from tests.server.servers import running

SIZE = {"width": 1120, "height": 620}
FRAME_MS = 350
MOST_FRAMES = 60
NUM_COLOURS = 128
SYSTEM = "You are a librarian. You know every book about trees, rivers and bees, and you answer in one short sentence."
QUESTIONS = ("What shall I read about rivers?", "What shall I read about bees?", "When do you open?")


class Frames:
    """Pictures of a page, one after the other."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._images: list[Image.Image] = []

    def take(self, number: int = 1) -> None:
        for _ in range(number):
            if len(self._images) < MOST_FRAMES:
                self._images.append(Image.open(io.BytesIO(self._page.screenshot())).convert("RGB"))
            self._page.wait_for_timeout(FRAME_MS // 2)

    def save(self, file: Path) -> None:
        first, *others = self._with_one_palette()
        durations = [FRAME_MS] * len(others) + [3_000]
        first.save(file, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)

    def _with_one_palette(self) -> list[Image.Image]:
        """All frames in the same colours: an animated PNG has one palette."""
        width, height = self._images[0].size
        chosen = self._images[:: max(1, len(self._images) // 6)]
        together = Image.new("RGB", (width, height * len(chosen)))
        for number, image in enumerate(chosen):
            together.paste(image, (0, number * height))
        palette = together.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        return [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in self._images]


def record(page: Page) -> Frames:
    """Ask the questions, each in a conversation of its own, and look at the tree meanwhile."""
    chat, frames = Chat(page), Frames(page)
    for number, question in enumerate(QUESTIONS):
        page.keyboard.press("Control+k")
        chat.set_limit(20)
        chat.write_system(SYSTEM)
        chat.composer.fill(question)
        frames.take(2)
        chat.composer.press("Enter")
        for _ in range(8):
            frames.take()
        wait_for_end(chat.answers.first)
        frames.take(3 + number)
    chat.set("Temperature", "1")  # so that forks differ
    chat.send("And on Sundays?", forks=3)
    frames.take(10)
    for number in range(3):
        wait_for_end(chat.answers.nth(number + 1))
    frames.take(4)
    page.get_by_role("radio", name="Everything").check()
    frames.take(4)
    return frames


def main(file: Path) -> None:
    expect.set_options(timeout=ANSWER_MS)
    with (
        tempfile.TemporaryDirectory() as folder,
        running("smollm2", Path(folder), lanes=4) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(ANSWER_MS)
        page.goto(server.url)
        record(page).save(file)
        browser.close()
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
