"""``tokenspeed demo`` without a model: what it would do, and what it says where it cannot."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from command_line import Command

from tokenspeed.cli import demo as module
from tokenspeed.cli.bench.options import ServeOptions
from tokenspeed.cli.records import ServerError


def test_a_dry_run_prints_the_three_commands(tokenspeed: Command) -> None:
    told = tokenspeed("demo", "smollm2-135m", "--dry-run")
    assert told.code == 0
    server, load, dashboard, end = told.out.splitlines()
    assert server.startswith("would start   tokenspeed serve smollm2-135m --host 127.0.0.1 --max-model-len 1600")
    assert load.startswith("would load it tokenspeed bench serve --workload sessions")
    assert dashboard == "would show it tokenspeed top"
    assert "nothing was started" in end


def test_the_longest_session_fits_the_model_and_all_of_them_do_not_fit_the_pool() -> None:
    names = (name.removeprefix("--").replace("-", "_") for name in module.LOAD[::2])
    given = dict(zip(names, module.LOAD[1::2], strict=True))
    workload = ServeOptions(
        workload="sessions",
        turns=int(given["turns"]),
        prefix_len=int(given["prefix_len"]),
        input_len=given["input_len"],
        output_len=given["output_len"],
    ).build(random.Random(0))
    longest = int(module.SERVER[module.SERVER.index("--max-model-len") + 1])
    assert workload.longest <= longest
    assert workload.longest * int(given["concurrency"]) > 2 * 2_500


def test_clients_that_end_early_are_named_with_their_words(
    tokenspeed: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def server(arguments: list[str], name: str) -> Iterator[str]:
        yield "http://127.0.0.1:1"

    def dashboard(arguments: list[str]) -> int:
        assert arguments == ["--url", "http://127.0.0.1:1"]
        # The load finds no server there and ends; the dashboard is closed only then.
        module_process[0].wait(60)
        return 0

    module_process = []
    start = module.subprocess.Popen

    def popen(*arguments, **options):
        module_process.append(start(*arguments, **options))
        return module_process[0]

    monkeypatch.setattr(module, "temporary_server", server)
    monkeypatch.setattr(module.subprocess, "Popen", popen)
    monkeypatch.setattr(module.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr("tokenspeed.cli.dashboard.show_dashboard", dashboard)
    with pytest.raises(ServerError, match=r"the clients of the demo ended early: .*127\.0\.0\.1:1"):
        module.run_demo("smollm2-135m", [], dry_run=False)
