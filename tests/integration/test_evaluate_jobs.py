"""Several tasks and splits in one call: their files, the table over all, drawn answers, and going on after a kill."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from support.forks import KILLED, Forks, Kill, forks

from tasks.refcoco import RefCOCO, Referent
from vlm_grpo.common.config import load_config
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import CPU
from vlm_grpo.evaluate import main
from vlm_grpo.evaluation.answering import generator, samples_digest, score_predictions
from vlm_grpo.evaluation.jobs import EvaluateConfig, chosen_splits
from vlm_grpo.evaluation.predictions import Journal, Prediction, read_predictions, take_up
from vlm_grpo.task import Sample
from vlm_grpo.tiny import TINY_PATH

# Batches of two; every answer that a model gives is noted; rewards tell answers apart
TASK = """
import os
import zlib
import vlm_grpo.evaluation.answering
from tasks.refcoco import RefCOCO
from vlm_grpo.task import Reward

vlm_grpo.evaluation.answering.BATCH = 2
plain = vlm_grpo.evaluation.answering._predictions

def noting(trees):
    predictions = plain(trees)
    with open("answered.txt", "a") as file:
        file.write("".join(prediction.id + chr(10) for prediction in predictions))
    return predictions

vlm_grpo.evaluation.answering._predictions = noting

class Noted(RefCOCO):
    def reward(self, sample, answer):
        if os.path.exists("crash"):
            raise KeyError("a mistake")
        value = zlib.crc32(answer.encode("utf-8", "replace")) % 101 / 100
        value = value / 2 if os.path.exists("halve") else value
        return Reward(value, {"iou": value, "acc@0.5": float(value > 0.5), "parsed": 0.0})

    def official_files(self, samples, answers):
        return {"results.txt": "".join(f"{s.id}: {a!r}" + chr(10) for s, a in zip(samples, answers)).encode()}
"""
OPTIONS: dict[str, Any] = {
    **{"task": "[noted_task:Noted,other=noted_task:Noted]", "split": "[val,test]", "splits.other": "val"},
    **{"task_args": "{Noted: {data: scenes, limit: 7}, other: {data: scenes, limit: 5, seed: 1}}"},
    **{"max_thought_length": 6, "max_answer_length": 6, "bootstrap_samples": 50},
}
SAMPLE = {"decoding": "sample", "num_thoughts": 3, "num_answers": 2}
JOBS = ("Noted-val", "Noted-test", "other-val")
RESULTS = ("metrics.json", "predictions.jsonl", "results.txt")
FILES = (*RESULTS, "made_from.json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("jobs")) as started:
        (started.folder / "noted_task.py").write_text(TASK)
        yield started


def start(server: Forks, name: str, processes: int = 1, kill: Kill | None = None, **changes: Any) -> list[str]:
    """Runs an evaluation into the folder `name`; gives the id of the sample for each answer that a model gave."""
    (server.folder / "answered.txt").unlink(missing_ok=True)
    given = OPTIONS | {key.replace("__", "."): value for key, value in changes.items()} | {"output_dir": name}
    codes = server.run("evaluate", name, {k: v for k, v in given.items() if v is not None}, processes, kill)
    assert codes[0] == (KILLED if kill else 0), server.log(name)
    answered = server.folder / "answered.txt"
    return answered.read_text().splitlines() if answered.exists() else []


def refused(server: Forks, name: str, **changes: Any) -> str:
    """The message of an evaluation that is refused."""
    log = f"refused-{name}"
    given = OPTIONS | changes | {"output_dir": name}
    (server.folder / f"{log}.log").unlink(missing_ok=True)
    assert server.run("evaluate", log, {k: v for k, v in given.items() if v is not None}) == [2], server.log(log)
    return server.log(log)


def results(folder: Path) -> dict[str, bytes]:
    """All files of an evaluation but the options, which name its folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "evaluation.yaml"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


@pytest.fixture(scope="module")
def greedy(server: Forks) -> Path:
    start(server, "greedy")
    return server.folder / "greedy"


