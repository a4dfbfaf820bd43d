"""`manyheads chat` in a terminal and with piped input, and `predict --chat`: real processes, typed keys and signals."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from multiprocessing import Pipe

import pytest
from chat_examples import TEMPLATES, WORD_TEMPLATE, message, word_tokenizer
from command import at_terminal, error_of, run, run_json, started
from small_checkpoints import folder_of

import manyheads
from manyheads import Conversation


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A decoder with a chat template that never ends an answer."""
    return chat_folder(tmp_path_factory.mktemp("chat") / "model", max_position_embeddings=1 << 19)


def chat_folder(path, template=WORD_TEMPLATE, **options):
    tokenizer = word_tokenizer()
    folder_of("llama", path, tokenizer=False, vocab_size=tokenizer.get_vocab_size(), eos_token_id=None, **options)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    return path


def answers_of(folder, questions, system=None, **settings):
    conversation = Conversation(manyheads.load(folder), system=system, **{"max_new_tokens": 4} | settings)
    return [conversation.send(question) for question in questions]


def chat(folder, lines, *options, check=0, **more):
    text = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    return run("chat", folder, "--max-new-tokens", 4, *options, stdin=text, check=check, **more)


# -------------------------------------------------------------------------------------------------------- piped input


def test_a_line_that_is_not_text_is_refused_without_naming_an_option_that_chat_has_not(model):
    done = chat(model, [b"word1 \xff", "word2"], check=3)
    assert len(done.stdout.splitlines()) == 1
    assert "UTF-8" in done.stderr
    assert "--encoding-errors" not in done.stderr


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3, "top_k": 5}, {"system": "word9"}], ids=str)
def test_each_line_is_a_message_and_each_answer_is_printed(options, model):
    questions = ["word1 word2", "word3", "", "word4 word5 word6", " /word7", "word8"]
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = chat(model, questions, *flags)
    expected = answers_of(model, [question for question in questions if question], **options)
    assert done.stdout == "".join(f"{answer}\n" for answer in expected)
    assert len(set(expected)) > 1
    first = done.stderr.splitlines()[0]
    assert str(model) in first
    assert "524,288" in first


def test_messages_of_several_lines(model):
    done = chat(model, ["word1 \\", "word2\\", "word3", '"""', "word4", "", "word5 \\", '"""', '"""word6"""'])
    expected = answers_of(model, ["word1 \nword2\nword3", "word4\n\nword5 \\", "word6"])
    assert done.stdout.splitlines() == expected


def test_commands_change_the_conversation(model, tmp_path):
    saved = tmp_path / "a folder" / "chat.json"
    lines = [
        "word1", "word2", "/undo", "word3",  # 1, 2; 1, 3
        "/system word9 word8", "word4", "/save " + str(saved),
        "/reset", "word5", "/system", "word6", "/help", "/exit", "word7",
    ]  # fmt: skip
    done = chat(model, lines)
    conversation, expected = Conversation(manyheads.load(model), max_new_tokens=4), []
    for question in ("word1", "word2"):
        expected.append(conversation.send(question))
    conversation.undo()
    expected.append(conversation.send("word3"))
    conversation.system = "word9 word8"
    expected.append(conversation.send("word4"))
    messages = conversation.messages_from()
    conversation.reset()
    expected.append(conversation.send("word5"))
    conversation.system = None
    expected.append(conversation.send("word6"))
    assert done.stdout.splitlines() == expected
    assert json.loads(saved.read_text(encoding="utf-8")) == messages
    assert messages[0] == message("system", "word9 word8")
    assert "/undo" in done.stderr


def test_a_line_that_cannot_be_answered_costs_that_line(model, tmp_path):
    """An unknown command, a file that exists, bytes that are not text: nothing is sent, and the rest is answered."""
    file = tmp_path / "chat.json"
    file.write_text("mine")
    wrong = ["/unknown", "/save", f"/save {file}", f"/save {file}/inside", "/undo", "/reset now", "/Undo", "/"]
    done = chat(model, [*wrong, "word1", "/undo", "/undo", "word2"], check=3)
    assert done.stdout.splitlines() == [*answers_of(model, ["word1"]), *answers_of(model, ["word2"])]
    assert done.stderr.count("\nmanyheads: ") == len(wrong) + 1
    assert "Traceback" not in done.stderr
    assert file.read_text() == "mine"
    done = run("chat", model, "--max-new-tokens", 4, stdin=b"\xff\nword1\n\0\n", check=3)
    assert done.stdout.splitlines() == answers_of(model, ["word1"])
    for unfinished in ('word1\n"""word2\nword3\n', "word1\nword2\\\n"):
        done = run("chat", model, "--max-new-tokens", 4, stdin=unfinished.encode(), check=3)
        assert done.stdout.splitlines() == answers_of(model, ["word1"])
    assert run("chat", model, stdin=b"").stdout == ""


