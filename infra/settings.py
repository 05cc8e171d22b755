"""What the environment says: roots, addresses, endpoints. No other file of the project reads environment variables.

Credentials are not here: botocore and Ray read their own (`AWS_*`, `RAY_AUTH_*`) and nothing of ours passes them on.
"""

from pathlib import Path

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """The settings of this process. An argument given in code wins over the environment."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, use_attribute_docstrings=True, env_ignore_empty=True
    )

    root: str = Field(
        default_factory=lambda: str(Path.cwd() / ".vitline" / "store"), validation_alias=AliasChoices("VITLINE_ROOT")
    )
    """Where corpora, runs and models live: a path or a URI, file:// or s3://."""
    ray_address: str | None = Field(None, validation_alias=AliasChoices("RAY_ADDRESS"))
    """The http URL of the Ray job server; none means that the local stack starts one."""
    s3_endpoint_url: str | None = Field(None, validation_alias=AliasChoices("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    """An S3 service other than AWS."""
    s3_region: str | None = Field(None, validation_alias=AliasChoices("AWS_REGION", "AWS_DEFAULT_REGION"))
    """botocore itself knows only AWS_DEFAULT_REGION."""
