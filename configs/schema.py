"""The schema of a deployment: thirteen frozen sections.

`slipstream.configs.load.load` reads one from a YAML file, the environment and `--set`; `Deployment(...)` alone reads
neither file nor environment, so that a test or a notebook gets exactly what it wrote.
"""

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from slipstream.configs.host import Host
from slipstream.configs.making import Capture, Data, Draft, Target, Training
from slipstream.configs.nccl import Nccl
from slipstream.configs.roll import Roll
from slipstream.configs.serving import Benchmark, Gates, Server, Speculation
from slipstream.configs.sglang import Sglang

ENV_PREFIX = "SLIPSTREAM_"
ENV_DELIMITER = "__"

__all__ = [
    "ENV_DELIMITER",
    "ENV_PREFIX",
    "Benchmark",
    "Capture",
    "Data",
    "Deployment",
    "Draft",
    "Gates",
    "Host",
    "Nccl",
    "Roll",
    "Server",
    "Sglang",
    "Speculation",
    "Target",
    "Training",
]


class Deployment(BaseSettings):
    """One deployment: a target, the draft made for it, and how both are served and judged."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", strict=True, env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER
    )

    target: Target = Field(default=Target(), description="The model that is served.")
    data: Data = Field(default=Data(), description="The conversations that the draft learns from.")
    capture: Capture = Field(default=Capture(), description="Which hidden states of the target the draft sees.")
    draft: Draft = Field(default=Draft(), description="The draft network.")
    training: Training = Field(default=Training(), description="How the draft is trained.")
    speculation: Speculation = Field(default=Speculation(), description="How far the draft runs ahead.")
    server: Server = Field(default=Server(), description="The server.")
    sglang: Sglang = Field(default=Sglang(), description="What only SGLang has, with server.engine: sglang.")
    nccl: Nccl = Field(default=Nccl(), description="Variables of NCCL, the library that sums over GPUs.")
    host: Host = Field(default=Host(), description="The machine and its folders.")
    roll: Roll = Field(default=Roll(), description="How servers are replaced one by one.")
    benchmark: Benchmark = Field(default=Benchmark(), description="What is measured.")
    gates: Gates = Field(default=Gates(), description="What a run must reach.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: `load` merges file, environment and --set itself, to know each value's origin."""
        return (init_settings,)
