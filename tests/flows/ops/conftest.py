"""A collection of garbage."""

from pathlib import Path

import pytest

from vitline.flows.forms.forms import CollectGarbageRequest
from vitline.flows.ops.collect_garbage import collect_garbage
from vitline.flows.runs.services import ConsoleObserver, Services
from vitline.flows.to_mlflow.child import SenderChild
from vitline.infra.settings import Settings


@pytest.fixture
def collect(root):
    """collect(**request): the findings, after deleting; of another root, if one is given."""

    def call(root=root, **request):
        settings = Settings(root=root, mlflow_tracking_uri=None)
        services = Services(settings, None, ConsoleObserver(), SenderChild(settings, Path()))
        return collect_garbage(CollectGarbageRequest.model_validate({"dry_run": False, **request}), services)

    return call
