"""The README runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from command import run

from manyheads import read_model
from manyheads.cli import demo
from manyheads.spec import parse
from manyheads.train.run import RunSpec, read_run

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_readme_runs_as_written(tmp_path):
    described = tmp_path / "model.toml"
    model, dates, beginning, shaping = blocks("toml")
    described.write_text(model)
    assert "window=64" in run("show", described).stdout
    assert read_run(tomllib.loads(dates)) == read_run(demo.RUN)
    assert len(read_run(tomllib.loads(dates) | tomllib.loads(shaping)).shaping) == 3
    tree = tomllib.loads(beginning)
    assert parse(RunSpec, tree | {"model": read_model({"vocab": 9, "encoder": {}})}).lora.rank == tree["lora"]["rank"]
    for block in blocks("python"):
        subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    commands = [line.split("manyheads ", 1)[1] for line in lines if "manyheads show" in line]
    assert len(commands) >= 7
    (tmp_path / "my_parts.py").write_text(next(block for block in blocks("python") if "my_parts.py" in block))
    for arguments in commands:
        assert run(*arguments.split(), cwd=tmp_path).stdout
