"""The section of NCCL's variables. None is: unset, NCCL chooses. What is allowed is checked by `plan` (F16)."""

from typing import Literal

from pydantic import Field

from slipstream.configs.base import CountOrZero, PositiveInt, Section


class NcclMeasured(Section):
    """What the values beside it were measured for; `slipstream doctor CONFIG --ranks N` prints it."""

    num_steps: CountOrZero = Field(description="K: sums of 1 to K + 1 rows were timed.")
    ranks: PositiveInt = Field(description="Ranks that summed.")
    card: str = Field(description="Name of the cards, as the driver tells it.")
    topology: Literal["nvlink", "pcie", "host"] = Field(description="How the cards reach each other, at worst.")


class Nccl(Section):
    """Variables of NCCL: `nccl.max_nchannels` is NCCL_MAX_NCHANNELS. For experiments; unset unless measured."""

    algo: str | None = Field(
        default=None,
        description="Algorithms, such as `Ring` or `Ring,Tree`; `^Tree` excludes; `allreduce:ring` for one.",
    )
    proto: str | None = Field(default=None, description="Protocols: LL, LL128, Simple; `^LL128` excludes.")
    p2p_level: str | int | None = Field(
        default=None, description="How far apart two GPUs may be for direct access: LOC, NVL, PIX, PXB, PHB, SYS."
    )
    p2p_disable: int | None = Field(default=None, description="1: no direct access between GPUs.")
    shm_disable: int | None = Field(default=None, description="1: no shared host memory between processes.")
    ib_disable: int | None = Field(default=None, description="1: no InfiniBand or RoCE.")
    ib_hca: str | None = Field(default=None, description="InfiniBand adapters to use.")
    net_gdr_level: str | int | None = Field(default=None, description="How far a GPU may be from its network adapter.")
    socket_ifname: str | None = Field(default=None, description="Network interfaces to use.")
    min_nchannels: int | None = Field(default=None, description="Fewest channels (GPU blocks) of a collective.")
    max_nchannels: int | None = Field(default=None, description="Most channels (GPU blocks) of a collective.")
    min_ctas: int | None = Field(default=None, description="Fewest channels, by its newer name.")
    max_ctas: int | None = Field(default=None, description="Most channels, by its newer name.")
    buffsize_bytes: int | None = Field(default=None, description="Buffer of a pair of GPUs, protocol Simple, in bytes.")
    nthreads: int | None = Field(default=None, description="Threads of a channel: 64, 128, 256 or 512.")
    nvls_enable: int | None = Field(default=None, description="0: no NVLink SHARP; 1: where there is; 2: by itself.")
    cumem_enable: int | None = Field(default=None, description="1: memory by CUDA's virtual-memory calls.")
    cross_nic: int | None = Field(default=None, description="0, 1 or 2: rings over several adapters.")
    debug: str | None = Field(default=None, description="How much NCCL logs: VERSION, WARN, INFO, TRACE.")
    debug_subsys: str | None = Field(default=None, description="Parts of NCCL that log, such as `INIT,NET`.")

    measured_for: NcclMeasured | None = Field(
        default=None, description="What these values were measured for: a plan warns where it is something else."
    )

    @property
    def variables(self) -> dict[str, str]:
        """What is set, as environment variables of a server's ranks."""
        given = self.model_dump(exclude_none=True, exclude={"measured_for"})
        return {"NCCL_" + field.removesuffix("_bytes").upper(): str(value) for field, value in given.items()}


NCCL_FIELDS = tuple(name for name in Nccl.model_fields if name != "measured_for")  # those that are variables
