"""The arguments of an application on Ray Serve, from the command line, YAML or Python.

Invariants: an unknown name or an invalid value is refused, with the name, before anything starts.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

OWN_FLAGS = ("--host", "--port", "--model", "--tp", "--resumable", "--managed", "--frontend", "--drain-timeout")
"""Flags of `minisgl serve` that a replica sets by itself."""


def _split(given: object) -> object:
    return shlex.split(given) if isinstance(given, str) else given


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ModelArgs(_Strict):
    """Arguments of one model: a deployment with one server per replica."""

    model: str = Field("smollm2", min_length=1, description="as minisgl serve --model has it")
    flags: Annotated[list[str], BeforeValidator(_split)] = Field(
        [], description="further flags of minisgl serve, as a list or as a line of a shell"
    )
    replicas: int = Field(1, ge=1, description="servers; with max_replicas those at first")
    min_replicas: int = Field(1, ge=1, description="with max_replicas")
    max_replicas: int | None = Field(None, ge=1, description="scale with the load up to as many")
    tp: int = Field(1, ge=1, description="--tp of each server, on one node")
    cpus: float = Field(1.0, ge=0, description="that Ray sets aside for each replica")
    gpus: float = Field(0.0, ge=0, description="that Ray sets aside for each replica; with tp at least as many")
    routing: Literal["prefix", "default"] = Field("prefix", description="which replica gets a request")
    queued_tokens: int = Field(8192, ge=1, description="prompt tokens that may wait for each replica before more come")
    kv_use: float = Field(0.8, gt=0, le=1, description="part of the KV pool in use beyond which more come")
    upscale_delay_s: float = Field(10.0, ge=0)
    downscale_delay_s: float = Field(300.0, ge=0)
    drain_s: float = Field(600.0, ge=0, description="that running requests of a replica have to end when it is to go")
    startup_s: float = Field(1800.0, gt=0, description="that a server has to load its model")

    @model_validator(mode="after")
    def _check(self) -> ModelArgs:
        for flag in self.flags:
            if flag.partition("=")[0] in OWN_FLAGS:
                raise ValueError(f"flags: {flag}: is set by the replica itself")
        if self.gpus and self.gpus < self.tp:
            raise ValueError(f"gpus: {self.gpus:g}: must be at least tp ({self.tp})")
        if self.max_replicas is not None and not self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas: {self.replicas}: must be between min_replicas ({self.min_replicas}) and max_replicas "
                f"({self.max_replicas})"
            )
        return self

    def server_flags(self, name: str) -> list[str]:
        """Return the arguments of `minisgl serve` for a replica whose API name is `name`."""
        served = [] if "--served-model-name" in self.flags else ["--served-model-name", name]
        tp = ["--tp", str(self.tp)] if self.tp > 1 else []
        return ["--model", self.model, *served, *tp, "--resumable", *self.flags]


class Args(ModelArgs):
    """Arguments of the application: one model, or several in `models`, by API name. Each of those inherits the
    arguments given here."""

    models: dict[str, ModelArgs] = {}
    name: str | None = Field(None, description="that clients ask for (default: model)")
    ingress_replicas: int = Field(1, ge=1, description="processes that take requests from Serve's proxy")
    ingress_resources: dict[str, float] = Field({}, description="Ray's own resources that say where these may run")
    retry_s: float = Field(60.0, ge=0, description="for which a request without a living replica is tried again")

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, data: object) -> object:
        if not isinstance(data, dict) or not isinstance(models := data.get("models"), dict):
            return data
        common = {key: value for key, value in data.items() if key in ModelArgs.model_fields}
        return data | {"models": {k: common | v if isinstance(v, dict) else v for k, v in models.items()}}

    def by_name(self) -> dict[str, ModelArgs]:
        """Return the models by their names in the API. The first one serves requests that name no model."""
        if self.models:
            return dict(self.models)
        return {self.name or self.model: ModelArgs(**self.model_dump(include=set(ModelArgs.model_fields)))}
