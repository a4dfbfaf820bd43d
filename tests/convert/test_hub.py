"""Checkpoints by name: the Hub's own library downloads them from a local server that stands for the Hub."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from functools import partial

import command
import pytest
import torch
from small_checkpoints import make
from tokenizers import Tokenizer, models, pre_tokenizers

from manyheads.convert.hub import is_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = """
import sys, torch, manyheads
assert "huggingface_hub" not in sys.modules
loaded = manyheads.load(sys.argv[1])
print(loaded.spec.architecture, float(loaded.logits(torch.tensor([[3, 5, 7]])).double().sum()))
if len(sys.argv) > 2:
    rows = {row.check: row.status for row in manyheads.audit(sys.argv[1])}
    print(rows["agrees with a reference implementation"])
sys.exit()  # there is no command
"""


@pytest.fixture
def hub(tmp_path):
    """One repository, someone/small, with weights, a pickle and code; and the list of requests."""
    folder = tmp_path / "repository"
    theirs = make("GPT2LMHeadModel", "GPT2Config").eval()
    theirs.save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never downloaded")
    (folder / "modeling_own.py").write_text("raise SystemExit('executed')")
    requests = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/someone/small"):
                names = [
                    {
                        "type": "file",
                        "path": file.name,
                        "rfilename": file.name,
                        "oid": "0" * 40,
                        "size": file.stat().st_size,
                    }
                    for file in folder.iterdir()
                ]
                listing = (
                    names
                    if "/tree/" in path
                    else {
                        "id": "someone/small",
                        "sha": COMMIT,
                        "siblings": names,
                        "private": False,
                        "downloads": 0,
                        "likes": 0,
                        "tags": [],
                    }
                )
                return self.answer(json.dumps(listing).encode())
            if path.startswith("/someone/small/resolve/"):
                data = (folder / path.rpartition("/")[2]).read_bytes()
                return self.answer(
                    data,
                    {
                        "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                        "X-Repo-Commit": COMMIT,
                        "Accept-Ranges": "bytes",
                    },
                )
            return self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)

        do_HEAD = do_GET

        def answer(self, data, headers=None, status=200):
            self.send_response(status)
            for name, value in (
                {"Content-Type": "application/json", "Content-Length": str(len(data))} | (headers or {})
            ).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *args): ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests, theirs
    server.shutdown()
    server.server_close()


def environment_of(endpoint, cache):
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return os.environ | hub


def run(name, endpoint, cache, *options, **more):
    """In a process that has not imported the Hub's library, which reads the environment once."""
    return command.run(
        name, *options, check=None, env=environment_of(endpoint, cache) | more, before=partial(exec, LOAD)
    )


def test_a_name_is_downloaded_once_and_only_the_files_that_are_read(hub, tmp_path):
    endpoint, requests, theirs = hub
    done = run("someone/small", endpoint, tmp_path / "cache", "audit")
    assert done.returncode == 0, done.stderr
    (shape, total), verdict = done.stdout.splitlines()[0].split(), done.stdout.splitlines()[1]
    assert verdict == "passed"
    ids = torch.tensor([[3, 5, 7]])
    assert (shape, float(total)) == (
        "decoder",
        pytest.approx(float(theirs(ids).logits.detach().double().sum()), abs=1e-3),
    )
    assert not [path for path in requests if path.endswith((".bin", ".py"))]
    offline = run("someone/small", endpoint, tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert offline.stdout.splitlines() == done.stdout.splitlines()[:1]


def test_a_name_is_used_as_its_folder_is(hub, tmp_path):
    endpoint, texts = hub[0], tmp_path / "texts"
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(61)}, unk_token="word0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "repository" / "tokenizer.json"))
    texts.write_text("word3 word5\nword7 word9 word11\n")
    options = ["--file", str(texts), "--max-new-tokens", "5"]
    environment = environment_of(endpoint, tmp_path / "cache")
    there, here = (
        command.run("predict", path, *options, env=environment).stdout
        for path in ("someone/small", tmp_path / "repository")
    )
    assert there == here != ""
    there, here = (
        command.run_json("evaluate", path, "--data", texts, env=environment)["metrics"]
        for path in ("someone/small", tmp_path / "repository")
    )
    assert there == here


def test_a_model_that_cannot_be_downloaded_is_one_line(hub, tmp_path):
    endpoint, _, _ = hub
    for name, address in (("someone/else", endpoint), ("someone/small", "http://127.0.0.1:9")):
        done = run(name, address, tmp_path / "none", HF_HUB_DOWNLOAD_TIMEOUT="2", HF_HUB_ETAG_TIMEOUT="2")
        error, _, message = done.stderr.strip().splitlines()[-1].partition(": ")
        assert error == "manyheads.errors.PathNotFoundError", done.stderr[-1500:]
        assert name in message
        assert len(message) < 300


@pytest.mark.parametrize(
    "text",
    [
        "small",
        "./someone/small",
        "/someone/small",
        "../x",
        "a/b/c",
        "someone/..",
        "a b/c",
        "someone/",
        "x/y\n",
        "a/b@/etc",
        "a/b@../x",
        "a/b@-x",
        "a/b@x//y",
        "runs/last.pt",
        "models/x.gguf",
        "a/b--c",
        "a/b.git",
        "a./b",
        "é/b",
    ],
)
def test_what_is_not_a_name_on_the_hub(text):
    assert not is_name(text)


def test_a_name_on_the_hub_is_an_owner_a_name_and_perhaps_a_revision():
    assert is_name("someone/small")
    assert is_name("someone/small@v1.0")
    assert is_name("someone/small@refs/pr/1")
