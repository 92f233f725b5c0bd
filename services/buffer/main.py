"""`python -m services.buffer.main`: serves the buffer service."""

from __future__ import annotations

from services.buffer.app import create_app
from services.buffer.settings import BufferSettings
from services.common.logs import configure_logs
from services.common.objectstore import ObjectStore
from services.common.process import hide_memory, run_until_error
from services.common.serve import serve


def main() -> None:
    """Serves until the process is terminated; settings come from the environment."""
    configure_logs("buffer")
    hide_memory()

    def work() -> None:
        settings = BufferSettings.load()
        app = create_app(
            settings.database_url.get_secret_value(),
            # Few retries: clients repeat calls, and a request must not occupy a thread for long.
            ObjectStore(settings.s3, retries=4),
            settings.tokens(),
            settings.root_path,
        )
        serve(app, settings)

    run_until_error(work)


if __name__ == "__main__":
    main()