@pytest.fixture(scope="module")
def drawn(server: Forks) -> Path:
    start(server, "drawn", **SAMPLE)
    return server.folder / "drawn"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_each_job_has_its_files_and_all_have_one_table(server: Forks, greedy: Path) -> None:
    expected = {f"{job}/{name}" for job in JOBS for name in FILES} | {"summary.json", "summary.md"}
    assert set(results(greedy)) == expected, "and nothing of what was kept for going on"
    summary = json.loads((greedy / "summary.json").read_text())
    assert [(row["task"], row["split"], row["num_samples"]) for row in summary["rows"]] == [
        ("Noted", "val", 7),
        ("Noted", "test", 7),
        ("other", "val", 5),
    ]
    printed, markdown = server.log("greedy"), (greedy / "summary.md").read_text()
    for row, job in zip(summary["rows"], JOBS, strict=True):
        metrics = json.loads((greedy / job / "metrics.json").read_text())
        assert row["metric"] == "acc@0.5" and row["value"] == metrics["acc@0.5"]
        assert row["interval"] == metrics["intervals"]["acc@0.5"]
        assert row["interval"][0] <= row["value"] <= row["interval"][1]
        assert row["decoding"] == metrics["notes"]["decoding"] == "greedy, one thought, one answer"
        span = f"[{row['interval'][0]:.4f}, {row['interval'][1]:.4f}]"
        cells = [row["task"], row["split"], str(row["num_samples"]), "acc@0.5", f"{row['value']:.4f}", span]
        assert f"| {' | '.join(cells)} |" in markdown
        assert re.search(r"\s+".join(map(re.escape, cells)), printed)
        assert "IoU >= 0.5" in summary["notes"][job] and "50 resamples" in summary["notes"][job]
        assert set(metrics["intervals"]) == {"acc@0.5", "mean_iou", "parsed"}
    lines = (greedy / "other-val" / "results.txt").read_text().splitlines()
    assert lines == [f"{row['id']}: {row['answer']!r}" for row in rows(greedy / "other-val")]


def test_a_job_gives_what_it_gives_alone(server: Forks, greedy: Path) -> None:
    alone = {"task": "other=noted_task:Noted", "task_args": "{data: scenes, limit: 5, seed: 1}", "split": "val"}
    start(server, "alone", **alone, splits__other=None)
    found = results(server.folder / "alone")
    assert {name: found[name] for name in RESULTS} == {
        name: (greedy / "other-val" / name).read_bytes() for name in RESULTS
    }
    assert {"summary.json", "summary.md"} <= set(found), "the same files, in one folder"


@pytest.mark.parametrize("which", ["greedy", "drawn"])
def test_two_processes_give_the_files_of_one(server: Forks, which: str, request: pytest.FixtureRequest) -> None:
    one = request.getfixturevalue(which)
    start(server, f"{which}-2", processes=2, **(SAMPLE if which == "drawn" else {}))
    assert results(server.folder / f"{which}-2") == results(one)


def test_drawn_answers_do_not_depend_on_what_grows_beside_them(server: Forks, drawn: Path) -> None:
    start(server, "narrow", rollout_lanes=1, **SAMPLE)
    assert results(server.folder / "narrow") == results(drawn)
    start(server, "few", max_samples=3, **SAMPLE)
    for job in JOBS:
        assert rows(server.folder / "few" / job) == rows(drawn / job)[: 3 * 6]
    start(server, "other-seed", seed=1, max_samples=3, **SAMPLE)
    assert rows(server.folder / "other-seed" / JOBS[0]) != rows(drawn / JOBS[0])[: 3 * 6]
    first, second = (generator(CPU, 0, key).initial_seed() for key in ("a", "b"))
    assert first != second and first == generator(CPU, 0, "a").initial_seed() != generator(CPU, 1, "a").initial_seed()


