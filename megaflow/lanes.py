"""Task records and operators' rows in registers: a warp's 32 lanes hold a word each.

A load costs a worker most of a microsecond, after a wait always, since that empties the L1 cache. A record (16 int32)
takes one register of each thread and a row (32 int64) two, so a worker loads those of its next task while it runs the
one before, and reads their fields by shuffles.

Held words look like one scalar to Triton, but each lane has another: nothing may be done with them but to pass them on
and to read fields. In the interpreter they are the pointer.
"""

from megaflow.backend import interpreted, jit, tl
from megaflow.kinds import ROW_WIDTH
from megaflow.records import RECORD_WIDTH

INTERPRETED = tl.constexpr(interpreted())
ROW = tl.constexpr(ROW_WIDTH)
RECORD = tl.constexpr(RECORD_WIDTH)
assert RECORD_WIDTH == 16 and ROW_WIDTH == 32, "a word for each lane; the lanes beyond 16 hold a record's words again"

_LOAD_RECORD = tl.constexpr("""{
.reg .u32 lane;
.reg .u64 at;
mov.u32 lane, %laneid;
and.b32 lane, lane, 15;
mad.wide.u32 at, lane, 4, $1;
ld.global.b32 $0, [at];
}""")

_LOAD_ROW = tl.constexpr("""{
.reg .u32 lane;
.reg .u64 at;
mov.u32 lane, %laneid;
mad.wide.u32 at, lane, 8, $1;
ld.global.b64 $0, [at];
}""")

_WORD = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;")

_NUMBER = tl.constexpr("""{
.reg .b32 low, high;
mov.b64 {low, high}, $1;
shfl.sync.idx.b32 $0, low, $2, 31, 0xffffffff;
}""")

_LONG = tl.constexpr("""{
.reg .b32 low, high;
mov.b64 {low, high}, $1;
shfl.sync.idx.b32 low, low, $2, 31, 0xffffffff;
shfl.sync.idx.b32 high, high, $2, 31, 0xffffffff;
mov.b64 $0, {low, high};
}""")


@jit
def hold_record(records, index):
    """Load a record, int32 [RECORD_WIDTH] at its index among `records`; nothing waits until a field is read."""
    at = records + index * RECORD
    if INTERPRETED:
        return at
    else:
        return tl.inline_asm_elementwise(_LOAD_RECORD, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@jit
def hold_row(table, operator):
    """Load an operator's row, int64 [ROW_WIDTH]; nothing waits until a field is read."""
    at = table + operator * ROW
    if INTERPRETED:
        return at
    else:
        return tl.inline_asm_elementwise(_LOAD_ROW, "=l,l", [at], dtype=tl.int64, is_pure=False, pack=1)


@jit
def word(record, field: tl.constexpr):
    """A field of a held record, int32."""
    # not pure: moved to where only some threads run, the shuffle would wait for the others
    if INTERPRETED:
        return tl.load(record + field)
    else:
        return tl.inline_asm_elementwise(_WORD, "=r,r,r", [record, field], dtype=tl.int32, is_pure=False, pack=1)


@jit
def number(row, field: tl.constexpr):
    """The int32 in a field of a held row."""
    if INTERPRETED:
        return tl.load(row + field).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(_NUMBER, "=r,l,r", [row, field], dtype=tl.int32, is_pure=False, pack=1)


@jit
def long(row, field: tl.constexpr):
    """The int64 in a field of a held row."""
    if INTERPRETED:
        return tl.load(row + field)
    else:
        return tl.inline_asm_elementwise(_LONG, "=l,l,r", [row, field], dtype=tl.int64, is_pure=False, pack=1)


@jit
def pointer(row, field: tl.constexpr, dtype: tl.constexpr):
    """The pointer in a field of a held row."""
    return long(row, field).to(tl.pointer_type(dtype))
