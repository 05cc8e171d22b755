"""Code in the READMEs and the documentation works: Python blocks are run, commands are parsed with all their options.

Commands are not run here: `make demo`, trainings and servers are run in `end_to_end/` and `flows/`; other commands need large
data sets, or change this machine.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitline.data_prep.config import ClassFolders, CorpusConfig
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.prepare.job import prepare
from vitline.flows.cli.main import all_commands
from vitline.infra.runs.journal import Journal
from vitline.infra.settings_file import SETTINGS_FILE, read_file
from vitline.infra.storage import open_store
from vitline.vit.convert.timm import write_timm
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import ViTConfig
from vitline.vit.published.models import publish

ROOT = Path(__file__).parents[1]
ROOMS = ("infra", "data_prep", "vit", "flows", "tests")
DOCUMENTS = [
    ROOT / "README.md",
    *(path for room in ROOMS for path in sorted((ROOT / room).rglob("README.md"))),
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Kinds of fenced blocks that are neither run nor parsed, and why. A kind that is not named here fails the test.
NOT_CHECKED = {
    "": "diagrams and folder names",
    "diff": "lines that test_contributing.py applies to a copy of the code",
    "yaml": "a deployments file, which tests/flows/on_prefect/deploy reads",
}
# Other programs in shell blocks, and why their lines are not checked here.
OTHER_PROGRAMS = {
    "cd": "changes the folder",
    "mlflow": "serving a registered model is tested by the tests of the registry",
    "curl": "sends requests to that server",
    "export": "sets addresses of servers",
    "eval": "takes the output of `vitline stack env`, which is tested by the tests of that command",
    "pip": "installs on the nodes of a cluster",
    "docker": "builds and enters images, and starts services, which tests/infra/images and compose do without Docker",
    "ray": "starts a cluster",
    "prefect": "makes a work pool on a server",
    "hf": "downloads weights",
    "helm": "installs an operator in a cluster",
    "kubectl": "changes a cluster; tests/infra/kubernetes renders the manifests",
    "openssl": "makes a certificate",
    "aws": "changes a bucket; tests/flows/ops/test_bucket_policies.py uses the files",
    "sed": "fills in those files",
    **dict.fromkeys(
        ("useradd", "install", "cp", "systemctl", "journalctl"),
        "installs the units that tests/infra/systemd starts",
    ),
    "printf": "writes a file with a password",
    "rm": "removes files with secrets",
    "sh": "runs a script of infra/compose, which tests/infra/compose runs, too",
    "sbatch": "submits jobs to Slurm; what vitline.sbatch runs in them is checked",
}
_IN_A_JOB = re.compile(r"^sbatch .*infra/slurm/vitline\.sbatch +")
COMMAND = all_commands()
# timm imports torchvision, whose compiled operators may be missing with a CPU build of torch (see vit/conftest.py).
WITHOUT_TORCHVISION = """
import contextlib, torch
library = torch.library.Library("torchvision", "DEF")
with contextlib.suppress(RuntimeError):
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def blocks(kind: str) -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.M | re.S):
            assert language in ("python", "sh", "toml", *NOT_CHECKED), f"{path} has a block of {language!r}"
            if language == kind:
                found.append((str(path.relative_to(ROOT)), text))
    return found


def command_lines() -> list[tuple[str, str]]:
    """Every command of the shell blocks and every `vitline ...` in the text, with alternatives such as `ls|show` expanded."""
    found = []
    for name, text in blocks("sh"):
        found += [(name, _IN_A_JOB.sub(".venv/bin/vitline ", line)) for line in text.replace("\\\n", " ").splitlines()]
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        for line in re.findall(r"`((?:\.venv/bin/)?vitline [^`]*)`", prose):
            words = [word.split("|") for word in line.replace("\\|", "|").split()]
            found += [(str(path.relative_to(ROOT)), " ".join(each)) for each in itertools.product(*words)]
    return sorted({(name, line) for name, line in found if line.split() and program_of(line) not in OTHER_PROGRAMS})


def program_of(line: str) -> str:
    return line.split()[0].removeprefix(".venv/bin/")


