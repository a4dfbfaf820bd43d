"""A client of the page's server with an open session, and the plain forward pass that its answers must match."""

from __future__ import annotations

import torch
from fastapi.testclient import TestClient
from shown_checkpoints import TEXT

from manyheads.model.recording import record
from manyheads.studio import app
from manyheads.studio.session import Sessions

HOST = "127.0.0.1:1"


class Page:
    """A client with an open session."""

    def __init__(self, *checkpoints, text="", steps=None):
        self.sessions = Sessions(checkpoints, [f"model{i}" for i in range(len(checkpoints))], text, steps)
        made = app.create_app(self.sessions, "secret", {HOST})
        self.client = TestClient(made, base_url=f"http://{HOST}/secret/api/", raise_server_exceptions=False)
        self.key = self.client.post("session").json()["session"]

    def run(self, text=TEXT, check=200, **fields):
        answer = self.client.post("look/run", json={"session": self.key, "text": text, **fields})
        assert answer.status_code == check, answer.text
        return answer.json()

    def get(self, path, run, check=200, **fields):
        answer = self.client.get(f"look/{path}", params={"session": self.key, "run": run["run"], **fields})
        assert answer.status_code == check, answer.text
        return answer

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
