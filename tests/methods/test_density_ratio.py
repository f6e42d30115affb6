"""Density ratios against loops over probabilities, closed forms, SciPy and brute force."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from fedprism.methods import density_ratio as ratio


def draw(seed: int = 0, n: int = 7, m: int = 3, C: int = 2, d: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    w = normal(n, C).softmax(1)
    owner = torch.randint(m, (n,), generator=g)
    tau = torch.rand(m, C, generator=g, dtype=torch.float64) * 9 + 1
    labels = normal(n, C).sigmoid().log()
    return {"gamma": normal(m, C), "xi": normal(m, C, d), "h": normal(n, d), "w": w, "owner": owner,
            "tau": tau, "labels": labels}  # fmt: skip


# ---- tilts and rows ------------------------------------------------------------------------------


def test_tilts_by_hand() -> None:
    gamma = torch.tensor([[1.0, 2.0]])
    xi = torch.tensor([[[1.0, 0.0], [0.0, 3.0]]])
    h = torch.tensor([[5.0, 7.0]])
    assert ratio.tilt(gamma, xi, h).tolist() == [[[6.0, 23.0]]]


def test_an_encoder_per_component_meets_only_its_component() -> None:
    p = draw()
    h = torch.stack([p["h"], 2 * p["h"]], dim=1)  # (n, C, d)
    both = ratio.tilt(p["gamma"], p["xi"], h)
    assert torch.allclose(both[:, :, 0], ratio.tilt(p["gamma"], p["xi"], p["h"])[:, :, 0])
    assert torch.allclose(both[:, :, 1], ratio.tilt(p["gamma"], p["xi"], 2 * p["h"])[:, :, 1])


@pytest.mark.parametrize("bad", ["gamma", "xi", "h"])
def test_shapes_that_do_not_fit_are_named(bad: str) -> None:
    p = draw()
    tables = {key: p[key] for key in ("gamma", "xi", "h")}
    tables[bad] = tables[bad][..., :1]
    with pytest.raises(ValueError, match=r"tilt: got gamma \(3, .*needs \(m, C\)"):
        ratio.tilt(**tables)


def test_own_rows_are_those_of_the_owner() -> None:
    p = draw()
    T = ratio.tilt(p["gamma"], p["xi"], p["h"])
    rows = [T[j, i].tolist() for j, i in enumerate(p["owner"].tolist())]
    assert ratio.own_rows(T, p["owner"]).tolist() == rows
    assert torch.equal(ratio.own_rows(T, 2), T[:, 2])


# ---- totals --------------------------------------------------------------------------------------


def test_totals_are_floored_at_a_millionth_of_the_client() -> None:
    tau = torch.tensor([[0.0, 50.0], [3.0, 1.0]], dtype=torch.float64)
    found = ratio.floored_totals(tau)
    assert found.tolist() == [[pytest.approx(5e-5), 50.0], [3.0, 1.0]]
    assert tau[0, 0] == 0  # the argument is left alone
    assert ratio.mixing_weights(tau).tolist() == [[0.0, 1.0], [0.75, 0.25]]


@pytest.mark.parametrize(
    ("tau", "text"),
    [
        ([[1.0, -0.5]], "smallest is -0.5"),
        ([[1.0, 1.0], [0.0, 0.0]], "client 1 has 0"),
        ([[math.nan, 1.0]], "client 0 has nan"),
        ([[math.inf, 1.0]], "client 0 has inf"),
    ],
)
def test_impossible_totals_are_refused(tau: list[list[float]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ratio.floored_totals(torch.tensor(tau))
    with pytest.raises(ValueError, match=text):
        ratio.mixing_weights(torch.tensor(tau))


# ---- the loss ------------------------------------------------------------------------------------


def loss_by_loops(p: dict[str, Tensor]) -> list[float]:
    """log sum tau e - sum w log e, with exponentials and Python sums."""
    out = []
    m, C = p["tau"].shape
    for j, i in enumerate(p["owner"].tolist()):
        logs = [[float(p["gamma"][k, c] + p["xi"][k, c] @ p["h"][j]) for c in range(C)] for k in range(m)]
        total = sum(float(p["tau"][k, c]) * math.exp(logs[k][c]) for k in range(m) for c in range(C))
        out.append(math.log(total) - sum(float(p["w"][j, c]) * logs[i][c] for c in range(C)))
    return out


def loss(p: dict[str, Tensor], **changes: Tensor) -> Tensor:
    q = {**p, **changes}
    return ratio.drm_loss(ratio.tilt(q["gamma"], q["xi"], q["h"]), q["owner"], q["w"], q["tau"])


def test_the_loss_is_that_of_loops() -> None:
    p = draw()
    assert loss(p).tolist() == pytest.approx(loss_by_loops(p), abs=1e-12)


def test_the_gradient_is_the_softmax_less_the_responsibilities() -> None:
    p = draw()
    T = ratio.tilt(p["gamma"], p["xi"], p["h"]).requires_grad_()
    ratio.drm_loss(T, p["owner"], p["w"], p["tau"]).sum().backward()
    wanted = (p["tau"] * T.detach().exp()).numpy()
    wanted /= wanted.sum((1, 2), keepdims=True)
    wanted[np.arange(len(wanted)), p["owner"].numpy()] -= p["w"].numpy()
    assert T.grad is not None
    assert T.grad.numpy() == pytest.approx(wanted, abs=1e-12)
    assert (wanted[0, [k for k in range(3) if k != int(p["owner"][0])]] > 0).all()  # others' rows move too


def test_a_dead_component_gives_numbers_and_may_return() -> None:
    """tau = 0 and w = 0: no 0 * log 0 anywhere, and a gradient that is not zero."""
    p = draw()
    tau, w = p["tau"].clone(), p["w"].clone()
    tau[0, 0] = 0.0
    w[p["owner"] == 0] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    gamma = p["gamma"].clone().requires_grad_()
    value = loss(p, gamma=gamma, tau=tau, w=w)
    value.sum().backward()
    assert gamma.grad is not None
    assert torch.isfinite(value).all() and torch.isfinite(gamma.grad).all()
    assert gamma.grad[0, 0] > 0


def test_large_ratios_do_not_overflow() -> None:
    p = draw()
    large = loss(p, gamma=p["gamma"] + 2000)
    assert torch.allclose(large, loss(p), atol=1e-9)


def test_scaling_all_totals_adds_a_constant() -> None:
    p = draw()
    moved = loss(p, tau=3 * p["tau"]) - loss(p)
    assert moved.tolist() == pytest.approx([math.log(3)] * 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_precisions_agree(dtype: torch.dtype) -> None:
    p = draw()
    low = {k: v if k == "owner" else v.to(dtype) for k, v in p.items()}
    found = loss(low)
    assert found.dtype == dtype
    assert found.double().tolist() == pytest.approx(loss(p).tolist(), abs=200 * torch.finfo(dtype).eps)


def test_rows_that_do_not_sum_to_one_are_refused() -> None:
    p = draw()
    w = p["w"].clone()
    w[3] *= 1.1
    with pytest.raises(ValueError, match=r"row 3 of w sums to 1\.1"):
        loss(p, w=w)
    w[3] = math.nan
    with pytest.raises(ValueError, match="row 3 of w sums to nan"):
        loss(p, w=w)
    with pytest.raises(ValueError, match="totals"):
        loss(p, tau=-p["tau"])


@pytest.mark.slow
def test_stacked_clients_give_the_gradients_of_single_ones() -> None:
    p = draw(n=6)
    gamma = torch.stack([p["gamma"], p["gamma"] + 1, p["gamma"] * 2])  # each client's copy
    owner = torch.arange(3)

    def one(table: Tensor, i: Tensor, h: Tensor, w: Tensor) -> Tensor:
        return ratio.drm_loss(ratio.tilt(table, p["xi"], h), i, w, p["tau"], check=False).mean()

    h, w = p["h"].view(3, 2, -1), p["w"].view(3, 2, -1)
    stacked = torch.func.vmap(torch.func.grad(one))(gamma, owner, h, w)
    for i in range(3):
        alone = gamma[i].clone().requires_grad_()
        ratio.drm_loss(ratio.tilt(alone, p["xi"], h[i]), i, w[i], p["tau"]).mean().backward()
        assert alone.grad is not None
        assert torch.allclose(stacked[i], alone.grad)


# ---- responsibilities and monitor ----------------------------------------------------------------


def test_responsibilities_are_bayes_rule() -> None:
    p, pi = draw(), torch.tensor([0.2, 0.8], dtype=torch.float64)
    own = ratio.own_rows(ratio.tilt(p["gamma"], p["xi"], p["h"]), p["owner"])
    joint = pi.numpy() * own.exp().numpy() * p["labels"].exp().numpy()
    wanted = joint / joint.sum(1, keepdims=True)
    assert ratio.responsibilities(p["labels"], own, pi).numpy() == pytest.approx(wanted, abs=1e-12)
    for other in ((0 * p["labels"], own, pi), (p["labels"], 0 * own, pi), (p["labels"], own, pi.flip(0))):
        assert ratio.responsibilities(*other).numpy() != pytest.approx(wanted, abs=1e-3)


def test_a_mixing_weight_of_zero_counts_as_a_millionth() -> None:
    zero = torch.zeros(1, 2, dtype=torch.float64)
    w = ratio.responsibilities(zero, zero, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert w[0, 0].item() == pytest.approx(1e-6 / (1 + 1e-6))


def test_rows_without_a_number_are_refused() -> None:
    bad = torch.tensor([[0.0, 0.0], [math.nan, 0.0], [-math.inf, -math.inf]])
    with pytest.raises(ValueError, match="2 of 3 rows are not numbers"):
        ratio.responsibilities(bad, torch.zeros(3, 2), torch.tensor([0.5, 0.5]))


def test_the_monitor_is_the_probability_of_owner_and_label() -> None:
    p = draw()
    T = ratio.tilt(p["gamma"], p["xi"], p["h"])
    e = (p["tau"] * T.exp()).numpy()
    for j, i in enumerate(p["owner"].tolist()):
        wanted = -math.log((e[j, i] * p["labels"][j].exp().numpy()).sum() / e[j].sum())
        assert ratio.monitor(T, p["owner"], p["labels"], p["tau"])[j].item() == pytest.approx(wanted)


# ---- inference -----------------------------------------------------------------------------------

MEANS = np.array([[[0.0, 1.0], [2.0, -1.0]], [[-1.0, 0.5], [1.0, 1.0]], [[0.5, 0.5], [-2.0, 0.0]]])
PI = np.array([[0.3, 0.7], [0.5, 0.5], [0.9, 0.1]])
RHO = np.array([0.5, 0.2, 0.3])
COVARIANCE = np.array([[1.0, 0.4], [0.4, 2.0]])


def gaussian_tilts(x: np.ndarray) -> Tensor:
    """The exact tables of Gaussians of one covariance against one of mean zero (spec 10a)."""
    inverse = np.linalg.inv(COVARIANCE)
    xi = MEANS @ inverse
    gamma = -0.5 * np.einsum("icd,icd->ic", xi, MEANS)
    return ratio.tilt(torch.from_numpy(gamma), torch.from_numpy(xi), torch.from_numpy(x))


def test_gaussian_clients_are_routed_as_by_bayes() -> None:
    x = np.random.default_rng(0).standard_normal((50, 2)) * 2
    density = np.stack(
        [
            sum(PI[i, c] * multivariate_normal(MEANS[i, c], COVARIANCE).pdf(x) for c in range(2))
            for i in range(3)
        ],
        axis=1,
    )
    scores = ratio.routing_scores(gaussian_tilts(x), torch.from_numpy(PI), torch.from_numpy(RHO))
    wanted = RHO * density / (RHO * density).sum(1, keepdims=True)
    assert ratio.routing_posterior(scores).numpy() == pytest.approx(wanted, abs=1e-10)
    flat = ratio.routing_scores(gaussian_tilts(x), torch.from_numpy(PI), torch.from_numpy(RHO), "uniform")
    wanted = density / density.sum(1, keepdims=True)
    assert ratio.routing_posterior(flat).numpy() == pytest.approx(wanted, abs=1e-10)
    with pytest.raises(ValueError, match="prior is 'size'"):
        ratio.routing_scores(gaussian_tilts(x), torch.from_numpy(PI), torch.from_numpy(RHO), "size")  # type: ignore[arg-type]


def test_the_routing_posterior_is_the_softmax_of_the_loss_also_at_the_floor() -> None:
    p = draw()
    T, tau = ratio.tilt(p["gamma"], p["xi"], p["h"]), p["tau"].clone()
    tau[1, 0] = 0.0
    pi, rho = ratio.mixing_weights(tau), tau.sum(1) / tau.sum()
    posterior = ratio.routing_posterior(ratio.routing_scores(T, pi, rho))
    pairs = ratio.pair_logits(T, tau).flatten(1).softmax(1).view(T.shape)
    assert torch.allclose(posterior, pairs.sum(2), atol=1e-14)


def test_component_weights_know_features_only() -> None:
    x = np.array([[0.3, -0.2], [1.0, 1.0]])
    parts = np.stack(
        [PI[1, c] * multivariate_normal(MEANS[1, c], COVARIANCE).pdf(x) for c in range(2)], axis=1
    )
    q = ratio.component_weights(gaussian_tilts(x)[:, 1], torch.from_numpy(PI[1]))
    assert q.numpy() == pytest.approx(parts / parts.sum(1, keepdims=True))


def test_probabilities_are_mixed_and_not_logits() -> None:
    q = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    log_p = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]] * 2).log()
    found = ratio.mix_predictions(q, log_p).exp()
    assert found.tolist() == [pytest.approx([0.55, 0.45]), pytest.approx([0.9, 0.1])]


def test_ties_go_to_the_lowest_index() -> None:
    assert ratio.first_argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 1.0, 5.0]])).tolist() == [
        1,
        0,
        2,
    ]
    assert ratio.first_argmax(torch.tensor([[-math.inf, -math.inf]])).tolist() == [0]
    with pytest.raises(ValueError, match="1 scores are not numbers"):
        ratio.first_argmax(torch.tensor([[math.nan, 1.0]]))


def test_majority_votes_by_hand() -> None:
    votes = torch.tensor([[2, 1, 1, 2], [0, 2, 2, 1], [3, 3, 0, 0], [2, 1, 0, 3]])
    assert ratio.majority_vote(votes, 4).tolist() == [1, 2, 0, 0]


# ---- calibration ---------------------------------------------------------------------------------


def calibrated(p: dict[str, Tensor], tau: Tensor, sweeps: int = 400) -> Tensor:
    """Tilts after calibration from the sums of two clients' rows."""
    gamma, halves = p["gamma"], (p["h"][:3], p["h"][3:])
    for _ in range(sweeps):
        parts = [ratio.log_pair_sums(ratio.tilt(gamma, p["xi"], h), tau) for h in halves]
        gamma = ratio.calibrate_gamma(gamma, tau, torch.stack(parts))
    shares = [ratio.log_inverse_sum(ratio.tilt(gamma, p["xi"], h), tau) for h in halves]
    gamma = ratio.canonical_shift(gamma, torch.stack(shares))
    return ratio.tilt(gamma, p["xi"], p["h"])


