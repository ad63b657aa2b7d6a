"""The bytes that a decode step has to read, which bound its time from below."""

from megaflow.models.geometry import Geometry
from megaflow.tasks.packing import padded

ELEMENT_BYTES = 2  # weight matrices and the cache are bfloat16
VECTOR_BYTES = 4  # norm weights are float32


def matrix_bytes(rows: int, columns: int) -> int:
    """Bytes of a packed matrix, in whole blocks."""
    return padded(rows) * padded(columns) * ELEMENT_BYTES


def mlp_bytes(hidden: int, width: int) -> int:
    """Bytes of the three matrices of an MLP, a dense layer's or an expert's."""
    return matrix_bytes(2 * width, hidden) + matrix_bytes(hidden, width)


def sparse_mlp_bytes(model: Geometry, active: float) -> float:
    """Bytes of a sparse layer's router and of its active experts, of which there may be a mean number."""
    experts = model.experts
    assert experts is not None
    return matrix_bytes(experts.count, model.hidden) + active * mlp_bytes(model.hidden, experts.width)


def step_bytes(model: Geometry, batch: int, context: int, active: float | None) -> int:
    """Bytes that a decode step has to read: weights once, and the keys and values of each sequence.

    Weights count as packed, in whole blocks. An embedding that is not the LM head too is read by the row, one for each
    sequence.

    Args:
        context: positions of each sequence that are in the cache.
        active: experts of a sparse layer that have any tokens, the mean over the layers; None in a dense model.
    """
    attention = (
        matrix_bytes(model.qkv_rows, model.hidden)
        + matrix_bytes(model.hidden, model.attention_width)
        + VECTOR_BYTES * 2 * (model.hidden + model.head_dim)
    )
    layers = model.layers * attention
    sparse = 0
    if model.experts:
        assert active is not None
        sparse = len(model.experts.layers)
        layers += round(sparse * sparse_mlp_bytes(model, active))
    layers += (model.layers - sparse) * mlp_bytes(model.hidden, model.intermediate)
    head = matrix_bytes(model.vocab, model.hidden) + VECTOR_BYTES * model.hidden
    embedding = 0 if model.tied else batch * padded(model.hidden) * ELEMENT_BYTES
    position = 2 * model.layers * model.kv_heads * model.head_dim * ELEMENT_BYTES
    return layers + head + embedding + batch * context * position