def test_metrics_of_drawn_answers_follow_from_their_file(server: Forks, drawn: Path) -> None:
    metrics = json.loads((drawn / "Noted-val" / "metrics.json").read_text())
    every = rows(drawn / "Noted-val")
    places = [(row["thought_index"], row["answer_index"]) for row in every]
    assert places == [(i, j) for i in range(3) for j in range(2)] * 7
    by_sample = [every[6 * i : 6 * i + 6] for i in range(7)]
    assert all(
        len({row["thought"] for row in row6 if row["thought_index"] == i}) == 1 for row6 in by_sample for i in range(3)
    )

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def right(row: dict[str, Any]) -> bool:
        return row["parts"]["acc@0.5"] == 1

    assert metrics["acc@0.5"] == pytest.approx(mean([float(right(row)) for row in every])) == metrics["pass@1"]
    assert metrics["mean_iou"] == pytest.approx(mean([row["reward"] for row in every]))
    for k in (2, 4, 6):
        draws = [mean([float(any(map(right, draw))) for draw in combinations(row6, k)]) for row6 in by_sample]
        assert metrics[f"tree_pass@{k}"] == pytest.approx(mean(draws))
    assert {"pass@3", "maj@3", "tree_maj@6", "tree_maj_reward@6"} <= set(metrics)
    assert set(metrics["intervals"]) >= {"pass@3", "tree_pass@6", "maj@3", "mean_iou"}
    said = "sample, 3 thoughts × 2 answers, temperature 1, top_p 1, top_k 0, min_p 0, seed 0"
    assert metrics["notes"]["decoding"] == said and said in server.log("drawn")
    table = json.loads((drawn / "summary.json").read_text())["rows"]
    shown = [row["metric"] for row in table if (row["task"], row["split"]) == ("Noted", "val")]
    several = ["pass@1", "pass@2", "pass@3", "maj@3", "tree_pass@2", "tree_pass@4", "tree_pass@6", "tree_maj@6"]
    assert shown[0] == "acc@0.5" and sorted(shown[1:]) == sorted(several), "no reward, which the task has no metric of"
    assert {row["decoding"] for row in table} == {said}
    official = (drawn / "Noted-val" / "results.txt").read_text().splitlines()
    assert official == [f"{row6[0]['id']}: {row6[0]['answer']!r}" for row6 in by_sample], "of the first answers"


