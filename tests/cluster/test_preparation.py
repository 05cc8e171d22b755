"""Several hosts prepare the corpus that one host prepares, although one of them is slow and another is lost on the way."""

import contextlib
import json
import sys
import time

import psutil
import pytest

from vitline.infra.local.processes import tail
from vitline.infra.local.stack_config import BUCKET

from ..eventually import eventually
from ..pictures import blurred
from .ray_hosts import ray_hosts, why_not_here

NUMBER = 7
SLOW, LOST = "h1", "h2"
SLOW_SHARE = 0.2
PICTURES, PER_CHUNK = 400, 4
CHUNKS = PICTURES // PER_CHUNK
PREPARE = [sys.executable, "-P", "-m", "vitline.flows.cli.main", "data", "prepare"]
PREPARE += [f"--source=s3://{BUCKET}/pictures", "--name=pictures"]
PREPARE += ["--set=execution.small_images=0", f"--set=execution.examples_per_chunk={PER_CHUNK}"]
PREPARE += ["--set=recipe.sharding.row_group_bytes=4000", "--set=recipe.sharding.shard_bytes=16000"]

pytestmark = [
    pytest.mark.servers,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why_not_here()), reason=f"the hosts of this test: {why_not_here()}"),
]


class Preparation:
    """`vitline data prepare` of the pictures into a root of its own, by a process on the head."""

    def __init__(self, cluster, root):
        self.cluster, self.root, self.began = cluster, root, time.monotonic()
        self.log, variables = cluster.log(root), cluster.variables(f"s3://{BUCKET}/{root}")
        self.process = cluster.hosts.start(cluster.head, PREPARE, self.log, variables)

    def examined(self):
        """The number of chunks that are examined."""
        assert self.process.poll() is None, tail(self.log)
        return sum("/records-" in key for key in self.cluster.keys(f"{self.root}/corpora/"))

    def ended(self):
        """The manifest of the corpus."""
        assert self.process.wait() == 0, tail(self.log)
        print(f"{self.root}: {time.monotonic() - self.began:.0f} s")
        (key,) = [key for key in self.cluster.keys(f"{self.root}/corpora/") if key.endswith("/manifest.json")]
        return json.load(self.cluster.client().get_object(Bucket=BUCKET, Key=key)["Body"])


def works_on_a_task(process):
    with contextlib.suppress(psutil.Error):
        return "ray::Map" in " ".join(process.cmdline())


def test_a_slow_and_a_lost_host_change_no_corpus():
    with ray_hosts(NUMBER) as cluster, cluster.hosts.inside(cluster.head):
        hosts, s3 = cluster.hosts, cluster.client()
        for number in range(PICTURES):
            key = f"pictures/{('crow', 'jay')[number % 2]}/{number}.png"
            s3.put_object(Bucket=BUCKET, Key=key, Body=blurred(number, (64, 48), "PNG"))
        expected = Preparation(cluster, "one").ended()
        cluster.join(hosts.names[1:])
        many = Preparation(cluster, "many")
        with hosts.slow(SLOW, SLOW_SHARE):
            eventually(lambda: many.examined() >= CHUNKS // 5, 300, "a fifth of the work", 0.1)
            examined = many.examined()
            eventually(lambda: any(map(works_on_a_task, hosts.processes(LOST))), 60, f"a task on {LOST}", 0.01)
            hosts.kill(LOST)
            found = many.ended()
        assert examined < CHUNKS
        assert found["digest"] == expected["digest"]
        assert (found["counts"], found["counts"]["num_accepted"]) == (expected["counts"], PICTURES)
        assert f"address: {hosts.address(LOST)} and node name: {LOST} has been marked dead" in cluster.job_logs()
