"""The old name of `vlm_grpo.scoring.quantities`, kept for one release."""

from vlm_grpo.scoring.quantities import MOST_MARKS, extract_number, number_equal

__all__ = ["MOST_MARKS", "extract_number", "number_equal"]
