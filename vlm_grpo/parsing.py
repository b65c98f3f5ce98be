"""The old name of `vlm_grpo.scoring.parsing`, kept for one release."""

from vlm_grpo.scoring.parsing import Detection, Point, parse_detections, parse_points, parse_trajectory

__all__ = ["Detection", "Point", "parse_detections", "parse_points", "parse_trajectory"]
