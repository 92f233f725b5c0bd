"""`python -m services.buffer.main`: the buffer service on a port."""

from __future__ import annotations

from services.buffer.app import create_app
from services.common.logs import configure_logs
from services.common.objectstore import ObjectStore
from services.common.serve import serve
from services.common.settings import ObjectStoreSettings, require


def main() -> None:
    configure_logs("buffer")
    app = create_app(
        require("BAPO_DATABASE_URL"),
        # Clients ask again: a request must not wait for long and hold a thread.
        ObjectStore(ObjectStoreSettings.from_environment(), retries=4),
        require("BAPO_TOKEN"),
    )
    serve(app)


if __name__ == "__main__":
    main()
