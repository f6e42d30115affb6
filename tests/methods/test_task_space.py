"""Task coordinates and groups: singular vectors, scikit-learn, brute force and closed forms."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.spatial.transform import Rotation
from sklearn.metrics import silhouette_score

from fedprism.methods.task_space import TaskSpace, canonical, cluster, group_weights, inertia, silhouette

RNG = np.random.default_rng(0)
C = RNG.random((9, 20))
Z = np.array([[0.0, 0.0], [5.0, 5.0], [0.1, 0.0], [5.1, 5.0], [0.0, 9.0], [0.0, 0.1]])


def test_coordinates_are_projections_on_the_leading_left_singular_vectors() -> None:
    space = TaskSpace.fit(C, 3)
    centred = (C - C.mean(0)).T  # (F, N) as the paper stacks it
    u, s, _ = np.linalg.svd(centred)
    np.testing.assert_allclose(space.basis @ space.basis.T, u[:, :3] @ u[:, :3].T, atol=1e-12)
    np.testing.assert_allclose(space.spectrum, s, atol=1e-12)
    np.testing.assert_allclose(space.z, (space.basis.T @ centred).T, atol=1e-12)
    np.testing.assert_allclose(space.z.sum(0), 0, atol=1e-12)
    assert (space.basis[np.abs(space.basis).argmax(0), range(3)] > 0).all()


def test_the_uncentred_basis_and_coordinates() -> None:
    u = np.linalg.svd(C.T)[0][:, :2]
    literal = TaskSpace.fit(C, 2, basis="uncentred")
    np.testing.assert_allclose(
        literal.z @ literal.z.T, (C - C.mean(0)) @ u @ u.T @ (C - C.mean(0)).T, atol=1e-12
    )
    raw = TaskSpace.fit(C, 2, basis="uncentred", coordinates="uncentred")
    np.testing.assert_allclose(raw.z @ raw.z.T, C @ u @ u.T @ C.T, atol=1e-12)


def test_the_uncentred_basis_wastes_its_first_direction_on_the_mean() -> None:
    near = 1 + 0.01 * C  # unit vectors close to one another (spec P3)
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    wasted, used = (np.var(TaskSpace.fit(near, 2, basis=b).z, axis=0) for b in ("uncentred", "centred"))
    assert wasted[0] < 0.05 * wasted[1] and used[0] >= used[1] > 0


def test_the_whole_space_keeps_every_distance() -> None:
    z = TaskSpace.fit(C, basis="full").z
    assert z.shape == (9, 8)
    np.testing.assert_allclose(z @ z.T, (C - C.mean(0)) @ (C - C.mean(0)).T, atol=1e-12)


def test_the_automatic_rank() -> None:
    one_direction = np.outer(np.arange(9.0), np.ones(4))
    assert TaskSpace.fit(one_direction).rank == 1  # all energy in the first
    assert TaskSpace.fit(C).rank == 4  # random: more than 4 for 95 %
    assert TaskSpace.fit(C[:4]).rank == 2  # N - 2
    assert TaskSpace.fit(np.ones((5, 3))).rank == 1


def test_ranks_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got r_task = 9, needs at most N - 1 = 8 for N = 9 clients"):
        TaskSpace.fit(C, 9)
    assert TaskSpace.fit(C, 8).rank == 8


def test_weighted_centring() -> None:
    p = np.arange(1.0, 10)
    z = TaskSpace.fit(C, 3, p=p).z
    np.testing.assert_allclose(p @ z, 0, atol=1e-12)


def test_groups_by_eye_in_the_order_of_their_first_client() -> None:
    labels, note = cluster(Z, 3)
    assert labels.tolist() == [0, 1, 0, 1, 2, 0] and note == ""
    assert canonical(np.array([2, 2, 0, 1, 0])).tolist() == [0, 0, 1, 2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_k_means_finds_the_best_of_all_partitions(seed: int) -> None:
    z = np.random.default_rng(seed).normal(size=(7, 2))
    p = np.full(7, 1 / 7)
    best = min(
        inertia(z, np.array(labels), p) for labels in product(range(3), repeat=7) if len(set(labels)) == 3
    )
    labels, _ = cluster(z, 3)
    assert inertia(z, labels, p) == pytest.approx(best, rel=1e-12)


def test_neither_order_nor_rotation_nor_signs_change_the_groups() -> None:
    z = RNG.normal(size=(12, 3))
    labels, _ = cluster(z, 4, seed=3)
    turned = (z @ Rotation.from_rotvec([1, 2, 3]).as_matrix()) * [1, -1, 1]
    assert cluster(turned, 4, seed=3)[0].tolist() == labels.tolist()
    order = RNG.permutation(12)
    assert cluster(z[order], 4, seed=3)[0].tolist() == canonical(labels[order]).tolist()


def test_more_groups_than_distinct_clients_are_lowered_with_a_note() -> None:
    twins = Z[[0, 0, 1, 1, 4]]
    labels, note = cluster(twins, 4)
    assert labels.tolist() == [0, 0, 1, 1, 2]
    assert note == "clusters: 4 asked for, 3 distinct task coordinates of 5 clients; used 3"
    assert cluster(np.zeros((3, 1)), 5)[0].tolist() == [0, 0, 0]


def test_silhouette_and_the_number_it_chooses() -> None:
    z = RNG.normal(size=(12, 2)) * 0.1 + np.repeat([[0, 0], [4, 0], [0, 4]], 4, 0)
    labels, _ = cluster(z, 0)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert silhouette(z, labels) == pytest.approx(silhouette_score(z, labels), abs=1e-12)
    odd = np.array([0, 0, 1, 1, 2, 0])
    assert silhouette(Z, odd) == pytest.approx(silhouette_score(Z, odd), abs=1e-12)


def test_group_weights_by_hand() -> None:
    z, labels = np.array([[-1.0], [-1.0], [2.0]]), np.array([0, 0, 1])
    w, a = group_weights(z, labels, 1.0, mode="absolute")  # squared distances 1 and 4 to the centre 0
    e = np.exp([-1.0, -4.0])
    np.testing.assert_allclose(w, e / e.sum())
    np.testing.assert_allclose(a, [w[0] / 2, w[0] / 2, w[1]])
    e = np.exp([-1 / 2.5, -4 / 2.5])  # mean squared distance 2.5
    np.testing.assert_allclose(group_weights(z, labels, 1.0)[0], e / e.sum())
    e = e * [2 / 3, 1 / 3]
    np.testing.assert_allclose(group_weights(z, labels, 1.0, size_aware=True)[0], e / e.sum())
    np.testing.assert_allclose(group_weights(z, labels, 0.0, size_aware=True)[1], [1 / 3] * 3)


def test_group_weights_with_examples_as_weights() -> None:
    z, labels, n = np.array([[-1.0], [0.0], [2.0]]), np.array([0, 0, 1]), np.array([30, 10, 60])
    _, a = group_weights(z, labels, 0.0, size_aware=True, p=n)
    np.testing.assert_allclose(a, n / 100)
    _, a = group_weights(z, labels, 0.0, p=n)
    np.testing.assert_allclose(a, [0.5 * 0.75, 0.5 * 0.25, 0.5])
