"""Answers to the samples of a split, by the engine of the training or from a file, and their metrics."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.reader import PromptReader
from vlm_grpo.evaluation.measure import Evaluation, sample_ids, summarise
from vlm_grpo.evaluation.predictions import Prediction, read_predictions
from vlm_grpo.model.coordinates import answer_in_original
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.growth import unbranched
from vlm_grpo.rollout.sampling import SamplingConfig, greedy, tree_sampler
from vlm_grpo.rollout.worker import RewardWorker
from vlm_grpo.task.interface import Sample, Samples, TaskAdapter
from vlm_grpo.tree.types import RolloutTree

BATCH = 32  # prompts whose answers grow at the same time


def evaluate(
    vlm: VLM,
    adapter: TaskAdapter,
    samples: Samples,
    reader: PromptReader,
    config: SamplingConfig,
    processes: Processes,
    seed: int | None = None,
    known: Iterable[Prediction] = (),
    on_batch: Callable[[list[Prediction], int], None] = lambda predictions, count: None,
) -> Evaluation:
    """Answers to all samples, shared among the processes; metrics over every sample that could be read.

    Without `seed` the answers are greedy, one for each sample; with it, K × M are drawn, from random numbers that each
    sample has of its own. Samples with `known` answers are not answered again; those answers are scored anew.
    `on_batch` is given each batch's answers, before they are scored, and its number of samples. The result is the same
    on every rank. It depends neither on the number of processes nor on what was known, up to rounding: batches of other
    shapes may turn a token that is a tie.
    """
    sampling = unbranched(config) if seed is not None else replace(unbranched(config), num_thoughts=1, num_answers=1)
    engine = Engine(vlm, sampling)
    worker = RewardWorker(adapter)
    ids = sample_ids(samples)
    places = {key: i for i, key in enumerate(ids)}
    indices = list(processes.share(len(samples)))
    own_ids = {ids[i] for i in indices}
    done = sorted((p for p in known if p.id in own_ids), key=lambda p: places[p.id])
    done_ids = {prediction.id for prediction in done}
    own: list[Prediction] = []
    for start in range(0, len(done), BATCH):
        batch = done[start : start + BATCH]
        own.extend(_scored(worker, {key: samples[places[key]] for key in {p.id for p in batch}}, batch))
    # Batches are those of an unbroken run, less what is known
    rows = [indices[start : start + BATCH] for start in range(0, len(indices), BATCH)]
    batches = [left for row in rows if (left := [i for i in row if ids[i] not in done_ids])]
    read = reader.read_batches([samples[i] for i in batch] for batch in batches)
    for batch, prompts in zip(batches, read, strict=True):
        draw = greedy
        if seed is not None:
            draw = tree_sampler(sampling, [generator(vlm.device, seed, prompt.sample.id) for prompt in prompts])
        with torch.no_grad():
            trees = engine.rollout(prompts, vlm.encode(prompts), draw)
        predictions = _predictions(trees)
        on_batch(predictions, len(batch))
        own.extend(_scored(worker, {prompt.sample.id: prompt.sample for prompt in prompts}, predictions))
    found = processes.gather(own)
    found.sort(key=lambda p: (places[p.id], p.thought_index, p.answer_index))
    return summarise(adapter, samples, found)


def generator(device: torch.device, seed: int, sample_id: str) -> torch.Generator:
    """The randomness of one sample's answers, wherever and whenever they are drawn."""
    digest = hashlib.sha256(f"{seed}\0{sample_id}".encode("utf-8", "surrogatepass")).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def _predictions(trees: Sequence[RolloutTree]) -> list[Prediction]:
    """The answers of the trees, not scored yet."""
    return [
        Prediction(
            tree.prompt.sample.id,
            answer_in_original(tree.prompt, answer.text),
            model_answer=answer.text,
            thought=thought.text,
            thought_index=i,
            answer_index=j,
        )
        for tree in trees
        for i, thought in enumerate(tree.thoughts)
        for j, answer in enumerate(thought.answers)
    ]


def _scored(worker: RewardWorker, samples: Mapping[str, Sample], predictions: Sequence[Prediction]) -> list[Prediction]:
    """The predictions with the rewards of their answers; `samples` are by id."""
    rewards = worker.score_all([(samples[p.id], p.answer) for p in predictions])
    return [
        replace(p, reward=None, parts={}) if r is None else replace(p, reward=r.value, parts=dict(r.parts))
        for p, r in zip(predictions, rewards, strict=True)
    ]


def score_predictions(
    adapter: TaskAdapter, samples: Samples, path: Path, processes: Processes | None = None
) -> Evaluation:
    """Metrics of a file of predictions (see `read_predictions`); a missing line counts as an empty answer."""
    processes = processes or Processes()
    ids = sample_ids(samples)
    answers = read_predictions(path, ids)
    places = sorted({(thought, answer) for _, thought, answer in answers})
    worker = RewardWorker(adapter)
    own: list[Prediction] = []
    shares = list(processes.share(len(ids)))
    for start in range(0, len(shares), BATCH):
        batch = {ids[at]: samples[at] for at in shares[start : start + BATCH]}
        given = [
            Prediction(key, answers.get((key, thought, answer), ""), thought_index=thought, answer_index=answer)
            for key in batch
            for thought, answer in places
        ]
        own.extend(_scored(worker, batch, given))
    at = {key: i for i, key in enumerate(ids)}
    predictions = sorted(processes.gather(own), key=lambda p: at[p.id])
    evaluation = summarise(adapter, samples, predictions)
    missing = len(ids) * len(places) - len(answers)
    return Evaluation({**evaluation.metrics, "num_missing": float(missing)}, predictions)


def prompt_limit(vlm: VLM, config: SamplingConfig, asked: int | None) -> int:
    """Most tokens of a prompt: as asked, and no more than the model's context leaves for thought and answer."""
    context = getattr(vlm.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = (
        context - config.max_thought_length - config.max_answer_length - 32
    )  # 32: the bridge between them, generously
    if room <= 0 or (asked is not None and asked <= 0):
        raise UserError(
            f"max_prompt_length: no token is left for a prompt: the context has {context}, max_thought_length is "
            f"{config.max_thought_length}, max_answer_length {config.max_answer_length}, max_prompt_length {asked}"
        )
    return room if asked is None else min(room, asked)


def run_notes(vlm: VLM, reader: PromptReader, samples: Samples) -> dict[str, str]:
    """What moves a benchmark number by points: the first prompt that can be read, coordinate space, pixel limits."""
    prompt = next((prompt for sample in samples for prompt in reader.read([sample])), None)
    size = getattr(getattr(vlm.processor, "image_processor", None), "size", None)
    return {
        "prompt": "none could be read" if prompt is None else repr(prompt.text),
        "coordinates": str(vlm.family.coordinates),
        "image size": "as the model's files say" if size is None else str(dict(size)),
    }


def weights_digest(vlm: VLM) -> str:
    """A digest of a sample of every weight's elements, which no training step leaves as it was."""
    digest = hashlib.sha256()
    for name, parameter in vlm.model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // 256)].float().cpu()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


def samples_digest(samples: Samples) -> str:
    """A digest of the samples' ids, questions and targets; of images and arrays only that there are some."""
    digest = hashlib.sha256()
    for sample in samples:
        row = [sample.id, sample.question, sample.target]
        digest.update(json.dumps(row, default=_plain, skipkeys=True).encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """What JSON can write of a target: dataclasses by their fields, other things by their type where text may vary."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value) if isinstance(value, Path | Fraction) else type(value).__name__
