"""Links between pages and to files work, and what the text names exists."""

import re
from pathlib import PurePosixPath

import yaml
from support.pages import DOCS, PAGES, ROOT, anchors, names, prose

from vlm_grpo.evaluation.jobs import EvaluateConfig
from vlm_grpo.experiment import ExperimentConfig
from vlm_grpo.sft import SftConfig
from vlm_grpo.train import TrainConfig

TOPS = ("vlm_grpo/", "tasks/", "data_scripts/", "configs/", "tests/", "docs/")


def test_links_lead_to_pages_files_and_headings() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, anchor = target.partition("#")
            file = ((ROOT / page).parent / path if path else ROOT / page).resolve()
            inside = page == "README.md" or file.is_relative_to(DOCS)  # the site has nothing else
            known = anchors(str(file.relative_to(ROOT))) if anchor and inside else {anchor}
            if not (target.startswith("https://") or (inside and file.exists() and anchor in known)):
                broken.append(f"{page}: {target}")
    assert broken == []


def test_files_that_the_text_names_exist() -> None:
    missing = [
        f"{page}: {name}"
        for page in PAGES
        for name in names(prose(page))
        if name.startswith(TOPS) and not (ROOT / name).exists()
    ]
    assert missing == []


def test_options_that_the_text_sets_exist() -> None:
    programs = (TrainConfig, EvaluateConfig, SftConfig, ExperimentConfig)
    options = {option for kind in programs for option in kind.__dataclass_fields__}
    settings = {
        word.partition("=")[0].partition(".")[0]
        for page in PAGES
        for name in names(prose(page))
        for word in name.split()
        if re.fullmatch(r"[a-z_.*]+=\S*", word)
    }
    known = {"key", "config", "help", "out", "ratio_of"}  # the last is a field of an objective
    of_tasks = {"data", "dataset", "annotations", "images", "questions", "split", "source", "root", "needs"}
    assert settings - options <= known | of_tasks


def test_the_site_has_every_page_and_nothing_from_a_network() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed: list[str] = []
    for entry in config["nav"]:
        [pages] = entry.values()
        listed += [pages] if isinstance(pages, str) else pages
    assert sorted(listed) == sorted(str(PurePosixPath(page).relative_to("docs")) for page in PAGES if "docs/" in page)
    assert config["theme"]["font"] is False and "extra_javascript" not in config
    assert all((DOCS / name).is_file() for name in config["extra_css"])


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[\w/]+\.md)", PAGES["README.md"]))
    assert linked == {page for page in PAGES if page.startswith("docs/")} - {"docs/index.md"}
