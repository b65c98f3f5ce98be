"""Measures for points, paths, sets of boxes and heat maps.

Points are (x, y), boxes (x1, y1, x2, y2), in the same unit on both sides of a comparison. N, M: points of a path;
H, W: rows and columns of a mask or heat map.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Bool, Float
from scipy.ndimage import distance_transform_edt, map_coordinates
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

Points = Sequence[Sequence[float]]
Boxes = Sequence[Sequence[float]]

# ---- points in a mask ----


def points_in_mask(points: Points, mask: Bool[np.ndarray, "H W"]) -> float:
    """The share of the points that lie in the mask; 0 if there are no points.

    A point (x, y) in pixels lies in column ⌊x⌋ and row ⌊y⌋. A point outside the image lies in no mask. This is the
    measure of Where2Place (arXiv 2406.10721), except that masks are true or false, without the grey edges of JPEG.
    """
    height, width = mask.shape
    inside = [0 <= x < width and 0 <= y < height and bool(mask[int(y), int(x)]) for x, y in points]
    return sum(inside) / len(inside) if inside else 0.0


def deepest_point(mask: Bool[np.ndarray, "H W"]) -> tuple[float, float]:
    """The centre (x, y) of the mask's pixel that is furthest from the mask's edge; the image's border is an edge."""
    depth = np.asarray(distance_transform_edt(np.pad(mask, 1)))[1:-1, 1:-1]
    y, x = np.unravel_index(int(np.argmax(depth)), depth.shape)
    return float(x) + 0.5, float(y) + 0.5


# ---- paths ----


def frechet_distance(first: Points, second: Points) -> float:
    """The discrete Fréchet distance of two paths of N and M points (Eiter and Mannila, 1994).

    It is c(N, M), where c(i, j) = max(min(c(i−1, j), c(i−1, j−1), c(i, j−1)), d(p_i, q_j)). It is infinite if exactly
    one path is empty.
    """
    if not len(first) or not len(second):
        return 0.0 if len(first) == len(second) else math.inf
    row: list[float] = []
    for distances in cdist(first, second).tolist():
        above, row = row, []
        for j, distance in enumerate(distances):
            reached = [*above[max(j - 1, 0) : j + 1], *row[-1:]]
            row.append(max(min(reached, default=0.0), distance))
    return row[-1]


def hausdorff_distance(first: Points, second: Points) -> float:
    """max(max_p min_q d(p, q), max_q min_p d(p, q)) over points p, q of both sides; infinite if one side is empty."""
    if not len(first) or not len(second):
        return 0.0 if len(first) == len(second) else math.inf
    distances = cdist(first, second)
    return float(max(distances.min(axis=1).max(), distances.min(axis=0).max()))


