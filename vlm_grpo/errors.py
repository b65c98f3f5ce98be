"""The old name of `vlm_grpo.common.errors`, kept for one release."""

from vlm_grpo.common.errors import PeerError, UserError

__all__ = ["PeerError", "UserError"]
