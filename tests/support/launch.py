"""`accelerate launch` as a reader of the pages types it; the launcher itself runs in the test's process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command, launch_command_parser

from support.pages import ROOT

Launch = Callable[..., tuple[str, str]]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Launch:
    """Runs an `accelerate launch` command in a folder; its output and its errors."""

    def launch(folder: Path, command: list[str], *more: str) -> tuple[str, str]:
        assert command[:2] == ["accelerate", "launch"]
        monkeypatch.chdir(folder)
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        launch_command(launch_command_parser().parse_args([*command[2:], *more]))
        return capfd.readouterr()

    return launch
