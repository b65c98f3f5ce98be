"""Points in masks, distances of paths, matching of boxes and heat maps, against formulas written anew and scipy."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask
from scipy.spatial.distance import directed_hausdorff

from vlm_grpo.scoring import box_iou
from vlm_grpo.scoring.shapes import (
    covered_shares,
    deepest_point,
    detection_score,
    frechet_distance,
    hausdorff_distance,
    heat_map,
    iou_matrix,
    kl_divergence,
    match_boxes,
    path_rmse,
    path_rmse_by_index,
    points_in_mask,
    resample,
    scanpath_saliency,
    similarity,
)

RNG = np.random.default_rng(0)


def paths(count, most=8):
    for _ in range(count):
        yield [RNG.uniform(0, 1, (int(RNG.integers(1, most)), 2)).tolist() for _ in range(2)]


def boxes(count, side=20.0):
    corners = RNG.uniform(0, side, (count, 2, 2))
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1).tolist()


# ---- points ----


def test_points_in_a_mask_by_hand():
    mask = np.zeros((4, 6), dtype=bool)
    mask[1, 2] = True  # row 1, column 2: 2 <= x < 3, 1 <= y < 2
    assert points_in_mask([(2, 1)], mask) == 1.0
    assert points_in_mask([(2.99, 1.99), (3, 1), (2, 2), (1, 2)], mask) == 0.25
    assert points_in_mask([(2, 1), (-1, 1), (2, -1), (6, 1), (2, 4)], mask) == 0.2
    assert points_in_mask([], mask) == 0.0


def test_points_just_outside_the_image_are_in_no_mask():
    everything = np.ones((3, 5), dtype=bool)
    outside = [(-0.5, 1), (1, -0.01), (5, 1), (1, 3), (1e15, 1), (-1e15, 2)]
    assert [points_in_mask([point], everything) for point in outside] == [0.0] * 6
    assert points_in_mask([(4.99, 2.99), (0, 0)], everything) == 1.0


def test_the_share_equals_that_of_where2place_on_whole_pixels():
    # Their evaluation: in_range rows of an array, the mask's values there, zeros for the rest, the mean.
    for _ in range(1000):
        mask = RNG.random((7, 9)) < 0.4
        points = RNG.integers(-3, 12, (int(RNG.integers(1, 9)), 2))
        x, y = points.T
        inside = (x >= 0) & (x < 9) & (y >= 0) & (y < 7)
        theirs = np.concatenate([mask[y[inside], x[inside]], np.zeros((~inside).sum())]).mean()
        assert points_in_mask(points.tolist(), mask) == pytest.approx(theirs)


def test_the_deepest_point_is_furthest_from_the_edge():
    for _ in range(100):
        mask = RNG.random((6, 8)) < 0.6
        if not mask.any():
            continue
        outside = [(r, c) for r in range(-1, 7) for c in range(-1, 9) if not (0 <= r < 6 and 0 <= c < 8 and mask[r, c])]
        depth = {
            (r, c): min(math.dist((r, c), other) for other in outside) for r, c in zip(*np.nonzero(mask), strict=True)
        }
        x, y = deepest_point(mask)
        assert points_in_mask([(x, y)], mask) == 1.0
        assert depth[int(y), int(x)] == pytest.approx(max(depth.values()))


# ---- paths ----


def recursive_frechet(p, q):
    @functools.cache
    def c(i, j):
        d = math.hypot(p[i][0] - q[j][0], p[i][1] - q[j][1])
        before = [c(a, b) for a, b in ((i - 1, j), (i - 1, j - 1), (i, j - 1)) if a >= 0 and b >= 0]
        return max(min(before), d) if before else d

    return c(len(p) - 1, len(q) - 1)


@pytest.mark.slow
def test_the_frechet_distance_equals_the_recursive_definition():
    for p, q in paths(2000):
        assert frechet_distance(p, q) == pytest.approx(recursive_frechet(p, q), abs=1e-12)
        assert frechet_distance(p, q) == frechet_distance(q, p)


def test_the_frechet_distance_equals_the_best_of_all_couplings():
    def couplings(n, m):
        def extend(i, j):
            if (i, j) == (n - 1, m - 1):
                yield [(i, j)]
                return
            for a, b in ((i + 1, j), (i, j + 1), (i + 1, j + 1)):
                if a < n and b < m:
                    yield from ([(i, j), *rest] for rest in extend(a, b))

        return extend(0, 0)

    for p, q in paths(100, most=5):
        best = min(max(math.dist(p[i], q[j]) for i, j in walk) for walk in couplings(len(p), len(q)))
        assert frechet_distance(p, q) == pytest.approx(best)


def test_distances_of_paths_by_hand():
    there, back = [(0, 0), (1, 0), (2, 0)], [(2, 0), (1, 0), (0, 0)]
    assert frechet_distance(there, back) == 2 and hausdorff_distance(there, back) == 0
    assert frechet_distance(there, [(0, 1), (2, 1)]) == pytest.approx(math.sqrt(2))
    assert hausdorff_distance([(0, 0)], [(0, 0), (3, 4)]) == 5
    assert path_rmse(there, [(0, 1), (2, 1)]) == pytest.approx(1)  # one above the other, whatever the counts
    assert path_rmse(there, back) == pytest.approx(math.sqrt(np.mean((2 * np.linspace(-1, 1, 50)) ** 2)))
    assert frechet_distance([], there) == hausdorff_distance(there, []) == path_rmse([], there) == math.inf
    assert path_rmse_by_index([], there) == math.inf and path_rmse_by_index([], []) == 0


@pytest.mark.slow
def test_the_hausdorff_distance_equals_scipys():
    for p, q in paths(2000):
        theirs = max(directed_hausdorff(np.array(p), np.array(q))[0], directed_hausdorff(np.array(q), np.array(p))[0])
        assert hausdorff_distance(p, q) == pytest.approx(theirs, abs=1e-12)
        assert hausdorff_distance(p, q) <= frechet_distance(p, q) + 1e-12


def test_resampled_points_lie_at_equal_steps_along_the_path():
    path = [(0, 0), (3, 0), (3, 0), (3, 4)]  # of length 7
    assert resample(path, 8).tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]
    assert resample([(2, 5)], 3).tolist() == [[2, 5]] * 3


def test_more_points_on_the_same_line_change_no_rmse():
    for p, q in paths(300):
        between = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in itertools.pairwise(p)]
        denser = [point for pair in itertools.zip_longest(p, between) for point in pair if point is not None]
        assert path_rmse(denser, q) == pytest.approx(path_rmse(p, q), abs=1e-9)


@pytest.mark.slow
def test_a_long_path_needs_no_recursion():
    line = [(float(at), 0.0) for at in range(1500)]
    assert frechet_distance(line, [(x, 2.0) for x, _ in line]) == 2.0


# ---- boxes ----


def test_ious_equal_pycocotools_and_the_scoring_module():
    first, second = boxes(60), boxes(50)
    xywh = [[[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in side] for side in (first, second)]
    assert iou_matrix(first, second) == pytest.approx(coco_mask.iou(*xywh, [0] * 50), abs=1e-12)
    assert covered_shares(first, second) == pytest.approx(coco_mask.iou(*xywh, [1] * 50), abs=1e-12)
    assert iou_matrix(first, second) == pytest.approx(np.array([[box_iou(a, b) for b in second] for a in first]))


def test_empty_and_swapped_boxes_overlap_nothing():
    odd = [(5, 5, 5, 9), (9, 9, 1, 1), (3, 9, 6, 1)]
    assert not iou_matrix(odd, [(0, 0, 10, 10)]).any() and not iou_matrix([(0, 0, 10, 10)], odd).any()
    assert iou_matrix([], [(0, 0, 1, 1)]).shape == (0, 1)


def best_matching(ious, allowed):
    """The most IoU of any one-to-one choice of allowed pairs, by trying all."""
    n, m = ious.shape
    best = 0.0
    for chosen in itertools.product(range(-1, m), repeat=n):
        used = [j for j in chosen if j >= 0]
        if len(used) == len(set(used)) and all(allowed[i, j] for i, j in enumerate(chosen) if j >= 0):
            best = max(best, math.fsum(ious[i, j] for i, j in enumerate(chosen) if j >= 0))
    return best


def test_the_matching_is_the_best_of_all():
    for _ in range(400):
        reference = boxes(int(RNG.integers(1, 5)))
        predicted = [
            [side + RNG.normal(0, 1.0) for side in reference[int(RNG.integers(len(reference)))]]
            for _ in range(int(RNG.integers(1, 5)))
        ]
        labels, reference_labels = (["ab"[int(RNG.integers(2))] for _ in side] for side in (predicted, reference))
        pairs = match_boxes(predicted, labels, reference, reference_labels)
        ious = iou_matrix(predicted, reference)
        allowed = np.array([[a == b for b in reference_labels] for a in labels]) & (ious >= 0.5)
        assert all(allowed[i, j] and iou == pytest.approx(ious[i, j]) for i, j, iou in pairs)
        assert len({i for i, _, _ in pairs}) == len({j for _, j, _ in pairs}) == len(pairs)
        assert math.fsum(iou for _, _, iou in pairs) == pytest.approx(best_matching(ious, allowed))


def test_the_score_is_f1_times_mean_iou():
    for _ in range(300):
        matched = RNG.uniform(0.5, 1, int(RNG.integers(1, 6))).tolist()
        num_boxes, num_reference = (len(matched) + int(RNG.integers(4)) for _ in range(2))
        precision, recall = len(matched) / num_boxes, len(matched) / num_reference
        f1 = 2 * precision * recall / (precision + recall)
        assert detection_score(matched, num_boxes, num_reference) == pytest.approx(f1 * np.mean(matched))
    assert detection_score([], 3, 0) == detection_score([], 0, 3) == 0.0
    assert detection_score([], 0, 0) == 1.0


def test_an_iou_of_just_the_threshold_matches():
    assert match_boxes([(0, 0, 1, 1)], ["a"], [(0, 0, 2, 1)], ["a"]) == [(0, 0, 0.5)]
    assert match_boxes([(0, 0, 1, 1)], ["a"], [(0, 0, 2, 1)], ["b"]) == []
    assert match_boxes([], [], [(0, 0, 2, 1)], ["b"]) == []


# ---- heat maps ----


def test_a_heat_map_is_the_greatest_gaussian():
    points, sigma = [(3.5, 2.5), (6.0, 1.0), (-40.0, 2.0)], 1.7
    drawn = heat_map(points, (5, 9), sigma)
    for row, column in itertools.product(range(5), range(9)):
        nearest = min((column + 0.5 - x) ** 2 + (row + 0.5 - y) ** 2 for x, y in points)
        assert drawn[row, column] == pytest.approx(math.exp(-nearest / (2 * sigma**2)))
    assert drawn[2, 3] == 1.0
    assert (heat_map(points * 3, (5, 9), sigma) == drawn).all()
    assert not heat_map([], (5, 9), sigma).any() and not heat_map([(1e15, -1e15)], (5, 9), sigma).any()


def agd20k(predicted, reference):
    """KLD, SIM and NSS with loops, as the formulas of AGD20K's evaluation read."""
    e = 1e-12
    p = [value / (math.fsum(predicted.flat) + e) for value in predicted.flat]
    q = [value / (math.fsum(reference.flat) + e) for value in reference.flat]
    kld = math.fsum(b * math.log(b / (a + e) + e) for a, b in zip(p, q, strict=True))
    sim = math.fsum(min(a, b) for a, b in zip(p, q, strict=True))
    mean = math.fsum(predicted.flat) / predicted.size
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in predicted.flat) / predicted.size)
    low, high = min(reference.flat), max(reference.flat)
    fixed = [(value - low) / (high - low + e) > 0.1 for value in reference.flat]
    nss = sum((v - mean) / std for v, is_fixed in zip(predicted.flat, fixed, strict=True) if is_fixed) / sum(fixed)
    return kld, sim, nss


