"""FedSPM's loop: what travels, what stays, and answers that the loop did not compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedprism import trees
from fedprism.engines.inprocess import InProcess
from fedprism.methods import density_ratio as dr
from fedprism.methods import fedspm
from fedprism.methods.component_mixture import Components, agreed_centroids, purity
from fedprism.methods.fedspm import METHOD, Config
from fedprism.protocol import Ask, Client, RoundEnd, payload_bytes
from tests.tiny import drive, facts_of, mixed_clients, table_clients

FULL = {"local_steps": 1, "drm_steps": 1, "batch_size": 10_000, "momentum": 0.0, "drm_momentum": 0.0}
PLAIN = {**FULL, "weight_decay": 0.0, "schedule": "constant"}


def config(**changes: Any) -> Config:
    return Config(
        **{"rounds": 2, "n_components": 2, "local_steps": 3, "drm_steps": 2, "batch_size": 8, **changes}
    )


def ask(clients: dict[int, Client], cfg: Config, phase: str, body: Any, round: int = 0) -> list[Any]:
    engine = InProcess("fedspm", {p.name: p for p in METHOD.phases}, clients, cfg, 0)
    return [reply.body for reply in engine.carry(Ask(phase, sorted(clients), body), round)]


def shared(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in fedspm.SHARED}


def e_body(state: Any, warm: bool = False) -> dict[str, Any]:
    return {**shared(state), "tau": state.tau, "warm": warm, "centroids": state.centroids}


# --- one round against formulas written out here -----------------------------------------------------------


def test_a_full_batch_round_is_one_gradient_step_on_the_pooled_data() -> None:
    cfg, clients = config(rounds=1, lr=0.3, drm_lr=0.2, **PLAIN), table_clients()
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    tau = torch.stack([reply["tau"] for reply in ask(clients, cfg, "e_step", e_body(state))])
    w = [clients[i].state["w"] for i in clients]
    heads = [trees.copy(clients[i].state["head"]) for i in clients]
    end = drive(METHOD, cfg, table_clients(), facts=facts_of(clients), state=state)[-1]

    # -Q1 / n and the soft cross-entropy over client-component pairs, over all rows at once
    model, n = clients[0].model, sum(c.n for c in clients.values())
    theta, nu = ({k: v.clone().requires_grad_() for k, v in t.items()} for t in (state.theta, state.nu))
    gamma, xi = state.gamma.clone().requires_grad_(), state.xi.clone().requires_grad_()
    loss = torch.zeros(())
    for i, client in clients.items():
        rows = client.data["train"]
        x, y = {"x": rows.x()}, rows.columns["label"]
        g, h = model.encode(theta, x), model.encode(nu, x, "router_encoder")
        for c in range(2):
            logits = F.linear(g, heads[i][f"{c}:head.weight"], heads[i][f"{c}:head.bias"])
            loss = loss + (w[i][:, c] * F.cross_entropy(logits, y, reduction="none")).sum() / n
        s = (tau.float().log() + gamma + torch.einsum("nd,icd->nic", h, xi)).flatten(1).log_softmax(1)
        loss = loss - (w[i] * s.view(-1, 3, 2)[:, i]).sum() / n
    loss.backward()
    for name, value in end.state.theta.items():
        assert torch.allclose(value, state.theta[name] - 0.3 * theta[name].grad, atol=2e-6), name
    for name, value in end.state.nu.items():
        assert torch.allclose(value, state.nu[name] - 0.2 * nu[name].grad, atol=2e-6), name
    assert torch.allclose(end.state.gamma, state.gamma - 0.2 * gamma.grad, atol=2e-6)
    assert torch.allclose(end.state.xi, state.xi - 0.2 * xi.grad, atol=2e-6)


def test_responsibilities_are_the_posterior_written_out() -> None:
    cfg, clients = config(), table_clients()
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    state = replace(state, gamma=torch.randn(3, 2, generator=torch.Generator().manual_seed(1)))
    state.tau[1] = torch.tensor([0.25, 0.75]) * clients[1].n
    got = ask(clients, cfg, "e_step", e_body(state))
    client, model = clients[1], clients[1].model
    rows, head = client.data["train"], client.state["head"]
    x = {"x": rows.x()}
    joint = torch.zeros(len(rows), 2, dtype=torch.float64)
    for c, pi in enumerate((0.25, 0.75)):
        logits = F.linear(model.encode(state.theta, x), head[f"{c}:head.weight"], head[f"{c}:head.bias"])
        p = logits.softmax(1)[torch.arange(len(rows)), rows.columns["label"]]
        e = (state.gamma[1, c] + model.encode(state.nu, x, "router_encoder") @ state.xi[1, c]).exp()
        joint[:, c] = pi * e * p
    w = joint / joint.sum(1, keepdim=True)
    assert torch.allclose(client.state["w"].double(), w, atol=1e-6)
    assert torch.allclose(got[1]["tau"], w.sum(0), atol=1e-4)
    assert float(got[1]["tau"].sum()) == pytest.approx(client.n, abs=1e-4)


def test_one_component_is_cross_entropy_and_a_softmax_over_clients() -> None:
    cfg = fedspm.OneComponentConfig(rounds=1, lr=0.3, **PLAIN)
    clients = table_clients()
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    end = drive(fedspm.FEDDRM_SEPARATE, cfg, clients, state=state)[-1]
    model = clients[0].model
    nu, xi = {k: v.clone().requires_grad_() for k, v in state.nu.items()}, state.xi.clone().requires_grad_()
    gamma = state.gamma.clone().requires_grad_()
    x = torch.cat([c.data["train"].x() for c in clients.values()])
    owner = torch.cat([torch.full((c.n,), i) for i, c in clients.items()])
    prior = torch.tensor([float(c.n) for c in clients.values()]).log()
    logits = prior + gamma[:, 0] + model.encode(nu, {"x": x}, "router_encoder") @ xi[:, 0].T
    F.cross_entropy(logits, owner).backward()
    assert torch.allclose(end.state.gamma, state.gamma - 0.3 * gamma.grad, atol=2e-6)
    assert torch.allclose(end.state.xi, state.xi - 0.3 * xi.grad, atol=2e-6)
    phases = {p.name for p in METHOD.phases}
    assert "e_step" in phases and set(end.log) >= {"J", "train_loss", "drm_loss"}
    # routing is that classifier: the log-posterior of each client, after the round
    batch, served = {"x": x}, METHOD.serve(cfg, end.state)
    scores = fedspm.router(model, served, batch, cfg)
    new = end.state
    expected = prior + new.gamma[:, 0] + model.encode(new.nu, batch, "router_encoder") @ new.xi[:, 0].T
    assert torch.allclose(scores.log_softmax(1), expected.log_softmax(1), atol=1e-5)


def test_one_component_asks_once_a_round_and_sends_no_responsibilities() -> None:
    cfg = fedspm.OneComponentConfig(rounds=1, monitor_every=0, **PLAIN)
    clients = table_clients()
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    server = METHOD.server(cfg, state, (0, 1, 2))
    first = next(server)
    assert isinstance(first, Ask) and first.phase == "fit"


def test_bytes_of_a_round_are_the_encoders_the_tables_and_two_tables_of_totals() -> None:
    cfg, clients = config(rounds=1), table_clients()
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    down = up = 0
    server, replies = METHOD.server(cfg, state, (0, 1, 2)), None
    engine = InProcess("fedspm", {p.name: p for p in METHOD.phases}, clients, cfg, 0)
    while not isinstance(event := server.send(replies), RoundEnd):  # type: ignore[arg-type]
        replies = engine.carry(event, 0)
        down += payload_bytes(event.body)
        up += payload_bytes(replies[0].body)
    m, C, d = 3, 2, clients[0].model.router_width
    networks = sum(v.numel() for v in (*state.theta.values(), *state.nu.values()))
    tables = 4 * (networks + m * C * (1 + d))
    assert down == tables + 2 * 8 * m * C + 2 * 8  # tau twice, for J and for the M-step; a flag, a rate
    assert up == tables + 8 * C + 8 * (6 + 4)  # tau of the client; sizes, losses and the like


# --- symmetries --------------------------------------------------------------------------------------------


def same_components(clients: dict[int, Client], state: Any) -> Any:
    for client in clients.values():
        one = clients[0].model.init("head", 10 + client.id)
        client.state["head"] = trees.join({"0": one, "1": one})
    xi = state.xi.clone()
    xi[:, 1] = xi[:, 0]
    return replace(state, xi=xi)


def test_equal_components_never_separate() -> None:
    cfg, clients = config(rounds=6, lr=0.1), table_clients()
    state = same_components(clients, METHOD.start(cfg, clients[0].model, facts_of(clients)))
    ends = drive(METHOD, cfg, clients, state=state)
    for client in clients.values():
        assert torch.allclose(ends[-1].state.tau[client.id], torch.tensor(client.n / 2).double(), atol=1e-4)
    apart = drive(METHOD, cfg, table_clients())[-1].state.tau
    assert float((apart[:, 0] / apart.sum(1) - 0.5).abs().max()) > 0.05  # with heads and xi drawn, they do


def test_relabelling_the_components_of_a_client_changes_nothing_with_shared_encoders() -> None:
    cfg = config(rounds=3, lr=0.1)
    plain = table_clients()
    state = METHOD.start(cfg, plain[0].model, facts_of(plain))
    for client in plain.values():
        client.state["head"] = Components(client.model, 2).heads(client.id)
    swapped = table_clients()
    for client in swapped.values():
        parts = trees.split(Components(client.model, 2).heads(client.id), ("0", "1"))
        order = ("1", "0") if client.id == 1 else ("0", "1")
        client.state["head"] = trees.join({str(c): parts[name] for c, name in enumerate(order)})
    xi, tau = state.xi.clone(), state.tau.clone()
    xi[1] = xi[1].flip(0)
    a = drive(METHOD, cfg, plain, state=state)[-1].state
    b = drive(METHOD, cfg, swapped, state=replace(state, xi=xi, tau=tau))[-1].state
    assert torch.allclose(a.tau[1], b.tau[1].flip(0), atol=1e-3)
    assert torch.allclose(a.gamma[1], b.gamma[1].flip(0), atol=1e-5)
    assert torch.allclose(a.tau[[0, 2]], b.tau[[0, 2]], atol=1e-3)
    batch = {"x": plain[0].data["test"].x()}
    scores = [fedspm.router(plain[0].model, METHOD.serve(cfg, s), batch, cfg) for s in (a, b)]
    assert torch.allclose(*scores, atol=1e-4)


def test_splitting_a_weight_between_two_equal_components_changes_no_prediction() -> None:
    cfg, clients = config(), table_clients()
    state = same_components(clients, METHOD.start(cfg, clients[0].model, facts_of(clients)))
    batch = {"x": clients[0].data["test"].x()}
    seen = []
    for first in (0.5, 0.9):
        tau = torch.tensor([[first, 1 - first]]).double() * torch.tensor(state.sizes)[:, None]
        served = METHOD.serve(cfg, replace(state, tau=tau))
        logits = fedspm.predictor(clients[1], served, cfg)(batch).logits
        seen.append((logits, fedspm.router(clients[0].model, served, batch, cfg)))
    assert torch.allclose(seen[0][0], seen[1][0], atol=1e-6)
    assert torch.allclose(seen[0][1], seen[1][1], atol=1e-6)
    assert torch.allclose(seen[0][0].exp().sum(1), torch.ones(12), atol=1e-5)  # log-probabilities


# --- the server by hand ------------------------------------------------------------------------------------


def fitted(state: Any, n: int, tau: Any = None, **changes: Any) -> dict[str, Any]:
    return {**shared(state), "n": n, "loss": 1.0, "drm_loss": 1.0, "examples": 1, **changes}


def looked(tau: list[float], n: int) -> dict[str, Any]:
    told = {"J": 1.0, "J_validation": -1.0, "confidence": 1.0, "purity": -1.0, "base_rate": -1.0}
    return {"tau": torch.tensor(tau).double(), "n": n, **told}


def test_whole_tables_are_averaged_by_size_and_an_absent_client_keeps_its_totals() -> None:
    from fedprism.protocol import Reply, sample_clients

    cfg, clients = config(participation=0.6), table_clients()
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    chosen = sample_clients((0, 1, 2), 0.6, 0, 0)
    (absent,) = {0, 1, 2} - set(chosen)
    server = METHOD.server(cfg, state, (0, 1, 2))
    asked = next(server)
    assert isinstance(asked, Ask) and list(asked.clients) == chosen
    n = [30, 10]
    asked = server.send([Reply(c, looked([5.0, k - 5.0], k)) for c, k in zip(chosen, n, strict=True)])
    assert isinstance(asked, Ask) and asked.phase == "m_step"
    tau = asked.body["tau"]
    assert tau[absent].tolist() == state.tau[absent].tolist()
    assert tau[chosen[0]].tolist() == [5.0, 25.0]
    uploads = [torch.full((3, 2), 4.0), torch.full((3, 2), 8.0)]
    end = server.send(
        [Reply(c, fitted(state, k, gamma=u)) for c, k, u in zip(chosen, n, uploads, strict=True)]
    )
    assert isinstance(end, RoundEnd)
    assert torch.equal(end.state.gamma, torch.full((3, 2), 5.0))  # (30 * 4 + 10 * 8) / 40, every row
    assert "purity" not in end.log and end.log["J"] == 1.0


def test_a_component_that_died_can_come_back() -> None:
    cfg, clients = config(lr=0.1), table_clients()
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    state.tau[0] = torch.tensor([float(clients[0].n), 0.0]).double()
    gamma = state.gamma.clone()
    gamma[0, 1] = 20.0  # the density of the dead component is far higher now
    replies = ask(clients, cfg, "e_step", e_body(replace(state, gamma=gamma)))
    assert float(replies[0]["tau"][1]) > 0.9 * clients[0].n
    ask(clients, cfg, "m_step", {"tau": state.tau, "lr": 0.1})  # and its logarithm stays finite


# --- first responsibilities --------------------------------------------------------------------------------


def planted(shift: float = 12.0) -> dict[int, Client]:
    """Components that k-means can see: the second lies far away in the first coordinate."""
    clients = table_clients(n=30)
    for client in clients.values():
        for split, rows in client.data.items():
            x = rows.inputs.clone()
            x[:, 0] = x[:, 0] + shift * rows.columns["component"]
            client.data = {**client.data, split: replace(rows, inputs=x)}
    return clients


@pytest.mark.parametrize("encoders", ["shared", "separate"])
def test_k_means_starts_with_the_true_components_and_stops_on_time(encoders: str) -> None:
    cfg, clients = config(rounds=3, init="kmeans", warm_rounds=2, lr=0.05, encoders=encoders), planted()
    ends = drive(METHOD, cfg, clients)
    assert [end.log["purity"] for end in ends[:2]] == [1.0, 1.0]
    assert all("kmeans" not in client.state for client in clients.values())
    random = drive(METHOD, config(rounds=1, lr=0.05, encoders=encoders), planted())
    assert random[0].log["purity"] < 1.0
    if encoders == "separate":  # numbers agree between clients: component 0 is the same side everywhere
        state = ends[0].state
        assert state.centroids.shape == (2, 3)
        fresh = planted()
        ask(fresh, cfg, "e_step", e_body(state, warm=True))
        sides = [
            [float(c.data["train"].x()[c.state["w"][:, k] == 1, 0].mean()) for k in range(2)]
            for c in fresh.values()
        ]
        assert len({side[0] > side[1] for side in sides}) == 1


def test_agreed_centroids_undo_another_numbering() -> None:
    a, b = torch.tensor([[0.0, 0.0], [10.0, 0.0]]), torch.tensor([[10.0, 2.0], [0.0, 2.0]])
    assert agreed_centroids([a, b], [30, 10]).tolist() == [[0.0, 0.5], [10.0, 0.5]]


def test_true_components_can_be_given_where_the_data_know_them() -> None:
    cfg = config(rounds=1, init="components", warm_rounds=1)
    assert drive(METHOD, cfg, table_clients())[0].log["purity"] == 1.0
    with pytest.raises(RuntimeError, match=r"needs 0 to 0; use 'kmeans'|needs 0 to 1"):
        clients = table_clients()
        rows = clients[0].data["train"]
        unknown = {**rows.columns, "component": rows.columns["component"] * 0 - 1}
        clients[0].data = {**clients[0].data, "train": replace(rows, columns=unknown)}
        drive(METHOD, cfg, clients)


def test_purity_by_hand() -> None:
    w = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    # component 0 holds rows 0, 1, 3 (true 0, 0, 1): 2 explained; component 1 holds row 2: 1 explained
    assert purity(w, torch.tensor([0, 0, 1, 1])) == (0.75, 0.5)
    assert purity(w, torch.tensor([0, -1, 1, 1])) == (-1.0, -1.0)


# --- options -----------------------------------------------------------------------------------------------


def test_the_batch_e_step_looks_at_the_rows_it_draws_and_scales_their_totals() -> None:
    cfg, clients = config(e_step="batch", local_steps=2, drm_steps=3, batch_size=4), table_clients()
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    replies = ask(clients, cfg, "e_step", e_body(state))
    for client, reply in zip(clients.values(), replies, strict=True):
        assert client.state["w"].shape == (12, 2) and len(set(client.state["ids"].tolist())) == 12
        expected = client.state["w"].double().sum(0) * client.n / 12
        assert torch.allclose(reply["tau"], expected)
    everything = config(e_step="batch", local_steps=100)
    fresh = table_clients()
    full = ask(table_clients(), config(), "e_step", e_body(state))
    for a, b in zip(ask(fresh, everything, "e_step", e_body(state)), full, strict=True):
        assert torch.equal(a["tau"], b["tau"])  # enough draws are all rows
    drive(METHOD, replace(cfg, rounds=2), table_clients())  # and the M-step draws from these rows alone


def test_calibration_makes_every_ratio_integrate_to_one() -> None:
    cfg, clients = config(rounds=2, lr=0.1, calibrate_gamma=60), table_clients()
    state = drive(METHOD, cfg, clients)[-1].state
    x = torch.cat([c.data["train"].x() for c in clients.values()])
    h = clients[0].model.encode(state.nu, {"x": x}, "router_encoder")
    e = (state.gamma + torch.einsum("nd,icd->nic", h, state.xi)).double().exp()
    den = (state.tau * e).sum((1, 2))
    sums = (e / den[:, None, None]).sum(0)  # proportional to one, for every pair
    assert torch.allclose(sums / sums.mean(), torch.ones(3, 2).double(), atol=1e-4)
    raw = drive(METHOD, config(rounds=2, lr=0.1), table_clients())[-1].state
    h = clients[0].model.encode(raw.nu, {"x": x}, "router_encoder")
    e = (raw.gamma + torch.einsum("nd,icd->nic", h, raw.xi)).double().exp()
    sums = (e / (raw.tau * e).sum((1, 2))[:, None, None]).sum(0)
    assert not torch.allclose(sums / sums.mean(), torch.ones(3, 2).double(), atol=1e-3)


def test_separate_encoders_are_separate_and_cost_as_many() -> None:
    cfg, clients = config(encoders="separate", rounds=1), table_clients()
    model = clients[0].model
    state = METHOD.start(cfg, model, facts_of(clients))
    assert len(state.theta) == 2 * len(model.blocks["encoder"])
    parts = trees.split(state.theta, ("0", "1"))
    assert not all(torch.equal(parts["0"][k], parts["1"][k]) for k in parts["0"])
    g = Components(model, 2, separate=True).features(
        state.theta, {"x": clients[0].data["test"].x()}, "encoder"
    )
    assert torch.equal(g[:, 1], model.encode(parts["1"], {"x": clients[0].data["test"].x()}))
    drive(METHOD, cfg, clients)


def test_the_prior_is_the_only_difference_between_the_two_rules() -> None:
    cfg, clients = config(), table_clients()
    served = METHOD.serve(cfg, METHOD.start(cfg, clients[0].model, facts_of(clients)))
    batch = {"x": clients[0].data["test"].x()}
    with_prior = fedspm.router(clients[0].model, served, batch, cfg)
    without = fedspm.router(clients[0].model, served, batch, replace(cfg, prior="uniform"))
    n = torch.tensor([float(c.n) for c in clients.values()])
    assert torch.allclose(with_prior - without, (n / n.sum()).log().expand(12, 3), atol=1e-5)


def test_the_objective_falls_from_that_of_a_uniform_guess() -> None:
    cfg = config(
        rounds=80, n_components=2, lr=0.2, drm_lr=0.1, batch_size=32, weight_decay=0.0, local_steps=5
    )
    two = [end.log["J"] for end in drive(METHOD, cfg, table_clients(n=80))]
    assert two[-1] < two[0] - 0.5
    assert two[0] == pytest.approx(np.log(3 * 2), abs=0.7)  # a uniform guess of owner and label


def test_weight_decay_spares_tables_norms_and_biases() -> None:
    cfg, clients = config(rounds=1, lr=0.1, weight_decay=10.0, **FULL), table_clients()
    cfg = replace(cfg, schedule="constant")
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    decayed = drive(METHOD, cfg, clients, state=state)[-1].state
    plain = drive(METHOD, replace(cfg, weight_decay=0.0), table_clients(), state=state)[-1].state
    assert torch.equal(decayed.gamma, plain.gamma) and torch.equal(decayed.xi, plain.xi)
    for name, value in plain.theta.items():
        moved = decayed.theta[name] - value
        expected = -0.1 * 10.0 * state.theta[name] if value.ndim > 1 else torch.zeros_like(value)
        assert torch.allclose(moved, expected, atol=1e-5), name


def test_a_model_without_encoders_and_too_few_rows_are_refused_in_one_line() -> None:
    clients = mixed_clients()
    with pytest.raises(
        ValueError, match=r'fedspm: the model is a Linear.*set model.kind = "vision" or "mlp"'
    ):
        METHOD.start(config(), clients[0].model, facts_of(clients))
    tables = table_clients(n=2)
    with pytest.raises(ValueError, match=r"client 0 has 2 examples for 3 components; lower n_components"):
        METHOD.start(config(n_components=3), tables[0].model, facts_of(tables))


def test_rows_are_looked_up_by_their_number() -> None:
    from fedprism.training import at_rows

    values, ids = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([7, 3, 5])
    assert at_rows(values, ids, torch.tensor([5, 7, 5])).flatten().tolist() == [3.0, 1.0, 3.0]
    with pytest.raises(ValueError, match=r"no values for rows \[4\]"):
        at_rows(values, ids, torch.tensor([4]))


def test_majority_ties_and_first_argmax_are_the_spec_s() -> None:
    assert dr.majority_vote(torch.tensor([[2, 1], [0, 0]]), 3).tolist() == [1, 0]
