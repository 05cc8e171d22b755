"""Checkpoints: restored exactly, visible only when complete, refused when damaged or of another recipe or corpus."""

import hashlib
import multiprocessing
import threading
import uuid

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from tests.vit.unleased import Unleased
from vitline.infra.config import digest_of, replace
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.storage import open_store
from vitline.vit.checkpoints import read, save
from vitline.vit.checkpoints.manifest import CannotResume, WeightsError
from vitline.vit.checkpoints.names import Retention, checkpoint_prefix, list_checkpoints
from vitline.vit.checkpoints.restore import newest_checkpoint, resume
from vitline.vit.checkpoints.save import CheckpointSaver
from vitline.vit.checkpoints.shares import MOST_WRITERS, share
from vitline.vit.checkpoints.state_tensors import state_tensors
from vitline.vit.checkpoints.tensor_file import read_tensors
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.sharding.slices import local_shard
from vitline.vit.training.world import World

CPU = World()


@pytest.fixture
def run():
    return open_store(f"memory://{uuid.uuid4().hex}/runs/r")


@pytest.fixture
def meta(tiny_recipe):
    return {"recipe": tiny_recipe.model_dump(mode="json"), "corpus_digest": "c" * 64, "class_map_digest": "m" * 64}


@pytest.fixture
def trained(tiny_recipe, make_batch):
    """trained(steps): a state after this number of updates."""

    def make(steps: int):
        state = initial_state(tiny_recipe, 5, CPU.device)
        for step in range(steps):
            train_step(state, state.model, [make_batch(step)], tiny_recipe, CPU)
        return state

    return make


def commit(run, state, meta, *, attempt=1, world_size=1, **kept):
    """Saves as `world_size` ranks do, each with a saver of its own."""
    retention = Retention(**{"keep": 5, **kept})
    savers = [CheckpointSaver(Unleased(run, attempt), World(rank, world_size), retention) for rank in range(world_size)]
    for saver in savers:
        saver.save(state, {**meta, "save_id": f"s-{state.step}", "images_seen": 8 * state.step})
    for saver in savers:
        saver.wait()


def assert_equal_states(a, b):
    expected, found = state_tensors(a), state_tensors(b)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("world_size", [1, 3, MOST_WRITERS + 2])
def test_state_saved_by_any_number_of_ranks_is_restored_exactly(run, meta, trained, world_size):
    state = trained(4)
    commit(run, state, meta, world_size=world_size)
    other = trained(1)
    ref = resume(run, other, meta, CPU)
    assert ref is not None
    assert (other.step, len(ref.manifest["files"])) == (4, min(world_size, MOST_WRITERS))
    assert_equal_states(state, other)


def test_ranks_write_even_shares_as_ordinary_safetensors_files(run, meta, trained):
    state = trained(2)
    tensors = state_tensors(state)
    shares = [sum(value.nbytes for value in share(tensors, rank, 3).values()) for rank in range(3)]
    assert max(shares) - min(shares) <= max(t.nbytes for t in tensors.values())
    commit(run, state, meta, world_size=3)
    prefix = checkpoint_prefix(2, 1)
    loaded = {}
    for rank in range(3):
        loaded |= safetensors.torch.load(run.read(f"{prefix}/rank-{rank:05d}-of-00003-s-2.safetensors"))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())


def test_state_may_change_while_its_checkpoint_is_being_written(run, meta, trained, make_batch, tiny_recipe):
    state, expected = trained(3), trained(3)
    gate = threading.Event()
    saver = CheckpointSaver(Unleased(run, 1), CPU, Retention(), gate.wait)
    saver.save(state, {**meta, "save_id": "s"})
    train_step(state, state.model, [make_batch(3)], tiny_recipe, CPU)
    assert list_checkpoints(run) == []  # not committed: invisible
    gate.set()
    saver.wait()
    other = trained(1)
    resume(run, other, meta, CPU)
    assert_equal_states(expected, other)


