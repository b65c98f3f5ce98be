"""The shipped tiny model: a real Qwen2.5-VL of about a million weights, made by data_scripts/build_tiny.py."""

from pathlib import Path

TINY_PATH = Path(__file__).parent
