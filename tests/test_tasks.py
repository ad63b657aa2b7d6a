"""Each tile task against its torch oracle in float64, on odd shapes, in both modes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onetask import EPS, config, model_dtype, on_device, poisoned, relative_error, run_operator, tolerance

from megaflow.graph import Tensor
from megaflow.models.stream import workspace
from megaflow.tasks import ATTENTION, EMBEDDING, LINEAR, SELECT
from megaflow.tasks.linear import most_splits, row_tiles, split_span
from megaflow.tasks.packing import blocks, pack, padded

SCHEDULES = ("static", "dynamic")
# batch, token tile, rows, columns: none a multiple of the tiles
LINEAR_SHAPES = [(1, 1, 80, 144), (3, 16, 112, 80), (5, 1, 48, 16), (17, 16, 208, 272), (15, 16, 48, 4112)]


def activations(batch: int, width: int) -> torch.Tensor:
    """Values that the model's dtype holds exactly."""
    return torch.randn(batch, width).to(model_dtype()).double()


def widened(x: torch.Tensor) -> torch.Tensor:
    """As the decoder stores it: whole blocks wide, padding zero."""
    return on_device(torch.nn.functional.pad(x, (0, padded(x.shape[1]) - x.shape[1])), model_dtype())


def run_linear(
    epilogue: str, shape: tuple[int, int, int, int], schedule: str, with_bias: bool = False
) -> tuple[dict, dict]:
    """The outputs of the kernel and of the oracle, by role."""
    batch, tokens, rows, columns = shape
    kernel = config(tokens)
    x, weight = activations(batch, columns), activations(rows, columns)
    inputs = {"x": Tensor("x", (batch, columns)), "weight": Tensor("w", (rows, columns))}
    inputs |= (space := workspace("op", inputs["weight"]))
    buffers = {"x": widened(x), "w": on_device(pack(weight).data, model_dtype()),
               "partials_op": poisoned(batch, space["partials"].width),
               "arrivals_op": on_device(torch.zeros(batch, space["arrivals"].width, dtype=torch.int32))}  # fmt: skip
    values = {"x": x, "weight": weight}
    tiles = row_tiles(rows, kernel, 3)
    width = rows // 2 if epilogue == "silu" else rows
    narrow = epilogue in ("silu", "residual")
    outputs = {"out": Tensor("out", (batch, width), "model" if narrow else "float32")}
    buffers["out"] = poisoned(batch, width, dtype=model_dtype() if narrow else torch.float32)
    if epilogue == "residual":
        values |= {"h": torch.randn(batch, rows).double(), "gamma": torch.rand(rows).double() + 0.5}
        inputs |= {"h": Tensor("h", (batch, rows), "float32"), "gamma": Tensor("gamma", (rows,), "float32")}
        outputs |= {"h_out": Tensor("h2", (batch, rows), "float32")}
        outputs |= {"ssq_out": Tensor("ssq2", (batch, tiles), "float32")}
        buffers |= {role: on_device(values[role], torch.float32) for role in ("h", "gamma")}
        buffers |= {"h2": poisoned(batch, rows), "ssq2": poisoned(batch, tiles)}
    else:
        values["ssq"] = torch.rand(batch, 7).double() + 0.1
        inputs["ssq"] = Tensor("ssq", (batch, 7), "float32")
        buffers["ssq"] = on_device(values["ssq"], torch.float32)
    if with_bias:
        values["bias"] = torch.randn(rows).double()
        inputs["bias"] = Tensor("bias", (rows,), "float32")
        buffers["bias"] = on_device(values["bias"], torch.float32)
    if epilogue == "logits":
        outputs |= {"best_value": Tensor("value", (batch, tiles), "float32")}
        outputs |= {"best_index": Tensor("index", (batch, tiles), "int32")}
        buffers |= {"value": poisoned(batch, tiles), "index": poisoned(batch, tiles, dtype=torch.int32)}
    run_operator("linear", inputs, outputs, buffers, kernel, {"B": batch}, schedule, epilogue=epilogue)
    assert not buffers["arrivals_op"].any(), "the last split leaves the counter as it was"
    return {role: buffers[t.name] for role, t in outputs.items()}, LINEAR.oracle(values, epilogue, EPS)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "torch"])
