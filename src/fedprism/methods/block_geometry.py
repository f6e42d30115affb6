"""Where trained blocks lie relative to the experts: plane coordinates, residuals, simplex weights.

Pure functions in float64 on stacked blocks. L layers, N clients, M experts, d entries per flattened block:
experts (L, M, d), blocks (L, N, d), mixtures (N, M) with rows that sum to 1. Distances are divided by the
layer's diameter D, the largest distance between two of its experts, so layers and seeds can be compared.
Source: FedSEE (2026), Appendix B.2 (Figures 6 and 7, Table 5); spec section 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedprism.methods.simplex import simplex_quadratic

FITS = ("affine", "hull", "true", "uniform", "shuffled")  # choices of the weights, rows of Table 5
SLACK = 1e-8  # in diameters: how far rounding may turn an inequality between residuals
KINDS = ("pure", "edge", "interior")


@dataclass(frozen=True)
class Geometry:
    """What `measure` found. All lengths are in units of the layer's diameter.

    diameter: (L,) D itself, in the blocks' unit. expert_points (L, M, M-1), client_points (L, N, M-1),
    mixture_points (L, N, M-1): coordinates in the experts' affine plane. weights: (L, N, M) of the nearest
    point of the experts' hull. residuals: fit -> (L, N), for each of `FITS`."""

    diameter: Tensor
    expert_points: Tensor
    client_points: Tensor
    mixture_points: Tensor
    weights: Tensor
    residuals: Mapping[str, Tensor]


def diameters(experts: Tensor) -> Tensor:
    """(L,) largest distance between two experts of a layer.

    experts: (L, M, d), M >= 2. Raises ValueError naming a layer whose experts are all the same."""
    if experts.ndim != 3 or experts.shape[1] < 2:
        raise ValueError(
            f"geometry: got experts of shape {tuple(experts.shape)}, needs (layers, experts, entries), with "
            "at least 2 experts; give more tasks"
        )
    gaps: Tensor = (experts.double()[:, :, None] - experts.double()[:, None]).norm(dim=-1).amax((1, 2))
    if bool((gaps <= 0).any()):
        raise ValueError(
            f"geometry: the experts of layer {int(gaps.argmin())} are all the same, needs different ones; "
            "train them for more steps"
        )
    return gaps


def plane_basis(experts: Tensor) -> Tensor:
    """(M-1, d) orthonormal basis of the plane through the experts (M, d), by Gram-Schmidt in their order.

    Axis k points along the part of expert k+1 minus expert 0 that the axes before leave: with three experts
    the first runs from the first to the second, the other towards the third (Figure 6). Experts in a common
    lower plane leave an axis arbitrary, and their coordinate on it is 0."""
    spread = (experts[1:] - experts[0]).double()
    columns, coordinates = torch.linalg.qr(spread.T)
    basis: Tensor = columns.T * torch.where(coordinates.diagonal() < 0, -1.0, 1.0)[:, None]
    return basis


def affine_weights(experts: Tensor, points: Tensor) -> Tensor:
    """(N, M) weights of the nearest point of the experts' affine plane; rows sum to 1, any sign.

    experts: (M, d). points: (N, d). Least squares in the experts' differences."""
    experts, points = experts.double(), points.double()
    spread = (experts[1:] - experts[0]).T  # (d, M-1)
    found = torch.linalg.lstsq(spread, (points - experts[0]).T, driver="gelsd").solution.T
    return torch.cat([1.0 - found.sum(1, keepdim=True), found], 1)


