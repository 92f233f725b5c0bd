"""Settings of a process, read from environment variables that begin with `BAPO_`.

Each process has one class below `Settings`. It names, types and describes its variables, and
`load` reports everything that is missing or invalid in one error. Secrets are `SecretStr`, so that
no log and no traceback shows them, and are registered for redaction: libraries get their values.
White space around a value is removed, because `kubectl create secret --from-file` and
`echo ... | base64` end each value with a newline. `docs/environment.md` is generated from these
classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from bapo_core.errors import ConfigError
from services.common.redaction import register_secret

PREFIX = "BAPO_"


def _check_address(address: str) -> str:
    """Returns the address of a service.

    Raises `ValueError` for one with a user or a password, and for one that no client can call.
    """
    parts = _split_address(address)
    if "@" in parts.netloc:
        raise ValueError(
            "holds a user or a password, which logs and messages would show; remove them (keys of "
            "the object store are in BAPO_S3_ACCESS_KEY and BAPO_S3_SECRET_KEY, the token of the "
            "services is in BAPO_TOKEN)"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("it must have the form http://host:port or https://host:port")
    return address


def _check_endpoint(address: str) -> str:
    """Returns the address of an object store. Raises `ValueError` for one with a path."""
    if _split_address(address).path.strip("/"):
        raise ValueError(
            "has a path, below which an S3 client cannot call a server; give http://host:port or "
            "https://host:port, and the bucket in BAPO_S3_BUCKET"
        )
    return address.rstrip("/")


def _split_address(address: str) -> SplitResult:
    if any(character.isspace() or not character.isprintable() for character in address):
        raise ValueError("holds white space or a control character; remove it")
    parts = urlsplit(address)
    parts.port  # noqa: B018  it raises `ValueError` for a port that is none
    return parts


def _check_secret(secret: SecretStr) -> SecretStr:
    """Returns the secret. Raises `ValueError` for one that no header can hold."""
    value = secret.get_secret_value()
    if not (value.isascii() and value.isprintable()):
        raise ValueError(
            "holds a line break or another character that is not printable ASCII, which no HTTP "
            "header can carry; store the value again, for example with `kubectl create secret "
            "generic NAME --from-literal=KEY=VALUE`"
        )
    return secret


Address = Annotated[str, AfterValidator(_check_address)]
"""Address of a service, which logs and messages show."""
Endpoint = Annotated[Address, AfterValidator(_check_endpoint)]
"""Address of an object store."""
Secret = Annotated[SecretStr, AfterValidator(_check_secret)]
"""A token or key, which is sent in a header."""
SHORTEST_TOKEN = 20
"""Characters of the shortest token that a server accepts, so that nobody guesses it."""
Token = Annotated[Secret, Field(min_length=SHORTEST_TOKEN)]
"""A bearer token that a server accepts."""


class _Values(BaseModel):
    """Base of everything that is read from variables."""

    @model_validator(mode="before")
    @classmethod
    def _strip(cls, values: Any) -> Any:
        """Removes white space around values; a value of white space alone counts as not set."""
        if not isinstance(values, dict):
            return values
        stripped = {
            name: value.strip() if isinstance(value, str) else value
            for name, value in values.items()
        }
        return {name: value for name, value in stripped.items() if value != "" or not values[name]}

    @model_validator(mode="after")
    def _register_secrets(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                register_secret(value.get_secret_value())
        return self


class Settings(_Values, BaseSettings):
    """Base of every process's settings. An empty variable counts as one that is not set."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        # BAPO_S3_ACCESS_KEY is `s3.access_key`.
        env_nested_delimiter="_",
        env_nested_max_split=1,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    remedy: ClassVar[str] = ""
    """End of the error that names missing variables; it says where they should have come from."""

    @classmethod
    def load(cls) -> Self:
        """Reads the settings from the environment.

        Raises `ConfigError` with one line that names every variable that is missing or invalid.
        """
        try:
            return cls()
        except ValidationError as error:
            problems = "; ".join(_problems(cls, error))
            raise ConfigError(f"environment: {problems}{cls.remedy}") from error


