"""Numbers of the tables: pure functions of accuracies, counts and mixtures.

Accuracies are fractions in 0..1. Source labels: "FedSEE spec 8" and "11" are the sections on metrics and on
the mixture report, "baselines spec 0.4" the prediction rules. A *spread* is a JSON-ready dict
`{"mean", "sd", "n", "values"}`; its sd is the sample standard deviation (n - 1) and None for one value.
A *run* is the dict that a run directory keeps in `summary.json`; runs are grouped by `label`, a key that a
comparison of several experiments adds, and by `method` where it is missing.

Choice where the text is silent: the slope of the mixture report is ordinary least squares with intercept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, sparse
from torch import Tensor

Array = NDArray[np.float64]
Run = Mapping[str, Any]
Spread = dict[str, Any]

SCORES = ("overall", "worst_50", "worst_25")
DISPERSION = ("rho", "relative_gap", "gap", "floor", "top", "effective_rank")
SINGULAR = 1e-10  # of the largest eigenvalue; what is below comes from the rounding of float32 features


def _client_values(name: str, accuracies: ArrayLike) -> Array:
    """Return a (N,) float64 array; ValueError for no client, another shape or a value that is not finite."""
    values = np.asarray(accuracies, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(
            f"{name}: got shape {values.shape}, needs one accuracy per client, at least one client"
        )
    if not np.isfinite(values).all():
        bad = np.flatnonzero(~np.isfinite(values)).tolist()
        raise ValueError(f"{name}: client {bad[0]} has accuracy {values[bad[0]]}, needs a finite number")
    return values


def overall(accuracies: ArrayLike) -> float:
    """Plain mean over clients (FedSEE spec 8).

    accuracies: (N,) fractions. Raises ValueError for no client or a value that is not finite.
    """
    return float(_client_values("overall", accuracies).mean())


def weighted_overall(accuracies: ArrayLike, counts: ArrayLike) -> float:
    """Mean over clients weighted by their examples, sum_i n_i acc_i / sum_i n_i (baselines spec 0.4).

    accuracies: (N,) fractions. counts: (N,) non-negative with a positive sum. Raises ValueError otherwise.
    """
    values = _client_values("weighted_overall", accuracies)
    n = np.asarray(counts, dtype=np.float64)
    if n.shape != values.shape or (n < 0).any() or not n.sum() > 0:
        raise ValueError(f"weighted_overall: got counts {n.tolist()}, needs {values.size} of them, sum > 0")
    return float(values @ n / n.sum())


def worst_fraction(accuracies: ArrayLike, fraction: float) -> float:
    """Mean of the lowest ceil(N * fraction) client accuracies: worst-50 at 0.5, worst-25 at 0.25 (spec 8).

    accuracies: (N,) fractions. fraction: in (0, 1]. Raises ValueError outside, or for no client.
    """
    values = np.sort(_client_values("worst_fraction", accuracies))
    if not 0 < fraction <= 1:
        raise ValueError(f"worst_fraction: fraction is {fraction}, must be in (0, 1]")
    count = math.ceil(round(values.size * fraction, 9))  # 0.1 * 30 is a little more than 3 in binary
    return float(values[: max(count, 1)].mean())


def task_accuracies(per_task: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy of each task, pooled over the test examples of all clients (FedSEE spec 8).

    per_task: task -> {"correct", "n"} counts, or already a fraction. Tasks without examples are left out.
    """
    result = {}
    for task, value in per_task.items():
        if isinstance(value, Mapping):
            if value["n"] > 0:
                result[task] = float(value["correct"]) / float(value["n"])
        elif value is not None:
            result[task] = float(value)
    return result


