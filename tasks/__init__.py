"""Tile tasks: one file for each kind, with its Triton body, its tiling and its torch oracle."""

from megaflow.tasks.attention import ATTENTION
from megaflow.tasks.combine import COMBINE
from megaflow.tasks.embedding import EMBEDDING
from megaflow.tasks.expert_linear import EXPERT_LINEAR
from megaflow.tasks.group import GROUP
from megaflow.tasks.linear import LINEAR
from megaflow.tasks.select import SELECT
from megaflow.tasks.slot_linear import SLOT_LINEAR
from megaflow.tasks.topk import TOPK

KINDS = (EMBEDDING, LINEAR, EXPERT_LINEAR, SLOT_LINEAR, ATTENTION, COMBINE, TOPK, GROUP, SELECT)

__all__ = [
    "ATTENTION",
    "COMBINE",
    "EMBEDDING",
    "EXPERT_LINEAR",
    "GROUP",
    "KINDS",
    "LINEAR",
    "SELECT",
    "SLOT_LINEAR",
    "TOPK",
]
