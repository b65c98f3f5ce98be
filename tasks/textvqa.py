"""TextVQA: questions about text in photographs, each answered by ten people."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tasks._hub_rows import Asked, of_textvqa
from tasks._vqa import SoftAccuracy


class TextVQA(SoftAccuracy):
    """The reward is the soft accuracy over the ten people's answers."""

    script: ClassVar[str] = "textvqa"
    repository: ClassVar[str | None] = "lmms-lab/textvqa"
    id_column: ClassVar[str | None] = "question_id"

    def of_hub(self, split: str, number: int, row: Mapping[str, Any]) -> Asked:
        return of_textvqa(row)
