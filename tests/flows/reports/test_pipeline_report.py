"""The report of a pipeline: its plots need only what is kept of an evaluation."""

from vitline.flows.runs.pipeline_report import transfer_plots
from vitline.infra.config import replace
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskRef, plan_task_sweeps
from vitline.vit.evaluation.protocols import known_protocols
from vitline.vit.evaluation.trials import TrialResult
from vitline.vit.models.config import ViTConfig


def test_the_curve_of_a_final_trial_is_drawn_after_the_others_were_deleted(digits, root):
    task, network = (
        TaskRef(name="digits", corpus=digits.uri),
        ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=48, depth=2, num_heads=4, mlp_dim=96),
    )
    protocol = replace(known_protocols()["small-images"], image_size_px=8)
    spec = EvaluationSpec(
        run_key="tiny-000000000000", tasks=(task,), models=(None,), architecture=network, protocol=protocol, root=root
    )
    (sweep,), store = plan_task_sweeps(spec), open_store(root)
    assert transfer_plots(store, spec) == []
    selected = [done(trial.key, 0.5) for trial in sweep.select_trials()]
    final = sweep.final_trial(selected)
    result = done(final.key, 0.75)
    store.write_json(f"trials/{result.key}.json", result.model_dump(mode="json"))
    sweep.score(selected, result, final).stored_first(store, sweep.score_key)
    (plot,) = transfer_plots(store, spec)
    assert plot is not None
    assert store.list("trials/") == [f"trials/{result.key}.json"]


def done(key, top1):
    return TrialResult(
        key=key, top1=top1, loss=0.5, num_examples=797, majority_fraction=0.1, train_losses=((1, 2.0), (2, 1.0), (3, 0.5)),
        wall_s=1.0, cpu_s=1.0, diverged=False,
    )  # fmt: skip
