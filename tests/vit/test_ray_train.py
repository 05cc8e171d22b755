"""How the driver sets up Ray Train. Whole runs are in `tests/end_to_end/`."""

from vit.ray_train import trainer_class


def test_trainer_omits_only_the_placement_group_cleaner():
    from ray.train.torch import TorchTrainer

    def callbacks(trainer):
        return {type(each).__name__ for each in trainer(print)._create_default_callbacks()}

    assert callbacks(TorchTrainer) - callbacks(trainer_class()) == {"PlacementGroupCleanerCallback"}
