"""The images of a batch prediction with the classes that its model gave them: what a teacher labels for a student (Xie et al.,
"Self-training with Noisy Student improves ImageNet classification", CVPR 2020, section 2)."""

import bisect
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from pydantic import Field, JsonValue

from vitline.data_prep.archives.parquet_rows import stretches
from vitline.data_prep.config import CorpusRecipe, PredictedClasses
from vitline.data_prep.labels.label_texts import plain_text
from vitline.data_prep.parquet_files import open_parquet, read_table
from vitline.data_prep.shard_format import Manifest, ShardReader, SplitInfo, load_manifest
from vitline.data_prep.sources.raw import ImageSource, RawExample, SourcePart, Spill, SplitRule, WorkFolder
from vitline.infra.records import StoredRecord
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import Store, open_store

_FOLDER, _LIMITS = "predictions", "class-limits.json"


class PredictionRun(StoredRecord):
    """What `config.json` of a batch prediction says of it; the model is not needed any more."""

    run_key: str
    corpus: str
    corpus_digest: str
    splits: tuple[str, ...] = Field(min_length=1)
    top_k: int


class Limit(NamedTuple):
    """The last image that stays in a class with too many: its score, and its place among all images, which are in random order."""

    score: float
    place: int


class PredictedCorpus(ImageSource):
    """Reads the predictions and the corpus that they were made for."""

    when_ids_repeat = "Predict splits that share no images: a split such as trainval has those of train again."

    def __init__(self, source: PredictedClasses, recipe: CorpusRecipe) -> None:
        self._source, self._recipe, self._run = source, recipe, open_store(source.path)
        self.origin, self.single_label = self._run.uri, source.labels == "hard"

    def fingerprint(self) -> str:
        return self._config.run_key

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        mean_bytes = -(-self._manifest.counts.num_bytes // self._manifest.counts.num_accepted)
        if self._source.max_per_class is not None:
            work.store.write_json(_LIMITS, self._limits(self._source.max_per_class))
        place = 0
        for key in self._keys():
            with self._run.open(key) as file, open_parquet(file) as parquet:
                groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
            sizes = [group.num_rows for group in groups]
            for first, stop, rows, _ in stretches(sizes, sizes, work.examples_per_part):
                where: dict[str, JsonValue] = {"key": key, "groups": [first, stop], "place": place}
                name = f"{key.removeprefix(_FOLDER + '/')}.{first:06d}-{stop:06d}"
                yield SourcePart(name=name, num_bytes=rows * mean_bytes, num_examples=rows, where=where)
                place += rows

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        where = cast(dict[str, Any], part.where)
        with self._run.open(where["key"]) as file, open_parquet(file) as parquet:
            columns = ["example_id", "split", "row", "classes", "scores"]
            found = parquet.read_row_groups(range(*where["groups"]), columns=columns).to_pylist()
        limits: dict[str, Limit] = {}
        if self._source.max_per_class is not None:
            limits = {name: Limit(*limit) for name, limit in work.store.read_json(_LIMITS).items()}
        split = found[0]["split"]
        rule = SplitRule(self._recipe)
        images = self._images(split, range(found[0]["row"], found[-1]["row"] + 1))
        with Spill(work, part) as spill:
            for place, (row, image) in enumerate(zip(found, images, strict=True), where["place"]):
                if row["example_id"] != image["example_id"]:
                    raise ValueError(
                        f"{self._run.uri_of(where['key'])} has {row['example_id']!r} where {self._config.corpus} has "
                        f"{image['example_id']!r} (row {row['row']} of {split}). Predict the classes again."
                    )
                assigned = rule.assign_split(image["group"] or row["example_id"])
                yield self._example(row, image, assigned, self._refusal(row, place, limits), spill)

    def _example(
        self,
        row: Mapping[str, Any],
        image: Mapping[str, Any],
        split: str,
        refused: tuple[str, str] | None,
        spill: Spill,
    ) -> RawExample:
        labels, weights = self._labels(row["classes"], row["scores"])
        if refused:
            key = f"row {row['row']} of {row['split']}"
            return RawExample(row["example_id"], labels, split, self._config.corpus, key, refused=refused)
        data = image["image"]["bytes"]
        return RawExample(
            example_id=row["example_id"],
            labels=labels,
            split=split,
            group=image["group"],
            weights=weights,
            data=data,
            **spill.keep(data),
        )

    def _labels(self, classes: list[str], scores: list[float]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
        """The most probable class, or all that are stored with probabilities that sum to 1."""
        if self.single_label:
            return (plain_text(classes[0]),), None
        weights: dict[str, float] = defaultdict(float)
        for name, score in zip(classes, scores, strict=True):
            if score > 0:
                weights[plain_text(name)] += score / sum(scores)
        return tuple(weights), tuple(weights.values())

    def _refusal(self, row: Mapping[str, Any], place: int, limits: Mapping[str, Limit]) -> tuple[str, str] | None:
        best, score = row["classes"][0], row["scores"][0]
        if score < self._source.min_score:
            return "low_score", f"{best} with probability {score:.3f}, below min_score {self._source.min_score}"
        if (limit := limits.get(best)) and (-score, place) > (-limit.score, limit.place):
            most = f"{self._source.max_per_class:,} most probable"
            return "class_full", f"{best} with probability {score:.3f} is not among its {most}"
        return None

    def _limits(self, most: int) -> dict[str, Limit]:
        """Of every class with more images than `most`, the last that stays. Needs some 30 bytes of memory per image."""
        names: dict[str, int] = {}
        codes, scores = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        for key in self._keys():
            found = read_table(self._run, key, ["class", "score"])
            of_file = found["class"].combine_chunks().dictionary_encode()
            code_of = [names.setdefault(name, len(names)) for name in of_file.dictionary.to_pylist()]
            codes.append(np.array(code_of, np.int32)[of_file.indices.to_numpy()])
            scores.append(found["score"].to_numpy())
        code, score = np.concatenate(codes), np.concatenate(scores)
        order = np.lexsort((-score, code))  # by class, the most probable first, of equal ones the first
        starts = np.searchsorted(code[order], np.arange(len(names) + 1))
        by_number, limits = list(names), dict[str, Limit]()
        for number in np.flatnonzero(np.diff(starts) > most).tolist():
            place = int(order[starts[number] + most - 1])
            limits[by_number[number]] = Limit(float(score[place]), place)
        return limits

    def _images(self, split: str, rows: range) -> Iterator[dict[str, Any]]:
        """Images, ids and groups of consecutive rows of a split of the corpus."""
        info = self._manifest.split(split)
        with ShardReader(self._corpus, self._manifest, split) as reader:
            for group in range(_group_of(info, rows.start), _group_of(info, rows[-1]) + 1):
                first = info.place(group).first_row
                table = reader.row_group(group, ["image", "example_id", "group"])
                begin = max(0, rows.start - first)
                yield from _rows(table.slice(begin, max(0, rows.stop - first - begin)))

    def _keys(self) -> list[str]:
        return sorted(self._run.list(f"{_FOLDER}/"))

    @functools.cached_property
    def _config(self) -> PredictionRun:
        """Raises ValueError where there is no finished batch prediction."""
        advice = "`vitline model predict-corpus` makes predictions; give the URI of its run, as in s3://bucket/runs/birds-predictions-..."
        found = self._run.read_json_or_none("config.json")
        if found is None or "top_k" not in found:
            raise ValueError(f"{self._run.uri} is no run of a batch prediction. {advice}")
        state = read_state(self._run)
        if state is None or state["state"] != "finished":
            raise ValueError(
                f"The batch prediction {self._run.uri} is not finished; it is {state['state'] if state else 'waiting'}. Let the "
                "same request go on to its end."
            )
        return PredictionRun.model_validate(found)

    @functools.cached_property
    def _corpus(self) -> Store:
        return open_store(self._config.corpus)

    @functools.cached_property
    def _manifest(self) -> Manifest:
        try:
            manifest = load_manifest(self._corpus)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if manifest.digest != self._config.corpus_digest:
            raise ValueError(
                f"{self._corpus.uri} is not the corpus that was predicted: its digest is {manifest.digest[:12]}, that of the "
                f"predictions {self._config.corpus_digest[:12]}. Predict its classes again."
            )
        return manifest


def _group_of(info: SplitInfo, row: int) -> int:
    """The row group that holds a row."""
    return bisect.bisect_right(range(info.num_row_groups), row, key=lambda group: info.place(group).first_row) - 1


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """One row after another, so that only one image at a time is copied out of the table."""
    for batch in table.to_batches():
        for i in range(batch.num_rows):
            yield {name: column[i].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
