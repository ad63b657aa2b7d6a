"""Tile tasks: one file for each kind, with its Triton body, its tiling and its torch oracle."""

from megaflow.tasks.attention import ATTENTION
from megaflow.tasks.embedding import EMBEDDING
from megaflow.tasks.linear import LINEAR
from megaflow.tasks.select import SELECT

KINDS = (EMBEDDING, LINEAR, ATTENTION, SELECT)

__all__ = ["ATTENTION", "EMBEDDING", "KINDS", "LINEAR", "SELECT"]
