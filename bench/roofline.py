"""The bytes that a decode step has to read, which bound its time from below."""

from megaflow.models.geometry import Geometry
from megaflow.tasks.expert_linear import active_experts
from megaflow.tasks.packing import padded

ELEMENT_BYTES = 2  # weight matrices and the cache are bfloat16
VECTOR_BYTES = 4  # norm weights are float32


def step_bytes(model: Geometry, batch: int, context: int) -> int:
    """Bytes that a decode step has to read: weights once, and the keys and values of each sequence.

    Of a sparse layer only active experts count: as many as are expected if each token chose its experts evenly, not
    those of a certain run. Weights count as packed, in whole blocks. An embedding that is not the LM head too is read
    by the row, one for each sequence.

    Args:
        context: positions of each sequence that are in the cache.
    """

    def matrix(rows: int, columns: int) -> int:
        return padded(rows) * padded(columns) * ELEMENT_BYTES

    attention = (
        matrix(model.qkv_rows, model.hidden)
        + matrix(model.hidden, model.attention_width)
        + VECTOR_BYTES * 2 * (model.hidden + model.head_dim)
    )

    def mlp(width: int) -> int:
        return matrix(2 * width, model.hidden) + matrix(model.hidden, width)

    layers = model.layers * attention
    sparse = 0
    if experts := model.experts:
        sparse = len(experts.layers)
        active = active_experts(experts.count, batch, experts.per_token) * mlp(experts.width)[0]
        layers += sparse * (matrix(experts.count, model.hidden) + round(active))
    layers += (model.layers - sparse) * mlp(model.intermediate)
    head = matrix(model.vocab, model.hidden) + VECTOR_BYTES * model.hidden
    embedding = 0 if model.tied else batch * padded(model.hidden) * ELEMENT_BYTES
    position = 2 * model.layers * model.kv_heads * model.head_dim * ELEMENT_BYTES
    return layers + head + embedding + batch * context * position
