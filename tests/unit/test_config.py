"""Options: precedence, and one clear message for everything that cannot be used."""

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlm_grpo.common.config import layered_config, load_config, resolved_yaml
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.option_help import help_text, option_docs
from vlm_grpo.common.options import Range, check_ranges
from vlm_grpo.train import TrainConfig


@dataclass
class SamplingOptions:
    """How answers are drawn."""

    # Thoughts per prompt
    num_thoughts: int = 4
    temperature: float = 1.0
    # Cuts the tail of the distribution;
    # null leaves it whole
    top_k: int | None = None


@dataclass
class RunOptions:
    """Where things go."""

    output_dir: str = "runs/x"
    system_prompt: str | None = None
    loss_type: Literal["grpo", "none"] = "grpo"
    resume_from_checkpoint: bool | str | None = None
    bf16: bool = False
    target_modules: list[str] = field(default_factory=list)


@dataclass
class Options(SamplingOptions, RunOptions):
    ROOM = "program"
    FIRST = ("task_args", "num_thoughts")

    # Given to the task's constructor
    task_args: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-6


def message(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        load_config(Options, argv)
    return str(caught.value)


@pytest.fixture
def write_yaml(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "given.yaml"
        path.write_text(text)
        return f"config={path}"

    return write


def test_command_line_wins_over_file_wins_over_defaults(write_yaml) -> None:
    config = write_yaml("num_thoughts: 8\ntemperature: 0.7\ntask_args: {data: hub, seed: 3}\n")
    got = load_config(Options, ["temperature=0.5", config, "task_args.data=scenes"])
    assert got == Options(num_thoughts=8, temperature=0.5, task_args={"data": "scenes", "seed": 3})


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("num_thoughts=16", "num_thoughts", 16),
        ("learning_rate=1e-5", "learning_rate", 1e-5),
        ("learning_rate=1", "learning_rate", 1.0),
        ("top_k=null", "top_k", None),
        ("top_k=50", "top_k", 50),
        ("bf16=true", "bf16", True),
        ("output_dir=007", "output_dir", "007"),
        ("output_dir=runs/a=b", "output_dir", "runs/a=b"),
        ("system_prompt=Answer: yes, [1, 2]", "system_prompt", "Answer: yes, [1, 2]"),
        ("system_prompt=null", "system_prompt", None),
        ("system_prompt=", "system_prompt", ""),
        ("loss_type=none", "loss_type", "none"),
        ("resume_from_checkpoint=true", "resume_from_checkpoint", True),
        ("resume_from_checkpoint=runs/checkpoint-3", "resume_from_checkpoint", "runs/checkpoint-3"),
        ("resume_from_checkpoint=3", "resume_from_checkpoint", "3"),
        ("target_modules=[q_proj, v_proj]", "target_modules", ["q_proj", "v_proj"]),
        ("task_args.splits.train=a", "task_args", {"splits": {"train": "a"}}),
        ("task_args.n=3", "task_args", {"n": 3}),
        ("task_args={n: 3}", "task_args", {"n": 3}),
    ],
)
def test_arguments_have_the_type_of_their_option(argument: str, name: str, value: Any) -> None:
    got = getattr(load_config(Options, [argument]), name)
    assert got == value
    assert type(got) is type(value)


def test_misspelt_option_names_the_nearest_and_where_it_may_stand(write_yaml) -> None:
    said = message(["num_thougths=8"])
    assert "'num_thougths' on the command line" in said
    assert "nearest name is 'num_thoughts'" in said
    assert "config=FILE.yaml" in said
    config = write_yaml("temprature: 1")
    assert f"'temprature' in {config.removeprefix('config=')}" in message([config])
    assert "nearest name is 'task_args'" in message(["task_arg.data=x"])
    assert "nearest name is 'config'" in message(["confg=x.yaml"])


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("num_thoughts=many", ["'num_thoughts'", "'many'", "an integer"]),
        ("num_thoughts=8.5", ["8.5", "an integer"]),
        ("num_thoughts=true", ["True", "an integer"]),
        ("num_thoughts=null", ["None", "an integer"]),
        ("num_thoughts=", ["None", "an integer"]),
        ("top_k=x", ["'x'", "an integer or null"]),
        ("temperature=hot", ["'hot'", "a number"]),
        ("bf16=maybe", ["'maybe'", "true or false"]),
        ("bf16=2", ["2", "true or false"]),
        ("loss_type=ppo", ["'ppo'", "one of grpo, none"]),
        ("task_args=scenes", ["'scenes'", "a mapping"]),
        ("target_modules=q_proj", ["'q_proj'", "a list"]),
        ("temperature.x=1", ["'temperature.x'", "a number", "nothing below it"]),
    ],
)
def test_wrong_type_names_option_value_and_what_is_accepted(argument: str, expected: list[str]) -> None:
    said = message([argument])
    assert all(part in said for part in expected), said
    assert "on the command line" in said


