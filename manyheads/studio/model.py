"""The tab Model: a drawing of the architecture, and what changes when a part is swapped."""

from __future__ import annotations

from fastapi import APIRouter

from manyheads.studio.session import Sessions


def router(sessions: Sessions) -> APIRouter:
    return APIRouter()
