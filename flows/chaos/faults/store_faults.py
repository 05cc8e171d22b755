"""An object store that fails, stays away, or answers other bytes than those asked for; by a proxy between it and this process."""

import contextlib
import itertools
from collections.abc import Iterator
from unittest.mock import patch

from vitline.flows.chaos.bench import Bench
from vitline.flows.chaos.faults.checkpoint_faults import stopped
from vitline.flows.chaos.faulty_proxy import FAULTS, Proxy, proxy_before
from vitline.flows.chaos.promises import NotTried, PromiseBroken, require
from vitline.flows.chaos.scenario import scenario
from vitline.infra.runs.run_state import StopReason
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.storage import StoreFailed
from vitline.vit.training.checkpoints.search import newest_checkpoint

NEEDS = "a root on S3"


@contextlib.contextmanager
def proxy(bench: Bench) -> Iterator[Proxy]:
    """A proxy before the store of the bench; what must not suffer is prepared before."""
    if not bench.on_s3:
        raise NotTried("the root is on a file system, which has no network between it and a training")
    _ = bench.undisturbed
    with proxy_before() as server:
        yield server


@scenario("every seventh request of a training meets an error, a reset, a cut or a slow reply", NEEDS, about_s=10)
def failing_store(bench: Bench) -> str:
    """A training on a store that fails now and then ends bit for bit as without the faults."""
    with proxy(bench) as server:
        server.every = 7
        run = bench.training("failing-store")
        run.train()
        server.every = 0
        bench.require_undisturbed(run)
        missing = sorted({*FAULTS} - {*server.suffered})
        require(not missing, f"the training sent too few requests to meet: {', '.join(missing)}")
        return ", ".join(f"{number} x {fault}" for fault, number in sorted(server.suffered.items()) if fault)


@scenario("the store answers every request from step 12 on with 503", NEEDS, about_s=10)
def lost_store(bench: Bench) -> str:
    """A training whose store stays away ends, after bounded retries, with an error that names operation, object and number of
    attempts; what was saved stays whole, and it resumes bit for bit."""
    with proxy(bench) as server:
        run, steps = bench.training("lost-store"), itertools.count(1)

        def asked(poller: StopPoller) -> StopReason | None:
            server.down = next(steps) >= 12
            return None

        try:
            with patch.object(StopPoller, "asked", asked):
                ended = run.train()
            raise PromiseBroken(f"the training ended as {ended} without its store")
        except StoreFailed as error:
            failed = error
        finally:
            server.down = False
        for part in ("get_object", run.run.uri, "failed at attempt"):
            require(part in str(failed), f"the error does not say {part!r}: {failed}")
        newest = newest_checkpoint(run.run, rejected=lambda *what: require(False, f"half-written: {what}"))
        require(newest is not None, "no checkpoint is left")
        run.train()
        bench.require_undisturbed(run)
        return str(failed)


@scenario("a cache answers whole objects where a range was asked for", NEEDS, about_s=8)
def ignored_ranges(bench: Bench) -> str:
    """A store that ignores the header Range is refused with that reason, and costs no checkpoint."""
    return faulty_ranges(bench, "ignored")


@scenario("a cache answers ranges with other bytes", NEEDS, about_s=8)
def garbled_ranges(bench: Bench) -> str:
    """Garbled bytes are found by their checksums; the run stops, deletes nothing, and resumes once the bytes are right."""
    return faulty_ranges(bench, "garbled")


def faulty_ranges(bench: Bench, how: str) -> str:
    with proxy(bench) as server:
        run = stopped(bench.training(f"ranges-{how}"))
        saved = {key: run.run.read(key) for key in run.run.list("checkpoints/")}
        server.range_faults = itertools.repeat(how)
        try:
            run.claim()
            ended, said = run.train(), run.reason
            require(ended == "failed", f"the run went on and ended as {ended}")
        except StoreFailed as error:
            said = str(error)
        finally:
            server.range_faults = iter(())
        expected = "header Range" if how == "ignored" else "sha256"
        require(expected in said, f"the error does not say {expected!r}: {said}")
        changed = [key for key, data in saved.items() if not run.run.exists(key) or run.run.read(key) != data]
        require(not changed, f"changed or deleted: {', '.join(changed)}")
        run.claim()
        run.train()
        bench.require_undisturbed(run)
        return said
