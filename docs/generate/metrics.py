"""The page of metrics. Their names are compared with those in the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from vitline.infra.system_metrics import SystemSampler

from .markdown import joined, table, text

ROOT = Path(__file__).parents[2]


ROOMS = ("infra", "data_prep", "vit", "flows")


METRICS = {
    "Training": {
        "train/loss": "Mean loss of the examples of one step. With MixUp and CutMix it cannot reach 0: the targets are shares.",
        "train/top1": "Fraction of the examples of a step whose highest logit is one of their labels, and of a teacher's labels the first. "
        "Not logged with MixUp or CutMix, where an image shows two.",
        "val/loss": "Mean loss over the held-out split, every `execution.evaluate_every_steps` and at the end of the training.",
        "val/top1": "Top-1 accuracy over the held-out split, at the same steps; with several labels per image any of them counts.",
        "val/mean_average_precision": "Mean over classes of the average precision over the held-out split, at the same steps; only "
        "with several labels per image.",
        "probe/<corpus>/knn_top1": "With `execution.probes`, at the step of a checkpoint: share of the validation images whose nearest "
        "training images, by the features of that checkpoint, vote for their class.",
        "probe/<corpus>/fewshot_top1": "The same of least squares on `execution.probes.shots` examples of each class.",
        "train/patch_accuracy": "With masked patches, in place of top-1: share of the corrupted patches of one step whose 3-bit colour is "
        "right.",
        "val/patch_accuracy": "The same over the held-out split, whenever `val/loss` is measured.",
        "optim/lr": "Learning rate of the step.",
        "optim/grad_norm": "Global gradient norm before clipping.",
        "guard/nonfinite_steps": "Consecutive steps that were skipped because their gradient was not finite.",
        "guard/spikes": "Spikes so far that the spike guard has left out; only with `recipe.spike_guard`.",
        "guard/loss": "Loss of a step that is a spike.",
        "guard/grad_norm": "Gradient norm, before clipping, of a step that is a spike.",
        "guard/loss_limit": "Loss above which the next step is a spike.",
        "guard/grad_norm_limit": "Gradient norm above which the next step is a spike.",
        "input/bad_examples": "Examples that were left out since the workers started because they cannot be decoded.",
        "progress/images_seen": "Training images up to this step, counting repeats.",
        "throughput/images_per_s": "Images per second over all workers; of a preparation, examined images per second.",
        "throughput/mfu": "Model FLOPs utilisation: achieved over peak FLOP/s of the device. Absent where no peak is known.",
        "time/data_wait_fraction": "Share of the time in which the device waited for batches: it had no work left.",
        "time/store_wait_fraction": "Of it: waiting for the store.",
        "time/decode_wait_fraction": "Of it: waiting for decoding and augmentation.",
        "time/hand_over_wait_fraction": "Of it: the rest, planning and handing over batches.",
        "time/slowest_rank": "Rank whose forward passes and waits for data take longest, once a minute.",
        "time/slowest_rank_wait_fraction": "Share of the time that the rank in the middle waits for it, estimated from these.",
    },
    "Preparation": {
        "data/images_accepted": "Examples in the corpus.",
        "data/images_refused": "Examples that were left out, each with a reason.",
        "data/images_duplicate": "Images that repeat another one: same file, same pixels, or near duplicates.",
        "data/images_leaked": "Training images that match an evaluation image and were not left out.",
        "data/bytes": "Bytes of the accepted images.",
        "time/prepare_s": "Seconds from the start of the preparation to its end.",
    },
    "Scores": {
        "vtab/<task>/top1": "Test score of one of VTAB's tasks.",
        "vtab/<group>/top1": "Mean over a group of VTAB (natural, specialized, structured); only if all its tasks are scored.",
        "vtab/all/top1": "Mean over all 19 tasks. With fewer tasks it is `vtab/all_<n>of19/top1`.",
        "tasks/<corpus>/top1": "Test score of any other task.",
        "fewshot/<corpus>/<n>shot/top1": "Test score of least squares on frozen features of n examples per class.",
        "linear/<corpus>/top1": "Test score of logistic regression on frozen features.",
        "knn/<corpus>/top1": "Test score of nearest neighbours on frozen features.",
        "head/<corpus>/top1": "Test score of the model's own classes.",
        "head/<corpus>/severity_<n>/top1": "The same of one severity, 1 to 5, of a corruption of ImageNet-C.",
        "head/imagenet-c/severity_<n>/top1": "Mean of these over the 15 corruptions; only if all are scored.",
        "head/imagenet-c/top1": "Mean over the 15 corruptions of ImageNet-C; only if all are scored.",
        "head/imagenet-c/mce": "Mean corruption error: the same of errors that are divided by AlexNet's; less is better, AlexNet has 1.",
        "<score>/ece": "Beside each `top1` of a task, in its place in the name (`tasks/pets/ece`): expected calibration error of the same "
        "predictions, from 0 to 1, over 15 bins of equal width. Absent for `fewshot`, whose outputs are no probabilities.",
        "<protocol>/<metric>": "Of a pipeline with several protocols: a score by a fine-tuning protocol other than the one by which nights "
        "are judged, whose scores have the names above.",
        "time/trials_s": "Seconds of all trials of the scores.",
    },
    "Batch predictions": {
        "predict/images": "Images whose classes were predicted.",
        "predict/top1": "Share that is right of those with a label that the model knows.",
        "time/predict_s": "Seconds from the start of the prediction to its end.",
    },
    "Pipelines": {
        "time/<stage>_s": "Seconds of a stage that was not reused, over all seeds: prepare, advance (of a long run), pretrain, evaluate. "
        "Of several protocols `evaluate` is the one by which nights are judged, and any other one is `evaluate/<protocol>`.",
        "night/<other>/difference": "Of a night: its mean over tasks less that of the champion or of last_night.",
    },
    "Machines": {
        "system/node<k>/cpu_fraction": "Share of all CPUs in use.",
        "system/node<k>/memory_used_bytes": "Memory in use on the machine.",
        "system/node<k>/process_memory_bytes": "Resident memory of the process that trains.",
        "system/node<k>/disk_used_fraction": "Share in use of the disk with the temporary folder.",
        "system/node<k>/network_receive_bytes_per_s": "Bytes received per second, loopback excluded.",
        "system/node<k>/gpu_memory_used_bytes": "GPU memory in use by all processes; only on a GPU.",
    },
}
"""What each metric means. `differing_metrics` compares the names with those in the code."""


def metrics_page() -> str:
    parts = [
        "# Metrics",
        "Journals in the store hold them, MLflow shows them. Scores and accuracies are fractions from 0 to 1. Scores of the "
        "control end in `_from_scratch`; those of further models of one evaluation in `_<version>`. A preparation of several "
        "corpora also has each count as `data/<corpus>/...`.",
    ]
    for group, metrics in METRICS.items():
        rows = [[f"`{name}`", text(meaning)] for name, meaning in metrics.items()]
        parts += [f"## {group}", table(["metric", "meaning"], rows)]
    return joined(parts)


def differing_metrics() -> list[str]:
    """Metric names that only the code has, or only METRICS."""
    known = {name for metrics in METRICS.values() for name in metrics}
    written = {name for name in known if "<" not in name and not name.startswith(PUT_TOGETHER)}
    groups = "|".join({name.split("/")[0] for name in written})
    found = {value for value in texts_in_code() if re.fullmatch(rf"(?:{groups})/[a-z0-9_]+", value)}
    samples = {name.replace("node0", "node<k>") for name in sampled()}
    return sorted((found ^ written) | (samples - known))


PUT_TOGETHER = ("data/", "head/", "probe/", "system/", "vtab/")
"""Metrics whose names the code makes from parts."""


def sampled() -> set[str]:
    sampler = SystemSampler(lambda *_: None, 0, lambda: 0, lambda: 0)
    return set(sampler.sample())


def texts_in_code() -> Iterator[str]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
