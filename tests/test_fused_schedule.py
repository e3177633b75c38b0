"""The fused exchange in programs compiled for 8 H200s and B200s without one: one order, no copy, no collective."""

import re

import deviceless
import exchange_hlo
import pytest

pytestmark = deviceless.requires_plugin

DECODE = """
import cases, exchange_hlo, jaxcp
from jax import lax
from jaxcp import LogBase, Partial

cp, tokens, heads, dim, layers = 8, 32, 128, 512, 4
m = mesh(cp=cp)

def exchange_of(backend="fused"):
    return jaxcp.Exchange(m, "cp", max_tokens=32, heads=heads, head_dim=dim, backend=backend)

def layer(exchange, x, w, keys):
    '''A decode-like layer: queries of all heads, a partial over own keys, the exchange, a projection back.'''
    q = jnp.einsum("td,dhk->thk", x, w)
    logits = jnp.einsum("thk,sk->ths", q, keys, preferred_element_type=jnp.float32)
    top = logits.max(-1, keepdims=True)
    p = jnp.exp2(logits - top)
    total = p.sum(-1)
    o = jnp.einsum("ths,sk->thk", (p / total[..., None]).astype(keys.dtype), keys)
    merged = exchange(Partial(o, top[..., 0] + jnp.log2(total), LogBase.TWO))
    return x + lax.psum(jnp.einsum("thk,dhk->td", merged, w[:, : merged.shape[1]]), "cp")

def step(exchange):
    def body(x, ws, keys):
        for i in range(layers):
            x = layer(exchange, x, ws[i], keys[0])
        return x
    return body

shapes = (((tokens, 256), jnp.bfloat16), ((layers, 256, heads, dim), jnp.bfloat16), ((cp, 4096, dim), jnp.bfloat16))
specs = (P(), P(), P("cp"))
"""


@pytest.mark.parametrize("architecture", deviceless.ARCHITECTURES)
def test_decode_layers(tmp_path, architecture):
    hlo = deviceless.run(DECODE + """
answer(compiled(step(exchange_of()), m, specs, P(), *shapes, check_vma=False))
""", tmp_path, architecture)  # fmt: skip
    exchange_hlo.assert_one_chain(hlo, 4)
    table = exchange_hlo.instructions(hlo)
    for call in exchange_hlo.exchanges(hlo):
        shape, _, operands, _ = table[call]
        assert shape.startswith("(bf16[32,16,512]{2,1,0}, u32[1]{0})")
        assert [table[x][0].split("{")[0] for x in operands[:2]] == ["bf16[32,128,512]", "f32[32,128]"]
        assert "copy" not in [table[x][1] for x in operands]
    copies = [shape for shape, opcode, _, _ in table.values() if opcode.startswith("copy") and "512" in shape]
    assert copies == []
    assert set(deviceless.collectives(hlo)) == {"all-reduce"}  # the layers' own


def test_every_call_is_made_once_and_in_order(tmp_path):
    """XLA:GPU likes to fuse a call with slices of its operands and results; jax 0.11's then ran it twice."""
    independent, scanned, wide = deviceless.run(DECODE + """
def many(o, lse):
    one, two = exchange_of(), exchange_of()
    return [exchange(Partial(o[0, :32] * i, lse[0, :32], LogBase.TWO)) for i in range(1, 6) for exchange in (one, two)]

def scan(o, lse):
    exchange = exchange_of()
    body = lambda carry, scale: (
        carry, [exchange(Partial(o[0, :32] * scale, lse[0, :32], LogBase.TWO)) for _ in range(2)])
    return lax.scan(body, 0, jnp.arange(3, dtype=o.dtype))[1]

def wide(o, lse):
    return exchange_of()(Partial(o[0], lse[0], LogBase.TWO))

partials = (((cp, 80, heads, dim), jnp.bfloat16), ((cp, 80, heads), jnp.float32))
answer([compiled(f, m, (P("cp"), P("cp")), P("cp"), *partials, check_vma=False) for f in (many, scan, wide)])
""", tmp_path)  # fmt: skip
    exchange_hlo.assert_one_chain(independent, 10)
    exchange_hlo.assert_one_chain(scanned, 2)
    exchange_hlo.assert_one_chain(wide, 3)


def test_flashinfer_is_given_a_copy(tmp_path, monkeypatch):
    """Its kernel reads [rows, cp, dim]; what the fused kernel saves is one fusion that writes that layout."""
    header = tmp_path / "include" / "flashinfer" / "comm" / "dcp_lse_reduce.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("// FusedKernel")
    monkeypatch.setenv("JAXCP_FLASHINFER_INCLUDE", str(tmp_path / "include"))
    hlo = deviceless.run(DECODE + """
f = lambda o, lse: exchange_of("flashinfer")(Partial(o[0], lse[0], LogBase.E))
partials = (((cp, tokens, heads, dim), jnp.bfloat16), ((cp, tokens, heads), jnp.float32))
answer(compiled(f, m, (P("cp"), P("cp")), P("cp"), *partials, check_vma=False))
""", tmp_path)  # fmt: skip
    table = exchange_hlo.instructions(hlo)
    (call,) = exchange_hlo.exchanges(hlo, "jaxcp_flashinfer")
    assert table[table[call][2][0]][0].startswith("bf16[512,8,512]")
    written = [shape for shape, opcode, _, _ in table.values() if opcode in ("fusion", "copy", "transpose")]
    assert any(re.search(r"bf16\[32,16,8,512\]|bf16\[512,8,512\]", shape) for shape in written)
