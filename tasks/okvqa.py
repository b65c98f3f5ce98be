"""OK-VQA: questions about photographs that need outside knowledge, with ten answers each."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tasks._hub_rows import Asked, of_okvqa
from tasks._vqa import SoftAccuracy


class OKVQA(SoftAccuracy):
    """The soft accuracy over the ten answers; metrics are also reported per category, as question_type/…."""

    script: ClassVar[str] = "okvqa"
    repository: ClassVar[str | None] = "lmms-lab/OK-VQA"
    hub_splits: ClassVar[Mapping[str, str]] = {"val": "val2014"}
    id_column: ClassVar[str | None] = "question_id"

    def of_hub(self, split: str, number: int, row: Mapping[str, Any]) -> Asked:
        return of_okvqa(row)
