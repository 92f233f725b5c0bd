"""Who gets somebody to run their configuration gets neither credentials nor the memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bapo_core.config import config_from, parse_overrides, parse_values
from bapo_core.errors import BapoError, ConfigError
from services.cli import main as cli
from services.exporters.mlflow import mirror_to_mlflow, update_mlflow
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config
from tests.security.foreign_server import foreign_server

SECRET = "a-secret-of-the-user"


@pytest.fixture(scope="module")
def hostile_server() -> Iterator[tuple[str, list[str]]]:
    """Yields the address of a server that answers 404, and the headers that it has received."""
    with foreign_server() as server:
        yield server.url, server.headers


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    return Driver(stack, small_config("pasted"))


@pytest.fixture(autouse=True)
def home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Gives the user an empty home directory, and no settings of MLflow."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


class TestMlflow:
    @pytest.mark.parametrize(
        ("variable", "trusted"),
        [
            ("MLFLOW_TRACKING_TOKEN", ""),
            ("MLFLOW_TRACKING_TOKEN", "https://mlflow.example"),
            ("MLFLOW_TRACKING_PASSWORD", "https://mlflow.example/{port}"),
            ("~/.mlflow/credentials", "https://mlflow.example"),
        ],
    )
    def test_of_a_configuration_gets_no_credentials_of_another_server(
        self,
        driver: Driver,
        hostile_server: tuple[str, list[str]],
        home_directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        variable: str,
        trusted: str,
    ) -> None:
        uri, received = hostile_server
        received.clear()
        if variable.startswith("~"):
            (home_directory / ".mlflow").mkdir()
            (home_directory / ".mlflow/credentials").write_text(
                f"[mlflow]\nmlflow_tracking_username = me\nmlflow_tracking_password = {SECRET}\n"
            )
        else:
            monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
            monkeypatch.setenv(variable, SECRET)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", trusted)
        pasted = config_from({"name": "pasted", "mlflow": {"tracking_uri": f"{uri}/"}})
        with (
            pytest.raises(BapoError, match=f"set MLFLOW_TRACKING_URI={uri}/ in the environment"),
            mirror_to_mlflow(pasted, driver.client),
        ):
            pass
        update_mlflow(pasted, driver.client)  # At the end of a run, the same is a warning.
        assert variable in caplog.text
        assert SECRET not in caplog.text
        assert received == []

    def test_of_the_environment_gets_its_credentials(
        self,
        driver: Driver,
        hostile_server: tuple[str, list[str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        uri, received = hostile_server
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{uri}/")
        own = config_from({"name": "pasted", "mlflow": {"tracking_uri": uri}})
        update_mlflow(own, driver.client)
        assert f"Bearer {SECRET}" in received[-1]


LAUGHS = "task: {options: {a0: &a0 [x, x, x, x, x, x, x, x, x, x]" + "".join(
    f", a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)
)
HOSTILE_YAML = {
    "aliases of aliases": (LAUGHS + "}}", "alias"),
    "a list that holds itself": ("task: {options: {a: &a [*a]}}", "alias"),
    "a merge key": ("task: &t {name: math}\nmodel: {<<: *t}", "alias"),
    "nested lists": (f"task: {'[' * 600}{']' * 600}", "nested too deeply"),
    "nested sections": (f"task: {'{a: ' * 600}{'}' * 600}", "nested too deeply"),
    "many digits": (f"steps: 1{'0' * 5000}", "number"),
    "many bits": (f"steps: 0x{'f' * 9000}", "number"),
    "a number of base 60": (f"steps: 1{':1' * 3000}", "number"),
    "a month of no year": ("name: 2026-13-45", "date"),
    "a tag of Python": ("task: !!python/object/apply:os.system [id]", "not valid YAML"),
}


@pytest.mark.parametrize("kind", HOSTILE_YAML)
def test_yaml_that_would_not_fit_or_not_print_is_refused(
    kind: str, stack: Endpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, reason = HOSTILE_YAML[kind]
    with pytest.raises(ConfigError, match=reason):
        config_from(parse_values(text, "config"))
    path = tmp_path / "pasted.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        cli.main(["config", "check", str(path)])
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert reason in error
    response = httpx.put(
        f"{stack.buffer_url}/v1/configs/pasted",
        json={"text": text},
        headers={"Authorization": f"Bearer {stack.token}"},
    )
    assert response.status_code == 422
    assert reason in response.json()["detail"]


@pytest.mark.parametrize(
    "value",
    ["&a [*a]", f"0x{'f' * 9000}", "2026-13-45", "[" * 600 + "]" * 600],
    ids=["alias", "number", "date", "depth"],
)
def test_overrides_are_read_as_the_file_is(value: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        parse_overrides([f"task.options.a={value}"])


# ---- vLLM's command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "0.0.0.0"],
        ["--host=0.0.0.0"],
        ["--ho", "0.0.0.0"],
        ["--port", "80"],
        ["--uds", "/tmp/open.sock"],
        ["--middleware", "evil.Middleware"],
        ["--midd", "evil.Middleware"],
        ["--worker-extension-cls", "evil.Worker"],
        ["--worker_extension_cls", "evil.Worker"],
        ["--worker-cls=evil.Worker"],
        ["--scheduler-cls", "evil.Scheduler"],
        ["--logits-processors", "evil:Processor"],
        ["--tool-parser-plugin", "/tmp/evil.py"],
        ["--reasoning-parser-plugin", "/tmp/evil.py"],
        ["--io-processor-plugin", "evil"],
        ["--log-config-file", "/tmp/evil.json"],
        ["--config", "/tmp/evil.yaml"],
        ["--trust-remote-code"],
        ["--model", "evil/model"],
        ["--hf-overrides.architectures", "Evil"],
        ["--speculative-config", '{"model": "evil/model"}'],
        ["--kv-transfer-config", '{"kv_connector_module_path": "evil"}'],
        ["--compilation-config", '{"backend": "evil.backend"}'],
        ["--load-format", "runai_streamer"],
        ["--allowed-origins", '["*"]'],
        ["--allowed-local-media-path", "/"],
        ["--otlp-traces-endpoint", "http://evil.example"],
        ["--data-parallel-address", "evil.example"],
        ["--generation-config", "auto"],
        ["-O", "3"],
        ["evil/model"],
        ["--enforce-eager", "evil/model"],
        ["--enforce-eager=x"],
        ["--seed", "--trust-remote-code"],
        ["--max-num-seqs"],
        [""],
        ["--"],
    ],
    ids=" ".join,
)
def test_a_configuration_gives_vllm_no_argument_that_loads_code_or_opens_addresses(
    arguments: list[str],
) -> None:
    with pytest.raises(ConfigError, match="rollout"):
        config_from({"rollout": {"engine": {"kind": "vllm", "args": arguments}}})


def test_a_refused_argument_of_vllm_is_the_operators() -> None:
    with pytest.raises(ConfigError, match=r"'--middleware'.*BAPO_VLLM_ARGS"):
        config_from({"rollout": {"engine": {"kind": "vllm", "args": ["--middleware", "x.y"]}}})


def test_a_configuration_tunes_vllm() -> None:
    arguments = ["--enforce-eager", "--max-num-seqs", "64", "--gpu-memory-utilization=0.3"]
    config = config_from({"rollout": {"engine": {"kind": "vllm", "args": arguments}}})
    assert config.model_dump()["rollout"]["engine"]["args"] == arguments
