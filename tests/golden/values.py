"""Names and digests of fixed requests, compared with the stored ones: no move or renaming of code may change one.

python -m tests.golden.values    (writes values.json; only where a result is to change, with its reason in the commit)
"""

import gzip
import io
import json
import os
import struct
import tarfile
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from vitline.data_prep.benchmarks.official_splits import OFFICIAL_SPLITS
from vitline.data_prep.config import CorpusConfig, Vtab
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.prepare.job import PrepareSpec, prepare
from vitline.data_prep.shard_format import Manifest, shard_schema
from vitline.flows.catalog.records import Origin, PipelineRecord, StageRecord, write_pipeline
from vitline.flows.forms import forms
from vitline.flows.forms.evaluation_plan import resolve_evaluate, resolve_predict
from vitline.flows.forms.finetune_config import resolve_finetune
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.flows.nights.compare import Difference
from vitline.flows.nights.judge import Comparison, Verdict
from vitline.flows.nights.night_record import GateResult, NightRecord, write_night
from vitline.flows.on_prefect.deployments import DEPLOYMENTS
from vitline.flows.plans.evaluation_spec import evaluation_spec
from vitline.flows.runs.prepare_corpus import preparation_key, source_request
from vitline.flows.to_mlflow.stage_snapshots import pipeline_snapshot, stage_snapshot
from vitline.infra.config import digest_of, replace
from vitline.infra.runs.run_state import StateDetail, write_state
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import plan_task_sweeps
from vitline.vit.evaluation.protocols import known_protocols
from vitline.vit.evaluation.trials import TrialResult
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import ViTConfig
from vitline.vit.published.models import publish
from vitline.vit.recipes import RECIPES

VALUES = Path(__file__).with_name("values.json")
_THEN = 1_700_000_000
_WORDS = frozenset({"description", "title", "help", "examples"})
JSON = dict[str, Any]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        VALUES.write_text(json.dumps(found(Path(folder)), indent=1, sort_keys=True) + "\n")


def found(folder: Path) -> JSON:
    """Every value as this code computes it."""
    root = str(folder / "store")
    corpora = prepared(folder / "sources", root)
    model = published_model(root)
    return {
        "corpora": {name: [manifest.version, manifest.digest] for name, manifest in corpora.items()},
        "splits": {name: split.digest for name, split in corpora["vtab-dtd"].splits.items()},
        "official splits of VTAB": digest_of({name: list(splits) for name, splits in OFFICIAL_SPLITS.items()}),
        "recipes": {name: digest_of(recipe.make()[0]) for name, recipe in RECIPES.items()},
        "protocols": {name: digest_of(protocol) for name, protocol in known_protocols().items()},
        "run keys": run_keys(root, folder / "sources"),
        "model": open_store(model).read_json("config.json")["digest"],
        "score": score_record(root),
        "schema of shards": [schema_text(single_label=s, has_weights=not s) for s in (True, False)],
        "forms": {each.flow: digest_of(without_words(each.model.model_json_schema())) for each in DEPLOYMENTS},
        "deployments": {each.full_name: digest_of(each.request) for each in DEPLOYMENTS},
        "MLflow": shown_in_mlflow(root, folder / "sources", corpora),
    }


def schema_text(**of: bool) -> str:
    return shard_schema(**of).to_string(truncate_metadata=False)


def without_words(value: Any) -> Any:
    """A JSON schema without titles, descriptions, help and examples."""
    if isinstance(value, Mapping):
        return {k: without_words(v) for k, v in value.items() if k not in _WORDS or not isinstance(v, str | list)}
    return [without_words(v) for v in value] if isinstance(value, list) else value


def bitmap(number: int) -> bytes:
    """A BMP of 4 x 4 pixels, different for each number; written by hand, because an encoder's bytes depend on its version."""
    pixels = b"".join(
        struct.pack("<I", (number * 2_654_435_761 + i * 40_503 * 65_537) % (1 << 32))[:3] for i in range(16)
    )
    head = struct.pack("<2sIHHI", b"BM", 54 + len(pixels), 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, 4, 4, 1, 24, 0, len(pixels), 2835, 2835, 0, 0) + pixels