def test_a_full_context_is_told_and_a_long_message_is_refused(tmp_path):
    folder = chat_folder(tmp_path / "model", max_position_embeddings=40)
    questions = [f"word{i} word{i}" for i in range(6)]
    done = chat(folder, [*questions[:4], "word1 " * 50, *questions[4:]], check=3)
    with pytest.warns(UserWarning, match="40"):
        assert done.stdout.splitlines() == answers_of(folder, questions)
    notes = [line for line in done.stderr.splitlines() if "40" in line]
    assert len(notes) >= 4, "the first line, two or more times that something was dropped, and the error"
    assert notes[-2 if "not read" in notes[-1] else -1].startswith("manyheads: ")


def test_a_template_that_refuses_a_conversation_does_not_end_it(tmp_path):
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + WORD_TEMPLATE
    )
    folder = chat_folder(tmp_path / "model", template)
    done = chat(folder, ["word1", "/system word9", "word2", "/system", "word3"], check=3)
    assert done.stdout.splitlines() == answers_of(folder, ["word1", "word3"])
    assert "no system prompt" in done.stderr


def test_what_is_wrong_from_the_start_is_an_error(model, tmp_path):
    bare, wrong = folder_of("llama", tmp_path / "bare"), chat_folder(tmp_path / "wrong", "{% for %}")
    for arguments in (["nowhere"], ["nowhere", "--temperature", -1], [bare], [model, "--device", "other"]):
        done = run("chat", *arguments, stdin=b"word1\n", check=2, cwd=tmp_path)
        assert (len(done.stderr.splitlines()), done.stdout) == (1, "")
    for arguments, check, code in (
        ([bare, "--chat"], 2, "model.unsupported"),
        ([model, "--system", "word2"], 2, "usage.argument"),
        ([model, "--chat", "--truncate"], 2, "usage.argument"),
        ([folder_of("bert", tmp_path / "bert"), "--chat"], 2, "model.unsupported"),
        ([wrong, "--chat"], 4, "checkpoint.chat-template"),
    ):
        assert error_of("predict", *arguments, "word1", check=check)["code"] == code


def test_a_message_in_quotes_is_no_command_and_costs_itself_alone(model):
    done = chat(model, ['"""', "/word1", '"""', '"""', "word2", b"\xff", "word3", '"""', "word4"], check=3)
    assert done.stdout.splitlines() == answers_of(model, ["/word1", "word4"])


def test_a_broken_template_ends_the_program(tmp_path):
    wrong = chat_folder(tmp_path / "wrong", "{% for %}")
    done = chat(wrong, ["word1", "word2"], check=4)
    assert done.stdout == ""


# ------------------------------------------------------------------------------------------------------ predict --chat


def test_predict_answers_one_message_or_one_per_line(model):
    questions = ["word1 word2", "word3", "word4 word5 word6"]
    common = ["predict", model, "--chat", "--max-new-tokens", 4]
    expected = [answers_of(model, [question])[0] for question in questions]
    assert run(*common, questions[0]).stdout == f"{expected[0]}\n"
    assert run(*common, questions[0], "--stream").stdout == f"{expected[0]}\n"
    result = run_json(*common, questions[0])
    assert result.pop("settings")["max_new_tokens"] == {"value": 4, "from": "caller"}
    assert result == {
        "schema": 1, "task": "causal", "text": questions[0], "generated": expected[0], "finish_reason": "length",
    }  # fmt: skip
    lines = "\n".join([*questions[:2], "", questions[2]]).encode()
    assert run(*common, stdin=lines).stdout.split("\n") == [*expected[:2], "", expected[2], ""]
    (system,) = answers_of(model, questions[:1], system="word9")
    assert run(*common, questions[0], "--system", "word9").stdout == f"{system}\n"
    assert system != expected[0]


# ------------------------------------------------------------------------------------------------------------ terminal


