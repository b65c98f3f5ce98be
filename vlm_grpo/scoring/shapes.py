"""Pure parts of rewards and metrics for points, paths, sets of boxes and heat maps.

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
    """The share of points that lie in the mask, 0 where there are none; denominator: the points.

    A point (x, y) in pixels lies in column ⌊x⌋ and row ⌊y⌋; outside the image it lies in no mask. As Where2Place
    counts (arXiv 2406.10721), but for its grey values at the edges of JPEG masks: a mask here is true or false.
    """
    height, width = mask.shape
    inside = [0 <= x < width and 0 <= y < height and bool(mask[int(y), int(x)]) for x, y in points]
    return sum(inside) / len(inside) if inside else 0.0


def deepest_point(mask: Bool[np.ndarray, "H W"]) -> tuple[float, float]:
    """The centre of the pixel of the mask that is furthest from its edge; the image's border counts as edge."""
    depth = np.asarray(distance_transform_edt(np.pad(mask, 1)))[1:-1, 1:-1]
    y, x = np.unravel_index(int(np.argmax(depth)), depth.shape)
    return float(x) + 0.5, float(y) + 0.5


# ---- paths ----


def frechet_distance(first: Points, second: Points) -> float:
    """The discrete Fréchet distance of two paths of N and M points:

    c(i, j) = max(min(c(i−1, j), c(i−1, j−1), c(i, j−1)), d(p_i, q_j)), and the result is c(N, M)
    (Eiter and Mannila, 1994), row by row, without recursion. Infinite if one path is empty and the other is not.
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
    """max(sup_p inf_q d(p, q), sup_q inf_p d(p, q)) over the points; infinite if just one side is empty."""
    if not len(first) or not len(second):
        return 0.0 if len(first) == len(second) else math.inf
    distances = cdist(first, second)
    return float(max(distances.min(axis=1).max(), distances.min(axis=0).max()))


def resample(points: Points, count: int) -> Float[np.ndarray, "count 2"]:
    """`count` points at equal steps along the path, its ends among them; copies of its start if it has no length."""
    path = np.asarray(points, dtype=np.float64)
    steps = np.hypot(*np.diff(path, axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    at = np.linspace(0.0, along[-1], count)
    return np.stack([np.interp(at, along, path[:, axis]) for axis in (0, 1)], axis=1)


def path_rmse(first: Points, second: Points, count: int = 50) -> float:
    """√(mean_i |p_i − q_i|²) over `count` points, both paths resampled to as many along their length.

    RoboBrain (arXiv 2502.21257) does not say how its RMSE aligns paths of different counts (its evaluation does it as
    path_rmse_by_index); equal steps along the length do not depend on how many points a path was given. Infinite if one
    path is empty.
    """
    if not len(first) or not len(second):
        return 0.0 if len(first) == len(second) else math.inf
    difference = resample(first, count) - resample(second, count)
    return float(np.sqrt(np.mean(np.sum(difference**2, axis=1))))


def path_rmse_by_index(first: Points, second: Points) -> float:
    """√(mean_i |p_i − q_i|²) over the first min(N, M) points of both, what the longer path has more being left out.

    As FlagEvalMM, BAAI's evaluation, computes ShareRobot's RMSE. Infinite if one path is empty.
    """
    if not len(first) or not len(second):
        return 0.0 if len(first) == len(second) else math.inf
    squares = [math.dist(p, q) ** 2 for p, q in zip(first, second, strict=False)]
    return math.sqrt(math.fsum(squares) / len(squares))


# ---- sets of boxes ----


def iou_matrix(first: Boxes, second: Boxes) -> Float[np.ndarray, "N M"]:
    """Intersection over union of every pair of continuous boxes; 0 where a box is empty or its corners are swapped."""
    overlap, first_areas, second_areas = _overlaps(first, second)
    union = first_areas[:, None] + second_areas[None, :] - overlap
    return np.divide(overlap, union, out=np.zeros_like(overlap), where=overlap > 0)


def covered_shares(boxes: Boxes, regions: Boxes) -> Float[np.ndarray, "N M"]:
    """For every pair, the share of the box's area that the region covers: COCO's overlap with a crowd region."""
    overlap, areas, _ = _overlaps(boxes, regions)
    return np.divide(overlap, areas[:, None], out=np.zeros_like(overlap), where=overlap > 0)


def _overlaps(first: Boxes, second: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Area of every pair's intersection, 0 for empty boxes; areas of the first and of the second boxes."""
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
    """(box, reference box, IoU) of the pairs of equal label and an IoU of at least `threshold` that add up to most.

    Every box stands in one pair at most (the Hungarian method, on the IoU of the pairs that may be).
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

    So the matching of most IoU, which match_boxes finds, is the one of most score, and a box that matches nothing
    lowers it. 1 if there was nothing to find and nothing was found.
    """
    total = num_boxes + num_reference
    return 2 * math.fsum(ious) / total if total else 1.0


