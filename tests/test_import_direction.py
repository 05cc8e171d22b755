"""infra <- data_prep <- vit <- flows: reads the imports of every module and keeps the arrow, and the doors, true."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("infra", "data_prep", "vit", "flows")
# Beside its own kind, a room may import what stands to its left; vit takes two modules of data_prep only.
VIT_TAKES = {"data_prep.shard_format", "data_prep.decode"}
DOORS = {
    "ray": {"data_prep/prepare.py", "vit/ray_train.py", "vit/ray_workers.py", "infra/ray_jobs.py"},
    "prefect": {"flows/"},
    "mlflow": {"infra/mlflow/tracking.py"},
    "s3fs": {"infra/stores/s3_store.py"},
    "boto3": set(),
}
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, function bodies included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            # `from data_prep import decode` names the module only together with what it takes.
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_to_the_left_and_services_have_their_doors(path):
    name = str(path.relative_to(ROOT))
    room = ROOMS.index(name.split("/")[0])
    found = imports(path)
    for module in found:
        top = module.split(".")[0]
        if top in ROOMS:
            assert ROOMS.index(top) <= room, f"{name} imports {module}, which stands to its right"
        if top in DOORS:
            allowed = any(name == door or (door.endswith("/") and name.startswith(door)) for door in DOORS[top])
            assert allowed, f"{name} imports {top}; its door is {DOORS[top] or 'closed'}"
    if name.startswith("vit/"):
        taken = {m for m in found if m.split(".")[0] == "data_prep"}
        allowed = VIT_TAKES | {"data_prep"}
        assert all(any(m == a or m.startswith(f"{a}.") for a in allowed if a != "data_prep") for m in taken), taken
    if name.startswith("data_prep/"):
        assert "torch" not in {m.split(".")[0] for m in found}, f"{name}: a preparation worker has no torch"


@pytest.mark.parametrize(
    "name",
    ["data_prep/config.py", "vit/config.py", "vit/input/config.py", "flows/deployed.py", "flows/commands/trigger.py"],
)
def test_configs_and_flows_import_neither_torch_nor_ray(name):
    """Run for real: what they import may import something in turn. Each flow run is a process of its own."""
    module = name.removesuffix(".py").replace("/", ".")
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'ray'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_environment_variables_are_read_in_one_place():
    """`os.environ` belongs to infra/settings.py; what a child process inherits is asked for there too."""
    readers = {str(p.relative_to(ROOT)) for p in MODULES if re.search(r"os\.(environ|getenv)", p.read_text())}
    assert readers <= {"infra/settings.py"}, readers
