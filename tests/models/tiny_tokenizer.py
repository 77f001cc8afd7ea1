"""Tokenizers trained on a few lines, and templates of every awkward kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

LINES = [
    "You are a helpful assistant. What is the capital of France? The capital of France is Paris.",
    "user assistant system tool Human Assistant thinking: one two three, 1 2 3\n\n\nHello there, how are you?\n",
    "Grüße aus Köln, 你好 world 🙂 and <|im_start|> <|im_end|> <think> </think>",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BARE_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMS = BARE_CHATML.replace("message['content']", "message['content'] | trim")
# The system text goes into the first user message, roles must alternate, and an end token follows each answer.
ALTERNATES = """
{%- if messages[0]['role'] == 'system' -%}
  {%- set system = messages[0]['content'] + '\n\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{{- '<|endoftext|>' -}}
{%- for message in turns -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
  {{- '<|im_start|>' + message['role'] + '\n' + (system if loop.first else '') -}}
  {{- message['content'] | trim + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# Thinking is shown only behind the last user message; tools are listed in the system part; tool results are grouped.
THINKS = """
{%- if tools %}{{ '<|im_start|>system\n' + (messages[0].content + '\n' if messages[0].role == 'system' else '') }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- elif message.role == 'assistant' %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\n') if loop.index0 < ns.last else message.content %}
    {{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
  {%- elif message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>\n' if enable_thinking else '') }}{% endif %}
"""
# No special tokens between messages: text may merge across their borders.
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% else %}{{ 'The end.' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(
    template: str | None = CHATML, *, lines: Sequence[str] = LINES, vocab_size: int = 400, **options: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 tokens, with three special tokens and four added ones that are not special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*lines, *lines], trainer)
    backend.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=SPECIAL[:2], **options
    )
    hf.chat_template = template
    return hf


def sentencepiece(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A vocabulary as sentencepiece makes it: `▁` for spaces, one in front of the text, and bytes for what is unknown."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for text in ("▁", *"abcdefghijklmnopqrstuvwxyz<|>_"):
        pieces[text] = len(pieces)
    backend = Backend(models.BPE(vocab=pieces, merges=[], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=SPECIAL[:2])
    hf.chat_template = template
    return hf
