"""What both sides share: the database, and nothing that costs either of them time."""

import environ

DATABASES = {"default": environ.Env().db("DATABASE_URL")}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DEBUG = False
SECRET_KEY = "a fixed key for the benchmarks"
TIME_ZONE = "UTC"
USE_TZ = True
