"""The bytes that a decode step has to read, which bound its time from below."""

from megaflow.models.geometry import Geometry
from megaflow.tasks.packing import padded

ELEMENT_BYTES = 2  # weight matrices and the cache are bfloat16
VECTOR_BYTES = 4  # norm weights are float32


def step_bytes(model: Geometry, batch: int, context: int) -> int:
    """Bytes that a decode step has to read: all weights once, and the keys and values of each sequence.

    Weights count as packed, in whole blocks. An embedding that is not the LM head too is read by the row,
    one for each sequence.

    Args:
        context: positions of each sequence that are in the cache.
    """

    def matrix(rows: int, columns: int) -> int:
        return padded(rows) * padded(columns) * ELEMENT_BYTES

    layer = (
        matrix(model.qkv_rows, model.hidden)
        + matrix(model.hidden, model.attention_width)
        + matrix(2 * model.intermediate, model.hidden)
        + matrix(model.hidden, model.intermediate)
        + VECTOR_BYTES * 2 * (model.hidden + model.head_dim)
    )
    head = matrix(model.vocab, model.hidden) + VECTOR_BYTES * model.hidden
    embedding = 0 if model.tied else batch * padded(model.hidden) * ELEMENT_BYTES
    position = 2 * model.layers * model.kv_heads * model.head_dim * ELEMENT_BYTES
    return model.layers * layer + head + embedding + batch * context * position
