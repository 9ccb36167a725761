"""What MLflow's experiment page shows of a study at once: saved views with columns, order, groups and charts.

Pure functions from a study's record to the experiment's tags. The tags are those that MLflow's own page writes when a
user saves a view (seen in MLflow 3.17); a page that doesn't know them shows its defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ranksearch.records import StudyRecord
from ranksearch.space import read_space

__all__ = ["VIEW", "experiment_tags"]

VIEW = "mlflow.sharedViewState."
"""Begins the tag of a saved view; the rest is its key."""

_FEW = 100
"""Runs that the charts draw at once: beyond, the page gets slow."""


def experiment_tags(study: StudyRecord) -> dict[str, str]:
    """The tags of the experiment: its kind, its metric, and the study's views.

    Args:
        study: The study; runs are known to be its own by the id in their tags.
    """
    metric, direction = study.metric()
    searched = _searched(study)
    ours = f"tags.`ranksearch.study_id` = '{study.study_id}'"
    trials = _view(
        study,
        "all trials",
        where=f"{ours} and tags.`ranksearch.trial` LIKE '%'",
        order=(f"metrics.`{metric}`", direction == "minimize"),
        columns=[
            *_tags("purpose", "state"),
            *(f"params.`{name}`" for name in searched),
            *(f"metrics.`{name}`" for name in _metrics(metric)),
            "metrics.`cost/total_steps`",
        ],
        charts=_charts(metric, searched),
    )
    ranks = _view(
        study,
        "the decision, by rank",
        where=f"{ours} and tags.`ranksearch.purpose` = 'decide'",
        order=(f"metrics.`{metric}`", direction == "minimize"),
        columns=["params.`r`", *(f"metrics.`{name}`" for name in _metrics(metric)), *_tags("seed")],
        charts=_charts(metric, ["r", "seed"]),
        group="r",
    )
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.experiment.primaryMetric.name": metric,
        f"{VIEW}{study.study_id}-trials": trials,
        f"{VIEW}{study.study_id}-ranks": ranks,
    }


def _searched(study: StudyRecord) -> list[str]:
    space, _ = read_space(study.spec.get("space"))
    names = list(space.searched) if space is not None else []
    return list(dict.fromkeys(["r", "learning_rate", *names]))


def _metrics(metric: str) -> list[str]:
    others = ("eval/accuracy", "eval/macro_f1") if metric != "eval/accuracy" else ("eval/nll",)
    return [metric, *others]


def _tags(*names: str) -> list[str]:
    return [f"tags.`ranksearch.{name}`" for name in names]


def _view(
    study: StudyRecord,
    title: str,
    *,
    where: str,
    order: tuple[str, bool],
    columns: Sequence[str],
    charts: Sequence[Mapping[str, Any]],
    group: str | None = None,
) -> str:
    """A saved view as the page writes it: an envelope whose state is JSON in a string."""
    by_group = {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": group}]}
    # Sorted by anything but the time the page lists the trials themselves, not the study to be unfolded.
    state = {
        "searchFilter": where,
        "orderByKey": order[0],
        "orderByAsc": order[1],
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(columns),
        "runsHiddenMode": "SHOW_ALL" if (study.plan.get("runs_most") or 0) <= _FEW else "FIRST_20_RUNS",
        "groupBy": by_group if group else None,
        "compareRunCharts": list(charts),
        # Keeps our section before those that the page makes by itself.
        "isAccordionReordered": True,
        "compareRunSections": [
            {"uuid": "search", "name": "Search", "display": True, "isReordered": False, "deleted": False}
        ],
    }
    at = round(study.created_at.timestamp() * 1000)
    name = f"{study.name}: {title}"
    return json.dumps({"name": name, "createdAt": at, "updatedAt": at, "state": json.dumps(state)})


def _charts(metric: str, parameters: Sequence[str]) -> list[dict[str, Any]]:
    """Parallel coordinates over the parameters, the metric against the rank, and the metric over the steps."""
    common = {"metricSectionId": "search", "deleted": False, "isGenerated": False}
    return [
        common
        | {
            "uuid": "parallel",
            "type": "PARALLEL",
            "selectedParams": list(parameters),
            "selectedMetrics": [metric],
            "runsCountToCompare": _FEW,
            "showAllRuns": False,
        },
        common
        | {
            "uuid": "by-rank",
            "type": "SCATTER",
            "xaxis": {"key": "r", "type": "PARAM"},
            "yaxis": {"key": metric, "type": "METRIC"},
            "runsCountToCompare": _FEW,
        },
        common
        | {
            "uuid": "by-step",
            "type": "LINE",
            "metricKey": metric,
            "selectedMetricKeys": [metric],
            "runsCountToCompare": _FEW,
            "lineSmoothness": 0,
            "xAxisScaleType": "linear",
            "scaleType": "linear",
            "xAxisKey": "step",
            "range": {},
        },
    ]
