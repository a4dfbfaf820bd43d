"""The page as one file: it runs its own script, loads nothing, and says what it leaves out."""

from __future__ import annotations

import re

from shown_checkpoints import HOSTILE, checkpoint, long_checkpoint

from manyheads.studio import offline
from manyheads.studio.session import Sessions


def test_the_offline_file_runs_its_own_script_and_loads_nothing():
    html, note = offline.offline_page(Sessions([checkpoint("pair")], ["x"], f"the cat {HOSTILE}"))
    assert "leaves out" not in note
    assert HOSTILE not in html
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.S)
    assert f"script-src '{offline.digest(script)}'" in policy
    assert f"style-src '{offline.digest(style)}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r'(src|href)="(?!data:,)', html.replace(script, ""))
    assert not re.search(r"^(import|export) ", script, re.M)


def test_the_offline_file_says_what_it_left_out(monkeypatch):
    sessions = Sessions([long_checkpoint()], ["x"], " ".join(str(i * i % 23) for i in range(600)))
    monkeypatch.setattr(offline, "MAX_DATA", 60_000)
    html, note = offline.offline_page(sessions)
    assert "leaves out" in note
    assert len(html) < 60_000 * 4 / 3 + 200_000