# ---- heat maps ----

EPSILON = 1e-12  # in the formulas of AGD20K's evaluation, wherever they divide or take a logarithm


def heat_map(points: Points, shape: tuple[int, int], sigma: float) -> Float[np.ndarray, "H W"]:
    """The greatest of the Gaussians exp(−d²/2σ²) around the points, d from the centres of the pixels; 0 without points.

    The greatest and not the sum, so that a point that stands twice changes nothing.
    """
    height, width = shape
    result = np.zeros(shape)
    columns, rows = np.arange(width) + 0.5, np.arange(height) + 0.5
    for x, y in points:
        by_row, by_column = (np.exp(-((at - p) ** 2) / (2 * sigma**2)) for at, p in ((rows, y), (columns, x)))
        np.maximum(result, by_row[:, None] * by_column[None, :], out=result)
    return result


def resized_map(values: Float[np.ndarray, "H W"], shape: tuple[int, int]) -> Float[np.ndarray, "rows columns"]:
    """The map on another grid, by bilinear interpolation between the centres of its pixels, its edge going on outside.

    As OpenCV's INTER_LINEAR, which AGD20K's evaluation uses: nothing is averaged where the map shrinks.
    """
    rows, columns = ((np.arange(new) + 0.5) * old / new - 0.5 for new, old in zip(shape, values.shape, strict=True))
    at = np.meshgrid(rows, columns, indexing="ij")
    return map_coordinates(values, at, order=1, mode="nearest", output=np.float64)


def kl_divergence(predicted: Float[np.ndarray, "H W"], reference: Float[np.ndarray, "H W"]) -> float:
    """KLD = Σ q log(q / (p + ε) + ε) of the maps divided by their sums + ε, p predicted and q reference.

    As AGD20K's evaluation computes it (Cross-View-AG, arXiv 2203.09905). An empty prediction has p = 0 everywhere.
    """
    p, q = (values / (values.sum() + EPSILON) for values in (predicted, reference))
    return float(np.sum(q * np.log(q / (p + EPSILON) + EPSILON)))


def similarity(predicted: Float[np.ndarray, "H W"], reference: Float[np.ndarray, "H W"]) -> float:
    """SIM = Σ min(p, q) of the maps divided by their sums + ε, from 0 to 1; as AGD20K's evaluation computes it."""
    p, q = (values / (values.sum() + EPSILON) for values in (predicted, reference))
    return float(np.minimum(p, q).sum())


def scanpath_saliency(predicted: Float[np.ndarray, "H W"], reference: Float[np.ndarray, "H W"]) -> float:
    """NSS: the mean of (p − mean p) / (std p + ε) over the pixels where the reference, scaled to 0…1, is above 0.1.

    As AGD20K's evaluation computes it; ε under the fraction makes it 0 for a prediction that is the same everywhere.
    """
    standard = (predicted - predicted.mean()) / (predicted.std() + EPSILON)
    spread = reference.max() - reference.min()
    fixated = (reference - reference.min()) / (spread + EPSILON) > 0.1
    return float(np.sum(standard * fixated) / (fixated.sum() + EPSILON * fixated.size))
