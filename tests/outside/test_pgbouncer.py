"""pgbouncer, which gives each transaction another connection to Postgres (Debian's package)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from services.common.process import ChildProcess
from services.stack.stack import Endpoints
from services.stack.supervisor import reserve_ports
from tests.integration.support.driver import Driver, small_config
from tests.outside.servers import (
    await_true,
    buffer_service,
    open_directory,
    plain,
    postgres,
    server_user,
)

pytestmark = pytest.mark.outside
CLIENTS, CALLS = 24, 600


@pytest.fixture
def pooled() -> Iterator[str]:
    """Yields the URL of a database behind pgbouncer, which has four connections to it."""
    program = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("needs pgbouncer: apt-get install pgbouncer")
    with postgres() as server, open_directory() as directory, reserve_ports(1) as (port,):
        config = directory / "pgbouncer.ini"
        config.write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={server.port} user=postgres\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            "auth_type = any\npool_mode = transaction\ndefault_pool_size = 4\n"
            "ignore_startup_parameters = extra_float_digits\n"
        )
        config.chmod(0o644)
        process = ChildProcess([program, str(config)], log=directory / "log", user=server_user())
        url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"

        def answers() -> bool:
            assert process.exit_code is None, process.last_error()
            with suppress(psycopg.OperationalError):
                psycopg.connect(plain(url), connect_timeout=5).close()
                return True
            return False

        try:
            await_true(answers, "pgbouncer starts")
            yield url
        finally:
            process.stop()


def test_calls_of_many_clients_succeed_behind_pgbouncer(
    stack: Endpoints, pooled: str, tmp_path: Path
) -> None:
    """A prepared statement would be missing, or another client's, in some of them."""
    with buffer_service(stack, tmp_path, database_url=pooled) as service:
        driver = Driver(service.endpoints, small_config("pooled"))
        for step in range(1, 4):
            driver.run_step(step)
        with ThreadPoolExecutor(CLIENTS) as pool:
            statuses = list(pool.map(lambda _: service.create_token().status_code, range(CALLS)))
        assert set(statuses) == {201}
        assert "Traceback" not in service.log.read_text()