def hull_weights(experts: Tensor, points: Tensor) -> Tensor:
    """(L, N, M) weights of the nearest point of the experts' convex hull, one program per layer and point.

    experts: (L, M, d). points: (L, N, d). The iterative solution is sharpened: on the face that it names the
    best point is a least-squares one, taken where it lies on the face and is no further away."""
    scale = diameters(experts)[:, None, None]
    centre = experts.double().mean(1, keepdim=True)
    E, P = (experts.double() - centre) / scale, (points.double() - centre) / scale
    G = E @ E.mT  # (L, M, M)
    weights = simplex_quadratic(G[:, None], P @ E.mT, tolerance=1e-12).weights
    for layer in range(len(E)):
        for i in range(P.shape[1]):
            face = weights[layer, i] > 1e-6
            sharper = torch.zeros_like(weights[layer, i])
            if int(face.sum()) == 1:
                sharper[face] = 1.0
            else:
                sharper[face] = affine_weights(E[layer, face], P[layer, i : i + 1])[0]
            before, after = ((w @ E[layer] - P[layer, i]).norm() for w in (weights[layer, i], sharper))
            if bool((sharper >= 0).all()) and bool(after <= before):
                weights[layer, i] = sharper
    return weights


def residual(experts: Tensor, points: Tensor, weights: Tensor) -> Tensor:
    """(L, N) distance |B_i - sum_m w_m B_m| / D. experts: (L, M, d). points: (L, N, d). weights: (N, M) or
    (L, N, M). Source: Appendix B.2, the definition before Table 5."""
    gaps = points.double() - weights.double() @ experts.double()
    distances: Tensor = gaps.norm(dim=-1) / diameters(experts)[:, None]
    return distances


def measure(experts: Tensor, blocks: Tensor, mixtures: Tensor) -> Geometry:
    """Plane coordinates, hull weights and residuals of every layer and client.

    experts: (L, M, d). blocks: (L, N, d), the clients' own. mixtures: (N, M), rows sum to 1. "shuffled" is
    the mean residual over the M-1 cyclic shifts of the mixture. Raises ValueError for shapes that do not fit,
    and ArithmeticError if affine <= hull <= {true, uniform, shuffled} fails by more than `SLACK`."""
    experts, blocks, mixtures = experts.double(), blocks.double(), mixtures.double()
    D = diameters(experts)
    M = experts.shape[1]
    if blocks.shape != (len(D), len(mixtures), experts.shape[2]) or mixtures.shape[1] != M:
        raise ValueError(
            f"geometry: got blocks {tuple(blocks.shape)} and mixtures {tuple(mixtures.shape)} for experts "
            f"{tuple(experts.shape)}, needs (L, N, d) and (N, M) for (L, M, d); stack what belongs together"
        )
    bases = torch.stack([plane_basis(layer) for layer in experts])  # (L, M-1, d)
    origin = experts[:, :1]

    def in_plane(points: Tensor) -> Tensor:
        return (points - origin) @ bases.mT / D[:, None, None]

    hull = hull_weights(experts, blocks)
    affine = torch.stack([affine_weights(e, b) for e, b in zip(experts, blocks, strict=True)])
    shifted = [residual(experts, blocks, mixtures.roll(k, 1)) for k in range(1, M)]
    residuals = {
        "affine": residual(experts, blocks, affine),
        "hull": residual(experts, blocks, hull),
        "true": residual(experts, blocks, mixtures),
        "uniform": residual(experts, blocks, torch.full_like(mixtures, 1.0 / M)),
        "shuffled": torch.stack(shifted).mean(0),
    }
    check_order(residuals)
    return Geometry(D, in_plane(experts), in_plane(blocks), in_plane(mixtures @ experts), hull, residuals)


def check_order(residuals: Mapping[str, Tensor]) -> None:
    """Raise ArithmeticError where a freer fit is further away than a stricter one: affine <= hull <= the
    three fixed choices, for each layer and client, within `SLACK` relative to max(1, residual)."""
    for near, far in (("affine", "hull"), *(("hull", fixed) for fixed in FITS[2:])):
        excess = (residuals[near] - residuals[far]) / residuals[far].clamp_min(1.0)
        if float(excess.max()) > SLACK:
            layer, client = divmod(int(excess.argmax()), excess.shape[1])
            raise ArithmeticError(
                f"geometry: layer {layer}, client {client}: residual of the {near} fit is "
                f"{float(residuals[near][layer, client]):.9g}, needs at most that of the {far} fit, "
                f"{float(residuals[far][layer, client]):.9g}; report this, it must not happen"
            )