class SettingsGroup(_Values):
    """Base of the groups of variables that share a prefix, as `BAPO_S3_` does."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class ObjectStoreSettings(SettingsGroup):
    """Address, bucket and credentials of the object store."""

    endpoint: Endpoint
    """Address of the S3 API, `http://host:port` or `https://host:port`."""
    bucket: str
    """Bucket that holds all objects. It is created when it does not exist."""
    region: str = ""
    """Region of the bucket. If empty, the one in the host name of AWS, and us-east-1 for other
    servers."""
    path_style: Literal["auto", "always", "never"] = "auto"
    """Whether the bucket is in the path of an address instead of the host name; `auto`: unless the
    server is AWS or Alibaba Cloud."""
    credentials: Literal["keys", "identity"] = "keys"
    """`keys`: the two keys below. `identity`: the cloud identity of the pod or machine (AWS)."""
    access_key: Secret = SecretStr("")
    """Access key of the object store; required unless `credentials` is `identity`."""
    secret_key: Secret = SecretStr("")
    """Secret key of the object store; required unless `credentials` is `identity`."""

    @model_validator(mode="after")
    def _require_keys(self) -> Self:
        keys = {"BAPO_S3_ACCESS_KEY": self.access_key, "BAPO_S3_SECRET_KEY": self.secret_key}
        missing = [name for name, key in keys.items() if not key.get_secret_value()]
        if missing and self.credentials == "keys":
            raise ValueError("; ".join(f"{name} is not set" for name in missing))
        return self

    def environment(self) -> dict[str, str]:
        """Returns the variables from which `Settings.load` makes the same settings."""
        return {
            "BAPO_S3_ENDPOINT": self.endpoint,
            "BAPO_S3_BUCKET": self.bucket,
            "BAPO_S3_REGION": self.region,
            "BAPO_S3_PATH_STYLE": self.path_style,
            "BAPO_S3_CREDENTIALS": self.credentials,
            "BAPO_S3_ACCESS_KEY": self.access_key.get_secret_value(),
            "BAPO_S3_SECRET_KEY": self.secret_key.get_secret_value(),
        }


class ServerSettings(Settings):
    """Settings of a process that serves HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on; `::` is all addresses of this machine, of IPv4 and of IPv6."""
    port: int = Field(ge=1, le=65_535)
    """Port to listen on."""
    listen_fd: int | None = None
    """Descriptor of a socket that listens already, which the process inherits, in place of `host`
    and `port`: nobody else can bind the port before it does."""
    host_names: str = ""
    """Names with a full stop under which requests reach the server, separated by commas; one that
    begins with a full stop stands for all names that end with it. IP addresses and names without a
    full stop are always accepted."""


class BufferClientSettings(Settings):
    """Settings of a process that calls the buffer service."""

    buffer_url: Address
    """Address of the buffer service, `http://host:port`."""
    token: Secret
    """Bearer token of the buffer service, of the scope of this process."""


class ObjectStoreClientSettings(Settings):
    """Settings of a process that reads from or writes to the object store."""

    s3: ObjectStoreSettings
    """Address, bucket and credentials of the object store."""


def variables(model: type[BaseModel], prefix: str = PREFIX) -> Iterator[tuple[str, FieldInfo]]:
    """Yields (variable, field) for every environment variable of a settings class."""
    for name, field in model.model_fields.items():
        nested: Any = field.annotation
        if _is_group(nested):
            yield from variables(nested, f"{prefix}{name.upper()}_")
        else:
            yield f"{prefix}{name.upper()}", field


def _is_group(annotation: Any) -> bool:
    """Returns whether a field is a group of variables, as `s3` is, and not one variable."""
    return isinstance(annotation, type) and issubclass(annotation, SettingsGroup)


def _problems(model: type[Settings], error: ValidationError) -> Iterator[str]:
    """Yields one message for each variable that is missing or invalid, without secret values."""
    for problem in error.errors():
        names = [str(part) for part in problem["loc"]]
        field = model.model_fields.get(names[0]) if names else None
        group: Any = field.annotation if field is not None else None
        if problem["type"] == "missing":
            missing = [PREFIX + "_".join(names).upper()]
            if len(names) == 1 and _is_group(group):
                members = variables(group, f"{missing[0]}_")
                missing = [
                    name
                    for name, member in members
                    if member.is_required() or member.annotation is SecretStr
                ]
            yield from (f"{name} is not set" for name in missing)
        elif problem["type"] == "value_error" and len(names) == 1 and _is_group(group):
            yield str(problem["ctx"]["error"])
        elif problem["type"] == "value_error":
            # The value is left out: it may be a secret that does not belong here.
            yield f"{PREFIX}{'_'.join(names).upper()}: {problem['ctx']['error']}"
        else:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            secret = field is None or field.annotation is SecretStr or names[0] == "s3"
            value = "" if secret else f" (got {problem['input']!r})"
            yield f"{PREFIX}{'_'.join(names).upper()}: {message}{value}"