def resample(points: Points, count: int) -> Float[np.ndarray, "count 2"]:
    """`count` points at equal steps from the path's start to its end; copies of the start if it has no length."""
    path = np.asarray(points, dtype=np.float64)
    steps = np.hypot(*np.diff(path, axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    at = np.linspace(0.0, along[-1], count)
    return np.stack([np.interp(at, along, path[:, axis]) for axis in (0, 1)], axis=1)


def path_rmse(first: Points, second: Points, count: int = 50) -> float:
    """√(mean_i |p_i − q_i|²) after both paths are resampled to `count` points; infinite if a path is empty.

    RoboBrain (arXiv 2502.21257) does not say how its RMSE aligns paths with different numbers of points; its evaluation
    uses path_rmse_by_index. Resampling makes the result independent of how many points a path was given.
    """
    if not len(first) or not len(second):
        return 0.0 if len(first) == len(second) else math.inf
    difference = resample(first, count) - resample(second, count)
    return float(np.sqrt(np.mean(np.sum(difference**2, axis=1))))


def path_rmse_by_index(first: Points, second: Points) -> float:
    """√(mean_i |p_i − q_i|²) over the first min(N, M) points of both paths; infinite if a path is empty.

    FlagEvalMM, BAAI's evaluation, computes ShareRobot's RMSE in this way.
    """
    if not len(first) or not len(second):
        return 0.0 if len(first) == len(second) else math.inf
    squares = [math.dist(p, q) ** 2 for p, q in zip(first, second, strict=False)]
    return math.sqrt(math.fsum(squares) / len(squares))


# ---- sets of boxes ----


def iou_matrix(first: Boxes, second: Boxes) -> Float[np.ndarray, "N M"]:
    """Intersection over union of each pair of continuous boxes; 0 where a box is empty or its corners are swapped."""
    overlap, first_areas, second_areas = _overlaps(first, second)
    union = first_areas[:, None] + second_areas[None, :] - overlap
    return np.divide(overlap, union, out=np.zeros_like(overlap), where=overlap > 0)


def covered_shares(boxes: Boxes, regions: Boxes) -> Float[np.ndarray, "N M"]:
    """The share of each box's area that each region covers, as COCO measures the overlap with a crowd region."""
    overlap, areas, _ = _overlaps(boxes, regions)
    return np.divide(overlap, areas[:, None], out=np.zeros_like(overlap), where=overlap > 0)


def _overlaps(first: Boxes, second: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The area of each pair's intersection, (N, M), and the areas of the first and the second boxes; 0 if empty."""
    a, b = (np.asarray(boxes, dtype=np.float64).reshape(-1, 4) for boxes in (first, second))
    corners = np.minimum(a[:, None, 2:], b[None, :, 2:]) - np.maximum(a[:, None, :2], b[None, :, :2])
    overlap = np.where((corners > 0).all(axis=2), corners.prod(axis=2), 0.0)
    first_areas, second_areas = ((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (a, b))
    return overlap, first_areas, second_areas


def match_boxes(
    boxes: Boxes,
    labels: Sequence[str],
    reference: Boxes,
    reference_labels: Sequence[str],
    threshold: float = 0.5,
) -> list[tuple[int, int, float]]:
    """Match boxes with reference boxes so that the sum of IoUs is greatest (Hungarian method).

    Returns (index of the box, index of the reference box, IoU) for each pair. Each box is in one pair at most. A pair
    must have equal labels and an IoU of at least `threshold`.
    """
    if not len(boxes) or not len(reference):
        return []
    ious = iou_matrix(boxes, reference)
    same = np.array([[label == other for other in reference_labels] for label in labels])
    ious = np.where(same & (ious >= threshold), ious, 0.0)
    pairs = zip(*linear_sum_assignment(ious, maximize=True), strict=True)
    return [(int(i), int(j), float(ious[i, j])) for i, j in pairs if ious[i, j] > 0]


def detection_score(ious: Collection[float], num_boxes: int, num_reference: int) -> float:
    """F1 of a matching times the mean IoU of its pairs = 2 Σ IoU / (boxes + reference boxes), from 0 to 1.

    The matching that match_boxes finds has the greatest score of all matchings. Each box that matches nothing lowers
    the score. It is 1 if there are neither boxes nor reference boxes.
    """
    total = num_boxes + num_reference
    return 2 * math.fsum(ious) / total if total else 1.0


# ---- heat maps ----

EPSILON = 1e-12  # in the formulas of AGD20K's evaluation, wherever they divide or take a logarithm


def heat_map(points: Points, shape: tuple[int, int], sigma: float) -> Float[np.ndarray, "H W"]:
    """For each pixel, the maximum over the points of exp(−d²/2σ²); 0 everywhere if there are no points.

    d is the distance from the point to the pixel's centre. The map is a maximum and not a sum, so repeating a point
    changes nothing.
    """
    height, width = shape
    result = np.zeros(shape)
    columns, rows = np.arange(width) + 0.5, np.arange(height) + 0.5
    for x, y in points:
        by_row, by_column = (np.exp(-((at - p) ** 2) / (2 * sigma**2)) for at, p in ((rows, y), (columns, x)))
        np.maximum(result, by_row[:, None] * by_column[None, :], out=result)
    return result


def resized_map(values: Float[np.ndarray, "H W"], shape: tuple[int, int]) -> Float[np.ndarray, "rows columns"]:
    """The map on a grid of another `shape`, by bilinear interpolation between the centres of its pixels.

    Values at the edge continue outside. Shrinking does not average, like OpenCV's INTER_LINEAR, which AGD20K's
    evaluation uses.
    """
    rows, columns = ((np.arange(new) + 0.5) * old / new - 0.5 for new, old in zip(shape, values.shape, strict=True))
    at = np.meshgrid(rows, columns, indexing="ij")
    return map_coordinates(values, at, order=1, mode="nearest", output=np.float64)


def kl_divergence(predicted: Float[np.ndarray, "H W"], reference: Float[np.ndarray, "H W"]) -> float:
    """KLD = Σ q log(q / (p + ε) + ε), where p and q are the predicted and the reference map over their sums + ε.

    AGD20K's evaluation computes it so (Cross-View-AG, arXiv 2203.09905). An empty prediction has p = 0 everywhere.
    """
    p, q = (values / (values.sum() + EPSILON) for values in (predicted, reference))
    return float(np.sum(q * np.log(q / (p + EPSILON) + EPSILON)))


def similarity(predicted: Float[np.ndarray, "H W"], reference: Float[np.ndarray, "H W"]) -> float:
    """SIM = Σ min(p, q), from 0 to 1, where p and q are the maps over their sums + ε, as in AGD20K's evaluation."""
    p, q = (values / (values.sum() + EPSILON) for values in (predicted, reference))
    return float(np.minimum(p, q).sum())


def scanpath_saliency(predicted: Float[np.ndarray, "H W"], reference: Float[np.ndarray, "H W"]) -> float:
    """NSS: the mean of (p − mean p) / (std p + ε) over the pixels where the reference, scaled to 0…1, is above 0.1.

    AGD20K's evaluation computes it so. The ε makes it 0 for a constant prediction p.
    """
    standard = (predicted - predicted.mean()) / (predicted.std() + EPSILON)
    spread = reference.max() - reference.min()
    fixated = (reference - reference.min()) / (spread + EPSILON) > 0.1
    return float(np.sum(standard * fixated) / (fixated.sum() + EPSILON * fixated.size))
