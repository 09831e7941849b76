"""Known failure 37: what dashboards and alerts ask for is what a server publishes, and all of that is documented."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenspeed.messages.snapshot import (
    STATES,
    CounterSnapshot,
    FlowSnapshot,
    GroupSnapshot,
    HeadroomSnapshot,
    StateSnapshot,
    StepSnapshot,
    StorageSnapshot,
)
from tokenspeed.telemetry.metrics import METRIC_NAMES, EngineReading, Metrics

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "images" / "observability"
ALERTS = OBSERVABILITY / "alerts.yaml"
DASHBOARD = OBSERVABILITY / "grafana-dashboard.json"
METRICS_PAGE = ROOT / "docs" / "metrics.md"

OUTSIDE = {"up": {"job", "instance"}}
"""Made by Prometheus itself for every target."""
OF_EVERY_TARGET = {"job", "instance"}


@dataclass(frozen=True)
class Published:
    """One family: its type, and its labels without those that its type brings."""

    kind: str
    labels: frozenset[str]


def snapshot() -> StateSnapshot:
    """An engine that has everything."""
    group = GroupSnapshot(
        group_id="full",
        kind="full_history",
        block_granularity=64,
        bytes_per_block=4096,
        total=4,
        held=2,
        cached=1,
        free=1,
        pinned=1,
    )
    return StateSnapshot(
        time=1.0,
        uptime_s=1.0,
        role="fused",
        states=dict.fromkeys(STATES, 1),
        groups=[group],
        flows=[FlowSnapshot("Submitted", "Prefilling", 1)],
        counters=CounterSnapshot(),
        step=StepSnapshot(plan_ms=1.0, device_ms=1.0, commit_ms=1.0, bubble_ms=1.0),
        running=1,
        waiting=1,
        last_progress=1.0,
        has_work=True,
        requests=[],
        host=[group],
        storage=StorageSnapshot(blocks=1, bytes=1, limit_bytes=2, pending=0),
        headroom=HeadroomSnapshot(tokens=1, largest=1, requests=1, typical_tokens=1),
    )


def published() -> dict[str, Published]:
    """Every family that a server publishes, by its name on the page."""
    reading = EngineReading(
        ready=True,
        lost=0,
        open_choices=0,
        snapshot=snapshot(),
        snapshot_age=0.0,
        doubtful_operations=("gemm.linear",),
    )
    metrics = Metrics(lambda: reading)
    # A counter with labels shows once it has counted.
    metrics.http_request("GET", "/live", 200)
    metrics.key_request("somebody", 200)
    metrics.refused("rate_limit_exceeded")
    metrics.stream_cut("stalled")
    metrics.fields_ignored(["user"])
    metrics.finished("stop", 1.0, 5)
    families = {}
    for family in metrics.registry.collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        families[name] = Published(family.type, frozenset(labels))
    return families


PUBLISHED = published()


def family_of(name: str) -> str:
    """A histogram's family for the name of one of its series."""
    for suffix in ("_bucket", "_sum", "_count"):
        if PUBLISHED.get(name.removesuffix(suffix), Published("", frozenset())).kind == "histogram":
            return name.removesuffix(suffix)
    return name


def labels_of(name: str) -> set[str]:
    """What a series may be selected and grouped by."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    bucket = {"le"} if name.endswith("_bucket") else set()
    return set(PUBLISHED[family_of(name)].labels) | OF_EVERY_TARGET | bucket


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression with the place it stands."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")


EXPRESSIONS = list(expressions())
_FUNCTIONS = {
    "rate",
    "increase",
    "deriv",
    "histogram_quantile",
    "sum",
    "max",
    "min",
    "avg",
    "by",
    "on",
    "and",
    "or",
    "unless",
}


def series(expression: str) -> set[str]:
    """The series an expression names: its words that are neither labels, nor functions, nor text in quotes."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    bare = re.sub(r"\b(?:by|on)\s*\([^)]*\)", "", bare)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    return set(re.findall(r"[a-z_][a-z0-9_]*", bare)) - _FUNCTIONS


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS, ids=[place for place, _ in EXPRESSIONS])
def test_what_is_asked_for_is_published_with_its_labels(place: str, expression: str) -> None:
    names = series(expression)
    assert names, "an expression without a series alerts on nothing"
    assert {name for name in names if name not in OUTSIDE and family_of(name) not in PUBLISHED} == set()
    for name, selector in re.findall(r"([a-z_][a-z0-9_]*)\{([^}]*)\}", expression):
        assert set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selector)) <= labels_of(name), name
    anywhere = set().union(*(labels_of(name) for name in names))
    for grouped in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= anywhere


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS, ids=[place for place, _ in EXPRESSIONS])
def test_rates_are_taken_of_what_only_grows(place: str, expression: str) -> None:
    for function, name in re.findall(r"\b(rate|increase|deriv)\(([a-z_][a-z0-9_]*)", expression):
        kind = PUBLISHED[family_of(name)].kind
        assert (kind == "gauge") == (function == "deriv"), f"{function} of the {kind} {name}"


