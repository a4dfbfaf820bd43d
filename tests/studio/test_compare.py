"""The differences between all heads of two runs are those of their weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from shown_checkpoints import TEXT, checkpoint, long_checkpoint
from studio_client import Page, literal


def differences(page, run, other, info):
    data = page.get("differences", run, other=other["run"], name=info["name"]).content
    heads, (height, width) = info["heads"], info["thumbnail"]
    moved = torch.frombuffer(bytearray(data[: 4 * heads]), dtype=torch.float32)
    return moved, torch.frombuffer(bytearray(data[4 * heads :]), dtype=torch.int8).reshape(heads, height, width)


@pytest.mark.parametrize("name", ["decoder", "pair", "recurrent"])
def test_the_difference_of_heads_is_the_weight_that_moved(name):
    shown = checkpoint(name)
    page = Page(shown)
    run = page.run(add=[4, 5, 6])
    other = page.run("a cat sat on a mat . the dog ran", add=[5, 4, 6])
    tapes = [literal(shown, item)[0] for item in (run, other)]
    for info in run["attentions"]:
        change = tapes[0].weights(info["name"])[0] - tapes[1].weights(info["name"])[0]
        moved, pictures = differences(page, run, other, info)
        torch.testing.assert_close(moved, change.abs().sum(dim=-1).mean(dim=-1) / 2)
        expected = change.abs().sqrt() * change.sign() * 127  # so few tokens that each has a pixel
        torch.testing.assert_close(pictures.float(), expected, atol=0.51, rtol=0)
        assert moved.max() > 0.01
        assert differences(page, run, run, info)[0].max() == 0


def test_the_difference_of_a_long_text_is_the_largest_of_each_pixel():
    shown = long_checkpoint()
    page = Page(shown)
    run, other = (page.run(" ".join(str(i * i % size) for i in range(600))) for size in (23, 19))
    (info,) = run["attentions"]
    first, second = (literal(shown, item)[0].weights(info["name"])[0] for item in (run, other))
    moved, pictures = differences(page, run, other, info)
    change = F.pad(first - second, (0, -600 % 13, 0, -600 % 13)).unflatten(2, (-1, 13)).unflatten(1, (-1, 13))
    cells = change.transpose(2, 3).flatten(3)
    largest = cells.gather(-1, cells.abs().argmax(dim=-1, keepdim=True))[..., 0]
    torch.testing.assert_close(pictures.float(), largest.abs().sqrt() * largest.sign() * 127, atol=0.51, rtol=0)
    torch.testing.assert_close(moved, (first - second).abs().sum(dim=-1).mean(dim=-1) / 2)


def test_heads_of_other_shapes_are_not_compared():
    page = Page(checkpoint("decoder"))
    run, longer = page.run(), page.run(f"{TEXT} sat")
    name = run["attentions"][0]["name"]
    assert page.get("differences", run, check=422, other=longer["run"], name=name).json()["code"] == "usage.argument"
    assert page.get("differences", run, check=422, other="x", name=name).json()["code"] == "usage.expired"
