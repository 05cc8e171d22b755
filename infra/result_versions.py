"""Result versions: one integer per stage, part of every run key. Raise one by hand when a change of the code changes
results. Older runs then keep their keys, and the same request starts a new run."""

RESULT_VERSIONS = {"prepare": 4, "pretrain": 1, "finetune": 1, "evaluate": 1, "predict": 1, "pipeline": 1}
