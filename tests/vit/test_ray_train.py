"""How the driver sets up Ray Train. Whole runs are in `tests/end_to_end/`."""

from vit.ray_train import UNUSED_CALLBACKS, trainer_class


def test_trainer_omits_only_unused_callbacks():
    from ray.train.torch import TorchTrainer

    def callbacks(trainer):
        return {type(each).__name__ for each in trainer(print)._create_default_callbacks()}

    assert callbacks(TorchTrainer) - callbacks(trainer_class()) == UNUSED_CALLBACKS
