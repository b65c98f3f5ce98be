"""TextVQA: questions about text in photographs, each answered by ten people."""

from collections.abc import Callable
from typing import Any, ClassVar

from tasks._vqa import SoftAccuracy


class TextVQA(SoftAccuracy):
    """Soft accuracy over the ten people's answers."""

    script: ClassVar[str] = "textvqa"
    repository: ClassVar[str | None] = "lmms-lab/textvqa"
    id_column: ClassVar[str | None] = "question_id"

    def of_hub(self) -> Callable[..., Any]:
        from data_scripts.textvqa import of_hub

        return of_hub
