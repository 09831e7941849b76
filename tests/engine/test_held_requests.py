"""A request whose constraint is being compiled holds up nobody, and is a request like any other once it is compiled."""

import pytest
from control_plane import ControlPlane, submit
from hand_compiler import REGEX, HandCompiler, MarkedGrammar
from token_device import expected_tokens

from tokenspeed.messages import Constraint, ConstraintError


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * position + 13 * salt) % 997 for position in range(length)]


@pytest.fixture
def compiler() -> HandCompiler:
    return HandCompiler()


def test_others_run_while_one_is_compiled(compiler: HandCompiler) -> None:
    plane = ControlPlane(grammars=compiler)
    plane.channel.send_in(submits=[submit(1, prompt_of(9), constraint=REGEX), submit(2, prompt_of(9, 1))])
    for _ in range(12):
        plane.loop.round()
    plane.channel.send_in(submits=[submit(3, prompt_of(9, 2))])
    for _ in range(12):
        plane.loop.round()
    for handle, salt in ((2, 1), (3, 2)):
        assert plane.channel.tokens(handle) == expected_tokens(prompt_of(9, salt), 8)
    assert plane.channel.tokens(1) == [] and plane.channel.waits == 0, "it looks again and again, and never sleeps long"
    plane.loop.publish_snapshot()
    assert (plane.channel.snapshots[-1].waiting, plane.channel.snapshots[-1].has_work) == (1, True)
    compiler.begun[0].end()
    plane.until_quiet()
    assert plane.channel.tokens(1) == expected_tokens(prompt_of(9), 8)
    assert [start.grammar for start in plane.device.starts if start.handle == 1] == [MarkedGrammar(REGEX)]
    assert [start.grammar for start in plane.device.starts if start.handle != 1] == [None, None]
    plane.assert_pool_is_whole()


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_retracted_request_takes_its_grammar_and_output_along(compiler: HandCompiler, overlap: int) -> None:
    plane = ControlPlane(overlap=overlap, num_blocks=14, max_num_seqs=6, grammars=compiler)
    plane.channel.send_in(
        submits=[submit(h, prompt_of(9, h), 24, declared=False, constraint=REGEX) for h in range(1, 7)]
    )
    plane.loop.round()
    for one in compiler.begun:
        one.end()
    plane.until_quiet()
    assert plane.scheduler.snapshot().retractions > 0
    again = [start for start in plane.device.starts if start.output.size]
    assert again and all(start.grammar == MarkedGrammar(REGEX) for start in plane.device.starts)
    for handle in range(1, 7):
        assert plane.channel.tokens(handle) == expected_tokens(prompt_of(9, handle), 24)


def test_an_abort_lets_go_of_the_compilation(compiler: HandCompiler) -> None:
    plane = ControlPlane(grammars=compiler)
    plane.channel.send_in(submits=[submit(1, prompt_of(9), constraint=REGEX)])
    plane.loop.round()
    plane.channel.send_in(aborts=[1])
    plane.until_quiet()
    assert compiler.begun[0].cancelled
    compiler.begun[0].end()
    plane.loop.publish_snapshot()
    assert plane.channel.snapshots[-1].counters.aborted == 1
    assert plane.channel.outputs == [] and plane.device.starts == []
    plane.assert_pool_is_whole()


def test_a_refusal_is_the_requests_own(compiler: HandCompiler) -> None:
    plane = ControlPlane(grammars=compiler)
    busy = Constraint(kind="regex", text="busy")
    plane.channel.send_in(
        submits=[submit(1, prompt_of(9), constraint=REGEX), submit(2, prompt_of(9)), submit(3, [1], constraint=busy)]
    )
    plane.loop.round()
    compiler.begun[0].found = ConstraintError("unclosed group")
    plane.until_quiet()
    refused, late = plane.channel.last(1), plane.channel.last(3)
    assert (refused.finish_reason, refused.error_code, refused.error) == (
        "error",
        "invalid_constraint",
        "unclosed group",
    )
    assert (late.finish_reason, late.error_code) == ("error", "constraint_busy")
    assert plane.channel.tokens(2) == expected_tokens(prompt_of(9), 8)


def test_without_a_compiler_constraints_are_refused() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, prompt_of(9), constraint=REGEX), submit(2, prompt_of(9))])
    plane.until_quiet()
    assert plane.channel.last(1).error_code == "constraint_unavailable"
    assert plane.channel.tokens(2) == expected_tokens(prompt_of(9), 8)


def test_a_drain_waits_for_what_is_being_compiled(compiler: HandCompiler) -> None:
    plane = ControlPlane(grammars=compiler)
    plane.channel.send_in(submits=[submit(1, prompt_of(9), constraint=REGEX)])
    plane.loop.round()
    plane.channel.send_in(drain=True)
    for _ in range(5):
        plane.loop.round()
    plane.channel.send_in(submits=[submit(2, prompt_of(9), constraint=REGEX)])
    plane.loop.round()
    compiler.begun[0].end()
    plane.loop.run()
    assert plane.channel.tokens(1) == expected_tokens(prompt_of(9), 8)
    assert plane.channel.last(2).error_code == "draining"
    assert len(compiler.begun) == 1