def prepared(folder: Path, root: str) -> dict[str, Manifest]:
    """A folder of class folders, a table, a WebDataset and a task of VTAB, prepared."""
    files = {f"folder/{('owl', 'wren', 'tit')[i % 3]}/{i:03d}.bmp": bitmap(i) for i in range(60)}
    rows = [f"{i:03d}.bmp,{('a', 'b')[i % 2]},{('train', 'test')[i % 5 == 0]}" for i in range(40)]
    files["table/rows.csv"] = "\n".join(["image,labels,split", *rows, ""]).encode()
    files |= {f"table/{i:03d}.bmp": bitmap(1000 + i) for i in range(40)}
    files["tars/train-000.tar"] = tar_of(
        {
            f"{i:03d}{end}": data
            for i in range(30)
            for end, data in ((".ppm", bitmap(2000 + i)), (".cls", b"%d" % (i % 4)))
        }
    )
    names = [f"texture{i:02d}" for i in range(47)]
    keys = [f"{names[i % 47]}/{names[i % 47]}_{i:04d}.jpg" for i in range(5640)]
    dtd = {f"dtd/images/{key}": bitmap(10_000 + i) for i, key in enumerate(keys)}
    for i, name in enumerate(("train1", "val1", "test1")):
        dtd[f"dtd/labels/{name}.txt"] = "".join(f"{key}\n" for key in keys[1880 * i : 1880 * (i + 1)]).encode()
    files["vtab/dtd-r1.0.1.tar.gz"] = gzip.compress(tar_of(dtd), 0, mtime=0)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (_THEN, _THEN))
    return {
        request.name: manifest for request in corpus_requests(root, folder) for manifest in prepare([request], root)
    }


def corpus_requests(root: str, folder: Path) -> list[CorpusConfig]:
    return [
        source_request(root, str(folder / "folder"), "birds"),
        source_request(root, str(folder / "table/rows.csv"), "rows", kind="table"),
        source_request(root, str(folder / "tars"), "tars", kind="webdataset"),
        CorpusConfig(name="vtab-dtd", source=Vtab(task="dtd", path=str(folder / "vtab"))),
    ]


def tar_of(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), _THEN
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def published_model(root: str) -> str:
    """A model with computed, not random weights: a random generator may differ between processors."""
    config = ViTConfig(image_size_px=32, patch_size_px=8, embed_dim=16, depth=2, num_heads=2, mlp_dim=32)
    network = build_network(config, 3)
    with torch.no_grad():
        for value in network.state_dict().values():
            value.copy_((torch.arange(value.numel()) % 7 - 3).float().reshape(value.shape) / 64)
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=32))
    models = open_store(root).child("models")
    return publish(models, "birds", "1", network, contract, ["owl", "tit", "wren"], {"made": "by hand"})


def run_keys(root: str, folder: Path) -> dict[str, str]:
    """One of each stage."""
    asked = corpus_requests(root, folder)
    stores = [open_store(root).child("corpora/birds/0123456789ab")]
    evaluation = forms.EvaluateRequest(model="birds", tasks=("vtab-dtd",), protocol="vit-paper")
    pipeline = forms.PipelineRequest(name="night", corpus="birds", recipe="digits", tasks=("vtab-dtd",))
    (plan,) = resolve_evaluate(root, evaluation)
    trainings = {
        "pretrain": resolve_pretrain(root, forms.PretrainRequest(corpus="birds", recipe="digits")),
        "finetune": resolve_finetune(root, forms.FinetuneRequest(model="birds", corpus="vtab-dtd")),
        "finetune, several labels": resolve_finetune(root, forms.FinetuneRequest(model="birds", corpus="rows")),
    }
    return {
        "prepare": preparation_key([asked[0].name], stores, root),
        **{stage: training.spec().run_key for stage, training in trainings.items()},
        "evaluate": evaluation_spec("birds-vtab", plan, root).run_key,
        "pipeline": resolve_pipeline(root, pipeline).key,
        "pipeline, two protocols": resolve_pipeline(root, replace(pipeline, protocol=("fewshot", "vit-paper"))).key,
    }


def score_record(root: str) -> JSON:
    """A stored score of synthetic trials, and its key."""
    request = forms.EvaluateRequest(model="birds", tasks=("vtab-dtd",), protocol="vit-paper", from_scratch=False)
    task_sweep = plan_task_sweeps(evaluation_spec("birds-vtab", *resolve_evaluate(root, request), root))[0]
    trials = task_sweep.select_trials()
    results = [made_up(trial.key, i) for i, trial in enumerate(trials)]
    final = task_sweep.final_trial(results)
    record = task_sweep.score(results, made_up(final.key, 9), final).model_dump(mode="json")
    return {
        "key": task_sweep.score_key,
        "record": record | {"model": record["model"].removeprefix(open_store(root).uri)},
    }


