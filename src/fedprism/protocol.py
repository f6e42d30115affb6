"""The words that methods and engines share: asks, replies, round ends, clients and phase contracts.

A server is a generator that yields `Ask` and `RoundEnd`; an engine carries an ask to phases and sends the
replies back, sorted by client. A phase is a function `phase(client, got, cfg) -> sent`. What a client keeps
between rounds is in `client.state` and nowhere else.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]
Body = dict[str, Any]  # name -> tree, group of trees, tensor or number

PUBLIC = -1  # the participant that holds the server's task-labelled public sets
POOLED = -2  # the participant that holds all clients' training data (centralised references only)
PARTICIPANT_NAMES = {PUBLIC: "public", POOLED: "pooled"}


def participant_name(client: int) -> str:
    """Readable name of a participant: 'client 3', 'public' or 'pooled'."""
    return PARTICIPANT_NAMES.get(client, f"client {client}")


@dataclass(frozen=True)
class Ask:
    """One question to some participants.

    phase: name of a phase of the method. clients: whom to ask. body: what all of them get. each: what one
    participant gets besides, by participant. allow_missing: let the server see failures as replies with
    `error` set; without it a failing participant raises. diagnostic: not part of the method, so its bytes
    stay out of the communication of clients, and asking twice in a round draws the same numbers twice."""

    phase: str
    clients: Sequence[int]
    body: Mapping[str, Any]
    each: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    allow_missing: bool = False
    diagnostic: bool = False


@dataclass(frozen=True)
class Reply:
    """What one participant sent back; `body` is empty and `error` says why where it failed."""

    client: int
    body: Body
    error: str | None = None


@dataclass(frozen=True)
class RoundEnd:
    """The run can stop here. round: 0-based number of the round that ended. state: the server's State,
    complete. log: JSON-ready facts of the round for metrics.jsonl."""

    round: int
    state: Any
    log: Mapping[str, Any] = field(default_factory=dict)


Server = Generator[Ask | RoundEnd, list[Reply], None]


@dataclass(frozen=True)
class Facts:
    """What a method may know about the federation before the first round.

    clients: ids in order. sizes: training examples of each. tasks: names of the tasks with a public set, in
    expert order (expert m belongs to tasks[m]). trained_tasks: those of them that occur in clients' training
    data. seed: the run's seed. public_sizes: rows of each task's public set; () where nobody says."""

    clients: tuple[int, ...]
    sizes: tuple[int, ...]
    tasks: tuple[str, ...]
    trained_tasks: tuple[str, ...]
    seed: int
    public_sizes: tuple[int, ...] = ()


@dataclass
class Client:
    """A participant as a phase sees it.

    id; model: shared frozen model (`models.interface.Model`); data: split name -> rows with `len()` and
    `batches(size, epochs=, steps=, generator=)`; state: what it keeps between rounds; generator: seeded by
    the engine from (run seed, round, phase, client) before each phase."""

    id: int
    model: Any
    data: Mapping[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def n(self) -> int:
        """Number of training examples."""
        return len(self.data["train"])

    def batches(
        self, size: int, *, epochs: int | None = None, steps: int | None = None, full: bool = False
    ) -> Iterator[Any]:
        """Shuffled training batches of at most `size` examples, for whole `epochs` or exactly `steps`.

        full, with `steps`: every batch has min(size, n) examples; image and table rows alone have it."""
        walk = {"full": True} if full else {}
        batches: Iterator[Any] = self.data["train"].batches(
            size, epochs=epochs, steps=steps, generator=self.generator, **walk
        )
        return batches

    def loss(self, tree: Tree, batch: Any) -> Tensor:
        """Mean training loss of the plain model (dropout on), a scalar."""
        outputs = self.model.apply(tree, batch, generator=self.generator)
        loss: Tensor = self.model.per_example_loss(outputs, batch).mean()
        return loss


@dataclass(frozen=True)
class Phase:
    """A phase with its contract: the names it receives, keeps in `client.state` and sends."""

    run: Callable[[Client, Body, Any], Body]
    name: str
    receives: frozenset[str]
    keeps: frozenset[str]
    sends: frozenset[str]

    def __call__(self, client: Client, got: Body, cfg: Any) -> Body:
        """Run the phase and hold it to its contract; raises ValueError naming the keys that differ."""
        where = f"phase '{self.name}', {participant_name(client.id)}"
        _check_keys(f"{where}: received", got.keys(), self.receives)
        sent = self.run(client, got, cfg)
        _check_keys(f"{where}: sent", sent.keys(), self.sends)
        stray = set(client.state) - self.keeps
        if stray:
            raise ValueError(
                f"{where}: keeps {sorted(stray)} without declaring it; declared: {sorted(self.keeps)}"
            )
        return sent


def _check_keys(what: str, got: Any, declared: frozenset[str]) -> None:
    got = set(got)
    if got != declared:
        raise ValueError(
            f"{what} {sorted(got)}, declared {sorted(declared)}; "
            f"missing {sorted(declared - got)}, undeclared {sorted(got - declared)}"
        )


def phase(
    *, receives: Sequence[str] = (), keeps: Sequence[str] = (), sends: Sequence[str] = ()
) -> Callable[[Callable[[Client, Body, Any], Body]], Phase]:
    """Declare a function as a phase. The keys are checked at each call and feed the byte counts.

    keeps: every name that may stand in `client.state` after the call, whoever wrote it."""

    def declare(run: Callable[[Client, Body, Any], Body]) -> Phase:
        return Phase(run, run.__name__, frozenset(receives), frozenset(keeps), frozenset(sends))

    return declare


@dataclass(frozen=True)
class Method:
    """A method as the registry lists it.

    name, paper: identifiers for tables. config: its frozen config dataclass. presets: name -> field values.
    start(cfg, model, facts) -> State: first server state.  phases: what participants can be asked.
    server(cfg, state, clients): the generator.  serve(cfg, state) -> body: what a prediction needs from the
    server.  predictor(client, got, cfg) -> (batch -> Outputs): the method's ID rule; it may fine-tune a copy
    but leaves `client.state` alone.
    router(model, got, batch, cfg) -> (b, m): log-scores of the clients, in order of id, for queries whose
    owner nobody knows; got is what `serve` gave, the largest score (lowest id among ties) answers. None: the
    method can't route, clients vote.  needs: special participants it uses (PUBLIC, POOLED).
    state: the dataclass of server state, rebuilt on resume from its fields; it has a field `round`."""

    name: str
    paper: str
    config: type[Any]
    state: type[Any]
    start: Callable[[Any, Any, Facts], Any]
    phases: tuple[Phase, ...]
    server: Callable[[Any, Any, Sequence[int]], Server]
    serve: Callable[[Any, Any], Body]
    predictor: Callable[[Client, Body, Any], Callable[[Any], Any]]
    router: Callable[[Any, Body, Any, Any], Tensor] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: tuple[int, ...] = ()
    summary: str = ""

    def __post_init__(self) -> None:
        if not inspect.isgeneratorfunction(self.server):
            raise TypeError(f"method '{self.name}': its server must be a generator function")


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from named parts, the same on every machine; for example (seed, round, phase, client)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors inside nested mappings and sequences, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{k}]")


def payload_bytes(value: Any) -> int:
    """Bytes that a body takes on the wire: tensors at their own width, other numbers 8 bytes each."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(payload_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(payload_bytes(item) for item in value)
    if isinstance(value, str):
        return len(value.encode())
    return 0 if value is None else 8


def first_non_finite(body: Mapping[str, Any]) -> str | None:
    """Path of the first tensor or number in `body` that is not finite, or None."""
    for path, tensor in tensors_in(body):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return path
    for key, value in body.items():
        if isinstance(value, float) and not math.isfinite(value):
            return key
    return None


class ClientFailure(RuntimeError):
    """A participant failed or sent something unusable; the message names method, phase, round and who."""


def sample_clients(clients: Sequence[int], fraction: float, seed: int, at_round: int) -> list[int]:
    """The participants of a round: ceil(fraction N) clients without replacement, from (seed, at_round) alone.

    fraction in (0, 1]; 1 returns all clients. Sorted by id (baselines spec 0.2)."""
    wanted = max(1, math.ceil(round(fraction * len(clients), 9)))  # .07 of 100 is a little over 7 in binary
    if wanted >= len(clients):
        return sorted(clients)
    order = torch.randperm(len(clients), generator=generator(seed, "participation", at_round)).tolist()
    return sorted(clients[k] for k in order[:wanted])
