"""The old name of `vlm_grpo.scoring.mathematics`, kept for one release."""

from vlm_grpo.scoring.mathematics import (
    MOST_CHARACTERS,
    chosen_option,
    final_expression,
    load_math_verify,
    math_equal,
    option_letters,
)

__all__ = ["MOST_CHARACTERS", "chosen_option", "final_expression", "load_math_verify", "math_equal", "option_letters"]
