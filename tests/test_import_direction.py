"""Checks the imports of every module: infra <- data_prep <- vit <- flows, and no import cycle in any folder."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("infra", "data_prep", "vit", "flows")
# A room may import itself and rooms to its left; vit imports only four modules of data_prep.
VIT_MAY_IMPORT = {
    "vitline.data_prep.shard_format",
    "vitline.data_prep.decode",
    "vitline.data_prep.examine.decode_sandboxed",
    "vitline.data_prep.parquet_files",
}
IMPORTERS = {
    "ray": {
        "infra/local/ray_node.py",
        "infra/runs/ray_work.py",
        "vit/ray_jobs/",
    },
    "prefect": {"flows/"},
    "mlflow": {"infra/mlflow/mlflow_private.py", "infra/mlflow/tracking.py"},
    "s3fs": {"infra/stores/s3_store.py"},
    "obstore": {"infra/stores/object_store.py"},
    "boto3": set(),
}
# What computes with networks in the process of a command, which imports these inside of functions.
COMPUTE_IN_FLOWS = {
    "flows/cli/evaluation.py",
    "flows/cli/models.py",
    "flows/cli/training_input.py",
    "flows/plans/evaluation_cost.py",
    "flows/plans/transfer_plan.py",
}
# Within a room of the top level, each file or folder imports only what stands to its left.
ORDER = {
    "data_prep": (
        "parquet_files labels archives decode config source_kinds shard_format sources find_corpus partitions records progress "
        "executors examine plan shards pages prepare benchmarks examples"
    ),
    "vit": (
        "models input config recipes training checkpoints published corpora cost pages run evaluation features ray_jobs convert"
    ),
    "flows": "console catalog forms nights plans to_mlflow reports runs ops on_prefect cli",
}
MAX_FILES_PER_FOLDER = 15
"""A reader can survey this many modules at once."""


def module_name(path: Path) -> str:
    return ".".join(("vitline", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}
FOLDERS = sorted({path.parent for path in MODULES.values()})


def room_of(module: str) -> str | None:
    """The room of a module; None for one of another package."""
    top, _, rest = module.partition(".")
    return rest.split(".")[0] if top == "vitline" and rest else None


@functools.cache
def imports(importer: str) -> set[str]:
    """Dotted names of all modules that a module imports, function bodies included."""
    path = MODULES[importer]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            # In `from vitline.data_prep import decode`, only both names together are the module.
            taken = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in taken}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_left_and_services_are_imported_only_by_their_modules(room):
    for name in (name for name in MODULES if room_of(name) == room):
        file = str(MODULES[name].relative_to(ROOT))
        for module in imports(name):
            top, to = module.split(".")[0], room_of(module)
            assert top not in ROOMS, f"{file} imports {module}, which is vitline.{module}"
            if to:
                assert ROOMS.index(to) <= ROOMS.index(room), f"{file} imports {module}, which is to its right"
            if top in IMPORTERS:
                allowed = any(
                    file == place or (place.endswith("/") and file.startswith(place)) for place in IMPORTERS[top]
                )
                assert allowed, f"{file} imports {top}, which only these may import: {sorted(IMPORTERS[top])}"
            if room == "vit" and to == "data_prep":
                assert module in VIT_MAY_IMPORT, f"{file} imports {module}"
            assert room != "data_prep" or top != "torch", f"{file} imports torch, which preparation workers do not have"


@pytest.mark.parametrize("room", ORDER)
def test_imports_within_a_room_point_left(room):
    order = ORDER[room].split()
    prefix = f"vitline.{room}."
    below = {name: name.removeprefix(prefix).split(".")[0] for name in MODULES if name.startswith(prefix)}
    assert set(below.values()) - {"native"} == set(order), "each file and folder has its place in ORDER"
    for name, here in below.items():
        for there in {below[other] for other in imports(name) if other in below} - {here}:
            assert order.index(there) < order.index(here), f"{name} imports {there}, which is to its right"


def test_images_of_others_are_decoded_in_the_decoding_process_only():
    """These read images that it has accepted, or published files (SECURITY.md, "How it is kept")."""
    decoders = re.compile(
        r"from vitline\.data_prep\.decode import [^\n]*\b(decode|decode_image)\b|\bImage\.open\(|\bimdecode\(|simplejpeg\.decode"
    )
    found = {str(path.relative_to(ROOT)) for path in MODULES.values() if decoders.search(path.read_text())}
    vtab = {f"data_prep/benchmarks/vtab/{name}.py" for name in ("caltech101", "sun397", "diabetic_retinopathy")}
    training = {"vit/input/read_shards.py", "vit/input/decoding/native_view.py"}
    assert found == {"data_prep/decode.py", "data_prep/examine/images.py"} | training | vtab


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_folder_has_no_import_cycle(folder):
    """The nodes are the files and folders directly in it; a folder has the imports of everything below it."""
    prefix = module_name(folder / "__init__.py") + "."
    below = {name: name.removeprefix(prefix).split(".")[0] for name in MODULES if name.startswith(prefix)}
    graph: dict[str, set[str]] = {node: set() for node in below.values()}
    for name, node in below.items():
        graph[node] |= {below[other] for other in imports(name) if other in below} - {node}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"{folder.relative_to(ROOT)}: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_folder_is_small_and_has_a_short_readme(folder):
    """Few files, and a README of at most a page."""
    shown = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(shown) <= MAX_FILES_PER_FOLDER, f"{folder.relative_to(ROOT)} has {len(shown)} files"
    readme = folder / "README.md"
    assert readme.exists(), f"{folder.relative_to(ROOT)} has no README.md"
    assert len(readme.read_text().splitlines()) <= 80, f"{readme.relative_to(ROOT)} is longer than a page"


def runs_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that its import executes: neither those of functions nor those for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef | ast.Try) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test)
        ):
            yield from runs_at_import(node.body)


@functools.cache
def loaded(module: str) -> set[str]:
    """What the import of a module imports, and the packages above it."""
    names: set[str] = set()
    for node in runs_at_import(ast.parse(MODULES[module].read_text()).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name[:end] for name in names for end in (*(found.start() for found in re.finditer(r"\.", name)), len(name))}


def test_what_flows_import_imports_neither_torch_nor_ray():
    """By the text of all modules; the test below also sees what other packages import."""
    for start in (name for name in MODULES if room_of(name) == "flows"):
        if str(MODULES[start].relative_to(ROOT)) in COMPUTE_IN_FLOWS:
            continue
        seen, left = {start}, [start]
        while left:
            module = left.pop()
            heavy = loaded(module) & {"torch", "ray"}
            assert not heavy, f"{start} imports {heavy} by way of {module}"
            new = (loaded(module) & MODULES.keys()) - seen
            seen |= new
            left += new


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "data_prep/config.py",
        "vit/config.py",
        "vit/input/config.py",
        "flows/on_prefect/flows.py",
        "flows/cli/trigger.py",
    ],
)
def test_configs_and_flows_import_neither_torch_nor_ray(name):
    """Imported in a new process, because imports may be indirect. Each flow run is a process of its own."""
    module = "vitline." + name.removesuffix(".py").replace("/", ".")
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'ray'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_environment_variables_are_read_in_settings_only():
    """Only infra/settings.py, infra/settings_file.py and infra/environment use `os.environ`, also for the environment of child
    processes; and the build of vit/native, which is a package of its own."""
    readers = {str(p.relative_to(ROOT)) for p in MODULES.values() if re.search(r"os\.(environ|getenv)", p.read_text())}
    others = {reader for reader in readers if not reader.startswith("infra/environment/")}
    assert others <= {"infra/settings.py", "infra/settings_file.py", "vit/native/needs.py"}, readers