def test_states_and_kinds_in_selectors_exist() -> None:
    text = "\n".join(expression for _, expression in EXPRESSIONS)
    known = {"state": set(STATES), "kind": {"total", "held", "cached", "free", "pinned"}}
    for label, values in known.items():
        found = re.findall(rf'\b{label}\s*(?:=~|!=|=)\s*"([^"]*)"', text)
        assert found and {value for one in found for value in one.split("|")} <= values


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS, ids=[place for place, _ in EXPRESSIONS])
def test_prometheus_syntax(place: str, expression: str) -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    parser.parse(expression)


def test_the_parser_refuses_what_is_wrong() -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    with pytest.raises(ValueError, match="unclosed"):
        parser.parse("sum by (a (x)")


def test_the_dashboard_fits_one_screen_and_its_panels_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and place["x"] + place["w"] <= 24
        cells |= own
    assert max(y for _, y in cells) < 24, "one screen is about 24 rows"
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["description"] for panel in panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)


def test_the_dashboard_shows_what_an_operator_asks_first() -> None:
    shown = {
        family_of(name) for panel in dashboard()["panels"] for one in panel["targets"] for name in series(one["expr"])
    }
    assert {
        "tokenspeed_requests",
        "tokenspeed_kv_blocks",
        "tokenspeed_engine_prefix_hit_tokens_total",
        "tokenspeed_time_to_first_token_seconds",
        "tokenspeed_inter_token_seconds",
        "tokenspeed_generation_tokens_total",
        "tokenspeed_engine_retractions_total",
        "tokenspeed_engine_aborted_total",
        "tokenspeed_step_seconds",
        "tokenspeed_requests_waiting",
        "tokenspeed_log_records_dropped_total",
    } <= shown


def test_alerts_are_complete() -> None:
    rules = alerts()
    assert {rule["alert"] for rule in rules} >= {
        "TokenSpeedDown",
        "TokenSpeedNotReady",
        "TokenSpeedStuck",
        "TokenSpeedEngineSilent",
        "TokenSpeedRetractionsHigh",
        "TokenSpeedCacheFullAndQueueGrowing",
        "TokenSpeedErrorsHigh",
    }
    jsonschema = pytest.importorskip("jsonschema")
    from kubernetes_schemas import RULE_GROUPS

    jsonschema.validate(yaml.safe_load(ALERTS.read_text()), RULE_GROUPS)


def test_alerts_name_labels_that_are_left() -> None:
    for rule in alerts():
        used = set(re.findall(r"\$labels\.([a-z_]+)", json.dumps(rule["annotations"])))
        grouped = re.findall(r"\bby\s*\(([^)]*)\)", rule["expr"])
        # The outermost grouping stands first.
        left = (
            {label.strip() for label in grouped[0].split(",")}
            if grouped
            else set().union(*map(labels_of, series(rule["expr"])))
        )
        assert used <= left, rule["alert"]


