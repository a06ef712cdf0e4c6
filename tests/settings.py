"""Settings of the test suite, on SQLite or on PostgreSQL.

Environment variables:

TEST_DATABASE       "sqlite" (the default) or "postgres".
DATABASE_URL        the PostgreSQL server to use; read for "postgres" only, and
                    set by ``python -m tests._postgres -- command``.
TEST_SQLITE_JOURNAL "wal" (the default), or "delete": SQLite's own default journal mode.
TEST_DATABASE_NAME  connect to this existing database instead of a new one: how
                    a process started by a test finds that test's database (see
                    the fixture ``child_environment``).
"""

import atexit
import os
import secrets
import tempfile
from pathlib import Path

import environ
from django.core.exceptions import ImproperlyConfigured


def _choice(variable: str, values: list[str]) -> str:
    """Give an environment variable's value, the first of the legal ones where it is not set."""
    value = os.environ.get(variable, values[0])
    if value not in values:
        raise ImproperlyConfigured(f"{variable} must be {' or '.join(values)}, not {value!r}.")
    return value


def _sqlite_database(existing_name: str | None) -> dict[str, object]:
    # A file, not memory: several connections, threads and processes must meet
    # in it as they do in production.
    name = existing_name or _temporary_name()
    options: dict[str, object] = {"timeout": 60}
    if _choice("TEST_SQLITE_JOURNAL", ["wal", "delete"]) == "wal":
        options["init_command"] = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": name,
        "OPTIONS": options,
        "TEST": {"NAME": f"{name}.test"},
    }


def _temporary_name() -> str:
    stem = f"durable-jobs-tests-{os.getpid()}-{secrets.token_hex(4)}"
    path = Path(tempfile.gettempdir(), f"{stem}.sqlite3")
    atexit.register(_remove_files, path, os.getpid())
    return str(path)


def _remove_files(path: Path, owner: int) -> None:
    # A forked child inherits the exit handler; the files are not its own.
    if os.getpid() == owner:
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink(missing_ok=True)


def _postgres_database(existing_name: str | None) -> dict[str, object]:
    url = os.environ.get("DATABASE_URL", "")
    if not url.startswith(("postgres://", "postgresql://")):
        raise ImproperlyConfigured(
            "TEST_DATABASE=postgres needs a server. Start one for the run with "
            "`python -m tests._postgres -- python -m pytest`, or set DATABASE_URL."
        )
    database: dict[str, object] = dict(environ.Env.db_url_config(url))
    database["TEST"] = {"NAME": f"test_durable_jobs_{os.getpid()}"}
    if existing_name is not None:
        database["NAME"] = existing_name
    return database


_DATABASES = {"sqlite": _sqlite_database, "postgres": _postgres_database}
_kind = _choice("TEST_DATABASE", list(_DATABASES))

DATABASES = {"default": _DATABASES[_kind](os.environ.get("TEST_DATABASE_NAME"))}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_durable_jobs",
    "tests.testapp",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"

SECRET_KEY = "a fixed key for the tests"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ALLOWED_HOSTS = ["testserver", "localhost"]
USE_TZ = True
TIME_ZONE = "UTC"

DURABLE_JOBS: dict[str, object] = {}
# SQLite's transactions begin deferred here: what holds then holds in the other modes, too.
SILENCED_SYSTEM_CHECKS = ["django_durable_jobs.W003"]