def client_kinds(mixtures: Tensor) -> list[str]:
    """Kind of each client by its mixture (N, M): "pure" holds one task, "interior" all, "edge" between."""
    held = (mixtures > 0).sum(1).tolist()
    return ["pure" if k == 1 else "interior" if k == mixtures.shape[1] else "edge" for k in held]


def absent_mass(weights: Tensor, mixtures: Tensor, kinds: Sequence[str]) -> float | None:
    """Mean weight that edge clients' tasks get which the client does not hold; None without edge clients.

    weights: (..., N, M). mixtures: (N, M). Source: Appendix B.2, text on Figure 7."""
    edge = [i for i, kind in enumerate(kinds) if kind == "edge"]
    if not edge:
        return None
    absent = (mixtures[edge] == 0).double()
    return float((weights.double()[..., edge, :] * absent).sum(-1).mean())


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Pearson's r of two equally shaped tensors, None where one of them is constant."""
    a, b = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size > 0 else None


def by_kind(values: Sequence[float], kinds: Sequence[str]) -> dict[str, float]:
    """Mean of the clients' values over each kind of client that there is, and over "all" of them."""
    groups = {kind: [v for v, k in zip(values, kinds, strict=True) if k == kind] for kind in KINDS}
    groups["all"] = list(values)
    return {kind: sum(group) / len(group) for kind, group in groups.items() if group}


def report(geometry: Geometry, mixtures: Tensor) -> dict[str, Any]:
    """JSON-ready record of one seed: everything measured, and under "summary" the figures that are published.

    mixtures: (N, M). The summary holds medians over clients and layers of each residual, and how well the
    hull weights find the mixtures over clients, tasks and layers (Table 5 and Figure 7). "holds" says whether
    true < uniform < shuffled, and whether hull exceeds affine by less than .02."""
    medians = {fit: float(torch.quantile(geometry.residuals[fit].flatten(), 0.5)) for fit in FITS}
    wanted = mixtures.double().expand_as(geometry.weights)
    kinds = client_kinds(mixtures)
    return {
        "mixtures": mixtures.tolist(),
        "kinds": kinds,
        "diameters": geometry.diameter.tolist(),
        "expert_points": geometry.expert_points.tolist(),
        "client_points": geometry.client_points.tolist(),
        "mixture_points": geometry.mixture_points.tolist(),
        "weights": geometry.weights.tolist(),
        "residuals": {fit: values.tolist() for fit, values in geometry.residuals.items()},
        "summary": {
            "residual": medians,
            "coordinate_correlation": correlation(geometry.weights, wanted),
            "coordinate_mae": float((geometry.weights - wanted).abs().mean()),
            "edge_absent_mass": absent_mass(geometry.weights, mixtures, kinds),
        },
        "holds": {
            "true < uniform < shuffled": medians["true"] < medians["uniform"] < medians["shuffled"],
            "hull - affine < .02": medians["hull"] - medians["affine"] < 0.02,
        },
    }


def calibration(usage: Tensor, losses: Sequence[float], mixtures: Tensor) -> dict[str, Any]:
    """JSON-ready figures of one calibration target (Figure 8): usage mismatch |p - alpha|_1 of the mean over
    projections and, since that can hide opposite errors, its mean per projection; mass on the right expert of
    pure clients and on absent experts of edge clients; cross-entropy by kind of client.

    usage: (N, P, M) mean usage per projection, rows sum to 1. losses: (N,) nats. mixtures: (N, M)."""
    kinds, mean_usage = client_kinds(mixtures), usage.mean(1)  # (N, M)
    pure = [i for i, kind in enumerate(kinds) if kind == "pure"]
    right = [float(mean_usage[i, mixtures[i].argmax()]) for i in pure]
    return {
        "mismatch": by_kind((mean_usage - mixtures).abs().sum(1).tolist(), kinds),
        "mismatch_per_projection": by_kind((usage - mixtures[:, None]).abs().sum(2).mean(1).tolist(), kinds),
        "pure_correct_mass": sum(right) / len(right) if right else None,
        "edge_absent_mass": absent_mass(mean_usage, mixtures, kinds),
        "cross_entropy": by_kind(losses, kinds),
        "usage": mean_usage.tolist(),
    }