def score(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Summary of one evaluation: overall, worst-50, worst-25, per-task accuracy and the clients' own.

    evaluation: {"accuracy": (N,) fractions, "per_task": task -> {"correct", "n"} (optional)}.
    Returns {"overall", "worst_50", "worst_25", "per_task", "clients"}. Raises ValueError for no client.
    """
    accuracies = evaluation["accuracy"]
    return {
        "overall": overall(accuracies),
        "worst_50": worst_fraction(accuracies, 0.5),
        "worst_25": worst_fraction(accuracies, 0.25),
        "per_task": task_accuracies(evaluation.get("per_task", {})),
        "clients": [float(value) for value in accuracies],
    }


def system_report(
    answers: NDArray[np.integer[Any]], labels: NDArray[np.integer[Any]], owners: NDArray[np.integer[Any]],
    scores: NDArray[np.floating[Any]] | None, n_classes: int,
) -> dict[str, Any]:  # fmt: skip
    """Accuracy on pooled queries whose owner is hidden (FedSPM spec 5).

    answers: (m, n) classes, each client's to every query. labels, owners: (n,). scores: (n, m) log-scores of
    a router, whose largest (lowest client among ties) answers; None: one vote per client, the lowest class
    among ties. Returns {"rule": "route" or "vote", "system": share of right answers, "n", and of a router
    "routing": share of queries sent to their owner, "routing_nll": mean of -log softmax(scores)[owner], and
    "asked": (m,) share of queries that each client got; of a vote "tied": share of queries without a single
    winner}. Raises ValueError for scores that are not numbers."""
    n = answers.shape[1]
    if scores is None:
        counts = (answers[:, :, None] == np.arange(n_classes)).sum(0)  # (n, K)
        tied = (counts == counts.max(1, keepdims=True)).sum(1) > 1
        right = counts.argmax(1) == labels  # argmax takes the first
        return {"rule": "vote", "system": float(right.mean()), "n": n, "tied": float(tied.mean())}
    if np.isnan(scores).any():
        raise ValueError(
            f"routing: {int(np.isnan(scores).sum())} scores are not numbers; lower the learning rate"
        )
    chosen = scores.argmax(1)
    shifted = scores - scores.max(1, keepdims=True)
    log_posterior = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return {
        "rule": "route",
        "system": float((answers[chosen, np.arange(n)] == labels).mean()),
        "n": n,
        "routing": float((chosen == owners).mean()),
        "routing_nll": float(-log_posterior[np.arange(n), owners].mean()),
        "asked": (np.bincount(chosen, minlength=len(answers)) / n).tolist(),
    }


def spread(values: Iterable[float]) -> Spread:
    """Mean and sample standard deviation (n - 1) of one number per seed (FedSEE spec 8).

    values: at least one finite number. Raises ValueError for none.
    """
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0:
        raise ValueError("spread: got no values, needs at least one")
    sd = float(array.std(ddof=1)) if array.size > 1 else None
    return {"mean": float(array.mean()), "sd": sd, "n": int(array.size), "values": array.tolist()}


def paired_differences(values: Mapping[Any, float], reference: Mapping[Any, float]) -> Spread:
    """Difference per seed, value minus reference, then mean and sample sd over seeds (FedSEE spec 8).

    values, reference: seed -> number; only seeds in both count. Raises ValueError when they share none.
    """
    shared = [seed for seed in values if seed in reference]
    if not shared:
        raise ValueError(
            f"paired_differences: seeds {list(values)} and {list(reference)} have none in common; "
            "run both methods with the same seeds"
        )
    return spread(values[seed] - reference[seed] for seed in shared)


def confusion_counts(labels: ArrayLike, predictions: ArrayLike, n_classes: int) -> NDArray[np.int64]:
    """Confusion counts: entry (k, l) is the number of examples of class k predicted as l.

    labels, predictions: (n,) integers in 0..n_classes-1. Returns (n_classes, n_classes) int64.
    Raises ValueError for differing lengths or a class outside the range.
    """
    true, predicted = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    if true.shape != predicted.shape or true.ndim != 1:
        raise ValueError(
            f"confusion_counts: got shapes {true.shape} and {predicted.shape}, needs two equal (n,)"
        )
    both = np.concatenate([true, predicted])
    if both.size and not (both.min() >= 0 and both.max() < n_classes):
        raise ValueError(
            f"confusion_counts: got classes {both.min()}..{both.max()}, needs 0..{n_classes - 1}"
        )
    cells = np.bincount(true * n_classes + predicted, minlength=n_classes**2)
    return np.asarray(cells, dtype=np.int64).reshape(n_classes, n_classes)


def matthews_correlation(confusion: ArrayLike) -> float:
    """Matthews correlation from confusion counts (Gorodkin 2004, R_K; for two classes the usual phi).

    confusion: (K, K) counts, rows true, columns predicted. Returns a number in -1..1, and 0 where it is
    not defined (one class only among labels or predictions). Raises ValueError for another shape.
    """
    counts = np.asarray(confusion, dtype=np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or (counts < 0).any():
        raise ValueError(f"matthews_correlation: got shape {counts.shape}, needs square non-negative counts")
    true, predicted, n = counts.sum(1), counts.sum(0), counts.sum()
    covariance = np.trace(counts) * n - true @ predicted
    scale = math.sqrt((n**2 - true @ true) * (n**2 - predicted @ predicted))
    return float(covariance / scale) if scale > 0 else 0.0


def _mixtures(name: str, value: ArrayLike) -> Array:
    """Return (N, M) float64 mixtures; ValueError unless every row is non-negative and sums to 1."""
    rows = np.asarray(value, dtype=np.float64)
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"{name}: got shape {rows.shape}, needs (clients, tasks)")
    bad = np.flatnonzero((rows < -1e-9).any(1) | ~(np.abs(rows.sum(1) - 1) <= 1e-4))
    if bad.size:
        raise ValueError(f"{name}: row {bad[0]} is {rows[bad[0]].tolist()}, needs non-negative with sum 1")
    return rows


def best_feasible_mae(mixtures: ArrayLike) -> float:
    """Smallest mixture error that any contribution matrix can have (FedSEE spec 11, structural limit).

    Contributions C (M, N) have row sums 1 and column sums M/N, and the estimate of client i is
    c_i = C[:, i] N/M. So each row of c (N, M) sums to 1 and each column to N/M, whatever the extraction does;
    a federation whose tasks are not balanced cannot be estimated exactly. This minimises
    mean_im |c_im - alpha_im| over all such c by a linear program (HiGHS).

    mixtures: alpha, (N, M), rows sum to 1. Returns a fraction >= 0; 0 exactly if every task has the total
    N/M. Raises ValueError for bad rows, ArithmeticError if the solver fails.
    """
    alpha = _mixtures("best_feasible_mae", mixtures)
    alpha = alpha / alpha.sum(1, keepdims=True)
    n, m = alpha.shape
    cells = n * m
    # Variables: c (row-major), then d >= |c - alpha|, both (N M,). Balanced sums make one equation redundant.
    rows = sparse.kron(sparse.identity(n), np.ones((1, m)))
    columns = sparse.kron(np.ones((1, n)), sparse.identity(m))
    none = sparse.csr_matrix((n + m, cells))
    sums = sparse.hstack([sparse.vstack([rows, columns]), none], format="csr")[:-1]
    unit = sparse.identity(cells)
    absolute = sparse.bmat([[unit, -unit], [-unit, -unit]], format="csr")
    flat = alpha.ravel()
    solved = optimize.linprog(
        np.concatenate([np.zeros(cells), np.ones(cells)]),
        A_ub=absolute,
        b_ub=np.concatenate([flat, -flat]),
        A_eq=sums,
        b_eq=np.concatenate([np.ones(n), np.full(m, n / m)])[:-1],
        bounds=(0, None),
        method="highs",
    )
    if not solved.success:
        raise ArithmeticError(f"best_feasible_mae: the linear program of {n} x {m} failed: {solved.message}")
    error = float(solved.fun / cells)
    return max(error, 0.0)


def mixture_report(estimated: ArrayLike, partitioner: ArrayLike, realised: ArrayLike) -> dict[str, Any]:
    """Estimated against true mixtures (FedSEE spec 11).

    estimated: (N, M), rows sum to 1; or (T, N, M), the matrices *used* in rounds 1..T, which are averaged.
    partitioner: (N, M) proportions after thresholding, the "true" ones (A29). realised: (N, M) shares of the
    examples the clients hold. Returns a JSON-ready dict: the three matrices; "mae" and "mae_realised", mean
    absolute differences over all cells; "best_feasible_mae" of the partitioner's; "slope" of the least
    squares line of estimated on true, None when all true entries are equal; "pure_argmax_accuracy", share of
    the clients with a single task whose largest estimate is that task, None without such a client.
    Raises ValueError for differing shapes or rows that are no mixtures.
    """
    guess = np.asarray(estimated, dtype=np.float64)
    guess = _mixtures("mixture_report: estimated", guess.mean(0) if guess.ndim == 3 else guess)
    true = _mixtures("mixture_report: partitioner", partitioner)
    held = _mixtures("mixture_report: realised", realised)
    if not guess.shape == true.shape == held.shape:
        raise ValueError(f"mixture_report: shapes differ: {guess.shape}, {true.shape} and {held.shape}")
    centred = true - true.mean()
    variance = float((centred**2).sum())
    pure = true.max(1) >= 1 - 1e-9
    hits = guess.argmax(1) == true.argmax(1)
    return {
        "estimated": guess.tolist(),
        "partitioner": true.tolist(),
        "realised": held.tolist(),
        "mae": float(np.abs(guess - true).mean()),
        "mae_realised": float(np.abs(guess - held).mean()),
        "best_feasible_mae": best_feasible_mae(true),
        "slope": float((centred * guess).sum()) / variance if variance > 1e-12 else None,
        "pure_argmax_accuracy": float(hits[pure].mean()) if pure.any() else None,
    }


def second_moments(parts: Iterable[tuple[Tensor, Tensor]], n_tasks: int) -> tuple[Tensor, Tensor]:
    """Feature second moment Phi_m = mean of phi phi' over a task's examples, for every task (FedSEE spec 1).

    parts: pairs of features phi, (n, D), and tasks, (n,) integers in 0..n_tasks-1, one pair per client.
    Returns (n_tasks, D, D) float64, zeros for a task without examples, and (n_tasks,) numbers of examples.
    Raises ValueError for no parts, or parts of differing D.
    """
    known = list(parts)
    widths = sorted({phi.shape[1] for phi, _ in known})
    if len(widths) != 1:
        raise ValueError(f"second_moments: got parts of {widths} features, needs one number for all")
    sums = torch.zeros(n_tasks, widths[0], widths[0], dtype=torch.float64)
    counts = torch.zeros(n_tasks, dtype=torch.int64)
    for phi, task in known:
        for m in range(n_tasks):
            mine = phi[task == m].double()
            sums[m] += mine.T @ mine
            counts[m] += len(mine)
    return sums / counts.clamp(min=1)[:, None, None], counts


def covariance_dispersion(moments: Tensor) -> dict[str, Any]:
    """Relative covariance dispersion of tasks, rho = max |Phi_m - Phi_k|_2 / min sigma_min(Phi_m), and its
    parts (FedSEE spec 1).

    With a linear head and squared loss, a client's optimum lies within rho times the diameter of the task
    optima of their barycentre. Directions that no example of any task has (a standardised vector sums to 0)
    change no loss, so everything is taken on the span of the features; where that is the whole space, rho is
    `theory.mixture_geometry.relative_dispersion`.

    moments: Phi_m of each task, (M, D, D), symmetric positive semidefinite, not all zero.
    Returns a JSON-ready dict: "rho", None (infinite) if a task's Phi_m is singular on the span, as it is with
    fewer examples than dimensions; "gap", the numerator; "floor", the denominator; "top", the largest
    eigenvalue of any Phi_m; "relative_gap", gap over the largest eigenvalue of the mean of the Phi_m, in
    0..M and always finite; "effective_rank", trace of that mean over its largest eigenvalue, in 1..D;
    "dimension", D, and "span", the dimension of the span. Raises ValueError for another shape or for zeros.
    """
    phi = torch.as_tensor(moments, dtype=torch.float64)
    if phi.ndim != 3 or phi.shape[1] != phi.shape[2] or 0 in phi.shape or not phi.isfinite().all():
        raise ValueError(f"covariance_dispersion: got shape {tuple(phi.shape)}, needs finite (tasks, D, D)")
    values, vectors = torch.linalg.eigh(phi.mean(0))  # torch keeps to the threads of the run
    largest = float(values[-1])
    if not largest > 0:
        raise ValueError("covariance_dispersion: got zeros only, needs examples of at least one task")
    span = vectors[:, values > SINGULAR * largest]
    inside = span.T @ phi @ span
    spectra = torch.linalg.eigvalsh(inside)  # (M, span), ascending
    floor, top = max(float(spectra[:, 0].min()), 0.0), float(spectra[:, -1].max())
    gap = max(
        (float(torch.linalg.eigvalsh(a - b).abs().max()) for a, b in combinations(inside, 2)), default=0.0
    )
    return {
        "rho": gap / floor if floor > SINGULAR * top else None,
        "relative_gap": gap / largest,
        "gap": gap,
        "floor": floor,
        "top": top,
        "effective_rank": float(values.sum()) / largest,
        "dimension": phi.shape[1],
        "span": span.shape[1],
    }


OUTSIDE = ("system", "average", "routing")  # accuracies of queries whose owner is hidden


def label_of(run: Run) -> str:
    """Name under which a run is grouped: its label in a comparison, else its method."""
    return str(run.get("label") or run["method"])


def group_runs(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by label, in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(label_of(run), []).append(run)
    return groups


def reference_label(runs: Iterable[Run]) -> str | None:
    """The label others are compared with: fedsee where there is one, else the first; None without runs."""
    groups = group_runs(runs)
    named = [label for label, members in groups.items() if members[0]["method"] == "fedsee"]
    return next(iter([*named, *groups]), None)


def _spread_of(runs: Sequence[Run], *path: str) -> Spread | None:
    """Spread of a number at a path of keys over the runs that have it; None when no run has it."""
    values = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            values.append(float(value))
    return spread(values) if values else None


def summarise_runs(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One JSON-ready entry per label, numbers as spreads over its seeds (FedSEE spec 8).

    runs: complete run summaries. Returns entries {"label", "method", "seeds", "test", "validation",
    "seconds", "bytes_up_per_client_round", "bytes_down_per_client_round", "examples_trained",
    "examples_public", "local_epochs", "rounds", "mixture", "covariance_dispersion", "outside"}; "test" and
    "validation" hold spreads of the scores and, under "per_task", of every task; "mixture" spreads of "mae",
    "mae_realised", "best_feasible_mae", "slope" and "pure_argmax_accuracy"; "covariance_dispersion" of its
    numbers, rho over the seeds where it is finite; "outside" has the "rule" and spreads of "system",
    "average" and "routing" of queries whose owner is hidden. What no run of the label has is None.
    """
    entries = []
    for label, members in group_runs(runs).items():
        entry: dict[str, Any] = {
            "label": label,
            "method": members[0]["method"],
            "seeds": [run["seed"] for run in members],
        }
        for split in ("test", "validation"):
            tasks = dict.fromkeys(
                task for run in members for task in (run.get(split) or {}).get("per_task", {})
            )
            scored = [
                {**run, split: {**run[split], "per_task": task_accuracies(run[split].get("per_task", {}))}}
                for run in members
                if run.get(split)
            ]
            entry[split] = {name: _spread_of(scored, split, name) for name in SCORES}
            entry[split]["per_task"] = {task: _spread_of(scored, split, "per_task", task) for task in tasks}
        for name in (
            "seconds",
            "bytes_up_per_client_round",
            "bytes_down_per_client_round",
            "examples_trained",
            "examples_public",
            "local_epochs",
            "rounds",
        ):
            entry[name] = _spread_of(members, name)
        entry["mixture"] = {
            name: _spread_of(members, "mixture", name)
            for name in ("mae", "mae_realised", "best_feasible_mae", "slope", "pure_argmax_accuracy")
        }
        entry["covariance_dispersion"] = {
            name: _spread_of(members, "covariance_dispersion", name) for name in DISPERSION
        }
        answered = [run["outside"] for run in members if run.get("outside")]
        entry["outside"] = None
        if answered:
            spreads = {name: _spread_of(members, "outside", name) for name in OUTSIDE}
            entry["outside"] = {"rule": answered[0]["rule"], **spreads}
        entries.append(entry)
    return entries


def _by_seed(runs: Iterable[Run]) -> dict[tuple[Any, Any], Run]:
    """Runs by (seed, federation fingerprint): equal keys mean the same clients with the same rows."""
    return {(run["seed"], run.get("fingerprint")): run for run in runs if run.get("test")}


def paired_summary(runs: Iterable[Run], reference: str) -> list[dict[str, Any]]:
    """Test differences to a reference, label by label: method minus reference per seed (FedSEE spec 8).

    runs: complete run summaries. reference: a label among them. Runs are paired when seed *and* federation
    fingerprint agree. Returns for every other label {"label", "seeds", "unpaired" (seeds without a partner),
    "overall", "worst_50", "worst_25", "per_task", "outside" ("system" and "average")}; spreads, None where no
    seed pairs up.
    Raises KeyError for an unknown reference.
    """
    groups = group_runs(runs)
    if reference not in groups:
        raise KeyError(f"paired differences: no method '{reference}' here; choose one of {list(groups)}")
    base = _by_seed(groups[reference])
    entries = []
    for label, members in groups.items():
        if label == reference:
            continue
        own = _by_seed(members)
        shared = [key for key in own if key in base]
        entry: dict[str, Any] = {
            "label": label,
            "seeds": [seed for seed, _ in shared],
            "unpaired": sorted({run["seed"] for run in members} - {seed for seed, _ in shared}),
        }

        def difference(pick: Any, shared: Any = shared, own: Any = own) -> Spread | None:
            if not shared:
                return None
            return paired_differences(
                {k: pick(own[k]["test"]) for k in shared}, {k: pick(base[k]["test"]) for k in shared}
            )

        for name in SCORES:
            entry[name] = difference(lambda test, name=name: test[name])
        tables = [
            task_accuracies(side[key]["test"].get("per_task", {})) for key in shared for side in (own, base)
        ]
        tasks = [task for task in (tables[0] if tables else {}) if all(task in table for table in tables)]
        entry["per_task"] = {
            task: difference(lambda test, task=task: task_accuracies(test["per_task"])[task])
            for task in tasks
        }
        answered = [key for key in shared if own[key].get("outside") and base[key].get("outside")]
        entry["outside"] = {
            name: paired_differences(
                {key: own[key]["outside"][name] for key in answered},
                {key: base[key]["outside"][name] for key in answered},
            )
            if answered
            else None
            for name in ("system", "average")
        }
        entries.append(entry)
    return entries


def negative_transfer(runs: Iterable[Run], baseline: str = "local_only") -> list[dict[str, Any]]:
    """Clients that a method serves worse than their own local training (FedSEE spec 8: difference < 0).

    runs: complete run summaries. baseline: the method that trains without communication. Runs are paired as
    in `paired_summary`. Returns for every label of another method {"label", "seeds", "n_clients", "below"
    (spread of the number of clients below the baseline), "difference" (spread of the mean difference)}; empty
    without the baseline.
    """
    known = list(runs)
    alone = [run for run in known if run["method"] == baseline]
    entries = []
    for label, members in group_runs(run for run in known if run["method"] != baseline).items():
        homes = {run.get("experiment") for run in members}  # a run's own experiment knows its baseline best
        base = _by_seed([*alone, *(run for run in alone if run.get("experiment") in homes)])
        own = _by_seed(members)
        shared = [key for key in own if key in base]
        if not shared:
            continue
        gaps = [np.subtract(own[key]["test"]["clients"], base[key]["test"]["clients"]) for key in shared]
        entries.append(
            {
                "label": label,
                "seeds": [seed for seed, _ in shared],
                "n_clients": int(gaps[0].size),
                "below": spread(int((gap < -1e-12).sum()) for gap in gaps),
                "difference": spread(float(gap.mean()) for gap in gaps),
            }
        )
    return entries


def fingerprint_conflicts(runs: Iterable[Run]) -> dict[Any, dict[str, list[str]]]:
    """Seeds whose runs saw different federations: seed -> fingerprint -> labels. Empty when all agree."""
    seen: dict[Any, dict[str, list[str]]] = {}
    for run in runs:
        if run.get("fingerprint"):
            seen.setdefault(run["seed"], {}).setdefault(str(run["fingerprint"]), []).append(label_of(run))
    return {seed: prints for seed, prints in seen.items() if len(prints) > 1}
