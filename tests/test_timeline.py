"""Profiles as launches, profiles and schedules as timelines, timelines as pictures; profiles are written out here."""

import itertools

import jax
import pytest
from test_overlap import HLO
from typer.testing import CliRunner

from jaxcp import cli
from jaxcp.bench import timeline, trace
from jaxcp.bench.timeline import COLLECTIVE, COMPUTATION


def plane(name, streams, module="jit_step"):
    """Text of a plane: stream -> [(kernel, operation, start µs, µs)]."""
    kernels = list(dict.fromkeys(kernel for events in streams.values() for kernel, *_ in events))
    lines = ""
    for stream, events in streams.items():
        body = "".join(
            f"events {{ metadata_id: {1 + kernels.index(kernel)} offset_ps: {start}000000 duration_ps: {us}000000 "
            f'stats {{ metadata_id: 1 ref_value: 3 }} stats {{ metadata_id: 2 str_value: "{operation}" }} }} '
            for kernel, operation, start, us in events
        )
        lines += f'lines {{ name: "{stream}" timestamp_ns: 1000 {body} }} '
    events = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{kernel}" }} }} ' for i, kernel in enumerate(kernels, 1)
    )
    stats = "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{stat}" }} }} '
        for i, stat in enumerate(("hlo_module", "hlo_op", module), 1)
    )
    return f'planes {{ name: "{name}" {lines} {events} {stats} }} '


def run_of(begin):
    """One run of a layer: two products, a gather beside the indexer, attention."""
    compute = [
        ("nvjet", "dot.1", begin, 4), ("nvjet", "dot.2", begin + 4, 2), ("top_blocks", "select", begin + 7, 10),
        ("attend_hopper", "attend", begin + 20, 30),
    ]  # fmt: skip
    return compute, [("ncclDevKernel_AllGather", "all-gather-start", begin + 6, 8)]


def profile(folder, *planes):
    path = folder / "plugins" / "a.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace("".join(planes)))
    return path


@pytest.fixture
def two_runs(tmp_path):
    runs = run_of(0), run_of(100)
    compute, gathers = (list(itertools.chain(*each)) for each in zip(*runs, strict=True))
    streams = {"Stream #7(Compute)": compute, "Stream #9": gathers, "XLA Ops": compute}
    other = plane("/device:GPU:1", {"Stream #7": [("nvjet", "dot.1", 0, 1)]})
    return profile(tmp_path, plane("/device:GPU:0", streams), other, plane("/host:CPU", {"Stream #1": compute}))


def test_launches_of_a_trace(two_runs):
    found = trace.launches(two_runs)
    assert found == trace.launches(two_runs.parent.parent), "a folder stands for the one profile in it"
    assert len(found) == 11, "streams of GPUs, and nothing else"
    first = found[0]
    assert (first.device, first.stream, first.module) == ("/device:GPU:0", "Stream #7(Compute)", "jit_step")
    assert (first.operation, first.name, first.start_us, first.us) == ("dot.1", "nvjet", 1.0, 4.0)
    assert [launch.start_us for launch in found[:4]] == [1.0, 5.0, 7.0, 8.0], "in order of start over all streams"


def test_a_profile_as_a_timeline(two_runs):
    """The last run, from its first kernel on."""
    found = timeline.read(two_runs)
    assert (found.of, found.unit, found.end) == ("jit_step on GPU:0", "µs", 50.0)
    assert [(s.start, s.end, s.part) for s in found.spans] == [
        (0, 4, "projections"), (4, 6, "projections"), (6, 14, "gathers"), (7, 17, "indexer"), (20, 50, "attention"),
    ]  # fmt: skip
    assert found.lanes == ["Stream #7(Compute)", "Stream #9"]
    assert [s.part for s in found.between(15, 19).spans] == ["indexer"]
    assert timeline.read(two_runs, device=1).end == 1.0
    with pytest.raises(ValueError, match=r"start, stop: got 60 … 50; expected a part of 0 … 50"):
        found.between(60, None)


def test_a_schedule_as_a_timeline():
    """The loop's body, which is longer than the entry: its gather runs behind three operations."""
    found = timeline.of_schedule(HLO)
    assert (found.of, found.unit) == ("schedule of jit_step, a loop's body", "operations")
    assert [(s.start, s.end, s.lane, s.label) for s in found.spans if s.lane == COLLECTIVE] == [
        (0, 3, COLLECTIVE, "all-gather f32[8]")
    ]
    assert [s.name for s in found.spans if s.lane == COMPUTATION] == ["top", "sum.1", "sum.2", "use"]


def test_a_gather_that_is_waited_for_has_a_place_of_its_own():
    entry = HLO.replace("while(%init), condition=%cond, body=%body.1", "fusion(%p), kind=kLoop, calls=%last")
    spans = timeline.of_schedule(entry).spans
    assert [(s.name, s.start, s.end) for s in spans] == [
        ("sync", 0, 1),
        ("pair-start", 1, 2),
        ("loop", 2, 3),
        ("r", 3, 4),
    ]
    assert [s.lane for s in spans] == [COLLECTIVE, COLLECTIVE, COMPUTATION, COMPUTATION]


def test_parts_of_a_schedule():
    scoped = HLO.replace("jit(f)/ffi_call", "jit(f)/qsa_indexer/ffi_call")
    parts = {s.name: s.part for s in timeline.of_schedule(scoped).spans}
    assert parts == {"ag-start": "gathers", "top": "indexer", "sum.1": "rest", "sum.2": "rest", "use": "rest"}


def test_what_is_no_source(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"trace: .*none does not exist"):
        timeline.read(tmp_path / "none")
    with pytest.raises(ValueError, match=r"trace: got 0 files \*\.xplane\.pb below"):
        timeline.read(tmp_path)
    for name, content, message in (
        ("a.xplane.pb", b"no profile", r"trace: got .*a\.xplane\.pb"),
        ("a.txt", b"HloModule jit_f", "HLO without a schedule"),
        ("a.bin", b"\xff\xfe\x00", r"source: got .*a\.bin, which is no text"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            timeline.read(tmp_path / name)


def test_a_profile_without_a_gpu_is_named(tmp_path):
    """jax's own profile of a CPU: it has planes, and none of a GPU."""
    with jax.profiler.trace(tmp_path):
        jax.jit(lambda x: x + 1)(1.0).block_until_ready()
    with pytest.raises(ValueError, match="device: got 0; expected a GPU with kernels in the profile"):
        timeline.read(tmp_path)


def test_the_command_draws_both(two_runs, tmp_path):
    pytest.importorskip("matplotlib")
    text = tmp_path / "program.hlo"
    text.write_text(HLO)
    for source in (two_runs, text):
        pictures = [tmp_path / "new" / f"{source.stem}-{name}.svg" for name in "ab"]
        for picture in pictures:
            done = CliRunner().invoke(cli.app, ["plot", "timeline", str(source), str(picture)])
            assert done.exit_code == 0, done.stderr
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
        assert pictures[0].stat().st_size > 5000
    done = CliRunner().invoke(cli.app, ["plot", "timeline", str(tmp_path / "none.hlo"), str(tmp_path / "a.svg")])
    assert done.exit_code == 2
    assert "none.hlo does not exist" in done.stderr
