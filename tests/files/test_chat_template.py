"""Chat templates: each renders as in transformers, and a hostile one neither runs anything nor takes much time or memory."""

from __future__ import annotations

import pytest
from chat_examples import ANSWERED, ASKED, CONVERSATIONS, TEMPLATES, byte_tokenizer
from raising import raises

from manyheads.errors import InputError
from manyheads.files import chat_template
from manyheads.files.chat_template import render_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def in_transformers(template, conversations):
    """What transformers renders, None where the template raises."""
    from jinja2.exceptions import TemplateError
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), chat_template=template, **TOKENS)
    texts = []
    for messages in conversations:
        try:
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError:
            texts.append(None)
    return texts


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name):
    expected = in_transformers(TEMPLATES[name], CONVERSATIONS)
    variables = TOKENS | {"add_generation_prompt": True}
    rendered = [text for text in expected if text is not None]
    accepted = [conversation for conversation, text in zip(CONVERSATIONS, expected, strict=True) if text is not None]
    assert len(accepted) >= 3
    assert render_template(TEMPLATES[name], accepted, variables) == rendered
    for messages, text in zip(CONVERSATIONS, expected, strict=True):
        if text is None:
            with raises("input.invalid"):
                render_template(TEMPLATES[name], [messages], variables)


HOSTILE = {
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a long text": "{{ 'a' * 10 ** 9 }}",
    "a long list": "{{ [1] * 10 ** 9 }}",
    "memory without output": "{% set x = 'a' * 10 ** 9 %}done",
    "padding": "{{ '%1000000000d' % 1 }}",
    "a growing text": "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "a class": "{{ ''.__class__.__mro__ }}",
    "a class in a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['sys'].modules }}",
    "globals of a built-in": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "a reserved name": "{% set ns = namespace(__class__=1) %}",
    "a reserved name later": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changed messages": "{{ messages.append(1) }}",
    "a changed message": "{{ messages[0].update(role='system') }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/hosts' %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "depth": "{{" + "(" * 9999 + "1" + ")" * 9999 + "}}",
    "syntax": "{% for %}",
    "undefined": "{{ nothing.at.all }}",
    "an unknown filter": "{{ 1 | system }}",
    "division": "{{ 1 / 0 }}",
    "half of a surrogate pair": r"{{ '\ud83d' }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_an_error(name):
    with raises("input.invalid" if name == "much output" else "checkpoint.chat-template"):
        render_template(HOSTILE[name], [ANSWERED], {})


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 9) }}",  # one operation, which no signal handler of Python interrupts
    ],
)
def test_a_template_that_does_not_end_is_killed(template, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    with raises("checkpoint.chat-template", 1):
        render_template(template, [ASKED], {})


def test_the_time_limit_is_for_each_conversation_and_not_for_all(monkeypatch):
    """The limit is of processor time, so a busy machine changes nothing."""
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    template = "{% for i in range(99999) %}{% for j in range(8) %}{% endfor %}{% endfor %}x"
    assert render_template(template, [ASKED] * 8, {}) == ["x"] * 8


def test_the_process_opens_writes_and_starts_nothing(tmp_path):
    """Even if the sandbox had a hole: what a template could call then fails."""
    import json
    import subprocess
    import sys

    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
import template_process
template_process.limit_resources(1 << 29)
for attempt in (lambda: open("/etc/hosts"), lambda: open(sys.argv[2], "w"), lambda: __import__("wave")):
    try:
        attempt()
    except (OSError, ImportError):
        print("refused")
"""
    folder = chat_template.PROGRAM.parent
    command = [sys.executable, "-P", "-c", code, str(folder), str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["refused"] * 3, json.dumps([done.stdout, done.stderr])
    assert not (tmp_path / "file").exists()


def test_an_error_of_a_template_is_one_printable_line():
    with pytest.raises(InputError) as caught:
        render_template("{{ raise_exception('a\\n\\x1b[31m' ~ 'b' * 5000) }}", [ASKED], {})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