class Terminal:
    """A process of `manyheads chat` in a terminal."""

    def __init__(self, *arguments):
        self.process, self.master = at_terminal("chat", *arguments, TERM="dumb")
        self.output = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()
        os.close(self.master)

    def type(self, text):
        os.write(self.master, text.encode())

    def expect(self, text, key=""):
        """Waits for a text after what was expected before; returns what is between the two.

        Python's `input` does not see a signal that arrives just before it waits for a key, so `key` is typed again.
        """
        deadline = time.monotonic() + 120
        while text not in self.output:
            assert time.monotonic() < deadline, f"no {text!r} in {self.output!r}"
            self.type(key)
            while select.select([self.master], [], [], 3 if key else 1)[0] and text not in self.output:
                try:
                    self.output += os.read(self.master, 4096).decode(errors="replace")
                except OSError:  # the process is gone
                    raise AssertionError(f"no {text!r} in {self.output!r}") from None
        before, _, self.output = self.output.partition(text)
        return before

    def end(self, key=""):
        """The exit status; `key` is typed until the process has ended."""
        for _ in range(40):
            self.type(key)
            self.process.join(3)
            if self.process.exitcode is not None:
                return self.process.exitcode
        raise AssertionError(self.output)


def test_ctrl_c_stops_the_answer_and_not_the_program(model, tmp_path):
    """The answer of 100,000 tokens is shown as it grows; what there is when it is stopped stays in the conversation."""
    with Terminal(model, "--max-new-tokens", 100_000) as terminal:
        terminal.expect("> ")
        terminal.type("word1 word2\n")
        terminal.expect("word2\r\n")
        shown = "".join(terminal.expect(" ") + " " for _ in range(5))
        terminal.type("\x03")
        terminal.expect("stopped")
        terminal.expect("> ")
        terminal.type(f"/save {tmp_path / 'chat.json'}\n")
        terminal.expect("> ")
        terminal.type("word3\n")
        terminal.expect("word3\r\n")
        terminal.expect(" ")
        terminal.type("\x03")
        terminal.expect("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
    question, answer = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert question == message("user", "word1 word2")
    assert answer["role"] == "assistant"
    assert answer["content"].startswith(shown.strip())
    count = len(answer["content"].split())
    whole = manyheads.load(model).chat([question], max_new_tokens=count + 20)
    assert whole.startswith(answer["content"])


def test_keys_at_the_prompt(model):
    """Ctrl-C clears the line, a second one leaves, and so does Ctrl-D; the arrow key recalls a line."""
    (answer,) = answers_of(model, ["word1"])
    (first, second) = answers_of(model, ["word1", "word1"])
    with Terminal(model, "--max-new-tokens", 4) as terminal:
        terminal.expect("> ")
        terminal.type("word20 word21")
        terminal.expect("word21")
        terminal.expect("Ctrl-D", key="\x03")
        terminal.expect("> ")
        terminal.type("word1\n")
        terminal.expect("word1\r\n")
        assert terminal.expect("\r\n") == answer == first
        terminal.expect("> ")
        terminal.type("\x10\n")  # Ctrl-P, the line before
        terminal.expect("word1\r\n")
        assert terminal.expect("\r\n") == second
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    with Terminal(model) as terminal:
        terminal.expect("> ")
        terminal.expect("Ctrl-D", key="\x03")
        terminal.expect("> ")
        assert terminal.end(key="\x03") == 130


def test_ctrl_c_with_piped_input_ends_the_program(model, tmp_path):
    (stdin, typing), (reading, stdout), stderr = Pipe(duplex=False), Pipe(duplex=False), tmp_path / "err"
    stderr.touch()
    command = ("chat", model, "--max-new-tokens", 100_000)
    process = started(*command, stdin=stdin, stdout=stdout, stderr=stderr)
    with typing, reading:
        os.write(typing.fileno(), b"word1\n")
        assert os.read(reading.fileno(), 20), "the answer is written as it grows"
        os.kill(process.pid, signal.SIGINT)
        while os.read(reading.fileno(), 1 << 16):
            pass
        process.join(60)
    assert process.exitcode == 130
    assert "Traceback" not in stderr.read_text()


def test_templates_of_the_tests_are_used_by_the_command(tmp_path):
    """A template that needs an end token, which a folder without tokenizer_config.json has by its id."""
    folder = chat_folder(tmp_path / "model", TEMPLATES["renamed roles"])
    assert chat(folder, ["word1", "word2"]).stdout.splitlines() == answers_of(folder, ["word1", "word2"])
