"""Messages survive the wire, and what cannot be read is refused by name."""

import msgspec
import pytest
from scripted_engine import snapshot

from tokenspeed.messages import (
    PROTOCOL_VERSION,
    Constraint,
    EngineInput,
    EngineOutput,
    EngineSnapshot,
    EngineStatus,
    Finish,
    PromptLogprobs,
    RequestOutput,
    SamplingParameters,
    Submit,
    TokenLogprobs,
    WireError,
    decode_input,
    decode_output,
    encode,
)


def test_input_round_trip() -> None:
    sampling = SamplingParameters(
        temperature=0.7, logit_bias={5: -1.5, 70000: 2.0}, stop_token_ids=(2, 3), seed=2**64 - 1, logprobs=3
    )
    message = EngineInput(
        version=PROTOCOL_VERSION,
        submits=[
            Submit(
                handle=1, request_id="a", prompt=b"\1\0\0\0", max_new_tokens=4, sampling=sampling, namespace=b"salt"
            ),
            Submit(
                handle=2,
                request_id="b",
                prompt=b"\1\0\0\0",
                max_new_tokens=4,
                sampling=sampling,
                constraint=Constraint(kind="regex", text="[äö]+", begin_after="</think>"),
            ),
        ],
        finishes=[Finish(7, 3)],
        aborts=[8, 9],
        drain=True,
    )
    assert decode_input(encode(message)) == message


def test_output_round_trip() -> None:
    messages = [
        EngineOutput(
            version=PROTOCOL_VERSION,
            round=5,
            outputs=[
                RequestOutput(
                    handle=1,
                    token_ids=[4, 5],
                    logprobs=[TokenLogprobs(4, -0.5, [4, 6], [-0.5, -1.5]), TokenLogprobs(5, float("-inf"), [], [])],
                    prompt_logprobs=PromptLogprobs(1, [TokenLogprobs(9, -2.0, [], [])]),
                    cached_tokens=64,
                    finish_reason="stop",
                    stop_token_id=5,
                )
            ],
        ),
        EngineStatus(version=PROTOCOL_VERSION, phase="load", done=2, total=5, facts={"kernels": {"linear": "native"}}),
        EngineSnapshot(version=PROTOCOL_VERSION, snapshot=snapshot()),
    ]
    for message in messages:
        assert decode_output(encode(message)) == message


def test_another_version_is_refused_by_name() -> None:
    data = encode(EngineStatus(version=PROTOCOL_VERSION + 1, phase="ready"))
    with pytest.raises(WireError, match=f"version {PROTOCOL_VERSION + 1}, this one {PROTOCOL_VERSION}"):
        decode_output(data)


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(EngineInput(version=PROTOCOL_VERSION))[:-1]])
def test_damaged_messages_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        decode_input(data)
    with pytest.raises(WireError, match="cannot be read"):
        decode_output(data)


def test_a_value_of_a_wrong_type_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode(EngineStatus(version=PROTOCOL_VERSION, phase="ready")))
    raw["phase"] = "dancing"
    with pytest.raises(WireError, match="dancing"):
        decode_output(msgspec.msgpack.encode(raw))


def test_what_has_its_default_takes_no_room() -> None:
    quiet = EngineOutput(version=PROTOCOL_VERSION, round=1, outputs=[RequestOutput(handle=3, token_ids=[9])])
    assert len(encode(quiet)) < 60
