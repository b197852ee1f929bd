"""What every section of a deployment has in common: frozen, strict about types, and closed to unknown keys."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Dtype = Literal["bfloat16", "float32"]


class Section(BaseModel):
    """One section of a deployment.

    Strict: `"5"` is not a whole number and `true` is not 1, so that a slip of the keyboard is an error and not a value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _expand(value: object) -> object:
    """`~` of a path as the home directory of whoever runs the command."""
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("the path of a file or directory")
    return Path(value).expanduser()


# A relative path means: relative to the directory in which the command is given (as for any other argument of a shell
# command), wherever the value came from.
LocalPath = Annotated[Path, BeforeValidator(_expand), Field(strict=False)]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
