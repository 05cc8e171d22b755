"""What every source is tested with: all that it gives, read as preparation reads it."""

import uuid

import pytest

from data_prep.corpora.raw import Part, Place
from infra.storage import open_store


@pytest.fixture
def read():
    """read(source, examples_per_part): id, labels, weights, group, split, bytes, refusal and key of every example; checked
    against its locator when its part was exhausted, and against a second listing."""

    def read_twice(source, examples_per_part=512):
        runs = []
        for _ in range(2):
            work = open_store(f"memory://{uuid.uuid4().hex}")
            place, found = Place(work, work, examples_per_part), []
            for part in source.parts(place):
                of_part = [*source.examples(Part.model_validate_json(part.model_dump_json()), place)]
                for example in of_part:
                    if not example.refused:
                        end = example.offset + example.length
                        assert open_store(example.base).read(example.key, example.offset, end) == example.data
                assert part.num_examples in (0, len(of_part)) or any(example.refused for example in of_part)
                found += [
                    (e.example_id, e.labels, e.weights, e.group, e.split, e.data, e.refused, e.key) for e in of_part
                ]
            runs.append(found)
        assert runs[0] == runs[1]
        assert len({row[0] for row in runs[0]}) == len(runs[0])
        return runs[0]

    return read_twice