@pytest.mark.parametrize("dead", [False, True])
def test_calibrated_ratios_meet_all_constraints(dead: bool) -> None:
    """Masses r = 1 / den sum to 1, and so does r e for every pair, by plain arithmetic."""
    p = draw(n=40)
    tau = p["tau"] / p["tau"].sum() * 40
    if dead:
        tau[0, 1] += tau[0, 0]
        tau[0, 0] = 0.0
    e = calibrated(p, tau).exp().numpy()
    floored = np.maximum(tau.numpy(), 1e-6 * tau.numpy().sum(1, keepdims=True))
    r = 1 / (e * floored * 40 / floored.sum()).sum((1, 2))
    assert r.sum() == pytest.approx(1, abs=1e-10)
    assert (r[:, None, None] * e).sum(0) == pytest.approx(np.ones((3, 2)), abs=1e-8)


def test_calibration_sums_of_clients_add_up_to_the_pooled_ones() -> None:
    p = draw()
    T = ratio.tilt(p["gamma"], p["xi"], p["h"])
    pooled = ratio.log_pair_sums(T, p["tau"])[None]
    parts = torch.stack([ratio.log_pair_sums(T[:2], p["tau"]), ratio.log_pair_sums(T[2:], p["tau"])])
    found, wanted = (ratio.calibrate_gamma(p["gamma"], p["tau"], a) for a in (parts, pooled))
    assert torch.allclose(found, wanted)
    assert torch.allclose(ratio.calibrate_gamma(p["gamma"], 5 * p["tau"], parts), found)
    e = (p["tau"] * T.exp()).numpy()
    sums = (e / e.sum((1, 2), keepdims=True)).sum(0)
    moved = (found - p["gamma"]).numpy() - np.log(p["tau"].numpy() / sums)
    assert moved == pytest.approx(np.full((3, 2), moved[0, 0]))  # the stated step, up to the gauge


