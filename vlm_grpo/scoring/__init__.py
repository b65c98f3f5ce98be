"""Pure functions for rewards: parsers of answers, and measures that compare an answer with a reference.

It may import common.
"""

from vlm_grpo.common.errors import UserError
from vlm_grpo.scoring.answers import answer_span, box_iou, exact_match, extract_answer, parse_box
from vlm_grpo.scoring.located import Box
from vlm_grpo.scoring.vqa import (
    anls,
    edit_distance,
    normalise_vqa,
    official_vqa_accuracy,
    relaxed_accuracy,
    soft_accuracy,
    strict_anls,
    vqa_accuracy,
    vqa_reward,
)

__all__ = [
    "Box",
    "UserError",
    "anls",
    "answer_span",
    "box_iou",
    "edit_distance",
    "exact_match",
    "extract_answer",
    "normalise_vqa",
    "official_vqa_accuracy",
    "parse_box",
    "relaxed_accuracy",
    "soft_accuracy",
    "strict_anls",
    "vqa_accuracy",
    "vqa_reward",
]
