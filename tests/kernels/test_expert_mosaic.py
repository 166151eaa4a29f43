"""The Mosaic form where it cannot run: its layout, its PTX instruction by instruction, refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import ptx
import pytest
from expert_cases import ALPHA, LIMIT, TABLE, random_experts, random_rows

from gptoss_jax.kernels import bench_mosaic, routing, shapes
from gptoss_jax.kernels.expert_matmul import mosaic, mosaic_ptx
from gptoss_jax.kernels.mxfp4 import decode, fragments

# Eagerly, each of their hundred small operations would be compiled by itself.
to_fragments, from_fragments, decode_tile = map(
    jax.jit, (fragments.to_fragments, fragments.from_fragments, fragments.decode_tile)
)
make_tiles = jax.jit(routing.make_tiles, static_argnums=(1, 2))


def packed(seed, rows, columns, low=0, high=256):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // 32, 16))
    scales = rng.integers(low, high, (rows, columns // 32))
    return jnp.asarray(blocks, jnp.uint8), jnp.asarray(scales, jnp.uint8)


def test_fragments_go_back_to_the_same_bytes():
    blocks, scales = (jnp.stack([a, a[::-1]]) for a in packed(0, 192, 128))
    lanes, pairs = to_fragments(blocks, scales)
    assert lanes.shape == (2, 3, 2, 4, 256) and pairs.shape == (2, 3, 2, 32)
    assert lanes.nbytes == blocks.nbytes and pairs.nbytes == scales.nbytes
    for got, want in zip(from_fragments(lanes, pairs), (blocks, scales), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="64 rows by 64 columns; got 192 by 96"):
        to_fragments(blocks[0, :, :3], scales[0, :, :3])


def test_a_tile_is_decoded_in_the_tensor_cores_order_of_rows():
    blocks, scales = packed(1, 128, 128, high=255)
    lanes, pairs = to_fragments(blocks, scales)
    whole = np.asarray(decode(blocks, scales, jnp.bfloat16)).astype(np.float32)
    tile = np.asarray(decode_tile(lanes[1, 1], pairs[1, 1])).astype(np.float32)
    for w, r, g in ((0, 0, 0), (0, 1, 3), (2, 0, 7), (3, 1, 5)):
        row = 64 + 16 * w + 2 * g + r
        np.testing.assert_array_equal(tile[16 * w + 8 * r + g], whole[row, 64:128])


def halves(array, base):
    """16-bit memory by byte address of an array at `base`."""
    flat = np.asarray(array).reshape(-1).view("<u2")
    return {base + 2 * i: int(half) for i, half in enumerate(flat)}


@pytest.mark.parametrize("wide", [False, True])
def test_the_ptx_decodes_every_code_and_scale_into_the_registers_of_wgmma(wide):
    # Every scale byte that the form is for, in turn, and all 16 codes in every place.
    most = 256 if wide else 129
    rows = np.arange(64)[:, None]
    codes = (rows + np.arange(64)) % 16
    for start in range(0, most, 64 if wide else 43):
        scales = (start + rows + np.arange(2) * 64) % most
        blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(64, 2, 16)
        lanes, pairs = to_fragments(jnp.asarray(blocks, jnp.uint8), jnp.asarray(scales, jnp.uint8))
        memory = halves(lanes, 0) | halves(pairs, 4096)
        exponent = np.repeat(scales, 32, axis=1).astype(np.float64) - 127
        with np.errstate(over="ignore"):
            want = (TABLE[codes] * 2.0**exponent).astype(np.float32).astype(jnp.bfloat16)
        for thread in range(0, 128, 13):
            w, g, c = thread // 32, thread % 32 // 4, thread % 4
            addresses = {"$16": 16 * thread, "$17": 4096 + 4 * (8 * w + g)}
            registers = ptx.run(mosaic_ptx.decode(wide), addresses, memory)
            for i in range(4):
                for n in range(4):  # PTX: rows g, g + 8, g, g + 8; columns 2 c, 2 c, 2 c + 8, + 8
                    row, column = 16 * w + 2 * g + n % 2, 16 * i + 8 * (n // 2) + 2 * c
                    bits = registers[f"${4 * i + n}"]
                    got = np.array([bits & 0xFFFF, bits >> 16], np.uint16).view(jnp.bfloat16)
                    right = want[row, column : column + 2]
                    if scales[row, column // 32] == 255:
                        assert np.isnan(got.astype(np.float32)).all()
                    else:
                        np.testing.assert_array_equal(got.view(np.uint16), right.view(np.uint16))


def bits(value):
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize("limit", [LIMIT, None])
def test_the_ptx_gates(limit):
    sums = [(-9.0, 8.0), (0.5, -0.25), (30.0, -30.0), (-200.0, 1.0), (np.nan, 1.0), (1.0, np.nan)]
    for first, second in zip(sums, sums[1:] + sums[:1], strict=True):
        given = {f"${i}": bits(v) for i, v in enumerate((*first, *second))}
        # Row 0, then row 1, of two tokens: gate, gate, up, up.
        gate, up = np.float32(first), np.float32(second)
        given |= {"$4": bits(0.25), "$5": bits(-0.5), "$6": 9, "$7": 1000}
        memory = {}
        ptx.run(mosaic_ptx.store_gated(8, 64, limit, ALPHA), given, memory)
        assert set(memory) == {1000 + 8 * 64, 1000 + 9 * 64}
        gate, up = gate.astype(np.float64) + 0.25, up.astype(np.float64) - 0.5
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        want = gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
        got = np.array([memory[1000 + (8 + v) * 64] for v in (0, 1)], np.uint16)
        got = got.view(jnp.bfloat16).astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-30)
    memory = {}
    ptx.run(mosaic_ptx.store_gated(8, 64, limit, ALPHA), given | {"$6": 8}, memory)
    assert not memory  # 8 tokens: the ninth is not this tile's


@pytest.mark.parametrize("float32", [False, True])
def test_the_ptx_adds_biases(float32):
    sums = np.float32([1.5, 2.5, -3.0, 1e-3])
    given = {f"${i}": bits(v) for i, v in enumerate(sums)}
    given |= {"$4": bits(0.5), "$5": bits(1.0), "$6": 8, "$7": 0}
    memory = {}
    ptx.run(mosaic_ptx.store_biased(0, 256, float32), given, memory)
    kind, size = (np.float32, 4) if float32 else (jnp.bfloat16, 2)
    for v in (0, 1):
        raw = [memory[256 * v + 2 * i] for i in range(size)]
        got = np.array(raw, np.uint16).view(kind)
        want = np.float32([sums[v] + 0.5, sums[2 + v] + 1.0]).astype(kind)
        np.testing.assert_array_equal(got, want)


def test_slots_in_use_hold_their_tokens_and_others_are_not_written():
    x, ids, _ = random_rows(5, 37)
    tiles = make_tiles(ids, 5, 8)
    used_S = np.asarray(tiles.row_TR).reshape(-1)
    garbage_S = jnp.where(used_S >= 0, used_S, 2**30)
    size_G = jnp.asarray((used_S.reshape(-1, 8) >= 0).sum(1), jnp.int32)
    got = mosaic.sorted_rows(x, garbage_S, size_G, 4, 16, interpret=True)
    got = np.asarray(got).astype(np.float32)
    assert got.shape == (used_S.size + 16, 160)
    want = np.asarray(x).astype(np.float32)[used_S // 4]
    np.testing.assert_array_equal(got[: used_S.size][used_S >= 0], want[used_S >= 0])
    assert np.isnan(got[: used_S.size][used_S < 0]).all() and np.isnan(got[used_S.size :]).all()


def test_plans_fit_into_shared_memory_and_registers():
    for experts in (32, 128):
        for tokens in shapes.TOKENS:
            plans = mosaic.candidates(tokens, 4, experts)
            assert len(plans) == len(set(plans)) >= 3
            for plan in plans:
                assert list(plan.widths) == sorted(set(plan.widths))
                assert all(n % 8 == 0 and n <= 256 for n in plan.widths)
                for shape in (plan.gate_up, plan.down):
                    assert shape.stages >= 2
                    assert shape.shared_bytes(plan.widths[-1]) + 1024 <= mosaic.SHARED_BYTES
                    # Accumulators of a thread, of the 160 registers that it gets.
                    assert shape.warpgroups == 3 and plan.widths[-1] // 2 <= 96


def test_plans_that_were_measured_come_first():
    measured = {
        ("20b", 512): (64, 72, 88, 128),
        ("20b", 2048): (64, 112, 136, 160, 192),
        ("20b", 8192): (96, 136, 160, 176, 192),
        ("120b", 512): (8, 16, 24, 32, 64),
        ("120b", 2048): (64, 72, 88, 128),
        ("120b", 8192): (64, 112, 136, 160, 192),
    }
    for shape, widths in measured.items():
        problem = shapes.experts(*shape)
        plan = mosaic.heuristic(problem.tokens, problem.chosen, problem.experts)
        assert plan.widths == widths and plan.partial == "bfloat16"


def test_a_plan_has_a_name_in_the_benchmark():
    # Seven stages of 192 tokens and three warpgroups' weights are what 227 KB hold.
    plan = mosaic.heuristic(2048, 4, 32)
    assert bench_mosaic.described(plan) == "64,112,136,160,192/3x7/3x7/bfloat16"


def test_the_benchmark_builds_all_then_measures_and_says_what_is_left_out(
    monkeypatch, tmp_path, capsys
):
    events, file = [], tmp_path / "rows.json"

    def build(problem, plan):
        events.append("build")
        if plan.widths == (16, 32, 64):
            raise MemoryError("too much shared memory")
        return plan

    def measure(problem, plan, program, first):
        assert program == plan
        events.append("measure")
        kernels = [{"name": "experts_gate_up", "us": 7.0}]
        row = dict(us=9.0, floor_us=1.0, tflop_per_s=5.0, relative_error=1e-3, right=True)
        return row | dict(shape=problem.name, plan=bench_mosaic.described(plan), kernels=kernels)

    for name, fake in (("compiled_layers", build), ("measure", measure)):
        monkeypatch.setattr(bench_mosaic, name, fake)
    for name in ("_inputs", "_rows"):
        monkeypatch.setattr(bench_mosaic, name, lambda _: None)
    options = ["--shapes", "20b/128,120b/512", "--most", "2", "--json", str(file)]
    bench_mosaic.main(options)
    assert events == ["build"] * 4 + ["measure"] * 2
    rows = json.loads(file.read_text())["rows"]
    # Every shape's first, then everybody's second.
    assert [row["shape"] for row in rows] == ["20b/128", "120b/512"] * 2
    assert ["failed" in row for row in rows] == [False, False, True, True]
    assert "{'experts_gate_up': 7.0}" in capsys.readouterr().out
    events.clear()
    bench_mosaic.main([*options, "--seconds", "0"])
    assert events == [] and capsys.readouterr().out.count("left out: not begun") == 4


def test_it_is_refused_where_it_cannot_run():
    experts = jax.jit(lambda e: e.to_layout("mosaic"))(random_experts(1, embed=128, ffn=64))
    x, ids, weights = random_rows(2, 3, embed=128)
    if jax.default_backend() == "gpu":
        pytest.skip("this machine may be able to run it")
    with pytest.raises(NotImplementedError, match="jax 0.11|NVIDIA GPU"):
        mosaic.expert_matmul(
            x, ids, weights, experts, limit=LIMIT, alpha=ALPHA, out_dtype=jnp.dtype(jnp.float32)
        )


def test_the_layout_turns_back_and_gives_its_matrices():
    stored = random_experts(12, embed=128, ffn=64)
    turn = jax.jit(lambda e, layout: e.to_layout(layout), static_argnums=1)
    packed = turn(stored, "mosaic")
    packed.check()
    back = turn(packed, "checkpoint")
    for name, leaf in stored.leaves().items():
        np.testing.assert_array_equal(getattr(back, name), leaf)
    got = jax.jit(lambda e: e.matrix("gate_up", 3, jnp.float32))(packed)
    want = decode(stored.gate_up_blocks[3], stored.gate_up_scales[3], jnp.float32)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="mosaic_wide"):
        random_experts(13, embed=128, ffn=64, low=129, high=130).to_layout("mosaic")
