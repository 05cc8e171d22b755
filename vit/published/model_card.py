"""The card of a published model: what it is, what it was made from, how it is used."""

from collections.abc import Sequence

import numpy as np

from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.config import NetworkConfig, TransformerConfig, UserNetworkConfig, ViTConfig, network_config
from vitline.vit.models.user_code import package_of
from vitline.vit.published.model_record import ModelRecord


def elsewhere(config: NetworkConfig) -> str:
    """The formats that a model of this config can be exported to, with the call that loads each."""
    forms = ["`onnx`, `torch-export`, `mlflow`"]
    plain = not isinstance(config, TransformerConfig) or (
        not config.pre_logits and config.pos_embed != "relative" and config.pos_embed_at == "stem"
    )
    if plain and config.architecture in ("vit", "bit"):
        forms.append('`timm`, loaded by `timm.create_model("local-dir:out", pretrained=True)`')
    if plain and isinstance(config, ViTConfig) and config.pool == "token":
        forms.append('`huggingface`, loaded by `ViTForImageClassification.from_pretrained("out")`')
    return "; ".join(forms)


def card(name: str, version: str, config: ModelRecord, contract: ImageContract, classes: Sequence[str]) -> str:
    """The text of the model card: what the model is, what it was made from, and how to use it."""
    model, provenance = config["model"], config["provenance"]
    parameters = sum(int(np.prod(p["shape"])) for p in config["tensors"])
    made = "\n".join(f"- {key.replace('_', ' ')}: `{value}`" for key, value in provenance.items() if key != "mixture")
    for each in provenance.get("mixture", ()):
        made += (
            f"\n- corpus: `{each['corpus']}`, {100 * each['share']:.4g} % of the examples, digest `{each['digest']}`"
        )
    network = network_config(model)
    code = ""
    if isinstance(network, UserNetworkConfig):
        package = package_of(network.network)
        code = (
            f"Needs the Python package `{package}`, whose files had the digest `{network.source[:12]}`, and "
            f"`VITLINE_RECIPE_PACKAGES={package}`.\n"
        )
    return f"""# {name} {version}

{network.summary}; {parameters:,} parameters, {len(classes):,} classes.
Digest `{config["digest"]}`.

## Made from
{made}

## Use
{code}```python
from vitline import load_model

model = load_model("{name}/{version}")
print(model.predict(["picture.jpg"]))
```
Images go through `image_contract.json`: RGB, resized to {contract.evaluation.image_size_px} px \
({contract.evaluation.eval_resize}, antialias {"on" if contract.evaluation.antialias else "off"}), \
values from {contract.low:g} to {contract.high:g}.

Elsewhere: `vitline model convert {name}/{version} out --to ...` writes {elsewhere(network)}.
"""
