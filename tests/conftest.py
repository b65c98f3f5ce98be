"""What every test runs under."""

import os

# Nothing in the tests may ask a model hub or draw progress bars of other libraries
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import types
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

INTEGRATION = Path(__file__).parent / "integration"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every integration test slow that is not marked quick; skip tests marked gpu where there is none."""
    for item in items:
        if INTEGRATION in item.path.parents and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_test() -> None:
    torch.manual_seed(0)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5 runs its delta rule and norms in float32 whatever its weights are; here they follow the weights."""
    wide = types.SimpleNamespace(**vars(torch))
    wide.float32 = torch.float64
    monkeypatch.setattr(modeling_qwen3_5, "torch", wide)
    narrow = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else narrow(self))