@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=lambda s: "B{}-T{}-rows{}-columns{}".format(*s))
@pytest.mark.parametrize("epilogue", ["store", "residual", "silu", "logits"])
def test_linear_equals_its_oracle(epilogue, shape, schedule):
    got, wanted = run_linear(epilogue, shape, schedule)
    assert relative_error(got["out"], wanted["out"]) < tolerance()
    if epilogue == "residual":
        assert relative_error(got["h_out"], wanted["h_out"]) < tolerance()
        assert relative_error(got["ssq_out"].sum(1, keepdim=True), wanted["ssq_out"]) < tolerance()
    if epilogue == "logits":
        best = got["best_value"].argmax(1, keepdim=True)
        chosen = got["best_index"].gather(1, best).long()
        assert torch.equal(chosen, got["out"].argmax(1, keepdim=True))
        assert torch.equal(got["best_value"].gather(1, best), got["out"].gather(1, chosen))


@given(
    rows=st.integers(1, 40000),
    columns=st.integers(1, 20000),
    k_blocks=st.sampled_from([1, 2, 8]),
    workers=st.integers(1, 300),
    token_tiles=st.integers(1, 4),
)
def test_the_splits_of_k_are_whole_iterations_and_not_more_than_there_is_room_for(
    rows, columns, k_blocks, workers, token_tiles
):
    span = split_span(rows, columns, config(16, k_blocks=k_blocks), workers, token_tiles)
    assert span % k_blocks == 0
    assert 1 <= -(-blocks(columns) // span) <= most_splits(rows)


def test_k_is_split_where_there_are_fewer_tiles_than_workers():
    assert split_span(48, 4112, config(16), 3, 1) < blocks(4112)
    assert split_span(100000, 4112, config(16), 3, 2) >= blocks(4112)


@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=lambda s: "B{}-T{}-rows{}-columns{}".format(*s))
def test_a_bias_is_added_to_what_is_stored(shape):
    got, wanted = run_linear("store", shape, "static", with_bias=True)
    assert relative_error(got["out"], wanted["out"]) < tolerance()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("width", [16, 80, 1040])