KILLS: dict[str, Kill] = {
    "before the first answer": ("vlm_grpo.evaluation.answering:_predictions", 1),
    "within a batch": ("vlm_grpo.evaluation.answering:_predictions", 6),
    "before a batch is kept": ("vlm_grpo.evaluation.predictions:Journal.append", 2),
    "before options are kept": ("vlm_grpo.evaluation.predictions:write_whole", 1),
    "in the second job": ("vlm_grpo.evaluation.answering:_predictions", 6),
    "before files of a job": ("vlm_grpo.evaluate:write_evaluation", 1),
    "between files of a job": ("vlm_grpo.evaluation.results:write_whole", 8),
    "before the table": ("vlm_grpo.evaluate:write_summary", 1),
    "within the table": ("vlm_grpo.evaluation.results:write_whole", 17),
    "before tidying": ("vlm_grpo.evaluate:finish", 1),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_evaluation_goes_on_and_answers_nothing_again(server: Forks, greedy: Path, moment: str) -> None:
    name = moment.replace(" ", "-")
    first = start(server, name, kill=KILLS[moment])
    kept = [
        prediction["id"]
        for path in (server.folder / name).glob("*/partial/rank-0.jsonl")
        for line in path.read_text().splitlines()
        for prediction in json.loads(line)
    ]
    assert len(set(first)) - len(kept) in range(3), "at most the batch at hand is lost"
    second = start(server, name)
    assert not set(second) & set(kept) and len(second) == 19 - len(kept)
    assert results(server.folder / name) == results(greedy)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_evaluation_that_goes_on_scores_all_answers_by_the_reward_of_today(
    server: Forks, greedy: Path, processes: int
) -> None:
    """The reward is halved, or mended, between a kill and going on."""
    halve, crash = server.folder / "halve", server.folder / "crash"
    name = f"rescored-{processes}"
    try:
        halve.touch()
        start(server, name, kill=("vlm_grpo.evaluation.predictions:Journal.append", 3))
        crash.touch()
        assert "KeyError: 'a mistake'" in refused(server, name)
    finally:
        halve.unlink(missing_ok=True)
        crash.unlink(missing_ok=True)
    assert len(start(server, name, processes)) == 19 - 4, "and nothing is answered again"
    assert results(server.folder / name) == results(greedy)


@pytest.mark.parametrize("processes", [(2, 2), (2, 1), (1, 2)])
def test_drawn_answers_go_on_with_any_number_of_processes(
    server: Forks, drawn: Path, processes: tuple[int, int]
) -> None:
    name = "drawn-{}-{}".format(*processes)
    first = start(server, name, processes[0], ("vlm_grpo.evaluation.predictions:Journal.append", 3), **SAMPLE)
    second = start(server, name, processes[1], **SAMPLE)
    assert len(first) >= 4 * 6 and len(second) <= (19 - 4) * 6
    assert results(server.folder / name) == results(drawn)


def test_a_line_that_a_kill_cut_off_is_answered_again(server: Forks, greedy: Path) -> None:
    start(server, "torn", kill=("vlm_grpo.evaluate:write_evaluation", 1))
    journal = server.folder / "torn" / "Noted-val" / "partial" / "rank-0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    second = start(server, "torn", kill=("vlm_grpo.evaluate:write_evaluation", 1))
    assert len(second) == 7 - 4
    third = start(server, "torn")
    assert len(third) == 7 + 5, "the job that was answered whole is not answered again"
    assert results(server.folder / "torn") == results(greedy)


def test_an_unfinished_evaluation_with_other_settings_is_refused(server: Forks, greedy: Path) -> None:
    start(server, "unfinished", kill=("vlm_grpo.evaluation.predictions:Journal.append", 3))
    before = results(server.folder / "unfinished")
    args = "{Noted: {data: scenes, limit: 7, seed: 2}, other: {data: scenes, limit: 5, seed: 1}}"
    for changes, words in (
        ({"max_answer_length": 5}, ["max_answer_length was 6, is now 5"]),
        ({"decoding": "sample"}, ["decoding was 'greedy', is now 'sample'"]),
        ({"dtype": "bfloat16"}, ["dtype was 'auto', is now 'bfloat16'"]),
        ({"task_args": args}, ["task_args was", "'seed': 2"]),
        ({"max_pixels": 6272}, ["max_pixels was None, is now 6272"]),
        ({"max_prompt_length": 300, "on_long_prompt": "skip"}, ["max_prompt_length was None, is now 300"]),
    ):
        said = refused(server, "unfinished", **changes)
        assert all(
            word in said for word in [*words, "unfinished/Noted-val/partial", "delete that folder", "output_dir"]
        )
        assert results(server.folder / "unfinished") == before
    # What no answer depends on may differ
    skip = {"on_bad_sample": "skip", "on_long_prompt": "skip"}
    start(server, "unfinished", rollout_lanes=3, bootstrap_samples=50, seed=1, **skip)
    same = results(server.folder / "unfinished")
    assert {name: same[name] for name in same if name.endswith("predictions.jsonl")} == {
        name: content for name, content in results(greedy).items() if name.endswith("predictions.jsonl")
    }
    # A finished evaluation is simply made anew
    assert len(start(server, "unfinished")) == 19


def test_an_unfinished_evaluation_goes_on_with_a_greater_length_of_prompts(server: Forks, greedy: Path) -> None:
    kill = ("vlm_grpo.evaluation.predictions:Journal.append", 3)
    start(server, "longer", kill=kill, max_prompt_length=200)
    start(server, "longer", kill=kill, max_prompt_length=300)
    said = refused(server, "longer", max_prompt_length=200, on_long_prompt="skip")
    assert "max_prompt_length was 300, is now 200" in said
    assert 0 < len(start(server, "longer", max_prompt_length=300)) < 19, "of 19 answers some were there"
    files = ("Noted-val/predictions.jsonl", "other-val/predictions.jsonl")
    assert [results(server.folder / "longer")[name] for name in files] == [results(greedy)[name] for name in files]


def test_a_finished_evaluation_with_other_settings_is_kept(server: Forks, greedy: Path, drawn: Path) -> None:
    shutil.copytree(greedy, server.folder / "finished")
    retrained = server.folder / "retrained"
    shutil.copytree(TINY_PATH, retrained)
    weights = load_file(retrained / "model.safetensors")
    weights["visual.merger.mlp.0.bias"] += 0.5
    save_file(weights, retrained / "model.safetensors", {"format": "pt"})
    args = "{Noted: {data: scenes, limit: 7}, other: {data: scenes, limit: 5, seed: 2}}"
    for changes, words in (
        ({"model": "retrained"}, ["finished/Noted-val: ", "model's weights was"]),
        ({"decoding": "sample"}, ["finished/Noted-val: ", "decoding was 'greedy', is now 'sample'"]),
        ({"max_answer_length": 5}, ["finished/Noted-val: ", "max_answer_length was 6, is now 5"]),
        ({"predictions": "drawn"}, ["finished/Noted-val: ", "predictions (a digest of the file) was None, is now '"]),
        ({"task_args": args}, ["finished/other-val: ", "'seed': 2"]),  # before anything is answered
        ({"splits.other": "test"}, ["output_dir=finished: ", "summary.json", "other-val", "other-test"]),
    ):
        said = refused(server, "finished", **changes)
        assert all(word in said for word in [*words, "set another output_dir"]), said
        assert results(server.folder / "finished") == results(greedy), "nothing is lost, and nothing was begun"


def test_the_folder_of_one_model_is_not_that_of_another(server: Forks) -> None:
    alone = {"task": "noted_task:Noted", "task_args": "{data: scenes, limit: 2}", "split": "val", "splits.other": None}
    shutil.copytree(TINY_PATH, server.folder / "runs" / "mine")
    for changes in (
        {"model": "tiny"},
        {"model": "runs/mine"},
        {"predictions": "evaluations/Noted-val-tiny/predictions.jsonl"},
    ):
        given = {k: v for k, v in (OPTIONS | alone | changes).items() if v is not None}
        assert server.run("evaluate", "folders", given) == [0], server.log("folders")
    found = {path.name: path for path in (server.folder / "evaluations").iterdir()}
    assert set(found) == {"Noted-val-tiny", "Noted-val-runs-mine", "Noted-val-Noted-val-tiny-predictions"}
    for name, model in (("Noted-val-tiny", "tiny"), ("Noted-val-runs-mine", "runs/mine")):
        assert json.loads((found[name] / "metrics.json").read_text())["notes"]["model"] == model


def test_data_that_changed_under_the_same_ids_is_noticed(server: Forks) -> None:
    data = server.folder / "changing"
    data.mkdir()
    for name in "abcdef":
        Image.new("RGB", (64, 48), "red").save(data / f"{name}.png")

    def write(**of_last: Any) -> None:
        entries = [
            {"id": name, "image": f"{name}.png", "expression": f"thing {name}", "bbox_xyxy": [1, 2, 30, 40]}
            for name in "abcdef"
        ]
        (data / "val.jsonl").write_text(
            "\n".join(json.dumps(entry) for entry in [*entries[:-1], entries[-1] | of_last])
        )

    alone = {"task": "noted_task:Noted", "task_args": "{data: changing}", "split": "val", "splits.other": None}
    write()
    start(server, "data", kill=("vlm_grpo.evaluation.predictions:Journal.append", 2), **alone)
    for change in ({"expression": "another thing"}, {"bbox_xyxy": [1, 2, 30, 41]}, {"id": "z"}):
        write(**change)
        said = refused(server, "data", **alone)
        assert "data (a digest of ids, questions and targets) was" in said and "data/partial" in said, said
        assert "task_args was" not in said
    write()
    assert len(start(server, "data", **alone)) == 4, "with the same data it goes on"


def test_the_digest_of_samples_sees_questions_and_targets_and_is_the_same_in_every_process() -> None:
    def digest(question: str, target: Any) -> str:
        return samples_digest([Sample("a", [], question, target)])

    target = {"box": Referent((1.0, 2.0, 3.0, 4.0)), "words": ["a", Fraction(1, 3)], "of": Path("x"), "map": object()}
    same = {**target, "map": object()}  # the address of an object says nothing
    assert digest("q", target) == digest("q", same)
    others = [digest("p", target), digest("q", {**target, "box": Referent((1.0, 2.0, 3.0, 5.0))})]
    others += [digest("q", {**target, "words": ["a", Fraction(1, 4)]}), digest("q", {**target, "of": Path("y")})]
    assert len({digest("q", target), *others}) == 5


def test_what_tidying_left_behind_is_never_taken_up(tmp_path: Path) -> None:
    Journal(tmp_path, 3).path.parent.mkdir()
    Journal(tmp_path, 3).append([Prediction("a", "stale", 1.0, {})])
    assert take_up(tmp_path, {"split": "val"}) == []
    assert take_up(tmp_path, {"split": "val"}) == []
    kept = [Prediction("a", "\ud800\u2028", None, {}, "x", "y", 1, 2), Prediction("b", "", 0.5, {"iou": 0.5})]
    Journal(tmp_path, 0).append(kept[:1])
    Journal(tmp_path, 1).append(kept[1:])
    assert take_up(tmp_path, {"split": "val"}) == [replace(one, reward=None, parts={}) for one in kept]
    with pytest.raises(UserError, match="split was 'val', is now 'test'"):
        take_up(tmp_path, {"split": "test"})


# ---- predictions ----


def scored(*arguments: str) -> None:
    args = "task_args={refcoco: {data: scenes, limit: 7}, other: {data: scenes, limit: 5, seed: 1}}"
    main(["task=[refcoco,other=refcoco]", args, "split=[val,test]", "splits.other=[val]", *arguments])


def test_a_folder_of_predictions_is_scored_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_grpo.evaluate.load_vlm", lambda *_: pytest.fail("a model was loaded"))
    answers, out = tmp_path / "answers", tmp_path / "out"
    answers.mkdir()
    for name, seed, limit in (("refcoco-val", 0, 7), ("refcoco-test", 0, 7), ("other-val", 1, 5)):
        task = RefCOCO(data="scenes", limit=limit, seed=seed)
        samples = list(task.samples(name.rpartition("-")[2]))
        lines = [{"id": s.id, "answer": task.reference_answer(s)} for s in samples[:-1]]  # one is missing in each
        (answers / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    scored(f"predictions={answers}", f"output_dir={out}", "bootstrap_samples=20")
    for name, total in (("refcoco-val", 7), ("refcoco-test", 7), ("other-val", 5)):
        metrics = json.loads((out / name / "metrics.json").read_text())
        assert metrics["acc@0.5"] == pytest.approx((total - 1) / total) and metrics["num_missing"] == 1
        assert metrics["notes"]["decoding"] == f"none: answers of {answers}/{name}.jsonl, which lacks 1"
    # The folder of an evaluation is one of predictions
    again = tmp_path / "again"
    scored(f"predictions={out}", f"output_dir={again}", "bootstrap_samples=20")
    for name in ("refcoco-val", "refcoco-test", "other-val"):
        assert (again / name / "predictions.jsonl").read_bytes() == (out / name / "predictions.jsonl").read_bytes()
    (answers / "other-val.jsonl").unlink()
    with pytest.raises(UserError, match=r"neither other-val.jsonl nor other-val/predictions.jsonl; it has refcoco-"):
        scored(f"predictions={answers}", f"output_dir={again}")
    with pytest.raises(UserError, match=r"for several tasks or splits, name a folder .* such as refcoco-val.jsonl"):
        scored(f"predictions={answers}/refcoco-val.jsonl", f"output_dir={again}")


def test_two_processes_score_the_predictions_of_one(server: Forks) -> None:
    task = RefCOCO(data="scenes", limit=7)
    lines = [{"id": s.id, "answer": f"{i} words"} for i, s in enumerate(task.samples("val"))]
    (server.folder / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {
        "task": "noted_task:Noted",
        "task_args": "{data: scenes, limit: 7}",
        "split": "val",
        "splits__other": None,
    }
    for processes in (1, 2):
        assert start(server, f"scored-{processes}", processes, **options, predictions="answers.jsonl") == []
    assert results(server.folder / "scored-1") == results(server.folder / "scored-2")


def test_results_of_other_predictions_are_kept_whatever_their_file_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = RefCOCO(data="scenes", limit=3)
    monkeypatch.chdir(tmp_path)
    file, options = tmp_path / "answers.jsonl", ["task=refcoco", "task_args={data: scenes, limit: 3}"]

    def write(answers: list[str]) -> None:
        lines = [{"id": s.id, "answer": a} for s, a in zip(task.samples("val"), answers, strict=True)]
        file.write_text("\n".join(map(json.dumps, lines)))

    def score(given: object) -> float:
        main([*options, f"predictions={given}", "output_dir=out", "bootstrap_samples=9"])
        return json.loads((tmp_path / "out/metrics.json").read_text())["acc@0.5"]

    write([task.reference_answer(s) for s in task.samples("val")])
    assert score("answers.jsonl") == score(file) == score(shutil.copy(file, "copy.jsonl")) == 1.0
    write(["[0, 0, 1, 1]"] * 3)
    with pytest.raises(
        UserError, match=r"output_dir=out: .*\(predictions \(a digest of the file\) was .* another output"
    ):
        score("answers.jsonl")
    assert json.loads((tmp_path / "out/metrics.json").read_text())["acc@0.5"] == 1.0
    with pytest.raises(UserError, match=r"predictions=gone.jsonl: it cannot be read"):
        score("gone.jsonl")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "answer", "answer_index"]), inner, max_size=3)
    ),
    max_leaves=6,
)
LINES = (
    st.text(max_size=20)
    | st.builds(json.dumps, JSON)
    | st.builds(
        lambda i, a: json.dumps({"id": f"val-0-{i:06d}", "answer": a}), st.integers(0, 3), st.text(max_size=9) | JSON
    )
)


