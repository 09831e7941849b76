"""The state is read without trusting it: a missing or odd field is unknown, never an error and never 0."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.telemetry import snapshot as wire
from tokenspeed_tui import detail, view
from tokenspeed_tui.configuration import ConfigurationView, KeyView
from tokenspeed_tui.controls import Controls, Shown
from tokenspeed_tui.observation import Observation
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render import render_screen


@pytest.mark.parametrize(
    ("mirror", "original"),
    [
        (view.GroupView, wire.GroupSnapshot),
        (view.FlowView, wire.FlowSnapshot),
        (view.RequestView, wire.RequestSnapshot),
        (view.StepView, wire.StepSnapshot),
        (view.CounterView, wire.CounterSnapshot),
        (view.SnapshotView, wire.StateSnapshot),
        (view.StorageView, wire.StorageSnapshot),
        (view.HeadroomView, wire.HeadroomSnapshot),
        (view.EventView, wire.EventSnapshot),
        (view.QuantileView, wire.QuantileSnapshot),
        (view.LatencyView, wire.LatencySnapshot),
        (view.AcceptanceView, wire.AcceptanceSnapshot),
        (view.PhaseView, wire.PhaseSnapshot),
        (detail.DetailView, wire.RequestDetail),
        (detail.EntryView, wire.TimelineEntry),
    ],
)
def test_the_views_mirror_the_snapshot_types(mirror, original):
    assert mirror.__struct_fields__ == original.__struct_fields__


def test_what_is_read_of_the_server_is_what_it_writes():
    from tokenspeed.server.state import StateBody

    assert set(view.ServerView.__struct_fields__) - {"max_model_len", "kernels"} <= set(StateBody.__struct_fields__)


def plain(structs) -> list[dict]:
    return [msgspec.to_builtins(struct) for struct in structs]


def test_everything_an_engine_sends_is_read(story):
    snapshot = story.snapshot()
    read = view.read_server(story.state(snapshot))
    assert plain(read.snapshot.groups) == plain(snapshot.groups)
    assert [(flow.source, flow.target, flow.count) for flow in read.snapshot.flows] == [
        (flow.source, flow.target, flow.count) for flow in snapshot.flows
    ]
    assert plain(read.snapshot.requests) == plain(snapshot.requests)
    assert msgspec.to_builtins(read.snapshot.counters) == msgspec.to_builtins(snapshot.counters)
    assert msgspec.to_builtins(read.snapshot.step) == msgspec.to_builtins(snapshot.step)
    assert read.snapshot.states == snapshot.states
    assert (read.model, read.recipe_hash, read.devices, read.phase) == ("smollm2-135m", "3f9a17c2", 1, "ready")


def test_what_is_missing_or_odd_is_unknown(story):
    state = story.state(story.snapshot(), model=None, devices="many", age_s="old")
    del state["recipe"]
    del state["snapshot"]["running"]
    del state["snapshot"]["counters"]["decode_tokens"]
    state["snapshot"]["states"]["Decoding"] = "six"
    state["snapshot"]["groups"] = "none"
    read = view.read_server(state)
    assert (read.model, read.recipe, read.devices, read.age_s) == (None, None, None, None)
    assert read.snapshot.running is None
    assert read.snapshot.counters.decode_tokens is None
    assert read.snapshot.counters.prefill_tokens is not None
    assert read.snapshot.states["Decoding"] is None
    assert read.snapshot.groups == ()


def test_a_request_id_cannot_steer_the_terminal(story):
    request = msgspec.structs.replace(story.snapshot().requests[0], request_id="\x1b[2Jowned\n\x07")
    read = view.read_server(story.state(story.snapshot(requests=[request])))
    assert read.snapshot.requests[0].request_id == "?[2Jowned??"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
field_names = st.sampled_from(
    sorted(
        {
            *view.ServerView.__struct_fields__,
            *view.SnapshotView.__struct_fields__,
            *detail.DetailView.__struct_fields__,
        }
    )
)
objects = st.dictionaries(field_names, json_values, max_size=8)


configuration_names = st.sampled_from(
    sorted({*ConfigurationView.__struct_fields__, *KeyView.__struct_fields__, "memory"})
)
parts = st.dictionaries(configuration_names, json_values, max_size=4)


pages = st.sampled_from(get_args(Shown))
sizes = st.sampled_from([(80, 23), (120, 39), (30, 6)])


@given(
    server=objects,
    snapshot=objects,
    request=objects,
    configuration=parts,
    key=parts,
    memory=parts,
    detail=objects,
    shown=pages,
    size=sizes,
)
def test_no_answer_can_break_the_screen(server, snapshot, request, configuration, key, memory, detail, shown, size):
    state = {**server, "snapshot": {**snapshot, "requests": [request], "time": 5.0}}
    told = {"keys": [key], "memory": memory, **configuration}
    observation = Observation(
        version=1, time=6.0, url="http://host", state=state, configuration=told, detail={**request, **detail}
    )
    picture = advance(Picture(url="http://host"), observation)
    controls = Controls(shown=shown, selected=picture.snapshot.requests[0].handle)
    lines = render_screen(picture, controls, 7.0, *size)
    assert [line.cell_len for line in lines] == [size[0]] * size[1]