# ---- k-means -------------------------------------------------------------------------------------


def blobs(seed: int, sizes: tuple[int, ...] = (20, 50, 30)) -> tuple[Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    centres = np.array([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    return torch.from_numpy(centres[label] + rng.standard_normal((len(label), 3)) * 0.5), label


def test_kmeans_finds_blobs_and_numbers_them_by_size() -> None:
    x, label = blobs(0)
    w, centroids = ratio.kmeans_responsibilities(x, 3, np.random.default_rng(0))
    assert w.dtype == x.dtype
    assert w.sum(0).tolist() == [50, 30, 20]
    assert w.argmax(1).tolist() == [{1: 0, 2: 1, 0: 2}[k] for k in label.tolist()]
    for c, k in enumerate((1, 2, 0)):
        assert centroids[c].numpy() == pytest.approx(x[label == k].mean(0).numpy())


def test_kmeans_depends_on_its_generator_only_and_takes_images() -> None:
    x, _ = blobs(1)
    first = ratio.kmeans_responsibilities(x, 3, np.random.default_rng(5))
    again = ratio.kmeans_responsibilities(x.view(-1, 1, 3, 1), 3, np.random.default_rng(5))
    other = ratio.kmeans_responsibilities(x, 3, np.random.default_rng(6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[0], other[0])  # well separated: the same answer from other starts


def test_kmeans_is_as_tight_as_scikit_learn() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((120, 2)))
    w, centroids = ratio.kmeans_responsibilities(x, 4, np.random.default_rng(0), restarts=20)
    spread = float(((x - w @ centroids) ** 2).sum())
    assert spread <= 1.01 * cluster.KMeans(4, n_init=20, random_state=0).fit(x.numpy()).inertia_


def test_kmeans_refuses_more_components_than_rows() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="C is 4 for 3 rows"):
        ratio.kmeans_responsibilities(torch.eye(3), 4, rng)
    with pytest.raises(ValueError, match="C is 3 for 2 different rows"):
        ratio.kmeans_responsibilities(torch.tensor([[0.0], [1.0], [1.0], [0.0]]), 3, rng)
    with pytest.raises(ValueError, match="C is 0"):
        ratio.kmeans_responsibilities(torch.eye(3), 0, rng)
    with pytest.raises(ValueError, match="none of 0 starts"):
        ratio.kmeans_responsibilities(torch.eye(3), 2, rng, restarts=0)


def test_every_row_its_own_cluster() -> None:
    w, centroids = ratio.kmeans_responsibilities(
        torch.tensor([[3.0], [1.0], [2.0]]), 3, np.random.default_rng(0)
    )
    assert torch.equal(w, torch.eye(3))  # equal sizes: by first row
    assert centroids.flatten().tolist() == [3, 1, 2]


def test_matching_is_the_best_of_all_permutations() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        local, reference = rng.standard_normal((2, 4, 3))
        best = min(permutations(range(4)), key=lambda o: ((local[list(o)] - reference) ** 2).sum())
        found = ratio.match_centroids(torch.from_numpy(local), torch.from_numpy(reference))
        assert tuple(found.tolist()) == best
    with pytest.raises(ValueError, match=r"got \(4, 3\) and \(2, 3\)"):
        ratio.match_centroids(torch.zeros(4, 3), torch.zeros(2, 3))


def test_matching_brings_shuffled_centroids_back() -> None:
    reference = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    local = reference[[3, 1, 4, 0, 2]] + 0.01
    assert torch.allclose(local[ratio.match_centroids(local, reference)], reference + 0.01)