def documented() -> dict[str, Published]:
    """The rows of the tables in docs/metrics.md."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (\w+) \| ([^|]*) \|", METRICS_PAGE.read_text(), re.MULTILINE)
    return {name: Published(kind, frozenset(re.findall(r"`([a-z_]+)`", labels))) for name, kind, labels in rows}


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    assert documented() == PUBLISHED


def test_the_list_of_names_is_what_is_published() -> None:
    assert {name for name in PUBLISHED if "_process_" not in name} == set(METRIC_NAMES)


def test_every_alert_is_documented() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text()
    assert [rule["alert"] for rule in alerts() if f"`{rule['alert']}`" not in page] == []


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False)


def test_prometheus_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    told = promtool("check", "rules", str(ALERTS))
    assert told.returncode == 0, told.stdout + told.stderr
    text = (OBSERVABILITY / "prometheus.yml").read_text()
    text = text.replace("/etc/prometheus", str(OBSERVABILITY)).replace("/run/secrets/metrics-key", "/dev/null")
    (tmp_path / "prometheus.yml").write_text(text)
    told = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert told.returncode == 0, told.stdout + told.stderr


FIRING: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TokenSpeedDown": ({"up": "1x5 0x90"}, {"up": "1x95"}),
    "TokenSpeedNotReady": ({"tokenspeed_engine_ready": "0x95"}, {"tokenspeed_engine_ready": "0x10 1x85"}),
    "TokenSpeedEngineLost": ({"tokenspeed_engine_lost_total": "0x80 1x15"}, {"tokenspeed_engine_lost_total": "1x95"}),
    "TokenSpeedStuck": (
        {"tokenspeed_open_choices": "2x95", "tokenspeed_engine_steps_total": "0+100x50 5000x45"},
        {"tokenspeed_open_choices": "2x95", "tokenspeed_engine_steps_total": "0+1x95"},
    ),
    "TokenSpeedEngineSilent": (
        {"tokenspeed_snapshot_age_seconds": "0+60x95", "tokenspeed_engine_ready": "1x95"},
        {"tokenspeed_snapshot_age_seconds": "0+60x95", "tokenspeed_engine_ready": "0x95"},
    ),
    "TokenSpeedRetractionsHigh": (
        {
            "tokenspeed_engine_retractions_total": "0+30x95",
            "tokenspeed_engine_finished_total": "0+60x95",
            "tokenspeed_engine_aborted_total": "0x95",
        },
        {
            "tokenspeed_engine_retractions_total": "0+30x95",
            "tokenspeed_engine_finished_total": "0+600x95",
            "tokenspeed_engine_aborted_total": "0x95",
        },
    ),
    "TokenSpeedCacheFullAndQueueGrowing": (
        {
            'tokenspeed_kv_blocks{group="a", kind="held"}': "99x95",
            'tokenspeed_kv_blocks{group="a", kind="total"}': "100x95",
            'tokenspeed_kv_blocks{group="b", kind="held"}': "1x95",
            'tokenspeed_kv_blocks{group="b", kind="total"}': "100x95",
            "tokenspeed_requests_waiting": "0+1x95",
        },
        {
            'tokenspeed_kv_blocks{group="a", kind="held"}': "99x95",
            'tokenspeed_kv_blocks{group="a", kind="total"}': "100x95",
            "tokenspeed_requests_waiting": "200-1x95",
        },
    ),
    "TokenSpeedErrorsHigh": (
        {
            'tokenspeed_http_requests_total{method="POST", path="/v1/completions", status="200"}': "0+60x95",
            'tokenspeed_http_requests_total{method="POST", path="/v1/completions", status="500"}': "0+10x95",
        },
        {
            'tokenspeed_http_requests_total{method="POST", path="/v1/completions", status="200"}': "0+60x95",
            'tokenspeed_http_requests_total{method="POST", path="/v1/completions", status="400"}': "0+60x95",
            'tokenspeed_http_requests_total{method="GET", path="/ready", status="503"}': "0+600x95",
        },
    ),
    "TokenSpeedStepsFail": (
        {"tokenspeed_engine_failed_steps_total": "0x85 1x10", "tokenspeed_engine_nan_rows_total": "0x95"},
        {"tokenspeed_engine_failed_steps_total": "3x95", "tokenspeed_engine_nan_rows_total": "0x95"},
    ),
    "TokenSpeedLogDrops": (
        {'tokenspeed_log_records_dropped_total{process="api"}': "0+5x95"},
        {'tokenspeed_log_records_dropped_total{process="api"}': "7x95"},
    ),
}
"""For each alert the series of a server that has the trouble, and of one that has not, a value a minute."""


def placed(name: str, instance: str) -> str:
    """The series of one server."""
    target = f'job="tokenspeed", instance="{instance}"'
    return f"{name[:-1]}, {target}}}" if name.endswith("}") else f"{name}{{{target}}}"


def test_every_alert_has_its_series() -> None:
    assert set(FIRING) == {rule["alert"] for rule in alerts()}
    for _, (bad, good) in FIRING.items():
        assert {name.partition("{")[0] for name in {**bad, **good}} - set(OUTSIDE) <= set(PUBLISHED)


@pytest.mark.long
def test_alerts_fire_for_the_trouble_they_name_and_for_nothing_beside_it(tmp_path: Path) -> None:
    tests = [
        {
            "interval": "1m",
            "name": alert,
            "input_series": [
                {"series": placed(name, instance), "values": values}
                for instance, group in (("bad", bad), ("good", good))
                for name, values in group.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count by (instance) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                    "eval_time": "90m",
                    "exp_samples": [{"labels": '{instance="bad"}', "value": 1}],
                }
            ],
        }
        for alert, (bad, good) in FIRING.items()
    ]
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    told = promtool("test", "rules", str(cases))
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_scraped_target_is_the_service_of_the_compose_file() -> None:
    configuration = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    assert job["job_name"] == "tokenspeed" and 'up{job="tokenspeed"}' in ALERTS.read_text()
    compose = yaml.safe_load((ROOT / "images" / "compose" / "cpu.yaml").read_text())
    (target,) = job["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert name in compose["services"] and compose["services"][name]["ports"][0].endswith(f":{port}")
    mounted = f"/run/secrets/{compose['services']['prometheus']['secrets'][0]}"
    assert job["authorization"]["credentials_file"] == mounted
    assert configuration["rule_files"] == ["/etc/prometheus/alerts.yaml"]
