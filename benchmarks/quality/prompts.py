"""The prompts of `python -m benchmarks quality`: texts of different kinds. Chats go through the model's template."""

from __future__ import annotations

from dataclasses import dataclass

_CHAT = "My bicycle squeaks when I brake, but only in the rain. What could be the reason, and what should I try first?"

_CODE = '''\
def read_table(path: str) -> list[dict[str, str]]:
    """Read a file of comma-separated values into a list of rows."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def group_by(rows: list[dict[str, str]], column: str) -> dict[str, list[dict[str, str]]]:
    """Group rows by the value of one column."""
'''

_PROSE = (
    "The lighthouse had stood empty for eleven winters when Marta came up the path with a lantern in one hand and the key "
    "in the other. The lock was stiff with salt. Below her the sea threw itself at the rocks, as it had on the night when "
    "her grandfather had written the last line into the book, and somebody had torn out the page. She"
)

_LIST = """\
Planets of the solar system, with their diameter and the length of their day:

1. Mercury: 4,879 km, 1,408 hours
2. Venus: 12,104 km, 5,832 hours
3. Earth:"""

_GERMAN = (
    "Am Montagmorgen fuhr der Zug mit zwanzig Minuten Verspätung in den Bahnhof ein. Die Reisenden auf dem Bahnsteig sahen "
    "einander an, als hätten sie nichts anderes erwartet. Eine Frau mit einem roten Koffer fragte den Schaffner, ob"
)

_DATA = """\
{"orders": [
  {"id": 1041, "customer": "Ines Weber", "items": [{"name": "notebook", "count": 3}], "paid": true},
  {"id": 1042, "customer": "Tom Hale", "items": [{"name": "stapler", "count": 1}], "paid": false},
  {"id": 1043,"""

_SUMMARY = (
    "Explain in plain words how a prefix cache makes a language model answer sooner: what is stored, when it can be used "
    "again, and what happens when memory runs out. Use short paragraphs."
)


@dataclass(frozen=True)
class QualityPrompt:
    """A text to continue, or a user's message to answer."""

    name: str
    text: str
    is_chat: bool = False


PROMPTS = (
    QualityPrompt("chat", _CHAT, is_chat=True),
    QualityPrompt("code", _CODE),
    QualityPrompt("prose", _PROSE),
    QualityPrompt("list", _LIST),
    QualityPrompt("German", _GERMAN),
    QualityPrompt("data", _DATA),
    QualityPrompt("explanation", _SUMMARY, is_chat=True),
)
