"""What crosses the binding about decisions: explanations, records of rounds, operations and digests."""

import numpy as np
from kv_model import prompt_of

from tokenspeed_scheduler import (
    CacheGroup,
    Decision,
    Event,
    Finish,
    ForwardResult,
    OperationDone,
    OperationKind,
    Plan,
    Scheduler,
    SchedulerConfig,
    State,
)


def scheduler(*, num_parents: int = 14, max_num_seqs: int = 6) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            groups=[CacheGroup(group_id="full", kind="full_history", block_granularity=4)],
            num_parents=num_parents,
            prefix_granularity=4,
            max_num_seqs=max_num_seqs,
            max_scheduled_tokens=64,
            max_model_len=200,
            host_parents=60,
        )
    )


def land(target: Scheduler, plan: Plan) -> None:
    """Every copy succeeds, every row that samples draws token 5."""
    events: list[Event] = [OperationDone(operation.op_id) for operation in plan.operations]
    if plan.num_rows:
        tokens = np.where(plan.samples == 1, 5, -1).astype(np.int32)
        events.append(ForwardResult(plan.forward_id, tokens))
    target.advance(events)


def submit(target: Scheduler, count: int, new: int = 24) -> None:
    for handle in range(1, count + 1):
        prompt = np.asarray(prompt_of(9, handle), np.int32)
        target.submit(handle, prompt, max_new_tokens=new, declared=False)


def test_why_a_request_waits_has_code_text_and_figures() -> None:
    target = scheduler(max_num_seqs=1)
    submit(target, 2)
    land(target, target.plan())
    running, waiting = target.explain(1), target.explain(2)
    assert (running.code, running.text, running.state) == ("running", "", State.PREFILL_DONE)
    assert (waiting.handle, waiting.code, waiting.state) == (2, "no_row", State.SUBMITTED)
    assert "(scheduler.max_seqs)" in waiting.text
    assert (waiting.short_by, waiting.group_id, waiting.other, waiting.op_id) == (0, "", 0, 0)
    assert target.explain(99).code == "ended"


def test_a_retraction_is_told_with_its_copy_its_cause_and_its_record() -> None:
    target = scheduler()
    submit(target, 6)
    victims: list[int] = []
    while not victims:
        plan = target.plan()
        victims = [row.handle for row in target.requests() if row.state == State.RETRACTED]
        if not victims:
            land(target, plan)
    saves = [operation for operation in plan.operations if operation.kind == OperationKind.IMAGE_SAVE]
    assert [operation.handle for operation in saves] == victims[: len(saves)]
    for operation in saves:
        assert len(operation.group) == len(operation.source) == len(operation.target) > 0
        assert operation.source.min() > 0
        assert operation.target.min() > 0
        assert operation.digests.shape == (0, 32)
    why = target.explain(victims[0])
    assert why.code == "retracted"
    assert why.other in set(range(1, 7)) - set(victims)
    assert why.op_id == saves[0].op_id
    (record,) = target.decisions(1)
    assert isinstance(record, Decision)
    assert record.retracted == victims
    assert record.decode_rows == int(np.count_nonzero(plan.kind))
    assert len(record.free_blocks) == 1


def test_storage_operations_carry_the_keys_of_their_blocks() -> None:
    group = CacheGroup(group_id="full", kind="full_history", block_granularity=2)
    target = Scheduler(
        SchedulerConfig(
            groups=[group],
            num_parents=30,
            prefix_granularity=4,
            max_num_seqs=2,
            max_scheduled_tokens=64,
            max_model_len=100,
            host_parents=30,
            storage=True,
        )
    )
    target.submit(1, np.asarray(prompt_of(9), np.int32), max_new_tokens=2)
    (query,) = target.plan().operations
    assert query.kind == OperationKind.STORAGE_QUERY
    assert query.digests.shape == (4, 32)
    assert query.offsets.tolist() == [0, 1, 0, 1]
    assert (query.digests[0] == query.digests[1]).all()
    assert (query.digests[0] != query.digests[2]).any()


def test_equal_inputs_give_equal_digests_and_others_do_not() -> None:
    one, two, other = scheduler(), scheduler(), scheduler(num_parents=12)
    for target in (one, two, other):
        submit(target, 6)
    differed = False
    for _ in range(40):
        plans = [target.plan() for target in (one, two, other)]
        digests = [plan.digest() for plan in plans]
        assert digests[0] == digests[1]
        assert len(digests[0]) == 32
        differed = differed or digests[0] != digests[2]
        for target, plan in zip((one, two, other), plans, strict=True):
            land(target, plan)
    assert differed
    one.advance([Finish(handle) for handle in range(1, 7)])
    one.check_invariants()
