"""Settings of the example shop.

It runs on SQLite as it is. Everything that differs between machines comes from
environment variables, or from a file `.env` beside `manage.py`:

DATABASE_URL           e.g. postgres://user:password@127.0.0.1:5432/shop
DJANGO_DEBUG           on by default: this is an example to run locally
DJANGO_SECRET_KEY      required once DJANGO_DEBUG is off
DJANGO_ALLOWED_HOSTS   comma separated
SHOP_WEBHOOK_SECRET    what a payment message must carry; required as above
SHOP_IMPORT_DIR        the folder from which CSV files may be imported
SHOP_LEASE_SECONDS     how long the jobs of a killed worker rest
SHOP_SHUTDOWN_SECONDS  how long a worker that stops lets its jobs finish
"""

from pathlib import Path
from urllib.parse import quote

import environ

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()
env.read_env(BASE_DIR / ".env")

DEBUG = env.bool("DJANGO_DEBUG", default=True)


def secret(name, local_default):
    """Read a secret; only a local (DEBUG) shop may run on the default."""
    return env.str(name, default=local_default) if DEBUG else env.str(name)


SECRET_KEY = secret("DJANGO_SECRET_KEY", "local-example-key-of-no-value-anywhere-else")
ALLOWED_HOSTS = env.list("DJANGO_ALLOWED_HOSTS", default=[])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_durable_jobs",
    "shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "config.urls"
WSGI_APPLICATION = "config.wsgi.application"
ASGI_APPLICATION = "config.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

SQLITE_FILE = quote(str(BASE_DIR / "db.sqlite3"))  # whatever characters the path has
DATABASES = {"default": env.db("DATABASE_URL", default=f"sqlite:///{SQLITE_FILE}")}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # SQLite has one writer. WAL lets readers go on meanwhile, IMMEDIATE makes a
    # transaction wait for its turn at its start (not fail in its middle), and
    # the timeout is how long it waits, in seconds.
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# A lease is how long the jobs of a killed worker rest before another one takes
# them up. On SQLite it must be longer than the longest timeout of a job, so the
# one is derived from the other.
LEASE_SECONDS = env.float("SHOP_LEASE_SECONDS", default=60)
DURABLE_JOBS = {
    "LEASE_SECONDS": LEASE_SECONDS,
    "TIMEOUT_SECONDS": 0.9 * LEASE_SECONDS,
    "SHUTDOWN_SECONDS": env.float("SHOP_SHUTDOWN_SECONDS", default=30),
}

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = True
USE_TZ = True
STATIC_URL = "static/"

SHOP_WEBHOOK_SECRET = secret("SHOP_WEBHOOK_SECRET", "local-webhook-secret")
SHOP_IMPORT_DIR = env.path("SHOP_IMPORT_DIR", default=str(BASE_DIR / "imports"))
