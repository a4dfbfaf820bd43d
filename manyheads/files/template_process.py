"""The program that renders chat templates in a process of its own, with little memory and time and no files.

It reads a JSON object from standard input, {"template", "conversations", …}, and prints {"texts": […]}, {"refused": …}
or {"error": …}. It imports nothing of manyheads, so that it starts fast. The environment is that of transformers.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2.debug
import jinja2.ext
import jinja2.sandbox

WARM_UP = "{{ 'é\\n' | tojson | upper | pprint }}{{ strftime_now('%Y') }}"


class Namespace(jinja2.utils.Namespace):
    """The namespace of a template, without names that Python reserves."""

    def __init__(*args: Any, **attributes: Any) -> None:  # a template may name an attribute `self`
        self, values = args[0], dict(*args[1:], **attributes)
        for name in values:
            check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"an attribute of a namespace cannot be named {name!r}")


class Dict:
    """The function `dict` of a template, which is not the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's text for training: here its content alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller: Any) -> str:
        return str(caller())


class RefusedError(Exception):
    """A template does not accept a conversation, or makes too long a text of it."""


def raise_exception(message: str) -> None:
    raise RefusedError(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format: str) -> str:  # noqa: A002
    return datetime.now().strftime(format)


def environment() -> jinja2.Environment:
    """What a template can use."""
    extensions = [Generation, jinja2.ext.loopcontrols]
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = tojson
    env.globals |= {
        "raise_exception": raise_exception, "strftime_now": strftime_now, "dict": Dict(), "namespace": Namespace,
    }  # fmt: skip
    return env


def limit(kind: int, value: int) -> None:
    try:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    except (ValueError, OSError):  # a system without this limit; the parent's time limit holds everywhere
        pass


def limit_resources(max_bytes: int) -> None:
    """Limits memory, and opens, writes and starts nothing from now on."""
    limit(resource.RLIMIT_AS, max_bytes)
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        limit(kind, 0)


def render(request: dict[str, Any]) -> Iterator[str]:
    """Yields the text of each conversation; a template that takes too long ends the process."""
    limit_resources(request["max_bytes"])
    for i, messages in enumerate(request["conversations"]):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + request["seconds"])
        if i == 0:
            template = environment().from_string(request["template"])
        pieces, remaining = [], request["max_characters"]
        for piece in template.generate(messages=messages, **request["variables"]):
            pieces.append(piece)
            remaining -= len(piece)
            if remaining < 0:
                raise RefusedError(f"its text has more than {request['max_characters']:,} characters")
        yield "".join(pieces)


def main() -> None:
    request = json.load(sys.stdin)
    environment().from_string(WARM_UP).render()  # Python and Jinja import some modules at their first use
    texts: list[str] = []
    try:
        texts.extend(render(request))
        result: dict[str, Any] = {"texts": texts}
    except RefusedError as error:
        result = {"refused": str(error)[:1000], "index": len(texts)}
    except MemoryError:
        result = {"error": "it needs too much memory"}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:1000]}
    limit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1])
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
