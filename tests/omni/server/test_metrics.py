"""The metrics of ``/metrics``, by replica, and the queries of the dashboard."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni import Omni
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.serving.meters import Meters
from tests.support.import_graph import ROOT
from tests.support.live_server import LiveServer
from tests.support.patience import PATIENCE_S

DASHBOARD = json.loads((ROOT / "examples/grafana_dashboard.json").read_text("utf-8"))
NUM_BLOCKS = 128
MODEL = {
    "kind": "autoregressive",
    "engine": {"num_blocks": NUM_BLOCKS, "block_size": 4, "max_model_len": 128},
    "sampling": {"temperature": 0.0, "max_tokens": 5},
}
WIDE = PipelineConfig.model_validate(
    {
        "name": "wide",
        "stages": {
            "writer": MODEL | {"model": "seeded:gemma2", "final_output": "text"},
            "reader": MODEL
            | {
                "model": "seeded:llama",
                "inputs": {"from": "writer", "transform": "text_as_prompt"},
                "final_output": "text",
            },
        },
    }
)

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


@pytest.fixture(scope="module")
def reported(checkpoint_cache: object) -> Iterator[Samples]:
    """Metrics of a server after one repeated, one refused and one spoken request."""
    with LiveServer([WIDE, "omni_speech"]) as server, server.client() as client:
        for _ in range(2):
            client.completions.create(model="wide", prompt="Once upon a time, in a house by a sea")
        with suppress(openai.BadRequestError):
            client.completions.create(model="wide", prompt=[10**6])
        client.audio.speech.create(model="omni_speech", input="Hello", voice="Ethan")
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        if family.type == "gauge":  # also one without samples, such as that of remote workers
            found.setdefault(family.name, {})
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    yield found


def of_stage(reported: Samples, name: str, stage: str, **labels: str) -> float:
    (value,) = (
        value
        for given, value in reported[f"omni_stage_{name}"].items()
        if dict(given).items()
        >= {"model": "wide", "stage": stage, "replica": "0", **labels}.items()
    )
    return value


def test_a_stage_has_metrics_of_its_work(reported: Samples) -> None:
    assert of_stage(reported, "steps_total", "writer") >= 5
    assert of_stage(reported, "generated_tokens_total", "writer") == 10
    assert of_stage(reported, "cached_tokens_total", "writer") > 0
    assert of_stage(reported, "transfers_total", "reader") == 2
    assert of_stage(reported, "transferred_bytes_total", "reader") > 0
    assert of_stage(reported, "transfers_total", "writer") == 0
    for name in ("running", "waiting", "preemptions_total", "restarts_total"):
        assert of_stage(reported, name, "writer") == 0
    assert 0 < of_stage(reported, "hit_rate", "writer") < 1
    blocks = [
        of_stage(reported, "blocks", "writer", state=each) for each in ("free", "held", "cached")
    ]
    assert sum(blocks) == NUM_BLOCKS - 1
    counted = reported["omni_requests_total"]
    for status, number in (("ok", 2), ("refused", 1)):
        assert counted[("model", "wide"), ("status", status)] == number
    assert all(name.startswith("omni_") for name in reported)


def test_memory_is_reported_by_cache_and_by_group_of_layers(reported: Samples) -> None:
    groups = {
        (dict(labels)["group"], dict(labels)["kind"])
        for labels in reported["omni_stage_group_blocks"]
        if dict(labels)["stage"] == "writer"
    }
    assert groups == {("0", "sliding window of 16"), ("1", "full attention")}
    assert of_stage(reported, "group_blocks", "writer", group="1", state="held") == 0
    assert of_stage(reported, "group_blocks", "writer", group="1", state="cached") > 0
    for cache in ("kv", "stage_outputs"):
        assert of_stage(reported, "cache_bytes", "writer", cache=cache) > 0
    assert of_stage(reported, "evictions_total", "writer", group="1") == 0
    assert of_stage(reported, "group_misses_total", "writer", group="0") >= 0
    assert of_stage(reported, "offload_hit_tokens_total", "writer", tier="disk") == 0
    speech = {"model": "omni_speech", "stage": "thinker", "cache": "encoder"}
    assert any(
        dict(labels).items() >= speech.items() for labels in reported["omni_stage_cache_bytes"]
    )


def test_every_time_is_measured(reported: Samples) -> None:
    def count(name: str, **labels: str) -> float:
        return reported[f"omni_{name}_count"][tuple(sorted(labels.items()))]

    assert count("queue_seconds", model="wide") == 3
    for name in ("time_to_first_token_seconds", "request_duration_seconds"):
        assert count(name, model="wide") == 2
    for name in ("time_to_first_audio_seconds", "real_time_factor"):
        assert count(name, model="omni_speech") == 1
    # Four of five tokens follow another one.
    assert count("time_between_tokens_seconds", model="wide", stage="writer") == 8


def test_every_replica_has_its_metrics(checkpoint_cache: object) -> None:
    stage = MODEL | {"model": "seeded:qwen2", "final_output": "text"}
    config = PipelineConfig.model_validate(
        {
            "name": "twice",
            "runtime": {"kind": "processes"},
            "stages": {"writer": stage | {"placement": {"replicas": 2, "threads": 1}}},
        }
    )

    class Told:
        name = "twice"

        def __init__(self, omni: Omni) -> None:
            self.replica_stats = omni.replica_stats
            self.worker_states = omni.worker_states

        class queue:
            num_running = num_waiting = 0

    with Omni(config) as omni:
        omni.generate(["Once upon a time", "A clock told the time"])
        one, other = omni.replica_stats()["writer"]
        both = omni.stats()["writer"]
        families = {each.name: each for each in Meters([Told(omni)]).collect()}  # type: ignore[list-item]
    assert one.generated_tokens + other.generated_tokens == both.generated_tokens == 10
    assert both.kv.num_blocks == 256
    assert both.kv.groups[0].cached == one.kv.groups[0].cached + other.kv.groups[0].cached
    reported = {
        (sample.labels["stage"], sample.labels["replica"]): sample.value
        for sample in families["omni_stage_generated_tokens"].samples
    }
    up = [sample.value for sample in families["omni_stage_worker_up"].samples]
    assert up == [1, 1]
    assert reported == {
        ("writer", "0"): one.generated_tokens,
        ("writer", "1"): other.generated_tokens,
    }


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def problems(query: str, reported: Samples) -> list[str]:
    """Metrics and labels of a query that do not exist."""
    found = []
    names = re.findall(r"omni_\w+", query)
    for name in names:
        if name not in reported:
            found.append(f"{name} is not there")
    labels: set[str] = set()
    for of_name in (reported.get(name, {}) for name in names):
        for given in of_name:
            labels |= {label for label, _ in given}
    asked = re.findall(r"(\w+)=~?\"", query)
    for listed in re.findall(r"by \(([^)]*)\)", query):
        asked += listed.replace(" ", "").split(",")
    if not any(reported.get(name) for name in names):
        return found
    return found + [f"no label {each}" for each in asked if each not in labels]


def test_the_dashboard_queries_only_existing_metrics(reported: Samples) -> None:
    assert len(queries()) > 30
    assert [each for query in queries() for each in problems(query, reported)] == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(omni_stage_stepps_total[1m])", "omni_stage_stepps_total is not there"),
        ("sum by (stag) (omni_stage_running)", "no label stag"),
        ('omni_stage_running{modl="x"}', "no label modl"),
    ],
)
def test_a_query_of_an_unknown_metric_or_label_is_found(
    reported: Samples, query: str, problem: str
) -> None:
    assert problem in problems(query, reported)


def test_the_dashboard_shows_every_metric(reported: Samples) -> None:
    asked = {
        re.sub(r"_bucket$", "", name)
        for each in queries()
        for name in re.findall(r"omni_\w+", each)
    }
    known = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for name in reported
        if not name.endswith("_created")  # the start of counting
    }
    # The dashboard computes rates from the parts of these sums.
    assert known - asked == {"omni_stage_hit_rate", "omni_stage_transfers_total"}


def test_names_units_and_help_follow_the_rules_of_prometheus(checkpoint_cache: object) -> None:
    """The rules of ``promtool check metrics``."""
    with LiveServer([WIDE]) as server:
        families = [*text_string_to_metric_families(server.pipelines.meters.text().decode())]
    assert len({each.name for each in families}) == len(families) > 25
    for each in families:
        assert re.fullmatch(r"omni_[a-z0-9_]+[a-z0-9]", each.name)
        assert each.documentation.endswith("."), "help"
        assert each.type in ("counter", "gauge", "histogram")
        wrong = ("total", "count", "sum", "bucket", "milliseconds", "ms", "mib", "percent")
        assert each.name.rpartition("_")[2] not in wrong
        # A base unit ends the name, apart from the unit of a counter.
        for unit in ("seconds", "bytes"):
            assert unit not in each.name or each.name.endswith(unit)
        assert each.type not in each.name.split("_")


def test_every_panel_of_the_dashboard_has_a_position_and_texts(reported: Samples) -> None:
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels]
    assert len(set(places)) == len(places) and len({each["id"] for each in panels}) == len(panels)
    assert all(each["title"] for each in panels)
