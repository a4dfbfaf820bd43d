"""A client of the page's server with an open session, and the plain forward pass that its answers must match."""

from __future__ import annotations

import torch
from fastapi.testclient import TestClient
from shown_checkpoints import TEXT

from manyheads.model.recording import record
from manyheads.studio import app
from manyheads.studio.session import Sessions

HOST = "127.0.0.1:1"


class Client:
    """An open session, and requests whose answer must have a status, or the code of an error."""

    def __init__(self, *checkpoints, text="", steps=None, paths=None):
        paths = paths or [f"model{i}" for i in range(len(checkpoints))]
        self.sessions = Sessions(checkpoints, paths, text, steps)
        server = app.create_app(self.sessions, "secret", {HOST})
        self.client = TestClient(server, base_url=f"http://{HOST}/secret/api/", raise_server_exceptions=False)
        self.key = self.client.post("session").json()["session"]

    def get(self, path, check=200, code=None, **fields):
        return self.checked(self.client.get(path, params={"session": self.key, **fields}), check, code)

    def post(self, path, check=200, code=None, **fields):
        return self.checked(self.client.post(path, json={"session": self.key, **fields}), check, code).json()

    def checked(self, answer, check, code):
        assert answer.status_code == (422 if code else check), answer.text
        assert code is None or answer.json()["code"] == code
        return answer


class Page(Client):
    """The tab Look."""

    def run(self, text=TEXT, check=200, **fields):
        return self.post("look/run", check, text=text, **fields)

    def get(self, path, run, check=200, **fields):
        return super().get(f"look/{path}", check, run=run["run"], **fields)

    def next_tokens(self):
        return self.get("next", self.run(), position=0).json()["tokens"]

    def tile(self, run, **fields):
        answer = self.get("tile", run, **{"row": 0, "column": 0, **fields})
        height, width = map(int, answer.headers["x-shape"].split())
        return torch.frombuffer(bytearray(answer.content), dtype=torch.float32).reshape(height, width)


def literal(checkpoint, run):
    """The tape of a plain recorded forward pass on the tokens that the page shows."""
    ids = {name: torch.tensor([text["ids"]]) for name, text in run["texts"].items()}
    with record(checkpoint.model) as tape:
        logits = checkpoint.logits(ids["source"], ids["target"]) if "source" in ids else checkpoint.logits(ids["text"])
    return tape, logits[0]