def made_up(key: str, number: int) -> TrialResult:
    return TrialResult(
        key=key, top1=0.5 + number / 64, loss=1.0, num_examples=1880, majority_fraction=0.025, train_losses=((1, 2.0),),
        wall_s=1.0, cpu_s=2.0, diverged=False,
    )  # fmt: skip


def shown_in_mlflow(root: str, folder: Path, corpora: Mapping[str, Manifest]) -> JSON:
    """What MLflow gets of a finished run of each stage, and of a night of two of them: tags, params, names of metrics and files."""
    store = open_store(root)
    score = score_record(root)["record"] | {"model": store.uri + score_record(root)["record"]["model"]}
    evaluation = forms.EvaluateRequest(model="birds", tasks=("vtab-dtd",), protocol="vit-paper")
    training = resolve_pretrain(root, forms.PretrainRequest(corpus="birds", recipe="digits")).spec()
    made = {"birds": {"version": corpora["birds"].version, "digest": corpora["birds"].digest}}
    model = store.uri_of("models/birds/1")
    runs: list[tuple[Any, StateDetail]] = [
        (training, {"step": 100, "images_seen": 12_800, "val_top1": 0.5, "val_examples": 4, "model": model}),
        (evaluation_spec("birds-vtab", *resolve_evaluate(root, evaluation), root), {"scores": [score]}),
        (
            resolve_predict(root, forms.PredictRequest(model="birds", corpus="birds")),
            {"predicted": {"images": 4, "known": 4, "hits": 2}},
        ),
        (
            PrepareSpec(run_key="prepare-birds-0", root=root, requests=tuple(corpus_requests(root, folder)[:1])),
            {"corpora": made},
        ),
    ]
    views = []
    for spec, detail in runs:
        run = store.child(f"runs/{spec.run_key}")
        run.write_json("config.json", spec.model_dump(mode="json"))
        write_state(run, "finished", 1, **detail)
        views.append(stage_snapshot(store, spec.run_key))
    views.append(pipeline_snapshot(store, judged_night(root, training.run_key, runs[1][0].run_key))[0])
    shown = {}
    for view in views:
        assert view is not None
        found = {"tags": view.tags, "params": view.params, "metrics": sorted(view.values), "files": sorted(view.files)}
        found |= {"children": [[child.name, child.params, sorted(child.values)] for child in view.children]}
        found |= {"model": view.model and [view.model.tags, view.model.params, sorted(view.model.files)]}
        shown[view.stage] = json.loads(json.dumps(found, default=str).replace(store.uri, "ROOT"))
    return shown


def judged_night(root: str, training: str, evaluation: str) -> str:
    """The key of a stored night of these runs, which was judged against the one before."""
    store, request = open_store(root), forms.PipelineRequest(name="nightly", corpus="birds", recipe="digits")
    night = datetime.fromtimestamp(_THEN, UTC)
    stages = tuple(
        StageRecord(stage=stage, run_key=key, reused=False, wall_s=60.0, what="", where="")
        for stage, key in (("pretrain", training), ("evaluate", evaluation))
    )
    record = PipelineRecord(
        key="nightly-0", name="nightly", request=request.model_dump(mode="json"), night=night, state="finished",
        origin=Origin(trigger="schedule", pipeline="nightly-0", flow_run_id="0-1"),
        started_at=_THEN, updated_at=_THEN + 200, stages=stages, corpora={"birds": "a" * 64}, images={"birds": 60},
        model=store.uri_of("models/birds/1"), model_digest="b" * 64, images_seen=12_800,
        metrics={"val/top1": 0.5, "vtab/dtd/top1": 0.25},
    )  # fmt: skip
    write_pipeline(store, record)
    difference = Difference(
        name="vtab/dtd/top1", ours=0.25, theirs=0.5, half_width=0.1, p=0.01, seeds_se=0.01, images_se=0.01, df=4, paired=True,
        word="worse",
    )  # fmt: skip
    before = Comparison(
        who="last night", key="nightly-1", night=night - timedelta(1), word="worse", differences=(difference,),
        changes={"corpora.birds": ("a", "b")},
    )  # fmt: skip
    verdict = Verdict(word="worse", sentence="Worse than last night: -25.0 points.", against=(before,))
    gate = GateResult(passed=False, reason="It is worse.")
    write_night(
        store,
        NightRecord(name="nightly", night=night, outcome="finished", pipeline=record.key, verdict=verdict, gate=gate),
    )
    return record.key


if __name__ == "__main__":
    main()
