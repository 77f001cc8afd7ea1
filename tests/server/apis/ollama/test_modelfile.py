"""Modelfiles: what is read, and that what is written can be read again."""

from __future__ import annotations

import pytest

from bough.errors import RequestError
from bough.models.aliases import Overlay
from bough.server.apis.ollama.modelfile import Modelfile, parse_modelfile, write_modelfile, write_parameters

TEXT = '''# a comment
FROM small

system """You are a pirate.
Say "arr"."""
PARAMETER num_predict 8
Parameter temperature 0.5
PARAMETER use_mmap false
PARAMETER stop "</s> "
PARAMETER stop <|x|>
TEMPLATE """{{ .Prompt }}
# no comment
"""
MESSAGE user Hello there
MESSAGE ASSISTANT """Arr
arr"""
LICENSE MIT
LICENSE "another"'''


def test_a_modelfile_is_read():
    assert parse_modelfile(TEXT) == Modelfile(
        source="small",
        system='You are a pirate.\nSay "arr".',
        template="{{ .Prompt }}\n# no comment\n",
        license=["MIT", "another"],
        parameters={"num_predict": 8, "temperature": 0.5, "use_mmap": False, "stop": ["</s> ", "<|x|>"]},
        messages=[{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Arr\narr"}],
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [("FROM a\nADAPTER ./b", "'ADAPTER'"), ("hello", "'hello'"), ('SYSTEM """a', 'SYSTEM with """')],
)
def test_what_is_not_supported_is_refused_by_name(text, named):
    with pytest.raises(RequestError, match=named):
        parse_modelfile(text)


def test_what_is_written_can_be_read_again():
    parameters = {"stop": ["\n", 'a "b"'], "temperature": 0.5}
    overlay = Overlay(system="a\nb", messages=({"role": "user", "content": "x\ny"},), license="MIT")

    found = parse_modelfile(write_modelfile("small", "{{ .Prompt }}\n", parameters, overlay))

    assert (found.source, found.template, found.parameters) == ("small", "{{ .Prompt }}\n", parameters)
    assert (found.system, found.messages, found.license) == ("a\nb", [dict(overlay.messages[0])], ["MIT"])


def test_each_stop_string_has_a_line():
    assert [line.split() for line in write_parameters({"seed": 1, "stop": ["a", "\n"]}).splitlines()] == [
        ["seed", "1"],
        ["stop", '"a"'],
        ["stop", '"\\n"'],
    ]
