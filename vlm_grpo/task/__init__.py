"""The interface of a task author: samples, rewards, the task adapter, and functions that find and check an adapter.

It may import common and scoring.
"""

from vlm_grpo.common.errors import UserError
from vlm_grpo.task.check import check_samples, check_task, score
from vlm_grpo.task.find import find_task, known_tasks
from vlm_grpo.task.interface import (
    LazySamples,
    Reward,
    Sample,
    Samples,
    TaskAdapter,
    Tasks,
    by_name,
    describe,
    groups_of,
    metric_terms,
    task_name,
)

__all__ = [
    "LazySamples",
    "Reward",
    "Sample",
    "Samples",
    "TaskAdapter",
    "Tasks",
    "UserError",
    "by_name",
    "check_samples",
    "check_task",
    "describe",
    "find_task",
    "groups_of",
    "known_tasks",
    "metric_terms",
    "score",
    "task_name",
]
