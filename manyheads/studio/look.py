"""The tab Look: the attention of a text, from the grid of all heads to one cell."""

from __future__ import annotations

from fastapi import APIRouter

from manyheads.studio.session import Sessions


def router(sessions: Sessions) -> APIRouter:
    return APIRouter()
