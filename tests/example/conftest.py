from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from .shop import NewShop, Shop


@contextmanager
def new_postgres_database(template: str = "template1") -> Iterator[str]:
    """Create a database on the suite's server, give its address, and drop it afterwards."""
    import psycopg

    url = os.environ["DATABASE_URL"]
    name = f"shop_{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield f"{url.rpartition('/')[0]}/{name}"
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def pattern(tmp_path_factory: pytest.TempPathFactory, is_postgres: bool) -> Iterator[Shop]:
    """A shop whose database is migrated and filled, to make copies of."""
    with ExitStack() as stack:
        url = stack.enter_context(new_postgres_database()) if is_postgres else None
        shop = Shop(tmp_path_factory.mktemp("pattern") / "shop", url)
        stack.callback(shop.end)
        shop.python("import processes; processes.prepare_database()")
        yield shop


@pytest.fixture
def new_shop(tmp_path: Path, is_postgres: bool) -> Iterator[NewShop]:
    """Make copies of the example, each with an empty database of its own."""
    with ExitStack() as stack:

        def make(template: str = "template1") -> Shop:
            url = stack.enter_context(new_postgres_database(template)) if is_postgres else None
            # What an address has to quote may stand in the name of anybody's folder.
            shop = Shop(tmp_path / f"a shop+#%41-{secrets.token_hex(4)}", url)
            stack.callback(shop.end)
            return shop

        yield make


@pytest.fixture
def shop(pattern: Shop, new_shop: NewShop, is_postgres: bool) -> Shop:
    """A shop whose database is migrated and filled."""
    if is_postgres:
        return new_shop(pattern.database_url.rpartition("/")[2])
    shop = new_shop()
    file = pattern.folder / "db.sqlite3"
    assert not file.with_name("db.sqlite3-wal").exists()
    shutil.copy(file, shop.folder)
    return shop