def test_embedding_equals_its_oracle(width, schedule):
    batch, vocab = 3, 70
    weight, gamma = activations(vocab, width), torch.rand(width).double() + 0.5
    tokens = torch.tensor([0, vocab - 1, 33])
    inputs = {"tokens": Tensor("tokens", (batch,), "int32"), "weight": Tensor("w", (vocab, width)),
              "gamma": Tensor("gamma", (width,), "float32")}  # fmt: skip
    outputs = {"h": Tensor("h", (batch, width), "float32"), "out": Tensor("out", (batch, width)),
               "ssq_out": Tensor("ssq", (batch, 1), "float32")}  # fmt: skip
    buffers = {
        "tokens": on_device(tokens, torch.int32),
        "w": on_device(pack(weight).data, model_dtype()),
        "gamma": on_device(gamma, torch.float32),
        "h": poisoned(batch, width),
        "out": poisoned(batch, width, dtype=model_dtype()),
        "ssq": poisoned(batch, 1),
    }
    run_operator("embedding", inputs, outputs, buffers, config(1), {"B": batch}, schedule)
    wanted = EMBEDDING.oracle({"tokens": tokens, "weight": weight, "gamma": gamma})
    for role, tensor in outputs.items():
        assert relative_error(buffers[tensor.name], wanted[role]) < tolerance(), role


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("workers", [40, 16])  # up to 5 splits of one KV block, 2 of several
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize(("group", "qk_norm"), [(1, True), (2, True), (2, False), (5, True)])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_equals_its_oracle_over_scattered_pages_and_any_number_of_splits(
    head_dim, page_size, group, qk_norm, tokens, workers, schedule
):
    lengths, kv_heads, max_length = [1, 16, 17, 70], 2, 128  # earlier positions plus the new one: 1 to 5 KV blocks
    batch, pages_each = len(lengths), max_length // page_size
    width = kv_heads * (group + 2) * head_dim
    norms = {name: torch.rand(head_dim).double() + 0.5 for name in ("q_norm", "k_norm") if qk_norm}
    angle = torch.rand(max_length, head_dim // 2).double().repeat(1, 2)
    qkv = torch.randn(batch, width).double()
    keys = [activations(kv_heads * (n - 1), head_dim).view(kv_heads, n - 1, head_dim) for n in lengths]
    values = [activations(kv_heads * (n - 1), head_dim).view(kv_heads, n - 1, head_dim) for n in lengths]
    table = torch.randperm(batch * pages_each).view(batch, pages_each)
    cache = {name: poisoned(batch * pages_each, kv_heads, page_size, head_dim, dtype=model_dtype()) for name in "kv"}
    for name, dense in (("k", keys), ("v", values)):
        for b, part in enumerate(dense):
            for p in range(part.shape[1]):
                cache[name][table[b, p // page_size], :, p % page_size] = on_device(part[:, p], model_dtype())
    positions = torch.tensor(lengths) - 1
    kernel = config(tokens, head_dim=head_dim, qk_norm=qk_norm)
    units = batch * kv_heads * 32
    buffers = {
        **{name: on_device(norm, torch.float32) for name, norm in norms.items()},
        "qkv": on_device(qkv, torch.float32), "cos": on_device(angle.cos(), torch.float32),
        "sin": on_device(angle.sin(), torch.float32), "positions": on_device(positions, torch.int32),
        "k_cache": cache["k"], "v_cache": cache["v"], "block_table": on_device(table, torch.int32),
        "partial": poisoned(units * 16 * head_dim), "statistics": poisoned(units * 16 * 2),
        "arrived": on_device(torch.zeros(batch * kv_heads, 32, dtype=torch.int32)),
        "out": poisoned(batch, kv_heads * group * head_dim, dtype=model_dtype()),
    }  # fmt: skip
    shapes = {"qkv": (batch, width), "q_norm": (head_dim,), "k_norm": (head_dim,)}
    inputs = {name: Tensor(name, shapes.get(name, ())) for name in buffers if name != "out"}
    outputs = {"out": Tensor("out", (batch, kv_heads * group * head_dim))}
    attrs = {"kv_heads": kv_heads, "group": group, "max_length": max_length}
    run_operator("attention", inputs, outputs, buffers, kernel, {"B": batch}, schedule, workers=workers, **attrs)

    place = {"cos": angle.cos()[positions], "sin": angle.sin()[positions]}
    wanted = ATTENTION.oracle({"qkv": qkv, **norms, **place, "keys": keys, "values": values}, kv_heads, group, EPS)
    assert relative_error(buffers["out"], wanted["out"]) < tolerance()
    for b, position in enumerate(positions.tolist()):
        page, slot = table[b, position // page_size], position % page_size
        assert relative_error(cache["k"][page, :, slot], wanted["new_key"][b]) < tolerance()
        assert relative_error(cache["v"][page, :, slot], wanted["new_value"][b]) < tolerance()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_select_takes_the_best_part_and_keeps_the_request_state(schedule):
    batch, parts, eos, pad = 4, 1500, 7, 9
    value = torch.randn(batch, parts)
    index = torch.stack([torch.randperm(parts) for _ in range(batch)]) + 10
    value[1, 1200] = value[1].max() + 1
    index[1, 1200] = eos  # sequence 1 ends now; sequence 2 ended before
    buffers = {
        "value": on_device(value), "index": on_device(index, torch.int32),
        "tokens": poisoned(batch, dtype=torch.int32), "generated": poisoned(batch, 3, dtype=torch.int32),
        "positions": on_device(torch.tensor([5, 6, 7, 8]), torch.int32),
        "finished": on_device(torch.tensor([0, 0, 1, 0]), torch.int32),
        "unfinished": on_device(torch.tensor([3]), torch.int32),
        "eos": on_device(torch.tensor([eos] + [-1] * 15), torch.int32),
        "pad": on_device(torch.tensor([pad]), torch.int32),
    }  # fmt: skip
    inputs = {"best_value": Tensor("value", (batch, parts), "float32"), "best_index": Tensor("index", (batch, parts))}
    state = ("positions", "finished", "unfinished", "generated", "eos", "pad", "stop_step")
    inputs |= {name: Tensor(name, ()) for name in state}
    outputs = {"tokens": Tensor("tokens", (batch,), "int32")}
    run_operator("select", inputs, outputs, buffers, config(1), {"B": batch}, schedule)
    wanted = SELECT.oracle({"best_value": value, "best_index": index})["tokens"]
    wanted[2] = pad
    assert buffers["tokens"].tolist() == buffers["generated"][:, 0].tolist() == wanted.tolist()
    assert buffers["positions"].tolist() == [6, 7, 7, 9]
    assert buffers["finished"].tolist() == [0, 1, 1, 0]
    assert buffers["unfinished"].item() == 2


def test_equal_logits_choose_the_lowest_index():
    value = torch.zeros(1, 5)
    index = torch.tensor([[40, 3, 17, 3000, 2]])
    buffers = {"value": on_device(value), "index": on_device(index, torch.int32)}
    buffers |= {name: on_device(torch.zeros(1, 16), torch.int32)
                for name in ("tokens", "positions", "finished", "unfinished", "generated", "eos", "pad")}  # fmt: skip
    inputs = {"best_value": Tensor("value", (1, 5), "float32"), "best_index": Tensor("index", (1, 5))}
    state = ("positions", "finished", "unfinished", "generated", "eos", "pad", "stop_step")
    inputs |= {name: Tensor(name, ()) for name in state}
    run_operator("select", inputs, {"tokens": Tensor("tokens", (1,), "int32")}, buffers, config(1), {"B": 1}, "static")
    assert buffers["tokens"][0, 0].item() == 2
