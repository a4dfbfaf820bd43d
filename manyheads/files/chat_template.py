"""Renders chat templates from other people: in Jinja's sandbox, and in a process with little memory and time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyheads.errors import ChatTemplateError, InputError
from manyheads.files.tokenizer import is_unicode_text
from manyheads.spec import shorten

Message = Mapping[str, str]  # its role and its content

PROGRAM = Path(__file__).with_name("template_process.py")
SECONDS = 5  # of processor time for a conversation; a usual one needs a thousandth of it
START_SECONDS = 60  # for the process to start, on a busy machine
MAX_CHARACTERS = 1 << 24  # of the text of a conversation
MAX_BYTES = 1 << 29  # of memory


def render_template(
    template: str, conversations: Sequence[Sequence[Message]], variables: Mapping[str, Any]
) -> list[str]:
    """The text of each conversation, as `apply_chat_template` of transformers renders it.

    A template is a program, and the sandbox bounds neither its time nor its memory, so another process runs it, which
    starts in a tenth of a second. A conversation that the template refuses, with raise_exception, is an InputError.
    """
    request = {
        "template": template,
        "conversations": [[dict(message) for message in messages] for messages in conversations],
        "variables": {"tools": None, "documents": None} | dict(variables),
        "seconds": SECONDS,
        "max_characters": MAX_CHARACTERS,
        "max_bytes": MAX_BYTES,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(PROGRAM)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=START_SECONDS + 2 * SECONDS * len(conversations),
            start_new_session=True,  # Ctrl-C is for us
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ChatTemplateError(f"the chat template took over {error.timeout:.0f} seconds") from None
    if done.returncode == -signal.SIGXCPU:
        raise ChatTemplateError(f"the chat template took over {SECONDS} seconds for a conversation")
    if done.returncode != 0:  # the process was killed, or its interpreter failed
        reason = done.stderr.strip().rpartition("\n")[2] or f"its process ended with {done.returncode}"
        raise ChatTemplateError(f"the chat template failed: {shorten(reason, 300)}")
    result = json.loads(done.stdout)
    if "refused" in result:
        raise InputError(f"the chat template refuses it: {shorten(result['refused'], 300)}", result["index"])
    if "error" in result:
        raise ChatTemplateError(f"the chat template failed: {shorten(result['error'], 300)}")
    texts: list[str] = result["texts"]
    if not all(map(is_unicode_text, texts)):
        raise ChatTemplateError("the chat template writes an unpaired surrogate")
    return texts
