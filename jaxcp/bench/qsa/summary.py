"""A record of the benchmark as two small tables: prefill with a line per case, decode with a line per batch."""

from typing import Any

from jaxcp.bench.qsa.selections import MODELS

PREFILL = (
    "rows / keys", "scoring + selection", "FlashInfer", "lax.top_k", "attention: own", *MODELS, "row gather",
    "cuDNN dense", "cuDNN masked", "mixer", "projections", "layer", "MiB",
)  # fmt: skip
DECODE = ("requests", "scoring + selection", "attention", "mixer", "layer", "XLA's selection", "XLA's attention",
          "row gather")  # fmt: skip
EXPLAINED = (
    "Prefill in ms, decode over 131072 keys of each request in µs. In brackets: × the floor of score products, tokens "
    "that four neighbouring rows select together (per row), × the floor of the projections' products; in decode × "
    "reading the keys concerned once. FlashInfer's selection gets XLA's scores, `lax.top_k` alone is given them, cuDNN "
    "attends to all keys, without a mask or, where rows see up to four times what they select, with the selection as "
    "its bias; the mixer is the layer without projections. MiB: beside arguments and results, of scoring + "
    "selection / attention / mixer"
)

Rows = list[list[str]]


def prefill(record: dict[str, Any]) -> Rows:
    """Cells of `PREFILL`, ms."""
    return [_prefill(case) for case in record["cases"] if not _decodes(case)]


def decode(record: dict[str, Any]) -> Rows:
    """Cells of `DECODE`, µs."""
    return [_decode(case) for case in record["cases"] if _decodes(case)]


def _decodes(case: dict[str, Any]) -> bool:
    return case["rows"] == case["requests"]


def _prefill(case: dict[str, Any]) -> list[str]:
    def attention(selection: str) -> str:
        union = case["union_tokens"].get(selection)
        return _cell(_best(case, "attend", selection), 1e3, None if union is None else f"{union:.0f}")

    return [
        f"{case['rows']} / {case['keys']}",
        _with_floor(_best(case, "select"), 1e3),
        _cell(_named(case, "select", "flashinfer"), 1e3),
        _cell(_named(case, "select", "lax.top_k"), 1e3),
        *(attention(selection) for selection in ("own", *MODELS)),
        _cell(_named(case, "attend", "row gather"), 1e3),
        _cell(_named(case, "attend", "cuDNN dense"), 1e3),
        _cell(_named(case, "attend", "cuDNN masked"), 1e3),
        _cell(_best(case, "mixer"), 1e3),
        _with_floor(_best(case, "projections"), 1e3),
        _cell(_best(case, "layer"), 1e3),
        " / ".join(_mib(_best(case, part)) for part in ("select", "attend", "mixer")),
    ]


def _decode(case: dict[str, Any]) -> list[str]:
    return [
        str(case["requests"]),
        *(_with_floor(_best(case, part), 1.0) for part in ("select", "attend", "mixer")),
        _cell(_best(case, "layer"), 1.0),
        *(_cell(_named(case, part, "xla"), 1.0) for part in ("select", "attend")),
        _cell(_named(case, "attend", "row gather"), 1.0),
    ]


def _best(case: dict[str, Any], part: str, selection: str | None = "own") -> dict[str, Any] | None:
    """Figure of the fastest implementation."""
    found = [f for f in case["figures"] if f["part"] == part and not f["peer"] and f["selection"] in (None, selection)]
    return min(found, key=lambda f: f["us"], default=None)


def _named(case: dict[str, Any], part: str, name: str) -> dict[str, Any] | None:
    """Figure of an implementation or a peer, over the own selection."""
    found = (f for f in case["figures"] if (f["part"], f["name"]) == (part, name) and f["selection"] in (None, "own"))
    return next(found, None)


def _mib(figure: dict[str, Any] | None) -> str:
    return "-" if figure is None else f"{figure['temporary_bytes'] / 2**20:.0f}"


def _with_floor(figure: dict[str, Any] | None, us_per_unit: float) -> str:
    return _cell(figure, us_per_unit, f"{next(iter(figure['of_floor'].values())):.2g}×" if figure else None)


def _cell(figure: dict[str, Any] | None, us_per_unit: float, note: str | None = None) -> str:
    if figure is None:
        return "-"
    value = figure["us"] / us_per_unit
    return (f"{value:.3g}" if value < 1000 else f"{value:.0f}") + (f" ({note})" if note else "")