@dataclass
class Ranges:
    """Options with a range."""

    # Counts something
    count: Annotated[int, Range(at_least=1)] = 4
    limit: Annotated[int | None, Range(at_least=1)] = None
    rate: Annotated[float, Range(at_least=0, below=math.inf)] = 0.1
    share: Annotated[float, Range(above=0, at_most=1)] = 1.0
    decay: Annotated[float, Range(at_least=0, below=1)] = 0.9
    clip: Annotated[float, Range(above=0)] = 1.0
    seed: Annotated[int, Range(at_least=0, at_most=9)] = 0


@pytest.mark.parametrize(
    ("argument", "accepted"),
    [
        ("count=0", "at least 1"),
        ("limit=-3", "at least 1 or null"),
        ("rate=-0.5", "at least 0 and finite"),
        ("rate=inf", "at least 0 and finite"),
        ("rate=nan", "at least 0 and finite"),
        ("share=0.0", "above 0 and at most 1"),
        ("share=1.5", "above 0 and at most 1"),
        ("decay=1.0", "at least 0 and below 1"),
        ("clip=nan", "above 0"),
        ("seed=10", "from 0 to 9"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range_and_where_it_stands(argument: str, accepted: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(Ranges, [argument])
    assert str(caught.value) == f"{argument}: must be {accepted} (on the command line)"
    name, value = argument.split("=")
    with pytest.raises(UserError, match=rf"{name}=.*in a\.yaml, base"):
        layered_config(
            Ranges, None, [({name: value if "." in value or "n" in value else int(value)}, "in a.yaml, base")]
        )
    with pytest.raises(UserError, match=re.escape(f"{argument}: must be {accepted}")):
        check_ranges(Ranges(**{name: float(value) if not value.lstrip("-").isdigit() else int(value)}))


def test_values_on_the_border_of_a_range_are_accepted() -> None:
    given = ["count=1", "limit=null", "rate=0", "share=1", "decay=0", "clip=inf", "seed=9"]
    assert load_config(Ranges, given) == Ranges(1, None, 0.0, 1.0, 0.0, math.inf, 9)


def test_help_says_the_range() -> None:
    printed = help_text(Ranges)
    for words in (
        "# Counts something [an integer of at least 1]\ncount: 4\n",
        "# [an integer of at least 1 or null]\nlimit: null\n",
        "# [a number above 0 and at most 1]\nshare: 1.0\n",
        "# [an integer from 0 to 9]\nseed: 0",
    ):
        assert words in printed


def test_help_begins_with_what_everyone_needs_and_goes_on_by_rooms() -> None:
    lines = help_text(Options).splitlines()
    assert "# ==== What everyone needs ====" in lines[:5] and "# ==== program ====" in lines
    names = [line.partition(":")[0] for line in lines if line and not line.startswith(("#", " ", "-"))]
    assert names[:2] == ["task_args", "num_thoughts"] and names[-1] == "learning_rate"


@pytest.mark.parametrize("line", ["output_dir: 7", "output_dir: yes", "system_prompt: 1.5", "bf16: 1"])
def test_yaml_values_are_not_converted_silently(write_yaml, line: str) -> None:
    said = message([write_yaml(line)])
    assert line.partition(":")[0] in said and "given.yaml" in said


@pytest.mark.parametrize("argument", ["task", "--num_thoughts", "--num-thoughts=8", "8", "=8", "task_args.=1", "a b=1"])
def test_malformed_argument_is_refused(argument: str) -> None:
    assert "not of the form key=value" in message([argument])


def test_options_in_the_style_of_other_trainers_get_a_hint() -> None:
    assert "write num_thoughts=8" in message(["--num-thoughts=8"])
    assert "write num_thoughts=VALUE" in message(["--num_thoughts", "8"])


def test_duplicates_are_refused(write_yaml) -> None:
    assert "'num_thoughts' is given twice on the command line: '1' and '2'" in message(
        ["num_thoughts=1", "num_thoughts=2"]
    )
    assert "'config' is given twice" in message([write_yaml("bf16: true"), "config=other.yaml"])
    assert "duplicate key" in message([write_yaml("bf16: true\nbf16: false")])


def test_missing_and_unreadable_files_are_named(tmp_path: Path, write_yaml) -> None:
    assert "no such file" in message([f"config={tmp_path}/absent.yaml"])
    assert "cannot be read" in message([f"config={tmp_path}"])
    assert "not valid YAML" in message([write_yaml("a: [1")])
    assert "must hold lines" in message([write_yaml("- 1")])
    assert "command line only" in message([write_yaml("config: other.yaml")])
    assert "given.yaml" in message([write_yaml("just text")])
    assert load_config(Options, [write_yaml("# nothing yet\n")]) == Options()


def test_yaml_runs_no_code(tmp_path: Path, write_yaml) -> None:
    witness = tmp_path / "witness"
    attack = f"!!python/object/apply:os.mkdir ['{witness}']"
    assert "not valid YAML" in message([write_yaml(f"task_args: {{x: {attack}}}")])
    assert load_config(Options, [f"task_args.x={attack}"]).task_args == {"x": attack}
    assert not witness.exists()


def test_unresolvable_reference_is_refused() -> None:
    assert "'output_dir'" in message(["output_dir=${nowhere}"])


@pytest.mark.parametrize("argument", ["--help", "-h", "help=true"])
def test_help_prints_every_option_with_default_and_comment(argument: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_config(Options, ["nonsense", argument])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert printed.strip() == help_text(Options)
    assert "# Thoughts per prompt [an integer]\nnum_thoughts: 4\n" in printed
    assert "# == How answers are drawn. ==" in printed


def test_help_is_a_configuration_file_of_the_defaults(write_yaml) -> None:
    assert set(yaml.safe_load(help_text(Options))) == {option.name for option in fields(Options)}
    assert load_config(Options, [write_yaml(help_text(Options))]) == Options()


def test_comments_above_an_option_are_its_documentation() -> None:
    assert option_docs(SamplingOptions) == {
        "num_thoughts": "Thoughts per prompt",
        "temperature": "",
        "top_k": "Cuts the tail of the distribution; null leaves it whole",
    }
    assert option_docs(Options)["task_args"] == "Given to the task's constructor"


text = st.text(st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="$\x85\u2028\u2029"))
options = st.builds(
    Options,
    num_thoughts=st.integers(),
    temperature=st.floats(allow_nan=False),
    top_k=st.none() | st.integers(),
    output_dir=text,
    system_prompt=st.none() | text,
    loss_type=st.sampled_from(["grpo", "none"]),
    resume_from_checkpoint=st.none() | st.booleans() | text,
    bf16=st.booleans(),
    target_modules=st.lists(text),
    task_args=st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), st.integers() | text),
    learning_rate=st.floats(allow_nan=False),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=options)
def test_resolved_yaml_reads_back_as_the_same_configuration(tmp_path: Path, config: Options) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load_config(Options, [f"config={path}"]) == config
    assert list(yaml.safe_load(path.read_text())) == [option.name for option in fields(Options)]


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_are_accepted(path: Path) -> None:
    load_config(TrainConfig, [f"config={path}"])


def test_the_file_of_all_options_is_what_help_prints() -> None:
    shipped = (Path(__file__).parents[2] / "configs" / "forkme.yaml").read_text()
    assert shipped == help_text(TrainConfig) + "\n", (
        "rebuild it: accelerate launch -m vlm_grpo.train help=true > configs/forkme.yaml"
    )


def test_every_option_of_the_trainer_is_declared_once_and_documented() -> None:
    owners = [owner for owner in TrainConfig.__mro__ if owner is not object]
    documents = [document for owner in owners for document in option_docs(owner).items()]
    declared = [name for name, _ in documents]
    assert [name for name, comment in documents if not comment] == []
    assert len(declared) == len(set(declared)), "two owners declare the same option: one would silently win"
    assert len(declared) <= 90, "about 80 options in all: derive one, or remove one"