@given(st.lists(LINES, max_size=4), st.sampled_from(["\n", "\r\n", "\n\n"]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_of_predictions_is_scored_or_refused_by_line(tmp_path: Path, lines: list[str], end: str) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(end.join(lines).encode("utf-8", "surrogatepass"))
    task = RefCOCO(data="scenes", limit=3)
    known = [f"val-0-{i:06d}" for i in range(3)]
    try:
        answers = read_predictions(path, known)
    except UserError as error:
        assert re.match(rf"predictions={path}(, line \d+)?: ", str(error))
        return
    assert {key for key, _, _ in answers} <= set(known)
    several = len({place[1:] for place in answers})
    metrics = score_predictions(task, task.samples("val"), path).metrics
    assert metrics["num_samples"] == 3 and metrics["num_missing"] == 3 * several - len(answers)


def test_a_file_of_drawn_answers_is_scored_as_they_were(server: Forks, drawn: Path) -> None:
    start(server, "scored-drawn", predictions="drawn")
    for job in JOBS:
        first, second = (
            json.loads((f / job / "metrics.json").read_text()) for f in (drawn, server.folder / "scored-drawn")
        )
        assert second.pop("num_missing") == 0
        assert (
            second.pop("notes")["decoding"] == f"none: answers of drawn/{job}/predictions.jsonl" != first.pop("notes")
        )
        assert first == second
        assert [(row["answer"], row["reward"]) for row in rows(drawn / job)] == [
            (row["answer"], row["reward"]) for row in rows(server.folder / "scored-drawn" / job)
        ]


def test_several_answers_in_a_file_have_places_of_their_own(tmp_path: Path) -> None:
    task, path = RefCOCO(data="scenes", limit=2), tmp_path / "answers.jsonl"
    samples = list(task.samples("val"))
    lines = [
        {"id": samples[0].id, "answer": task.reference_answer(samples[0]), "thought_index": 1},
        {"id": samples[0].id, "answer": "[0, 0, 1, 1]"},
        {"id": samples[1].id, "answer": task.reference_answer(samples[1]), "answer_index": 0},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    metrics = score_predictions(task, samples, path).metrics
    assert (metrics["pass@1"], metrics["pass@2"], metrics["maj@2"], metrics["num_missing"]) == (0.5, 1.0, 0.5, 1)
    for index in (-1, 1.0, True, "0", None):
        path.write_text(json.dumps({"id": samples[0].id, "answer": "", "answer_index": index}))
        with pytest.raises(UserError, match=r"line 1: thought_index and answer_index are .* whole numbers from 0"):
            score_predictions(task, samples, path)


# ---- options ----


def test_splits_are_of_all_tasks_or_of_one() -> None:
    def splits(*arguments: str) -> dict[str, list[str]]:
        return chosen_splits(load_config(EvaluateConfig, ["task=[refcoco,more=refcoco]", *arguments]))

    assert splits() == {"refcoco": ["val"], "more": ["val"]}
    assert splits("split=[val,test]") == {"refcoco": ["val", "test"], "more": ["val", "test"]}
    assert splits("split=test", "splits.more=[testA,testB]") == {"refcoco": ["test"], "more": ["testA", "testB"]}
    assert splits("split=2017", "splits.more=[2014,val2017]") == {"refcoco": ["2017"], "more": ["2014", "val2017"]}
    assert splits("splits.more=2017")["more"] == ["2017"], "which YAML reads as a number"
    for arguments, words in (
        (["splits.mor=val"], r"splits.mor: .* only refcoco, more. Did you mean splits.more\?"),
        (["split=[val,val]"], r"split=\['val', 'val'\]: .* once"),
        (["split=[]"], r"split=\[\]"),
        (["splits.more=2.5"], r"splits.more=2.5: it must be the name of a split"),
        (["splits.more=[val,yes]"], r"splits.more=\['val', True\]"),
        (["splits.more=[7,'7']"], r"splits.more=\[7, '7'\]: .* once"),
    ):
        with pytest.raises(UserError, match=words):
            splits(*arguments)


def test_bad_options_are_refused_before_anything_is_answered(server: Forks) -> None:
    assert "bootstrap_samples=-1: must be at least 0" in refused(server, "bad", bootstrap_samples=-1)
    assert "'decoding'" in refused(server, "bad", decoding="beam")
    said = refused(server, "bad", **{"splits.other": "vall"})
    assert "splits.other=vall: " in said and "they have: " in said
    said = refused(server, "bad", split="testA")
    assert "split=testA: " in said and "splits.other=" not in said
    assert not (server.folder / "bad").exists()


WRONG_FILES = """
from noted_task import Noted

class Wrong(Noted):
    def official_files(self, samples, answers):
        return {"../results.txt": b""} if self.seed == 0 else {"results.txt": "text"} if self.seed == 1 else 1 / 0
"""


def test_files_of_a_task_that_cannot_be_written_are_named(server: Forks) -> None:
    (server.folder / "wrong_task.py").write_text(WRONG_FILES)
    for seed, words in ((0, "'../results.txt'"), (1, "gave str for the file 'results.txt'"), (2, "ZeroDivisionError")):
        args = f"{{data: scenes, limit: 2, seed: {seed}}}"
        options = {"task": "wrong_task:Wrong", "task_args": args, "split": "val", "splits.other": None}
        said = refused(server, f"wrong-{seed}", **options)
        assert "task wrong_task:Wrong: official_files()" in said and words in said
    shutil.rmtree(server.folder / "wrong-0")