def test_kld_sim_and_nss_equal_the_formulas_with_loops():
    for _ in range(300):
        predicted, reference = (RNG.random((6, 7)) ** 4 for _ in range(2))
        reference[RNG.random((6, 7)) < 0.3] = 0.0
        ours = (f(predicted, reference) for f in (kl_divergence, similarity, scanpath_saliency))
        assert tuple(ours) == pytest.approx(agd20k(predicted, reference), rel=1e-9, abs=1e-9)


def test_a_map_is_most_like_itself():
    values = RNG.random((6, 7))
    assert similarity(values, values) == pytest.approx(1)
    assert kl_divergence(values, values) == pytest.approx(0, abs=1e-9)
    assert kl_divergence(100 * values, values) == pytest.approx(0, abs=1e-9)  # maps are scaled to the sum 1


def test_an_empty_prediction_has_finite_metrics():
    empty, reference = np.zeros((4, 4)), RNG.random((4, 4))
    assert similarity(empty, reference) == 0.0 and scanpath_saliency(empty, reference) == 0.0
    assert 20 < kl_divergence(empty, reference) < 30


coordinates = st.floats(-1e15, 1e15)
points = st.lists(st.tuples(coordinates, coordinates), max_size=6)


@settings(max_examples=300, deadline=None)
@given(points, points)
def test_any_points_have_finite_or_infinite_distances_and_no_warning(first, second):
    for distance in (frechet_distance, hausdorff_distance, path_rmse):
        assert distance(first, second) >= 0
    assert 0 <= points_in_mask(first, np.ones((3, 4), dtype=bool)) <= 1
    assert 0 <= similarity(heat_map(first, (3, 4), 1.0), np.ones((3, 4))) <= 1 + 1e-9


@settings(max_examples=200, deadline=None)
@given(*[st.lists(st.tuples(*[coordinates] * 4), max_size=5)] * 2)
def test_any_boxes_have_a_score_from_0_to_1(first, second):
    pairs = match_boxes(first, [""] * len(first), second, [""] * len(second))
    assert 0 <= detection_score([iou for _, _, iou in pairs], len(first), len(second)) <= 1