def weights(run, step: int, rank: int = 0) -> str:
    """The key of the tensors that a rank saved."""
    keys = run.list(f"{checkpoint_prefix(step, 1)}/rank-{rank:05d}-")
    (key,) = [key for key in keys if key.endswith(".safetensors")]
    return key


@pytest.mark.parametrize(
    "damage", ["flipped byte", "missing file", "cut short", "manifest not JSON", "manifest changed"]
)
def test_damaged_checkpoint_is_named_and_the_previous_one_is_used(run, meta, trained, damage):
    commit(run, trained(2), meta)
    commit(run, trained(4), meta)
    prefix = checkpoint_prefix(4, 1)
    key = weights(run, 4)
    data = run.read(key)
    if damage == "flipped byte":
        run.write(key, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "missing file":
        run.delete(key)
    elif damage == "cut short":
        run.write(key, data[:-100])
    elif damage == "manifest not JSON":
        run.write(f"{prefix}/manifest.json", b"{")
    else:
        run.write_json(f"{prefix}/manifest.json", {**run.read_json(f"{prefix}/manifest.json"), "images_seen": 7})
    rejected = []
    ref, _ = newest_checkpoint(run, lambda prefix, error: rejected.append((prefix, str(error))))
    assert ref.step == 2
    assert [(p, prefix in text) for p, text in rejected] == [(prefix, True)]
    # The run resumes from there and may save the damaged step again. The damaged one is marked, and nothing else changes.
    before = {key: run.read(key) for key in run.list()}
    assert resume(run, trained(1), meta, CPU).step == 2
    assert list_checkpoints(run) == [checkpoint_prefix(2, 1)]
    mark = run.read_json(f"{prefix}/rejected.json")
    assert prefix in mark["reason"]
    assert {key: run.read(key) for key in run.list() if not key.endswith("rejected.json")} == before
    commit(run, trained(4), meta, keep=1)
    assert resume(run, trained(1), meta, CPU).step == 4


def with_schema(run, prefix, version):
    """A manifest as another version of vitline writes it, with its digest."""
    manifest = {**run.read_json(f"{prefix}/manifest.json"), "schema_version": version}
    del manifest["digest"]
    run.write_json(f"{prefix}/manifest.json", {**manifest, "digest": digest_of(manifest)})


def test_a_checkpoint_of_another_version_is_refused_with_what_reads_it_and_kept(run, meta, trained):
    commit(run, trained(2), meta)
    commit(run, trained(4), meta, attempt=3)
    prefix = checkpoint_prefix(4, 3)
    with_schema(run, prefix, 2)
    start = {"at": 1.0, "world_size": 1, "versions": {"vitline": "9.1", "commit": "0123456789abcdef", "torch": "2.9"}}
    run.write_json("starts/a3-from-none-000.json", start)
    before = {key: run.read(key) for key in run.list()}
    with pytest.raises(CannotResume) as refused:
        resume(run, trained(1), meta, CPU)
    for part in (
        f"{prefix}/manifest.json has schema_version 2",
        "reads 1",
        "Attempt 3",
        "vitline 9.1 (commit 0123456789ab)",
    ):
        assert part in str(refused.value)
    assert {key: run.read(key) for key in run.list()} == before


def test_a_checkpoint_with_a_name_of_another_version_is_not_overlooked(run, meta, trained):
    run.write_json("checkpoints/000000004/manifest.json", {"schema_version": 2})
    with pytest.raises(CannotResume, match="checkpoints/000000004: another version of vitline"):
        resume(run, trained(1), meta, CPU)
    commit(run, trained(5), meta, keep=1)
    assert run.exists("checkpoints/000000004/manifest.json")


def test_where_no_checkpoint_is_valid_the_run_stops_with_the_list_and_deletes_nothing(run, meta, trained):
    for steps in (2, 4):
        commit(run, trained(steps), meta)
        key = weights(run, steps)
        run.write(key, run.read(key)[:-1] + b"?")
    before = {key: run.read(key) for key in run.list()}
    state = trained(1)
    for _ in range(2):  # the second finds the marks of the first
        with pytest.raises(CannotResume, match="None of the 2 checkpoints") as refused:
            resume(run, state, meta, CPU)
        for part in (checkpoint_prefix(4, 1), checkpoint_prefix(2, 1), "sha256", f"delete {run.uri_of('checkpoints')}"):
            assert part in str(refused.value)
    assert_equal_states(state, trained(1))
    marks = {f"{checkpoint_prefix(steps, 1)}/rejected.json" for steps in (2, 4)}
    assert {key: run.read(key) for key in run.list() if key not in marks} == {
        k: v for k, v in before.items() if k not in marks
    }
    assert marks < set(run.list())


def test_a_marked_checkpoint_that_can_be_read_again_is_used_again(run, meta, trained):
    """As where a proxy changed bytes on their way, and does no more."""
    commit(run, trained(2), meta)
    commit(run, trained(4), meta)
    key = weights(run, 4)
    data = run.read(key)
    run.write(key, data[:-1] + b"?")
    assert resume(run, trained(1), meta, CPU).step == 2
    run.write(key, data)
    state = trained(1)
    assert resume(run, state, meta, CPU).step == 4
    assert_equal_states(state, trained(4))
    assert list_checkpoints(run) == [checkpoint_prefix(4, 1), checkpoint_prefix(2, 1)]


def test_marked_checkpoints_do_not_count_as_kept_and_go_once_enough_newer_ones_are_there(run, meta, trained):
    for steps in (1, 2):
        commit(run, trained(steps), meta)
    damaged = checkpoint_prefix(2, 1)
    run.delete(weights(run, 2))
    assert resume(run, trained(1), meta, CPU).step == 1
    commit(run, trained(2), meta, keep=2)  # its place is taken by the marked one
    again = checkpoint_prefix(2, 1, repetition=1)
    assert list_checkpoints(run) == [again, checkpoint_prefix(1, 1)]
    assert run.exists(f"{damaged}/manifest.json")
    commit(run, trained(3), meta, keep=2)
    assert list_checkpoints(run) == [checkpoint_prefix(3, 1), again]
    assert not run.list(f"{damaged}/")


def test_an_attempt_that_lost_its_lease_marks_nothing(run, meta, trained):
    def lost():
        raise LeaseLost("attempt 2 holds it")

    commit(run, trained(2), meta)
    run.delete(weights(run, 2))
    before = run.list()
    with pytest.raises(LeaseLost):
        resume(run, trained(1), meta, CPU, check_lease=lost)
    assert run.list() == before


def resume_as_rank(rank, run_uri, recipe, meta, sync, answers):
    """Answers with the bytes that this rank has read of tensors, and a digest of the state, or why it cannot resume."""
    dist.init_process_group("gloo", init_method=f"file://{sync}", rank=rank, world_size=2)
    state, num_bytes = initial_state(recipe, 5, CPU.device), 0

    def counted(store, key, pieces):
        nonlocal num_bytes
        num_bytes += sum(piece["end"] - piece["start"] for piece in pieces)
        return read_tensors(store, key, pieces)

    read.read_tensors = counted
    try:
        resume(open_store(run_uri), state, meta, World(rank, 2))
        answers.put((rank, (num_bytes, digest(state))))
    except CannotResume as error:
        answers.put((rank, str(error)))
    dist.barrier()


def digest(state):
    return hashlib.sha256(safetensors.torch.save(state_tensors(state))).hexdigest()


@pytest.fixture
def run_on_disk(tmp_path):
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def answers_of_two_ranks(run_on_disk, meta, tiny_recipe, tmp_path):
    def resumed():
        context = multiprocessing.get_context("spawn")
        answers, given = context.Queue(), (run_on_disk.uri, tiny_recipe, meta, str(tmp_path / "meet"))
        ranks = [context.Process(target=resume_as_rank, args=(rank, *given, answers)) for rank in range(2)]
        for process in ranks:
            process.start()
        found = dict(answers.get(timeout=800) for _ in ranks)
        for process in ranks:
            process.join()
        return found

    return resumed


@pytest.mark.slow
def test_ranks_read_each_tensor_once_and_send_it_to_the_others(run_on_disk, meta, trained, answers_of_two_ranks):
    state = trained(2)
    commit(run_on_disk, state, meta, world_size=3)
    (first, one), (second, other) = answers_of_two_ranks().values()
    assert one == other == digest(state)
    assert first + second == sum(value.nbytes for value in state_tensors(state).values())
    assert min(first, second) > 0.4 * (first + second)


@pytest.mark.slow
def test_all_ranks_stop_where_no_checkpoint_is_valid(run_on_disk, meta, trained, answers_of_two_ranks):
    commit(run_on_disk, trained(2), meta, world_size=2)
    run_on_disk.delete(weights(run_on_disk, 2, rank=1))
    found = answers_of_two_ranks()
    assert found[0] == found[1]
    assert "None of the 1 checkpoints" in found[0]


def test_another_recipe_or_corpus_is_refused_with_the_difference(run, meta, trained, tiny_recipe):
    commit(run, trained(2), meta)
    changed = replace(tiny_recipe, **{"optim.peak_lr": 5e-2}).model_dump(mode="json")
    key = weights(run, 2)
    data = run.read(key)
    run.write(key, b"?" + data[1:-1] + b"?")  # refused before a tensor is read, and not marked as damaged
    with pytest.raises(CannotResume, match=r"recipe\.optim\.peak_lr: 0\.01 -> 0\.05"):
        resume(run, trained(1), {**meta, "recipe": changed}, CPU)
    assert not [key for key in run.list() if key.endswith("rejected.json")]
    run.write(key, data)
    with pytest.raises(WeightsError, match="corpus_digest"):
        resume(run, trained(1), {**meta, "corpus_digest": "d" * 64}, CPU)


def test_attempt_that_lost_its_lease_commits_nothing_and_raises(run, meta, trained):
    def lost():
        raise LeaseLost("attempt 2 holds it")

    held = Unleased(run, 1)
    held.check = lost
    saver = CheckpointSaver(held, CPU, Retention())
    saver.save(trained(2), {**meta, "save_id": "s"})
    with pytest.raises(LeaseLost):
        saver.wait()
    assert list_checkpoints(run) == []


def test_worker_that_wakes_after_its_replacement_has_committed_changes_nothing(run, meta, trained, overtake):
    """Both are of one attempt, so neither has lost a lease; the old one is suspended before it writes its tensors."""
    old, state = trained(1), trained(2)
    old.step = state.step
    saver = CheckpointSaver(Unleased(run, 1), CPU, Retention())
    overtake(save, "write_tensors", lambda: commit(run, state, meta))
    saver.save(old, {**meta, "save_id": "old"})
    saver.wait()
    restored = trained(1)
    assert resume(run, restored, meta, CPU).manifest["save_id"] == "s-2"
    assert_equal_states(restored, state)


def test_rank_0_does_not_wait_for_ranks_that_found_the_checkpoint_committed(run, meta, trained, overtake, monkeypatch):
    """An earlier start of the same attempt wakes and commits it after the new rank 0 has looked, and before rank 1 looks."""
    state = trained(2)
    monkeypatch.setattr(save, "PEER_TIMEOUT_S", 5.0)
    saver = CheckpointSaver(Unleased(run, 1), World(0, 2), Retention())

    def commit_at_an_earlier_start():
        commit(run, state, meta, world_size=2)
        CheckpointSaver(Unleased(run, 1), World(1, 2), Retention())._write({}, {"step": 2, "save_id": "new"})

    overtake(save, "write_tensors", commit_at_an_earlier_start)
    saver.save(state, {**meta, "save_id": "new"})
    saver.wait()
    restored = trained(1)
    assert resume(run, restored, meta, CPU).manifest["save_id"] == "s-2"
    assert_equal_states(restored, state)


def test_attempt_that_loses_its_lease_while_it_commits_deletes_no_file_of_its_successor(
    run, meta, trained, monkeypatch
):
    commit(run, trained(1), meta)
    theirs, held = f"{checkpoint_prefix(2, 2)}/rank-00000-of-00001-new.safetensors", [True]
    real = save.commit

    def suspended(*args):
        real(*args)
        held.clear()
        run.write(theirs, b"being written by attempt 2, which resumed at step 1")

    def check():
        if not held:
            raise LeaseLost("attempt 2 holds it")

    monkeypatch.setattr(save, "commit", suspended)
    lease = Unleased(run, 1)
    lease.check = check
    saver = CheckpointSaver(lease, CPU, Retention())
    saver.save(trained(3), {**meta, "save_id": "old"})
    with pytest.raises(LeaseLost):
        saver.wait()
    assert run.exists(theirs)


def test_an_attempt_that_wakes_while_it_deletes_leaves_the_unfinished_save_of_its_successor(run, meta, trained):
    """It was suspended after its last look at the lease; attempt 2 has resumed before its checkpoint and is saving."""
    commit(run, trained(3), meta)
    theirs = f"{checkpoint_prefix(2, 2)}/rank-00000-of-00001-new.safetensors"
    run.write(theirs, b"being written by attempt 2, which resumed at step 1")
    save.prune(run, Retention(2), newest=checkpoint_prefix(3, 1))
    assert run.exists(theirs)


def test_newest_checkpoints_are_kept_and_a_later_attempt_wins_at_the_same_step(run, meta, trained):
    for steps in (1, 2, 3):
        commit(run, trained(steps), meta, keep=2)
    assert list_checkpoints(run) == [checkpoint_prefix(3, 1), checkpoint_prefix(2, 1)]
    assert not run.list(checkpoint_prefix(1, 1))
    commit(run, trained(3), meta, attempt=2)
    assert list_checkpoints(run)[0] == checkpoint_prefix(3, 2)


def test_files_of_a_killed_save_are_deleted_by_a_later_one(run, meta, trained):
    run.write(f"{checkpoint_prefix(1, 1)}/rank-00000-of-00002.safetensors", b"half")
    commit(run, trained(2), meta)
    assert not run.list(checkpoint_prefix(1, 1))


def test_workers_restarted_within_an_attempt_do_not_commit_older_files(run, meta, trained):
    """Rank 1 of an earlier start has left its files; the new rank 0 waits for the new rank 1."""
    old = trained(2)
    CheckpointSaver(Unleased(run, 1), World(1, 2), Retention())._write(
        {"model/old": local_shard(torch.zeros(1))}, {"step": 2, "save_id": "before"}
    )
    commit(run, old, meta, world_size=2)
    other = trained(1)
    resume(run, other, meta, CPU)
    assert_equal_states(old, other)


@pytest.mark.parametrize(
    ("keep_every_images", "expected"),
    [
        (None, []),
        (80, [10, 20, 30, 40, 50, 60]),
        (200, [30, 50]),  # 240 images are the first from 200 on, 400 from 400 on
        (150, [20, 40, 60]),
        (480, [60]),
        (1, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_the_first_regular_checkpoint_after_each_number_of_images_lasts(keep_every_images, expected):
    retention = Retention(keep_every_images=keep_every_images, save_every_steps=10, global_batch_size=8)
    assert [
        step for step in range(1, 64) if retention.is_permanent(step)
    ] == expected  # preempted runs save at any step


@pytest.mark.parametrize("world_size", [1, 2])
def test_lasting_checkpoints_stay_beside_the_newest_unless_they_are_damaged(run, meta, trained, world_size):
    def save(step):
        commit(run, trained(step), meta, world_size=world_size, keep=1, keep_every_images=2)

    for step in (1, 2, 3, 4, 5):
        save(step)
    assert list_checkpoints(run) == [checkpoint_prefix(step, 1) for step in (5, 4, 2)]
    run.write_json(f"{checkpoint_prefix(4, 1)}/rejected.json", {"reason": "a byte differs"})
    run.delete(f"{checkpoint_prefix(2, 1)}/permanent.json")
    save(7)
    assert {key.rpartition("/")[0] for key in run.list("checkpoints/")} == {checkpoint_prefix(7, 1)}
