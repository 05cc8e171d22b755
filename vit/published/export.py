"""Exports published models to torch.export (`.pt2`) and ONNX, which need no vitline, and checks the exported program.

The input is a batch of any size, float32 (batch, 3, height, width), decoded, resized and normalised by the image contract.
The output is logits. `<path>.json` beside the program has the contract, the classes and the digest of the model.
"""

import contextlib
import copy
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitline.vit.published.models import PublishedModel

MAX_DIFFERENCE = 1e-5  # of logits, relative to the largest
# A larger difference is allowed up to this multiple of the network's own rounding error. Deep ResNets come near the limit by
# rounding alone: at 224 px BiT-R50x1 differs by 6e-6 from its exact logits, and by 9e-6 from those of onnxruntime.
ROUNDINGS = 3
BATCHES = (1, 3)
_FOR_ONNX = ("onnx", "onnxscript", "onnxruntime")
_SMALLEST = 1.1754944e-38  # the smallest positive normal float32

Program = Callable[[Float[Tensor, "B 3 H W"]], Float[Tensor, "B K"]]


def export_torch(model: PublishedModel, path: str | Path) -> Path:
    """Writes a torch.export program, which `torch.export.load(path).module()` loads, and returns its path.

    Raises RuntimeError and leaves no file if the loaded program computes other logits than the network.
    """
    path = Path(path)
    with _quiet():
        program = torch.export.export(model.network, (_images(model, 2),), dynamic_shapes=_shapes())
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
        return _checked(model, path, "torch.export", loaded, {"torch": torch.__version__})


def export_onnx(model: PublishedModel, path: str | Path) -> Path:
    """Writes an ONNX model that maps `image` to `logits`, and returns its path. Weights of more than 2 GB are a separate file.

    Raises RuntimeError if `vitline[export]` is not installed. Raises it too, and leaves no file, if onnxruntime computes
    other logits from the file than the network.
    """
    if absent := [name for name in _FOR_ONNX if importlib.util.find_spec(name) is None]:
        raise RuntimeError(f"ONNX export needs {', '.join(absent)}: pip install 'vitline[export]'.")
    import onnxruntime

    path = Path(path)
    # The fused attention kernels return a memory layout with which the exporter fails for attention masks.
    with _quiet(), sdpa_kernel(SDPBackend.MATH):
        program = torch.onnx.export(
            model.network,
            (_images(model, 2),),
            dynamo=True,
            dynamic_shapes=_shapes(),
            input_names=["image"],
            output_names=["logits"],
            verbose=False,
        )
        assert program is not None
        _keep_zero_padding(program.model)
        program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def loaded(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"image": images.numpy()})[0])

    versions = {"torch": torch.__version__, "opset": program.model.opset_imports[""]}
    return _checked(model, path, "ONNX", loaded, versions)


def _checked(model: PublishedModel, path: Path, form: str, loaded: Program, versions: dict[str, Any]) -> Path:
    """Compares the loaded program with the network on random images, and writes the description of the program."""
    difference = 0.0
    with torch.no_grad():
        for batch in BATCHES:
            images = _images(model, batch)
            logits = model.network(images)
            # With a head of zeros all logits are zero: then use absolute differences.
            largest = float(logits.abs().max()) or 1.0
            difference = max(difference, float((loaded(images) - logits).abs().max()) / largest)
    if not difference <= MAX_DIFFERENCE and not difference <= ROUNDINGS * _rounding(model):
        for file in (path, path.with_name(f"{path.name}.data")):
            file.unlink(missing_ok=True)
        raise RuntimeError(
            f"{form} of {model.uri} computes logits that differ from the network's. "
            f"They differ by {difference:.1e} of the largest, "
            f"more than {MAX_DIFFERENCE:.0e} and more than rounding explains. Nothing was written to {path}. Try other "
            "versions of the exporter's packages, or another format."
        )
    size = model.network.config.image_size_px
    about = {
        "format": form,
        "digest": model.digest,
        "classes": list(model.classes),
        "image_contract": model.contract.model_dump(mode="json"),
        "input": {"name": "image", "dtype": "float32", "shape": ["batch", 3, size, size]},
        "output": {"name": "logits", "dtype": "float32", "shape": ["batch", model.network.num_classes]},
        "largest_difference": difference,
        "versions": versions,
    }
    text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
    path.with_name(f"{path.name}.json").write_text(text, encoding="utf-8")
    return path


def _rounding(model: PublishedModel) -> float:
    """Difference between the network's float32 and float64 logits, relative to the largest."""
    images = _images(model, max(BATCHES))
    with torch.no_grad():
        exact = copy.deepcopy(model.network).double()(images.double())
        return float((model.network(images) - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def _images(model: PublishedModel, batch: int) -> Float[Tensor, "B 3 H W"]:
    size, low, high = model.network.config.image_size_px, model.contract.low, model.contract.high
    generator = torch.Generator().manual_seed(batch)
    return torch.rand(batch, 3, size, size, generator=generator) * (high - low) + low


def _shapes() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch", min=1)},)


def _keep_zero_padding(graph_model: Any) -> None:
    """Replaces the zeros that BiT pads before its max-pool by the smallest positive float32, which does not change logits.

    onnxruntime 1.31 fuses padding with zeros into the following max-pool, whose own padding is minus infinity. It does not
    fuse padding with other values. For a BiT of two blocks the fusion changed logits by 4e-3 of the largest.
    """
    import onnx_ir

    graph = graph_model.graph
    for node in list(graph):
        source = node.inputs[0].producer() if node.op_type == "MaxPool" else None
        if source is None or source.op_type != "Pad" or len(source.inputs) > 2:
            continue
        value = onnx_ir.Value(
            name=f"{source.name}_value", const_value=onnx_ir.tensor(_SMALLEST, onnx_ir.DataType.FLOAT)
        )
        graph.register_initializer(value)
        source.resize_inputs(3)
        source.replace_input_with(2, value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disables gradients, and hides warnings of the exporters about their own code."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
