"""Geometry of blocks between experts, against triangles worked by hand and SciPy's solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from fedprism.methods import block_geometry as geometry

# In the plane z = w = 0: corners (0,0), (5,0), (1,3). Sides 5, sqrt 10, 5 -> the diameter is 5.
CORNERS = torch.tensor([[0.0, 0, 0, 0], [5, 0, 0, 0], [1, 3, 0, 0]], dtype=torch.float64)
THIRDS = torch.full((1, 3), 1 / 3)


def rotation(d: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q


def random_case(layers: int = 3, clients: int = 5, m: int = 4, d: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    experts = torch.randn(layers, m, d, generator=g, dtype=torch.float64)
    blocks = 0.8 * torch.randn(layers, clients, d, generator=g, dtype=torch.float64)
    mixtures = torch.rand(clients, m, generator=g, dtype=torch.float64)
    return experts, blocks, mixtures / mixtures.sum(1, keepdim=True)


def test_the_triangle_is_drawn_with_its_first_side_along_the_first_axis() -> None:
    turned = CORNERS @ rotation(4, 0) + 7.0  # where and how the triangle lies in space does not matter
    found = geometry.measure(turned[None], turned[None], torch.eye(3))
    wanted = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.2, 0.6]], dtype=torch.float64)  # divided by 5
    for points in (found.expert_points, found.client_points, found.mixture_points):
        assert torch.allclose(points[0], wanted, atol=1e-12)
    assert found.diameter.tolist() == pytest.approx([5.0])
    assert torch.allclose(found.weights[0], torch.eye(3, dtype=torch.float64), atol=1e-9)
    assert float(found.residuals["true"].abs().max()) < 1e-12


def test_a_point_above_the_plane_keeps_its_height_in_every_fit() -> None:
    # Mixture (.5, .3, .2) lies at (1.7, .6); 2 above it the distances are 2 / 5 in the best fits and the true
    # one. Cyclic shifts (.2, .5, .3) and (.3, .2, .5) lie at (2.8, .9) and (1.5, 1.5), the middle at (2, 1):
    # distances sqrt(1.21 + .09 + 4), sqrt(.04 + .81 + 4), sqrt(.09 + .16 + 4), each over 5.
    point = torch.tensor([[1.7, 0.6, 2.0, 0.0]], dtype=torch.float64)
    found = geometry.measure(CORNERS[None], point[None], torch.tensor([[0.5, 0.3, 0.2]]).double())
    for fit in ("affine", "hull", "true"):
        assert float(found.residuals[fit]) == pytest.approx(0.4, abs=1e-12)
    assert float(found.residuals["uniform"]) == pytest.approx(4.25**0.5 / 5)
    assert float(found.residuals["shuffled"]) == pytest.approx((5.3**0.5 + 4.85**0.5) / 10)
    assert found.weights.flatten().tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert found.client_points.flatten().tolist() == pytest.approx([0.34, 0.12])


def test_outside_the_triangle_the_hull_stops_at_its_edge() -> None:
    # (2, -1) projects to (2, 0) on the first side: 1 away, weights (.6, .4, 0); the plane contains the point.
    point = torch.tensor([[2.0, -1.0, 0.0, 0.0]], dtype=torch.float64)
    found = geometry.measure(CORNERS[None], point[None], THIRDS)
    assert float(found.residuals["affine"]) == pytest.approx(0.0, abs=1e-12)
    assert float(found.residuals["hull"]) == pytest.approx(0.2, abs=1e-12)
    assert found.weights.flatten().tolist() == pytest.approx([0.6, 0.4, 0.0], abs=1e-12)
    # (-3, -1) is nearest to the corner at the origin.
    point = torch.tensor([[-3.0, -1.0, 0.0, 0.0]], dtype=torch.float64)
    found = geometry.measure(CORNERS[None], point[None], THIRDS)
    assert found.weights.flatten().tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-12)
    assert float(found.residuals["hull"]) == pytest.approx(10**0.5 / 5, abs=1e-12)


def test_hull_weights_agree_with_a_general_solver() -> None:
    experts, blocks, _ = random_case()
    found = geometry.hull_weights(experts, blocks)
    assert found.shape == (3, 5, 4)
    assert torch.allclose(found.sum(2), torch.ones(3, 5, dtype=torch.float64)) and bool((found >= 0).all())
    inside = 0
    for layer in range(3):
        for i in range(5):
            E, b = experts[layer].numpy(), blocks[layer, i].numpy()
            solved = minimize(
                lambda w, E=E, b=b: float(((w @ E - b) ** 2).sum()),
                np.full(4, 0.25),
                method="SLSQP",
                bounds=[(0, 1)] * 4,
                constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
                options={"ftol": 1e-14, "maxiter": 500},
            )
            assert found[layer, i].numpy() == pytest.approx(solved.x, abs=2e-5)
            inside += bool((found[layer, i] > 1e-3).all())
    assert 0 < inside < 15  # faces and the interior both occur


def test_affine_weights_solve_the_constrained_normal_equations() -> None:
    experts, blocks, _ = random_case()
    E = experts[0]
    system = torch.zeros(5, 5, dtype=torch.float64)  # Lagrange: 2 E E' w + lambda 1 = 2 E b, 1'w = 1
    system[:4, :4], system[:4, 4], system[4, :4] = 2 * E @ E.T, 1.0, 1.0
    right = torch.cat([2 * E @ blocks[0].T, torch.ones(1, 5, dtype=torch.float64)])
    assert torch.allclose(geometry.affine_weights(E, blocks[0]), torch.linalg.solve(system, right)[:4].T)


def test_scaling_and_moving_everything_changes_no_figure() -> None:
    experts, blocks, mixtures = random_case()
    plain = geometry.report(geometry.measure(experts, blocks, mixtures), mixtures)
    moved = geometry.report(geometry.measure(50 * experts - 3, 50 * blocks - 3, mixtures), mixtures)
    for fit in geometry.FITS:
        assert plain["residuals"][fit] == pytest.approx(np.array(moved["residuals"][fit]), abs=1e-8)
    assert plain["summary"]["residual"] == pytest.approx(moved["summary"]["residual"])
    assert np.array(moved["diameters"]) == pytest.approx(50 * np.array(plain["diameters"]))


def test_the_report_gives_medians_correlation_error_and_absent_mass() -> None:
    # Blocks exactly at weights w, in two layers of which the second is the first turned and doubled: the
    # coordinates found are w. Against alpha = (1,0,0), (.5,.5,0): differences .1 .1 0 and .1 .1 .2.
    w = torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.4, 0.2]], dtype=torch.float64)
    alpha = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    experts = torch.stack([CORNERS, 2 * CORNERS @ rotation(4, 2)])
    found = geometry.report(geometry.measure(experts, w @ experts, alpha), alpha)
    summary = found["summary"]
    assert found["kinds"] == ["pure", "edge"]
    assert summary["edge_absent_mass"] == pytest.approx(0.2, abs=1e-9)
    assert summary["coordinate_mae"] == pytest.approx(0.1, abs=1e-9)
    assert summary["coordinate_correlation"] == pytest.approx(np.corrcoef(w.flatten(), alpha.flatten())[0, 1])
    # true: (.9,.1,0) is .1 of the first side away: .1. The other misses by -.1 e0 -.1 e1 +.2 e2 = (-.3, .6).
    assert summary["residual"]["true"] == pytest.approx((0.1 + 0.45**0.5 / 5) / 2, abs=1e-9)
    assert summary["residual"]["hull"] == pytest.approx(0.0, abs=1e-9)
    assert found["holds"] == {"true < uniform < shuffled": True, "hull - affine < .02": True}


def test_kinds_of_clients_follow_the_number_of_tasks_they_hold() -> None:
    mixtures = torch.tensor([[0.0, 1, 0], [0.2, 0, 0.8], [0.6, 0.2, 0.2]])
    assert geometry.client_kinds(mixtures) == ["pure", "edge", "interior"]
    assert geometry.absent_mass(torch.eye(3), torch.eye(3), ["pure"] * 3) is None
    assert geometry.by_kind([1.0, 3.0, 8.0], ["pure", "pure", "interior"]) == {
        "pure": 2.0, "interior": 8.0, "all": 4.0
    }  # fmt: skip


def test_calibration_figures_by_hand() -> None:
    # Client 0 is pure in task 0; two projections use it .9 and .7: mean .8, |(.8,.1,.1) - (1,0,0)|_1 = .4.
    # Client 1 is on an edge; its projections err from (.5,.5,0) in opposite directions, task 2 gets .1:
    # |(.7,.2,.1) - .| = .6 and |(.2,.7,.1) - .| = .6 one by one, |(.45,.45,.1) - .| = .2 together.
    usage = torch.tensor(
        [[[0.9, 0.0, 0.1], [0.7, 0.2, 0.1]], [[0.7, 0.2, 0.1], [0.2, 0.7, 0.1]]], dtype=torch.float64
    )
    alpha = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    found = geometry.calibration(usage, [0.3, 0.5], alpha)
    assert found["mismatch"] == pytest.approx({"pure": 0.4, "edge": 0.2, "all": 0.3})
    assert found["mismatch_per_projection"] == pytest.approx({"pure": 0.4, "edge": 0.6, "all": 0.5})
    assert found["pure_correct_mass"] == pytest.approx(0.8)
    assert found["edge_absent_mass"] == pytest.approx(0.1)
    assert found["cross_entropy"] == pytest.approx({"pure": 0.3, "edge": 0.5, "all": 0.4})


def test_a_hull_that_is_nearer_than_the_plane_is_refused() -> None:
    good = {fit: torch.tensor([[1.0, 2.0]]) for fit in geometry.FITS}
    geometry.check_order(good)
    for fit in geometry.FITS[1:]:
        with pytest.raises(ArithmeticError, match=f"layer 0, client 1: .*of the {fit} fit"):
            geometry.check_order({**good, fit: torch.tensor([[1.0, 1.9]])})


def test_experts_that_span_nothing_and_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts of layer 1 are all the same.*more steps"):
        geometry.diameters(torch.stack([CORNERS, torch.ones(3, 4)]))
    with pytest.raises(ValueError, match="at least 2 experts"):
        geometry.diameters(torch.ones(1, 1, 4))
    with pytest.raises(ValueError, match=r"got blocks \(1, 2, 4\) and mixtures \(1, 3\)"):
        geometry.measure(CORNERS[None], torch.ones(1, 2, 4), THIRDS)
