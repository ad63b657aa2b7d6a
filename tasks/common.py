"""Small Triton functions that several task bodies share."""

from megaflow.backend import jit, tl


@jit
def pointer(row, field: tl.constexpr, dtype: tl.constexpr):
    """The pointer in a field of an operator's row."""
    return tl.load(row + field).to(tl.pointer_type(dtype))


@jit
def number(row, field: tl.constexpr):
    """The int32 in a field of an operator's row."""
    return tl.load(row + field).to(tl.int32)
