"""The in-process engine: every participant is served in turn, in one process, deterministically."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedprism.protocol import (
    Ask,
    Client,
    ClientFailure,
    Phase,
    Reply,
    derive_seed,
    first_non_finite,
    participant_name,
    payload_bytes,
    tensors_in,
)


@dataclass
class PhaseCost:
    """What a phase cost within one round: seconds, participants asked, bytes over all of them, examples."""

    seconds: float = 0.0
    asked: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    examples: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "seconds": round(self.seconds, 4),
            "asked": self.asked,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "examples": self.examples,
        }


@dataclass
class InProcess:
    """Carries asks to phases of one run.

    method: name for error messages. phases: phase name -> phase. participants: id -> client. cfg: the
    method's config, handed to each phase. seed: the run's seed. on_client(phase, client, done, asked): told
    before each participant's turn. `costs` holds the phases' cost since the last `take_costs`."""

    method: str
    phases: Mapping[str, Phase]
    participants: Mapping[int, Client]
    cfg: Any
    seed: int
    on_client: Callable[[str, int, int, int], None] | None = None
    costs: dict[str, PhaseCost] = field(default_factory=dict)
    traffic: dict[int, list[int]] = field(default_factory=dict)
    _asks: dict[tuple[int, str], int] = field(default_factory=dict)

    def carry(self, ask: Ask, round: int) -> list[Reply]:
        """Run one ask in round `round`; replies come sorted by client.

        Raises KeyError for an unknown phase or participant, ClientFailure naming method, phase, round and
        client where a participant fails or sends something that is not finite, unless the ask says
        `allow_missing`."""
        if ask.phase not in self.phases:
            raise KeyError(f"method '{self.method}' has no phase '{ask.phase}', has {sorted(self.phases)}")
        unknown = [c for c in ask.clients if c not in self.participants]
        if unknown:
            raise KeyError(f"method '{self.method}', phase '{ask.phase}': no participants {unknown}")
        phase = self.phases[ask.phase]
        repeat = 0 if ask.diagnostic else self._asks.get((round, ask.phase), 0)
        self._asks = {key: n for key, n in self._asks.items() if key[0] == round}
        self._asks[round, ask.phase] = repeat + 1
        cost = self.costs.setdefault(ask.phase, PhaseCost())
        replies = []
        for done, identity in enumerate(sorted(ask.clients)):
            if self.on_client is not None:
                self.on_client(ask.phase, identity, done, len(ask.clients))
            replies.append(self._serve(phase, ask, identity, round, repeat, cost))
        return replies

    def _serve(
        self, phase: Phase, ask: Ask, identity: int, round: int, repeat: int, cost: PhaseCost
    ) -> Reply:
        client = self.participants[identity]
        client.generator.manual_seed(derive_seed(self.seed, round, repeat, phase.name, identity))
        got = {**ask.body, **ask.each.get(identity, {})}
        before = dict(client.state)
        started = time.perf_counter()
        where = f"{self.method}, phase '{phase.name}', round {round}, {participant_name(identity)}"
        try:
            sent = phase(client, got, self.cfg)
            broken = first_non_finite(sent)
            if broken is not None:
                raise FloatingPointError(
                    f"sent '{broken}' with values that are not finite; lower the learning rate"
                )
            attached = next((path for path, tensor in tensors_in(sent) if tensor.requires_grad), None)
            if attached is not None:
                raise ValueError(f"sent '{attached}' with its gradient graph; detach it")
        except Exception as fault:  # whatever it is, it gets the place where it happened
            client.state.clear()
            client.state.update(before)  # a failed phase leaves no trace
            if not ask.allow_missing:
                raise ClientFailure(f"{where}: {fault}") from fault
            return Reply(identity, {}, error=f"{where}: {fault}")
        finally:
            cost.seconds += time.perf_counter() - started
            cost.asked += 1
        up, down = payload_bytes(sent), payload_bytes(got)
        cost.bytes_up, cost.bytes_down = cost.bytes_up + up, cost.bytes_down + down
        examples = sent.get("examples", 0)
        cost.examples += int(examples)
        if not ask.diagnostic:
            counts = self.traffic.setdefault(identity, [0, 0])
            counts[0], counts[1] = counts[0] + up, counts[1] + down
        return Reply(identity, sent)

    def take_costs(self) -> tuple[dict[str, PhaseCost], dict[int, list[int]]]:
        """Costs by phase and [bytes up, bytes down] by participant since the last call; starts afresh."""
        costs, traffic = self.costs, self.traffic
        self.costs, self.traffic = {}, {}
        return costs, traffic
