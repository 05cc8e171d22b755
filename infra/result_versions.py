"""What the code of each stage means, as integers in every run key. Raise one by hand when a change alters results:
runs made before it then keep their keys, and the same request starts a new run."""

RESULT_VERSIONS = {"prepare": 3, "pretrain": 1, "finetune": 1, "evaluate": 1, "pipeline": 1}