@pytest.fixture(scope="module")
def store_with_a_corpus(tmp_path_factory) -> Path:
    """The store after `vitline data prepare --source pictures --name birds`."""
    folder = tmp_path_factory.mktemp("birds")
    levels = np.random.default_rng(0)
    for bird in ("crow", "jay", "tit"):
        (folder / "pictures" / bird).mkdir(parents=True)
        for i in range(4):
            picture = Image.fromarray(levels.integers(0, 256, (12, 16, 3), np.uint8))
            picture.save(folder / "pictures" / bird / f"{i}.png")
    source = ClassFolders(path=str(folder / "pictures"))
    prepare([CorpusConfig(name="birds", source=source)], str(folder / "store"))
    return folder / "store"


@pytest.fixture
def folder_with_a_model(tmp_path, store_with_a_corpus) -> Path:
    """The result of `vitline train-folder --name birds`, a picture, and the model as `vitline model convert` writes it for timm."""
    shutil.copytree(store_with_a_corpus, tmp_path / ".vitline" / "store")
    run = open_store(str(tmp_path / ".vitline" / "store" / "runs" / "birds-0123456789ab"))
    run.write_json("config.json", {})
    journal = Journal(run, 1)
    journal.record({"train/loss": 0.5}, 1)
    journal.close()
    torch.manual_seed(0)
    config = ViTConfig(image_size_px=16, patch_size_px=8, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)
    network = build_network(config, 3).eval()
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=16))
    models = open_store(str(tmp_path / ".vitline" / "store" / "models"))
    publish(models, "birds", "0123456789ab", network, contract, ["crow", "jay", "tit"], {})
    write_timm(network, tmp_path / "birds-timm", ["crow", "jay", "tit"], contract)
    Image.fromarray(np.full((20, 30, 3), 120, np.uint8)).save(tmp_path / "picture.jpg")
    return tmp_path


@pytest.mark.parametrize(("name", "text"), blocks("toml"))
def test_toml_blocks_of_the_documentation_are_files_of_settings(name, text, tmp_path):
    path = tmp_path / SETTINGS_FILE
    path.write_text(text)
    assert read_file(path, named=False), name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), blocks("python"))
def test_python_blocks_of_the_documentation_run(name, code, folder_with_a_model):
    prefixes = ("VITLINE_", "AWS_", "RAY_", "MLFLOW_", "PREFECT_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    env |= {"HF_HOME": str(folder_with_a_model / "hf"), "HF_HUB_OFFLINE": "1"}
    before = WITHOUT_TORCHVISION if "import timm" in code else ""
    done = subprocess.run(
        [sys.executable, "-c", before + code],
        cwd=folder_with_a_model,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{name}:\n{code}\n{done.stderr}"
    assert any(word in done.stdout for word in ("crow", "jay", "tit", "train/loss"))


@pytest.mark.parametrize(("name", "line"), command_lines())
def test_commands_of_the_documentation_exist_with_their_options(name, line):
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M), f"{name}: {line}"
        return
    if program.endswith("python"):
        if words[0] == "-P":  # without it, a file of the current folder is imported where it is named like a module
            words = words[1:]
        else:
            assert not words[1:] or not words[1].startswith("vitline."), f"{name}: {line}"
        file = f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]
        assert (ROOT / file).exists(), f"{name}: {line}"
        return
    assert program_of(line) == "vitline", f"{name}: {line}"
    command, path = COMMAND, []
    while words and hasattr(command, "commands"):
        path.append(words.pop(0))
        if path[-1].startswith("-"):
            return  # `vitline --help`
        assert path[-1] in command.commands, f"{name}: {line}: there is no command {' '.join(path)}"
        command = command.commands[path[-1]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.partition("=")[0] for word in words if word.startswith("-")} - {"--help"}
    assert used <= known, f"{name}: {line}: {' '.join(path)} has no {', '.join(used - known)}"


@pytest.mark.parametrize(
    ("name", "line"), [each for each in command_lines() if each[1].startswith(".venv/bin/vitline")]
)
def test_full_command_lines_of_the_documentation_can_be_parsed(name, line):
    """With values and arguments: none is missing, and all have the right type."""
    words = shlex.split(line, comments=True)[1:]
    command, path = COMMAND, []
    while hasattr(command, "commands"):
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    command.make_context(" ".join(path), words).close()
