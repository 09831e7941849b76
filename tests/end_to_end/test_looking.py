"""Looking at the real engine: what is shown is what the scheduler has, and a request tells its life over HTTP."""

import itertools

import pytest
from control_plane import submit
from in_process_engine import random_llama
from memory_channel import MemoryChannel
from running_server import RunningServer

from tokenspeed.launch.compose import compose_engine
from tokenspeed.messages import Inspect, SamplingParameters
from tokenspeed.messages.snapshot import STATES
from tokenspeed_scheduler import transition_table

ARROWS = {(state, target) for state, _, successors in transition_table() for target in successors}
GREEDY = SamplingParameters(top_k=1)


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_a_crowded_engine_shows_what_its_scheduler_has_and_why(host_blocks: int) -> None:
    channel = MemoryChannel()
    config = random_llama(overlap=1, blocks=14, chunk=16, host_blocks=host_blocks)
    engine = compose_engine(config, channel, lambda phase, done=0, total=0, detail="": None)
    prompts = {handle: [(7 * at + handle) % 255 for at in range(20)] for handle in range(1, 7)}
    channel.send_in(
        submits=[submit(handle, prompt, 60, declared=False, sampling=GREEDY) for handle, prompt in prompts.items()],
        watch_s=600,
    )
    said: set[str] = set()
    try:
        while len([handle for handle in prompts if channel.ends(handle)]) < len(prompts):
            engine.loop.round()
            engine.loop.publish_snapshot()
            state, counts = channel.snapshots[-1], engine.loop._scheduler.snapshot()
            shown = [None if count < 0 else count for count in counts.states.tolist()]
            assert [state.states[name] for name in STATES] == shown
            (group,) = state.groups
            assert (group.map.count("h") + group.map.count("p"), group.map.count("c"), group.map.count(".")) == (
                counts.groups[0].held,
                counts.groups[0].cached,
                counts.groups[0].free,
            )
            assert len(state.requests) == counts.live
            said.update(row.reason.split(":")[0] for row in state.requests if row.state != "Decoding")
        channel.send_in(inspects=[Inspect(handle, f"request-{handle}") for handle in prompts])
        engine.loop.round()
    finally:
        engine.shutdown()
    assert "capacity" in said
    lives = [answer.detail for answer in channel.inspected]
    ways = [[entry.state for entry in life.timeline] for life in lives if life is not None]
    assert len(ways) == 6 and all(way[0] == "Submitted" and way[-1] == "Finished" for way in ways)
    assert all(set(itertools.pairwise(way)) <= ARROWS for way in ways)
    assert any("Retracted" in way for way in ways) == (host_blocks > 0)
    events = [event for snapshot in channel.snapshots for event in snapshot.events if event.kind == "retraction"]
    assert len(events) == channel.snapshots[-1].counters.retractions > 0


def test_a_request_tells_its_life_over_http(server: RunningServer) -> None:
    body = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    name = "a request that is looked at"
    answer = server.client.post("/v1/completions", json=body, headers={"X-Request-Id": name})
    assert answer.status_code == 200
    life = server.client.get(f"/v1/internal/requests/{name}").json()
    assert (life["request_id"], life["state"], life["finish_reason"]) == (name, "Finished", "length")
    assert life["generated_tokens"] == 8 and life["output_limit"] == 8
    way = [entry["state"] for entry in life["timeline"]]
    assert way[0] == "Submitted" and way[-1] == "Finished" and set(itertools.pairwise(way)) <= ARROWS
    times = [entry["time"] for entry in life["timeline"]]
    assert times == sorted(times) and life["arrived"] == times[0]
    assert server.client.get("/v1/internal/requests/nobody").json()["error"]["code"] == "request_not_found"


def test_the_state_is_complete_for_whoever_asks(server: RunningServer) -> None:
    state = server.state()
    snapshot = state["snapshot"]
    assert snapshot["complete"] and snapshot["version"] == 2
    assert len(snapshot["groups"][0]["map"]) == min(256, snapshot["groups"][0]["total"])
    assert snapshot["headroom"]["largest"] > 0 and snapshot["headroom"]["tokens"] > 0
    assert state["progress"]["name"] == "ready" == snapshot["phase"]["name"]
